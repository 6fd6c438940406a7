// SPDX-License-Identifier: Apache-2.0
// What a process knows of an engine's objects. All of it may be out of date: reading tells.
#pragma once

#include <deque>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "store/index.h"
#include "store/metrics.h"
#include "store/tier.h"

namespace kvstride::store {

/// Pieces that were there at most `keep` ago, the latest `most` of them. Thread-safe.
class Known {
 public:
  Known(std::size_t most, Clock::duration keep);

  /// It is there, of so many bytes. Nothing where it is known to be damaged.
  void learn(const PieceId& id, std::int64_t bytes, Clock::time_point now);
  /// It is not.
  void forget(const PieceId& id, Clock::time_point now);
  /// It is there, and not to be read again for a while: only a write of it, which must replace it, ends that.
  void learn_damaged(const PieceId& id, Clock::time_point now);
  void learn_mended(const PieceId& id);
  void used(const PieceId& id);

  bool holds(const PieceId& id, Clock::time_point now);
  bool is_damaged(const PieceId& id, Clock::time_point now);
  /// Whether somebody asked lately, and it was not there.
  bool was_absent(const PieceId& id, Clock::time_point now);
  void pieces(std::uint32_t space, const Key& key, Clock::time_point now, std::vector<Piece>& out);
  std::size_t covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix, Clock::time_point now,
                      std::span<std::uint8_t> out);
  std::size_t size() const;

 private:
  struct Due {
    Slot slot;
    Clock::time_point when;
  };
  struct IdHash {
    std::size_t operator()(const PieceId& id) const;
  };
  using Times = std::unordered_map<PieceId, Clock::time_point, IdHash>;

  void drop_old(Clock::time_point now);
  void drop(Slot slot);

  const std::size_t most_;
  const Clock::duration keep_;
  mutable std::mutex mutex_;
  Index index_{Policy::kLru};
  std::vector<Clock::time_point> until_;  ///< of the entry in each slot; zero: none
  std::deque<Due> due_;                   ///< the eldest first; of an entry that was learnt again the last one counts
  Times absent_;
  Times damaged_;
  std::vector<Slot> found_;
};

}  // namespace kvstride::store
