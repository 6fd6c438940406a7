// SPDX-License-Identifier: Apache-2.0
// The loops of attention: products of queries and weights with rows of a cache, and what lies between them.
//
// Rows of keys and values are given as addresses of contiguous elements. Where there are few query rows they are read
// as they are; for many they are packed into *panels* first: `panel` columns side by side, one depth after the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/products.h"
#include "kvstride/dtype.h"

namespace kvstride::cpu {

/// Floats that any buffer of the kernels is padded to a multiple of.
inline constexpr std::int64_t kPadding = 64;

/// Depths of packed pairs of bf16 are padded to a multiple of it.
inline constexpr std::int64_t kPairUnit = 32;

constexpr std::int64_t padded(std::int64_t count) { return padded_to(count, kPadding); }

struct AttentionMath {
  std::int64_t panel;  ///< columns of a panel; divides kPadding

  decltype(Products::multiply) multiply;  ///< of f32
  /// −infinity in what of `count` scores is not in [first, end); returns the largest score × scale, NaN where one is.
  /// With `write` the scores become that, soft cap where > 0.
  float (*finish)(float* scores, std::int64_t first, std::int64_t end, std::int64_t count, float scale, float cap,
                  bool write);
  /// exp(score × scale − max) for `count` scores, none of them above max; returns the sum. A NaN stays one.
  float (*exponentiate)(float* scores, std::int64_t count, float scale, float max);
  /// The same, rounded to a row of A of products of bf16: `padded` of them, zeros behind `count`. The sum is of what
  /// was not rounded.
  float (*weigh)(std::byte* to, const float* scores, std::int64_t count, std::int64_t padded, float scale, float max);
  /// f32 that are bf16 as a row of A of products of bf16, `padded` of them.
  void (*narrow)(std::byte* to, const float* from, std::int64_t padded);
  /// to += from.
  void (*add)(float* to, const float* from, std::int64_t count);
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
  decltype(Products::pack_keys) pack;
  /// Panels of pairs of bf16, [padded dim / 2, panel, 2] each. Not of f32 and f16.
  decltype(Products::pack_keys) pack_pairs;
  /// Puts a row of the query, padded, in the order that scores() wants.
  void (*order)(float* row, std::int64_t dim);
  float unit;  ///< what scores() gives must be multiplied by
};

struct ValueLoops {
  /// out [heads × rows, dim] += weights [heads × rows, count] × values, as above.
  void (*add)(float* out, std::int64_t out_step, const float* weights, std::int64_t weight_step, std::int64_t rows,
              const std::byte* const* values, std::int64_t count, std::int64_t dim, const Heads& heads);
  /// Panels of `panel` dims, [count, panel] each; columns behind `dim` are 0. Returns whether all are finite.
  decltype(Products::pack_values) pack;
  /// Panels of pairs of bf16, [padded count / 2, panel, 2] each. Not of f32 and f16.
  decltype(Products::pack_values) pack_pairs;
  /// Puts a row that add() made, padded, in the order of its dims.
  void (*order)(float* row, std::int64_t dim);
  float unit;  ///< what add() gives must be multiplied by
};

/// For the best instruction set of this machine. dtypes are f32, f16, bf16, f8_e4m3 and f8_e5m2.
const AttentionMath& attention_math();
KeyLoops key_loops(DType dtype);
ValueLoops value_loops(DType dtype);

}  // namespace kvstride::cpu
