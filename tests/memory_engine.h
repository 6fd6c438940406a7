// SPDX-License-Identifier: Apache-2.0
// An engine in this process's memory, with the faults of others at will.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "store/remote/engine.h"

namespace kvstride::test {

/// Thread-safe. Knobs may be turned while calls are under way.
class MemoryEngine final : public store::Engine {
 public:
  using Answer = store::Answer;
  using Clock = store::Clock;

  const char* kind() const override { return "memory"; }
  std::string detail() const override { return "in memory"; }
  std::int64_t largest() const override { return largest_bytes; }
  bool reads_ranges() const override { return ranges; }
  int num_threads() const override { return threads; }
  std::size_t batch() const override { return batch_items; }
  std::size_t names_a_trip() const override { return names; }
  bool memory(std::span<std::byte> region) override {
    const std::lock_guard lock(mutex);
    regions.push_back(region);
    return true;
  }

  void find(std::span<store::FindItem> items, Clock::time_point deadline) override {
    ++finds;
    if (!wait(deadline)) return;
    for (store::FindItem& item : items) {
      if (const auto bad = fault("find", item.name)) {
        item.answer = *bad;
        continue;
      }
      const std::lock_guard lock(mutex);
      const auto at = objects.find(item.name);
      item.answer = at == objects.end() ? Answer::kAbsent : Answer::kOk;
      if (at != objects.end()) item.bytes = tells_bytes ? static_cast<std::int64_t>(at->second.size()) : -1;
    }
  }

  void read(std::span<store::ReadItem> items, Clock::time_point deadline, const Done& done) override {
    ++reads;
    const bool in_time = wait(deadline);
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (in_time) read_one(items[i]);
      done(i);
    }
  }

  void write(std::span<store::WriteItem> items, Clock::time_point deadline, const Done& done) override {
    ++writes;
    const bool in_time = wait(deadline);
    for (std::size_t i = 0; i < items.size(); ++i) {
      store::WriteItem& item = items[i];
      if (!in_time) {
      } else if (const auto bad = fault("write", item.name)) {
        item.answer = *bad;
      } else {
        const std::lock_guard lock(mutex);
        const bool there = objects.count(item.name) > 0;
        if (!there || item.replace) objects[item.name].assign(item.data.begin(), item.data.end());
        item.answer = there && !item.replace ? Answer::kThere : Answer::kOk;
      }
      done(i);
    }
  }

  void remove(std::span<store::RemoveItem> items, Clock::time_point deadline) override {
    if (!wait(deadline)) return;
    for (store::RemoveItem& item : items) {
      if (const auto bad = fault("remove", item.name)) {
        item.answer = *bad;
        continue;
      }
      const std::lock_guard lock(mutex);
      objects.erase(item.name);
      item.answer = Answer::kOk;
    }
  }

  Answer list(const std::string& folder, Clock::time_point deadline,
              const std::function<bool(const store::ListedObject&)>& use) override {
    if (!lists) return Answer::kAbsent;
    if (!wait(deadline)) return Answer::kLate;
    std::vector<store::ListedObject> found;
    {
      const std::lock_guard lock(mutex);
      for (const auto& [name, bytes] : objects) {
        if (name.compare(0, folder.size(), folder) != 0) continue;
        const std::size_t slash = name.find('/', folder.size());
        if (slash == std::string::npos) {
          found.push_back({name, static_cast<std::int64_t>(bytes.size()), 0});
        } else if (found.empty() || found.back().name != name.substr(0, slash + 1)) {
          found.push_back({name.substr(0, slash + 1), -1, 0});
        }
      }
    }
    for (const store::ListedObject& one : found) {
      if (!use(one)) break;
    }
    return Answer::kOk;
  }

  // Set before it is used.
  std::int64_t largest_bytes = 64 << 20;
  bool ranges = true;
  bool lists = true;
  bool tells_bytes = true;
  int threads = 2;
  std::size_t batch_items = 8;
  std::size_t names = 1000;

  // At any time.
  std::atomic<std::int64_t> latency_us{0};
  std::atomic<bool> hangs{false};     ///< calls come back when this is false again, whatever their deadline
  std::atomic<bool> impatient{true};  ///< a call that would outlast its deadline ends there
  /// What an item is answered instead of what it should be: (`find`, `read`, `write`, `remove`; name).
  void set_fault(std::function<std::optional<Answer>(const std::string&, const std::string&)> use) {
    const std::lock_guard lock(mutex);
    fault_ = std::move(use);
  }

  std::mutex mutex;
  std::map<std::string, std::vector<std::byte>> objects;
  std::vector<std::span<std::byte>> regions;
  std::atomic<int> finds{0}, reads{0}, writes{0};

 private:
  bool wait(Clock::time_point deadline) const {
    while (hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto end = Clock::now() + std::chrono::microseconds(latency_us.load());
    std::this_thread::sleep_until(impatient ? std::min(end, deadline) : end);
    return end <= deadline;
  }
  std::optional<Answer> fault(const char* what, const std::string& name) {
    const std::lock_guard lock(mutex);
    return fault_ ? fault_(what, name) : std::nullopt;
  }
  void read_one(store::ReadItem& item) {
    if (const auto bad = fault("read", item.name)) {
      item.answer = *bad;
      return;
    }
    const std::lock_guard lock(mutex);
    const auto at = objects.find(item.name);
    if (at == objects.end()) {
      item.answer = Answer::kAbsent;
      return;
    }
    item.answer = Answer::kOk;
    item.found = tells_bytes ? static_cast<std::int64_t>(at->second.size()) : -1;
    for (const store::Bytes& range : item.ranges) {
      const auto end = std::min<std::int64_t>(range.end, static_cast<std::int64_t>(at->second.size()));
      if (range.begin < end) {
        std::memcpy(item.into + range.begin, at->second.data() + range.begin,
                    static_cast<std::size_t>(end - range.begin));
      }
    }
  }

  std::function<std::optional<Answer>(const std::string&, const std::string&)> fault_;
};

}  // namespace kvstride::test
