// SPDX-License-Identifier: Apache-2.0
// A table for people.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvstride::cli {

/// Rows of cells in columns two blanks apart, UTF-8. A cell of more than `widest` characters does not widen its
/// column: the rest of its row goes to the next line.
std::string table(const std::vector<std::vector<std::string>>& rows, std::size_t widest = 48);

/// `4.7 GiB`, `12 B`.
std::string size_text(std::int64_t bytes);

}  // namespace kvstride::cli
