// SPDX-License-Identifier: Apache-2.0
// gather_tokens, scatter_tokens and write_tokens: tokens by slot.
#include <fmt/format.h>

#include <numeric>

#include "blocks/internal.h"
#include "kvstride/error.h"

namespace kvstride {
namespace {

bool is_f8(DType dtype) { return is_castable(dtype) && item_size(dtype) == 1; }

std::vector<std::int64_t> counting(std::size_t n) {
  std::vector<std::int64_t> out(n);
  std::iota(out.begin(), out.end(), 0);
  return out;
}

}  // namespace

Layout dense_layout(const Layout& layout, std::int64_t num_tokens) {
  std::string text;
  Geometry geometry = layout.geometry();
  geometry.num_blocks = std::max<std::int64_t>(num_tokens, 1);
  geometry.block_size = 1;
  for (const Plane& plane : layout.planes()) {
    if (plane.raw() || plane.extent(Axis::kToken) != layout.geometry().block_size) {
      throw Error(ErrorCode::kArgument, fmt::format("gather_tokens: plane '{}' has no tokens", plane.name));
    }
    text += fmt::format("{}{}: L[{}] B[{}]{} D[{}] {}", text.empty() ? "" : " | ", plane.name, geometry.num_layers,
                        geometry.num_blocks, plane.has_head ? fmt::format(" H[{}]", plane.extent(Axis::kHead)) : "",
                        plane.extent(Axis::kDim), name_of(plane.dtype));
  }
  return Layout(text, geometry);
}

void gather_tokens(const Cache& cache, std::span<const std::int64_t> slots, const Cache& dense) {
  plan::Program program("gather_tokens", end_of(cache), end_of(dense), {});
  program.bind_slots(slots, counting(slots.size()));
  program.check_memory();
  program.run();
}

void scatter_tokens(const Cache& cache, std::span<const std::int64_t> slots, const Cache& dense) {
  plan::Program program("scatter_tokens", end_of(dense), end_of(cache), {});
  program.bind_slots(counting(slots.size()), slots);
  program.check_memory();
  program.run();
}

void write_tokens(const Cache& cache, std::int64_t layer, const TokenTensor& key, const TokenTensor& value,
                  std::span<const std::int64_t> slot_mapping, float key_scale, float value_scale) {
  if (cache.read_only()) throw Error(ErrorCode::kArgument, "write_tokens: the cache is read-only");
  const Layout& layout = cache.layout();
  const Plane& key_plane = layout.plane("key");
  const Plane& value_plane = layout.plane("value");
  if (layer < 0 || layer >= layout.geometry().num_layers) {
    throw Error(ErrorCode::kBlockIndex, fmt::format("write_tokens: layer {} is outside the cache (num_layers is {})",
                                                    layer, layout.geometry().num_layers));
  }
  const auto check = [&](const char* name, const TokenTensor& tensor, const Plane& plane) {
    const bool fits = tensor.shape[1] == plane.extent(Axis::kHead) && tensor.shape[2] == plane.extent(Axis::kDim);
    if (!fits || tensor.shape[0] < static_cast<std::int64_t>(slot_mapping.size())) {
      throw Error(ErrorCode::kArgument,
                  fmt::format("write_tokens: {} has shape [{}, {}, {}], expected [at least {}, {}, {}]", name,
                              tensor.shape[0], tensor.shape[1], tensor.shape[2], slot_mapping.size(),
                              plane.extent(Axis::kHead), plane.extent(Axis::kDim)));
    }
    if (tensor.dtype != plane.dtype && (!is_castable(tensor.dtype) || is_f8(tensor.dtype) || !is_f8(plane.dtype))) {
      throw Error(ErrorCode::kDType, fmt::format("write_tokens: {} is {}, the cache holds {}", name,
                                                 name_of(tensor.dtype), name_of(plane.dtype)));
    }
    for (const std::int64_t stride : tensor.strides) {
      if (stride < 0) throw Error(ErrorCode::kArgument, fmt::format("write_tokens: {} has a negative stride", name));
    }
  };
  check("key", key, key_plane);
  check("value", value, value_plane);
  const std::int64_t num_slots = layout.geometry().num_blocks * layout.geometry().block_size;
  for (std::size_t i = 0; i < slot_mapping.size(); ++i) {
    if (slot_mapping[i] >= num_slots) {
      throw Error(
          ErrorCode::kBlockIndex,
          fmt::format(
              "write_tokens: slot {} in slot_mapping[{}] is outside the cache (num_blocks {} × block_size {} is {})",
              slot_mapping[i], i, layout.geometry().num_blocks, layout.geometry().block_size, num_slots));
    }
  }
  const auto check_scale = [](const char* name, float scale) {
    if (!(scale > 0.0F) || scale > 3.0e38F) {
      throw Error(ErrorCode::kArgument,
                  fmt::format("write_tokens: {} {} is not a positive finite number", name, scale));
    }
  };
  check_scale("key_scale", key_scale);
  check_scale("value_scale", value_scale);
  const auto check_use = [](const char* name, float scale, DType from, DType to) {
    if (scale != 1.0F && from == to) {
      throw Error(ErrorCode::kArgument,
                  fmt::format("write_tokens: {} is {}, but {} is stored as it comes", name, scale, name_of(from)));
    }
  };
  check_use("key_scale", key_scale, key.dtype, key_plane.dtype);
  check_use("value_scale", value_scale, value.dtype, value_plane.dtype);

  std::vector<std::int64_t> src;
  std::vector<std::int64_t> dst;
  for (std::size_t i = 0; i < slot_mapping.size(); ++i) {
    if (slot_mapping[i] < 0) continue;
    src.push_back(static_cast<std::int64_t>(i));
    dst.push_back(slot_mapping[i]);
  }
  if (src.empty()) return;
  const auto num_tokens = static_cast<std::int64_t>(slot_mapping.size());
  // The new tokens as a cache of one layer: a "block" is a token.
  const auto term = [](const char* axis, std::int64_t length, std::int64_t stride, DType dtype) {
    return length > 1 ? fmt::format("{}[{}]@{} ", axis, length, stride * item_size(dtype))
                      : fmt::format("{}[{}] ", axis, length);
  };
  const auto part = [&](const char* name, const TokenTensor& tensor) {
    return fmt::format("{}: {}{}{}{}", name, term("B", num_tokens, tensor.strides[0], tensor.dtype),
                       term("H", tensor.shape[1], tensor.strides[1], tensor.dtype),
                       term("D", tensor.shape[2], tensor.strides[2], tensor.dtype), name_of(tensor.dtype));
  };
  Geometry geometry = layout.geometry();
  geometry.num_layers = 1;
  geometry.num_blocks = num_tokens;
  geometry.block_size = 1;
  const Layout source_layout(part("key", key) + " | " + part("value", value), geometry, Overlap::kAllowed);
  const Cache source({const_cast<std::byte*>(key.data), const_cast<std::byte*>(value.data)}, source_layout, true);
  plan::BuildOptions build;
  build.planes = {"key", "value"};
  build.dst_first_layer = layer;
  build.num_layers = 1;
  build.plan.cast = true;  // dtypes were checked above
  if (is_f8(key_plane.dtype) && key.dtype != key_plane.dtype) build.plan.scales["key"] = {key_scale};
  if (is_f8(value_plane.dtype) && value.dtype != value_plane.dtype) build.plan.scales["value"] = {value_scale};
  plan::Program program("write_tokens", end_of(source), end_of(cache), std::move(build));
  program.bind_slots(src, dst);
  program.check_memory();
  program.run();
}

}  // namespace kvstride
