// SPDX-License-Identifier: Apache-2.0
// What tiers have in common.
#include "store/tier.h"

#include <algorithm>

namespace kvstride::store {

std::size_t covered(const Index& index, std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                    std::span<std::uint8_t> out) {
  std::vector<Slot> slots;
  std::size_t leading = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    slots.clear();
    index.find(space, keys[i], slots);
    out[i] = std::any_of(slots.begin(), slots.end(), [&](Slot slot) { return covers(index.heads(slot), heads); });
    if (out[i] != 0 && leading == i) ++leading;
    if (out[i] == 0 && prefix) break;
  }
  return leading;
}

}  // namespace kvstride::store
