// SPDX-License-Identifier: Apache-2.0
// The sizes that turn an order into a layout.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "kvstride/dtype.h"

namespace kvstride {

/// The five axes of a KV cache. Letters L B N H D in the notation.
enum class Axis : std::uint8_t { kLayer, kBlock, kToken, kHead, kDim };
inline constexpr int kNumAxes = 5;
/// `L`, `B`, `N`, `H`, `D`.
char letter_of(Axis axis) noexcept;
/// `layer`, `block`, `token`, `head`, `dim`.
const char* word_of(Axis axis) noexcept;

/// The field of Geometry that holds the length of an axis: `num_layers`, `num_blocks` …
const char* size_name(Axis axis) noexcept;

/// Sizes of a cache, in elements. All are at least 1.
struct Geometry {
  std::int64_t num_layers = 1;
  std::int64_t num_blocks = 1;
  std::int64_t block_size = 1;    ///< tokens in a block
  std::int64_t num_kv_heads = 1;  ///< KV heads, not query heads
  std::int64_t head_size = 1;
  std::optional<std::int64_t> value_head_size;  ///< D of `value…` planes; head_size where not given
  DType dtype = DType::kBF16;                   ///< of every plane that the order gives no dtype
  std::map<std::string, std::int64_t> symbols;  ///< values of `k`, `g` … used in an order

  /// Length of `axis`; D is that of the planes whose name does not start with `value`.
  std::int64_t extent(Axis axis) const noexcept;
  /// head_size or value_head_size, by the plane's name.
  std::int64_t dim_of(const std::string& plane) const noexcept;
  bool operator==(const Geometry&) const = default;
};

/// Throws Error(kLayout) that names the field where a size is below 1 or above 2^48.
void check_geometry(const Geometry& geometry);
/// `L=2,B=8,N=16,H=4,D=64,dtype=bf16`.
std::string to_string(const Geometry& geometry);

}  // namespace kvstride
