// SPDX-License-Identifier: Apache-2.0
// A stream of a device, as a verb uses it.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstring>

#include "cuda/buffers.h"
#include "cuda/lower.h"
#include "kvstride/device.h"
#include "kvstride/error.h"
#include "plan/program.h"

namespace kvstride::cuda {

/// A stream of one device while a verb puts work on it.
class OnDevice {
 public:
  /// `faults`: whether ids that earlier work found to name nothing are reported; who does not, leaves them to others.
  OnDevice(Device device, const Stream& stream, bool faults = true)
      : runtime_(runtime_of(device)), device_(device.cuda) {
    stream_ = stream.given ? stream.handle : own_stream(runtime_, device_);
    // Asked first: while a graph is captured even a question about an event ends that.
    capturing_ = stream.given && runtime_.capturing(device_, stream_);
    if (faults && !capturing_) report_faults(runtime_, device_, false);
  }

  /// Throws where the stream is captured: `what` is not what a graph can do again.
  void refuse_capture(const char* what) const {
    if (!capturing_) return;
    throw Error(ErrorCode::kDevice,
                fmt::format("{}: the stream is being captured into a CUDA graph, which cannot take {}",
                            name_of(Device{device_}), what));
  }
  bool capturing() const { return capturing_; }
  /// Not while the stream is captured: another call has the buffer when this one's work is done once.
  Lease lease(std::size_t bytes) { return {runtime_, device_, stream_, bytes}; }
  void copy(std::span<const Copy> copies) { runtime_.copy(device_, copies, stream_); }
  /// Waits for all that is on the stream now.
  void finish() {
    const Mark mark(runtime_, device_, stream_);
    runtime_.finish(device_, mark.event());
  }
  /// Work that is put on this stream from now on comes after what is on the other one now.
  void follow(OnDevice& other) {
    const Mark mark(runtime_, other.device_, other.stream_);
    runtime_.wait(device_, stream_, mark.event());
  }

  /// `recipe`: whose ids they are, where only the device knows them.
  void launch(const Lowering& lowering, const plan::Recipe* recipe = nullptr) {
    if (lowering.empty()) return;
    const std::size_t bytes = lowering.size();
    if (bytes <= kInlineBytes && !lowering.has_ids()) {
      alignas(16) std::byte data[kInlineBytes];
      const Table table = lowering.write(data);
      runtime_.launch(device_, table, data, bytes, stream_);
      return;
    }
    constexpr std::size_t kFaultBytes = (sizeof(Fault) + 15) / 16 * 16;
    refuse_capture(lowering.has_ids() ? "ids in device memory" : "so many blocks in one call");
    Lease room = lease(kFaultBytes + bytes);
    Fault none{};
    std::memcpy(room.pinned(), &none, sizeof none);
    Table table = lowering.write(room.pinned() + kFaultBytes);
    table.data = room.device() + kFaultBytes;
    table.fault = reinterpret_cast<Fault*>(room.device());
    const auto there = reinterpret_cast<std::int64_t>(room.device());
    const auto here = reinterpret_cast<std::int64_t>(room.pinned());
    copy(std::array{Copy{there, here, static_cast<std::int64_t>(kFaultBytes + bytes)}});
    runtime_.launch(device_, table, nullptr, 0, stream_);
    if (!lowering.has_ids()) return;
    room.watch(recipe->verb(), recipe->options().ids_name, table.src_ids.limit, table.dst_ids.limit);
    copy(std::array{Copy{here, there, sizeof(Fault)}});
  }

  void checksum(const Checksums& work) { runtime_.checksum(device_, work, stream_); }

  void wait_for_faults() { report_faults(runtime_, device_, true); }

 private:
  Runtime& runtime_;
  int device_;
  StreamHandle stream_ = nullptr;
  bool capturing_ = false;
};

}  // namespace kvstride::cuda
