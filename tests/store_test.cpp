// SPDX-License-Identifier: Apache-2.0
// The store against the naive truth: chunks written from one layout and read into another, over each kind of tier.
#include "kvstride/store.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <thread>

#include "oracle.h"

using namespace kvstride;
using namespace kvstride::test;
using namespace std::chrono_literals;

namespace {

/// A directory that goes when the test ends.
struct Folder {
  std::string path;
  Folder() {
    std::string pattern = std::filesystem::temp_directory_path() / "kvstride-XXXXXX";
    path = mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

constexpr std::int64_t kBlock = 32;  // of the store
constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kBlocks = 12;  // of a cache with that block size

NamespaceFields fields() {
  NamespaceFields out;
  out.model = "test/model";
  out.revision = "0123abcd";
  out.planes = {{"key", {DType::kBF16, {}}}, {"value", {DType::kBF16, {}}}};
  out.num_layers = 3;
  out.num_kv_heads = kHeads;
  out.head_size = 16;
  out.block_size = kBlock;
  return out;
}

Geometry geometry(std::int64_t block_size = kBlock, std::int64_t heads = kHeads) {
  Geometry out;
  out.num_layers = 3;
  out.num_blocks = kBlocks * kBlock / block_size;
  out.block_size = block_size;
  out.num_kv_heads = heads;
  out.head_size = 16;
  return out;
}

Key key(int i) {
  const std::string text = "key number " + std::to_string(i);
  return Key(std::as_bytes(std::span(text)));
}
std::vector<Key> keys(int first, int count) {
  std::vector<Key> out;
  for (int i = first; i < first + count; ++i) out.push_back(key(i));
  return out;
}
std::vector<std::int64_t> iota(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> out;
  for (std::int64_t i = first; i < first + count; ++i) out.push_back(i);
  return out;
}

/// Whether tokens of the source's blocks are those of the destination's, head by head.
void expect_equal(Memory& src, std::int64_t src_block, Memory& dst, std::int64_t dst_block, std::int64_t tokens,
                  RangePair heads) {
  std::string wrong;
  for (const Plane& plane : src.layout.planes()) {
    const Plane& twin = dst.layout.plane(plane.name);
    const std::int64_t src_size = src.layout.geometry().block_size;
    const std::int64_t dst_size = dst.layout.geometry().block_size;
    for (std::int64_t l = 0; l < 3; ++l)
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t h = 0; h < heads.count; ++h)
          for (std::int64_t d = 0; d < 16 && wrong.empty(); ++d) {
            const Index from{l, src_block + t / src_size, t % src_size, heads.src_first + h, d};
            const Index to{l, dst_block + t / dst_size, t % dst_size, heads.dst_first + h, d};
            if (std::memcmp(src.at(plane, from), dst.at(twin, to), 2) == 0) continue;
            wrong = plane.name + " layer " + std::to_string(l) + " token " + std::to_string(t) + " head " +
                    std::to_string(h) + " dim " + std::to_string(d);
          }
  }
  EXPECT_EQ(wrong, "");
}

enum class Kind { kHost, kDirectory, kBlockingDirectory, kBoth };

class StoreOver : public testing::TestWithParam<Kind> {
 protected:
  std::vector<TierPtr> tiers() {
    std::vector<TierPtr> out;
    const Kind kind = GetParam();
    if (kind == Kind::kHost || kind == Kind::kBoth) out.push_back(host_tier({.num_bytes = 4 << 20}));
    if (kind != Kind::kHost) {
      DirectoryTierOptions options;
      options.path = folder.path + "/store";
      options.max_bytes = 8 << 20;
      options.keep_free = 0;
      if (kind == Kind::kBlockingDirectory) options.engine = DirectoryTierOptions::Engine::kBlocking;
      out.push_back(directory_tier(options));
    }
    return out;
  }
  Folder folder;
};

const std::vector<const char*> kOrders{"KV B N H D",
                                       "B KV H N D",
                                       "B H N KV D",
                                       "L B N H KV D",
                                       "{key: B H D/x N D%x, value: B H D N}",
                                       "B H {key: D N, value: N D}",
                                       "key: B N H D | value: B H D N",
                                       "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}"};

TEST_P(StoreOver, AnyLayoutReadsWhatAnyLayoutWrote) {
  Store store(tiers(), Namespace(fields()));
  int first = 0;
  std::vector<Memory> targets;
  for (const char* order : kOrders) {
    for (const std::int64_t size : {kBlock, kBlock / 2}) targets.emplace_back(Layout(order, geometry(size)), 7);
  }
  for (std::size_t i = 0; i < kOrders.size(); ++i) {
    Memory src(Layout(kOrders[i], geometry()), 100 + static_cast<std::uint32_t>(i));
    const std::vector<Key> names = keys(first, 4);
    first += 4;
    ASSERT_EQ(store.put(names, src.cache(), std::vector<std::int64_t>{3, 0, 7, 5}).wait(),
              std::vector<Outcome>(4, Outcome::kOk));
    for (std::size_t j = 0; j < kOrders.size(); ++j) {
      for (const std::int64_t size : {kBlock, kBlock / 2}) {
        Memory& before = targets[2 * j + (size == kBlock ? 0 : 1)];
        Memory dst = before;
        const std::int64_t ratio = kBlock / size;
        std::vector<std::int64_t> blocks;
        for (const std::int64_t b : {10, 1, 2, 4}) {
          for (std::int64_t r = 0; r < ratio; ++r) blocks.push_back(b * ratio + r);
        }
        ASSERT_EQ(store.get(names, dst.cache(), blocks).wait(), std::vector<Outcome>(4, Outcome::kOk));
        expect_equal(src, 3, dst, 10 * ratio, kBlock, {0, 0, kHeads});
        expect_equal(src, 0, dst, 1 * ratio, kBlock, {0, 0, kHeads});
        expect_equal(src, 7, dst, 2 * ratio, kBlock, {0, 0, kHeads});
        expect_equal(src, 5, dst, 4 * ratio, kBlock, {0, 0, kHeads});
        expect_equal(before, 0, dst, 0, kBlock, {0, 0, kHeads});  // others are as they were
        expect_equal(before, 3 * ratio, dst, 3 * ratio, kBlock, {0, 0, kHeads});
      }
    }
  }
}

TEST_P(StoreOver, WritersAndReadersOfHeadRanges) {
  const std::vector<TierPtr> all = tiers();
  Store store(all, Namespace(fields()));
  // Two writers of four heads each, in different layouts; readers of all, of two, and of a range across both.
  Memory low(Layout("KV B N H D", geometry(kBlock, 4)), 1);
  Memory high(Layout("B H N KV D", geometry(kBlock, 4)), 2);
  const std::vector<Key> names = keys(0, 3);
  const std::vector<std::int64_t> blocks = iota(2, 3);
  RequestOptions half;
  half.heads = {0, 0, 4};
  ASSERT_EQ(store.put(names, low.cache(), blocks, half).wait(), std::vector<Outcome>(3, Outcome::kOk));
  EXPECT_EQ(store.lookup(names), std::vector<bool>(3, false)) << "half of the heads is no chunk";
  EXPECT_EQ(store.lookup(names, Range{0, 4}), std::vector<bool>(3, true));
  EXPECT_EQ(store.lookup(names, Range{3, 2}), std::vector<bool>(3, false));
  Memory whole(Layout("B KV H N D", geometry()), 3);
  const Memory before = whole;
  ASSERT_EQ(store.get(names, whole.cache(), blocks).wait(), std::vector<Outcome>(3, Outcome::kMiss));
  EXPECT_EQ(whole.buffers, before.buffers);
  half.heads = {0, 4, 4};
  ASSERT_EQ(store.put(names, high.cache(), blocks, half).wait(), std::vector<Outcome>(3, Outcome::kOk));
  EXPECT_EQ(store.lookup_prefix(names), 3);
  ASSERT_EQ(store.get(names, whole.cache(), blocks).wait(), std::vector<Outcome>(3, Outcome::kOk));
  for (std::int64_t i = 2; i < 5; ++i) {
    expect_equal(low, i, whole, i, kBlock, {0, 0, 4});
    expect_equal(high, i, whole, i, kBlock, {0, 4, 4});
  }
  Memory middle(Layout("B N H KV D", geometry(kBlock, 6)), 4);
  RequestOptions across;
  across.heads = {1, 3, 2};  // stored heads 3 and 4 are the cache's 1 and 2
  ASSERT_EQ(store.get(names, middle.cache(), blocks, across).wait(), std::vector<Outcome>(3, Outcome::kOk));
  for (std::int64_t i = 2; i < 5; ++i) {
    expect_equal(low, i, middle, i, kBlock, {3, 1, 1});
    expect_equal(high, i, middle, i, kBlock, {0, 2, 1});
  }
}

TEST_P(StoreOver, PlanesWithoutHeadsAreKeptOnce) {
  NamespaceFields mla = fields();
  mla.planes = {{"latent", {DType::kBF16, 64}}, {"rope", {DType::kBF16, 16}}};
  mla.num_kv_heads = 1;
  Store store(tiers(), Namespace(mla));
  Geometry sizes = geometry(kBlock, 1);
  Memory src(Layout("B N {latent: D[64], rope: D[16]}", sizes), 5);
  Memory dst(Layout("rope: B N D[16] | latent: B N D[64]", sizes), 6);
  const std::vector<Key> names = keys(0, 2);
  ASSERT_EQ(store.put(names, src.cache(), iota(0, 2)).wait(), std::vector<Outcome>(2, Outcome::kOk));
  ASSERT_EQ(store.get(names, dst.cache(), iota(4, 2)).wait(), std::vector<Outcome>(2, Outcome::kOk));
  Memory expected(Layout("rope: B N D[16] | latent: B N D[64]", sizes), 6);
  convert(src, expected, {{0, 4}, {1, 5}});
  EXPECT_EQ(dst.buffers, expected.buffers);
}

TEST_P(StoreOver, RawBytes) {
  NamespaceFields raw = fields();
  raw.raw = "layout=x,tp=1,rank=0";
  Store store(tiers(), Namespace(raw));
  std::vector<std::byte> one(10'000, std::byte{1});
  std::vector<std::byte> two(4096, std::byte{2});
  const std::vector<Key> names = keys(0, 2);
  const std::vector<std::span<const std::byte>> from{one, two};
  ASSERT_EQ(store.put_bytes(names, from).wait(), std::vector<Outcome>(2, Outcome::kOk));
  std::vector<std::byte> back_one(10'000);
  std::vector<std::byte> back_two(4095);
  const std::vector<std::span<std::byte>> to{back_one, back_two};
  EXPECT_EQ(store.get_bytes(names, to).wait(), (std::vector<Outcome>{Outcome::kOk, Outcome::kMiss}));
  EXPECT_EQ(back_one, one);
  EXPECT_EQ(back_two, std::vector<std::byte>(4095)) << "another size is no answer";
  back_two.resize(4096);
  const std::vector<std::span<std::byte>> again{back_one, back_two};
  EXPECT_EQ(store.get_bytes(names, again).wait(), std::vector<Outcome>(2, Outcome::kOk));
  EXPECT_EQ(back_two, two);
  Store tidy({host_tier({.num_bytes = 1 << 20})}, Namespace(fields()));
  EXPECT_THROW(tidy.put_bytes(names, from), Error);
}

TEST_P(StoreOver, OtherNamespacesAreOtherChunks) {
  const std::vector<TierPtr> all = tiers();
  NamespaceFields other = fields();
  other.revision = "deadbeef";
  Store store(all, Namespace(fields()));
  Store stranger(all, Namespace(other));
  Memory src(Layout("KV B N H D", geometry()), 8);
  const std::vector<Key> names = keys(0, 4);
  ASSERT_EQ(store.put(names, src.cache(), iota(0, 4)).wait(), std::vector<Outcome>(4, Outcome::kOk));
  EXPECT_EQ(store.lookup_prefix(names), 4);
  EXPECT_EQ(stranger.lookup_prefix(names), 0);
  Memory dst(Layout("KV B N H D", geometry()), 9);
  const Memory before = dst;
  EXPECT_EQ(stranger.get(names, dst.cache(), iota(0, 4)).wait(), std::vector<Outcome>(4, Outcome::kMiss));
  EXPECT_EQ(dst.buffers, before.buffers);
}

TEST_P(StoreOver, RemovedAndPutAgain) {
  Store store(tiers(), Namespace(fields()));
  Memory src(Layout("KV B N H D", geometry()), 8);
  const std::vector<Key> names = keys(0, 4);
  ASSERT_EQ(store.put(names, src.cache(), iota(0, 4)).wait(), std::vector<Outcome>(4, Outcome::kOk));
  EXPECT_EQ(store.remove(std::span(names).first(2)), 2);
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(store.lookup(names), (std::vector<bool>{false, false, true, true}));
  EXPECT_EQ(store.lookup_prefix(names), 0);
  EXPECT_GE(store.metrics().counters.at("unreachable_prefix"), 2U);
  EXPECT_EQ(store.put(names, src.cache(), iota(0, 4)).wait(), std::vector<Outcome>(4, Outcome::kOk));
  EXPECT_EQ(store.lookup_prefix(names), 4);
}

TEST_P(StoreOver, BadInputIsAnError) {
  Store store(tiers(), Namespace(fields()));
  Memory src(Layout("KV B N H D", geometry()), 8);
  const std::vector<Key> names = keys(0, 2);
  EXPECT_THROW(store.put(names, src.cache(), iota(0, 1)), Error);
  EXPECT_THROW(store.put(names, src.cache(), std::vector<std::int64_t>{0, kBlocks}), Error);
  EXPECT_THROW(store.put(names, src.cache(), std::vector<std::int64_t>{0, -1}), Error);
  EXPECT_THROW(store.get(names, src.cache(), std::vector<std::int64_t>{3, 3}), Error);
  Memory half(Layout("KV B N H D", geometry(kBlock, 4)), 1);
  EXPECT_THROW(store.put(names, half.cache(), iota(0, 2)), Error) << "heads are not given";
  RequestOptions heads;
  heads.heads = {0, 6, 4};
  EXPECT_THROW(store.put(names, half.cache(), iota(0, 2), heads), Error);
  Memory large(Layout("KV B N H D", geometry(2 * kBlock)), 1);
  EXPECT_THROW(store.put(names, large.cache(), iota(0, 2)), Error) << "a block is larger than a chunk";
  Geometry other = geometry();
  other.dtype = DType::kF16;
  Memory halves(Layout("KV B N H D", other), 1);
  EXPECT_THROW(store.put(names, halves.cache(), iota(0, 2)), Error);
  other = geometry();
  other.head_size = 32;
  Memory wide(Layout("KV B N H D", other), 1);
  EXPECT_THROW(store.put(names, wide.cache(), iota(0, 2)), Error);
  EXPECT_EQ(store.lookup_prefix(names), 0);
}

TEST_P(StoreOver, AClosedStoreDoesNothing) {
  const std::vector<TierPtr> all = tiers();
  Store store(all, Namespace(fields()));
  Memory src(Layout("KV B N H D", geometry()), 8);
  const std::vector<Key> names = keys(0, 2);
  ASSERT_EQ(store.put(names, src.cache(), iota(0, 2)).wait(), std::vector<Outcome>(2, Outcome::kOk));
  store.close();
  EXPECT_EQ(store.put(keys(2, 1), src.cache(), iota(0, 1)).wait(), std::vector<Outcome>(1, Outcome::kRefused));
  EXPECT_EQ(store.get(names, src.cache(), iota(0, 2)).wait(), std::vector<Outcome>(2, Outcome::kRefused));
  EXPECT_THROW(store.remove(names), Error);
  EXPECT_THROW(store.pin(names), Error);
  EXPECT_THROW(store.lookup(names), Error);
  EXPECT_THROW(store.lookup(names, {}, false), Error);
  EXPECT_THROW(store.lookup_prefix(names), Error);
  EXPECT_THROW(store.take_gone(), Error);
  EXPECT_TRUE(store.flush(1s));
  EXPECT_EQ(store.metrics().counters.at("put_refused"), 1U);
  store.close();
  // Another one over the same tiers still has all.
  Store next(all, Namespace(fields()));
  EXPECT_EQ(next.lookup(keys(0, 3)), (std::vector<bool>{true, true, false}));
}

TEST_P(StoreOver, AfterAndDeadline) {
  Store store(tiers(), Namespace(fields()));
  Memory src(Layout("KV B N H D", geometry()), 8);
  std::atomic<bool> ready{false};
  RequestOptions options;
  options.after = [&] { return ready.load(); };
  const std::vector<Key> names = keys(0, 2);
  const Job job = store.put(names, src.cache(), iota(0, 2), options);
  EXPECT_FALSE(job.wait_for(20ms));
  Memory later(Layout("KV B N H D", geometry()), 99);
  src.buffers = later.buffers;  // what the producer writes late
  ready = true;
  ASSERT_EQ(job.wait(), std::vector<Outcome>(2, Outcome::kOk));
  Memory dst(Layout("KV B N H D", geometry()), 9);
  ASSERT_EQ(store.get(names, dst.cache(), iota(0, 2)).wait(), std::vector<Outcome>(2, Outcome::kOk));
  expect_equal(later, 0, dst, 0, kBlock, {0, 0, kHeads});
  RequestOptions never;
  never.after = [] { return false; };
  never.deadline = 30ms;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(store.get(names, dst.cache(), iota(0, 2), never).wait(), std::vector<Outcome>(2, Outcome::kTimeout));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

TEST_P(StoreOver, EvictionKeepsTheLimit) {
  const std::vector<TierPtr> all = tiers();
  Store store(all, Namespace(fields()));
  Memory src(Layout("KV B N H D", geometry()), 8);
  for (int i = 0; i < 60; ++i) {
    for (const Outcome outcome : store.put(keys(i * 4, 4), src.cache(), iota(i % 8, 4)).wait()) {
      ASSERT_EQ(outcome, Outcome::kOk);
    }
    for (const TierMetrics& tier : store.metrics().tiers) ASSERT_LE(tier.used_bytes, tier.capacity_bytes);
  }
  std::uint64_t evictions = 0;
  for (const TierMetrics& tier : store.metrics().tiers) evictions += tier.counters.at("evictions");
  EXPECT_GT(evictions, 50U);
  int held = 0;
  Memory dst(Layout("B H N KV D", geometry()), 9);
  for (int i = 0; i < 240; ++i) {
    const Outcome outcome = store.get(keys(i, 1), dst.cache(), iota(1, 1)).wait()[0];
    if (outcome == Outcome::kMiss) continue;
    ASSERT_EQ(outcome, Outcome::kOk);
    ++held;
    expect_equal(src, i / 4 % 8 + i % 4, dst, 1, kBlock, {0, 0, kHeads});
  }
  EXPECT_GT(held, 30);
}

std::string name_of_kind(const testing::TestParamInfo<Kind>& info) {
  constexpr std::array<const char*, 4> kNames{"Host", "Directory", "BlockingDirectory", "Both"};
  return kNames[static_cast<std::size_t>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(Tiers, StoreOver,
                         testing::Values(Kind::kHost, Kind::kDirectory, Kind::kBlockingDirectory, Kind::kBoth),
                         name_of_kind);

}  // namespace
