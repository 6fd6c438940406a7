// SPDX-License-Identifier: Apache-2.0
// How many threads the verbs may use.
#pragma once

namespace kvstride {

/// Threads that large calls are split over, the calling one included: KVSTRIDE_NUM_THREADS, by default the cores that
/// the process may run on. Small calls stay on the calling thread. Safe to call at any time from any thread.
int num_threads();
/// Sets it for calls that start later; 0 goes back to the default. Throws Error(kArgument) for a number below 0 or
/// above 1024.
void set_num_threads(int threads);

}  // namespace kvstride
