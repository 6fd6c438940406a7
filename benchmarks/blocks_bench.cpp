// SPDX-License-Identifier: Apache-2.0
// Bytes per second of convert_blocks from blocks-first memory into other layouts, beside memcpy of as many bytes.
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "kvstride/kvstride.h"

using namespace kvstride;

namespace {

/// 8 layers, 64 blocks of 16 tokens, 8 heads of 128 in bf16: 32 MiB in all.
constexpr std::int64_t kBlocks = 64;
Geometry geometry() {
  return {.num_layers = 8, .num_blocks = kBlocks, .block_size = 16, .num_kv_heads = 8, .head_size = 128};
}

constexpr const char* kOrders[] = {
    "B KV N H D",
    "KV B N H D",
    "B KV H N D",
    "B N H KV D",
    "B H N KV D",
    "B H L KV N D",
    "{key: B H D/x N D%x, value: B H D N}",
    "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}",
};

struct Buffers {
  std::vector<std::vector<std::byte>> tensors;
  explicit Buffers(const Layout& layout) {
    for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
      tensors.emplace_back(static_cast<std::size_t>(layout.num_bytes()), std::byte{1});
    }
  }
  Cache cache(const Layout& layout) {
    std::vector<std::byte*> pointers;
    for (auto& tensor : tensors) pointers.push_back(tensor.data());
    return {std::move(pointers), layout};
  }
};

void convert(benchmark::State& state) {
  const Layout src("B KV N H D", geometry());
  const Layout dst(kOrders[state.range(0)], geometry());
  Buffers from(src);
  Buffers to(dst);
  std::vector<Pair> pairs;
  for (std::int64_t i = 0; i < kBlocks; ++i) pairs.push_back({i, (i * 37) % kBlocks});  // scattered
  Plan plan(from.cache(src), to.cache(dst));
  plan.bind(pairs);
  for (auto _ : state) plan.run();
  state.SetBytesProcessed(state.iterations() * plan.num_bytes());
  state.SetLabel(kOrders[state.range(0)]);
}
BENCHMARK(convert)->DenseRange(0, std::size(kOrders) - 1)->Unit(benchmark::kMillisecond);

void build_and_bind(benchmark::State& state) {
  const Layout src("B KV N H D", geometry());
  const Layout dst("B H N KV D", geometry());
  std::vector<Pair> pairs;
  for (std::int64_t i = 0; i < kBlocks; ++i) pairs.push_back({i, (i * 37) % kBlocks});
  for (auto _ : state) {
    Plan plan(src, dst);
    plan.bind(pairs);
    benchmark::DoNotOptimize(plan.num_copies());
  }
}
BENCHMARK(build_and_bind)->Unit(benchmark::kMicrosecond);

void memory_copy(benchmark::State& state) {
  const Layout layout("B KV N H D", geometry());
  Buffers from(layout);
  Buffers to(layout);
  for (auto _ : state) {
    for (std::size_t i = 0; i < from.tensors.size(); ++i) {
      std::memcpy(to.tensors[i].data(), from.tensors[i].data(), from.tensors[i].size());
      benchmark::ClobberMemory();
    }
  }
  state.SetBytesProcessed(state.iterations() * layout.num_bytes() * layout.num_tensors());
}
BENCHMARK(memory_copy)->Unit(benchmark::kMillisecond);

}  // namespace
