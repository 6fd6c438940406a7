// SPDX-License-Identifier: Apache-2.0
// Which bytes of a cache a picture shows, and what each of them holds.
#pragma once

#include <cstdint>
#include <vector>

#include "kvstride/layout.h"

namespace kvstride::cli {

/// Consecutive bytes of one element, or of none.
struct Cell {
  static constexpr int kPadding = -1;
  static constexpr int kOtherBlock = -2;
  std::int64_t begin;
  std::int64_t length;
  int plane;  ///< index in Layout::planes(), or one of the above
  Index index{};
};

/// A line of the picture: bytes of a row, or a number of rows that are left out because they look like the last one.
struct Line {
  std::int64_t begin;
  std::vector<Cell> cells;
  std::int64_t left_out = 0;
};

/// Neighbouring bytes of the shown blocks; its lines may end before it does.
struct Region {
  std::int64_t part;
  std::int64_t begin;
  std::int64_t end;
  std::vector<Line> lines;
};

struct ByteMap {
  std::int64_t num_blocks = 1;  ///< blocks 0 … num_blocks − 1 are shown
  std::int64_t row_bytes = 1;
  std::vector<Region> regions;
  std::size_t regions_left_out = 0;
};

/// The first block, or the first few of small ones; layer 0 where each layer has a tensor of its own. At most
/// `max_lines` lines.
ByteMap make_byte_map(const Layout& layout, std::size_t max_lines);

}  // namespace kvstride::cli
