// SPDX-License-Identifier: Apache-2.0
#include "store/remote/redis_client.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>

namespace kvstride::store::redis {
namespace {

using namespace std::chrono_literals;

/// On their way to a node and back at once: a server keeps all replies that nobody reads yet.
constexpr std::int64_t kWindow = 16 << 20;
constexpr int kMostRedirects = 5;
/// Nodes beyond those of the map that one call may be sent to.
constexpr std::size_t kMostStrangers = 8;
constexpr auto kAskEvery = 250ms;
constexpr auto kAskPatience = 1s;
constexpr std::size_t kAsked = 4;

Answer answer_of(std::string_view error) {
  const std::string_view code = error.substr(0, error.find(' '));
  if (code == "OOM") return Answer::kFull;
  for (const std::string_view denied : {"NOAUTH", "WRONGPASS", "NOPERM", "DENIED"}) {
    if (code == denied) return Answer::kDenied;
  }
  for (const std::string_view large : {"invalid bulk length", "string exceeds maximum allowed size"}) {
    if (error.find(large) != std::string_view::npos) return Answer::kTooLarge;
  }
  return Answer::kBroken;
}

/// Of an error that AUTH or SELECT got: what the URL says is not what the server wants, or it is just not ready.
Answer answer_of_greeting(std::string_view error) {
  const bool busy = error.find("max number of clients") != std::string_view::npos;
  return error.starts_with("ERR") && !busy ? Answer::kDenied : answer_of(error);
}

bool fits(Expect expect, const Reply& reply) {
  const int type = reply.type();
  switch (expect) {
    case Expect::kStatus: return type == REDIS_REPLY_STATUS || type == REDIS_REPLY_NIL;
    case Expect::kInteger: return type == REDIS_REPLY_INTEGER;
    case Expect::kString: return type == REDIS_REPLY_STRING || type == REDIS_REPLY_NIL;
    case Expect::kArray: return type == REDIS_REPLY_ARRAY;
  }
  return false;
}

int milliseconds_to(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

}  // namespace

/// What one call has to do with one node.
struct Client::Lane {
  static constexpr std::size_t kOk = static_cast<std::size_t>(-1);  ///< awaited: `+OK`, of no request
  struct Ready {
    std::size_t request;
    bool ask;  ///< the node has the slot not quite yet
  };
  enum class Stage : std::uint8_t { kConnecting, kGreeting, kOpen };

  Node node;
  std::unique_ptr<Connection> connection{};
  Stage stage = Stage::kConnecting;
  std::vector<std::string> addresses{};
  std::size_t num_tried = 0;
  std::deque<Ready> ready{};
  std::deque<std::size_t> awaited{};  ///< requests sent, or queued in the connection
  std::int64_t bytes = 0;             ///< of these
  bool sends = true;                  ///< false: what is awaited may still come, no more can be sent
  std::optional<Answer> failed{};

  bool busy() const { return !failed && !(ready.empty() && awaited.empty()); }
};

/// One call: requests travel over lanes until all are answered.
class Client::Exchange {
 public:
  Exchange(Client& client, const SlotMap& map, std::span<Request> requests, Clock::time_point deadline,
           const Answered& answered)
      : client_(client), map_(map), requests_(requests), deadline_(deadline), answered_(answered) {}

  void run() {
    open_.assign(requests_.size(), true);
    num_open_ = requests_.size();
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      const Request& request = requests_[i];
      const Node* node = request.node ? &*request.node : map_.node_of(request.slot);
      if (node == nullptr) {
        client_.distrust();
        settle(i, Answer::kBroken);
      } else {
        route(i, *node, false);
      }
    }
    std::vector<pollfd> polls;
    std::vector<Lane*> polled;
    while (num_open_ > 0 && !stopped_ && Clock::now() < deadline_) {
      polls.clear();
      polled.clear();
      for (auto& [node, lane] : lanes_) {
        if (!lane.busy() || (!lane.connection && !open(lane))) continue;
        send(lane);
        if (!lane.sends && lane.awaited.empty()) {  // all that came before it closed
          fail(lane, Answer::kBroken, "closed the connection");
          continue;
        }
        const bool out = lane.stage == Lane::Stage::kConnecting || (lane.sends && lane.connection->sends());
        const int events = (out ? POLLOUT : 0) | (lane.awaited.empty() ? 0 : POLLIN);
        polls.push_back({lane.connection->fd(), static_cast<short>(events), 0});
        polled.push_back(&lane);
      }
      if (num_open_ == 0) break;
      poll(polls.data(), polls.size(), milliseconds_to(deadline_));
      for (std::size_t i = 0; i < polls.size(); ++i) {
        if (polls[i].revents != 0 && !stopped_) turn(*polled[i]);
      }
    }
    end();
  }

  /// From inside `answered`: the rest does not matter.
  void stop() { stopped_ = true; }

 private:
  void settle(std::size_t i, Answer answer) {
    if (!open_[i]) return;
    open_[i] = false;
    --num_open_;
    requests_[i].answer = answer;
    answered_(i);
  }

  void route(std::size_t i, const Node& node, bool ask) {
    auto at = lanes_.find(node);
    if (at == lanes_.end()) {
      if (lanes_.size() >= map_.masters.size() + kMostStrangers) return settle(i, Answer::kBroken);
      at = lanes_.emplace(node, Lane{node}).first;
    }
    if (at->second.failed) return settle(i, *at->second.failed);
    at->second.ready.push_back({i, ask});
  }

  /// A connection that was kept, or a new one. False: the lane failed.
  bool open(Lane& lane) {
    lane.connection = client_.take(lane.node);
    if (lane.connection) {
      lane.stage = Lane::Stage::kOpen;
      return true;
    }
    lane.addresses = addresses_of(lane.node.host, deadline_);
    return connect(lane);
  }

  bool connect(Lane& lane) {
    lane.connection.reset();
    while (!lane.connection && lane.num_tried < lane.addresses.size()) {
      lane.connection = Connection::open(lane.addresses[lane.num_tried++], lane.node.port);
    }
    if (!lane.connection) {
      const bool late = Clock::now() >= deadline_;
      const char* what = late ? "late" : lane.addresses.empty() ? "no such host" : "cannot be connected to";
      fail(lane, late ? Answer::kLate : Answer::kBroken, what);
    }
    return lane.connection != nullptr;
  }

  void greet(Lane& lane) {
    const Settings& is = client_.settings_;
    if (!is.password.empty()) {
      lane.connection->put(is.user.empty() ? command({"AUTH", is.password}) : command({"AUTH", is.user, is.password}));
      lane.awaited.push_back(Lane::kOk);
    }
    if (is.database != 0) {
      lane.connection->put(command({"SELECT", std::to_string(is.database)}));
      lane.awaited.push_back(Lane::kOk);
    }
    // Nothing else before these are answered: it would go to another database.
    lane.stage = lane.awaited.empty() ? Lane::Stage::kOpen : Lane::Stage::kGreeting;
  }

  void send(Lane& lane) {
    while (lane.stage == Lane::Stage::kOpen && lane.sends && !lane.ready.empty()) {
      const auto [i, ask] = lane.ready.front();
      const Request& request = requests_[i];
      if (!lane.awaited.empty() && lane.bytes + request.bytes > kWindow) break;
      lane.ready.pop_front();
      if (ask) {
        lane.connection->put(command({"ASKING"}));
        lane.awaited.push_back(Lane::kOk);
      }
      lane.connection->put(request.text);
      lane.connection->put(request.payload);
      lane.connection->put(request.end);
      lane.awaited.push_back(i);
      lane.bytes += request.bytes;
    }
    if (lane.stage != Lane::Stage::kConnecting && lane.sends) lane.sends = lane.connection->flush();
  }

  /// Something happened on its connection.
  void turn(Lane& lane) {
    if (lane.stage == Lane::Stage::kConnecting) {
      if (lane.connection->connected()) {
        greet(lane);
      } else {
        connect(lane);
      }
      return;
    }
    while (!lane.awaited.empty() && !stopped_ && Clock::now() < deadline_) {
      const std::size_t i = lane.awaited.front();
      const bool string = i != Lane::kOk && requests_[i].expect == Expect::kString;
      Reply reply;
      const auto got = lane.connection->receive(string ? &requests_[i].into : nullptr, reply);
      if (got == Connection::Got::kLater) return;
      if (got == Connection::Got::kBroken) {
        return fail(lane, Answer::kBroken, "closed the connection, or sent what is no reply");
      }
      lane.awaited.pop_front();
      const bool sound = i == Lane::kOk ? take_ok(lane, reply) : take(lane, i, std::move(reply));
      if (!sound) return;
      send(lane);  // keeps the server busy
    }
  }

  bool take_ok(Lane& lane, const Reply& reply) {
    const bool greeting = lane.stage == Lane::Stage::kGreeting;
    if (reply.type() != REDIS_REPLY_STATUS) {
      const bool error = reply.type() == REDIS_REPLY_ERROR;
      fail(lane, error && greeting ? answer_of_greeting(reply.text()) : Answer::kBroken,
           error ? reply.text() : "sent another kind of reply");
      return false;
    }
    if (greeting && lane.awaited.empty()) lane.stage = Lane::Stage::kOpen;
    return true;
  }

  /// False: the lane failed. What makes no sense is no reply to this request, nor would the next be one.
  bool take(Lane& lane, std::size_t i, Reply reply) {
    Request& request = requests_[i];
    lane.bytes -= request.bytes;
    if (reply.type() != REDIS_REPLY_ERROR) {
      const bool sound = fits(request.expect, reply);
      request.reply = std::move(reply);
      if (!sound) fail(lane, Answer::kBroken, "sent another kind of reply");
      settle(i, sound ? Answer::kOk : Answer::kBroken);
      return sound;
    }
    request.reply = std::move(reply);
    const std::string_view error = request.reply.text();
    if (error.starts_with("MOVED") || error.starts_with("CLUSTERDOWN")) client_.distrust();
    const auto redirect = redirect_of(error, lane.node);
    if (redirect && map_.cluster && !request.node && redirect->to.port != 0 &&
        request.num_redirects++ < kMostRedirects) {
      route(i, redirect->to, redirect->ask);
    } else {
      client_.note(lane.node, error);
      settle(i, answer_of(error));
    }
    return true;
  }

  void fail(Lane& lane, Answer answer, std::string_view what) {
    client_.note(lane.node, what);
    lane.failed = answer;
    lane.connection.reset();
    if (map_.cluster) client_.distrust();
    for (const std::size_t i : lane.awaited) {
      if (i != Lane::kOk) settle(i, answer);
    }
    for (const Lane::Ready& one : lane.ready) settle(one.request, answer);
  }

  /// A connection that owes an answer is closed, whoever would read the answer.
  void end() {
    for (auto& [node, lane] : lanes_) {
      const bool clean = lane.connection && lane.stage == Lane::Stage::kOpen && lane.sends && !lane.busy();
      if (lane.busy() && !stopped_) {
        client_.note(node, "late");
        if (map_.cluster) client_.distrust();
      }
      if (clean && lane.connection->quiet()) client_.give(node, std::move(lane.connection));
      lane.connection.reset();
    }
    for (std::size_t i = 0; i < requests_.size(); ++i) settle(i, Answer::kLate);
  }

  Client& client_;
  const SlotMap& map_;
  std::span<Request> requests_;
  Clock::time_point deadline_;
  const Answered& answered_;
  std::map<Node, Lane> lanes_;
  std::vector<bool> open_;
  std::size_t num_open_ = 0;
  bool stopped_ = false;
};

Client::Client(Settings settings) : settings_(std::move(settings)), dice_(std::random_device{}()) {
  if (settings_.cluster == Cluster::kNo) map_ = std::make_shared<SlotMap>(SlotMap::of(settings_.seed));
}

void Client::run(std::span<Request> requests, Clock::time_point deadline, const Answered& answered) {
  Answer why = Answer::kLate;
  const std::shared_ptr<const SlotMap> now = map(deadline, why);
  if (!now) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      requests[i].answer = why;
      answered(i);
    }
    return;
  }
  Exchange(*this, *now, requests, deadline, answered).run();
}

std::vector<Node> Client::masters(Clock::time_point deadline, Answer& why) {
  const std::shared_ptr<const SlotMap> now = map(deadline, why);
  return now ? now->masters : std::vector<Node>();
}

std::shared_ptr<const SlotMap> Client::map(Clock::time_point deadline, Answer& why) {
  std::shared_ptr<const SlotMap> old;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    if (map_ && (!stale_ || now < next_ask_)) return map_;
    next_ask_ = now + kAskEvery;  // meanwhile others go by the old one, if there is one
    stale_ = false;
    old = map_;
  }
  // A call whose nodes all answer must not fail because of one that does not tell the way.
  const auto now = Clock::now();
  const auto patience =
      old ? std::min(deadline, now + std::min<Clock::duration>(kAskPatience, (deadline - now) / 2)) : deadline;
  const std::shared_ptr<const SlotMap> fresh = ask(old.get(), patience, why);
  const std::lock_guard lock(mutex_);
  if (!fresh) {
    stale_ = true;
    return map_;
  }
  map_ = fresh;
  std::erase_if(idle_, [&](const auto& one) {
    return std::find(fresh->masters.begin(), fresh->masters.end(), one.first) == fresh->masters.end();
  });
  return map_;
}

/// Asks the first node, and some of the others beside it, until one tells. Null and why.
std::shared_ptr<const SlotMap> Client::ask(const SlotMap* old, Clock::time_point deadline, Answer& why) {
  std::vector<Node> nodes{settings_.seed};
  if (old != nullptr) {
    std::vector<Node> others = old->masters;
    std::erase(others, settings_.seed);
    {
      const std::lock_guard lock(mutex_);
      std::shuffle(others.begin(), others.end(), dice_);
    }
    others.resize(std::min(others.size(), kAsked - 1));
    nodes.insert(nodes.end(), others.begin(), others.end());
  }
  std::vector<Request> requests(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    requests[i].text = command({"CLUSTER", "SLOTS"});
    requests[i].expect = Expect::kArray;
    requests[i].node = nodes[i];
  }
  why = Answer::kLate;
  const std::string before = trouble();
  std::shared_ptr<const SlotMap> found;
  Exchange* running = nullptr;
  const Answered answered = [&](std::size_t i) {
    if (found) return;
    const Request& request = requests[i];
    Answer answer = request.answer;
    if (answer == Answer::kOk) {
      answer = Answer::kBroken;
      if (auto map = SlotMap::parse(*request.reply.value, nodes[i])) found = std::make_shared<SlotMap>(std::move(*map));
    } else if (i == 0 && request.reply.type() == REDIS_REPLY_ERROR) {
      // No cluster (ERR), or one that keeps it to itself (NOPERM).
      const std::string_view error = request.reply.text();
      const bool single = error.starts_with("ERR ") || error.starts_with("NOPERM");
      if (single && settings_.cluster == Cluster::kAuto) found = std::make_shared<SlotMap>(SlotMap::of(settings_.seed));
      if (single) answer = Answer::kDenied;
    }
    if (found) running->stop();
    if (why == Answer::kLate || answer == Answer::kDenied) why = answer;
  };
  SlotMap all = SlotMap::of(settings_.seed);
  Exchange exchange(*this, all, requests, deadline, answered);
  running = &exchange;
  exchange.run();
  if (found) {  // what others said about it does not matter
    const std::lock_guard lock(mutex_);
    trouble_ = before;
  }
  return found;
}

/// One that was kept, if it still stands; the last that came back.
std::unique_ptr<Connection> Client::take(const Node& node) {
  for (;;) {
    std::unique_ptr<Connection> out;
    {
      const std::lock_guard lock(mutex_);
      const auto at = idle_.find(node);
      if (at == idle_.end() || at->second.empty()) return nullptr;
      out = std::move(at->second.back());
      at->second.pop_back();
    }
    if (out->quiet()) return out;
  }
}

void Client::give(const Node& node, std::unique_ptr<Connection> connection) {
  const std::lock_guard lock(mutex_);
  const bool known = map_ && std::find(map_->masters.begin(), map_->masters.end(), node) != map_->masters.end();
  std::vector<std::unique_ptr<Connection>>& idle = idle_[node];
  if ((known || node == settings_.seed) && idle.size() < settings_.num_connections) {
    idle.push_back(std::move(connection));
  }
  if (idle.empty()) idle_.erase(node);
}

std::string Client::trouble() {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

/// Servers repeat what they did not understand, a password too.
void Client::note(const Node& node, std::string_view what) {
  std::string text = fmt::format("{}:{}: {}", node.host, node.port, what.substr(0, 200));
  if (!settings_.password.empty() && what.find(settings_.password) != std::string_view::npos) {
    text = fmt::format("{}:{}: an error that names the password", node.host, node.port);
  }
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c > 0x7E; }, '?');
  const std::lock_guard lock(mutex_);
  trouble_ = std::move(text);
}

void Client::distrust() {
  const std::lock_guard lock(mutex_);
  stale_ = settings_.cluster != Cluster::kNo;
}

}  // namespace kvstride::store::redis
