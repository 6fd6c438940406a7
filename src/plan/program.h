// SPDX-License-Identifier: Apache-2.0
// Inside a plan: strands of coalesced loops, and the entries (slots) that they are run for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvstride/plan.h"

namespace kvstride::plan {

/// `extent` steps of `src` and `dst` bytes.
struct Loop {
  std::int64_t extent;
  std::int64_t src;
  std::int64_t dst;
  bool operator==(const Loop&) const = default;
};

/// How values change on the way; none for plain copies.
struct Cast {
  DType src{};
  DType dst{};
  float scale = 1.0F;
  bool active = false;
  bool operator==(const Cast&) const = default;
};

/// One side of a copy: which tensor (0 and an absolute address where the plan has memory), and where in it.
struct Side {
  std::int64_t tensor;
  std::int64_t byte;
  bool operator==(const Side&) const = default;
};

struct Base {
  Side src;
  Side dst;
};

/// Bytes that a slot (block × block_size + token) adds to an address: its block, and its place along the outermost
/// token mode. What lies below that mode is in the loops.
struct SlotOffset {
  std::vector<Mode> block;
  std::vector<Mode> token;
  std::int64_t block_size = 1;
  std::int64_t operator()(std::int64_t slot) const;
  bool operator==(const SlotOffset&) const = default;
};

/// The same loops for several bases (planes, layers). A copy moves `run` bytes; a cast one element.
struct Strand {
  std::vector<Loop> loops;  ///< outermost first by destination stride
  std::int64_t run = 0;
  Cast cast;
  SlotOffset src_slot;
  SlotOffset dst_slot;
  std::vector<Base> bases;
};

/// Source and destination slot that an entry starts at.
struct Entry {
  std::int64_t src;
  std::int64_t dst;
};

/// Strands for entries of `tokens` tokens that start at given tokens of a period.
struct Nest {
  std::int64_t tokens;
  std::int64_t src_phase;
  std::int64_t dst_phase;
  std::vector<Strand> strands;
  std::vector<Entry> entries;
  std::int64_t entry_bytes = 0;  ///< that one entry writes
};

/// One plane on both sides, with everything that does not depend on tokens.
struct PlanePair {
  const Plane* src;
  const Plane* dst;
  RangePair heads;
  bool whole_only;  ///< raw, or without tokens: moves with whole blocks only
};

struct BuildOptions {
  PlanOptions plan;
  std::int64_t src_first_layer = 0;
  std::int64_t dst_first_layer = 0;
  std::optional<std::int64_t> num_layers;
  std::vector<std::string> planes;  ///< empty: all
  bool merge = true;                ///< join neighbouring entries
  const char* ids_name = "pairs";   ///< for messages: the argument with the block ids …
  const char* src_name = "source";  ///< … and what they are ids of
  const char* dst_name = "destination";
};

/// One side's layout and, if there is memory, its tensors.
struct End {
  const Layout* layout;
  const Cache* cache;  ///< null for a layout without memory
};

/// Both layouts, the nests and what they are bound to. Not copyable: nests point into its layouts.
class Program {
 public:
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  Program(const char* verb, End src, End dst, BuildOptions options);

  void bind(std::span<const Pair> pairs);
  void bind_tokens(std::span<const std::int64_t> src_blocks, std::span<const std::int64_t> dst_blocks,
                   RangePair tokens);
  void bind_slots(std::span<const std::int64_t> src_slots, std::span<const std::int64_t> dst_slots);

  std::int64_t num_copies() const;
  std::int64_t num_bytes() const;
  std::map<std::int64_t, std::int64_t> sizes() const;
  /// Whether so much is written that it should go past the caches.
  bool streams() const;

  /// Throws where bytes that are read meet bytes that are written, or the destination is read-only.
  void check_memory() const;
  /// Runs all entries of all nests; no checks.
  void run() const;

  const std::vector<Nest>& nests() const { return nests_; }
  const Layout& src() const { return *src_; }
  const Layout& dst() const { return *dst_; }
  const char* verb() const { return verb_; }

 private:
  Nest& nest_for(std::int64_t tokens, std::int64_t src_token, std::int64_t dst_token);
  void build_strands(Nest& nest) const;
  void add(std::int64_t tokens, std::int64_t src_slot, std::int64_t dst_slot);
  void check_block(const char* what, std::size_t at, std::int64_t id, const Layout& layout, const char* side) const;
  void clear();
  void run_part(std::int64_t begin, std::int64_t end, bool stream) const;

  const char* verb_;
  std::optional<Layout> own_src_;
  std::optional<Layout> own_dst_;
  const Layout* src_;
  const Layout* dst_;
  std::vector<std::byte*> src_tensors_;
  std::vector<std::byte*> dst_tensors_;
  bool has_memory_ = false;
  bool read_only_ = false;
  BuildOptions options_;
  std::vector<PlanePair> planes_;
  std::int64_t layers_ = 1;
  std::int64_t src_period_ = 1;
  std::int64_t dst_period_ = 1;
  std::vector<Nest> nests_;
};

/// Calls `sink(src, dst, loops, num_loops, strand, length)` for every group of copies of a nest. Neighbouring
/// entries whose runs touch on both sides are one copy where the strand has no inner loops.
template <class Sink>
void for_each_copy(const Nest& nest, bool merge, const Sink& sink);

/// Puts loops in order, joins what is contiguous into the run; casts (`join` false) join nothing.
void coalesce(std::vector<Loop>& loops, std::int64_t& run, bool join);
/// Joins bases whose runs touch on both sides, and splits by run; repeated until nothing changes.
std::vector<Strand> join_strands(std::vector<Strand> strands);

/// (offset, loops) pieces that cover `count` indices of an axis on both sides.
struct Piece {
  std::int64_t src;
  std::int64_t dst;
  std::vector<Loop> loops;
};
std::vector<Piece> refine(const std::vector<Mode>& src, std::int64_t src_first, const std::vector<Mode>& dst,
                          std::int64_t dst_first, std::int64_t count);

// --- implementation of the template ---

template <class Sink>
void for_each_copy(const Nest& nest, bool merge, const Sink& sink) {
  for (const Strand& strand : nest.strands) {
    // Loops outside the blocks (layers of one tensor, heads far apart) go outside the entries, so that runs of
    // neighbouring blocks meet.
    std::size_t outer = 0;
    const auto step = [](const SlotOffset& slot) {
      std::int64_t largest = 0;
      for (const Mode& mode : slot.block) largest = std::max(largest, mode.stride);
      return largest;
    };
    const std::int64_t src_step = step(strand.src_slot);
    const std::int64_t dst_step = step(strand.dst_slot);
    while (outer < strand.loops.size() && strand.loops[outer].src > src_step && strand.loops[outer].dst > dst_step) {
      ++outer;
    }
    const bool runs_only = outer == strand.loops.size() && !strand.cast.active && merge;
    if (!runs_only) {
      for (const Entry& entry : nest.entries) {
        const std::int64_t src = strand.src_slot(entry.src);
        const std::int64_t dst = strand.dst_slot(entry.dst);
        for (const Base& base : strand.bases) {
          sink(Side{base.src.tensor, base.src.byte + src}, Side{base.dst.tensor, base.dst.byte + dst},
               strand.loops.data(), strand.loops.size(), strand, strand.run);
        }
      }
      continue;
    }
    std::vector<std::int64_t> at(outer, 0);
    for (const Base& base : strand.bases) {
      std::fill(at.begin(), at.end(), 0);
      while (true) {
        std::int64_t src0 = base.src.byte;
        std::int64_t dst0 = base.dst.byte;
        for (std::size_t i = 0; i < outer; ++i) {
          src0 += at[i] * strand.loops[i].src;
          dst0 += at[i] * strand.loops[i].dst;
        }
        std::int64_t length = 0;
        std::int64_t src = 0;
        std::int64_t dst = 0;
        for (const Entry& entry : nest.entries) {
          const std::int64_t s = src0 + strand.src_slot(entry.src);
          const std::int64_t d = dst0 + strand.dst_slot(entry.dst);
          if (length > 0 && s == src + length && d == dst + length) {
            length += strand.run;
            continue;
          }
          if (length > 0) {
            sink(Side{base.src.tensor, src}, Side{base.dst.tensor, dst}, nullptr, std::size_t{0}, strand, length);
          }
          src = s;
          dst = d;
          length = strand.run;
        }
        if (length > 0) {
          sink(Side{base.src.tensor, src}, Side{base.dst.tensor, dst}, nullptr, std::size_t{0}, strand, length);
        }
        std::size_t i = outer;
        while (i > 0 && ++at[i - 1] == strand.loops[i - 1].extent) at[--i] = 0;
        if (i == 0) break;
      }
    }
  }
}

}  // namespace kvstride::plan
