// SPDX-License-Identifier: Apache-2.0
// copy_blocks: inside one cache, in an order that reads every source before it is overwritten.
#include "cpu/copy.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "cuda/run.h"
#include "kvstride/blocks.h"
#include "kvstride/error.h"
#include "layout/internal.h"
#include "plan/program.h"

namespace kvstride {
namespace {

using plan::Entry;
using plan::Nest;
using plan::Strand;

using Entries = std::pmr::vector<Entry>;

/// A copy of the same strands for one entry.
void run_entry(const Nest& nest, const Entry& entry) {
  for (const Strand& strand : nest.strands) {
    const std::int64_t src = strand.src_slot(entry.src);
    const std::int64_t dst = strand.dst_slot(entry.dst);
    for (const plan::Base& base : strand.bases) {
      cpu::copy(reinterpret_cast<std::byte*>(base.dst.byte + dst),
                reinterpret_cast<const std::byte*>(base.src.byte + src), strand.loops.data(), strand.loops.size(),
                strand.run, false);
    }
  }
}

/// slots[0] → slots[1] → … → slots[0], run by run through a buffer on the stack.
void rotate(const Nest& nest, const std::vector<std::int64_t>& slots) {
  constexpr std::int64_t kChunk = 4096;
  std::array<std::byte, kChunk> buffer;
  for (const Strand& strand : nest.strands) {
    std::vector<std::int64_t> at(strand.loops.size(), 0);
    for (const plan::Base& base : strand.bases) {
      while (true) {
        std::int64_t inner = 0;
        for (std::size_t i = 0; i < at.size(); ++i) inner += at[i] * strand.loops[i].src;
        for (std::int64_t done = 0; done < strand.run; done += kChunk) {
          const auto n = static_cast<std::size_t>(std::min(kChunk, strand.run - done));
          const auto address = [&](std::int64_t slot) {
            return reinterpret_cast<std::byte*>(base.src.byte + strand.src_slot(slot) + inner + done);
          };
          std::memcpy(buffer.data(), address(slots.back()), n);
          for (std::size_t i = slots.size() - 1; i > 0; --i) std::memcpy(address(slots[i]), address(slots[i - 1]), n);
          std::memcpy(address(slots.front()), buffer.data(), n);
        }
        std::size_t i = at.size();
        while (i > 0 && ++at[i - 1] == strand.loops[i - 1].extent) at[--i] = 0;
        if (i == 0) break;
      }
    }
  }
}

/// Entries sorted by destination whose sources are also destinations: what reads a block goes before what writes it.
void run_ordered(const Nest& nest, const Entries& entries) {
  const auto writer_of = [&](std::int64_t slot) {
    const auto at = std::lower_bound(entries.begin(), entries.end(), slot,
                                     [](const Entry& entry, std::int64_t value) { return entry.dst < value; });
    return at != entries.end() && at->dst == slot ? static_cast<std::int64_t>(at - entries.begin()) : -1;
  };
  std::vector<std::int32_t> readers(entries.size(), 0);  // of the block that the entry overwrites
  for (const Entry& entry : entries) {
    if (const std::int64_t writer = writer_of(entry.src); writer >= 0) ++readers[static_cast<std::size_t>(writer)];
  }
  std::vector<std::int32_t> ready;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (readers[i] == 0) ready.push_back(static_cast<std::int32_t>(i));
  }
  while (!ready.empty()) {
    const auto i = static_cast<std::size_t>(ready.back());
    ready.pop_back();
    run_entry(nest, entries[i]);
    readers[i] = -1;
    if (const std::int64_t writer = writer_of(entries[i].src); writer >= 0) {
      if (--readers[static_cast<std::size_t>(writer)] == 0) ready.push_back(static_cast<std::int32_t>(writer));
    }
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {  // what is left are cycles
    if (readers[i] < 0) continue;
    std::vector<std::int64_t> slots;
    for (std::size_t at = i; readers[at] >= 0;) {
      readers[at] = -1;
      slots.push_back(entries[at].dst);
      at = static_cast<std::size_t>(writer_of(entries[at].src));
    }
    std::reverse(slots.begin(), slots.end());  // each slot now goes to the next one
    rotate(nest, slots);
  }
}

}  // namespace

namespace {

std::shared_ptr<const plan::Recipe> copy_recipe(const Cache& cache, std::optional<Range> layers) {
  if (cache.read_only()) throw Error(ErrorCode::kArgument, "copy_blocks: the cache is read-only");
  plan::BuildOptions build;
  build.plan.layers = layers;
  return plan::recipe_for("copy_blocks", cache, cache, std::move(build));
}

std::shared_ptr<const plan::Recipe> zero_recipe(const Cache& cache) {
  if (cache.read_only()) throw Error(ErrorCode::kArgument, "zero_blocks: the cache is read-only");
  plan::BuildOptions build;
  build.ids_name = "ids";
  build.src_name = build.dst_name = "cache";
  return plan::recipe_for("zero_blocks", cache, cache, std::move(build));
}

}  // namespace

void copy_blocks(const Cache& cache, const DevicePairs& pairs, std::optional<Range> layers, const Stream& stream) {
  plan::Program program(copy_recipe(cache, layers));
  program.bind_device(pairs);
  program.run(stream);
}

std::int64_t copy_blocks(const Cache& cache, std::span<const Pair> pairs, std::optional<Range> layers,
                         std::optional<std::int64_t> null_block, const Stream& stream) {
  plan::Program program(copy_recipe(cache, layers));
  const std::int64_t count = program.bind(pairs, null_block);  // checks all of them, also those that do nothing
  // A pair (b, b) keeps b, so another pair must not write it; bind() refused that. Reading b is free.
  if (std::any_of(pairs.begin(), pairs.end(), [](const Pair& pair) { return pair.src == pair.dst; })) {
    std::vector<Pair> moving;
    std::copy_if(pairs.begin(), pairs.end(), std::back_inserter(moving),
                 [](const Pair& pair) { return pair.src != pair.dst; });
    program.bind(moving, null_block);
  }
  if (!cache.device().on_host()) {
    cuda::copy_inside(program, stream);
    return count;
  }
  for (const plan::Bound& bound : program.bound()) {
    const Entries& entries = bound.entries;
    if (std::any_of(entries.begin(), entries.end(), [&](const Entry& entry) { return bound.overwrites(entry.src); })) {
      run_ordered(*bound.nest, entries);
    } else {
      program.run();
    }
  }
  return count;
}

void zero_blocks(const Cache& cache, const DeviceList& ids, const Stream& stream) {
  plan::Program program(zero_recipe(cache));
  program.bind_device({ids, ids});
  program.zero(stream);
}

void zero_blocks(const Cache& cache, std::span<const std::int64_t> ids, std::optional<std::int64_t> null_block,
                 const Stream& stream) {
  plan::Program program(zero_recipe(cache));
  std::vector<Pair> pairs;
  pairs.reserve(ids.size());
  for (const std::int64_t id : ids) pairs.push_back({id, id});
  program.bind(pairs, null_block);
  program.zero(stream);
}

std::vector<std::int64_t> expand_block_ids(std::span<const std::int64_t> ids, std::int64_t ratio) {
  constexpr std::int64_t kMaxId = std::int64_t{1} << 48;
  constexpr std::int64_t kMaxIds = std::int64_t{1} << 31;
  std::int64_t total = 0;
  if (ratio < 1) throw Error(ErrorCode::kArgument, fmt::format("expand_block_ids: ratio {} is below 1", ratio));
  if (__builtin_mul_overflow(static_cast<std::int64_t>(ids.size()), ratio, &total) || total > kMaxIds) {
    throw Error(ErrorCode::kArgument,
                fmt::format("expand_block_ids: {} ids × {} are more than {}", ids.size(), ratio, kMaxIds));
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] > kMaxId / ratio) {
      throw Error(ErrorCode::kBlockIndex, fmt::format("expand_block_ids: block id {} in ids[{}] is not from 0 to {}",
                                                      ids[i], i, kMaxId / ratio));
    }
  }
  std::vector<std::int64_t> out;
  out.reserve(static_cast<std::size_t>(total));
  for (const std::int64_t id : ids) {
    for (std::int64_t r = 0; r < ratio; ++r) out.push_back(id * ratio + r);
  }
  return out;
}

}  // namespace kvstride
