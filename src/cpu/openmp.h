// SPDX-License-Identifier: Apache-2.0
// The threads of an OpenMP runtime that this process has already.
#pragma once

#include <functional>

namespace kvstride::cpu {

/// Threads that OpenMP would give a call of this thread; 0 where the process has no OpenMP runtime, was forked after
/// this library was loaded, or KVSTRIDE_OPENMP is 0.
int openmp_threads();

/// Calls `work(i)` for each i below the number of threads that come, one of them the caller, and waits. They are at
/// most `threads` and at most openmp_threads(): GCC's runtime ends the process where the system refuses it one more.
/// Only where openmp_threads() is not 0. `work` must not throw and must not rely on how many come.
void on_openmp(int threads, const std::function<void(int)>& work);

}  // namespace kvstride::cpu
