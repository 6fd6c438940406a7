// SPDX-License-Identifier: Apache-2.0
// Strict parsing of option values.
#include "parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "kvstride/error.h"

namespace kvstride::cli {
namespace {

[[noreturn]] void fail(std::string_view option, const std::string& what) {
  throw Error(ErrorCode::kArgument, fmt::format("{}: {}", option, what));
}

/// `first:second[:third]` of exactly `count` integers.
std::vector<std::int64_t> parse_tuple(std::string_view text, std::size_t count, const char* form,
                                      std::string_view option) {
  std::vector<std::int64_t> out;
  const auto fields = split(text, ':');
  if (fields.size() != count) fail(option, fmt::format("'{}' is not {}", text, form));
  for (const std::string_view field : fields) out.push_back(parse_integer(field, option));
  return out;
}

/// A number from 0 on with one of these units behind it.
std::int64_t parse_with_unit(std::string_view text, std::string_view option, const char* what,
                             std::initializer_list<std::pair<std::string_view, std::int64_t>> units) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  for (const auto& [unit, factor] : units) {
    if (digits == 0 || text.substr(digits) != unit) continue;
    std::int64_t out = parse_integer(text.substr(0, digits), option);
    if (__builtin_mul_overflow(out, factor, &out)) fail(option, fmt::format("{} does not fit 64 bits", text));
    return out;
  }
  fail(option, fmt::format("'{}' is not {}", text, what));
}

std::optional<Axis> axis_called(std::string_view name) {
  for (int a = 0; a < kNumAxes; ++a) {
    const auto axis = static_cast<Axis>(a);
    if (name.size() == 1 && name[0] == letter_of(axis)) return axis;
  }
  return std::nullopt;
}

bool is_symbol(std::string_view name) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  return letter(name[0]) &&
         std::all_of(name.begin(), name.end(), [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
}

void set_size(Geometry& geometry, Axis axis, std::int64_t value) {
  switch (axis) {
    case Axis::kLayer: geometry.num_layers = value; return;
    case Axis::kBlock: geometry.num_blocks = value; return;
    case Axis::kToken: geometry.block_size = value; return;
    case Axis::kHead: geometry.num_kv_heads = value; return;
    case Axis::kDim: geometry.head_size = value; return;
  }
}

/// Whether a term of `section` takes the length of `axis` from the geometry.
bool takes_length(const Section& section, Axis axis) {
  for (const Term& term : section.terms) {
    if (term.axis == axis && !term.modulus && !term.extent) return true;
    if (term.extent && term.extent->axis == axis) return true;
  }
  return std::any_of(section.members.begin(), section.members.end(),
                     [&](const Member& member) { return takes_length(member.body, axis); });
}

}  // namespace

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> out;
  while (true) {
    const std::size_t at = text.find(separator);
    out.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return out;
    text.remove_prefix(at + 1);
  }
}

std::vector<std::pair<std::string, std::string_view>> parse_assignments(std::string_view text,
                                                                        std::string_view option) {
  std::vector<std::pair<std::string, std::string_view>> out;
  std::set<std::string> seen;
  for (const std::string_view field : split(text, ',')) {
    const std::size_t at = field.find('=');
    if (at == std::string_view::npos || at == 0) fail(option, fmt::format("'{}' is not name=value", field));
    const std::string name(field.substr(0, at));
    if (!seen.insert(name).second) fail(option, fmt::format("{} is given twice", name));
    out.emplace_back(name, field.substr(at + 1));
  }
  return out;
}

std::int64_t parse_integer(std::string_view text, std::string_view option) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range) fail(option, fmt::format("{} does not fit 64 bits", text));
  if (error != std::errc() || end != text.data() + text.size())
    fail(option, fmt::format("'{}' is not an integer", text));
  return value;
}

double parse_number(std::string_view text, std::string_view option) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    fail(option, fmt::format("'{}' is not a number", text));
  }
  return value;
}

std::int64_t parse_bytes(std::string_view text, std::string_view option) {
  return parse_with_unit(text, option, "a size such as 500, 64K, 10G or 5GB",
                         {{"", 1},
                          {"B", 1},
                          {"K", std::int64_t{1} << 10},
                          {"M", std::int64_t{1} << 20},
                          {"G", std::int64_t{1} << 30},
                          {"T", std::int64_t{1} << 40},
                          {"KiB", std::int64_t{1} << 10},
                          {"MiB", std::int64_t{1} << 20},
                          {"GiB", std::int64_t{1} << 30},
                          {"TiB", std::int64_t{1} << 40},
                          {"kB", 1000},
                          {"MB", 1'000'000},
                          {"GB", 1'000'000'000},
                          {"TB", 1'000'000'000'000}});
}

std::int64_t parse_duration(std::string_view text, std::string_view option) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  return parse_with_unit(text, option, "a duration such as 30s, 10m, 2h or 7d",
                         {{"s", kSecond},
                          {"m", 60 * kSecond},
                          {"h", 3600 * kSecond},
                          {"d", 86'400 * kSecond},
                          {"w", 7 * 86'400 * kSecond}});
}

std::vector<std::int64_t> parse_integers(std::string_view text, std::string_view option) {
  std::vector<std::int64_t> out;
  for (const std::string_view field : split(text, ',')) out.push_back(parse_integer(field, option));
  return out;
}

std::vector<Pair> parse_pairs(std::string_view text, std::string_view option) {
  std::vector<Pair> out;
  for (const std::string_view field : split(text, ',')) {
    const auto pair = parse_tuple(field, 2, "source:destination", option);
    out.push_back({pair[0], pair[1]});
  }
  return out;
}

Range parse_range(std::string_view text, std::string_view option) {
  const auto values = parse_tuple(text, 2, "first:count", option);
  return {values[0], values[1]};
}

RangePair parse_range_pair(std::string_view text, std::string_view option) {
  const auto values = parse_tuple(text, 3, "source first:destination first:count", option);
  return {values[0], values[1], values[2]};
}

DType parse_dtype(std::string_view text, std::string_view option) {
  const auto dtype = dtype_from_name(text);
  if (!dtype) fail(option, fmt::format("'{}' is none of {}", text, dtype_names()));
  return *dtype;
}

Sizes parse_geometry(std::string_view text, std::string_view option, const Sizes& base) {
  Sizes out = base;
  for (const auto& [name, value] : parse_assignments(text, option)) {
    if (const auto axis = axis_called(name)) {
      set_size(out.geometry, *axis, parse_integer(value, option));
      out.given[static_cast<int>(*axis)] = true;
    } else if (name == "Dv") {
      out.geometry.value_head_size = parse_integer(value, option);
    } else if (name == "dtype") {
      out.geometry.dtype = parse_dtype(value, option);
      out.dtype_given = true;
    } else if (is_symbol(name)) {
      out.geometry.symbols[name] = parse_integer(value, option);
    } else {
      fail(option, fmt::format("'{}' is no axis (L, B, N, H, D, Dv) and no symbol", name));
    }
  }
  return out;
}

Sizes parse_sizes(std::string_view geometry, const std::optional<std::string>& dtype) {
  Sizes out = parse_geometry(geometry, "--geometry");
  if (dtype) {
    const DType given = parse_dtype(*dtype, "--dtype");
    if (out.dtype_given && out.geometry.dtype != given) {
      fail("--dtype", fmt::format("is {}, --geometry says {}", *dtype, name_of(out.geometry.dtype)));
    }
    out.geometry.dtype = given;
  }
  return out;
}

Layout parse_layout(std::string_view name_or_order, const Sizes& sizes, std::string_view option) {
  Order order = order_of(name_or_order);
  for (int a = 1; a < kNumAxes; ++a) {
    const auto axis = static_cast<Axis>(a);
    const bool taken = std::any_of(order.parts().begin(), order.parts().end(),
                                   [&](const Part& part) { return takes_length(part.body, axis); });
    if (taken && !sizes.given[a]) {
      fail(option, fmt::format("'{}' needs the length of {}: give {}=", order.text(), word_of(axis), letter_of(axis)));
    }
  }
  return Layout(std::move(order), sizes.geometry);
}

Element parse_element(std::string_view text, std::string_view option) {
  Element out;
  bool named = false;
  for (const auto& [name, value] : parse_assignments(text, option)) {
    if (name == "plane") {
      out.plane = std::string(value);
      named = true;
    } else if (const auto axis = axis_called(name)) {
      out.index[static_cast<std::size_t>(*axis)] = parse_integer(value, option);
    } else {
      fail(option, fmt::format("'{}' is none of plane, L, B, N, H, D", name));
    }
  }
  if (!named) fail(option, fmt::format("'{}' names no plane: give plane=", text));
  return out;
}

}  // namespace kvstride::cli
