// SPDX-License-Identifier: Apache-2.0
// A table for people.
#include "table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace kvstride::cli {
namespace {

std::size_t characters(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

std::string table(const std::vector<std::vector<std::string>>& rows, std::size_t widest) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (const std::size_t width = characters(row[i]); width <= widest) widths[i] = std::max(widths[i], width);
    }
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    std::size_t start = 0;  // of the column
    std::size_t at = 0;     // characters in the line
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (!row[i].empty()) {
        if (at > start) {
          out += line + "\n";
          line.clear();
          at = 0;
        }
        line.append(start - at, ' ');
        line += row[i];
        at = start + characters(row[i]);
      }
      start += widths[i] + 2;
    }
    out += line + "\n";
  }
  return out;
}

std::string size_text(std::int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits{"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  auto value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; value >= 1023.95 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace kvstride::cli
