// SPDX-License-Identifier: Apache-2.0
// attention(): a call is checked, split into items, run by threads and put together.
#include "kvstride/attention.h"

#include <algorithm>
#include <atomic>
#include <tuple>

#include "attention/item.h"
#include "cpu/pool.h"
#include "kvstride/threads.h"

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
  return static_cast<int>(std::clamp<double>(most, 1, num_threads()));
}

/// States of the items that share rows with others.
class Parts {
 public:
  Parts(const std::vector<Item>& items, const Sizes& sizes, std::int64_t parts) {
    starts_.resize(static_cast<std::size_t>(parts));
    std::int64_t total = 0;
    for (const Item& item : items) {
      if (item.part < 0) continue;
      starts_[static_cast<std::size_t>(item.part)] = {total, item.all_rows()};
      total += cpu::padded(item.all_rows() * (sizes.value_step + 2));
    }
    step_ = sizes.value_step;
    memory_ = hwy::AllocateAligned<float>(static_cast<std::size_t>(std::max<std::int64_t>(total, 1)));
    if (!memory_) throw std::bad_alloc();
  }

  State of(const Item& item) const {
    if (item.part < 0) return {};
    const auto [start, rows] = starts_[static_cast<std::size_t>(item.part)];
    float* values = memory_.get() + start;
    return {values, values + rows * step_, values + rows * (step_ + 1)};
  }

 private:
  hwy::AlignedFreeUniquePtr<float[]> memory_;
  std::vector<std::pair<std::int64_t, std::int64_t>> starts_;
  std::int64_t step_;
};

bool same_rows(const Item& a, const Item& b) {
  return a.part >= 0 && b.part >= 0 &&
         std::tie(a.sequence, a.kv_head, a.first_head, a.first_row) ==
             std::tie(b.sequence, b.kv_head, b.first_head, b.first_row);
}

void put_together(const Problem& problem, const std::vector<Item>& items, const Sizes& sizes, const Parts& parts,
                  float* row) {
  for (std::size_t i = 0; i < items.size();) {
    const std::size_t first = i++;
    if (items[first].part < 0) continue;
    const State state = parts.of(items[first]);
    for (; i < items.size() && same_rows(items[first], items[i]); ++i) {
      attend::merge(state, parts.of(items[i]), items[first].all_rows(), sizes.value_step);
    }
    attend::write_out(problem, items[first], sizes, state, row);
  }
}

void report(const AttentionOptions& options, std::vector<attend::Findings>& findings) {
  std::fill(options.skipped_at.begin(), options.skipped_at.end(), 0);
  TileCounters counters;
  std::vector<TileDecision> decisions;
  for (attend::Findings& one : findings) {
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
  std::int64_t num_parts = 0;
  const std::vector<Item> items = attend::items_of(problem, sizes, num_parts);
  const bool looks = options.counters != nullptr || options.decisions != nullptr || problem.calibrating();
  const int threads = threads_for(problem, items);
  std::vector<attend::Workspace> spaces;
  spaces.reserve(static_cast<std::size_t>(threads));
  for (int i = 0; i < threads; ++i) spaces.emplace_back(problem, sizes);
  const Parts parts(items, sizes, num_parts);
  std::vector<attend::Findings> findings(looks ? items.size() : 0);
  for (attend::Findings& one : findings) one.skipped_at.resize(options.thresholds.size());

  std::atomic<std::size_t> next{0};
  cpu::parallel_for(threads, threads, [&](int worker) {
    while (true) {
      const std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= items.size()) return;
      attend::run(problem, items[i], sizes, spaces[static_cast<std::size_t>(worker)], parts.of(items[i]),
                  looks ? &findings[i] : nullptr);
    }
  });
  put_together(problem, items, sizes, parts, spaces[0].row);
  if (looks) report(options, findings);
}

}  // namespace kvstride
