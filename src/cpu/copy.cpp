// SPDX-License-Identifier: Apache-2.0
// Copies of runs and of single elements over nested loops.
#include "cpu/copy.h"

#include <algorithm>
#include <cstring>

namespace kvstride::cpu {
namespace {

using plan::Loop;

/// Runs whose length the compiler knows; elements may be unaligned.
template <std::size_t Bytes>
void innermost_fixed(std::byte* dst, const std::byte* src, const Loop& loop) {
  for (std::int64_t i = 0; i < loop.extent; ++i) {
    std::memcpy(dst + i * loop.dst, src + i * loop.src, Bytes);
  }
}

void innermost(std::byte* dst, const std::byte* src, const Loop& loop, std::int64_t run) {
  switch (run) {
    case 1: return innermost_fixed<1>(dst, src, loop);
    case 2: return innermost_fixed<2>(dst, src, loop);
    case 4: return innermost_fixed<4>(dst, src, loop);
    case 8: return innermost_fixed<8>(dst, src, loop);
    case 16: return innermost_fixed<16>(dst, src, loop);
    case 32: return innermost_fixed<32>(dst, src, loop);
    case 64: return innermost_fixed<64>(dst, src, loop);
    default:
      for (std::int64_t i = 0; i < loop.extent; ++i) {
        std::memcpy(dst + i * loop.dst, src + i * loop.src, static_cast<std::size_t>(run));
      }
  }
}

/// Two loops in tiles, so that neither side walks far across cache lines before it comes back.
void tiled(std::byte* dst, const std::byte* src, const Loop& outer, const Loop& inner, std::int64_t run) {
  constexpr std::int64_t kTile = 32;
  for (std::int64_t o = 0; o < outer.extent; o += kTile) {
    const std::int64_t rows = std::min(kTile, outer.extent - o);
    for (std::int64_t i = 0; i < inner.extent; i += kTile) {
      const Loop part{std::min(kTile, inner.extent - i), inner.src, inner.dst};
      for (std::int64_t r = 0; r < rows; ++r) {
        innermost(dst + (o + r) * outer.dst + i * inner.dst, src + (o + r) * outer.src + i * inner.src, part, run);
      }
    }
  }
}

}  // namespace

void copy(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, std::int64_t run) {
  if (num_loops == 0) {
    std::memcpy(dst, src, static_cast<std::size_t>(run));
  } else if (num_loops == 1) {
    innermost(dst, src, loops[0], run);
  } else if (num_loops == 2 && run <= 16) {
    tiled(dst, src, loops[0], loops[1], run);
  } else {
    for (std::int64_t i = 0; i < loops[0].extent; ++i) {
      copy(dst + i * loops[0].dst, src + i * loops[0].src, loops + 1, num_loops - 1, run);
    }
  }
}

void zero(std::byte* dst, const Loop* loops, std::size_t num_loops, std::int64_t run) {
  if (num_loops == 0) {
    std::memset(dst, 0, static_cast<std::size_t>(run));
    return;
  }
  for (std::int64_t i = 0; i < loops[0].extent; ++i) zero(dst + i * loops[0].dst, loops + 1, num_loops - 1, run);
}

}  // namespace kvstride::cpu
