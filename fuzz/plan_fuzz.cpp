// SPDX-License-Identifier: Apache-2.0
// Any two orders, sizes, ranges and ids: refused with an Error and nothing written, or exactly the bytes that a
// loop over every element moves.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fuzz.h"
#include "kvstride/kvstride.h"

using namespace kvstride;
using fuzz::require;

namespace {

constexpr std::int64_t kMaxBytes = 1 << 13;

/// An index from 0 to limit, or, rarely, -1. (A provider without bytes gives the smallest value: a valid one.)
std::int64_t index_of(FuzzedDataProvider& in, std::int64_t limit) {
  const auto drawn = in.ConsumeIntegralInRange<std::int64_t>(0, limit + 1);
  return drawn <= limit ? drawn : -1;
}

/// Axes in any sequence, K and V apart anywhere, any of N, H and D split.
std::string random_order(FuzzedDataProvider& in) {
  std::vector<std::string> terms;
  for (const char* axis : {"L", "B", "N", "H", "D"}) {
    if (axis[0] == 'L' && in.ConsumeBool()) continue;
    if (axis[0] != 'L' && axis[0] != 'B' && in.ConsumeIntegralInRange(0, 3) == 3) {
      const std::string size = std::to_string(1 << in.ConsumeIntegralInRange(1, 2));
      terms.push_back(std::string(axis) + "/" + size);
      terms.push_back(std::string(axis) + "%" + size);
    } else {
      terms.emplace_back(axis);
    }
  }
  for (std::size_t i = terms.size(); i > 1; --i) {
    std::swap(terms[i - 1], terms[in.ConsumeIntegralInRange<std::size_t>(0, i - 1)]);
  }
  const std::size_t cut = in.ConsumeIntegralInRange<std::size_t>(0, terms.size());
  const int kind = in.ConsumeIntegralInRange(0, 3);
  std::string inner;
  for (std::size_t i = cut; i < terms.size(); ++i) inner += terms[i] + " ";
  std::string outer;
  for (std::size_t i = 0; i < cut; ++i) outer += terms[i] + " ";
  switch (kind) {
    case 0: return outer + "KV " + inner;
    case 1: return outer + "KV@" + std::to_string(in.ConsumeIntegralInRange(0, 2048)) + " " + inner;
    case 2: {
      std::string reversed;
      for (std::size_t i = terms.size(); i > cut; --i) reversed += terms[i - 1] + " ";
      return outer + "{key: " + inner + ", value: " + reversed + "}";
    }
    default: return "key: " + outer + inner + "| value: " + inner + outer;
  }
}

std::string order_of(FuzzedDataProvider& in) {
  const int kind = in.ConsumeIntegralInRange(0, 15);
  if (kind == 15) return in.ConsumeRandomLengthString(48);
  if (kind < 9) return random_order(in);
  return std::string(registry()[in.ConsumeIntegralInRange<std::size_t>(0, registry().size() - 1)].order);
}

Geometry geometry_of(FuzzedDataProvider& in) {
  constexpr std::int64_t kTokens[] = {4, 8, 2, 16, 1, 6, 3};
  Geometry geometry{.num_layers = in.ConsumeIntegralInRange(1, 3),
                    .num_blocks = in.ConsumeIntegralInRange(1, 4),
                    .block_size = in.PickValueInArray(kTokens),
                    .num_kv_heads = in.ConsumeIntegralInRange(1, 3),
                    .head_size = 8 * in.ConsumeIntegralInRange(1, 2),
                    .dtype = static_cast<DType>(in.ConsumeIntegralInRange(0, static_cast<int>(DType::kI32))),
                    .symbols = {{"k", 2}, {"g", 2}}};
  if (in.ConsumeIntegralInRange(0, 7) == 7) geometry.value_head_size = in.ConsumeIntegralInRange(1, 16);
  return geometry;
}

/// Tensors of exactly the layout's bytes, so that AddressSanitizer sees one byte too many.
struct Memory {
  std::vector<std::vector<std::byte>> tensors;

  Memory(const Layout& layout, std::uint8_t first) {
    for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
      auto& tensor = tensors.emplace_back(static_cast<std::size_t>(layout.part_bytes(i % layout.num_parts())));
      for (std::byte& byte : tensor) byte = static_cast<std::byte>(first = static_cast<std::uint8_t>(first * 5 + 1));
    }
  }
  Cache cache(const Layout& layout) {
    std::vector<std::byte*> pointers;
    for (auto& tensor : tensors) pointers.push_back(tensor.data());
    return Cache(std::move(pointers), layout);
  }
  std::byte* at(const Location& location) {
    return tensors[static_cast<std::size_t>(location.tensor)].data() + location.byte;
  }
  bool operator==(const Memory&) const = default;
};

std::int64_t total_bytes(const Layout& layout) {
  std::int64_t sum = 0;
  for (std::int64_t part = 0; part < layout.num_parts(); ++part) sum += layout.part_bytes(part);
  return sum * (layout.num_tensors() / layout.num_parts());
}

/// (block, token) on both sides.
struct Slot {
  std::int64_t src_block, src_token, dst_block, dst_token;
};

/// Moves every element of the slots by itself. Returns the bytes that were written.
std::int64_t naive(const Layout& src, const Layout& dst, Memory& from, Memory& to, const std::vector<Slot>& slots,
                   const PlanOptions& options) {
  const Range layers = options.layers.value_or(Range{0, src.geometry().num_layers});
  std::int64_t written = 0;
  for (const Plane& plane : src.planes()) {
    const Plane& twin = dst.plane(plane.name);
    RangePair heads{0, 0, plane.extent(Axis::kHead)};
    if (options.heads && plane.has_head) heads = *options.heads;
    const auto bytes = item_size(plane.dtype);
    for (std::int64_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
      for (const Slot& slot : slots) {
        for (std::int64_t head = 0; head < heads.count; ++head) {
          for (std::int64_t dim = 0; dim < plane.extent(Axis::kDim); ++dim) {
            const Index a{layer, slot.src_block, slot.src_token, heads.src_first + head, dim};
            const Index b{layer, slot.dst_block, slot.dst_token, heads.dst_first + head, dim};
            std::memcpy(to.at(dst.offset(twin, b)), from.at(src.offset(plane, a)), static_cast<std::size_t>(bytes));
            written += bytes;
          }
        }
      }
    }
  }
  return written;
}

/// Up to five ids below `limit`, different ones where the provider has no bytes left; rarely one out of range.
std::vector<std::int64_t> ids_of(FuzzedDataProvider& in, std::int64_t limit) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(std::min<std::int64_t>(limit, 5 - index_of(in, 5))));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t drawn = index_of(in, 15);
    ids[i] = drawn == 15 ? limit : drawn < 0 ? drawn : (static_cast<std::int64_t>(i) + drawn) % limit;
  }
  return ids;
}

/// Whether a byte-by-byte comparison is the whole meaning: equal dtypes, and each plane has tokens of its own.
bool comparable(const Layout& src, const Layout& dst) {
  return std::all_of(src.planes().begin(), src.planes().end(), [&](const Plane& plane) {
    const Plane* twin = dst.find_plane(plane.name);
    return twin != nullptr && twin->dtype == plane.dtype && plane.extent(Axis::kToken) == src.geometry().block_size &&
           twin->extent(Axis::kToken) == dst.geometry().block_size;
  });
}

void check_counts(const Plan& plan, std::optional<std::int64_t> written) {
  std::int64_t copies = 0;
  std::int64_t bytes = 0;
  for (const auto& [size, count] : plan.sizes()) {
    require(size > 0 && count > 0, "sizes and counts are positive");
    copies += count;
    bytes += size * count;
  }
  require(copies == plan.num_copies() && bytes == plan.num_bytes(), "sizes() adds up");
  require(!written || *written == bytes, "num_bytes() are the bytes of the elements");
}

/// One convert between two caches. Throws Error where the library does.
void convert(FuzzedDataProvider& in, const Layout& src, const Layout& dst, const PlanOptions& options) {
  Plan inspected(src, dst, options);
  const bool by_tokens = in.ConsumeBool();
  const std::uint8_t seed = in.ConsumeIntegral<std::uint8_t>();
  std::vector<std::int64_t> src_blocks = ids_of(in, src.geometry().num_blocks);
  std::vector<std::int64_t> dst_blocks = ids_of(in, dst.geometry().num_blocks);
  RangePair tokens;
  if (by_tokens) {
    tokens = {index_of(in, 20), index_of(in, 20), (index_of(in, 40) + 3) % 41};
  } else {
    dst_blocks.resize(src_blocks.size(), 0);
  }
  std::vector<Pair> pairs;
  for (std::size_t i = 0; !by_tokens && i < src_blocks.size(); ++i) pairs.push_back({src_blocks[i], dst_blocks[i]});
  const auto bind = [&](Plan& plan) {
    if (by_tokens) {
      plan.bind_tokens(src_blocks, dst_blocks, tokens);
    } else {
      plan.bind(pairs);
    }
  };
  bind(inspected);
  check_counts(inspected, {});
  if (total_bytes(src) > kMaxBytes || total_bytes(dst) > kMaxBytes) return;

  Memory from(src, seed);
  Memory to(dst, static_cast<std::uint8_t>(seed + 101));
  const Memory from_before = from;
  Memory expected = to;
  Plan plan(from.cache(src), to.cache(dst), options);
  bind(plan);
  require(to == expected, "building and binding write nothing");
  std::optional<std::int64_t> written;
  if (comparable(src, dst)) {
    std::vector<Slot> slots;
    const std::int64_t a = src.geometry().block_size;
    const std::int64_t b = dst.geometry().block_size;
    for (std::int64_t t = 0; by_tokens && t < tokens.count; ++t) {
      const std::int64_t s = tokens.src_first + t;
      const std::int64_t d = tokens.dst_first + t;
      slots.push_back(
          {src_blocks[static_cast<std::size_t>(s / a)], s % a, dst_blocks[static_cast<std::size_t>(d / b)], d % b});
    }
    for (const Pair& pair : pairs) {
      for (std::int64_t t = 0; t < a; ++t) slots.push_back({pair.src, t, pair.dst, t});
    }
    written = naive(src, dst, from, expected, slots, options);
  }
  check_counts(plan, written);
  plan.run();
  require(from == from_before, "sources are not written");
  require(!written || to == expected, "run() moves what a loop over every element moves");
  plan.run();
  require(!written || to == expected, "a second run() does the same");
}

/// copy_blocks and zero_blocks inside one cache.
void inside(FuzzedDataProvider& in, const Layout& layout) {
  if (total_bytes(layout) > kMaxBytes) return;
  Memory memory(layout, in.ConsumeIntegral<std::uint8_t>());
  Memory before = memory;
  Memory expected = memory;
  std::vector<Pair> pairs;
  const std::int64_t num_blocks = layout.geometry().num_blocks;
  for (const std::int64_t id : ids_of(in, num_blocks)) {
    pairs.push_back({in.ConsumeIntegralInRange<std::int64_t>(0, num_blocks - 1), id});
  }
  try {
    copy_blocks(memory.cache(layout), pairs);
  } catch (const Error& error) {
    fuzz::check_error(error, 1 << 16);
    require(memory == expected, "nothing is written after an error", error.what());
    return;
  }
  if (!comparable(layout, layout)) return;
  std::vector<Slot> slots;
  for (const Pair& pair : pairs) {
    for (std::int64_t t = 0; t < layout.geometry().block_size; ++t) slots.push_back({pair.src, t, pair.dst, t});
  }
  naive(layout, layout, before, expected, slots, {});
  require(memory == expected, "copy_blocks reads all sources before it writes");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider in(data, size);
  try {
    const Geometry geometry = geometry_of(in);
    Geometry other = geometry;
    const int differing = in.ConsumeIntegralInRange(0, 7);  // bits: blocks, heads and layers, dims and dtype
    if (differing != 0) {
      const Geometry drawn = geometry_of(in);
      if ((differing & 1) != 0) {
        other.num_blocks = drawn.num_blocks;
        other.block_size = drawn.block_size;
      }
      if ((differing & 2) != 0) {
        other.num_kv_heads = drawn.num_kv_heads;
        other.num_layers = drawn.num_layers;
      }
      if ((differing & 4) != 0) {
        other.head_size = in.ConsumeBool() ? drawn.head_size : other.head_size;
        other.value_head_size = in.ConsumeBool() ? drawn.value_head_size : other.value_head_size;
        other.dtype = drawn.dtype;
      }
    }
    const Layout src(order_of(in), geometry);
    if (in.ConsumeIntegralInRange(0, 3) == 3) {
      inside(in, src);
      return 0;
    }
    const Layout dst(order_of(in), other);
    PlanOptions options;
    options.cast = in.ConsumeBool();
    if (in.ConsumeBool()) options.heads = RangePair{index_of(in, 3), index_of(in, 3), index_of(in, 4)};
    if (in.ConsumeBool()) options.layers = Range{index_of(in, 2), index_of(in, 3)};
    if (options.cast && in.ConsumeBool()) options.scales["key"] = {8.0F - in.ConsumeFloatingPointInRange(0.0F, 8.5F)};
    convert(in, src, dst, options);
  } catch (const Error& error) {
    fuzz::check_error(error, 1 << 16);
  }
  return 0;
}
