// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <new>
#include <string>

namespace bench {
namespace {

constexpr std::size_t kPage = std::size_t{2} << 20;

std::size_t round_up(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

/// One side: a mapping, and the part of it that starts on a huge page.
struct Side {
  void* mapping = nullptr;
  std::size_t mapped = 0;
  std::byte* data = nullptr;

  void map(std::size_t bytes) {
    mapped = bytes + kPage;
    mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    data = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(mapping)));
    madvise(data, bytes, MADV_HUGEPAGE);
    // Values around 1 with both signs, all fields of a bf16 in use but no infinity and no NaN.
    auto* words = reinterpret_cast<std::uint16_t*>(data);
    std::uint32_t state = 1;
    for (std::size_t i = 0; i < kPage / 2; ++i) {
      state = state * 1664525U + 1013904223U;
      words[i] = static_cast<std::uint16_t>(0x3C00U + ((state >> 16) & 0x83FFU));
    }
    for (std::size_t at = kPage; at < bytes; at += kPage) std::memcpy(data + at, data, kPage);
  }

  void unmap() {
    if (mapping != nullptr) munmap(mapping, mapped);
    *this = {};
  }
};

Side sides[2];
std::size_t size = 0;  // of a side
std::size_t at = 0;    // of the next spot

}  // namespace

Spot next_spot(std::size_t bytes) {
  const std::size_t piece = round_up(bytes);
  const std::size_t needed = (std::max(kRotation, piece) + piece - 1) / piece * piece;
  if (needed > size) {
    release();
    for (Side& side : sides) side.map(needed);
    size = needed;
  }
  if (at + piece > size) at = 0;
  const Spot spot{sides[0].data + at, sides[1].data + at};
  at += piece;
  return spot;
}

void release() {
  for (Side& side : sides) side.unmap();
  size = at = 0;
}

std::size_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::size_t kib = 0;
  while (file >> name >> kib) {
    if (name == "MemAvailable:") return kib << 10;
    file.ignore(64, '\n');
  }
  return 0;
}

}  // namespace bench
