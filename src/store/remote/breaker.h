// SPDX-License-Identifier: Apache-2.0
// Counts failures of something that others run, and says when to leave it alone for a while.
#pragma once

#include <algorithm>
#include <mutex>
#include <random>

#include "store/metrics.h"

namespace kvstride::store {

/// Opens after some failures in a row. Open, it lets one attempt pass each time a pause is over; one success closes it,
/// a failure makes the pause longer. Thread-safe.
class Breaker {
 public:
  static constexpr int kMostBad = 5;
  static constexpr auto kFirstPause = std::chrono::milliseconds(250);
  static constexpr auto kLongestPause = std::chrono::seconds(10);

  bool open() const {
    const std::lock_guard lock(mutex_);
    return bad_ >= kMostBad;
  }
  /// Whether an attempt may be made now: closed, or it is the one that finds out. That one must end in good() or bad().
  bool allows(Clock::time_point now) {
    const std::lock_guard lock(mutex_);
    if (bad_ < kMostBad) return true;
    if (now < again_) return false;
    again_ = now + jittered();  // the next one, should nothing come of this
    return true;
  }
  void good() {
    const std::lock_guard lock(mutex_);
    bad_ = 0;
    pause_ = kFirstPause;
  }
  /// An attempt that began at `begun` failed; whether that opened it. Attempts that were under way when another one
  /// failed are the same failure. `hopeless`: one such answer is enough.
  bool bad(Clock::time_point begun, Clock::time_point now, bool hopeless = false) {
    const std::lock_guard lock(mutex_);
    const bool was_open = bad_ >= kMostBad;
    if (begun < last_ && (was_open || !hopeless)) return false;
    last_ = now;
    bad_ = hopeless ? kMostBad : std::min(bad_ + 1, kMostBad);
    if (bad_ < kMostBad) return false;
    if (was_open) pause_ = std::min<Clock::duration>(2 * pause_, kLongestPause);
    again_ = now + jittered();
    return !was_open;
  }

 private:
  /// Between half of the pause and all of it: those who share a server do not all come back at once.
  Clock::duration jittered() {
    return std::chrono::duration_cast<Clock::duration>(pause_ * std::uniform_real_distribution<>(0.5, 1.0)(dice_));
  }

  mutable std::mutex mutex_;
  std::minstd_rand dice_{std::random_device()()};
  int bad_ = 0;
  Clock::time_point last_{};  ///< when a failure counted
  Clock::duration pause_ = kFirstPause;
  Clock::time_point again_{};
};

}  // namespace kvstride::store
