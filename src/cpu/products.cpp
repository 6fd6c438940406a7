// SPDX-License-Identifier: Apache-2.0
// The choice between vectors and a matrix unit, and plain loops that stand in for one.
#include "cpu/products.h"

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "cpu/attention.h"
#include "kvstride/cpu.h"

namespace kvstride::cpu {
namespace {

float widened(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

float element(const std::byte* from, std::int64_t i) {
  std::uint16_t x = 0;
  std::memcpy(&x, from + 2 * i, 2);
  return widened(x);
}

void emulated_multiply(float* c, std::int64_t c_step, const std::byte* a, std::int64_t a_step, std::int64_t rows,
                       const std::byte* b, std::int64_t depth, std::int64_t panel_step, std::int64_t panels) {
  const std::int64_t panel = attention_math().panel;
  for (std::int64_t p = 0; p < panels; ++p, b += 2 * panel_step, c += panel) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < panel; ++i) {
        float sum = 0.0F;
        for (std::int64_t k = 0; k < depth; ++k) {
          const float factor = element(b, (k / 2 * panel + i) * 2 + k % 2);
          sum += element(a, r * a_step + k) * factor;
        }
        c[r * c_step + i] = sum;
      }
    }
  }
}

struct Choice {
  const char* name;
  MatrixUnit unit;
};

/// What KVSTRIDE_MATRIX and the machine give.
Choice choose() {
  const char* text = std::getenv("KVSTRIDE_MATRIX");
  const std::string_view wanted = text == nullptr || *text == '\0' ? "auto" : text;
  if (wanted == "off") return {"none", {}};
  if (wanted == "emulated") return {"emulated", emulated_unit()};
  if (wanted != "auto") {
    std::fprintf(stderr, "kvstride: KVSTRIDE_MATRIX is '%.40s', ignored: neither auto, off nor emulated\n", text);
  }
  constexpr std::int64_t kPanel = 32;  // AMX's machines have AVX-512, but KVSTRIDE_CPU_TARGET may want less
  const MatrixUnit unit = attention_math().panel == kPanel ? amx() : MatrixUnit{};
  return {unit.multiply == nullptr ? "none" : "amx", unit};
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

MatrixUnit emulated_unit() { return {emulated_multiply, nullptr, nullptr}; }

Products products(DType query, DType keys, DType values) {
  const AttentionMath& math = attention_math();
  const KeyLoops key = key_loops(keys);
  const ValueLoops value = value_loops(values);
  if (query == DType::kBF16 && fits_bf16(keys) && fits_bf16(values)) {
    const MatrixUnit& unit = chosen().unit;
    if (unit.multiply != nullptr) {
      return {math.panel, kPairUnit, 32, 15, 2, key.pack_pairs, value.pack_pairs, unit.multiply, unit.begin, unit.end};
    }
  }
  return {math.panel, 1, 24, 0, 4, key.pack, value.pack, math.multiply, nullptr, nullptr};
}

}  // namespace kvstride::cpu

namespace kvstride {
std::string matrix_unit() { return cpu::chosen().name; }
}  // namespace kvstride
