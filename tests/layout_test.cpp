// SPDX-License-Identifier: Apache-2.0
// Layouts: addresses against formulas of real engines, equality, canonical text, overlap.
#include <gtest/gtest.h>

#include <set>

#include "oracle.h"

namespace kvstride {
namespace {

using test::for_each_index;
using test::random_order;
using test::small_geometry;
using test::thrown;

Geometry geometry(std::int64_t blocks, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                  std::int64_t layers = 1) {
  Geometry out;
  out.num_layers = layers;
  out.num_blocks = blocks;
  out.block_size = tokens;
  out.num_kv_heads = heads;
  out.head_size = dim;
  return out;
}

/// Element addresses of vLLM's kernels, by hand: s is 0 for K and 1 for V.
using Formula = std::int64_t (*)(std::int64_t s, const Index& i);
constexpr std::int64_t NB = 3, BS = 32, H = 5, D = 32, L = 4, X = 8;

struct Known {
  const char* order;
  Formula element;
};

const Known kKnown[] = {
    {"KV B N H D",
     [](std::int64_t s, const Index& i) { return (((s * NB + i[1]) * BS + i[2]) * H + i[3]) * D + i[4]; }},
    {"B KV H N D", [](std::int64_t s, const Index& i) { return (((2 * i[1] + s) * H + i[3]) * BS + i[2]) * D + i[4]; }},
    {"B N H KV D",
     [](std::int64_t s, const Index& i) { return ((i[1] * BS + i[2]) * H + i[3]) * 2 * D + s * D + i[4]; }},
    {"{key: B H D/x N D%x, value: B H D N}",
     [](std::int64_t s, const Index& i) {
       const std::int64_t block = (s * NB + i[1]) * H * D * BS + i[3] * D * BS;
       return block + (s == 0 ? i[4] / X * BS * X + i[2] * X + i[4] % X : i[4] * BS + i[2]);
     }},
    {"B H {key: D N, value: N D}",
     [](std::int64_t s, const Index& i) {
       return (i[1] * H + i[3]) * 2 * BS * D + s * BS * D + (s == 0 ? i[4] * BS + i[2] : i[2] * D + i[4]);
     }},
    {"B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}",
     [](std::int64_t s, const Index& i) {
       const std::int64_t inner = s == 0 ? i[2] / 16 * 16 * D + i[4] / 2 * 32 + i[2] % 16 * 2 + i[4] % 2
                                         : i[4] / 16 * 16 * BS + i[2] / 2 * 32 + i[4] % 16 * 2 + i[2] % 2;
       return (i[1] * H + i[3]) * 2 * BS * D + s * BS * D + inner;
     }},
    {"B H L KV N D",
     [](std::int64_t s, const Index& i) { return ((((i[1] * H + i[3]) * L + i[0]) * 2 + s) * BS + i[2]) * D + i[4]; }},
};

TEST(Layout, AddressesAreThoseOfRealKernels) {
  for (const Known& known : kKnown) {
    const Layout layout(known.order, geometry(NB, BS, H, D, Order::parse(known.order).has(Axis::kLayer) ? L : 1));
    for (const Plane& plane : layout.planes()) {
      for_each_index(plane, [&](const Index& i) {
        ASSERT_EQ(layout.offset(plane, i).byte, 2 * known.element(plane.name == "value" ? 1 : 0, i)) << known.order;
      });
    }
  }
}

TEST(Layout, RandomOrdersAreOneToOneAndReprint) {
  std::mt19937 random(1);
  for (int round = 0; round < 400; ++round) {
    const std::string text = random_order(random);
    const Layout layout(text, small_geometry());
    std::set<std::pair<std::int64_t, std::int64_t>> seen;
    for (const Plane& plane : layout.planes()) {
      for_each_index(plane, [&](const Index& i) {
        const Location at = layout.offset(plane, i);
        EXPECT_TRUE(seen.insert({at.tensor, at.byte}).second) << text;
        EXPECT_LE(at.byte + 2, layout.num_bytes());
      });
    }
    const Layout again(layout.str(), small_geometry());
    EXPECT_EQ(again, layout) << text << " -> " << layout.str();
    EXPECT_EQ(again.str(), layout.str()) << text;
  }
}

TEST(Layout, EqualityIsEqualityOfAddresses) {
  const Geometry g = geometry(7, 16, 3, 32);
  EXPECT_EQ(Layout("B KV N H D", g), Layout("B {key: N H D, value: N H D}", g));
  EXPECT_EQ(Layout("B KV N/4 N%4 H D", g), Layout("B KV N H D", g));
  EXPECT_FALSE(Layout("B KV N H D", g) == Layout("B KV H N D", g));
  EXPECT_FALSE(Layout("B KV N H D", g) == Layout("B KV N H D f16", g));
  const Geometry one = geometry(7, 16, 1, 32);
  EXPECT_EQ(Layout("B KV N H D", one), Layout("B KV H N D", one));
  EXPECT_EQ(Layout("B KV H N D", one).str(), "B[7] KV N[16] H[1] D[32]");
}

TEST(Layout, CanonicalText) {
  Geometry g = geometry(7, 16, 3, 32, 5);
  EXPECT_EQ(Layout("B L H N KV D", g).str(), "B[7] L[5] H[3] N[16] KV D[32]");
  EXPECT_EQ(Layout("B@40000 KV N H D", g).str(), "B[7]@40000 KV N[16] H[3] D[32]");
  EXPECT_EQ(Layout("B KV@4000 N H D", g).str(), "B[7] KV@4000 N[16] H[3] D[32]");
  EXPECT_EQ(Layout("B KV@3072 N H D", g).str(), "B[7] KV N[16] H[3] D[32]");
  EXPECT_EQ(Layout("B KV N/4 N%4 H D/8 D%8", g).str(), "B[7] KV N[16] H[3] D[32]");
  EXPECT_EQ(Layout("B H {key: D/x N D%x, value: D N}", g).str(),
            "B[7] H[3] {key: D/8[32] N[16] D%8, value: D[32] N[16]}");
}

TEST(Layout, SizesAndErrors) {
  const Geometry g = geometry(7, 16, 3, 32);
  EXPECT_EQ(Layout("B N {latent: D[512] f8_e4m3, latent_scale: D[4] f32, rope: D[64] bf16}", g).num_bytes(),
            7 * 16 * 656);
  EXPECT_EQ(Layout("B N@584 {latent: D[448] f8_e4m3, rope: D[64] bf16, latent_scale: D[7] f8_e8m0}", g).num_bytes(),
            7 * 16 * 584);
  const auto says = [&](const char* text, const char* part) {
    const auto error = thrown([&] { Layout(text, g); });
    EXPECT_NE(error.what.find(part), std::string::npos) << text << ": " << error.what;
  };
  says("B N H D", "a plane without a name");
  says("B KV N%3 H D", "splits of N reach 3, not 16");
  says("B KV N/4 N%2 H D", "splits of N do not multiply");
  says("B KV N N H D", "splits of N do not multiply");
  says("B {key: D, key: D}", "'key' is given twice");
  says("B {key: {data: D}, key: D}", "'key' is given twice");
  says("B N/k H N%k KV D", "symbol 'k' has no value");
  says("B@2 KV N H D", "overlap");
  says("B@0 KV N H D", "overlap");
  says("B {key: N H D, value@10: N H D}", "overlap");
  says("B KV N/5 H N%5 D", "not divisible by 5");
  says("key: L B D | value: B D", "L is in one tensor");
  Geometry huge = g;
  huge.num_blocks = std::int64_t{1} << 48;
  huge.block_size = std::int64_t{1} << 40;
  EXPECT_NE(thrown([&] { Layout("B KV N H D", huge); }).what.find("2^62"), std::string::npos);
  huge.num_blocks = 0;
  EXPECT_NE(thrown([&] { Layout("B KV N H D", huge); }).what.find("num_blocks is 0"), std::string::npos);
}

TEST(Layout, InterleavedStridesAreNoOverlap) {
  Geometry g = geometry(4, 1, 1, 8);
  // Key and value of 16 bytes alternate.
  const Layout layout("{key: B@32 D, value@16: B@32 D}", g);
  EXPECT_EQ(layout, Layout("B KV D", g));
  EXPECT_EQ(layout.num_bytes(), 16 + 4 * 32);
  // Steps of 3 and of 2 elements that never meet, though neither spans the other.
  g.num_blocks = 2;
  g.block_size = 2;
  EXPECT_NO_THROW(Layout("key: B@6 N@4 D[1]", g));
  EXPECT_THROW(Layout("key: B@8 N@4 D[3]", g), Error);
  // Ids go to the geometry's end, so L and B have its lengths.
  EXPECT_THROW(Layout("B[1] KV N H D", g), Error);
}

TEST(Layout, LayersAreTensorsWhereTheOrderHasNoL) {
  const Layout layout("key: B N H D | value: B N H D", geometry(3, 4, 2, 8, 5));
  EXPECT_EQ(layout.num_tensors(), 10);
  EXPECT_EQ(layout.offset("value", {3, 0, 0, 0, 1}), (Location{7, 2}));
  EXPECT_NE(thrown([&] { layout.offset("value", {5, 0, 0, 0, 0}); }).what.find("layer 5"), std::string::npos);
}

}  // namespace
}  // namespace kvstride
