// SPDX-License-Identifier: Apache-2.0
// Detection among the registry's rows, and binding of tensors to a layout that is named.
#include "kvstride/detect.h"

#include <fmt/format.h>

#include <algorithm>

#include "kvstride/error.h"
#include "layout/fit.h"
#include "layout/internal.h"
#include "layout/shape_text.h"

namespace kvstride {
namespace {

constexpr std::size_t kMaxRank = 12;

/// Fills in strides and item size; refuses what is no tensor.
std::vector<TensorShape> checked(const std::vector<TensorShape>& parts, const Hints& hints, const char* verb) {
  const auto fail = [&](const std::string& what) {
    throw Error(ErrorCode::kArgument, fmt::format("{}: {}", verb, what));
  };
  if (parts.empty() || parts.size() > 2) fail("expected one tensor or a (key, value) pair");
  std::vector<TensorShape> out = parts;
  for (TensorShape& part : out) {
    if (part.shape.empty()) fail("a tensor of rank 0");
    if (part.shape.size() > kMaxRank) fail(fmt::format("rank {} is above {}", part.shape.size(), kMaxRank));
    for (const std::int64_t length : part.shape) {
      if (length < 1) fail(fmt::format("a dimension of length {}", length));
    }
    if (part.strides.empty()) part.strides = contiguous_strides(part.shape);
    if (part.strides.size() != part.shape.size()) {
      fail(fmt::format("{} strides for a shape of rank {}", part.strides.size(), part.shape.size()));
    }
    for (std::size_t i = 0; i < part.shape.size(); ++i) {
      if (part.strides[i] < 0) fail(fmt::format("a negative stride {}", part.strides[i]));
    }
    if (part.item_size == 0) part.item_size = item_size(hints.dtype.value_or(DType::kBF16));
  }
  return out;
}

void check_hints(const Hints& hints, const char* verb) {
  const auto check = [&](const char* name, const std::optional<std::int64_t>& value) {
    if (value && *value < 1) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: {} is {}, must be at least 1", verb, name, *value));
    }
  };
  check("num_layers", hints.num_layers);
  check("num_blocks", hints.num_blocks);
  check("block_size", hints.block_size);
  check("num_kv_heads", hints.num_kv_heads);
  check("head_size", hints.head_size);
  check("value_head_size", hints.value_head_size);
  for (const auto& [name, value] : hints.symbols) check(name.c_str(), value);
}

/// Layouts of one row over the tensors. Without num_layers the tensor is one layer.
std::vector<Layout> fit_row(const Entry& row, const std::vector<TensorShape>& parts, Hints hints) {
  if (!hints.num_layers) hints.num_layers = 1;
  std::vector<Layout> out;
  const Order order = Order::parse(row.order);
  if (!order.has(Axis::kBlock) && hints.num_blocks.value_or(1) != 1) return out;  // it has one block
  const bool layered = order.has(Axis::kLayer);
  const bool declares_layers = row.shape.find('L') != std::string_view::npos;
  const Declared declared{row.shape, row.literal};
  const auto add = [&](Layout layout) {
    if (std::none_of(out.begin(), out.end(), [&](const Layout& o) { return o == layout; })) {
      out.push_back(std::move(layout));
    }
  };
  if (layered && !declares_layers) {
    if (auto one = fit_declared(order.without(Axis::kLayer), declared, parts, hints)) add(std::move(*one));
  } else if (auto all = fit_declared(order, declared, parts, hints)) {
    add(std::move(*all));
  }
  for (Layout& layout : fit_natural(order, parts, hints)) add(std::move(layout));
  return out;
}

bool wanted(const Entry& row, const std::vector<std::string>& among) {
  return among.empty() || std::any_of(among.begin(), among.end(),
                                      [&](const std::string& name) { return row.name == name || row.engine == name; });
}

void check_among(const std::vector<std::string>& among) {
  for (const std::string& name : among) {
    bool found = false;
    for (const Entry& row : registry()) {
      if (row.name == name && row.opaque) {
        throw Error(ErrorCode::kLayout,
                    fmt::format("among: '{}' is opaque: shape and strides cannot show it; name it instead", name));
      }
      found |= row.name == name || row.engine == name;
    }
    if (!found) throw Error(ErrorCode::kLayout, fmt::format("among: no layout or engine '{}'", name));
  }
}

}  // namespace

Hints Hints::from(const Geometry& geometry) {
  Hints out;
  out.num_layers = geometry.num_layers;
  out.num_blocks = geometry.num_blocks;
  out.block_size = geometry.block_size;
  out.num_kv_heads = geometry.num_kv_heads;
  out.head_size = geometry.head_size;
  out.value_head_size = geometry.value_head_size;
  out.dtype = geometry.dtype;
  out.symbols = geometry.symbols;
  return out;
}

std::optional<std::int64_t> Hints::get(Axis axis) const {
  switch (axis) {
    case Axis::kLayer: return num_layers;
    case Axis::kBlock: return num_blocks;
    case Axis::kToken: return block_size;
    case Axis::kHead: return num_kv_heads;
    case Axis::kDim: return head_size;
  }
  return std::nullopt;
}

std::vector<Reading> candidates(const std::vector<TensorShape>& tensors, const Hints& hints,
                                const std::vector<std::string>& among) {
  check_hints(hints, "detect");
  check_among(among);
  const std::vector<TensorShape> parts = checked(tensors, hints, "detect");
  std::vector<Reading> out;
  for (const Entry& row : registry()) {
    if (row.opaque || !wanted(row, among)) continue;
    for (Layout& layout : fit_row(row, parts, hints)) {
      const auto same = std::find_if(out.begin(), out.end(), [&](const Reading& r) { return r.layout == layout; });
      const std::string name(row.name);
      if (same == out.end()) {
        out.push_back({name, {name}, std::string(row.order), std::move(layout), "strided"});
      } else if (same->names.back() != name) {
        same->names.push_back(name);
      }
    }
  }
  return out;
}

std::optional<Example> differing_element(const Layout& a, const Layout& b) {
  for (const Plane& plane : a.planes()) {
    const Plane* twin = b.find_plane(plane.name);
    if (twin == nullptr) continue;
    const auto example = [&](const Index& index) {
      return Example{plane.name, index, a.offset(plane, index), b.offset(*twin, index)};
    };
    if (twin->base != plane.base || twin->part != plane.part) return example({});
    for (int axis = 0; axis < kNumAxes; ++axis) {
      const auto at = static_cast<std::size_t>(axis);
      const std::int64_t end = std::min({plane.extents[at], twin->extents[at], std::int64_t{1} << 16});
      for (std::int64_t i = 1; i < end; ++i) {
        Index index{};
        index[at] = i;
        if (a.offset(plane, index) != b.offset(*twin, index)) return example(index);
      }
    }
  }
  return std::nullopt;
}

namespace {

std::string print(const Example& example) {
  return fmt::format("{}(B={}, N={}, H={}, D={})", example.plane, example.index[1], example.index[2], example.index[3],
                     example.index[4]);
}

[[noreturn]] void throw_ambiguous(const std::string& what, const std::vector<TensorShape>& parts,
                                  const std::vector<std::pair<std::string, const Layout*>>& readings) {
  std::string text;
  for (std::size_t i = 0; i < readings.size(); ++i) {
    const Layout& layout = *readings[i].second;
    const Layout& other = *readings[i == 0 ? 1 : 0].second;
    text += fmt::format("{}{} = {} [{}]", i == 0 ? "" : "; ", readings[i].first, layout.order().text(),
                        to_string(layout.geometry()));
    if (const auto example = differing_element(layout, other)) {
      text += fmt::format(" puts {} at byte {}", print(*example), example->a.byte);
    } else {
      text += " differs in sizes only, which a geometry settles";
    }
  }
  throw Error(ErrorCode::kAmbiguous,
              fmt::format("{}: {} has {} readings: {}", what, describe(parts), readings.size(), text));
}

/// Why a row of the same rank does not fit, for the message of an unknown layout.
std::string closest(const std::vector<TensorShape>& parts, const Hints& hints) {
  Hints free;
  free.num_layers = hints.num_layers;
  free.dtype = hints.dtype;
  std::string out;
  int shown = 0;
  for (const Entry& row : registry()) {
    if (row.opaque || shown == 3) continue;
    const std::vector<Layout> layouts = fit_row(row, parts, free);
    if (layouts.empty()) continue;
    ++shown;
    out += fmt::format("{}{} would need {}", out.empty() ? "" : "; ", row.name, to_string(layouts[0].geometry()));
  }
  if (!out.empty()) return out;
  return fmt::format("no row of the registry has this shape with rank {}", parts[0].shape.size());
}

}  // namespace

Reading detect(const std::vector<TensorShape>& tensors, const Hints& hints, const std::vector<std::string>& among) {
  std::vector<Reading> readings = candidates(tensors, hints, among);
  if (readings.size() == 1) return std::move(readings.front());
  const std::vector<TensorShape> parts = checked(tensors, hints, "detect");
  if (readings.empty()) {
    throw Error(ErrorCode::kUnknown,
                fmt::format("detect: nothing reads {}; closest: {}", describe(parts), closest(parts, hints)));
  }
  std::vector<std::pair<std::string, const Layout*>> list;
  for (const Reading& reading : readings) list.emplace_back(reading.name, &reading.layout);
  throw_ambiguous("detect", parts, list);
}

namespace {

/// The geometry that complete hints give.
std::optional<Geometry> complete(const Hints& hints, std::int64_t item) {
  if (!hints.num_blocks || !hints.block_size || !hints.num_kv_heads || !hints.head_size) return std::nullopt;
  Geometry out;
  out.num_layers = hints.num_layers.value_or(1);
  out.num_blocks = *hints.num_blocks;
  out.block_size = *hints.block_size;
  out.num_kv_heads = *hints.num_kv_heads;
  out.head_size = *hints.head_size;
  out.value_head_size = hints.value_head_size;
  out.dtype = hints.dtype.value_or(default_dtype(item));
  out.symbols = hints.symbols;
  return out;
}

/// One contiguous dimension of at least the bytes that the layout has.
std::optional<Layout> fit_flat(const Order& order, const std::vector<TensorShape>& parts, const Hints& hints) {
  const auto geometry = complete(hints, parts[0].item_size);
  if (!geometry) return std::nullopt;
  Layout layout(order, *geometry);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const TensorShape& part = parts[p];
    if (part.shape.size() != 1 || (part.shape[0] > 1 && part.strides[0] != 1)) return std::nullopt;
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(part.shape[0], part.item_size, &bytes) ||
        bytes < layout.part_bytes(static_cast<std::int64_t>(p))) {
      return std::nullopt;
    }
  }
  return layout;
}

/// An order and the shapes that engines declare for it.
struct Choice {
  Order order;
  std::vector<Declared> shapes;
};

/// The named row, or all rows that have this order.
std::vector<const Entry*> rows_of(const Order& order, const Entry* named) {
  if (named != nullptr) return {named};
  std::vector<const Entry*> out;
  const std::string text = without_strides(order.parts());
  for (const Entry& row : registry()) {
    const Order whole = Order::parse(row.order);
    const bool one_layer =
        row.shape.find('L') == std::string_view::npos && without_strides(whole.without(Axis::kLayer).parts()) == text;
    if (one_layer || without_strides(whole.parts()) == text) out.push_back(&row);
  }
  return out;
}

Layout bind_order(const std::vector<Choice>& choices, const std::vector<TensorShape>& tensors, const Hints& hints) {
  const std::vector<TensorShape> parts = checked(tensors, hints, "cache");
  const Order& order = choices.front().order;
  if (order.parts().size() != parts.size()) {
    throw Error(ErrorCode::kLayout, fmt::format("cache: '{}' has {} tensors a layer, {} given", order.text(),
                                                order.parts().size(), parts.size()));
  }
  std::vector<Layout> found;
  const auto add = [&](Layout layout) {
    if (std::none_of(found.begin(), found.end(), [&](const Layout& o) { return o == layout; })) {
      found.push_back(std::move(layout));
    }
  };
  for (const Choice& choice : choices) {
    for (const Declared& shape : choice.shapes) {
      if (auto layout = fit_declared(choice.order, shape, parts, hints)) add(std::move(*layout));
    }
  }
  for (Layout& layout : fit_natural(order, parts, hints)) add(std::move(layout));
  if (found.empty()) {
    if (auto layout = fit_flat(order, parts, hints)) add(std::move(*layout));
  }
  if (found.size() == 1) return std::move(found.front());
  if (found.size() > 1) {
    std::vector<std::pair<std::string, const Layout*>> list;
    for (const Layout& layout : found) list.emplace_back(order.text(), &layout);
    throw_ambiguous("cache", parts, list);
  }
  std::string expected;
  for (const Choice& choice : choices) {
    for (const Declared& shape : choice.shapes) expected += fmt::format(" or [{}]", shape.shape);
  }
  if (const auto geometry = complete(hints, parts[0].item_size)) {
    const Layout layout(order, *geometry);
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const auto part = static_cast<std::int64_t>(p);
      expected +=
          fmt::format(" or natural shape [{}] with item size {} ({} bytes)", fmt::join(layout.shape(part), ", "),
                      layout.natural_item_size(part), layout.part_bytes(part));
    }
  } else {
    expected += " or its natural shape, one dimension a term (fused dimensions need a geometry)";
  }
  throw Error(ErrorCode::kLayout, fmt::format("cache: {} does not fit '{}'; expected{}", describe(parts), order.text(),
                                              expected.substr(3)));
}

}  // namespace

Layout bind_layout(std::string_view name_or_order, const std::vector<TensorShape>& parts, Hints hints,
                   std::int64_t tensors_per_part) {
  check_hints(hints, "cache");
  const Entry* named = find_entry(name_or_order);
  const Order order = order_of(name_or_order);
  std::vector<Declared> whole;  // shapes that hold all that the order holds
  std::vector<Declared> layer;  // shapes of one layer's view of an order with L
  const bool layered = order.has(Axis::kLayer);
  for (const Entry* row : rows_of(order, named)) {
    const bool declares_layers = row->shape.find('L') != std::string_view::npos;
    (layered && !declares_layers ? layer : whole).push_back({row->shape, row->literal});
  }
  if (tensors_per_part > 1) {
    if (hints.num_layers.value_or(tensors_per_part) != tensors_per_part) {
      throw Error(ErrorCode::kLayout,
                  fmt::format("cache: {} tensors for num_layers {}", tensors_per_part, *hints.num_layers));
    }
    hints.num_layers = tensors_per_part;
    if (layered) return bind_order({{order.without(Axis::kLayer), layer}}, parts, hints);
    return bind_order({{order, whole}}, parts, hints);
  }
  std::vector<Choice> choices{{order, whole}};
  if (layered && hints.num_layers.value_or(1) == 1 && !layer.empty()) {
    choices.push_back({order.without(Axis::kLayer), layer});
  }
  return bind_order(choices, parts, hints);
}

Layout bind_layout(const Layout& layout, const std::vector<TensorShape>& parts, std::int64_t tensors_per_part) {
  return bind_layout(layout.order().text(), parts, Hints::from(layout.geometry()), tensors_per_part);
}

BlockBytes block_bytes(const Layout& layout) {
  constexpr std::int64_t kMaxRuns = std::int64_t{1} << 22;
  BlockBytes out;
  out.num_blocks = 1;
  out.runs.resize(static_cast<std::size_t>(layout.num_parts()));
  out.block_offsets.resize(out.runs.size());
  for (const Plane& plane : layout.planes()) {
    out.num_blocks = std::max(out.num_blocks, plane.extent(Axis::kBlock));
    auto& runs = out.runs[static_cast<std::size_t>(plane.part)];
    std::int64_t run = item_size(plane.dtype);
    std::vector<Mode> loops;
    std::vector<Mode> modes = normal_modes(plane);
    std::vector<std::int64_t> block;
    for (auto mode = modes.rbegin(); mode != modes.rend(); ++mode) {
      if (mode->axis == Axis::kBlock) {
        block.push_back(mode->divisor);
        block.push_back(mode->stride);
      } else if (loops.empty() && mode->stride == run) {
        run *= mode->extent;
      } else {
        loops.push_back(*mode);
      }
    }
    auto& offsets = out.block_offsets[static_cast<std::size_t>(plane.part)];
    if (runs.empty()) offsets = block;
    if (offsets != block) offsets.push_back(-1);  // planes whose blocks step differently
    std::vector<std::int64_t> starts{plane.base};
    for (const Mode& loop : loops) {
      if (checked_mul(static_cast<std::int64_t>(starts.size()), loop.extent, "the runs of a block") > kMaxRuns) {
        throw Error(ErrorCode::kArgument, "block_bytes: a block of more than 2^22 runs");
      }
      std::vector<std::int64_t> next;
      for (const std::int64_t start : starts) {
        for (std::int64_t i = 0; i < loop.extent; ++i) next.push_back(start + i * loop.stride);
      }
      starts = std::move(next);
    }
    for (const std::int64_t start : starts) runs.emplace_back(start, run);
  }
  for (auto& runs : out.runs) {
    std::sort(runs.begin(), runs.end());
    std::vector<std::pair<std::int64_t, std::int64_t>> merged;
    for (const auto& run : runs) {
      if (!merged.empty() && merged.back().first + merged.back().second == run.first) {
        merged.back().second += run.second;
      } else {
        merged.push_back(run);
      }
    }
    runs = std::move(merged);
  }
  return out;
}

}  // namespace kvstride
