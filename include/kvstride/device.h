// SPDX-License-Identifier: Apache-2.0
// Where memory lies, and the streams of devices.
#pragma once

#include <optional>
#include <string>

namespace kvstride {

/// The host's memory, or that of a CUDA device.
struct Device {
  int cuda = -1;  ///< the device's number; −1 is the host
  bool on_host() const noexcept { return cuda < 0; }
  bool operator==(const Device&) const = default;
};

/// `host`, `cuda:0` …
std::string name_of(Device device);

/// The CUDA stream that a verb on device memory is put on. A verb without one uses a stream of kvstride's own and
/// returns when its work is done. With one it comes after what is on the stream already and before what is put there
/// later; it returns at once where all memory is the device's, and where some is the host's as soon as the host may use
/// that memory again. For two devices it is the destination's. Ignored where all memory is the host's. A stream that is
/// being captured into a CUDA graph takes what one launch of at most 3 KiB of parameters does inside a device: a few
/// dozen blocks with ids from the host. All else is refused by Error(kDevice), and the graph stays as it was.
struct Stream {
  void* handle = nullptr;  ///< a cudaStream_t of the device; nullptr is CUDA's default stream
  bool given = false;
  Stream() = default;
  explicit Stream(void* stream) : handle(stream), given(true) {}
};

/// What the CUDA back end is here, in one line: `not built`, `built with CUDA 13.0; no driver` …
std::string cuda_status();
/// Devices that can be used; 0 without CUDA or a driver. Never throws.
int num_cuda_devices() noexcept;
/// Where memory lies that CUDA has made or pinned; nothing for memory that it does not know. Throws Error(kDevice)
/// without CUDA.
std::optional<Device> device_of(const void* memory);
/// Waits for what is on a stream of `device` now. Throws Error(kDevice).
void wait_for(Device device, const Stream& stream);
/// Waits for what verbs with ids in device memory have put on streams of `device`, and throws Error(kBlockIndex) for an
/// id that named nothing: such ids are left out, and later calls or this one report them.
void cuda_check(Device device);

}  // namespace kvstride
