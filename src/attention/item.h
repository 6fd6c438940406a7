// SPDX-License-Identifier: Apache-2.0
// Pieces of a call that threads take one by one.
#pragma once

#include <hwy/aligned_allocator.h>

#include <vector>

#include "attention/problem.h"

namespace kvstride::attend {

/// Some query rows of some query heads of one KV head (or of all query heads of several), over a range of keys. Its
/// rows lie head by head.
struct Item {
  std::int64_t sequence;
  std::int64_t kv_head;
  std::int64_t kv_heads;
  std::int64_t first_head;  ///< of the group
  std::int64_t heads;       ///< of each KV head
  std::int64_t first_row;   ///< of the sequence
  std::int64_t rows;        ///< of each head
  std::int64_t first_key;
  std::int64_t end_key;
  bool shared = false;  ///< other items have the same rows: it leaves its state instead of finishing them
  bool direct = false;  ///< few rows: keys and values are read where they are

  std::int64_t all_heads() const noexcept { return kv_heads * heads; }
  std::int64_t all_rows() const noexcept { return all_heads() * rows; }
};

/// Rows of an item so far: values not yet divided by `sums`, which are relative to `tops`.
struct State {
  float* values;  ///< [row, padded value dim]
  float* tops;
  float* sums;
};

/// What an item needs beside its input, for the largest of a call.
struct Sizes {
  std::int64_t rows = 0;
  std::int64_t score_rows = 0;
  std::int64_t score_step = 0;
  std::int64_t query_step = 0;
  std::int64_t weight_step = 0;
  std::int64_t value_step = 0;
  std::int64_t keys = 0;  ///< of a tile
  bool packs = false;
};

/// Memory of one thread.
struct Workspace {
  explicit Workspace(const Problem& problem, const Sizes& sizes);

  hwy::AlignedFreeUniquePtr<float[]> memory;
  float* query;
  float* scores;
  float* row;             ///< one row of values or scores
  float* fresh;           ///< values of one tile: long sums are sums of tiles' sums
  std::byte* key_panels;  ///< what the problem's products multiply: panels, and rows that they have narrowed
  std::byte* value_panels;
  std::byte* narrow_query;
  std::byte* narrow_weights;
  std::byte* wide_values;  ///< panels of f32 for values that are not all finite
  float* largest;          ///< of a tile, for each row
  State state;
  std::vector<const std::byte*> key_rows;
  std::vector<const std::byte*> value_rows;
  std::vector<std::byte> key_staging;
  std::vector<std::byte> value_staging;
};

/// What an item found out about tiles.
struct Findings {
  TileCounters counters;
  std::vector<std::int64_t> skipped_at;
  std::vector<TileDecision> decisions;
};

/// Splits a call; `sizes` becomes what the largest item needs. Depends on a sequence and the cache alone, so that
/// neither the batch nor the threads change a result.
std::vector<Item> items_of(const Problem& problem, Sizes& sizes);

/// Keys of a tile of an item.
std::int64_t tile_keys(const Problem& problem, const Item& item);

/// The rows of an item, finished, or their state at `into` where they are shared.
void run(const Problem& problem, const Item& item, const Sizes& sizes, Workspace& space, const State& into,
         Findings* findings);

/// Divides, scales and writes the rows of an item; `row` is room for one.
void write_out(const Problem& problem, const Item& item, const Sizes& sizes, const State& state, float* row);

/// `more` into `state`, for `rows` rows.
void merge(const State& state, const State& more, std::int64_t rows, std::int64_t step);

}  // namespace kvstride::attend
