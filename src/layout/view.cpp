// SPDX-License-Identifier: Apache-2.0
// Strided views of a plane, and the checks that make memory and layout a cache.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "kvstride/cache.h"
#include "kvstride/error.h"
#include "layout/internal.h"

namespace kvstride {

PlaneView plane_view(const Layout& layout, std::string_view name, std::int64_t layer, bool allow_split) {
  const Plane& plane = layout.plane(name);
  if (layer < 0 || layer >= plane.extent(Axis::kLayer)) {
    throw Error(ErrorCode::kBlockIndex, fmt::format("plane '{}': layer {} is outside the cache (num_layers is {})",
                                                    name, layer, plane.extent(Axis::kLayer)));
  }
  const std::int64_t item = item_size(plane.dtype);
  PlaneView out;
  out.dtype = plane.dtype;
  const Location start = layout.offset(plane, {layer, 0, 0, 0, 0});
  out.tensor = start.tensor;
  out.byte_offset = start.byte;
  std::vector<std::int64_t> bytes;  // strides in bytes, -1 where the axis has no mode
  for (int a = 1; a < kNumAxes; ++a) {
    const Axis axis = static_cast<Axis>(a);
    const std::vector<Mode> modes = plane.merged(axis);
    if (modes.size() > 1 && !allow_split) {
      throw Error(ErrorCode::kNotStrided,
                  fmt::format("plane '{}' of '{}': {} is split into {} strides; cache.plane(layer, \"{}\") gives "
                              "the view with split axes as extra dimensions",
                              name, layout.order().text(), word_of(axis), modes.size(), name));
    }
    for (const Mode& mode : modes) {
      if (mode.stride % item != 0) {
        throw Error(ErrorCode::kNotStrided,
                    fmt::format("plane '{}' of '{}': the stride of {}, {} bytes, is no multiple of the item size {}",
                                name, layout.order().text(), word_of(axis), mode.stride, item));
      }
      out.shape.push_back(mode.extent);
      bytes.push_back(mode.stride);
    }
    if (modes.empty()) {
      out.shape.push_back(1);
      bytes.push_back(-1);
    }
  }
  std::int64_t next = item;  // next inner stride × next inner length
  for (std::size_t i = bytes.size(); i-- > 0;) {
    if (bytes[i] < 0) bytes[i] = next;
    next = bytes[i] * out.shape[i];
  }
  for (const std::int64_t stride : bytes) out.strides.push_back(stride / item);
  return out;
}

Cache::Cache(std::vector<std::byte*> tensors, Layout layout, bool read_only, Device device)
    : tensors_(std::move(tensors)), layout_(std::move(layout)), read_only_(read_only), device_(device) {
  static std::atomic<std::uint64_t> next{1};
  id_ = next.fetch_add(1, std::memory_order_relaxed);
  if (static_cast<std::int64_t>(tensors_.size()) != layout_.num_tensors()) {
    throw Error(ErrorCode::kArgument, fmt::format("cache: {} tensors given, '{}' has {}", tensors_.size(),
                                                  layout_.order().text(), layout_.num_tensors()));
  }
  struct Memory {
    std::uintptr_t begin;
    std::uintptr_t end;
  };
  std::vector<Memory> extents;
  std::uintptr_t low = UINTPTR_MAX;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i] == nullptr) throw Error(ErrorCode::kArgument, fmt::format("cache: tensor {} is null", i));
    std::int64_t end = 0;
    const auto part = static_cast<int>(static_cast<std::int64_t>(i) % layout_.num_parts());
    for (const Plane& plane : layout_.planes()) {
      if (plane.part == part) end = std::max(end, plane.base + span_of(plane.modes, item_size(plane.dtype)));
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(tensors_[i]);
    extents.push_back({begin, begin + static_cast<std::uintptr_t>(end)});
    low = std::min(low, begin);
  }
  std::sort(extents.begin(), extents.end(), [](const Memory& a, const Memory& b) { return a.begin < b.begin; });
  bool apart = true;
  for (std::size_t i = 1; i < extents.size(); ++i) apart &= extents[i - 1].end <= extents[i].begin;
  if (apart || (read_only_ && layout_.overlap() == Overlap::kAllowed)) return;
  // Layers that lie inside each other's strides: one layout of all their planes must be free of overlaps.
  std::vector<Plane> planes;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    for (Plane plane : layout_.planes()) {
      if (plane.part != static_cast<int>(static_cast<std::int64_t>(i) % layout_.num_parts())) continue;
      plane.base += static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensors_[i]) - low);
      planes.push_back(std::move(plane));
    }
  }
  try {
    check_no_overlap(planes, layout_.order().text());
  } catch (const Error&) {
    throw Error(ErrorCode::kArgument, "cache: the tensors share memory: two elements would have one address");
  }
}

}  // namespace kvstride
