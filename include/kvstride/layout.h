// SPDX-License-Identifier: Apache-2.0
// A layout: planes × modes, a map (plane, layer, block, token, head, dim) → (tensor, byte offset).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvstride/geometry.h"
#include "kvstride/order.h"

namespace kvstride {

/// One linear piece of an axis: index i → ((i % modulus) / divisor) × stride. extent = modulus / divisor.
struct Mode {
  Axis axis;
  std::int64_t modulus;
  std::int64_t divisor;
  std::int64_t extent;
  std::int64_t stride;  ///< bytes
  bool operator==(const Mode&) const = default;
};

/// One kind of element (`key`, `value`, `latent`, `key_scale` …).
struct Plane {
  std::string name;
  DType dtype;
  int part = 0;             ///< which tensor of a layer
  std::int64_t base = 0;    ///< byte of element (0, 0, 0, 0, 0)
  std::vector<Mode> modes;  ///< outermost first, as the order has them
  std::array<std::int64_t, kNumAxes> extents{1, 1, 1, 1, 1};
  bool has_head = false;  ///< the order gives it an H, of whatever length: a sharded plane

  std::int64_t extent(Axis axis) const { return extents[static_cast<std::size_t>(axis)]; }
  /// Planes without H are replicated over tensor-parallel ranks, but `state…` planes are raw.
  bool raw() const { return !has_head && name.rfind("state", 0) == 0; }
  /// The modes of one axis with length-1 modes dropped and mergeable ones merged, largest divisor first.
  std::vector<Mode> merged(Axis axis) const;
  /// Bytes that `index` of `axis` adds to the address.
  std::int64_t axis_offset(Axis axis, std::int64_t index) const;
};

/// Where an element lies.
struct Location {
  std::int64_t tensor;
  std::int64_t byte;
  bool operator==(const Location&) const = default;
};

/// Element index [layer, block, token, head, dim].
using Index = std::array<std::int64_t, kNumAxes>;

/// Whether elements may share bytes: only in memory that is read and never written (an expanded tensor).
enum class Overlap { kRefused, kAllowed };

/// An order with its sizes. Immutable; safe to share between threads.
///
/// Example: `Layout("B KV N H D", {.num_blocks = 8, .block_size = 16, .num_kv_heads = 4, .head_size = 64})`.
class Layout {
 public:
  /// Throws Error(kLayout): splits that do not multiply, members of unequal length, overlapping elements, sizes
  /// whose bytes exceed 2^62, symbols without a value.
  Layout(Order order, Geometry geometry, Overlap overlap = Overlap::kRefused);
  Layout(std::string_view order, Geometry geometry, Overlap overlap = Overlap::kRefused);

  const Order& order() const noexcept { return order_; }
  const Geometry& geometry() const noexcept { return geometry_; }
  const std::vector<Plane>& planes() const noexcept { return planes_; }
  /// The plane called `name`; throws Error(kLayout) that lists the names.
  const Plane& plane(std::string_view name) const;
  const Plane* find_plane(std::string_view name) const noexcept;

  Overlap overlap() const noexcept { return overlap_; }
  /// L is in the order: one tensor holds all layers.
  bool layered() const noexcept { return layered_; }
  std::int64_t num_parts() const noexcept { return static_cast<std::int64_t>(part_bytes_.size()); }
  /// Parts, times layers where L is not in the order. Tensor of a plane: layer × parts + part.
  std::int64_t num_tensors() const noexcept;
  /// Bytes of the largest tensor, padding included.
  std::int64_t num_bytes() const noexcept;
  /// Bytes of tensor `part` of a layer.
  std::int64_t part_bytes(std::int64_t part) const;

  /// Throws Error(kBlockIndex) where an index is outside its plane.
  Location offset(std::string_view plane, const Index& index) const;
  Location offset(const Plane& plane, const Index& index) const;

  /// Shape of the natural tensor of `part`: one dimension a term, KV as 2, other members as one flat dimension
  /// of elements (of bytes where their dtypes differ).
  std::vector<std::int64_t> shape(std::int64_t part = 0) const;
  /// Strides of the natural tensor, in elements of `natural_item_size`.
  std::vector<std::int64_t> strides(std::int64_t part = 0) const;
  /// Item size that shape() and strides() count in: the planes' common one, else 1.
  std::int64_t natural_item_size(std::int64_t part = 0) const;

  /// Canonical text: extents given, length-1 modes dropped (a length-1 H stays), mergeable splits merged,
  /// outermost first, `@` only where not natural. Parsing it with the same geometry gives an equal layout.
  std::string str() const;
  /// Equal addresses of every element.
  bool operator==(const Layout& other) const;

 private:
  Order order_;
  Geometry geometry_;
  std::vector<Plane> planes_;
  std::vector<std::int64_t> part_bytes_;
  bool layered_ = false;
  Overlap overlap_ = Overlap::kRefused;
};

/// The order of a registry name such as `vllm/flashinfer-nhd`, or `name_or_order` parsed.
Order order_of(std::string_view name_or_order);

/// `kv.layout`: `name_or_order` is a registry name such as `vllm/flashinfer-nhd`, or an order.
Layout make_layout(std::string_view name_or_order, const Geometry& geometry);

}  // namespace kvstride
