// SPDX-License-Identifier: Apache-2.0
// The one kernel: blocks of threads that take the tiles of a table. `Block` is the device's, or the host grid's.
//
//   index(), count()   of this block, of all blocks
//   threads(f)         calls f(thread) for each thread of the block: on the device once, on the host in a loop
//   barrier()          between phases of the block: what was in shared memory is there for all
//   shared()           kSharedBytes of the block's memory
#pragma once

#include "cuda/cast.h"

namespace kvstride::cuda {

/// The work that a tile belongs to: works are in the order of their first tiles.
KVSTRIDE_HD inline const Work& work_of(const Table& table, std::int64_t tile) {
  const Work* works = table.at<Work>(table.works);
  std::uint32_t low = 0;
  for (std::uint32_t high = table.num_works; high - low > 1;) {
    const std::uint32_t middle = (low + high) / 2;
    if (works[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return works[low];
}

/// Says once what is wrong with an id; the first that comes keeps its place.
KVSTRIDE_HD inline void report(Fault* fault, bool of_dst, std::int64_t position, std::int64_t id) {
#ifdef __CUDA_ARCH__
  if (atomicCAS(&fault->claimed, 0U, 1U) != 0) return;
#else
  if (fault->claimed != 0) return;
  fault->claimed = 1;
#endif
  fault->of_dst = of_dst ? 1 : 0;
  fault->position = position;
  fault->id = id;
}

KVSTRIDE_HD inline std::int64_t id_at(const DeviceIds& ids, std::int64_t position) {
  if (ids.ids == nullptr) return position;
  if (ids.item == 4) return static_cast<const std::int32_t*>(ids.ids)[position * ids.stride];
  return static_cast<const std::int64_t*>(ids.ids)[position * ids.stride];
}

/// Bytes that an id adds to an address.
KVSTRIDE_HD inline std::int64_t step_of(const Table& table, std::uint32_t first_mode, std::uint32_t num_modes,
                                        std::int64_t block_size, std::int64_t id) {
  const std::int64_t block = table.ids_are_slots != 0 ? id / block_size : id;
  const std::int64_t token = table.ids_are_slots != 0 ? id - block * block_size : 0;
  const IdMode* modes = table.at<IdMode>(table.modes) + first_mode;
  std::int64_t out = 0;
  for (std::uint32_t i = 0; i < num_modes; ++i) {
    const IdMode& mode = modes[i];
    out += (mode.of_token != 0 ? token : block) % mode.modulus / mode.divisor * mode.stride;
  }
  return out;
}

/// Where a group starts; false where its ids name nothing.
KVSTRIDE_HD inline bool start_of(const Table& table, const Work& work, std::uint32_t group, bool first, Start& out) {
  const std::uint32_t entry = work.starts.divide(group);
  const std::uint32_t which = group - entry * work.starts.value;
  const Start& base = table.at<Start>(table.starts)[work.first_start + which];
  Step step;
  if (work.by_ids == 0) {
    step = table.at<Step>(table.steps)[work.first_entry + entry];
  } else {
    const std::int64_t position = work.first_entry + entry;
    const std::int64_t src = id_at(table.src_ids, position);
    const std::int64_t dst = id_at(table.dst_ids, position);
    if (dst < 0 && table.ids_skip_negative != 0) return false;
    const bool src_inside = src >= 0 && src < table.src_ids.limit;
    const bool dst_inside = dst >= 0 && dst < table.dst_ids.limit;
    if (!src_inside || !dst_inside) {
      if (first) report(table.fault, src_inside, position, src_inside ? dst : src);
      return false;
    }
    step.src = step_of(table, work.src_modes, work.num_src_modes, work.src_block_size, src);
    step.dst = step_of(table, work.dst_modes, work.num_dst_modes, work.dst_block_size, dst);
  }
  out = {base.src + step.src, base.dst + step.dst, base.head};
  return true;
}

template <class T, class Block>
KVSTRIDE_HD void move_square(const Table& table, const Work& work, const Start& start, std::uint32_t tile,
                             Block& block) {
  const Square square = square_of(table.at<Digit>(table.digits) + work.first_digit, work, start, tile);
  block.threads([&](std::uint32_t thread) { load_square<T>(work, square, block.shared(), thread); });
  block.barrier();
  if (work.kind == Kind::kTile) {
    block.threads([&](std::uint32_t thread) {
      store_square<T>(work, square, block.shared(), thread,
                      [](std::int64_t to, T value, std::int64_t) { store(to, value); });
    });
  } else if constexpr (sizeof(T) <= 4) {
    const float* scales = table.at<float>(table.scales);
    block.threads([&](std::uint32_t thread) {
      store_square<T>(work, square, block.shared(), thread,
                      [&](std::int64_t to, T value, std::int64_t head) { convert(scales, work, to, value, head); });
    });
  }
  block.barrier();
}

template <class Block>
KVSTRIDE_HD void move_tile(const Table& table, std::int64_t number, Block& block) {
  const Work& work = work_of(table, number);
  const auto in_work = static_cast<std::uint32_t>(number - work.first_tile);
  const std::uint32_t group = work.tiles.divide(in_work);
  const std::uint32_t tile = in_work - group * work.tiles.value;
  const Digit* digits = table.at<Digit>(table.digits) + work.first_digit;
  Start start{};
  if (!start_of(table, work, group, tile == 0, start)) return;
  switch (work.kind) {
    case Kind::kRuns: block.threads([&](std::uint32_t thread) { copy_rows(digits, work, start, tile, thread); }); break;
    case Kind::kZero: block.threads([&](std::uint32_t thread) { zero_rows(digits, work, start, tile, thread); }); break;
    case Kind::kCast: {
      const float* scales = table.at<float>(table.scales);
      block.threads([&](std::uint32_t thread) { cast_rows(digits, scales, work, start, tile, thread); });
      break;
    }
    default:
      switch (work.item) {
        case 1: return move_square<std::uint8_t>(table, work, start, tile, block);
        case 2: return move_square<std::uint16_t>(table, work, start, tile, block);
        case 4: return move_square<std::uint32_t>(table, work, start, tile, block);
        case 8: return move_square<std::uint64_t>(table, work, start, tile, block);
        default: return move_square<Sixteen>(table, work, start, tile, block);
      }
  }
}

template <class Block>
KVSTRIDE_HD void move(const Table& table, Block& block) {
  for (std::int64_t tile = block.index(); tile < table.num_tiles; tile += block.count()) move_tile(table, tile, block);
}

}  // namespace kvstride::cuda
