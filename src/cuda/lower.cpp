// SPDX-License-Identifier: Apache-2.0
// Strips to the table of one launch: which kind of work each is, and how it is cut into tiles.
#include "cuda/lower.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <span>

namespace kvstride::cuda {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxGroup = std::int64_t{1} << 30;  ///< bytes, so that rows and tiles count in 31 bits

std::uint32_t small(std::int64_t value) { return static_cast<std::uint32_t>(value); }
std::int64_t up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

Digit digit_of(const plan::Loop& loop) { return {Divisor::of(loop.extent), loop.src, loop.dst, loop.head}; }

/// Whether everything that is added to an address is a multiple of `by`, on both sides.
bool steps_are_multiples(const Strip& strip, std::int64_t src_by, std::int64_t dst_by) {
  return std::all_of(strip.loops.begin(), strip.loops.end(),
                     [&](const plan::Loop& loop) { return loop.src % src_by == 0 && loop.dst % dst_by == 0; });
}

bool all_multiples(const Strip& strip, std::int64_t src_by, std::int64_t dst_by) {
  const auto fits = [&](const auto& one) { return one.src % src_by == 0 && one.dst % dst_by == 0; };
  const auto modes = [](const plan::SlotOffset& slot, std::int64_t by) {
    const auto whole = [&](const Mode& mode) { return mode.stride % by == 0; };
    return std::all_of(slot.block.begin(), slot.block.end(), whole) &&
           std::all_of(slot.token.begin(), slot.token.end(), whole);
  };
  return steps_are_multiples(strip, src_by, dst_by) && std::all_of(strip.starts.begin(), strip.starts.end(), fits) &&
         std::all_of(strip.steps.begin(), strip.steps.end(), fits) && modes(strip.src_slot, src_by) &&
         modes(strip.dst_slot, dst_by);
}

/// A tile: the loop of neighbours in the source, and the one of neighbours in the destination.
struct Along {
  std::size_t src;
  std::size_t dst;
};
std::optional<Along> transposed(const Strip& strip, std::int64_t src_item, std::int64_t dst_item) {
  constexpr std::int64_t kLeast = 4;  // neighbours for which shared memory is worth it
  std::optional<std::size_t> src;
  std::optional<std::size_t> dst;
  for (std::size_t i = 0; i < strip.loops.size(); ++i) {
    const plan::Loop& loop = strip.loops[i];
    if (loop.src == src_item && loop.extent >= kLeast) src = i;
    if (loop.dst == dst_item && loop.extent >= kLeast) dst = i;
  }
  if (!src || !dst || *src == *dst) return std::nullopt;
  return Along{*src, *dst};
}

}  // namespace

Divisor Divisor::of(std::int64_t value) {
  Divisor out;
  out.value = small(value);
  const auto log = static_cast<std::uint32_t>(std::bit_width(static_cast<std::uint64_t>(value - 1)));
  out.shift = 31 + log;
  const std::uint64_t power = std::uint64_t{1} << out.shift;
  const auto divisor = static_cast<std::uint64_t>(value);
  out.multiplier = static_cast<std::uint32_t>((power + divisor - 1) / divisor);
  return out;
}

void Lowering::set_ids(const IdSources& ids) { ids_ = ids; }

void Lowering::add(Strip strip, bool zero) {
  if (strip.bytes() == 0) return;
  split_groups(strip, kMaxGroup);
  const std::int64_t item = strip.cast.active ? item_size(strip.cast.src) : strip.run;
  Work work{};
  work.kind = zero ? Kind::kZero : strip.cast.active ? Kind::kCast : Kind::kRuns;
  work.run = strip.cast.active ? 1 : strip.run;
  work.item = small(item);
  work.dst_item = small(strip.run);
  work.rows_per_tile = 1;
  work.first_digit = small(static_cast<std::int64_t>(digits_.size()));
  work.src_type = strip.cast.src;
  work.dst_type = strip.cast.dst;
  if (strip.cast.active) {
    work.first_scale = small(static_cast<std::int64_t>(scales_.size()));
    work.by_head = strip.cast.by_head() ? 1 : 0;
    scales_.insert(scales_.end(), strip.cast.scales.begin(), strip.cast.scales.end());
  }
  std::vector<plan::Loop> rows = strip.loops;
  const bool is_item = item == 1 || item == 2 || item == 4 || item == 8 || item == 16;
  const auto along = !zero && is_item ? transposed(strip, item, strip.run) : std::nullopt;
  if (along && all_multiples(strip, item, strip.run)) {
    work.kind = strip.cast.active ? Kind::kCastTile : Kind::kTile;
    work.side = item <= 2 ? 64 : 32;
    work.along_src = digit_of(strip.loops[along->src]);
    work.along_dst = digit_of(strip.loops[along->dst]);
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(std::max(along->src, along->dst)));
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(std::min(along->src, along->dst)));
    const std::int64_t tiles_src = up(strip.loops[along->src].extent, work.side);
    const std::int64_t tiles_dst = up(strip.loops[along->dst].extent, work.side);
    work.parts = Divisor::of(tiles_src);
    work.tiles_dst = Divisor::of(tiles_dst);
    work.tiles = Divisor::of(plan::iterations(rows.data(), rows.size()) * tiles_src * tiles_dst);
  } else {
    if (strip.cast.active) {  // elements side by side on both sides are one row
      const auto inner = std::find_if(rows.begin(), rows.end(), [&](const plan::Loop& loop) {
        return loop.src == item && loop.dst == strip.run && (loop.head == 0 || !strip.cast.by_head());
      });
      if (inner != rows.end()) {
        work.run = inner->extent;
        rows.erase(inner);
      }
    }
    const std::int64_t unit = strip.cast.active ? std::max<std::int64_t>(item, strip.run) : 1;
    const std::int64_t most = kTileBytes / unit;
    work.part = std::min(work.run, most);
    const std::int64_t parts = up(work.run, work.part);
    work.rows = small(plan::iterations(rows.data(), rows.size()));
    if (parts == 1) {
      work.rows_per_tile = small(std::clamp<std::int64_t>(most / work.run, 1, std::max<std::int64_t>(work.rows, 1)));
    }
    work.parts = Divisor::of(parts);
    work.tiles = Divisor::of(up(work.rows, work.rows_per_tile) * parts);
    const std::int64_t steps = strip.cast.active ? work.part : up(work.part, 16);
    work.lanes = small(
        std::min<std::int64_t>(static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(steps))), kThreads));
    work.aligned = work.kind == Kind::kRuns && parts == 1 && work.run % 16 == 0 && steps <= kThreads &&
                           steps_are_multiples(strip, 16, 16)
                       ? 1
                       : 0;
  }
  for (const plan::Loop& loop : rows) digits_.push_back(digit_of(loop));
  work.num_digits = small(static_cast<std::int64_t>(rows.size()));
  add_work(strip, work);
}

/// So many works that each of them counts its tiles in 31 bits.
void Lowering::add_work(const Strip& strip, Work work) {
  const auto num_starts = static_cast<std::int64_t>(strip.starts.size());
  const std::int64_t tiles = work.tiles.value;
  const std::int64_t starts_at_once = std::min(num_starts, std::max<std::int64_t>(kMost / tiles, 1));
  const auto first_step = static_cast<std::int64_t>(steps_.size());
  const auto first_start = static_cast<std::int64_t>(starts_.size());
  steps_.insert(steps_.end(), strip.steps.begin(), strip.steps.end());
  starts_.insert(starts_.end(), strip.starts.begin(), strip.starts.end());
  if (strip.num_ids > 0) {
    work.by_ids = 1;
    const auto add_modes = [&](const plan::SlotOffset& slot, std::uint32_t& first, std::uint32_t& num) {
      first = small(static_cast<std::int64_t>(modes_.size()));
      for (const Mode& mode : slot.block) modes_.push_back({mode.modulus, mode.divisor, mode.stride, 0});
      if (ids_->are_slots) {
        for (const Mode& mode : slot.token) modes_.push_back({mode.modulus, mode.divisor, mode.stride, 1});
      }
      num = small(static_cast<std::int64_t>(modes_.size())) - first;
    };
    add_modes(strip.src_slot, work.src_modes, work.num_src_modes);
    add_modes(strip.dst_slot, work.dst_modes, work.num_dst_modes);
    work.src_block_size = strip.src_slot.block_size;
    work.dst_block_size = strip.dst_slot.block_size;
  }
  for (std::int64_t start = 0; start < num_starts; start += starts_at_once) {
    const std::int64_t here = std::min(starts_at_once, num_starts - start);
    const std::int64_t entries_at_once = std::max<std::int64_t>(kMost / (tiles * here), 1);
    for (std::int64_t entry = 0; entry < strip.entries(); entry += entries_at_once) {
      const std::int64_t count = std::min(entries_at_once, strip.entries() - entry);
      work.first_tile = num_tiles_;
      work.first_start = small(first_start + start);
      work.starts = Divisor::of(here);
      work.first_entry = (strip.num_ids > 0 ? 0 : first_step) + entry;
      works_.push_back(work);
      num_tiles_ += tiles * here * count;
    }
  }
}

namespace {

constexpr std::size_t kAlign = 16;
std::size_t padded(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

std::size_t Lowering::size() const {
  const auto of = [](const auto& list) { return padded(std::span(list).size_bytes()); };
  return of(works_) + of(digits_) + of(starts_) + of(steps_) + of(scales_) + of(modes_);
}

Table Lowering::write(std::byte* to) const {
  Table out;
  std::size_t at = 0;
  const auto put = [&](const auto& list) {
    const std::size_t bytes = std::span(list).size_bytes();
    if (bytes > 0) std::memcpy(to + at, list.data(), bytes);
    const auto offset = static_cast<std::uint32_t>(at);
    at += padded(bytes);
    return offset;
  };
  out.works = put(works_);
  out.digits = put(digits_);
  out.starts = put(starts_);
  out.steps = put(steps_);
  out.scales = put(scales_);
  out.modes = put(modes_);
  out.num_works = static_cast<std::uint32_t>(works_.size());
  out.num_tiles = num_tiles_;
  if (ids_) {
    out.src_ids = ids_->src;
    out.dst_ids = ids_->dst;
    out.ids_are_slots = ids_->are_slots ? 1 : 0;
    out.ids_skip_negative = ids_->skip_negative ? 1 : 0;
  }
  return out;
}

}  // namespace kvstride::cuda
