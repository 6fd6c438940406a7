// SPDX-License-Identifier: Apache-2.0
// What a tensor's shape and strides can mean, and binding a tensor to a named layout.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvstride/layout.h"
#include "kvstride/registry.h"

namespace kvstride {

/// Shape and strides of one tensor.
struct TensorShape {
  std::vector<std::int64_t> shape;
  /// In elements; empty means C-contiguous.
  std::vector<std::int64_t> strides;
  /// Bytes of an element; 0 where it is not known (then that of the hinted dtype).
  std::int64_t item_size = 0;
};

/// What the caller knows. Everything that is given must agree with a reading.
struct Hints {
  std::optional<std::int64_t> num_layers;
  std::optional<std::int64_t> num_blocks;
  std::optional<std::int64_t> block_size;
  std::optional<std::int64_t> num_kv_heads;
  std::optional<std::int64_t> head_size;
  std::optional<std::int64_t> value_head_size;
  std::optional<DType> dtype;
  std::map<std::string, std::int64_t> symbols;

  static Hints from(const Geometry& geometry);
  std::optional<std::int64_t> get(Axis axis) const;
};

/// A geometry and an address for every element.
struct Reading {
  std::string name;                ///< first row that reads so
  std::vector<std::string> names;  ///< all rows that read so
  std::string order;               ///< the first row's order
  Layout layout;                   ///< with the tensor's own strides
  std::string assumes;             ///< "strided": opaque layouts of the same shape are not considered
};

/// All readings of one tensor (`parts` of size 1) or of a (key, value) pair of tensors, among the registry rows
/// that are not opaque and, where `among` is not empty, have one of these names (or this engine).
/// Throws Error(kArgument) for a shape that is none, Error(kLayout) for an unknown name in `among`.
std::vector<Reading> candidates(const std::vector<TensorShape>& parts, const Hints& hints,
                                const std::vector<std::string>& among = {});

/// The one reading. Throws Error(kAmbiguous) with each reading and an element whose address differs, or
/// Error(kUnknown) with the shape and what came closest.
Reading detect(const std::vector<TensorShape>& parts, const Hints& hints, const std::vector<std::string>& among = {});

/// An element at which two readings give different addresses.
struct Example {
  std::string plane;
  Index index{};
  Location a{};
  Location b{};
};
/// Nothing where the readings agree on every element that both have.
std::optional<Example> differing_element(const Layout& a, const Layout& b);

/// Layout of tensors that are *said* to have `name_or_order`: shape declared by the engine, natural, natural
/// with neighbours fused, or flat. Outer strides are the tensors' own. `parts` describes one tensor a part;
/// `tensors_per_part` > 1 means one such tensor a layer. Throws Error(kAmbiguous) where two readings of the
/// tensors fit and differ, Error(kLayout) where none fits.
Layout bind_layout(std::string_view name_or_order, const std::vector<TensorShape>& parts, Hints hints,
                   std::int64_t tensors_per_part = 1);
/// The same for a layout whose geometry is known.
Layout bind_layout(const Layout& layout, const std::vector<TensorShape>& parts, std::int64_t tensors_per_part = 1);

/// The bytes of one tensor that a block id owns: block stride and the merged (offset, length) runs of block 0.
struct BlockBytes {
  std::int64_t num_blocks = 0;
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> runs;  ///< a list of runs for each tensor part
  std::vector<std::vector<std::int64_t>> block_offsets;                  ///< strides of the block axis, by part
  bool operator==(const BlockBytes&) const = default;
};
BlockBytes block_bytes(const Layout& layout);

}  // namespace kvstride
