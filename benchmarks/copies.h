// SPDX-License-Identifier: Apache-2.0
// The yardsticks: plain copies of one run of bytes, by as many threads as the work beside them.
#pragma once

#include <cstddef>

namespace bench {

using CopyFunction = void (*)(std::byte* dst, const std::byte* src, std::size_t bytes);

/// glibc's.
void memcpy_copy(std::byte* dst, const std::byte* src, std::size_t bytes);
/// A loop of non-temporal stores of the widest vectors, prefetched. Addresses are multiples of 64.
void streamed_copy(std::byte* dst, const std::byte* src, std::size_t bytes);
/// Non-temporal too, eight pages side by side: more rows of the memory are open at once. Only for the roofline.
void paged_copy(std::byte* dst, const std::byte* src, std::size_t bytes);
/// STREAM's copy kernel: loads and ordinary stores of the widest vectors.
void stored_copy(std::byte* dst, const std::byte* src, std::size_t bytes);

/// Splits the bytes over `threads`, fewer where a part would be under 256 KiB; those besides the calling one are kept
/// for the next call.
void copy_on(int threads, CopyFunction copy, std::byte* dst, const std::byte* src, std::size_t bytes);

}  // namespace bench
