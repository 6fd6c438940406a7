// SPDX-License-Identifier: Apache-2.0
// The table of known layouts: every row parses, has a name of its own and is bound by the shape that it declares.
#include <gtest/gtest.h>

#include <set>

#include "layout/shape_text.h"
#include "oracle.h"

namespace kvstride {
namespace {

Geometry geometry() {
  Geometry out;
  out.num_layers = 5;
  out.num_blocks = 7;
  out.block_size = 32;
  out.num_kv_heads = 6;
  out.head_size = 128;
  out.symbols = {{"k", 16}, {"g", 2}};
  return out;
}

TEST(Registry, RowsAreWhole) {
  std::set<std::string_view> names;
  for (const Entry& row : registry()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_EQ(row.name.find(' '), std::string_view::npos);
    EXPECT_NE(row.name.find('/'), std::string_view::npos);
    EXPECT_NO_THROW(Layout(row.order, geometry())) << row.name;
    EXPECT_EQ(find_entry(row.name), &row);
    EXPECT_EQ(row.opaque, !row.literal.empty()) << row.name;
    EXPECT_EQ(split(row.shape, '|').size(), Order::parse(row.order).parts().size()) << row.name;
    EXPECT_FALSE(row.source.empty()) << row.name;
  }
  EXPECT_EQ(find_entry("vllm/none"), nullptr);
}

TEST(Registry, DeclaredShapesHoldTheBytesOfTheLayout) {
  Geometry g = geometry();
  Sizes sizes{{"L", 5}, {"B", 7}, {"N", 32}, {"H", 6}, {"D", 128}, {"k", 16}, {"g", 2}};
  for (const Entry& row : registry()) {
    const bool declares_layers = row.shape.find('L') != std::string_view::npos;
    g.num_layers = declares_layers ? 5 : 1;
    const Layout layout(row.order, g);
    std::int64_t part = 0;
    for (const std::string& shape : split(row.shape, '|')) {
      std::int64_t elements = 1;
      for (const std::string& dim : split(shape, ',')) {
        const auto length = evaluate(dim, sizes);
        ASSERT_TRUE(length) << row.name << ": " << dim;
        elements *= *length;
      }
      EXPECT_EQ(elements * layout.natural_item_size(part), layout.part_bytes(part)) << row.name;
      ++part;
    }
  }
}

}  // namespace
}  // namespace kvstride
