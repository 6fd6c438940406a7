// SPDX-License-Identifier: Apache-2.0
// Conversion of elements that lie side by side.
#pragma once

#include <cstddef>

#include "plan/recipe.h"

namespace kvstride::cpu {

/// `count` elements from `src` to `dst`, both contiguous: dequantised q × scale, quantised x / scale (the IEEE
/// quotient, then one rounding to nearest even; f8 saturates). The two do not overlap.
using CastRow = void (*)(std::byte* dst, const std::byte* src, std::int64_t count, float scale);

/// The conversion for a pair of castable types, for the best instruction set of this machine.
CastRow cast_row(DType src, DType dst);

}  // namespace kvstride::cpu
