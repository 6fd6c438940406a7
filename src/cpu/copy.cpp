// SPDX-License-Identifier: Apache-2.0
// Copies of runs and of single elements over nested loops, for every instruction set that Highway compiles.
#include "cpu/copy.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/copy.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kvstride::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using plan::Loop;

constexpr std::int64_t kLine = 64;

[[maybe_unused]] const std::uint8_t* u8(const std::byte* p) { return reinterpret_cast<const std::uint8_t*>(p); }
[[maybe_unused]] std::uint8_t* u8(std::byte* p) { return reinterpret_cast<std::uint8_t*>(p); }

/// Rows of a tile: `rows` of `src` at `src_row` bytes, whose elements become columns of `dst` at `dst_column` bytes.
struct Tile {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t src_row;
  std::int64_t dst_column;
};

template <std::int64_t kBytes>
void fixed_runs(std::byte* dst, const std::byte* src, const Loop& loop) {
  for (std::int64_t i = 0; i < loop.extent; ++i) std::memcpy(dst + i * loop.dst, src + i * loop.src, kBytes);
}

[[maybe_unused]] bool aligned(const std::byte* p, std::uintptr_t to) {
  return reinterpret_cast<std::uintptr_t>(p) % to == 0;
}

/// 16 bytes that move together.
struct Sixteen {
  std::uint64_t halves[2];
};

template <class T>
void element(std::byte* dst, const std::byte* src) {
  std::memcpy(dst, src, sizeof(T));
}

#if HWY_TARGET == HWY_SCALAR

void stream_run(std::byte* dst, const std::byte* src, std::int64_t bytes) {
  std::memcpy(dst, src, static_cast<std::size_t>(bytes));
}

template <class T>
void tile_of(std::byte* dst, const std::byte* src, const Tile& tile, bool) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    for (std::int64_t c = 0; c < tile.columns; ++c) {
      element<T>(dst + c * tile.dst_column + r * kItem, src + r * tile.src_row + c * kItem);
    }
  }
}

#else

using Bytes = hn::ScalableTag<std::uint8_t>;

/// One run past the caches: whole lines are written at once, so that none is read before it is overwritten.
void stream_run(std::byte* dst, const std::byte* src, std::int64_t bytes) {
  const Bytes d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t head = std::min<std::int64_t>(bytes, -reinterpret_cast<std::intptr_t>(dst) & (kLine - 1));
  if (head != 0) std::memcpy(dst, src, static_cast<std::size_t>(head));
  std::int64_t i = head;
  if (step <= kLine) {
    for (; i + 4 * step <= bytes; i += 4 * step) {
      const auto v0 = hn::LoadU(d, u8(src + i));
      const auto v1 = hn::LoadU(d, u8(src + i + step));
      const auto v2 = hn::LoadU(d, u8(src + i + 2 * step));
      const auto v3 = hn::LoadU(d, u8(src + i + 3 * step));
      hn::Stream(v0, d, u8(dst + i));
      hn::Stream(v1, d, u8(dst + i + step));
      hn::Stream(v2, d, u8(dst + i + 2 * step));
      hn::Stream(v3, d, u8(dst + i + 3 * step));
    }
    for (; i + step <= bytes; i += step) hn::Stream(hn::LoadU(d, u8(src + i)), d, u8(dst + i));
  }
  if (i < bytes) std::memcpy(dst + i, src + i, static_cast<std::size_t>(bytes - i));
}

/// kRows vectors, each with elements of its row, to kRows vectors in which the rows alternate element by element.
template <int kRows, class D, class V>
void interleave(D d, V (&v)[kRows]) {
  for (int stage = 1; stage < kRows; stage *= 2) {
    V t[kRows];
    for (int i = 0; i < kRows / 2; ++i) {
      t[2 * i] = hn::InterleaveLower(d, v[i], v[i + kRows / 2]);
      t[2 * i + 1] = hn::InterleaveUpper(d, v[i], v[i + kRows / 2]);
    }
    for (int i = 0; i < kRows; ++i) v[i] = t[i];
  }
}

/// Squares of 16 bytes by 16 bytes in registers; edges one element at a time.
template <class T, bool kStream>
void transpose(std::byte* dst, const std::byte* src, const Tile& tile) {
  constexpr int kSide = 16 / sizeof(T);
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const hn::FixedTag<T, kSide> d;
  const hn::FixedTag<std::uint8_t, 16> bytes;
  const std::int64_t rows = tile.rows - tile.rows % kSide;
  const std::int64_t columns = tile.columns - tile.columns % kSide;
  for (std::int64_t c = 0; c < columns; c += kSide) {
    for (std::int64_t r = 0; r < rows; r += kSide) {
      decltype(hn::Zero(d)) v[kSide];
      for (int i = 0; i < kSide; ++i) {
        v[i] = hn::BitCast(d, hn::LoadU(bytes, u8(src + (r + i) * tile.src_row + c * kItem)));
      }
      interleave<kSide>(d, v);
      for (int i = 0; i < kSide; ++i) {
        std::byte* to = dst + (c + i) * tile.dst_column + r * kItem;
        if constexpr (kStream) {
          hn::Stream(hn::BitCast(bytes, v[i]), bytes, u8(to));
        } else {
          hn::StoreU(hn::BitCast(bytes, v[i]), bytes, u8(to));
        }
      }
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

/// Two or four rows whose elements alternate in consecutive memory.
template <class T, int kRows, bool kStream>
void zip(std::byte* dst, const std::byte* src, const Tile& tile) {
  constexpr int kSide = 16 / sizeof(T);
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const hn::FixedTag<T, kSide> d;
  const hn::FixedTag<std::uint8_t, 16> bytes;
  std::int64_t c = 0;
  for (; c + kSide <= tile.columns; c += kSide) {
    decltype(hn::Zero(d)) v[kRows];
    for (int i = 0; i < kRows; ++i) v[i] = hn::BitCast(d, hn::LoadU(bytes, u8(src + i * tile.src_row + c * kItem)));
    interleave<kRows>(d, v);
    for (int i = 0; i < kRows; ++i) {
      std::byte* to = dst + c * kRows * kItem + i * 16;
      if constexpr (kStream) {
        hn::Stream(hn::BitCast(bytes, v[i]), bytes, u8(to));
      } else {
        hn::StoreU(hn::BitCast(bytes, v[i]), bytes, u8(to));
      }
    }
  }
  for (; c < tile.columns; ++c) {
    for (int r = 0; r < kRows; ++r) {
      element<T>(dst + (c * kRows + r) * kItem, src + r * tile.src_row + c * kItem);
    }
  }
}

/// The reverse of zip with two: consecutive pairs to two columns.
template <class T>
void unzip(std::byte* dst, const std::byte* src, const Tile& tile) {
  constexpr int kSide = 16 / sizeof(T);
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const hn::FixedTag<T, kSide> d;
  const hn::FixedTag<std::uint8_t, 16> bytes;
  std::int64_t r = 0;
  for (; r + kSide <= tile.rows; r += kSide) {
    const auto low = hn::BitCast(d, hn::LoadU(bytes, u8(src + 2 * r * kItem)));
    const auto high = hn::BitCast(d, hn::LoadU(bytes, u8(src + 2 * r * kItem + 16)));
    hn::StoreU(hn::BitCast(bytes, hn::ConcatEven(d, high, low)), bytes, u8(dst + r * kItem));
    hn::StoreU(hn::BitCast(bytes, hn::ConcatOdd(d, high, low)), bytes, u8(dst + tile.dst_column + r * kItem));
  }
  for (; r < tile.rows; ++r) {
    for (std::int64_t c = 0; c < 2; ++c) {
      element<T>(dst + c * tile.dst_column + r * kItem, src + (2 * r + c) * kItem);
    }
  }
}

template <bool kStream>
void transpose_16(std::byte* dst, const std::byte* src, const Tile& tile) {
  const hn::FixedTag<std::uint8_t, 16> bytes;
  for (std::int64_t c = 0; c < tile.columns; ++c) {
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const auto v = hn::LoadU(bytes, u8(src + r * tile.src_row + c * 16));
      std::byte* to = dst + c * tile.dst_column + r * 16;
      if constexpr (kStream) {
        hn::Stream(v, bytes, u8(to));
      } else {
        hn::StoreU(v, bytes, u8(to));
      }
    }
  }
}

template <class T>
void tile_of(std::byte* dst, const std::byte* src, const Tile& tile, bool stream);

template <>
[[maybe_unused]] void tile_of<Sixteen>(std::byte* dst, const std::byte* src, const Tile& tile, bool stream) {
  const bool fits = stream && aligned(dst, 16) && tile.dst_column % 16 == 0;
  return fits ? transpose_16<true>(dst, src, tile) : transpose_16<false>(dst, src, tile);
}

template <class T>
void tile_of(std::byte* dst, const std::byte* src, const Tile& tile, bool stream) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const bool packed = tile.dst_column == tile.rows * kItem;
  if (packed && tile.rows == 2) {
    return stream && aligned(dst, 16) ? zip<T, 2, true>(dst, src, tile) : zip<T, 2, false>(dst, src, tile);
  }
  if constexpr (sizeof(T) < 8) {
    if (packed && tile.rows == 4) {
      return stream && aligned(dst, 16) ? zip<T, 4, true>(dst, src, tile) : zip<T, 4, false>(dst, src, tile);
    }
    if (tile.columns == 2 && tile.src_row == 2 * kItem) return unzip<T>(dst, src, tile);
  }
  const bool fits = stream && aligned(dst, 16) && tile.dst_column % 16 == 0;
  return fits ? transpose<T, true>(dst, src, tile) : transpose<T, false>(dst, src, tile);
}

#endif  // HWY_TARGET == HWY_SCALAR

void runs(std::byte* dst, const std::byte* src, const Loop& loop, std::int64_t run, bool stream) {
  switch (run) {
    case 1: return fixed_runs<1>(dst, src, loop);
    case 2: return fixed_runs<2>(dst, src, loop);
    case 4: return fixed_runs<4>(dst, src, loop);
    case 8: return fixed_runs<8>(dst, src, loop);
    case 16: return fixed_runs<16>(dst, src, loop);
    case 32: return fixed_runs<32>(dst, src, loop);
    default: break;
  }
  for (std::int64_t i = 0; i < loop.extent; ++i) {
    if (stream && run >= 2 * kLine) {
      stream_run(dst + i * loop.dst, src + i * loop.src, run);
    } else {
      std::memcpy(dst + i * loop.dst, src + i * loop.src, static_cast<std::size_t>(run));
    }
  }
}

void tile_of_size(std::byte* dst, const std::byte* src, const Tile& tile, std::int64_t item, bool stream) {
  switch (item) {
    case 1: return tile_of<std::uint8_t>(dst, src, tile, stream);
    case 2: return tile_of<std::uint16_t>(dst, src, tile, stream);
    case 4: return tile_of<std::uint32_t>(dst, src, tile, stream);
    case 8: return tile_of<std::uint64_t>(dst, src, tile, stream);
    default: return tile_of<Sixteen>(dst, src, tile, stream);
  }
}

/// Outer loops around a leaf that takes (dst, src).
template <class Leaf>
void around(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, const Leaf& leaf) {
  if (num_loops == 0) return leaf(dst, src);
  for (std::int64_t i = 0; i < loops[0].extent; ++i) {
    around(dst + i * loops[0].dst, src + i * loops[0].src, loops + 1, num_loops - 1, leaf);
  }
}

constexpr std::size_t kMaxLoops = 16;

/// What loops read, as runs of consecutive bytes: to ask for it ahead of time.
struct Footprint {
  Loop loops[kMaxLoops];
  std::size_t num_loops = 0;
  std::int64_t run = 0;
};

Footprint footprint_of(const Loop* loops, std::size_t num_loops, std::int64_t run) {
  Footprint out;
  out.run = run;
  std::copy(loops, loops + num_loops, out.loops);
  std::sort(out.loops, out.loops + num_loops, [](const Loop& a, const Loop& b) { return a.src > b.src; });
  while (num_loops > 0 && out.loops[num_loops - 1].src <= out.run) {
    out.run += (out.loops[num_loops - 1].extent - 1) * out.loops[num_loops - 1].src;
    --num_loops;
  }
  out.num_loops = num_loops;
  return out;
}

void prefetch(const std::byte* src, const Footprint& what, std::size_t depth) {
  if (depth == what.num_loops) {
    for (std::int64_t i = 0; i < what.run; i += kLine) hwy::Prefetch(src + i);
    return;
  }
  for (std::int64_t i = 0; i < what.loops[depth].extent; ++i)
    prefetch(src + i * what.loops[depth].src, what, depth + 1);
}

/// Elements of 1 to 16 bytes that lie side by side along one loop in the source and along another in the destination.
void copy_tiles(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, std::int64_t item,
                const Loop& along_src, const Loop& along_dst, bool stream) {
  constexpr std::int64_t kAhead = 8192;  // bytes that the first cache holds beside what is in work
  Loop all[kMaxLoops];
  std::size_t num_outer = 0;
  for (std::size_t i = 0; i < num_loops; ++i) {
    if (&loops[i] != &along_src && &loops[i] != &along_dst) all[num_outer++] = loops[i];
  }
  all[num_outer] = along_src;
  all[num_outer + 1] = along_dst;
  const Tile tile{along_dst.extent, along_src.extent, along_dst.src, along_src.dst};
  std::int64_t bytes = item * along_src.extent * along_dst.extent;
  std::size_t split = num_outer;  // loops from here on work on what was asked for
  while (split > 0 && bytes * all[split - 1].extent <= kAhead) bytes *= all[--split].extent;
  const auto leaf = [&](std::byte* to, const std::byte* from) { tile_of_size(to, from, tile, item, stream); };
  if (split == 0 || bytes > 2 * kAhead) return around(dst, src, all, num_outer, leaf);
  const Footprint next = footprint_of(all + split, num_loops - split, item);
  const Loop& step = all[split - 1];
  around(dst, src, all, split - 1, [&](std::byte* to, const std::byte* from) {
    for (std::int64_t i = 0; i < step.extent; ++i) {
      if (i + 1 < step.extent) prefetch(from + (i + 1) * step.src, next, 0);
      around(to + i * step.dst, from + i * step.src, all + split, num_outer - split, leaf);
    }
  });
}

void copy_loops(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, std::int64_t run,
                bool stream) {
  if (num_loops == 0) {
    if (stream && run >= 2 * kLine) return stream_run(dst, src, run);
    std::memcpy(dst, src, static_cast<std::size_t>(run));
    return;
  }
  const Loop* along_src = nullptr;  // steps by one element in the source
  const Loop* along_dst = nullptr;
  for (std::size_t i = 0; i < num_loops; ++i) {
    if (loops[i].src == run) along_src = &loops[i];
    if (loops[i].dst == run) along_dst = &loops[i];
  }
  const bool element_sized = run == 1 || run == 2 || run == 4 || run == 8 || run == 16;
  if (element_sized && along_src != nullptr && along_dst != nullptr && num_loops <= kMaxLoops) {
    return copy_tiles(dst, src, loops, num_loops, run, *along_src, *along_dst, stream);
  }
  Loop sorted[kMaxLoops];
  if (stream && run >= kLine && num_loops <= kMaxLoops) {
    // Streamed lines may go anywhere; what is read should be read in sequence.
    std::copy(loops, loops + num_loops, sorted);
    std::sort(sorted, sorted + num_loops, [](const Loop& a, const Loop& b) { return a.src > b.src; });
    loops = sorted;
  }
  around(dst, src, loops, num_loops - 1,
         [&](std::byte* to, const std::byte* from) { runs(to, from, loops[num_loops - 1], run, stream); });
}

}  // namespace

void CopyLoops(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, std::int64_t run,
               bool stream) {
  copy_loops(dst, src, loops, num_loops, run, stream);
}

}  // namespace HWY_NAMESPACE
}  // namespace kvstride::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstride::cpu {

HWY_EXPORT(CopyLoops);

void copy(std::byte* dst, const std::byte* src, const plan::Loop* loops, std::size_t num_loops, std::int64_t run,
          bool stream) {
  HWY_DYNAMIC_DISPATCH(CopyLoops)(dst, src, loops, num_loops, run, stream);
}

void fence() { hwy::FlushStream(); }

void zero(std::byte* dst, const plan::Loop* loops, std::size_t num_loops, std::int64_t run) {
  if (num_loops == 0) {
    std::memset(dst, 0, static_cast<std::size_t>(run));
    return;
  }
  for (std::int64_t i = 0; i < loops[0].extent; ++i) zero(dst + i * loops[0].dst, loops + 1, num_loops - 1, run);
}

}  // namespace kvstride::cpu
#endif
