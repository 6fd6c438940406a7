// SPDX-License-Identifier: Apache-2.0
// The CUDA back end where it was not built: it says so.
#include "kvstride/version.h"

namespace kvstride {

bool cuda_built() noexcept { return false; }

}  // namespace kvstride
