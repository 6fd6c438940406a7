// SPDX-License-Identifier: Apache-2.0
// Copies of runs and of single elements over nested loops, for every instruction set that Highway compiles.
#include "cpu/copy.h"

#include <algorithm>
#include <cstring>

#include "cpu/cast.h"
#include "cpu/unit.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/copy.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstride::cpu {
namespace HWY_NAMESPACE {
namespace {

using plan::Loop;

template <std::int64_t kBytes>
void fixed_runs(std::byte* dst, const std::byte* src, const Loop& loop) {
  for (std::int64_t i = 0; i < loop.extent; ++i) std::memcpy(dst + i * loop.dst, src + i * loop.src, kBytes);
}

#if HWY_TARGET == HWY_SCALAR

void stream_run(std::byte* dst, const std::byte* src, std::int64_t bytes) {
  std::memcpy(dst, src, static_cast<std::size_t>(bytes));
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

#endif  // HWY_TARGET == HWY_SCALAR

void runs(std::byte* dst, const std::byte* src, const Loop& loop, std::int64_t run, bool stream) {
  switch (run) {
    case 1: return fixed_runs<1>(dst, src, loop);
    case 2: return fixed_runs<2>(dst, src, loop);
    case 4: return fixed_runs<4>(dst, src, loop);
    case 8: return fixed_runs<8>(dst, src, loop);
    case 16: return fixed_runs<16>(dst, src, loop);
    case 32: return fixed_runs<32>(dst, src, loop);
    case 64: return fixed_runs<64>(dst, src, loop);
    default: break;
  }
  for (std::int64_t i = 0; i < loop.extent; ++i) {
    if (stream) {
      stream_run(dst + i * loop.dst, src + i * loop.src, run);
    } else {
      std::memcpy(dst + i * loop.dst, src + i * loop.src, static_cast<std::size_t>(run));
    }
  }
}

/// Loops around a leaf that takes (dst, src).
template <class Leaf>
void around(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, const Leaf& leaf) {
  if (num_loops == 0) return leaf(dst, src);
  const Loop& loop = loops[0];
  if (num_loops == 1) {
    for (std::int64_t i = 0; i < loop.extent; ++i) leaf(dst + i * loop.dst, src + i * loop.src);
    return;
  }
  for (std::int64_t i = 0; i < loop.extent; ++i) {
    around(dst + i * loop.dst, src + i * loop.src, loops + 1, num_loops - 1, leaf);
  }
}

/// One unit to the buffer, or to its place; the lines of the next unit are asked for meanwhile.
void move_unit(std::byte* dst, const std::byte* src, const Unit& unit, std::int64_t item, Ahead ahead) {
  const Tile tile{unit.along_dst.extent, unit.along_src.extent, unit.along_dst.src, unit.along_src.dst};
  const auto tiles = [&](auto element) {
    using T = decltype(element);
    around(dst, src, unit.inner, unit.num_inner,
           [&](std::byte* to, const std::byte* from) { tile_of<T>(to, from, tile, ahead); });
  };
  if (tile.rows == 0) {
    if (unit.num_inner == 0) {
      std::memcpy(dst, src, static_cast<std::size_t>(item));
    } else {
      around(dst, src, unit.inner, unit.num_inner - 1, [&](std::byte* to, const std::byte* from) {
        runs(to, from, unit.inner[unit.num_inner - 1], item, false);
        ahead.step<256>();
      });
    }
  } else {
    switch (item) {
      case 1: tiles(std::uint8_t{}); break;
      case 2: tiles(std::uint16_t{}); break;
      case 4: tiles(std::uint32_t{}); break;
      case 8: tiles(std::uint64_t{}); break;
      default: tiles(Sixteen{}); break;
    }
  }
  while (ahead.left > 0) ahead.step<64>();
}

/// Elements and short runs, unit by unit; through `row` where values change.
void copy_units(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, std::int64_t item,
                const plan::Cast* how, bool stream) {
  const CastRow row = how != nullptr ? cast_row(how->src, how->dst) : nullptr;
  const Unit unit(loops, num_loops, item, row != nullptr ? item_size(how->src) : 0, stream);
  alignas(kLine) std::byte buffer[kUnitBytes];
  alignas(kLine) std::byte staging[kUnitBytes];
  const auto one = [&](std::byte* to, const std::byte* from, Ahead ahead) {
    if (row != nullptr) {
      while (ahead.left > 0) ahead.step<64>();
      around(staging, from, unit.fetch, unit.num_fetch,
             [&](std::byte* out, const std::byte* in) { row(out, in, unit.fetch_run, how->scale); });
      from = staging;
    }
    if (!unit.buffered) return move_unit(to, from, unit, item, ahead);
    move_unit(buffer, from, unit, item, ahead);
    around(to, buffer, unit.flush, unit.num_flush,
           [&](std::byte* out, const std::byte* in) { stream_run(out, in, unit.flush_run); });
  };
  if (unit.num_outer == 0) return one(dst, src, {nullptr, nullptr, 0});
  const Loop& step = unit.outer[unit.num_outer - 1];
  around(dst, src, unit.outer, unit.num_outer - 1, [&](std::byte* to, const std::byte* from) {
    for (std::int64_t i = 0; i < step.extent; ++i) {
      const bool more = i + 1 < step.extent;
      one(to + i * step.dst, from + i * step.src, {from + (i + 1) * step.src, unit.lines, more ? unit.num_lines : 0});
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
  const bool element = run == 1 || run == 2 || run == 4 || run == 8 || run == 16;
  if ((element || (stream && run < 2 * kLine)) && num_loops <= kMaxLoops) {
    return copy_units(dst, src, loops, num_loops, run, nullptr, stream);
  }
  Loop sorted[kMaxLoops];
  if (stream && num_loops <= kMaxLoops) {
    // Streamed lines may go anywhere; what is read should be read in sequence.
    std::copy(loops, loops + num_loops, sorted);
    std::sort(sorted, sorted + num_loops, [](const Loop& a, const Loop& b) { return a.src > b.src; });
    loops = sorted;
  }
  around(dst, src, loops, num_loops - 1, [&](std::byte* to, const std::byte* from) {
    runs(to, from, loops[num_loops - 1], run, stream && run >= 2 * kLine);
  });
}

/// Elements that lie side by side on both sides, converted; past the caches by way of a buffer.
void cast_row_streamed(std::byte* dst, const std::byte* src, std::int64_t count, CastRow row, const plan::Cast& how) {
  // Small, so that stores to memory are spread between conversions.
  alignas(kLine) std::byte buffer[512];
  constexpr std::int64_t kAhead = 2048;
  const std::int64_t src_item = item_size(how.src);
  const std::int64_t item = item_size(how.dst);
  const std::int64_t step = static_cast<std::int64_t>(sizeof(buffer)) / item;
  for (std::int64_t i = 0; i < count; i += step) {
    const std::int64_t n = std::min(step, count - i);
    const std::int64_t ahead = std::min((i + n) * src_item + kAhead, count * src_item);
    for (std::int64_t at = i * src_item + kAhead; at < ahead; at += kLine) hwy::Prefetch(src + at);
    row(buffer, src + i * src_item, n, how.scale);
    stream_run(dst + i * item, buffer, n * item);
  }
}

void cast_loops(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, const plan::Cast& how,
                bool stream) {
  constexpr std::int64_t kRow = 32;  // elements that are worth a row of their own
  const std::int64_t src_item = item_size(how.src);
  const std::int64_t item = item_size(how.dst);
  const CastRow row = cast_row(how.src, how.dst);
  if (num_loops == 0) return row(dst, src, 1, how.scale);
  Loop sorted[kMaxLoops];
  if (num_loops > kMaxLoops) {
    return around(dst, src, loops, num_loops,
                  [&](std::byte* to, const std::byte* from) { row(to, from, 1, how.scale); });
  }
  Loop along{0, 0, 0};
  std::size_t num_outer = 0;
  for (std::size_t i = 0; i < num_loops; ++i) {
    if (loops[i].src == src_item && loops[i].dst == item && along.extent == 0) {
      along = loops[i];
    } else {
      sorted[num_outer++] = loops[i];
    }
  }
  if (along.extent < kRow) return copy_units(dst, src, loops, num_loops, item, &how, stream);
  if (stream) std::sort(sorted, sorted + num_outer, [](const Loop& a, const Loop& b) { return a.src > b.src; });
  around(dst, src, sorted, num_outer, [&](std::byte* to, const std::byte* from) {
    if (stream && along.extent * item >= 2 * kLine) return cast_row_streamed(to, from, along.extent, row, how);
    row(to, from, along.extent, how.scale);
  });
}

}  // namespace

void CopyLoops(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, std::int64_t run,
               bool stream) {
  copy_loops(dst, src, loops, num_loops, run, stream);
}

void CastLoops(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, const plan::Cast& how,
               bool stream) {
  cast_loops(dst, src, loops, num_loops, how, stream);
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

HWY_EXPORT(CastLoops);

void cast(std::byte* dst, const std::byte* src, const plan::Loop* loops, std::size_t num_loops, const plan::Cast& how,
          bool stream) {
  HWY_DYNAMIC_DISPATCH(CastLoops)(dst, src, loops, num_loops, how, stream);
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
