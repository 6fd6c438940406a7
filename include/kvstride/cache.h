// SPDX-License-Identifier: Apache-2.0
// A cache: memory with a layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvstride/device.h"
#include "kvstride/layout.h"

namespace kvstride {

/// Tensors and the layout of their bytes. Holds no memory: the caller keeps it alive. Copies are cheap to share;
/// reading from many threads is safe, verbs that write the same blocks at once are not.
class Cache {
 public:
  /// `tensors[layer × parts + part]` points at the byte that the layout calls 0 and has at least
  /// `layout.part_bytes(part)` bytes. Throws Error(kArgument) for a wrong number of tensors, a null pointer, or
  /// tensors whose elements share bytes (unless the layout allows it and the cache is read-only). All tensors lie on
  /// `device`; whether it is there is asked by the first verb.
  Cache(std::vector<std::byte*> tensors, Layout layout, bool read_only = false, Device device = {});

  const Layout& layout() const noexcept { return layout_; }
  const std::vector<std::byte*>& tensors() const noexcept { return tensors_; }
  bool read_only() const noexcept { return read_only_; }
  Device device() const noexcept { return device_; }
  /// A number that this cache and its copies have, and no other cache in this process.
  std::uint64_t id() const noexcept { return id_; }

 private:
  std::vector<std::byte*> tensors_;
  Layout layout_;
  bool read_only_;
  Device device_;
  std::uint64_t id_;
};

/// A strided view of one plane of one layer. Shape and strides count elements of the plane's dtype.
struct PlaneView {
  DType dtype;
  std::int64_t tensor;       ///< index into Cache::tensors()
  std::int64_t byte_offset;  ///< of element 0
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

/// `[block, token, head, dim]` where each axis is one mode, otherwise split axes become several dimensions
/// (outermost first, in place of their axis) if `allow_split`. An axis without a mode has length 1 and the
/// stride (next inner stride × next inner length). Throws Error(kNotStrided) where an axis is split and
/// `allow_split` is false, or a stride is no whole multiple of the item size; Error(kBlockIndex) for a layer out
/// of range.
PlaneView plane_view(const Layout& layout, std::string_view plane, std::int64_t layer, bool allow_split);

}  // namespace kvstride
