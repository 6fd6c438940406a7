// SPDX-License-Identifier: Apache-2.0
// Conversion of elements that lie side by side.
#pragma once

#include <cstddef>

#include "plan/recipe.h"

namespace kvstride::cpu {

/// `rows` rows of `count` elements: contiguous in `src`, `src_step` bytes from row to row; all contiguous in `dst`.
/// Dequantised q × scale, quantised x / scale (the IEEE quotient, then one rounding to nearest even; f8 saturates). The
/// two do not overlap.
using CastRows = void (*)(std::byte* dst, const std::byte* src, std::int64_t count, std::int64_t rows,
                          std::int64_t src_step, float scale);

/// The conversion for a pair of castable types, for the best instruction set of this machine.
CastRows cast_rows(DType src, DType dst);

}  // namespace kvstride::cpu
