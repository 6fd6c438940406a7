// SPDX-License-Identifier: Apache-2.0
// Conversions beside the best copy of the same bytes: cold data, alternating in one process, medians of ratios.
//
// The best copy is the faster of memcpy and of a conversion between two equal layouts in one run, which streams. Usage:
// kvstride_bench [THREADS]
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kvstride/kvstride.h"

namespace {

using namespace kvstride;

constexpr std::size_t kHuge = std::size_t{2} << 20;
constexpr std::size_t kSlot = std::size_t{64} << 20;  // room for one side of one round
constexpr std::size_t kSlots = 8;                     // 512 MiB a side: nothing stays in the caches
constexpr std::size_t kRounds = 25;

struct Work {
  const char* name;
  const char* src;
  const char* dst;
  DType src_dtype = DType::kBF16;
  DType dst_dtype = DType::kBF16;
  double target = 0;
};

const Work kWork[] = {
    {"copy, K/V first", "KV B N H D", "KV B N H D", DType::kBF16, DType::kBF16, 0.95},
    {"copy, blocks first", "B KV N H D", "B KV N H D", DType::kBF16, DType::kBF16, 0.95},
    {"NHD to HND", "B KV N H D", "B KV H N D", DType::kBF16, DType::kBF16, 0.85},
    {"HND to NHD", "B KV H N D", "B KV N H D", DType::kBF16, DType::kBF16, 0.85},
    {"packed NHD to NHD", "B N H KV D", "B KV N H D", DType::kBF16, DType::kBF16, 0.85},
    {"blocks first to stored order", "B KV N H D", "B H L KV N D", DType::kBF16, DType::kBF16, 0.85},
    {"BLHNC to stored order", "BLHNC", "B H L KV N D", DType::kBF16, DType::kBF16, 0.85},
    {"LBNHC to stored order", "LBNHC", "B H L KV N D", DType::kBF16, DType::kBF16, 0.85},
    {"x-split K", "B KV N H D", "{key: B H D/x N D%x, value: B H N D}", DType::kBF16, DType::kBF16, 0.60},
    {"K and V transposed", "B KV N H D", "B H {key: D N, value: D N}", DType::kBF16, DType::kBF16, 0.45},
    {"from K and V transposed", "B H {key: D N, value: D N}", "B KV N H D", DType::kBF16, DType::kBF16, 0.45},
    {"AMX tiles", "B KV N H D", "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}", DType::kBF16, DType::kBF16,
     0.45},
    {"from AMX tiles", "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}", "B KV N H D", DType::kBF16,
     DType::kBF16, 0.45},
    {"transposed, 1 byte", "B KV N H D", "B H {key: D N, value: D N}", DType::kI8, DType::kI8, 0.30},
    {"bf16 to f8_e4m3", "B KV N H D", "B KV N H D", DType::kBF16, DType::kF8E4M3, 0.60},
    {"f8_e4m3 to bf16", "B KV N H D", "B KV N H D", DType::kF8E4M3, DType::kBF16, 0.60},
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::byte* huge(std::size_t bytes) {
  void* raw = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  const auto at = (reinterpret_cast<std::uintptr_t>(raw) + kHuge - 1) / kHuge * kHuge;
  auto* out = reinterpret_cast<std::byte*>(at);
  madvise(out, bytes, MADV_HUGEPAGE);
  std::memset(out, 1, bytes);
  return out;
}

Cache cache_at(std::byte* memory, const Layout& layout) {
  std::vector<std::byte*> tensors;
  for (std::int64_t t = 0; t < layout.num_tensors(); ++t) tensors.push_back(memory + t * layout.num_bytes());
  return Cache(tensors, layout);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  set_num_threads(argc > 1 ? std::atoi(argv[1]) : 1);
  std::byte* sources = huge(kSlot * kSlots);
  std::byte* targets = huge(kSlot * kSlots);
  std::vector<Pair> pairs;
  for (std::int64_t i = 0; i < 16; ++i) pairs.push_back({i, (i * 7 + 3) % 16});
  std::printf("%-30s %8s %8s %8s %8s\n", "work", "GB/s", "memcpy", "ratio", "target");
  for (const Work& work : kWork) {
    Geometry g;
    g.num_layers = 32, g.num_blocks = 16, g.block_size = 16, g.num_kv_heads = 8, g.head_size = 128;
    g.dtype = work.src_dtype;
    const Layout src(work.src, g);
    g.dtype = work.dst_dtype;
    const Layout dst(work.dst, g);
    g.dtype = DType::kU8;
    const auto bytes = std::max(src.num_bytes() * src.num_tensors(), dst.num_bytes() * dst.num_tensors());
    Geometry flat;
    flat.head_size = bytes;
    flat.dtype = DType::kU8;
    const Layout run("state: D", flat);
    std::vector<double> ratios;
    std::vector<double> rates;
    std::vector<double> copies;
    for (std::size_t round = 0; round < kRounds; ++round) {
      const auto slot = [&](std::size_t n) { return (round * 3 + n) % kSlots * kSlot; };
      const Cache from = cache_at(sources + slot(0), src);
      const Cache to = cache_at(targets + slot(0), dst);
      const Cache run_from = cache_at(sources + slot(1), run);
      const Cache run_to = cache_at(targets + slot(1), run);
      const double t0 = now();
      convert_blocks(from, to, pairs, {.cast = work.src_dtype != work.dst_dtype});
      const double t1 = now();
      convert_blocks(run_from, run_to, std::vector<Pair>{{0, 0}});
      const double t2 = now();
      std::memcpy(targets + slot(2), sources + slot(2), static_cast<std::size_t>(bytes));
      const double t3 = now();
      ratios.push_back(std::min(t2 - t1, t3 - t2) / (t1 - t0));
      rates.push_back(static_cast<double>(bytes) / (t1 - t0) / 1e9);
      copies.push_back(static_cast<double>(bytes) / (t3 - t2) / 1e9);
    }
    std::printf("%-30s %8.2f %8.2f %8.2f %8.2f\n", work.name, median(rates), median(copies), median(ratios),
                work.target);
  }
  return 0;
}
