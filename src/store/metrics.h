// SPDX-License-Identifier: Apache-2.0
// Counters and latencies that many threads add to.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <string>

#include "kvstride/store.h"

namespace kvstride::store {

using Clock = std::chrono::steady_clock;

class Histogram {
 public:
  void add(std::chrono::nanoseconds time);
  HistogramSnapshot snapshot() const;

 private:
  std::array<std::atomic<std::uint64_t>, 28> counts_{};
  std::atomic<std::uint64_t> nanoseconds_{0};
};

/// What a tier counts; the names are those of name_of(), in Python and in Prometheus.
enum class Count : std::uint8_t {
  kReads,  ///< chunks read
  kReadBytes,
  kWrites,  ///< chunks written
  kWriteBytes,
  kAlreadyThere,  ///< writes of what was there
  kRefusedFull,   ///< no room that could be freed
  kRefusedQueue,
  kRefusedLarge,  ///< a chunk larger than the tier
  kRefusedBusy,   ///< the account could not be had in time, or somebody counts
  kRefusedSick,   ///< requests while the tier does not answer, or is left alone
  kNoSpace,       ///< the file system is full
  kCorrupt,       ///< chunks found damaged and set aside
  kVanished,      ///< chunks that were known and gone
  kForeign,       ///< links, files of other owners or kinds: refused
  kIoErrors,
  kTimeouts,
  kEvictions,
  kEvictedUnread,  ///< written, never read
  kRemoved,
  kProbes,             ///< keys that the file system was asked about
  kDemotions,          ///< evicted chunks that went to the next tier
  kNotPinned,          ///< memory that CUDA refused to pin
  kRetries,            ///< attempts after one that failed
  kDenied,             ///< credentials or permissions
  kTrips,              ///< a remote engine was left alone after failures
  kExpired,            ///< chunks past their time to live that were let go of
  kNotAdmittedSeldom,  ///< asked for too seldom to be written
  kNotAdmittedBudget,  ///< the write budget was used up
  kNotAdmittedQuota,   ///< their tenant holds as much as it may
  kNumCounts
};
const char* name_of(Count count);

struct Counters {
  std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(Count::kNumCounts)> values{};
  Histogram read_seconds;
  Histogram write_seconds;

  void add(Count count, std::uint64_t by = 1) {
    values[static_cast<std::size_t>(count)].fetch_add(by, std::memory_order_relaxed);
  }
  std::uint64_t get(Count count) const {
    return values[static_cast<std::size_t>(count)].load(std::memory_order_relaxed);
  }
  void fill(TierMetrics& out) const;
};

}  // namespace kvstride::store
