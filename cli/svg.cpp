// SPDX-License-Identifier: Apache-2.0
// A picture of the bytes of the first blocks.
#include "svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

#include "byte_map.h"
#include "kvstride/error.h"

namespace kvstride::cli {
namespace {

struct Color {
  int r, g, b;
};
struct Ramp {
  Color from, to;
};

constexpr std::size_t kMaxLines = 56;
constexpr double kWidth = 1240;     // of the whole picture, about
constexpr double kGap = 18;         // between panels
constexpr double kCharacter = 6.2;  // width at the font size of labels
constexpr double kTitleCharacter = 10.6;
constexpr double kThinnest = 1;     // piece that is drawn on its own
constexpr double kNarrowest = 560;  // of the whole picture, for its title

/// Light to dark, by index; L B N H D.
constexpr std::array<Ramp, kNumAxes> kRamps{{{{237, 228, 245}, {92, 45, 130}},
                                             {{232, 232, 232}, {70, 70, 78}},
                                             {{221, 240, 222}, {18, 96, 52}},
                                             {{253, 228, 207}, {166, 54, 3}},
                                             {{219, 233, 246}, {8, 64, 129}}}};
constexpr std::array<Color, 8> kPlaneColors{{{66, 133, 180},
                                             {235, 140, 52},
                                             {82, 158, 88},
                                             {196, 78, 82},
                                             {129, 114, 179},
                                             {147, 120, 96},
                                             {218, 139, 195},
                                             {140, 140, 140}}};
constexpr Color kOther{214, 214, 214};

std::string hex(Color color) { return fmt::format("#{:02x}{:02x}{:02x}", color.r, color.g, color.b); }

Color mix(const Ramp& ramp, double t) {
  const auto channel = [t](int from, int to) { return static_cast<int>(from + (to - from) * t + 0.5); };
  return {channel(ramp.from.r, ramp.to.r), channel(ramp.from.g, ramp.to.g), channel(ramp.from.b, ramp.to.b)};
}

bool dark(Color color) { return 299 * color.r + 587 * color.g + 114 * color.b < 140000; }

/// `text` cut to what fits `width` at a character width of `character`.
std::string fitted(const std::string& text, double width, double character) {
  const auto room = static_cast<std::size_t>(std::max(width / character, 4.0));
  return text.size() <= room ? text : text.substr(0, room - 1) + "…";
}

std::string grouped(std::int64_t value) {
  std::string out = fmt::format("{}", value);
  for (std::size_t i = out.size(); i > 3; i -= 3) out.insert(i - 3, ",");
  return out;
}

/// Planes, or one axis.
struct Panel {
  std::optional<Axis> axis;
  std::int64_t extent = 1;
  std::int64_t step = 1;  ///< indices that share a color, so that cells stay visible
  double x = 0;
};

/// Neighbouring cells of one color.
struct Piece {
  std::int64_t begin;
  std::int64_t length;
  int plane;
  std::int64_t first;  ///< index along the panel's axis
};

std::vector<Piece> pieces_of(const Line& line, const Panel& panel) {
  std::vector<Piece> out;
  for (const Cell& cell : line.cells) {
    const std::int64_t index =
        panel.axis ? cell.index[static_cast<std::size_t>(*panel.axis)] / panel.step * panel.step : 0;
    const bool same = !out.empty() && (out.back().plane < 0) == (cell.plane < 0) &&
                      (cell.plane < 0 || !panel.axis ? out.back().plane == cell.plane : out.back().first == index);
    if (same) {
      out.back().length += cell.length;
    } else {
      out.push_back({cell.begin, cell.length, cell.plane, cell.plane < 0 ? 0 : index});
    }
  }
  return out;
}

class Drawing {
 public:
  Drawing(const Layout& layout, const std::string& name)
      : layout_(layout), name_(name), map_(make_byte_map(layout, kMaxLines)) {
    measure();
    choose_panels();
  }

  std::string draw() {
    head();
    for (const Region& region : map_.regions) draw_region(region);
    if (map_.regions_left_out > 0) {
      text(left_, y_ + 12, fmt::format("… and {} more pieces of these blocks", map_.regions_left_out), "note");
      y_ += 22;
    }
    const double width = picture_width();
    const double height = y_ + 8;
    return fmt::format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
               "{1:.0f}\" data-row-bytes=\"{2}\" data-blocks=\"{3}\">\n",
               width, height, map_.row_bytes, map_.num_blocks) +
           kDefinitions + out_ + "</svg>\n";
  }

 private:
  static constexpr const char* kDefinitions =
      "<style>text{font-family:'DejaVu Sans',Verdana,Arial,sans-serif;font-size:11px;fill:#333}"
      ".title{font-size:17px;font-weight:bold}.long{font-size:11px}.panel-title{font-size:12px;font-weight:bold}"
      ".note{fill:#666}.address{font-size:10px;fill:#666;text-anchor:end}.label{font-size:10px;text-anchor:middle}"
      ".light{fill:#fff}</style>\n"
      "<defs><pattern id=\"padding\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" "
      "patternTransform=\"rotate(45)\"><path d=\"M0 0V5\" stroke=\"#999\" stroke-width=\"2\"/></pattern></defs>\n"
      "<path d=\"M0 0H100000V100000H0Z\" fill=\"#fff\"/>\n";

  /// Height of lines and the room for addresses.
  void measure() {
    std::size_t lines = 0;
    std::int64_t last = 0;
    for (const Region& region : map_.regions) {
      lines += region.lines.size();
      last = std::max(last, region.end);
    }
    line_height_ = lines <= 14 ? 24 : lines <= 28 ? 18 : 13;
    left_ = 18 + kCharacter * static_cast<double>(grouped(last).size());
  }

  void choose_panels() {
    panels_.push_back({});
    std::array<std::int64_t, kNumAxes> extents{};
    extents.fill(1);
    for (const Plane& plane : layout_.planes()) {
      for (std::size_t a = 0; a < extents.size(); ++a) extents[a] = std::max(extents[a], plane.extents[a]);
    }
    extents[0] = layout_.layered() ? extents[0] : 1;
    extents[1] = std::min(extents[1], map_.num_blocks);
    for (std::size_t a = 0; a < extents.size(); ++a) {
      if (extents[a] > 1) panels_.push_back({static_cast<Axis>(a), extents[a], 1, 0});
    }
    const auto count = static_cast<double>(panels_.size());
    std::int64_t item = map_.row_bytes;
    for (const Plane& plane : layout_.planes()) item = std::min(item, item_size(plane.dtype));
    const double widest = 34 * static_cast<double>(map_.row_bytes) / static_cast<double>(item);
    panel_width_ = std::clamp(std::min((kWidth - left_) / count - kGap, widest), 150.0, 460.0);
    for (std::size_t i = 0; i < panels_.size(); ++i) {
      panels_[i].x = left_ + static_cast<double>(i) * (panel_width_ + kGap);
      coarsen(panels_[i]);
    }
  }

  /// Doubles the step until a piece is three pixels wide on average.
  void coarsen(Panel& panel) const {
    if (!panel.axis) return;
    for (; panel.step < panel.extent; panel.step *= 2) {
      std::size_t pieces = 0;
      double width = 0;
      for (const Region& region : map_.regions) {
        for (const Line& line : region.lines) {
          pieces += pieces_of(line, panel).size();
          for (const Cell& cell : line.cells) width += scaled(cell.length);
        }
      }
      if (width >= 3 * static_cast<double>(pieces)) return;
    }
  }

  double picture_width() const { return std::max(panels_.back().x + panel_width_ + 16, kNarrowest); }

  double scaled(std::int64_t bytes) const {
    return static_cast<double>(bytes) * panel_width_ / static_cast<double>(map_.row_bytes);
  }

  void text(double x, double y, const std::string& words, const char* style) {
    out_ += fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", style, x, y, escape_xml(words));
  }
  void rect(double x, double y, double width, double height, const std::string& fill, bool edge) {
    out_ += fmt::format("<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"{}\"{}/>\n", x, y,
                        width, height, fill, edge ? " stroke=\"#fff\"" : "");
  }

  void head() {
    const double width = picture_width() - 32;
    const std::string order = layout_.order().text();
    const std::string title = name_.empty() ? order : name_ + ": " + order;
    if (static_cast<double>(title.size()) * kTitleCharacter <= width) {
      text(16, 28, title, "title");
    } else {
      text(16, 28, fitted(title, width, kCharacter + 1.4), "long title");
    }
    text(16, 48,
         fitted(fmt::format("{}  ·  {}", to_string(layout_.geometry()), what_is_shown()), width, kCharacter + 0.6),
         "note");
    y_ = 62;
    draw_plane_legend(width);
    draw_axis_legends();
  }

  std::string what_is_shown() const {
    std::string out = map_.num_blocks == 1 ? "block 0" : fmt::format("blocks 0 to {}", map_.num_blocks - 1);
    if (!layout_.layered() && layout_.geometry().num_layers > 1) out += " of layer 0";
    return out + fmt::format(", {} bytes a row", grouped(map_.row_bytes));
  }

  void draw_plane_legend(double width) {
    out_ += "<g class=\"legend\">\n";
    double x = 16;
    const auto entry = [&](const std::string& fill, const std::string& words) {
      const double needed = 22 + 7 * static_cast<double>(words.size()) + 14;
      if (x + needed > width && x > 16) {
        x = 16;
        y_ += 18;
      }
      rect(x, y_, 14, 12, fill, false);
      text(x + 19, y_ + 10, words, "legend-text");
      x += needed;
    };
    for (std::size_t p = 0; p < layout_.planes().size(); ++p) {
      const Plane& plane = layout_.planes()[p];
      entry(plane_fill(static_cast<int>(p)), fmt::format("{} {}", plane.name, name_of(plane.dtype)));
    }
    if (has(Cell::kPadding)) entry(plane_fill(Cell::kPadding), "padding");
    if (has(Cell::kOtherBlock)) entry(plane_fill(Cell::kOtherBlock), "another block");
    out_ += "</g>\n";
    y_ += 34;
  }

  bool has(int plane) const {
    for (const Region& region : map_.regions) {
      for (const Line& line : region.lines) {
        for (const Cell& cell : line.cells) {
          if (cell.plane == plane) return true;
        }
      }
    }
    return false;
  }

  /// The titles of the panels and, for axes, which color is which index.
  void draw_axis_legends() {
    out_ += "<g class=\"legend\">\n";
    for (const Panel& panel : panels_) {
      if (!panel.axis) {
        text(panel.x, y_ + 11, "plane", "panel-title");
        continue;
      }
      const std::string title = fmt::format("{} {}", word_of(*panel.axis), letter_of(*panel.axis));
      text(panel.x, y_ + 11, title, "panel-title");
      const std::string last = fmt::format("{}", panel.extent - 1);
      const double start = panel.x + 16 + 8 * static_cast<double>(title.size());
      const double room = panel.x + panel_width_ - start - kCharacter * static_cast<double>(last.size()) - 6;
      const double count = std::min(static_cast<double>(std::min<std::int64_t>(panel.extent, 16)), room / 3);
      const auto swatches = static_cast<std::int64_t>(std::max(count, 2.0));
      const double swatch = std::min(room / static_cast<double>(swatches), 12.0);
      text(start - 9, y_ + 11, "0", "legend-text");
      for (std::int64_t i = 0; i < swatches; ++i) {
        const double t = static_cast<double>(i) / static_cast<double>(swatches - 1);
        rect(start + static_cast<double>(i) * swatch, y_ + 1, swatch, 11, hex(mix(ramp(panel), t)), false);
      }
      text(start + static_cast<double>(swatches) * swatch + 3, y_ + 11, last, "legend-text");
    }
    out_ += "</g>\n";
    y_ += 22;
  }

  static const Ramp& ramp(const Panel& panel) { return kRamps[static_cast<std::size_t>(*panel.axis)]; }

  static std::string plane_fill(int plane) {
    if (plane == Cell::kPadding) return "url(#padding)";
    if (plane == Cell::kOtherBlock) return hex(kOther);
    return hex(kPlaneColors[static_cast<std::size_t>(plane) % kPlaneColors.size()]);
  }

  void draw_region(const Region& region) {
    if (map_.regions.size() > 1 && (region.lines.size() > 1 || layout_.num_parts() > 1)) {
      std::string where = fmt::format("bytes {} to {}", grouped(region.begin), grouped(region.end - 1));
      if (layout_.num_parts() > 1) where = fmt::format("tensor {}, ", region.part) + where;
      text(left_, y_ + 13, where, "note");
      y_ += 20;
    }
    for (const Panel& panel : panels_) {
      out_ += fmt::format("<g class=\"cells\" data-panel=\"{}\">\n",
                          panel.axis ? std::string(1, letter_of(*panel.axis)) : "plane");
      double y = y_;
      for (const Line& line : region.lines) {
        if (!line.cells.empty()) draw_line(line, panel, y);
        y += line_height_;
      }
      out_ += "</g>\n";
    }
    for (const Line& line : region.lines) {
      if (line.cells.empty()) {
        text(left_, y_ + line_height_ / 2 + 4,
             fmt::format("⋮  {} rows alike, {} bytes", grouped(line.left_out), grouped(line.left_out * map_.row_bytes)),
             "note");
      } else {
        text(left_ - 6, y_ + line_height_ / 2 + 3.5, grouped(line.begin), "address");
      }
      y_ += line_height_;
    }
    const Line& last = region.lines.back();
    const std::int64_t end = last.cells.empty() ? last.begin : last.cells.back().begin + last.cells.back().length;
    if (end < region.end) {
      text(left_, y_ + 13, fmt::format("… and {} more bytes", grouped(region.end - end)), "note");
      y_ += 20;
    }
    y_ += 8;
  }

  void draw_line(const Line& line, const Panel& panel, double y) {
    double drawn = panel.x;  // right end of what is drawn
    for (const Piece& piece : pieces_of(line, panel)) {
      const double right = panel.x + scaled(piece.begin - line.begin + piece.length);
      if (right < drawn + kThinnest && piece.plane >= 0) continue;  // the next piece covers it
      const double x = drawn;
      const double width = std::max(right - x, piece.plane < 0 ? 2.0 : 0.0);
      drawn = right;
      std::string fill = plane_fill(piece.plane);
      std::string label;
      bool light = false;
      if (piece.plane >= 0 && panel.axis) {
        const Color color =
            mix(ramp(panel), std::min(1.0, static_cast<double>(piece.first) / static_cast<double>(panel.extent - 1)));
        fill = hex(color);
        light = dark(color);
        const std::int64_t last = std::min(piece.first + panel.step, panel.extent) - 1;
        label = panel.step == 1 ? fmt::format("{}", piece.first) : fmt::format("{}–{}", piece.first, last);
      } else if (piece.plane >= 0) {
        label = layout_.planes()[static_cast<std::size_t>(piece.plane)].name;
        light = true;
      }
      rect(x, y, width, line_height_ - 1, fill, width >= 5);
      const auto characters =
          static_cast<double>(label.size() - (panel.step > 1 && panel.axis && !label.empty() ? 2 : 0));
      if (!label.empty() && width >= characters * kCharacter + 1) {
        text(x + width / 2, y + line_height_ / 2 + 3, label, light ? "label light" : "label");
      }
    }
  }

  const Layout& layout_;
  const std::string& name_;
  ByteMap map_;
  std::vector<Panel> panels_;
  double panel_width_ = 0;
  double line_height_ = 0;
  double left_ = 0;
  double y_ = 0;
  std::string out_;
};

}  // namespace

std::string escape_xml(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

void write_svg(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  int error = errno;
  if (file != nullptr && std::fclose(file) != 0 && written) {
    written = false;
    error = errno;
  }
  if (!written)
    throw Error(ErrorCode::kArgument, fmt::format("--svg: cannot write '{}': {}", path, std::strerror(error)));
}

std::string draw_svg(const Layout& layout, const std::string& name) { return Drawing(layout, name).draw(); }

}  // namespace kvstride::cli
