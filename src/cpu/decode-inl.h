// SPDX-License-Identifier: Apache-2.0
// Elements of a cache as vectors of f32. Included once per Highway target.
#if defined(KVSTRIDE_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRIDE_CPU_DECODE_INL_H_
#undef KVSTRIDE_CPU_DECODE_INL_H_
#else
#define KVSTRIDE_CPU_DECODE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "cpu/numbers.h"

HWY_BEFORE_NAMESPACE();
namespace kvstride::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using U = hn::Rebind<std::uint32_t, F>;
using I = hn::Rebind<std::int32_t, F>;
using Half = hn::Rebind<std::uint16_t, F>;
using Float16 = hn::Rebind<hwy::float16_t, F>;
using Byte = hn::Rebind<std::uint8_t, F>;
using VF = hn::Vec<F>;
using VU = hn::Vec<U>;
using VHalf = hn::Vec<Half>;

const F f;
const U u;
const I s;
const Half half;

template <class T>
const T* as(const std::byte* p) {
  return reinterpret_cast<const T*>(p);
}

constexpr std::uint32_t kSign = 0x80000000U;
constexpr std::uint32_t kInfinity = 0x7F800000U;

constexpr std::size_t item_of(DType dtype) { return dtype == DType::kF32 ? 4 : is_f8(dtype) ? 1 : 2; }

/// decode() of numbers.h, a vector at a time.
template <DType kType>
HWY_INLINE VF decode_vector(VU bits) {
  constexpr Format kFormat = cpu::format_of(kType);
  const VU sign_bit = hn::Set(u, 1U << (kFormat.bits - 1));
  const VU magnitude = hn::AndNot(sign_bit, bits);
  const VU low = hn::And(magnitude, hn::Set(u, (1U << kFormat.mantissa) - 1));
  const VU high = hn::ShiftRight<kFormat.mantissa>(magnitude);
  const auto subnormal = hn::Eq(high, hn::Zero(u));
  const VF tiny =
      hn::Mul(hn::ConvertTo(f, hn::BitCast(s, low)), hn::Set(f, power_of_two(kFormat.min_exponent - kFormat.mantissa)));
  const VU exponent = hn::Add(high, hn::Set(u, static_cast<std::uint32_t>(kFormat.min_exponent - 1 + 127)));
  const VU normal = hn::Or(hn::ShiftLeft<23>(exponent), hn::ShiftLeft<23 - kFormat.mantissa>(low));
  VU out = hn::IfThenElse(subnormal, hn::BitCast(u, tiny), normal);
  const VU nan = hn::Set(u, 0x7FC00000U);
  const VU sign = hn::ShiftLeft<32 - kFormat.bits>(hn::And(bits, sign_bit));
  if constexpr (kFormat.fnuz) {
    out = hn::Or(out, sign);
    return hn::BitCast(f, hn::IfThenElse(hn::Eq(bits, hn::Set(u, kFormat.nan)), nan, out));
  }
  constexpr std::uint32_t kFirstNan = kFormat.infinity != 0 ? kFormat.infinity + 1 : kFormat.nan;
  if constexpr (kFormat.infinity != 0) {
    out = hn::IfThenElse(hn::Eq(magnitude, hn::Set(u, kFormat.infinity)), hn::Set(u, kInfinity), out);
  }
  out = hn::IfThenElse(hn::Gt(magnitude, hn::Set(u, kFirstNan - 1)), nan, out);
  return hn::BitCast(f, hn::Or(out, sign));
}

/// f8_e4m3 by way of f16, whose fields its own fit: moved into place it is its value times 2^-8. NaN would be 480.
HWY_INLINE VF decode_e4m3(const std::byte* from) {
  const VHalf bits = hn::PromoteTo(half, hn::LoadU(Byte(), as<std::uint8_t>(from)));
  const VHalf magnitude = hn::ShiftLeft<7>(hn::And(bits, hn::Set(half, 0x7F)));
  const VHalf moved = hn::Or(magnitude, hn::ShiftLeft<8>(hn::And(bits, hn::Set(half, 0x80))));
  const VF value = hn::Mul(hn::PromoteTo(f, hn::BitCast(Float16(), moved)), hn::Set(f, 256.0F));
  const auto is_nan = hn::RebindMask(u, hn::Eq(hn::Abs(value), hn::Set(f, 480.0F)));
  const VU to_nan = hn::Set(u, 0x7FC00000U - 0x43F00000U);  // from 480's bits, whatever the sign
  return hn::BitCast(f, hn::Add(hn::BitCast(u, value), hn::IfThenElseZero(is_nan, to_nan)));
}

template <DType kType>
HWY_INLINE VF load(const std::byte* from) {
  if constexpr (kType == DType::kF32) {
    return hn::LoadU(f, as<float>(from));
  } else if constexpr (kType == DType::kBF16) {
    return hn::BitCast(f, hn::ShiftLeft<16>(hn::PromoteTo(u, hn::LoadU(half, as<std::uint16_t>(from)))));
  } else if constexpr (kType == DType::kF16) {
    return decode_vector<kType>(hn::PromoteTo(u, hn::LoadU(half, as<std::uint16_t>(from))));
  } else if constexpr (kType == DType::kF8E4M3) {
    return decode_e4m3(from);
  } else {
    return decode_vector<kType>(hn::PromoteTo(u, hn::LoadU(Byte(), as<std::uint8_t>(from))));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstride::cpu
HWY_AFTER_NAMESPACE();

#endif  // per target
