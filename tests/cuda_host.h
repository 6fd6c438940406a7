// SPDX-License-Identifier: Apache-2.0
// A stand-in for the CUDA runtime: streams are queues that run as late as they can, kernels run on a host grid.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda/grid.h"
#include "cuda/runtime.h"
#include "kvstride/error.h"

namespace kvstride::test {

/// One block of the host grid: every thread of a phase, one after another.
class HostBlock {
 public:
  HostBlock(std::int64_t index, std::int64_t count) : index_(index), count_(count), shared_(cuda::kSharedBytes / 16) {}
  std::int64_t index() const { return index_; }
  std::int64_t count() const { return count_; }
  std::byte* shared() { return reinterpret_cast<std::byte*>(shared_.data()); }
  template <class Body>
  void threads(const Body& body) {
    for (std::uint32_t thread = 0; thread < cuda::kThreads; ++thread) body(thread);
  }
  void barrier() {}

 private:
  std::int64_t index_;
  std::int64_t count_;
  std::vector<cuda::Sixteen> shared_;  // on the heap, where AddressSanitizer sees its ends
};

/// The recording stand-in. Work waits until somebody asks for an event, then as little as has to runs: what a real
/// device may have left undone is left undone. Streams are taken in turn or at random.
class HostRuntime : public cuda::Runtime {
 public:
  explicit HostRuntime(int devices = 1, std::uint32_t seed = 1) : devices_(devices), random_(seed) {}

  /// Its pools are forgotten with it, as a driver's memory is.
  ~HostRuntime() override {
    for (std::byte* memory : memory_) std::free(memory);
  }

  /// What has been asked for, in order: `copy 0 stream bytes`, `launch`, `record`, `wait`, `finish` …
  struct Call {
    std::string name;
    int device;
    cuda::StreamHandle stream = nullptr;
    std::int64_t bytes = 0;
    std::size_t count = 0;
  };
  std::vector<Call> calls;
  /// The call with this number (of all names, or of `fail_name`) fails, once; −1: none.
  int fail_at = -1;
  std::string fail_name;
  std::int64_t grid = 3;  ///< blocks of a launch
  /// Streams that are being captured; of those events nobody may ask.
  std::set<cuda::StreamHandle> captured;

  std::string status() override { return "a stand-in on the host"; }
  int num_devices() override { return devices_; }
  std::optional<int> device_of(const void* memory) override {
    const std::lock_guard lock(mutex_);
    const auto after = placed_.upper_bound(static_cast<const std::byte*>(memory));
    if (after == placed_.begin()) return std::nullopt;
    const auto& [first, place] = *std::prev(after);
    if (static_cast<const std::byte*>(memory) >= first + place.bytes) return std::nullopt;
    return place.device;
  }

  std::byte* make_device_memory(int device, std::size_t bytes) override {
    return make("make_device_memory", device, bytes);
  }
  std::byte* make_pinned_memory(int device, std::size_t bytes) override {
    return make("make_pinned_memory", device, bytes);
  }
  void free_device_memory(int device, std::byte* memory) override { release("free_device_memory", device, memory); }
  void free_pinned_memory(int device, std::byte* memory) override { release("free_pinned_memory", device, memory); }

  cuda::StreamHandle make_stream(int device) override {
    const std::lock_guard lock(mutex_);
    note({"make_stream", device});
    streams_.push_back(std::make_unique<Queue>());
    return streams_.back().get();
  }
  cuda::EventHandle make_event(int device) override {
    const std::lock_guard lock(mutex_);
    note({"make_event", device});
    events_.push_back(std::make_unique<Event>());
    return events_.back().get();
  }
  bool capturing(int, cuda::StreamHandle stream) override {
    const std::lock_guard lock(mutex_);
    return captured.contains(stream);
  }
  void record(int device, cuda::EventHandle event, cuda::StreamHandle stream) override {
    const std::lock_guard lock(mutex_);
    note({"record", device, stream});
    auto* one = static_cast<Event*>(event);
    const std::uint64_t ticket = ++one->recorded;
    put(stream, [one, ticket] { one->reached = std::max(one->reached, ticket); });
  }
  void wait(int device, cuda::StreamHandle stream, cuda::EventHandle event) override {
    const std::lock_guard lock(mutex_);
    note({"wait", device, stream});
    auto* one = static_cast<Event*>(event);
    queue(stream).work.push_back({nullptr, one, one->recorded});
  }
  bool done(int device, cuda::EventHandle event) override {
    const std::lock_guard lock(mutex_);
    note({"done", device});
    const auto* one = static_cast<Event*>(event);
    if (one->reached < one->recorded && random_() % 4 == 0) run_some(1 + random_() % 3);
    return one->reached >= one->recorded;
  }
  void finish(int device, cuda::EventHandle event) override {
    const std::lock_guard lock(mutex_);
    note({"finish", device});
    const auto* one = static_cast<Event*>(event);
    const std::uint64_t ticket = one->recorded;
    while (one->reached < ticket) {
      if (!run_some(1)) std::abort();  // a stream waits for what nobody will do
    }
  }
  void copy(int device, std::span<const cuda::Copy> copies, cuda::StreamHandle stream) override {
    const std::lock_guard lock(mutex_);
    std::int64_t bytes = 0;
    for (const cuda::Copy& one : copies) bytes += one.bytes;
    note({"copy", device, stream, bytes, copies.size()});
    std::vector<cuda::Copy> kept(copies.begin(), copies.end());
    std::shuffle(kept.begin(), kept.end(), random_);
    put(stream, [kept = std::move(kept)] {
      for (const cuda::Copy& one : kept) {
        std::memcpy(reinterpret_cast<void*>(one.dst), reinterpret_cast<const void*>(one.src),
                    static_cast<std::size_t>(one.bytes));
      }
    });
  }
  void launch(int device, const cuda::Table& table, const std::byte* inline_data, std::size_t inline_bytes,
              cuda::StreamHandle stream) override {
    const std::lock_guard lock(mutex_);
    note({"launch", device, stream, table.num_tiles, inline_bytes});
    auto data = std::make_shared<std::vector<cuda::Sixteen>>((inline_bytes + 15) / 16);
    if (inline_bytes > 0) std::memcpy(data->data(), inline_data, inline_bytes);
    put(stream, [table = cuda::Table(table), data, blocks = std::min(grid, table.num_tiles)]() mutable {
      if (!data->empty()) table.data = reinterpret_cast<const std::byte*>(data->data());
      for (std::int64_t i = 0; i < blocks; ++i) {
        HostBlock block(i, blocks);
        cuda::move(table, block);
      }
    });
  }

  /// Says where a piece of the host's memory lies, −1 for pinned memory; of 0 bytes: that it is gone. Other memory
  /// CUDA does not know.
  void place(const std::byte* memory, std::size_t bytes, int device) {
    const std::lock_guard lock(mutex_);
    placed_.erase(placed_.lower_bound(memory), placed_.lower_bound(memory + std::max<std::size_t>(bytes, 1)));
    if (bytes > 0) placed_[memory] = {bytes, device};
  }

  /// A stream of the tests' own, and work on it.
  cuda::StreamHandle stream() { return make_stream(0); }
  void enqueue(cuda::StreamHandle stream, std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    put(stream, std::move(work));
  }
  /// Everything that can run runs.
  void drain() {
    const std::lock_guard lock(mutex_);
    while (run_some(1)) {
    }
  }
  std::int64_t count(const std::string& name) const {
    return std::count_if(calls.begin(), calls.end(), [&](const Call& call) { return call.name == name; });
  }
  std::size_t memories() const { return memory_.size(); }

 private:
  struct Place {
    std::size_t bytes;
    int device;
  };
  struct Event {
    std::uint64_t recorded = 0;
    std::uint64_t reached = 0;
  };
  struct Item {
    std::function<void()> work;  ///< null: a wait
    Event* event = nullptr;
    std::uint64_t ticket = 0;
  };
  struct Queue {
    std::deque<Item> work;
  };

  void note(Call call) {
    calls.push_back(call);
    if (fail_at < 0 || (!fail_name.empty() && fail_name != call.name)) return;
    if (fail_at-- == 0) {
      throw Error(ErrorCode::kDevice, "cuda:" + std::to_string(call.device) + ": " + call.name + ": made to fail");
    }
  }
  std::byte* make(const char* name, int device, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    note({name, device, nullptr, static_cast<std::int64_t>(bytes)});
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    memory_.insert(memory);
    return memory;
  }
  void release(const char* name, int device, std::byte* memory) {
    const std::lock_guard lock(mutex_);
    note({name, device});
    memory_.erase(memory);
    std::free(memory);
  }
  Queue& queue(cuda::StreamHandle stream) {
    if (stream == nullptr) return default_;
    return *static_cast<Queue*>(stream);
  }
  void put(cuda::StreamHandle stream, std::function<void()> work) {
    queue(stream).work.push_back({std::move(work), nullptr, 0});
  }
  /// Runs up to `many` items of streams that are not waiting; false where none can.
  bool run_some(std::size_t many) {
    bool any = false;
    for (std::size_t n = 0; n < many; ++n) {
      std::vector<Queue*> ready;
      const auto look = [&](Queue& one) {
        while (!one.work.empty() && !one.work.front().work &&
               one.work.front().event->reached >= one.work.front().ticket) {
          one.work.pop_front();
        }
        if (!one.work.empty() && one.work.front().work) ready.push_back(&one);
      };
      look(default_);
      for (const auto& one : streams_) look(*one);
      if (ready.empty()) return any;
      Queue& chosen = *ready[random_() % ready.size()];
      const Item item = std::move(chosen.work.front());
      chosen.work.pop_front();
      item.work();
      any = true;
    }
    return any;
  }

  int devices_;
  std::mt19937 random_;
  std::mutex mutex_;
  std::set<std::byte*> memory_;
  std::map<const std::byte*, Place> placed_;
  std::vector<std::unique_ptr<Queue>> streams_;
  std::vector<std::unique_ptr<Event>> events_;
  Queue default_;
};

}  // namespace kvstride::test
