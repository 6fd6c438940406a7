// SPDX-License-Identifier: Apache-2.0
// A small pool of threads that wait for work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

namespace kvstride::cpu {

/// Calls `work(i)` for i from 0 to count − 1, on the calling thread and `threads` − 1 of the pool, and waits. Where
/// another call is using the pool, or after a fork in a child whose parent had one, everything runs on the calling
/// thread or on a new pool: callers never wait for each other. `work` must not throw.
void parallel_for(int threads, int count, const std::function<void(int)>& work);

/// Threads that a call which writes so many bytes is worth: at most num_threads(), at least one.
int threads_for(std::int64_t bytes);

/// Calls `use(i)` for i from 0 to count − 1, on several threads where so many bytes are worth it.
template <class Use>
void for_each_in_parallel(std::int64_t bytes, std::int64_t count, const Use& use) {
  const int threads = threads_for(bytes);
  const auto parts = static_cast<int>(std::min<std::int64_t>(count, threads == 1 ? 1 : 4 * threads));
  const auto part = [&](int number) {
    for (std::int64_t i = count * number / parts; i < count * (number + 1) / parts; ++i) use(i);
  };
  if (parts == 1) return part(0);
  parallel_for(threads, parts, part);
}

/// Threads for a computation: OpenMP's where the process has them and no number was set, otherwise num_threads().
int team_threads();

/// Calls `work(i)` once for each i below `threads` or, where fewer threads come, below their number; waits. On OpenMP's
/// threads where the process has them. For computations of the engine's own thread: copies use parallel_for(), whose
/// threads do not stay awake.
void run_team(int threads, const std::function<void(int)>& work);

}  // namespace kvstride::cpu
