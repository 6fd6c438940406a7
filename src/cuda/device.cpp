// SPDX-License-Identifier: Apache-2.0
// The runtime that the back end uses, and what callers may ask about devices.
#include "kvstride/device.h"

#include <fmt/format.h>
#include <pthread.h>

#include <atomic>

#include "cuda/buffers.h"
#include "cuda/runtime.h"
#include "kvstride/error.h"
#include "kvstride/version.h"

namespace kvstride {
namespace cuda {
namespace {

std::atomic<Runtime*> other{nullptr};

struct Made {
  Runtime* runtime;
  std::string why;
};
const Made& made() {
  static const Made& once = *new Made([] {
    std::string why;
    Runtime* runtime = make_runtime(&why);
    return Made{runtime, why};
  }());
  return once;
}

}  // namespace

Runtime* runtime(std::string* why) {
  static std::atomic<bool>& forked = *new std::atomic<bool>{false};
  static const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)at_fork;
  if (forked) {
    if (why != nullptr) *why = "a process that was forked after CUDA was asked for cannot use it; start it anew";
    return nullptr;
  }
  if (Runtime* given = other.load()) return given;
  if (why != nullptr) *why = made().why;
  return made().runtime;
}

Runtime& runtime_of(Device device) {
  std::string why;
  Runtime* found = runtime(&why);
  if (found == nullptr)
    throw Error(ErrorCode::kDevice, fmt::format("{}: kvstride has no CUDA here: {}", name_of(device), why));
  if (device.cuda >= found->num_devices()) {
    throw Error(ErrorCode::kDevice, fmt::format("{}: there are {} devices", name_of(device), found->num_devices()));
  }
  return *found;
}

void set_runtime(Runtime* given) {
  forget_buffers();
  other = given;
}

}  // namespace cuda

std::string name_of(Device device) { return device.on_host() ? "host" : fmt::format("cuda:{}", device.cuda); }

std::string cuda_status() {
  std::string why;
  cuda::Runtime* found = cuda::runtime(&why);
  return found != nullptr ? found->status() : why;
}

int num_cuda_devices() noexcept {
  try {
    cuda::Runtime* found = cuda::runtime();
    return found != nullptr ? found->num_devices() : 0;
  } catch (...) {
    return 0;
  }
}

std::optional<Device> device_of(const void* memory) {
  const std::optional<int> number = cuda::runtime_of({0}).device_of(memory);
  if (!number) return std::nullopt;
  return Device{*number};
}

void wait_for(Device device, const Stream& stream) {
  if (device.on_host()) return;
  cuda::Runtime& runtime = cuda::runtime_of(device);
  const cuda::Mark mark(runtime, device.cuda, stream.given ? stream.handle : cuda::own_stream(runtime, device.cuda));
  runtime.finish(device.cuda, mark.event());
}

void cuda_check(Device device) {
  if (device.on_host()) return;
  if (cuda::Runtime* found = cuda::runtime()) cuda::report_faults(*found, device.cuda, true);
}

}  // namespace kvstride
