// SPDX-License-Identifier: Apache-2.0
// The loops of attention, for each instruction set.
#include "cpu/attention.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

// Vectors lie in arrays, which those of SVE cannot; such machines run NEON's. SSSE3 and AVX3_DL have nothing that these
// loops use and their neighbours lack: they would double the time of compiling this.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention.cpp"
// The first of these must come first.
// clang-format off
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>
#include <hwy/cache_control.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include "cpu/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstride::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3
constexpr bool kManyRegisters = false;
#else
constexpr bool kManyRegisters = true;  // 32
#endif
constexpr int kRowBlock = kManyRegisters ? 12 : 6;

constexpr std::int64_t lanes() { return static_cast<std::int64_t>(hn::MaxLanes(f)); }

/// Whether pairs of bf16 are taken apart where they lie: without vectors, or big end first, they are not.
constexpr bool kDeals = HWY_TARGET != HWY_SCALAR && std::endian::native == std::endian::little;

/// Elements of a cache; f16 by the machine's own conversion.
template <DType kType>
HWY_INLINE VF element_vector(const std::byte* from) {
  if constexpr (kType == DType::kF16) {
    return hn::PromoteTo(f, hn::LoadU(Float16(), as<hwy::float16_t>(from)));
  } else {
    return load<kType>(from);
  }
}

template <DType kType>
HWY_INLINE const std::byte* at(const std::byte* row, std::int64_t dim) {
  return row + dim * static_cast<std::int64_t>(item_of(kType));
}

/// The last elements of a row, fewer than a vector; zeros behind them.
template <DType kType>
HWY_INLINE VF last_vector(const std::byte* from, std::int64_t count) {
  alignas(64) std::byte some[HWY_MAX_BYTES] = {};
  std::memcpy(some, from, static_cast<std::size_t>(count) * item_of(kType));
  return element_vector<kType>(some);
}

HWY_INLINE float sum_of(VF v) { return hn::GetLane(hn::SumOfLanes(f, v)); }
HWY_INLINE float max_of(VF v) { return hn::GetLane(hn::MaxOfLanes(f, v)); }

#if HWY_TARGET != HWY_SCALAR
const hn::FixedTag<float, 4> four;
using V4 = hn::Vec<decltype(four)>;

/// The sums of parts of a vector of any length.
template <class D>
HWY_INLINE V4 fold(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(d) <= 4) {
    return v;
  } else {
    const hn::Half<D> half_of;
    return fold(half_of, hn::Add(hn::LowerHalf(half_of, v), hn::UpperHalf(half_of, v)));
  }
}

/// Rows become columns.
HWY_INLINE void turn(V4& a, V4& b, V4& c, V4& d) {
  const hn::FixedTag<double, 2> wide;
  const auto ab = hn::BitCast(wide, hn::InterleaveLower(four, a, b));  // a0 b0 a1 b1
  const auto cd = hn::BitCast(wide, hn::InterleaveLower(four, c, d));
  const auto ab_high = hn::BitCast(wide, hn::InterleaveUpper(four, a, b));
  const auto cd_high = hn::BitCast(wide, hn::InterleaveUpper(four, c, d));
  a = hn::BitCast(four, hn::InterleaveLower(wide, ab, cd));
  b = hn::BitCast(four, hn::InterleaveUpper(wide, ab, cd));
  c = hn::BitCast(four, hn::InterleaveLower(wide, ab_high, cd_high));
  d = hn::BitCast(four, hn::InterleaveUpper(wide, ab_high, cd_high));
}

/// The sums of four vectors, in order.
HWY_INLINE V4 sums_of(VF a, VF b, VF c, VF d) {
  const hn::Repartition<double, F> wide;
  const auto ab = hn::BitCast(wide, hn::Add(hn::InterleaveLower(f, a, b), hn::InterleaveUpper(f, a, b)));
  const auto cd = hn::BitCast(wide, hn::Add(hn::InterleaveLower(f, c, d), hn::InterleaveUpper(f, c, d)));
  const auto low = hn::BitCast(f, hn::InterleaveLower(wide, ab, cd));  // a02 b02 c02 d02
  const auto high = hn::BitCast(f, hn::InterleaveUpper(wide, ab, cd));
  return fold(f, hn::Add(low, high));
}
#endif

// ------------------------------------------------------------------------------------------------ products

template <int kRows>
HWY_INLINE void multiply_block(float* HWY_RESTRICT c, std::int64_t c_step, const float* HWY_RESTRICT a,
                               std::int64_t a_step, const float* HWY_RESTRICT b, std::int64_t depth) {
  VF sums[kRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    sums[r][0] = hn::Zero(f);
    sums[r][1] = hn::Zero(f);
  }
  for (std::int64_t k = 0; k < depth; ++k, b += 2 * lanes()) {
    const VF b0 = hn::LoadU(f, b);
    const VF b1 = hn::LoadU(f, b + lanes());
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const VF one = hn::Set(f, a[r * a_step + k]);
      sums[r][0] = hn::MulAdd(one, b0, sums[r][0]);
      sums[r][1] = hn::MulAdd(one, b1, sums[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    hn::StoreU(sums[r][0], f, c + r * c_step);
    hn::StoreU(sums[r][1], f, c + r * c_step + lanes());
  }
}

void multiply(float* c, std::int64_t c_step, const std::byte* rows_of_a, std::int64_t a_step, std::int64_t rows,
              const std::byte* panels_of_b, std::int64_t depth, std::int64_t panel_step, std::int64_t panels) {
  const auto* a = as<float>(rows_of_a);
  const auto* b = as<float>(panels_of_b);
  for (std::int64_t p = 0; p < panels; ++p, b += panel_step, c += 2 * lanes()) {
    std::int64_t r = 0;
    for (; r + kRowBlock <= rows; r += kRowBlock) {
      multiply_block<kRowBlock>(c + r * c_step, c_step, a + r * a_step, a_step, b, depth);
    }
    for (; r + 4 <= rows; r += 4) multiply_block<4>(c + r * c_step, c_step, a + r * a_step, a_step, b, depth);
    for (; r < rows; ++r) multiply_block<1>(c + r * c_step, c_step, a + r * a_step, a_step, b, depth);
  }
}

// ------------------------------------------------------------------------------------------------ packing

/// Four floats of each of four rows become columns; `to` has `step` floats from one to the next.
HWY_INLINE void turn_four(float* to, std::int64_t step, const float* const* rows, std::int64_t first) {
#if HWY_TARGET == HWY_SCALAR
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < 4; ++i) to[i * step + r] = rows[r][first + i];
  }
#else
  V4 a = hn::LoadU(four, rows[0] + first);
  V4 b = hn::LoadU(four, rows[1] + first);
  V4 c = hn::LoadU(four, rows[2] + first);
  V4 d = hn::LoadU(four, rows[3] + first);
  turn(a, b, c, d);
  hn::StoreU(a, four, to);
  hn::StoreU(b, four, to + step);
  hn::StoreU(c, four, to + 2 * step);
  hn::StoreU(d, four, to + 3 * step);
#endif
}

constexpr std::int64_t kPart = 64;  // dims at once

/// Part of a row as f32, whole vectors: zeros behind it.
template <DType kType>
HWY_INLINE void decode_part(float* to, const std::byte* row, std::int64_t first, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + lanes() <= count; i += lanes()) hn::StoreU(element_vector<kType>(at<kType>(row, first + i)), f, to + i);
  if (i < count) hn::StoreU(last_vector<kType>(at<kType>(row, first + i), count - i), f, to + i);
}

/// Panels of `depth` floats of each key, of which fetch(space, key, first, num) gives some: in memory of its own, or in
/// `space`, which has room for kPart.
template <class Fetch>
HWY_INLINE void turn_keys(std::byte* to_panels, std::int64_t count, std::int64_t depth, Fetch&& fetch) {
  constexpr std::int64_t kPanel = 2 * lanes();
  alignas(64) static constexpr float kZeros[kPart] = {};
  alignas(64) float space[4][kPart];
  auto* panels = reinterpret_cast<float*>(to_panels);
  for (std::int64_t t = 0; t < count; t += kPanel, panels += depth * kPanel) {
    for (std::int64_t d = 0; d < depth; d += kPart) {
      const std::int64_t part = std::min(kPart, depth - d);
      for (std::int64_t i = 0; i < kPanel; i += 4) {
        const std::int64_t columns = std::min<std::int64_t>(4, kPanel - i);
        const float* rows[4] = {kZeros, kZeros, kZeros, kZeros};
        for (std::int64_t r = 0; r < std::min(columns, count - t - i); ++r)
          rows[r] = fetch(space[r], t + i + r, d, part);
        float* to = panels + d * kPanel + i;
        std::int64_t j = 0;
        if constexpr (kPanel % 4 == 0) {
          for (; j + 4 <= part; j += 4) turn_four(to + j * kPanel, kPanel, rows, j);
        }
        for (; j < part; ++j) {
          for (std::int64_t r = 0; r < columns; ++r) to[j * kPanel + r] = rows[r][j];
        }
      }
    }
  }
}

template <DType kType>
void pack_keys(std::byte* panels, const std::byte* const* keys, std::int64_t count, std::int64_t dim) {
  turn_keys(panels, count, dim, [&](float* space, std::int64_t key, std::int64_t first, std::int64_t num) HWY_ATTR {
    decode_part<kType>(space, keys[key], first, num);
    return static_cast<const float*>(space);
  });
}

template <DType kType>
bool pack_values(std::byte* to_panels, const std::byte* const* values, std::int64_t count, std::int64_t dim) {
  auto* panels = reinterpret_cast<float*>(to_panels);
  constexpr std::int64_t kPanel = 2 * lanes();
  const U words;
  auto largest = hn::Zero(words);
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t d = 0; d < dim; d += lanes()) {
      const std::int64_t left = dim - d;
      const VF v = left >= lanes() ? element_vector<kType>(at<kType>(values[t], d))
                                   : last_vector<kType>(at<kType>(values[t], d), left);
      float* to = panels + (d / kPanel * count + t) * kPanel + d % kPanel;
      hn::StoreU(v, f, to);
      if (left <= lanes() && d % kPanel == 0) hn::StoreU(hn::Zero(f), f, to + lanes());
      largest = hn::Max(largest, hn::BitCast(words, hn::Abs(v)));
    }
  }
  return hn::AllFalse(words, hn::Gt(largest, hn::Set(words, kInfinity - 1)));
}

/// Two f32 that are bf16, side by side: the first one's bits lower.
HWY_INLINE VU pair_of(VF first, VF second) {
  return hn::Or(hn::ShiftRight<16>(hn::BitCast(u, first)), hn::And(hn::BitCast(u, second), hn::Set(u, 0xFFFF0000U)));
}

/// Pairs of bf16 are turned as floats are: they are bits, nobody calculates with them.
template <DType kType>
void pack_key_pairs(std::byte* panels, const std::byte* const* keys, std::int64_t count, std::int64_t dim) {
  const std::int64_t depth = padded_to(dim, kPairUnit) / 2;
  turn_keys(panels, count, depth, [&](float* space, std::int64_t key, std::int64_t first, std::int64_t num) HWY_ATTR {
    const std::int64_t elements = std::clamp<std::int64_t>(dim - 2 * first, 0, 2 * num);
    if constexpr (kType == DType::kBF16) {
      const std::byte* from = at<kType>(keys[key], 2 * first);
      // turn_four() loads it, wherever it lies.
      if (HWY_TARGET != HWY_SCALAR && elements == 2 * num) return reinterpret_cast<const float*>(from);
      std::memset(space, 0, kPart * sizeof(float));
      std::memcpy(space, from, static_cast<std::size_t>(elements) * 2);
    } else {
      alignas(64) float some[2 * kPart] = {};
      decode_part<kType>(some, keys[key], 2 * first, elements);
      for (std::int64_t i = 0; i < num; ++i) {
        const auto low = std::bit_cast<std::uint32_t>(some[2 * i]) >> 16;
        space[i] = std::bit_cast<float>(low | (std::bit_cast<std::uint32_t>(some[2 * i + 1]) & 0xFFFF0000U));
      }
    }
    return static_cast<const float*>(space);
  });
}

/// Pairs of the values of two keys, and the largest bits of any so far.
#if HWY_TARGET != HWY_SCALAR
HWY_INLINE VU pair_values(const std::byte* first, const std::byte* second, VU& largest) {
  const hn::Repartition<std::uint16_t, F> halves;
  const VU low = hn::PromoteTo(u, hn::LoadU(half, as<std::uint16_t>(first)));
  const VU high = hn::PromoteTo(u, hn::LoadU(half, as<std::uint16_t>(second)));
  const VU both = hn::Or(low, hn::ShiftLeft<16>(high));
  const auto magnitudes = hn::BitCast(halves, hn::And(both, hn::Set(u, 0x7FFF7FFFU)));
  largest = hn::BitCast(u, hn::Max(hn::BitCast(halves, largest), magnitudes));
  return both;
}
#endif

template <DType kType>
bool pack_value_pairs(std::byte* to_panels, const std::byte* const* values, std::int64_t count, std::int64_t dim) {
  constexpr std::int64_t kPanel = 2 * lanes();
  const std::int64_t depth = padded_to(count, kPairUnit);
  auto* panels = reinterpret_cast<std::uint32_t*>(to_panels);
  VU largest = hn::Zero(u);  // of f32
  VU largest_pair = hn::Zero(u);
  const auto part = [&](std::int64_t t, std::int64_t d) HWY_ATTR {
    if (t >= count) return hn::Zero(f);
    const std::byte* from = at<kType>(values[t], d);
    const VF v = dim - d >= lanes() ? element_vector<kType>(from) : last_vector<kType>(from, dim - d);
    largest = hn::Max(largest, hn::BitCast(u, hn::Abs(v)));
    return v;
  };
  for (std::int64_t t = 0; t < depth; t += 2) {
    for (std::int64_t d = 0; d < dim; d += lanes()) {
      std::uint32_t* to = panels + (d / kPanel * depth + t) / 2 * kPanel + d % kPanel;
      if (dim - d <= lanes() && d % kPanel == 0) hn::StoreU(hn::Zero(u), u, to + lanes());
#if HWY_TARGET != HWY_SCALAR
      if (kType == DType::kBF16 && t + 1 < count && dim - d >= lanes()) {
        hn::StoreU(pair_values(at<kType>(values[t], d), at<kType>(values[t + 1], d), largest_pair), u, to);
        continue;
      }
#endif
      const VF first = part(t, d);
      const VF second = part(t + 1, d);
      hn::StoreU(pair_of(first, second), u, to);
    }
  }
  largest = hn::Max(largest, hn::Max(hn::ShiftLeft<16>(largest_pair), hn::And(largest_pair, hn::Set(u, 0x7FFF0000U))));
  return hn::AllFalse(u, hn::Gt(largest, hn::Set(u, kInfinity - 1)));
}

// ------------------------------------------------------------------------------------------------ few rows

/// Rows that are asked for ahead of those at work, a line at a time while these are used.
constexpr std::int64_t kAhead = 12;

/// Elements of a line.
template <DType kType>
constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(item_of(kType));

template <int kRows>
HWY_INLINE void ask_for(const std::byte* const* rows, std::int64_t offset) {
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) hwy::Prefetch(rows[i] + offset);
}

HWY_INLINE const std::byte* const* later_of(const std::byte* const* rows, std::int64_t first, std::int64_t num,
                                            std::int64_t count) {
  return rows + std::min(first + kAhead, count - num);
}

/// Elements that load_side() takes apart where they lie.
template <DType kType>
constexpr bool kDealt = kDeals && (kType == DType::kBF16 || kType == DType::kF8E4M3 || kType == DType::kF8E5M2);

/// What a vector of load_side() must be multiplied by: f8_e4m3 comes by way of f16, whose exponents have another bias.
template <DType kType>
constexpr float kUnit = kDealt<kType>&& kType == DType::kF8E4M3 ? 256.0F : 1.0F;

/// Side 0 or 1 of the elements of two vectors: those at even or at odd places where they are dealt (`deal`), the first
/// or the second half of others. `kNaN`: f8_e4m3 may be NaN, which takes half of the time; 480 is what it comes out as.
template <DType kType, bool kNaN = true>
HWY_INLINE VF load_side(const std::byte* from, int side) {
  if constexpr (kDealt<kType> && kType != DType::kBF16) {
    const VHalf both = hn::LoadU(half, as<std::uint16_t>(from));
    const VHalf high = side == 0 ? hn::ShiftLeft<8>(both) : both;
    if constexpr (kType == DType::kF8E5M2) {
      return hn::PromoteTo(f, hn::BitCast(Float16(), hn::And(high, hn::Set(half, 0xFF00))));
    }
    // The sign comes twice; the second one and the other element are masked.
    const hn::Rebind<std::int16_t, F> wide;
    const VHalf moved = hn::BitCast(half, hn::ShiftRight<1>(hn::BitCast(wide, high)));
    VHalf bits = hn::And(moved, hn::Set(half, 0xBF80));
    if constexpr (kNaN) {
      const VHalf magnitude = hn::And(bits, hn::Set(half, 0x3F80));
      bits = hn::Or(bits, hn::VecFromMask(half, hn::Eq(magnitude, hn::Set(half, 0x3F80))));
    }
    return hn::PromoteTo(f, hn::BitCast(Float16(), bits));
  } else if constexpr (kDealt<kType>) {
    const VU both = hn::LoadU(u, as<std::uint32_t>(from));
    // Shifts, not a mask: that would take a register which the sums need.
    return hn::BitCast(f, hn::ShiftLeft<16>(side == 0 ? both : hn::ShiftRight<16>(both)));
  } else {
    return element_vector<kType>(at<kType>(from, side * lanes()));
  }
}

/// Whether one of some rows has a NaN that load_side() without kNaN would not tell.
template <DType kType>
HWY_INLINE bool any_nan(const std::byte* const* rows, std::int64_t count, std::int64_t head, std::int64_t dim) {
  if constexpr (!kDealt<kType> || kType != DType::kF8E4M3) return false;
  const hn::ScalableTag<std::uint8_t> bytes;
  const auto step = static_cast<std::int64_t>(hn::MaxLanes(bytes));
  const auto magnitude = hn::Set(bytes, 0x7F);
  auto found = hn::Zero(bytes);
  bool rest = false;
  for (std::int64_t r = 0; r < count; ++r) {
    const auto* row = as<std::uint8_t>(rows[r] + head);
    std::int64_t d = 0;
    for (; d + step <= dim; d += step) {
      const auto v = hn::And(hn::LoadU(bytes, row + d), magnitude);
      found = hn::Or(found, hn::VecFromMask(bytes, hn::Eq(v, magnitude)));
    }
    for (; d < dim; ++d) rest = rest || (row[d] & 0x7F) == 0x7F;
  }
  return rest || !hn::AllFalse(bytes, hn::Ne(found, hn::Zero(bytes)));
}

/// The last elements of a row, fewer than two vectors, with zeros behind them.
template <DType kType>
struct Last {
  alignas(64) std::byte some[2 * HWY_MAX_BYTES] = {};
  const std::byte* of(const std::byte* from, std::int64_t count) {
    std::memcpy(some, from, static_cast<std::size_t>(count) * item_of(kType));
    return some;
  }
};

/// Rows of f32 in the order of load_side(), and back.
template <DType kType, bool kBack>
void deal(float* row, std::int64_t count) {
  if constexpr (kDealt<kType>) {
    constexpr std::int64_t kBlock = 2 * lanes();
    float old[kBlock];
    for (std::int64_t d = 0; d < count; d += kBlock) {
      std::memcpy(old, row + d, sizeof old);
      for (std::int64_t i = 0; i < kBlock; ++i) {
        const std::int64_t dealt = i % 2 * lanes() + i / 2;
        row[d + (kBack ? i : dealt)] = old[kBack ? dealt : i];
      }
    }
  }
}

/// Scores of kRows query rows and kKeys keys.
template <DType kType, bool kNaN, int kRows, int kKeys>
HWY_INLINE void score_block(float* out, std::int64_t out_step, const float* query, std::int64_t query_step,
                            const std::byte* const* keys, const std::byte* const* later, std::int64_t head,
                            std::int64_t dim) {
  VF sums[kRows][kKeys];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) sums[r][k] = hn::Zero(f);
  }
  const auto step = [&](std::int64_t d, const std::byte* const* from, std::int64_t offset) HWY_ATTR {
#pragma GCC unroll 2
    for (int side = 0; side < 2; ++side) {
      VF key[kKeys];
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) key[k] = load_side<kType, kNaN>(from[k] + offset, side);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const VF q = hn::LoadU(f, query + r * query_step + d + side * lanes());
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) sums[r][k] = hn::MulAdd(q, key[k], sums[r][k]);
      }
    }
  };
  std::int64_t d = 0;
  for (; d + 2 * lanes() <= dim; d += 2 * lanes()) {
    const std::int64_t offset = head + d * static_cast<std::int64_t>(item_of(kType));
    if (d % kLine<kType> == 0) ask_for<kKeys>(later, offset);
    step(d, keys, offset);
  }
  if (d < dim) {
    const std::byte* last[kKeys];
    std::array<Last<kType>, kKeys> copies;
    for (int k = 0; k < kKeys; ++k)
      last[k] = copies[static_cast<std::size_t>(k)].of(at<kType>(keys[k] + head, d), dim - d);
    step(d, last, 0);
  }
#if HWY_TARGET != HWY_SCALAR
  if constexpr (kRows == 4 && kKeys % 3 == 0) {
    // Three scores of each row at once; what is behind them is written next, or masked.
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; k += 3) {
      const auto sums_at = [&](int i) HWY_ATTR { return sums_of(sums[0][i], sums[1][i], sums[2][i], sums[3][i]); };
      V4 a = sums_at(k);
      V4 b = sums_at(k + 1);
      V4 c = sums_at(k + 2);
      V4 rest = hn::Zero(four);
      turn(a, b, c, rest);
      hn::StoreU(a, four, out + k);
      hn::StoreU(b, four, out + out_step + k);
      hn::StoreU(c, four, out + 2 * out_step + k);
      hn::StoreU(rest, four, out + 3 * out_step + k);
    }
    return;
  }
#endif
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) out[r * out_step + k] = sum_of(sums[r][k]);
  }
}

/// Calls use(rows as a constant, first row) for blocks of four, two and one rows.
template <class Use>
HWY_INLINE void for_row_blocks(std::int64_t rows, Use&& use) {
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4) use(std::integral_constant<int, 4>(), r);
  for (; r + 2 <= rows; r += 2) use(std::integral_constant<int, 2>(), r);
  if (r < rows) use(std::integral_constant<int, 1>(), r);
}

/// Scores of the rows of one head and `count` keys from `t` on.
template <DType kType, bool kNaN>
HWY_INLINE void score_head(float* out, std::int64_t out_step, const float* query, std::int64_t query_step,
                           std::int64_t rows, const std::byte* const* keys, std::int64_t t, std::int64_t here,
                           std::int64_t count, std::int64_t head, std::int64_t dim) {
  for_row_blocks(rows, [&](auto num, std::int64_t r) HWY_ATTR {
    constexpr int kRows = decltype(num)::value;
    constexpr int kKeys = kManyRegisters || kRows < 4 ? 6 : 3;
    float* to = out + r * out_step + t;
    const float* from = query + r * query_step;
    std::int64_t k = 0;
    for (; k + kKeys <= here; k += kKeys) {
      score_block<kType, kNaN, kRows, kKeys>(to + k, out_step, from, query_step, keys + t + k,
                                             later_of(keys, t + k, kKeys, count), head, dim);
    }
    for (; k < here; ++k) {
      score_block<kType, kNaN, kRows, 1>(to + k, out_step, from, query_step, keys + t + k,
                                         later_of(keys, t + k, 1, count), head, dim);
    }
  });
}

template <DType kType>
void scores(float* out, std::int64_t out_step, const float* query, std::int64_t query_step, std::int64_t rows,
            const std::byte* const* keys, std::int64_t count, std::int64_t dim, const Heads& heads) {
  constexpr std::int64_t kStep = 12;
  for (std::int64_t t = 0; t < count; t += kStep) {
    const std::int64_t here = std::min(kStep, count - t);
    for (std::int64_t h = 0; h < heads.count; ++h) {
      const std::int64_t head = heads.first + h * heads.step;
      float* to = out + h * rows * out_step;
      const float* from = query + h * rows * query_step;
      if (any_nan<kType>(keys + t, here, head, dim)) {
        score_head<kType, true>(to, out_step, from, query_step, rows, keys, t, here, count, head, dim);
      } else {
        score_head<kType, false>(to, out_step, from, query_step, rows, keys, t, here, count, head, dim);
      }
    }
  }
}

constexpr int kValueStep = 8;  // keys at once

/// kRows rows of the output += kKeys weights of each × values.
template <DType kType, bool kNaN, int kRows, int kKeys>
HWY_INLINE void add_block(float* out, std::int64_t out_step, const float* weights, std::int64_t weight_step,
                          const std::byte* const* values, const std::byte* const* later, std::int64_t head,
                          std::int64_t dim) {
  const float* weight[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) weight[r] = weights + r * weight_step;
  const auto step = [&](std::int64_t d, const std::byte* const* from, std::int64_t offset) HWY_ATTR {
    VF sums[kRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = hn::LoadU(f, out + r * out_step + d);
      sums[r][1] = hn::LoadU(f, out + r * out_step + d + lanes());
    }
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      const VF first = load_side<kType, kNaN>(from[k] + offset, 0);
      const VF second = load_side<kType, kNaN>(from[k] + offset, 1);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const VF one = hn::Set(f, weight[r][k]);
        sums[r][0] = hn::MulAdd(one, first, sums[r][0]);
        sums[r][1] = hn::MulAdd(one, second, sums[r][1]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      hn::StoreU(sums[r][0], f, out + r * out_step + d);
      hn::StoreU(sums[r][1], f, out + r * out_step + d + lanes());
    }
  };
  std::int64_t d = 0;
  for (; d + 2 * lanes() <= dim; d += 2 * lanes()) {
    const std::int64_t offset = head + d * static_cast<std::int64_t>(item_of(kType));
    if (d % kLine<kType> == 0) ask_for<kKeys>(later, offset);
    step(d, values, offset);
  }
  if (d < dim) {
    const std::byte* last[kKeys];
    std::array<Last<kType>, kKeys> copies;
    for (int k = 0; k < kKeys; ++k) {
      last[k] = copies[static_cast<std::size_t>(k)].of(at<kType>(values[k] + head, d), dim - d);
    }
    step(d, last, 0);
  }
}

/// Rows of one head of the output += `here` weights × values from `t` on.
template <DType kType, bool kNaN>
HWY_INLINE void add_head(float* out, std::int64_t out_step, const float* weights, std::int64_t weight_step,
                         std::int64_t rows, const std::byte* const* values, std::int64_t t, std::int64_t here,
                         std::int64_t count, std::int64_t head, std::int64_t dim) {
  constexpr int kKeys = kValueStep;
  for_row_blocks(rows, [&](auto num, std::int64_t r) HWY_ATTR {
    constexpr int kRows = decltype(num)::value;
    float* to = out + r * out_step;
    const float* from = weights + r * weight_step + t;
    if (here == kKeys) {
      add_block<kType, kNaN, kRows, kKeys>(to, out_step, from, weight_step, values + t,
                                           later_of(values, t, kKeys, count), head, dim);
      return;
    }
    for (std::int64_t k = 0; k < here; ++k) {
      add_block<kType, kNaN, kRows, 1>(to, out_step, from + k, weight_step, values + t + k,
                                       later_of(values, t + k, 1, count), head, dim);
    }
  });
}

template <DType kType>
void add_values(float* out, std::int64_t out_step, const float* weights, std::int64_t weight_step, std::int64_t rows,
                const std::byte* const* values, std::int64_t count, std::int64_t dim, const Heads& heads) {
  for (std::int64_t t = 0; t < count; t += kValueStep) {
    const std::int64_t here = std::min<std::int64_t>(kValueStep, count - t);
    for (std::int64_t h = 0; h < heads.count; ++h) {
      const std::int64_t head = heads.first + h * heads.step;
      float* to = out + h * rows * out_step;
      const float* from = weights + h * rows * weight_step;
      if (any_nan<kType>(values + t, here, head, dim)) {
        add_head<kType, true>(to, out_step, from, weight_step, rows, values, t, here, count, head, dim);
      } else {
        add_head<kType, false>(to, out_step, from, weight_step, rows, values, t, here, count, head, dim);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ softmax

/// The largest of some vectors so far, and whether one had a NaN.
struct Largest {
  VF most;
  hn::Mask<F> nan;
};

HWY_INLINE void add(Largest& to, VF v) {
  to.most = hn::Max(to.most, v);
  to.nan = hn::Or(to.nan, hn::IsNaN(v));
}

HWY_INLINE float value_of(const Largest& a, const Largest& b) {
  if (!hn::AllFalse(f, hn::Or(a.nan, b.nan))) return std::numeric_limits<float>::quiet_NaN();
  return max_of(hn::Max(a.most, b.most));
}

float finish(float* scores, std::int64_t first, std::int64_t end, std::int64_t count, float scale, float cap,
             bool write) {
  std::fill(scores, scores + first, kLowest);
  std::fill(scores + end, scores + count, kLowest);
  const VF lowest = hn::Set(f, kLowest);
  Largest even{lowest, hn::IsNaN(lowest)};
  Largest odd = even;
  const VF times = hn::Set(f, scale);
  std::int64_t i = first / lanes() * lanes();
  if (!write) {
    for (; i + lanes() < end; i += 2 * lanes()) {
      add(even, hn::LoadU(f, scores + i));
      add(odd, hn::LoadU(f, scores + i + lanes()));
    }
    if (i < end) add(even, hn::LoadU(f, scores + i));
    return value_of(even, odd) * scale;
  }
  for (; i < end; i += lanes()) {
    VF v = hn::Mul(hn::LoadU(f, scores + i), times);
    if (cap > 0.0F) v = hn::Mul(hn::Set(f, cap), hn::Tanh(f, hn::Div(v, hn::Set(f, cap))));
    if (i < first || i + lanes() > end) {
      const auto before = hn::FirstN(f, static_cast<std::size_t>(std::max<std::int64_t>(first - i, 0)));
      const auto inside = hn::FirstN(f, static_cast<std::size_t>(std::min(end - i, lanes())));
      v = hn::IfThenElse(before, lowest, hn::IfThenElse(inside, v, lowest));
    }
    hn::StoreU(v, f, scores + i);
    add(even, v);
  }
  return value_of(even, odd);
}

/// exp(x) of x not above 0, to 2 units in the last place; 0 below the smallest normal number, NaN of NaN. Half the time
/// of Highway's, which also knows what lies above.
HWY_INLINE VF exp_below(VF x) {
  const VF shift = hn::Set(f, 12582912.0F + 127.0F);  // 1.5 × 2^23: adding it rounds to a whole number
  const VF whole = hn::MulAdd(x, hn::Set(f, 1.44269504F), shift);
  const VF n = hn::Sub(whole, shift);
  VF r = hn::NegMulAdd(n, hn::Set(f, 0.693145752F), x);
  r = hn::NegMulAdd(n, hn::Set(f, 1.42860677e-6F), r);  // |r| <= ln 2 / 2
  VF p = hn::MulAdd(r, hn::Set(f, 1.0F / 720), hn::Set(f, 1.0F / 120));
  p = hn::MulAdd(p, r, hn::Set(f, 1.0F / 24));
  p = hn::MulAdd(p, r, hn::Set(f, 1.0F / 6));
  p = hn::MulAdd(p, r, hn::Set(f, 0.5F));
  p = hn::MulAdd(p, r, hn::Set(f, 1.0F));
  p = hn::MulAdd(p, r, hn::Set(f, 1.0F));
  const VU power = hn::ShiftLeft<23>(hn::BitCast(u, whole));  // n + 127, in the exponent's place
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(f, -87.3F)), hn::Mul(p, hn::BitCast(f, power)));
}

/// score × scale − max, each rounded: 0 for the score that is the maximum. This file is compiled without contraction of
/// the two, which would leave its rounding error, of large scores more than the exponential can take.
HWY_INLINE VF below(VF score, VF scale, VF max) { return hn::Sub(hn::Mul(score, scale), max); }

float exponentiate(float* scores, std::int64_t count, float scale, float max) {
  const VF times = hn::Set(f, scale);
  const VF top = hn::Set(f, max);
  VF sum = hn::Zero(f);
  for (std::int64_t i = 0; i < count; i += lanes()) {
    const VF e = exp_below(below(hn::LoadU(f, scores + i), times, top));
    hn::StoreU(e, f, scores + i);
    sum = hn::Add(sum, e);
  }
  return sum_of(sum);
}

/// 2^y of y not above 0, to 10^-7; 0 below the smallest normal number, NaN of NaN.
HWY_INLINE VF power_below(VF y) {
  const VF shift = hn::Set(f, 12582912.0F + 127.0F);  // as above
  const VF whole = hn::Add(y, shift);
  const VF r = hn::Sub(y, hn::Sub(whole, shift));  // |r| <= 1/2
  // The polynomial of degree 5 with the least relative error there.
  VF p = hn::MulAdd(r, hn::Set(f, 0.00132764713F), hn::Set(f, 0.00967554096F));
  p = hn::MulAdd(p, r, hn::Set(f, 0.0555071309F));
  p = hn::MulAdd(p, r, hn::Set(f, 0.240221202F));
  p = hn::MulAdd(p, r, hn::Set(f, 0.693146944F));
  p = hn::MulAdd(p, r, hn::Set(f, 1.00000012F));
  const VU power = hn::ShiftLeft<23>(hn::BitCast(u, whole));
  return hn::IfThenZeroElse(hn::Lt(y, hn::Set(f, -126.0F)), hn::Mul(p, hn::BitCast(f, power)));
}

/// The upper halves of f32.
HWY_INLINE void store_upper(VF first, VF second, std::byte* to) {
#if HWY_TARGET == HWY_SCALAR
  const std::uint32_t bits = hn::GetLane(pair_of(first, second));
  std::memcpy(to, &bits, sizeof bits);
#else
  const hn::Repartition<std::uint16_t, F> halves;
  hn::StoreU(hn::ConcatOdd(halves, hn::BitCast(halves, second), hn::BitCast(halves, first)), halves,
             reinterpret_cast<std::uint16_t*>(to));
#endif
}

/// f32 above 0, so that their upper halves are they themselves, rounded.
HWY_INLINE VF half_up(VF v) { return hn::BitCast(f, hn::Add(hn::BitCast(u, v), hn::Set(u, 0x8000))); }

float weigh(std::byte* to, const float* scores, std::int64_t count, std::int64_t padded, float scale, float max) {
  const VF log2_e = hn::Set(f, 1.44269504F);
  const VF times = hn::Set(f, scale);
  const VF top = hn::Set(f, max);
  VF sums[2] = {hn::Zero(f), hn::Zero(f)};
  for (std::int64_t i = 0; i < padded; i += 2 * lanes()) {
    VF e[2];
#pragma GCC unroll 2
    for (int side = 0; side < 2; ++side) {
      const std::int64_t first = i + side * lanes();
      e[side] = power_below(hn::Mul(below(hn::LoadU(f, scores + first), times, top), log2_e));
      if (first + lanes() > count) {
        const std::int64_t left = std::max<std::int64_t>(count - first, 0);
        e[side] = hn::IfThenElseZero(hn::FirstN(f, static_cast<std::size_t>(left)), e[side]);
      }
      sums[side] = hn::Add(sums[side], e[side]);
    }
    store_upper(half_up(e[0]), half_up(e[1]), to + 2 * i);
  }
  return sum_of(hn::Add(sums[0], sums[1]));
}

void narrow(std::byte* to, const float* from, std::int64_t padded) {
  for (std::int64_t i = 0; i < padded; i += 2 * lanes()) {
    store_upper(hn::LoadU(f, from + i), hn::LoadU(f, from + i + lanes()), to + 2 * i);
  }
}

void add_row(float* to, const float* from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += lanes()) {
    hn::StoreU(hn::Add(hn::LoadU(f, to + i), hn::LoadU(f, from + i)), f, to + i);
  }
}

void multiply_row(float* x, std::int64_t count, float factor) {
  const VF by = hn::Set(f, factor);
  for (std::int64_t i = 0; i < count; i += lanes()) hn::StoreU(hn::Mul(hn::LoadU(f, x + i), by), f, x + i);
}

template <int kGroup>
void keep_of(float* scores, std::int64_t count, int n) {
  for (std::int64_t i = 0; i + kGroup <= count; i += kGroup) {
    float old[kGroup];
    std::memcpy(old, scores + i, sizeof old);
    for (int a = 0; a < kGroup; ++a) {
      int before = 0;
      for (int b = 0; b < kGroup; ++b) before += old[b] > old[a] || (kGroup == 4 && b < a && old[b] == old[a]) ? 1 : 0;
      if (before >= n) scores[i + a] = kLowest;
    }
  }
}

void keep(float* scores, std::int64_t count, int n, int m) {
  if (m == 4) return keep_of<4>(scores, count, n);
  keep_of<8>(scores, count, n);
}

template <DType kType>
constexpr KeyLoops key_loops_of() {
  KeyLoops out{scores<kType>, pack_keys<kType>, nullptr, deal<kType, false>, kUnit<kType>};
  if constexpr (fits_bf16(kType)) out.pack_pairs = pack_key_pairs<kType>;
  return out;
}

template <DType kType>
constexpr ValueLoops value_loops_of() {
  ValueLoops out{add_values<kType>, pack_values<kType>, nullptr, deal<kType, true>, kUnit<kType>};
  if constexpr (fits_bf16(kType)) out.pack_pairs = pack_value_pairs<kType>;
  return out;
}

}  // namespace

AttentionMath MathFor() {
  return {2 * lanes(), multiply, finish, exponentiate, weigh, narrow, add_row, multiply_row, keep};
}

KeyLoops KeysFor(DType dtype) {
  switch (dtype) {
    case DType::kF32: return key_loops_of<DType::kF32>();
    case DType::kF16: return key_loops_of<DType::kF16>();
    case DType::kBF16: return key_loops_of<DType::kBF16>();
    case DType::kF8E5M2: return key_loops_of<DType::kF8E5M2>();
    default: return key_loops_of<DType::kF8E4M3>();
  }
}

ValueLoops ValuesFor(DType dtype) {
  switch (dtype) {
    case DType::kF32: return value_loops_of<DType::kF32>();
    case DType::kF16: return value_loops_of<DType::kF16>();
    case DType::kBF16: return value_loops_of<DType::kBF16>();
    case DType::kF8E5M2: return value_loops_of<DType::kF8E5M2>();
    default: return value_loops_of<DType::kF8E4M3>();
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvstride::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstride::cpu {

HWY_EXPORT(MathFor);
HWY_EXPORT(KeysFor);
HWY_EXPORT(ValuesFor);

const AttentionMath& attention_math() {
  static const AttentionMath math = HWY_DYNAMIC_DISPATCH(MathFor)();
  return math;
}

KeyLoops key_loops(DType dtype) { return HWY_DYNAMIC_DISPATCH(KeysFor)(dtype); }
ValueLoops value_loops(DType dtype) { return HWY_DYNAMIC_DISPATCH(ValuesFor)(dtype); }

}  // namespace kvstride::cpu
#endif
