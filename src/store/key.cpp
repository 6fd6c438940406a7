// SPDX-License-Identifier: Apache-2.0
// Keys and their chain, SHA-256 and hex; the format is in docs/formats/identity.md.
#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>

#include "kvstride/error.h"
#include "store/sha256.h"

namespace kvstride {
namespace {

constexpr std::string_view kFirstLine = "kvstride-key 1\n";
constexpr std::string_view kDigits = "0123456789abcdef";

void append(std::vector<std::byte>& out, std::span<const std::byte> bytes) {
  out.insert(out.end(), bytes.begin(), bytes.end());
}
void append(std::vector<std::byte>& out, std::string_view text) { append(out, std::as_bytes(std::span(text))); }

/// Little-endian, whatever the machine is.
template <typename T>
void append_number(std::vector<std::byte>& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<std::byte>(value >> (8 * i) & 0xFF));
}

}  // namespace

std::string to_hex(std::span<const std::byte> bytes) {
  std::string out;
  out.reserve(bytes.size() * 2);
  for (const std::byte byte : bytes) {
    out += kDigits[std::to_integer<std::size_t>(byte >> 4)];
    out += kDigits[std::to_integer<std::size_t>(byte & std::byte{15})];
  }
  return out;
}

std::optional<std::vector<std::byte>> from_hex(std::string_view text) {
  if (text.size() % 2 != 0) return {};
  std::vector<std::byte> out;
  out.reserve(text.size() / 2);
  for (std::size_t i = 0; i < text.size(); i += 2) {
    const auto high = kDigits.find(text[i]);
    const auto low = kDigits.find(text[i + 1]);
    if (high == std::string_view::npos || low == std::string_view::npos) return {};
    out.push_back(static_cast<std::byte>(high * 16 + low));
  }
  return out;
}

Digest store::sha256(std::span<const std::byte> bytes) {
  static const EVP_MD* const algorithm = EVP_MD_fetch(nullptr, "SHA256", nullptr);  // half the time of a small call
  Digest out;
  if (algorithm == nullptr || EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(out.data()),
                                         nullptr, algorithm, nullptr) != 1) {
    throw Error(ErrorCode::kStore, "sha256: libcrypto cannot compute it");
  }
  return out;
}

Key::Key(std::span<const std::byte> bytes) : size_(static_cast<std::uint8_t>(bytes.size())) {
  if (bytes.empty() || bytes.size() > kMaxBytes) {
    throw Error(ErrorCode::kArgument, fmt::format("key: {} bytes, must be from 1 to {}", bytes.size(), kMaxBytes));
  }
  std::copy(bytes.begin(), bytes.end(), bytes_.begin());
}

Key Key::chain(const Key* parent, std::span<const std::uint32_t> tokens, std::span<const std::string_view> extra) {
  std::vector<std::byte> text;
  text.reserve(kFirstLine.size() + 1 + 4 + kMaxBytes + 8 + tokens.size_bytes() + 4);
  append(text, kFirstLine);
  text.push_back(std::byte{parent != nullptr});
  if (parent != nullptr) {
    append_number(text, std::uint32_t{parent->size_});
    append(text, parent->bytes());
  }
  append_number(text, std::uint64_t{tokens.size()});
  for (const std::uint32_t token : tokens) append_number(text, token);
  append_number(text, static_cast<std::uint32_t>(extra.size()));
  for (const std::string_view item : extra) {
    append_number(text, std::uint64_t{item.size()});
    append(text, item);
  }
  return Key(store::sha256(text));
}

bool Key::operator==(const Key& other) const noexcept {
  return size_ == other.size_ && std::equal(bytes_.begin(), bytes_.begin() + size_, other.bytes_.begin());
}

}  // namespace kvstride
