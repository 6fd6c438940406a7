// SPDX-License-Identifier: Apache-2.0
#include "store/remote/redis_connection.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

namespace kvstride::store::redis {
namespace {

constexpr std::size_t kTurnBytes = 1 << 20;         // of one call of receive()
constexpr std::size_t kLongestReply = 32 << 20;     // of those that hiredis keeps
constexpr std::int64_t kLongestString = 512 << 20;  // Redis' own limit, unless somebody raised it
constexpr std::int64_t kMostElements = 1 << 20;     // of an array: hiredis allocates before it sees them
constexpr int kMostResolvers = 8;
constexpr int kMostPieces = 64;

/// The whole number that `text` is; -1: it is none of up to ten digits.
std::int64_t number(std::string_view text) {
  std::int64_t out = -1;
  if (text.empty() || text.size() > 10 || text[0] < '0' || text[0] > '9') return -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size() ? out : -1;
}

std::vector<std::string> resolve(const std::string& host, int flags) {
  addrinfo hints{};
  hints.ai_flags = flags;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  std::vector<std::string> out;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return out;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    char text[NI_MAXHOST];
    if (getnameinfo(one->ai_addr, one->ai_addrlen, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0) {
      out.emplace_back(text);
    }
  }
  freeaddrinfo(found);
  return out;
}

std::atomic<int> num_resolvers{0};

}  // namespace

std::string command(std::initializer_list<std::string_view> words) {
  std::string out = fmt::format("*{}\r\n", words.size());
  for (const std::string_view word : words) fmt::format_to(std::back_inserter(out), "${}\r\n{}\r\n", word.size(), word);
  return out;
}

std::vector<std::string> addresses_of(const std::string& host, Clock::time_point deadline) {
  if (auto out = resolve(host, AI_NUMERICHOST); !out.empty()) return out;
  struct Shared {
    std::mutex mutex;
    std::condition_variable change;
    bool done = false;
    std::vector<std::string> found;
  };
  const auto shared = std::make_shared<Shared>();
  if (num_resolvers.fetch_add(1) >= kMostResolvers) {
    num_resolvers.fetch_sub(1);
    return {};
  }
  try {
    std::thread([shared, host] {
      std::vector<std::string> found = resolve(host, 0);
      num_resolvers.fetch_sub(1);
      const std::lock_guard lock(shared->mutex);
      shared->found = std::move(found);
      shared->done = true;
      shared->change.notify_all();
    }).detach();
  } catch (const std::system_error&) {
    num_resolvers.fetch_sub(1);
    return {};
  }
  std::unique_lock lock(shared->mutex);
  shared->change.wait_until(lock, deadline, [&] { return shared->done; });
  return shared->found;
}

std::unique_ptr<Connection> Connection::open(const std::string& address, int port) {
  std::unique_ptr<redisContext, FreeContext> context(redisConnectNonBlock(address.c_str(), port));
  if (!context) throw std::bad_alloc();
  if (context->err != 0) return nullptr;
  fcntl(context->fd, F_SETFD, FD_CLOEXEC);
  std::unique_ptr<Connection> out(new Connection(context.get()));
  context.release();
  return out;
}

bool Connection::connected() const {
  int error = 0;
  socklen_t length = sizeof error;
  return getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
}

void Connection::put(std::string_view text) {
  if (text.empty()) return;
  if (out_.empty() || out_.back().text.empty()) out_.emplace_back();
  out_.back().text += text;
}

void Connection::put(std::span<const std::byte> data) {
  if (!data.empty()) out_.push_back({{}, data});
}

bool Connection::flush() {
  while (!out_.empty()) {
    iovec pieces[kMostPieces];
    int count = 0;
    for (auto piece = out_.begin(); piece != out_.end() && count < kMostPieces; ++piece, ++count) {
      const void* data = piece->text.empty() ? static_cast<const void*>(piece->data.data()) : piece->text.data();
      pieces[count] = {const_cast<void*>(data), piece->text.empty() ? piece->data.size() : piece->text.size()};
    }
    pieces[0].iov_base = static_cast<char*>(pieces[0].iov_base) + sent_;
    pieces[0].iov_len -= sent_;
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = static_cast<std::size_t>(count);
    const ssize_t n = sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    auto left = static_cast<std::size_t>(n);
    for (int i = 0; i < count && left >= pieces[i].iov_len; ++i) {
      left -= pieces[i].iov_len;
      out_.pop_front();
      sent_ = 0;
    }
    sent_ += left;
  }
  return true;
}

Connection::Got Connection::receive(const std::span<std::byte>* into, Reply& reply) {
  std::size_t received = 0;
  for (;;) {
    Got got = parse(into, reply);
    // Only with an empty buffer: nobody is woken for what lies in it.
    if (got != Got::kLater || received >= kTurnBytes) return got;
    got = fill(into, received);
    if (got != Got::kReply) return got;
  }
}

/// From the buffer: kLater where it is used up, or ends in the midst of something.
Connection::Got Connection::parse(const std::span<std::byte>* into, Reply& reply) {
  while (payload_ < 0) {
    if (num_unread() == 0) return Got::kLater;
    const std::string_view unread(buffer_.data() + begin_, num_unread());
    const std::size_t line = unread.find('\n');
    // The first line comes whole, and is short.
    if (line == std::string_view::npos && fed_ == 0) {
      return unread.size() < buffer_.size() ? Got::kLater : Got::kBroken;
    }
    // Not further than the line goes: each reply ends with one, so that hiredis never has the next one's bytes.
    const std::size_t length = line == std::string_view::npos ? unread.size() : line + 1;
    const std::string_view rest = length > 3 ? unread.substr(1, length - 3) : "";
    if (unread[0] == '*' && (into != nullptr || number(rest) > kMostElements)) return Got::kBroken;
    if (into != nullptr && unread[0] == '$' && rest != "-1") {
      payload_ = number(rest);
      taken_ = 0;
      begin_ += length;
      const std::int64_t most = std::max(kLongestString, static_cast<std::int64_t>(into->size()));
      if (payload_ < 0 || payload_ > most || !unread.substr(0, length).ends_with("\r\n")) return Got::kBroken;
      break;
    }
    fed_ += length;
    if (fed_ > kLongestReply || redisReaderFeed(context_->reader, unread.data(), length) != REDIS_OK) {
      return Got::kBroken;
    }
    begin_ += length;
    void* value = nullptr;
    if (redisReaderGetReply(context_->reader, &value) != REDIS_OK) return Got::kBroken;
    if (value != nullptr) {
      reply.value.reset(static_cast<redisReply*>(value));
      reply.bytes = -1;
      fed_ = 0;
      return Got::kReply;
    }
  }
  return parse_payload(*into, reply);
}

Connection::Got Connection::parse_payload(std::span<std::byte> into, Reply& reply) {
  const auto part = static_cast<std::size_t>(std::min(static_cast<std::int64_t>(num_unread()), payload_ - taken_));
  if (payload_ <= static_cast<std::int64_t>(into.size()) && part > 0) {
    std::memcpy(into.data() + taken_, buffer_.data() + begin_, part);
  }
  taken_ += static_cast<std::int64_t>(part);
  begin_ += part;
  if (taken_ < payload_ || num_unread() < 2) return Got::kLater;
  if (buffer_[begin_] != '\r' || buffer_[begin_ + 1] != '\n') return Got::kBroken;
  begin_ += 2;
  reply.value.reset();
  reply.bytes = payload_;
  payload_ = -1;
  return Got::kReply;
}

/// Receives into `into` what belongs there, and into the buffer what follows. kReply: something came.
Connection::Got Connection::fill(const std::span<std::byte>* into, std::size_t& received) {
  std::copy(buffer_.begin() + static_cast<std::ptrdiff_t>(begin_), buffer_.begin() + static_cast<std::ptrdiff_t>(end_),
            buffer_.begin());
  end_ -= begin_;
  begin_ = 0;
  std::size_t direct = 0;
  if (payload_ > taken_ && payload_ <= static_cast<std::int64_t>(into->size())) {
    direct = static_cast<std::size_t>(payload_ - taken_);
  }
  iovec pieces[2] = {{direct > 0 ? into->data() + taken_ : nullptr, direct},
                     {buffer_.data() + end_, buffer_.size() - end_}};
  ssize_t n;
  do {
    n = readv(fd(), pieces, 2);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Got::kLater;
  if (n <= 0) return Got::kBroken;
  received += static_cast<std::size_t>(n);
  direct = std::min(direct, static_cast<std::size_t>(n));
  taken_ += static_cast<std::int64_t>(direct);
  end_ += static_cast<std::size_t>(n) - direct;
  return Got::kReply;
}

bool Connection::quiet() {
  pollfd ask{fd(), POLLIN, 0};
  return out_.empty() && num_unread() == 0 && fed_ == 0 && payload_ < 0 && poll(&ask, 1, 0) == 0;
}

}  // namespace kvstride::store::redis
