// SPDX-License-Identifier: Apache-2.0
// Names and sizes of element types.
#include "kvstride/dtype.h"

#include <array>

namespace kvstride {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  std::int64_t bytes;
  bool castable;
};

constexpr std::array<Row, 12> kRows{{
    {DType::kF32, "f32", 4, true},
    {DType::kF16, "f16", 2, true},
    {DType::kBF16, "bf16", 2, true},
    {DType::kF8E4M3, "f8_e4m3", 1, true},
    {DType::kF8E5M2, "f8_e5m2", 1, true},
    {DType::kF8E4M3Fnuz, "f8_e4m3fnuz", 1, true},
    {DType::kF8E5M2Fnuz, "f8_e5m2fnuz", 1, true},
    {DType::kF8E8M0, "f8_e8m0", 1, false},
    {DType::kF4x2, "f4x2", 1, false},
    {DType::kI8, "i8", 1, false},
    {DType::kU8, "u8", 1, false},
    {DType::kI32, "i32", 4, false},
}};

const Row& row_of(DType dtype) noexcept { return kRows[static_cast<std::size_t>(dtype)]; }

}  // namespace

std::int64_t item_size(DType dtype) noexcept { return row_of(dtype).bytes; }
std::string_view name_of(DType dtype) noexcept { return row_of(dtype).name; }
bool is_castable(DType dtype) noexcept { return row_of(dtype).castable; }

std::optional<DType> dtype_from_name(std::string_view name) noexcept {
  for (const Row& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

std::string_view dtype_names() noexcept {
  return "f32, f16, bf16, f8_e4m3, f8_e5m2, f8_e4m3fnuz, f8_e5m2fnuz, f8_e8m0, f4x2, i8, u8, i32";
}

}  // namespace kvstride
