// SPDX-License-Identifier: Apache-2.0
// A tier's memory for images on their way.
#pragma once

#include <memory>
#include <mutex>

#include "store/arena.h"
#include "store/tier.h"

namespace kvstride::store {

/// Lives as long as the last image in it. Thread-safe.
class Staging : public std::enable_shared_from_this<Staging> {
 public:
  /// Throws Error(kStore) where the memory cannot be had.
  explicit Staging(std::int64_t bytes) : memory_(bytes), extents_(bytes) { memory_.keep_from_children(); }

  /// Whole pages; null where there is no room at the moment.
  BufferPtr buffer(std::int64_t bytes);
  /// The longest image that fits.
  std::int64_t largest() const { return memory_.size() / kPage * kPage; }
  Memory& memory() { return memory_; }

 private:
  class Staged;

  Memory memory_;
  std::mutex mutex_;
  Extents extents_;
};

}  // namespace kvstride::store
