// SPDX-License-Identifier: Apache-2.0
// The works that have a target. 32 MiB: 32 layers, 256 tokens, K and V, 8 heads of 128, bf16, unless a row says
// otherwise.
#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "work.h"

namespace bench {
namespace {

using namespace kvstride;

const std::string kDense = "KV L N H D";
const std::string kStored = "B H L KV N D";
const std::string kCpu = "B H {key: D N, value: N D}";
const std::string kAmx = "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}";
const std::string kNhd = "B KV N H D";
const std::string kHnd = "B KV H N D";

/// Sizes of one side.
struct Size {
  std::int64_t tokens = 256;
  std::int64_t block = 16;
  DType dtype = DType::kBF16;
  std::int64_t heads = 8;
  std::int64_t layers = 32;
};

Layout layout(const std::string& order, const Size& size = {}) {
  Geometry g;
  g.num_layers = size.layers;
  g.num_blocks = size.tokens / size.block;
  g.block_size = size.block;
  g.num_kv_heads = size.heads;
  g.head_size = 128;
  g.dtype = size.dtype;
  return Layout(order, g);
}

/// One sequence of all tokens: its blocks scattered on both sides.
Work tokens_work(std::string name, const Layout& src, const Layout& dst, double target) {
  const std::size_t bytes = bytes_of(src);
  const std::int64_t count = src.geometry().num_blocks * src.geometry().block_size;
  const auto src_blocks = scattered(src.geometry().num_blocks);
  const auto dst_blocks = scattered(dst.geometry().num_blocks);
  const auto blocks = static_cast<std::int64_t>(std::max(src_blocks.size(), dst_blocks.size()));
  return {std::move(name), Kind::kRows, target, bytes, bytes, 2 * bytes, blocks, [=](Spot spot, std::int64_t) {
            return [&, from = cache_at(spot.src, src), to = cache_at(spot.dst, dst)] {
              convert_tokens(from, to, src_blocks, dst_blocks, {0, 0, count});
            };
          }};
}

Work both(const std::string& what, const std::string& order, const Size& size, bool gather, double target) {
  const Layout cache = layout(order, size);
  Size flat = size;
  flat.block = size.tokens;
  const Layout dense = layout(kDense, flat);
  return gather ? tokens_work("gather/" + what, cache, dense, target)
                : tokens_work("scatter/" + what, dense, cache, target);
}

/// gather_tokens or scatter_tokens of `slots`.
Work slots_work(const std::string& what, const Layout& cache, std::vector<std::int64_t> slots, bool gather,
                double target) {
  const auto count = static_cast<std::int64_t>(slots.size());
  const Layout dense = dense_layout(cache, count);
  const std::size_t bytes = bytes_of(cache);
  return {
      (gather ? "gather_tokens/" : "scatter_tokens/") + what,
      Kind::kRows,
      target,
      std::max(bytes, bytes_of(dense)),
      bytes,
      2 * bytes,
      count,
      [=, ids = std::move(slots)](Spot spot, std::int64_t) -> std::function<void()> {
        if (gather) {
          return
              [&, from = cache_at(spot.src, cache), to = cache_at(spot.dst, dense)] { gather_tokens(from, ids, to); };
        }
        return [&, to = cache_at(spot.dst, cache), from = cache_at(spot.src, dense)] { scatter_tokens(to, ids, from); };
      }};
}

/// The slots of scattered blocks, block after block.
std::vector<std::int64_t> block_slots(const Layout& cache) {
  std::vector<std::int64_t> slots;
  const std::int64_t size = cache.geometry().block_size;
  for (const std::int64_t block : scattered(cache.geometry().num_blocks)) {
    for (std::int64_t i = 0; i < size; ++i) slots.push_back(block * size + i);
  }
  return slots;
}

/// Half of a cache's blocks to the other half.
Work copy_work(std::string name, const std::string& order, double target) {
  const Layout cache = layout(order, {.tokens = 512});
  const std::size_t bytes = bytes_of(cache) / 2;
  const auto ids = scattered(cache.geometry().num_blocks);
  const std::size_t half = ids.size() / 2;
  std::vector<Pair> pairs;
  for (std::size_t i = 0; i < half; ++i) pairs.push_back({ids[i], ids[half + i]});
  return {std::move(name),
          Kind::kCopy,
          target,
          2 * bytes,
          bytes,
          2 * bytes,
          static_cast<std::int64_t>(half),
          [=](Spot spot, std::int64_t) {
            return [&pairs, both = cache_at(spot.dst, cache)] { copy_blocks(both, pairs); };
          }};
}

/// One of eight heads, another one each round: what a reader with eight times the ranks takes, or a writer gives.
Work head_work(std::string name, const std::string& rank_order, bool read, double target) {
  const Layout all = layout(kStored, {.tokens = 2048});
  const Layout rank = layout(rank_order, {.tokens = 2048, .heads = 1});
  const std::size_t bytes = bytes_of(rank);
  const auto pairs = scattered_pairs(rank.geometry().num_blocks);
  return {std::move(name),
          Kind::kRows,
          target,
          bytes_of(all),
          bytes,
          2 * bytes,
          rank.geometry().num_blocks,
          [=](Spot spot, std::int64_t round) -> std::function<void()> {
            const std::int64_t head = round % 8;
            const auto apart = static_cast<std::ptrdiff_t>(bytes) * head;  // no round finds the last one's rank warm
            if (read) {
              return [&pairs, head, from = cache_at(spot.src, all), to = cache_at(spot.dst + apart, rank)] {
                convert_blocks(from, to, pairs, {.heads = RangePair{head, 0, 1}});
              };
            }
            return [&pairs, head, from = cache_at(spot.src + apart, rank), to = cache_at(spot.dst, all)] {
              convert_blocks(from, to, pairs, {.heads = RangePair{0, head, 1}});
            };
          }};
}

/// 512 new tokens of one layer: a row of slots in a cache with little more, or slots of a cache of 4096 at random.
Work write_work(std::string name, Kind kind, const std::string& order, std::int64_t block, bool at_random,
                double target) {
  constexpr std::int64_t kNew = 512;
  const std::int64_t tokens = at_random ? 4096 : kNew + 128;
  const Layout cache = layout(order, {.tokens = tokens, .block = block, .layers = 1});
  std::vector<std::int64_t> slots = scattered(tokens);
  slots.resize(kNew);
  if (!at_random) std::iota(slots.begin(), slots.end(), 64);
  const std::size_t bytes = bytes_of(cache) / static_cast<std::size_t>(tokens) * kNew;
  return {std::move(name), kind, target, bytes_of(cache), bytes, 2 * bytes, kNew, [=](Spot spot, std::int64_t) {
            const TokenTensor key{spot.src, DType::kBF16, {kNew, 8, 128}, {1024, 128, 1}};
            TokenTensor value = key;
            value.data += bytes / 2;
            return [&slots, key, value, to = cache_at(spot.dst, cache)] { write_tokens(to, 0, key, value, slots); };
          }};
}

void add_copies(std::vector<Work>& all) {
  const std::pair<const char*, std::string> kOrders[] = {{"kv_first_NHD", "KV B N H D"},
                                                         {"kv_first_HND", "KV B H N D"},
                                                         {"blocks_first_NHD", kNhd},
                                                         {"blocks_first_HND", kHnd},
                                                         {"packed_NHD", "B N H KV D"},
                                                         {"packed_HND", "B H N KV D"},
                                                         {"BLHNC", "BLHNC"},
                                                         {"stored", kStored}};
  for (const auto& [what, order] : kOrders) {
    all.push_back(swap_work(std::string("swap_blocks/") + what, layout(order), 0.95));
    all.push_back(copy_work(std::string("copy_blocks/") + what, order, 0.95));
  }
}

void add_dense(std::vector<Work>& all) {
  struct Row {
    const char* what;
    std::string order;
    double target;
  };
  const Row kRows[] = {{"kv_first_NHD", "KV B N H D", 0.90},
                       {"blocks_first_NHD", kNhd, 0.90},
                       {"blocks_first_HND", kHnd, 0.85},
                       {"packed_NHD", "B N H KV D", 0.85},
                       {"packed_HND", "B H N KV D", 0.85}};
  for (const Row& row : kRows) {
    all.push_back(both(row.what, row.order, {}, true, row.target));
    all.push_back(both(row.what, row.order, {}, false, row.target));
    const Layout cache = layout(row.order);
    all.push_back(slots_work(row.what, cache, block_slots(cache), true, row.target));
    all.push_back(slots_work(row.what, cache, block_slots(cache), false, row.target));
  }
}

void add_rows(std::vector<Work>& all) {
  all.push_back(convert_work("convert/NHD_to_HND", Kind::kRows, layout(kNhd), layout(kHnd), 0.85));
  all.push_back(convert_work("convert/HND_to_NHD", Kind::kRows, layout(kHnd), layout(kNhd), 0.85));
  for (const char* letters : {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"}) {
    const Layout six = layout(letters);
    const Layout stored = layout(kStored);
    all.push_back(convert_work(std::string("convert/") + letters + "_to_stored", Kind::kRows, six, stored, 0.85));
    all.push_back(convert_work(std::string("convert/stored_to_") + letters, Kind::kRows, stored, six, 0.85));
  }
  for (const auto& [what, order] : {std::pair{"NHD", kNhd}, std::pair{"HND", kHnd}}) {
    const Layout small = layout(order);
    const Layout large = layout(order, {.block = 128});
    all.push_back(tokens_work(std::string("convert/block_16_to_128_") + what, small, large, 0.85));
    all.push_back(tokens_work(std::string("convert/block_128_to_16_") + what, large, small, 0.85));
  }
  all.push_back(head_work("convert/an_eighth_of_stored_to_NHD", kNhd, true, 0.90));
  all.push_back(head_work("convert/NHD_to_an_eighth_of_stored", kNhd, false, 0.90));
  all.push_back(head_work("convert/an_eighth_of_stored_to_packed_HND", "B H N KV D", true, 0.90));
  all.push_back(head_work("convert/packed_HND_to_an_eighth_of_stored", "B H N KV D", false, 0.90));
}

/// Records of 61 layers: 576 bf16, and 656 bytes of f8 with scales.
void add_mla(std::vector<Work>& all) {
  const std::pair<const char*, std::string> kRecords[] = {
      {"MLA_576", "N {latent: D[512], rope: D[64]}"},
      {"MLA_656", "N {latent: D[512] f8_e4m3, latent_scale: D[4] f32, rope: D[64] bf16}"}};
  for (const auto& [what, record] : kRecords) {
    const Size size{.tokens = 512, .block = 64, .heads = 1, .layers = 61};
    Size flat = size;
    flat.block = size.tokens;
    const Layout cache = layout("B " + record, size);
    const Layout dense = layout("L " + record, flat);
    const std::string name = what;
    all.push_back(swap_work("swap_blocks/" + name, cache, 0.90));
    all.push_back(tokens_work("gather/" + name, cache, dense, 0.90));
    all.push_back(tokens_work("scatter/" + name, dense, cache, 0.90));
    // The planes of each record go to tensors of their own: no target.
    all.push_back(slots_work(name + "_random", cache, scattered(size.tokens), true, 0));
  }
}

void add_elements(std::vector<Work>& all) {
  const auto add = [&](const std::string& a, const std::string& b, const Layout& left, const Layout& right,
                       double target) {
    all.push_back(convert_work("convert/" + a + "_to_" + b, Kind::kElements, left, right, target));
    all.push_back(convert_work("convert/" + b + "_to_" + a, Kind::kElements, right, left, target));
  };
  const Size one_plane{.tokens = 512};
  add("K", "x_split_K", layout("{key: B N H D}", one_plane), layout("{key: B H D/x N D%x}", one_plane), 0.60);
  for (const auto& [suffix, dtype, target] :
       {std::tuple{"", DType::kBF16, 0.45}, std::tuple{"_1_byte", DType::kF8E4M3, 0.30}}) {
    const std::int64_t tokens = dtype == DType::kBF16 ? 256 : 512;
    const std::string name = suffix;
    const Size plane{.tokens = 2 * tokens, .dtype = dtype};
    add("V" + name, "V_transposed" + name, layout("{value: B N H D}", plane), layout("{value: B H D N}", plane),
        target);
    const Size cpu{.tokens = tokens, .block = 128, .dtype = dtype};
    add("NHD" + name, "cpu_K_transposed" + name, layout(kNhd, cpu), layout(kCpu, cpu), target);
    add("NHD" + name, "amx_tiles" + name, layout(kNhd, cpu), layout(kAmx, cpu), target);
  }
}

void add_casts(std::vector<Work>& all) {
  const auto add = [&](const std::string& name, const Layout& src, const Layout& dst, std::vector<float> scales) {
    PlanOptions options;
    options.cast = true;
    options.scales = {{"key", scales}, {"value", scales}};
    all.push_back(convert_work("cast/" + name, Kind::kElements, src, dst, 0.60, options));
  };
  const Layout wide = layout(kNhd);
  const Layout narrow = layout(kNhd, {.dtype = DType::kF8E4M3});
  const Layout narrow_hnd = layout(kHnd, {.dtype = DType::kF8E4M3});
  const std::vector<float> heads{0.25F, 0.5F, 0.75F, 1, 1.25F, 1.5F, 1.75F, 2};
  add("bf16_to_f8_e4m3", wide, narrow, {0.5F});
  add("f8_e4m3_to_bf16", narrow, wide, {0.5F});
  add("bf16_NHD_to_f8_HND", wide, narrow_hnd, {0.5F});
  add("f8_HND_to_bf16_NHD", narrow_hnd, wide, {0.5F});
  add("bf16_to_f8_scale_per_head", wide, narrow, heads);
  add("f8_to_bf16_scale_per_head", narrow, wide, heads);
}

void add_writes(std::vector<Work>& all) {
  all.push_back(write_work("write_tokens/NHD", Kind::kRows, kNhd, 16, false, 0.80));
  all.push_back(write_work("write_tokens/packed_HND", Kind::kRows, "B H N KV D", 16, false, 0.80));
  // Beside vLLM's own op in peers.py.
  all.push_back(write_work("write_tokens/cpu_random", Kind::kElements, kCpu, 128, true, 0));
}

}  // namespace

std::vector<Work> works() {
  std::vector<Work> all;
  add_copies(all);
  add_dense(all);
  add_rows(all);
  add_mla(all);
  add_elements(all);
  add_casts(all);
  add_writes(all);
  return all;
}

}  // namespace bench
