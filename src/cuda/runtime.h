// SPDX-License-Identifier: Apache-2.0
// The calls of the CUDA runtime that the back end makes; tests put a recording stand-in here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "cuda/table.h"
#include "kvstride/device.h"

namespace kvstride::cuda {

using StreamHandle = void*;
using EventHandle = void*;

/// One copy of `bytes` bytes; addresses of any kind of memory.
struct Copy {
  std::int64_t dst;
  std::int64_t src;
  std::int64_t bytes;
};

/// Every function throws Error(kDevice) that names the call and what it answered. All but `finish` and `make_…` only
/// put work on a stream. Any thread may call.
class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual std::string status() = 0;  ///< one line for people
  virtual int num_devices() = 0;
  /// The device of memory that CUDA has made, −1 for pinned memory of the host, nothing for what CUDA does not know.
  virtual std::optional<int> device_of(const void* memory) = 0;

  virtual std::byte* make_device_memory(int device, std::size_t bytes) = 0;
  virtual std::byte* make_pinned_memory(int device, std::size_t bytes) = 0;
  virtual void free_device_memory(int device, std::byte* memory) = 0;
  virtual void free_pinned_memory(int device, std::byte* memory) = 0;
  virtual StreamHandle make_stream(int device) = 0;
  virtual EventHandle make_event(int device) = 0;

  /// Whether what is put on the stream becomes part of a CUDA graph instead of being done.
  virtual bool capturing(int device, StreamHandle stream) = 0;
  virtual void record(int device, EventHandle event, StreamHandle stream) = 0;
  virtual void wait(int device, StreamHandle stream, EventHandle event) = 0;  ///< of the stream
  virtual bool done(int device, EventHandle event) = 0;
  virtual void finish(int device, EventHandle event) = 0;  ///< wait of the caller

  /// Copies in any order among each other. Host memory that is not pinned may be read and written before this returns.
  virtual void copy(int device, std::span<const Copy> copies, StreamHandle stream) = 0;
  /// The table's arrays lie at table.data; `inline_bytes` of them, from `inline_data`, go with the launch where given.
  virtual void launch(int device, const Table& table, const std::byte* inline_data, std::size_t inline_bytes,
                      StreamHandle stream) = 0;
};

constexpr std::size_t kInlineBytes = 3072;  ///< of a table that goes with the launch

/// The back end's runtime, or null with the reason in `why`: not built, no driver.
Runtime* runtime(std::string* why = nullptr);
/// The same for a device that has to be there. Throws Error(kDevice) without CUDA and for a number that is too large.
Runtime& runtime_of(Device device);
/// For tests: another one, from now on; null puts the real one back.
void set_runtime(Runtime* other);
/// Makes the real one, or says why there is none.
Runtime* make_runtime(std::string* why);

}  // namespace kvstride::cuda
