// SPDX-License-Identifier: Apache-2.0
// Memory to measure on: huge pages, already touched, and cold because every use takes the next piece of a long
// rotation.
#pragma once

#include <cstddef>

namespace bench {

/// Room for one source and one destination.
struct Spot {
  std::byte* src;
  std::byte* dst;
};

/// Bytes that a side rotates over at least. Nothing that was moved one rotation ago is still in a cache.
inline constexpr std::size_t kRotation = std::size_t{512} << 20;

/// The next spot with `bytes` on each side, aligned to 2 MiB. Both sides are mapped on first use, and again where
/// more is asked for than they hold. Contents are any finite bf16 values.
Spot next_spot(std::size_t bytes);
/// Gives the memory back: what is measured next gets new pages.
void release();

/// What the kernel says it could give to a process now.
std::size_t available_bytes();

}  // namespace bench
