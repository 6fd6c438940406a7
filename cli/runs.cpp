// SPDX-License-Identifier: Apache-2.0
// Which bytes of a block lie together.
#include "runs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "kvstride/detect.h"
#include "kvstride/error.h"

namespace kvstride::cli {

std::optional<std::vector<Runs>> runs_of_block(const Layout& layout) {
  try {
    std::vector<Runs> out;
    for (const auto& part : block_bytes(layout).runs) {
      out.emplace_back();
      for (const auto& [offset, length] : part) ++out.back()[length];
    }
    return out;
  } catch (const Error&) {  // more than it can list
    return std::nullopt;
  }
}

Runs runs_of_plane(const Plane& plane) {
  std::vector<Mode> modes;
  for (int a = 0; a < kNumAxes; ++a) {
    if (static_cast<Axis>(a) == Axis::kBlock) continue;
    for (const Mode& mode : plane.merged(static_cast<Axis>(a))) modes.push_back(mode);
  }
  std::sort(modes.begin(), modes.end(), [](const Mode& x, const Mode& y) { return x.stride < y.stride; });
  std::int64_t run = item_size(plane.dtype);
  std::int64_t count = 1;
  for (const Mode& mode : modes) {  // a run grows as long as the next one starts where it ends
    if (count == 1 && mode.stride == run) {
      run *= mode.extent;
    } else {
      count *= mode.extent;
    }
  }
  return {{run, count}};
}

std::string to_text(const Runs& runs) {
  constexpr std::size_t kShown = 4;
  std::vector<std::string> out;
  for (const auto& [length, count] : runs) {
    if (out.size() == kShown) {
      out.push_back(fmt::format("{} other lengths", runs.size() - kShown));
      break;
    }
    out.push_back(fmt::format("{} × {} bytes", count, length));
  }
  return fmt::format("{}", fmt::join(out, ", "));
}

Json to_json(const Runs& runs) {
  Json out = Json::array();
  for (const auto& [length, count] : runs) out.push_back({{"bytes", length}, {"count", count}});
  return out;
}

}  // namespace kvstride::cli
