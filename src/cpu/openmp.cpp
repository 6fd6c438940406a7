// SPDX-License-Identifier: Apache-2.0
// The threads of an OpenMP runtime that this process has already.
//
// torch's are such threads. After each of its operations they stay awake for milliseconds, waiting for the next one,
// and engines bind each to a processor: threads of our own would share those processors with them, or, made by a thread
// that is bound, all have one. GCC's, Intel's and LLVM's runtimes have the same entry point, GOMP_parallel, which torch
// loads for the whole process.
#include "cpu/openmp.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>

#include "cpu/environment.h"

namespace kvstride::cpu {
namespace {

struct Runtime {
  void (*parallel)(void (*work)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  int (*thread)() = nullptr;
  int (*most)() = nullptr;
  bool complete() const { return parallel != nullptr && thread != nullptr && most != nullptr; }
};

template <class Function>
void find(Function& function, const char* name) {
  function = reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
}

/// Set in a forked child, which has none of the runtime's threads, whoever had started them.
std::atomic<bool> forked{false};
const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

/// It may be loaded after us: looked for until it is found.
const Runtime* runtime() {
  (void)at_fork;
  static const bool wanted = number_from("KVSTRIDE_OPENMP", 0, 1).value_or(1) == 1;
  static std::atomic<const Runtime*> found{nullptr};
  if (!wanted || forked.load(std::memory_order_relaxed)) return nullptr;
  if (const Runtime* known = found.load(std::memory_order_acquire)) return known;
  Runtime now;
  find(now.parallel, "GOMP_parallel");
  if (now.parallel == nullptr) return nullptr;
  find(now.thread, "omp_get_thread_num");
  find(now.most, "omp_get_max_threads");
  if (!now.complete()) return nullptr;
  static const Runtime kept = now;
  found.store(&kept, std::memory_order_release);
  return &kept;
}

}  // namespace

int openmp_threads() {
  const Runtime* omp = runtime();
  return omp == nullptr ? 0 : omp->most();
}

void on_openmp(int threads, const std::function<void(int)>& work) {
  struct Job {
    const Runtime* omp;
    const std::function<void(int)>* work;
  } job{runtime(), &work};
  job.omp->parallel(
      [](void* data) {
        const Job& mine = *static_cast<const Job*>(data);
        (*mine.work)(mine.omp->thread());
      },
      &job, static_cast<unsigned>(std::min(threads, job.omp->most())), 0);
}

}  // namespace kvstride::cpu
