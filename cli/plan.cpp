// SPDX-License-Identifier: Apache-2.0
// `kvstride plan`: the copies that bring blocks from one layout to another.
#include "kvstride/plan.h"

#include <fmt/format.h>

#include "commands.h"
#include "json.h"
#include "kvstride/error.h"
#include "parse.h"
#include "table.h"

namespace kvstride::cli {
namespace {

/// Elements of a block over all layers that are planned for; more would be a question of memory, not of layout.
constexpr std::int64_t kMaxLayers = std::int64_t{1} << 20;
constexpr std::int64_t kMaxElements = std::int64_t{1} << 32;

void check_size(const Layout& layout, std::string_view side) {
  for (const Plane& plane : layout.planes()) {
    std::int64_t elements = 1;
    for (const Axis axis : {Axis::kLayer, Axis::kToken, Axis::kHead, Axis::kDim}) {
      if (__builtin_mul_overflow(elements, plane.extent(axis), &elements)) elements = kMaxElements + 1;
      if (elements > kMaxElements || plane.extent(Axis::kLayer) > kMaxLayers) {
        throw Error(ErrorCode::kArgument,
                    fmt::format("plan: a block of plane '{}' of the {} has more than 2^32 elements or 2^20 layers",
                                plane.name, side));
      }
    }
  }
}

void bind(Plan& plan, const Options& options) {
  const bool sequence = options.src_blocks || options.dst_blocks || options.tokens;
  if (sequence == options.pairs.has_value()) {
    throw Error(ErrorCode::kArgument, "plan: give --pairs, or --src-blocks, --dst-blocks and --tokens");
  }
  if (options.pairs) {
    plan.bind(parse_pairs(*options.pairs, "--pairs"));
    return;
  }
  if (!options.src_blocks || !options.dst_blocks || !options.tokens) {
    throw Error(ErrorCode::kArgument, "plan: --src-blocks, --dst-blocks and --tokens go together");
  }
  plan.bind_tokens(parse_integers(*options.src_blocks, "--src-blocks"),
                   parse_integers(*options.dst_blocks, "--dst-blocks"), parse_range_pair(*options.tokens, "--tokens"));
}

}  // namespace

Outcome run_plan(const Options& options) {
  const Sizes from = parse_sizes(options.geometry, options.dtype);
  const Sizes to = options.to_geometry ? parse_geometry(*options.to_geometry, "--to-geometry", from) : from;
  const Layout src = parse_layout(options.order, from, "--geometry");
  const Layout dst = parse_layout(options.to_order, to, "--to-geometry");
  check_size(src, "source");
  check_size(dst, "destination");
  PlanOptions how;
  how.cast = options.cast;
  if (options.heads) how.heads = parse_range_pair(*options.heads, "--heads");
  if (options.layers) how.layers = parse_range(*options.layers, "--layers");
  Plan plan(src, dst, how);
  bind(plan, options);
  const std::map<std::int64_t, std::int64_t> sizes = plan.sizes();
  if (options.json) {
    Json counts = Json::object();
    for (const auto& [size, count] : sizes) counts[std::to_string(size)] = count;
    return {dump({{"copies", plan.num_copies()}, {"bytes", plan.num_bytes()}, {"sizes", std::move(counts)}}), "",
            kDone};
  }
  std::vector<std::vector<std::string>> rows{{"from", src.str()},
                                             {"to", dst.str()},
                                             {"copies", fmt::format("{}", plan.num_copies())},
                                             {"bytes", fmt::format("{}", plan.num_bytes())}};
  for (const auto& [size, count] : sizes) {
    rows.push_back({&count == &sizes.begin()->second ? "sizes" : "", fmt::format("{} × {} bytes", count, size)});
  }
  return {table(rows), "", kDone};
}

}  // namespace kvstride::cli
