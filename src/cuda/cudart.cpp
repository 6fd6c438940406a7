// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime, linked statically: it looks for the driver when it is first called.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <map>
#include <mutex>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/runtime.h"
#include "kvstride/error.h"
#include "kvstride/version.h"

namespace kvstride {

bool cuda_built() noexcept { return true; }

namespace cuda {
namespace {

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

void check(int device, const char* call, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // what is not sticky is not found again by somebody else
  throw Error(ErrorCode::kDevice,
              fmt::format("cuda:{}: {}: {} ({})", device, call, cudaGetErrorString(error), cudaGetErrorName(error)));
}

/// The device of the calling thread while a call is made: others, such as torch, set it for themselves.
class Current {
 public:
  explicit Current(int device) : device_(device) {
    check(device, "cudaGetDevice", cudaGetDevice(&before_));
    if (before_ != device) check(device, "cudaSetDevice", cudaSetDevice(device));
  }
  ~Current() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int device_;
  int before_ = 0;
};

class CudaRuntime : public Runtime {
 public:
  CudaRuntime(int devices, int driver) : devices_(devices), has_batches_(driver >= 12080) {}

  std::string status() override {
    std::string out = fmt::format("built with CUDA {}, {} device{}", version_text(CUDART_VERSION), devices_,
                                  devices_ == 1 ? "" : "s");
    for (int i = 0; i < devices_; ++i) {
      cudaDeviceProp properties{};
      if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
      out += fmt::format("{}cuda:{} {} (sm_{}{})", i == 0 ? ": " : ", ", i, properties.name, properties.major,
                         properties.minor);
    }
    return out;
  }
  int num_devices() override { return devices_; }
  std::optional<int> device_of(const void* memory) override {
    cudaPointerAttributes attributes{};
    check(0, "cudaPointerGetAttributes", cudaPointerGetAttributes(&attributes, memory));
    if (attributes.type == cudaMemoryTypeUnregistered) return std::nullopt;
    return attributes.type == cudaMemoryTypeHost ? -1 : attributes.device;
  }

  std::byte* make_device_memory(int device, std::size_t bytes) override {
    const Current current(device);
    void* out = nullptr;
    check(device, "cudaMalloc", cudaMalloc(&out, bytes));
    return static_cast<std::byte*>(out);
  }
  std::byte* make_pinned_memory(int device, std::size_t bytes) override {
    const Current current(device);
    void* out = nullptr;
    check(device, "cudaHostAlloc", cudaHostAlloc(&out, bytes, cudaHostAllocPortable));
    return static_cast<std::byte*>(out);
  }
  void free_device_memory(int device, std::byte* memory) override {
    const Current current(device);
    check(device, "cudaFree", cudaFree(memory));
  }
  void free_pinned_memory(int device, std::byte* memory) override {
    const Current current(device);
    check(device, "cudaFreeHost", cudaFreeHost(memory));
  }
  StreamHandle make_stream(int device) override {
    const Current current(device);
    cudaStream_t out = nullptr;
    check(device, "cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&out, cudaStreamNonBlocking));
    return out;
  }
  EventHandle make_event(int device) override {
    const Current current(device);
    cudaEvent_t out = nullptr;
    check(device, "cudaEventCreateWithFlags", cudaEventCreateWithFlags(&out, cudaEventDisableTiming));
    return out;
  }

  bool capturing(int device, StreamHandle stream) override {
    const Current current(device);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(device, "cudaStreamIsCapturing", cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  }
  void record(int device, EventHandle event, StreamHandle stream) override {
    const Current current(device);
    check(device, "cudaEventRecord",
          cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
  }
  void wait(int device, StreamHandle stream, EventHandle event) override {
    const Current current(device);
    check(device, "cudaStreamWaitEvent",
          cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
  }
  bool done(int device, EventHandle event) override {
    const Current current(device);
    const cudaError_t answer = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (answer == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(device, "cudaEventQuery", answer);
    return true;
  }
  void finish(int device, EventHandle event) override {
    const Current current(device);
    check(device, "cudaEventSynchronize", cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
  }

  void copy(int device, std::span<const Copy> copies, StreamHandle stream) override {
    const Current current(device);
    const auto on = static_cast<cudaStream_t>(stream);
    // CUDA's own streams (0, 1, 2) take no batches, nor does memory that the driver has to stage.
    constexpr std::size_t kFew = 4;
    if (has_batches_ && copies.size() > kFew && reinterpret_cast<std::uintptr_t>(stream) > 2 && all_pinned(copies)) {
      return copy_batch(device, copies, on);
    }
    for (const Copy& one : copies) {
      check(device, "cudaMemcpyAsync",
            cudaMemcpyAsync(reinterpret_cast<void*>(one.dst), reinterpret_cast<const void*>(one.src),
                            static_cast<std::size_t>(one.bytes), cudaMemcpyDefault, on));
    }
  }

  void launch(int device, const Table& table, const std::byte* inline_data, std::size_t inline_bytes,
              StreamHandle stream) override {
    const Current current(device);
    check(device, "the kernel",
          launch_move(table, inline_data, inline_bytes, blocks_of(device), static_cast<cudaStream_t>(stream)));
  }

 private:
  /// Whether the driver knows the memory of all copies; neighbours in one 2 MiB page are asked for once.
  bool all_pinned(std::span<const Copy> copies) {
    std::int64_t last_src = 0;
    std::int64_t last_dst = 0;
    const auto known = [](std::int64_t address, std::int64_t& last) {
      if (address >> 21 == last) return true;
      last = address >> 21;
      cudaPointerAttributes attributes{};
      if (cudaPointerGetAttributes(&attributes, reinterpret_cast<const void*>(address)) != cudaSuccess) {
        cudaGetLastError();
        return false;
      }
      return attributes.type != cudaMemoryTypeUnregistered;
    };
    for (const Copy& one : copies) {
      if (!known(one.src, last_src) || !known(one.dst, last_dst)) return false;
    }
    return true;
  }

  void copy_batch(int device, std::span<const Copy> copies, cudaStream_t stream) {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<std::size_t> sizes;
    to.reserve(copies.size());
    from.reserve(copies.size());
    sizes.reserve(copies.size());
    for (const Copy& one : copies) {
      to.push_back(reinterpret_cast<void*>(one.dst));
      from.push_back(reinterpret_cast<const void*>(one.src));
      sizes.push_back(static_cast<std::size_t>(one.bytes));
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
    check(device, "cudaMemcpyBatchAsync",
          cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), copies.size(), &attributes, &first, 1, stream));
  }

  int blocks_of(int device) {
    const std::lock_guard lock(mutex_);
    int& blocks = blocks_[device];
    if (blocks == 0) check(device, "cudaOccupancyMaxActiveBlocksPerMultiprocessor", resident_blocks(device, &blocks));
    return blocks;
  }

  int devices_;
  bool has_batches_;
  std::mutex mutex_;
  std::map<int, int> blocks_;
};

}  // namespace

Runtime* make_runtime(std::string* why) {
  const std::string built = fmt::format("built with CUDA {}", version_text(CUDART_VERSION));
  int devices = 0;
  int driver = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  cudaDriverGetVersion(&driver);
  cudaGetLastError();
  if (driver == 0) {
    *why = built + "; no driver was found";
  } else if (error != cudaSuccess) {
    *why = fmt::format("{}; driver {}: {}", built, version_text(driver), cudaGetErrorString(error));
  } else if (devices == 0) {
    *why = fmt::format("{}; driver {}: no device", built, version_text(driver));
  } else {
    return new CudaRuntime(devices, driver);  // never destroyed: the driver may be gone before
  }
  return nullptr;
}

}  // namespace cuda
}  // namespace kvstride
