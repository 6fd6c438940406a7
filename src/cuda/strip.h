// SPDX-License-Identifier: Apache-2.0
// Strands with absolute addresses, and what a transfer makes of them: smaller groups, packed copies.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/table.h"
#include "plan/program.h"

namespace kvstride::cuda {

/// The same loops for every start and entry. A group is one start of one entry.
struct Strip {
  std::vector<plan::Loop> loops;  ///< outermost first, by the destination
  std::int64_t run = 0;           ///< bytes; an element of the destination for casts
  plan::Cast cast;
  std::vector<Start> starts;
  std::vector<Step> steps;  ///< one an entry
  /// Entries that only the device knows: their number; then `steps` is empty.
  std::int64_t num_ids = 0;
  plan::SlotOffset src_slot;  ///< of those ids
  plan::SlotOffset dst_slot;

  std::int64_t entries() const { return num_ids > 0 ? num_ids : static_cast<std::int64_t>(steps.size()); }
  std::int64_t groups() const { return entries() * static_cast<std::int64_t>(starts.size()); }
  std::int64_t group_bytes() const { return plan::iterations(loops.data(), loops.size()) * run; }
  std::int64_t bytes() const { return group_bytes() * groups(); }
};

/// What a program does, strand by strand; all of it, or one nest.
std::vector<Strip> strips_of(const plan::Program& program);
std::vector<Strip> strips_of(const plan::Bound& bound, const plan::Program& program);

/// Outer loops become starts until a group has at most `bytes`, or only one step of its loops is left.
void split_groups(Strip& strip, std::int64_t bytes);

/// The same bytes in strips whose groups have at most so many, runs cut where they must be. No casts.
std::vector<Strip> split_runs(std::vector<Strip> strips, std::int64_t bytes);

/// Some of a strip's groups: so many starts, so many entries.
Strip part_of(const Strip& strip, std::int64_t first_start, std::int64_t num_starts, std::int64_t first_entry,
              std::int64_t num_entries);

/// A strip in two halves, through packed memory: the groups one after another, each in the order in which it lies on
/// one of the sides, without gaps.
struct Packed {
  Strip in;            ///< source to the packed memory
  Strip out;           ///< packed memory to the destination
  std::int64_t bytes;  ///< of the packed memory
};
/// The packed memory is written at `in` and read at `out_of`: another memory where it is copied in between.
/// `by_source`: it has the source's order and type; otherwise the destination's.
Packed pack(const Strip& strip, std::int64_t in, std::int64_t out_of, bool by_source);

}  // namespace kvstride::cuda
