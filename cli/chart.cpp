// SPDX-License-Identifier: Apache-2.0
// A chart of lines, as SVG.
#include "chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "svg.h"

namespace kvstride::cli {
namespace {

constexpr std::array<const char*, 8> kColors{"#4285b4", "#eb8c34", "#529e58", "#c44e52",
                                             "#8172b3", "#937860", "#da8bc3", "#8c8c8c"};
constexpr std::array<const char*, 3> kDashes{"none", "6 3", "2 3"};
constexpr double kLeft = 58, kTop = 66, kHeight = 300, kTick = 74, kRow = 17, kCharacter = 6.3;

std::string text(double x, double y, const std::string& words, const std::string& more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, more, escape_xml(words));
}

}  // namespace

std::string draw_chart(const Chart& chart) {
  const double plot = std::max(5.0, static_cast<double>(chart.ticks.size())) * kTick;
  std::size_t longest = 0;
  for (const Chart::Line& line : chart.lines) longest = std::max(longest, line.name.size());
  const double legend = kLeft + plot + 18;
  const double head = kLeft + kCharacter * static_cast<double>(std::max(chart.title.size() * 3 / 2, chart.note.size()));
  const double width = std::max(legend + 36 + kCharacter * static_cast<double>(longest), head);
  const double height = std::max(kTop + kHeight + 56, kTop + kRow * static_cast<double>(chart.lines.size()) + 20);
  const auto x = [&](std::size_t tick) {
    return kLeft + plot * (static_cast<double>(tick) + 0.5) / static_cast<double>(chart.ticks.size());
  };
  double most = 10;  // percent: up to the next ten
  for (const Chart::Line& line : chart.lines) {
    for (const auto& value : line.values) {
      while (value.value_or(0) > most) most += 10;
    }
  }
  const auto y = [&](double value) { return kTop + kHeight * (1 - value / most); };

  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"'DejaVu Sans',Verdana,Arial,sans-serif\" font-size=\"11\" fill=\"#333\">\n"
      "<rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"white\"/>\n",
      width, height);
  out += text(kLeft, 22, chart.title, "font-size=\"15\" font-weight=\"bold\"");
  out += text(kLeft, 41, chart.note, "fill=\"#666\"");
  for (double percent = 0; percent <= most; percent += 10) {
    out += fmt::format("<line x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>\n", kLeft,
                       kLeft + plot, y(percent), y(percent));
    out += text(kLeft - 6, y(percent) + 4, fmt::format("{:.0f} %", percent), "text-anchor=\"end\"");
  }
  for (std::size_t tick = 0; tick < chart.ticks.size(); ++tick) {
    out += text(x(tick), kTop + kHeight + 18, chart.ticks[tick], "text-anchor=\"middle\"");
  }
  out += text(kLeft + plot / 2, kTop + kHeight + 40, chart.x, "text-anchor=\"middle\" font-weight=\"bold\"");
  out += text(16, kTop + kHeight / 2, chart.y,
              fmt::format("text-anchor=\"middle\" font-weight=\"bold\" transform=\"rotate(-90 16 {:.1f})\"",
                          kTop + kHeight / 2));
  for (std::size_t i = 0; i < chart.lines.size(); ++i) {
    const Chart::Line& line = chart.lines[i];
    const std::string look = fmt::format("stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{}\" fill=\"none\"",
                                         kColors[i % kColors.size()], kDashes[i / kColors.size() % kDashes.size()]);
    std::string points;
    for (std::size_t tick = 0; tick < line.values.size(); ++tick) {
      if (!line.values[tick]) continue;
      points += fmt::format("{:.1f},{:.1f} ", x(tick), y(*line.values[tick]));
      out += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x(tick), y(*line.values[tick]),
                         kColors[i % kColors.size()]);
    }
    out += fmt::format("<polyline points=\"{}\" {}/>\n", points, look);
    const double row = kTop + kRow * static_cast<double>(i) + 8;
    out += fmt::format("<path d=\"M{:.1f} {:.1f}h22\" {}/>\n", legend, row, look);
    out += text(legend + 28, row + 4, line.name);
  }
  return out + "</svg>\n";
}

}  // namespace kvstride::cli
