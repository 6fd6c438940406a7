// SPDX-License-Identifier: Apache-2.0
// The block verbs (docs/architecture.md, "Verbs").
//
// Every id, size, dtype and layout is checked before the first byte is written; after an error nothing was
// written. A call means what it would mean if all sources were read before any destination was written. Only
// the planes' own bytes change, never padding. Functions may run at once on different blocks.
//
// Caches lie in host memory, on a CUDA device, or one here and one there; `stream` is for devices (device.h). Ids that
// lie in device memory (DeviceList, DevicePairs) are for caches of that device. Nobody checks them before the call: ids
// that name nothing are left out and reported by a later call or cuda_check(); that no destination is given twice, and
// none is another pair's source, is the caller's to know.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvstride/cache.h"
#include "kvstride/plan.h"

namespace kvstride {

/// Inside one cache, all planes, all layers or a range. A pair (b, b) does nothing; chains and cycles are
/// allowed. Pairs that name `null_block` are left out. Returns the number of pairs that were carried out.
std::int64_t copy_blocks(const Cache& cache, std::span<const Pair> pairs, std::optional<Range> layers = {},
                         std::optional<std::int64_t> null_block = {}, const Stream& stream = {});
void copy_blocks(const Cache& cache, const DevicePairs& pairs, std::optional<Range> layers = {},
                 const Stream& stream = {});

/// vLLM's historical name: copies, does not exchange. Both caches have one order; num_blocks and outer strides
/// may differ. Throws Error(kLayout) where the orders differ, Error(kArgument) where touched bytes meet.
std::int64_t swap_blocks(const Cache& src, const Cache& dst, std::span<const Pair> pairs,
                         std::optional<Range> layers = {}, std::optional<std::int64_t> null_block = {},
                         const Stream& stream = {});
void swap_blocks(const Cache& src, const Cache& dst, const DevicePairs& pairs, std::optional<Range> layers = {},
                 const Stream& stream = {});

/// Between any two layouts of the same planes and block size.
std::int64_t convert_blocks(const Cache& src, const Cache& dst, std::span<const Pair> pairs,
                            const PlanOptions& options = {}, std::optional<std::int64_t> null_block = {},
                            const Stream& stream = {});
void convert_blocks(const Cache& src, const Cache& dst, const DevicePairs& pairs, const PlanOptions& options = {},
                    const Stream& stream = {});

/// Two token sequences over blocks of any sizes; see Plan::bind_tokens.
void convert_tokens(const Cache& src, const Cache& dst, std::span<const std::int64_t> src_blocks,
                    std::span<const std::int64_t> dst_blocks, RangePair tokens, const PlanOptions& options = {},
                    const Stream& stream = {});

/// Zeroes every byte of the planes of these blocks, padding untouched. An id given twice is an error.
void zero_blocks(const Cache& cache, std::span<const std::int64_t> ids, std::optional<std::int64_t> null_block = {},
                 const Stream& stream = {});
void zero_blocks(const Cache& cache, const DeviceList& ids, const Stream& stream = {});

/// Tokens by slot (block × block_size + token) into dense tensors `[layer, token, head, dim]`, one a plane:
/// `dense` has the order `plane: L N H D | …` with one block of as many tokens as there are slots. Slots may repeat.
void gather_tokens(const Cache& cache, std::span<const std::int64_t> slots, const Cache& dense,
                   const Stream& stream = {});
void gather_tokens(const Cache& cache, const DeviceList& slots, const Cache& dense, const Stream& stream = {});
/// The reverse. A slot given twice is an error.
void scatter_tokens(const Cache& cache, std::span<const std::int64_t> slots, const Cache& dense,
                    const Stream& stream = {});
void scatter_tokens(const Cache& cache, const DeviceList& slots, const Cache& dense, const Stream& stream = {});
/// The layout of `dense` above for `num_tokens` tokens of `layout`. Throws for raw planes.
Layout dense_layout(const Layout& layout, std::int64_t num_tokens);

/// One number for each block, the same for the same elements in whatever layout, on whatever device: its planes one
/// after the other by name, each as `[layer, token, head, dim]`, are cut into granules of 256 KiB, the last one being
/// what is left, and the number is the XXH3-64 of the granules' XXH3-64s as little-endian words. Ids may repeat. Takes
/// scratch memory of 8 MiB, or of one block where that is more; returns when the numbers are known.
std::vector<std::uint64_t> checksum_blocks(const Cache& cache, std::span<const std::int64_t> ids,
                                           const Stream& stream = {});

/// One layer's new keys or values: `[token, head, dim]`, strides in elements of `dtype`.
struct TokenTensor {
  const std::byte* data;
  DType dtype;
  std::array<std::int64_t, 3> shape;
  std::array<std::int64_t, 3> strides;
  Device device{};
};
/// The engine's reshape_and_cache: token i of key and value goes to slot_mapping[i]; a negative slot is skipped;
/// key and value may each be longer than slot_mapping. A cache of an f8 dtype stores x / scale, saturated; otherwise
/// dtypes must be equal.
void write_tokens(const Cache& cache, std::int64_t layer, const TokenTensor& key, const TokenTensor& value,
                  std::span<const std::int64_t> slot_mapping, float key_scale = 1.0F, float value_scale = 1.0F,
                  const Stream& stream = {});
void write_tokens(const Cache& cache, std::int64_t layer, const TokenTensor& key, const TokenTensor& value,
                  const DeviceList& slot_mapping, float key_scale = 1.0F, float value_scale = 1.0F,
                  const Stream& stream = {});

/// Kernel block ids of manager block ids: b → b × ratio … b × ratio + ratio − 1. Throws Error(kArgument) for a
/// ratio below 1 or more than 2^31 results, Error(kBlockIndex) for negative ids.
std::vector<std::int64_t> expand_block_ids(std::span<const std::int64_t> ids, std::int64_t ratio);

}  // namespace kvstride
