// SPDX-License-Identifier: Apache-2.0
// XXH3-64 at the speed of the CPU that it runs on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvstride::cpu {

/// XXH3-64 with seed 0.
std::uint64_t xxh3(std::span<const std::byte> bytes);
/// The same of two pieces, one after the other.
std::uint64_t xxh3(std::span<const std::byte> first, std::span<const std::byte> second);

}  // namespace kvstride::cpu
