// SPDX-License-Identifier: Apache-2.0
// What a user of the installed library writes: one block moved from blocks-first to packed memory.
#include <kvstride/kvstride.h>

#include <cstdio>
#include <vector>

int main() {
  const kvstride::Geometry geometry{
      .num_blocks = 4, .block_size = 2, .num_kv_heads = 3, .head_size = 8, .dtype = kvstride::DType::kU8};
  const kvstride::Layout from("B KV N H D", geometry);
  const kvstride::Layout to("B H N KV D", geometry);
  std::vector<std::byte> source(static_cast<std::size_t>(from.num_bytes()));
  std::vector<std::byte> target(static_cast<std::size_t>(to.num_bytes()), std::byte{0xA5});
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i);

  const kvstride::Pair pairs[] = {{.src = 1, .dst = 2}};
  kvstride::convert_blocks(kvstride::Cache({source.data()}, from), kvstride::Cache({target.data()}, to), pairs);

  const auto read = from.offset("value", {0, 1, 1, 2, 5}).byte;  // layer, block, token, head, dim
  const auto written = to.offset("value", {0, 2, 1, 2, 5}).byte;
  std::printf("kvstride %s: byte %td went to byte %td\n", kvstride::version().data(), read, written);
  return source[static_cast<std::size_t>(read)] == target[static_cast<std::size_t>(written)] ? 0 : 1;
}
