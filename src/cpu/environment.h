// SPDX-License-Identifier: Apache-2.0
// Settings from environment variables.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace kvstride::cpu {

/// The whole number from `least` to `most` that a variable holds; nothing where it is absent, empty or, which it says,
/// holds anything else.
inline std::optional<std::int64_t> number_from(const char* variable, std::int64_t least, std::int64_t most) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return {};
  const char* end = text + std::strlen(text);
  std::int64_t value = 0;
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error == std::errc{} && stop == end && value >= least && value <= most) return value;
  std::fprintf(stderr, "kvstride: %s is '%.40s', ignored: no whole number from %lld to %lld\n", variable, text,
               static_cast<long long>(least), static_cast<long long>(most));
  return {};
}

}  // namespace kvstride::cpu
