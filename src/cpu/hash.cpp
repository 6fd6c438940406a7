// SPDX-License-Identifier: Apache-2.0
// XXH3-64: the instructions that every CPU has, or AVX2 where it is there.
#include "cpu/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvstride::cpu {

#ifdef KVSTRIDE_HASH_AVX2
std::uint64_t xxh3_avx2(const void* data, std::size_t bytes);
#endif

std::uint64_t xxh3(std::span<const std::byte> bytes) {
#ifdef KVSTRIDE_HASH_AVX2
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return xxh3_avx2(bytes.data(), bytes.size());
#endif
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::uint64_t xxh3(std::span<const std::byte> first, std::span<const std::byte> second) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, first.data(), first.size());
  XXH3_64bits_update(&state, second.data(), second.size());
  return XXH3_64bits_digest(&state);
}

}  // namespace kvstride::cpu
