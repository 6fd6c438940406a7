// SPDX-License-Identifier: Apache-2.0
// A chunk's image: header and payload as they lie in a file or in memory (docs/formats/chunk.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvstride/identity.h"
#include "store/arena.h"
#include "store/index.h"

namespace kvstride::store {

inline constexpr std::int64_t kGranuleBytes = 256 << 10;
inline constexpr std::int64_t kLargestHeader = 1 << 20;

/// What a payload holds: a section that belongs to all heads, then one of `head_bytes` for each head.
struct Content {
  std::string order;  ///< of the payload's bytes, with all extents; empty: raw bytes
  Heads heads;
  std::int64_t shared_bytes = 0;
  std::int64_t head_bytes = 0;

  std::int64_t payload_bytes() const { return shared_bytes + heads.count * head_bytes; }
  std::int64_t num_granules() const;
  bool operator==(const Content&) const = default;
};

/// From `begin` to `end` of an image.
struct Bytes {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Images of one namespace and content: all that their headers share is made once. Immutable, safe to share.
class Frame {
 public:
  /// Throws Error(kArgument) where the payload is empty or the header would exceed 1 MiB.
  Frame(const Namespace& space, Content content);

  const Content& content() const { return content_; }
  std::int64_t header_bytes() const { return header_bytes_; }
  /// Whole pages: what a file has, and a buffer needs.
  std::int64_t image_bytes() const { return header_bytes_ + whole_pages(content_.payload_bytes()); }

  /// Zeroes the padding behind the payload, and writes the header with all checksums.
  void seal(std::byte* image, const Key& key) const;
  /// Whether the header at `image` (header_bytes() of it) is one of this frame and `key`, undamaged.
  bool matches(const std::byte* image, const Key& key) const;
  /// Whether these parts of the payload are as they were sealed: the shared section if asked for, and `heads` (indices
  /// within the content). The header must match.
  bool verify(const std::byte* image, bool shared, std::int64_t first_head, std::int64_t num_heads) const;
  bool verify(const std::byte* image) const { return verify(image, true, 0, content_.heads.count); }
  /// The bytes that verify() reads for `heads`, in whole pages. Includes the header where `header`.
  Bytes shared_range(bool header) const;
  Bytes heads_range(std::int64_t first_head, std::int64_t num_heads) const;

 private:
  Content content_;
  std::int64_t header_bytes_ = 0;
  std::vector<std::byte> blank_;  ///< header without key and checksums
};

/// A header that may come from anywhere.
struct Header {
  Key key;
  Digest digest;
  std::string space_text;
  Content content;
  std::int64_t header_bytes = 0;
  std::vector<std::uint64_t> sums;
};

/// The bytes of an image that each checksum of its header covers, in their order and without a gap.
std::vector<Bytes> granules(const Content& content, std::int64_t header_bytes);

/// Bytes of the fixed part, which says how long the header is.
inline constexpr std::int64_t kFixedHeader = 192;
/// Length of the header that starts with these (at least kFixedHeader) bytes, or nothing where it is none.
std::optional<std::int64_t> header_length(std::span<const std::byte> start);
/// Parses a whole header; every field is checked, and that its namespace text has its digest. Nothing where it is
/// damaged; `why` then says what is wrong.
std::optional<Header> parse_header(std::span<const std::byte> bytes, std::string* why = nullptr);

}  // namespace kvstride::store
