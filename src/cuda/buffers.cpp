// SPDX-License-Identifier: Apache-2.0
// Buffers that are used again, one pool a device.
#include "cuda/buffers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kvstride/error.h"

namespace kvstride::cuda {

/// Free, leased, or waiting for its event.
struct Buffer {
  std::byte* pinned = nullptr;
  std::byte* device = nullptr;
  std::size_t bytes = 0;
  EventHandle event = nullptr;
  bool kept = true;      ///< one of the pool's; larger ones are freed after their work
  bool watched = false;  ///< its first bytes are a Fault
  std::string verb;
  std::string ids_name;
  std::int64_t src_limit = 0;
  std::int64_t dst_limit = 0;
};

namespace {

constexpr std::size_t kMaxBuffers = 8;

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Buffer>> all;
  std::deque<Buffer*> free;         ///< work done
  std::deque<Buffer*> waiting;      ///< work under way, oldest first
  std::vector<EventHandle> events;  ///< that nobody uses
  std::vector<std::string> faults;
  StreamHandle stream = nullptr;
};

std::mutex& pools_lock() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

std::map<int, std::unique_ptr<Pool>>& pools() {
  static auto& map = *new std::map<int, std::unique_ptr<Pool>>;  // never destroyed: the driver may be gone before
  return map;
}

Pool& pool_of(int device) {
  const std::lock_guard lock(pools_lock());
  auto& pool = pools()[device];
  if (!pool) pool = std::make_unique<Pool>();
  return *pool;
}

/// Reads what the device found; the buffer's work is done.
void read_fault(Pool& pool, Buffer& buffer) {
  if (!std::exchange(buffer.watched, false)) return;
  Fault fault;
  std::memcpy(&fault, buffer.pinned, sizeof fault);
  if (fault.claimed == 0) return;
  pool.faults.push_back(fmt::format("{}: id {} in {}[{}] of the {} is not from 0 to {}; it was left out", buffer.verb,
                                    fault.id, buffer.ids_name, fault.position,
                                    fault.of_dst != 0 ? "destination" : "source",
                                    (fault.of_dst != 0 ? buffer.dst_limit : buffer.src_limit) - 1));
}

void release_memory(Runtime& runtime, int device, Buffer& buffer) {
  if (buffer.device != nullptr) runtime.free_device_memory(device, buffer.device);
  if (buffer.pinned != nullptr) runtime.free_pinned_memory(device, buffer.pinned);
  buffer.device = buffer.pinned = nullptr;
}

/// Buffers whose work is done become free, in order; those that were too large for the pool go.
void collect(Runtime& runtime, int device, Pool& pool) {
  while (!pool.waiting.empty()) {
    Buffer* buffer = pool.waiting.front();
    if (!runtime.done(device, buffer->event)) return;
    pool.waiting.pop_front();
    read_fault(pool, *buffer);
    if (!buffer->kept) release_memory(runtime, device, *buffer);
    pool.free.push_back(buffer);
  }
}

Buffer* make_buffer(Runtime& runtime, int device, Pool& pool, std::size_t bytes) {
  Buffer* buffer = nullptr;
  for (const auto& one : pool.free) {
    if (one->device == nullptr) buffer = one;  // one whose memory went
  }
  if (buffer == nullptr) {
    auto made = std::make_unique<Buffer>();
    made->event = runtime.make_event(device);
    buffer = made.get();
    pool.all.push_back(std::move(made));
  } else {
    std::erase(pool.free, buffer);
  }
  try {
    buffer->kept = bytes <= kBufferBytes;
    buffer->bytes = std::max(bytes, kBufferBytes);
    buffer->pinned = runtime.make_pinned_memory(device, buffer->bytes);
    buffer->device = runtime.make_device_memory(device, buffer->bytes);
  } catch (...) {
    try {
      release_memory(runtime, device, *buffer);
    } catch (const Error&) {
      buffer->pinned = buffer->device = nullptr;
    }
    pool.free.push_back(buffer);
    throw;
  }
  return buffer;
}

}  // namespace

Lease::Lease(Runtime& runtime, int device, StreamHandle stream, std::size_t bytes)
    : runtime_(&runtime), device_(device), stream_(stream), buffer_(nullptr) {
  Pool& pool = pool_of(device);
  while (true) {
    Buffer* oldest = nullptr;
    {
      const std::lock_guard lock(pool.mutex);
      collect(runtime, device, pool);
      const auto fits = std::find_if(pool.free.begin(), pool.free.end(),
                                     [&](const Buffer* one) { return one->device != nullptr && one->bytes >= bytes; });
      if (fits != pool.free.end()) {
        buffer_ = *fits;
        pool.free.erase(fits);
      } else if (bytes > kBufferBytes || pool.waiting.empty() || pool.all.size() < kMaxBuffers) {
        buffer_ = make_buffer(runtime, device, pool, bytes);
      } else {
        oldest = pool.waiting.front();
      }
      if (buffer_ != nullptr) return;
    }
    runtime.finish(device, oldest->event);
  }
}

Lease::Lease(Lease&& other) noexcept
    : runtime_(other.runtime_),
      device_(other.device_),
      stream_(other.stream_),
      buffer_(std::exchange(other.buffer_, nullptr)),
      marked_(other.marked_) {}

Lease::~Lease() {
  if (buffer_ == nullptr) return;
  try {
    if (!marked_) mark();
  } catch (const Error&) {
    return;  // nobody knows when its work is done: it is not used again
  }
  Pool& pool = pool_of(device_);
  const std::lock_guard lock(pool.mutex);
  pool.waiting.push_back(buffer_);
}

std::byte* Lease::pinned() const { return buffer_->pinned; }
std::byte* Lease::device() const { return buffer_->device; }

void Lease::mark() {
  runtime_->record(device_, buffer_->event, stream_);
  marked_ = true;
}
void Lease::finish() { runtime_->finish(device_, buffer_->event); }

void Lease::watch(const char* verb, const char* ids_name, std::int64_t src_limit, std::int64_t dst_limit) {
  buffer_->watched = true;
  buffer_->verb = verb;
  buffer_->ids_name = ids_name;
  buffer_->src_limit = src_limit;
  buffer_->dst_limit = dst_limit;
}

Mark::Mark(Runtime& runtime, int device, StreamHandle stream) : device_(device), event_(nullptr) {
  Pool& pool = pool_of(device);
  {
    const std::lock_guard lock(pool.mutex);
    if (!pool.events.empty()) {
      event_ = pool.events.back();
      pool.events.pop_back();
    }
  }
  if (event_ == nullptr) event_ = runtime.make_event(device);
  try {
    runtime.record(device, event_, stream);
  } catch (...) {
    const std::lock_guard lock(pool.mutex);
    pool.events.push_back(event_);
    throw;
  }
}

Mark::~Mark() {
  Pool& pool = pool_of(device_);
  const std::lock_guard lock(pool.mutex);
  pool.events.push_back(event_);
}

void report_faults(Runtime& runtime, int device, bool all) {
  Pool& pool = pool_of(device);
  std::string what;
  while (true) {
    EventHandle pending = nullptr;
    {
      const std::lock_guard lock(pool.mutex);
      collect(runtime, device, pool);
      if (all && !pool.waiting.empty()) pending = pool.waiting.front()->event;
      if (pending == nullptr) {
        if (pool.faults.empty()) return;
        what = pool.faults.front();
        pool.faults.clear();
        break;
      }
    }
    runtime.finish(device, pending);
  }
  throw Error(ErrorCode::kBlockIndex, what);
}

StreamHandle own_stream(Runtime& runtime, int device) {
  Pool& pool = pool_of(device);
  const std::lock_guard lock(pool.mutex);
  if (pool.stream == nullptr) pool.stream = runtime.make_stream(device);
  return pool.stream;
}

void forget_buffers() {
  const std::lock_guard lock(pools_lock());
  pools().clear();
}

}  // namespace kvstride::cuda
