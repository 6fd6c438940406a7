// SPDX-License-Identifier: Apache-2.0
// The CPU kernels at sizes where they cut, buffer and stream, against the oracle; each_instruction_set.sh runs them
// with each instruction set.
#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <cstring>

#include "cpu/numbers.h"
#include "kvstride/cpu.h"
#include "oracle.h"

namespace kvstride {
namespace {

using test::Memory;

TEST(Kernels, TheInstructionSetIsTheOneThatWasAskedFor) {
  const std::vector<std::string> sets = instruction_sets();
  ASSERT_FALSE(sets.empty());
  const char* expected = std::getenv("KVSTRIDE_EXPECT_TARGET");
  EXPECT_EQ(sets.front(), expected != nullptr ? expected : sets.front());
}

struct Case {
  const char* src;
  const char* dst;
};

const Case kCases[] = {
    {"B KV N H D", "B KV H N D"},
    {"B KV H N D", "B KV N H D"},
    {"B N H KV D", "B H N KV D"},
    {"B KV N H D", "B H {key: D N, value: D N}"},
    {"B H {key: D N, value: D N}", "B KV N H D"},
    {"B H {key: D N, value: N D}", "B N H KV D"},
    {"B KV N H D", "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}"},
    {"B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}", "B KV N H D"},
    {"B KV N H D", "B H {key: N/16 D/4 N%16 D%4, value: D/16 N/4 D%16 N%4}"},
    {"B H {key: N/16 D/4 N%16 D%4, value: D/16 N/4 D%16 N%4}", "B KV N H D"},
    {"B KV N H D", "{key: B H D/x N D%x, value: B H D N}"},
    {"{key: B H D/x N D%x, value: B H D N}", "B KV N H D"},
    {"KV B N H D", "B D KV N H"},
    {"B D KV N H", "N D H B KV"},
};

Geometry geometry(std::int64_t block_size, std::int64_t heads, std::int64_t dim, DType dtype) {
  Geometry g = test::small_geometry();
  g.num_layers = 1;
  g.num_blocks = 3;
  g.block_size = block_size;
  g.num_kv_heads = heads;
  g.head_size = dim;
  g.dtype = dtype;
  return g;
}

const std::vector<Pair> kPairs{{0, 2}, {2, 1}, {1, 0}};

using cpu::format_of;

float load(const std::byte* from, DType dtype) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, from, static_cast<std::size_t>(item_size(dtype)));
  if (dtype == DType::kF32) return std::bit_cast<float>(bits);
  if (dtype == DType::kBF16) return cpu::from_bf16(static_cast<std::uint16_t>(bits));
  return cpu::decode(format_of(dtype), bits);
}

void store(std::byte* to, DType dtype, float value) {
  const std::uint32_t bits = dtype == DType::kBF16 ? cpu::to_bf16(value) : cpu::encode(format_of(dtype), value);
  std::memcpy(to, &bits, static_cast<std::size_t>(item_size(dtype)));
}

/// Value by value: f8 to others is multiplied by the scale, others to f8 are divided by it.
void cast(Memory& src, Memory& dst, const std::vector<Pair>& pairs, const PlanOptions& options) {
  for (const Plane& plane : src.layout.planes()) {
    const Plane& twin = dst.layout.plane(plane.name);
    const std::vector<float>& scales = options.scales.at(plane.name);
    const bool multiply = item_size(plane.dtype) == 1;
    for (const Pair& pair : pairs) {
      test::for_each_index(plane, [&](Index index) {
        if (index[1] != pair.src) return;
        const float scale = scales[scales.size() == 1 ? 0 : static_cast<std::size_t>(index[3])];
        const float value = load(src.at(plane, index), plane.dtype);
        index[1] = pair.dst;
        store(dst.at(twin, index), twin.dtype, multiply ? value * scale : value / scale);
      });
    }
  }
}

TEST(Kernels, CopiesMatchTheOracle) {
  for (const Case& one : kCases) {
    for (const DType dtype : {DType::kU8, DType::kBF16, DType::kF32}) {
      for (const auto& [block_size, heads, dim] : {std::array<std::int64_t, 3>{16, 2, 64}, {48, 3, 80}, {16, 1, 576}}) {
        const Geometry g = geometry(block_size, heads, dim, dtype);
        Memory src(Layout(one.src, g), 7);
        Memory dst(Layout(one.dst, g));
        Memory want = dst;
        test::convert(src, want, kPairs);
        convert_blocks(src.cache(), dst.cache(), kPairs);
        ASSERT_TRUE(dst.buffers == want.buffers) << one.src << " → " << one.dst << " " << name_of(dtype) << " N "
                                                 << block_size << " H " << heads << " D " << dim;
      }
    }
  }
}

TEST(Kernels, CastsMatchTheOracle) {
  const PlanOptions options{.cast = true, .scales = {{"key", {0.37F}}, {"value", {0.5F, 3.0F}}}};
  const std::pair<DType, DType> types[] = {{DType::kBF16, DType::kF8E4M3},
                                           {DType::kF8E4M3, DType::kBF16},
                                           {DType::kF32, DType::kF8E5M2},
                                           {DType::kF8E5M2, DType::kF16}};
  for (const Case& one : kCases) {
    for (const auto& [from, to] : types) {
      for (const auto& [block_size, dim] : {std::pair<std::int64_t, std::int64_t>{16, 64}, {48, 80}}) {
        Memory src(Layout(one.src, geometry(block_size, 2, dim, from)), 7);
        Memory dst(Layout(one.dst, geometry(block_size, 2, dim, to)));
        Memory want = dst;
        cast(src, want, kPairs, options);
        convert_blocks(src.cache(), dst.cache(), kPairs, options);
        ASSERT_TRUE(dst.buffers == want.buffers) << one.src << " → " << one.dst << " " << name_of(from) << " → "
                                                 << name_of(to) << " N " << block_size << " D " << dim;
      }
    }
  }
}

/// Token ranges that cut a split walk backwards through the source.
TEST(Kernels, CastsOfSourcesThatStepBackwards) {
  Geometry g = geometry(4, 1, 8, DType::kF32);
  g.num_blocks = 1;
  Memory src(Layout("B KV N%2 N/2 D", g), 7);
  g.dtype = DType::kF8E4M3;
  const std::vector<std::int64_t> block{0};
  for (std::int64_t first = 0; first < 3; ++first) {
    Memory dst(Layout("B KV H D N", g));
    Memory want = dst;
    convert_tokens(src.cache(), dst.cache(), block, block, {first, 0, 2}, {.cast = true});
    for (const Plane& plane : src.layout.planes()) {
      test::for_each_index(plane, [&](Index index) {
        if (index[2] < first || index[2] >= first + 2) return;
        const float value = load(src.at(plane, index), DType::kF32);
        index[2] -= first;
        store(want.at(want.layout.plane(plane.name), index), DType::kF8E4M3, value);
      });
    }
    EXPECT_TRUE(dst.buffers == want.buffers) << "from token " << first;
  }
}

/// New tokens that are one token, expanded: the source steps by 0.
TEST(Kernels, CastsOfExpandedTokens) {
  Geometry g = geometry(4, 4, 8, DType::kF8E4M3);
  g.num_blocks = 1;
  for (const char* order : {"B KV N D H", "B KV H D N", "B KV N H D"}) {
    for (const std::array<std::int64_t, 3>& strides : {std::array<std::int64_t, 3>{8, 0, 1}, {0, 8, 1}, {0, 0, 1}}) {
      std::vector<float> values(64);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.25F * static_cast<float>(i + 1);
      const TokenTensor key{reinterpret_cast<const std::byte*>(values.data()), DType::kF32, {4, 4, 8}, strides};
      Memory dst(Layout(order, g));
      write_tokens(dst.cache(), 0, key, key, std::vector<std::int64_t>{0, 1, 2, 3});
      for (const Plane& plane : dst.layout.planes()) {
        test::for_each_index(plane, [&](Index index) {
          const std::int64_t at = index[2] * strides[0] + index[3] * strides[1] + index[4];
          std::byte want{};
          store(&want, DType::kF8E4M3, values[static_cast<std::size_t>(at)]);
          EXPECT_EQ(*dst.at(plane, index), want) << order;
        });
      }
    }
  }
}

}  // namespace
}  // namespace kvstride
