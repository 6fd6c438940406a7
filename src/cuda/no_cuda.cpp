// SPDX-License-Identifier: Apache-2.0
// The CUDA back end where it was not built: it says so.
#include "cuda/runtime.h"
#include "kvstride/version.h"

namespace kvstride {

bool cuda_built() noexcept { return false; }

namespace cuda {

Runtime* make_runtime(std::string* why) {
  *why = "not built";
  return nullptr;
}

}  // namespace cuda
}  // namespace kvstride
