// SPDX-License-Identifier: Apache-2.0
// The store's verbs: checks, lookups, pins, metrics, the end.
#include "kvstride/store.h"

#include <algorithm>

#include "kvstride/error.h"
#include "store/forked.h"
#include "store/store_impl.h"

namespace kvstride::store {

std::size_t StoreImpl::lookup(std::span<const Key> keys, Heads heads, bool prefix, bool may_ask,
                              std::vector<std::uint8_t>& out) {
  const std::size_t leading = look(keys, heads, prefix, may_ask, out);
  if (options_.prefetch && tiers_.size() > 1) bring(prefix ? keys.first(leading) : keys, heads, out);
  return leading;
}

std::size_t StoreImpl::look(std::span<const Key> keys, Heads heads, bool prefix, bool may_ask,
                            std::vector<std::uint8_t>& out) {
  check_open(prefix ? "lookup_prefix" : "lookup");
  out.assign(keys.size(), 0);
  std::size_t leading = 0;
  std::vector<std::uint8_t> one(keys.size());
  for (std::size_t i = 0; i < tiers_.size() && leading < keys.size(); ++i) {
    // Of a prefix only what the tiers above have not counted.
    const std::size_t from = prefix ? leading : 0;
    const std::span<std::uint8_t> part(one.data() + from, keys.size() - from);
    std::fill(part.begin(), part.end(), std::uint8_t{0});
    tiers_[i]->covered(numbers_[i], keys.subspan(from), heads, prefix, part);
    for (std::size_t k = from; k < keys.size(); ++k) out[k] = out[k] != 0 || one[k] != 0 ? 1 : 0;
    while (leading < keys.size() && out[leading] != 0) ++leading;
  }
  // What no tier has in one piece: several pieces, or somebody else's.
  std::vector<Piece> pieces;
  const auto together = [&](const Key& key) {
    pieces.clear();
    for (std::size_t i = 0; i < tiers_.size(); ++i) tiers_[i]->pieces(numbers_[i], key, pieces);
    std::int64_t head = heads.first;
    const std::int64_t last = heads.first + heads.count;
    for (bool more = true; more && head < last;) {
      more = false;
      for (const Piece& piece : pieces) {
        if (piece.heads.count == 0) return true;
        if (piece.heads.first <= head && piece.heads.first + piece.heads.count > head) {
          head = piece.heads.first + piece.heads.count;
          more = true;
        }
      }
    }
    return head >= last;
  };
  const Clock::time_point begin = Clock::now();
  const auto ask = [&](std::span<const Key> unknown) {
    bool more = false;
    for (std::size_t i = 0; may_ask && i < tiers_.size(); ++i) {
      more = tiers_[i]->probe(numbers_[i], unknown, heads, prefix, begin) || more;
    }
    return more;
  };
  if (prefix) {
    // Others' chunks and ours may alternate: every question asks for the rest.
    while (leading < keys.size()) {
      if (!together(keys[leading]) && !(ask(keys.subspan(leading)) && together(keys[leading]))) break;
      while (leading < keys.size() && together(keys[leading])) out[leading++] = 1;
    }
  } else {
    std::vector<Key> unknown;
    std::vector<std::size_t> at;
    for (std::size_t k = 0; k < keys.size(); ++k) {
      if (out[k] != 0) continue;
      if (together(keys[k])) {
        out[k] = 1;
      } else {
        unknown.push_back(keys[k]);
        at.push_back(k);
      }
    }
    if (!unknown.empty() && ask(unknown)) {
      for (std::size_t i = 0; i < unknown.size(); ++i) out[at[i]] = together(unknown[i]) ? 1 : 0;
    }
  }
  if (prefix && leading < keys.size()) {
    // Chunks behind a gap are never read by prefix: somebody should know.
    const std::span<const Key> behind =
        keys.subspan(leading + 1).first(std::min<std::size_t>(keys.size() - leading - 1, 8));
    for (std::size_t i = 0; i < tiers_.size(); ++i) {
      std::fill(one.begin(), one.end(), std::uint8_t{0});
      tiers_[i]->covered(numbers_[i], behind, heads, false, one);
      count(Tally::kUnreachable, static_cast<std::uint64_t>(std::count(one.begin(), one.end(), 1)));
    }
  }
  return leading;
}

StoreMetrics StoreImpl::metrics() const {
  check_process();
  StoreMetrics out;
  for (std::size_t i = 0; i < 6; ++i) {
    const std::string outcome(name_of(static_cast<Outcome>(i)));
    out.counters["put_" + outcome] = tallies_[static_cast<std::size_t>(Tally::kPutOk) + i];
    out.counters["get_" + outcome] = tallies_[static_cast<std::size_t>(Tally::kGetOk) + i];
  }
  for (std::size_t i = 0; i < kTallyNames.size(); ++i) {
    out.counters[kTallyNames[i]] = tallies_[static_cast<std::size_t>(Tally::kMissAbsent) + i];
  }
  out.seconds["put"] = put_seconds_.snapshot();
  out.seconds["get"] = get_seconds_.snapshot();
  for (const TierPtr& tier : tiers_) out.tiers.push_back(tier->metrics());
  return out;
}

bool StoreImpl::flush(std::chrono::nanoseconds time) {
  check_process();
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, time,
                        [&] { return under_way_ == 0 && waiting_.empty() && starved_.empty() && delayed_.empty(); });
}

void StoreImpl::close() {
  std::vector<std::thread> threads;
  if (getpid() != pid_) {
    for (std::thread& thread : threads_) thread.detach();
    threads_.clear();
    return;
  }
  {
    std::unique_lock lock(mutex_);
    if (closed_) return idle_.wait(lock, [&] { return ended_; });  // somebody else ends it
    closed_ = true;
    Clock::time_point last = Clock::now();
    for (const auto& [deadline, job] : jobs_) last = std::max(last, deadline);
    std::deque<Task> dropped;
    dropped.swap(waiting_);
    for (Task& task : starved_) dropped.push_back(std::move(task));
    starved_.clear();
    for (const Later& later : delayed_) {
      for (std::size_t i = 0; i < later.chunks; ++i) dropped.push_back({later.job, i, {}});
      delayed_chunks_ -= later.chunks;  // not those of a job that is being asked
    }
    delayed_.clear();
    lock.unlock();
    for (const Task& task : dropped) end(*task.job, task.chunk, Stage::kQueued, Outcome::kRefused);
    lock.lock();
    idle_.wait_until(lock, last + std::chrono::milliseconds(100), [&] { return under_way_ == 0; });
    stop_ = true;
    threads.swap(threads_);
  }
  work_.notify_all();
  watch_.notify_all();
  for (std::thread& thread : threads) thread.join();
  const std::lock_guard lock(mutex_);
  ended_ = true;
  idle_.notify_all();
}

/// Chunks that nobody evicts.
class PinsImpl {
 public:
  std::vector<bool> found;
  std::vector<std::shared_ptr<void>> pins;
  std::vector<TierPtr> tiers;
};

}  // namespace kvstride::store

namespace kvstride {

TierMetrics tier_metrics(const store::Tier& tier) {
  tier.check_process("tier_metrics");
  return tier.metrics();
}

Pins::Pins(std::unique_ptr<store::PinsImpl> impl) : impl_(std::move(impl)) {}
Pins::~Pins() = default;
Pins::Pins(Pins&&) noexcept = default;
Pins& Pins::operator=(Pins&&) noexcept = default;
const std::vector<bool>& Pins::found() const { return impl_->found; }

Store::Store(std::vector<TierPtr> tiers, Namespace space, const StoreOptions& options)
    : impl_(std::make_shared<store::StoreImpl>(std::move(tiers), std::move(space), options)) {
  impl_->start();
}
Store::~Store() {
  close();
  store::keep_where_forked(impl_, impl_->pid_);
}

Job Store::put(std::span<const Key> keys, const Cache& cache, std::span<const std::int64_t> blocks,
               const RequestOptions& options, const Stream& stream) {
  return impl_->transfer("put", store::Verb::kPut, keys, cache, blocks, options, stream);
}
Job Store::get(std::span<const Key> keys, const Cache& cache, std::span<const std::int64_t> blocks,
               const RequestOptions& options, const Stream& stream) {
  return impl_->transfer("get", store::Verb::kGet, keys, cache, blocks, options, stream);
}
Job Store::put_bytes(std::span<const Key> keys, std::span<const std::span<const std::byte>> bytes,
                     const RequestOptions& options) {
  return impl_->transfer_bytes("put_bytes", store::Verb::kPutBytes, keys, {bytes.begin(), bytes.end()}, {}, options);
}
Job Store::get_bytes(std::span<const Key> keys, std::span<const std::span<std::byte>> bytes,
                     const RequestOptions& options) {
  return impl_->transfer_bytes("get_bytes", store::Verb::kGetBytes, keys, {}, {bytes.begin(), bytes.end()}, options);
}

std::vector<bool> Store::lookup(std::span<const Key> keys, std::optional<Range> heads, bool ask) {
  std::vector<std::uint8_t> found;
  impl_->lookup(keys, impl_->want(heads), false, ask, found);
  return {found.begin(), found.end()};
}
std::int64_t Store::lookup_prefix(std::span<const Key> keys, std::optional<Range> heads, bool ask) {
  std::vector<std::uint8_t> found;
  return static_cast<std::int64_t>(impl_->lookup(keys, impl_->want(heads), true, ask, found));
}

Job Store::prefetch(std::span<const Key> keys, std::optional<Range> heads, const RequestOptions& options) {
  return impl_->prefetch(keys, heads, options);
}

Pins Store::pin(std::span<const Key> keys) {
  impl_->check_open("pin");
  auto out = std::make_unique<store::PinsImpl>();
  out->tiers = impl_->tiers_;
  for (const Key& key : keys) {
    bool found = false;
    for (std::size_t i = 0; i < impl_->tiers_.size(); ++i) {
      if (std::shared_ptr<void> pin = impl_->tiers_[i]->pin(impl_->numbers_[i], key)) {
        out->pins.push_back(std::move(pin));
        found = true;
      }
    }
    out->found.push_back(found);
  }
  return Pins(std::move(out));
}

std::int64_t Store::remove(std::span<const Key> keys) {
  impl_->check_open("remove");
  std::int64_t removed = 0;
  for (const Key& key : keys) {
    bool there = false;
    for (std::size_t i = 0; i < impl_->tiers_.size(); ++i) {
      there = impl_->tiers_[i]->remove(impl_->numbers_[i], key) || there;
    }
    removed += there ? 1 : 0;
  }
  return removed;
}

std::vector<Key> Store::take_gone() {
  impl_->check_open("take_gone");
  std::vector<Key> out;
  for (std::size_t i = 0; i < impl_->tiers_.size(); ++i) {
    for (Key& key : impl_->tiers_[i]->take_gone(impl_->numbers_[i])) out.push_back(std::move(key));
  }
  return out;
}

const Namespace& Store::space() const { return impl_->space_; }
StoreMetrics Store::metrics() const { return impl_->metrics(); }
bool Store::flush(std::chrono::nanoseconds time) { return impl_->flush(time); }
void Store::close() {
  impl_->close();
  if (getpid() != impl_->pid_) return;
  // The last callbacks of tiers are on their way out: tiers shall not end on threads of their own.
  for (int i = 0; i < 1000 && impl_.use_count() > 1; ++i) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

}  // namespace kvstride
