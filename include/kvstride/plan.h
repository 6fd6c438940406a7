// SPDX-License-Identifier: Apache-2.0
// A plan: two layouts and ranges turned into checked, coalesced loops; bound to blocks, run many times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvstride/cache.h"
#include "kvstride/device.h"
#include "kvstride/layout.h"

namespace kvstride {

/// (source block id, destination block id).
struct Pair {
  std::int64_t src;
  std::int64_t dst;
  bool operator==(const Pair&) const = default;
};

/// Ids in device memory: int32 or int64, `stride` items apart.
struct DeviceList {
  const void* ids = nullptr;
  std::int64_t item = 8;
  std::int64_t stride = 1;
  std::int64_t count = 0;
};

/// Pairs in device memory; both lists have the same count.
struct DevicePairs {
  DeviceList src;
  DeviceList dst;
};

/// First index and count.
struct Range {
  std::int64_t first = 0;
  std::int64_t count = 0;
  bool operator==(const Range&) const = default;
};

/// Heads or tokens on both sides.
struct RangePair {
  std::int64_t src_first = 0;
  std::int64_t dst_first = 0;
  std::int64_t count = 0;
  bool operator==(const RangePair&) const = default;
};

struct PlanOptions {
  std::optional<RangePair> heads;  ///< sharded planes only; replicated planes are always whole
  std::optional<Range> layers;
  bool cast = false;  ///< convert values where dtypes differ; otherwise that is an error
  /// Per plane name, one scale or one for each head of the f8 side: quantise x / scale, dequantise q × scale.
  std::map<std::string, std::vector<float>> scales;
  bool operator==(const PlanOptions&) const = default;
};

namespace plan {
class Program;
}

/// Copies of blocks from one layout to another. One thread at a time may bind or run a plan. Building checks everything
/// that does not depend on block ids; bind() checks the ids. Building and binding throw Error; nothing is written by
/// them.
class Plan {
 public:
  /// Planes must have the same names, token, head and dim lengths (head lengths may differ with `heads`).
  /// From layouts alone the plan can be inspected, not run.
  Plan(const Layout& src, const Layout& dst, const PlanOptions& options = {});
  Plan(const Cache& src, const Cache& dst, const PlanOptions& options = {});
  ~Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;

  /// Whole blocks. Throws Error(kBlockIndex) for an id outside its cache, Error(kArgument) for a destination
  /// given twice.
  void bind(std::span<const Pair> pairs);
  /// Token sequences: token t of the source is slot t % block_size of block src_blocks[t / block_size].
  /// A destination slot given twice is an error. Raw planes are refused unless whole blocks move.
  void bind_tokens(std::span<const std::int64_t> src_blocks, std::span<const std::int64_t> dst_blocks,
                   RangePair tokens);
  /// Slots (block × block_size + token) on both sides, of equal number.
  void bind_slots(std::span<const std::int64_t> src_slots, std::span<const std::int64_t> dst_slots);

  /// Of what is bound: copies after coalescing, bytes that they write, copies by size in bytes.
  std::int64_t num_copies() const;
  std::int64_t num_bytes() const;
  std::map<std::int64_t, std::int64_t> sizes() const;

  /// Throws what run() would throw, and moves nothing.
  void check() const;
  /// Moves the bytes. Throws Error(kArgument) for a plan of layouts without memory, read-only destinations, or
  /// where a byte that is read meets a byte that is written.
  void run(const Stream& stream = {});

 private:
  std::unique_ptr<plan::Program> program_;
};

}  // namespace kvstride
