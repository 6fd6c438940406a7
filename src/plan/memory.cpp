// SPDX-License-Identifier: Apache-2.0
// The exact check that reads and writes stay apart, window by window of the addresses that both may touch.
#include "plan/memory.h"

#include <algorithm>
#include <limits>

#include "layout/internal.h"
#include "plan/program.h"
#include "plan/walk.h"

namespace kvstride::plan {

void merge(std::vector<Interval>& list) {
  std::sort(list.begin(), list.end(), [](const Interval& x, const Interval& y) { return x.begin < y.begin; });
  std::size_t kept = 0;
  for (const Interval& one : list) {
    if (kept > 0 && one.begin <= list[kept - 1].end) {
      list[kept - 1].end = std::max(list[kept - 1].end, one.end);
    } else {
      list[kept++] = one;
    }
  }
  list.resize(kept);
}

bool meet(std::vector<Interval>& a, std::vector<Interval>& b) {
  merge(a);
  merge(b);
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (a[i].end <= b[j].begin) {
      ++i;
    } else if (b[j].end <= a[i].begin) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

void hulls(const Layout& layout, const std::vector<std::byte*>& tensors, std::vector<Interval>& out) {
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const auto at = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensors[t]));
    for (const Plane& plane : layout.planes()) {
      if (plane.part != static_cast<int>(static_cast<std::int64_t>(t) % layout.num_parts())) continue;
      out.push_back({at + plane.base, at + plane.base + span_of(plane.modes, item_size(plane.dtype))});
    }
  }
}

namespace {

constexpr std::size_t kMaxIntervals = std::size_t{1} << 17;

/// What nested loops touch on one side: runs, and steps between them, largest first.
struct Reach {
  struct Step {
    std::int64_t extent;
    std::int64_t stride;
  };
  std::vector<Step> steps;
  std::int64_t begin;
  std::int64_t run;

  Reach(std::int64_t at, std::int64_t bytes, const Loop* loops, std::size_t num_loops, std::int64_t Loop::*side)
      : begin(at), run(bytes) {
    for (std::size_t i = 0; i < num_loops; ++i) {
      std::int64_t stride = loops[i].*side;
      if (stride < 0) {
        begin += (loops[i].extent - 1) * stride;
        stride = -stride;
      }
      steps.push_back({loops[i].extent, stride});
    }
    std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.stride > b.stride; });
    while (!steps.empty() && steps.back().stride <= run) {
      run += (steps.back().extent - 1) * steps.back().stride;
      steps.pop_back();
    }
  }

  /// Bytes from the first to the last that the steps from `depth` on touch.
  std::int64_t span(std::size_t depth) const {
    std::int64_t out = run;
    for (std::size_t i = depth; i < steps.size(); ++i) out += (steps[i].extent - 1) * steps[i].stride;
    return out;
  }
};

/// Intervals of one window; false once there are too many of them.
struct Window {
  Interval bounds;
  std::vector<Interval> list;

  bool add(const Reach& reach, std::size_t depth, std::int64_t at) {
    if (at >= bounds.end || at + reach.span(depth) <= bounds.begin) return true;
    if (depth == reach.steps.size()) {
      list.push_back({std::max(at, bounds.begin), std::min(at + reach.run, bounds.end)});
      if (list.size() < kMaxIntervals) return true;
      merge(list);
      return list.size() < kMaxIntervals / 2;
    }
    for (std::int64_t i = 0; i < reach.steps[depth].extent; ++i) {
      if (!add(reach, depth + 1, at + i * reach.steps[depth].stride)) return false;
    }
    return true;
  }
};

using Programs = std::span<const Program* const>;

template <class Sink>
void each_reach(Programs programs, const Sink& sink) {
  for (const Program* program : programs) {
    program->walk([&](Side src, Side dst, const Loop* loops, std::size_t num, const Strand& strand, std::int64_t run) {
      const std::int64_t src_run = strand.cast.active ? item_size(strand.cast.src) : run;
      sink(Reach(src.byte, src_run, loops, num, &Loop::src), Reach(dst.byte, run, loops, num, &Loop::dst));
    });
  }
}

bool meets_in(Programs programs, Interval bounds) {
  Window reads{bounds, {}};
  Window writes{bounds, {}};
  bool fits = true;
  each_reach(programs, [&](const Reach& read, const Reach& write) {
    fits = fits && reads.add(read, 0, read.begin) && writes.add(write, 0, write.begin);
  });
  if (fits) return meet(reads.list, writes.list);
  const std::int64_t middle = bounds.begin + (bounds.end - bounds.begin) / 2;
  return meets_in(programs, {bounds.begin, middle}) || meets_in(programs, {middle, bounds.end});
}

}  // namespace

bool meet_each_other(Programs programs) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  Interval reads{kMax, 0};
  Interval writes{kMax, 0};
  each_reach(programs, [&](const Reach& read, const Reach& write) {
    reads = {std::min(reads.begin, read.begin), std::max(reads.end, read.begin + read.span(0))};
    writes = {std::min(writes.begin, write.begin), std::max(writes.end, write.begin + write.span(0))};
  });
  const Interval both{std::max(reads.begin, writes.begin), std::min(reads.end, writes.end)};
  return both.begin < both.end && meets_in(programs, both);
}

}  // namespace kvstride::plan
