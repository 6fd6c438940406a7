// SPDX-License-Identifier: Apache-2.0
// The stand-in for CUDA as the library's back end (KVSTRIDE_CUDA_STAND_IN), and what tests in other languages ask of
// it.
#include <cstdint>

#include "cuda/runtime.h"
#include "cuda_host.h"
#include "kvstride/version.h"

namespace kvstride {

bool cuda_built() noexcept { return true; }

namespace cuda {
namespace {

test::HostRuntime& stand_in() {
  static test::HostRuntime& made = *new test::HostRuntime(2);
  return made;
}

}  // namespace

Runtime* make_runtime(std::string*) { return &stand_in(); }

}  // namespace cuda
}  // namespace kvstride

using kvstride::cuda::stand_in;

#define KVSTRIDE_STAND_IN extern "C" __attribute__((visibility("default")))

KVSTRIDE_STAND_IN void kvstride_stand_in_place(const std::byte* memory, std::size_t bytes, int device) {
  stand_in().place(memory, bytes, device);
}
KVSTRIDE_STAND_IN void* kvstride_stand_in_stream() { return stand_in().stream(); }
/// Work on a stream: bytes are copied when it runs.
KVSTRIDE_STAND_IN void kvstride_stand_in_copy(void* stream, void* to, const void* from, std::size_t bytes) {
  stand_in().enqueue(stream, [=] { std::memcpy(to, from, bytes); });
}
KVSTRIDE_STAND_IN void kvstride_stand_in_drain() { stand_in().drain(); }
KVSTRIDE_STAND_IN void kvstride_stand_in_capture(void* stream, bool on) {
  if (on) {
    stand_in().captured.insert(stream);
  } else {
    stand_in().captured.erase(stream);
  }
}
/// How often the runtime was called by this name since forget_calls.
KVSTRIDE_STAND_IN std::int64_t kvstride_stand_in_calls(const char* name) { return stand_in().count(name); }
KVSTRIDE_STAND_IN void kvstride_stand_in_forget_calls() { stand_in().calls.clear(); }
