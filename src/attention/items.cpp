// SPDX-License-Identifier: Apache-2.0
// Splitting a call of attention.
#include <algorithm>

#include "attention/item.h"

namespace kvstride::attend {
namespace {

constexpr std::int64_t kDirectRows = 8;  // up to so many rows, keys are not packed
constexpr std::int64_t kRows = 256;      // of an item: their queries and values stay in the second cache
constexpr std::int64_t kUnitRows = 512;  // where products are so fast that packing a tile must serve more
constexpr std::int64_t kMaxTileRows = 128;
constexpr std::int64_t kTileKeys = 256;
constexpr std::int64_t kDirectKeys = 256;  // of a tile whose keys are read where they are
constexpr std::int64_t kPartKeys = 2048;   // a lone query's keys are split into parts of at least so many heads' keys
constexpr std::int64_t kMaxParts = 16;
constexpr std::int64_t kInterleavedRows = 64;  // whose queries and values stay in the first cache
constexpr std::int64_t kInterleavedKeys = 128;

/// Keys of each part of a sequence with one query row.
std::int64_t part_keys(std::int64_t keys, std::int64_t heads) {
  const std::int64_t parts = std::clamp<std::int64_t>(keys * heads / kPartKeys, 1, kMaxParts * heads);
  const std::int64_t each = (keys + parts - 1) / parts;
  return (each + kTileKeys - 1) / kTileKeys * kTileKeys;
}

}  // namespace

std::int64_t tile_keys(const Problem& problem, const Item& item) {
  if (problem.tiled(problem.sequences[static_cast<std::size_t>(item.sequence)])) return problem.options.tile_keys;
  if (item.kv_heads > 1) return kInterleavedKeys;
  return item.direct ? kDirectKeys : kTileKeys;
}

std::vector<Item> items_of(const Problem& problem, Sizes& sizes) {
  std::vector<Item> out;
  const std::int64_t kv_heads = problem.keys.heads();
  const std::int64_t most_rows = problem.products.narrow() ? kUnitRows : kRows;
  const auto add = [&](Item item) {
    for (item.kv_head = 0; item.kv_head < kv_heads; item.kv_head += item.kv_heads) {
      for (item.first_head = 0; item.first_head < problem.group; item.first_head += item.heads) {
        Item one = item;
        one.kv_heads = std::min(item.kv_heads, kv_heads - item.kv_head);
        one.heads = std::min(item.heads, problem.group - item.first_head);
        out.push_back(one);
      }
    }
  };
  for (std::size_t i = 0; i < problem.sequences.size(); ++i) {
    const Sequence& s = problem.sequences[i];
    if (s.rows == 0) continue;
    Item item{};
    item.sequence = static_cast<std::int64_t>(i);
    item.direct = s.rows * problem.group <= kDirectRows && !s.keep;
    const bool tiled = problem.tiled(s);
    // Heads that lie side by side in a token are read together: memory is read in its own order.
    const bool interleaved = item.direct && problem.keys.head_step() > 0 && problem.values.head_step() > 0 &&
                             problem.keys.direct() && problem.values.direct();
    item.kv_heads =
        interleaved ? std::clamp<std::int64_t>(kInterleavedRows / (s.rows * problem.group), 1, kv_heads) : 1;
    std::int64_t tile_rows = std::clamp<std::int64_t>(most_rows / problem.group, 8, kMaxTileRows);
    if (tiled) tile_rows = problem.options.tile_rows;
    item.heads =
        tiled && !item.direct ? std::clamp<std::int64_t>(most_rows / tile_rows, 1, problem.group) : problem.group;
    // The last rows see most keys: they come first.
    for (std::int64_t t = (s.rows - 1) / tile_rows; t >= 0; --t) {
      item.first_row = t * tile_rows;
      item.rows = std::min(tile_rows, s.rows - item.first_row);
      item.first_key = first_key(problem, s, item.first_row);
      item.end_key = end_key(s, item.first_row + item.rows - 1);
      const std::int64_t first = item.first_key;
      const std::int64_t end = item.end_key;
      const std::int64_t each = s.rows == 1 && !tiled ? part_keys(end - first, item.kv_heads) : end - first;
      if (end - first <= each) {
        add(item);
        continue;
      }
      item.shared = true;
      // Items that share rows lie behind each other, for each KV head: parts of one KV head and group.
      const std::int64_t together = item.kv_heads;
      for (item.kv_head = 0; item.kv_head < kv_heads; item.kv_head += together) {
        item.kv_heads = std::min(together, kv_heads - item.kv_head);
        for (item.first_key = first; item.first_key < end; item.first_key += each) {
          item.end_key = std::min(end, item.first_key + each);
          out.push_back(item);
        }
      }
      item.kv_heads = together;
      item.shared = false;
    }
  }
  sizes.query_step = cpu::padded(problem.keys.dim());
  sizes.value_step = cpu::padded(problem.values.dim());
  for (const Item& item : out) {
    const Sequence& s = problem.sequences[static_cast<std::size_t>(item.sequence)];
    const std::int64_t rows = item.all_rows();
    sizes.rows = std::max(sizes.rows, rows);
    sizes.score_rows = std::max(sizes.score_rows, item.direct        ? rows
                                                  : problem.tiled(s) ? item.rows
                                                                     : problem.products.rows);
    sizes.keys = std::max(sizes.keys, std::min(tile_keys(problem, item), std::max<std::int64_t>(s.length, 1)));
    sizes.packs = sizes.packs || !item.direct;
  }
  // Scores begin anywhere in a tile and end with a panel.
  sizes.score_step = cpu::padded(sizes.keys) + cpu::kPadding;
  sizes.weight_step = cpu::padded(sizes.keys);
  return out;
}

}  // namespace kvstride::attend
