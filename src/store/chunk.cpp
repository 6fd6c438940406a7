// SPDX-License-Identifier: Apache-2.0
// Writing and checking images: one header of whole pages, sections cut into granules, an XXH3-64 of each.
#include "store/chunk.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "cpu/hash.h"
#include "kvstride/error.h"

namespace kvstride::store {
namespace {

constexpr std::array<char, 8> kMagic{'K', 'V', 'S', 'T', 'R', 'I', 'D', 'E'};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kKeyAt = 128;  ///< Key::kMaxBytes of room

/// The fixed part. Numbers are little-endian, which is what the machines that we support have.
struct Fixed {
  char magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint64_t checksum;  ///< of the header with this field as 0
  std::uint64_t payload_bytes;
  std::byte digest[32];
  std::uint32_t head_first;
  std::uint32_t head_count;
  std::uint64_t shared_bytes;
  std::uint64_t head_bytes;
  std::uint32_t num_granules;
  std::uint32_t granule_bytes;
  std::uint32_t order_bytes;
  std::uint32_t space_bytes;
  std::uint32_t key_bytes;
  std::uint32_t zero[5];
};
static_assert(sizeof(Fixed) == kKeyAt);
static_assert(kKeyAt + Key::kMaxBytes == static_cast<std::size_t>(kFixedHeader));
static_assert(std::endian::native == std::endian::little);

std::int64_t granules_of(std::int64_t section) { return (section + kGranuleBytes - 1) / kGranuleBytes; }

std::uint64_t checksum_of(std::span<const std::byte> header) {
  Fixed fixed;
  std::memcpy(&fixed, header.data(), sizeof fixed);
  fixed.checksum = 0;
  return cpu::xxh3(std::as_bytes(std::span(&fixed, 1)), header.subspan(sizeof fixed));
}

/// Calls `use(index, begin, end)` for the granules of a section: index of the checksum, bytes of the image.
template <class Use>
bool each_granule(std::int64_t index, std::int64_t begin, std::int64_t bytes, std::int64_t padding, const Use& use) {
  for (std::int64_t at = 0; at < bytes; at += kGranuleBytes) {
    const bool last = at + kGranuleBytes >= bytes;
    const std::int64_t end = last ? begin + bytes + padding : begin + at + kGranuleBytes;
    if (!use(index++, begin + at, end)) return false;
  }
  return true;
}

/// The same for the shared section and a range of heads. What pads the payload to whole pages belongs to the last
/// granule.
template <class Use>
bool each_granule(const Content& content, std::int64_t header_bytes, bool shared, std::int64_t first_head,
                  std::int64_t num_heads, const Use& use) {
  const std::int64_t payload = content.payload_bytes();
  const std::int64_t padding = whole_pages(payload) - payload;
  const bool heads = content.head_bytes > 0 && content.heads.count > 0;
  if (shared && !each_granule(0, header_bytes, content.shared_bytes, heads ? 0 : padding, use)) return false;
  if (!heads) return true;
  for (std::int64_t h = first_head; h < first_head + num_heads; ++h) {
    const std::int64_t index = granules_of(content.shared_bytes) + h * granules_of(content.head_bytes);
    const std::int64_t begin = header_bytes + content.shared_bytes + h * content.head_bytes;
    if (!each_granule(index, begin, content.head_bytes, h + 1 == content.heads.count ? padding : 0, use)) return false;
  }
  return true;
}

std::uint64_t sum_at(const std::byte* image, std::int64_t index) {
  std::uint64_t sum = 0;
  std::memcpy(&sum, image + kFixedHeader + index * 8, sizeof sum);
  return sum;
}

}  // namespace

std::int64_t Content::num_granules() const { return granules_of(shared_bytes) + heads.count * granules_of(head_bytes); }

Frame::Frame(const Namespace& space, Content content) : content_(std::move(content)) {
  const std::int64_t granules = content_.num_granules();
  if (granules == 0) throw Error(ErrorCode::kArgument, "store: a chunk of 0 bytes");
  const std::size_t texts = content_.order.size() + space.text().size();
  header_bytes_ = whole_pages(kFixedHeader + granules * 8 + static_cast<std::int64_t>(texts));
  if (header_bytes_ > kLargestHeader) {
    throw Error(ErrorCode::kArgument, fmt::format("store: a chunk of {} bytes needs a header of {} bytes, more than {}",
                                                  content_.payload_bytes(), header_bytes_, kLargestHeader));
  }
  Fixed fixed{};
  std::copy(kMagic.begin(), kMagic.end(), fixed.magic);
  fixed.version = kVersion;
  fixed.header_bytes = static_cast<std::uint32_t>(header_bytes_);
  fixed.payload_bytes = static_cast<std::uint64_t>(content_.payload_bytes());
  std::copy(space.digest().begin(), space.digest().end(), fixed.digest);
  fixed.head_first = content_.heads.first;
  fixed.head_count = content_.heads.count;
  fixed.shared_bytes = static_cast<std::uint64_t>(content_.shared_bytes);
  fixed.head_bytes = static_cast<std::uint64_t>(content_.head_bytes);
  fixed.num_granules = static_cast<std::uint32_t>(granules);
  fixed.granule_bytes = kGranuleBytes;
  fixed.order_bytes = static_cast<std::uint32_t>(content_.order.size());
  fixed.space_bytes = static_cast<std::uint32_t>(space.text().size());
  blank_.resize(static_cast<std::size_t>(header_bytes_));
  std::memcpy(blank_.data(), &fixed, sizeof fixed);
  std::byte* text = blank_.data() + kFixedHeader + granules * 8;
  std::memcpy(text, content_.order.data(), content_.order.size());
  std::memcpy(text + content_.order.size(), space.text().data(), space.text().size());
}

void Frame::seal(std::byte* image, const Key& key) const {
  std::memcpy(image, blank_.data(), blank_.size());
  std::memset(image + header_bytes_ + content_.payload_bytes(), 0,
              static_cast<std::size_t>(image_bytes() - header_bytes_ - content_.payload_bytes()));
  Fixed fixed;
  std::memcpy(&fixed, image, sizeof fixed);
  fixed.key_bytes = static_cast<std::uint32_t>(key.bytes().size());
  std::memcpy(image + kKeyAt, key.bytes().data(), key.bytes().size());
  each_granule(content_, header_bytes_, true, 0, content_.heads.count,
               [&](std::int64_t index, std::int64_t begin, std::int64_t end) {
                 const std::uint64_t sum = cpu::xxh3({image + begin, image + end});
                 std::memcpy(image + kFixedHeader + index * 8, &sum, sizeof sum);
                 return true;
               });
  std::memcpy(image, &fixed, sizeof fixed);
  fixed.checksum = checksum_of({image, static_cast<std::size_t>(header_bytes_)});
  std::memcpy(image, &fixed, sizeof fixed);
}

bool Frame::matches(const std::byte* image, const Key& key) const {
  Fixed fixed;
  std::memcpy(&fixed, image, sizeof fixed);
  const std::uint64_t checksum = fixed.checksum;
  if (fixed.key_bytes != key.bytes().size()) return false;
  fixed.checksum = 0;
  fixed.key_bytes = 0;
  if (std::memcmp(&fixed, blank_.data(), sizeof fixed) != 0) return false;
  std::array<std::byte, Key::kMaxBytes> room{};
  std::copy(key.bytes().begin(), key.bytes().end(), room.begin());
  if (std::memcmp(image + kKeyAt, room.data(), room.size()) != 0) return false;
  const auto texts = static_cast<std::size_t>(kFixedHeader + content_.num_granules() * 8);
  if (std::memcmp(image + texts, blank_.data() + texts, blank_.size() - texts) != 0) return false;
  return checksum == checksum_of({image, blank_.size()});
}

bool Frame::verify(const std::byte* image, bool shared, std::int64_t first_head, std::int64_t num_heads) const {
  return each_granule(content_, header_bytes_, shared, first_head, num_heads,
                      [&](std::int64_t index, std::int64_t begin, std::int64_t end) {
                        return cpu::xxh3({image + begin, image + end}) == sum_at(image, index);
                      });
}

Bytes Frame::shared_range(bool header) const {
  Bytes out{header ? 0 : header_bytes_, header_bytes_};
  if (content_.shared_bytes > 0) out.end = header_bytes_ + whole_pages(content_.shared_bytes);
  return out;
}

Bytes Frame::heads_range(std::int64_t first_head, std::int64_t num_heads) const {
  const std::int64_t begin = header_bytes_ + content_.shared_bytes + first_head * content_.head_bytes;
  return {begin / kPage * kPage, whole_pages(begin + num_heads * content_.head_bytes)};
}

std::vector<Bytes> granules(const Content& content, std::int64_t header_bytes) {
  std::vector<Bytes> out;
  each_granule(content, header_bytes, true, 0, content.heads.count,
               [&](std::int64_t, std::int64_t begin, std::int64_t end) {
                 out.push_back({begin, end});
                 return true;
               });
  return out;
}

std::optional<std::int64_t> header_length(std::span<const std::byte> start) {
  Fixed fixed;
  if (start.size() < static_cast<std::size_t>(kFixedHeader)) return std::nullopt;
  std::memcpy(&fixed, start.data(), sizeof fixed);
  if (!std::equal(kMagic.begin(), kMagic.end(), fixed.magic) || fixed.version != kVersion) return std::nullopt;
  if (fixed.header_bytes == 0 || fixed.header_bytes % kPage != 0 || fixed.header_bytes > kLargestHeader) {
    return std::nullopt;
  }
  return fixed.header_bytes;
}

std::optional<Header> parse_header(std::span<const std::byte> bytes, std::string* why) {
  const auto refuse = [&](const char* reason) -> std::optional<Header> {
    if (why != nullptr) *why = reason;
    return std::nullopt;
  };
  const std::optional<std::int64_t> length = header_length(bytes);
  if (!length) {
    const bool magic = bytes.size() >= kMagic.size() && std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0;
    return refuse(magic ? "a header of another version, or damaged" : "not a chunk file");
  }
  if (bytes.size() < static_cast<std::size_t>(*length)) return refuse("the header is cut off");
  bytes = bytes.first(static_cast<std::size_t>(*length));
  Fixed fixed;
  std::memcpy(&fixed, bytes.data(), sizeof fixed);
  if (checksum_of(bytes) != fixed.checksum) return refuse("the header is damaged");
  // From here on the header is what some program sealed; that does not make its numbers sensible.
  constexpr std::uint64_t kMost = std::uint64_t{1} << 40;
  if (fixed.payload_bytes > kMost || fixed.shared_bytes > kMost || fixed.head_bytes > kMost ||
      fixed.head_first > 0xFFFF || fixed.head_count > 0xFFFF) {
    return refuse("the header has sizes out of range");
  }
  Content content;
  content.heads = {static_cast<std::uint16_t>(fixed.head_first), static_cast<std::uint16_t>(fixed.head_count)};
  content.shared_bytes = static_cast<std::int64_t>(fixed.shared_bytes);
  content.head_bytes = static_cast<std::int64_t>(fixed.head_bytes);
  const std::uint64_t granules = fixed.num_granules;
  const std::uint64_t used =
      static_cast<std::uint64_t>(kFixedHeader) + granules * 8 + fixed.order_bytes + fixed.space_bytes;
  if (fixed.payload_bytes == 0 || static_cast<std::uint64_t>(content.payload_bytes()) != fixed.payload_bytes ||
      static_cast<std::uint64_t>(content.num_granules()) != granules || fixed.granule_bytes != kGranuleBytes ||
      fixed.key_bytes == 0 || fixed.key_bytes > Key::kMaxBytes || used > bytes.size() ||
      whole_pages(static_cast<std::int64_t>(used)) != *length) {
    return refuse("the header contradicts itself");
  }
  const auto text_at = static_cast<std::size_t>(kFixedHeader) + granules * 8;
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + text_at;
  content.order.assign(text, fixed.order_bytes);
  Header out{Key(bytes.subspan(kKeyAt, fixed.key_bytes)), {}, {}, std::move(content), *length, {}};
  std::copy(std::begin(fixed.digest), std::end(fixed.digest), out.digest.begin());
  out.space_text.assign(text + fixed.order_bytes, fixed.space_bytes);
  try {
    if (Namespace::parse(out.space_text).digest() != out.digest) return refuse("the namespace's text has another hash");
  } catch (const Error&) {
    return refuse("the namespace's text is none");
  }
  for (std::uint64_t i = 0; i < granules; ++i) out.sums.push_back(sum_at(bytes.data(), static_cast<std::int64_t>(i)));
  return out;
}

}  // namespace kvstride::store
