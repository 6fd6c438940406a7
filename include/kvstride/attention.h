// SPDX-License-Identifier: Apache-2.0
// Attention over a paged cache of any layout, dense or sparse (docs/attention.md).
//
// Tokens of a sequence lie in the blocks that its row of the block table names; query row i of a sequence sits at
// position i + seq_len − (its number of query rows). Everything is checked before the first output is written. Slots
// past seq_len and blocks that no sequence names are never read, nor are keys that no row of a tile sees. A row that
// sees no key is 0 with LSE −infinity. Results of a sequence do not depend on the others of its batch, nor on the
// number of threads. Functions may run at once on the same cache as long as nobody writes it, the block table or the
// lengths.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvstride/blocks.h"
#include "kvstride/cache.h"

namespace kvstride {

/// int32 or int64 block ids, `rows` × `columns`, strides in elements. Entries that no query needs may be anything.
struct BlockTable {
  const void* data;
  bool wide;  ///< int64
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t row_stride;
  std::int64_t column_stride = 1;
};

/// What attends: `query` is [token, query head, head_size] in f32, f16 or bf16; rows query_start_loc[s] up to
/// query_start_loc[s + 1] belong to sequence s, which has seq_lens[s] tokens in the cache, its queries' own included.
struct AttentionBatch {
  TokenTensor query;
  BlockTable blocks;
  std::span<const std::int64_t> seq_lens;
  std::span<const std::int64_t> query_start_loc;  ///< one more than sequences, from 0 on, never falling
};

/// Where results go. `out` is [token, query head, value head size] in the query's dtype; rows behind the last
/// query_start_loc are left alone. `lse` is [token, query head], contiguous, or null.
struct AttentionOutput {
  std::byte* out;
  std::array<std::int64_t, 3> shape;
  std::array<std::int64_t, 3> strides;  ///< in elements
  float* lse = nullptr;
};

/// N:M sparse softmax: of each group of `m` keys at absolute positions, `n` are kept (ModelOpt 0.47).
struct KeepNofM {
  int n;
  int m;                         ///< 4 or 8
  std::int64_t recent = 64;      ///< the keys next behind a query, itself included, are kept
  std::int64_t sink_tokens = 0;  ///< the first keys of a sequence are kept
};

/// One tile of a query head that skip-softmax looked at.
struct TileDecision {
  std::int64_t sequence;
  std::int64_t head;
  std::int64_t query_tile;
  std::int64_t key_tile;
  bool skipped;
  bool operator==(const TileDecision&) const = default;
};

/// What the sparse methods did: tiles of query heads, those of padding rows left out.
struct TileCounters {
  std::int64_t total = 0;
  std::int64_t skipped = 0;
};

struct AttentionOptions {
  std::optional<float> scale;  ///< of scores; 1 / sqrt(head_size) where not given
  bool causal = true;
  std::span<const std::uint8_t> causal_of;  ///< for each sequence, instead of `causal`
  /// Row at position p sees keys from p − window + 1 on (also where it is not causal).
  std::optional<std::int64_t> window;
  float soft_cap = 0.0F;  ///< > 0: scores become cap × tanh(score / cap)
  /// For each query head a logit that takes part in the softmax without a value; −infinity is none.
  std::span<const float> sinks;
  std::span<const float> key_scale;    ///< of an f8 cache: none, one, or one for each KV head
  std::span<const float> value_scale;  ///< likewise
  /// Skip-softmax: tiles whose every row has exp(max − running max) < lambda are skipped. Not above 0: off. None, one,
  /// or one for each sequence.
  std::span<const float> skip_lambda;
  std::int64_t tile_rows = 128;  ///< of skip-softmax and calibration
  std::int64_t tile_keys = 128;
  std::optional<KeepNofM> keep;  ///< for sequences of more than one query row
  bool lse_log2 = false;         ///< LSE in units of log2 instead of the natural logarithm

  // Results beside the output, where wanted.
  TileCounters* counters = nullptr;
  std::span<TileCounters> counters_of;             ///< for each sequence
  std::vector<TileDecision>* decisions = nullptr;  ///< sorted by sequence, head, query tile, key tile
  /// Calibration: nothing is skipped, and `skipped_at[i]` counts the tiles that `thresholds[i]` would have skipped.
  std::span<const float> thresholds;
  std::span<std::int64_t> skipped_at;
};

/// Softmax(Q Kᵀ) V of one layer. Throws Error(kArgument) for shapes, lengths, scales and overlapping memory,
/// Error(kBlockIndex) for ids and layers, Error(kDType) for dtypes, Error(kLayout) for caches that are not keys and
/// values alone; nothing was written then.
void attention(const AttentionBatch& batch, const Cache& cache, std::int64_t layer, const AttentionOutput& output,
               const AttentionOptions& options = {});

/// One of two attention results over disjoint keys: values [row, head, dim], strides in elements, LSE [row, head].
struct AttentionState {
  TokenTensor out;
  const float* lse;
};

/// What attention over the keys of both had given: weights exp(lse − max), a state of LSE −infinity adds nothing, and
/// two of them give 0 and −infinity. `out` may be the memory of one of them. dtypes f32, f16, bf16, equal.
void merge_states(const AttentionState& first, const AttentionState& second, const AttentionOutput& output,
                  bool lse_log2 = false);

}  // namespace kvstride
