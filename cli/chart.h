// SPDX-License-Identifier: Apache-2.0
// A chart of lines.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace kvstride::cli {

struct Chart {
  struct Line {
    std::string name;
    std::vector<std::optional<double>> values;  ///< in percent, one for each tick
  };
  std::string title;
  std::string note;  ///< below the title
  std::string x;     ///< what the ticks are
  std::string y;
  std::vector<std::string> ticks;  ///< side by side at equal distances
  std::vector<Line> lines;
};

/// SVG.
std::string draw_chart(const Chart& chart);

}  // namespace kvstride::cli
