// SPDX-License-Identifier: Apache-2.0
// attention(): a call is checked, split into items, run by threads and put together.
#include "kvstride/attention.h"

#include <algorithm>
#include <atomic>
#include <tuple>

#include "attention/item.h"
#include "cpu/pool.h"

namespace kvstride {
namespace {

using attend::Item;
using attend::Problem;
using attend::Sizes;
using attend::State;

constexpr double kWorkOfThread = 2e6;  // multiplications that are worth another thread

int threads_for(const Problem& problem, const std::vector<Item>& items) {
  double work = 0;
  for (const Item& item : items) {
    work += static_cast<double>(item.all_rows()) * static_cast<double>(item.end_key - item.first_key);
  }
  work *= static_cast<double>(problem.keys.dim() + problem.values.dim());
  const double most = std::min<double>(static_cast<double>(items.size()), work / kWorkOfThread + 1);
  return static_cast<int>(std::clamp<double>(most, 1, cpu::team_threads()));
}

bool same_rows(const Item& a, const Item& b) {
  return a.shared && b.shared &&
         std::tie(a.sequence, a.kv_head, a.first_head, a.first_row) ==
             std::tie(b.sequence, b.kv_head, b.first_head, b.first_row);
}

/// Items [first, end) that run together, and the states of those that share rows with others.
class Wave {
 public:
  Wave(const std::vector<Item>& items, std::size_t first, const Sizes& sizes)
      : items_(items), first_(first), end_(first), step_(sizes.value_step) {
    std::int64_t total = 0;
    while (end_ < items.size()) {
      const bool same = end_ > first && same_rows(items[end_ - 1], items[end_]);
      if (total > kFloats && !same) break;
      starts_.push_back(total);
      if (items[end_].shared) total += cpu::padded(items[end_].all_rows() * (step_ + 2));
      ++end_;
    }
    memory_ = hwy::AllocateAligned<float>(static_cast<std::size_t>(std::max<std::int64_t>(total, 1)));
    if (!memory_) throw std::bad_alloc();
  }

  std::size_t end() const noexcept { return end_; }

  State of(std::size_t i) const {
    if (!items_[i].shared) return {};
    float* values = memory_.get() + starts_[i - first_];
    const std::int64_t rows = items_[i].all_rows();
    return {values, values + rows * step_, values + rows * (step_ + 1)};
  }

  void put_together(const Problem& problem, const Sizes& sizes, float* row) const {
    for (std::size_t i = first_; i < end_;) {
      const std::size_t begin = i++;
      if (!items_[begin].shared) continue;
      const State state = of(begin);
      for (; i < end_ && same_rows(items_[begin], items_[i]); ++i) {
        attend::merge(state, of(i), items_[begin].all_rows(), step_);
      }
      attend::write_out(problem, items_[begin], sizes, state, row);
    }
  }

 private:
  static constexpr std::int64_t kFloats = std::int64_t{4} << 20;  // of states: 16 MiB

  const std::vector<Item>& items_;
  std::size_t first_;
  std::size_t end_;
  std::int64_t step_;
  hwy::AlignedFreeUniquePtr<float[]> memory_;
  std::vector<std::int64_t> starts_;
};

void report(const AttentionOptions& options, const std::vector<Item>& items, std::vector<attend::Findings>& findings) {
  std::fill(options.skipped_at.begin(), options.skipped_at.end(), 0);
  TileCounters counters;
  std::vector<TileDecision> decisions;
  std::fill(options.counters_of.begin(), options.counters_of.end(), TileCounters{});
  for (std::size_t item = 0; item < items.size(); ++item) {
    const attend::Findings& one = findings[item];
    if (!options.counters_of.empty()) {
      TileCounters& its = options.counters_of[static_cast<std::size_t>(items[item].sequence)];
      its.total += one.counters.total;
      its.skipped += one.counters.skipped;
    }
    counters.total += one.counters.total;
    counters.skipped += one.counters.skipped;
    for (std::size_t i = 0; i < one.skipped_at.size(); ++i) options.skipped_at[i] += one.skipped_at[i];
    decisions.insert(decisions.end(), one.decisions.begin(), one.decisions.end());
  }
  if (options.counters != nullptr) *options.counters = counters;
  if (options.decisions == nullptr) return;
  const auto key = [](const TileDecision& d) { return std::tie(d.sequence, d.head, d.query_tile, d.key_tile); };
  std::sort(decisions.begin(), decisions.end(),
            [&](const TileDecision& a, const TileDecision& b) { return key(a) < key(b); });
  *options.decisions = std::move(decisions);
}

}  // namespace

void attention(const AttentionBatch& batch, const Cache& cache, std::int64_t layer, const AttentionOutput& output,
               const AttentionOptions& options) {
  const Problem problem = attend::checked(batch, cache, layer, output, options);
  Sizes sizes;
  const std::vector<Item> items = attend::items_of(problem, sizes);
  const bool looks = options.counters != nullptr || !options.counters_of.empty() || options.decisions != nullptr ||
                     problem.calibrating();
  const int threads = threads_for(problem, items);
  std::vector<attend::Workspace> spaces;
  spaces.reserve(static_cast<std::size_t>(threads));
  for (int i = 0; i < threads; ++i) spaces.emplace_back(problem, sizes);
  std::vector<attend::Findings> findings(looks ? items.size() : 0);
  for (attend::Findings& one : findings) one.skipped_at.resize(options.thresholds.size());

  for (std::size_t first = 0; first < items.size();) {
    const Wave wave(items, first, sizes);
    std::atomic<std::size_t> next{first};
    cpu::run_team(threads, [&](int worker) {
      while (true) {
        const std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
        if (i >= wave.end()) return;
        attend::run(problem, items[i], sizes, spaces[static_cast<std::size_t>(worker)], wave.of(i),
                    looks ? &findings[i] : nullptr);
      }
    });
    wave.put_together(problem, sizes, spaces[0].row);
    first = wave.end();
  }
  if (looks) report(options, items, findings);
}

}  // namespace kvstride
