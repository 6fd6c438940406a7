// SPDX-License-Identifier: Apache-2.0
// The verbs in the memory of a real device, against loops over every element. Skips where there is no device. With
// KVSTRIDE_TEST_CUDA it runs on the stand-in for CUDA: so the tests themselves are tested where there is none.
#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <thread>

#include "cuda/runtime.h"
#include "oracle.h"

namespace kvstride {
namespace {

using test::Memory;
using test::random_order;
using test::random_pairs;
using test::small_geometry;
using test::thrown;

Cache cache_of(std::vector<std::byte*> tensors, const Layout& layout, int device) {
  return Cache(std::move(tensors), layout, false, {device});
}
Cache on_host(Memory& memory) {
  std::vector<std::byte*> tensors;
  for (auto& buffer : memory.buffers) tensors.push_back(buffer.data());
  return cache_of(std::move(tensors), memory.layout, -1);
}

std::int64_t address(const void* at) { return reinterpret_cast<std::int64_t>(at); }

/// Skips without a device; frees what a test took of its memory.
class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    test::place();  // the stand-in, where it is asked for
    std::string why;
    runtime = cuda::runtime(&why);
    if (runtime == nullptr && std::getenv("KVSTRIDE_REQUIRE_GPU") != nullptr) FAIL() << why;
    if (runtime == nullptr) GTEST_SKIP() << "no CUDA device: " << why;
    event_ = runtime->make_event(0);
    stream = runtime->make_stream(0);
  }
  void TearDown() override {
    for (const auto& [device, memory] : taken_) runtime->free_device_memory(device, memory);
    for (std::byte* memory : pinned_) runtime->free_pinned_memory(0, memory);
  }

  static bool on_stand_in() { return std::getenv("KVSTRIDE_TEST_CUDA") != nullptr; }

  std::byte* take(int device, std::int64_t bytes) {
    taken_.emplace_back(device, runtime->make_device_memory(device, static_cast<std::size_t>(bytes)));
    return taken_.back().second;
  }
  std::byte* take_pinned(std::int64_t bytes) {
    pinned_.push_back(runtime->make_pinned_memory(0, static_cast<std::size_t>(bytes)));
    return pinned_.back();
  }
  void finish(cuda::StreamHandle of) {
    runtime->record(0, event_, of);
    runtime->finish(0, event_);
  }
  void move(const void* dst, const void* src, std::int64_t bytes) {
    runtime->copy(0, std::array{cuda::Copy{address(dst), address(src), bytes}}, stream);
    finish(stream);
  }

  /// Device memory with what a Memory holds, `shift` bytes past a round address.
  struct Twin {
    Cache cache;
    const std::vector<std::byte*>& tensors() const { return cache.tensors(); }
  };
  Twin twin(const Memory& memory, int device = 0, std::int64_t shift = 0) {
    std::vector<std::byte*> tensors;
    for (const auto& buffer : memory.buffers) {
      tensors.push_back(take(device, std::ssize(buffer) + shift) + shift);
      move(tensors.back(), buffer.data(), std::ssize(buffer));
    }
    return {cache_of(std::move(tensors), memory.layout, device)};
  }
  /// What a twin holds now; paddings included.
  std::vector<std::vector<std::byte>> fetched(const Twin& twin, const Memory& like) {
    std::vector<std::vector<std::byte>> out = like.buffers;
    for (std::size_t t = 0; t < out.size(); ++t) move(out[t].data(), twin.tensors()[t], std::ssize(out[t]));
    return out;
  }
  template <class T>
  const T* upload(const std::vector<T>& values) {
    const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
    std::byte* out = take(0, bytes);
    move(out, values.data(), bytes);
    return reinterpret_cast<const T*>(out);
  }

  cuda::Runtime* runtime = nullptr;
  cuda::StreamHandle stream = nullptr;

 private:
  cuda::EventHandle event_ = nullptr;
  std::vector<std::pair<int, std::byte*>> taken_;
  std::vector<std::byte*> pinned_;
};

/// The source's index of an element of the destination, where a verb writes it.
using Inverse = std::function<std::optional<Index>(const Index&)>;

/// What a verb means, one element at a time.
void apply(Memory& src, Memory& dst, const Inverse& inverse) {
  for (const Plane& plane : dst.layout.planes()) {
    const Plane& twin = src.layout.plane(plane.name);
    test::for_each_index(plane, [&](const Index& index) {
      if (const auto from = inverse(index)) {
        std::memcpy(dst.at(plane, index), src.at(twin, *from), static_cast<std::size_t>(item_size(plane.dtype)));
      }
    });
  }
}

/// Of a list: where `value` is in it.
std::optional<std::int64_t> position(const std::vector<std::int64_t>& list, std::int64_t value) {
  const auto at = std::find(list.begin(), list.end(), value);
  if (at == list.end()) return {};
  return at - list.begin();
}

/// Every block of a cache to another one, scattered.
std::vector<Pair> scattered(std::int64_t blocks) {
  std::vector<Pair> out;
  for (std::int64_t i = 0; i < blocks; ++i) out.push_back({i, (i * 7 + 3) % blocks});
  return out;
}

Geometry vllm_like(DType dtype = DType::kBF16) {
  Geometry out;
  out.num_layers = 2;
  out.num_blocks = 16;  // 7 does not divide it
  out.block_size = 16;
  out.num_kv_heads = 4;
  out.head_size = 128;
  out.dtype = dtype;
  return out;
}

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF8E4M3, DType::kI8, DType::kF16};

TEST_F(Gpu, IsWhatTheStatusSays) {
  ASSERT_GE(num_cuda_devices(), 1);
  std::printf("[ DEVICE   ] %s\n", cuda_status().c_str());
  Memory memory(Layout("B KV N H D", small_geometry()), 1);
  const Cache nowhere = cache_of({memory.buffers[0].data(), memory.buffers[1].data()}, memory.layout, 99);
  const std::string says = thrown([&] { copy_blocks(nowhere, std::vector<Pair>{{0, 1}}); }).what;
  EXPECT_NE(says.find("cuda:99: there are "), std::string::npos) << says;
}

/// Orders of a conversion between caches of vLLM's shapes, and where both lie: D device, P pinned, H pageable.
struct Shape {
  const char* src;
  const char* dst;
  DType dtype = DType::kBF16;
};
constexpr Shape kShapes[] = {{"B KV N H D", "B KV N H D"},  // runs of 32 KiB
                             {"KV B N H D", "KV B N H D"},  // of 16 KiB
                             {"B KV N H D", "B KV H N D"},  // rows of 256 bytes
                             {"B KV H N D", "KV B N H D"},
                             {"B H N KV D", "B L KV N H D"},                        // packed, TensorRT-LLM's
                             {"B N H KV D", "B H L KV N D"},                        // packed, the stored order
                             {"L B H N KV D", "B KV N H D"},                        // one allocation
                             {"B KV N H D", "B {key: H D/x N D%x, value: H D N}"},  // elements
                             {"B H {key: D N, value: N D}", "B KV H N D"},          // transposed keys
                             {"B KV N H D", "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}"},  // AMX
                             {"B KV N H D", "B KV H N D", DType::kF8E4M3},
                             {"B {key: H D/x N D%x, value: H D N}", "B KV N H D", DType::kF32}};

class GpuShapes : public Gpu, public testing::WithParamInterface<std::tuple<int, std::string>> {};
INSTANTIATE_TEST_SUITE_P(All, GpuShapes,
                         testing::Combine(testing::Range(0, static_cast<int>(std::size(kShapes))),
                                          testing::Values("DD", "HD", "PD", "DH", "DP")),
                         [](const auto& one) {
                           return std::get<1>(one.param) + "Shape" + std::to_string(std::get<0>(one.param));
                         });

TEST_P(GpuShapes, ConvertBlocks) {
  const Shape& shape = kShapes[static_cast<std::size_t>(std::get<0>(GetParam()))];
  const std::string places = std::get<1>(GetParam());
  const Geometry g = vllm_like(shape.dtype);
  Memory src(Layout(shape.src, g), 5);
  Memory dst(Layout(shape.dst, g), 6);
  Memory want = dst;
  const std::vector<Pair> pairs = scattered(g.num_blocks);
  test::convert(src, want, pairs);
  const auto placed = [&](Memory& memory, char place) {
    if (place == 'H') return on_host(memory);
    if (place == 'D') return twin(memory).cache;
    std::vector<std::byte*> tensors;
    for (const auto& buffer : memory.buffers) {
      tensors.push_back(take_pinned(std::ssize(buffer)));
      std::copy(buffer.begin(), buffer.end(), tensors.back());
    }
    return cache_of(std::move(tensors), memory.layout, -1);
  };
  const Cache from = placed(src, places[0]);
  const Cache to = placed(dst, places[1]);
  convert_blocks(from, to, pairs);
  for (std::size_t t = 0; t < dst.buffers.size(); ++t) {
    auto& buffer = dst.buffers[t];
    if (places[1] == 'D') move(buffer.data(), to.tensors()[t], std::ssize(buffer));
    if (places[1] == 'P') std::copy_n(to.tensors()[t], buffer.size(), buffer.begin());
  }
  EXPECT_TRUE(dst.buffers == want.buffers) << shape.src << " -> " << shape.dst;
}

TEST_F(Gpu, RandomLayouts) {
  std::mt19937 random(31);
  for (std::uint32_t round = 1; round <= 200; ++round) {
    const Geometry g = small_geometry(kDTypes[round % 5]);
    const std::int64_t shift = std::array{0, 16, 8, 2, 1}[round % 5];
    Memory src(Layout(random_order(random), g), round);
    Memory dst(Layout(random_order(random), g));
    const std::string orders = src.layout.order().text() + " -> " + dst.layout.order().text();
    const std::vector<Pair> pairs = random_pairs(random, 5);
    const Twin from = twin(src, 0, shift);
    const Twin to = twin(dst, 0, round % 3 == 0 ? shift : 0);
    Memory want = dst;
    test::convert(src, want, pairs);
    convert_blocks(from.cache, to.cache, pairs);
    ASSERT_EQ(fetched(to, dst), want.buffers) << orders;
    ASSERT_EQ(fetched(from, src), src.buffers) << orders;
    // Inside the source: all sources are read before any is overwritten.
    Memory moved = src;
    test::convert(src, moved, pairs);
    copy_blocks(from.cache, pairs);
    ASSERT_EQ(fetched(from, src), moved.buffers) << orders;
    // Zeroes.
    std::vector<std::int64_t> ids;
    for (const Pair& pair : pairs) ids.push_back(pair.dst);
    for (const Plane& plane : want.layout.planes()) {
      test::for_each_index(plane, [&](const Index& index) {
        if (position(ids, index[1]))
          std::memset(want.at(plane, index), 0, static_cast<std::size_t>(item_size(plane.dtype)));
      });
    }
    zero_blocks(to.cache, ids);
    ASSERT_EQ(fetched(to, dst), want.buffers) << orders;
  }
}

TEST_F(Gpu, TokensHeadsAndLayers) {
  std::mt19937 random(32);
  for (std::uint32_t round = 1; round <= 60; ++round) {
    const Geometry g = small_geometry(kDTypes[round % 5]);
    Memory cache(Layout(random_order(random), g), round);
    const std::string order = cache.layout.order().text();
    const Twin there = twin(cache);
    // Gather and scatter, by slot.
    const std::vector<std::int64_t> slots{7, 0, 18, 9, 13};
    Memory dense(dense_layout(cache.layout, 5), round + 1000);
    const Twin dense_there = twin(dense);
    Memory want = dense;
    apply(cache, want, [&](const Index& i) {
      const std::int64_t slot = slots[static_cast<std::size_t>(i[2])];
      return Index{i[0], slot / 4, slot % 4, i[3], i[4]};
    });
    Memory scattered_want = cache;
    apply(dense, scattered_want, [&](const Index& i) -> std::optional<Index> {
      const auto at = position(slots, i[1] * 4 + i[2]);
      if (!at) return {};
      return Index{i[0], 0, *at, i[3], i[4]};
    });
    scatter_tokens(there.cache, slots, dense_there.cache);
    ASSERT_EQ(fetched(there, cache), scattered_want.buffers) << order;
    const Twin again = twin(cache);
    gather_tokens(again.cache, slots, dense_there.cache);
    ASSERT_EQ(fetched(dense_there, dense), want.buffers) << order;
    // Seven tokens from the third on, of one head, to blocks twice as large.
    Geometry large = g;
    large.block_size = 8;
    large.num_blocks = 3;
    large.num_kv_heads = 4;
    Memory other(Layout(random_order(random), large), round + 2000);
    Memory other_want = other;
    const std::vector<std::int64_t> from{4, 1, 2};
    const std::vector<std::int64_t> to{2, 0};
    apply(cache, other_want, [&](const Index& i) -> std::optional<Index> {
      const auto block = position(to, i[1]);
      if (!block || i[3] != 3 || i[0] != 1) return {};
      const std::int64_t token = *block * 8 + i[2] - 5 + 2;
      if (token < 2 || token >= 9) return {};
      return Index{i[0], from[static_cast<std::size_t>(token / 4)], token % 4, 1, i[4]};
    });
    const Twin other_there = twin(other);
    convert_tokens(again.cache, other_there.cache, from, to, {2, 5, 7},
                   {.heads = RangePair{1, 3, 1}, .layers = Range{1, 1}});
    ASSERT_EQ(fetched(other_there, other), other_want.buffers) << order << " -> " << other.layout.order().text();
    // New keys and values of one layer; negative slots are skipped.
    const std::vector<std::int64_t> mapping{4, -1, 19, -7, 11};
    Memory written = cache;
    apply(dense, written, [&](const Index& i) -> std::optional<Index> {
      const auto at = position(mapping, i[1] * 4 + i[2]);
      if (!at || i[0] != 1) return {};
      return Index{i[0], 0, *at, i[3], i[4]};
    });
    const Twin tokens = twin(dense);
    const auto layer = [&](int tensor) {
      const std::int64_t bytes = 5 * 2 * 8 * item_size(g.dtype);
      return TokenTensor{
          tokens.tensors()[static_cast<std::size_t>(tensor)] + bytes, g.dtype, {5, 2, 8}, {16, 8, 1}, {0}};
    };
    write_tokens(again.cache, 1, layer(0), layer(1), mapping);
    ASSERT_EQ(fetched(again, cache), written.buffers) << order;
  }
}

/// The CPU's casts have oracles of their own.
TEST_F(Gpu, CastsAreTheCpusToTheBit) {
  std::mt19937 random(33);
  const DType types[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E5M2};
  for (std::uint32_t round = 1; round <= 100; ++round) {
    const DType a = types[random() % 5];
    const DType b = types[random() % 5];
    if (a == b) continue;
    Memory src(Layout(random_order(random), small_geometry(a)), round);  // any bits: NaN, Inf, subnormals
    Memory dst(Layout(random_order(random), small_geometry(b)), round + 1);
    Memory want = dst;
    PlanOptions options{.cast = true};
    if (is_f8(a) != is_f8(b)) options.scales = {{"key", {0.37F}}, {"value", {2.5F, 0.011F}}};
    const std::vector<Pair> pairs = random_pairs(random, 5);
    convert_blocks(on_host(src), on_host(want), pairs, options);
    const Twin from = twin(src);
    const Twin to = twin(dst);
    convert_blocks(from.cache, to.cache, pairs, options);
    ASSERT_EQ(fetched(to, dst), want.buffers)
        << src.layout.order().text() << " " << name_of(a) << " -> " << dst.layout.order().text() << " " << name_of(b);
  }
}

TEST_F(Gpu, ChainsAndCyclesLargerThanTheBuffer) {
  Geometry g = vllm_like();
  g.num_layers = 1;
  g.num_blocks = 150;
  g.head_size = 256;
  Memory memory(Layout("B KV N H D", g), 4);  // 64 KiB a block
  const Twin there = twin(memory);
  Memory want = memory;
  std::vector<Pair> pairs;
  const std::ptrdiff_t block = std::ssize(memory.buffers[0]) / 150;
  for (std::int64_t i = 0; i < 150; ++i) {
    pairs.push_back({i, (i + 1) % 150});
    std::copy_n(memory.buffers[0].begin() + i * block, block, want.buffers[0].begin() + (i + 1) % 150 * block);
  }
  copy_blocks(there.cache, pairs);
  EXPECT_TRUE(fetched(there, memory) == want.buffers);
}

TEST_F(Gpu, IdsInDeviceMemory) {
  for (const char* order : {"B KV N H D", "B KV H N/2 D N%2", "B H {key: D N, value: N D}"}) {
    Memory src(Layout(order, small_geometry()), 9);
    Memory dst(Layout("B KV H N D", small_geometry()), 10);
    Memory want = dst;
    test::convert(src, want, {{1, 3}, {0, 2}});
    const Twin from = twin(src);
    const Twin to = twin(dst);
    const auto* ids = upload(std::vector<std::int32_t>{1, 3, 0, 2, 4, 5});  // (4, 5) names nothing
    const DevicePairs pairs{{ids, 4, 2, 3}, {ids + 1, 4, 2, 3}};
    convert_blocks(from.cache, to.cache, pairs, {}, Stream(stream));
    finish(stream);
    EXPECT_EQ(fetched(to, dst), want.buffers) << order;
    EXPECT_EQ(thrown([&] { cuda_check({0}); }).what,
              "convert_blocks: id 5 in pairs[2] of the destination is not from 0 to 4; it was left out");
    EXPECT_NO_THROW(cuda_check({0}));  // said once
    // Slots.
    const std::vector<std::int64_t> slots{7, 0, 18, 9, 13};
    Memory dense(dense_layout(src.layout, 5), 1);
    apply(src, dense, [&](const Index& i) {
      const std::int64_t slot = slots[static_cast<std::size_t>(i[2])];
      return Index{i[0], slot / 4, slot % 4, i[3], i[4]};
    });
    const Twin dense_there = twin(Memory(dense.layout));
    gather_tokens(from.cache, DeviceList{upload(slots), 8, 1, 5}, dense_there.cache);
    EXPECT_EQ(fetched(dense_there, dense), dense.buffers) << order;
    zero_blocks(to.cache, DeviceList{ids, 4, 1, 3});
    for (const Plane& plane : want.layout.planes()) {
      test::for_each_index(plane, [&](const Index& index) {
        if (index[1] == 1 || index[1] == 3 || index[1] == 0) std::memset(want.at(plane, index), 0, 2);
      });
    }
    EXPECT_EQ(fetched(to, dst), want.buffers) << order;
  }
}

/// A producer, a verb and a consumer on one stream, again and again, and nobody waits in between.
TEST_F(Gpu, StreamsKeepTheirOrder) {
  Geometry g = vllm_like();
  g.num_layers = 1;
  const std::vector<Pair> pairs = scattered(g.num_blocks);
  constexpr int kRounds = 12;
  for (void* on : {stream, static_cast<void*>(nullptr)}) {
    for (const char* order : {"B KV N H D", "B KV H N D", "B {key: H D/x N D%x, value: H D N}"}) {
      Memory dst(Layout(order, g), 1);
      Memory src(Layout("B KV N H D", g), 2);
      const Twin from = twin(src);
      const Twin to = twin(dst);
      const std::int64_t bytes = std::ssize(src.buffers[0]);
      std::byte* in = take_pinned(kRounds * bytes);
      std::byte* out = take_pinned(kRounds * bytes);
      std::vector<Memory> wants;
      for (int round = 0; round < kRounds; ++round) {
        Memory filled(src.layout, static_cast<std::uint32_t>(100 + round));
        std::copy(filled.buffers[0].begin(), filled.buffers[0].end(), in + round * bytes);
        wants.push_back(dst);
        if (round > 0) wants.back() = wants[static_cast<std::size_t>(round - 1)];
        test::convert(filled, wants.back(), pairs);
      }
      for (int round = 0; round < kRounds; ++round) {
        runtime->copy(0, std::array{cuda::Copy{address(from.tensors()[0]), address(in + round * bytes), bytes}}, on);
        convert_blocks(from.cache, to.cache, pairs, {}, {}, Stream(on));
        runtime->copy(0, std::array{cuda::Copy{address(out + round * bytes), address(to.tensors()[0]), bytes}}, on);
      }
      finish(on);
      for (int round = 0; round < kRounds; ++round) {
        EXPECT_TRUE(std::equal(out + round * bytes, out + (round + 1) * bytes,
                               wants[static_cast<std::size_t>(round)].buffers[0].begin()))
            << order << ", round " << round;
      }
    }
  }
}

TEST_F(Gpu, ThreadsWithStreamsOfTheirOwn) {
  Geometry g = vllm_like();
  g.num_layers = 1;
  const std::vector<Pair> pairs = scattered(g.num_blocks);
  struct One {
    Memory src, dst, want;
    Twin from, to;
    cuda::StreamHandle on;
  };
  std::vector<One> all;
  for (std::uint32_t i = 0; i < 4; ++i) {
    Memory src(Layout("B KV N H D", g), i + 1);
    Memory dst(Layout("B KV H N D", g), i + 11);
    Memory want = dst;
    test::convert(src, want, pairs);
    all.push_back({src, dst, want, twin(src), twin(dst), runtime->make_stream(0)});
  }
  std::vector<std::thread> threads;
  for (One& one : all) {
    threads.emplace_back([&one, &pairs] {
      for (int i = 0; i < 20; ++i) {
        convert_blocks(one.from.cache, one.to.cache, pairs, {}, {}, Stream(one.on));
        convert_blocks(on_host(one.src), one.to.cache, pairs, {}, {}, Stream(one.on));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (One& one : all) {
    finish(one.on);
    EXPECT_TRUE(fetched(one.to, one.dst) == one.want.buffers);
  }
}

TEST_F(Gpu, AddressesBeyondFourGigabytes) {
  if (on_stand_in()) GTEST_SKIP() << "for a device's memory";
  Geometry g = vllm_like();
  g.num_layers = 1;
  g.num_kv_heads = 8;
  g.num_blocks = 140'000;  // 64 KiB each, 8.5 GiB
  const Layout layout("B KV N H D", g);
  std::byte* memory = nullptr;
  try {
    memory = take(0, layout.num_bytes());
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  const Cache large = cache_of({memory}, layout, 0);
  Geometry two = g;
  two.num_blocks = 2;
  Memory few(Layout("B KV N H D", two), 8);
  const std::int64_t block = std::ssize(few.buffers[0]) / 2;
  move(memory, few.buffers[0].data(), block);
  move(memory + 139'998 * block, few.buffers[0].data() + block, block);
  copy_blocks(large, std::vector<Pair>{{0, 139'999}, {139'998, 1}});
  Memory out(Layout("B KV H N D", two));
  Memory want = out;
  test::convert(few, want, {{0, 0}, {1, 1}});
  const Twin there = twin(out);
  convert_blocks(large, there.cache, std::vector<Pair>{{139'999, 0}, {1, 1}});
  EXPECT_TRUE(fetched(there, out) == want.buffers);
}

TEST_F(Gpu, FromOneDeviceToAnother) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "one device";
  const Geometry g = vllm_like();
  for (const char* order : {"B KV N H D", "B KV H N D"}) {
    Memory src(Layout("B KV N H D", g), 5);
    Memory dst(Layout(order, g), 6);
    Memory want = dst;
    test::convert(src, want, scattered(g.num_blocks));
    const Twin from = twin(src, 1);
    const Twin to = twin(dst, 0);
    convert_blocks(from.cache, to.cache, scattered(g.num_blocks));
    EXPECT_TRUE(fetched(to, dst) == want.buffers) << order;
  }
}

}  // namespace
}  // namespace kvstride
