// SPDX-License-Identifier: Apache-2.0
// swap_blocks and convert_blocks: block pairs and token sequences between two caches.
#include <fmt/format.h>

#include <algorithm>

#include "kvstride/blocks.h"
#include "kvstride/error.h"
#include "layout/internal.h"
#include "plan/program.h"

namespace kvstride {
namespace {

/// Axis letters of a plane from the outermost mode inwards, digits with their divisors; the lengths of B and the
/// strides are left out.
std::string sequence(const Layout& layout, const Plane& plane) {
  std::string out;
  for (const Mode& mode : normal_modes(plane)) {
    out += fmt::format("{}{}", letter_of(mode.axis), mode.divisor);
    if (mode.axis != Axis::kBlock) out += fmt::format("x{}", mode.extent);
    out += ' ';
  }
  // Where the plane stands among those of its tensor.
  std::size_t before = 0;
  for (const Plane& other : layout.planes()) before += other.part == plane.part && other.base < plane.base ? 1 : 0;
  std::size_t outside = 0;
  for (const Plane& other : layout.planes()) {
    if (other.part != plane.part) continue;
    const std::int64_t apart = std::abs(other.base - plane.base);
    for (const Mode& mode : normal_modes(plane)) outside += apart != 0 && mode.stride > apart ? 1 : 0;
  }
  return out + fmt::format("#{} of tensor {}, {}", before, plane.part, outside);
}

void check_same_order(const Cache& src, const Cache& dst) {
  const bool one_layer = src.layout().geometry().num_layers == 1 && dst.layout().geometry().num_layers == 1;
  for (const Plane& plane : src.layout().planes()) {
    const Plane* twin = dst.layout().find_plane(plane.name);
    if (twin == nullptr) continue;  // reported by the plan
    const bool one_block = plane.extent(Axis::kBlock) == 1 || twin->extent(Axis::kBlock) == 1;
    if ((one_layer || src.layout().layered() == dst.layout().layered()) &&
        (one_block || sequence(src.layout(), plane) == sequence(dst.layout(), *twin))) {
      if (!one_block) continue;
      // With one block the block axis has no place; compare what is inside.
      if (plane.extents[2] == twin->extents[2] && plane.extents[3] == twin->extents[3]) {
        const auto inner = [](const Plane& p) {
          std::string text;
          for (const Mode& mode : normal_modes(p)) {
            if (mode.axis != Axis::kBlock)
              text += fmt::format("{}{}x{} ", letter_of(mode.axis), mode.divisor, mode.extent);
          }
          return text;
        };
        if (inner(plane) == inner(*twin)) continue;
      }
    }
    throw Error(ErrorCode::kLayout,
                fmt::format("swap_blocks: '{}' and '{}' are different orders (plane '{}'); convert_blocks converts",
                            src.layout().str(), dst.layout().str(), plane.name));
  }
}

/// `bind(program)` gives it its ids.
template <class Bind>
void convert(const char* verb, const Cache& src, const Cache& dst, const PlanOptions& options, const Stream& stream,
             void (*check)(const Cache&, const Cache&), const Bind& bind) {
  plan::BuildOptions build;
  build.plan = options;
  plan::Program program(plan::recipe_for(verb, src, dst, std::move(build), check));
  bind(program);
  program.check_memory();
  program.run(stream);
}

PlanOptions only(std::optional<Range> layers) {
  PlanOptions out;
  out.layers = layers;
  return out;
}

}  // namespace

std::int64_t swap_blocks(const Cache& src, const Cache& dst, std::span<const Pair> pairs, std::optional<Range> layers,
                         std::optional<std::int64_t> null_block, const Stream& stream) {
  std::int64_t count = 0;
  convert("swap_blocks", src, dst, only(layers), stream, check_same_order,
          [&](plan::Program& program) { count = program.bind(pairs, null_block); });
  return count;
}

void swap_blocks(const Cache& src, const Cache& dst, const DevicePairs& pairs, std::optional<Range> layers,
                 const Stream& stream) {
  convert("swap_blocks", src, dst, only(layers), stream, check_same_order,
          [&](plan::Program& program) { program.bind_device(pairs); });
}

std::int64_t convert_blocks(const Cache& src, const Cache& dst, std::span<const Pair> pairs, const PlanOptions& options,
                            std::optional<std::int64_t> null_block, const Stream& stream) {
  std::int64_t count = 0;
  convert("convert_blocks", src, dst, options, stream, nullptr,
          [&](plan::Program& program) { count = program.bind(pairs, null_block); });
  return count;
}

void convert_blocks(const Cache& src, const Cache& dst, const DevicePairs& pairs, const PlanOptions& options,
                    const Stream& stream) {
  convert("convert_blocks", src, dst, options, stream, nullptr,
          [&](plan::Program& program) { program.bind_device(pairs); });
}

void convert_tokens(const Cache& src, const Cache& dst, std::span<const std::int64_t> src_blocks,
                    std::span<const std::int64_t> dst_blocks, RangePair tokens, const PlanOptions& options,
                    const Stream& stream) {
  convert("convert_blocks", src, dst, options, stream, nullptr,
          [&](plan::Program& program) { program.bind_tokens(src_blocks, dst_blocks, tokens); });
}

}  // namespace kvstride
