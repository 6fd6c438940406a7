// SPDX-License-Identifier: Apache-2.0
// Objects in a bucket, by the S3 protocol: one request for an object or a range of it, several for a large one.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <optional>
#include <utility>

#include "kvstride/error.h"
#include "store/remote/engine.h"
#include "store/remote/http.h"
#include "store/remote/s3_settings.h"
#include "store/remote/sign.h"
#include "store/remote/xml.h"

namespace kvstride::store {
namespace {

using namespace std::chrono_literals;
using Query = std::map<std::string, std::string>;
using End = Exchange::End;

constexpr std::int64_t kMaxParts = 10'000;
constexpr std::int64_t kMaxObject = std::int64_t{5} << 40;
constexpr auto kAbortTime = 500ms;      // beyond the deadline, for what was begun and must not stay
constexpr auto kReadAgain = 1s;         // least time between two looks at the credentials' files
constexpr std::int64_t kMaxSkew = 240;  // seconds; servers refuse from 900 on

/// What a reply other than 2xx means; nothing: whether it helps to sign again must be looked at.
std::optional<Answer> meaning(int status, std::string_view code) {
  constexpr struct {
    std::string_view code;
    Answer answer;
  } kCodes[] = {{"NoSuchBucket", Answer::kDenied},     {"QuotaExceeded", Answer::kFull},
                {"StorageFull", Answer::kFull},        {"XMinioStorageFull", Answer::kFull},
                {"EntityTooLarge", Answer::kTooLarge}, {"RequestTimeout", Answer::kBroken},
                {"InternalError", Answer::kBroken},    {"SlowDown", Answer::kBroken},
                {"NoSuchUpload", Answer::kBroken},     {"InvalidPart", Answer::kBroken}};
  for (const auto& one : kCodes) {
    if (one.code == code) return one.answer;
  }
  switch (status) {
    case 404: return Answer::kAbsent;
    case 413: return Answer::kTooLarge;
    case 507: return Answer::kFull;
    case 400:
    case 401:
    case 403: return std::nullopt;
    case 408:
    case 409:
    case 425:
    case 429: return Answer::kBroken;
    default: return status >= 500 && status != 501 ? Answer::kBroken : Answer::kDenied;
  }
}

/// Printable ASCII, not too much of it: a server's words.
std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 200)) out += c >= 0x20 && c < 0x7F ? c : '?';
  return out;
}

/// Names that can be ours.
bool is_name(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '/';
  });
}

/// `2009-10-12T17:50:30.000Z` in seconds since 1970; 0: it is none.
std::int64_t time_of(const std::string& text) {
  std::tm parts{};
  const char* end = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &parts);
  return end != nullptr ? static_cast<std::int64_t>(::timegm(&parts)) : 0;
}

/// Runs of bytes of one object, one request.
struct Piece {
  ReadItem* item;
  Bytes range;
  std::int64_t at = -1;  ///< of the object: what comes next; -1: nothing has come

  static std::int64_t whole(const Exchange& e) { return e.status == 206 ? e.range_whole : e.length; }
  /// A server may send the whole object instead of a range of it, but no other range.
  bool fits(const Exchange& e) const { return e.status == 200 || e.range_begin == range.begin; }

  /// Writes nothing but the range, whatever comes.
  bool take(const Exchange& e, std::span<const std::byte> data) {
    if (!fits(e) || (whole(e) >= 0 && whole(e) != item->bytes)) return false;
    if (at < 0) at = e.status == 206 ? range.begin : 0;
    const auto bytes = static_cast<std::int64_t>(data.size());
    const std::int64_t begin = std::max(at, range.begin);
    const std::int64_t end = std::min(at + bytes, range.end);
    if (begin < end) std::memcpy(item->into + begin, data.data() + (begin - at), static_cast<std::size_t>(end - begin));
    at += bytes;
    return at <= range.end;
  }
  /// Of a reply with 200 or 206: what came, and `found`.
  Answer answer(const Exchange& e, std::int64_t& found) const {
    if (!fits(e)) return Answer::kBroken;
    found = whole(e);
    if (found >= 0 && found != item->bytes) return Answer::kOk;
    if (at < range.end || (at > range.end && range.end == item->bytes)) return Answer::kBroken;
    return Answer::kOk;
  }
};

/// A read of one item: its pieces, and what is known of it so far.
struct Reading {
  std::size_t left = 0;
  Answer answer = Answer::kOk;
  std::int64_t found = -1;

  void add(Answer of_piece, std::int64_t whole) {
    if (answer != Answer::kOk) return;
    if (of_piece == Answer::kOk && whole >= 0 && found >= 0 && whole != found) of_piece = Answer::kBroken;
    answer = of_piece;
    found = std::max(found, whole);
  }
};

/// A write in parts.
struct Upload {
  std::string key;
  std::string id;
  std::vector<std::string> tags;  ///< of each part
  std::size_t left = 0;
  Answer answer = Answer::kOk;
  std::string list;  ///< of the parts, as the last request has it
};

class S3Engine final : public Engine {
 public:
  S3Engine(S3Settings settings, AwsConfig aws)
      : settings_(std::move(settings)), aws_(std::move(aws)), process_(new Process(aws_.credentials())) {}
  ~S3Engine() override {
    // A forked child shares the connections with its parent, who would see them closed.
    if (Process* process = process_.load(); process->owner == ::getpid()) delete process;
  }
  S3Engine(const S3Engine&) = delete;
  S3Engine& operator=(const S3Engine&) = delete;

  const char* kind() const override { return "s3"; }
  std::string detail() const override {
    return fmt::format("s3://{}/{} at {} ({}, {} style)", settings_.bucket, settings_.prefix, settings_.endpoint,
                       settings_.region, settings_.path_style ? "path" : "host");
  }
  std::string trouble() const override {
    Process& mine = process();
    const std::lock_guard lock(mine.mutex);
    return mine.trouble;
  }
  std::int64_t largest() const override { return std::min(kMaxObject, kMaxParts * settings_.part_bytes); }
  bool reads_ranges() const override { return true; }
  int num_threads() const override { return settings_.threads; }
  std::size_t batch() const override { return settings_.connections; }
  std::size_t names_a_trip() const override { return settings_.connections; }

  void find(std::span<FindItem> items, Clock::time_point deadline) override {
    Call call(*this);
    for (FindItem& item : items) {
      auto exchange = call.request("HEAD", key_of(item.name));
      exchange->ended = [&](const Exchange& e) {
        item.answer = call.answer(e);
        if (item.answer == Answer::kOk) item.bytes = e.length;
      };
      call.http->add(std::move(exchange));
    }
    call.run(deadline);
  }

  void read(std::span<ReadItem> items, Clock::time_point deadline, const Done& done) override {
    Call call(*this);
    std::vector<Reading> readings(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      ReadItem& item = items[i];
      std::vector<Bytes> pieces;
      for (Bytes range : item.ranges) {
        for (; range.begin < range.end; range.begin += settings_.part_bytes) {
          pieces.push_back({range.begin, std::min(range.end, range.begin + settings_.part_bytes)});
        }
      }
      Reading& reading = readings[i];
      reading.left = pieces.size();
      for (const Bytes& range : pieces) {
        const bool whole = range.begin == 0 && range.end == item.bytes;
        auto exchange = call.request("GET", key_of(item.name));
        if (!whole) exchange->headers["range"] = fmt::format("bytes={}-{}", range.begin, range.end - 1);
        const auto piece = std::make_shared<Piece>(Piece{&item, range});
        exchange->prepare = [&, sign = std::move(exchange->prepare)](Exchange& e) {
          return reading.answer == Answer::kOk && sign(e);
        };
        exchange->take = [piece](const Exchange& e, std::span<const std::byte> data) { return piece->take(e, data); };
        exchange->ended = [&, i, piece](const Exchange& e) {
          std::int64_t found = -1;
          const Answer answer = call.answer_of_piece(e, *piece, found);
          reading.add(answer, found);
          if (--reading.left > 0) return;
          items[i].answer = reading.answer;
          items[i].found = reading.found;
          done(i);
        };
        call.http->add(std::move(exchange));
      }
      if (pieces.empty()) {  // nothing is asked for
        item.answer = Answer::kOk;
        done(i);
      }
    }
    call.run(deadline);
  }

  void write(std::span<WriteItem> items, Clock::time_point deadline, const Done& done) override {
    Call call(*this);
    std::vector<Upload> uploads(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      uploads[i].key = key_of(items[i].name);
      const auto ended = [&items, &done, i](Answer answer) {
        // A bucket, a path: whatever is not there, an object cannot be written.
        items[i].answer = answer == Answer::kAbsent ? Answer::kDenied : answer;
        done(i);
      };
      if (items[i].data.size() > static_cast<std::size_t>(settings_.part_bytes)) {
        call.upload(uploads[i], items[i].data, ended);
        continue;
      }
      auto exchange = call.request("PUT", uploads[i].key);
      exchange->body = items[i].data;
      exchange->ended = [&call, ended](const Exchange& e) { ended(call.answer(e)); };
      call.http->add(std::move(exchange));
    }
    call.run(deadline);
    for (const Upload& upload : uploads) {
      if (upload.answer == Answer::kOk || upload.id.empty()) continue;
      call.http->add(call.request("DELETE", upload.key, {{"uploadId", upload.id}}));
    }
    call.run(Clock::now() + kAbortTime);
  }

  void remove(std::span<RemoveItem> items, Clock::time_point deadline) override {
    Call call(*this);
    for (RemoveItem& item : items) {
      auto exchange = call.request("DELETE", key_of(item.name));
      exchange->ended = [&](const Exchange& e) {
        item.answer = call.answer(e);
        if (item.answer == Answer::kAbsent) item.answer = Answer::kOk;
      };
      call.http->add(std::move(exchange));
    }
    call.run(deadline);
  }

  Answer list(const std::string& folder, Clock::time_point deadline,
              const std::function<bool(const ListedObject&)>& use) override {
    Call call(*this);
    Query query{{"list-type", "2"}, {"delimiter", "/"}, {"prefix", settings_.prefix + folder}};
    for (;;) {
      Answer answer = Answer::kLate;
      bool more = false;
      auto exchange = call.request("GET", "", query);
      exchange->ended = [&](const Exchange& e) {
        answer = call.answer(e);
        if (answer == Answer::kOk && !read_page(e.text, folder, use, more, query["continuation-token"])) {
          answer = call.broken("the listing is not what S3 sends");
        }
        if (answer == Answer::kAbsent) answer = Answer::kDenied;  // not of a bucket
      };
      call.http->add(std::move(exchange));
      call.run(deadline);
      if (answer != Answer::kOk || !more) return answer;
    }
  }

 private:
  /// What a process has: a forked child makes its own.
  struct Process {
    explicit Process(AwsCredentials now) : credentials(std::move(now)) {}
    const pid_t owner = ::getpid();
    std::mutex mutex;  ///< of all below; held for no longer than it takes to read two small files
    std::vector<std::unique_ptr<Http>> idle;
    AwsCredentials credentials;
    std::int64_t ahead = 0;     ///< seconds that the server's clock is before ours
    std::uint64_t version = 1;  ///< of these two
    Clock::time_point read_at;  ///< the credentials
    std::string trouble;
  };

  /// One call of the engine, on one thread.
  struct Call {
    S3Engine& engine;
    Process& mine;
    std::unique_ptr<Http> http;

    explicit Call(S3Engine& of) : engine(of), mine(of.process()) {
      {
        const std::lock_guard lock(mine.mutex);
        if (!mine.idle.empty()) {
          http = std::move(mine.idle.back());
          mine.idle.pop_back();
        }
      }
      if (!http) http = std::make_unique<Http>(Http::Options{engine.settings_.connections, engine.settings_.ca});
    }
    ~Call() {
      if (!reusable_ || http->doubtful()) return;
      const std::lock_guard lock(mine.mutex);
      mine.idle.push_back(std::move(http));
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    void run(Clock::time_point deadline) {
      reusable_ = false;
      http->run(deadline);
      reusable_ = true;
    }

    std::unique_ptr<Exchange> request(const char* method, const std::string& key, Query query = {}) {
      auto out = std::make_unique<Exchange>();
      const S3Settings& to = engine.settings_;
      std::string path = to.path() + percent_encoded(key, true);
      if (key.empty() && to.path_style) path.pop_back();  // the bucket itself
      out->method = method;
      out->url = fmt::format("{}://{}{}", to.scheme(), to.host(), path);
      if (!query.empty()) out->url += "?" + query_text(query);
      out->prepare = [this, path = std::move(path), query = std::move(query)](Exchange& e) {
        engine.sign(mine, e, path, query);
        return true;
      };
      return out;
    }

    void note(std::string trouble) {
      const std::lock_guard lock(mine.mutex);
      mine.trouble = std::move(trouble);
    }
    Answer broken(std::string trouble) {
      note(std::move(trouble));
      return Answer::kBroken;
    }

    Answer answer(const Exchange& e) {
      if (e.end == End::kLate || e.end == End::kStopped) return Answer::kLate;
      if (e.end != End::kReplied) {
        note(fmt::format("{} {}: {}", e.method, engine.settings_.endpoint, printable(e.error)));
        return e.end == End::kUntrusted ? Answer::kDenied : Answer::kBroken;
      }
      if (e.status >= 200 && e.status < 300) return Answer::kOk;
      return refusal(e, e.status, xml_text(e.text, "Code"));
    }

    Answer refusal(const Exchange& e, int status, const std::string& code) {
      const std::optional<Answer> known = meaning(status, code);
      if (known != Answer::kAbsent) {
        note(fmt::format("{} s3://{} at {}: {} {}: {}", e.method, engine.settings_.bucket, engine.settings_.endpoint,
                         status, printable(code), printable(xml_text(e.text, "Message"))));
      }
      return known ? *known : engine.refused(mine, e) ? Answer::kBroken : Answer::kDenied;
    }

    Answer answer_of_piece(const Exchange& e, const Piece& piece, std::int64_t& found) {
      if (e.status == 200 || e.status == 206) {
        if (e.end == End::kReplied || e.end == End::kStopped) {
          const Answer out = piece.answer(e, found);
          return out == Answer::kOk ? out : broken("GET: the reply is not the range that was asked for");
        }
      } else if (e.end == End::kReplied && e.status == 416) {
        found = e.range_whole >= 0 ? e.range_whole : std::atoll(xml_text(e.text, "ActualObjectSize").c_str());
        if (found > 0 && found != piece.item->bytes) return Answer::kOk;
        found = -1;
        return broken("GET: the server has no such range, and does not say how long the object is");
      }
      const Answer out = answer(e);
      return out == Answer::kOk ? broken(fmt::format("GET: a reply with status {}", e.status)) : out;
    }

    /// Of data larger than a part. `upload`, `data` stay until `ended`.
    void upload(Upload& upload, std::span<const std::byte> data, std::function<void(Answer)> ended) {
      auto begin = request("POST", upload.key, {{"uploads", ""}});
      begin->ended = [this, &upload, data, ended = std::move(ended)](const Exchange& e) {
        upload.answer = answer(e);
        upload.id = upload.answer == Answer::kOk ? xml_text(e.text, "UploadId") : "";
        if (upload.answer == Answer::kOk && upload.id.empty()) upload.answer = broken("POST: no UploadId in the reply");
        if (upload.answer != Answer::kOk) return ended(upload.answer);
        send_parts(upload, data, ended);
      };
      http->add(std::move(begin));
    }

    void send_parts(Upload& upload, std::span<const std::byte> data, const std::function<void(Answer)>& ended) {
      const auto part_bytes = static_cast<std::size_t>(engine.settings_.part_bytes);
      upload.left = (data.size() + part_bytes - 1) / part_bytes;
      upload.tags.resize(upload.left);
      for (std::size_t i = 0; i < upload.tags.size(); ++i) {
        auto part = request("PUT", upload.key, {{"partNumber", std::to_string(i + 1)}, {"uploadId", upload.id}});
        part->body = data.subspan(i * part_bytes, std::min(part_bytes, data.size() - i * part_bytes));
        part->prepare = [&upload, sign = std::move(part->prepare)](Exchange& e) {
          return upload.answer == Answer::kOk && sign(e);
        };
        part->ended = [this, &upload, i, ended](const Exchange& e) {
          upload.tags[i] = e.etag;
          if (upload.answer == Answer::kOk) upload.answer = answer(e);
          if (upload.answer == Answer::kOk && e.etag.empty()) upload.answer = broken("PUT: no ETag in the reply");
          if (--upload.left > 0) return;
          if (upload.answer != Answer::kOk) return ended(upload.answer);
          complete(upload, ended);
        };
        http->add(std::move(part));
      }
    }

    void complete(Upload& upload, const std::function<void(Answer)>& ended) {
      upload.list = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
      for (std::size_t i = 0; i < upload.tags.size(); ++i) {
        upload.list +=
            fmt::format("<Part><PartNumber>{}</PartNumber><ETag>{}</ETag></Part>", i + 1, xml_escaped(upload.tags[i]));
      }
      upload.list += "</CompleteMultipartUpload>";
      auto last = request("POST", upload.key, {{"uploadId", upload.id}});
      last->body = std::as_bytes(std::span(upload.list));
      last->headers["content-type"] = "application/xml";
      last->ended = [this, &upload, ended](const Exchange& e) {
        upload.answer = answer(e);
        // 200 is sent before the work is done: what became of it is in the body.
        if (upload.answer == Answer::kOk && xml_text(e.text, "ETag").empty()) {
          upload.answer = refusal(e, 500, xml_text(e.text, "Code"));
        }
        ended(upload.answer);
      };
      http->add(std::move(last));
    }

   private:
    bool reusable_ = false;
  };

  std::string key_of(const std::string& name) const { return settings_.prefix + name; }

  Process& process() const {
    Process* now = process_.load();
    if (now->owner == ::getpid()) return *now;
    // Its lock may be held by a thread that is not here, its connections are the parent's: left alone for good.
    auto own = std::make_unique<Process>(AwsCredentials{});
    try {
      own->credentials = aws_.credentials();
    } catch (const Error&) {  // found again once a request is refused
    }
    if (process_.compare_exchange_strong(now, own.get())) return *own.release();
    return *now;
  }

  void sign(Process& mine, Exchange& e, const std::string& path, const Query& query) const {
    Unsigned request{e.method, settings_.host(), path, query, e.headers, e.body.empty() ? kEmptyHash : kUnsignedBody};
    AwsCredentials credentials;
    std::int64_t ahead = 0;
    {
      const std::lock_guard lock(mine.mutex);
      credentials = mine.credentials;
      ahead = mine.ahead;
      e.signed_with = mine.version;
    }
    e.headers = signed_headers(request, credentials, settings_.region, std::time(nullptr) + ahead);
  }

  /// After a refusal: are there other credentials now, or is the server's clock another? Then the next request is
  /// signed with them, and may be heard.
  bool refused(Process& mine, const Exchange& e) const {
    const std::lock_guard lock(mine.mutex);
    if (e.signed_with != mine.version) return true;
    if (const auto theirs = static_cast<std::int64_t>(Curl::get().getdate(e.date.c_str(), nullptr)); theirs > 0) {
      const std::int64_t ahead = theirs - std::time(nullptr);
      if (std::abs(ahead - mine.ahead) > kMaxSkew) {
        mine.ahead = ahead;
        ++mine.version;
      }
    }
    if (const auto now = Clock::now(); now - mine.read_at > kReadAgain) {
      mine.read_at = now;
      try {
        if (AwsCredentials fresh = aws_.credentials(); fresh != mine.credentials) {
          mine.credentials = std::move(fresh);
          ++mine.version;
        }
      } catch (const Error&) {  // half written, or gone: the old ones stay
      }
    }
    return e.signed_with != mine.version;
  }

  /// False: it is no listing. `more`, with the `token` to ask for it.
  bool read_page(const std::string& text, const std::string& folder,
                 const std::function<bool(const ListedObject&)>& use, bool& more, std::string& token) const {
    ListedObject one;
    bool wanted = true;
    bool is_list = false;
    token.clear();
    const bool right = scan_xml(text, [&](std::span<const std::string_view> path, const std::string& inside) {
      is_list = path[0] == "ListBucketResult";
      if (!is_list) return false;
      if (path.size() == 2) {
        if (path[1] == "IsTruncated") more = inside == "true";
        if (path[1] == "NextContinuationToken") token = inside;
        if (path[1] != "Contents" && path[1] != "CommonPrefixes") return true;
        ListedObject listed = std::exchange(one, {});
        // Others may have put what they like into the bucket.
        if (listed.name.compare(0, settings_.prefix.size(), settings_.prefix) != 0) return true;
        listed.name.erase(0, settings_.prefix.size());
        const bool below = listed.name.size() > folder.size() && listed.name.compare(0, folder.size(), folder) == 0;
        if (below && is_name(listed.name)) wanted = use(listed);
        return wanted;
      }
      if (path.size() != 3) return true;
      if (path[2] == "Key" || path[2] == "Prefix") one.name = inside;
      if (path[2] == "Size") one.bytes = std::max<std::int64_t>(std::atoll(inside.c_str()), 0);
      if (path[2] == "LastModified") one.modified = time_of(inside);
      return true;
    });
    more = more && wanted;
    return right && is_list && (!more || !token.empty());
  }

  S3Settings settings_;
  AwsConfig aws_;
  mutable std::atomic<Process*> process_;
};

}  // namespace

EnginePtr s3_engine(const Url& url) {
  Curl::get();
  signed_headers({}, {}, "", 0);  // what libcurl or libcrypto lack is said here, not by a request
  AwsConfig aws(s3_profile(url));
  S3Settings settings = s3_settings(url, aws);
  return std::make_shared<S3Engine>(std::move(settings), std::move(aws));
}

}  // namespace kvstride::store
