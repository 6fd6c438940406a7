// SPDX-License-Identifier: Apache-2.0
// Copies of runs and of single elements over nested loops, for every instruction set that Highway compiles.
#include "cpu/copy.h"

#include <algorithm>
#include <cstring>

#include "cpu/cast.h"
#include "cpu/target.h"
#include "cpu/unit.h"

#if defined(__aarch64__)
// Tiles are arrays of registers, which SVE's vectors of unknown length cannot be in: every such CPU has NEON too.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
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

/// Pages side by side, a line of each in turn: more of them are on their way at once than of one page after another.
template <std::int64_t kPages>
std::int64_t stream_pages(std::byte* dst, const std::byte* src, std::int64_t bytes) {
  constexpr std::int64_t kPage = 4096;
  const Bytes d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + kPages * kPage <= bytes; i += kPages * kPage) {
    for (std::int64_t line = 0; line < kPage; line += 2 * kLine) {
      for (std::int64_t page = 0; page < kPages; ++page) {
        const std::int64_t at = i + page * kPage + line;
        for (std::int64_t j = 0; j < 2 * kLine; j += step) {
          hn::Stream(hn::LoadU(d, u8(src + at + j)), d, u8(dst + at + j));
        }
      }
    }
  }
  return i;
}

/// One run past the caches: whole lines are written at once, so that none is read before it is overwritten.
void stream_run(std::byte* dst, const std::byte* src, std::int64_t bytes) {
  const Bytes d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t head = std::min<std::int64_t>(bytes, -reinterpret_cast<std::intptr_t>(dst) & (kLine - 1));
  if (head != 0) std::memcpy(dst, src, static_cast<std::size_t>(head));
  std::int64_t i = head;
  if (step <= kLine) {
    i += stream_pages<8>(dst + i, src + i, bytes - i);
    i += stream_pages<4>(dst + i, src + i, bytes - i);
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

/// The same with the count of heads: the leaf takes (dst, src, head).
template <class Leaf>
void around_heads(std::byte* dst, const std::byte* src, std::int64_t head, const Loop* loops, std::size_t num_loops,
                  const Leaf& leaf) {
  if (num_loops == 0) return leaf(dst, src, head);
  for (std::int64_t i = 0; i < loops[0].extent; ++i) {
    around_heads(dst + i * loops[0].dst, src + i * loops[0].src, head + i * loops[0].head, loops + 1, num_loops - 1,
                 leaf);
  }
}

/// Steps through nested loops.
struct Steps {
  const Loop* loops;
  std::size_t num_loops;
  const std::byte* src;
  std::byte* dst;
  std::int64_t head = 0;
  std::int64_t at[kMaxLoops + 2] = {};
  bool more = true;

  HWY_INLINE void next() {
    for (std::size_t i = num_loops; i-- > 0;) {
      src += loops[i].src;
      dst += loops[i].dst;
      head += loops[i].head;
      if (++at[i] < loops[i].extent) return;
      src -= loops[i].src * loops[i].extent;
      dst -= loops[i].dst * loops[i].extent;
      head -= loops[i].head * loops[i].extent;
      at[i] = 0;
    }
    more = false;
  }
};

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

/// A unit from the buffer to its place.
void flush_unit(std::byte* dst, std::byte* buffer, const Unit& unit) {
  around(dst, buffer, unit.flush, unit.num_flush,
         [&](std::byte* to, const std::byte* from) { stream_run(to, from, unit.flush_run); });
}

/// Calls `one(dst, src, head, ahead)` for each unit.
template <class One>
void each_unit(std::byte* dst, const std::byte* src, std::int64_t head, const Unit& unit, const One& one) {
  Steps now{unit.outer, unit.num_outer, src, dst, head};
  Steps next = now;
  for (next.next(); now.more; now.next(), next.next()) {
    one(now.dst, now.src, now.head, Ahead{next.src, unit.lines, next.more ? unit.num_lines : 0});
  }
}

/// Elements and short runs, unit by unit.
void copy_units(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, std::int64_t item,
                bool stream) {
  const Unit unit(loops, num_loops, item, 0, stream);
  alignas(kLine) std::byte buffer[kUnitBytes];
  each_unit(dst, src, 0, unit, [&](std::byte* to, const std::byte* from, std::int64_t, Ahead ahead) {
    move_unit(unit.buffered ? buffer : to, from, unit, item, ahead);
    if (unit.buffered) flush_unit(to, buffer, unit);
  });
}

/// Elements of one unit, converted, to the staging buffer.
void fetch_unit(std::byte* staging, const std::byte* src, std::int64_t head, const Unit& unit, CastRows convert,
                const plan::Cast& how, Ahead& ahead) {
  constexpr std::int64_t kCall = 512;  // elements of one call, between which lines are asked for
  std::size_t outer = unit.num_fetch;
  Loop rows{1, 0, 0};
  // The innermost loop is rows of one call where they have one scale and lie side by side in the buffer.
  if (outer > 0 && (unit.fetch[outer - 1].head == 0 || !how.by_head())) rows = unit.fetch[--outer];
  const std::int64_t together = std::clamp<std::int64_t>(kCall / unit.fetch_run, 1, rows.extent);
  std::int64_t calls = (rows.extent + together - 1) / together;
  for (std::size_t i = 0; i < outer; ++i) calls *= unit.fetch[i].extent;
  const std::size_t lines = ahead.left / static_cast<std::size_t>(calls) + 1;
  around_heads(staging, src, head, unit.fetch, outer, [&](std::byte* to, const std::byte* from, std::int64_t at) {
    for (std::int64_t row = 0; row < rows.extent; row += together) {
      for (std::size_t i = 0; i < lines && ahead.left > 0; ++i) ahead.step<64>();
      convert(to + row * rows.dst, from + row * rows.src, unit.fetch_run, std::min(together, rows.extent - row),
              rows.src, how.scale(at));
    }
  });
}

/// Elements whose values change: first into a staging buffer in the source's order, then as other elements.
void cast_units(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, const plan::Cast& how,
                std::int64_t head, bool stream) {
  const std::int64_t item = item_size(how.dst);
  const CastRows convert = cast_rows(how.src, how.dst);
  const Unit unit(loops, num_loops, item, item_size(how.src), stream);
  alignas(kLine) std::byte staging[kUnitBytes];
  alignas(kLine) std::byte buffer[kUnitBytes];
  each_unit(dst, src, head, unit, [&](std::byte* to, const std::byte* from, std::int64_t at, Ahead ahead) {
    fetch_unit(staging, from, at, unit, convert, how, ahead);
    if (unit.same_order) return flush_unit(to, staging, unit);
    move_unit(unit.buffered ? buffer : to, staging, unit, item, ahead);
    if (unit.buffered) flush_unit(to, buffer, unit);
  });
}

/// Rows past the caches, while the sources of later ones are asked for.
void stream_rows(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, std::int64_t run) {
  constexpr std::int64_t kAhead = 4096;
  Loop sorted[kMaxLoops];
  std::copy(loops, loops + num_loops, sorted);
  order_rows(sorted, num_loops, run);
  Steps row{sorted, num_loops, src, dst};
  Steps later = row;
  for (std::int64_t i = 0; i < kAhead && later.more; i += run) later.next();
  const std::int64_t asked = std::min(run, kAhead);
  for (; row.more; row.next()) {
    if (later.more) {
      for (std::int64_t i = 0; i < asked; i += kLine) hwy::Prefetch(later.src + i);
      later.next();
    }
    stream_run(row.dst, row.src, run);
  }
}

void copy_loops(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, std::int64_t run,
                bool stream) {
  if (num_loops == 0) {
    if (stream && run >= 2 * kLine) return stream_run(dst, src, run);
    std::memcpy(dst, src, static_cast<std::size_t>(run));
    return;
  }
  if ((is_element(run) || (stream && run < 2 * kLine)) && num_loops <= kMaxLoops) {
    return copy_units(dst, src, loops, num_loops, run, stream);
  }
  if (stream && num_loops <= kMaxLoops) return stream_rows(dst, src, loops, num_loops, run);
  around(dst, src, loops, num_loops - 1,
         [&](std::byte* to, const std::byte* from) { runs(to, from, loops[num_loops - 1], run, stream); });
}

/// A long row of elements, converted, past the caches by way of a small buffer.
void stream_cast(std::byte* dst, const std::byte* src, std::int64_t count, CastRows convert, const plan::Cast& how,
                 float scale) {
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
    convert(buffer, src + i * src_item, n, 1, 0, scale);
    stream_run(dst + i * item, buffer, n * item);
  }
}

void cast_loops(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, const plan::Cast& how,
                std::int64_t head, bool stream) {
  constexpr std::int64_t kRow = 1024;  // elements that are worth a call of their own
  const std::int64_t src_item = item_size(how.src);
  const std::int64_t item = item_size(how.dst);
  const CastRows convert = cast_rows(how.src, how.dst);
  const auto single = [&](std::byte* to, const std::byte* from, std::int64_t at) {
    convert(to, from, 1, 1, 0, how.scale(at));
  };
  if (num_loops == 0 || num_loops > kMaxLoops) return around_heads(dst, src, head, loops, num_loops, single);
  Loop outer[kMaxLoops];
  Loop along{0, 0, 0};
  std::size_t num_outer = 0;
  for (std::size_t i = 0; i < num_loops; ++i) {
    const bool row = loops[i].src == src_item && loops[i].dst == item && (loops[i].head == 0 || !how.by_head());
    if (row && along.extent == 0) {
      along = loops[i];
    } else {
      outer[num_outer++] = loops[i];
    }
  }
  if (along.extent < kRow) return cast_units(dst, src, loops, num_loops, how, head, stream);
  if (stream) std::sort(outer, outer + num_outer, [](const Loop& a, const Loop& b) { return a.src > b.src; });
  around_heads(dst, src, head, outer, num_outer, [&](std::byte* to, const std::byte* from, std::int64_t at) {
    if (stream) return stream_cast(to, from, along.extent, convert, how, how.scale(at));
    convert(to, from, along.extent, 1, 0, how.scale(at));
  });
}

}  // namespace

void CopyLoops(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, std::int64_t run,
               bool stream) {
  copy_loops(dst, src, loops, num_loops, run, stream);
}

void CastLoops(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, const plan::Cast& how,
               std::int64_t head, bool stream) {
  cast_loops(dst, src, loops, num_loops, how, head, stream);
}

}  // namespace HWY_NAMESPACE
}  // namespace kvstride::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstride::cpu {

// Before any kernel runs: at the start of the process.
[[maybe_unused]] const bool kChosen = choose_target();

HWY_EXPORT(CopyLoops);

void copy(std::byte* dst, const std::byte* src, const plan::Loop* loops, std::size_t num_loops, std::int64_t run,
          bool stream) {
  HWY_DYNAMIC_DISPATCH(CopyLoops)(dst, src, loops, num_loops, run, stream);
}

HWY_EXPORT(CastLoops);

void cast(std::byte* dst, const std::byte* src, const plan::Loop* loops, std::size_t num_loops, const plan::Cast& how,
          std::int64_t head, bool stream) {
  HWY_DYNAMIC_DISPATCH(CastLoops)(dst, src, loops, num_loops, how, head, stream);
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
