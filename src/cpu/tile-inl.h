// SPDX-License-Identifier: Apache-2.0
// Tiles: rows of elements that become columns, in 128-bit registers. Included once per Highway target.
#if defined(KVSTRIDE_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRIDE_CPU_TILE_INL_H_
#undef KVSTRIDE_CPU_TILE_INL_H_
#else
#define KVSTRIDE_CPU_TILE_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace kvstride::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

[[maybe_unused]] inline const std::uint8_t* u8(const std::byte* p) { return reinterpret_cast<const std::uint8_t*>(p); }
[[maybe_unused]] inline std::uint8_t* u8(std::byte* p) { return reinterpret_cast<std::uint8_t*>(p); }

/// `rows` of the source at `src_row` bytes, whose elements lie side by side, to `columns` of the destination at
/// `dst_column` bytes.
struct Tile {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t src_row;
  std::int64_t dst_column;
};

/// Lines to ask for while others are moved.
struct Ahead {
  const std::byte* base;
  const std::int32_t* lines;
  std::size_t left;

  /// The next lines, as many as `kBytes` make.
  template <std::size_t kBytes>
  HWY_INLINE void step() {
    for (std::size_t i = 0; i < (kBytes + 63) / 64 && left > 0; ++i, --left) hwy::Prefetch(base + *lines++);
  }
};

/// 16 bytes that move together.
struct Sixteen {
  std::uint64_t halves[2];
};

template <class T>
HWY_INLINE void element(std::byte* dst, const std::byte* src) {
  std::memcpy(dst, src, sizeof(T));
}

#if HWY_TARGET == HWY_SCALAR

template <class T>
void tile_of(std::byte* dst, const std::byte* src, const Tile& tile, Ahead&) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    for (std::int64_t c = 0; c < tile.columns; ++c) {
      element<T>(dst + c * tile.dst_column + r * kItem, src + r * tile.src_row + c * kItem);
    }
  }
}

#else

/// kRows vectors, each with elements of its row, to kRows vectors in which the rows alternate element by element.
template <int kRows, class D, class V>
HWY_INLINE void interleave(D d, V (&v)[kRows]) {
  for (int stage = 1; stage < kRows; stage *= 2) {
    V t[kRows];
    for (int i = 0; i < kRows / 2; ++i) {
      t[2 * i] = hn::InterleaveLower(d, v[i], v[i + kRows / 2]);
      t[2 * i + 1] = hn::InterleaveUpper(d, v[i], v[i + kRows / 2]);
    }
    for (int i = 0; i < kRows; ++i) v[i] = t[i];
  }
}

/// The reverse: kColumns vectors of alternating elements to one vector a column.
template <int kColumns, class D, class V>
HWY_INLINE void separate(D d, V (&v)[kColumns]) {
  for (int stage = 1; stage < kColumns; stage *= 2) {
    V t[kColumns];
    for (int i = 0; i < kColumns / 2; ++i) {
      t[i] = hn::ConcatEven(d, v[2 * i + 1], v[2 * i]);
      t[i + kColumns / 2] = hn::ConcatOdd(d, v[2 * i + 1], v[2 * i]);
    }
    for (int i = 0; i < kColumns; ++i) v[i] = t[i];
  }
}

/// kCount registers from `src`, `src_step` bytes apart, permuted, to `dst`, `dst_step` bytes apart.
template <class T, int kCount, class Permute>
HWY_INLINE void exchange(std::byte* dst, std::int64_t dst_step, const std::byte* src, std::int64_t src_step,
                         const Permute& permute, Ahead& ahead) {
  const hn::FixedTag<T, 16 / sizeof(T)> d;
  const hn::FixedTag<std::uint8_t, 16> bytes;
  decltype(hn::Zero(d)) v[kCount];
  for (int i = 0; i < kCount; ++i) v[i] = hn::BitCast(d, hn::LoadU(bytes, u8(src + i * src_step)));
  permute(d, v);
  for (int i = 0; i < kCount; ++i) hn::StoreU(hn::BitCast(bytes, v[i]), bytes, u8(dst + i * dst_step));
  ahead.step<16 * kCount>();
}

/// Squares of 16 bytes by 16 bytes in registers; edges one element at a time.
template <class T>
struct Transpose {
  static void run(std::byte* dst, const std::byte* src, const Tile& tile, Ahead& ahead) {
    constexpr int kSide = 16 / sizeof(T);
    constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
    const std::int64_t rows = tile.rows - tile.rows % kSide;
    const std::int64_t columns = tile.columns - tile.columns % kSide;
    for (std::int64_t c = 0; c < columns; c += kSide) {
      for (std::int64_t r = 0; r < rows; r += kSide) {
        exchange<T, kSide>(
            dst + c * tile.dst_column + r * kItem, tile.dst_column, src + r * tile.src_row + c * kItem, tile.src_row,
            [](auto d, auto& v) { interleave<kSide>(d, v); }, ahead);
      }
      for (std::int64_t r = rows; r < tile.rows; ++r) {
        for (std::int64_t i = c; i < c + kSide; ++i) {
          element<T>(dst + i * tile.dst_column + r * kItem, src + r * tile.src_row + i * kItem);
        }
      }
    }
    for (std::int64_t c = columns; c < tile.columns; ++c) {
      for (std::int64_t r = 0; r < tile.rows; ++r) {
        element<T>(dst + c * tile.dst_column + r * kItem, src + r * tile.src_row + c * kItem);
      }
    }
  }
};

template <>
struct Transpose<Sixteen> {
  static void run(std::byte* dst, const std::byte* src, const Tile& tile, Ahead& ahead) {
    const hn::FixedTag<std::uint8_t, 16> bytes;
    for (std::int64_t c = 0; c < tile.columns; ++c) {
      for (std::int64_t r = 0; r < tile.rows; ++r) {
        hn::StoreU(hn::LoadU(bytes, u8(src + r * tile.src_row + c * 16)), bytes,
                   u8(dst + c * tile.dst_column + r * 16));
      }
      ahead.step<64>();
    }
  }
};

/// Two or four rows whose elements alternate in consecutive memory.
template <class T, int kRows>
HWY_INLINE void zip(std::byte* dst, const std::byte* src, const Tile& tile, Ahead& ahead) {
  constexpr int kSide = 16 / sizeof(T);
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  std::int64_t c = 0;
  for (; c + kSide <= tile.columns; c += kSide) {
    exchange<T, kRows>(
        dst + c * kRows * kItem, 16, src + c * kItem, tile.src_row, [](auto d, auto& v) { interleave<kRows>(d, v); },
        ahead);
  }
  for (; c < tile.columns; ++c) {
    for (int r = 0; r < kRows; ++r) {
      element<T>(dst + (c * kRows + r) * kItem, src + r * tile.src_row + c * kItem);
    }
  }
}

/// The reverse: consecutive pairs or fours to two or four columns.
template <class T, int kColumns>
HWY_INLINE void unzip(std::byte* dst, const std::byte* src, const Tile& tile, Ahead& ahead) {
  constexpr int kSide = 16 / sizeof(T);
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  std::int64_t r = 0;
  for (; r + kSide <= tile.rows; r += kSide) {
    exchange<T, kColumns>(
        dst + r * kItem, tile.dst_column, src + kColumns * r * kItem, 16,
        [](auto d, auto& v) { separate<kColumns>(d, v); }, ahead);
  }
  for (; r < tile.rows; ++r) {
    for (std::int64_t c = 0; c < kColumns; ++c) {
      element<T>(dst + c * tile.dst_column + r * kItem, src + (kColumns * r + c) * kItem);
    }
  }
}

template <class T>
HWY_INLINE void tile_of(std::byte* dst, const std::byte* src, const Tile& tile, Ahead& ahead) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  if constexpr (sizeof(T) < 16) {
    if (tile.dst_column == tile.rows * kItem) {
      if (tile.rows == 2) return zip<T, 2>(dst, src, tile, ahead);
      if (sizeof(T) < 8 && tile.rows == 4) return zip<T, 4>(dst, src, tile, ahead);
    }
    if (tile.src_row == tile.columns * kItem) {
      if (tile.columns == 2) return unzip<T, 2>(dst, src, tile, ahead);
      if (sizeof(T) < 8 && tile.columns == 4) return unzip<T, 4>(dst, src, tile, ahead);
    }
  }
  Transpose<T>::run(dst, src, tile, ahead);
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstride::cpu
HWY_AFTER_NAMESPACE();
#endif
