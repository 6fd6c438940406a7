// SPDX-License-Identifier: Apache-2.0
// The notation: what parses, what is refused and where the error points.
#include <gtest/gtest.h>

#include "oracle.h"

namespace kvstride {
namespace {

using test::thrown;

TEST(Notation, ErrorsPointAtTheColumn) {
  struct Case {
    const char* text;
    int column;
    const char* says;
  };
  const Case cases[] = {
      {"", 1, "empty"},
      {"   ", 4, "empty"},
      {"B KV N$ H D", 7, "unexpected character '$'"},
      {"B Q KV D", 3, "unknown term 'Q'"},
      {"BN KV D", 1, "unknown term 'BN'"},
      {"B KV KV D", 3, "KV inside KV"},
      {"KV {a: KV D, b: D}", 1, "KV inside KV"},
      {"B {key: N H D, value N H D}", 22, "expected ':'"},
      {"B {key: N H D", 14, "expected '}'"},
      {"B N/0 KV D", 5, "is 0"},
      {"B N%0 KV D", 5, "is 0"},
      {"B KV D[0]", 8, "is 0"},
      {"B KV D[D/0]", 10, "is 0"},
      {"B@99999999999999999999 KV D", 3, "does not fit"},
      {"B KV D} ", 7, "unexpected '}'"},
      {"B KV D bf16 N", 13, "a dtype ends"},
      {"NHD", 1, "vllm/flashinfer-nhd"},
      {"HND", 1, "vllm/flashinfer-hnd"},
      {"B: N H D", 1, "cannot be a name"},
  };
  for (const Case& c : cases) {
    const auto error = thrown([&] { Order::parse(c.text); });
    EXPECT_EQ(error.code, static_cast<int>(ErrorCode::kLayout)) << c.text;
    EXPECT_EQ(error.column, c.column) << c.text << ": " << error.what;
    EXPECT_NE(error.what.find(c.says), std::string::npos) << c.text << ": " << error.what;
  }
}

TEST(Notation, PrintsAsWritten) {
  for (const char* text :
       {"B KV N H D", "  B   {key: H D/x N D%x,value: H D N} ", "LBHNC", "key: N H D|value: H D N"}) {
    EXPECT_EQ(Order::parse(text).text(), text);
  }
}

TEST(Notation, DeepNestingIsRefusedNotFollowed) {
  std::string text = "B ";
  for (int i = 0; i < 200; ++i) text += "{a: ";
  EXPECT_NE(thrown([&] { Order::parse(text); }).what.find("nested deeper"), std::string::npos);
  EXPECT_NE(thrown([&] { Order::parse(std::string(100000, 'B')); }).what.find("longer than"), std::string::npos);
}

TEST(Notation, AxesAreTakenOut) {
  EXPECT_EQ(Order::parse("B L H N KV D").without(Axis::kLayer).text(), "B H N KV D");
  EXPECT_TRUE(Order::parse("{key: L B D, value: L B D}").has(Axis::kLayer));
  EXPECT_FALSE(Order::parse("B KV N H D").has(Axis::kLayer));
}

TEST(Notation, StridesAreSet) {
  const Order order = Order::parse("{key: B H D/x N D%x, value: B H D N}");
  EXPECT_EQ(order.with_strides({{{Axis::kBlock, 4096}}, 512}).text(),
            "{key: B@4096 H D/x N D%x, value@512: B@4096 H D N}");
  EXPECT_NE(thrown([&] { order.with_strides({{{Axis::kDim, 4}}, {}}); }).what.find("D is split"), std::string::npos);
  EXPECT_NE(thrown([&] { order.with_strides({{{Axis::kLayer, 4}}, {}}); }).what.find("no L"), std::string::npos);
}

}  // namespace
}  // namespace kvstride
