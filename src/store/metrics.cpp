// SPDX-License-Identifier: Apache-2.0
// Snapshots of counters.
#include "store/metrics.h"

#include <bit>

namespace kvstride::store {

void Histogram::add(std::chrono::nanoseconds time) {
  const auto nanoseconds = static_cast<std::uint64_t>(std::max<std::int64_t>(time.count(), 0));
  const auto bucket = static_cast<std::size_t>(std::bit_width(nanoseconds / 1000));
  counts_[std::min(bucket, counts_.size() - 1)].fetch_add(1, std::memory_order_relaxed);
  nanoseconds_.fetch_add(nanoseconds, std::memory_order_relaxed);
}

HistogramSnapshot Histogram::snapshot() const {
  HistogramSnapshot out;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    out.counts[i] = counts_[i].load(std::memory_order_relaxed);
    out.count += out.counts[i];
  }
  out.sum_seconds = static_cast<double>(nanoseconds_.load(std::memory_order_relaxed)) * 1e-9;
  return out;
}

const char* name_of(Count count) {
  switch (count) {
    case Count::kReads: return "reads";
    case Count::kReadBytes: return "read_bytes";
    case Count::kWrites: return "writes";
    case Count::kWriteBytes: return "write_bytes";
    case Count::kAlreadyThere: return "already_there";
    case Count::kRefusedFull: return "refused_full";
    case Count::kRefusedQueue: return "refused_queue";
    case Count::kRefusedLarge: return "refused_large";
    case Count::kRefusedBusy: return "refused_busy";
    case Count::kRefusedSick: return "refused_sick";
    case Count::kNoSpace: return "no_space";
    case Count::kCorrupt: return "corrupt";
    case Count::kVanished: return "vanished";
    case Count::kForeign: return "foreign";
    case Count::kIoErrors: return "io_errors";
    case Count::kTimeouts: return "timeouts";
    case Count::kEvictions: return "evictions";
    case Count::kEvictedUnread: return "evicted_unread";
    case Count::kRemoved: return "removed";
    case Count::kProbes: return "probes";
    case Count::kDemotions: return "demotions";
    case Count::kNotPinned: return "not_pinned";
    case Count::kRetries: return "retries";
    case Count::kDenied: return "denied";
    case Count::kTrips: return "trips";
    case Count::kExpired: return "expired";
    case Count::kNotAdmittedSeldom: return "not_admitted_seldom";
    case Count::kNotAdmittedBudget: return "not_admitted_budget";
    case Count::kNotAdmittedQuota: return "not_admitted_quota";
    case Count::kNumCounts: break;
  }
  return "";
}

void Counters::fill(TierMetrics& out) const {
  for (std::size_t i = 0; i < values.size(); ++i) {
    out.counters[name_of(static_cast<Count>(i))] = values[i].load(std::memory_order_relaxed);
  }
  out.seconds["read"] = read_seconds.snapshot();
  out.seconds["write"] = write_seconds.snapshot();
}

}  // namespace kvstride::store
