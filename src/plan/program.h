// SPDX-License-Identifier: Apache-2.0
// A recipe bound to block ids: which entries each nest is run for, and running them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <vector>

#include "cuda/table.h"
#include "kvstride/device.h"
#include "plan/memory.h"
#include "plan/recipe.h"
#include "plan/walk.h"

namespace kvstride::plan {

/// Throws Error(kBlockIndex) for an id that is not below `limit`, the `at`-th of the verb's argument `list`; `side` is
/// what it names a block of.
void check_block_id(const char* verb, const char* list, std::size_t at, std::int64_t id, std::int64_t limit,
                    const char* side);

/// An address of no memory, for tensors of programs that are moved to where the memory really is.
inline std::byte* nominal() { return reinterpret_cast<std::byte*>(std::uintptr_t{1} << 44); }

/// A nest and the entries it is run for.
struct Bound {
  const Nest* nest;
  std::pmr::vector<Entry> entries;  ///< of block pairs: in the order of their destinations

  /// Whether one of the block pairs overwrites the block at this slot.
  bool overwrites(std::int64_t slot) const {
    return std::binary_search(entries.begin(), entries.end(), Entry{0, slot},
                              [](const Entry& a, const Entry& b) { return a.dst < b.dst; });
  }
};

/// Ids that only a device knows: their number, and the nest for one of them.
struct DeviceEntries {
  const Nest* nest;
  std::int64_t count;
  cuda::IdSources sources;
};

/// Ids are checked when they are bound, memory by check_memory(); run() checks nothing. Few ids need no heap.
class Program {
 public:
  explicit Program(std::shared_ptr<const Recipe> recipe);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// Pairs that name `null_block` are left out. Returns how many are bound.
  std::int64_t bind(std::span<const Pair> pairs, std::optional<std::int64_t> null_block = {});
  void bind_tokens(std::span<const std::int64_t> src_blocks, std::span<const std::int64_t> dst_blocks,
                   RangePair tokens);
  /// Slots are 0, 1, 2, … on a side that is given none. `skip_negative`: destination slots below 0 are left out.
  void bind_slots(std::span<const std::int64_t> src_slots, std::span<const std::int64_t> dst_slots,
                  bool skip_negative = false);

  /// Ids in the memory of the device on which both caches lie: pairs of blocks, or slots on either side. They are
  /// checked where they are used: what names nothing is left out and reported later, what is given twice is not seen.
  void bind_device(const DevicePairs& pairs);
  void bind_device_slots(const DeviceList* src_slots, const DeviceList* dst_slots, bool skip_negative = false);

  /// For a recipe whose source is one tensor: it lies here, up to `bytes` from there.
  void place_source(const std::byte* at, std::int64_t bytes);
  /// The same for memory that nobody else can name, of a recipe that was made for tensors from `nominal` on: all of
  /// them lie `at − nominal` further on. check_memory() does not look at it.
  void move_source(const std::byte* at, const std::byte* nominal);
  void move_destination(std::byte* at, const std::byte* nominal);

  std::int64_t num_copies() const;
  std::int64_t num_bytes() const;
  std::map<std::int64_t, std::int64_t> sizes() const;

  /// Throws where bytes that are read meet bytes that are written, or the destination is read-only.
  void check_memory() const { check_memory_of({this}); }
  /// The same for programs that are run as one.
  static void check_memory_of(std::initializer_list<const Program*> programs);
  /// Runs all entries of all nests; no checks.
  void run(const Stream& stream = {}) const;
  /// The same on the calling thread only, and done when it returns; `past_caches`: written past them.
  void run_here(bool past_caches) const;
  /// Several programs as one: large ones go past the caches, and are split over threads by bytes.
  static void run_all(std::initializer_list<const Program*> programs, const Stream& stream = {});
  /// Zeroes what run() would write.
  void zero(const Stream& stream = {}) const;

  std::span<const Bound> bound() const { return {bound_.data(), bound_.size()}; }
  const Recipe& recipe() const { return *recipe_; }
  const std::optional<DeviceEntries>& device_ids() const { return device_ids_; }
  std::int64_t source_shift() const { return shift_; }
  std::int64_t destination_shift() const { return dst_shift_; }

  /// All groups of copies; see walk.h.
  template <class Sink>
  void walk(const Sink& sink) const {
    for (const Bound& one : bound_) {
      plan::walk(
          *one.nest, one.entries, Part{},
          [&](Side src, Side dst, const Loop* loops, std::size_t num, const Strand& strand, std::int64_t run,
              std::int64_t) {
            sink(Side{src.tensor, src.byte + shift_}, Side{dst.tensor, dst.byte + dst_shift_}, loops, num, strand, run);
          });
    }
  }

 private:
  std::pmr::vector<Entry>& entries_for(std::int64_t tokens, std::int64_t src_token, std::int64_t dst_token);
  void add(std::int64_t tokens, std::int64_t src_slot, std::int64_t dst_slot);
  void clear();
  bool apart() const;
  void check_block_sizes() const;
  void refuse_whole_only() const;
  cuda::DeviceIds device_list(const DeviceList& list, std::int64_t limit) const;
  void check_slot(const char* side, std::size_t at, std::int64_t slot, std::int64_t blocks,
                  std::int64_t block_size) const;
  void run_part(Part part, bool stream) const;

  std::shared_ptr<const Recipe> recipe_;
  const Layout& src_;
  const Layout& dst_;
  std::int64_t shift_ = 0;          ///< of the source
  std::int64_t dst_shift_ = 0;      ///< of the destination
  std::optional<Interval> placed_;  ///< where the source lies
  std::optional<DeviceEntries> device_ids_;
  std::array<std::byte, 1024> few_;
  std::pmr::monotonic_buffer_resource memory_{few_.data(), few_.size()};
  std::pmr::vector<Bound> bound_{&memory_};
};

}  // namespace kvstride::plan
