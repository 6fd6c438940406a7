// SPDX-License-Identifier: Apache-2.0
// SHA-256 in one call.
#pragma once

#include <span>
#include <string_view>

#include "kvstride/identity.h"

namespace kvstride::store {

/// Throws Error(kStore) where libcrypto has none.
Digest sha256(std::span<const std::byte> bytes);
inline Digest sha256(std::string_view text) { return sha256(std::as_bytes(std::span(text))); }

}  // namespace kvstride::store
