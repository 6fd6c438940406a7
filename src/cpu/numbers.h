// SPDX-License-Identifier: Apache-2.0
// Conversion of single values between f32 and the narrower floats: round to nearest even, f8 saturates.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cuda/host_device.h"
#include "kvstride/dtype.h"

namespace kvstride::cpu {

/// A binary float format narrower than f32.
struct Format {
  int mantissa;       ///< stored bits
  int min_exponent;   ///< of normal numbers
  float max;          ///< largest finite value
  bool fnuz;          ///< no negative zero, NaN is 0x80
  bool saturate;      ///< beyond max → max; otherwise infinity
  std::uint32_t nan;  ///< positive NaN pattern
  std::uint32_t infinity;
  int bits;
};

/// The format of f16 or one of the f8 kinds.
KVSTRIDE_HD constexpr Format format_of(DType type) {
  switch (type) {
    case DType::kF16: return {10, -14, 65504.0F, false, false, 0x7E00, 0x7C00, 16};
    case DType::kF8E5M2: return {2, -14, 57344.0F, false, true, 0x7F, 0x7C, 8};
    case DType::kF8E4M3Fnuz: return {3, -7, 240.0F, true, true, 0x80, 0, 8};
    case DType::kF8E5M2Fnuz: return {2, -15, 57344.0F, true, true, 0x80, 0, 8};
    default: return {3, -6, 448.0F, false, true, 0x7F, 0, 8};
  }
}

inline constexpr Format kF16 = format_of(DType::kF16);
inline constexpr Format kE4M3 = format_of(DType::kF8E4M3);
inline constexpr Format kE5M2 = format_of(DType::kF8E5M2);
inline constexpr Format kE4M3Fnuz = format_of(DType::kF8E4M3Fnuz);
inline constexpr Format kE5M2Fnuz = format_of(DType::kF8E5M2Fnuz);

/// 2^exponent, exact for the exponents used here.
KVSTRIDE_HD constexpr float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

KVSTRIDE_HD inline std::uint32_t encode(const Format& format, float value) {
  const std::uint32_t sign_bit = 1U << (format.bits - 1);
  const bool negative = std::signbit(value);
  if (std::isnan(value)) return format.fnuz ? format.nan : format.nan | (negative ? sign_bit : 0);
  float magnitude = std::fabs(value);
  const std::uint32_t sign = negative ? sign_bit : 0;
  if (format.saturate && magnitude > format.max) magnitude = format.max;
  if (std::isinf(magnitude)) return sign | format.infinity;
  const int exponent_bits = static_cast<int>(std::bit_cast<std::uint32_t>(magnitude) >> 23) - 127;
  int exponent = exponent_bits < format.min_exponent ? format.min_exponent : exponent_bits;
  // Adding and taking away 2^23 rounds to an integer, ties to even.
  const float scaled = magnitude * power_of_two(format.mantissa - exponent);
  auto digits = static_cast<std::uint32_t>((scaled + 8388608.0F) - 8388608.0F);
  if (digits == 2U << format.mantissa) {
    digits >>= 1;
    ++exponent;
  }
  std::uint32_t out = digits;
  if (digits >> format.mantissa != 0) {
    out = (static_cast<std::uint32_t>(exponent - format.min_exponent + 1) << format.mantissa) |
          (digits - (1U << format.mantissa));
  }
  if (!format.saturate && out > format.infinity) out = format.infinity;
  if (format.fnuz && out == 0) return 0;
  return sign | out;
}

KVSTRIDE_HD inline float decode(const Format& format, std::uint32_t bits) {
  const std::uint32_t sign_bit = 1U << (format.bits - 1);
  const bool negative = (bits & sign_bit) != 0;
  const std::uint32_t magnitude = bits & (sign_bit - 1);
  if (format.fnuz && bits == format.nan) return std::numeric_limits<float>::quiet_NaN();
  if (!format.fnuz) {
    if (format.infinity != 0 && magnitude == format.infinity) {
      return negative ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
    }
    const std::uint32_t first_nan = format.infinity != 0 ? format.infinity + 1 : format.nan;
    if (magnitude >= first_nan) return std::copysign(std::numeric_limits<float>::quiet_NaN(), negative ? -1.0F : 1.0F);
  }
  const std::uint32_t low = magnitude & ((1U << format.mantissa) - 1);
  const int high = static_cast<int>(magnitude >> format.mantissa);
  const float digits = static_cast<float>(high == 0 ? low : low + (1U << format.mantissa));
  const int exponent = format.min_exponent + (high == 0 ? 0 : high - 1) - format.mantissa;
  const float value = digits * power_of_two(exponent);
  return negative ? -value : value;
}

KVSTRIDE_HD inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

KVSTRIDE_HD inline float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

}  // namespace kvstride::cpu
