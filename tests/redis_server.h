// SPDX-License-Identifier: Apache-2.0
// A server on loopback that speaks as much of Redis' protocol as a test scripts.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace kvstride::test {

class RedisServer {
 public:
  using Words = std::vector<std::string>;
  struct Answer {
    std::string bytes{};
    bool close = false;  ///< behind the bytes
    int later_ms = 0;    ///< until `then` goes, without another command
    std::string then{};
  };
  using Script = std::function<Answer(const Words&)>;

  explicit RedisServer(Script script) : script_(std::move(script)), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(listener_, 64) != 0 ||
        ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      throw std::runtime_error("no socket on loopback");
    }
    port_ = ntohs(address.sin_port);
    acceptor_ = std::thread([this] { accept(); });
  }
  RedisServer(const RedisServer&) = delete;
  ~RedisServer() {
    stop_ = true;
    acceptor_.join();
    for (std::thread& thread : threads_) thread.join();
    ::close(listener_);
  }

  int port() const { return port_; }
  std::string url(const std::string& options = "cluster=no") const {
    return "redis://127.0.0.1:" + std::to_string(port_) + "/?prefix=&" + options;
  }
  /// From now on.
  void set(Script script) {
    const std::lock_guard lock(mutex_);
    script_ = std::move(script);
  }
  /// Commands that came whole.
  std::vector<Words> commands() {
    const std::lock_guard lock(mutex_);
    return commands_;
  }
  int num_connections() const { return num_connections_; }
  std::atomic<bool> reads{true};  ///< false: what clients send stays in the kernel

 private:
  bool wait(int fd, short events) const {
    while (!stop_) {
      pollfd one{fd, events, 0};
      if (::poll(&one, 1, 10) > 0) return true;
    }
    return false;
  }
  void accept() {
    while (wait(listener_, POLLIN)) {
      const int fd = ::accept(listener_, nullptr, nullptr);
      if (fd < 0) continue;
      ++num_connections_;
      threads_.emplace_back([this, fd] {
        serve(fd);
        ::close(fd);
      });
    }
  }
  bool send(int fd, std::string_view bytes) const {
    while (!bytes.empty()) {
      if (!wait(fd, POLLOUT)) return false;
      const ssize_t n = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
  }
  void serve(int fd) {
    std::string received;
    std::vector<char> part(1 << 20);
    while (wait(fd, POLLIN)) {
      if (!reads) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        continue;
      }
      const ssize_t n = ::recv(fd, part.data(), part.size(), 0);
      if (n <= 0) return;
      received.append(part.data(), static_cast<std::size_t>(n));
      for (Words words; take(received, words); words.clear()) {
        Answer answer;
        {
          const std::lock_guard lock(mutex_);
          commands_.push_back(words);
          answer = script_(words);
        }
        if (!send(fd, answer.bytes) || answer.close) return;
        for (int ms = 0; ms < answer.later_ms && !stop_; ++ms)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (!send(fd, answer.then)) return;
      }
    }
  }
  static bool take(std::string& from, Words& words) {
    std::size_t at = 0;
    const auto number = [&](char mark, std::size_t& out) {
      const std::size_t end = from.find("\r\n", at);
      if (end == std::string::npos || from[at] != mark) return false;
      out = std::strtoull(from.c_str() + at + 1, nullptr, 10);
      at = end + 2;
      return true;
    };
    std::size_t count = 0;
    if (!number('*', count)) return false;
    for (std::size_t i = 0; i < count; ++i) {
      std::size_t length = 0;
      if (!number('$', length) || from.size() < at + length + 2) return false;
      words.push_back(from.substr(at, length));
      at += length + 2;
    }
    from.erase(0, at);
    return true;
  }

  std::mutex mutex_;
  Script script_;
  std::vector<Words> commands_;
  int listener_;
  int port_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<int> num_connections_{0};
  std::thread acceptor_;
  std::vector<std::thread> threads_;
};

}  // namespace kvstride::test
