// SPDX-License-Identifier: Apache-2.0
// Bodies of the copy kernel, for the device and for the host grid: runs, zeroes, tiles through shared memory.
#pragma once

#include <cstring>

#include "cuda/table.h"

namespace kvstride::cuda {

struct alignas(16) Sixteen {
  std::uint64_t low, high;
};

/// Caches lie in global memory, which an address of unknown kind does not say: the compiler takes it for any kind.
template <class T>
KVSTRIDE_HD T load(std::int64_t address) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 16) {
    T out;
    asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(out.low), "=l"(out.high) : "l"(address));
    return out;
  } else if constexpr (sizeof(T) == 8) {
    T out;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(out) : "l"(address));
    return out;
  } else if constexpr (sizeof(T) == 4) {
    T out;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(out) : "l"(address));
    return out;
  } else {
    std::uint16_t out;
    if constexpr (sizeof(T) == 2) {
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(out) : "l"(address));
    } else {
      asm volatile("ld.global.u8 %0, [%1];" : "=h"(out) : "l"(address));
    }
    return static_cast<T>(out);
  }
#else
  return *reinterpret_cast<const T*>(address);
#endif
}
template <class T>
KVSTRIDE_HD void store(std::int64_t address, T value) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 16) {
    asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(value.low), "l"(value.high));
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("st.global.u64 [%0], %1;" ::"l"(address), "l"(value));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(value));
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(value));
  } else {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "h"(static_cast<std::uint16_t>(value)));
  }
#else
  *reinterpret_cast<T*>(address) = value;
#endif
}

/// Addresses of a row.
struct Row {
  std::int64_t src;
  std::int64_t dst;
  std::int64_t head;
};

KVSTRIDE_HD inline Row row_at(const Digit* digits, std::uint32_t num, std::uint32_t row, const Start& start) {
  Row out{start.src, start.dst, start.head};
  for (std::uint32_t i = num; i-- > 0;) {
    const std::uint32_t rest = digits[i].extent.divide(row);
    const auto at = static_cast<std::int64_t>(row - rest * digits[i].extent.value);
    out.src += at * digits[i].src;
    out.dst += at * digits[i].dst;
    out.head += at * digits[i].head;
    row = rest;
  }
  return out;
}

/// `bytes` bytes in steps of T, of which this is one of `lanes` threads. Both addresses are multiples of sizeof(T).
template <class T>
KVSTRIDE_HD void copy_in(std::int64_t dst, std::int64_t src, std::int64_t bytes, std::uint32_t lane,
                         std::uint32_t lanes) {
  constexpr std::int64_t kItem = sizeof(T);
  const std::int64_t step = kItem * lanes;
  std::int64_t at = kItem * lane;
  for (; at + 3 * step + kItem <= bytes; at += 4 * step) {  // four on their way at once
    const T a = load<T>(src + at);
    const T b = load<T>(src + at + step);
    const T c = load<T>(src + at + 2 * step);
    const T d = load<T>(src + at + 3 * step);
    store(dst + at, a);
    store(dst + at + step, b);
    store(dst + at + 2 * step, c);
    store(dst + at + 3 * step, d);
  }
  for (; at + kItem <= bytes; at += step) store(dst + at, load<T>(src + at));
}

/// One run, of which this is one of `lanes` threads; in the widest steps that source and destination both allow.
KVSTRIDE_HD inline void copy_run(std::int64_t dst, std::int64_t src, std::int64_t bytes, std::uint32_t lane,
                                 std::uint32_t lanes) {
  const std::int64_t differ = (dst ^ src) | 16;
  const std::int64_t width = differ & -differ;
  std::int64_t head = -dst & (width - 1);  // bytes before the first whole step
  if (head > bytes) head = bytes;
  const std::int64_t body = (bytes - head) & -width;
  for (std::int64_t i = lane; i < head; i += lanes) store(dst + i, load<std::uint8_t>(src + i));
  switch (width) {
    case 16: copy_in<Sixteen>(dst + head, src + head, body, lane, lanes); break;
    case 8: copy_in<std::uint64_t>(dst + head, src + head, body, lane, lanes); break;
    case 4: copy_in<std::uint32_t>(dst + head, src + head, body, lane, lanes); break;
    case 2: copy_in<std::uint16_t>(dst + head, src + head, body, lane, lanes); break;
    default: copy_in<std::uint8_t>(dst + head, src + head, body, lane, lanes); break;
  }
  for (std::int64_t i = head + body + lane; i < bytes; i += lanes) store(dst + i, load<std::uint8_t>(src + i));
}

KVSTRIDE_HD inline void zero_run(std::int64_t dst, std::int64_t bytes, std::uint32_t lane, std::uint32_t lanes) {
  std::int64_t head = -dst & 15;
  if (head > bytes) head = bytes;
  const std::int64_t body = (bytes - head) & ~std::int64_t{15};
  for (std::int64_t i = lane; i < head; i += lanes) store(dst + i, std::uint8_t{0});
  for (std::int64_t i = head + 16 * std::int64_t{lane}; i < head + body; i += 16 * std::int64_t{lanes}) {
    store(dst + i, Sixteen{0, 0});
  }
  for (std::int64_t i = head + body + lane; i < bytes; i += lanes) store(dst + i, std::uint8_t{0});
}

/// The rows of one tile, and which bytes (elements for casts) of each.
struct Rows {
  std::uint32_t first;
  std::uint32_t end;
  std::int64_t from;
  std::int64_t count;
};

KVSTRIDE_HD inline Rows rows_of(const Work& work, std::uint32_t tile) {
  const std::uint32_t line = work.parts.divide(tile);
  const auto part = static_cast<std::int64_t>(tile - line * work.parts.value);
  Rows out{line * work.rows_per_tile, (line + 1) * work.rows_per_tile, part * work.part, work.part};
  if (out.end > work.rows) out.end = work.rows;
  if (out.count > work.run - out.from) out.count = work.run - out.from;
  return out;
}

/// The rows of a tile that are one step of 16 bytes for each of their threads: several rows on their way at once.
KVSTRIDE_HD inline void copy_short_rows(const Digit* digits, const Work& work, const Start& start, const Rows& rows,
                                        std::uint32_t thread) {
  constexpr std::uint32_t kTogether = 4;
  const std::uint32_t lane = thread & (work.lanes - 1);
  const std::uint32_t together = kThreads / work.lanes;
  const auto at = 16 * static_cast<std::int64_t>(lane);
  if (at >= rows.count) return;
  for (std::uint32_t row = rows.first + thread / work.lanes; row < rows.end; row += kTogether * together) {
    Sixteen values[kTogether];
    std::int64_t to[kTogether];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (std::uint32_t i = 0; i < kTogether; ++i) {
      if (row + i * together >= rows.end) continue;
      const Row here = row_at(digits, work.num_digits, row + i * together, start);
      values[i] = load<Sixteen>(here.src + at);
      to[i] = here.dst + at;
    }
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (std::uint32_t i = 0; i < kTogether; ++i) {
      if (row + i * together < rows.end) store(to[i], values[i]);
    }
  }
}

/// Whether every row of a work starts at a multiple of 16 on both sides and is whole vectors, one a thread.
KVSTRIDE_HD inline bool is_short(const Work& work, const Start& start) {
  return work.aligned != 0 && ((start.src | start.dst) & 15) == 0;
}

KVSTRIDE_HD inline void copy_rows(const Digit* digits, const Work& work, const Start& start, std::uint32_t tile,
                                  std::uint32_t thread) {
  const Rows rows = rows_of(work, tile);
  if (is_short(work, start)) return copy_short_rows(digits, work, start, rows, thread);
  const std::uint32_t lane = thread & (work.lanes - 1);
  for (std::uint32_t row = rows.first + thread / work.lanes; row < rows.end; row += kThreads / work.lanes) {
    const Row here = row_at(digits, work.num_digits, row, start);
    copy_run(here.dst + rows.from, here.src + rows.from, rows.count, lane, work.lanes);
  }
}

KVSTRIDE_HD inline void zero_rows(const Digit* digits, const Work& work, const Start& start, std::uint32_t tile,
                                  std::uint32_t thread) {
  const Rows rows = rows_of(work, tile);
  const std::uint32_t lane = thread & (work.lanes - 1);
  for (std::uint32_t row = rows.first + thread / work.lanes; row < rows.end; row += kThreads / work.lanes) {
    zero_run(row_at(digits, work.num_digits, row, start).dst + rows.from, rows.count, lane, work.lanes);
  }
}

/// One square of elements: where it starts and how many elements it has each way.
struct Square {
  Row at;
  std::uint32_t along_src;
  std::uint32_t along_dst;
};

KVSTRIDE_HD inline Square square_of(const Digit* digits, const Work& work, const Start& start, std::uint32_t tile) {
  const std::uint32_t rest = work.tiles_dst.divide(tile);
  const std::uint32_t d = (tile - rest * work.tiles_dst.value) * work.side;
  const std::uint32_t row = work.parts.divide(rest);  // parts: tiles along the source
  const std::uint32_t s = (rest - row * work.parts.value) * work.side;
  Square out{row_at(digits, work.num_digits, row, start), work.along_src.extent.value - s,
             work.along_dst.extent.value - d};
  out.at.src += s * work.along_src.src + d * work.along_dst.src;
  out.at.dst += s * work.along_src.dst + d * work.along_dst.dst;
  out.at.head += s * work.along_src.head + d * work.along_dst.head;
  if (out.along_src > work.side) out.along_src = work.side;
  if (out.along_dst > work.side) out.along_dst = work.side;
  return out;
}

/// Bytes between the lines of a square in shared memory: one bank further each.
template <class T>
KVSTRIDE_HD constexpr std::uint32_t line_of(std::uint32_t side) {
  return side * static_cast<std::uint32_t>(sizeof(T)) + (sizeof(T) < 4 ? 4 : static_cast<std::uint32_t>(sizeof(T)));
}

/// Source to shared memory, neighbours of the source by neighbouring threads.
template <class T>
KVSTRIDE_HD void load_square(const Work& work, const Square& square, std::byte* shared, std::uint32_t thread) {
  const std::uint32_t line = line_of<T>(work.side);
  for (std::uint32_t i = thread; i < work.side * work.side; i += kThreads) {
    const std::uint32_t s = i & (work.side - 1);
    const std::uint32_t d = i / work.side;
    if (s >= square.along_src || d >= square.along_dst) continue;
    const T value = load<T>(square.at.src + s * work.along_src.src + d * work.along_dst.src);
    *reinterpret_cast<T*>(shared + s * line + d * sizeof(T)) = value;
  }
}

/// Shared memory to the destination, neighbours of the destination by neighbouring threads; `put(address, value,
/// head)`.
template <class T, class Put>
KVSTRIDE_HD void store_square(const Work& work, const Square& square, const std::byte* shared, std::uint32_t thread,
                              const Put& put) {
  const std::uint32_t line = line_of<T>(work.side);
  for (std::uint32_t i = thread; i < work.side * work.side; i += kThreads) {
    const std::uint32_t d = i & (work.side - 1);
    const std::uint32_t s = i / work.side;
    if (s >= square.along_src || d >= square.along_dst) continue;
    put(square.at.dst + s * work.along_src.dst + d * work.along_dst.dst,
        *reinterpret_cast<const T*>(shared + s * line + d * sizeof(T)),
        square.at.head + s * work.along_src.head + d * work.along_dst.head);
  }
}

}  // namespace kvstride::cuda
