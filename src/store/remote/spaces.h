// SPDX-License-Identifier: Apache-2.0
// Namespaces of a remote tier, names of their objects, and which head ranges somebody has written.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "store/metrics.h"
#include "store/remote/engine.h"

namespace kvstride::store {

/// Objects are called as files of a directory are (docs/formats/chunk.md), so that either can be copied to the other:
/// `<namespace>/<shard>/<key><first><count>`, and `<namespace>/<first><count>` for each head range, of one byte.
/// Thread-safe.
class Spaces {
 public:
  std::uint32_t number(const Namespace& space);
  std::string name(const PieceId& id) const;
  std::string marker(std::uint32_t space, Heads heads) const;

  /// Ranges of which pieces may be there that have some of `wanted`.
  std::vector<Heads> ranges(std::uint32_t space, Heads wanted) const;
  /// All of which pieces may be there.
  std::vector<Heads> every_range(std::uint32_t space) const;
  /// Whether the engine should be asked which ranges there are: not for a while.
  bool should_ask(std::uint32_t space, Clock::time_point now);
  /// Asks it. Whether it answered.
  bool ask(Engine& engine, std::uint32_t space, Clock::time_point deadline);

  /// Whether the marker of a range that is to be written must be written first.
  bool should_mark(std::uint32_t space, Heads heads, Clock::time_point now) const;
  void marked(std::uint32_t space, Heads heads, Clock::time_point now);

 private:
  struct Range {
    Heads heads;
    Clock::time_point marked{};  ///< by this process; zero: by others
  };
  struct Space {
    Digest digest;
    std::int64_t num_heads = 0;
    bool raw = false;  ///< chunks have no heads
    std::vector<Range> ranges;
    Clock::time_point asked{};
  };

  void add(std::uint32_t space, Heads heads);
  std::vector<Heads> usual(std::int64_t num_heads) const;

  mutable std::mutex mutex_;
  std::vector<Space> spaces_;
};

}  // namespace kvstride::store
