// SPDX-License-Identifier: Apache-2.0
// Products of bf16 on Intel's AMX.
#include "cpu/products.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace kvstride::cpu {
namespace {

#define KVSTRIDE_AMX __attribute__((target("amx-tile,amx-bf16")))

constexpr std::int64_t kSide = 16;                   // rows of a tile, and columns of f32
constexpr std::int64_t kDepth = 32;                  // bf16 of a row of a tile
constexpr std::int64_t kPanelBytes = 4 * 2 * kSide;  // of a pair of depths

/// All eight tiles are 16 rows of 64 bytes.
struct alignas(64) Shape {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Shape) == 64);
constexpr Shape kShape;

KVSTRIDE_AMX void begin() { _tile_loadconfig(&kShape); }
KVSTRIDE_AMX void end() { _tile_release(); }

// GCC's tile instructions do not tell the compiler that they touch memory. Here nothing else does: what is loaded was
// written before the call, what is stored is read after it.

/// 32 or, without kTwo, 16 rows of C and both halves of a panel.
template <bool kTwo>
KVSTRIDE_AMX inline __attribute__((always_inline)) void multiply_block(float* c, std::int64_t c_step,
                                                                       const std::byte* a, std::int64_t a_bytes,
                                                                       const std::byte* b, std::int64_t depth) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t k = 0; k < depth; k += kDepth) {
    _tile_loadd(6, b, kPanelBytes);
    _tile_loadd(7, b + kPanelBytes / 2, kPanelBytes);
    b += kDepth / 2 * kPanelBytes;
    _tile_loadd(4, a + k * 2, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, a + k * 2 + kSide * a_bytes, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  const std::int64_t c_bytes = c_step * static_cast<std::int64_t>(sizeof(float));
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + kSide, c_bytes);
  if constexpr (kTwo) {
    _tile_stored(2, c + kSide * c_step, c_bytes);
    _tile_stored(3, c + kSide * c_step + kSide, c_bytes);
  }
}

KVSTRIDE_AMX void multiply(float* c, std::int64_t c_step, const std::byte* a, std::int64_t a_step, std::int64_t rows,
                           const std::byte* b, std::int64_t depth, std::int64_t panel_step, std::int64_t panels) {
  const std::int64_t a_bytes = 2 * a_step;
  for (std::int64_t p = 0; p < panels; ++p, b += 2 * panel_step, c += 2 * kSide) {
    for (std::int64_t r = 0; r < rows; r += 2 * kSide) {
      const std::int64_t first = r * a_bytes;
      if (rows - r > kSide) {
        multiply_block<true>(c + r * c_step, c_step, a + first, a_bytes, b, depth);
      } else {
        multiply_block<false>(c + r * c_step, c_step, a + first, a_bytes, b, depth);
      }
    }
  }
}

__attribute__((target("xsave"))) bool state_is_kept() {
  constexpr std::uint64_t kTiles = 3ULL << 17;
  return (_xgetbv(0) & kTiles) == kTiles;
}

bool usable() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0 || !state_is_kept()) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool tiles = (d >> 22 & 1U) != 0 && (d >> 24 & 1U) != 0;  // AMX-BF16, AMX-TILE
  if (!tiles) return false;
  // Linux gives the tiles' state to processes that ask.
  constexpr long kAskPermission = 0x1023;
  constexpr long kTileData = 18;
  return ::syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
}

}  // namespace

MatrixUnit amx() {
  static const bool there = usable();
  return there ? MatrixUnit{multiply, begin, end} : MatrixUnit{};
}

}  // namespace kvstride::cpu

#else

namespace kvstride::cpu {
MatrixUnit amx() { return {}; }
}  // namespace kvstride::cpu

#endif
