// SPDX-License-Identifier: Apache-2.0
// Fitting a tensor's shape and strides to an order: the one rule under detection and binding.
#include "layout/fit.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "kvstride/error.h"
#include "layout/internal.h"
#include "layout/shape_text.h"

namespace kvstride {
namespace {

/// One dimension of the natural tensor.
struct Atom {
  enum Kind { kTerm, kKV, kContent } kind;
  Term* term = nullptr;        // kTerm
  Section* section = nullptr;  // kKV: whose members are key and value
  std::string label;           // as in a declared shape: `B`, `N//k`, `k`, `2`
};

std::string text_of(const Size& size) {
  if (const auto* value = std::get_if<std::int64_t>(&size)) return std::to_string(*value);
  return std::get<std::string>(size);
}

std::string label_of(const Term& term) {
  const std::string axis(1, letter_of(term.axis));
  if (term.extent && term.whole()) {
    const Extent& extent = *term.extent;
    return extent.axis ? fmt::format("{}//{}", letter_of(*extent.axis), extent.divisor) : text_of(extent.size);
  }
  if (term.divisor && !term.modulus) return axis + "//" + text_of(*term.divisor);
  if (term.modulus && !term.divisor) return text_of(*term.modulus);
  return term.whole() ? axis : "?";
}

/// Atoms of a section, outermost first. `even` is whether key and value have one head size.
std::vector<Atom> atoms_of(Section& section, bool even) {
  std::vector<Atom> out;
  for (Term& term : section.terms) out.push_back({Atom::kTerm, &term, nullptr, label_of(term)});
  if (section.members.empty()) return out;
  if (section.kv && even) {
    // Key and value have equal bodies; the modes are set on both, the first one speaks for them.
    out.push_back({Atom::kKV, nullptr, &section, "2"});
    for (Atom& atom : atoms_of(section.members[0].body, even)) out.push_back(std::move(atom));
  } else {
    out.push_back({Atom::kContent, nullptr, &section, "content"});
  }
  return out;
}

/// Which atoms (indices, outermost first) each dimension of the tensor holds; `padded` marks a dimension whose
/// length is not that of its one atom.
struct Grouping {
  std::vector<std::vector<std::size_t>> dims;
  std::vector<bool> padded;
};

Sizes known_sizes(const Hints& hints, std::int64_t item) {
  Sizes out;
  out["x"] = 16 / item;  // as in layout.cpp
  for (int a = 0; a < kNumAxes; ++a) {
    const Axis axis = static_cast<Axis>(a);
    if (const auto value = hints.get(axis)) out[std::string(1, letter_of(axis))] = *value;
  }
  for (const auto& [name, value] : hints.symbols) out[name] = value;
  return out;
}

/// Sets `name` or compares with what is known.
bool learn(Sizes& sizes, const std::string& name, std::int64_t value) {
  if (value < 1) return false;
  const auto [at, added] = sizes.emplace(name, value);
  return added || at->second == value;
}

bool is_number(const std::string& text) { return !text.empty() && text[0] >= '0' && text[0] <= '9'; }

/// Learns sizes from one part's shape; `given` are the caller's. False where it contradicts what is known or leaves a
/// size open.
bool solve(const std::vector<Atom>& atoms, const Grouping& grouping, const TensorShape& tensor, const Sizes& given,
           Sizes& sizes) {
  const auto single = [&](std::size_t dim) { return grouping.dims[dim].size() == 1; };
  const std::size_t rank = grouping.dims.size();
  for (std::size_t dim = 0; dim < rank; ++dim) {
    const std::int64_t length = tensor.shape[dim];
    if (grouping.dims[dim].empty() && length != 1) return false;
    if (!single(dim)) continue;
    const Atom& atom = atoms[grouping.dims[dim][0]];
    if (atom.kind == Atom::kKV && length != 2) return false;
    if (atom.kind != Atom::kTerm) continue;
    if (grouping.padded[dim]) {
      const auto found = sizes.find(atom.label);
      if (found == sizes.end()) {
        sizes[atom.label] = length;
      } else if (found->second > length) {
        return false;
      }
    } else if (is_number(atom.label)) {
      if (length != std::stoll(atom.label)) return false;
    } else if (atom.label.find("//") == std::string::npos && !learn(sizes, atom.label, length)) {
      return false;
    }
  }
  for (std::size_t dim = 0; dim < rank; ++dim) {  // `N//k` once k is known
    if (!single(dim)) continue;
    const Atom& atom = atoms[grouping.dims[dim][0]];
    const std::size_t slash = atom.label.find("//");
    if (atom.kind != Atom::kTerm || slash == std::string::npos) continue;
    const auto divisor = evaluate(atom.label.substr(slash + 2), sizes);
    std::int64_t whole = 0;
    if (!divisor || __builtin_mul_overflow(tensor.shape[dim], *divisor, &whole)) return false;
    if (!learn(sizes, atom.label.substr(0, slash), whole)) return false;
  }
  for (std::size_t dim = 0; dim < rank; ++dim) {
    const auto& group = grouping.dims[dim];
    if (group.size() < 2) continue;
    const std::int64_t length = tensor.shape[dim];
    if (group.size() == 2 && atoms[group[0]].kind == Atom::kKV && atoms[group[1]].label == "D") {
      if (length % 2 != 0 || !learn(sizes, "D", length / 2)) return false;
      continue;
    }
    // One size may be open where the caller gave another.
    std::int64_t product = 1;
    std::string open;
    bool hinted = false;
    for (const std::size_t i : group) {
      if (atoms[i].kind == Atom::kContent) return false;
      // A length of 1 fuses with anything: one layer is a dimension of its own, or not in the tensor at all.
      if (atoms[i].label == "L" && evaluate("L", sizes) == 1) return false;
      if (const auto value = evaluate(atoms[i].label, sizes)) {
        hinted |= given.contains(atoms[i].label);
        if (__builtin_mul_overflow(product, *value, &product)) return false;
      } else if (open.empty() && atoms[i].term != nullptr && atoms[i].term->whole()) {
        open = atoms[i].label;
      } else {
        return false;
      }
    }
    if (!open.empty()) {
      if (!hinted || length % product != 0 || !learn(sizes, open, length / product)) return false;
      continue;
    }
    if (product != length) return false;
  }
  return true;
}

/// Puts the tensor's strides into the terms of `part`; false where they do not fall in the order's sequence.
/// `content_bytes` is the size of the content atom.
bool place_strides(std::vector<Atom>& atoms, const Grouping& grouping, const TensorShape& tensor, const Sizes& sizes,
                   std::int64_t item, std::int64_t content_bytes) {
  std::vector<std::int64_t> extent(atoms.size(), 1);
  std::vector<std::int64_t> stride(atoms.size(), 0);
  for (std::size_t dim = 0; dim < grouping.dims.size(); ++dim) {
    std::int64_t step = 0;
    if (__builtin_mul_overflow(tensor.strides[dim], item, &step)) return false;
    const auto& group = grouping.dims[dim];
    for (auto i = group.rbegin(); i != group.rend(); ++i) {
      const Atom& atom = atoms[*i];
      std::int64_t length = 2;
      if (atom.kind == Atom::kContent) {
        if (tensor.shape[dim] != content_bytes / item || content_bytes % item != 0) return false;
        length = content_bytes / item;
      } else if (atom.kind == Atom::kTerm) {
        const auto value = evaluate(atom.label, sizes);
        if (!value) return false;
        length = *value;
      }
      extent[*i] = length;
      stride[*i] = step;
      if (__builtin_mul_overflow(step, length, &step)) return false;
    }
  }
  std::int64_t natural = item;  // size in bytes of what was placed so far
  std::int64_t span = item;     // one past its last byte
  for (std::size_t i = atoms.size(); i-- > 0;) {
    Atom& atom = atoms[i];
    if (atom.kind == Atom::kContent) {
      if (extent[i] > 1 && stride[i] != item) return false;
      natural = span = content_bytes;
      continue;
    }
    std::optional<std::int64_t>& given = atom.kind == Atom::kKV ? atom.section->kv_stride : atom.term->stride;
    if (extent[i] == 1) {
      if (given) natural = *given;
      continue;
    }
    if (stride[i] < span) return false;
    if (given && *given != stride[i]) return false;
    if (stride[i] != natural) given = stride[i];
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(extent[i] - 1, stride[i], &reach) || __builtin_add_overflow(span, reach, &span) ||
        __builtin_mul_overflow(stride[i], extent[i], &natural)) {
      return false;
    }
  }
  return true;
}

/// Copies what was set on the key's body to the value's.
void mirror(Section& section) {
  if (section.kv) section.members[1].body = section.members[0].body;
  for (Member& member : section.members) mirror(member.body);
}

bool uneven(const Hints& hints) {
  return hints.value_head_size && hints.head_size && *hints.value_head_size != *hints.head_size;
}

/// The sizes as a part of its own sees them: in a value's, D is the value's head size.
Sizes seen_by(const Part& part, Sizes sizes, const Hints& hints) {
  if (uneven(hints) && part.name.rfind("value", 0) == 0) sizes["D"] = *hints.value_head_size;
  return sizes;
}

Geometry to_geometry(const Sizes& sizes, const Hints& hints, const Order& order, const TensorShape& tensor) {
  const auto get = [&](const char* name) {
    const auto found = sizes.find(name);
    return found == sizes.end() ? std::int64_t{1} : found->second;
  };
  Geometry out;
  out.num_layers = get("L");
  out.num_blocks = order.has(Axis::kBlock) ? get("B") : 1;
  out.block_size = get("N");
  out.num_kv_heads = get("H");
  out.head_size = sizes.contains("D") ? get("D") : tensor.shape.back();
  out.value_head_size = hints.value_head_size;
  out.dtype = hints.dtype.value_or(default_dtype(tensor.item_size));
  for (const auto& [name, value] : sizes) {
    if (name.size() != 1 || std::string_view("LBNHDx").find(name) == std::string_view::npos) {
      out.symbols[name] = value;
    }
  }
  return out;
}

std::optional<Layout> fit_grouped(const Order& order, const std::vector<Grouping>& groupings,
                                  const std::vector<TensorShape>& tensors, const Hints& hints) {
  const Sizes given = known_sizes(hints, tensors[0].item_size);
  Sizes sizes = given;
  std::vector<Part> parts = order.parts();
  std::vector<std::vector<Atom>> atoms;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    atoms.push_back(atoms_of(parts[p].body, !uneven(hints)));
    Sizes seen = seen_by(parts[p], sizes, hints);
    if (!solve(atoms[p], groupings[p], tensors[p], seen_by(parts[p], given, hints), seen)) return std::nullopt;
    if (uneven(hints)) seen["D"] = *hints.head_size;
    sizes = std::move(seen);
  }
  const Geometry geometry = to_geometry(sizes, hints, order, tensors[0]);
  if (!uneven(hints) && geometry.value_head_size.value_or(geometry.head_size) != geometry.head_size)
    return std::nullopt;
  try {
    check_geometry(geometry);
    for (std::size_t p = 0; p < parts.size(); ++p) {
      std::int64_t content = 0;
      if (!atoms[p].empty() && atoms[p].back().kind == Atom::kContent) {
        content = content_bytes(*atoms[p].back().section, geometry);
      }
      if (!place_strides(atoms[p], groupings[p], tensors[p], seen_by(parts[p], sizes, hints), tensors[p].item_size,
                         content)) {
        return std::nullopt;
      }
      mirror(parts[p].body);
    }
    Layout layout(Order::from_parts(std::move(parts)), geometry);
    for (std::size_t p = 0; p < tensors.size(); ++p) {
      if (layout.natural_item_size(static_cast<std::int64_t>(p)) != tensors[p].item_size) {
        return std::nullopt;
      }
    }
    return layout;
  } catch (const Error&) {
    return std::nullopt;  // the sizes contradict the order (a split that does not divide, an overlap)
  }
}

/// All ways to cut `num_atoms` neighbours into `rank` groups.
void compositions(std::size_t num_atoms, std::size_t rank, std::vector<std::size_t>& cuts, std::vector<Grouping>& out) {
  if (cuts.size() + 1 == rank) {
    Grouping grouping;
    std::size_t from = 0;
    for (std::size_t i = 0; i < rank; ++i) {
      const std::size_t to = i + 1 == rank ? num_atoms : cuts[i];
      std::vector<std::size_t> group;
      for (std::size_t a = from; a < to; ++a) group.push_back(a);
      grouping.dims.push_back(std::move(group));
      from = to;
    }
    grouping.padded.assign(rank, false);
    out.push_back(std::move(grouping));
    return;
  }
  for (std::size_t cut = cuts.empty() ? 1 : cuts.back() + 1; cut < num_atoms; ++cut) {
    cuts.push_back(cut);
    compositions(num_atoms, rank, cuts, out);
    cuts.pop_back();
  }
}

/// Groups of atoms by the text of a declared shape, or nothing where the text is more than names and products.
std::optional<Grouping> declared_grouping(const std::vector<Atom>& atoms, const std::vector<std::string>& dims) {
  Grouping out;
  std::vector<bool> placed(atoms.size(), false);
  constexpr std::size_t kNone = SIZE_MAX;
  std::size_t constant = kNone;  // dimension that is a bare number
  const bool content = !atoms.empty() && atoms.back().kind == Atom::kContent;
  for (const std::string& dim : dims) {
    const auto parts = factors(dim);
    if (!parts) return std::nullopt;
    std::vector<std::size_t> group;
    for (const std::string& factor : *parts) {
      if (factor == "1") continue;
      const auto at = std::find_if(atoms.begin(), atoms.end(), [&](const Atom& a) { return a.label == factor; });
      if (at != atoms.end()) {
        const auto index = static_cast<std::size_t>(at - atoms.begin());
        if (placed[index]) return std::nullopt;
        placed[index] = true;
        group.push_back(index);
      } else if (content) {
        if (!placed.back()) group.push_back(atoms.size() - 1);
        placed.back() = true;
      } else if (is_number(factor) && parts->size() == 1) {
        constant = out.dims.size();
      } else {
        return std::nullopt;
      }
    }
    std::sort(group.begin(), group.end());
    out.dims.push_back(std::move(group));
  }
  out.padded.assign(dims.size(), false);
  for (std::size_t i = 0; i < atoms.size(); ++i) {
    if (placed[i]) continue;
    if (constant == kNone) return std::nullopt;
    out.dims[constant].push_back(i);
    out.padded[constant] = true;
    constant = kNone;
  }
  return out;
}

/// Opaque layouts: the literal dimensions give strides, all others are one contiguous content.
std::optional<Layout> fit_opaque(const Order& order, const Declared& declared, const std::vector<TensorShape>& tensors,
                                 const Hints& hints) {
  if (tensors.size() != 1) return std::nullopt;
  const TensorShape& tensor = tensors[0];
  const std::vector<std::string> dims = split(declared.shape, ',');
  const std::vector<std::string> literal = split(declared.literal, ',');
  if (dims.size() != tensor.shape.size()) return std::nullopt;
  Sizes sizes = known_sizes(hints, tensors[0].item_size);
  for (bool again = true; again;) {  // products with one unknown size
    again = false;
    for (std::size_t dim = 0; dim < dims.size(); ++dim) {
      const auto parts = factors(dims[dim]);
      if (!parts) continue;
      std::int64_t rest = tensor.shape[dim];
      std::string unknown;
      for (const std::string& factor : *parts) {
        const auto value = evaluate(factor, sizes);
        if (!value) {
          unknown = unknown.empty() ? factor : "?";
        } else if (*value == 0 || rest % *value != 0) {
          return std::nullopt;
        } else {
          rest /= *value;
        }
      }
      if (unknown.empty() || unknown == "?") continue;
      sizes[unknown] = rest;
      again = true;
    }
  }
  for (std::size_t dim = 0; dim < dims.size(); ++dim) {
    const auto value = evaluate(dims[dim], sizes);
    if (!value || *value != tensor.shape[dim]) return std::nullopt;
  }
  const Geometry geometry = to_geometry(sizes, hints, order, tensor);
  // Outside in: strides of literal dimensions; inside: the contiguous rest.
  Order::Strides strides;
  std::vector<bool> is_literal(dims.size(), false);
  std::int64_t span = tensor.item_size;
  std::int64_t packed = 1;
  for (std::size_t dim = dims.size(); dim-- > 0;) {
    if (std::find(literal.begin(), literal.end(), dims[dim]) != literal.end()) continue;
    if (tensor.shape[dim] > 1 && tensor.strides[dim] != packed) return std::nullopt;
    if (__builtin_mul_overflow(packed, tensor.shape[dim], &packed)) return std::nullopt;
  }
  if (__builtin_mul_overflow(packed, tensor.item_size, &span)) return std::nullopt;
  for (std::size_t l = literal.size(); l-- > 0;) {
    const auto at = std::find(dims.begin(), dims.end(), literal[l]);
    if (at == dims.end()) return std::nullopt;
    const auto dim = static_cast<std::size_t>(at - dims.begin());
    if (tensor.shape[dim] == 1) continue;
    std::int64_t step = 0;
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(tensor.strides[dim], tensor.item_size, &step) || step < span) return std::nullopt;
    if (__builtin_mul_overflow(step, tensor.shape[dim] - 1, &reach) || __builtin_add_overflow(span, reach, &span)) {
      return std::nullopt;
    }
    if (literal[l] == "2") {
      strides.kv = step;
    } else {
      for (int a = 0; a < kNumAxes; ++a) {
        if (literal[l][0] == letter_of(static_cast<Axis>(a))) strides.axes.emplace_back(static_cast<Axis>(a), step);
      }
    }
  }
  try {
    check_geometry(geometry);
    Layout natural(order, geometry);
    if (natural.natural_item_size(0) != tensor.item_size) return std::nullopt;
    for (const Plane& plane : natural.planes()) {  // the literal dimensions are what the order says they are
      for (const auto& [axis, stride] : strides.axes) {
        if (plane.merged(axis).size() != 1) return std::nullopt;
      }
    }
    const Layout strided(order.with_strides(strides), geometry);
    // Strides that are natural need no @.
    const Layout& layout = strided == natural ? natural : strided;
    // What lies inside the literal dimensions is exactly the contiguous rest.
    std::int64_t inside = 0;
    for (const Plane& plane : layout.planes()) {
      std::vector<Mode> rest;
      for (const Mode& mode : normal_modes(plane)) {
        const bool outer =
            std::any_of(strides.axes.begin(), strides.axes.end(), [&](const auto& s) { return s.first == mode.axis; });
        if (!outer) rest.push_back(mode);
      }
      const bool second = strides.kv && plane.base >= *strides.kv;
      inside =
          std::max(inside, (second ? plane.base - *strides.kv : plane.base) + span_of(rest, item_size(plane.dtype)));
    }
    if (inside > packed * tensor.item_size) return std::nullopt;
    return layout;
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> out(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    out[i] = step;
    step = checked_mul(step, std::max<std::int64_t>(shape[i], 1), "the tensor");
  }
  return out;
}

DType default_dtype(std::int64_t item) { return item == 1 ? DType::kU8 : item == 4 ? DType::kF32 : DType::kBF16; }

std::string describe(const std::vector<TensorShape>& parts) {
  std::string out;
  for (const TensorShape& part : parts) {
    out += fmt::format("{}shape [{}] strides [{}] item size {}", out.empty() ? "" : " | ", fmt::join(part.shape, ", "),
                       fmt::join(part.strides, ", "), part.item_size);
  }
  return out;
}

std::vector<Layout> fit_natural(const Order& order, const std::vector<TensorShape>& parts, const Hints& hints) {
  if (order.parts().size() != parts.size()) return {};
  std::vector<std::vector<Grouping>> choices;
  std::vector<Part> copy = order.parts();
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::size_t num_atoms = atoms_of(copy[p].body, !uneven(hints)).size();
    const std::size_t rank = parts[p].shape.size();
    if (rank > num_atoms || rank == 0 || num_atoms > 12) return {};
    std::vector<std::size_t> cuts;
    choices.emplace_back();
    compositions(num_atoms, rank, cuts, choices.back());
  }
  std::vector<Layout> out;
  const auto add = [&](const std::vector<Grouping>& groupings) {
    if (auto layout = fit_grouped(order, groupings, parts, hints)) {
      const bool seen = std::any_of(out.begin(), out.end(), [&](const Layout& other) {
        return other == *layout && other.geometry() == layout->geometry();
      });
      if (!seen) out.push_back(std::move(*layout));
    }
  };
  for (const Grouping& first : choices[0]) {
    if (parts.size() == 1) {
      add({first});
    } else if (parts.size() == 2) {
      for (const Grouping& second : choices[1]) add({first, second});
    }
  }
  return out;
}

std::optional<Layout> fit_declared(const Order& order, const Declared& declared, const std::vector<TensorShape>& parts,
                                   const Hints& hints) {
  if (order.parts().size() != parts.size()) return std::nullopt;
  if (!declared.literal.empty()) return fit_opaque(order, declared, parts, hints);
  const std::vector<std::string> texts = split(declared.shape, '|');
  if (texts.size() != parts.size()) return std::nullopt;
  std::vector<Grouping> groupings;
  std::vector<Part> copy = order.parts();
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::vector<std::string> dims = split(texts[p], ',');
    if (dims.size() != parts[p].shape.size()) return std::nullopt;
    auto grouping = declared_grouping(atoms_of(copy[p].body, !uneven(hints)), dims);
    if (!grouping) return std::nullopt;
    groupings.push_back(std::move(*grouping));
  }
  return fit_grouped(order, groupings, parts, hints);
}

}  // namespace kvstride
