// SPDX-License-Identifier: Apache-2.0
// The layouts that engines use, as one data table (src/layout/registry_rows.inc).
#pragma once

#include <span>
#include <string_view>

namespace kvstride {

/// One known layout. All text is static.
struct Entry {
  std::string_view name;      ///< `vllm/flashinfer-nhd`
  std::string_view order;     ///< notation text
  std::string_view shape;     ///< tensor shape that the engine declares, over L B N H D k g: `B,H,N,2*D`
  std::string_view literal;   ///< opaque rows: the dimensions of `shape` whose strides are true, outermost first
  bool opaque;                ///< ◆: shape and strides do not tell the bytes; only ever named, never observed
  std::string_view engine;    ///< `vllm`
  std::string_view backends;  ///< comma separated
  std::string_view first;     ///< first and last release, `""` where the table has no bound
  std::string_view last;
  std::string_view source;  ///< where the rule comes from
  std::string_view note;
};

/// All rows, in the order in which readings are named.
std::span<const Entry> registry() noexcept;
/// The row called `name`, or null.
const Entry* find_entry(std::string_view name) noexcept;

}  // namespace kvstride
