// SPDX-License-Identifier: Apache-2.0
// Packed products of bf16: panels against their definition, the machine's matrix unit against plain loops.
#include "cpu/products.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "attention_oracle.h"
#include "cpu/attention.h"

namespace kvstride::cpu {
namespace {

constexpr std::byte kLeft{0xAB};

double element(const std::vector<std::byte>& panels, std::int64_t at) {
  return test::decode_element(DType::kBF16, &panels[static_cast<std::size_t>(2 * at)]);
}

/// Rows of a cache, of a dtype, some apart.
struct Rows {
  std::vector<std::byte> memory;
  std::vector<const std::byte*> rows;
  std::int64_t item;
  DType dtype;

  Rows(std::mt19937& random, DType type, std::int64_t count, std::int64_t dim) : item(item_size(type)), dtype(type) {
    const std::int64_t step = dim * item + 6 * item;
    // Whoever reads behind the last row is seen by the sanitizers.
    memory.resize(static_cast<std::size_t>((count - 1) * step + dim * item));
    for (std::int64_t r = 0; r < count; ++r) {
      std::byte* row = &memory[static_cast<std::size_t>(r * step)];
      for (std::int64_t d = 0; d < dim; ++d) {
        test::encode_element(type, row + d * item, static_cast<float>(static_cast<int>(random() % 25) - 12) / 4);
      }
      rows.push_back(row);
    }
  }
  double at(std::int64_t row, std::int64_t dim) const {
    return test::decode_element(dtype, rows[static_cast<std::size_t>(row)] + dim * item);
  }
};

constexpr DType kDTypes[] = {DType::kBF16, DType::kF8E4M3, DType::kF8E5M2};

TEST(Products, PanelsOfPairsAreWhatTheyAreSaidToBe) {
  std::mt19937 random(3);
  const std::int64_t panel = attention_math().panel;
  for (const DType dtype : kDTypes) {
    for (const std::int64_t count : {1, 2, 3, 31, 32, 33, 100}) {
      for (const std::int64_t dim : {1, 2, 7, 20, 32, 33, 64, 96, 128, 130, 200}) {
        const Rows rows(random, dtype, count, dim);
        const auto padded = [](std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; };
        const std::int64_t depth = padded(dim, kPairUnit);
        std::vector<std::byte> keys(static_cast<std::size_t>(2 * depth * padded(count, panel)), kLeft);
        key_loops(dtype).pack_pairs(keys.data(), rows.rows.data(), count, dim);
        for (std::int64_t k = 0; k < padded(count, panel); ++k) {
          for (std::int64_t d = 0; d < depth; ++d) {
            const double expected = k < count && d < dim ? rows.at(k, d) : 0.0;
            ASSERT_EQ(element(keys, k / panel * panel * depth + (d / 2 * panel + k % panel) * 2 + d % 2), expected)
                << name_of(dtype) << " " << count << " x " << dim << ": key " << k << " dim " << d;
          }
        }
        const std::int64_t tokens = padded(count, kPairUnit);
        std::vector<std::byte> values(static_cast<std::size_t>(2 * tokens * padded(dim, panel)), kLeft);
        ASSERT_TRUE(value_loops(dtype).pack_pairs(values.data(), rows.rows.data(), count, dim));
        for (std::int64_t d = 0; d < padded(dim, panel); ++d) {
          for (std::int64_t t = 0; t < tokens; ++t) {
            const double expected = t < count && d < dim ? rows.at(t, d) : 0.0;
            ASSERT_EQ(element(values, d / panel * panel * tokens + (t / 2 * panel + d % panel) * 2 + t % 2), expected)
                << name_of(dtype) << " " << count << " x " << dim << ": token " << t << " dim " << d;
          }
        }
      }
    }
  }
}

TEST(Products, ANaNOrInfinityAmongValuesIsSeenWhereverItIs) {
  std::mt19937 random(4);
  for (const DType dtype : kDTypes) {
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
      if (is_f8(dtype) && !std::isnan(bad)) continue;  // e4m3 has no infinity, and e5m2 is encoded without
      for (const std::int64_t count : {1, 5, 32}) {
        const std::int64_t dim = 45;
        Rows rows(random, dtype, count, dim);
        std::vector<std::byte> panels(std::size_t{4} * 64 * 64);
        for (std::int64_t t = 0; t < count; ++t) {
          for (std::int64_t d = 0; d < dim; ++d) {
            auto* at = const_cast<std::byte*>(rows.rows[static_cast<std::size_t>(t)]) + d * rows.item;
            std::byte old[2];
            std::memcpy(old, at, static_cast<std::size_t>(rows.item));
            test::encode_element(dtype, at, static_cast<float>(bad));
            ASSERT_FALSE(value_loops(dtype).pack_pairs(panels.data(), rows.rows.data(), count, dim))
                << name_of(dtype) << " " << bad << " at " << t << ", " << d;
            std::memcpy(at, old, static_cast<std::size_t>(rows.item));
          }
        }
      }
    }
  }
}

TEST(Products, WeightsAreRoundedAndTheirSumIsNot) {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> below(-20.0F, 0.0F);
  for (const std::int64_t count : {0, 1, 15, 16, 33, 100, 128}) {
    const std::int64_t all = (count + kPairUnit - 1) / kPairUnit * kPairUnit;
    std::vector<float> scores(static_cast<std::size_t>(all) + 64, std::numeric_limits<float>::quiet_NaN());
    double sum = 0;
    const float scale = 0.25F;
    const float max = 3.0F;
    std::vector<double> expected(static_cast<std::size_t>(all), 0.0);
    for (std::int64_t i = 0; i < count; ++i) {
      float& score = scores[static_cast<std::size_t>(i)];
      score = i % 7 == 3 ? -std::numeric_limits<float>::infinity() : i % 7 == 5 ? -1e6F : (below(random) + max) / scale;
      expected[static_cast<std::size_t>(i)] = std::exp(double{score} * scale - max);
      sum += expected[static_cast<std::size_t>(i)];
    }
    std::vector<std::byte> out(static_cast<std::size_t>(2 * all));
    EXPECT_NEAR(attention_math().weigh(out.data(), scores.data(), count, all, scale, max), sum, 4e-6 * (1 + sum));
    for (std::int64_t i = 0; i < all; ++i) {
      const double value = expected[static_cast<std::size_t>(i)];
      EXPECT_NEAR(element(out, i), value, value * 0x1p-8 + 1e-37) << count << ": " << i;
    }
  }
}

TEST(Products, TheMatrixUnitGivesWhatPlainLoopsGive) {
  const MatrixUnit unit = amx();
  if (unit.multiply == nullptr) GTEST_SKIP() << "no AMX here";
  if (attention_math().panel != 32) GTEST_SKIP() << "panels are not 32 wide with this instruction set";
  const MatrixUnit plain = emulated_unit();
  std::mt19937 random(6);
  for (const std::int64_t rows : {1, 15, 16, 17, 32, 33, 70}) {
    for (const std::int64_t depth : {32, 64, 160}) {
      for (const std::int64_t panels : {1, 3}) {
        const std::int64_t a_step = depth + 32;
        const std::int64_t c_step = panels * 32 + 16;
        const std::int64_t padded_rows = (rows + 15) / 16 * 16;
        std::vector<std::uint16_t> a(static_cast<std::size_t>(padded_rows * a_step));
        std::vector<std::uint16_t> b(static_cast<std::size_t>(panels * depth * 32));
        const auto fill = [&](std::vector<std::uint16_t>& to) {
          for (auto& x : to) {
            test::encode_element(DType::kBF16, reinterpret_cast<std::byte*>(&x),
                                 static_cast<float>(static_cast<int>(random() % 257) - 128) / 32);
          }
        };
        fill(a);
        fill(b);
        std::vector<float> got(static_cast<std::size_t>(padded_rows * c_step), 7.0F);
        std::vector<float> expected = got;
        const auto* left = reinterpret_cast<const std::byte*>(a.data());
        const auto* right = reinterpret_cast<const std::byte*>(b.data());
        unit.begin();
        unit.multiply(got.data(), c_step, left, a_step, rows, right, depth, depth * 32, panels);
        unit.end();
        plain.multiply(expected.data(), c_step, left, a_step, rows, right, depth, depth * 32, panels);
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t i = 0; i < c_step; ++i) {
            // Sums of small numbers are exact, whatever their order; what is behind the panels is left alone.
            ASSERT_EQ(got[static_cast<std::size_t>(r * c_step + i)], expected[static_cast<std::size_t>(r * c_step + i)])
                << rows << " x " << depth << " x " << panels << ": row " << r << " column " << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvstride::cpu
