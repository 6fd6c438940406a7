// SPDX-License-Identifier: Apache-2.0
// Redis and Valkey, one server or a cluster: an object is a string.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <unordered_set>

#include "kvstride/error.h"
#include "store/remote/engine.h"
#include "store/remote/redis_client.h"

namespace kvstride::store {
namespace {

using redis::Client;
using redis::command;
using redis::Expect;
using redis::Request;

constexpr std::int64_t kLargest = 512 << 20;  // proto-max-bulk-len, unless somebody changed it
/// Of a request or a reply without its payload.
constexpr std::int64_t kSmall = 400;
/// Names that a listing keeps in mind, so that none is told twice.
constexpr std::size_t kMostListed = 1 << 20;
constexpr std::string_view kScanned = "1000";

struct Options {
  std::string prefix = "kvstride:";
  std::int64_t ttl_seconds = 0;  ///< 0: for ever
  std::int64_t largest = kLargest;
};

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kArgument, "URL of a store: " + why); }

std::int64_t whole(const char* name, const std::string& text, std::int64_t least, std::int64_t most) {
  std::int64_t out = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc() || end != text.data() + text.size() || out < least || out > most) {
    refuse(fmt::format("{} is '{}', of {} to {}", name, text, least, most));
  }
  return out;
}

class RedisEngine final : public Engine {
 public:
  RedisEngine(redis::Settings settings, Options options)
      : detail_(fmt::format("redis://{}:{}/{} {}*", settings.seed.host, settings.seed.port, settings.database,
                            options.prefix)),
        num_threads_(static_cast<int>(settings.num_connections)),
        options_(std::move(options)),
        client_(std::move(settings)) {}

  const char* kind() const override { return "redis"; }
  std::string detail() const override { return detail_; }
  std::string trouble() const override { return client_.trouble(); }
  std::int64_t largest() const override { return options_.largest; }
  bool reads_ranges() const override { return true; }
  int num_threads() const override { return num_threads_; }
  std::size_t batch() const override { return 32; }
  std::size_t names_a_trip() const override { return 4096; }

  void find(std::span<FindItem> items, Clock::time_point deadline) override {
    std::vector<Request> requests;
    requests.reserve(items.size());
    for (const FindItem& item : items) requests.push_back(of_key("STRLEN", item.name, Expect::kInteger));
    client_.run(requests, deadline, [&](std::size_t i) {
      items[i].answer = requests[i].answer;
      if (items[i].answer != Answer::kOk) return;
      const long long length = requests[i].reply.value->integer;
      items[i].answer = length > 0 ? Answer::kOk : length == 0 ? Answer::kAbsent : Answer::kBroken;
      if (length > 0) items[i].bytes = length;
    });
  }

  void read(std::span<ReadItem> items, Clock::time_point deadline, const Done& done) override {
    std::vector<Request> requests;
    std::vector<std::size_t> item_of, left(items.size()), first(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      first[i] = requests.size();
      ask_for(items[i], requests);
      left[i] = requests.size() - first[i];
      item_of.resize(requests.size(), i);
    }
    client_.run(requests, deadline, [&](std::size_t r) {
      const std::size_t i = item_of[r];
      if (--left[i] > 0) return;
      const std::size_t end = i + 1 < items.size() ? first[i + 1] : requests.size();
      judge(items[i], std::span(requests).subspan(first[i], end - first[i]));
      done(i);
    });
  }

  void write(std::span<WriteItem> items, Clock::time_point deadline, const Done& done) override {
    std::vector<Request> requests;
    std::vector<std::size_t> item_of;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (static_cast<std::int64_t>(items[i].data.size()) > options_.largest) {
        items[i].answer = Answer::kTooLarge;
        done(i);
        continue;
      }
      requests.push_back(to_set(items[i]));
      item_of.push_back(i);
    }
    client_.run(requests, deadline, [&](std::size_t r) {
      WriteItem& item = items[item_of[r]];
      item.answer = requests[r].answer;
      if (item.answer == Answer::kOk && requests[r].reply.type() == REDIS_REPLY_NIL) item.answer = Answer::kThere;
      done(item_of[r]);
    });
  }

  void remove(std::span<RemoveItem> items, Clock::time_point deadline) override {
    std::vector<Request> requests;
    requests.reserve(items.size());
    for (const RemoveItem& item : items) requests.push_back(of_key("UNLINK", item.name, Expect::kInteger));
    client_.run(requests, deadline, [&](std::size_t i) { items[i].answer = requests[i].answer; });
  }

  Answer list(const std::string& folder, Clock::time_point deadline,
              const std::function<bool(const ListedObject&)>& use) override {
    struct Walk {
      redis::Node node;
      std::string cursor = "0";
    };
    Answer why = Answer::kLate;
    std::vector<Walk> walks;
    for (const redis::Node& node : client_.masters(deadline, why)) walks.push_back({node});
    if (walks.empty()) return why;
    std::string pattern;
    for (const char c : options_.prefix + folder) {
      if (std::string_view("*?[]\\").find(c) != std::string_view::npos) pattern += '\\';
      pattern += c;
    }
    pattern += '*';
    std::unordered_set<std::string> told;
    bool goes_on = true;
    while (!walks.empty()) {  // a page of each node that has more
      std::vector<Request> pages(walks.size());
      for (std::size_t i = 0; i < walks.size(); ++i) {
        pages[i].text = command({"SCAN", walks[i].cursor, "MATCH", pattern, "COUNT", kScanned});
        pages[i].expect = Expect::kArray;
        pages[i].node = walks[i].node;
      }
      client_.run(pages, deadline, [](std::size_t) {});
      std::vector<FindItem> objects;
      for (std::size_t i = 0; i < walks.size(); ++i) {
        if (pages[i].answer != Answer::kOk) return pages[i].answer;
        if (!take_page(*pages[i].reply.value, walks[i].cursor, folder, told, objects, use, goes_on)) {
          return Answer::kBroken;
        }
        if (!goes_on) return Answer::kOk;
      }
      find(objects, deadline);
      for (const FindItem& item : objects) {
        if (item.answer == Answer::kAbsent) continue;
        if (item.answer != Answer::kOk) return item.answer;
        if (!use({item.name, item.bytes, 0})) return Answer::kOk;
      }
      std::erase_if(walks, [](const Walk& walk) { return walk.cursor == "0"; });
    }
    return Answer::kOk;
  }

 private:
  std::string key(const std::string& name) const { return options_.prefix + name; }

  Request of_key(const char* verb, const std::string& name, Expect expect) const {
    Request out;
    out.text = command({verb, key(name)});
    out.expect = expect;
    out.bytes = kSmall;
    out.slot = redis::slot_of(key(name));
    return out;
  }

  /// GET for all of it; else STRLEN, and GETRANGE for each range.
  void ask_for(const ReadItem& item, std::vector<Request>& requests) const {
    const auto part = [&](std::int64_t begin, std::int64_t end) {
      Request& request = requests.back();
      request.into = {item.into + begin, static_cast<std::size_t>(end - begin)};
      request.bytes += end - begin;
    };
    if (item.ranges.size() == 1 && item.ranges[0].begin == 0 && item.ranges[0].end == item.bytes) {
      requests.push_back(of_key("GET", item.name, Expect::kString));
      return part(0, item.bytes);
    }
    requests.push_back(of_key("STRLEN", item.name, Expect::kInteger));
    for (const Bytes& range : item.ranges) {
      requests.push_back(of_key("GET", item.name, Expect::kString));
      const std::string last = std::to_string(range.end - 1);
      requests.back().text = command({"GETRANGE", key(item.name), std::to_string(range.begin), last});
      part(range.begin, range.end);
    }
  }

  static void judge(ReadItem& item, std::span<const Request> requests) {
    item.answer = Answer::kOk;
    for (const Request& request : requests) {
      if (request.answer != Answer::kOk) {
        item.answer = request.answer;
        return;
      }
    }
    const auto& front = requests.front();
    const bool nil = front.reply.type() == REDIS_REPLY_NIL;
    item.found = nil ? 0 : front.expect == Expect::kInteger ? front.reply.value->integer : front.reply.bytes;
    if (item.found <= 0) {
      item.answer = item.found == 0 ? Answer::kAbsent : Answer::kBroken;
      item.found = -1;
      return;
    }
    if (item.found != item.bytes) return;
    for (const Request& request : requests) {  // it may have gone between its length and its bytes
      const auto wanted = static_cast<std::int64_t>(request.into.size());
      if (request.expect == Expect::kString && request.reply.bytes != wanted) item.answer = Answer::kBroken;
    }
  }

  Request to_set(const WriteItem& item) const {
    const std::string milliseconds = std::to_string(options_.ttl_seconds * 1000);
    std::vector<std::string_view> words;  // behind the value
    if (!item.replace) words.push_back("NX");
    if (options_.ttl_seconds > 0) words.insert(words.end(), {"PX", milliseconds});
    Request out;
    const std::string own = key(item.name);
    out.text =
        fmt::format("*{}\r\n$3\r\nSET\r\n${}\r\n{}\r\n${}\r\n", 3 + words.size(), own.size(), own, item.data.size());
    out.payload = item.data;
    out.end = "\r\n";
    for (const std::string_view word : words) out.end += fmt::format("${}\r\n{}\r\n", word.size(), word);
    out.bytes = kSmall + static_cast<std::int64_t>(item.data.size());
    out.slot = redis::slot_of(own);
    return out;
  }

  /// One page of a node: folders go to `use`, objects to `objects`. False where it makes no sense, or there are too
  /// many to tell each once.
  bool take_page(const redisReply& page, std::string& cursor, const std::string& folder,
                 std::unordered_set<std::string>& told, std::vector<FindItem>& objects,
                 const std::function<bool(const ListedObject&)>& use, bool& goes_on) const;

  const std::string detail_;
  const int num_threads_;
  const Options options_;
  mutable Client client_;
};

bool RedisEngine::take_page(const redisReply& page, std::string& cursor, const std::string& folder,
                            std::unordered_set<std::string>& told, std::vector<FindItem>& objects,
                            const std::function<bool(const ListedObject&)>& use, bool& goes_on) const {
  if (page.elements != 2 || page.element[0]->type != REDIS_REPLY_STRING || page.element[1]->type != REDIS_REPLY_ARRAY) {
    return false;
  }
  cursor.assign(page.element[0]->str, page.element[0]->len);
  const std::string before = options_.prefix + folder;
  for (std::size_t i = 0; i < page.element[1]->elements; ++i) {
    const redisReply* one = page.element[1]->element[i];
    if (one->type != REDIS_REPLY_STRING) return false;
    const std::string_view name(one->str, one->len);
    if (!name.starts_with(before)) return false;
    const std::string_view rest = name.substr(before.size());
    const std::size_t slash = rest.find('/');
    std::string whole = folder + std::string(rest.substr(0, slash == std::string_view::npos ? slash : slash + 1));
    if (!told.insert(whole).second) continue;
    if (told.size() > kMostListed) return false;
    if (slash == std::string_view::npos) {
      objects.push_back({std::move(whole)});
    } else {
      goes_on = use({std::move(whole), -1, 0});
    }
    if (!goes_on) break;
  }
  return true;
}

}  // namespace

EnginePtr redis_engine(const Url& url) {
  if (url.scheme == "rediss") {
    refuse(
        "rediss needs hiredis with TLS (libhiredis_ssl, from 1.0 on), which this build has not; redis:// through a "
        "tunnel works");
  }
  redis::Settings settings;
  if (url.host.empty()) refuse("no host: redis://host:port/database");
  settings.seed = {url.host, url.port != 0 ? url.port : 6379};
  settings.user = url.user;
  settings.password = url.password;
  if (!url.user.empty() && url.password.empty()) refuse("a user without a password; a password alone is :password@");
  if (!url.path.empty()) settings.database = static_cast<int>(whole("the database", url.path, 0, 1 << 20));
  Options options;
  for (const auto& [name, value] : url.options) {
    if (name == "prefix") {
      if (value.size() > 200) refuse(fmt::format("prefix has {} characters, of at most 200", value.size()));
      options.prefix = value;
    } else if (name == "ttl") {
      options.ttl_seconds = whole("ttl", value, 1, 100LL * 366 * 86400);
    } else if (name == "largest") {
      options.largest = whole("largest", value, 1, kLargest);
    } else if (name == "connections") {
      settings.num_connections = static_cast<std::size_t>(whole("connections", value, 1, 64));
    } else if (name == "cluster") {
      if (value != "auto" && value != "yes" && value != "no") {
        refuse(fmt::format("cluster is '{}', expected auto, yes or no", value));
      }
      settings.cluster = value == "yes"  ? redis::Cluster::kYes
                         : value == "no" ? redis::Cluster::kNo
                                         : redis::Cluster::kAuto;
    } else {
      refuse(fmt::format("no option {}; redis has cluster, connections, largest, prefix and ttl", name));
    }
  }
  if (settings.cluster == redis::Cluster::kYes && settings.database != 0) {
    refuse("a cluster has no database but 0");
  }
  return std::make_shared<RedisEngine>(std::move(settings), std::move(options));
}

}  // namespace kvstride::store
