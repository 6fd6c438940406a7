// SPDX-License-Identifier: Apache-2.0
// Requests to one Redis server, or to the nodes of a cluster side by side.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "store/remote/engine.h"
#include "store/remote/redis_cluster.h"
#include "store/remote/redis_connection.h"

namespace kvstride::store::redis {

enum class Cluster : std::uint8_t { kAuto, kYes, kNo };

struct Settings {
  Node seed;
  std::string user, password;
  int database = 0;
  Cluster cluster = Cluster::kAuto;
  std::size_t num_connections = 4;  ///< that are kept to a node
};

/// What a reply must be to make sense. A status or a string may be absent (nil) instead.
enum class Expect : std::uint8_t { kStatus, kInteger, kString, kArray };

struct Request {
  std::string text;                    ///< of the command; or what goes before the payload
  std::span<const std::byte> payload;  ///< stays as it is until it is answered
  std::string end;                     ///< of the command, behind the payload
  Expect expect = Expect::kStatus;
  std::span<std::byte> into;   ///< kString: where its bytes go
  std::int64_t bytes = 0;      ///< about so many on their way, there or back
  int slot = 0;                ///< whose node gets it
  std::optional<Node> node{};  ///< this one gets it instead

  Answer answer = Answer::kLate;  ///< kOk: `reply` is what was expected
  Reply reply{};                  ///< an error's too
  int num_redirects = 0;
};

/// Calls may come from several threads at once; each has connections of its own while it is under way.
class Client {
 public:
  using Answered = std::function<void(std::size_t)>;
  explicit Client(Settings settings);

  /// Each request is answered once, and after that nothing touches its memory. Ends little after `deadline`.
  void run(std::span<Request> requests, Clock::time_point deadline, const Answered& answered);
  /// All that have keys; none and why.
  std::vector<Node> masters(Clock::time_point deadline, Answer& why);
  /// What went wrong last, and where: one line without the password.
  std::string trouble();

 private:
  class Exchange;
  struct Lane;

  std::shared_ptr<const SlotMap> map(Clock::time_point deadline, Answer& why);
  std::shared_ptr<const SlotMap> ask(const SlotMap* old, Clock::time_point deadline, Answer& why);
  std::unique_ptr<Connection> take(const Node& node);
  void give(const Node& node, std::unique_ptr<Connection> connection);
  void distrust();
  void note(const Node& node, std::string_view what);

  const Settings settings_;
  std::mutex mutex_;
  std::shared_ptr<const SlotMap> map_;
  bool stale_ = false;  ///< the map may be
  Clock::time_point next_ask_{};
  std::minstd_rand dice_;
  std::string trouble_;
  std::map<Node, std::vector<std::unique_ptr<Connection>>> idle_;
};

}  // namespace kvstride::store::redis
