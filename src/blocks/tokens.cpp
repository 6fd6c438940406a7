// SPDX-License-Identifier: Apache-2.0
// gather_tokens, scatter_tokens and write_tokens: tokens by slot.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>

#include "kvstride/blocks.h"
#include "kvstride/error.h"
#include "plan/lock.h"
#include "plan/program.h"

namespace kvstride {
namespace {

/// The memory of new tokens is another one in every call; a recipe is made for this address and moved from there.
constexpr std::uintptr_t kAnywhere = std::uintptr_t{1} << 61;
constexpr std::int64_t kManyTokens = std::int64_t{1} << 30;

/// New tokens of one plane as a cache of one block of shape[0] tokens.
Cache source_of(const char* plane, const TokenTensor& tensor) {
  const auto term = [&](const char* axis, std::int64_t length, std::int64_t stride) {
    return length > 1 ? fmt::format("{}[{}]@{} ", axis, length, stride * item_size(tensor.dtype))
                      : fmt::format("{}[{}] ", axis, length);
  };
  Geometry geometry;
  geometry.block_size = tensor.shape[0];
  const std::string text = fmt::format("{}: {}{}{}{}", plane, term("N", geometry.block_size, tensor.strides[0]),
                                       term("H", tensor.shape[1], tensor.strides[1]),
                                       term("D", tensor.shape[2], tensor.strides[2]), name_of(tensor.dtype));
  return Cache({reinterpret_cast<std::byte*>(kAnywhere)}, Layout(text, geometry, Overlap::kAllowed), true,
               tensor.device);
}

/// source_of(), kept for later calls with tensors of the same strides.
std::shared_ptr<const Cache> kept_source(const char* plane, TokenTensor tensor) {
  struct Kept {
    std::string plane;
    TokenTensor tensor;
    std::shared_ptr<const Cache> cache;
  };
  static std::vector<Kept>& kept = *new std::vector<Kept>;
  constexpr std::size_t kMaxKept = 32;
  if (tensor.strides[0] < kManyTokens / 16) tensor.shape[0] = kManyTokens;  // one recipe for any number of tokens
  const std::lock_guard lock(plan::kept_lock());
  for (const Kept& one : kept) {
    if (one.plane == plane && one.tensor.dtype == tensor.dtype && one.tensor.shape == tensor.shape &&
        one.tensor.strides == tensor.strides && one.tensor.device == tensor.device) {
      return one.cache;
    }
  }
  auto made = std::make_shared<const Cache>(source_of(plane, tensor));
  if (kept.size() == kMaxKept) kept.erase(kept.begin());
  kept.push_back({plane, tensor, made});
  return made;
}

/// Bytes from the first to the last that `tokens` tokens touch.
std::int64_t span_of_tokens(const TokenTensor& tensor, std::int64_t tokens) {
  const std::int64_t last = (tokens - 1) * tensor.strides[0] + (tensor.shape[1] - 1) * tensor.strides[1] +
                            (tensor.shape[2] - 1) * tensor.strides[2];
  return (last + 1) * item_size(tensor.dtype);
}

plan::BuildOptions slot_options() {
  plan::BuildOptions out;
  out.ids_name = "slots";
  return out;
}

/// `bind(program)` gives it its slots.
template <class Bind>
void move_dense(const char* verb, const Cache& src, const Cache& dst, const Stream& stream, const Bind& bind) {
  plan::Program program(std::make_shared<plan::Recipe>(verb, plan::end_of(src), plan::end_of(dst), slot_options()));
  bind(program);
  program.check_memory();
  program.run(stream);
}

}  // namespace

Layout dense_layout(const Layout& layout, std::int64_t num_tokens) {
  std::string text;
  Geometry geometry = layout.geometry();
  geometry.num_blocks = 1;
  geometry.block_size = std::max<std::int64_t>(num_tokens, 1);
  for (const Plane& plane : layout.planes()) {
    if (plane.raw() || plane.extent(Axis::kToken) != layout.geometry().block_size) {
      throw Error(ErrorCode::kArgument, fmt::format("gather_tokens: plane '{}' has no tokens", plane.name));
    }
    text += fmt::format("{}{}: L[{}] N[{}]{} D[{}] {}", text.empty() ? "" : " | ", plane.name, geometry.num_layers,
                        geometry.block_size, plane.has_head ? fmt::format(" H[{}]", plane.extent(Axis::kHead)) : "",
                        plane.extent(Axis::kDim), name_of(plane.dtype));
  }
  return Layout(text, geometry);
}

void gather_tokens(const Cache& cache, std::span<const std::int64_t> slots, const Cache& dense, const Stream& stream) {
  move_dense("gather_tokens", cache, dense, stream, [&](plan::Program& program) { program.bind_slots(slots, {}); });
}

void gather_tokens(const Cache& cache, const DeviceList& slots, const Cache& dense, const Stream& stream) {
  move_dense("gather_tokens", cache, dense, stream,
             [&](plan::Program& program) { program.bind_device_slots(&slots, nullptr); });
}

void scatter_tokens(const Cache& cache, std::span<const std::int64_t> slots, const Cache& dense, const Stream& stream) {
  move_dense("scatter_tokens", dense, cache, stream, [&](plan::Program& program) { program.bind_slots({}, slots); });
}

void scatter_tokens(const Cache& cache, const DeviceList& slots, const Cache& dense, const Stream& stream) {
  move_dense("scatter_tokens", dense, cache, stream,
             [&](plan::Program& program) { program.bind_device_slots(nullptr, &slots); });
}

namespace {

/// Both verbs: `count` slots, which `bind(program)` gives to a program; `check_slots` says whether any is to be
/// written.
template <class Check, class Bind>
void write(const Cache& cache, std::int64_t layer, const TokenTensor& key, const TokenTensor& value, std::int64_t count,
           float key_scale, float value_scale, const Stream& stream, const Check& check_slots, const Bind& bind) {
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
    if (!fits || tensor.shape[0] < count) {
      throw Error(
          ErrorCode::kArgument,
          fmt::format("write_tokens: {} has shape [{}, {}, {}], expected [at least {}, {}, {}]", name, tensor.shape[0],
                      tensor.shape[1], tensor.shape[2], count, plane.extent(Axis::kHead), plane.extent(Axis::kDim)));
    }
    if (tensor.dtype != plane.dtype && (!is_castable(tensor.dtype) || is_f8(tensor.dtype) || !is_f8(plane.dtype))) {
      throw Error(ErrorCode::kDType, fmt::format("write_tokens: {} is {}, the cache holds {}", name,
                                                 name_of(tensor.dtype), name_of(plane.dtype)));
    }
    for (const std::int64_t stride : tensor.strides) {
      if (stride < 0) throw Error(ErrorCode::kArgument, fmt::format("write_tokens: {} has a negative stride", name));
    }
    if (!(tensor.device == key.device)) {
      throw Error(ErrorCode::kArgument, fmt::format("write_tokens: key lies on {}, {} on {}", name_of(key.device), name,
                                                    name_of(tensor.device)));
    }
  };
  check("key", key, key_plane);
  check("value", value, value_plane);
  const bool any = check_slots();
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

  if (!any) return;
  const auto program_for = [&](const char* name, const TokenTensor& tensor, const Plane& plane, float scale) {
    plan::BuildOptions build = slot_options();
    build.planes = {name};
    build.dst_first_layer = layer;
    build.num_layers = 1;
    build.plan.cast = true;  // dtypes were checked above
    if (is_f8(plane.dtype) && tensor.dtype != plane.dtype) build.plan.scales[name] = {scale};
    const std::shared_ptr<const Cache> source = kept_source(name, tensor);
    auto program = std::make_unique<plan::Program>(plan::recipe_for("write_tokens", *source, cache, std::move(build)));
    program->place_source(tensor.data, span_of_tokens(tensor, count));
    bind(*program);
    return program;
  };
  const auto keys = program_for("key", key, key_plane, key_scale);
  const auto values = program_for("value", value, value_plane, value_scale);
  plan::Program::check_memory_of({keys.get(), values.get()});
  plan::Program::run_all({keys.get(), values.get()}, stream);
}

}  // namespace

void write_tokens(const Cache& cache, std::int64_t layer, const TokenTensor& key, const TokenTensor& value,
                  std::span<const std::int64_t> slot_mapping, float key_scale, float value_scale,
                  const Stream& stream) {
  const Geometry& geometry = cache.layout().geometry();
  const std::int64_t num_slots = geometry.num_blocks * geometry.block_size;
  const auto check_slots = [&] {
    for (std::size_t i = 0; i < slot_mapping.size(); ++i) {
      if (slot_mapping[i] >= num_slots) {
        throw Error(
            ErrorCode::kBlockIndex,
            fmt::format(
                "write_tokens: slot {} in slot_mapping[{}] is outside the cache (num_blocks {} × block_size {} is {})",
                slot_mapping[i], i, geometry.num_blocks, geometry.block_size, num_slots));
      }
    }
    return std::any_of(slot_mapping.begin(), slot_mapping.end(), [](std::int64_t slot) { return slot >= 0; });
  };
  write(cache, layer, key, value, static_cast<std::int64_t>(slot_mapping.size()), key_scale, value_scale, stream,
        check_slots, [&](plan::Program& program) { program.bind_slots({}, slot_mapping, true); });
}

void write_tokens(const Cache& cache, std::int64_t layer, const TokenTensor& key, const TokenTensor& value,
                  const DeviceList& slot_mapping, float key_scale, float value_scale, const Stream& stream) {
  write(
      cache, layer, key, value, slot_mapping.count, key_scale, value_scale, stream,
      [&] { return slot_mapping.count > 0; },
      [&](plan::Program& program) { program.bind_device_slots(nullptr, &slot_mapping, true); });
}

}  // namespace kvstride
