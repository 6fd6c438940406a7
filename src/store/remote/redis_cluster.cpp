// SPDX-License-Identifier: Apache-2.0
#include "store/remote/redis_cluster.h"

#include <algorithm>
#include <charconv>

namespace kvstride::store::redis {
namespace {

constexpr std::size_t kMostMasters = 1000;  // what the protocol of Redis' nodes is made for

int crc16(std::string_view text) {
  unsigned crc = 0;
  for (const char c : text) {
    crc ^= static_cast<unsigned>(static_cast<unsigned char>(c)) << 8;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 0x8000) != 0 ? (crc << 1) ^ 0x1021 : crc << 1;
  }
  return static_cast<int>(crc & 0xFFFF);
}

bool is_text(const redisReply* reply) { return reply->type == REDIS_REPLY_STRING; }

}  // namespace

std::string Node::text() const {
  const bool brackets = host.find(':') != std::string::npos;
  return (brackets ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

int slot_of(std::string_view key) {
  if (const std::size_t open = key.find('{'); open != std::string_view::npos) {
    const std::size_t close = key.find('}', open);
    if (close != std::string_view::npos && close > open + 1) key = key.substr(open + 1, close - open - 1);
  }
  return crc16(key) % kNumSlots;
}

SlotMap SlotMap::of(const Node& only) {
  SlotMap out;
  out.masters = {only};
  out.owner.fill(0);
  return out;
}

std::optional<SlotMap> SlotMap::parse(const redisReply& reply, const Node& asked) {
  SlotMap out;
  out.cluster = true;
  out.owner.fill(-1);
  if (reply.type != REDIS_REPLY_ARRAY) return std::nullopt;
  for (std::size_t i = 0; i < reply.elements; ++i) {
    const redisReply* range = reply.element[i];  // first slot, last slot, master, replicas
    if (range->type != REDIS_REPLY_ARRAY || range->elements < 3) return std::nullopt;
    const redisReply* master = range->element[2];  // host, port, id
    if (range->element[0]->type != REDIS_REPLY_INTEGER || range->element[1]->type != REDIS_REPLY_INTEGER ||
        master->type != REDIS_REPLY_ARRAY || master->elements < 2 || master->element[1]->type != REDIS_REPLY_INTEGER) {
      return std::nullopt;
    }
    const long long first = range->element[0]->integer;
    const long long last = range->element[1]->integer;
    const long long port = master->element[1]->integer;
    if (first < 0 || first > last || last >= kNumSlots || port < 1 || port > 65535) return std::nullopt;
    Node node{asked.host, static_cast<int>(port)};
    // No host: the one that was asked. `?`: the node does not know its own name.
    if (is_text(master->element[0]) && master->element[0]->len > 0) {
      node.host.assign(master->element[0]->str, master->element[0]->len);
    }
    if (node.host == "?") node.host = asked.host;
    auto at = std::find(out.masters.begin(), out.masters.end(), node);
    if (at == out.masters.end()) {
      if (out.masters.size() == kMostMasters) return std::nullopt;
      at = out.masters.insert(out.masters.end(), node);
    }
    std::fill(out.owner.begin() + first, out.owner.begin() + last + 1,
              static_cast<std::int16_t>(at - out.masters.begin()));
  }
  if (out.masters.empty()) return std::nullopt;
  return out;
}

std::optional<Redirect> redirect_of(std::string_view error, const Node& asked) {
  Redirect out;
  out.ask = error.starts_with("ASK ");
  if (!out.ask && !error.starts_with("MOVED ")) return std::nullopt;
  const std::string_view where = error.substr(error.rfind(' ') + 1);
  const std::size_t colon = where.rfind(':');
  if (colon == std::string_view::npos) return out;
  const char* end = where.data() + where.size();
  int port = 0;
  const auto [stop, bad] = std::from_chars(where.data() + colon + 1, end, port);
  if (bad != std::errc() || stop != end || port < 1 || port > 65535) return out;
  out.to = {colon == 0 ? asked.host : std::string(where.substr(0, colon)), port};
  return out;
}

}  // namespace kvstride::store::redis
