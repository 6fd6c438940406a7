// SPDX-License-Identifier: Apache-2.0
// A small pool of threads that wait for work.
#include "cpu/pool.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/environment.h"
#include "cpu/openmp.h"
#include "kvstride/error.h"
#include "kvstride/threads.h"

namespace kvstride {
namespace {

constexpr int kMaxThreads = 1024;

/// Of the environment; 0 where it says nothing.
int wanted_threads() {
  static const auto given = static_cast<int>(cpu::number_from("KVSTRIDE_NUM_THREADS", 0, kMaxThreads).value_or(0));
  return given;
}

int default_threads() {
  if (wanted_threads() > 0) return wanted_threads();
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::atomic<int> chosen{0};

}  // namespace

int num_threads() {
  const int given = chosen.load(std::memory_order_relaxed);
  static const int fallback = default_threads();
  return given > 0 ? given : fallback;
}

void set_num_threads(int threads) {
  if (threads < 0 || threads > kMaxThreads) {
    throw Error(ErrorCode::kArgument, fmt::format("set_num_threads: {} is not from 0 to {}", threads, kMaxThreads));
  }
  chosen.store(threads, std::memory_order_relaxed);
}

namespace cpu {
namespace {

/// One job at a time; workers take indices until none is left.
class Pool {
 public:
  void run(int threads, int count, const std::function<void(int)>& work) {
    long job = 0;
    {
      const std::lock_guard lock(mutex_);
      while (workers_ < threads - 1) {
        try {
          std::thread(&Pool::wait_for_work, this).detach();
        } catch (const std::system_error&) {
          break;  // no more threads for this process: those that there are do the work
        }
        ++workers_;
      }
      work_ = &work;
      next_ = 0;
      count_ = count;
      left_ = count;
      places_ = threads - 1;
      job = ++job_;
    }
    ready_.notify_all();
    take(job);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
    work_ = nullptr;
  }

 private:
  /// Runs indices of a job; each is taken under the lock, so that none is taken after the job ended.
  void take(long job) {
    std::unique_lock lock(mutex_);
    while (job_ == job && work_ != nullptr && next_ < count_) {
      const int index = next_++;
      const auto* work = work_;
      lock.unlock();
      (*work)(index);
      lock.lock();
      if (--left_ == 0) done_.notify_all();
    }
  }

  void wait_for_work() {
    long seen = 0;
    while (true) {
      {
        std::unique_lock lock(mutex_);
        ready_.wait(lock, [&] { return job_ != seen; });
        seen = job_;
        if (places_ == 0) continue;
        --places_;
      }
      take(seen);
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::condition_variable done_;
  const std::function<void(int)>* work_ = nullptr;
  int next_ = 0;
  int count_ = 0;
  int left_ = 0;
  int places_ = 0;  // workers that may still join the job
  long job_ = 0;
  int workers_ = 0;
};

/// Never destroyed: its threads wait until the process ends. A forked child has none of them and starts anew.
std::atomic<Pool*> pool{nullptr};
std::atomic<bool> busy{false};

void forget() {
  pool.store(nullptr);
  busy.store(false);
}

}  // namespace

int threads_for(std::int64_t bytes) {
  constexpr std::int64_t kShare = std::int64_t{1} << 19;  // bytes below which a thread is not worth waking
  return static_cast<int>(std::clamp<std::int64_t>(bytes / kShare, 1, num_threads()));
}

int team_threads() {
  const bool set = chosen.load(std::memory_order_relaxed) > 0 || wanted_threads() > 0;
  const int lent = set ? 0 : openmp_threads();
  return lent > 0 ? lent : num_threads();
}

void run_team(int threads, const std::function<void(int)>& work) {
  if (threads > 1 && openmp_threads() > 0) return on_openmp(threads, work);
  parallel_for(threads, threads, work);
}

void parallel_for(int threads, int count, const std::function<void(int)>& work) {
  if (threads > 1 && count > 1 && !busy.exchange(true, std::memory_order_acquire)) {
    Pool* mine = pool.load();
    if (mine == nullptr) {
      static const int at_fork = pthread_atfork(nullptr, nullptr, forget);
      (void)at_fork;
      mine = new Pool;
      pool.store(mine);
    }
    mine->run(threads, count, work);
    busy.store(false, std::memory_order_release);
    return;
  }
  for (int i = 0; i < count; ++i) work(i);
}

}  // namespace cpu
}  // namespace kvstride
