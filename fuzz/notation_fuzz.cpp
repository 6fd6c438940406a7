// SPDX-License-Identifier: Apache-2.0
// Any bytes as notation text: refused with an Error, or a layout whose printed forms mean the same addresses.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "fuzz.h"
#include "kvstride/cache.h"
#include "kvstride/layout.h"

using namespace kvstride;
using fuzz::require;

namespace {

/// Small sizes, one set for each value of the first byte.
Geometry geometry_of(std::uint8_t byte) {
  constexpr std::int64_t kTokens[] = {1, 4, 16, 6};
  constexpr std::int64_t kDims[] = {1, 8, 64, 576};
  constexpr DType kDTypes[] = {DType::kBF16, DType::kF32, DType::kU8, DType::kF8E4M3};
  Geometry geometry{.num_layers = 1 + byte % 2,
                    .num_blocks = 3,
                    .block_size = kTokens[byte / 2 % 4],
                    .num_kv_heads = 1 + byte / 8 % 4,
                    .head_size = kDims[byte / 32 % 4],
                    .dtype = kDTypes[byte / 64],
                    .symbols = {{"k", 2}, {"g", 2}}};
  if (byte % 16 == 7) geometry.value_head_size = 4;
  return geometry;
}

/// First, last and a middle element of a plane are inside their tensor, and a view puts them where offset() does.
void check_plane(const Layout& layout, const Plane& plane) {
  Index last{};
  for (int i = 0; i < kNumAxes; ++i) last[static_cast<std::size_t>(i)] = plane.extents[static_cast<std::size_t>(i)] - 1;
  Index middle = last;
  for (std::int64_t& i : middle) i /= 2;
  for (const Index& index : {Index{}, middle, last}) {
    const Location at = layout.offset(plane, index);
    require(at.tensor >= 0 && at.tensor < layout.num_tensors(), "the tensor exists", plane.name);
    require(at.byte >= 0 && at.byte + item_size(plane.dtype) <= layout.part_bytes(plane.part), "inside", plane.name);
  }
  try {
    const PlaneView view = plane_view(layout, plane.name, 0, false);
    require(view.shape.size() == 4, "a view is [block, token, head, dim]", plane.name);
    std::int64_t element = 0;
    for (std::size_t i = 0; i < 4; ++i) element += (last[i == 0 ? 1 : i + 1] / 2) * view.strides[i];
    const Index index{0, last[1] / 2, last[2] / 2, last[3] / 2, last[4] / 2};
    require(view.byte_offset + element * item_size(plane.dtype) == layout.offset(plane, index).byte,
            "a view has offset()'s addresses", plane.name);
  } catch (const Error& error) {
    fuzz::check_error(error, 0);
  }
  try {
    plane_view(layout, plane.name, 0, true);
  } catch (const Error& error) {
    fuzz::check_error(error, 0);
  }
}

/// The layout of a text that kvstride itself printed.
Layout reparse(const std::string& text, const Geometry& geometry) {
  try {
    return Layout(text, geometry);
  } catch (const Error& error) {
    require(false, "what is printed parses", text + "\n" + error.what());
    throw;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const Geometry geometry = geometry_of(data[0]);
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  std::optional<Order> order;
  try {
    order = Order::parse(text);
  } catch (const Error& error) {
    fuzz::check_error(error, text.size());
    return 0;
  }
  std::string written(text);
  for (char& c : written) c = std::strchr("\t\n\r", c) != nullptr ? ' ' : c;
  require(order->text() == written, "an order prints as written, on one line", order->text());
  const Order printed = Order::from_parts(order->parts());
  std::optional<Layout> layout;
  try {
    layout.emplace(*order, geometry);
  } catch (const Error& error) {
    fuzz::check_error(error, text.size());
    return 0;
  }
  require(reparse(printed.text(), geometry) == *layout, "a tree's text means the tree", printed.text());
  for (const Plane& plane : layout->planes()) check_plane(*layout, plane);
  const std::string canonical = layout->str();
  // The parser counts padding after a member's outermost term, which canonical text sorts by stride: up to twice the
  // bytes, and 2^62 are the limit.
  if (layout->num_bytes() > std::int64_t{1} << 61) return 0;
  const Layout again = reparse(canonical, geometry);
  require(again == *layout, "the canonical text means the layout", canonical);
  require(again.str() == canonical, "the canonical text is its own", canonical + "\n" + again.str());
  for (std::int64_t part = 0; part < layout->num_parts(); ++part) {
    try {
      require(layout->shape(part).size() == layout->strides(part).size(), "a stride for each dimension", canonical);
    } catch (const Error& error) {
      fuzz::check_error(error, text.size());
    }
  }
  return 0;
}
