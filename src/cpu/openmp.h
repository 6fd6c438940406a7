// SPDX-License-Identifier: Apache-2.0
// The threads of an OpenMP runtime that this process has already.
#pragma once

#include <functional>

namespace kvstride::cpu {

/// Threads that OpenMP would give a call of this thread; 0 where the process has no OpenMP runtime, has been forked
/// since it was looked for, or KVSTRIDE_OPENMP is 0.
int openmp_threads();

/// Calls `work(i)` for each i below the number of threads that come, at most `threads`, one of them the caller, and
/// waits. Only where openmp_threads() is not 0. `work` must not throw and must not rely on how many come.
void on_openmp(int threads, const std::function<void(int)>& work);

}  // namespace kvstride::cpu
