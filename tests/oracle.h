// SPDX-License-Identifier: Apache-2.0
// Naive truth for the tests: every element, one at a time, by the layout's own offset; and random orders.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cuda_host.h"
#include "kvstride/kvstride.h"

namespace kvstride::test {

/// Where the caches of Memory lie. KVSTRIDE_TEST_CUDA=device: on the stand-in's device 0; =mixed: there, on device 1 or
/// on the host, in turn. The stand-in's device memory is the host's, so that tests look at it as ever.
inline HostRuntime* shared_runtime() {
  static HostRuntime* made = std::getenv("KVSTRIDE_TEST_CUDA") != nullptr ? new HostRuntime(2) : nullptr;
  return made;
}
inline Device place() {
  static const std::string mode = [] {
    const char* given = std::getenv("KVSTRIDE_TEST_CUDA");
    if (given != nullptr) cuda::set_runtime(shared_runtime());
    return std::string(given != nullptr ? given : "");
  }();
  static std::uint32_t turn = 0;
  if (mode == "device") return {0};
  if (mode == "mixed") return {static_cast<int>(turn++ * 5 / 3 % 3) - 1};
  return {};
}

/// A layout over buffers of its own, filled with 0xA5 or with random bytes.
struct Memory {
  Layout layout;
  std::vector<std::vector<std::byte>> buffers;

  explicit Memory(Layout l, std::uint32_t seed = 0) : layout(std::move(l)) {
    std::mt19937 random(seed);
    for (std::int64_t t = 0; t < layout.num_tensors(); ++t) {
      std::vector<std::byte> buffer(static_cast<std::size_t>(layout.part_bytes(t % layout.num_parts())),
                                    std::byte{0xA5});
      if (seed != 0) {
        for (std::byte& byte : buffer) byte = static_cast<std::byte>(random());
      }
      buffers.push_back(std::move(buffer));
    }
  }

  Cache cache() {
    std::vector<std::byte*> tensors;
    for (auto& buffer : buffers) tensors.push_back(buffer.data());
    return Cache(std::move(tensors), layout, false, place());
  }

  std::byte* at(const Plane& plane, const Index& index) {
    const Location where = layout.offset(plane, index);
    return buffers[static_cast<std::size_t>(where.tensor)].data() + where.byte;
  }
};

/// Calls `use` for every index of a plane.
inline void for_each_index(const Plane& plane, const std::function<void(const Index&)>& use) {
  Index i{};
  for (i[0] = 0; i[0] < plane.extents[0]; ++i[0])
    for (i[1] = 0; i[1] < plane.extents[1]; ++i[1])
      for (i[2] = 0; i[2] < plane.extents[2]; ++i[2])
        for (i[3] = 0; i[3] < plane.extents[3]; ++i[3])
          for (i[4] = 0; i[4] < plane.extents[4]; ++i[4]) use(i);
}

/// What convert_blocks means: all sources read, then all destinations written.
inline void convert(Memory& src, Memory& dst, const std::vector<Pair>& pairs) {
  const std::vector<std::vector<std::byte>> before = src.buffers;
  for (const Plane& plane : src.layout.planes()) {
    const Plane& twin = dst.layout.plane(plane.name);
    const auto item = static_cast<std::size_t>(item_size(plane.dtype));
    for (const Pair& pair : pairs) {
      for_each_index(plane, [&](Index index) {
        if (index[1] != pair.src) return;
        const Location from = src.layout.offset(plane, index);
        index[1] = pair.dst;
        std::memcpy(dst.at(twin, index), before[static_cast<std::size_t>(from.tensor)].data() + from.byte, item);
      });
    }
  }
}

/// A random order with K and V: axes permuted, K/V split anywhere, N, H and D split in two, V's interior its own.
inline std::string random_order(std::mt19937& random) {
  const auto coin = [&] { return random() % 2 == 0; };
  std::vector<std::string> axes{"B", "N", "H", "D"};
  if (coin()) axes.push_back("L");
  std::shuffle(axes.begin(), axes.end(), random);
  const auto cut = static_cast<std::ptrdiff_t>(random() % axes.size());
  const auto terms = [&](std::vector<std::string> list) {
    for (const auto& [axis, size] : {std::pair{"N", "2"}, {"H", "2"}, {"D", "4"}}) {
      const auto at = std::find(list.begin(), list.end(), axis);
      if (at == list.end() || coin()) continue;
      const std::string digit = std::string(axis) + "%" + size;
      *at += std::string("/") + size;
      const auto left = static_cast<std::size_t>(list.end() - at);
      list.insert(at + 1 + static_cast<std::ptrdiff_t>(random() % left), digit);
    }
    std::string text;
    for (const std::string& term : list) text += (text.empty() ? "" : " ") + term;
    return text;
  };
  std::vector<std::string> outer(axes.begin(), axes.begin() + cut);
  std::vector<std::string> inner(axes.begin() + cut, axes.end());
  const std::string head = terms(outer);
  const std::string space = head.empty() ? "" : " ";
  const std::string key = terms(inner);
  if (coin()) return head + space + "KV " + key;
  std::shuffle(inner.begin(), inner.end(), random);
  return head + space + "{key: " + key + ", value: " + terms(inner) + "}";
}

/// Sizes that the splits of random_order divide.
inline Geometry small_geometry(DType dtype = DType::kBF16) {
  Geometry out;
  out.num_layers = 2;
  out.num_blocks = 5;
  out.block_size = 4;
  out.num_kv_heads = 2;
  out.head_size = 8;
  out.dtype = dtype;
  return out;
}

/// Pairs with destinations that differ.
inline std::vector<Pair> random_pairs(std::mt19937& random, std::int64_t blocks) {
  std::vector<std::int64_t> targets(static_cast<std::size_t>(blocks));
  for (std::size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<std::int64_t>(i);
  std::shuffle(targets.begin(), targets.end(), random);
  std::vector<Pair> out;
  for (std::size_t i = 0; i < random() % (targets.size() + 1); ++i) {
    out.push_back({static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(blocks)), targets[i]});
  }
  return out;
}

/// The code and message of the Error that `call` throws; code −1 where it throws none.
struct Thrown {
  int code = -1;
  int column = 0;
  std::string what;
};
inline Thrown thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return {static_cast<int>(error.code()), error.column(), error.what()};
  }
  return {};
}

}  // namespace kvstride::test
