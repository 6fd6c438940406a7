// SPDX-License-Identifier: Apache-2.0
// Starting and ending a directory tier's threads, giving them work, questions about keys, keeping house.
#include "store/disk_threads.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

using Engine = DirectoryTierOptions::Engine;

}  // namespace

DiskThreads::DiskThreads(const DirectoryTierOptions& options, const std::shared_ptr<Io>& io,
                         std::shared_ptr<Admission> admission)
    : options_(options),
      io_(io),
      staging_(std::make_shared<Staging>(options.staging_bytes)),
      directory_(io,
                 {options.path, options.max_bytes, options.keep_free,
                  options.eviction == Eviction::kLru ? Policy::kLru : Policy::kS3Fifo, options.sync, options.group,
                  staging_->largest()},
                 counters_, std::move(admission)) {}

void DiskThreads::start() {
  // Which engine it will be is found out at once, without pinning memory.
  bool ring = false;
  if (options_.engine != Engine::kBlocking) {
    std::string why;
    ring = ring_transfers(1, {}, &why) != nullptr;
    if (!ring && options_.engine == Engine::kRing) {
      throw Error(ErrorCode::kStore, fmt::format("DirectoryTier: io_uring is not there: {}", why));
    }
    engine_ = ring ? "io_uring" : fmt::format("pread/pwrite ({})", why);
  } else {
    engine_ = "pread/pwrite";
  }
  const std::size_t threads = options_.num_threads > 0 ? static_cast<std::size_t>(options_.num_threads) : ring ? 2 : 8;
  for (std::size_t i = 0; i < threads; ++i) busy_.push_back(std::make_unique<Busy>());
  const auto add_thread = [&](auto body) {
    {
      const std::lock_guard lock(mutex_);
      ++alive_;
    }
    try {
      threads_.emplace_back([self = shared_from_this(), body] {
        body(*self);
        const std::lock_guard lock(self->mutex_);
        --self->alive_;
        self->ended_.notify_all();
      });
    } catch (const std::system_error& error) {
      {
        const std::lock_guard lock(mutex_);
        --alive_;
      }
      stop();
      throw Error(ErrorCode::kStore, fmt::format("DirectoryTier: no thread can be made: {}", error.what()));
    }
  };
  for (std::size_t i = 0; i < threads; ++i) add_thread([i](DiskThreads& disk) { disk.run(i); });
  add_thread([](DiskThreads& disk) { disk.keep_house(); });
  add_thread([](DiskThreads& disk) { disk.answer(); });
}

/// Threads that a disk keeps are left behind with all that they use.
void DiskThreads::stop() {
  if (getpid() != pid_) {  // a forked child has none of them
    for (std::thread& thread : threads_) thread.detach();
    threads_.clear();
    return;
  }
  std::deque<Operation> dropped;
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    dropped.swap(writes_);
    std::move(reads_.begin(), reads_.end(), std::back_inserter(dropped));
    reads_.clear();
  }
  work_.notify_all();
  work_house_.notify_all();
  question_.notify_all();
  answered_.notify_all();
  for (Operation& one : dropped) {
    if (one.read) end_read(one, Outcome::kRefused);
    if (one.write) end_write(one, Outcome::kRefused);
  }
  std::unique_lock lock(mutex_);
  // The last one to let go of a tier may be one of its own threads.
  const auto is_this = [](const std::thread& thread) { return thread.get_id() == std::this_thread::get_id(); };
  const std::size_t own = std::any_of(threads_.begin(), threads_.end(), is_this) ? 1 : 0;
  const bool all = ended_.wait_for(lock, std::chrono::seconds(10), [&] { return alive_ == own; });
  lock.unlock();
  for (std::thread& thread : threads_) all && !is_this(thread) ? thread.join() : thread.detach();
  threads_.clear();
  try {
    if (all) directory_.settle_all();
  } catch (...) {  // no memory: the next one finds it
  }
}

std::string DiskThreads::engine() const {
  const std::lock_guard lock(mutex_);
  return directory_.direct() ? engine_ + ", O_DIRECT" : engine_;
}

bool DiskThreads::sick() const {
  const Clock::rep now = Clock::now().time_since_epoch().count();
  return std::all_of(busy_.begin(), busy_.end(), [&](const std::unique_ptr<Busy>& busy) {
    const Clock::rep until = busy->until.load(std::memory_order_relaxed);
    return until != 0 && until < now;
  });
}

void DiskThreads::add_task(std::function<void()> task) {
  Operation operation;
  operation.task = std::move(task);
  const std::lock_guard lock(mutex_);
  if (stop_) return;
  reads_.push_back(std::move(operation));
  work_.notify_one();
}

void DiskThreads::add(Operation operation) {
  operation.start = Clock::now();
  const bool read = operation.read.has_value();
  bool full = false;
  const bool is_sick = sick();
  if (!is_sick) {
    const std::lock_guard lock(mutex_);
    full = stop_ || reads_.size() + writes_.size() >= options_.queue_chunks;
    if (!full) {
      (read ? reads_ : writes_).push_back(std::move(operation));
      work_.notify_one();
      return;
    }
  }
  counters_.add(is_sick ? Count::kRefusedSick : Count::kRefusedQueue);
  if (read) {
    end_read(operation, is_sick ? Outcome::kTimeout : Outcome::kRefused);
  } else {
    end_write(operation, Outcome::kRefused);
  }
}

/// Now and then: the account, and what dead processes left.
void DiskThreads::keep_house() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    work_house_.wait_for(lock, std::chrono::milliseconds(200), [&] { return stop_; });
    lock.unlock();
    try {
      directory_.keep_house();
    } catch (...) {  // a directory that went away; requests say so
    }
    lock.lock();
  }
}

/// Answers questions about keys that this process does not know.
void DiskThreads::answer() {
  std::unique_lock lock(mutex_);
  while (true) {
    question_.wait(lock, [&] { return stop_ || (asked_ && !asked_->done); });
    if (stop_) return;
    const std::shared_ptr<Question> question = asked_;
    lock.unlock();
    bool found = false;
    try {
      found = directory_.probe(question->space, question->keys, question->heads, question->prefix);
    } catch (...) {
    }
    lock.lock();
    question->found = found;
    question->done = true;
    answered_.notify_all();
  }
}

bool DiskThreads::probe(std::uint32_t space, std::vector<Key> keys, Heads heads, bool prefix, Clock::time_point begin) {
  const Clock::time_point until = begin + options_.lookup_timeout;
  if (Clock::now() >= until) return false;
  const auto question = std::make_shared<Question>(Question{space, std::move(keys), heads, prefix, until});
  std::unique_lock lock(mutex_);
  // One at a time. Who comes while the file system keeps an old one waits no longer than that one did.
  const auto answered = [&] { return stop_ || !asked_ || asked_->done; };
  while (!answered()) {
    const Clock::time_point limit = std::min(until, asked_->until);
    if (!answered_.wait_until(lock, limit, answered)) return false;
  }
  if (stop_) return false;
  asked_ = question;
  question_.notify_one();
  answered_.wait_until(lock, until, [&] { return stop_ || question->done; });
  return question->found;
}

}  // namespace kvstride::store
