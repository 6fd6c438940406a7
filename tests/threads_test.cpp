// SPDX-License-Identifier: Apache-2.0
// Verbs from many threads at once, the pool's split of large jobs, and forked children. Run under ThreadSanitizer too.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "child.h"
#include "cpu/openmp.h"
#include "cpu/pool.h"
#include "oracle.h"

namespace kvstride {
namespace {

using test::Memory;

Geometry big_geometry() {
  Geometry g = test::small_geometry();
  g.num_blocks = 16;
  g.block_size = 64;
  g.head_size = 256;  // 2 MiB a layer: split over the pool
  g.num_kv_heads = 4;
  return g;
}

std::vector<Pair> reversed_pairs() {
  std::vector<Pair> pairs;
  for (std::int64_t i = 0; i < 16; ++i) pairs.push_back({i, 15 - i});
  return pairs;
}

TEST(Threads, EveryNumberOfThreadsMovesTheSameBytes) {
  const char* targets[] = {"KV B H N D", "B H {key: D N, value: N D}", "{key: B H D/x N D%x, value: B H D N}"};
  for (const char* target : targets) {
    Memory src(Layout("B KV N H D", big_geometry()), 5);
    std::vector<std::vector<std::byte>> want;
    for (const int threads : {1, 2, 3, 7}) {
      set_num_threads(threads);
      Memory dst(Layout(target, big_geometry()));
      convert_blocks(src.cache(), dst.cache(), reversed_pairs());
      if (threads == 1) want = dst.buffers;
      EXPECT_EQ(dst.buffers, want) << target << " with " << threads;
    }
  }
  set_num_threads(0);
  EXPECT_THROW(set_num_threads(-1), Error);
  EXPECT_GE(num_threads(), 1);
}

TEST(Threads, CallersDoNotDisturbEachOther) {
  set_num_threads(2);
  Memory src(Layout("B KV N H D", big_geometry()), 5);
  Memory dst(Layout("B KV H N D", big_geometry()));
  Memory want = dst;
  convert_blocks(src.cache(), want.cache(), reversed_pairs());
  const Cache from = src.cache();
  const Cache to = dst.cache();
  std::vector<std::thread> callers;
  for (std::int64_t t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      for (int round = 0; round < 3; ++round) {
        for (std::int64_t i = t; i < 16; i += 4) convert_blocks(from, to, std::vector<Pair>{{i, 15 - i}});
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(dst.buffers, want.buffers);
  set_num_threads(0);
}

TEST(Threads, AForkedChildHasAPoolOfItsOwn) {
  cpu::parallel_for(3, 3, [](int) {});
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> sum{0};
    cpu::parallel_for(4, 4, [&](int i) { sum += i; });
    _exit(sum == 6 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(Threads, C93CallersNeverWaitForAPoolThatIsBusy) {
  std::promise<void> entered;
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  std::atomic<bool> first{true};
  std::thread holder([&] {
    cpu::parallel_for(2, 2, [&](int) {
      if (first.exchange(false)) entered.set_value();
      released.wait();
    });
  });
  entered.get_future().wait();  // the pool is taken, and stays so until these return
  std::vector<std::thread> callers;
  std::atomic<int> done{0};
  for (int i = 0; i < 100; ++i) {
    callers.emplace_back([&] { cpu::parallel_for(2, 4, [&](int) { ++done; }); });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(done, 400);
  release.set_value();
  holder.join();
}

TEST(Threads, AJobHasNoMoreThreadsThanItAskedFor) {
  cpu::parallel_for(8, 8, [](int) {});  // the pool has seven workers now
  std::mutex mutex;
  std::set<std::thread::id> seen;
  cpu::parallel_for(2, 64, [&](int) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  EXPECT_LE(seen.size(), 2U);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && !defined(__clang__)
/// The child of a fork has none of the other threads, and none of the locks that they held.
TEST(Threads, AForkedChildMayCallVerbsWhateverOtherThreadsDo) {
  Memory src(Layout("B KV N H D", test::small_geometry()), 5);
  Memory dst(Layout("B KV H N D", test::small_geometry()));
  convert_blocks(src.cache(), dst.cache(), std::vector<Pair>{{0, 0}});
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) {
      Memory to(Layout("B KV H N D", test::small_geometry()));
      convert_blocks(src.cache(), to.cache(), std::vector<Pair>{{0, 0}});  // new caches: recipes are made and dropped
    }
  });
  int failed = 0;
  for (int i = 0; i < 200 && failed == 0; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      Memory to(Layout("B KV H N D", test::small_geometry()));
      _exit(convert_blocks(src.cache(), to.cache(), std::vector<Pair>{{0, 0}}) == 1 ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    failed += WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
  }
  stop = true;
  busy.join();
  EXPECT_EQ(failed, 0);
}
#endif

TEST(Threads, C91WhatIsBoundIsACopyOfTheIds) {
  Memory src(Layout("B KV N H D", test::small_geometry()), 5);
  Memory dst(Layout("B KV H N D", test::small_geometry()));
  Memory want = dst;
  test::convert(src, want, {{1, 2}});
  Plan plan(src.cache(), dst.cache());
  std::vector<Pair> pairs{{1, 2}};
  plan.bind(pairs);
  pairs[0] = {3, 4};
  plan.run();
  EXPECT_EQ(dst.buffers, want.buffers);
}

/// As torch loads it: for the whole process, after us.
TEST(Threads, AComputationUsesTheThreadsOfOpenMP) {
#if defined(__SANITIZE_THREAD__) || defined(__clang__)
  GTEST_SKIP() << "OpenMP's runtime is not built for ThreadSanitizer, which clang builds are for";
#endif
  EXPECT_EQ(cpu::openmp_threads(), 0);
  EXPECT_EQ(cpu::team_threads(), num_threads());
  if (::dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL) == nullptr) GTEST_SKIP() << "no libgomp.so.1 here";
  ASSERT_GE(cpu::openmp_threads(), 1);
  EXPECT_EQ(cpu::team_threads(), cpu::openmp_threads());
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::set<int> indices;
  const auto meet = [&](int index) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    indices.insert(index);
  };
  cpu::run_team(3, meet);
  EXPECT_EQ(indices.size(), threads.size());
  EXPECT_TRUE(indices.contains(0));
  EXPECT_TRUE(threads.contains(std::this_thread::get_id()));
  const std::set<std::thread::id> lent = threads;
  cpu::run_team(3, meet);
  EXPECT_EQ(threads, lent) << "the runtime's threads are kept";

  set_num_threads(2);
  EXPECT_EQ(cpu::team_threads(), 2);
  set_num_threads(0);
  EXPECT_EQ(in_child([&] {
              std::atomic<int> calls{0};
              cpu::run_team(2, [&](int) { ++calls; });
              return cpu::openmp_threads() == 0 && calls == 2 ? 0 : 1;
            }),
            0)
      << "a forked child has none of them";
}

/// A child of a process whose OpenMP, torch's, was busy before anybody attended: its threads are not the child's.
TEST(Threads, AForkedChildDoesWithoutOpenMP) {
#if defined(__SANITIZE_THREAD__) || defined(__clang__)
  GTEST_SKIP() << "OpenMP's runtime is not built for ThreadSanitizer, which clang builds are for";
#endif
  void* library = ::dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) GTEST_SKIP() << "no libgomp.so.1 here";
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  const auto parallel = reinterpret_cast<Parallel>(::dlsym(library, "GOMP_parallel"));
  parallel([](void*) {}, nullptr, 2, 0);
  EXPECT_EQ(in_child([] {
              ::alarm(20);
              std::atomic<int> calls{0};
              cpu::run_team(2, [&](int) { ++calls; });
              return calls == 2 && cpu::openmp_threads() == 0 ? 0 : 1;
            }),
            0);
}

}  // namespace
}  // namespace kvstride
