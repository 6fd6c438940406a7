// SPDX-License-Identifier: Apache-2.0
// Plans: how many copies of which sizes, before anything moves.
#include <gtest/gtest.h>

#include <set>

#include "oracle.h"
#include "plan/program.h"

namespace kvstride {
namespace {

using Sizes = std::map<std::int64_t, std::int64_t>;

Geometry geometry(std::int64_t layers, std::int64_t blocks, std::int64_t heads = 8, std::int64_t dim = 128) {
  Geometry out;
  out.num_layers = layers;
  out.num_blocks = blocks;
  out.block_size = 16;
  out.num_kv_heads = heads;
  out.head_size = dim;
  return out;
}

Plan same(const char* order, const Geometry& g, const std::vector<Pair>& pairs) {
  const Layout layout(order, g);
  Plan plan(layout, layout);
  plan.bind(pairs);
  return plan;
}

TEST(Plan, C60CopiesAfterMerging) {
  const Geometry g = geometry(32, 16);
  const std::vector<Pair> pairs{{4, 4}, {5, 5}, {6, 6}, {9, 9}};
  const std::int64_t bytes = 4 * 32 * 2 * 16 * 8 * 128 * 2;
  for (const auto& [order, copies] : {std::pair{"KV B N H D", 128}, {"B KV N H D", 64}, {"B L KV N H D", 2}}) {
    const Plan plan = same(order, g, pairs);
    EXPECT_EQ(plan.num_copies(), copies) << order;
    EXPECT_EQ(plan.num_bytes(), bytes) << order;
  }
}

TEST(Plan, C61NeighboursMergeWhereBothSidesTouch) {
  const Geometry g = geometry(1, 193);
  std::vector<Pair> all;
  for (std::int64_t i = 0; i < 193; ++i) all.push_back({i, i});
  EXPECT_EQ(same("KV B N H D", g, all).num_copies(), 2);
  EXPECT_EQ(same("B KV N H D", g, all).num_copies(), 1);
  EXPECT_EQ(same("B KV N H D", g, {{0, 0}, {1, 2}}).num_copies(), 2);
  EXPECT_EQ(same("B KV N H D", g, {{3, 0}, {4, 1}}).num_copies(), 1);
}

TEST(Plan, C62PiecesOfATensorParallelSlice) {
  const Geometry g = geometry(1, 4);
  const Layout whole("B KV H N D", g);
  const Layout half("B KV H N D", geometry(1, 4, 4));
  Plan plan(whole, half, {.heads = RangePair{4, 0, 4}});
  plan.bind(std::vector<Pair>{{0, 0}});
  EXPECT_EQ(plan.sizes(), (Sizes{{16384, 2}}));
}

TEST(Plan, RunsAreAsLongAsBothLayoutsAllow) {
  const Geometry g = geometry(2, 8);
  const auto sizes = [&](const char* from, const char* to) {
    Plan plan(Layout(from, g), Layout(to, g));
    plan.bind(std::vector<Pair>{{1, 6}});
    return plan.sizes();
  };
  EXPECT_EQ(sizes("B KV N H D", "KV B N H D"), (Sizes{{32768, 4}}));
  EXPECT_EQ(sizes("B KV N H D", "B KV H N D"), (Sizes{{256, 2 * 2 * 16 * 8}}));
  EXPECT_EQ(sizes("B N H KV D", "B H N KV D"), (Sizes{{512, 2 * 16 * 8}}));
  EXPECT_EQ(sizes("B H L KV N D", "B L H KV N D"), (Sizes{{8192, 2 * 8}}));
  EXPECT_EQ(sizes("B KV N H D", "{key: B H D/x N D%x, value: B H D N}"),
            (Sizes{{2, 2 * 16 * 8 * 128}, {16, 2 * 16 * 8 * 16}}));
}

TEST(Plan, RecordsAreOneRun) {
  const char* record = "B N {latent: D[512] f8_e4m3, latent_scale: D[4] f32, rope: D[64] bf16}";
  EXPECT_EQ(same(record, geometry(3, 4), {{0, 1}}).sizes(), (Sizes{{656 * 16, 3}}));
}

TEST(Plan, LayoutsWithoutMemoryDoNotRun) {
  Plan plan = same("B KV N H D", geometry(1, 2), {{0, 1}});
  EXPECT_NE(test::thrown([&] { plan.run(); }).what.find("no memory"), std::string::npos);
}

TEST(Refine, CoversEveryIndexOnce) {
  const auto mode = [](std::int64_t modulus, std::int64_t divisor, std::int64_t stride) {
    return Mode{Axis::kToken, modulus, divisor, modulus / divisor, stride};
  };
  // Splits by 4 and by 6 that do not nest, over 24 tokens.
  const std::vector<Mode> a{mode(24, 4, 1000), mode(4, 1, 2)};
  const std::vector<Mode> b{mode(24, 6, 50), mode(6, 1, 300)};
  const auto offset = [](const std::vector<Mode>& modes, std::int64_t i) {
    std::int64_t out = 0;
    for (const Mode& m : modes) out += i % m.modulus / m.divisor * m.stride;
    return out;
  };
  for (std::int64_t first = 0; first < 24; ++first) {
    for (std::int64_t count = 1; first + count <= 24; ++count) {
      std::multiset<std::pair<std::int64_t, std::int64_t>> want;
      std::multiset<std::pair<std::int64_t, std::int64_t>> got;
      for (std::int64_t i = 0; i < count; ++i) want.insert({offset(a, first + i), offset(b, i)});
      for (const plan::Piece& piece : plan::refine(a, first, b, 0, count)) {
        std::vector<std::pair<std::int64_t, std::int64_t>> all{{piece.src, piece.dst}};
        for (const plan::Loop& loop : piece.loops) {
          std::vector<std::pair<std::int64_t, std::int64_t>> next;
          for (const auto& [s, d] : all) {
            for (std::int64_t i = 0; i < loop.extent; ++i) next.emplace_back(s + i * loop.src, d + i * loop.dst);
          }
          all = std::move(next);
        }
        got.insert(all.begin(), all.end());
      }
      ASSERT_EQ(got, want) << first << " " << count;
    }
  }
}

}  // namespace
}  // namespace kvstride
