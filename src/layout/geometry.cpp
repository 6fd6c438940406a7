// SPDX-License-Identifier: Apache-2.0
// Sizes of a cache: checks and printing.
#include "kvstride/geometry.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "kvstride/error.h"

namespace kvstride {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 48;

void check(const char* field, std::int64_t value) {
  if (value < 1 || value > kMaxSize) {
    throw Error(ErrorCode::kLayout, fmt::format("geometry: {} is {}, must be from 1 to {}", field, value, kMaxSize));
  }
}

}  // namespace

char letter_of(Axis axis) noexcept { return "LBNHD"[static_cast<int>(axis)]; }

const char* word_of(Axis axis) noexcept {
  constexpr const char* kWords[] = {"layer", "block", "token", "head", "dim"};
  return kWords[static_cast<int>(axis)];
}

const char* size_name(Axis axis) noexcept {
  constexpr const char* kNames[] = {"num_layers", "num_blocks", "block_size", "num_kv_heads", "head_size"};
  return kNames[static_cast<int>(axis)];
}

std::int64_t Geometry::extent(Axis axis) const noexcept {
  switch (axis) {
    case Axis::kLayer: return num_layers;
    case Axis::kBlock: return num_blocks;
    case Axis::kToken: return block_size;
    case Axis::kHead: return num_kv_heads;
    case Axis::kDim: return head_size;
  }
  return 1;
}

std::int64_t Geometry::dim_of(const std::string& plane) const noexcept {
  return plane.rfind("value", 0) == 0 ? value_head_size.value_or(head_size) : head_size;
}

void check_geometry(const Geometry& geometry) {
  check("num_layers", geometry.num_layers);
  check("num_blocks", geometry.num_blocks);
  check("block_size", geometry.block_size);
  check("num_kv_heads", geometry.num_kv_heads);
  check("head_size", geometry.head_size);
  if (geometry.value_head_size) check("value_head_size", *geometry.value_head_size);
  for (const auto& [name, value] : geometry.symbols) {
    const bool word =
        !name.empty() && name.size() <= 8 && name[0] >= 'a' && name[0] <= 'z' &&
        std::all_of(name.begin(), name.end(), [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); });
    // Words that somebody would write for a size that has another name.
    constexpr std::string_view kMeant[] = {"dv",     "layer", "layers", "block", "blocks", "token",
                                           "tokens", "head",  "heads",  "dim",   "dims",   "dtype"};
    const bool meant = std::find(std::begin(kMeant), std::end(kMeant), name) != std::end(kMeant);
    if (!word || meant || dtype_from_name(name)) {
      throw Error(ErrorCode::kLayout, "geometry: unknown size '" + name.substr(0, 40) +
                                          "'; symbols are short lower-case words such as k or g");
    }
    if (name == "x") throw Error(ErrorCode::kLayout, "geometry: x is 16 / item size of the plane and cannot be given");
    check(name.c_str(), value);
  }
}

std::string to_string(const Geometry& geometry) {
  std::string out = fmt::format("L={},B={},N={},H={},D={}", geometry.num_layers, geometry.num_blocks,
                                geometry.block_size, geometry.num_kv_heads, geometry.head_size);
  if (geometry.value_head_size) out += fmt::format(",Dv={}", *geometry.value_head_size);
  for (const auto& [name, value] : geometry.symbols) out += fmt::format(",{}={}", name, value);
  return out + fmt::format(",dtype={}", name_of(geometry.dtype));
}

}  // namespace kvstride
