// SPDX-License-Identifier: Apache-2.0
// Strict parsing of option values; every function throws Error(kArgument) that names the option.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvstride/layout.h"
#include "kvstride/plan.h"

namespace kvstride::cli {

/// `a,b,c`, at least one, which may be empty.
std::vector<std::string_view> split(std::string_view text, char separator);
/// `name=value,…`; a name given twice is an error.
std::vector<std::pair<std::string, std::string_view>> parse_assignments(std::string_view text, std::string_view option);
/// A decimal int64, nothing before or after it.
std::int64_t parse_integer(std::string_view text, std::string_view option);
/// `2`, `0.5`; neither infinite nor a NaN.
double parse_number(std::string_view text, std::string_view option);
/// `500`, `64K`, `10G`, `2TiB` (of 1024), `5kB`, `3GB` (of 1000).
std::int64_t parse_bytes(std::string_view text, std::string_view option);
/// `30s`, `10m`, `2h`, `7d`, `2w`, in nanoseconds.
std::int64_t parse_duration(std::string_view text, std::string_view option);
/// `7,2,16`.
std::vector<std::int64_t> parse_integers(std::string_view text, std::string_view option);
/// `0:3,4:1`.
std::vector<Pair> parse_pairs(std::string_view text, std::string_view option);
/// `first:count`.
Range parse_range(std::string_view text, std::string_view option);
/// `source first:destination first:count`.
RangePair parse_range_pair(std::string_view text, std::string_view option);
DType parse_dtype(std::string_view text, std::string_view option);

/// Sizes, and which axes were given.
struct Sizes {
  Geometry geometry;
  bool given[kNumAxes] = {};
  bool dtype_given = false;
};
/// `L=2,B=8,N=16,H=4,D=64[,Dv=..][,dtype=..][,k=..]`, over the sizes of `base`.
Sizes parse_geometry(std::string_view text, std::string_view option, const Sizes& base = {});
/// `--geometry` and `--dtype` together.
Sizes parse_sizes(std::string_view geometry, const std::optional<std::string>& dtype);
/// The layout of a name or an order. Refuses sizes that leave out an axis which the order takes from them; only
/// the number of layers has a default.
Layout parse_layout(std::string_view name_or_order, const Sizes& sizes, std::string_view option);

/// `plane=key,B=1,N=2,H=1,D=3[,L=0]`.
struct Element {
  std::string plane;
  Index index{};
};
Element parse_element(std::string_view text, std::string_view option);

}  // namespace kvstride::cli
