// SPDX-License-Identifier: Apache-2.0
// Proof that no two elements of a layout share a byte.
#include <fmt/format.h>

#include <algorithm>

#include "kvstride/error.h"
#include "layout/internal.h"

namespace kvstride {
namespace {

/// Above this many bytes an interleaving that the rules below cannot prove is refused.
constexpr std::int64_t kMaxBrute = std::int64_t{1} << 24;

struct View {
  std::int64_t base;
  std::int64_t item;
  std::vector<Mode> modes;  // normal form
  std::int64_t end() const { return base + span_of(modes, item); }
};

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::kLayout, fmt::format("layout '{}': elements overlap", what));
}

void mark(const View& view, std::size_t depth, std::int64_t at, std::vector<bool>& seen, const std::string& what) {
  if (depth == view.modes.size()) {
    for (std::int64_t b = 0; b < view.item; ++b) {
      auto bit = seen[static_cast<std::size_t>(at + b)];
      if (bit) fail(what);
      bit = true;
    }
    return;
  }
  const Mode& mode = view.modes[depth];
  for (std::int64_t i = 0; i < mode.extent; ++i) {
    mark(view, depth + 1, at + i * mode.stride, seen, what);
  }
}

void brute(const std::vector<View>& views, const std::string& what) {
  std::int64_t low = views.front().base;
  std::int64_t high = low;
  for (const View& view : views) {
    low = std::min(low, view.base);
    high = std::max(high, view.end());
  }
  if (high - low > kMaxBrute) {
    throw Error(ErrorCode::kLayout,
                fmt::format("layout '{}': cannot show that its interleaved strides do not overlap", what));
  }
  std::vector<bool> seen(static_cast<std::size_t>(high - low));
  for (const View& view : views) mark(view, 0, view.base - low, seen, what);
}

/// Sections that lie one after the other are checked one by one; a common outer mode whose stride spans all of
/// its content is taken off; the rest is counted byte by byte.
void check(std::vector<View> views, const std::string& what) {
  while (true) {
    std::sort(views.begin(), views.end(), [](const View& a, const View& b) { return a.base < b.base; });
    std::vector<View> group;
    std::int64_t end = 0;
    std::vector<std::vector<View>> groups;
    for (View& view : views) {
      if (!group.empty() && view.base >= end) {
        groups.push_back(std::move(group));
        group.clear();
      }
      end = group.empty() ? view.end() : std::max(end, view.end());
      group.push_back(std::move(view));
    }
    groups.push_back(std::move(group));
    if (groups.size() > 1) {
      for (auto& part : groups) check(std::move(part), what);
      return;
    }
    views = std::move(groups.front());
    if (std::all_of(views.begin(), views.end(), [](const View& v) { return v.modes.empty(); })) {
      if (views.size() > 1) fail(what);
      return;
    }
    const bool common = std::all_of(views.begin(), views.end(), [&](const View& view) {
      return !view.modes.empty() && view.modes.front().extent == views.front().modes.front().extent &&
             view.modes.front().stride == views.front().modes.front().stride;
    });
    if (!common) break;
    const std::int64_t stride = views.front().modes.front().stride;
    std::vector<View> inner = views;
    std::int64_t high = 0;
    for (View& view : inner) {
      view.modes.erase(view.modes.begin());
      high = std::max(high, view.end());
    }
    if (high - inner.front().base > stride) break;
    views = std::move(inner);
  }
  brute(views, what);
}

}  // namespace

std::vector<Mode> normal_modes(const Plane& plane) {
  std::vector<Mode> out;
  for (int a = 0; a < kNumAxes; ++a) {
    for (const Mode& mode : plane.merged(static_cast<Axis>(a))) out.push_back(mode);
  }
  std::stable_sort(out.begin(), out.end(), [](const Mode& a, const Mode& b) { return a.stride > b.stride; });
  return out;
}

std::int64_t span_of(const std::vector<Mode>& modes, std::int64_t item) {
  std::int64_t span = item;
  for (const Mode& mode : modes) {
    span = checked_add(span, checked_mul(mode.extent - 1, mode.stride, "the span"), "the span");
  }
  return span;
}

void check_no_overlap(const std::vector<Plane>& planes, const std::string& what) {
  std::vector<View> views;
  for (const Plane& plane : planes) {
    views.push_back({plane.base, item_size(plane.dtype), normal_modes(plane)});
  }
  check(std::move(views), what);
}

}  // namespace kvstride
