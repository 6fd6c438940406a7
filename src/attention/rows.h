// SPDX-License-Identifier: Apache-2.0
// Rows of a tensor, however far apart their elements are, as f32 and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/cast.h"
#include "kvstride/dtype.h"

namespace kvstride::attend {

inline void copy_strided(std::byte* to, std::int64_t to_stride, const std::byte* from, std::int64_t from_stride,
                         std::int64_t count, std::int64_t item) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride * item, from + i * from_stride * item, static_cast<std::size_t>(item));
  }
}

/// `count` elements `stride` apart to f32; `room` is for as many of them.
inline void read_row(float* to, const std::byte* from, DType dtype, std::int64_t stride, std::int64_t count,
                     std::byte* room) {
  if (stride != 1 && count > 1) {
    copy_strided(room, 1, from, stride, count, item_size(dtype));
    from = room;
  }
  cpu::cast_rows(dtype, DType::kF32)(reinterpret_cast<std::byte*>(to), from, count, 1, 0, 1.0F);
}

/// And back.
inline void write_row(std::byte* to, const float* from, DType dtype, std::int64_t stride, std::int64_t count,
                      std::byte* room) {
  const bool apart = stride != 1 && count > 1;
  cpu::cast_rows(DType::kF32, dtype)(apart ? room : to, reinterpret_cast<const std::byte*>(from), count, 1, 0, 1.0F);
  if (apart) copy_strided(to, stride, room, 1, count, item_size(dtype));
}

}  // namespace kvstride::attend
