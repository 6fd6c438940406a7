// SPDX-License-Identifier: Apache-2.0
// Printing and editing of orders.
#include "kvstride/order.h"

#include <fmt/format.h>

#include <algorithm>

#include "kvstride/error.h"
#include "layout/internal.h"

namespace kvstride {
namespace {

std::string print_size(const Size& size) {
  if (const auto* value = std::get_if<std::int64_t>(&size)) return std::to_string(*value);
  return std::get<std::string>(size);
}

std::string print_term(const Term& term) {
  std::string out(1, letter_of(term.axis));
  if (term.modulus) out += "%" + print_size(*term.modulus);
  if (term.divisor) out += "/" + print_size(*term.divisor);
  if (term.extent) {
    const Extent& extent = *term.extent;
    out += extent.axis ? fmt::format("[{}/{}]", letter_of(*extent.axis), extent.divisor)
                       : "[" + print_size(extent.size) + "]";
  }
  if (term.stride) out += fmt::format("@{}", *term.stride);
  return out;
}

bool section_has(const Section& section, Axis axis) {
  for (const Term& term : section.terms) {
    if (term.axis == axis) return true;
  }
  for (const Member& member : section.members) {
    if (section_has(member.body, axis)) return true;
  }
  return false;
}

void drop_axis(Section& section, Axis axis) {
  std::erase_if(section.terms, [axis](const Term& term) { return term.axis == axis; });
  for (Member& member : section.members) drop_axis(member.body, axis);
}

void set_axis_stride(Section& section, Axis axis, std::int64_t stride) {
  for (Term& term : section.terms) {
    if (term.axis != axis) continue;
    if (!term.whole()) {
      throw Error(ErrorCode::kLayout, fmt::format("order: {} is split, its stride cannot be set", letter_of(axis)));
    }
    term.stride = stride;
  }
  for (Member& member : section.members) set_axis_stride(member.body, axis, stride);
}

void drop_strides(Section& section) {
  for (Term& term : section.terms) term.stride.reset();
  section.kv_stride.reset();
  for (Member& member : section.members) {
    member.offset.reset();
    drop_strides(member.body);
  }
}

/// The innermost section that holds the two halves.
bool set_value_offset(Section& section, std::int64_t stride) {
  if (section.members.size() == 2 && section.members[1].name == "value") {
    if (section.kv) {
      section.kv_stride = stride;
    } else {
      section.members[1].offset = stride;
    }
    return true;
  }
  return std::any_of(section.members.begin(), section.members.end(),
                     [&](Member& member) { return set_value_offset(member.body, stride); });
}

}  // namespace

std::string without_strides(std::vector<Part> parts) {
  for (Part& part : parts) drop_strides(part.body);
  return print_parts(parts);
}

std::string print_section(const Section& section) {
  std::string out;
  const auto word = [&out](const std::string& text) { out += (out.empty() ? "" : " ") + text; };
  for (const Term& term : section.terms) word(print_term(term));
  if (section.kv) {
    word(section.kv_stride ? fmt::format("KV@{}", *section.kv_stride) : "KV");
    word(print_section(section.members[0].body));
  } else if (!section.members.empty()) {
    std::string list;
    for (const Member& member : section.members) {
      list += (list.empty() ? "" : ", ") + member.name;
      if (member.offset) list += fmt::format("@{}", *member.offset);
      list += ": " + print_section(member.body);
    }
    word("{" + list + "}");
  }
  if (section.dtype) word(std::string(name_of(*section.dtype)));
  return out;
}

std::string print_parts(const std::vector<Part>& parts) {
  std::string out;
  for (const Part& part : parts) {
    out += out.empty() ? "" : " | ";
    if (!part.name.empty()) out += part.name + ": ";
    out += print_section(part.body);
  }
  return out;
}

bool Order::has(Axis axis) const {
  return std::any_of(parts_.begin(), parts_.end(), [axis](const Part& part) { return section_has(part.body, axis); });
}

Order Order::without(Axis axis) const {
  std::vector<Part> parts = parts_;
  for (Part& part : parts) drop_axis(part.body, axis);
  return from_parts(std::move(parts));
}

Order Order::with_strides(const Strides& strides) const {
  std::vector<Part> parts = parts_;
  for (Part& part : parts) {
    for (const auto& [axis, stride] : strides.axes) {
      if (!section_has(part.body, axis)) {
        throw Error(ErrorCode::kLayout, fmt::format("order: no {} in '{}'", letter_of(axis), text_));
      }
      set_axis_stride(part.body, axis, stride);
    }
    if (strides.kv && !set_value_offset(part.body, *strides.kv)) {
      throw Error(ErrorCode::kLayout, fmt::format("order: no key and value in '{}'", text_));
    }
  }
  return from_parts(std::move(parts));
}

Order Order::from_parts(std::vector<Part> parts) {
  Order out;
  out.text_ = print_parts(parts);
  out.parts_ = std::move(parts);
  return out;
}

}  // namespace kvstride
