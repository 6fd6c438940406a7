// SPDX-License-Identifier: Apache-2.0
// Attention. The interpreter lock is released while it runs.
#include "gil.h"
#include "module.h"

using namespace kvstride;

namespace {

using Tensor = std::tuple<std::uintptr_t, std::string, std::array<std::int64_t, 3>, std::array<std::int64_t, 3>>;

TokenTensor to_tensor(const Tensor& tensor) {
  const auto& [address, dtype, shape, strides] = tensor;
  return {reinterpret_cast<const std::byte*>(address), to_dtype(dtype), shape, strides};
}

/// (address, int64, rows, columns, row stride, column stride)
using Table = std::tuple<std::uintptr_t, bool, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

BlockTable to_table(const Table& table) {
  const auto& [address, wide, rows, columns, row_stride, column_stride] = table;
  return {reinterpret_cast<const void*>(address), wide, rows, columns, row_stride, column_stride};
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def(
      "attention",
      [](const Cache& cache, std::int64_t layer, const Tensor& query, const Tensor& out, std::uintptr_t lse,
         const Table& table, const Ids& seq_lens, const Ids& query_start_loc, std::optional<float> scale, bool causal,
         const std::vector<std::uint8_t>& causal_of, std::optional<std::int64_t> window, float soft_cap,
         const std::vector<float>& sinks, const std::vector<float>& key_scale, const std::vector<float>& value_scale,
         const std::vector<float>& skip_lambda, const std::array<std::int64_t, 2>& tile,
         const std::optional<std::array<int, 2>>& nm, std::int64_t recent, std::int64_t sink_tokens, bool lse_log2,
         bool counts, bool maps, const std::vector<float>& thresholds) {
        AttentionOptions options;
        options.scale = scale;
        options.causal = causal;
        options.causal_of = causal_of;
        options.window = window;
        options.soft_cap = soft_cap;
        options.sinks = sinks;
        options.key_scale = key_scale;
        options.value_scale = value_scale;
        options.skip_lambda = skip_lambda;
        options.tile_rows = tile[0];
        options.tile_keys = tile[1];
        if (nm) options.keep = KeepNofM{(*nm)[0], (*nm)[1], recent, sink_tokens};
        options.lse_log2 = lse_log2;
        std::vector<TileDecision> decisions;
        std::vector<std::int64_t> skipped_at(thresholds.size());
        std::vector<TileCounters> each(counts ? seq_lens.shape(0) : 0);
        options.counters_of = each;
        if (maps) options.decisions = &decisions;
        options.thresholds = thresholds;
        options.skipped_at = skipped_at;
        const TokenTensor to = to_tensor(out);
        const AttentionOutput output{const_cast<std::byte*>(to.data), to.shape, to.strides,
                                     reinterpret_cast<float*>(lse)};
        {
          const GilReleased release;
          attention({to_tensor(query), to_table(table), to_span(seq_lens), to_span(query_start_loc)}, cache, layer,
                    output, options);
        }
        std::vector<std::array<std::int64_t, 5>> map;
        for (const TileDecision& d : decisions) {
          map.push_back({d.sequence, d.head, d.query_tile, d.key_tile, d.skipped ? 1 : 0});
        }
        std::vector<std::array<std::int64_t, 2>> of_each;
        for (const TileCounters& one : each) of_each.push_back({one.total, one.skipped});
        return std::make_tuple(of_each, skipped_at, map);
      },
      nb::arg("cache"), nb::arg("layer"), nb::arg("query"), nb::arg("out"), nb::arg("lse"), nb::arg("table"),
      nb::arg("seq_lens"), nb::arg("query_start_loc"), nb::arg("scale").none(), nb::arg("causal"), nb::arg("causal_of"),
      nb::arg("window").none(), nb::arg("soft_cap"), nb::arg("sinks"), nb::arg("key_scale"), nb::arg("value_scale"),
      nb::arg("skip_lambda"), nb::arg("tile"), nb::arg("nm").none(), nb::arg("recent"), nb::arg("sink_tokens"),
      nb::arg("lse_log2"), nb::arg("counts"), nb::arg("maps"), nb::arg("thresholds"),
      "([tiles, tiles skipped] of each sequence, skipped at each threshold, [sequence, head, query tile, key "
      "tile, skipped])");
  m.def(
      "merge_states",
      [](const Tensor& out1, std::uintptr_t lse1, const Tensor& out2, std::uintptr_t lse2, const Tensor& out,
         std::uintptr_t lse, bool lse_log2) {
        const TokenTensor to = to_tensor(out);
        const GilReleased release;
        merge_states({to_tensor(out1), reinterpret_cast<const float*>(lse1)},
                     {to_tensor(out2), reinterpret_cast<const float*>(lse2)},
                     {const_cast<std::byte*>(to.data), to.shape, to.strides, reinterpret_cast<float*>(lse)}, lse_log2);
      },
      nb::arg("out1"), nb::arg("lse1"), nb::arg("out2"), nb::arg("lse2"), nb::arg("out"), nb::arg("lse"),
      nb::arg("lse_log2"));
}
