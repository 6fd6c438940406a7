// SPDX-License-Identifier: Apache-2.0
// attention() against the oracle: layouts, dtypes, batches, options; what nobody may read is NaN.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <optional>

#include "attention_oracle.h"
#include "kvstride/kvstride.h"

namespace kvstride {
namespace {

using test::Attended;
using test::AttentionOracle;
using test::Memory;

std::byte nan_byte(DType dtype) {
  return dtype == DType::kF8E4M3Fnuz || dtype == DType::kF8E5M2Fnuz ? std::byte{0x80} : std::byte{0xFF};
}

/// A random batch over a random layout.
struct Case {
  std::mt19937 random;
  std::optional<Memory> memory;
  std::vector<std::byte> query;
  std::vector<std::int32_t> table;
  std::vector<std::int64_t> lengths;
  std::vector<std::int64_t> starts{0};
  AttentionBatch batch{};
  DType query_dtype = DType::kF32;
  std::int64_t heads = 0;
  std::int64_t layer = 0;

  explicit Case(std::uint32_t seed, std::int64_t max_rows = 20) : random(seed) {
    choose_layout();
    choose_batch(max_rows);
    fill();
  }

  template <class T>
  T any(std::initializer_list<T> list) {
    return list.begin()[random() % list.size()];
  }
  bool coin() { return random() % 2 == 0; }
  /// Multiples of a quarter from −3 to 3: every dtype holds them, and sums of their products are exact.
  float small_number() { return static_cast<float>(static_cast<int>(random() % 25) - 12) / 4; }

  void choose_layout() {
    Geometry g;
    g.num_layers = any({1, 2});
    g.block_size = any({1, 2, 3, 4, 8, 16, 17});
    g.num_kv_heads = any({1, 2, 3});
    g.head_size = any({1, 4, 8, 12, 16, 20, 33, 64});
    g.dtype = any({DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E5M2, DType::kF8E4M3Fnuz,
                   DType::kF8E5M2Fnuz});
    query_dtype = is_f8(g.dtype) ? any({DType::kF32, DType::kF16, DType::kBF16}) : coin() ? DType::kF32 : g.dtype;
    if (coin()) g.value_head_size = any({4, 8, 20});
    std::string order;
    if (g.block_size % 2 == 0 && g.num_kv_heads % 2 == 0 && g.head_size % 4 == 0 && !g.value_head_size && coin()) {
      order = test::random_order(random);
    } else {
      order = any<const char*>({"B {key: N H D, value: N H D}", "B {key: H N D, value: H N D}",
                                "{key: B N H D, value: B N H D}", "B H N {key: D, value: D}",
                                "key: B H D N | value: B H N D", "key: N B H D | value: B D N H",
                                "B N H {key: D, value: D}"});
    }
    g.num_blocks = 40;
    if (order.find('|') != std::string::npos && g.num_layers > 1) g.num_layers = 1;
    memory.emplace(Layout(order, g));
    layer = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(g.num_layers));
    heads = g.num_kv_heads * any({1, 2, 3, 4, 5, 7, 9});
  }

  void choose_batch(std::int64_t max_rows) {
    const Geometry& g = memory->layout.geometry();
    const std::int64_t page = g.block_size;
    const std::int64_t sequences = static_cast<std::int64_t>(random() % 5);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(g.num_blocks));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    const std::int64_t columns = 8;
    table.assign(static_cast<std::size_t>(sequences * columns), -1);
    std::size_t next = 0;
    for (std::int64_t s = 0; s < sequences; ++s) {
      const std::int64_t length = std::min<std::int64_t>(
          any<std::int64_t>({0, 1, page - 1, page, page + 1, 2 * page, 7, 13, 31, 61, 97}), 8 * page);
      const std::int64_t rows =
          coin() ? 1 : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(max_rows + 1));
      for (std::int64_t c = 0; c * page < length; ++c) table[static_cast<std::size_t>(s * columns + c)] = ids[next++];
      lengths.push_back(length);
      starts.push_back(starts.back() + rows);
    }
    const std::int64_t tokens = starts.back() + static_cast<std::int64_t>(random() % 2);
    const std::int64_t dim = g.head_size;
    query.resize(static_cast<std::size_t>(tokens * heads * dim * item_size(query_dtype)));
    batch.query = {query.data(), query_dtype, {tokens, heads, dim}, {heads * dim, dim, 1}};
    batch.blocks = {table.data(), false, sequences, columns, columns};
    batch.seq_lens = lengths;
    batch.query_start_loc = starts;
  }

  void fill() {
    for (auto& buffer : memory->buffers)
      std::fill(buffer.begin(), buffer.end(), nan_byte(memory->layout.geometry().dtype));
    const auto item = static_cast<std::size_t>(item_size(query_dtype));
    for (std::size_t at = 0; at < query.size(); at += item)
      test::encode_element(query_dtype, &query[at], small_number());
    const std::int64_t page = memory->layout.geometry().block_size;
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      for (std::int64_t key = 0; key < lengths[s]; ++key) {
        const std::int64_t block = table[s * 8 + static_cast<std::size_t>(key / page)];
        for (const char* name : {"key", "value"}) {
          const Plane& plane = memory->layout.plane(name);
          for (std::int64_t h = 0; h < plane.extent(Axis::kHead); ++h) {
            for (std::int64_t d = 0; d < plane.extent(Axis::kDim); ++d) {
              test::encode_element(plane.dtype, memory->at(plane, {layer, block, key % page, h, d}), small_number());
            }
          }
        }
      }
    }
  }

  std::int64_t value_dim() const { return memory->layout.plane("value").extent(Axis::kDim); }

  AttentionOptions options() {
    AttentionOptions o;
    if (coin()) o.scale = any({0.125F, 0.5F, 1.0F});
    o.causal = coin();
    if (random() % 4 == 0) o.window = any<std::int64_t>({1, 2, 5, 16, 50});
    if (random() % 4 == 0) o.soft_cap = 4.0F;
    return o;
  }
};

struct Result {
  std::vector<std::byte> out;
  std::vector<float> lse;
};

Result attend(Case& c, const AttentionOptions& options) {
  const std::int64_t tokens = c.batch.query.shape[0];
  const std::int64_t dim = c.value_dim();
  Result result;
  result.out.assign(static_cast<std::size_t>(tokens * c.heads * dim * item_size(c.query_dtype)), std::byte{0xFF});
  result.lse.assign(static_cast<std::size_t>(tokens * c.heads), std::numeric_limits<float>::quiet_NaN());
  attention(c.batch, c.memory->cache(), c.layer,
            {result.out.data(), {tokens, c.heads, dim}, {c.heads * dim, dim, 1}, result.lse.data()}, options);
  return result;
}

double tolerance(DType dtype) { return dtype == DType::kF32 ? 5e-6 : dtype == DType::kF16 ? 1e-3 : 1e-2; }

void expect_equal(Case& c, const Result& got, const Attended& expected, const std::string& what) {
  const double limit = tolerance(c.query_dtype);
  const auto item = static_cast<std::size_t>(item_size(c.query_dtype));
  const auto used = static_cast<std::size_t>(c.starts.back() * c.heads);
  const auto dim = static_cast<std::size_t>(c.value_dim());
  for (std::size_t i = 0; i < used * dim; ++i) {
    const double value = test::decode_element(c.query_dtype, &got.out[i * item]);
    ASSERT_NEAR(value, expected.out[i], limit * (1 + std::fabs(expected.out[i]))) << what << " element " << i;
  }
  for (std::size_t i = 0; i < used; ++i) {
    if (std::isinf(expected.lse[i])) {
      ASSERT_EQ(got.lse[i], expected.lse[i]) << what << " lse " << i;
    } else {
      ASSERT_NEAR(got.lse[i], expected.lse[i], 1e-5 * (1 + std::fabs(expected.lse[i]))) << what << " lse " << i;
    }
  }
  for (std::size_t i = used * dim * item; i < got.out.size(); ++i) ASSERT_EQ(got.out[i], std::byte{0xFF}) << what;
}

std::string describe(const Case& c, std::uint32_t seed) {
  std::string out = "seed " + std::to_string(seed) + " " + c.memory->layout.str() + " q " +
                    std::string(name_of(c.query_dtype)) + " heads " + std::to_string(c.heads);
  for (std::size_t s = 0; s < c.lengths.size(); ++s) {
    out += " [" + std::to_string(c.starts[s + 1] - c.starts[s]) + " of " + std::to_string(c.lengths[s]) + "]";
  }
  return out;
}

constexpr std::uint32_t kCases = 120;

TEST(Attention, DenseEqualsTheOracle) {
  for (std::uint32_t seed = 1; seed <= kCases; ++seed) {
    Case c(seed);
    AttentionOptions options = c.options();
    std::vector<float> sinks(static_cast<std::size_t>(c.heads));
    for (float& sink : sinks) sink = c.small_number();
    if (c.coin()) options.sinks = sinks;
    std::vector<std::uint8_t> causal(c.lengths.size());
    for (auto& one : causal) one = c.coin() ? 1 : 0;
    if (c.random() % 4 == 0) options.causal_of = causal;
    std::vector<float> scales(static_cast<std::size_t>(c.memory->layout.geometry().num_kv_heads), 2.0F);
    scales[0] = 0.5F;
    if (is_f8(c.memory->layout.geometry().dtype) && c.coin()) options.key_scale = options.value_scale = scales;
    const Result got = attend(c, options);
    expect_equal(c, got, AttentionOracle(c.batch, *c.memory, c.layer, options)(), describe(c, seed));
  }
}

TEST(Attention, SparseEqualsTheOracle) {
  for (std::uint32_t seed = 1; seed <= kCases; ++seed) {
    Case c(seed + 10000, 40);
    AttentionOptions options = c.options();
    TileCounters counters;
    std::vector<TileDecision> decisions;
    options.counters = &counters;
    options.decisions = &decisions;
    std::vector<float> lambdas(c.lengths.size());
    for (float& lambda : lambdas) lambda = c.any({0.0F, -1.0F, 0.013F, 0.11F, 0.43F, 0.89F});
    options.skip_lambda = lambdas;
    options.tile_rows = c.any<std::int64_t>({1, 2, 7, 16, 128});
    options.tile_keys = c.any<std::int64_t>({8, 16, 24, 128});
    if (c.coin()) {
      const int m = c.any({4, 8});
      options.keep = KeepNofM{1 + static_cast<int>(c.random() % static_cast<unsigned>(m - 1)), m,
                              c.any<std::int64_t>({0, 1, 5, 17}), c.any<std::int64_t>({0, 1, 6})};
    }
    const Result got = attend(c, options);
    const Attended expected = AttentionOracle(c.batch, *c.memory, c.layer, options)();
    const std::string what = describe(c, seed + 10000);
    expect_equal(c, got, expected, what);
    ASSERT_EQ(decisions, expected.decisions) << what;
    ASSERT_EQ(counters.total, static_cast<std::int64_t>(decisions.size()));
    ASSERT_EQ(counters.skipped, std::count_if(decisions.begin(), decisions.end(), [](auto& d) { return d.skipped; }));
  }
}

TEST(Attention, CalibrationCountsWhatWouldBeSkipped) {
  for (std::uint32_t seed = 1; seed <= kCases / 4; ++seed) {
    Case c(seed + 20000, 40);
    AttentionOptions options = c.options();
    const std::vector<float> thresholds{0.013F, 0.11F, 0.43F, 0.89F};
    std::vector<std::int64_t> counts(thresholds.size(), -1);
    options.tile_rows = c.any<std::int64_t>({4, 16});
    options.tile_keys = c.any<std::int64_t>({8, 16});
    TileCounters counters;
    options.counters = &counters;
    options.thresholds = thresholds;
    options.skipped_at = counts;
    const Result got = attend(c, options);
    const Attended expected = AttentionOracle(c.batch, *c.memory, c.layer, options)();
    expect_equal(c, got, expected, describe(c, seed + 20000));
    ASSERT_EQ(counts, expected.skipped_at) << describe(c, seed + 20000);
    ASSERT_EQ(counters.total, static_cast<std::int64_t>(expected.decisions.size()));
    for (std::size_t i = 0; i < thresholds.size(); ++i) {
      AttentionOptions skip = options;
      skip.thresholds = {};
      skip.skipped_at = {};
      skip.skip_lambda = {&thresholds[i], 1};
      attend(c, skip);
      ASSERT_EQ(counters.skipped, counts[i]) << describe(c, seed + 20000);
    }
  }
}

/// A NaN that one row must see does not reach a row that does not see it.
TEST(Attention, MaskedNaNStaysAway) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t rows : {2, 40}) {
      for (const bool in_value : {false, true}) {
        Memory memory(Layout("B KV N H D",
                             {.num_blocks = 3, .block_size = 32, .num_kv_heads = 1, .head_size = 8, .dtype = dtype}));
        for (auto& buffer : memory.buffers) std::fill(buffer.begin(), buffer.end(), std::byte{0});
        const float nan = std::numeric_limits<float>::quiet_NaN();
        const std::int64_t bad = 63;
        test::encode_element(dtype, memory.at(memory.layout.plane(in_value ? "value" : "key"), {0, 1, bad % 32, 0, 3}),
                             nan);
        const auto item = static_cast<std::size_t>(item_size(dtype));
        std::vector<std::byte> query(static_cast<std::size_t>(rows * 8) * item);
        for (std::size_t i = 0; i < query.size(); i += item) test::encode_element(dtype, &query[i], 1.0F);
        std::vector<std::byte> out(query.size(), std::byte{7});
        const std::vector<std::int64_t> table{0, 1};
        const std::vector<std::int64_t> lengths{64};
        const std::vector<std::int64_t> starts{0, rows};
        attention({{query.data(), dtype, {rows, 1, 8}, {8, 8, 1}}, {table.data(), true, 1, 2, 2}, lengths, starts},
                  memory.cache(), 0, {out.data(), {rows, 1, 8}, {8, 8, 1}});
        const auto at = [&](std::int64_t r, std::int64_t d) {
          return test::decode_element(dtype, &out[static_cast<std::size_t>(r * 8 + d) * item]);
        };
        for (std::int64_t r = 0; r + 1 < rows; ++r) {
          for (std::int64_t d = 0; d < 8; ++d) ASSERT_EQ(at(r, d), 0.0) << name_of(dtype) << " " << r << " " << d;
        }
        ASSERT_TRUE(std::isnan(at(rows - 1, 3))) << name_of(dtype);
      }
    }
  }
}

/// One sequence of one head; the last `rows` of `keys` tokens ask. Elements are functions of (token, dim).
struct Plain {
  using Fill = std::function<double(std::int64_t, std::int64_t)>;
  DType dtype;
  std::int64_t rows;
  std::int64_t keys;
  std::int64_t dim;
  std::int64_t step = 1;  ///< between the query's elements
  std::vector<double> out;
  std::vector<float> lse;

  void attend(const Fill& query, const Fill& key, const Fill& value, const AttentionOptions& options) {
    Memory memory(Layout("B KV N H D",
                         {.num_blocks = keys, .block_size = 1, .num_kv_heads = 1, .head_size = dim, .dtype = dtype}));
    const auto item = static_cast<std::size_t>(item_size(dtype));
    std::vector<std::byte> q(static_cast<std::size_t>(rows * dim * step) * item, nan_byte(dtype));
    std::vector<std::byte> result(static_cast<std::size_t>(rows * dim) * item);
    std::vector<std::int32_t> table(static_cast<std::size_t>(keys));
    std::iota(table.begin(), table.end(), 0);
    for (std::int64_t t = 0; t < keys; ++t) {
      for (std::int64_t d = 0; d < dim; ++d) {
        test::encode_element(dtype, memory.at(memory.layout.plane("key"), {0, t, 0, 0, d}),
                             static_cast<float>(key(t, d)));
        test::encode_element(dtype, memory.at(memory.layout.plane("value"), {0, t, 0, 0, d}),
                             static_cast<float>(value(t, d)));
        if (t < rows) {
          test::encode_element(dtype, &q[static_cast<std::size_t>((t * dim + d) * step) * item],
                               static_cast<float>(query(t, d)));
        }
      }
    }
    const std::vector<std::int64_t> lengths{keys};
    const std::vector<std::int64_t> starts{0, rows};
    lse.assign(static_cast<std::size_t>(rows), 0.0F);
    attention({{q.data(), dtype, {rows, 1, dim}, {dim * step, dim * step, step}},
               {table.data(), false, 1, keys, keys},
               lengths,
               starts},
              memory.cache(), 0, {result.data(), {rows, 1, dim}, {dim, dim, 1}, lse.data()}, options);
    out.clear();
    for (std::size_t i = 0; i < result.size(); i += item) out.push_back(test::decode_element(dtype, &result[i]));
  }
  double at(std::int64_t row, std::int64_t d) const { return out[static_cast<std::size_t>(row * dim + d)]; }
};

/// Scores near the end of f32 are scores: equal ones weigh the same, whatever rounding their product with the scale
/// has.
TEST(Attention, LargeScoresAreScores) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t rows : {1, 4, 40}) {
      for (const float scale : {1.0F, 0.1118034F, -0.1118034F, 3.0F}) {
        for (const double score : {1e4, 1.1e9, -1.1e9, 1e15, -1e29, 7e37, -7e37}) {
          Plain plain{dtype, rows, 300, 80, 1, {}, {}};
          AttentionOptions options;
          options.scale = scale;
          const double key = score / scale;  // times a query of ones and zeros
          if (std::fabs(key) > 3e38) continue;
          plain.attend([](auto, std::int64_t d) { return d == 3 ? 1.0 : 0.0; },
                       [&](auto, std::int64_t d) { return d == 3 ? key : 0.5; },
                       [](auto, std::int64_t d) { return static_cast<double>(d % 7) - 3; }, options);
          for (std::int64_t r = 0; r < rows; ++r) {
            ASSERT_NEAR(plain.lse[static_cast<std::size_t>(r)], score, std::fabs(score) * 8e-3 + 6)
                << name_of(dtype) << " " << rows << " rows, scale " << scale;
            for (std::int64_t d = 0; d < 80; ++d) {
              ASSERT_NEAR(plain.at(r, d), static_cast<double>(d % 7) - 3, 1e-2) << score << " " << scale << " " << rows;
            }
          }
        }
      }
    }
  }
}

/// An infinite value reaches its own dim of the rows that see it, and nothing else.
TEST(Attention, AnInfiniteValueLeavesTheRestAlone) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::int64_t rows = 40;
    const auto number = [](std::int64_t t, std::int64_t d) {
      return static_cast<double>((t * 7 + d * 3) % 13 - 6) / 4;
    };
    const Plain::Fill finite = [&](std::int64_t t, std::int64_t d) { return number(t + 5, d + 1); };
    const Plain::Fill infinite = [&](std::int64_t t, std::int64_t d) {
      return t == 270 && d == 2 ? std::numeric_limits<double>::infinity() : finite(t, d);
    };
    Plain expected{dtype, rows, 300, 20, 1, {}, {}};
    Plain got = expected;
    expected.attend(number, number, finite, {});
    got.attend(number, number, infinite, {});
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t d = 0; d < 20; ++d) {
        if (d == 2 && 260 + r >= 270) {
          ASSERT_TRUE(std::isinf(got.at(r, d))) << r;
        } else {
          ASSERT_NEAR(got.at(r, d), expected.at(r, d), tolerance(dtype)) << name_of(dtype) << " " << r << " " << d;
        }
      }
    }
  }
}

TEST(Attention, AQueryMayHaveItsElementsApart) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t rows : {1, 40}) {
      const auto number = [](std::int64_t t, std::int64_t d) {
        return static_cast<double>((t * 5 + d * 3) % 13 - 6) / 4;
      };
      Plain together{dtype, rows, 90, 33, 1, {}, {}};
      Plain apart{dtype, rows, 90, 33, 3, {}, {}};
      together.attend(number, number, number, {});
      apart.attend(number, number, number, {});
      EXPECT_EQ(apart.out, together.out);
      EXPECT_EQ(apart.lse, together.lse);
    }
  }
}

/// Prompts of several tiles, with heads of sizes that do not fill a panel.
TEST(Attention, LongPromptsEqualTheOracle) {
  std::mt19937 random(8);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    for (const std::int64_t dim : {80, 45}) {
      Geometry g{.num_blocks = 40, .block_size = 16, .num_kv_heads = 1, .head_size = dim, .dtype = dtype};
      g.value_head_size = dim - 5;
      Memory memory{Layout("B {key: N H D, value: N H D}", g)};
      for (auto& buffer : memory.buffers) std::fill(buffer.begin(), buffer.end(), nan_byte(dtype));
      const std::vector<std::int64_t> lengths{330};
      const std::vector<std::int64_t> starts{0, 70};
      std::vector<std::int32_t> table(40);
      std::iota(table.begin(), table.end(), 0);
      std::shuffle(table.begin(), table.end(), random);
      const auto number = [&] { return static_cast<float>(static_cast<int>(random() % 25) - 12) / 4; };
      for (std::int64_t key = 0; key < lengths[0]; ++key) {
        for (const char* name : {"key", "value"}) {
          const Plane& plane = memory.layout.plane(name);
          for (std::int64_t d = 0; d < plane.extent(Axis::kDim); ++d) {
            const std::int64_t block = table[static_cast<std::size_t>(key / 16)];
            test::encode_element(dtype, memory.at(plane, {0, block, key % 16, 0, d}), number());
          }
        }
      }
      const DType query_dtype = dtype == DType::kF32 ? dtype : DType::kBF16;
      const auto item = static_cast<std::size_t>(item_size(query_dtype));
      const std::int64_t heads = 2;
      std::vector<std::byte> query(static_cast<std::size_t>(70 * heads * dim) * item);
      for (std::size_t i = 0; i < query.size(); i += item) test::encode_element(query_dtype, &query[i], number());
      const AttentionBatch batch{{query.data(), query_dtype, {70, heads, dim}, {heads * dim, dim, 1}},
                                 {table.data(), false, 1, 40, 40},
                                 lengths,
                                 starts};
      for (const bool windowed : {false, true}) {
        AttentionOptions options;
        if (windowed) options.window = 90;
        std::vector<std::byte> out(static_cast<std::size_t>(70 * heads * (dim - 5)) * item);
        std::vector<float> lse(static_cast<std::size_t>(70 * heads));
        attention(batch, memory.cache(), 0,
                  {out.data(), {70, heads, dim - 5}, {heads * (dim - 5), dim - 5, 1}, lse.data()}, options);
        const Attended expected = AttentionOracle(batch, memory, 0, options)();
        for (std::size_t i = 0; i < expected.out.size(); ++i) {
          ASSERT_NEAR(test::decode_element(query_dtype, &out[i * item]), expected.out[i],
                      tolerance(query_dtype) * (1 + std::fabs(expected.out[i])))
              << name_of(dtype) << " of " << dim << ", " << windowed << ": " << i;
        }
        for (std::size_t i = 0; i < lse.size(); ++i) {
          ASSERT_NEAR(lse[i], expected.lse[i], 1e-5 * (1 + std::fabs(expected.lse[i]))) << i;
        }
      }
    }
  }
}

/// Long sequences of one query are split; neither threads nor neighbours change a bit.
TEST(Attention, ThreadsAndNeighboursChangeNothing) {
  for (const char* order : {"B KV N H D", "B KV H N D"}) {
    Geometry g{.num_blocks = 512, .block_size = 16, .num_kv_heads = 2, .head_size = 32, .dtype = DType::kF16};
    Memory memory{Layout(order, g)};
    std::mt19937 random(5);
    for (const char* name : {"key", "value"}) {
      const Plane& plane = memory.layout.plane(name);
      test::for_each_index(plane, [&](const Index& i) {
        test::encode_element(plane.dtype, memory.at(plane, i),
                             static_cast<float>(static_cast<int>(random() % 25) - 12) / 4);
      });
    }
    std::vector<std::int32_t> table(2 * 400);
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(random() % 512);
    std::vector<std::byte> query(2 * 8 * 32 * 2);
    for (std::size_t i = 0; i < query.size(); i += 2)
      test::encode_element(DType::kF16, &query[i], static_cast<float>(static_cast<int>(random() % 9) - 4) / 4);
    const std::vector<std::int64_t> lengths{6333, 5000};
    const std::vector<std::int64_t> starts{0, 1, 2};
    const auto run = [&](std::size_t sequences, std::vector<float>* lse) {
      std::vector<std::byte> out(sequences * 8 * 32 * 2);
      lse->resize(sequences * 8);
      const auto n = static_cast<std::int64_t>(sequences);
      attention({{query.data(), DType::kF16, {n, 8, 32}, {256, 32, 1}},
                 {table.data(), false, n, 400, 400},
                 std::span(lengths).first(sequences),
                 std::span(starts).first(sequences + 1)},
                memory.cache(), 0, {out.data(), {n, 8, 32}, {256, 32, 1}, lse->data()});
      return out;
    };
    std::vector<float> lse;
    std::vector<float> other;
    set_num_threads(1);
    const auto alone = run(2, &lse);
    set_num_threads(5);
    EXPECT_EQ(run(2, &other), alone);
    EXPECT_EQ(other, lse);
    set_num_threads(0);
    const auto first = run(1, &other);
    EXPECT_EQ(std::vector<std::byte>(alone.begin(), alone.begin() + static_cast<std::ptrdiff_t>(first.size())), first);
    const AttentionBatch batch{
        {query.data(), DType::kF16, {2, 8, 32}, {256, 32, 1}}, {table.data(), false, 2, 400, 400}, lengths, starts};
    const Attended expected = AttentionOracle(batch, memory, 0, {})();
    for (std::size_t i = 0; i < expected.out.size(); ++i) {
      ASSERT_NEAR(test::decode_element(DType::kF16, &alone[2 * i]), expected.out[i], 1e-3) << i;
    }
    for (std::size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(lse[i], expected.lse[i], 1e-4) << i;
  }
}

}  // namespace
}  // namespace kvstride
