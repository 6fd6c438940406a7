// SPDX-License-Identifier: Apache-2.0
// Conversion of elements over nested loops: dequantise q × scale, quantise x / scale.
#include <array>
#include <cstring>

#include "cpu/copy.h"
#include "cpu/numbers.h"

namespace kvstride::cpu {
namespace {

using plan::Loop;

template <class T>
T read(const std::byte* at) {
  T out;
  std::memcpy(&out, at, sizeof(T));
  return out;
}

template <class T>
void store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

const Format& format_of(DType dtype) {
  switch (dtype) {
    case DType::kF8E5M2: return kE5M2;
    case DType::kF8E4M3Fnuz: return kE4M3Fnuz;
    case DType::kF8E5M2Fnuz: return kE5M2Fnuz;
    case DType::kF16: return kF16;
    default: return kE4M3;
  }
}

float load(const std::byte* at, DType dtype) {
  switch (dtype) {
    case DType::kF32: return read<float>(at);
    case DType::kBF16: return from_bf16(read<std::uint16_t>(at));
    case DType::kF16: return decode(kF16, read<std::uint16_t>(at));
    default: return decode(format_of(dtype), read<std::uint8_t>(at));
  }
}

void save(std::byte* at, DType dtype, float value) {
  switch (dtype) {
    case DType::kF32: return store(at, value);
    case DType::kBF16: return store(at, to_bf16(value));
    case DType::kF16: return store(at, static_cast<std::uint16_t>(encode(kF16, value)));
    default: return store(at, static_cast<std::uint8_t>(encode(format_of(dtype), value)));
  }
}

bool is_f8(DType dtype) { return item_size(dtype) == 1; }

}  // namespace

void cast(std::byte* dst, const std::byte* src, const Loop* loops, std::size_t num_loops, const plan::Cast& how) {
  if (num_loops > 0) {
    for (std::int64_t i = 0; i < loops[0].extent; ++i) {
      cast(dst + i * loops[0].dst, src + i * loops[0].src, loops + 1, num_loops - 1, how);
    }
    return;
  }
  float value = load(src, how.src);
  // Between two f8 types the scale is the same on both sides.
  if (is_f8(how.src) && !is_f8(how.dst)) value *= how.scale;
  if (!is_f8(how.src) && is_f8(how.dst)) value /= how.scale;
  save(dst, how.dst, value);
}

}  // namespace kvstride::cpu
