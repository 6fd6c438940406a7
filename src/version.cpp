// SPDX-License-Identifier: Apache-2.0
// The version, from the build.
#include "kvstride/version.h"

namespace kvstride {

std::string_view version() noexcept { return KVSTRIDE_VERSION; }

}  // namespace kvstride
