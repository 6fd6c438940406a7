// SPDX-License-Identifier: Apache-2.0
// The verbs against the naive oracle over random layouts, and what they refuse.
#include <gtest/gtest.h>

#include "cpu/hash.h"
#include "oracle.h"

namespace kvstride {
namespace {

using test::Memory;
using test::random_order;
using test::random_pairs;
using test::small_geometry;
using test::thrown;

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF8E4M3, DType::kI8, DType::kI32, DType::kF16};

TEST(Blocks, ConvertBetweenRandomLayouts) {
  std::mt19937 random(11);
  for (std::uint32_t round = 1; round <= 1500; ++round) {
    const Geometry g = small_geometry(kDTypes[round % 6]);
    Memory src(Layout(random_order(random), g), round);
    Memory dst(Layout(random_order(random), g));
    Memory want = dst;
    const std::vector<Pair> pairs = random_pairs(random, 5);
    test::convert(src, want, pairs);
    const auto before = src.buffers;
    convert_blocks(src.cache(), dst.cache(), pairs);
    ASSERT_EQ(dst.buffers, want.buffers) << src.layout.order().text() << " -> " << dst.layout.order().text();
    ASSERT_EQ(src.buffers, before);
  }
}

TEST(Blocks, CopyReadsAllSourcesFirst) {
  std::mt19937 random(12);
  for (std::uint32_t round = 1; round <= 1000; ++round) {
    Memory memory(Layout(random_order(random), small_geometry(kDTypes[round % 6])), round);
    Memory want = memory;
    const std::vector<Pair> pairs = random_pairs(random, 5);
    test::convert(memory, want, pairs);
    EXPECT_EQ(copy_blocks(memory.cache(), pairs), static_cast<std::int64_t>(pairs.size()));
    ASSERT_EQ(memory.buffers, want.buffers) << memory.layout.order().text();
  }
}

TEST(Blocks, CyclesOfBlocksLargerThanTheBuffer) {
  Geometry g = small_geometry();
  g.block_size = 64;
  g.head_size = 128;
  Memory memory(Layout("B KV N H D", g), 3);
  Memory want = memory;
  const std::vector<Pair> pairs{{0, 1}, {1, 2}, {2, 0}, {3, 4}, {4, 3}};
  test::convert(memory, want, pairs);
  copy_blocks(memory.cache(), pairs);
  EXPECT_EQ(memory.buffers, want.buffers);
}

TEST(Blocks, C01TheBlockAxisIsNotTheKVAxis) {
  // Blocks first NHD, (5, 2, 4, 3, 8) int32, 1 + flat index.
  Geometry g = small_geometry(DType::kI32);
  g.num_layers = 1;
  g.num_kv_heads = 3;
  const Layout layout("B KV N H D", g);
  std::vector<std::int32_t> f(960);
  for (std::size_t i = 0; i < f.size(); ++i) f[i] = static_cast<std::int32_t>(i) + 1;
  std::vector<std::int32_t> out(960, 0);
  const Cache src({reinterpret_cast<std::byte*>(f.data())}, layout);
  const Cache dst({reinterpret_cast<std::byte*>(out.data())}, layout);
  swap_blocks(src, dst, std::vector<Pair>{{0, 3}, {4, 1}});
  std::int64_t sum = 0;
  std::int64_t filled = 0;
  for (const std::int32_t value : out) {
    sum += value;
    filled += value != 0;
  }
  EXPECT_EQ(sum, 184512);
  EXPECT_EQ(filled, 384);
  EXPECT_TRUE(std::equal(f.begin(), f.begin() + 192, out.begin() + 3 * 192));
  EXPECT_TRUE(std::equal(f.begin() + 4 * 192, f.end(), out.begin() + 192));
  // The wrong code: views kv[:, 0] and kv[:, 1] into a kernel that steps by the elements of one view's block.
  std::vector<std::int32_t> wrong(960, 0);
  for (const std::size_t base : {std::size_t{0}, std::size_t{96}}) {
    for (const auto& [s, d] : {std::pair{std::size_t{0}, std::size_t{3}}, {4, 1}}) {
      std::copy_n(f.begin() + static_cast<std::ptrdiff_t>(base + s * 96), 96,
                  wrong.begin() + static_cast<std::ptrdiff_t>(base + d * 96));
    }
  }
  EXPECT_NE(wrong, out);
  EXPECT_TRUE(std::any_of(wrong.begin() + 192 + 96, wrong.begin() + 384, [](std::int32_t v) { return v != 0; }));
}

TEST(Blocks, SwapNeedsOneOrder) {
  const Geometry g = small_geometry();
  Geometry more = g;
  more.num_blocks = 9;
  Memory src(Layout("B KV N H D", g), 1);
  Memory dst(Layout("B@300 KV N H D", more));
  EXPECT_EQ(swap_blocks(src.cache(), dst.cache(), std::vector<Pair>{{1, 8}}), 1);
  Memory other(Layout("KV B N H D", more));
  EXPECT_EQ(thrown([&] {
              swap_blocks(src.cache(), other.cache(), std::vector<Pair>{{1, 8}});
            }).code,
            static_cast<int>(ErrorCode::kLayout));
  Memory hnd(Layout("B KV H N D", g));
  EXPECT_THROW(swap_blocks(src.cache(), hnd.cache(), std::vector<Pair>{{1, 4}}), Error);
}

TEST(Blocks, NothingIsWrittenAfterAnError) {
  Memory src(Layout("B KV N H D", small_geometry()), 1);
  Memory dst(Layout("KV B H N D", small_geometry()));
  const auto before = dst.buffers;
  const auto refuse = [&](std::vector<Pair> pairs, const char* says) {
    const auto error = thrown([&] { convert_blocks(src.cache(), dst.cache(), pairs); });
    EXPECT_NE(error.what.find(says), std::string::npos) << error.what;
    EXPECT_EQ(dst.buffers, before);
  };
  refuse({{0, 0}, {5, 1}}, "block id 5 in pairs[1] is outside the source (num_blocks is 5)");
  refuse({{0, 0}, {1, -1}}, "block id -1 in pairs[1] is outside the destination (num_blocks is 5)");
  refuse({{0, 0}, {1, std::int64_t{1} << 40}}, "1099511627776");
  refuse({{0, 3}, {1, 3}}, "destination block 3 is given twice");
}

TEST(Blocks, MemoryThatMeetsIsRefusedAndInterleavedMemoryIsNot) {
  const Geometry g = small_geometry();
  Geometry one = g;
  one.num_layers = 1;
  const Layout layer("B@1024 KV N H D", one);  // 256 bytes of a block, then other layers
  std::vector<std::byte> big(8192, std::byte{1});
  const Cache a({big.data()}, layer);
  const Cache b({big.data() + 512}, layer);
  EXPECT_NO_THROW(swap_blocks(a, b, std::vector<Pair>{{0, 0}, {1, 4}}));
  const Cache c({big.data() + 128}, layer);
  EXPECT_NE(thrown([&] { swap_blocks(a, c, std::vector<Pair>{{0, 0}}); }).what.find("share memory"), std::string::npos);
  EXPECT_NO_THROW(swap_blocks(a, c, std::vector<Pair>{{0, 3}}));
  EXPECT_NE(thrown([&] {
              convert_blocks(a, a, std::vector<Pair>{{0, 1}, {1, 2}});
            }).what.find("share memory"),
            std::string::npos);
}

TEST(Blocks, MemoryThatMeetsIsSeenThroughInvertedSplits) {
  // A head range that cuts an inverted split steps backwards through the destination.
  Geometry g;
  g.num_kv_heads = 4;
  g.head_size = 2;
  g.dtype = DType::kU8;
  std::vector<std::byte> memory(40);
  const Cache src({memory.data()}, Layout("B KV N H D", g));
  const Cache dst({memory.data() + 3}, Layout("B KV H%2 H/2 N D", g));
  const auto before = memory;
  const auto error = thrown([&] {
    convert_blocks(src, dst, std::vector<Pair>{{0, 0}}, {.heads = RangePair{0, 1, 2}});
  });
  EXPECT_NE(error.what.find("share memory"), std::string::npos) << error.what;
  EXPECT_EQ(memory, before);
}

TEST(Blocks, RawPlanesMoveWhole) {
  Geometry g = small_geometry();
  Memory src(Layout("B@100 {state: D[68] u8}", g), 2);
  Memory dst(Layout("B@80 {state: D[68] u8}", g));
  Memory want = dst;
  test::convert(src, want, {{1, 2}});
  convert_blocks(src.cache(), dst.cache(), std::vector<Pair>{{1, 2}});
  EXPECT_EQ(dst.buffers, want.buffers);
  EXPECT_NE(thrown([&] {
              convert_blocks(src.cache(), dst.cache(), std::vector<Pair>{{1, 2}}, {.heads = RangePair{0, 0, 1}});
            }).what.find("raw"),
            std::string::npos);
  const std::vector<std::int64_t> ids{1};
  EXPECT_THROW(convert_tokens(src.cache(), dst.cache(), ids, ids, {0, 0, 3}), Error);
  EXPECT_NO_THROW(convert_tokens(src.cache(), dst.cache(), ids, ids, {0, 0, 4}));
}

/// The checksum of a block, from its elements one at a time.
std::uint64_t naive_checksum(Memory& memory, std::int64_t block) {
  std::vector<const Plane*> planes;
  for (const Plane& plane : memory.layout.planes()) planes.push_back(&plane);
  std::sort(planes.begin(), planes.end(), [](const Plane* a, const Plane* b) { return a->name < b->name; });
  std::vector<std::byte> bytes;
  for (const Plane* plane : planes) {
    test::for_each_index(*plane, [&](const Index& index) {
      const std::byte* at = memory.at(*plane, index);
      if (index[1] == block) bytes.insert(bytes.end(), at, at + item_size(plane->dtype));
    });
  }
  std::vector<std::uint64_t> sums;
  for (std::size_t at = 0; at < bytes.size(); at += 256 << 10) {
    sums.push_back(cpu::xxh3(std::span(bytes).subspan(at, std::min<std::size_t>(bytes.size() - at, 256 << 10))));
  }
  return cpu::xxh3(std::as_bytes(std::span(sums)));
}

TEST(Blocks, ChecksumsDoNotDependOnTheLayout) {
  std::mt19937 random(17);
  for (std::uint32_t round = 1; round <= 200; ++round) {
    Geometry g = small_geometry(kDTypes[round % 6]);
    g.num_blocks = 1 + static_cast<std::int64_t>(random() % 5);
    g.num_kv_heads = 2 * (1 + static_cast<std::int64_t>(random() % 3));
    g.head_size = 4 * (1 + static_cast<std::int64_t>(random() % 20));
    Memory memory(Layout(random_order(random), g), round);
    std::vector<std::int64_t> ids;
    std::vector<std::uint64_t> want;
    for (std::uint32_t i = 0; i < random() % 8; ++i) {
      ids.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(g.num_blocks)));
      want.push_back(naive_checksum(memory, ids.back()));
    }
    ASSERT_EQ(checksum_blocks(memory.cache(), ids), want) << memory.layout.order().text();
  }
}

TEST(Blocks, ChecksumsOfPlanesOfAllKinds) {
  Geometry g = small_geometry();
  for (const char* order :
       {"B N {latent: D[51] f8_e4m3, latent_scale: D[3] f32, rope: D[6] bf16}", "B@128 {state: D[77] u8}",
        "B {key: {data: H N D[D/2] u8, scale: H N D[D/4] f8_e4m3}, value: {data: H N D i8, scale: N H D[1] f32}}",
        "B {state_x: H D[4], state_b: H D[1]}", "key: B N H D | value: B H D N"}) {
    Memory memory(Layout(order, g), 3);
    const std::vector<std::int64_t> ids{4, 0, 4};
    const std::vector<std::uint64_t> want{naive_checksum(memory, 4), naive_checksum(memory, 0),
                                          naive_checksum(memory, 4)};
    EXPECT_EQ(checksum_blocks(memory.cache(), ids), want) << order;
  }
}

TEST(Blocks, ChecksumsOfLargeBlocks) {
  Geometry g = small_geometry();
  g.num_layers = 3;
  g.num_blocks = 40;
  g.block_size = 16;
  g.head_size = 1500;  // 576,000 bytes a block: three granules, and not all blocks at once
  Memory memory(Layout("B KV H N D", g), 3);
  Memory other(Layout("B H {key: D N, value: N D}", g));
  std::vector<std::int64_t> ids;
  std::vector<Pair> pairs;
  for (std::int64_t i = 0; i < 40; ++i) {
    ids.push_back(39 - i);
    pairs.push_back({39 - i, i});
  }
  convert_blocks(memory.cache(), other.cache(), pairs);
  const std::vector<std::uint64_t> sums = checksum_blocks(memory.cache(), ids);
  for (const std::int64_t i : {0, 17, 39}) {
    EXPECT_EQ(sums[static_cast<std::size_t>(i)], naive_checksum(memory, 39 - i));
  }
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(checksum_blocks(other.cache(), ids), sums);
  g.num_blocks = 1;
  g.head_size = 30000;  // 11.5 MB
  Memory one(Layout("B KV N H D", g), 4);
  EXPECT_EQ(checksum_blocks(one.cache(), std::vector<std::int64_t>{0}), std::vector{naive_checksum(one, 0)});
}

TEST(Blocks, ChecksumsRefuseBlocksThatAreNotThere) {
  Memory memory(Layout("B KV H N D", small_geometry()), 3);
  EXPECT_EQ(thrown([&] {
              checksum_blocks(memory.cache(), std::vector<std::int64_t>{0, 5});
            }).what,
            "checksum_blocks: block id 5 in ids[1] is outside the cache (num_blocks is 5)");
  EXPECT_TRUE(checksum_blocks(memory.cache(), {}).empty());
}

TEST(Blocks, NullBlockIsLeftOut) {
  Memory src(Layout("B KV N H D", small_geometry()), 1);
  Memory dst(Layout("B KV N H D", small_geometry()));
  EXPECT_EQ(swap_blocks(src.cache(), dst.cache(), std::vector<Pair>{{0, 0}, {0, 1}, {3, 3}, {4, 4}}, {}, 0), 2);
}

TEST(Blocks, ExpandBlockIds) {
  const std::vector<std::int64_t> ids{3, 0};
  EXPECT_EQ(expand_block_ids(ids, 2), (std::vector<std::int64_t>{6, 7, 0, 1}));
  EXPECT_THROW(expand_block_ids(ids, 0), Error);
  EXPECT_THROW(expand_block_ids(std::vector<std::int64_t>(65536, 0), std::int64_t{1} << 48), Error);
  EXPECT_THROW(expand_block_ids(std::vector<std::int64_t>{-1}, 2), Error);
}

TEST(Blocks, WriteTokensRefusesKeysThatLieWhereValuesGo) {
  Geometry g = test::small_geometry();
  g.num_layers = 1;
  g.num_blocks = 2;
  Memory cache(Layout("KV B N H D", g), 3);
  const auto before = cache.buffers;
  std::byte* start = cache.buffers[0].data();
  const std::int64_t half = cache.layout.num_bytes() / 2;
  const TokenTensor key{start + half, DType::kBF16, {4, 2, 8}, {16, 8, 1}};  // value block 0
  const TokenTensor value{start, DType::kBF16, {4, 2, 8}, {16, 8, 1}};       // key block 0
  EXPECT_THROW(write_tokens(cache.cache(), 0, key, value, std::vector<std::int64_t>{0, 1, 2, 3}), Error);
  EXPECT_EQ(cache.buffers, before);
}

}  // namespace
}  // namespace kvstride
