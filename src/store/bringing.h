// SPDX-License-Identifier: Apache-2.0
// Keys that prefetches bring up. Who wants one meanwhile waits for that rather than read it twice.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "store/key_hash.h"

namespace kvstride::store {

/// `Waiting` is what waits. Thread-safe; holds no lock while it calls.
template <typename Waiting>
class Bringing {
 public:
  using Resume = std::function<void(std::vector<Waiting>)>;
  /// Ends the bringing of a key when its last copy goes: from then on nobody waits, and who did is resumed.
  using Token = std::shared_ptr<void>;

  /// Null where somebody brings the key already. `resume` is called from wherever the token goes, and must not throw.
  Token begin(const Key& key, Resume resume) {
    {
      const std::lock_guard lock(mutex_);
      if (!waiting_.try_emplace(key).second) return nullptr;
    }
    return Token(static_cast<void*>(this), [this, key, resume = std::move(resume)](void*) { resume(end(key)); });
  }
  /// Whether somebody brings it; if so `one` waits.
  bool wait(const Key& key, Waiting one) {
    const std::lock_guard lock(mutex_);
    const auto at = waiting_.find(key);
    if (at == waiting_.end()) return false;
    at->second.push_back(std::move(one));
    return true;
  }
  bool has(const Key& key) const {
    const std::lock_guard lock(mutex_);
    return waiting_.contains(key);
  }

 private:
  std::vector<Waiting> end(const Key& key) {
    const std::lock_guard lock(mutex_);
    return std::move(waiting_.extract(key).mapped());
  }

  mutable std::mutex mutex_;
  std::unordered_map<Key, std::vector<Waiting>, KeyHash> waiting_;
};

}  // namespace kvstride::store
