// SPDX-License-Identifier: Apache-2.0
// From an order and sizes to planes of modes: the one place where addresses are made.
#include "kvstride/layout.h"

#include <fmt/format.h>

#include <algorithm>

#include "kvstride/error.h"
#include "kvstride/registry.h"
#include "layout/internal.h"

namespace kvstride {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{1} << 62;
constexpr std::size_t kMaxPlanes = 64;

[[noreturn]] void fail(const std::string& what, int column = 0) {
  const std::string where = column > 0 ? fmt::format("layout, column {}: ", column) : "layout: ";
  throw Error(ErrorCode::kLayout, where + what, column);
}

std::string join_names(const std::string& outer, const std::string& inner) {
  if (outer.empty()) return inner;
  if (inner.empty() || inner == "data") return outer;
  return outer + "_" + inner;
}

/// Planes of one section, with addresses relative to its start, and its size in bytes.
struct Built {
  std::vector<Plane> planes;
  std::int64_t size = 0;
};

class Builder {
 public:
  Builder(const Geometry& geometry) : geometry_(geometry) {}

  Built build(const Section& section, const std::string& prefix, std::optional<DType> inherited) {
    const std::optional<DType> dtype = section.dtype ? section.dtype : inherited;
    Built out;
    if (section.members.empty()) {
      Plane plane;
      plane.name = prefix;
      plane.dtype = dtype.value_or(geometry_.dtype);
      if (prefix.empty()) {
        fail("a plane without a name; write `KV` or `{key: …, value: …}`", section.column);
      }
      out.size = item_size(plane.dtype);
      out.planes.push_back(std::move(plane));
    } else {
      out = build_members(section, prefix, dtype);
    }
    for (auto term = section.terms.rbegin(); term != section.terms.rend(); ++term) {
      out.size = wrap(out, *term);
    }
    return out;
  }

 private:
  Built build_members(const Section& section, const std::string& prefix, std::optional<DType> dtype) {
    Built out;
    std::int64_t end = 0;
    for (std::size_t i = 0; i < section.members.size(); ++i) {
      const Member& member = section.members[i];
      std::optional<std::int64_t> at = member.offset;
      if (section.kv && i == 1) at = section.kv_stride;
      Built inner = build(member.body, join_names(prefix, member.name), dtype);
      const std::int64_t base = at.value_or(end);
      for (Plane& plane : inner.planes) {
        plane.base = checked_add(plane.base, base, "a member's offset");
        for (const Plane& other : out.planes) {
          if (other.name == plane.name) {
            fail(fmt::format("the name '{}' is given twice", plane.name), member.column);
          }
        }
        out.planes.push_back(std::move(plane));
      }
      if (out.planes.size() > kMaxPlanes) fail(fmt::format("more than {} planes", kMaxPlanes));
      end = checked_add(base, inner.size, "the size of a member");
      out.size = std::max(out.size, end);
    }
    if (!section.kv) out.size = end;  // the last member ends the section
    if (section.kv && section.kv_stride) {
      out.size = checked_mul(2, *section.kv_stride, "KV@");
    }
    return out;
  }

  std::int64_t size_value(const Size& size, const Plane& plane, int column) const {
    if (const auto* value = std::get_if<std::int64_t>(&size)) return *value;
    const std::string& symbol = std::get<std::string>(size);
    if (symbol == "x") return 16 / item_size(plane.dtype);
    const auto found = geometry_.symbols.find(symbol);
    if (found == geometry_.symbols.end()) {
      fail(fmt::format("symbol '{}' has no value in the geometry", symbol), column);
    }
    return found->second;
  }

  std::int64_t full_extent(Axis axis, const Plane& plane) const {
    return axis == Axis::kDim ? geometry_.dim_of(plane.name) : geometry_.extent(axis);
  }

  std::int64_t extent_of(const Term& term, const Plane& plane) const {
    if (!term.extent) return full_extent(term.axis, plane);
    const Extent& extent = *term.extent;
    if (!extent.axis) return size_value(extent.size, plane, term.column);
    const std::int64_t full = full_extent(*extent.axis, plane);
    if (full % extent.divisor != 0) {
      fail(fmt::format("plane {}: [{}/{}]: {} does not divide {}", plane.name, letter_of(*extent.axis), extent.divisor,
                       extent.divisor, full),
           term.column);
    }
    return full / extent.divisor;
  }

  /// Puts `term` around all planes of `built`; returns the new size.
  std::int64_t wrap(Built& built, const Term& term) {
    std::optional<std::int64_t> size;
    for (Plane& plane : built.planes) {
      Mode mode{};
      mode.axis = term.axis;
      mode.divisor = term.divisor ? size_value(*term.divisor, plane, term.column) : 1;
      mode.modulus = term.modulus ? size_value(*term.modulus, plane, term.column) : extent_of(term, plane);
      if (mode.modulus % mode.divisor != 0) {
        fail(fmt::format("plane {}: the {} of {}, {}, is not divisible by {}", plane.name,
                         term.modulus ? "modulus" : "length", letter_of(term.axis), mode.modulus, mode.divisor),
             term.column);
      }
      mode.extent = mode.modulus / mode.divisor;
      mode.stride = term.stride.value_or(built.size);
      const std::int64_t whole = checked_mul(mode.stride, mode.extent, "the size");
      if (size && *size != whole) {
        fail(fmt::format("members disagree on the length of {}", letter_of(term.axis)), term.column);
      }
      size = whole;
      plane.modes.insert(plane.modes.begin(), mode);
      digit_columns_[{plane.name, term.axis, mode.divisor}] = term.column;
      if (term.extent) {
        auto& given = given_[plane.name];
        given[static_cast<std::size_t>(term.axis)] = true;
      }
    }
    return *size;
  }

 public:
  /// Fills Plane::extents; checks that the splits of each axis multiply to its length.
  void finish(Plane& plane) const {
    for (int a = 0; a < kNumAxes; ++a) {
      const Axis axis = static_cast<Axis>(a);
      std::vector<std::pair<std::int64_t, std::int64_t>> digits;  // (divisor, modulus)
      for (const Mode& mode : plane.modes) {
        if (mode.axis == axis) digits.emplace_back(mode.divisor, mode.modulus);
      }
      if (axis == Axis::kHead) plane.has_head = !digits.empty();
      if (digits.empty()) continue;
      std::sort(digits.begin(), digits.end());
      std::int64_t reached = 1;
      for (const auto& [divisor, modulus] : digits) {
        if (divisor != reached) {
          fail(fmt::format("plane {}: splits of {} do not multiply: one ends at {}, the next starts "
                           "at {}",
                           plane.name, letter_of(axis), reached, divisor),
               column_of(plane, axis, divisor));
        }
        reached = modulus;
      }
      const auto given = given_.find(plane.name);
      // Ids are checked against the geometry: L and B have its lengths.
      const bool free = given != given_.end() && given->second[static_cast<std::size_t>(a)] && axis != Axis::kLayer &&
                        axis != Axis::kBlock;
      if (!free && reached != full_extent(axis, plane)) {
        fail(fmt::format("plane {}: splits of {} reach {}, not {}", plane.name, letter_of(axis), reached,
                         full_extent(axis, plane)),
             column_of(plane, axis, digits.back().first));
      }
      plane.extents[static_cast<std::size_t>(a)] = reached;
    }
  }

 private:
  int column_of(const Plane& plane, Axis axis, std::int64_t divisor) const {
    const auto found = digit_columns_.find({plane.name, axis, divisor});
    return found == digit_columns_.end() ? 0 : found->second;
  }

  const Geometry& geometry_;
  std::map<std::string, std::array<bool, kNumAxes>> given_;
  std::map<std::tuple<std::string, Axis, std::int64_t>, int> digit_columns_;
};

bool has_padding(const Section& section) {
  if (section.kv_stride) return true;
  for (const Term& term : section.terms) {
    if (term.stride) return true;
  }
  return std::any_of(section.members.begin(), section.members.end(),
                     [](const Member& member) { return member.offset.has_value() || has_padding(member.body); });
}

}  // namespace

std::int64_t checked_mul(std::int64_t a, std::int64_t b, const char* what) {
  std::int64_t out = 0;
  if (__builtin_mul_overflow(a, b, &out) || out > kMaxBytes) {
    fail(fmt::format("{} exceeds 2^62 bytes ({} × {})", what, a, b));
  }
  return out;
}

std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* what) {
  std::int64_t out = 0;
  if (__builtin_add_overflow(a, b, &out) || out > kMaxBytes) {
    fail(fmt::format("{} exceeds 2^62 bytes", what));
  }
  return out;
}

std::vector<Mode> Plane::merged(Axis axis) const {
  std::vector<Mode> out;
  for (const Mode& mode : modes) {
    if (mode.axis == axis && mode.extent > 1) out.push_back(mode);
  }
  std::sort(out.begin(), out.end(), [](const Mode& a, const Mode& b) { return a.divisor > b.divisor; });
  for (std::size_t i = 0; i + 1 < out.size();) {
    Mode& outer = out[i];
    const Mode& inner = out[i + 1];
    if (outer.stride == inner.stride * inner.extent) {
      outer.divisor = inner.divisor;
      outer.extent *= inner.extent;
      outer.stride = inner.stride;
      out.erase(out.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    } else {
      ++i;
    }
  }
  return out;
}

std::int64_t Plane::axis_offset(Axis axis, std::int64_t index) const {
  std::int64_t byte = 0;
  for (const Mode& mode : modes) {
    if (mode.axis == axis) byte += (index % mode.modulus) / mode.divisor * mode.stride;
  }
  return byte;
}

Layout::Layout(std::string_view order, Geometry geometry, Overlap overlap)
    : Layout(Order::parse(order), std::move(geometry), overlap) {}

Layout::Layout(Order order, Geometry geometry, Overlap overlap)
    : order_(std::move(order)), geometry_(std::move(geometry)), overlap_(overlap) {
  check_geometry(geometry_);
  layered_ = order_.has(Axis::kLayer);
  bool padded = false;
  Builder builder(geometry_);
  int part_index = 0;
  for (const Part& part : order_.parts()) {
    Built built = builder.build(part.body, part.name, std::nullopt);
    bool part_layered = false;
    for (Plane& plane : built.planes) {
      if (find_plane(plane.name) != nullptr) {
        fail(fmt::format("the name '{}' is given twice", plane.name), part.column);
      }
      plane.part = part_index;
      builder.finish(plane);
      for (const Mode& mode : plane.modes) part_layered |= mode.axis == Axis::kLayer;
      if (!layered_) plane.extents[static_cast<std::size_t>(Axis::kLayer)] = geometry_.num_layers;
      planes_.push_back(std::move(plane));
      if (planes_.size() > kMaxPlanes) fail(fmt::format("more than {} planes", kMaxPlanes));
    }
    if (part_layered != layered_) fail("L is in one tensor and not in another", part.column);
    padded |= has_padding(part.body);
    part_bytes_.push_back(built.size);
    ++part_index;
  }
  for (int part = 0; padded && part < part_index; ++part) {
    std::vector<Plane> planes;
    std::int64_t end = 0;
    for (const Plane& plane : planes_) {
      if (plane.part != part) continue;
      planes.push_back(plane);
      end = std::max(end, checked_add(plane.base, span_of(plane.modes, item_size(plane.dtype)), "the size"));
    }
    if (overlap_ == Overlap::kRefused) check_no_overlap(planes, order_.text());
    auto& bytes = part_bytes_[static_cast<std::size_t>(part)];
    bytes = std::max(bytes, end);
  }
}

const Plane* Layout::find_plane(std::string_view name) const noexcept {
  for (const Plane& plane : planes_) {
    if (plane.name == name) return &plane;
  }
  return nullptr;
}

const Plane& Layout::plane(std::string_view name) const {
  if (const Plane* found = find_plane(name)) return *found;
  std::string names;
  for (const Plane& plane : planes_) names += (names.empty() ? "" : ", ") + plane.name;
  throw Error(ErrorCode::kLayout, fmt::format("plane: no plane '{}' among {}", name, names));
}

std::int64_t Layout::num_tensors() const noexcept { return num_parts() * (layered_ ? 1 : geometry_.num_layers); }

std::int64_t Layout::part_bytes(std::int64_t part) const {
  if (part < 0 || part >= num_parts()) {
    throw Error(ErrorCode::kBlockIndex, fmt::format("layout: part {} of {} tensors a layer", part, num_parts()));
  }
  return part_bytes_[static_cast<std::size_t>(part)];
}

std::int64_t Layout::num_bytes() const noexcept { return *std::max_element(part_bytes_.begin(), part_bytes_.end()); }

Location Layout::offset(std::string_view name, const Index& index) const { return offset(plane(name), index); }

Location Layout::offset(const Plane& plane, const Index& index) const {
  std::int64_t byte = plane.base;
  for (int a = 0; a < kNumAxes; ++a) {
    const Axis axis = static_cast<Axis>(a);
    const std::int64_t i = index[static_cast<std::size_t>(a)];
    if (i < 0 || i >= plane.extent(axis)) {
      throw Error(ErrorCode::kBlockIndex, fmt::format("offset: {} {} is outside plane '{}' ({} is {})", word_of(axis),
                                                      i, plane.name, size_name(axis), plane.extent(axis)));
    }
    byte += plane.axis_offset(axis, i);
  }
  const std::int64_t layer = layered_ ? 0 : index[0];
  return {layer * num_parts() + plane.part, byte};
}

namespace {

/// Dimensions of the natural tensor: (length, stride in bytes).
struct Dim {
  std::int64_t length;
  std::int64_t stride;
};

}  // namespace

std::int64_t Layout::natural_item_size(std::int64_t part) const {
  std::int64_t item = 0;
  for (const Plane& plane : planes_) {
    if (plane.part != part) continue;
    const std::int64_t size = item_size(plane.dtype);
    item = item == 0 || item == size ? size : 1;
  }
  return item;
}

std::int64_t content_bytes(const Section& section, const Geometry& geometry) {
  Section content = section;
  content.terms.clear();
  Geometry one = geometry;
  one.num_layers = 1;
  return Builder(one).build(content, "", std::nullopt).size;
}

static std::vector<Dim> natural_dims(const Layout& layout, std::int64_t part) {
  const Section* section = &layout.order().parts().at(static_cast<std::size_t>(part)).body;
  std::vector<const Plane*> planes;
  for (const Plane& plane : layout.planes()) {
    if (plane.part == part) planes.push_back(&plane);
  }
  const Plane& first = *planes.front();
  std::vector<Dim> dims;
  std::size_t mode = 0;
  while (true) {
    for (std::size_t i = 0; i < section->terms.size(); ++i, ++mode) {
      dims.push_back({first.modes[mode].extent, first.modes[mode].stride});
    }
    // K's planes come first, then V's alike.
    const Plane& twin = *planes[planes.size() / 2];
    if (!section->kv || first.extents != twin.extents) break;
    dims.push_back({2, twin.base - first.base});
    planes.resize(planes.size() / 2);
    section = &section->members[0].body;
  }
  if (!section->members.empty()) {
    const std::int64_t item = layout.natural_item_size(part);
    dims.push_back({content_bytes(*section, layout.geometry()) / item, item});
  }
  return dims;
}

std::vector<std::int64_t> Layout::shape(std::int64_t part) const {
  std::vector<std::int64_t> out;
  for (const Dim& dim : natural_dims(*this, part)) out.push_back(dim.length);
  return out;
}

std::vector<std::int64_t> Layout::strides(std::int64_t part) const {
  const std::int64_t item = natural_item_size(part);
  std::vector<std::int64_t> out;
  for (const Dim& dim : natural_dims(*this, part)) {
    if (dim.stride % item != 0) {
      throw Error(ErrorCode::kNotStrided,
                  fmt::format("strides: a stride of {} bytes is no multiple of the item size {}", dim.stride, item));
    }
    out.push_back(dim.stride / item);
  }
  return out;
}

bool Layout::operator==(const Layout& other) const {
  if (planes_.size() != other.planes_.size() || num_tensors() != other.num_tensors()) return false;
  for (const Plane& plane : planes_) {
    const Plane* twin = other.find_plane(plane.name);
    if (twin == nullptr || twin->dtype != plane.dtype || twin->extents != plane.extents) return false;
    // One layer in one tensor is the same with and without an L of length 1.
    if (twin->part != plane.part || twin->base != plane.base) return false;
    if (normal_modes(*twin) != normal_modes(plane)) return false;
  }
  return true;
}

Layout make_layout(std::string_view name_or_order, const Geometry& geometry) {
  return Layout(order_of(name_or_order), geometry);
}

}  // namespace kvstride
