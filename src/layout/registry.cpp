// SPDX-License-Identifier: Apache-2.0
// Access to the table of known layouts.
#include "kvstride/registry.h"

#include <string>

#include "layout/internal.h"

namespace kvstride {
namespace {

constexpr Entry kRows[] = {
#include "layout/registry_rows.inc"
};

}  // namespace

std::span<const Entry> registry() noexcept { return kRows; }

const Entry* find_entry(std::string_view name) noexcept {
  for (const Entry& row : kRows) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

std::string rows_called(std::string_view letters) {
  const std::string suffix = letters == "NHD" ? "-nhd" : "-hnd";
  std::string out;
  for (const Entry& row : kRows) {
    if (row.name.size() > suffix.size() &&
        row.name.substr(row.name.size() - suffix.size()) == suffix) {
      out += (out.empty() ? "" : ", ") + std::string(row.name);
    }
  }
  return out;
}

}  // namespace kvstride
