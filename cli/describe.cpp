// SPDX-License-Identifier: Apache-2.0
// `kvstride describe`: planes, strides, sizes and contiguous runs of a layout.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "commands.h"
#include "json.h"
#include "kvstride/error.h"
#include "kvstride/registry.h"
#include "parse.h"
#include "runs.h"
#include "svg.h"
#include "table.h"

namespace kvstride::cli {
namespace {

using Rows = std::vector<std::vector<std::string>>;

/// `N%16/2[8] 32`: digit, length, stride.
std::string mode_text(const Mode& mode, std::int64_t extent) {
  std::string out(1, letter_of(mode.axis));
  if (mode.modulus != extent) out += fmt::format("%{}", mode.modulus);
  if (mode.divisor != 1) out += fmt::format("/{}", mode.divisor);
  return fmt::format("{}[{}] {}", out, mode.extent, mode.stride);
}

/// Natural strides; nothing where they are no whole numbers of elements.
std::optional<std::vector<std::int64_t>> natural_strides(const Layout& layout, std::int64_t part) {
  try {
    return layout.strides(part);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string natural_tensor(const Layout& layout, std::int64_t part) {
  const std::int64_t item = layout.natural_item_size(part);
  std::string out =
      fmt::format("{} bytes, natural shape [{}]", layout.part_bytes(part), fmt::join(layout.shape(part), ", "));
  if (const auto strides = natural_strides(layout, part))
    out += fmt::format(" strides [{}]", fmt::join(*strides, ", "));
  return out + (item == 1 ? " of bytes" : fmt::format(" of {}-byte elements", item));
}

Rows overview(const Layout& layout, const Entry* entry) {
  Rows rows;
  if (entry != nullptr) {
    rows.push_back({"name", std::string(entry->name)});
    if (!entry->note.empty()) rows.push_back({"note", std::string(entry->note)});
    rows.push_back({"declared", fmt::format("[{}] by {}{}", entry->shape, entry->engine,
                                            entry->opaque ? " ◆ which does not tell the bytes" : "")});
  }
  rows.push_back({"order", layout.order().text()});
  rows.push_back({"layout", layout.str()});
  rows.push_back({"geometry", to_string(layout.geometry())});
  rows.push_back({"tensors", fmt::format("{}{}", layout.num_tensors(), layout.layered() ? " with all layers" : "")});
  const auto runs = runs_of_block(layout);
  for (std::int64_t part = 0; part < layout.num_parts(); ++part) {
    rows.push_back({fmt::format("tensor {}", part), natural_tensor(layout, part)});
    rows.push_back({"a block has", runs ? to_text((*runs)[static_cast<std::size_t>(part)]) : "more than 2^22 runs"});
  }
  return rows;
}

Rows planes(const Layout& layout) {
  Rows rows{{"PLANE", "DTYPE", "TENSOR", "BASE", "A BLOCK HAS", "MODES: axis[length] stride in bytes"}};
  for (const Plane& plane : layout.planes()) {
    std::vector<std::string> modes;
    for (const Mode& mode : plane.modes) modes.push_back(mode_text(mode, plane.extent(mode.axis)));
    rows.push_back({plane.name, std::string(name_of(plane.dtype)), fmt::format("{}", plane.part),
                    fmt::format("{}", plane.base), to_text(runs_of_plane(plane)),
                    fmt::format("{}", fmt::join(modes, ", "))});
  }
  return rows;
}

Json plane_json(const Plane& plane) {
  Json modes = Json::array();
  for (const Mode& mode : plane.modes) {
    modes.push_back({{"axis", std::string(1, letter_of(mode.axis))},
                     {"modulus", mode.modulus},
                     {"divisor", mode.divisor},
                     {"extent", mode.extent},
                     {"stride", mode.stride}});
  }
  return {{"name", plane.name},
          {"dtype", name_of(plane.dtype)},
          {"part", plane.part},
          {"base", plane.base},
          {"block_runs", to_json(runs_of_plane(plane))},
          {"modes", std::move(modes)}};
}

Json layout_json(const Layout& layout, const Entry* entry) {
  Json out = Json::object();
  if (entry != nullptr) out["name"] = entry->name;
  out["order"] = layout.order().text();
  out["layout"] = layout.str();
  out["geometry"] = to_json(layout.geometry());
  out["num_tensors"] = layout.num_tensors();
  out["num_bytes"] = layout.num_bytes();
  out["parts"] = Json::array();
  const auto runs = runs_of_block(layout);
  for (std::int64_t part = 0; part < layout.num_parts(); ++part) {
    Json one{{"num_bytes", layout.part_bytes(part)},
             {"item_size", layout.natural_item_size(part)},
             {"shape", layout.shape(part)},
             {"strides", nullptr},
             {"block_runs", nullptr}};
    if (const auto strides = natural_strides(layout, part)) one["strides"] = *strides;
    if (runs) one["block_runs"] = to_json((*runs)[static_cast<std::size_t>(part)]);
    out["parts"].push_back(std::move(one));
  }
  out["planes"] = Json::array();
  for (const Plane& plane : layout.planes()) out["planes"].push_back(plane_json(plane));
  return out;
}

}  // namespace

Outcome run_describe(const Options& options) {
  const Layout layout = parse_layout(options.order, parse_sizes(options.geometry, options.dtype), "--geometry");
  const Entry* entry = find_entry(options.order);
  if (options.svg) write_svg(*options.svg, draw_svg(layout, entry != nullptr ? options.order : ""));
  if (options.json) return {dump(layout_json(layout, entry)), "", kDone};
  return {table(overview(layout, entry), 1000) + "\n" + table(planes(layout)), "", kDone};
}

}  // namespace kvstride::cli
