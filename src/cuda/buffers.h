// SPDX-License-Identifier: Apache-2.0
// Buffers of device memory with pinned twins, used again when what was put on a stream with them is done.
#pragma once

#include <cstddef>

#include "cuda/runtime.h"

namespace kvstride::cuda {

constexpr std::size_t kBufferBytes = std::size_t{8} << 20;

struct Buffer;

/// A buffer of at least so many bytes, for work on one stream. When the lease ends the buffer waits for what has been
/// put on the stream until then. Waits itself where all buffers of a device are in use.
class Lease {
 public:
  Lease(Runtime& runtime, int device, StreamHandle stream, std::size_t bytes);
  ~Lease();
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&&) = delete;

  std::byte* pinned() const;
  std::byte* device() const;
  /// Marks the work with the buffer, all of which is on the stream now; finish() waits for it.
  void mark();
  void finish();
  /// The buffer's first bytes are a Fault that the device has written back by the time the lease's work is done;
  /// `describe` makes the message of what it found.
  void watch(const char* verb, const char* ids_name, std::int64_t src_limit, std::int64_t dst_limit);

 private:
  Runtime* runtime_;
  int device_;
  StreamHandle stream_;
  Buffer* buffer_;
  bool marked_ = false;
};

/// A point of a stream that others wait for.
class Mark {
 public:
  Mark(Runtime& runtime, int device, StreamHandle stream);
  ~Mark();
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  EventHandle event() const { return event_; }

 private:
  int device_;
  EventHandle event_;
};

/// Throws for faults of work that is done; `all` waits for what is not.
void report_faults(Runtime& runtime, int device, bool all);

/// kvstride's own stream of a device.
StreamHandle own_stream(Runtime& runtime, int device);

/// Forgets all buffers and streams, for tests that put another runtime in.
void forget_buffers();

}  // namespace kvstride::cuda
