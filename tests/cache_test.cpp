// SPDX-License-Identifier: Apache-2.0
// Caches and views.
#include <gtest/gtest.h>

#include "oracle.h"

namespace kvstride {
namespace {

using test::Memory;
using test::random_order;
using test::small_geometry;
using test::thrown;

TEST(View, ShowsEveryElementOfRandomLayouts) {
  std::mt19937 random(7);
  int strided = 0;
  for (int round = 0; round < 300; ++round) {
    const std::string text = random_order(random);
    const Layout layout(text, small_geometry());
    for (const Plane& plane : layout.planes()) {
      PlaneView view;
      const auto error = thrown([&] { view = plane_view(layout, plane.name, 1, false); });
      if (error.code >= 0) {
        EXPECT_EQ(error.code, static_cast<int>(ErrorCode::kNotStrided)) << error.what;
        continue;
      }
      ++strided;
      ASSERT_EQ(view.shape, (std::vector<std::int64_t>{5, 4, 2, 8})) << text;
      test::for_each_index(plane, [&](const Index& i) {
        if (i[0] != 1) return;
        const std::int64_t byte = view.byte_offset + 2 * (i[1] * view.strides[0] + i[2] * view.strides[1] +
                                                          i[3] * view.strides[2] + i[4] * view.strides[3]);
        ASSERT_EQ(byte, layout.offset(plane, i).byte) << text;
      });
    }
  }
  EXPECT_GT(strided, 50);
}

TEST(View, LengthOneAxesHaveTheNextInnerExtent) {
  Geometry g = small_geometry();
  g.num_kv_heads = 1;
  const PlaneView view = plane_view(Layout("B KV N H D", g), "key", 0, false);
  EXPECT_EQ(view.strides, (std::vector<std::int64_t>{64, 8, 8, 1}));
}

TEST(View, ScalesAtOddStridesAreNotStrided) {
  Geometry g = small_geometry();
  g.head_size = 5;
  const Layout layout("B N H KV {data: D i8, scale: D[1] f32}", g);
  EXPECT_EQ(thrown([&] { plane_view(layout, "key_scale", 0, true); }).code, static_cast<int>(ErrorCode::kNotStrided));
  EXPECT_NO_THROW(plane_view(layout, "value", 0, false));
}

TEST(Cache, TensorsMayLieInsideEachOther) {
  Geometry g = small_geometry();
  std::vector<std::byte> memory(1 << 16);
  // Per-layer views of B L KV N H D: block stride covers both layers.
  const Layout layer("B@1024 KV N H D", g);
  EXPECT_NO_THROW(Cache({memory.data(), memory.data() + 512}, layer));
  const auto error = thrown([&] { Cache({memory.data(), memory.data() + 128}, layer); });
  EXPECT_EQ(error.code, static_cast<int>(ErrorCode::kArgument));
  EXPECT_NE(error.what.find("share memory"), std::string::npos);
  EXPECT_NE(thrown([&] { Cache({memory.data()}, layer); }).what.find("1 tensors given"), std::string::npos);
  EXPECT_NE(thrown([&] { Cache({memory.data(), nullptr}, layer); }).what.find("tensor 1 is null"), std::string::npos);
}

}  // namespace
}  // namespace kvstride
