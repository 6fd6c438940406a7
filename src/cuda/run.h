// SPDX-License-Identifier: Apache-2.0
// Programs on device memory: what src/plan calls where a cache lies on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "kvstride/device.h"
#include "plan/program.h"

namespace kvstride::cuda {

/// Runs programs of the same two places, at least one of them a device, as one.
void run(std::initializer_list<const plan::Program*> programs, const Stream& stream);
/// The same for a thread in the background: on kvstride's own stream, done when it returns. What earlier work found
/// wrong with its ids is left to the verb that comes next.
void run_here(const plan::Program& program);
/// Waits for what is on kvstride's own stream of a device; false where that cannot be known. For who has seen
/// run_here() fail, before the host's memory is used for something else.
bool settle(Device device) noexcept;
/// Zeroes what a program of one device would write.
void zero(const plan::Program& program, const Stream& stream);
/// A program inside one cache whose destinations may be sources: all sources are read before any is overwritten.
void copy_inside(const plan::Program& program, const Stream& stream);

/// `count` pieces of `bytes` bytes, `stride` (a multiple of 16) apart, each in granules of kGranule bytes.
struct Pieces {
  std::int64_t bytes;
  std::int64_t stride;
  std::int64_t count;
};
/// The pieces that `program` makes at `nominal`, a program inside one device, are made in a buffer instead; `sums` gets
/// the XXH3-64 of each granule, piece by piece. Done when it returns.
void checksums(plan::Program& program, const std::byte* nominal, const Pieces& pieces, std::span<std::uint64_t> sums,
               const Stream& stream);

}  // namespace kvstride::cuda
