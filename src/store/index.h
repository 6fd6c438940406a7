// SPDX-License-Identifier: Apache-2.0
// The pieces that a tier holds, by namespace and key, and which of them goes first.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvstride/identity.h"

namespace kvstride::store {

enum class Policy : std::uint8_t { kS3Fifo, kLru };

/// Heads of a piece; count 0: the piece has no heads of its own (replicated planes, or raw bytes).
struct Heads {
  std::uint16_t first = 0;
  std::uint16_t count = 0;
  bool operator==(const Heads&) const = default;
};

/// Whether a piece with `have` has all of `want`. A piece without heads is all there is of its chunk.
constexpr bool covers(Heads have, Heads want) {
  return have.count == 0 || (have.first <= want.first && want.first + want.count <= have.first + have.count);
}

/// What names a piece. `space` is the tier's number of a namespace.
struct PieceId {
  std::uint32_t space = 0;
  Key key;
  Heads heads;

  bool operator==(const PieceId&) const = default;
};

/// Handle of an entry; stays valid while the entry is in the index, then may be given to another.
using Slot = std::uint32_t;
inline constexpr Slot kNoSlot = ~Slot{0};

/// What the caller keeps with an entry.
struct Held {
  std::uint64_t place = 0;  ///< arena offset, or time of last use
  std::uint32_t pages = 0;  ///< size in units of 4 KiB: what eviction counts. resize() changes it
};

/// Hash table and eviction queues. Not thread-safe: the tier has a lock. At a million entries each costs 94
/// bytes, table and queues included; a key of more than 39 bytes 40 more, a ghost 35. Memory grows in steps;
/// entries never move. What throws (Error(kStore): no memory) has changed nothing; only insert() can.
///
/// LRU has one queue. S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023) has a small
/// queue of a tenth of the pages, a main queue, and ghosts: fingerprints of what the small queue let go. Entries start
/// at the head of the small queue, or of the main queue where their ghost is there (it is then dropped). A hit adds a
/// use, up to 3. The rules of victim(), all sizes in pages:
/// - It starts with the small queue where that has a tenth of all pages or more, else with the main queue, and goes on
///   with the other one where the first has nothing to give.
/// - Small queue: the tail goes to the head of the main queue, its uses back to 0, if it has 2 uses or more (two hits
///   after the insertion, as in the authors' code: one hit more is often part of the same burst); else it is the
///   victim.
/// - Main queue: the tail goes back to its head with a use less, if it has any; else it is the victim.
/// - A pinned or skipped entry that would be the victim goes to the head of its queue instead. A queue gives nothing
///   when all of it was passed in this way. Where every entry is pinned nothing moves.
/// Ghosts may have nine tenths of the pages that are held when one is added (its own included); the oldest go first.
class Index {
 public:
  /// What slots and the table's tags of 32 bits allow; the table would be of 32 GiB.
  static constexpr std::int64_t kMaxEntries = std::int64_t{3} << 30;

  explicit Index(Policy policy);
  ~Index();
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  /// All pieces of a key, in no order, appended to `out`.
  void find(std::uint32_t space, const Key& key, std::vector<Slot>& out) const;
  bool contains(std::uint32_t space, const Key& key) const;
  /// For each key whether one piece has all of `heads`; with `prefix` up to the first that has none (what follows in
  /// `out` is left as it is). Returns the number of leading keys that have. Fetches the memory of several keys at once.
  std::size_t covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                      std::span<std::uint8_t> out) const;
  Slot find(const PieceId& id) const;
  /// Inserts as newest; `used`: it was hit before (a restart), so it belongs into the main queue. The id must be new.
  Slot insert(const PieceId& id, Held held, bool used = false);
  /// Removes the entry, whatever its pins. `remember`: a ghost may stay (an eviction), which only the small queue
  /// leaves.
  void remove(Slot slot, bool remember);
  /// A hit.
  void touch(Slot slot);
  /// The entry has so many pages now; its place in the queue stays.
  void resize(Slot slot, std::uint32_t pages);

  /// The entry that the policy lets go next, moved on past pinned ones; kNoSlot where all are pinned or none is there.
  /// It stays until remove(). `skip` (if given) says of an unpinned candidate that it shall be kept for now; it is then
  /// passed over like a pinned one, and may be asked about more than once. It must not change the index.
  Slot victim(const std::function<bool(Slot)>& skip = {});

  void pin(Slot slot);
  void unpin(Slot slot);
  std::uint32_t pins(Slot slot) const;
  bool was_read(Slot slot) const;  ///< touched at least once since it was inserted (or inserted as used)

  PieceId id(Slot slot) const;
  std::uint32_t space(Slot slot) const;
  Heads heads(Slot slot) const;
  Held& held(Slot slot);
  const Held& held(Slot slot) const;

  std::uint64_t size() const;       ///< entries
  std::uint64_t num_pages() const;  ///< sum of all entries' pages
  std::size_t memory() const;       ///< bytes of the index itself
  /// Every entry, in no order; `use` must not insert or remove.
  void for_each(const std::function<void(Slot)>& use) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvstride::store
