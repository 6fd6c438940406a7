// SPDX-License-Identifier: Apache-2.0
// An HTTP server in this process that sends whatever a test tells it to, right or wrong.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace kvstride::test {

/// Loopback only. A thread for each connection, each ended within a second of stop().
class HttpServer {
 public:
  struct Request {
    std::string method;
    std::string target;                          ///< path and query as they came
    std::map<std::string, std::string> headers;  ///< names in lower case
    std::string body;

    std::string header(const std::string& name) const {
      const auto at = headers.find(name);
      return at != headers.end() ? at->second : "";
    }
  };
  /// Bytes as they go to the socket, with a pause after each piece.
  struct Reply {
    std::vector<std::string> pieces;
    bool closes = false;
    std::chrono::milliseconds pause{0};
  };
  using Handler = std::function<Reply(const Request&)>;

  explicit HttpServer(Handler handler) : handler_(std::move(handler)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener_, plain, length) != 0 || ::listen(listener_, 128) != 0 ||
        ::getsockname(listener_, plain, &length) != 0) {
      std::abort();
    }
    port_ = ::ntohs(address.sin_port);
    acceptor_ = std::thread([this] { accept(); });
  }
  ~HttpServer() { stop(); }
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  /// Nobody listens after it.
  void stop() {
    if (stopping_.exchange(true)) return;
    acceptor_.join();
    for (std::thread& thread : threads_) thread.join();
    ::close(listener_);
  }
  std::string endpoint() const { return "http://127.0.0.1:" + std::to_string(port_); }
  int connections() const { return connections_; }
  std::vector<Request> requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

  static Reply reply(int status, const std::string& body = "", const std::string& headers = "") {
    return {{"HTTP/1.1 " + std::to_string(status) + " X\r\nContent-Length: " + std::to_string(body.size()) + "\r\n" +
             headers + "\r\n" + body}};
  }
  static Reply error(int status, const std::string& code, const std::string& headers = "") {
    return reply(status, "<?xml version=\"1.0\"?><Error><Code>" + code + "</Code><Message>no</Message></Error>",
                 headers);
  }

 private:
  void accept() {
    while (!stopping_) {
      pollfd waiting{listener_, POLLIN, 0};
      if (::poll(&waiting, 1, 20) <= 0) continue;
      const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (socket < 0) continue;
      ++connections_;
      threads_.emplace_back([this, socket] {
        serve(socket);
        ::close(socket);
      });
    }
  }

  /// More of what comes; false: nothing will.
  bool receive(int socket, std::string& into) const {
    while (!stopping_) {
      pollfd waiting{socket, POLLIN, 0};
      if (::poll(&waiting, 1, 20) <= 0) continue;
      char buffer[65536];
      const ssize_t bytes = ::recv(socket, buffer, sizeof buffer, 0);
      if (bytes <= 0) return false;
      into.append(buffer, static_cast<std::size_t>(bytes));
      return true;
    }
    return false;
  }
  bool send(int socket, const std::string& text) const {
    std::size_t at = 0;
    while (at < text.size() && !stopping_) {
      pollfd waiting{socket, POLLOUT, 0};
      if (::poll(&waiting, 1, 20) <= 0) continue;
      const ssize_t bytes = ::send(socket, text.data() + at, text.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (bytes <= 0) return false;
      at += static_cast<std::size_t>(bytes);
    }
    return at == text.size();
  }
  void pause(std::chrono::milliseconds time) const {
    const auto end = std::chrono::steady_clock::now() + time;
    while (std::chrono::steady_clock::now() < end && !stopping_) {
      std::this_thread::sleep_for(std::min<std::chrono::milliseconds>(time, std::chrono::milliseconds(5)));
    }
  }

  void serve(int socket) {
    std::string text;
    for (;;) {
      std::size_t end;
      while ((end = text.find("\r\n\r\n")) == std::string::npos) {
        if (!receive(socket, text)) return;
      }
      Request request = parse(text.substr(0, end + 2));
      text.erase(0, end + 4);
      const std::size_t length = std::strtoull(request.header("content-length").c_str(), nullptr, 10);
      while (text.size() < length) {
        if (!receive(socket, text)) return;
      }
      request.body = text.substr(0, length);
      text.erase(0, length);
      {
        const std::lock_guard lock(mutex_);
        requests_.push_back(request);
      }
      const Reply reply = handler_(request);
      for (const std::string& piece : reply.pieces) {
        if (!send(socket, piece)) return;
        pause(reply.pause);
      }
      if (reply.closes) return;
    }
  }

  static Request parse(const std::string& head) {
    Request out;
    const std::size_t first = head.find(' ');
    const std::size_t second = head.find(' ', first + 1);
    out.method = head.substr(0, first);
    out.target = head.substr(first + 1, second - first - 1);
    for (std::size_t at = head.find("\r\n") + 2; at < head.size();) {
      const std::size_t end = head.find("\r\n", at);
      const std::size_t colon = head.find(": ", at);
      std::string name = head.substr(at, colon - at);
      for (char& c : name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
      out.headers[name] = head.substr(colon + 2, end - colon - 2);
      at = end + 2;
    }
    return out;
  }

  Handler handler_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> stopping_{false};
  std::atomic<int> connections_{0};
  mutable std::mutex mutex_;
  std::vector<Request> requests_;
  std::list<std::thread> threads_;  ///< of the acceptor until it has ended
  std::thread acceptor_;
};

}  // namespace kvstride::test
