// SPDX-License-Identifier: Apache-2.0
// Detection: unique where all readings agree, ambiguous where not, and binding of named tensors.
#include <gtest/gtest.h>

#include "oracle.h"

namespace kvstride {
namespace {

using test::thrown;

Hints hints(std::int64_t blocks, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  Hints out;
  out.num_blocks = blocks;
  out.block_size = tokens;
  out.num_kv_heads = heads;
  out.head_size = dim;
  return out;
}

TEST(Detect, C03TwoBlocksAreAmbiguous) {
  const auto error = thrown([] { detect({{{2, 2, 4, 3, 8}, {}, 0}}, {}); });
  EXPECT_EQ(error.code, static_cast<int>(ErrorCode::kAmbiguous));
  EXPECT_NE(error.what.find("[2, 2, 4, 3, 8]"), std::string::npos);
  EXPECT_NE(error.what.find("vllm/flashinfer-nhd"), std::string::npos);
  EXPECT_NE(error.what.find("vllm/flash-attention-nhd"), std::string::npos);
  const Hints item{.dtype = DType::kF32};
  const Reading blocks = detect({{{2, 2, 4, 3, 8}, {}, 4}}, item, {"vllm/flashinfer-nhd"});
  EXPECT_EQ(blocks.layout.offset("key", {0, 1, 0, 0, 0}).byte, 192 * 4);
  const Reading kv = detect({{{2, 2, 4, 3, 8}, {}, 4}}, item, {"vllm/flash-attention-nhd"});
  EXPECT_EQ(kv.layout.offset("key", {0, 1, 0, 0, 0}).byte, 96 * 4);
}

TEST(Detect, C04TwoHeadsPackedOrSplit) {
  EXPECT_EQ(thrown([] { detect({{{7, 16, 2, 256}, {}, 0}}, {}); }).code, static_cast<int>(ErrorCode::kAmbiguous));
  EXPECT_EQ(thrown([] {
              detect({{{7, 16, 2, 256}, {}, 0}}, {.num_kv_heads = 2});
            }).code,
            static_cast<int>(ErrorCode::kAmbiguous));
}

TEST(Detect, C06ThreeContractsOfOneBackend) {
  const Hints known = hints(3, 16, 1, 16);
  EXPECT_EQ(detect({{{2, 3, 16, 1, 16}, {}, 0}}, known).order, "KV B N H D");
  EXPECT_EQ(detect({{{3, 2, 16, 1, 16}, {}, 0}}, known).order, "B KV N H D");
  EXPECT_EQ(detect({{{3, 1, 16, 32}, {}, 0}}, known).order, "B N H KV D");
  EXPECT_EQ(thrown([&] { detect({{{3, 4, 16, 1, 16}, {}, 0}}, known); }).code, static_cast<int>(ErrorCode::kUnknown));
}

TEST(Detect, StridesDecide) {
  const Hints known = hints(7, 16, 3, 32);
  const std::vector<std::int64_t> logical{7, 2, 16, 3, 32};
  EXPECT_EQ(detect({{logical, {}, 0}}, known).order, "B KV N H D");
  EXPECT_EQ(detect({{logical, {3072, 1536, 32, 512, 1}, 0}}, known).order, "B KV H N D");
  EXPECT_EQ(detect({{logical, {3072, 96, 192, 32, 1}, 0}}, known).order, "B N KV H D");
  // Padded blocks keep their stride in the layout.
  const Reading padded = detect({{logical, {4096, 1536, 96, 32, 1}, 0}}, known);
  EXPECT_EQ(padded.layout.offset("value", {0, 2, 0, 0, 0}).byte, 2 * (2 * 4096 + 1536));
  // Overlapping rows are nothing.
  EXPECT_EQ(thrown([&] {
              detect({{logical, {3000, 1536, 96, 32, 1}, 0}}, known);
            }).code,
            static_cast<int>(ErrorCode::kUnknown));
}

TEST(Detect, BadQuestions) {
  EXPECT_NE(thrown([] { detect({{{7, 0, 3}, {}, 0}}, {}); }).what.find("length 0"), std::string::npos);
  EXPECT_NE(thrown([] { detect({{{7, 2, 3}, {1, 2}, 0}}, {}); }).what.find("2 strides"), std::string::npos);
  EXPECT_NE(thrown([] { detect({{{7, 2}, {-1, 1}, 0}}, {}); }).what.find("negative stride"), std::string::npos);
  EXPECT_NE(thrown([] { detect({{{7, 2}, {}, 0}}, {}, {"vllm/cpu-vec"}); }).what.find("opaque"), std::string::npos);
  EXPECT_NE(thrown([] { detect({{{7, 2}, {}, 0}}, {}, {"nobody"}); }).what.find("nobody"), std::string::npos);
  EXPECT_NE(thrown([] { detect({{{7, 2}, {}, 0}}, {.head_size = 0}); }).what.find("head_size is 0"), std::string::npos);
}

TEST(Bind, DeclaredShapeOfAnOpaqueRow) {
  // vLLM's CPU cache: the last two dimensions lie, the first two and their strides do not.
  const TensorShape tensor{{7, 3, 16, 64}, {4096, 1024, 64, 1}, 2};
  const Layout layout = bind_layout("vllm/cpu-vec", {tensor}, {.dtype = DType::kBF16});
  EXPECT_EQ(layout.offset("key", {0, 2, 5, 1, 3}).byte, 2 * (2 * 4096 + 1024 + 3 * 16 + 5));
  EXPECT_EQ(layout.offset("value", {0, 2, 5, 1, 3}).byte, 2 * (2 * 4096 + 1024 + 512 + 5 * 32 + 3));
  // Inner strides that are not contiguous contradict it.
  EXPECT_THROW(bind_layout("vllm/cpu-vec", {{{7, 3, 16, 64}, {4096, 64, 192, 1}, 2}}, {.dtype = DType::kBF16}), Error);
}

TEST(Bind, TwoSlotsWithTheLargerStrideOnKV) {
  Hints known = hints(7, 16, 3, 32);
  known.dtype = DType::kBF16;
  const Layout layout = bind_layout("vllm/rocm-lhbnc", {{{7, 2, 16, 96}, {1536, 10752, 96, 1}, 2}}, known);
  EXPECT_EQ(layout.offset("value", {0, 1, 0, 0, 0}).byte, 2 * (10752 + 1536));
  EXPECT_THROW(bind_layout("vllm/rocm-lbhnc", {{{7, 2, 16, 96}, {1536, 10752, 96, 1}, 2}}, known), Error);
}

TEST(Bind, FlatBuffersAndErrors) {
  const Hints known = Hints::from([] {
    Geometry g;
    g.num_blocks = 7;
    g.block_size = 16;
    g.num_kv_heads = 3;
    g.head_size = 32;
    return g;
  }());
  EXPECT_EQ(bind_layout("B KV N H D", {{{43008}, {}, 1}}, known).num_bytes(), 43008);
  EXPECT_EQ(bind_layout("B KV N H D", {{{50000}, {}, 1}}, known).num_bytes(), 43008);
  const auto small = thrown([&] { bind_layout("B KV N H D", {{{43007}, {}, 1}}, known); });
  EXPECT_NE(small.what.find("43008 bytes"), std::string::npos) << small.what;
  const auto wrong = thrown([&] { bind_layout("B KV N H D", {{{7, 2, 16, 32, 3}, {}, 2}}, known); });
  EXPECT_NE(wrong.what.find("[7, 2, 16, 32, 3]"), std::string::npos) << wrong.what;
  EXPECT_NE(wrong.what.find("[7, 2, 16, 3, 32]"), std::string::npos) << wrong.what;
}

TEST(BlockBytes, SameForLayoutsThatMoveWholeBlocks) {
  Geometry g;
  g.num_blocks = 4;
  g.block_size = 8;
  g.num_kv_heads = 3;
  g.head_size = 16;
  const auto bytes = [&](const char* order) { return block_bytes(Layout(order, g)); };
  EXPECT_EQ(bytes("B KV N H D"), bytes("B H N KV D"));
  EXPECT_EQ(bytes("KV B N H D"), bytes("{key: B H D/x N D%x, value: B H D N}"));
  EXPECT_FALSE(bytes("B KV N H D") == bytes("KV B N H D"));
  EXPECT_FALSE(bytes("B KV N H D") == bytes("H B N KV D"));
  EXPECT_EQ(bytes("B KV N H D").runs[0].size(), 1U);
}

}  // namespace
}  // namespace kvstride
