// SPDX-License-Identifier: Apache-2.0
// Bodies of the copy kernel that convert values, for the device and for the host grid.
#pragma once

#include "cpu/numbers.h"
#include "cuda/copy.h"

namespace kvstride::cuda {

/// The value of an element's bits.
KVSTRIDE_HD inline float decode(DType type, std::uint32_t bits) {
  if (type == DType::kF32) return std::bit_cast<float>(bits);
  if (type == DType::kBF16) return cpu::from_bf16(static_cast<std::uint16_t>(bits));
  return cpu::decode(cpu::format_of(type), bits);
}

/// The bits of a value, rounded to nearest even.
KVSTRIDE_HD inline std::uint32_t encode(DType type, float value) {
  if (type == DType::kF32) return std::bit_cast<std::uint32_t>(value);
  if (type == DType::kBF16) return cpu::to_bf16(value);
  return cpu::encode(cpu::format_of(type), value);
}

/// Bits of an element at its address, which need not be a multiple of its size.
KVSTRIDE_HD inline std::uint32_t bits_at(std::int64_t address, std::uint32_t item) {
  if ((address & (item - 1)) != 0) {
    std::uint32_t bits = 0;
    for (std::uint32_t i = 0; i < item; ++i) bits |= std::uint32_t{load<std::uint8_t>(address + i)} << (8 * i);
    return bits;
  }
  if (item == 1) return load<std::uint8_t>(address);
  if (item == 2) return load<std::uint16_t>(address);
  return load<std::uint32_t>(address);
}

KVSTRIDE_HD inline void put_bits(std::int64_t address, std::uint32_t item, std::uint32_t bits) {
  if ((address & (item - 1)) != 0) {
    for (std::uint32_t i = 0; i < item; ++i) store(address + i, static_cast<std::uint8_t>(bits >> (8 * i)));
    return;
  }
  if (item == 1) return store(address, static_cast<std::uint8_t>(bits));
  if (item == 2) return store(address, static_cast<std::uint16_t>(bits));
  store(address, bits);
}

/// Dequantised q × scale, quantised x / scale; between two f8 types, and with NaN, nothing is scaled.
KVSTRIDE_HD inline float scaled(const Work& work, float value, float scale) {
  if (scale == 1.0F || std::isnan(value)) return value;
  if (is_f8(work.src_type)) return is_f8(work.dst_type) ? value : value * scale;
  return is_f8(work.dst_type) ? value / scale : value;
}

KVSTRIDE_HD inline float scale_of(const float* scales, const Work& work, std::int64_t head) {
  return scales[work.first_scale + (work.by_head != 0 ? static_cast<std::uint32_t>(head) : 0)];
}

KVSTRIDE_HD inline void convert(const float* scales, const Work& work, std::int64_t dst, std::uint32_t bits,
                                std::int64_t head) {
  const float value = scaled(work, decode(work.src_type, bits), scale_of(scales, work, head));
  put_bits(dst, work.dst_item, encode(work.dst_type, value));
}

/// Rows of elements that lie side by side on both sides.
KVSTRIDE_HD inline void cast_rows(const Digit* digits, const float* scales, const Work& work, const Start& start,
                                  std::uint32_t tile, std::uint32_t thread) {
  const Rows rows = rows_of(work, tile);
  const std::uint32_t lane = thread & (work.lanes - 1);
  for (std::uint32_t row = rows.first + thread / work.lanes; row < rows.end; row += kThreads / work.lanes) {
    const Row here = row_at(digits, work.num_digits, row, start);
    for (std::int64_t i = rows.from + lane; i < rows.from + rows.count; i += work.lanes) {
      convert(scales, work, here.dst + i * work.dst_item, bits_at(here.src + i * work.item, work.item), here.head);
    }
  }
}

}  // namespace kvstride::cuda
