// SPDX-License-Identifier: Apache-2.0
// A checked call of attention: what its items share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/attention.h"
#include "cpu/cast.h"
#include "cpu/products.h"
#include "kvstride/attention.h"

namespace kvstride::attend {

/// Keys or values of one layer: where the elements of (block, slot, head) lie.
class PlaneReader {
 public:
  PlaneReader(const Cache& cache, std::string_view plane, std::int64_t layer);

  DType dtype() const noexcept { return plane_->dtype; }
  /// What rows() gives: f32 for types that the loops do not know.
  DType row_dtype() const noexcept { return cast_ == nullptr ? plane_->dtype : DType::kF32; }
  /// Bytes of a row that rows() puts into its staging memory; 0 where it needs none.
  std::int64_t staged_bytes() const { return direct() ? 0 : dim() * (cast_ == nullptr ? item_ : 4); }
  std::int64_t heads() const { return plane_->extent(Axis::kHead); }
  std::int64_t dim() const { return plane_->extent(Axis::kDim); }
  /// Elements of a head lie side by side and are used as they are: rows() gives their own memory.
  bool direct() const noexcept { return dim_offsets_.empty() && cast_ == nullptr; }

  /// Bytes between the heads of a token where all lie equally far apart, and nearer than tokens do; else 0.
  std::int64_t head_step() const noexcept { return head_step_; }

  /// Addresses of keys `first` up to `first + count` of a sequence, `dim()` contiguous elements of row_dtype() each;
  /// what is not so in memory is brought into `staging` (count × staged_bytes()).
  void rows(const BlockTable& blocks, std::int64_t sequence, std::int64_t first, std::int64_t count, std::int64_t head,
            const std::byte** out, std::byte* staging) const;

 private:
  std::int64_t step_of_heads() const;

  const Plane* plane_;
  const std::byte* base_;
  std::int64_t item_;
  cpu::CastRows cast_ = nullptr;
  std::int64_t head_step_ = 0;
  std::int64_t run_ = 0;  ///< dims that lie side by side where not all do
  std::vector<std::int64_t> slot_offsets_;
  std::vector<std::int64_t> head_offsets_;
  std::vector<std::int64_t> dim_offsets_;  ///< of each run; empty where all dims are one
};

inline std::int64_t block_at(const BlockTable& blocks, std::int64_t row, std::int64_t column) {
  const std::int64_t at = row * blocks.row_stride + column * blocks.column_stride;
  return blocks.wide ? static_cast<const std::int64_t*>(blocks.data)[at]
                     : static_cast<const std::int32_t*>(blocks.data)[at];
}

/// One sequence of a batch.
struct Sequence {
  std::int64_t query;   ///< first row of the query tensor
  std::int64_t rows;    ///< query rows
  std::int64_t length;  ///< keys
  bool causal;
  bool keep;                                                      ///< N:M applies
  float log_lambda;                                               ///< of skip-softmax; NaN where it is off
  std::int64_t offset() const noexcept { return length - rows; }  ///< position of query row 0
};

struct Problem {
  const AttentionBatch& batch;
  const AttentionOutput& output;
  const AttentionOptions& options;
  PlaneReader keys;
  PlaneReader values;
  cpu::Products products;  ///< for many query rows
  std::int64_t block_size;
  std::int64_t heads;  ///< of the query
  std::int64_t group;  ///< query heads of a KV head
  float scale;
  std::optional<std::int64_t> window;  ///< as the options', but so that nothing overflows
  std::optional<KeepNofM> keep;        ///< likewise
  std::vector<Sequence> sequences;

  bool calibrating() const noexcept { return !options.thresholds.empty(); }
  /// Whether tiles of a sequence are looked at one by one.
  bool tiled(const Sequence& s) const noexcept { return calibrating() || !std::isnan(s.log_lambda); }
  float key_scale(std::int64_t kv_head) const { return scale_of(options.key_scale, kv_head); }
  float value_scale(std::int64_t kv_head) const { return scale_of(options.value_scale, kv_head); }

 private:
  static float scale_of(std::span<const float> scales, std::int64_t head) {
    return scales.empty() ? 1.0F : scales[scales.size() == 1 ? 0 : static_cast<std::size_t>(head)];
  }
};

/// Throws Error for everything that attention() refuses.
Problem checked(const AttentionBatch& batch, const Cache& cache, std::int64_t layer, const AttentionOutput& output,
                const AttentionOptions& options);

/// First key that row `row` of a sequence sees, and the end of those that it sees (not above its length).
inline std::int64_t first_key(const Problem& problem, const Sequence& s, std::int64_t row) {
  if (!problem.window) return 0;
  return std::max<std::int64_t>(0, s.offset() + row - *problem.window + 1);
}
inline std::int64_t end_key(const Sequence& s, std::int64_t row) {
  return s.causal ? std::clamp<std::int64_t>(s.offset() + row + 1, 0, s.length) : s.length;
}

}  // namespace kvstride::attend
