// SPDX-License-Identifier: Apache-2.0
// Which bytes of a cache a picture shows, and what each of them holds.
#include "byte_map.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace kvstride::cli {
namespace {

constexpr std::size_t kMaxRuns = 4096;  // of the shown blocks, per plane
constexpr std::int64_t kMaxGap = 4096;  // bytes between runs that are drawn as padding
constexpr std::int64_t kMaxRowElements = 8192;
constexpr std::int64_t kMaxLookedAt = std::int64_t{1} << 22;  // bytes that are compared to find rows alike
constexpr std::int64_t kSmall = 36;                           // rows up to which none is left out
constexpr std::int64_t kMaxBlocks = 4;                        // as many as fit kSmall rows

/// The inverse of a plane's address function.
class Decoder {
 public:
  explicit Decoder(const Plane& plane) : base_(plane.base), item_(item_size(plane.dtype)) {
    for (const Mode& mode : plane.modes) {
      if (mode.extent > 1 && mode.stride > 0) modes_.push_back(mode);
    }
    std::sort(modes_.begin(), modes_.end(), [](const Mode& a, const Mode& b) { return a.stride > b.stride; });
    spans_.assign(modes_.size() + 1, item_);
    for (std::size_t i = modes_.size(); i-- > 0;) {
      spans_[i] = spans_[i + 1] + (modes_[i].extent - 1) * modes_[i].stride;
    }
  }

  /// Fills `index` and returns the first byte of the element that holds `byte`.
  std::optional<std::int64_t> find(std::int64_t byte, Index& index) const {
    index = {};
    const auto left = descend(0, byte - base_, index);
    if (!left) return std::nullopt;
    return byte - *left;
  }
  std::int64_t item() const { return item_; }

 private:
  /// Byte inside the element.
  std::optional<std::int64_t> descend(std::size_t depth, std::int64_t byte, Index& index) const {
    if (byte < 0 || byte >= spans_[depth]) return std::nullopt;
    if (depth == modes_.size()) return byte;
    const Mode& mode = modes_[depth];
    std::int64_t& at = index[static_cast<std::size_t>(mode.axis)];
    const std::int64_t start = at;
    for (std::int64_t digit = std::min(byte / mode.stride, mode.extent - 1); digit >= 0; --digit) {
      if (byte - digit * mode.stride >= spans_[depth + 1]) break;
      at = start + digit * mode.divisor;
      if (const auto left = descend(depth + 1, byte - digit * mode.stride, index)) return left;
    }
    at = start;
    return std::nullopt;
  }

  std::int64_t base_;
  std::int64_t item_;
  std::vector<Mode> modes_;          // largest stride first
  std::vector<std::int64_t> spans_;  // bytes from the first to the last one of the modes from here inwards
};

struct Interval {
  std::int64_t begin;
  std::int64_t end;
};

/// The modes of a plane but those of the blocks, smallest stride first.
std::vector<Mode> inner_modes(const Plane& plane) {
  std::vector<Mode> out;
  for (int a = 0; a < kNumAxes; ++a) {
    if (static_cast<Axis>(a) == Axis::kBlock) continue;
    for (const Mode& mode : plane.merged(static_cast<Axis>(a))) out.push_back(mode);
  }
  std::sort(out.begin(), out.end(), [](const Mode& a, const Mode& b) { return a.stride < b.stride; });
  return out;
}

/// Contiguous runs of the first blocks, lowest first; of many runs the first ones.
void add_runs(const Plane& plane, std::int64_t num_blocks, std::vector<Interval>& out) {
  std::vector<Mode> modes = inner_modes(plane);
  std::int64_t run = item_size(plane.dtype);
  std::size_t joined = 0;
  while (joined < modes.size() && modes[joined].stride == run) run *= modes[joined++].extent;
  std::vector<std::int64_t> starts{0};
  for (std::size_t i = modes.size(); i-- > joined;) {
    std::vector<std::int64_t> next;
    for (const std::int64_t start : starts) {
      for (std::int64_t k = 0; k < modes[i].extent && next.size() < kMaxRuns; ++k)
        next.push_back(start + k * modes[i].stride);
    }
    starts = std::move(next);
  }
  for (std::int64_t b = 0; b < std::min(num_blocks, plane.extent(Axis::kBlock)); ++b) {
    const std::int64_t base = plane.base + plane.axis_offset(Axis::kBlock, b);
    for (const std::int64_t start : starts) out.push_back({base + start, base + start + run});
  }
}

/// The planes of one tensor.
struct Part {
  std::vector<int> planes;
  std::vector<Decoder> decoders;
  std::int64_t num_blocks = 1;
  /// Bytes from block to block where each block is one record of the tensor, 0 where blocks lie otherwise.
  std::int64_t record = 0;
};

Part part_of(const Layout& layout, std::int64_t part) {
  Part out;
  bool records = true;
  for (std::size_t p = 0; p < layout.planes().size(); ++p) {
    const Plane& plane = layout.planes()[p];
    if (plane.part != part) continue;
    out.planes.push_back(static_cast<int>(p));
    out.decoders.emplace_back(plane);
    out.num_blocks = std::max(out.num_blocks, plane.extent(Axis::kBlock));
    const std::vector<Mode> blocks = plane.merged(Axis::kBlock);
    const std::vector<Mode> inner = inner_modes(plane);
    const std::int64_t stride = blocks.empty() ? layout.part_bytes(part) : blocks.front().stride;
    records &= blocks.size() <= 1 && (out.record == 0 || out.record == stride);
    out.record = stride;
    std::int64_t span = plane.base + item_size(plane.dtype);
    for (const Mode& mode : inner) span += mode.stride * (mode.extent - 1);
    records &= span <= stride;
  }
  if (!records) out.record = 0;
  return out;
}

std::vector<Interval> regions_of(const Layout& layout, const Part& part, std::int64_t num_blocks) {
  if (part.record > 0) return {{0, part.record * std::min(num_blocks, part.num_blocks)}};
  std::vector<Interval> runs;
  for (const int p : part.planes) add_runs(layout.planes()[static_cast<std::size_t>(p)], num_blocks, runs);
  std::sort(runs.begin(), runs.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> out;
  for (const Interval& run : runs) {
    if (!out.empty() && run.begin - out.back().end <= kMaxGap) {
      out.back().end = std::max(out.back().end, run.end);
    } else {
      out.push_back(run);
    }
  }
  return out;
}

/// How many bytes of a plane follow each other before more than its innermost mode changes.
std::int64_t fineness(const Plane& plane, const std::vector<Mode>& modes) {
  if (modes.empty()) return item_size(plane.dtype);
  if (modes.front().stride > item_size(plane.dtype)) return modes.front().stride;  // something else lies between
  // A digit of two, as in AMX tiles, is one thing with the next one.
  const Mode& mode = modes.front().extent > 2 || modes.size() == 1 ? modes.front() : modes[1];
  return mode.stride * mode.extent;
}

/// Bytes of a row: a stride of the layout, so that columns mean something, that gives rows in number and fineness
/// that an eye can follow.
std::int64_t choose_row(const Layout& layout, const Part& part, std::int64_t total) {
  std::vector<std::int64_t> sizes{total};
  std::vector<std::int64_t> strides;
  std::int64_t finest = total;
  std::int64_t item = total;
  for (const int p : part.planes) {
    const Plane& plane = layout.planes()[static_cast<std::size_t>(p)];
    const std::vector<Mode> modes = inner_modes(plane);
    item = std::min(item, item_size(plane.dtype));
    std::int64_t bytes = item_size(plane.dtype);
    for (const Mode& mode : modes) {
      sizes.push_back(mode.stride);
      sizes.push_back(mode.stride * mode.extent);
      strides.push_back(mode.stride);
      bytes *= mode.extent;
    }
    if (bytes > total / 8) finest = std::min(finest, fineness(plane, modes));  // scales are small in any row
  }
  const std::size_t num_natural = sizes.size();
  for (const std::int64_t elements : {16, 64, 256, 1024, 4096}) sizes.push_back(elements * item);
  const double wanted = std::clamp(static_cast<double>(total / item) / 16.0, 1.0, 16.0);
  std::int64_t best = 0;
  double least = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::int64_t size = sizes[i];
    if (size < item || size > total || size / item > kMaxRowElements) continue;
    const double rows = std::ceil(static_cast<double>(total) / static_cast<double>(size));
    const double cells = static_cast<double>(size) / static_cast<double>(finest);
    const bool aligned = std::all_of(strides.begin(), strides.end(),
                                     [size](std::int64_t stride) { return stride < size || stride % size == 0; });
    const double score = std::abs(std::log2(rows / wanted)) + 2 * std::max(0.0, std::log2(cells / 16)) +
                         (aligned ? 0 : 4) + (i < num_natural ? 0 : 1);
    if (best == 0 || score < least || (score == least && size > best)) {
      best = size;
      least = score;
    }
  }
  return best > 0 ? best : total;
}

/// What lies at `byte`, up to the end of its element or to `end`.
Cell cell_at(const Part& part, std::int64_t byte, std::int64_t end, std::int64_t num_blocks) {
  Index index{};
  for (std::size_t i = 0; i < part.decoders.size(); ++i) {
    const auto first = part.decoders[i].find(byte, index);
    if (!first) continue;
    const std::int64_t length = std::min(*first + part.decoders[i].item(), end) - byte;
    const bool shown = index[static_cast<std::size_t>(Axis::kBlock)] < num_blocks;
    return {byte, length, shown ? part.planes[i] : Cell::kOtherBlock, index};
  }
  return {byte, 1, Cell::kPadding, {}};
}

std::vector<Cell> cells_of(const Part& part, std::int64_t begin, std::int64_t end, std::int64_t num_blocks) {
  std::vector<Cell> out;
  for (std::int64_t byte = begin; byte < end;) {
    Cell cell = cell_at(part, byte, end, num_blocks);
    byte += cell.length;
    if (cell.plane < 0 && !out.empty() && out.back().plane == cell.plane) {
      out.back().length += cell.length;
    } else {
      out.push_back(cell);
    }
  }
  return out;
}

/// Where in a row which plane lies. Rows of equal outlines look alike.
std::vector<std::int64_t> outline(const std::vector<Cell>& cells) {
  std::vector<std::int64_t> out;
  int plane = INT32_MAX;
  for (const Cell& cell : cells) {
    if (cell.plane == plane) continue;
    plane = cell.plane;
    out.push_back(cell.begin - cells.front().begin);
    out.push_back(plane);
  }
  out.push_back(cells.back().begin + cells.back().length - cells.front().begin);
  return out;
}

/// Rows of a region; long stretches of rows that look alike keep their ends only.
std::vector<Line> lines_of(const Part& part, const Region& region, std::int64_t row_bytes, std::int64_t num_blocks,
                           std::size_t room, bool all) {
  std::vector<Line> out;
  const std::int64_t num_rows = (region.end - region.begin + row_bytes - 1) / row_bytes;
  const std::int64_t looked_at = std::min(num_rows, std::max<std::int64_t>(kMaxLookedAt / row_bytes, 64));
  constexpr std::int64_t kKept = 6;
  const auto row = [&](std::int64_t r) {
    const std::int64_t begin = region.begin + r * row_bytes;
    return Line{begin, cells_of(part, begin, std::min(begin + row_bytes, region.end), num_blocks), 0};
  };
  for (std::int64_t r = 0; r < looked_at && out.size() < room;) {
    const std::vector<std::int64_t> shape = outline(row(r).cells);
    std::int64_t last = r;
    while (!all && last + 1 < looked_at && outline(row(last + 1).cells) == shape) ++last;
    const std::int64_t alike = last - r + 1;
    const bool shorten = alike > kKept + 2;
    for (std::int64_t k = 0; k < (shorten ? kKept : alike) && out.size() < room; ++k) out.push_back(row(r + k));
    if (shorten && out.size() + 2 <= room) {
      out.push_back({region.begin + (r + kKept) * row_bytes, {}, alike - kKept - 1});
      out.push_back(row(last));
    } else if (shorten) {
      break;
    }
    r = last + 1;
  }
  return out;
}

/// Regions of the first blocks, without lines.
std::vector<Region> outline_regions(const Layout& layout, const std::vector<Part>& parts, std::int64_t num_blocks) {
  std::vector<Region> out;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (const Interval& region : regions_of(layout, parts[p], num_blocks)) {
      out.push_back({static_cast<std::int64_t>(p), region.begin, region.end, {}});
    }
  }
  return out;
}

std::int64_t count_rows(const std::vector<Region>& regions, std::int64_t row_bytes) {
  std::int64_t out = 0;
  for (const Region& region : regions) out += (region.end - region.begin + row_bytes - 1) / row_bytes;
  return out;
}

}  // namespace

ByteMap make_byte_map(const Layout& layout, std::size_t max_lines) {
  ByteMap out;
  std::vector<Part> parts;
  for (std::int64_t p = 0; p < layout.num_parts(); ++p) {
    parts.push_back(part_of(layout, p));
    std::int64_t total = 0;
    for (const Interval& region : regions_of(layout, parts.back(), 1)) total += region.end - region.begin;
    out.row_bytes = std::max(out.row_bytes, choose_row(layout, parts.back(), total));
  }
  std::int64_t blocks = 1;
  for (const Plane& plane : layout.planes()) blocks = std::max(blocks, plane.extent(Axis::kBlock));
  std::int64_t num_rows = 0;
  for (out.num_blocks = std::min<std::int64_t>(blocks, kMaxBlocks);; --out.num_blocks) {
    out.regions = outline_regions(layout, parts, out.num_blocks);
    num_rows = count_rows(out.regions, out.row_bytes);
    if (num_rows <= kSmall || out.num_blocks == 1) break;
  }
  const bool all = num_rows <= kSmall;
  std::size_t room = max_lines;
  std::size_t shown = 0;
  for (; shown < out.regions.size() && room > 0; ++shown) {
    Region& region = out.regions[shown];
    // Each region gets its share, so that keys do not push values out of the picture.
    const std::size_t share = std::max<std::size_t>(room / std::min<std::size_t>(out.regions.size() - shown, 8), 3);
    region.lines = lines_of(parts[static_cast<std::size_t>(region.part)], region, out.row_bytes, out.num_blocks,
                            std::min(share, room), all);
    room -= std::min(room, region.lines.size() + 1);
  }
  out.regions_left_out = out.regions.size() - shown;
  out.regions.resize(shown);
  return out;
}

}  // namespace kvstride::cli
