// SPDX-License-Identifier: Apache-2.0
// The loops of attention: products of f32 matrices with rows of a cache, and what lies between them.
//
// Rows of keys and values are given as addresses of contiguous elements. Where there are few query rows they are read
// as they are; for many they are packed into *panels* first: `panel` columns side by side, one depth after the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvstride/dtype.h"

namespace kvstride::cpu {

/// Floats that any buffer of the kernels is padded to a multiple of.
inline constexpr std::int64_t kPadding = 64;

constexpr std::int64_t padded(std::int64_t count) { return (count + kPadding - 1) / kPadding * kPadding; }

struct AttentionMath {
  std::int64_t panel;  ///< columns of a panel; divides kPadding

  /// C [rows, panels × panel] = A [rows, depth] B, with panels `panel_step` floats apart.
  void (*multiply)(float* c, std::int64_t c_step, const float* a, std::int64_t a_step, std::int64_t rows,
                   const float* b, std::int64_t depth, std::int64_t panel_step, std::int64_t panels);
  /// Scores [first, end) × scale, soft cap where > 0, −infinity in the rest of `count`; returns the largest, NaN where
  /// one is.
  float (*finish)(float* scores, std::int64_t first, std::int64_t end, std::int64_t count, float scale, float cap);
  /// exp(score − max) for `count` scores not above max; returns the sum. A NaN stays one.
  float (*exponentiate)(float* scores, std::int64_t count, float max);
  /// x × factor.
  void (*multiply_row)(float* x, std::int64_t count, float factor);
  /// −infinity for all but the `n` largest of each group of `m` (4 or 8). Of equals, m = 4 keeps the first, m = 8 all.
  void (*keep)(float* scores, std::int64_t count, int n, int m);
};

/// KV heads that lie side by side in a token; bytes from where a row begins.
struct Heads {
  std::int64_t count = 1;
  std::int64_t first = 0;
  std::int64_t step = 0;
};

struct KeyLoops {
  /// Scores [heads × rows, count] of query rows `dim` long, padded with zeros to kPadding: `rows` of them for each of
  /// the heads.
  void (*scores)(float* out, std::int64_t out_step, const float* query, std::int64_t query_step, std::int64_t rows,
                 const std::byte* const* keys, std::int64_t count, std::int64_t dim, const Heads& heads);
  /// Panels of `panel` keys, [dim, panel] each; columns behind `count` are 0.
  void (*pack)(float* panels, const std::byte* const* keys, std::int64_t count, std::int64_t dim);
  /// Puts a row of the query, padded, in the order that scores() wants.
  void (*order)(float* row, std::int64_t dim);
  float unit;  ///< what scores() gives must be multiplied by
};

struct ValueLoops {
  /// out [heads × rows, dim] += weights [heads × rows, count] × values, as above.
  void (*add)(float* out, std::int64_t out_step, const float* weights, std::int64_t weight_step, std::int64_t rows,
              const std::byte* const* values, std::int64_t count, std::int64_t dim, const Heads& heads);
  /// Panels of `panel` dims, [count, panel] each; columns behind `dim` are 0. Returns whether all are finite.
  bool (*pack)(float* panels, const std::byte* const* values, std::int64_t count, std::int64_t dim);
  /// Puts a row that add() made, padded, in the order of its dims.
  void (*order)(float* row, std::int64_t dim);
  float unit;  ///< what add() gives must be multiplied by
};

/// For the best instruction set of this machine. dtypes are f32, f16, bf16, f8_e4m3 and f8_e5m2.
const AttentionMath& attention_math();
KeyLoops key_loops(DType dtype);
ValueLoops value_loops(DType dtype);

}  // namespace kvstride::cpu
