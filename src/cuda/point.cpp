// SPDX-License-Identifier: Apache-2.0
// Points of streams and pinned memory. In a forked child there is no runtime, and nothing is given back.
#include "cuda/point.h"

#include "cuda/on_device.h"
#include "kvstride/error.h"

namespace kvstride::cuda {

Point::Point(Device device, const Stream& stream) : device_(device) {
  OnDevice(device, stream, false).refuse_capture("requests of the store");
  mark_ = std::make_unique<Mark>(runtime_of(device), device.cuda, stream.handle);
}

Point::~Point() {
  if (runtime() == nullptr) (void)mark_.release();  // the pool's lock may be held by a thread that is not here
}

bool Point::reached() const { return runtime_of(device_).done(device_.cuda, mark_->event()); }

Pinned::Pinned(Device device, std::byte* memory, std::size_t bytes) : device_(device), memory_(memory) {
  runtime_of(device).register_memory(device.cuda, memory, bytes);
}

Pinned::~Pinned() {
  try {
    if (Runtime* found = runtime()) found->unregister_memory(device_.cuda, memory_);
  } catch (const Error&) {  // the process ends, or the device is lost
  }
}

}  // namespace kvstride::cuda
