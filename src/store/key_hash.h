// SPDX-License-Identifier: Apache-2.0
// Keys in hash tables.
#pragma once

#include <functional>
#include <string_view>

#include "kvstride/identity.h"

namespace kvstride::store {

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    const auto bytes = key.bytes();
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
};

}  // namespace kvstride::store
