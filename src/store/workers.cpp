// SPDX-License-Identifier: Apache-2.0
// The store's threads, memory for images, and how images look.
#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "cuda/run.h"
#include "kvstride/error.h"
#include "store/store_impl.h"

namespace kvstride::store {

void StoreImpl::end(JobState& job, std::size_t chunk, Stage stage, Outcome outcome) {
  if (!job.claim(chunk, stage)) return;
  // Counted first: who sees the job done sees it counted.
  if (job.verb != Verb::kPrefetch) {
    const bool put = is_put(job.verb);
    const auto first = static_cast<std::size_t>(put ? Tally::kPutOk : Tally::kGetOk);
    tallies_[first + static_cast<std::size_t>(outcome)].fetch_add(1, std::memory_order_relaxed);
    (put ? put_seconds_ : get_seconds_).add(Clock::now() - job.start);
  }
  job.settle(chunk, outcome);
  job.take_token(chunk);
}

/// Only one thread asks of a job at a time.
bool StoreImpl::is_ready(JobState& job) {
  try {
    if (job.point) {
      if (!job.point->reached()) return false;
      job.point = nullptr;
    }
  } catch (...) {
    job.lost = true;
    return true;
  }
  try {
    return !job.after || job.after();
  } catch (...) {
    return false;  // it must not throw; the deadline ends it
  }
}

/// The next task: one that has been short of memory, now and then; else the eldest. The lock must be held.
bool StoreImpl::take(Task& out, Clock::time_point now) {
  std::deque<Task>* from = nullptr;
  if (!starved_.empty() && starved_until_ <= now) {
    from = &starved_;
  } else if (!waiting_.empty()) {
    from = &waiting_;
  }
  if (from == nullptr) return false;
  out = std::move(from->front());
  from->pop_front();
  return true;
}

/// Asks the job whose turn it is whether its blocks may be touched. The lock must be held; it is not meanwhile.
bool StoreImpl::ask_later(std::unique_lock<std::mutex>& lock, Clock::time_point now) {
  constexpr auto kLongest = std::chrono::microseconds(5000);
  if (delayed_.empty() || delayed_.front().when > now) return false;
  Later one = std::move(delayed_.front());
  delayed_.pop_front();
  ++under_way_;
  lock.unlock();
  // What is over, or shall not begin, has no reason to wait.
  const bool over = one.job->left.load() == 0 || one.job->cancelled;
  const bool ready = over || is_ready(*one.job);
  lock.lock();
  --under_way_;
  if (!ready && !closed_) {
    one.when = now + one.pause;
    one.pause = std::min(2 * one.pause, kLongest);
    const auto later = [&](const Later& other) { return other.when > one.when; };
    delayed_.insert(std::find_if(delayed_.begin(), delayed_.end(), later), std::move(one));
    return true;
  }
  delayed_chunks_ -= one.chunks;
  if (closed_) {
    lock.unlock();
    for (std::size_t i = 0; i < one.chunks; ++i) end(*one.job, i, Stage::kQueued, Outcome::kRefused);
    lock.lock();
  } else {
    for (std::size_t i = 0; i < one.chunks; ++i) waiting_.push_back({one.job, i, {}});
  }
  work_.notify_all();
  if (under_way_ == 0) idle_.notify_all();
  return true;
}

/// A task that found no memory; whether it waits for some. The lock must be held.
bool StoreImpl::put_back(Task& task) {
  constexpr auto kPause = std::chrono::microseconds(200);
  constexpr auto kHopeless = std::chrono::milliseconds(250);
  const Clock::time_point now = Clock::now();
  // Everything that could give memory back may be pinned, for as long as its owner likes.
  const bool hopeless = under_way_ == 1 && task.starved && now - *task.starved > kHopeless;
  if (closed_ || hopeless) return false;
  const bool again = task.starved.has_value();
  if (!again) task.starved = now;
  again ? starved_.push_front(std::move(task)) : starved_.push_back(std::move(task));
  starved_until_ = now + kPause;
  return true;
}

/// Threads check what has been read before they start anything new: that is what gives memory back.
void StoreImpl::work() {
  std::unique_lock lock(mutex_);
  Task task;
  while (true) {
    const Clock::time_point now = Clock::now();
    if (!ready_.empty()) {
      const std::shared_ptr<Fetch> fetch = std::move(ready_.front());
      ready_.pop_front();
      lock.unlock();
      finish_get(fetch);
      lock.lock();
    } else if (stop_) {
      return;
    } else if (!asked_ && ask_later(lock, now)) {
      asked_ = true;
    } else if (asked_ = false; take(task, now)) {
      ++under_way_;
      lock.unlock();
      const Begun begun = begin(task);
      lock.lock();
      if (begun != Begun::kYes) {
        if (!put_back(task)) {
          lock.unlock();
          end(*task.job, task.chunk, Stage::kQueued, Outcome::kRefused);
          lock.lock();
        }
        if (--under_way_ == 0) idle_.notify_all();
      }
      task = {};
    } else if (!starved_.empty() || !delayed_.empty()) {
      Clock::time_point until = Clock::time_point::max();
      if (!starved_.empty()) until = starved_until_;
      if (!delayed_.empty()) until = std::min(until, delayed_.front().when);
      work_.wait_until(lock, until);
    } else {
      work_.wait(lock);
    }
  }
}

/// Ends what is past its deadline.
void StoreImpl::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (jobs_.empty()) {
      watch_.wait(lock);
      continue;
    }
    if (jobs_.begin()->first > Clock::now()) {
      watch_.wait_until(lock, jobs_.begin()->first);
      continue;
    }
    const std::shared_ptr<JobState> job = jobs_.begin()->second.lock();
    jobs_.erase(jobs_.begin());
    if (!job) continue;
    lock.unlock();
    for (std::size_t i = 0; i < job->keys.size(); ++i) {
      end(*job, i, Stage::kQueued, Outcome::kTimeout);
      end(*job, i, Stage::kWaiting, Outcome::kTimeout);
    }
    lock.lock();
    // What moves memory at this moment is looked at again.
    if (job->left.load() > 0) jobs_.insert({Clock::now() + std::chrono::milliseconds(5), job});
  }
}

StoreImpl::Begun StoreImpl::begin(const Task& task) {
  JobState& job = *task.job;
  if (job.cancelled) end(job, task.chunk, Stage::kQueued, Outcome::kRefused);
  if (job.lost) end(job, task.chunk, Stage::kQueued, Outcome::kIoError);
  if (job.stages[task.chunk].load() == Stage::kDone) {
    leave();
    return Begun::kYes;
  }
  try {
    if (!task.starved) ++job.begun;
    if (!job.device().on_host()) pin_tiers(job.device());
    if (is_put(job.verb)) return begin_put(task);
    auto fetch = std::make_shared<Fetch>();
    fetch->job = task.job;
    fetch->chunk = task.chunk;
    fetch->everything = job.verb == Verb::kPrefetch;
    fetch->brings = job.has_token(task.chunk);
    // Who prefetches gets it next, and that is what counts. A task that was short of memory has asked.
    fetch->asked = job.verb == Verb::kPrefetch || task.starved;
    return begin_get(fetch);
  } catch (...) {  // no memory
    end(job, task.chunk, Stage::kQueued, Outcome::kRefused);
    end(job, task.chunk, Stage::kWaiting, Outcome::kRefused);
    leave();
    return Begun::kYes;
  }
}

void StoreImpl::leave() {
  const std::lock_guard lock(mutex_);
  if (--under_way_ == 0) idle_.notify_all();
}

/// A request brings or reads a piece. A get of what no tier has counts when it is put.
void StoreImpl::ask(const PieceId& piece) {
  for (std::size_t i = 0; i < tiers_.size(); ++i) tiers_[i]->asked(in_tier(i, piece));
}

/// What the tiers before `num_tiers` that lack a piece say of it.
std::vector<Offer> StoreImpl::offer(const JobState& job, const PieceId& piece, std::int64_t bytes,
                                    std::size_t num_tiers) {
  std::vector<Offer> out;
  for (std::size_t i = 0; i < num_tiers; ++i) {
    const PieceId id = in_tier(i, piece);
    if (!tiers_[i]->holds(id)) out.push_back({i, tiers_[i]->admit(id, bytes, job.tenant)});
  }
  return out;
}

/// Called once they are final: who is short of memory asks again.
void StoreImpl::count_refusals(const std::vector<Offer>& offers) {
  for (const Offer& one : offers) tiers_[one.tier]->count_refusal(one.admitted.why());
}

/// The number of a tier.
std::optional<std::size_t> StoreImpl::first_admitted(const std::vector<Offer>& offers) {
  for (const Offer& one : offers) {
    if (one.admitted) return one.tier;
  }
  return std::nullopt;
}

/// Memory for an image: of a tier that can keep it, else of one that is fast with it.
BufferPtr StoreImpl::buffer_for(std::int64_t bytes, std::size_t first_tier) {
  for (std::size_t i = first_tier; i < tiers_.size(); ++i) {
    if (BufferPtr out = tiers_[i]->buffer(bytes)) return out;
  }
  return nullptr;
}

bool StoreImpl::fits(std::int64_t bytes, std::size_t first_tier) const {
  return std::any_of(tiers_.begin() + static_cast<std::ptrdiff_t>(first_tier), tiers_.end(),
                     [&](const TierPtr& tier) { return bytes <= tier->largest(); });
}

/// Once a store: the thread that comes first does it, others go on meanwhile.
void StoreImpl::pin_tiers(Device device) {
  if (pinned_.exchange(true)) return;
  for (const TierPtr& tier : tiers_) tier->pin_memory(device);
}

/// After a transfer that failed: nobody gets the image's memory while the device may still be at it.
void StoreImpl::keep_unsettled(Device device, BufferPtr image) noexcept {
  const bool settled = cuda::settle(device);
  std::vector<std::pair<Device, BufferPtr>> dropped;  // after the lock
  const std::lock_guard lock(mutex_);
  try {
    if (!settled) {
      unsettled_.emplace_back(device, std::move(image));
      return;
    }
    for (auto& [lost, kept] : unsettled_) {
      if (lost == device) dropped.emplace_back(lost, std::move(kept));
    }
    std::erase_if(unsettled_, [](const auto& one) { return one.second == nullptr; });
  } catch (const std::bad_alloc&) {  // nor is there memory: what may be wrong of it will be found out by its checksums
  }
}

/// The shape of what a put writes, or of what a get expects of a piece with these heads.
std::shared_ptr<const Shape> StoreImpl::shape_for(const JobState& job, std::size_t chunk, Heads heads) {
  std::string name;
  const bool raw = !job.cache;
  const std::size_t bytes = job.verb == Verb::kPutBytes ? job.from[chunk].size() : raw ? job.to[chunk].size() : 0;
  if (raw) {
    name = fmt::format("raw {}", bytes);
  } else {
    name = fmt::format("{} {}", heads.first, heads.count);
    for (const Plane& plane : job.cache->layout().planes()) name += plane.has_head ? " h" : " -";
  }
  const std::lock_guard lock(shapes_mutex_);
  std::shared_ptr<const Shape>& out = shapes_[name];
  if (out) return out;
  if (shapes_.size() > 1024) {  // raw bytes of ever other sizes
    shapes_.clear();
    return shape_for_new(job, bytes, heads);
  }
  out = shape_for_new(job, bytes, heads);
  return out;
}

std::shared_ptr<const Shape> StoreImpl::shape_for_new(const JobState& job, std::size_t bytes, Heads heads) const {
  if (!job.cache) {
    return std::make_shared<Shape>(Shape{{}, Frame(space_, Content{"", {}, static_cast<std::int64_t>(bytes), 0})});
  }
  Form form = stored_form(space_, job.cache->layout(), heads);
  Frame frame(space_, form.content);
  return std::make_shared<Shape>(Shape{std::move(form), std::move(frame)});
}

}  // namespace kvstride::store
