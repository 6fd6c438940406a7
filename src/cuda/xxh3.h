// SPDX-License-Identifier: Apache-2.0
// XXH3-64 with seed 0, for the device and for the host grid: a block of threads takes one granule.
//
// A long input is rows of 1 KiB. What a row adds to the eight accumulators does not depend on what they hold, so all
// rows are summed at once; only the scrambling between them goes one row after the other.
#pragma once

#include "cuda/copy.h"

namespace kvstride::cuda {

/// Pieces of memory on a device, each cut into granules, of which each gets its checksum.
struct Checksums {
  std::int64_t data;      ///< address of the first piece, a multiple of 16
  std::int64_t stride;    ///< from piece to piece, a multiple of 16
  std::int64_t bytes;     ///< of a piece
  std::int64_t granules;  ///< of a piece
  std::int64_t pieces;
  std::int64_t sums;  ///< address of granules × pieces 64-bit words
  std::uint64_t secret[24];
};

namespace xxh3 {

constexpr std::uint64_t kPrime32_1 = 0x9E3779B1;
constexpr std::uint64_t kPrime32_2 = 0x85EBCA77;
constexpr std::uint64_t kPrime32_3 = 0xC2B2AE3D;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87;
constexpr std::uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4F;
constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9;
constexpr std::uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63;
constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5;
constexpr std::uint64_t kPrimeMx1 = 0x165667919E3779F9;
constexpr std::uint64_t kPrimeMx2 = 0x9FB21C651E98DF25;

constexpr std::int64_t kRow = 1024;                             ///< bytes between two scrambles
constexpr std::int64_t kStripe = 64;                            ///< bytes, eight accumulators' words
constexpr std::uint32_t kStripes = 16;                          ///< of a row
constexpr std::uint32_t kSecretAt = kGranule / kRow * kStripe;  ///< in shared memory, behind the rows' sums
constexpr std::int64_t kShort = 240;                            ///< bytes up to which an input is short
static_assert(kSecretAt + sizeof(Checksums::secret) <= kSharedBytes);

/// The secret's bytes, by any offset.
KVSTRIDE_HD inline std::uint64_t secret_at(const std::uint64_t* secret, std::uint32_t byte) {
  const std::uint32_t shift = byte % 8 * 8;
  const std::uint64_t* word = secret + byte / 8;
  return shift == 0 ? word[0] : word[0] >> shift | word[1] << (64 - shift);
}

/// A little-endian number of `num` bytes at any address.
KVSTRIDE_HD inline std::uint64_t number_at(std::int64_t address, std::int64_t num = 8) {
  std::uint64_t out = 0;
  for (std::int64_t i = 0; i < num; ++i) out |= std::uint64_t{load<std::uint8_t>(address + i)} << (8 * i);
  return out;
}

/// Low and high half of the 128-bit product, one xor the other.
KVSTRIDE_HD inline std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
  constexpr std::uint64_t kLow = 0xFFFFFFFF;
  const std::uint64_t low = (a & kLow) * (b & kLow);
  const std::uint64_t cross = (a >> 32) * (b & kLow) + (low >> 32);
  const std::uint64_t other = (a & kLow) * (b >> 32) + (cross & kLow);
  return ((a >> 32) * (b >> 32) + (cross >> 32) + (other >> 32)) ^ (other << 32 | (low & kLow));
}

KVSTRIDE_HD inline std::uint64_t rotated(std::uint64_t value, int by) { return value << by | value >> (64 - by); }

KVSTRIDE_HD inline std::uint64_t avalanche(std::uint64_t hash) {
  hash = (hash ^ hash >> 37) * kPrimeMx1;
  return hash ^ hash >> 32;
}

/// The one of XXH64.
KVSTRIDE_HD inline std::uint64_t old_avalanche(std::uint64_t hash) {
  hash = (hash ^ hash >> 33) * kPrime64_2;
  hash = (hash ^ hash >> 29) * kPrime64_3;
  return hash ^ hash >> 32;
}

KVSTRIDE_HD inline std::uint64_t mixed(const std::uint64_t* secret, std::int64_t at, std::uint32_t byte) {
  return folded(number_at(at) ^ secret_at(secret, byte), number_at(at + 8) ^ secret_at(secret, byte + 8));
}

/// Of at most 16 bytes.
KVSTRIDE_HD inline std::uint64_t tiny_sum(const std::uint64_t* secret, std::int64_t at, std::int64_t bytes) {
  const auto length = static_cast<std::uint64_t>(bytes);
  if (bytes == 0) return old_avalanche(secret_at(secret, 56) ^ secret_at(secret, 64));
  if (bytes < 4) {
    const std::uint64_t value =
        number_at(at, 1) << 16 | number_at(at + bytes / 2, 1) << 24 | number_at(at + bytes - 1, 1) | length << 8;
    return old_avalanche(value ^ ((secret[0] ^ secret[0] >> 32) & 0xFFFFFFFF));
  }
  if (bytes < 9) {
    std::uint64_t hash = number_at(at + bytes - 4, 4) + (number_at(at, 4) << 32);
    hash ^= secret_at(secret, 8) ^ secret_at(secret, 16);
    hash = (hash ^ rotated(hash, 49) ^ rotated(hash, 24)) * kPrimeMx2;
    hash = (hash ^ ((hash >> 35) + length)) * kPrimeMx2;
    return hash ^ hash >> 28;
  }
  const std::uint64_t low = number_at(at) ^ secret_at(secret, 24) ^ secret_at(secret, 32);
  const std::uint64_t high = number_at(at + bytes - 8) ^ secret_at(secret, 40) ^ secret_at(secret, 48);
  std::uint64_t swapped = 0;
  for (int i = 0; i < 64; i += 8) swapped = swapped << 8 | (low >> i & 0xFF);
  return avalanche(length + swapped + high + folded(low, high));
}

/// Of at most kShort bytes, by one thread.
KVSTRIDE_HD inline std::uint64_t short_sum(const std::uint64_t* secret, std::int64_t at, std::int64_t bytes) {
  if (bytes <= 16) return tiny_sum(secret, at, bytes);
  std::uint64_t sum = static_cast<std::uint64_t>(bytes) * kPrime64_1;
  if (bytes <= 128) {
    for (std::uint32_t i = 0; i <= static_cast<std::uint32_t>(bytes - 1) / 32; ++i) {
      sum += mixed(secret, at + 16 * std::int64_t{i}, 32 * i);
      sum += mixed(secret, at + bytes - 16 * (std::int64_t{i} + 1), 32 * i + 16);
    }
    return avalanche(sum);
  }
  for (std::uint32_t i = 0; i < 8; ++i) sum += mixed(secret, at + 16 * std::int64_t{i}, 16 * i);
  sum = avalanche(sum);
  for (std::uint32_t i = 8; i < static_cast<std::uint32_t>(bytes) / 16; ++i) {
    sum += mixed(secret, at + 16 * std::int64_t{i}, 16 * (i - 8) + 3);
  }
  return avalanche(sum + mixed(secret, at + bytes - 16, 136 - 17));
}

/// What 16 bytes add to two neighbouring accumulators.
KVSTRIDE_HD inline void add(std::uint64_t low, std::uint64_t high, std::uint64_t low_key, std::uint64_t high_key,
                            Sixteen& sums) {
  low_key ^= low;
  high_key ^= high;
  sums.low += high + (low_key & 0xFFFFFFFF) * (low_key >> 32);
  sums.high += low + (high_key & 0xFFFFFFFF) * (high_key >> 32);
}

/// Sums of the rows of a long granule: four threads a row, each of two accumulators.
KVSTRIDE_HD inline void sum_rows(std::int64_t at, std::int64_t bytes, std::byte* shared, std::uint32_t thread) {
  const auto* secret = reinterpret_cast<const std::uint64_t*>(shared + kSecretAt);
  const std::uint32_t pair = thread % 4;
  const auto last = static_cast<std::uint32_t>((bytes - 1) / kRow);
  for (std::uint32_t row = thread / 4; row <= last; row += kThreads / 4) {
    const std::int64_t from = at + row * kRow + 16 * std::int64_t{pair};
    const std::uint32_t stripes =
        row < last ? kStripes : static_cast<std::uint32_t>((bytes - 1 - last * kRow) / kStripe);
    Sixteen sums{0, 0};
    for (std::uint32_t stripe = 0; stripe < stripes; ++stripe) {
      const auto value = load<Sixteen>(from + stripe * kStripe);
      const std::uint64_t* key = secret + stripe + 2 * pair;
      add(value.low, value.high, key[0], key[1], sums);
    }
    if (row == last) {  // the granule's last 64 bytes, whatever they have in common with the stripe before
      const std::int64_t end = at + bytes - kStripe + 16 * std::int64_t{pair};
      const std::uint32_t byte = sizeof(Checksums::secret) - kStripe - 7 + 16 * pair;
      add(number_at(end), number_at(end + 8), secret_at(secret, byte), secret_at(secret, byte + 8), sums);
    }
    *reinterpret_cast<Sixteen*>(shared + row * kStripe + 16 * pair) = sums;
  }
}

/// The accumulator `lane` through all rows; in the end where the first row's sum was.
KVSTRIDE_HD inline void scramble_rows(std::int64_t bytes, std::byte* shared, std::uint32_t lane) {
  std::uint64_t sum = 0;
  switch (lane) {
    case 0: sum = kPrime32_3; break;
    case 1: sum = kPrime64_1; break;
    case 2: sum = kPrime64_2; break;
    case 3: sum = kPrime64_3; break;
    case 4: sum = kPrime64_4; break;
    case 5: sum = kPrime32_2; break;
    case 6: sum = kPrime64_5; break;
    default: sum = kPrime32_1; break;
  }
  auto* rows = reinterpret_cast<std::uint64_t*>(shared) + lane;
  const std::uint64_t key = reinterpret_cast<const std::uint64_t*>(shared + kSecretAt)[16 + lane];
  const std::int64_t last = (bytes - 1) / kRow;
  for (std::int64_t row = 0; row < last; ++row) {
    sum += rows[8 * row];
    sum = (sum ^ sum >> 47 ^ key) * kPrime32_1;
  }
  rows[0] = sum + rows[8 * last];
}

KVSTRIDE_HD inline std::uint64_t merged(std::int64_t bytes, const std::byte* shared) {
  const auto* sums = reinterpret_cast<const std::uint64_t*>(shared);
  const auto* secret = reinterpret_cast<const std::uint64_t*>(shared + kSecretAt);
  std::uint64_t out = static_cast<std::uint64_t>(bytes) * kPrime64_1;
  for (std::uint32_t i = 0; i < 8; i += 2) {
    out += folded(sums[i] ^ secret_at(secret, 11 + 8 * i), sums[i + 1] ^ secret_at(secret, 19 + 8 * i));
  }
  return avalanche(out);
}

}  // namespace xxh3

/// The checksums of all granules; `Block` as in grid.h.
template <class Block>
KVSTRIDE_HD void checksum(const Checksums& work, Block& block) {
  block.threads([&](std::uint32_t thread) {
    constexpr std::uint32_t kWords = sizeof work.secret / sizeof work.secret[0];
    if (thread < kWords)
      reinterpret_cast<std::uint64_t*>(block.shared() + xxh3::kSecretAt)[thread] = work.secret[thread];
  });
  block.barrier();
  for (std::int64_t i = block.index(); i < work.pieces * work.granules; i += block.count()) {
    const std::int64_t piece = i / work.granules;
    const std::int64_t begin = (i - piece * work.granules) * kGranule;
    const std::int64_t at = work.data + piece * work.stride + begin;
    const std::int64_t bytes = work.bytes - begin < kGranule ? work.bytes - begin : kGranule;
    const std::int64_t to = work.sums + i * static_cast<std::int64_t>(sizeof(std::uint64_t));
    if (bytes <= xxh3::kShort) {
      block.threads([&](std::uint32_t thread) {
        const auto* secret = reinterpret_cast<const std::uint64_t*>(block.shared() + xxh3::kSecretAt);
        if (thread == 0) store(to, xxh3::short_sum(secret, at, bytes));
      });
      continue;
    }
    block.threads([&](std::uint32_t thread) { xxh3::sum_rows(at, bytes, block.shared(), thread); });
    block.barrier();
    block.threads([&](std::uint32_t thread) {
      if (thread < 8) xxh3::scramble_rows(bytes, block.shared(), thread);
    });
    block.barrier();
    block.threads([&](std::uint32_t thread) {
      if (thread == 0) store(to, xxh3::merged(bytes, block.shared()));
    });
    block.barrier();
  }
}

/// The secret that XXH3 has where none is given.
inline void set_secret(Checksums& work) {
  constexpr std::uint64_t kSecret[24] = {
      0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,  //
      0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0,  //
      0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,  //
      0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8,  //
      0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,  //
      0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF};
  std::memcpy(work.secret, kSecret, sizeof kSecret);
}

}  // namespace kvstride::cuda
