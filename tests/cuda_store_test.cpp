// SPDX-License-Identifier: Apache-2.0
// The store over caches on devices, on the stand-in for CUDA: order against streams, calls that fail, pinned memory.
// That the right bytes move is what the store's own tests say with KVSTRIDE_TEST_CUDA.
#include <gtest/gtest.h>

#include "child.h"
#include "cuda/buffers.h"
#include "oracle.h"
#include "store_faults.h"

namespace kvstride {
namespace {

using namespace std::chrono_literals;
using test::HostRuntime;
using test::keys_of;
using test::Memory;
using test::Scratch;
using test::thrown;

constexpr std::int64_t kTierBytes = 4 << 20;

Namespace space() {
  NamespaceFields fields;
  fields.model = "test/cuda";
  fields.revision = "0123abcd";
  fields.planes = {{"key", {DType::kBF16, {}}}, {"value", {DType::kBF16, {}}}};
  fields.num_layers = 2;
  fields.num_kv_heads = 4;
  fields.head_size = 64;
  fields.block_size = 32;
  return Namespace(fields);
}

/// Chunks are two blocks of the cache, or one of 32 tokens.
Geometry geometry(std::int64_t block_size = 16) {
  Geometry out;
  out.num_layers = 2;
  out.num_blocks = 128 / block_size;
  out.block_size = block_size;
  out.num_kv_heads = 4;
  out.head_size = 64;
  return out;
}

const std::vector<int> kNumbers{1, 2, 3, 4};
const std::vector<std::int64_t> kBlocks{7, 2, 0, 5, 1, 6, 3, 4};
const std::vector<std::int64_t> kWholeBlocks{3, 0, 1, 2};  // of 32 tokens
const std::vector<Outcome> kAllOk(4, Outcome::kOk);

/// A stand-in of a test's own, and two caches: what is stored, and where it comes back.
class CudaStore : public testing::Test {
 protected:
  CudaStore() {
    test::place();  // what KVSTRIDE_TEST_CUDA put there comes first
    cuda::set_runtime(&runtime);
  }
  ~CudaStore() override { cuda::set_runtime(test::shared_runtime()); }

  static Cache on(Memory& memory, int device) {
    std::vector<std::byte*> tensors;
    for (auto& buffer : memory.buffers) tensors.push_back(buffer.data());
    return Cache(std::move(tensors), memory.layout, false, {device});
  }
  static Store open(std::vector<TierPtr> tiers) {
    StoreOptions options;
    options.num_threads = 1;
    return Store(std::move(tiers), space(), options);
  }
  /// What a get of everything that `src` was put from makes of `dst`.
  static Memory restored(Memory& src, const Memory& dst) {
    Memory out = dst;
    std::vector<Pair> all;
    for (std::int64_t i = 0; i < src.layout.geometry().num_blocks; ++i) all.push_back({i, i});
    test::convert(src, out, all);
    return out;
  }
  std::int64_t touched() const { return runtime.count("copy") + runtime.count("launch"); }

  HostRuntime runtime{2, 7};
  const std::vector<Key> keys = keys_of(kNumbers);
  Memory src{Layout("B KV N H D", geometry()), 5};
  Memory dst{Layout("B H {key: D N, value: N D}", geometry()), 6};
};

TEST_F(CudaStore, FromOneDeviceToAnotherAndToTheHost) {
  Scratch scratch;
  for (const auto& tiers : {std::vector{host_tier({.num_bytes = kTierBytes})},
                            std::vector{directory_tier(test::small_tier(scratch.path()))}}) {
    for (const char* order :
         {"B KV N H D", "KV B H N D", "B H {key: D N, value: N D}", "key: B N H D | value: B H D N"}) {
      Store store = open(tiers);
      Memory from(Layout(order, geometry()), 5);
      store.remove(keys);
      ASSERT_EQ(store.put(keys, on(from, 0), kBlocks).wait(), kAllOk);
      for (const int to : {1, 0, -1}) {
        Memory back = dst;
        const Memory want = restored(from, back);
        ASSERT_EQ(store.get(keys, on(back, to), kBlocks).wait(), kAllOk);
        EXPECT_EQ(back.buffers, want.buffers) << order << " to " << to;
      }
      ASSERT_TRUE(store.flush(5s));
    }
  }
}

TEST_F(CudaStore, APutComesAfterWhatIsOnTheStreamAndHoldsUpNobody) {
  Store store = open({host_tier({.num_bytes = kTierBytes})});
  Memory written(src.layout, 8);  // what the producer is still to write
  void* stream = runtime.stream();
  for (std::size_t i = 0; i < written.buffers.size(); ++i) {
    runtime.enqueue(
        stream, [&, i] { std::copy(written.buffers[i].begin(), written.buffers[i].end(), src.buffers[i].begin()); });
  }
  runtime.hold(stream);
  const Job job = store.put(keys, on(src, 0), kBlocks, {}, Stream(stream));
  // The one thread of the store does other things meanwhile.
  const std::vector<Key> other = test::keys_of({9});
  Memory third(src.layout, 9);
  EXPECT_EQ(store.put(other, on(third, 0), std::vector<std::int64_t>{0, 1}).wait(), std::vector{Outcome::kOk});
  EXPECT_FALSE(job.wait_for(30ms));
  EXPECT_EQ(store.lookup_prefix(keys), 0);
  runtime.release(stream);
  EXPECT_EQ(job.wait(), kAllOk);
  for (auto& buffer : src.buffers) std::fill(buffer.begin(), buffer.end(), std::byte{0xEE});  // the caller's again
  const Memory want = restored(written, dst);
  EXPECT_EQ(store.get(keys, on(dst, -1), kBlocks).wait(), kAllOk);
  EXPECT_EQ(dst.buffers, want.buffers);
}

TEST_F(CudaStore, AGetComesAfterItsReadersAndBeforeWhatFollows) {
  Store store = open({host_tier({.num_bytes = kTierBytes})});
  ASSERT_EQ(store.put(keys, on(src, -1), kBlocks).wait(), kAllOk);
  const auto old = dst.buffers;
  const Memory want = restored(src, dst);
  void* stream = runtime.stream();
  std::vector<std::vector<std::byte>> seen;
  std::vector<std::vector<std::byte>> after;
  runtime.enqueue(stream, [&] { seen = dst.buffers; });
  runtime.hold(stream);
  const Job job = store.get(keys, on(dst, 1), kBlocks, {}, Stream(stream));
  EXPECT_FALSE(job.wait_for(30ms));
  EXPECT_EQ(touched(), 0);
  EXPECT_EQ(dst.buffers, old);
  runtime.release(stream);
  EXPECT_EQ(job.wait(), kAllOk);
  EXPECT_EQ(dst.buffers, want.buffers);  // done is done
  runtime.enqueue(stream, [&] { after = dst.buffers; });
  runtime.drain();
  EXPECT_EQ(seen, old);
  EXPECT_EQ(after, want.buffers);
}

TEST_F(CudaStore, AStreamThatHangsEndsAtTheDeadlineOrWithTheStore) {
  const auto old = dst.buffers;
  void* stream = runtime.stream();
  runtime.enqueue(stream, [] {});
  runtime.hold(stream);
  std::optional<Job> job;
  {
    Store store = open({host_tier({.num_bytes = kTierBytes})});
    ASSERT_EQ(store.put(keys, on(src, -1), kBlocks).wait(), kAllOk);
    RequestOptions options;
    options.deadline = 20ms;
    EXPECT_EQ(store.get(keys, on(dst, 0), kBlocks, options, Stream(stream)).wait(),
              std::vector<Outcome>(4, Outcome::kTimeout));
    job = store.get(keys, on(dst, 0), kBlocks, {}, Stream(stream));
    const auto begin = std::chrono::steady_clock::now();
    store.close();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
  }
  EXPECT_EQ(job->wait(), std::vector<Outcome>(4, Outcome::kRefused));
  runtime.release(stream);
  runtime.drain();
  EXPECT_EQ(touched(), 0);
  EXPECT_EQ(dst.buffers, old);
}

TEST_F(CudaStore, AfterAndStreamAreBothWaitedFor) {
  Store store = open({host_tier({.num_bytes = kTierBytes})});
  void* stream = runtime.stream();
  runtime.enqueue(stream, [] {});
  runtime.hold(stream);
  std::atomic<bool> ready{false};
  RequestOptions options;
  options.after = [&] { return ready.load(); };
  const Job job = store.put(keys, on(src, 0), kBlocks, options, Stream(stream));
  ready = true;
  EXPECT_FALSE(job.wait_for(10ms));
  ready = false;
  runtime.release(stream);
  EXPECT_FALSE(job.wait_for(10ms));
  EXPECT_EQ(touched(), 0);
  ready = true;
  EXPECT_EQ(job.wait(), kAllOk);
}

TEST_F(CudaStore, WhatIsDamagedNeverReachesADevice) {
  Scratch scratch;
  Store store = open({directory_tier(test::small_tier(scratch.path()))});
  ASSERT_EQ(store.put(keys, on(src, -1), kBlocks).wait(), kAllOk);
  ASSERT_TRUE(store.flush(5s));
  for (const std::string& piece : test::look(scratch.path()).pieces) test::damage(piece);
  const auto old = dst.buffers;
  EXPECT_EQ(store.get(keys, on(dst, 0), kBlocks).wait(), std::vector<Outcome>(4, Outcome::kCorrupt));
  EXPECT_EQ(store.get(keys, on(dst, 0), kBlocks).wait(), std::vector<Outcome>(4, Outcome::kMiss));
  EXPECT_EQ(touched(), 0);
  EXPECT_EQ(dst.buffers, old);
}

/// Whether `job` ends, and each of its chunks is right, or an I/O error. The number of chunks that are right.
int right_or_io_error(const Job& job) {
  EXPECT_TRUE(job.wait_for(10s));
  int right = 0;
  for (const auto& outcome : job.poll()) {
    EXPECT_TRUE(outcome == Outcome::kOk || outcome == Outcome::kIoError);
    right += outcome == Outcome::kOk ? 1 : 0;
  }
  return right;
}

TEST_F(CudaStore, EveryCallMayFailAndTheNextRequestWorks) {
  // Blocks of 32 tokens are copied into their images by the device, others by way of pinned buffers.
  for (const std::int64_t block_size : {16, 32}) {
    const std::vector<std::int64_t>& blocks = block_size == 16 ? kBlocks : kWholeBlocks;
    src = Memory(Layout("B KV N H D", geometry(block_size)), 5);
    dst = Memory(Layout("B H {key: D N, value: N D}", geometry(block_size)), 6);
    int failures = 0;
    for (int at = 0;; ++at) {
      cuda::forget_buffers();  // so that they are made, and may fail
      const TierPtr tier = host_tier({.num_bytes = kTierBytes});
      Store store = open({tier});
      void* stream = runtime.stream();
      runtime.enqueue(stream, [] {});
      runtime.fail_at = at;
      int put = 0;
      const auto error =
          thrown([&] { put = right_or_io_error(store.put(keys, on(src, 0), blocks, {}, Stream(stream))); });
      if (error.code >= 0) {
        EXPECT_EQ(error.code, static_cast<int>(ErrorCode::kDevice));
        EXPECT_EQ(error.what.rfind("put: cuda:0: ", 0), 0U) << error.what;
      }
      const bool failed = runtime.fail_at == -1;
      runtime.fail_at = -1;
      ASSERT_TRUE(store.flush(5s));
      EXPECT_EQ(store.metrics().counters.at("put_ok"), static_cast<std::uint64_t>(put));
      TierMetrics metrics = tier_metrics(*tier);
      EXPECT_EQ(metrics.chunks, put);
      EXPECT_EQ(metrics.used_bytes, put * (metrics.used_bytes / std::max(put, 1)));  // 0 where there are none
      EXPECT_EQ(store.put(keys, on(src, 0), blocks).wait(), kAllOk);
      const std::int64_t full = tier_metrics(*tier).used_bytes;
      if (put > 0) {
        EXPECT_EQ(metrics.used_bytes, full / 4 * put);
      }
      Memory back = dst;
      const Memory want = restored(src, back);
      runtime.fail_at = at;
      thrown([&] { right_or_io_error(store.get(keys, on(back, 1), blocks, {}, Stream(stream))); });
      const bool get_failed = runtime.fail_at == -1;
      runtime.fail_at = -1;
      ASSERT_TRUE(store.flush(5s));
      EXPECT_EQ(tier_metrics(*tier).used_bytes, full);
      EXPECT_EQ(store.get(keys, on(back, 1), blocks).wait(), kAllOk);
      EXPECT_EQ(back.buffers, want.buffers);
      failures += put < 4 ? 1 : 0;
      if (!failed && !get_failed) break;
      ASSERT_LT(at, 1000);
    }
    EXPECT_GE(failures, 10);
  }
}

TEST_F(CudaStore, ADeviceThatIsLostMakesErrorsAndItsMemoryIsNotUsedAgain) {
  for (const std::int64_t block_size : {16, 32}) {
    const std::vector<std::int64_t>& blocks = block_size == 16 ? kBlocks : kWholeBlocks;
    src = Memory(Layout("B KV N H D", geometry(block_size)), 5);
    dst = Memory(Layout("B H {key: D N, value: N D}", geometry(block_size)), 6);
    for (int at = 0;; ++at) {
      cuda::forget_buffers();
      const TierPtr tier = host_tier({.num_bytes = kTierBytes});
      Store store = open({tier});
      runtime.for_ever = true;
      runtime.fail_at = at;
      int put = 0;
      const auto error = thrown([&] { put = right_or_io_error(store.put(keys, on(src, 0), blocks)); });
      const bool failed = runtime.fail_at == 0;
      runtime.fail_at = -1;
      runtime.for_ever = false;
      EXPECT_EQ(error.code, -1);
      ASSERT_TRUE(store.flush(5s));
      EXPECT_EQ(tier_metrics(*tier).chunks, put);
      // What the device still does, it does to memory that nobody else has got.
      Memory other(src.layout, 11);
      const std::vector<Key> others = test::keys_of({11, 12, 13, 14});
      EXPECT_EQ(store.put(others, on(other, -1), blocks).wait(), kAllOk);
      runtime.drain();
      const Memory want = restored(other, dst);
      Memory back = dst;
      EXPECT_EQ(store.get(others, on(back, -1), blocks).wait(), kAllOk);
      EXPECT_EQ(back.buffers, want.buffers);
      if (!failed) break;
      ASSERT_LT(at, 1000);
    }
  }
}

TEST_F(CudaStore, APointThatCannotBeAskedIsAnIoError) {
  Store store = open({host_tier({.num_bytes = kTierBytes})});
  void* stream = runtime.stream();
  runtime.enqueue(stream, [] {});
  runtime.hold(stream);
  runtime.fail_name = "done";
  runtime.fail_at = 0;
  EXPECT_EQ(store.put(keys, on(src, 0), kBlocks, {}, Stream(stream)).wait(),
            std::vector<Outcome>(4, Outcome::kIoError));
  EXPECT_EQ(store.lookup_prefix(keys), 0);
  EXPECT_EQ(touched(), 0);
  EXPECT_EQ(tier_metrics(*host_tier({.num_bytes = kTierBytes})).used_bytes, 0);
  runtime.release(stream);
}

TEST_F(CudaStore, MemoryIsPinnedWhenTheFirstDeviceComesAndNoLonger) {
  Scratch scratch;
  const TierPtr host = host_tier({.num_bytes = kTierBytes});
  const TierPtr disk = directory_tier(test::small_tier(scratch.path()));
  {
    Store first = open({host, disk});
    Store second = open({host});
    EXPECT_EQ(first.put(keys, on(src, -1), kBlocks).wait(), kAllOk);
    EXPECT_EQ(runtime.registered(), 0U);
    EXPECT_EQ(tier_metrics(*host).detail, "");
    EXPECT_EQ(first.get(keys, on(dst, 0), kBlocks).wait(), kAllOk);
    EXPECT_EQ(second.get(keys, on(dst, 1), kBlocks).wait(), kAllOk);
    EXPECT_EQ(runtime.registered(), 2U);
    EXPECT_EQ(runtime.count("register_memory"), 2);
    EXPECT_EQ(tier_metrics(*host).detail, "pinned");
    EXPECT_EQ(tier_metrics(*host).counters.at("not_pinned"), 0U);
    EXPECT_NE(tier_metrics(*disk).detail.find(", pinned"), std::string::npos);
    for (const HostRuntime::Call& call : runtime.calls) {
      if (call.name == "register_memory") {
        EXPECT_EQ(call.bytes, call.bytes / 4096 * 4096);
      }
    }
  }
  EXPECT_EQ(runtime.registered(), 2U);  // the tiers go on
}

TEST_F(CudaStore, PinnedMemoryEndsWithItsTier) {
  {
    Store store = open({host_tier({.num_bytes = kTierBytes})});
    EXPECT_EQ(store.put(keys, on(src, 0), kBlocks).wait(), kAllOk);
    EXPECT_EQ(runtime.registered(), 1U);
  }
  EXPECT_EQ(runtime.registered(), 0U);
}

TEST_F(CudaStore, WhatCannotBePinnedIsSaidOnceAndUsedAllTheSame) {
  const TierPtr tier = host_tier({.num_bytes = kTierBytes});
  runtime.fail_name = "register_memory";
  runtime.fail_at = 0;
  for (int i = 0; i < 2; ++i) {
    Store store = open({tier});
    EXPECT_EQ(store.put(keys, on(src, 0), kBlocks).wait(), kAllOk);
  }
  EXPECT_EQ(runtime.count("register_memory"), 1);
  EXPECT_EQ(tier_metrics(*tier).detail, "not pinned: cuda:0: register_memory: made to fail");
  EXPECT_EQ(tier_metrics(*tier).counters.at("not_pinned"), 1U);
  EXPECT_EQ(runtime.registered(), 0U);
}

TEST_F(CudaStore, AForkedChildMayDropWhatItsParentUses) {
  void* stream = runtime.stream();
  runtime.enqueue(stream, [] {});
  TierPtr tier = host_tier({.num_bytes = kTierBytes});
  auto store = std::make_unique<Store>(std::vector{tier}, space());
  ASSERT_EQ(store->put(keys, on(src, 0), kBlocks).wait(), kAllOk);
  runtime.hold(stream);
  RequestOptions options;
  options.deadline = 1ms;
  std::optional<Job> timed_out = store->get(keys, on(dst, 0), kBlocks, options, Stream(stream));
  timed_out->wait();  // it has its point still
  EXPECT_EQ(in_child([&] {
              if (thrown([&] { store->put(keys, on(src, 0), kBlocks); }).code != static_cast<int>(ErrorCode::kStore)) {
                return 1;
              }
              timed_out.reset();
              store.reset();
              tier.reset();
              return runtime.count("unregister_memory") == 0 ? 0 : 2;
            }),
            0);
  runtime.release(stream);
  const Memory want = restored(src, dst);
  EXPECT_EQ(store->get(keys, on(dst, 0), kBlocks).wait(), kAllOk);
  EXPECT_EQ(dst.buffers, want.buffers);
}

TEST_F(CudaStore, WrongIdsOfAVerbAreNotTheStoresToReport) {
  Store store = open({host_tier({.num_bytes = kTierBytes})});
  const std::vector<std::int64_t> ids{2, 9};
  Memory other(src.layout, 3);
  zero_blocks(on(other, 0), DeviceList{ids.data(), 8, 1, 2}, Stream(runtime.stream()));
  runtime.drain();
  EXPECT_EQ(store.put(keys, on(src, 0), kBlocks).wait(), kAllOk);
  EXPECT_EQ(thrown([&] { cuda_check({0}); }).what,
            "zero_blocks: id 9 in ids[1] of the source is not from 0 to 7; it was left out");
}

TEST_F(CudaStore, WhatADeviceCannotDoIsAnErrorAtOnce) {
  Store store = open({host_tier({.num_bytes = kTierBytes})});
  EXPECT_EQ(thrown([&] { store.put(keys, on(src, 2), kBlocks); }).what, "put: cuda:2: there are 2 devices");
  EXPECT_EQ(thrown([&] { store.get(keys, on(dst, 5), kBlocks, {}, Stream(nullptr)); }).what,
            "get: cuda:5: there are 2 devices");
  void* stream = runtime.stream();
  runtime.captured.insert(stream);
  runtime.calls.clear();
  EXPECT_EQ(thrown([&] { store.put(keys, on(src, 0), kBlocks, {}, Stream(stream)); }).what,
            "put: cuda:0: the stream is being captured into a CUDA graph, which cannot take requests of the store");
  // A stream means nothing to the host's memory.
  EXPECT_EQ(store.put(keys, on(src, -1), kBlocks, {}, Stream(nullptr)).wait(), kAllOk);
  EXPECT_TRUE(runtime.calls.empty());
}

}  // namespace
}  // namespace kvstride
