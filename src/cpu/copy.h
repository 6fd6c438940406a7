// SPDX-License-Identifier: Apache-2.0
// CPU loops of a plan: copies, casts, zeroing.
#pragma once

#include <cstddef>

#include "plan/recipe.h"

namespace kvstride::cpu {

constexpr std::int64_t kLine = 64;  ///< bytes of a cache line

/// For every index of the loops (outermost first): `run` bytes from src to dst. The two do not overlap. `stream`:
/// write past the caches where whole lines are written; then call fence() before anyone else reads.
void copy(std::byte* dst, const std::byte* src, const plan::Loop* loops, std::size_t num_loops, std::int64_t run,
          bool stream);
/// Orders streamed stores before what follows.
void fence();
/// The same for single elements whose values are converted; `head` is where the loops' count of heads starts.
void cast(std::byte* dst, const std::byte* src, const plan::Loop* loops, std::size_t num_loops, const plan::Cast& how,
          std::int64_t head, bool stream);
/// Zeroes `run` bytes at dst for every index of the loops (their src is not used).
void zero(std::byte* dst, const plan::Loop* loops, std::size_t num_loops, std::int64_t run);

}  // namespace kvstride::cpu
