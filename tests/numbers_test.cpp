// SPDX-License-Identifier: Apache-2.0
// Narrow floats: every code decodes and encodes back, rounding is to nearest even, f8 saturates.
#include "cpu/numbers.h"

#include <gtest/gtest.h>

#include <ostream>
#include <string>

namespace kvstride::cpu {

void PrintTo(const Format& format, std::ostream* out) {
  *out << format.bits << " bits, " << format.mantissa << " of mantissa";
}

namespace {

class Formats : public testing::TestWithParam<Format> {};

TEST_P(Formats, EveryCodeComesBack) {
  const Format& format = GetParam();
  for (std::uint32_t code = 0; code < (1U << format.bits); ++code) {
    const float value = decode(format, code);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(decode(format, encode(format, value))));
    } else if (!std::isinf(value)) {
      EXPECT_EQ(encode(format, value), code);
    }
  }
}

TEST_P(Formats, HalfwayGoesToTheEvenNeighbour) {
  const Format& format = GetParam();
  for (std::uint32_t code = 0; code + 1 < (1U << (format.bits - 1)); ++code) {
    const float low = decode(format, code);
    const float high = decode(format, code + 1);
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const float middle = low + (high - low) / 2;
    EXPECT_EQ(encode(format, middle), code % 2 == 0 ? code : code + 1);
    EXPECT_EQ(encode(format, std::nextafter(middle, low)), code);
    EXPECT_EQ(encode(format, std::nextafter(middle, high)), code + 1);
  }
}

TEST_P(Formats, BeyondTheLargest) {
  const Format& format = GetParam();
  const float infinity = std::numeric_limits<float>::infinity();
  const float top = decode(format, encode(format, 1.0e38F));
  const float bottom = decode(format, encode(format, -infinity));
  EXPECT_EQ(top, format.saturate ? format.max : infinity);
  EXPECT_EQ(bottom, format.saturate ? -format.max : -infinity);
  EXPECT_EQ(decode(format, encode(format, format.max)), format.max);
}

std::string format_name(const testing::TestParamInfo<Format>& info) {
  const char* names[] = {"f16", "f8_e4m3", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz"};
  return names[info.index];
}

INSTANTIATE_TEST_SUITE_P(All, Formats, testing::Values(kF16, kE4M3, kE5M2, kE4M3Fnuz, kE5M2Fnuz), format_name);

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.0F), 0x3F80);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3F808000U)), 0x3F80);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3F818000U)), 0x3F82);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3F808001U)), 0x3F81);
  EXPECT_TRUE(std::isnan(from_bf16(to_bf16(std::bit_cast<float>(0x7F800001U)))));
  EXPECT_EQ(from_bf16(to_bf16(65536.0F)), 65536.0F);
}

}  // namespace
}  // namespace kvstride::cpu
