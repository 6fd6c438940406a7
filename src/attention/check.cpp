// SPDX-License-Identifier: Apache-2.0
// What attention() refuses, before anything is written.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/problem.h"
#include "kvstride/error.h"

namespace kvstride::attend {
namespace {

constexpr std::int64_t kMaxTile = 4096;
constexpr std::int64_t kFar = std::int64_t{1} << 60;  // beyond any key

[[noreturn]] void refuse(ErrorCode code, const std::string& what) { throw Error(code, "attention: " + what); }

bool is_compute(DType dtype) { return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16; }

void check_layout(const Cache& cache, std::int64_t layer) {
  const Layout& layout = cache.layout();
  if (!cache.device().on_host()) {
    refuse(ErrorCode::kArgument,
           fmt::format("the cache lies on {}; it reads host memory only", name_of(cache.device())));
  }
  if (layer < 0 || layer >= layout.geometry().num_layers) {
    refuse(ErrorCode::kBlockIndex,
           fmt::format("layer {} is outside the cache (num_layers is {})", layer, layout.geometry().num_layers));
  }
  for (const Plane& plane : layout.planes()) {
    if (plane.name == "key" || plane.name == "value") continue;
    refuse(ErrorCode::kLayout, fmt::format("the layout has a plane '{}', which attention would ignore", plane.name));
  }
  for (const char* name : {"key", "value"}) {
    const Plane& plane = layout.plane(name);
    if (!is_castable(plane.dtype)) {
      refuse(ErrorCode::kDType, fmt::format("plane '{}' is {}, which is no plain float", name, name_of(plane.dtype)));
    }
    if (plane.extent(Axis::kToken) != layout.geometry().block_size) {
      refuse(ErrorCode::kLayout, fmt::format("plane '{}' has {} tokens a block, block_size is {}", name,
                                             plane.extent(Axis::kToken), layout.geometry().block_size));
    }
  }
}

void check_query(const TokenTensor& query, const PlaneReader& keys, const PlaneReader& values) {
  if (!is_compute(query.dtype)) {
    refuse(ErrorCode::kDType, fmt::format("q is {}, expected f32, f16 or bf16", name_of(query.dtype)));
  }
  for (const PlaneReader* plane : {&keys, &values}) {
    const DType dtype = plane->dtype();
    if (is_f8(dtype) || dtype == query.dtype || query.dtype == DType::kF32) continue;
    refuse(ErrorCode::kDType, fmt::format("q is {}, the cache holds {}", name_of(query.dtype), name_of(dtype)));
  }
  if (query.shape[2] != keys.dim()) {
    refuse(ErrorCode::kArgument, fmt::format("q has head size {}, the keys {}", query.shape[2], keys.dim()));
  }
  if (keys.heads() != values.heads()) {
    refuse(ErrorCode::kLayout, fmt::format("{} heads of keys, {} of values", keys.heads(), values.heads()));
  }
  if (query.shape[1] < 1 || query.shape[1] % keys.heads() != 0) {
    refuse(ErrorCode::kArgument, fmt::format("q has {} heads, which is no multiple of the cache's {} KV heads",
                                             query.shape[1], keys.heads()));
  }
}

/// Bytes [first, end) that a tensor touches.
struct Span {
  std::uintptr_t first = 0;
  std::uintptr_t end = 0;
  bool meets(const Span& other) const { return first < other.end && other.first < end; }
};

Span span_of(const void* data, std::array<std::int64_t, 3> shape, std::array<std::int64_t, 3> strides,
             std::int64_t item) {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  Span out{at, at};
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    if (shape[i] == 0) return out;
    const std::int64_t reach = (shape[i] - 1) * strides[i];
    (reach < 0 ? low : high) += reach;
  }
  out.first = at + static_cast<std::uintptr_t>(low * item);
  out.end = at + static_cast<std::uintptr_t>((high + 1) * item);
  return out;
}

void check_memory(const AttentionBatch& batch, const AttentionOutput& output, const Cache& cache,
                  std::int64_t value_dim) {
  const TokenTensor& query = batch.query;
  const std::int64_t item = item_size(query.dtype);
  const std::array<std::int64_t, 3> shape{query.shape[0], query.shape[1], value_dim};
  if (output.shape != shape) {
    refuse(ErrorCode::kArgument, fmt::format("out has shape [{}, {}, {}], expected [{}, {}, {}]", output.shape[0],
                                             output.shape[1], output.shape[2], shape[0], shape[1], shape[2]));
  }
  std::array<std::size_t, 3> order{0, 1, 2};
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return std::abs(output.strides[a]) < std::abs(output.strides[b]); });
  std::int64_t reach = 0;
  const bool empty = std::any_of(shape.begin(), shape.end(), [](std::int64_t n) { return n == 0; });
  for (const std::size_t axis : order) {
    if (empty) break;
    if (shape[axis] <= 1) continue;
    if (std::abs(output.strides[axis]) <= reach) {
      refuse(ErrorCode::kArgument,
             fmt::format("out has strides [{}, {}, {}] over shape [{}, {}, {}], so that its "
                         "elements share memory",
                         output.strides[0], output.strides[1], output.strides[2], shape[0], shape[1], shape[2]));
    }
    reach += (shape[axis] - 1) * std::abs(output.strides[axis]);
  }
  const Span out = span_of(output.out, shape, output.strides, item);
  const Span lse = span_of(output.lse, {shape[0], shape[1], output.lse == nullptr ? 0 : 1}, {shape[1], 1, 1}, 4);
  const Span q = span_of(query.data, query.shape, query.strides, item);
  if (out.meets(q) || lse.meets(q)) refuse(ErrorCode::kArgument, "the output overlaps q");
  if (out.meets(lse)) refuse(ErrorCode::kArgument, "out overlaps lse");
  if (batch.blocks.rows > 0 && batch.blocks.columns > 0) {
    const Span table = span_of(batch.blocks.data, {1, batch.blocks.rows, batch.blocks.columns},
                               {1, batch.blocks.row_stride, batch.blocks.column_stride}, batch.blocks.wide ? 8 : 4);
    if (out.meets(table) || lse.meets(table)) refuse(ErrorCode::kArgument, "the output overlaps block_table");
  }
  const Layout& layout = cache.layout();
  for (std::size_t i = 0; i < cache.tensors().size(); ++i) {
    const auto at = reinterpret_cast<std::uintptr_t>(cache.tensors()[i]);
    for (const Plane& plane : layout.planes()) {
      if (static_cast<std::size_t>(plane.part) != i % static_cast<std::size_t>(layout.num_parts())) continue;
      // What lies behind the last element may belong to others: layers of one allocation reach into each other.
      std::int64_t bytes = item_size(plane.dtype);
      for (const Mode& mode : plane.modes) bytes += (mode.extent - 1) * mode.stride;
      const auto first = at + static_cast<std::uintptr_t>(plane.base);
      const Span span{first, first + static_cast<std::uintptr_t>(bytes)};
      if (out.meets(span) || lse.meets(span)) refuse(ErrorCode::kArgument, "the output overlaps the cache");
    }
  }
}

void check_scales(const char* name, std::span<const float> scales, const PlaneReader& plane) {
  if (scales.size() > 1 && static_cast<std::int64_t>(scales.size()) != plane.heads()) {
    refuse(ErrorCode::kArgument, fmt::format("{} has {} values, expected one, or one for each of {} KV heads", name,
                                             scales.size(), plane.heads()));
  }
  for (const float scale : scales) {
    if (!(scale > 0.0F) || std::isinf(scale)) {
      refuse(ErrorCode::kArgument, fmt::format("{} {} is not a positive finite number", name, scale));
    }
    if (scale != 1.0F && !is_f8(plane.dtype())) {
      refuse(ErrorCode::kArgument,
             fmt::format("{} is {}, but the cache holds {} as it came", name, scale, name_of(plane.dtype())));
    }
  }
}

void check_options(const Problem& problem) {
  const AttentionOptions& o = problem.options;
  const auto sequences = static_cast<std::int64_t>(problem.batch.seq_lens.size());
  if (o.scale && !std::isfinite(*o.scale)) refuse(ErrorCode::kArgument, fmt::format("scale is {}", *o.scale));
  if (!(o.soft_cap >= 0.0F) || std::isinf(o.soft_cap)) {
    refuse(ErrorCode::kArgument, fmt::format("soft_cap is {}, expected 0 (off) or a positive number", o.soft_cap));
  }
  if (o.window && *o.window < 1) {
    refuse(ErrorCode::kArgument,
           fmt::format("window is {}, expected at least 1: it counts the token itself", *o.window));
  }
  if (!o.sinks.empty() && static_cast<std::int64_t>(o.sinks.size()) != problem.heads) {
    refuse(ErrorCode::kArgument, fmt::format("{} sinks for {} query heads", o.sinks.size(), problem.heads));
  }
  for (const float sink : o.sinks) {
    // A sink of −infinity takes no part.
    if (!(sink < std::numeric_limits<float>::infinity())) {
      refuse(ErrorCode::kArgument, fmt::format("a sink is {}, expected a finite number or -inf", sink));
    }
  }
  if (!o.counters_of.empty() && static_cast<std::int64_t>(o.counters_of.size()) != sequences) {
    refuse(ErrorCode::kArgument, fmt::format("room for {} counters, {} sequences", o.counters_of.size(), sequences));
  }
  if (!o.causal_of.empty() && static_cast<std::int64_t>(o.causal_of.size()) != sequences) {
    refuse(ErrorCode::kArgument, fmt::format("causal has {} values for {} sequences", o.causal_of.size(), sequences));
  }
  check_scales("key_scale", o.key_scale, problem.keys);
  check_scales("value_scale", o.value_scale, problem.values);
  if (o.skip_lambda.size() > 1 && static_cast<std::int64_t>(o.skip_lambda.size()) != sequences) {
    refuse(ErrorCode::kArgument,
           fmt::format("skip_lambda has {} values for {} sequences", o.skip_lambda.size(), sequences));
  }
  for (const float lambda : o.skip_lambda) {
    // ModelOpt 0.47 disables it in vLLM and skips tiles with a higher maximum elsewhere.
    if (!(lambda < 1.0F)) refuse(ErrorCode::kArgument, fmt::format("skip_lambda is {}, must be below 1", lambda));
  }
  for (const std::int64_t size : {o.tile_rows, o.tile_keys}) {
    if (size >= 1 && size <= kMaxTile) continue;
    refuse(ErrorCode::kArgument,
           fmt::format("tile is ({}, {}), each must be from 1 to {}", o.tile_rows, o.tile_keys, kMaxTile));
  }
  if (o.keep) {
    const KeepNofM& keep = *o.keep;
    if (keep.m != 4 && keep.m != 8)
      refuse(ErrorCode::kArgument, fmt::format("nm is {}:{}, M must be 4 or 8", keep.n, keep.m));
    if (keep.n < 1 || keep.n >= keep.m) {
      refuse(ErrorCode::kArgument, fmt::format("nm is {}:{}, N must be from 1 to {}", keep.n, keep.m, keep.m - 1));
    }
    if (keep.recent < 0 || keep.sink_tokens < 0) {
      refuse(ErrorCode::kArgument,
             fmt::format("recent is {} and sink_tokens {}, neither may be negative", keep.recent, keep.sink_tokens));
    }
    if (o.tile_keys % keep.m != 0) {
      refuse(ErrorCode::kArgument,
             fmt::format("tile has {} keys, which is no multiple of M of nm {}:{}", o.tile_keys, keep.n, keep.m));
    }
  }
  if (o.thresholds.size() != o.skipped_at.size()) {
    refuse(ErrorCode::kArgument,
           fmt::format("{} thresholds, but room for {} counts", o.thresholds.size(), o.skipped_at.size()));
  }
  for (const float threshold : o.thresholds) {
    if (threshold > 0.0F && threshold < 1.0F) continue;
    refuse(ErrorCode::kArgument, fmt::format("threshold {} is not between 0 and 1", threshold));
  }
}

float log_lambda(const AttentionOptions& options, std::size_t sequence) {
  const auto& given = options.skip_lambda;
  const float lambda = given.empty() ? 0.0F : given[given.size() == 1 ? 0 : sequence];
  return lambda > 0.0F ? std::log(lambda) : std::numeric_limits<float>::quiet_NaN();
}

void check_sequences(Problem& problem, const Cache& cache) {
  const AttentionBatch& batch = problem.batch;
  const AttentionOptions& options = problem.options;
  const auto count = batch.seq_lens.size();
  if (batch.query_start_loc.size() != count + 1) {
    refuse(ErrorCode::kArgument, fmt::format("query_start_loc has {} values for {} sequences, expected {}",
                                             batch.query_start_loc.size(), count, count + 1));
  }
  if (batch.query_start_loc[0] != 0) {
    refuse(ErrorCode::kArgument, fmt::format("query_start_loc[0] is {}, must be 0", batch.query_start_loc[0]));
  }
  if (batch.blocks.rows < static_cast<std::int64_t>(count)) {
    refuse(ErrorCode::kArgument, fmt::format("block_table has {} rows for {} sequences", batch.blocks.rows, count));
  }
  const std::int64_t num_blocks = cache.layout().geometry().num_blocks;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t first = batch.query_start_loc[i];
    const std::int64_t end = batch.query_start_loc[i + 1];
    if (end < first || end > batch.query.shape[0]) {
      refuse(ErrorCode::kArgument, fmt::format("query_start_loc[{}] is {}, must be from {} to q's {} tokens", i + 1,
                                               end, first, batch.query.shape[0]));
    }
    const std::int64_t length = batch.seq_lens[i];
    if (length < 0) refuse(ErrorCode::kArgument, fmt::format("seq_lens[{}] is {}, below 0", i, length));
    Sequence s{first, end - first, length, options.causal, false, log_lambda(options, i)};
    if (!options.causal_of.empty()) s.causal = options.causal_of[i] != 0;
    s.keep = options.keep.has_value() && s.rows > 1;
    problem.sequences.push_back(s);
    if (s.rows == 0 || length == 0) continue;
    // length may be anything: compared without a sum that could overflow.
    const std::int64_t needed = (length - 1) / problem.block_size + 1;
    if (needed > batch.blocks.columns) {
      refuse(ErrorCode::kArgument,
             fmt::format("seq_lens[{}] is {}, which needs {} blocks of {} tokens; block_table has {} columns", i,
                         length, needed, problem.block_size, batch.blocks.columns));
    }
    const std::int64_t last = end_key(s, s.rows - 1);
    for (std::int64_t c = first_key(problem, s, 0) / problem.block_size; c * problem.block_size < last; ++c) {
      const std::int64_t id = block_at(batch.blocks, static_cast<std::int64_t>(i), c);
      if (id >= 0 && id < num_blocks) continue;
      refuse(ErrorCode::kBlockIndex, fmt::format("block_table[{}][{}] is {}, outside the cache's {} blocks, and "
                                                 "seq_lens[{}] = {} needs it",
                                                 i, c, id, num_blocks, i, length));
    }
  }
}

}  // namespace

Problem checked(const AttentionBatch& batch, const Cache& cache, std::int64_t layer, const AttentionOutput& output,
                const AttentionOptions& options) {
  check_layout(cache, layer);
  Problem problem{batch, output, options, {cache, "key", layer}, {cache, "value", layer}, {}};
  check_query(batch.query, problem.keys, problem.values);
  problem.products = cpu::products(batch.query.dtype, problem.keys.row_dtype(), problem.values.row_dtype());
  problem.block_size = cache.layout().geometry().block_size;
  problem.heads = batch.query.shape[1];
  problem.group = problem.heads / problem.keys.heads();
  problem.scale = options.scale.value_or(1.0F / std::sqrt(static_cast<float>(problem.keys.dim())));
  check_options(problem);
  problem.window = options.window;
  if (problem.window) problem.window = std::min(*problem.window, kFar);
  problem.keep = options.keep;
  if (problem.keep) {
    problem.keep->recent = std::min(problem.keep->recent, kFar);
    problem.keep->sink_tokens = std::min(problem.keep->sink_tokens, kFar);
  }
  check_sequences(problem, cache);
  check_memory(batch, output, cache, problem.values.dim());
  return problem;
}

}  // namespace kvstride::attend
