// SPDX-License-Identifier: Apache-2.0
// What a launch does, as plain data: read by the kernel, and by the host grid that tests it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/host_device.h"
#include "kvstride/dtype.h"

namespace kvstride::cuda {

constexpr std::uint32_t kThreads = 256;                     ///< of a block
constexpr std::int64_t kTileBytes = std::int64_t{1} << 14;  ///< that one tile of runs moves, about
constexpr std::int64_t kGranule = std::int64_t{1} << 18;    ///< bytes under one checksum; the last is what is left
constexpr std::uint32_t kSharedBytes = 17408;  ///< of a block: the largest transposed tile, 32 × 32 × 16 + 32 × 32

/// n / value for n < 2^31, by one multiplication.
struct Divisor {
  std::uint32_t value = 1;
  std::uint32_t multiplier = std::uint32_t{1} << 31;
  std::uint32_t shift = 31;

  KVSTRIDE_HD std::uint32_t divide(std::uint32_t n) const {
    return static_cast<std::uint32_t>((std::uint64_t{n} * multiplier) >> shift);
  }
  static Divisor of(std::int64_t value);
};

/// One loop, as a digit of a row's number.
struct Digit {
  Divisor extent;
  std::int64_t src;
  std::int64_t dst;
  std::int64_t head;
};

/// Where a group starts: absolute addresses, and the head that its loops count from.
struct Start {
  std::int64_t src;
  std::int64_t dst;
  std::int64_t head;
};

/// Bytes that an entry adds on both sides.
struct Step {
  std::int64_t src;
  std::int64_t dst;
};

/// One mode of a block or slot id that only the device knows.
struct IdMode {
  std::int64_t modulus;
  std::int64_t divisor;
  std::int64_t stride;
  std::int64_t of_token;  ///< 1: of slot % block_size, 0: of slot / block_size
};

/// One side's ids in device memory, or 0, 1, 2, … where `ids` is null.
struct DeviceIds {
  const void* ids;
  std::int64_t item;    ///< 4 or 8 bytes
  std::int64_t stride;  ///< in items
  std::int64_t limit;   ///< ids from 0 to limit − 1 are inside
};

/// What only the device knows of a launch's entries.
struct IdSources {
  DeviceIds src;
  DeviceIds dst;
  bool are_slots = false;
  bool skip_negative = false;  ///< negative destination ids are left out without a fault
};

enum class Kind : std::uint32_t {
  kRuns,      ///< `run` bytes for each row
  kZero,      ///< the same, zeroes
  kTile,      ///< elements of `item` bytes, transposed through shared memory
  kCast,      ///< `run` elements for each row, converted
  kCastTile,  ///< elements, transposed and converted
};

/// The same loops for several starts and entries. A group is one start of one entry; it has `tiles` tiles.
struct Work {
  std::int64_t first_tile;
  std::int64_t run;   ///< bytes of a row; elements of one for casts
  std::int64_t part;  ///< of a row that one tile moves
  std::int64_t first_entry;
  Kind kind;
  std::uint32_t item;      ///< bytes of a source element of tiles and casts …
  std::uint32_t dst_item;  ///< … and of a destination element
  Divisor tiles;
  Divisor starts;
  Divisor parts;  ///< of a row; more than one where a tile is part of a row
  std::uint32_t first_start;
  std::uint32_t first_digit;
  std::uint32_t num_digits;  ///< of rows, outermost first; of tiles those outside of them
  std::uint32_t rows;
  std::uint32_t rows_per_tile;
  std::uint32_t lanes;      ///< threads of a row, a power of two
  std::uint32_t aligned;    ///< rows are whole vectors, one a thread, at multiples of 16 from the start
  std::uint32_t by_ids;     ///< entries are numbers into the table's ids …
  std::uint32_t src_modes;  ///< … and these the first modes of theirs
  std::uint32_t dst_modes;
  std::uint32_t num_src_modes;
  std::uint32_t num_dst_modes;
  std::int64_t src_block_size;
  std::int64_t dst_block_size;
  Digit along_src;     ///< of tiles: steps by one element in the source …
  Digit along_dst;     ///< … and in the destination
  Divisor tiles_dst;   ///< tiles along the destination
  std::uint32_t side;  ///< elements of a tile along each side
  DType src_type;
  DType dst_type;
  std::uint32_t first_scale;
  std::uint32_t by_head;  ///< scales are counted by heads
};

/// What a kernel found wrong with ids that only the device knows: entries that name what is not there are left out.
struct Fault {
  std::uint32_t claimed;
  std::uint32_t of_dst;
  std::int64_t position;
  std::int64_t id;
};

/// Offsets of the arrays from `data`, which may lie in device memory or in the kernel's parameters.
struct Table {
  const std::byte* data = nullptr;
  Fault* fault = nullptr;
  std::int64_t num_tiles = 0;
  std::uint32_t ids_are_slots = 0;      ///< block × block_size + token; otherwise blocks
  std::uint32_t ids_skip_negative = 0;  ///< negative destination ids are left out without a fault
  std::uint32_t num_works = 0;
  std::uint32_t works = 0;
  std::uint32_t digits = 0;
  std::uint32_t starts = 0;
  std::uint32_t steps = 0;
  std::uint32_t scales = 0;
  std::uint32_t modes = 0;
  DeviceIds src_ids{};
  DeviceIds dst_ids{};

  template <class T>
  KVSTRIDE_HD const T* at(std::uint32_t offset) const {
    return reinterpret_cast<const T*>(data + offset);
  }
};

}  // namespace kvstride::cuda
