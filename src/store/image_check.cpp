// SPDX-License-Identifier: Apache-2.0
// Checking an image against its name and its checksums.
#include "store/image_check.h"

#include <fmt/format.h>

#include <algorithm>

#include "cpu/hash.h"
#include "store/form.h"

namespace kvstride::store {
namespace {

std::string text_of(Heads heads) {
  if (heads.count == 0) return "no heads";
  return fmt::format("heads {} to {}", heads.first, heads.first + heads.count - 1);
}

}  // namespace

/// Whether readers can make sense of a sound header's order. They come in long runs of equal ones.
std::string ImageCheck::check_order(const Header& header) {
  if (header.content.order.empty()) return {};
  if (sound_content_ == header.content && sound_space_ == header.space_text) return {};
  if (!form_of(Namespace::parse(header.space_text), header.content)) {
    return fmt::format("its order '{}' does not suit its namespace", header.content.order);
  }
  sound_content_ = header.content;
  sound_space_ = header.space_text;
  return {};
}

std::string ImageCheck::check(std::int64_t length, const Digest& space, const Key& key, Heads heads, const Get& get) {
  std::string why;
  const std::optional<Header> header = parse_header(get(0, std::min(length, kLargestHeader)), &why);
  if (!header) return length < kPage ? fmt::format("cut off: {} bytes, a header has {} or more", length, kPage) : why;
  if (header->digest != space) return "another namespace's: " + to_hex(header->digest);
  if (!(header->key == key)) return "another chunk's: its header has the key " + header->key.hex();
  const Content& content = header->content;
  if (content.heads != heads) {
    return fmt::format("its header has {}, its name {}", text_of(content.heads), text_of(heads));
  }
  const std::int64_t expected = header->header_bytes + whole_pages(content.payload_bytes());
  if (length < expected) return fmt::format("cut off: {} of {} bytes", length, expected);
  if (length > expected) return fmt::format("{} bytes, {} more than it should have", length, length - expected);
  if (std::string order = check_order(*header); !order.empty()) return order;
  std::size_t bad = 0;
  Bytes first;
  const std::vector<Bytes> all = granules(content, header->header_bytes);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::span<const std::byte> bytes = get(all[i].begin, all[i].end);
    const auto got = static_cast<std::int64_t>(bytes.size());
    if (got < all[i].end - all[i].begin) return fmt::format("cut off: {} of {} bytes", all[i].begin + got, expected);
    if (cpu::xxh3(bytes) == header->sums[i]) continue;
    if (bad++ == 0) first = all[i];
  }
  if (bad == 0) return {};
  return fmt::format("{} of {} checksums do not fit, the first is that of bytes {} to {}", bad, all.size(), first.begin,
                     first.end - 1);
}

}  // namespace kvstride::store
