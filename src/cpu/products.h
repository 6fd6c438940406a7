// SPDX-License-Identifier: Apache-2.0
// Products of many query rows with a packed tile of keys or values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvstride/dtype.h"

namespace kvstride::cpu {

constexpr std::int64_t padded_to(std::int64_t count, std::int64_t unit) { return (count + unit - 1) / unit * unit; }

/// Whether all numbers of a dtype are bf16.
constexpr bool fits_bf16(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2;
}

/// C = A B with sums in f32. B is packed into *panels*: `panel` columns side by side, one depth after the other (f32),
/// or two depths of a column side by side (bf16). A are rows of f32 or of bf16.
struct Products {
  std::int64_t panel;  ///< columns; divides kPadding
  std::int64_t unit;   ///< depths are padded with zeros to a multiple of it
  std::int64_t rows;   ///< a good number for one call
  std::int64_t spare;  ///< rows behind the last one of A, which may be read, and of C, which may be written
  std::int64_t item;   ///< bytes of an element of A and B: 4 for f32, 2 for bf16
  bool narrow() const { return item == 2; }

  /// Of keys: columns are keys, those behind `count` 0. Of values: columns are dims, those behind `dim` 0; returns
  /// whether all are finite.
  void (*pack_keys)(std::byte* panels, const std::byte* const* keys, std::int64_t count, std::int64_t dim);
  bool (*pack_values)(std::byte* panels, const std::byte* const* values, std::int64_t count, std::int64_t dim);

  /// C [rows, panels × panel] = A [rows, depth] B; panels lie `panel_step` elements apart.
  void (*multiply)(float* c, std::int64_t c_step, const std::byte* a, std::int64_t a_step, std::int64_t rows,
                   const std::byte* b, std::int64_t depth, std::int64_t panel_step, std::int64_t panels);

  /// Around calls of multiply() in one thread. Null where there is nothing to do.
  void (*begin)();
  void (*end)();

  std::int64_t padded_depth(std::int64_t depth) const { return padded_to(depth, unit); }
};

/// For queries, keys and values of these dtypes: bf16 on a matrix unit where the machine has one and nothing is lost
/// but in weights, f32 vectors otherwise. KVSTRIDE_MATRIX=off does without, =emulated has plain loops in its place.
Products products(DType query, DType keys, DType values);

/// A matrix unit for bf16: as above, for panels of 32.
struct MatrixUnit {
  decltype(Products::multiply) multiply = nullptr;
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

/// Plain loops that give what such a unit gives, for panels of any width.
MatrixUnit emulated_unit();

/// Intel's AMX where the processor, the kernel and this build have it; otherwise nulls. Asks the kernel for it, once.
MatrixUnit amx();

}  // namespace kvstride::cpu
