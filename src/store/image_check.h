// SPDX-License-Identifier: Apache-2.0
// Whether a chunk's image is sound, wherever its bytes come from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "store/chunk.h"

namespace kvstride::store {

/// Checks images one after the other: header, header against name, length, every granule, and that the order suits the
/// namespace. For one thread.
class ImageCheck {
 public:
  /// Bytes `begin` to `end` of an image, at most kGranuleBytes + kPage or kLargestHeader of them; fewer where it ends
  /// before. Asked for from the beginning on, no range before an earlier one; valid until the next call.
  using Get = std::function<std::span<const std::byte>(std::int64_t begin, std::int64_t end)>;
  /// What is wrong with the image of `length` bytes that should be of `space`, `key` and `heads`; empty: nothing.
  std::string check(std::int64_t length, const Digest& space, const Key& key, Heads heads, const Get& get);

 private:
  std::string check_order(const Header& header);

  std::string sound_space_;  ///< the last namespace text and content whose order was looked at
  std::optional<Content> sound_content_;
};

}  // namespace kvstride::store
