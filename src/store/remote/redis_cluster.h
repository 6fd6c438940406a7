// SPDX-License-Identifier: Apache-2.0
// Which node of a Redis cluster has a key.
#pragma once

#include <hiredis/hiredis.h>

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvstride::store::redis {

inline constexpr int kNumSlots = 16384;

/// A server's address: a name or an IP address, and a port.
struct Node {
  std::string host;
  int port = 0;
  auto operator<=>(const Node&) const = default;
  std::string text() const;  ///< host:port, an IPv6 address in []
};

/// CRC-16 (XModem) of the key, or of what stands between its first `{` and the `}` after it where that is not empty.
int slot_of(std::string_view key);

/// Slots and the masters that serve them. A server that is no cluster is the master of all, and nobody is redirected.
struct SlotMap {
  bool cluster = false;
  std::vector<Node> masters;                  ///< each once
  std::array<std::int16_t, kNumSlots> owner;  ///< index into `masters`; -1: nobody

  static SlotMap of(const Node& only);
  /// What `asked` replied to CLUSTER SLOTS; nothing where that makes no sense.
  static std::optional<SlotMap> parse(const redisReply& reply, const Node& asked);

  const Node* node_of(int slot) const {
    const int at = owner[static_cast<std::size_t>(slot)];
    return at < 0 ? nullptr : &masters[static_cast<std::size_t>(at)];
  }
};

/// `MOVED slot host:port` or `ASK slot host:port`: another node has the key, from now on or this once.
struct Redirect {
  bool ask = false;
  Node to;
};
/// Nothing where the error is something else. A redirect that makes no sense has port 0.
std::optional<Redirect> redirect_of(std::string_view error, const Node& asked);

}  // namespace kvstride::store::redis
