// SPDX-License-Identifier: Apache-2.0
// The element types that KV caches hold.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace kvstride {

/// Names as in `f8_e4m3`; `f4x2` is one byte that holds two 4-bit floats (NVFP4), addressed in bytes.
enum class DType : std::uint8_t {
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kF8E5M2,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kF8E8M0,
  kF4x2,
  kI8,
  kU8,
  kI32,
};

/// Bytes of one element (of one pair for f4x2).
std::int64_t item_size(DType dtype) noexcept;
/// `f32`, `bf16`, `f8_e4m3` …
std::string_view name_of(DType dtype) noexcept;
/// The dtype called `name`, or nothing.
std::optional<DType> dtype_from_name(std::string_view name) noexcept;
/// All names, comma separated, for messages.
std::string_view dtype_names() noexcept;
/// One of the four 8-bit floats that scales belong to.
constexpr bool is_f8(DType dtype) {
  return dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2 || dtype == DType::kF8E4M3Fnuz ||
         dtype == DType::kF8E5M2Fnuz;
}
/// Whether a conversion between values of this type and f32 exists (f32, f16, bf16 and the f8 kinds but e8m0).
bool is_castable(DType dtype) noexcept;

}  // namespace kvstride
