// SPDX-License-Identifier: Apache-2.0
// `kvstride detect`: what a tensor's shape and strides can mean.
#include "kvstride/detect.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "commands.h"
#include "json.h"
#include "kvstride/error.h"
#include "parse.h"
#include "table.h"

namespace kvstride::cli {
namespace {

/// An element and where a reading puts it.
struct Example {
  std::string plane;
  Index index{};
  Location at{};
};

std::vector<TensorShape> parse_parts(const Options& options) {
  std::vector<TensorShape> out;
  for (const std::string& shape : options.shape) out.push_back({parse_integers(shape, "--shape"), {}, 0});
  if (!options.strides.empty() && options.strides.size() != out.size()) {
    throw Error(ErrorCode::kArgument,
                fmt::format("--strides: given {} times for {} tensors", options.strides.size(), out.size()));
  }
  for (std::size_t i = 0; i < options.strides.size(); ++i)
    out[i].strides = parse_integers(options.strides[i], "--strides");
  return out;
}

Hints parse_hints(const Options& options) {
  Hints out;
  const auto set = [](std::optional<std::int64_t>& to, const std::optional<std::string>& from, const char* option) {
    if (from) to = parse_integer(*from, option);
  };
  set(out.num_layers, options.num_layers, "--layers");
  set(out.num_blocks, options.num_blocks, "--blocks");
  set(out.block_size, options.block_size, "--block-size");
  set(out.num_kv_heads, options.num_kv_heads, "--heads");
  set(out.head_size, options.head_size, "--head-size");
  if (options.dtype) out.dtype = parse_dtype(*options.dtype, "--dtype");
  return out;
}

/// Elements that all readings have: near the start, the middle and the end of every axis but the layer.
std::vector<std::pair<std::string, Index>> common_elements(const std::vector<Reading>& readings) {
  std::vector<std::pair<std::string, Index>> out;
  for (const Plane& plane : readings.front().layout.planes()) {
    std::array<std::int64_t, kNumAxes> extents = plane.extents;
    const bool common = std::all_of(readings.begin(), readings.end(), [&](const Reading& reading) {
      const Plane* twin = reading.layout.find_plane(plane.name);
      for (std::size_t a = 0; twin != nullptr && a < extents.size(); ++a)
        extents[a] = std::min(extents[a], twin->extents[a]);
      return twin != nullptr;
    });
    if (!common) continue;
    std::vector<Index> indices{{}};
    for (std::size_t a = 1; a < extents.size(); ++a) {
      const std::set<std::int64_t> places{0, std::min<std::int64_t>(1, extents[a] - 1), extents[a] / 2, extents[a] - 1};
      std::vector<Index> next;
      for (const Index& index : indices) {
        for (const std::int64_t place : places) {
          next.push_back(index);
          next.back()[a] = place;
        }
      }
      indices = std::move(next);
    }
    for (const Index& index : indices) out.emplace_back(plane.name, index);
  }
  return out;
}

/// The element that the most readings put at addresses of their own, the same one for all of them.
std::optional<std::pair<std::string, Index>> telling_element(const std::vector<Reading>& readings) {
  std::optional<std::pair<std::string, Index>> best;
  std::size_t most = 1;
  for (const auto& [plane, index] : common_elements(readings)) {
    std::set<std::pair<std::int64_t, std::int64_t>> addresses;
    for (const Reading& reading : readings) {
      const Location at = reading.layout.offset(plane, index);
      addresses.emplace(at.tensor, at.byte);
    }
    if (addresses.size() > most) {
      most = addresses.size();
      best = {plane, index};
    }
  }
  return best;
}

/// For a reading that shares no such element with the others: one at which it differs from another reading, else
/// its last element, which a reading of other lengths does not have.
Example own_example(const std::vector<Reading>& readings, std::size_t at) {
  const Layout& layout = readings[at].layout;
  for (std::size_t i = 0; i < readings.size(); ++i) {
    if (i == at) continue;
    if (const auto found = differing_element(layout, readings[i].layout)) return {found->plane, found->index, found->a};
  }
  const Plane& plane = layout.planes().back();
  Index last{};
  for (std::size_t a = 1; a < last.size(); ++a) last[a] = plane.extents[a] - 1;
  return {plane.name, last, layout.offset(plane, last)};
}

std::vector<Example> examples(const std::vector<Reading>& readings) {
  std::vector<Example> out;
  const auto common = readings.size() > 1 ? telling_element(readings) : std::nullopt;
  for (std::size_t i = 0; i < readings.size(); ++i) {
    if (common) {
      out.push_back({common->first, common->second, readings[i].layout.offset(common->first, common->second)});
    } else {
      out.push_back(own_example(readings, i));
    }
  }
  return out;
}

Json example_json(const Example& example) {
  Json out{{"plane", example.plane}};
  if (example.index[0] != 0) out["L"] = example.index[0];
  for (int a = 1; a < kNumAxes; ++a) {
    out[std::string(1, letter_of(static_cast<Axis>(a)))] = example.index[static_cast<std::size_t>(a)];
  }
  out["offset"] = example.at.byte;
  if (example.at.tensor != 0) out["tensor"] = example.at.tensor;
  return out;
}

std::string example_text(const Example& example) {
  return fmt::format("{}(B={}, N={}, H={}, D={}) at byte {}", example.plane, example.index[1], example.index[2],
                     example.index[3], example.index[4], example.at.byte);
}

/// The library's own words for a shape that has no single reading.
std::string why(const std::vector<TensorShape>& parts, const Hints& hints, const std::vector<std::string>& among) {
  try {
    detect(parts, hints, among);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

Outcome run_detect(const Options& options) {
  const std::vector<TensorShape> parts = parse_parts(options);
  const Hints hints = parse_hints(options);
  const std::vector<Reading> readings = candidates(parts, hints, options.among);
  const std::vector<Example> shown = examples(readings);

  Outcome outcome;
  const char* status = "ok";
  if (readings.empty()) {
    status = "unknown";
    outcome.code = kUnknownShape;
    outcome.message = why(parts, hints, options.among);
  } else if (readings.size() > 1) {
    status = "ambiguous";
    outcome.code = kAmbiguousShape;
    outcome.message = fmt::format("detect: shape [{}] has {} readings; say more (--heads, --block-size, --among, …)",
                                  options.shape.front(), readings.size());
  }
  if (options.json) {
    Json list = Json::array();
    for (std::size_t i = 0; i < readings.size(); ++i) {
      const Reading& reading = readings[i];
      list.push_back({{"name", reading.name},
                      {"names", reading.names},
                      {"order", reading.order},
                      {"geometry", to_json(reading.layout.geometry())},
                      {"layout", reading.layout.str()},
                      {"assumes", reading.assumes},
                      {"example", example_json(shown[i])}});
    }
    outcome.out = dump({{"status", status}, {"readings", std::move(list)}});
    return outcome;
  }
  std::vector<std::vector<std::string>> rows;
  for (std::size_t i = 0; i < readings.size(); ++i) {
    const Reading& reading = readings[i];
    rows.push_back({reading.name, reading.order, to_string(reading.layout.geometry()), example_text(shown[i])});
    for (std::size_t n = 1; n < reading.names.size(); ++n) rows.push_back({"= " + reading.names[n]});
  }
  outcome.out = table(rows, 64);
  return outcome;
}

}  // namespace kvstride::cli
