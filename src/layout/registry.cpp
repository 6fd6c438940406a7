// SPDX-License-Identifier: Apache-2.0
// Access to the table of known layouts.
#include "kvstride/registry.h"

#include <string>

#include "kvstride/error.h"
#include "kvstride/layout.h"
#include "layout/internal.h"
#include "layout/shape_text.h"

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

Order order_of(std::string_view name_or_order) {
  const std::string_view text = trim(name_or_order);
  if (const Entry* entry = find_entry(text)) return Order::parse(entry->order);
  // A name, not an order: `engine/layout`.
  const bool name = !text.empty() && text[0] >= 'a' && text[0] <= 'z' && text.find('/') != std::string_view::npos &&
                    text.find_first_of(" \t\n\r:{") == std::string_view::npos;
  if (name) {
    throw Error(ErrorCode::kLayout, "layout: no layout '" + std::string(text.substr(0, 100)) +
                                        "' in the registry (`kvstride layouts` lists it)");
  }
  return Order::parse(name_or_order);
}

std::string rows_called(std::string_view letters) {
  const std::string suffix = letters == "NHD" ? "-nhd" : "-hnd";
  std::string out;
  for (const Entry& row : kRows) {
    if (row.name.size() > suffix.size() && row.name.substr(row.name.size() - suffix.size()) == suffix) {
      out += (out.empty() ? "" : ", ") + std::string(row.name);
    }
  }
  return out;
}

}  // namespace kvstride
