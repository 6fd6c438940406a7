// SPDX-License-Identifier: Apache-2.0
// Version and what was built in.
#pragma once

#include <string_view>

namespace kvstride {

/// `0.1.0`.
std::string_view version() noexcept;
/// Whether the CUDA back end was compiled.
bool cuda_built() noexcept;

}  // namespace kvstride
