// SPDX-License-Identifier: Apache-2.0
// checksum_blocks: blocks are gathered in one order, whatever theirs is, and hashed where they lie.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "cpu/hash.h"
#include "cpu/pool.h"
#include "cuda/run.h"
#include "kvstride/blocks.h"
#include "kvstride/error.h"
#include "plan/program.h"

namespace kvstride {
namespace {

using cuda::kGranule;
using cuda::Pieces;

constexpr std::int64_t kScratchBytes = std::int64_t{8} << 20;

/// `planes` of `num_blocks` blocks in the order of the checksums; blocks are `stride` bytes apart where it is given.
Layout checksum_order(const Layout& like, std::int64_t num_blocks, std::int64_t stride) {
  std::vector<const Plane*> planes;
  for (const Plane& plane : like.planes()) planes.push_back(&plane);
  std::sort(planes.begin(), planes.end(), [](const Plane* a, const Plane* b) { return a->name < b->name; });
  Geometry geometry = like.geometry();
  geometry.num_blocks = num_blocks;
  std::string text;
  for (const Plane* plane : planes) {
    text += fmt::format("{}{}: L[{}]", text.empty() ? "" : ", ", plane->name, geometry.num_layers);
    if (const std::int64_t tokens = plane->extent(Axis::kToken); tokens > 1) text += fmt::format(" N[{}]", tokens);
    if (plane->has_head) text += fmt::format(" H[{}]", plane->extent(Axis::kHead));
    text += fmt::format(" D[{}] {}", plane->extent(Axis::kDim), name_of(plane->dtype));
  }
  return Layout(fmt::format("B{} {{{}}}", stride > 0 ? fmt::format("@{}", stride) : "", text), geometry);
}

/// Granule sums of pieces that `program` gathers into `scratch`.
void sums_on_host(plan::Program& program, const std::byte* nominal, const Pieces& pieces, std::byte* scratch,
                  std::span<std::uint64_t> sums) {
  program.move_destination(scratch, nominal);
  program.run();
  const std::int64_t granules = std::ssize(sums) / pieces.count;
  cpu::for_each_in_parallel(pieces.count * pieces.bytes, std::ssize(sums), [&](std::int64_t i) {
    const std::int64_t begin = i % granules * kGranule;
    const std::int64_t end = std::min(begin + kGranule, pieces.bytes);
    const std::byte* piece = scratch + i / granules * pieces.stride;
    sums[static_cast<std::size_t>(i)] = cpu::xxh3({piece + begin, piece + end});
  });
}

}  // namespace

std::vector<std::uint64_t> checksum_blocks(const Cache& cache, std::span<const std::int64_t> ids,
                                           const Stream& stream) {
  const std::int64_t bytes = checksum_order(cache.layout(), 1, 0).num_bytes();
  const std::int64_t stride = (bytes + 15) / 16 * 16;
  const auto count = static_cast<std::int64_t>(ids.size());
  const std::int64_t at_once = std::clamp<std::int64_t>(kScratchBytes / stride, 1, std::max<std::int64_t>(count, 1));
  auto* nominal = plan::nominal();  // programs are moved to where the scratch memory is
  const Cache order({nominal}, checksum_order(cache.layout(), at_once, stride), false, cache.device());
  const auto recipe = std::make_shared<const plan::Recipe>("checksum_blocks", plan::end_of(cache), plan::end_of(order),
                                                           plan::BuildOptions{});
  for (std::size_t i = 0; i < ids.size(); ++i) {
    plan::check_block_id("checksum_blocks", "ids", i, ids[i], cache.layout().geometry().num_blocks, "cache");
  }
  const std::int64_t granules = (bytes + kGranule - 1) / kGranule;
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(granules * at_once));
  std::unique_ptr<std::byte[]> scratch;
  if (cache.device().on_host() && count > 0) scratch.reset(new std::byte[static_cast<std::size_t>(at_once * stride)]);
  std::vector<std::uint64_t> out;
  std::vector<Pair> pairs;
  for (std::int64_t first = 0; first < count; first += at_once) {
    const Pieces pieces{bytes, stride, std::min(at_once, count - first)};
    pairs.clear();
    for (std::int64_t i = 0; i < pieces.count; ++i) pairs.push_back({ids[static_cast<std::size_t>(first + i)], i});
    plan::Program program(recipe);
    program.bind(pairs);
    const std::span<std::uint64_t> here = std::span(sums).first(static_cast<std::size_t>(granules * pieces.count));
    if (scratch) {
      sums_on_host(program, nominal, pieces, scratch.get(), here);
    } else {
      cuda::checksums(program, nominal, pieces, here, stream);
    }
    for (std::int64_t i = 0; i < pieces.count; ++i) {
      out.push_back(cpu::xxh3(
          std::as_bytes(here.subspan(static_cast<std::size_t>(i * granules), static_cast<std::size_t>(granules)))));
    }
  }
  return out;
}

}  // namespace kvstride
