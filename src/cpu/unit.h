// SPDX-License-Identifier: Apache-2.0
// How element copies are cut into units that fit the first cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/copy.h"

namespace kvstride::cpu {

constexpr std::size_t kMaxLoops = 16;
constexpr std::int64_t kUnitBytes = 8192;

/// Bytes that fit a register: a run of so many is an element, which can be part of a tile.
constexpr bool is_element(std::int64_t bytes) {
  return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16;
}

/// Loops cut in two: `outer` steps from unit to unit, `inner` moves one unit. A unit is gathered in a buffer in the
/// destination's order, without its gaps, and then written out in `flush` loops of whole `flush_run`s; where that would
/// not make whole lines the unit goes straight to its place. While a unit is moved, the next one's lines are asked for.
///
/// A cast first converts a unit's source, in `fetch` loops of whole `fetch_run`s, to a staging buffer in the source's
/// order; the unit is then moved from there.
struct Unit {
  plan::Loop outer[kMaxLoops + 2];
  std::size_t num_outer = 0;
  plan::Loop inner[kMaxLoops];  ///< dst counts bytes of the buffer, or of the destination if not buffered
  std::size_t num_inner = 0;    ///< without those of the tile
  plan::Loop along_src;         ///< of the tile: steps by one element in the source …
  plan::Loop along_dst;         ///< … and in the destination; extent 0 where there is no tile
  bool buffered = false;
  plan::Loop flush[kMaxLoops];  ///< buffer to destination
  std::size_t num_flush = 0;
  std::int64_t flush_run = 0;
  plan::Loop fetch[kMaxLoops];  ///< source to staging buffer
  std::size_t num_fetch = 0;
  std::int64_t fetch_run = 0;                  ///< elements
  bool same_order = false;                     ///< staging and buffer would hold the same: nothing to move
  std::int32_t lines[kUnitBytes / kLine * 2];  ///< byte offsets of the source lines of a unit, ascending
  std::size_t num_lines = 0;

  /// `item` bytes move together on both sides; a cast makes them of `src_item` bytes (0: no cast). `stream`: the
  /// destination is written past the caches.
  Unit(const plan::Loop* loops, std::size_t num_loops, std::int64_t item, std::int64_t src_item, bool stream);
};

/// Puts loops around rows of `run` bytes in order: by the destination, but so that 64 KiB that lie together in the
/// source are read together. At most kMaxLoops.
void order_rows(plan::Loop* loops, std::size_t num_loops, std::int64_t run);

}  // namespace kvstride::cpu
