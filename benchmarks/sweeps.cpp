// SPDX-License-Identifier: Apache-2.0
// Cost grows with bytes, not with the number of blocks: sizes up to a third of free memory, and up to 100,000 pairs.
#include "work.h"

namespace bench {
namespace {

using namespace kvstride;

Layout layout(const char* order, std::int64_t blocks, std::int64_t block, std::int64_t heads, std::int64_t dim) {
  Geometry g;
  g.num_blocks = blocks, g.block_size = block, g.num_kv_heads = heads, g.head_size = dim;
  return Layout(order, g);
}

void add_sizes(std::vector<Work>& all) {
  constexpr std::size_t kBlock = std::size_t{64} << 10;  // 16 tokens, K and V, 8 heads of 128, bf16
  std::vector<std::pair<std::string, std::size_t>> sizes;
  for (std::size_t mib = 1; mib <= 1024; mib *= 4) sizes.emplace_back(std::to_string(mib) + "_MiB", mib << 20);
  sizes.emplace_back("third_of_memory", available_bytes() / 3 / kBlock * kBlock);
  for (const auto& [name, bytes] : sizes) {
    const auto blocks = static_cast<std::int64_t>(bytes / kBlock);
    const Layout nhd = layout("B KV N H D", blocks, 16, 8, 128);
    const Layout hnd = layout("B KV H N D", blocks, 16, 8, 128);
    all.push_back(swap_work("size_swap/" + name, nhd, 0));
    all.push_back(convert_work("size_NHD_to_HND/" + name, Kind::kRows, nhd, hnd, 0));
  }
}

void add_pairs(std::vector<Work>& all) {
  constexpr std::int64_t kTokens = 100000;  // of 1 KiB: 98 MiB whatever the number of pairs
  for (std::int64_t pairs = 1; pairs <= kTokens; pairs *= 10) {
    const std::string n = std::to_string(pairs);
    all.push_back(swap_work("pairs_of_98_MiB/" + n, layout("B {latent: N D}", pairs, kTokens / pairs, 1, 512), 0));
    all.push_back(swap_work("pairs_of_256_B/" + n, layout("B {latent: N D}", pairs, 1, 1, 128), 0));
  }
}

}  // namespace

std::vector<Work> sweeps() {
  std::vector<Work> all;
  add_pairs(all);
  add_sizes(all);
  return all;
}

}  // namespace bench
