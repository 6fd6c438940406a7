// SPDX-License-Identifier: Apache-2.0
// curl's multi interface: one loop that starts, polls and ends transfers.
#include "store/remote/http.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <csignal>
#include <cstring>
#include <new>
#include <string_view>

#include "kvstride/version.h"

namespace kvstride::store {
namespace {

/// TLS libraries write to sockets with write(), which raises SIGPIPE where the server has closed: kept from the
/// process.
class NoSigpipe {
 public:
  NoSigpipe() {
    ::sigemptyset(&pipe_);
    ::sigaddset(&pipe_, SIGPIPE);
    ::sigpending(&before_);
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &mask_);
  }
  ~NoSigpipe() {
    const timespec now{};
    if (::sigismember(&before_, SIGPIPE) == 0) {
      while (::sigtimedwait(&pipe_, nullptr, &now) == SIGPIPE) {
      }
    }
    ::pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t pipe_{};
  sigset_t before_{};
  sigset_t mask_{};
};

/// A whole number that is all of `text`; -1: it is none.
std::int64_t number(std::string_view text) {
  std::int64_t out = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size() && out >= 0 ? out : -1;
}

/// `bytes 0-4095/12288`, `bytes */12288`, `bytes 0-4095/*`.
void read_content_range(std::string_view value, Exchange& out) {
  constexpr std::string_view kUnit = "bytes ";
  if (value.substr(0, kUnit.size()) != kUnit) return;
  value.remove_prefix(kUnit.size());
  const std::size_t slash = value.find('/');
  if (slash == std::string_view::npos) return;
  out.range_whole = number(value.substr(slash + 1));
  out.range_begin = number(value.substr(0, std::min(value.find('-'), slash)));
}

void read_header(std::string_view line, Exchange& out) {
  while (!line.empty() && (line.back() == '\r' || line.back() == '\n' || line.back() == ' ')) line.remove_suffix(1);
  if (line.substr(0, 5) == "HTTP/") {  // of the last reply, where 100 Continue came before it
    const std::size_t blank = line.find(' ');
    out.status = blank == std::string_view::npos ? 0 : static_cast<int>(number(line.substr(blank + 1, 3)));
    out.length = out.range_begin = out.range_whole = -1;
    out.date.clear();
    out.etag.clear();
    return;
  }
  const std::size_t colon = line.find(':');
  if (colon == std::string_view::npos || colon > 32) return;
  std::string name(line.substr(0, colon));
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::string_view value = line.substr(colon + 1);
  while (!value.empty() && value.front() == ' ') value.remove_prefix(1);
  if (value.size() > 256) return;
  if (name == "content-length") out.length = number(value);
  if (name == "content-range") read_content_range(value, out);
  if (name == "date") out.date = value;
  if (name == "etag") out.etag = value;
}

}  // namespace

/// A handle of curl, used again for one request after another.
struct Http::Transfer {
  const Curl& curl;
  CURL* easy;
  curl_slist* headers = nullptr;
  std::unique_ptr<Exchange> exchange;
  std::size_t sent = 0;
  bool stopped = false;
  std::array<char, CURL_ERROR_SIZE> error{};

  explicit Transfer(const Curl& library) : curl(library), easy(library.easy_init()) {
    if (easy == nullptr) throw std::bad_alloc();
  }
  ~Transfer() {
    curl.easy_cleanup(easy);
    curl.slist_free_all(headers);
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  template <class T>
  void set(CURLoption option, T value) {
    // An option that this libcurl does not know yet is one that it does not need.
    if (curl.easy_setopt(easy, option, value) == CURLE_OUT_OF_MEMORY) throw std::bad_alloc();
  }
  void add_header(const std::string& line) {
    curl_slist* longer = curl.slist_append(headers, line.c_str());
    if (longer == nullptr) throw std::bad_alloc();
    headers = longer;
  }

  // curl calls these: nothing may be thrown through it.
  static std::size_t on_header(char* data, std::size_t, std::size_t bytes, void* self) noexcept try {
    read_header({data, bytes}, *static_cast<Transfer*>(self)->exchange);
    return bytes;
  } catch (const std::bad_alloc&) {
    return 0;
  }
  static std::size_t on_body(char* data, std::size_t, std::size_t bytes, void* self) noexcept try {
    auto& transfer = *static_cast<Transfer*>(self);
    Exchange& exchange = *transfer.exchange;
    if (exchange.take && (exchange.status == 200 || exchange.status == 206)) {
      transfer.stopped = !exchange.take(exchange, {reinterpret_cast<const std::byte*>(data), bytes});
      return transfer.stopped ? 0 : bytes;
    }
    if (exchange.text.size() + bytes > Exchange::kMaxText) return 0;
    exchange.text.append(data, bytes);
    return bytes;
  } catch (const std::bad_alloc&) {
    return 0;
  }
  static std::size_t on_send(char* into, std::size_t, std::size_t room, void* self) noexcept {
    auto& transfer = *static_cast<Transfer*>(self);
    const std::span<const std::byte> rest = transfer.exchange->body.subspan(transfer.sent);
    const std::size_t bytes = std::min(room, rest.size());
    std::memcpy(into, rest.data(), bytes);
    transfer.sent += bytes;
    return bytes;
  }
  /// curl begins again where a kept connection turned out to be closed before anything of the request was answered.
  static int on_seek(void* self, curl_off_t offset, int origin) noexcept {
    auto& transfer = *static_cast<Transfer*>(self);
    if (origin != SEEK_SET || offset < 0 || static_cast<std::size_t>(offset) > transfer.exchange->body.size()) {
      return CURL_SEEKFUNC_FAIL;
    }
    transfer.sent = static_cast<std::size_t>(offset);
    return CURL_SEEKFUNC_OK;
  }
};

Http::Http(Options options) : curl_(Curl::get()), options_(std::move(options)), multi_(curl_.multi_init()) {
  if (multi_ == nullptr) throw std::bad_alloc();
  curl_.multi_setopt(multi_, CURLMOPT_MAXCONNECTS, static_cast<long>(options_.connections));
}

Http::~Http() {
  const NoSigpipe guard;
  for (const auto& transfer : running_) curl_.multi_remove(multi_, transfer->easy);
  running_.clear();
  idle_.clear();
  curl_.multi_cleanup(multi_);
}

void Http::start(std::unique_ptr<Exchange> exchange) {
  if (exchange->prepare && !exchange->prepare(*exchange)) {
    exchange->end = Exchange::End::kStopped;
    if (exchange->ended) exchange->ended(*exchange);
    return;
  }
  if (idle_.empty()) idle_.push_back(std::make_unique<Transfer>(curl_));
  running_.push_back(std::move(idle_.back()));
  idle_.pop_back();
  Transfer& transfer = *running_.back();
  transfer.exchange = std::move(exchange);
  transfer.sent = 0;
  transfer.stopped = false;
  transfer.error[0] = '\0';
  curl_.slist_free_all(transfer.headers);
  transfer.headers = nullptr;
  const Exchange& asked = *transfer.exchange;
  for (const auto& [name, value] : asked.headers) transfer.add_header(fmt::format("{}: {}", name, value));
  transfer.add_header("Accept-Encoding: identity");  // no proxy may pack what comes back
  transfer.add_header("Expect:");                    // no round trip before a body

  constexpr long kBuffer = 256 << 10;
  curl_.easy_reset(transfer.easy);
  transfer.set(CURLOPT_PRIVATE, &transfer);
  transfer.set(CURLOPT_NOSIGNAL, 1L);
  transfer.set(CURLOPT_URL, asked.url.c_str());
  transfer.set(CURLOPT_PATH_AS_IS, 1L);
  transfer.set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));  // many connections, not one
  transfer.set(CURLOPT_HTTPHEADER, transfer.headers);
  transfer.set(CURLOPT_USERAGENT, "kvstride/" KVSTRIDE_VERSION);
  transfer.set(CURLOPT_ERRORBUFFER, transfer.error.data());
  transfer.set(CURLOPT_HEADERFUNCTION, &Transfer::on_header);
  transfer.set(CURLOPT_HEADERDATA, &transfer);
  transfer.set(CURLOPT_WRITEFUNCTION, &Transfer::on_body);
  transfer.set(CURLOPT_WRITEDATA, &transfer);
  transfer.set(CURLOPT_BUFFERSIZE, kBuffer);
  transfer.set(CURLOPT_TCP_KEEPALIVE, 1L);
  // 7.87 and newer: a request that ends while a name is looked up does not wait for that. Older headers lack its name.
  transfer.set(static_cast<CURLoption>(CURLOPTTYPE_LONG + 322), 1L);
  if (!options_.ca.empty()) transfer.set(CURLOPT_CAINFO, options_.ca.c_str());
  if (asked.method == "HEAD") {
    transfer.set(CURLOPT_NOBODY, 1L);
  } else if (asked.method == "PUT" || asked.method == "POST") {
    transfer.set(CURLOPT_UPLOAD, 1L);
    transfer.set(CURLOPT_CUSTOMREQUEST, asked.method.c_str());
    transfer.set(CURLOPT_READFUNCTION, &Transfer::on_send);
    transfer.set(CURLOPT_READDATA, &transfer);
    transfer.set(CURLOPT_SEEKFUNCTION, &Transfer::on_seek);
    transfer.set(CURLOPT_SEEKDATA, &transfer);
    transfer.set(CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(asked.body.size()));
    transfer.set(CURLOPT_UPLOAD_BUFFERSIZE, kBuffer);
  } else if (asked.method != "GET") {
    transfer.set(CURLOPT_CUSTOMREQUEST, asked.method.c_str());
  }
  if (curl_.multi_add(multi_, transfer.easy) != CURLM_OK) throw std::bad_alloc();
}

void Http::finish(Transfer& transfer, CURLcode code) {
  Exchange& exchange = *transfer.exchange;
  switch (code) {
    case CURLE_OK: exchange.end = exchange.status > 0 ? Exchange::End::kReplied : Exchange::End::kFailed; break;
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_ISSUER_ERROR: exchange.end = Exchange::End::kUntrusted; break;
    default: exchange.end = transfer.stopped ? Exchange::End::kStopped : Exchange::End::kFailed;
  }
  if (exchange.end != Exchange::End::kReplied && !transfer.stopped) {
    exchange.error = transfer.error[0] != '\0' ? transfer.error.data() : curl_.easy_strerror(code);
    doubtful_ = true;
  }
  stop(transfer);
}

void Http::stop(Transfer& transfer) {
  curl_.multi_remove(multi_, transfer.easy);
  const std::unique_ptr<Exchange> exchange = std::move(transfer.exchange);
  const auto at =
      std::find_if(running_.begin(), running_.end(), [&](const auto& one) { return one.get() == &transfer; });
  idle_.push_back(std::move(*at));
  *at = std::move(running_.back());
  running_.pop_back();
  if (exchange->ended) exchange->ended(*exchange);
}

void Http::run(Clock::time_point deadline) {
  const NoSigpipe guard;
  while (!waiting_.empty() || !running_.empty()) {
    if (Clock::now() >= deadline) {
      while (!running_.empty()) {
        doubtful_ = true;
        stop(*running_.back());
      }
      while (!waiting_.empty()) {
        const std::unique_ptr<Exchange> exchange = std::move(waiting_.front());
        waiting_.pop_front();
        if (exchange->ended) exchange->ended(*exchange);
      }
      continue;  // what was added meanwhile
    }
    while (!waiting_.empty() && running_.size() < options_.connections) {
      std::unique_ptr<Exchange> exchange = std::move(waiting_.front());
      waiting_.pop_front();
      start(std::move(exchange));
    }
    int left = 0;
    if (curl_.multi_perform(multi_, &left) != CURLM_OK) throw std::bad_alloc();
    bool any = false;
    while (const CURLMsg* message = curl_.multi_info_read(multi_, &left)) {
      if (message->msg != CURLMSG_DONE) continue;
      Transfer* transfer = nullptr;
      curl_.easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &transfer);
      finish(*transfer, message->data.result);
      any = true;
    }
    if (any) continue;
    const auto time = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    curl_.multi_poll(multi_, nullptr, 0, static_cast<int>(std::clamp<std::int64_t>(time, 0, 1000)), nullptr);
  }
}

}  // namespace kvstride::store
