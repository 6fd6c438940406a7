// SPDX-License-Identifier: Apache-2.0
// Naive truth of attention: one row, one key, one dim at a time, in f64, by the layout's own offsets.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

#include "cpu/numbers.h"
#include "kvstride/attention.h"
#include "oracle.h"

namespace kvstride::test {

inline double decode_element(DType dtype, const std::byte* from) {
  if (dtype == DType::kF32) {
    float out = 0;
    std::memcpy(&out, from, 4);
    return out;
  }
  if (item_size(dtype) == 2) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, from, 2);
    if (dtype == DType::kBF16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
    return cpu::decode(cpu::kF16, bits);
  }
  const auto bits = static_cast<std::uint32_t>(*from);
  return cpu::decode(cpu::format_of(dtype), bits);
}

/// For numbers that the type holds exactly.
inline void encode_element(DType dtype, std::byte* to, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(to, &value, 4);
  } else if (dtype == DType::kBF16) {
    const auto bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    std::memcpy(to, &bits, 2);
  } else if (dtype == DType::kF16) {
    const auto bits = static_cast<std::uint16_t>(cpu::encode(cpu::kF16, value));
    std::memcpy(to, &bits, 2);
  } else {
    *to = static_cast<std::byte>(cpu::encode(cpu::format_of(dtype), value));
  }
}

struct Attended {
  std::vector<double> out;  ///< [token, head, value dim]
  std::vector<double> lse;  ///< [token, head]
  std::vector<TileDecision> decisions;
  std::vector<std::int64_t> skipped_at;
};

/// What attention() means. Queries are contiguous.
class AttentionOracle {
 public:
  AttentionOracle(const AttentionBatch& batch, const Memory& memory, std::int64_t layer,
                  const AttentionOptions& options)
      : batch_(batch), memory_(memory), layer_(layer), o_(options) {
    heads_ = batch.query.shape[1];
    group_ = heads_ / memory.layout.plane("key").extent(Axis::kHead);
    dim_ = batch.query.shape[2];
    value_dim_ = memory.layout.plane("value").extent(Axis::kDim);
    result_.out.resize(static_cast<std::size_t>(batch.query.shape[0] * heads_ * value_dim_));
    result_.lse.resize(static_cast<std::size_t>(batch.query.shape[0] * heads_), kNone);
    result_.skipped_at.resize(options.thresholds.size());
  }

  Attended operator()() {
    for (std::size_t s = 0; s < batch_.seq_lens.size(); ++s) {
      for (std::int64_t h = 0; h < heads_; ++h) sequence(static_cast<std::int64_t>(s), h);
    }
    std::sort(result_.decisions.begin(), result_.decisions.end(), [](const TileDecision& a, const TileDecision& b) {
      return std::tie(a.sequence, a.head, a.query_tile, a.key_tile) <
             std::tie(b.sequence, b.head, b.query_tile, b.key_tile);
    });
    return std::move(result_);
  }

 private:
  static constexpr double kNone = -std::numeric_limits<double>::infinity();

  double element(const char* name, std::int64_t s, std::int64_t key, std::int64_t head, std::int64_t dim) const {
    const Plane& plane = memory_.layout.plane(name);
    const std::int64_t size = memory_.layout.geometry().block_size;
    const std::int64_t at = s * batch_.blocks.row_stride + key / size;
    const std::int64_t block = batch_.blocks.wide ? static_cast<const std::int64_t*>(batch_.blocks.data)[at]
                                                  : static_cast<const std::int32_t*>(batch_.blocks.data)[at];
    const Location where = memory_.layout.offset(plane, {layer_, block, key % size, head, dim});
    const double raw =
        decode_element(plane.dtype, memory_.buffers[static_cast<std::size_t>(where.tensor)].data() + where.byte);
    const auto& scales = plane.name == "key" ? o_.key_scale : o_.value_scale;
    return raw * (scales.empty() ? 1.0 : scales[scales.size() == 1 ? 0 : static_cast<std::size_t>(head)]);
  }

  void sequence(std::int64_t s, std::int64_t h) {
    const auto i = static_cast<std::size_t>(s);
    const std::int64_t first = batch_.query_start_loc[i];
    const std::int64_t rows = batch_.query_start_loc[i + 1] - first;
    const std::int64_t length = batch_.seq_lens[i];
    const bool causal = o_.causal_of.empty() ? o_.causal : o_.causal_of[i] != 0;
    float lambda = 0;
    if (!o_.skip_lambda.empty()) lambda = o_.skip_lambda[o_.skip_lambda.size() == 1 ? 0 : i];
    const bool tiled = lambda > 0 || !o_.thresholds.empty();
    const std::int64_t tile_rows = tiled ? o_.tile_rows : rows;
    for (std::int64_t r0 = 0; r0 < rows; r0 += tile_rows) {
      tile(s, h, first, r0, std::min(rows, r0 + tile_rows), rows, length, causal, tiled, lambda);
    }
  }

  /// Scores of a row after mask, soft cap and N:M.
  std::vector<double> scores(std::int64_t s, std::int64_t h, std::int64_t first, std::int64_t row, std::int64_t rows,
                             std::int64_t length, bool causal) const {
    std::vector<double> out(static_cast<std::size_t>(length), kNone);
    const std::int64_t position = row + length - rows;
    const double scale = o_.scale ? double{*o_.scale} : 1.0 / std::sqrt(static_cast<double>(dim_));
    for (std::int64_t key = 0; key < length; ++key) {
      if (causal && key > position) continue;
      if (o_.window && key <= position - *o_.window) continue;
      double sum = 0;
      for (std::int64_t d = 0; d < dim_; ++d) {
        const std::int64_t at = (((first + row) * heads_ + h) * dim_ + d) * item_size(batch_.query.dtype);
        sum += decode_element(batch_.query.dtype, batch_.query.data + at) * element("key", s, key, h / group_, d);
      }
      double score = sum * scale;
      if (o_.soft_cap > 0) score = double{o_.soft_cap} * std::tanh(score / double{o_.soft_cap});
      out[static_cast<std::size_t>(key)] = score;
    }
    if (!o_.keep || rows <= 1) return out;
    const std::vector<double> all = out;
    const auto& rule = *o_.keep;
    for (std::int64_t key = 0; key < length; ++key) {
      if (key < rule.sink_tokens || (position - key >= 0 && position - key < rule.recent)) continue;
      int before = 0;
      for (std::int64_t other = key / rule.m * rule.m; other < std::min(length, (key / rule.m + 1) * rule.m); ++other) {
        const double mine = all[static_cast<std::size_t>(key)];
        const double its = all[static_cast<std::size_t>(other)];
        before += its > mine || (rule.m == 4 && its == mine && other < key) ? 1 : 0;
      }
      if (before >= rule.n) out[static_cast<std::size_t>(key)] = kNone;
    }
    return out;
  }

  void tile(std::int64_t s, std::int64_t h, std::int64_t first, std::int64_t r0, std::int64_t r1, std::int64_t rows,
            std::int64_t length, bool causal, bool tiled, float lambda) {
    std::vector<std::vector<double>> all;
    for (std::int64_t r = r0; r < r1; ++r) all.push_back(scores(s, h, first, r, rows, length, causal));
    const std::int64_t end = causal ? std::clamp<std::int64_t>(length - rows + r1, 0, length) : length;
    const std::int64_t start = o_.window ? std::max<std::int64_t>(0, length - rows + r0 - *o_.window + 1) : 0;
    const std::int64_t size = tiled ? o_.tile_keys : std::max<std::int64_t>(end, 1);
    std::vector<double> tops(all.size(), kNone);
    for (std::int64_t k0 = start / size * size; k0 < end; k0 += size) {
      double gap = kNone;
      std::vector<double> largest(all.size(), kNone);
      for (std::size_t r = 0; r < all.size(); ++r) {
        for (std::int64_t k = k0; k < std::min(end, k0 + size); ++k) {
          largest[r] = std::max(largest[r], all[r][static_cast<std::size_t>(k)]);
        }
        gap = std::max(gap, tops[r] == kNone ? -kNone : largest[r] - tops[r]);
      }
      const bool skipped = o_.thresholds.empty() && tiled && gap < std::log(double{lambda});
      if (tiled) {
        result_.decisions.push_back({s, h, r0 / o_.tile_rows, k0 / size, skipped});
        for (std::size_t i = 0; i < o_.thresholds.size(); ++i) {
          result_.skipped_at[i] += gap < std::log(double{o_.thresholds[i]}) ? 1 : 0;
        }
      }
      for (std::size_t r = 0; r < all.size(); ++r) {
        if (!skipped) {
          tops[r] = std::max(tops[r], largest[r]);
          continue;
        }
        for (std::int64_t k = k0; k < std::min(end, k0 + size); ++k) all[r][static_cast<std::size_t>(k)] = kNone;
      }
    }
    for (std::size_t r = 0; r < all.size(); ++r) write(s, h, first + r0 + static_cast<std::int64_t>(r), all[r]);
  }

  void write(std::int64_t s, std::int64_t h, std::int64_t token, const std::vector<double>& scores) {
    const double sink = o_.sinks.empty() ? kNone : double{o_.sinks[static_cast<std::size_t>(h)]};
    double top = sink;
    for (const double score : scores) top = std::max(top, score);
    if (top == kNone) return;
    double sum = std::exp(sink - top);
    std::vector<double> out(static_cast<std::size_t>(value_dim_));
    for (std::size_t k = 0; k < scores.size(); ++k) {
      if (scores[k] == kNone) continue;  // a key without weight is not even looked at
      const double weight = std::exp(scores[k] - top);
      sum += weight;
      for (std::int64_t d = 0; d < value_dim_; ++d) {
        out[static_cast<std::size_t>(d)] += weight * element("value", s, static_cast<std::int64_t>(k), h / group_, d);
      }
    }
    for (std::int64_t d = 0; d < value_dim_; ++d) {
      result_.out[static_cast<std::size_t>((token * heads_ + h) * value_dim_ + d)] =
          out[static_cast<std::size_t>(d)] / sum;
    }
    result_.lse[static_cast<std::size_t>(token * heads_ + h)] = top + std::log(sum);
  }

  const AttentionBatch& batch_;
  const Memory& memory_;
  std::int64_t layer_;
  const AttentionOptions& o_;
  std::int64_t heads_;
  std::int64_t group_;
  std::int64_t dim_;
  std::int64_t value_dim_;
  Attended result_;
};

}  // namespace kvstride::test
