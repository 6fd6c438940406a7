// SPDX-License-Identifier: Apache-2.0
// XXH3-64 compiled with AVX2: more than twice as fast out of the cache as with SSE2, which is all that x86-64 promises.
#include <cstddef>
#include <cstdint>

#define XXH_INLINE_ALL
#define XXH_VECTOR XXH_AVX2
#include <xxhash.h>

namespace kvstride::cpu {

std::uint64_t xxh3_avx2(const void* data, std::size_t bytes) { return XXH3_64bits(data, bytes); }

}  // namespace kvstride::cpu
