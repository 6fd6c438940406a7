// SPDX-License-Identifier: Apache-2.0
// HTTP requests side by side over connections that are kept, each call with a deadline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "store/metrics.h"
#include "store/remote/curl.h"

namespace kvstride::store {

/// One request and what came of it.
struct Exchange {
  // What is sent. The body's memory is read until the request has ended.
  std::string method = "GET";
  std::string url;
  std::map<std::string, std::string> headers;
  std::span<const std::byte> body;
  /// Just before it is sent: sets the headers that depend on when that is. False: it is not wanted any more.
  std::function<bool(Exchange&)> prepare;
  /// Bytes of the body of a reply with status 200 or 206, in order; false: no more of it is wanted. Throws nothing.
  std::function<bool(Exchange&, std::span<const std::byte>)> take;
  /// On the thread that called run(), once; may add() others. Nothing touches `body`, or calls `take`, after it began.
  std::function<void(Exchange&)> ended;

  enum class End : std::uint8_t {
    kLate,       ///< the deadline passed
    kReplied,    ///< the reply is whole
    kStopped,    ///< `take` or `prepare` said so
    kFailed,     ///< the connection, or a reply that is no HTTP or has no end
    kUntrusted,  ///< the server's certificate, or the file of those that are trusted
  };
  End end = End::kLate;
  std::uint64_t signed_with = 0;  ///< whatever `prepare` wants to know later
  int status = 0;                 ///< of the reply; 0: none came
  std::int64_t length = -1;       ///< Content-Length
  /// Content-Range: the first byte and the whole length; -1: not told.
  std::int64_t range_begin = -1;
  std::int64_t range_whole = -1;
  std::string date;   ///< Date
  std::string etag;   ///< ETag
  std::string text;   ///< the body where `take` did not get it, at most kMaxText bytes: a longer one is kFailed
  std::string error;  ///< of kFailed and kUntrusted, for people

  static constexpr std::size_t kMaxText = 8 << 20;
};

/// For one thread at a time.
class Http {
 public:
  struct Options {
    std::size_t connections = 64;  ///< requests under way at once, and connections kept
    std::string ca;                ///< a file of trusted certificates; empty: libcurl's own
  };
  /// Throws std::bad_alloc.
  explicit Http(Options options);
  ~Http();
  Http(const Http&) = delete;
  Http& operator=(const Http&) = delete;

  /// Puts a request behind those that wait.
  void add(std::unique_ptr<Exchange> exchange) { waiting_.push_back(std::move(exchange)); }
  /// Until all have ended. Redirects are not followed, nothing is repeated. What is thrown is that of `prepare` and
  /// `ended`, and std::bad_alloc: the Http can only be destroyed then.
  void run(Clock::time_point deadline);
  /// A connection failed or fell silent: others that are kept may be dead, too, and none of them should be used again.
  bool doubtful() const { return doubtful_; }

 private:
  struct Transfer;
  void start(std::unique_ptr<Exchange> exchange);
  void finish(Transfer& transfer, CURLcode code);
  void stop(Transfer& transfer);

  const Curl& curl_;
  Options options_;
  CURLM* multi_ = nullptr;
  std::deque<std::unique_ptr<Exchange>> waiting_;
  std::vector<std::unique_ptr<Transfer>> running_;
  std::vector<std::unique_ptr<Transfer>> idle_;
  bool doubtful_ = false;
};

}  // namespace kvstride::store
