// SPDX-License-Identifier: Apache-2.0
// Conversion of rows of elements: dequantise q × scale, quantise x / scale.
#include "cpu/cast.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/numbers.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/cast.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "cpu/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstride::cpu {
namespace HWY_NAMESPACE {
namespace {

/// encode() of numbers.h, a vector at a time. The sign and NaN come from `original`, the rest from `value`, which has
/// any sign.
template <DType kType>
HWY_INLINE VU encode_vector(VF value, VU original) {
  constexpr Format kFormat = cpu::format_of(kType);
  constexpr int kShift = 23 - kFormat.mantissa;
  const VU no_sign = hn::Set(u, ~kSign);
  const auto is_nan = hn::Gt(hn::And(original, no_sign), hn::Set(u, kInfinity));
  // Beyond twice the largest everything is infinite, or saturates.
  constexpr float kTop = kFormat.saturate ? kFormat.max : 2 * kFormat.max;
  const VU bits = hn::Min(hn::And(hn::BitCast(u, value), no_sign), hn::BitCast(u, hn::Set(f, kTop)));
  const VU odd = hn::And(hn::ShiftRight<kShift>(bits), hn::Set(u, 1));
  // The exponent's bias goes with the half that rounds.
  constexpr std::uint32_t kBias = static_cast<std::uint32_t>(127 + kFormat.min_exponent - 1) << 23;
  const VU half_step = hn::Set(u, (1U << (kShift - 1)) - 1 - kBias);
  const VU normal = hn::ShiftRight<kShift>(hn::Add(hn::Add(bits, odd), half_step));
  // Adding a power of two whose last place is the smallest subnormal rounds to a whole number of them.
  const VF magic = hn::Set(f, power_of_two(23 + kFormat.min_exponent - kFormat.mantissa));
  const VU steps = hn::Sub(hn::BitCast(u, hn::Add(hn::BitCast(f, bits), magic)), hn::BitCast(u, magic));
  const auto small = hn::Lt(hn::BitCast(f, bits), hn::Set(f, power_of_two(kFormat.min_exponent)));
  VU out = hn::IfThenElse(hn::RebindMask(u, small), steps, normal);
  if constexpr (!kFormat.saturate) out = hn::Min(out, hn::Set(u, kFormat.infinity));
  const VU sign_bit = hn::Set(u, 1U << (kFormat.bits - 1));
  const VU sign = hn::ShiftRight<32 - kFormat.bits>(original);
  if constexpr (kFormat.fnuz) {
    const VU with_sign = hn::IfThenZeroElse(hn::Eq(out, hn::Zero(u)), hn::OrAnd(out, sign, sign_bit));
    return hn::IfThenElse(is_nan, hn::Set(u, kFormat.nan), with_sign);
  }
  return hn::OrAnd(hn::IfThenElse(is_nan, hn::Set(u, kFormat.nan), out), sign, sign_bit);
}

template <DType kType>
HWY_INLINE void store_code(std::byte* to, VU code) {
  if constexpr (kType == DType::kF16) {
    hn::StoreU(hn::TruncateTo(half, code), half, reinterpret_cast<std::uint16_t*>(to));
  } else {
    hn::StoreU(hn::TruncateTo(Byte(), code), Byte(), reinterpret_cast<std::uint8_t*>(to));
  }
}

/// `kCanonical`: a NaN has no payload that rounding could carry into the exponent.
template <DType kType, bool kCanonical>
HWY_INLINE void store(std::byte* to, VF value) {
  const VU bits = hn::BitCast(u, value);
  if constexpr (kType == DType::kF32) {
    hn::StoreU(value, f, reinterpret_cast<float*>(to));
  } else if constexpr (kType == DType::kBF16) {
    const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 1));
    VU out = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(u, 0x7FFF)), odd));
    if constexpr (!kCanonical) {
      const auto is_nan = hn::Gt(hn::AndNot(hn::Set(u, kSign), bits), hn::Set(u, kInfinity));
      out = hn::IfThenElse(is_nan, hn::Or(hn::ShiftRight<16>(bits), hn::Set(u, 0x40)), out);
    }
    hn::StoreU(hn::TruncateTo(half, out), half, reinterpret_cast<std::uint16_t*>(to));
  } else {
    store_code<kType>(to, encode_vector<kType>(value, bits));
  }
}

enum class Scaling { kNone, kTimes, kDivide };

/// Codes of a 2- or 1-byte format.
template <DType kDst, Scaling kScaling>
HWY_INLINE VU code_of(VF value, VF scale) {
  if constexpr (kScaling == Scaling::kDivide) {
    return encode_vector<kDst>(hn::Div(value, scale), hn::BitCast(u, value));
  }
  return encode_vector<kDst>(value, hn::BitCast(u, value));
}

template <DType kSrc, DType kDst, Scaling kScaling>
HWY_INLINE void convert(std::byte* dst, const std::byte* src, VF scale) {
  const VF value = load<kSrc>(src);
  if constexpr (kScaling == Scaling::kNone) {
    store<kDst, is_f8(kSrc)>(dst, value);
  } else if constexpr (kScaling == Scaling::kTimes) {
    store<kDst, is_f8(kSrc)>(dst, hn::Mul(value, scale));
  } else {
    store_code<kDst>(dst, code_of<kDst, kScaling>(value, scale));
  }
}

/// Two vectors of bf16 to f8: a word holds two elements, each of them in place as an f32 but for its neighbour.
template <DType kDst, Scaling kScaling>
HWY_INLINE void convert_pairs(std::byte* dst, const std::byte* src, VF scale) {
  const VU both = hn::LoadU(u, as<std::uint32_t>(src));
  const VU first = code_of<kDst, kScaling>(hn::BitCast(f, hn::ShiftLeft<16>(both)), scale);
  const VU second = code_of<kDst, kScaling>(hn::BitCast(f, hn::And(both, hn::Set(u, 0xFFFF0000U))), scale);
  const VU codes = hn::Or(first, hn::ShiftLeft<8>(second));
  hn::StoreU(hn::TruncateTo(half, codes), half, reinterpret_cast<std::uint16_t*>(dst));
}

template <DType kSrc, DType kDst, Scaling kScaling>
void rows_of(std::byte* dst, const std::byte* src, std::int64_t count, std::int64_t rows, std::int64_t src_step,
             float scale_value) {
  constexpr std::size_t kSrcItem = item_of(kSrc);
  constexpr std::size_t kDstItem = item_of(kDst);
  const VF scale = hn::Set(f, scale_value);
  const std::size_t lanes = hn::Lanes(f);
  const auto n = static_cast<std::size_t>(count);
  for (std::int64_t row = 0; row < rows; ++row, src += src_step, dst += n * kDstItem) {
    std::size_t i = 0;
    if constexpr (kSrc == DType::kBF16 && is_f8(kDst) && std::endian::native == std::endian::little) {
      for (; i + 2 * lanes <= n; i += 2 * lanes) convert_pairs<kDst, kScaling>(dst + i, src + 2 * i, scale);
    }
    for (; i + lanes <= n; i += lanes) {
      convert<kSrc, kDst, kScaling>(dst + i * kDstItem, src + i * kSrcItem, scale);
    }
    if (i == n) continue;
    alignas(64) std::byte from[HWY_MAX_BYTES] = {};
    alignas(64) std::byte to[HWY_MAX_BYTES];
    const std::size_t left = std::min(n - i, lanes);
    std::memcpy(from, src + i * kSrcItem, left * kSrcItem);
    convert<kSrc, kDst, kScaling>(to, from, scale);
    std::memcpy(dst + i * kDstItem, to, left * kDstItem);
  }
}

/// Between two f8 types the scale is the same on both sides.
template <DType kSrc, DType kDst>
void rows(std::byte* dst, const std::byte* src, std::int64_t count, std::int64_t num, std::int64_t src_step,
          float scale) {
  if constexpr (is_f8(kSrc) && !is_f8(kDst)) {
    if (scale != 1.0F) return rows_of<kSrc, kDst, Scaling::kTimes>(dst, src, count, num, src_step, scale);
  } else if constexpr (!is_f8(kSrc) && is_f8(kDst)) {
    if (scale != 1.0F) return rows_of<kSrc, kDst, Scaling::kDivide>(dst, src, count, num, src_step, scale);
  }
  rows_of<kSrc, kDst, Scaling::kNone>(dst, src, count, num, src_step, scale);
}

template <DType kSrc>
CastRows to(DType dst) {
  switch (dst) {
    case DType::kF32: return rows<kSrc, DType::kF32>;
    case DType::kF16: return rows<kSrc, DType::kF16>;
    case DType::kBF16: return rows<kSrc, DType::kBF16>;
    case DType::kF8E5M2: return rows<kSrc, DType::kF8E5M2>;
    case DType::kF8E4M3Fnuz: return rows<kSrc, DType::kF8E4M3Fnuz>;
    case DType::kF8E5M2Fnuz: return rows<kSrc, DType::kF8E5M2Fnuz>;
    default: return rows<kSrc, DType::kF8E4M3>;
  }
}

}  // namespace

CastRows RowsFor(DType src, DType dst) {
  switch (src) {
    case DType::kF32: return to<DType::kF32>(dst);
    case DType::kF16: return to<DType::kF16>(dst);
    case DType::kBF16: return to<DType::kBF16>(dst);
    case DType::kF8E5M2: return to<DType::kF8E5M2>(dst);
    case DType::kF8E4M3Fnuz: return to<DType::kF8E4M3Fnuz>(dst);
    case DType::kF8E5M2Fnuz: return to<DType::kF8E5M2Fnuz>(dst);
    default: return to<DType::kF8E4M3>(dst);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvstride::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstride::cpu {

HWY_EXPORT(RowsFor);

CastRows cast_rows(DType src, DType dst) { return HWY_DYNAMIC_DISPATCH(RowsFor)(src, dst); }

}  // namespace kvstride::cpu
#endif
