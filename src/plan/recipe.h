// SPDX-License-Identifier: Apache-2.0
// What a conversion is before block ids are known: checked layouts, and strands of coalesced loops.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvstride/plan.h"

namespace kvstride::plan {

/// `extent` steps of `src` and `dst` bytes and, where each head has its scale, of `head` heads.
struct Loop {
  std::int64_t extent;
  std::int64_t src;
  std::int64_t dst;
  std::int64_t head = 0;
  bool operator==(const Loop&) const = default;
};

/// How values change on the way; none for plain copies.
struct Cast {
  DType src{};
  DType dst{};
  bool active = false;
  std::vector<float> scales{1.0F};  ///< one, or one for each head that the loops count from 0
  bool by_head() const { return scales.size() > 1; }
  float scale(std::int64_t head) const { return scales[by_head() ? static_cast<std::size_t>(head) : 0]; }
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
  /// Bytes from a block to the one that is farthest by one step of a mode.
  std::int64_t largest_step() const;
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
  /// All loops go outside the entries: inside are runs only, so that those of neighbouring blocks can meet.
  bool runs_only = false;
  std::int64_t group_bytes = 0;  ///< that one base of one entry writes
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
  const char* ids_name = "pairs";   ///< for messages: the argument with the block ids …
  const char* src_name = "source";  ///< … and what they are ids of
  const char* dst_name = "destination";
  bool operator==(const BuildOptions&) const = default;
};

/// One side's layout and, if there is memory, its tensors.
struct End {
  const Layout* layout;
  const Cache* cache;  ///< null for a layout without memory
};

inline End end_of(const Cache& cache) { return {&cache.layout(), &cache}; }

/// Both layouts, what was asked for, and the nests. Immutable but for nests, which are built when they are first
/// needed. Safe to share between threads. Neither copied nor moved: nests point into its layouts.
class Recipe {
 public:
  Recipe(const Recipe&) = delete;
  Recipe& operator=(const Recipe&) = delete;
  /// Throws Error for everything that is wrong whatever the ids are.
  Recipe(const char* verb, End src, End dst, BuildOptions options);

  /// The strands for entries of `tokens` tokens that start at these tokens of a block.
  const Nest& nest(std::int64_t tokens, std::int64_t src_token, std::int64_t dst_token) const;

  const char* verb() const { return verb_; }
  const BuildOptions& options() const { return options_; }
  const Layout& src() const { return src_; }
  const Layout& dst() const { return dst_; }
  /// Blocks that ids of a side may name.
  std::int64_t src_blocks() const { return src_blocks_; }
  std::int64_t dst_blocks() const { return dst_blocks_; }
  const std::vector<PlanePair>& planes() const { return planes_; }
  const std::vector<std::byte*>& src_tensors() const { return src_tensors_; }
  const std::vector<std::byte*>& dst_tensors() const { return dst_tensors_; }
  bool has_memory() const { return has_memory_; }
  bool read_only() const { return read_only_; }
  Device src_device() const { return src_device_; }
  Device dst_device() const { return dst_device_; }
  bool on_host() const { return src_device_.on_host() && dst_device_.on_host(); }
  /// Whether the memory of the two sides has no byte in common, whatever the ids are.
  bool apart() const { return apart_; }
  /// Pieces that the nests hold. Read with kept_lock() held.
  std::size_t weight() const { return weight_; }

 private:
  void build_strands(Nest& nest) const;

  const char* verb_;
  Layout src_;
  Layout dst_;
  std::vector<std::byte*> src_tensors_;
  std::vector<std::byte*> dst_tensors_;
  bool has_memory_ = false;
  bool read_only_ = false;
  Device src_device_;
  Device dst_device_;
  bool apart_ = false;
  BuildOptions options_;
  std::vector<PlanePair> planes_;
  std::int64_t src_blocks_ = 1;
  std::int64_t dst_blocks_ = 1;
  std::int64_t src_first_layer_ = 0;
  std::int64_t dst_first_layer_ = 0;
  std::int64_t layers_ = 1;
  std::int64_t src_period_ = 1;
  std::int64_t dst_period_ = 1;
  mutable std::map<std::array<std::int64_t, 3>, Nest> nests_;  // by tokens and phases
  mutable std::size_t weight_ = 0;
};

/// The recipe for two caches, made now or kept from an earlier call: caches never change, so their ids name them.
/// `check` throws where the two do not suit each other; it is asked once a recipe.
std::shared_ptr<const Recipe> recipe_for(const char* verb, const Cache& src, const Cache& dst, BuildOptions options,
                                         void (*check)(const Cache&, const Cache&) = nullptr);

/// Puts loops in order, joins what is contiguous into the run; casts (`join` false) join nothing.
void coalesce(std::vector<Loop>& loops, std::int64_t& run, bool join);
/// Joins bases whose runs touch on both sides, and splits by run; repeated until nothing changes.
std::vector<Strand> join_strands(std::vector<Strand> strands);

/// (offset, loops) pieces that cover `count` indices of an axis on both sides; loops from the outermost digit inwards.
struct Piece {
  std::int64_t src;
  std::int64_t dst;
  std::vector<Loop> loops;
  std::int64_t head = 0;  ///< index of the first
};
std::vector<Piece> refine(const std::vector<Mode>& src, std::int64_t src_first, const std::vector<Mode>& dst,
                          std::int64_t dst_first, std::int64_t count);

std::int64_t iterations(const Loop* loops, std::size_t num_loops);

}  // namespace kvstride::plan
