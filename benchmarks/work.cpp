// SPDX-License-Identifier: Apache-2.0
#include "work.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace bench {

using kvstride::Cache;
using kvstride::Layout;
using kvstride::Pair;
using kvstride::PlanOptions;

std::size_t bytes_of(const Layout& layout) {
  return static_cast<std::size_t>(layout.num_bytes() * layout.num_tensors());
}

Cache cache_at(std::byte* memory, const Layout& layout) {
  std::vector<std::byte*> tensors;
  for (std::int64_t t = 0; t < layout.num_tensors(); ++t) tensors.push_back(memory + t * layout.num_bytes());
  return Cache(std::move(tensors), layout);
}

std::vector<std::int64_t> scattered(std::int64_t n) {
  std::int64_t step = std::max<std::int64_t>(1, n * 618 / 1000);
  while (std::gcd(step, n) != 1) ++step;
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < n; ++i) ids.push_back((i * step + n / 3) % n);
  return ids;
}

std::vector<Pair> scattered_pairs(std::int64_t n) {
  std::vector<Pair> pairs;
  for (const std::int64_t id : scattered(n)) pairs.push_back({static_cast<std::int64_t>(pairs.size()), id});
  return pairs;
}

Work swap_work(std::string name, const Layout& layout, double target) {
  const std::size_t bytes = bytes_of(layout);
  const auto pairs = scattered_pairs(layout.geometry().num_blocks);
  return {std::move(name),
          Kind::kCopy,
          target,
          bytes,
          bytes,
          2 * bytes,
          layout.geometry().num_blocks,
          [=](Spot spot, std::int64_t) {
            return [&pairs, src = cache_at(spot.src, layout), dst = cache_at(spot.dst, layout)] {
              swap_blocks(src, dst, pairs);
            };
          }};
}

Work convert_work(std::string name, Kind kind, const Layout& src, const Layout& dst, double target,
                  const PlanOptions& options) {
  const std::size_t read = bytes_of(src);
  const std::size_t written = bytes_of(dst);
  const std::size_t wider = std::max(read, written);
  const auto pairs = scattered_pairs(src.geometry().num_blocks);
  return {std::move(name),
          kind,
          target,
          wider,
          wider,
          read + written,
          src.geometry().num_blocks,
          [=](Spot spot, std::int64_t) {
            return [&pairs, &options, from = cache_at(spot.src, src), to = cache_at(spot.dst, dst)] {
              convert_blocks(from, to, pairs, options);
            };
          }};
}

}  // namespace bench
