// SPDX-License-Identifier: Apache-2.0
// The bytes of a directory's `ledger` file.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/hash.h"

namespace kvstride::store {

inline constexpr std::uint32_t kLedgerVersion = 1;
inline constexpr std::size_t kLedgerSlots = 60;
inline constexpr std::array<char, 8> kLedgerMagic{'k', 'v', 's', 'l', 'e', 'd', 'g', 'r'};

/// A process's place. Byte 4096 + its number is locked as long as the process lives.
struct LedgerSlot {
  std::uint64_t token = 0;  ///< 0: a process that lives, but whose entry was lost
  std::int64_t reserved = 0;
  std::uint32_t in_use = 0;
  std::uint32_t active = 0;  ///< 1: has changed files, or was about to; its death makes a count necessary
};

/// All of the file, little-endian. Bytes 0 to 4095 are locked while it is read or written; the locks of the slots lie
/// behind its end.
struct LedgerRecord {
  std::array<char, 8> magic = kLedgerMagic;  // at 0
  std::uint32_t version = kLedgerVersion;    // at 8
  std::uint32_t known = 0;                   // at 12: 1 from the end of a count on; 0: `used` means nothing
  std::int64_t max_bytes = 0;                // at 16: limit of the process that opened last, to be looked at
  std::int64_t used = 0;           // at 24: bytes of files (or less, while removals are written and puts are not)
  std::int64_t lost = 0;           // at 32: what processes that died had reserved; a count settles it
  std::int64_t lost_since = 0;     // at 40: the same, since the count under way began
  std::uint64_t count = 0;         // at 48: random name of the count that began last
  std::uint64_t counter = 0;       // at 56: token of the process that counts, 0: none does
  std::uint32_t counter_slot = 0;  // at 64: its slot
  std::uint32_t unsettled = 0;     // at 68: 1 if a process died or left since whose changes are not known
  std::array<LedgerSlot, kLedgerSlots> slots{};  // at 72, 24 bytes each
  std::array<char, 2576> zeros{};                // at 1512
  std::uint64_t checksum = 0;                    // at 4088: XXH3-64 of all before it

  std::uint64_t sum() const {
    return cpu::xxh3(std::as_bytes(std::span(this, 1)).first(offsetof(LedgerRecord, checksum)));
  }

  /// Whole, and no number so large that sums could overflow.
  static constexpr std::int64_t kMost = std::int64_t{1} << 56;
  bool valid() const {
    const auto fits = [](std::int64_t bytes) { return bytes >= 0 && bytes <= kMost; };
    if (magic != kLedgerMagic || checksum != sum()) return false;
    for (const LedgerSlot& slot : slots) {
      if (!fits(slot.reserved)) return false;
    }
    return used >= -kMost && used <= kMost && fits(lost) && fits(lost_since) && counter_slot < kLedgerSlots;
  }

  /// What may be on the disk: no more than this.
  std::int64_t total() const {
    std::int64_t bytes = used + lost + lost_since;
    for (const LedgerSlot& slot : slots) bytes += slot.reserved;
    return bytes;
  }
};
static_assert(sizeof(LedgerRecord) == 4096 && offsetof(LedgerRecord, slots) == 72 &&
              offsetof(LedgerRecord, checksum) == 4088 && std::endian::native == std::endian::little);

}  // namespace kvstride::store
