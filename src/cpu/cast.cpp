// SPDX-License-Identifier: Apache-2.0
// Conversion of elements over nested loops: dequantise q × scale, quantise x / scale.
#include <algorithm>
#include <cstring>

#include "cpu/copy.h"
#include "cpu/numbers.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/cast.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kvstride::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using plan::Loop;

using F = hn::ScalableTag<float>;
using U = hn::Rebind<std::uint32_t, F>;
using I = hn::Rebind<std::int32_t, F>;
using Half = hn::Rebind<std::uint16_t, F>;
using Byte = hn::Rebind<std::uint8_t, F>;
using VF = hn::Vec<F>;
using VU = hn::Vec<U>;

const F f;
const U u;
const I s;

template <class T>
const T* as(const std::byte* p) {
  return reinterpret_cast<const T*>(p);
}

/// decode() of numbers.h, a vector at a time.
VF decode_vector(const Format& format, VU bits) {
  const VU sign_bit = hn::Set(u, 1U << (format.bits - 1));
  const VU magnitude = hn::AndNot(sign_bit, bits);
  const VU low = hn::And(magnitude, hn::Set(u, (1U << format.mantissa) - 1));
  const VU high = hn::ShiftRightSame(magnitude, format.mantissa);
  const auto subnormal = hn::Eq(high, hn::Zero(u));
  const VF tiny =
      hn::Mul(hn::ConvertTo(f, hn::BitCast(s, low)), hn::Set(f, power_of_two(format.min_exponent - format.mantissa)));
  const VU exponent = hn::Add(high, hn::Set(u, static_cast<std::uint32_t>(format.min_exponent - 1 + 127)));
  const VU normal = hn::Or(hn::ShiftLeft<23>(exponent), hn::ShiftLeftSame(low, 23 - format.mantissa));
  VU out = hn::IfThenElse(subnormal, hn::BitCast(u, tiny), normal);
  const VU nan = hn::Set(u, 0x7FC00000U);
  const VU sign = hn::ShiftLeftSame(hn::And(bits, sign_bit), 32 - format.bits);
  if (format.fnuz) {
    out = hn::Or(out, sign);
    return hn::BitCast(f, hn::IfThenElse(hn::Eq(bits, hn::Set(u, format.nan)), nan, out));
  }
  const std::uint32_t first_nan = format.infinity != 0 ? format.infinity + 1 : format.nan;
  if (format.infinity != 0) {
    out = hn::IfThenElse(hn::Eq(magnitude, hn::Set(u, format.infinity)), hn::Set(u, 0x7F800000U), out);
  }
  out = hn::IfThenElse(hn::Gt(magnitude, hn::Set(u, first_nan - 1)), nan, out);
  return hn::BitCast(f, hn::Or(out, sign));
}

/// encode() of numbers.h, a vector at a time.
VU encode_vector(const Format& format, VF value) {
  const VU bits = hn::BitCast(u, value);
  const VU sign_mask = hn::Set(u, 0x80000000U);
  // Beyond twice the largest everything is infinite, or saturates.
  const float top = format.saturate ? format.max : 2 * format.max;
  const VU raw = hn::AndNot(sign_mask, bits);
  const auto is_nan = hn::Gt(raw, hn::Set(u, 0x7F800000U));
  const VF magnitude = hn::Min(hn::BitCast(f, raw), hn::Set(f, top));
  const auto exponent = hn::Max(hn::Sub(hn::BitCast(s, hn::ShiftRight<23>(hn::BitCast(u, magnitude))), hn::Set(s, 127)),
                                hn::Set(s, format.min_exponent));
  const auto scale = hn::ShiftLeft<23>(hn::Sub(hn::Set(s, format.mantissa + 127), exponent));
  const VF magic = hn::Set(f, 8388608.0F);  // rounds to an integer, ties to even
  const VF digits = hn::Sub(hn::Add(hn::Mul(magnitude, hn::BitCast(f, scale)), magic), magic);
  const auto steps = hn::Sub(exponent, hn::Set(s, format.min_exponent));
  VU out = hn::BitCast(u, hn::Add(hn::ShiftLeftSame(steps, format.mantissa), hn::ConvertTo(s, digits)));
  if (!format.saturate) out = hn::Min(out, hn::Set(u, format.infinity));
  VU sign = hn::ShiftRightSame(hn::And(bits, sign_mask), 32 - format.bits);
  if (format.fnuz) {
    sign = hn::IfThenZeroElse(hn::Eq(out, hn::Zero(u)), sign);
    return hn::IfThenElse(is_nan, hn::Set(u, format.nan), hn::Or(out, sign));
  }
  return hn::Or(hn::IfThenElse(is_nan, hn::Set(u, format.nan), out), sign);
}

template <DType kType>
constexpr Format format_of() {
  switch (kType) {
    case DType::kF16: return kF16;
    case DType::kF8E5M2: return kE5M2;
    case DType::kF8E4M3Fnuz: return kE4M3Fnuz;
    case DType::kF8E5M2Fnuz: return kE5M2Fnuz;
    default: return kE4M3;
  }
}

template <DType kType>
VF load(const std::byte* from) {
  if constexpr (kType == DType::kF32) {
    return hn::LoadU(f, as<float>(from));
  } else if constexpr (kType == DType::kBF16) {
    return hn::BitCast(f, hn::ShiftLeft<16>(hn::PromoteTo(u, hn::LoadU(Half(), as<std::uint16_t>(from)))));
  } else if constexpr (kType == DType::kF16) {
    return decode_vector(kF16, hn::PromoteTo(u, hn::LoadU(Half(), as<std::uint16_t>(from))));
  } else {
    return decode_vector(format_of<kType>(), hn::PromoteTo(u, hn::LoadU(Byte(), as<std::uint8_t>(from))));
  }
}

template <DType kType>
void store(std::byte* to, VF value) {
  if constexpr (kType == DType::kF32) {
    hn::StoreU(value, f, reinterpret_cast<float*>(to));
  } else if constexpr (kType == DType::kBF16) {
    const VU bits = hn::BitCast(u, value);
    const auto is_nan = hn::Gt(hn::AndNot(hn::Set(u, 0x80000000U), bits), hn::Set(u, 0x7F800000U));
    const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 1));
    const VU rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(u, 0x7FFF)), odd));
    const VU quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(u, 0x40));
    const VU out = hn::IfThenElse(is_nan, quiet, rounded);
    hn::StoreU(hn::DemoteTo(Half(), hn::BitCast(s, out)), Half(), reinterpret_cast<std::uint16_t*>(to));
  } else if constexpr (kType == DType::kF16) {
    hn::StoreU(hn::DemoteTo(Half(), hn::BitCast(s, encode_vector(kF16, value))), Half(),
               reinterpret_cast<std::uint16_t*>(to));
  } else {
    hn::StoreU(hn::DemoteTo(Byte(), hn::BitCast(s, encode_vector(format_of<kType>(), value))), Byte(),
               reinterpret_cast<std::uint8_t*>(to));
  }
}

constexpr bool is_f8(DType dtype) {
  return dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2 || dtype == DType::kF8E4M3Fnuz ||
         dtype == DType::kF8E5M2Fnuz;
}

/// Between two f8 types the scale is the same on both sides.
template <DType kSrc, DType kDst>
VF scaled(VF value, VF scale) {
  if constexpr (is_f8(kSrc) && !is_f8(kDst)) return hn::Mul(value, scale);
  if constexpr (!is_f8(kSrc) && is_f8(kDst)) return hn::Div(value, scale);
  return value;
}

template <DType kSrc, DType kDst>
struct Row {
  static constexpr std::size_t kSrcItem = kSrc == DType::kF32 ? 4 : is_f8(kSrc) ? 1 : 2;
  static constexpr std::size_t kDstItem = kDst == DType::kF32 ? 4 : is_f8(kDst) ? 1 : 2;

  /// `count` elements side by side.
  static void run(std::byte* dst, const std::byte* src, std::int64_t count, float scale_value) {
    const VF scale = hn::Set(f, scale_value);
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(f));
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      const auto at = static_cast<std::size_t>(i);
      store<kDst>(dst + at * kDstItem, scaled<kSrc, kDst>(load<kSrc>(src + at * kSrcItem), scale));
    }
    if (i == count) return;
    alignas(64) std::byte from[HWY_MAX_BYTES] = {};
    alignas(64) std::byte to[HWY_MAX_BYTES];
    const auto at = static_cast<std::size_t>(i);
    const std::size_t left = std::min(static_cast<std::size_t>(count - i), hn::Lanes(f));
    std::memcpy(from, src + at * kSrcItem, left * kSrcItem);
    store<kDst>(to, scaled<kSrc, kDst>(load<kSrc>(from), scale));
    std::memcpy(dst + at * kDstItem, to, left * kDstItem);
  }

  static void loops(std::byte* dst, const std::byte* src, const Loop* loop, std::size_t num_loops, float scale) {
    constexpr auto src_item = static_cast<std::int64_t>(kSrcItem);
    constexpr auto dst_item = static_cast<std::int64_t>(kDstItem);
    if (num_loops == 0) return run(dst, src, 1, scale);
    if (num_loops == 1 && loop->src == src_item && loop->dst == dst_item) return run(dst, src, loop->extent, scale);
    for (std::int64_t i = 0; i < loop->extent; ++i) {
      loops(dst + i * loop->dst, src + i * loop->src, loop + 1, num_loops - 1, scale);
    }
  }
};

template <DType kSrc>
void to(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, const plan::Cast& how) {
  switch (how.dst) {
    case DType::kF32: return Row<kSrc, DType::kF32>::loops(dst, src, loops, num_loops, how.scale);
    case DType::kF16: return Row<kSrc, DType::kF16>::loops(dst, src, loops, num_loops, how.scale);
    case DType::kBF16: return Row<kSrc, DType::kBF16>::loops(dst, src, loops, num_loops, how.scale);
    case DType::kF8E5M2: return Row<kSrc, DType::kF8E5M2>::loops(dst, src, loops, num_loops, how.scale);
    case DType::kF8E4M3Fnuz: return Row<kSrc, DType::kF8E4M3Fnuz>::loops(dst, src, loops, num_loops, how.scale);
    case DType::kF8E5M2Fnuz: return Row<kSrc, DType::kF8E5M2Fnuz>::loops(dst, src, loops, num_loops, how.scale);
    default: return Row<kSrc, DType::kF8E4M3>::loops(dst, src, loops, num_loops, how.scale);
  }
}

}  // namespace

void CastLoops(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, const plan::Cast& how) {
  switch (how.src) {
    case DType::kF32: return to<DType::kF32>(dst, src, loops, num_loops, how);
    case DType::kF16: return to<DType::kF16>(dst, src, loops, num_loops, how);
    case DType::kBF16: return to<DType::kBF16>(dst, src, loops, num_loops, how);
    case DType::kF8E5M2: return to<DType::kF8E5M2>(dst, src, loops, num_loops, how);
    case DType::kF8E4M3Fnuz: return to<DType::kF8E4M3Fnuz>(dst, src, loops, num_loops, how);
    case DType::kF8E5M2Fnuz: return to<DType::kF8E5M2Fnuz>(dst, src, loops, num_loops, how);
    default: return to<DType::kF8E4M3>(dst, src, loops, num_loops, how);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvstride::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstride::cpu {

HWY_EXPORT(CastLoops);

void cast(std::byte* dst, const std::byte* src, const plan::Loop* loops, std::size_t num_loops, const plan::Cast& how) {
  HWY_DYNAMIC_DISPATCH(CastLoops)(dst, src, loops, num_loops, how);
}

}  // namespace kvstride::cpu
#endif
