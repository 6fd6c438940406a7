// SPDX-License-Identifier: Apache-2.0
// What stored bytes belong to: a namespace, and a key in it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvstride/dtype.h"

namespace kvstride {

/// A SHA-256.
using Digest = std::array<std::byte, 32>;
/// Lower-case hex of any bytes.
std::string to_hex(std::span<const std::byte> bytes);
/// The bytes of lower-case hex, or nothing where the text is none.
std::optional<std::vector<std::byte>> from_hex(std::string_view text);

/// The elements of one plane: `bf16`, or `bf16[512]` where a token has another number of them than the head size.
struct PlaneSpec {
  DType dtype = DType::kBF16;
  std::optional<std::int64_t> dim;  ///< not given: head_size, or value_head_size of `value…` planes

  /// From `bf16` or `bf16[512]`; `plane` is its name, for messages. Throws Error(kDType) for an unknown dtype,
  /// Error(kArgument) for `auto` and for what has another form.
  static PlaneSpec parse(std::string_view text, std::string_view plane);
  bool operator==(const PlaneSpec&) const = default;
};

/// Everything that must be equal for stored bytes to mean the same thing. Tensor-parallel size, rank, memory layout and
/// CPU belong into `raw` only, and only where the bytes' layout is not known.
struct NamespaceFields {
  std::string model;                        ///< what the weights are called
  std::string revision;                     ///< of the weights: a commit or a fingerprint, never a moving name
  std::map<std::string, PlaneSpec> planes;  ///< name → elements; scales are planes (`key_scale`)
  std::int64_t num_layers = 0;
  std::int64_t num_kv_heads = 0;  ///< of the whole model, not of a tensor-parallel rank
  std::int64_t head_size = 0;
  std::int64_t block_size = 0;                  ///< tokens in a chunk
  std::optional<std::int64_t> value_head_size;  ///< of planes called `value…` without a dim of their own
  std::int64_t first_layer = 0;                 ///< of a pipeline stage or group
  std::int64_t group = 0;                       ///< KV group of a hybrid model
  std::optional<std::string> adapter;           ///< fingerprint of the adapter's weights, not only its name
  std::string salt_policy = "none";             ///< how tenants' salts enter the keys
  std::optional<std::string> raw;               ///< what raw bytes depend on: layout, ISA, TP size, rank
  bool operator==(const NamespaceFields&) const = default;
};

/// A canonical text and its SHA-256 (docs/formats/identity.md). Immutable.
class Namespace {
 public:
  /// Throws Error(kArgument) that names the field: model, revision, planes or a size missing; a text that is blank, not
  /// UTF-8 or longer than 4096 bytes; `auto` (in any case) as a value anywhere; a revision or adapter such as `main` or
  /// `latest`, which can change; a size below 1 or above 2^48; more than 64 planes, or a name that no layout can have.
  explicit Namespace(NamespaceFields fields);
  /// From canonical text, as a file's header holds it. Throws Error(kArgument) where it is not exactly that.
  static Namespace parse(std::string_view text);

  /// As the text has them, equal where the texts are: every plane with its dim, and value_head_size where the plane
  /// `value` has another dim than head_size.
  const NamespaceFields& fields() const noexcept { return fields_; }
  const std::string& text() const noexcept { return text_; }
  const Digest& digest() const noexcept { return digest_; }
  std::string hex() const { return to_hex(digest_); }
  bool operator==(const Namespace& other) const { return text_ == other.text_; }

 private:
  NamespaceFields fields_;
  std::string text_;
  Digest digest_;
};

/// Which chunk: an engine's own block hash, or ours. 1 to 64 bytes; becomes a file name through hex only.
class Key {
 public:
  static constexpr std::size_t kMaxBytes = 64;
  /// Throws Error(kArgument) for no bytes or more than 64.
  explicit Key(std::span<const std::byte> bytes);
  /// SHA-256 over the parent (null for the first block), the block's token ids and extra strings: cache salt, adapter,
  /// media ids. Each has its length or count before it (docs/formats/identity.md), so no two inputs give one text.
  static Key chain(const Key* parent, std::span<const std::uint32_t> tokens,
                   std::span<const std::string_view> extra = {});

  std::span<const std::byte> bytes() const noexcept { return {bytes_.data(), size_}; }
  std::string hex() const { return to_hex(bytes()); }
  bool operator==(const Key& other) const noexcept;

 private:
  std::array<std::byte, kMaxBytes> bytes_{};
  std::uint8_t size_ = 0;
};

}  // namespace kvstride
