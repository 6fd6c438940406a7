// SPDX-License-Identifier: Apache-2.0
// One connection to a Redis server. hiredis makes it and reads replies; what is long does not pass through its buffers:
// payloads are sent from where they lie, and long strings received to where they are wanted.
#pragma once

#include <hiredis/hiredis.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/metrics.h"

namespace kvstride::store::redis {

struct FreeReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
struct FreeContext {
  void operator()(redisContext* context) const { redisFree(context); }
};

/// hiredis' reply; or none, of a string whose bytes went elsewhere.
struct Reply {
  std::unique_ptr<redisReply, FreeReply> value;
  std::int64_t bytes = -1;  ///< of such a string

  int type() const { return value ? value->type : REDIS_REPLY_STRING; }
  std::string_view text() const { return value && value->str ? std::string_view(value->str, value->len) : ""; }
};

/// A command as the protocol has it.
std::string command(std::initializer_list<std::string_view> words);

/// Addresses of a host, as text, as good as they could be had until `deadline`. Asks name servers on a thread of its
/// own, which the C library does not let anybody interrupt.
std::vector<std::string> addresses_of(const std::string& host, Clock::time_point deadline);

/// Of one thread at a time. Nothing blocks, nothing throws but std::bad_alloc.
class Connection {
 public:
  /// Begins to connect; null where that fails at once.
  static std::unique_ptr<Connection> open(const std::string& address, int port);
  Connection(const Connection&) = delete;

  int fd() const { return context_->fd; }
  /// Once it can be written to: whether it stands.
  bool connected() const;

  /// Queues bytes: a copy, or bytes that stay as they are until all is sent or the connection is gone.
  void put(std::string_view text);
  void put(std::span<const std::byte> data);
  /// Sends what goes. False: no more will go.
  bool flush();
  bool sends() const { return !out_.empty(); }

  enum class Got : std::uint8_t { kReply, kLater, kBroken };
  /// The next reply. `into`, the same in each call until there is one: where the bytes of a string go, which has none
  /// of hiredis'; a longer string is dropped, and only its length is told. kLater: when there is more to read, or at
  /// once after some megabytes.
  Got receive(const std::span<std::byte>* into, Reply& reply);

  /// Whether nothing is queued or came that nobody asked for.
  bool quiet();

 private:
  struct Piece {
    std::string text;
    std::span<const std::byte> data;  ///< where the text is empty
  };

  explicit Connection(redisContext* context) : context_(context) {}
  std::size_t num_unread() const { return end_ - begin_; }
  Got parse(const std::span<std::byte>* into, Reply& reply);
  Got parse_payload(std::span<std::byte> into, Reply& reply);
  Got fill(const std::span<std::byte>* into, std::size_t& received);

  std::unique_ptr<redisContext, FreeContext> context_;
  std::deque<Piece> out_;
  std::size_t sent_ = 0;  ///< of the first piece
  std::vector<char> buffer_ = std::vector<char>(16 << 10);
  std::size_t begin_ = 0, end_ = 0;  ///< what is received and not yet looked at
  std::size_t fed_ = 0;              ///< bytes of the current reply that hiredis has
  std::int64_t payload_ = -1;        ///< bytes of a string that goes to `into`; -1: none is under way
  std::int64_t taken_ = 0;           ///< of these
};

}  // namespace kvstride::store::redis
