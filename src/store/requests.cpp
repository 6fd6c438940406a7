// SPDX-License-Identifier: Apache-2.0
// Requests: what is wrong with them whatever the store holds, and putting them into the queue.
#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "kvstride/error.h"
#include "plan/program.h"
#include "store/store_impl.h"

namespace kvstride::store {

StoreImpl::StoreImpl(std::vector<TierPtr> tiers, Namespace space, const StoreOptions& options)
    : tiers_(std::move(tiers)), space_(std::move(space)), options_(options) {
  if (tiers_.empty()) throw Error(ErrorCode::kArgument, "Store: no tiers are given");
  for (const TierPtr& tier : tiers_) {
    if (!tier) throw Error(ErrorCode::kArgument, "Store: a tier is null");
    tier->check_process("Store");
    numbers_.push_back(tier->space(space_));
  }
  constexpr std::int64_t kMostHeads = 0xFFFF;  // file names have four digits
  if (space_.fields().num_kv_heads > kMostHeads) {
    throw Error(ErrorCode::kArgument, fmt::format("Store: num_kv_heads {} of the namespace is above {}",
                                                  space_.fields().num_kv_heads, kMostHeads));
  }
  for (std::size_t i = 0; i < tiers_.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (tiers_[i] == tiers_[j]) throw Error(ErrorCode::kArgument, "Store: a tier is given twice");
    }
    if (i > 0) tiers_[i - 1]->demote_to(numbers_[i - 1], tiers_[i], numbers_[i]);
  }
}

void StoreImpl::start() {
  int threads = options_.num_threads;
  if (threads <= 0) threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 4U));
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    threads_.emplace_back([this] { watch(); });
  } catch (const std::system_error& error) {
    close();
    throw Error(ErrorCode::kStore, fmt::format("Store: no thread can be made: {}", error.what()));
  }
}

Job StoreImpl::submit(std::shared_ptr<JobState> job) {
  check_process();
  const std::size_t chunks = job->keys.size();
  std::size_t taken = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      const std::size_t queued = waiting_.size() + starved_.size() + delayed_chunks_;
      taken = std::min(chunks, options_.queue_chunks - std::min(options_.queue_chunks, queued));
      if ((job->after || job->point) && taken > 0) {
        delayed_.push_front({Clock::now(), job, taken});
        delayed_chunks_ += taken;
      } else {
        for (std::size_t i = 0; i < taken; ++i) waiting_.push_back({job, i, {}});
      }
      if (taken > 0) jobs_.insert({job->deadline, job});
    }
  }
  work_.notify_all();
  watch_.notify_one();
  for (std::size_t i = taken; i < chunks; ++i) end(*job, i, Stage::kQueued, Outcome::kRefused);
  return Job(std::move(job));
}

/// A forked child has none of the threads.
void StoreImpl::check_process() const {
  if (getpid() == pid_) return;
  throw Error(ErrorCode::kStore, fmt::format("Store: it belongs to process {}; open one after the fork", pid_));
}

void StoreImpl::check_open(const char* verb) const {
  check_process();
  if (closed_) throw Error(ErrorCode::kStore, fmt::format("{}: the store is closed", verb));
}

std::shared_ptr<JobState> StoreImpl::job(const char* name, Verb verb, std::span<const Key> keys,
                                         const RequestOptions& options) const {
  constexpr std::size_t kMostTenant = 256;
  if (options.tenant.size() > kMostTenant) {
    throw Error(ErrorCode::kArgument, fmt::format("{}: tenant has {} bytes, at most {} are allowed", name,
                                                  options.tenant.size(), kMostTenant));
  }
  auto out = std::make_shared<JobState>(keys.size());
  out->verb = verb;
  if (!options.tenant.empty()) out->tenant = std::make_shared<const std::string>(options.tenant);
  out->keys.assign(keys.begin(), keys.end());
  out->after = options.after;
  out->start = Clock::now();
  const std::chrono::nanoseconds time = options.deadline.value_or(options_.deadline);
  // Far deadlines would overflow the clock.
  out->deadline = out->start + std::min<std::chrono::nanoseconds>(time, std::chrono::hours(24 * 365));
  return out;
}

Job StoreImpl::transfer(const char* name, Verb verb, std::span<const Key> keys, const Cache& cache,
                        std::span<const std::int64_t> blocks, const RequestOptions& options, const Stream& stream) {
  std::shared_ptr<JobState> out = job(name, verb, keys, options);
  std::optional<HeadMap> heads;
  if (options.heads) heads = HeadMap{options.heads->cache_first, options.heads->stored_first, options.heads->count};
  out->heads = check_cache(name, space_, cache.layout(), heads);
  out->ratio = space_.fields().block_size / cache.layout().geometry().block_size;
  out->blocks.assign(blocks.begin(), blocks.end());
  if (out->blocks.size() != keys.size() * static_cast<std::size_t>(out->ratio)) {
    throw Error(ErrorCode::kArgument, fmt::format("{}: {} blocks for {} keys, {} a key are needed", name, blocks.size(),
                                                  keys.size(), out->ratio));
  }
  const std::int64_t limit = cache.layout().geometry().num_blocks;
  for (std::size_t i = 0; i < out->blocks.size(); ++i) {
    plan::check_block_id(name, "blocks", i, out->blocks[i], limit, "cache");
  }
  if (verb == Verb::kGet) {
    if (cache.read_only()) throw Error(ErrorCode::kArgument, fmt::format("{}: the cache is read-only", name));
    std::vector<std::int64_t> sorted = out->blocks;
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: block {} is given twice", name, *twice));
    }
  }
  out->cache.emplace(cache);
  if (!cache.device().on_host()) {
    check_process();
    try {
      cuda::runtime_of(cache.device());
      if (stream.given) out->point = std::make_unique<cuda::Point>(cache.device(), stream);
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}: {}", name, error.what()));
    }
  }
  return submit(std::move(out));
}

Job StoreImpl::transfer_bytes(const char* name, Verb verb, std::span<const Key> keys,
                              std::vector<std::span<const std::byte>> from, std::vector<std::span<std::byte>> to,
                              const RequestOptions& options) {
  const std::size_t given = verb == Verb::kPutBytes ? from.size() : to.size();
  if (given != keys.size()) {
    throw Error(ErrorCode::kArgument, fmt::format("{}: {} buffers for {} keys", name, given, keys.size()));
  }
  if (!space_.fields().raw) {
    throw Error(ErrorCode::kArgument,
                fmt::format("{}: a namespace with raw= is needed: what the bytes depend on, such as layout, "
                            "instruction set, tensor-parallel size and rank",
                            name));
  }
  if (options.heads) throw Error(ErrorCode::kArgument, fmt::format("{}: raw bytes have no heads", name));
  for (std::size_t i = 0; i < given; ++i) {
    if ((verb == Verb::kPutBytes ? from[i].size() : to[i].size()) == 0) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: buffer {} is empty", name, i));
    }
  }
  std::shared_ptr<JobState> out = job(name, verb, keys, options);
  out->from = std::move(from);
  out->to = std::move(to);
  return submit(std::move(out));
}

Job StoreImpl::prefetch(std::span<const Key> keys, const std::optional<Range>& heads, const RequestOptions& options) {
  const Heads wanted = want(heads);
  std::shared_ptr<JobState> out = job("prefetch", Verb::kPrefetch, keys, options);
  if (!space_.fields().raw) out->heads = {0, wanted.first, wanted.count};
  // What is refused at once shall not make anybody wait.
  check_process();
  const std::shared_ptr<StoreImpl> self = shared_from_this();
  for (const Key& key : keys) {
    out->tokens.push_back(bringing_.begin(key, [self](std::vector<Task> tasks) { self->resume(std::move(tasks)); }));
  }
  return submit(std::move(out));
}

/// After a lookup: what it found below the first tier.
void StoreImpl::bring(std::span<const Key> keys, Heads heads, std::span<const std::uint8_t> found) {
  std::vector<std::uint8_t> upper(keys.size());
  tiers_[0]->covered(numbers_[0], keys, heads, false, upper);
  std::vector<Key> wanted;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (found[i] != 0 && upper[i] == 0 && !bringing_.has(keys[i])) wanted.push_back(keys[i]);
  }
  if (wanted.empty()) return;
  std::optional<Range> range;
  if (!space_.fields().raw) range = Range{heads.first, heads.count};
  prefetch(wanted, range, {});
}

/// What waited for a prefetch begins anew, before anything else does.
void StoreImpl::resume(std::vector<Task> tasks) noexcept {
  if (tasks.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    for (Task& task : tasks) {
      bool taken = false;
      try {
        if (!closed_) waiting_.push_front(task);
        taken = !closed_;
      } catch (...) {  // no memory
      }
      if (taken) task.job = nullptr;
    }
  }
  work_.notify_all();
  for (const Task& task : tasks) {
    if (task.job) end(*task.job, task.chunk, Stage::kQueued, Outcome::kRefused);
    leave();
  }
}

/// What a reader of all, or of `heads`, needs.
Heads StoreImpl::want(const std::optional<Range>& heads) const {
  const std::int64_t limit = space_.fields().num_kv_heads;
  if (!heads) return {0, static_cast<std::uint16_t>(limit)};
  if (heads->first < 0 || heads->count < 1 || heads->first > limit || heads->count > limit - heads->first) {
    throw Error(ErrorCode::kArgument,
                fmt::format("lookup: heads: {} from {} of the namespace's {}", heads->count, heads->first, limit));
  }
  return {static_cast<std::uint16_t>(heads->first), static_cast<std::uint16_t>(heads->count)};
}

}  // namespace kvstride::store
