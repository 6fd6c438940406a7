// SPDX-License-Identifier: Apache-2.0
// One thing to measure beside the best copy of as many bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvstride/kvstride.h"
#include "memory.h"

namespace bench {

/// What a work does to bytes decides what is asked of it with several threads.
enum class Kind {
  kCopy,      ///< whole blocks: a ratio of 0.95 with any number of threads
  kRows,      ///< runs and rows: the ratio of one thread with any number of threads
  kElements,  ///< transposes and casts: with several threads, 1.5 times the speed of one
};

/// `prepare` places the caches, not timed, and returns the call that is timed.
struct Work {
  std::string name;  ///< verb/what
  Kind kind = Kind::kRows;
  double target = 0;        ///< ratio to the best copy with one thread; 0: none is asked
  std::size_t room = 0;     ///< bytes that each side of the memory needs
  std::size_t bytes = 0;    ///< of the wider side: what the best copy moves
  std::size_t traffic = 0;  ///< read and written
  std::int64_t pairs = 0;   ///< of blocks or tokens
  std::function<std::function<void()>(Spot spot, std::int64_t round)> prepare;
};

/// Every row of the table of targets (works.cpp).
std::vector<Work> works();
/// The same calls over sizes, and over numbers of pairs (sweeps.cpp).
std::vector<Work> sweeps();

/// Bytes of all tensors of a layout.
std::size_t bytes_of(const kvstride::Layout& layout);
/// The tensors of a layout one after the other.
kvstride::Cache cache_at(std::byte* memory, const kvstride::Layout& layout);
/// 0 … n − 1 in an order where no two neighbours stay neighbours, for n of 4 or more.
std::vector<std::int64_t> scattered(std::int64_t n);
/// (i, scattered[i])
std::vector<kvstride::Pair> scattered_pairs(std::int64_t n);

/// swap_blocks between two caches of this layout, every block.
Work swap_work(std::string name, const kvstride::Layout& layout, double target);
/// convert_blocks of every block, pair by pair.
Work convert_work(std::string name, Kind kind, const kvstride::Layout& src, const kvstride::Layout& dst, double target,
                  const kvstride::PlanOptions& options = {});

}  // namespace bench
