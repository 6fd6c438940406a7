// SPDX-License-Identifier: Apache-2.0
// Programs on device memory: what src/plan calls where a cache lies on a device.
#pragma once

#include <initializer_list>

#include "kvstride/device.h"
#include "plan/program.h"

namespace kvstride::cuda {

/// Runs programs of the same two places, at least one of them a device, as one.
void run(std::initializer_list<const plan::Program*> programs, const Stream& stream);
/// Zeroes what a program of one device would write.
void zero(const plan::Program& program, const Stream& stream);
/// A program inside one cache whose destinations may be sources: all sources are read before any is overwritten.
void copy_inside(const plan::Program& program, const Stream& stream);

}  // namespace kvstride::cuda
