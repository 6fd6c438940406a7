// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets share: stopping with a reason, and the promises that every Error keeps.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kvstride/error.h"

namespace fuzz {

/// Stops the run (libFuzzer keeps the input) where `ok` is false.
inline void require(bool ok, const char* promise, std::string_view detail = "") {
  if (ok) return;
  std::fprintf(stderr, "broken promise: %s: %.*s\n", promise, static_cast<int>(detail.size()), detail.data());
  std::abort();
}

/// A refusal is one line, not empty, and its column lies in the text (`size` bytes; one past the end is allowed).
inline void check_error(const kvstride::Error& error, std::size_t size) {
  const std::string what = error.what();
  require(!what.empty() && what.find('\n') == std::string::npos, "a message is one line", what);
  require(error.column() >= 0 && static_cast<std::size_t>(error.column()) <= size + 1, "the column is in the text",
          what);
}

}  // namespace fuzz
