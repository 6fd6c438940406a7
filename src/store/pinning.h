// SPDX-License-Identifier: Apache-2.0
// A tier's memory, pinned for devices when the first of them comes.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "cuda/point.h"
#include "kvstride/error.h"
#include "store/arena.h"
#include "store/metrics.h"

namespace kvstride::store {

/// Goes before the memory does. Thread-safe.
class Pinning {
 public:
  /// Tries it once.
  void pin(Device device, Memory& memory, Counters& counters) noexcept {
    if (tried_.exchange(true)) return;
    std::string detail = "pinned";
    try {
      pinned_.emplace(device, memory.data(), static_cast<std::size_t>(memory.mapped()));
      memory.keep_from_children();  // a fork would copy pinned pages at once
    } catch (const std::exception& error) {
      counters.add(Count::kNotPinned);
      detail = std::string("not pinned: ") + error.what();
    }
    const std::lock_guard lock(mutex_);
    detail_ = std::move(detail);
  }
  /// What became of it; empty before.
  std::string detail() const {
    const std::lock_guard lock(mutex_);
    return detail_;
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> tried_{false};
  std::optional<cuda::Pinned> pinned_;
  std::string detail_;
};

}  // namespace kvstride::store
