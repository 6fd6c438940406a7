// SPDX-License-Identifier: Apache-2.0
// Walking through what a nest copies for its entries, in whole or a part of the bytes.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <span>

#include "plan/recipe.h"

namespace kvstride::plan {

/// Of all that a nest writes, the bytes from `begin` to `end`, counted in the order of the walk.
struct Part {
  std::int64_t begin = 0;
  std::int64_t end = std::numeric_limits<std::int64_t>::max();
};

/// Calls `sink(src, dst, loops, num_loops, strand, run, start)` for groups of copies: `run` bytes (an element of a
/// cast) for every index of the loops, `start` the group's first byte. Where a strand is runs only, neighbouring
/// entries whose runs touch on both sides are one run, cut to the part; other groups are whole if they have any byte in
/// it, and the sink cuts them.
template <class Sink>
void walk(const Nest& nest, std::span<const Entry> entries, Part part, const Sink& sink) {
  const auto num_entries = static_cast<std::int64_t>(entries.size());
  std::int64_t strand_at = 0;
  for (const Strand& strand : nest.strands) {
    const auto num_bases = static_cast<std::int64_t>(strand.bases.size());
    const std::int64_t strand_bytes = num_entries * num_bases * strand.group_bytes;
    const std::int64_t at = strand_at;
    strand_at += strand_bytes;
    const std::int64_t low = std::clamp<std::int64_t>(part.begin - at, 0, strand_bytes);
    const std::int64_t high = std::clamp<std::int64_t>(part.end - at, 0, strand_bytes);
    if (low >= high) continue;
    if (!strand.runs_only) {
      const std::int64_t last = (high + strand.group_bytes - 1) / strand.group_bytes;
      std::int64_t group = low / strand.group_bytes;
      for (std::int64_t e = group / num_bases; group < last; ++e) {
        const Entry& entry = entries[static_cast<std::size_t>(e)];
        const std::int64_t src = strand.src_slot(entry.src);
        const std::int64_t dst = strand.dst_slot(entry.dst);
        for (std::int64_t b = group % num_bases; b < num_bases && group < last; ++b, ++group) {
          const Base& base = strand.bases[static_cast<std::size_t>(b)];
          sink(Side{base.src.tensor, base.src.byte + src}, Side{base.dst.tensor, base.dst.byte + dst},
               strand.loops.data(), strand.loops.size(), strand, strand.run, at + group * strand.group_bytes);
        }
      }
      continue;
    }
    // Rows: one base at one index of the loops, all entries.
    const std::int64_t row_bytes = num_entries * strand.run;
    for (std::int64_t row = low / row_bytes; row * row_bytes < high; ++row) {
      const std::int64_t begin = std::max<std::int64_t>(low - row * row_bytes, 0);
      const std::int64_t end = std::min(high - row * row_bytes, row_bytes);
      const std::int64_t loops = strand.group_bytes / strand.run;
      const Base& base = strand.bases[static_cast<std::size_t>(row / loops)];
      std::int64_t src0 = base.src.byte;
      std::int64_t dst0 = base.dst.byte;
      std::int64_t index = row % loops;
      for (std::size_t i = strand.loops.size(); i-- > 0; index /= strand.loops[i].extent) {
        src0 += index % strand.loops[i].extent * strand.loops[i].src;
        dst0 += index % strand.loops[i].extent * strand.loops[i].dst;
      }
      std::int64_t src = 0;
      std::int64_t dst = 0;
      std::int64_t length = 0;
      std::int64_t start = 0;
      const auto emit = [&] {
        sink(Side{base.src.tensor, src}, Side{base.dst.tensor, dst}, static_cast<const Loop*>(nullptr), std::size_t{0},
             strand, length, at + row * row_bytes + start);
      };
      for (std::int64_t e = begin / strand.run; e * strand.run < end; ++e) {
        const Entry& entry = entries[static_cast<std::size_t>(e)];
        const std::int64_t from = std::max<std::int64_t>(begin - e * strand.run, 0);
        const std::int64_t to = std::min(end - e * strand.run, strand.run);
        const std::int64_t s = src0 + strand.src_slot(entry.src) + from;
        const std::int64_t d = dst0 + strand.dst_slot(entry.dst) + from;
        if (length > 0 && s == src + length && d == dst + length) {
          length += to - from;
          continue;
        }
        if (length > 0) emit();
        src = s;
        dst = d;
        start = e * strand.run + from;
        length = to - from;
      }
      if (length > 0) emit();
    }
  }
}

}  // namespace kvstride::plan
