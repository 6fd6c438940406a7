// SPDX-License-Identifier: Apache-2.0
// Choosing units: the loops that make the longest runs on both sides go inside.
#include "cpu/unit.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace kvstride::cpu {
namespace {

using plan::Loop;

struct List {
  Loop loops[kMaxLoops + 2];
  std::size_t size = 0;

  void add(const Loop& loop) { loops[size++] = loop; }
  Loop take(std::size_t i) {
    const Loop out = loops[i];
    std::copy(loops + i + 1, loops + size, loops + i);
    --size;
    return out;
  }
  std::int64_t bytes(std::int64_t item) const {
    for (std::size_t i = 0; i < size; ++i) item *= loops[i].extent;
    return item;
  }
};

/// Consecutive bytes from the first on that the loops cover on one side, and how many loops they take, smallest
/// strides first. Sorts the list.
std::int64_t run_of(List& list, std::int64_t item, std::int64_t Loop::*side, std::size_t& taken,
                    bool one_head = false) {
  std::sort(list.loops, list.loops + list.size, [&](const Loop& a, const Loop& b) { return a.*side < b.*side; });
  std::int64_t run = item;
  for (taken = 0; taken < list.size && list.loops[taken].*side <= run; ++taken) {
    if (one_head && list.loops[taken].head != 0) break;
    run = std::max(run, run + (list.loops[taken].extent - 1) * list.loops[taken].*side);
  }
  return run;
}

/// Cuts a loop so that `inner` indices stay inside; the rest goes to `outer`.
Loop cut(Loop loop, std::int64_t inner, List& outer) {
  if (inner < loop.extent) outer.add({loop.extent / inner, loop.src * inner, loop.dst * inner, loop.head * inner});
  loop.extent = inner;
  return loop;
}

/// The largest divisor of `extent` that is not above `limit`.
std::int64_t divisor_below(std::int64_t extent, std::int64_t limit) {
  for (std::int64_t d = std::min(extent, limit); d > 1; --d) {
    if (extent % d == 0) return d;
  }
  return 1;
}

/// Moves loops from `rest` to `inside` while they lengthen a run, the shorter one first.
void fill(List& inside, List& rest, std::int64_t src_item, std::int64_t item, std::int64_t limit) {
  while (rest.size > 0) {
    std::size_t taken = 0;
    List sorted = inside;  // its own order says which loops are the tile
    const std::int64_t src_run = run_of(sorted, src_item, &Loop::src, taken);
    const std::int64_t dst_run = run_of(sorted, item, &Loop::dst, taken);
    const std::int64_t room = limit / inside.bytes(std::max(src_item, item));
    std::size_t best = rest.size;
    const bool src_first = src_run <= dst_run;
    for (const bool first : {true, false}) {
      for (std::size_t i = 0; i < rest.size && best == rest.size; ++i) {
        const bool longer = first == src_first ? rest.loops[i].src <= src_run : rest.loops[i].dst <= dst_run;
        if (longer && rest.loops[i].extent <= room) best = i;
      }
    }
    if (best == rest.size) return;
    inside.add(rest.take(best));
  }
}

/// One side of the loops of a unit, packed in its own order.
struct Packed {
  List loops;                   ///< by stride on that side
  Loop strides[kMaxLoops + 2];  ///< of the buffer (src) for each of them, and their own (dst)
  std::size_t taken = 0;        ///< loops that make the run
  std::int64_t run = 0;         ///< consecutive bytes
  bool dense = false;           ///< the run has no holes

  /// `one_head`: the run ends where another scale begins.
  Packed(const List& inside, std::int64_t side_item, std::int64_t item, std::int64_t Loop::*side, bool one_head)
      : loops(inside) {
    run = run_of(loops, side_item, side, taken, one_head);
    std::int64_t at = item;
    std::int64_t bytes = side_item;
    for (std::size_t i = 0; i < loops.size; ++i) {
      strides[i] = {loops.loops[i].extent, at, loops.loops[i].*side, loops.loops[i].head};
      at *= loops.loops[i].extent;
      if (i < taken) bytes *= loops.loops[i].extent;
    }
    dense = bytes == run;
  }

  /// The buffer's stride of a loop, given by extent and its own stride; each is given once.
  std::int64_t place(std::int64_t extent, std::int64_t own, std::int64_t head) {
    for (std::size_t i = 0; i < loops.size; ++i) {
      if (strides[i].dst != own || strides[i].extent != extent || strides[i].head != head) continue;
      strides[i].dst = std::numeric_limits<std::int64_t>::min();
      return strides[i].src;
    }
    return own;
  }
};

/// Offsets of the source lines that the loops touch, ascending; none where there are more than `room`, or one is far
/// away.
std::size_t lines_of(List loops, std::int64_t item, std::int32_t* lines, std::size_t room) {
  std::size_t taken = 0;
  const std::int64_t run = run_of(loops, item, &Loop::src, taken);
  std::int64_t count = (run + kLine - 1) / kLine;
  std::int64_t last = run;
  for (std::size_t i = taken; i < loops.size; ++i) {
    count *= loops.loops[i].extent;
    last += (loops.loops[i].extent - 1) * loops.loops[i].src;
  }
  if (count > static_cast<std::int64_t>(room) || last > std::numeric_limits<std::int32_t>::max()) return 0;
  std::size_t num = 0;
  std::int64_t at[kMaxLoops] = {};
  for (std::int64_t offset = 0;;) {
    for (std::int64_t i = 0; i < run; i += kLine) lines[num++] = static_cast<std::int32_t>(offset + i);
    std::size_t i = taken;
    for (; i < loops.size; ++i) {
      offset += loops.loops[i].src;
      if (++at[i] < loops.loops[i].extent) break;
      offset -= loops.loops[i].src * loops.loops[i].extent;
      at[i] = 0;
    }
    if (i == loops.size) return num;
  }
}

}  // namespace

Unit::Unit(const Loop* loops, std::size_t num_loops, std::int64_t item, std::int64_t cast_item, bool stream) {
  const std::int64_t src_item = cast_item != 0 ? cast_item : item;
  List rest;
  List inside;
  bool forward = true;
  along_src = along_dst = {0, 0, 0};
  for (std::size_t i = 0; i < num_loops; ++i) {
    forward &= loops[i].src > 0 && loops[i].dst > 0;
    if (loops[i].src == src_item && along_src.extent == 0) {
      along_src = loops[i];
    } else if (loops[i].dst == item && along_dst.extent == 0) {
      along_dst = loops[i];
    } else {
      rest.add(loops[i]);
    }
  }
  // A cast's staging buffer is packed by ascending steps of the source: along_src lies side by side there only if its
  // step is the smallest.
  bool smallest = along_dst.src > src_item;
  for (std::size_t i = 0; i < rest.size; ++i) smallest = smallest && rest.loops[i].src > src_item;
  const bool tile = is_element(item) && along_src.extent > 0 && along_dst.extent > 0 && (cast_item == 0 || smallest);
  if (!tile) {
    if (along_src.extent > 0) rest.add(along_src);
    if (along_dst.extent > 0) rest.add(along_dst);
    along_src = along_dst = {0, 0, 0};
  }
  List outside;
  if (tile) {
    // A large tile is cut into squares of whole lines.
    const std::int64_t widest = std::max(src_item, item);
    if (along_src.extent * along_dst.extent * widest > kUnitBytes) {
      const std::int64_t side = std::max<std::int64_t>(kLine * 2 / widest, 4);
      along_dst = cut(along_dst, divisor_below(along_dst.extent, side * 2), outside);
      const std::int64_t room = std::max<std::int64_t>(kUnitBytes / (along_dst.extent * widest), 1);
      along_src = cut(along_src, divisor_below(along_src.extent, room), outside);
    }
    inside.add(along_src);
    inside.add(along_dst);
  }
  if (forward) {
    if (!tile && rest.size > 0) {
      const auto* least = std::min_element(rest.loops, rest.loops + rest.size,
                                           [](const Loop& a, const Loop& b) { return a.dst < b.dst; });
      Loop first = rest.take(static_cast<std::size_t>(least - rest.loops));
      inside.add(cut(first, divisor_below(first.extent, kUnitBytes / std::max(src_item, item)), outside));
    }
    fill(inside, rest, src_item, item, kUnitBytes);
  } else if (!tile && rest.size > 0) {
    const Loop last = rest.take(rest.size - 1);
    inside.add(cut(last, divisor_below(last.extent, kUnitBytes / std::max(src_item, item)), outside));
  }

  if (forward) num_lines = lines_of(inside, src_item, lines, std::size(lines));

  const std::size_t first = tile ? 2 : 0;
  for (std::size_t i = first; i < inside.size; ++i) inner[num_inner++] = inside.loops[i];
  const auto each = [&](const auto& change) {
    if (tile) {
      change(along_src);
      change(along_dst);
    }
    for (std::size_t i = 0; i < num_inner; ++i) change(inner[i]);
  };
  if (cast_item != 0) {
    Packed packed(inside, src_item, item, &Loop::src, true);
    const bool whole = packed.dense && forward;
    fetch_run = whole ? packed.run / src_item : 1;
    for (std::size_t i = packed.loops.size; i-- > (whole ? packed.taken : 0);) {
      const Loop& loop = packed.strides[i];
      fetch[num_fetch++] = {loop.extent, loop.dst, loop.src, loop.head};
    }
    each([&](Loop& loop) { loop.src = packed.place(loop.extent, loop.src, loop.head); });
  }
  Packed packed(inside, item, item, &Loop::dst, false);
  buffered = stream && forward && packed.dense && packed.run >= kLine && inside.bytes(item) <= kUnitBytes;
  if (buffered) {
    flush_run = packed.run;
    for (std::size_t i = packed.loops.size; i-- > packed.taken;) {
      flush[num_flush++] = {packed.strides[i].extent, packed.strides[i].src, packed.strides[i].dst};
    }
    each([&](Loop& loop) { loop.dst = packed.place(loop.extent, loop.dst, loop.head); });
    same_order = cast_item != 0;
    each([&](Loop& loop) { same_order = same_order && loop.src == loop.dst; });
  }
  std::sort(inner, inner + num_inner, [](const Loop& a, const Loop& b) { return a.dst > b.dst; });

  for (std::size_t i = 0; i < outside.size; ++i) rest.add(outside.loops[i]);
  std::copy(rest.loops, rest.loops + rest.size, outer);
  num_outer = rest.size;
  std::sort(outer, outer + num_outer,
            [&](const Loop& a, const Loop& b) { return stream ? a.src > b.src : a.dst > b.dst; });
}

void order_rows(Loop* loops, std::size_t num_loops, std::int64_t run) {
  constexpr std::int64_t kTogether = 65536;
  List inside;
  List rest;
  for (std::size_t i = 0; i < num_loops; ++i) rest.add(loops[i]);
  fill(inside, rest, run, run, kTogether);
  const auto by_dst = [](const Loop& a, const Loop& b) { return a.dst > b.dst; };
  std::sort(rest.loops, rest.loops + rest.size, by_dst);
  std::sort(inside.loops, inside.loops + inside.size, by_dst);
  std::copy(inside.loops, inside.loops + inside.size, std::copy(rest.loops, rest.loops + rest.size, loops));
}

}  // namespace kvstride::cpu
