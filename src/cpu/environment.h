// SPDX-License-Identifier: Apache-2.0
// Settings from environment variables.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace kvstride::cpu {

/// The whole number, not negative, that a variable holds; nothing where it is absent or holds anything else.
inline std::optional<std::int64_t> number_from(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return {};
  const char* end = text + std::strlen(text);
  std::int64_t value = 0;
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error != std::errc{} || stop != end || value < 0) return {};
  return value;
}

}  // namespace kvstride::cpu
