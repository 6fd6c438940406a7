// SPDX-License-Identifier: Apache-2.0
// Caches whose elements say what they are, for tests of head ranges and layouts under faults.
#pragma once

#include "oracle.h"
#include "store_faults.h"

namespace kvstride::test {

constexpr std::int64_t kModelHeads = 8;
constexpr std::int64_t kChunkTokens = 4;

inline Namespace block_space(int number) {
  NamespaceFields fields;
  fields.model = "fault/blocks-" + std::to_string(number);
  fields.revision = "0123abcd";
  fields.planes = {{"key", {DType::kI32, {}}}, {"value", {DType::kI32, {}}}};
  fields.num_layers = 2;
  fields.num_kv_heads = kModelHeads;
  fields.head_size = 8;
  fields.block_size = kChunkTokens;
  return Namespace(fields);
}

/// Reads and writes chunks of one namespace in one layout, for some of the model's heads; checks every byte.
class BlockClient {
 public:
  BlockClient(std::vector<TierPtr> tiers, int space, const std::string& order, std::int64_t first_head = 0,
              std::int64_t num_heads = kModelHeads, std::int64_t block_size = kChunkTokens)
      : store(std::move(tiers), block_space(space)),
        space_(space),
        ratio_(kChunkTokens / block_size),
        memory_(Layout(order, geometry(num_heads, block_size))) {
    request_.heads = {0, first_head, num_heads};
  }

  Outcomes put(const std::vector<int>& numbers) {
    poison();
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      each(i, [&](std::byte* at, std::size_t plane, const Index& index) {
        const std::uint32_t right = element(numbers[i], plane, index);
        std::memcpy(at, &right, sizeof right);
      });
    }
    const Cache cache = memory_.cache();
    return Outcomes(store.put(keys_of(numbers), cache, blocks(numbers.size()), request_).wait());
  }

  Outcomes get_within(const std::vector<int>& numbers, std::chrono::nanoseconds deadline) {
    request_.deadline = deadline;
    const Outcomes out = get(numbers);
    request_.deadline.reset();
    return out;
  }
  Outcomes get(const std::vector<int>& numbers) {
    poison();
    const Cache cache = memory_.cache();
    const Outcomes outcomes(store.get(keys_of(numbers), cache, blocks(numbers.size()), request_).wait());
    for (std::size_t i = 0; i < kMost; ++i) {
      const bool ok = i < outcomes.size() && outcomes[i] == Outcome::kOk;
      int wrong = 0;
      each(i, [&](const std::byte* at, std::size_t plane, const Index& index) {
        const std::uint32_t right = ok ? element(numbers[i], plane, index) : 0xA5A5A5A5;
        std::uint32_t is = 0;
        std::memcpy(&is, at, sizeof is);
        if (is == right || ++wrong > 1) return;
        ADD_FAILURE() << (ok ? "WRONG BYTES" : "touched, though not ok") << ": namespace " << space_ << " chunk "
                      << (i < numbers.size() ? numbers[i] : -1) << " plane " << plane << " layer " << index[0]
                      << " token " << index[2] << " head " << index[3] << " dim " << index[4] << " holds namespace "
                      << (is >> 27) << " chunk " << (is >> 12 & 0x7fff) << " position " << (is & 0xfff);
      });
    }
    return outcomes;
  }

  std::vector<bool> lookup(const std::vector<int>& numbers) {
    return store.lookup(keys_of(numbers), Range{request_.heads->stored_first, request_.heads->count});
  }
  std::int64_t first_head() const { return request_.heads->stored_first; }
  std::int64_t num_heads() const { return request_.heads->count; }

  Store store;
  static constexpr std::size_t kMost = 6;  ///< chunks at once

 private:
  static Geometry geometry(std::int64_t heads, std::int64_t block_size) {
    Geometry out;
    out.num_layers = 2;
    out.num_blocks = static_cast<std::int64_t>(kMost) * kChunkTokens / block_size;
    out.block_size = block_size;
    out.num_kv_heads = heads;
    out.head_size = 8;
    out.dtype = DType::kI32;
    return out;
  }
  void poison() {
    for (auto& buffer : memory_.buffers) std::fill(buffer.begin(), buffer.end(), kPoison);
  }
  std::vector<std::int64_t> blocks(std::size_t chunks) const {
    std::vector<std::int64_t> out;
    for (std::size_t i = 0; i < chunks * static_cast<std::size_t>(ratio_); ++i)
      out.push_back(static_cast<std::int64_t>(i));
    return out;
  }
  /// Namespace, chunk and place; heads are the model's.
  std::uint32_t element(int number, std::size_t plane, const Index& at) const {
    const auto place =
        (((static_cast<std::int64_t>(plane) * 2 + at[0]) * kChunkTokens + at[2]) * kModelHeads + at[3]) * 8 + at[4];
    return static_cast<std::uint32_t>(space_) << 27 | static_cast<std::uint32_t>(number & 0x7fff) << 12 |
           static_cast<std::uint32_t>(place);
  }
  /// Calls `use` for each element of the i-th chunk: where it is, its plane, [layer, -, token of the chunk, model's
  /// head, dim].
  template <typename Use>
  void each(std::size_t chunk, const Use& use) {
    const std::int64_t size = memory_.layout.geometry().block_size;
    for (std::size_t p = 0; p < memory_.layout.planes().size(); ++p) {
      const Plane& plane = memory_.layout.planes()[p];
      for (std::int64_t l = 0; l < 2; ++l)
        for (std::int64_t t = 0; t < kChunkTokens; ++t)
          for (std::int64_t h = 0; h < num_heads(); ++h)
            for (std::int64_t d = 0; d < 8; ++d) {
              const std::int64_t block = static_cast<std::int64_t>(chunk) * ratio_ + t / size;
              use(memory_.at(plane, {l, block, t % size, h, d}), plane.name == "key" ? 0U : 1U,
                  Index{l, 0, t, first_head() + h, d});
            }
    }
  }

  int space_;
  std::int64_t ratio_;
  Memory memory_;
  RequestOptions request_;
};

}  // namespace kvstride::test
