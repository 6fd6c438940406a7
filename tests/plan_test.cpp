// SPDX-License-Identifier: Apache-2.0
// Plans: how many copies of which sizes, before anything moves.
#include <gtest/gtest.h>
#include <malloc.h>

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

TEST(Plan, RecipesAreKeptByCachesAndRanges) {
  test::Memory a(Layout("B KV N H D", test::small_geometry()), 1);
  test::Memory b(Layout("B KV H N D", test::small_geometry()));
  const Cache src = a.cache();
  const Cache dst = b.cache();
  const auto recipe = plan::recipe_for("verb", src, dst, {});
  EXPECT_EQ(plan::recipe_for("verb", src, dst, {}), recipe);
  EXPECT_EQ(plan::recipe_for("verb", Cache(src), dst, {}), recipe) << "a copy is the same cache";
  EXPECT_NE(plan::recipe_for("other", src, dst, {}), recipe);
  EXPECT_NE(plan::recipe_for("verb", dst, src, {}), recipe);
  EXPECT_NE(plan::recipe_for("verb", a.cache(), dst, {}), recipe) << "another cache over the same memory";
  plan::BuildOptions one_layer;
  one_layer.plan.layers = Range{1, 1};
  EXPECT_NE(plan::recipe_for("verb", src, dst, one_layer), recipe);
  EXPECT_EQ(plan::recipe_for("verb", src, dst, one_layer)->options(), one_layer);
  // Only the latest are kept; a recipe in use stays whole.
  for (int i = 0; i < 100; ++i) plan::recipe_for("verb", a.cache(), b.cache(), {});
  EXPECT_NE(plan::recipe_for("verb", src, dst, {}), recipe);
  plan::Program program(recipe);
  EXPECT_EQ(program.bind(std::vector<Pair>{{0, 1}}), 1);
  EXPECT_GT(program.num_copies(), 0);
}

TEST(Plan, ACheckThatThrowsKeepsNothing) {
  test::Memory a(Layout("B KV N H D", test::small_geometry()), 1);
  test::Memory b(Layout("B KV H N D", test::small_geometry()));
  const Cache src = a.cache();
  const Cache dst = b.cache();
  const std::vector<Pair> pairs{{0, 0}};
  for (int i = 0; i < 2; ++i) EXPECT_THROW(swap_blocks(src, dst, pairs), Error);
}

/// Two caches whose blocks alternate in one buffer never meet; a block of one that is also one of the other does.
TEST(Plan, MemoryIsComparedExactlyWhateverItsSize) {
  constexpr std::int64_t kBlocks = 300'000;  // more copies than a window of the comparison holds
  Geometry g = geometry(1, kBlocks, 1, 4);
  g.block_size = 1;
  const Layout layout("B[300000]@32 KV D", g);
  std::vector<std::byte> buffer(static_cast<std::size_t>(layout.num_bytes()) + 32);
  const Cache even({buffer.data()}, layout);
  const Cache odd({buffer.data() + 16}, layout);
  std::vector<Pair> pairs;
  for (std::int64_t i = 0; i < kBlocks; ++i) pairs.push_back({i, (i + 1) % kBlocks});
  EXPECT_EQ(convert_blocks(even, odd, pairs), kBlocks);
  // Block i of this one is block i + 1 of `even`.
  g.num_blocks = kBlocks - 1;
  const Cache shifted({buffer.data() + 32}, Layout("B[299999]@32 KV D", g));
  pairs.clear();
  for (std::int64_t i = 0; i < kBlocks / 2; ++i) pairs.push_back({2 * i, 2 * i});  // reads even blocks, writes odd ones
  EXPECT_EQ(convert_blocks(even, shifted, pairs), kBlocks / 2);
  pairs.back().src = pairs.front().dst + 1;  // the last one reads what the first one writes
  EXPECT_THROW(convert_blocks(even, shifted, pairs), Error);
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

TEST(Plan, BindingAgainTakesNoMoreMemory) {
  const Geometry g = geometry(1, 1000);
  const Layout layout("B KV N H D", g);
  Plan plan(layout, layout);
  std::vector<Pair> pairs;
  for (std::int64_t i = 0; i < 1000; ++i) pairs.push_back({i, i});
  plan.bind(pairs);
  const auto before = mallinfo2().uordblks;
  for (int i = 0; i < 1000; ++i) plan.bind(pairs);
  EXPECT_LT(mallinfo2().uordblks, before + (std::size_t{1} << 20));
}

TEST(Plan, AFailedBindLeavesNothingBound) {
  const Layout layout("B KV N H D", geometry(1, 4));
  Plan plan(layout, layout);
  const std::vector<std::int64_t> ids{0, 1};
  const auto bound_then = [&](const std::function<void()>& call) {
    plan.bind(std::vector<Pair>{{0, 1}});
    EXPECT_THROW(call(), Error);
    return plan.num_bytes();
  };
  EXPECT_EQ(bound_then([&] { plan.bind(std::vector<Pair>{{0, 9}}); }), 0);
  EXPECT_EQ(bound_then([&] { plan.bind_tokens(ids, ids, {0, 0, 33}); }), 0);
  EXPECT_EQ(bound_then([&] { plan.bind_slots(ids, std::vector<std::int64_t>{0, 64}); }), 0);
  EXPECT_EQ(bound_then([&] { plan.bind_slots({}, ids); }), 64 * 1024) << "sizes are compared before anything is bound";
}

}  // namespace
}  // namespace kvstride
