// SPDX-License-Identifier: Apache-2.0
// The CUDA back end on its stand-in: order of work on streams, ids that only the device knows, calls that fail. That
// the verbs move the right bytes is what the other tests say with KVSTRIDE_TEST_CUDA.
#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "cuda/buffers.h"
#include "cuda/lower.h"
#include "oracle.h"

namespace kvstride {
namespace {

using test::HostRuntime;
using test::Memory;
using test::small_geometry;
using test::thrown;

/// A stand-in of a test's own while the test runs.
class Cuda : public testing::Test {
 protected:
  Cuda() {
    test::place();  // what KVSTRIDE_TEST_CUDA put there comes first
    cuda::set_runtime(&runtime);
  }
  ~Cuda() override { cuda::set_runtime(test::shared_runtime()); }

  static Cache on(Memory& memory, int device) {
    std::vector<std::byte*> tensors;
    for (auto& buffer : memory.buffers) tensors.push_back(buffer.data());
    return Cache(std::move(tensors), memory.layout, false, {device});
  }

  HostRuntime runtime{2, 7};
};

Geometry large() {
  Geometry out = small_geometry();
  out.num_blocks = 24;
  out.block_size = 16;
  out.head_size = 64;
  return out;
}

std::vector<Pair> reversed(std::int64_t blocks) {
  std::vector<Pair> out;
  for (std::int64_t i = 0; i < blocks; ++i) out.push_back({i, blocks - 1 - i});
  return out;
}

/// Where both caches of a copy lie, −1 for the host.
class CudaPlaces : public Cuda, public testing::WithParamInterface<std::array<int, 2>> {};
INSTANTIATE_TEST_SUITE_P(All, CudaPlaces,
                         testing::Values(std::array{0, 0}, std::array{-1, 0}, std::array{0, -1}, std::array{1, 0}),
                         [](const auto& one) {
                           const auto name = [](int i) {
                             return i < 0 ? std::string("Host") : "Cuda" + std::to_string(i);
                           };
                           return name(one.param[0]) + "To" + name(one.param[1]);
                         });

TEST_P(CudaPlaces, WorkComesAfterWhatIsOnTheStreamAndBeforeWhatFollows) {
  const auto [from, to] = GetParam();
  for (const char* order : {"B KV N H D", "KV B H N D", "B H {key: D N, value: N D}"}) {
    Memory src(Layout("B KV H N D", large()), 5);
    Memory written = src;  // what a producer on the stream is still to write
    for (auto& buffer : src.buffers) std::fill(buffer.begin(), buffer.end(), std::byte{0});
    Memory dst(Layout(order, large()), 6);
    const Memory old = dst;
    Memory want = dst;
    const std::vector<Pair> pairs = reversed(24);
    test::convert(from < 0 ? src : written, want, pairs);
    void* stream = runtime.stream();
    std::vector<std::vector<std::byte>> seen;
    if (from >= 0) runtime.enqueue(stream, [&] { src.buffers = written.buffers; });
    if (to >= 0) runtime.enqueue(stream, [&] { seen = dst.buffers; });  // a consumer still reads
    std::vector<std::vector<std::byte>> after;
    // Buffers keep their addresses: contents are assigned element by element.
    const auto* at = src.buffers[0].data();
    convert_blocks(on(src, from), on(dst, to), pairs, {}, {}, Stream(stream));
    if (to >= 0) runtime.enqueue(stream, [&] { after = dst.buffers; });
    if (from < 0) {  // the host's memory is the caller's again
      for (auto& buffer : src.buffers) std::fill(buffer.begin(), buffer.end(), std::byte{0xEE});
    }
    if (to < 0) {
      EXPECT_EQ(dst.buffers, want.buffers) << order;  // done when the call returned
    }
    runtime.drain();
    ASSERT_EQ(src.buffers[0].data(), at);
    if (to >= 0) {
      EXPECT_EQ(seen, old.buffers) << order;
      EXPECT_EQ(after, want.buffers) << order;
      EXPECT_EQ(dst.buffers, want.buffers) << order;
    }
  }
}

TEST_F(Cuda, WorkInsideADeviceIsPutOnTheStreamAndNotWaitedFor) {
  Memory src(Layout("B KV N H D", large()), 1);
  Memory dst(Layout("B KV H N D", large()), 2);
  const auto before = dst.buffers;
  void* stream = runtime.stream();
  bool ready = false;
  runtime.enqueue(stream, [&] { ready = true; });
  convert_blocks(on(src, 0), on(dst, 0), reversed(24), {}, {}, Stream(stream));
  EXPECT_FALSE(ready);
  EXPECT_EQ(dst.buffers, before);
  EXPECT_EQ(runtime.count("launch"), 1);  // all layers, planes and pairs
  EXPECT_EQ(runtime.count("finish"), 0);
  for (const HostRuntime::Call& call : runtime.calls) {
    if (call.name == "launch" || call.name == "copy") {
      EXPECT_EQ(call.stream, stream);
    }
  }
  runtime.drain();
  EXPECT_TRUE(ready);
}

TEST_F(Cuda, LongRunsAreCopiedByTheDeviceShortOnesPacked) {
  Geometry g = large();
  g.num_kv_heads = 8;
  Memory src(Layout("B KV N H D", g), 1);  // 16 KiB of a plane of a block
  Memory dst(Layout("B KV N H D", g), 2);
  swap_blocks(on(src, 0), on(dst, -1), reversed(24));
  EXPECT_EQ(dst.buffers[0].size(), src.buffers[0].size());
  EXPECT_EQ(runtime.count("launch"), 0);
  std::size_t copies = 0;
  for (const HostRuntime::Call& call : runtime.calls) copies += call.name == "copy" ? call.count : 0;
  EXPECT_EQ(copies, 48U);  // 24 blocks of two layers, each a run of 32 KiB
  runtime.calls.clear();
  Memory other(Layout("B KV H N D", g), 3);
  Memory want = other;
  test::convert(src, want, reversed(24));
  convert_blocks(on(src, 0), on(other, -1), reversed(24));
  EXPECT_EQ(other.buffers, want.buffers);
  EXPECT_EQ(runtime.count("launch"), 1);
}

TEST_F(Cuda, LongChainsGoThroughABoundedBuffer) {
  Geometry g = small_geometry();
  g.num_layers = 1;
  g.num_blocks = 150;
  g.block_size = 16;
  g.head_size = 512;
  Memory memory(Layout("B KV N H D", g), 4);  // 64 KiB a block, 9.4 MiB entangled
  Memory want = memory;
  std::vector<Pair> pairs;
  const std::ptrdiff_t block = std::ssize(memory.buffers[0]) / 150;
  for (std::int64_t i = 0; i < 150; ++i) {
    pairs.push_back({i, (i + 1) % 150});
    std::copy_n(memory.buffers[0].begin() + i * block, block, want.buffers[0].begin() + (i + 1) % 150 * block);
  }
  copy_blocks(on(memory, 0), pairs);
  EXPECT_TRUE(memory.buffers == want.buffers);
  for (const HostRuntime::Call& call : runtime.calls) {
    if (call.name == "make_device_memory") {
      EXPECT_LE(call.bytes, static_cast<std::int64_t>(cuda::kBufferBytes));
    }
  }
}

TEST_F(Cuda, IdsInDeviceMemory) {
  for (const char* order : {"B KV N H D", "B KV H N/2 D N%2", "B H {key: D N, value: N D}"}) {
    Memory cache(Layout(order, small_geometry()), 9);
    Memory want = cache;
    const Cache there = on(cache, 0);
    // Blocks.
    std::vector<std::int32_t> ids{1, 3, 0, 2};  // two pairs
    Memory other(Layout("B KV H N D", small_geometry()), 10);
    Memory other_want = other;
    test::convert(cache, other_want, {{1, 3}, {0, 2}});
    convert_blocks(there, on(other, 0), DevicePairs{{ids.data(), 4, 2, 2}, {ids.data() + 1, 4, 2, 2}});
    EXPECT_EQ(other.buffers, other_want.buffers) << order;
    // Slots: token i of the dense planes.
    std::vector<std::int64_t> slots{7, 0, 18, 9, 13};
    const Layout dense_of = dense_layout(cache.layout, 5);
    Memory dense(dense_of, 1);
    Memory dense_want = dense;
    Memory host = cache;
    gather_tokens(host.cache(), slots, dense_want.cache());
    gather_tokens(there, DeviceList{slots.data(), 8, 1, 5}, on(dense, 0));
    EXPECT_EQ(dense.buffers, dense_want.buffers) << order;
    // What names nothing is left out, and said: negative slots are skipped where the verb skips them.
    std::vector<std::int64_t> mapping{4, -1, 20, 11};
    std::vector<std::uint16_t> key(4 * 2 * 8);
    std::iota(key.begin(), key.end(), std::uint16_t{1});
    const TokenTensor tokens{reinterpret_cast<const std::byte*>(key.data()), DType::kBF16, {4, 2, 8}, {16, 8, 1}, {0}};
    TokenTensor on_host = tokens;
    on_host.device = {};
    Memory written = cache;
    const std::vector<std::int64_t> kept{4, -1, -1, 11};
    std::vector<std::byte*> tensors;
    for (auto& buffer : written.buffers) tensors.push_back(buffer.data());
    write_tokens(Cache(tensors, written.layout), 1, on_host, on_host, kept);
    const auto error = thrown([&] { write_tokens(there, 1, tokens, tokens, DeviceList{mapping.data(), 8, 1, 4}); });
    EXPECT_EQ(error.what, "write_tokens: id 20 in slots[2] of the destination is not from 0 to 19; it was left out");
    EXPECT_EQ(error.code, static_cast<int>(ErrorCode::kBlockIndex));
    EXPECT_EQ(cache.buffers, written.buffers) << order;
    EXPECT_NO_THROW(cuda_check({0}));  // said once
  }
}

TEST_F(Cuda, FaultsOfAStreamAreReportedByALaterCall) {
  Memory cache(Layout("B KV N H D", small_geometry()), 9);
  const Cache there = on(cache, 0);
  const std::vector<std::int64_t> ids{2, 5};
  void* stream = runtime.stream();
  EXPECT_NO_THROW(zero_blocks(there, DeviceList{ids.data(), 8, 1, 2}, Stream(stream)));
  runtime.drain();
  const auto error = thrown([&] { copy_blocks(there, std::vector<Pair>{{0, 1}}); });
  EXPECT_EQ(error.what, "zero_blocks: id 5 in ids[1] of the source is not from 0 to 4; it was left out");
  EXPECT_NO_THROW(copy_blocks(there, std::vector<Pair>{{0, 1}}));
}

TEST_F(Cuda, EveryCallMayFailAndTheNextVerbWorks) {
  const std::vector<Pair> pairs = reversed(24);
  int failures = 0;
  for (const auto& places : {std::pair{0, 0}, {-1, 0}, {0, -1}, {1, 0}}) {
    const int from = places.first;  // clang 14 captures no structured bindings
    const int to = places.second;
    for (int at = 0;; ++at) {
      Memory src(Layout("B KV N H D", large()), 1);
      Memory dst(Layout("B KV H N D", large()), 2);
      Memory want = dst;
      test::convert(src, want, pairs);
      runtime.fail_at = at;
      const auto error = thrown([&] { convert_blocks(on(src, from), on(dst, to), pairs); });
      const bool failed = runtime.fail_at == -1;
      runtime.fail_at = -1;
      runtime.drain();
      if (!failed) {
        EXPECT_EQ(error.code, -1) << error.what;
        EXPECT_EQ(dst.buffers, want.buffers);
        break;
      }
      // A call that fails while a buffer is given back is nobody's error: the work was done.
      if (error.code >= 0) {
        ++failures;
        EXPECT_EQ(error.code, static_cast<int>(ErrorCode::kDevice));
        EXPECT_EQ(error.what.rfind("convert_blocks: cuda:", 0), 0U) << error.what;
      }
      convert_blocks(on(src, from), on(dst, to), pairs);
      EXPECT_EQ(dst.buffers, want.buffers);
    }
  }
  EXPECT_GE(failures, 12);
}

TEST_F(Cuda, WhatIsRefused) {
  Memory src(Layout("B KV N H D", small_geometry()), 1);
  Memory dst(Layout("B KV H N D", small_geometry()), 2);
  const std::vector<Pair> pairs{{0, 1}};
  EXPECT_EQ(thrown([&] { convert_blocks(on(src, 2), on(dst, -1), pairs); }).what,
            "convert_blocks: cuda:2: there are 2 devices");
  const std::vector<std::int64_t> ids{0, 1};
  EXPECT_EQ(thrown([&] {
              convert_blocks(on(src, 0), on(dst, -1), DevicePairs{{ids.data(), 8, 2, 1}, {ids.data() + 1, 8, 2, 1}});
            }).what,
            "convert_blocks: ids in device memory are for caches of that device");
  // Nor for the host's, where they would be nobody's.
  Memory twin = dst;
  EXPECT_EQ(thrown([&] {
              copy_blocks(on(dst, -1), DevicePairs{{ids.data(), 8, 2, 1}, {ids.data() + 1, 8, 2, 1}});
            }).what,
            "copy_blocks: ids in device memory are for caches of that device");
  EXPECT_EQ(thrown([&] {
              copy_blocks(on(dst, 0), DevicePairs{{ids.data(), 8, 1, 2}, {ids.data() + 1, 8, 1, 1}});
            }).what,
            "copy_blocks: 2 source blocks, 1 destination blocks");
  EXPECT_EQ(thrown([&] {
              zero_blocks(on(dst, 0), DeviceList{ids.data(), 2, 1, 2});
            }).what,
            "zero_blocks: ids of 2 bytes, expected 4 or 8");
  Memory dense(dense_layout(dst.layout, 1), 1);
  EXPECT_EQ(thrown([&] {
              gather_tokens(on(dst, 0), DeviceList{ids.data(), 8, 1, 2}, on(dense, 0));
            }).what,
            "gather_tokens: 2 slots for 1 tokens");
  EXPECT_EQ(dst.buffers, twin.buffers);
  AttentionBatch batch{};
  AttentionOutput output{};
  EXPECT_EQ(thrown([&] { attention(batch, on(dst, 0), 0, output, {}); }).what,
            "attention: the cache lies on cuda:0; it reads host memory only");
}

/// What one launch does is captured and nothing else is put on the stream; the rest is refused before anything is.
TEST_F(Cuda, AStreamThatIsCaptured) {
  Memory src(Layout("B KV N H D", small_geometry()), 1);
  Memory dst(Layout("B KV H N D", small_geometry()), 2);
  Memory want = dst;
  const std::vector<Pair> pairs{{0, 1}, {3, 2}};
  test::convert(src, want, pairs);
  const auto before = dst.buffers;
  void* stream = runtime.stream();
  const Stream on_it(stream);
  runtime.captured.insert(stream);
  runtime.calls.clear();
  const auto refused = [&](const std::string& verb, const std::string& what, const auto& call) {
    const auto error = thrown(call);
    EXPECT_EQ(error.code, static_cast<int>(ErrorCode::kDevice));
    EXPECT_EQ(error.what, verb + ": cuda:0: the stream is being captured into a CUDA graph, which cannot take " + what);
    EXPECT_TRUE(runtime.calls.empty()) << runtime.calls.front().name;
  };
  const std::string other_memory = "copies from one memory to another";
  refused("convert_blocks", other_memory, [&] { convert_blocks(on(src, -1), on(dst, 0), pairs, {}, {}, on_it); });
  refused("convert_blocks", other_memory, [&] { convert_blocks(on(src, 0), on(dst, -1), pairs, {}, {}, on_it); });
  refused("convert_blocks", other_memory, [&] { convert_blocks(on(src, 1), on(dst, 0), pairs, {}, {}, on_it); });
  const std::vector<std::int64_t> ids{0, 1};
  const DeviceList list{ids.data(), 8, 1, 2};
  refused("zero_blocks", "ids in device memory", [&] { zero_blocks(on(dst, 0), list, on_it); });
  const std::vector<Pair> swapped{{0, 1}, {1, 0}};
  refused("copy_blocks", "pairs whose source another one overwrites",
          [&] { copy_blocks(on(dst, 0), swapped, {}, {}, on_it); });
  Geometry many = small_geometry();
  many.num_blocks = 1000;
  Memory large(Layout("B KV N H D", many), 3);
  std::vector<std::int64_t> all;
  for (std::int64_t i = 0; i < many.num_blocks; i += 3) all.push_back(i);
  refused("zero_blocks", "so many blocks in one call", [&] { zero_blocks(on(large, 0), all, {}, on_it); });
  EXPECT_EQ(dst.buffers, before);

  convert_blocks(on(src, 0), on(dst, 0), pairs, {}, {}, on_it);
  ASSERT_EQ(runtime.calls.size(), 1U);
  EXPECT_EQ(runtime.calls.front().name, "launch");
  runtime.captured.clear();
  runtime.drain();  // the graph runs
  EXPECT_EQ(dst.buffers, want.buffers);
  EXPECT_NO_THROW(zero_blocks(on(dst, 0), list, on_it));
}

TEST_F(Cuda, WhereMemoryLiesAndWaitingForAStream) {
  std::vector<std::byte> memory(64);
  runtime.place(memory.data(), 32, 1);
  runtime.place(memory.data() + 32, 16, -1);
  EXPECT_EQ(device_of(memory.data()), Device{1});
  EXPECT_EQ(device_of(memory.data() + 31), Device{1});
  EXPECT_EQ(device_of(memory.data() + 40), Device{});
  EXPECT_EQ(device_of(memory.data() + 48), std::nullopt);
  void* stream = runtime.stream();
  bool done = false;
  runtime.enqueue(stream, [&] { done = true; });
  wait_for({0}, Stream(stream));
  EXPECT_TRUE(done);
  EXPECT_NO_THROW(wait_for({0}, Stream()));  // kvstride's own
  EXPECT_EQ(thrown([] { wait_for({2}, Stream()); }).what, "cuda:2: there are 2 devices");
}

TEST(CudaDivisor, EqualsDivision) {
  std::mt19937 random(3);
  for (std::int64_t value : {1, 2, 3, 5, 7, 11, 16, 100, 255, 641, 65535, 65537, 1 << 30, (1 << 30) + 1, 2147483647}) {
    const cuda::Divisor divisor = cuda::Divisor::of(value);
    for (std::uint32_t n : {0U, 1U, 2U, 2147483646U, 2147483647U}) EXPECT_EQ(divisor.divide(n), n / value);
    for (int i = 0; i < 2000; ++i) {
      const auto n = static_cast<std::uint32_t>(random() >> 1);
      ASSERT_EQ(divisor.divide(n), n / value) << n << " / " << value;
    }
  }
}

}  // namespace
}  // namespace kvstride
