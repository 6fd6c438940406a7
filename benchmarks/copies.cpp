// SPDX-License-Identifier: Apache-2.0
// The vector loops of the yardsticks, compiled for every instruction set that Highway knows here.
#include "copies.h"

#include <cstdint>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "copies.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace bench {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kStep = 256;  // four of the widest vectors

template <bool kStream>
HWY_INLINE void move_step(std::uint8_t* dst, const std::uint8_t* src) {
  const hn::ScalableTag<std::uint8_t> d;
  for (std::size_t i = 0; i < kStep; i += hn::Lanes(d)) {
    if constexpr (kStream) {
      hn::Stream(hn::LoadU(d, src + i), d, dst + i);
    } else {
      hn::StoreU(hn::LoadU(d, src + i), d, dst + i);
    }
  }
}

HWY_INLINE void prefetch_step(const std::uint8_t* src) {
  for (std::size_t line = 0; line < kStep; line += 64) hwy::Prefetch(src + line);
}

template <bool kStream>
void straight(std::byte* dst, const std::byte* src, std::size_t bytes) {
  constexpr std::size_t kAhead = 2048;  // measured: 512 to 4096 are alike
  auto* to = reinterpret_cast<std::uint8_t*>(dst);
  const auto* from = reinterpret_cast<const std::uint8_t*>(src);
  std::size_t i = 0;
  for (; i + kStep <= bytes; i += kStep) {
    prefetch_step(from + i + kAhead);
    move_step<kStream>(to + i, from + i);
  }
  std::memcpy(to + i, from + i, bytes - i);
  if constexpr (kStream) hwy::FlushStream();
}

void streamed(std::byte* dst, const std::byte* src, std::size_t bytes) { straight<true>(dst, src, bytes); }
void stored(std::byte* dst, const std::byte* src, std::size_t bytes) { straight<false>(dst, src, bytes); }

void paged(std::byte* dst, const std::byte* src, std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kPages = 8;
  auto* to = reinterpret_cast<std::uint8_t*>(dst);
  const auto* from = reinterpret_cast<const std::uint8_t*>(src);
  std::size_t done = 0;
  for (; done + kPages * kPage <= bytes; done += kPages * kPage) {
    for (std::size_t i = done; i < done + kPage; i += kStep) {
      for (std::size_t page = 0; page < kPages; ++page) prefetch_step(from + i + (kPages + page) * kPage);
      for (std::size_t page = 0; page < kPages; ++page) move_step<true>(to + i + page * kPage, from + i + page * kPage);
    }
  }
  straight<true>(dst + done, src + done, bytes - done);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace bench {

HWY_EXPORT(streamed);
HWY_EXPORT(stored);
HWY_EXPORT(paged);

void memcpy_copy(std::byte* dst, const std::byte* src, std::size_t bytes) { std::memcpy(dst, src, bytes); }
void streamed_copy(std::byte* dst, const std::byte* src, std::size_t bytes) {
  HWY_DYNAMIC_DISPATCH(streamed)(dst, src, bytes);
}
void stored_copy(std::byte* dst, const std::byte* src, std::size_t bytes) {
  HWY_DYNAMIC_DISPATCH(stored)(dst, src, bytes);
}
void paged_copy(std::byte* dst, const std::byte* src, std::size_t bytes) {
  HWY_DYNAMIC_DISPATCH(paged)(dst, src, bytes);
}

}  // namespace bench
#endif
