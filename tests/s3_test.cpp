// SPDX-License-Identifier: Apache-2.0
// The S3 engine against servers that are wrong in one way at a time.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstring>
#include <ctime>
#include <fstream>
#include <optional>

#include "child.h"
#include "http_server.h"
#include "kvstride/error.h"
#include "store/remote/engine.h"
#include "store/remote/sign.h"
#include "store/remote/xml.h"

namespace kvstride::test {
namespace {

using namespace store;
using namespace std::chrono_literals;
using Request = HttpServer::Request;
using Reply = HttpServer::Reply;

constexpr std::byte kPoison{0xA5};
constexpr std::int64_t kBytes = 4096;

/// The environment without anything of AWS but two keys; as it was, at the end.
class S3 : public testing::Test {
 protected:
  S3() {
    for (const char* name : {"AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE",
                             "AWS_REGION", "no_proxy", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
                             "AWS_CA_BUNDLE", "HOME", "http_proxy"}) {
      set(name, nullptr);
    }
    set("HOME", home_.path().c_str());
    set("AWS_ACCESS_KEY_ID", "AKID");
    set("AWS_SECRET_ACCESS_KEY", "secret");
  }
  ~S3() override {
    for (const auto& [name, value] : before_) {
      if (value) {
        ::setenv(name.c_str(), value->c_str(), 1);
      } else {
        ::unsetenv(name.c_str());
      }
    }
  }

  void set(const char* name, const char* value) {
    const char* now = std::getenv(name);
    before_.try_emplace(name, now != nullptr ? std::optional<std::string>(now) : std::nullopt);
    if (value != nullptr) {
      ::setenv(name, value, 1);
    } else {
      ::unsetenv(name);
    }
  }

  static EnginePtr engine(const HttpServer& server, const std::string& more = "") {
    return engine_of("s3://bucket/pre?endpoint=" + server.endpoint() + more);
  }
  static std::string why(const std::string& url) {
    try {
      engine_of(url);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  Directory home_;

 private:
  std::map<std::string, std::optional<std::string>> before_;
};

Clock::time_point soon() { return Clock::now() + 10s; }

std::string content(std::size_t bytes) {
  std::string out(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<char>('a' + (i * 7 + i / 251) % 26);
  return out;
}

/// Memory for one object with a margin that must stay as it is.
struct Room {
  static constexpr std::size_t kMargin = 4096;
  std::vector<std::byte> memory;

  explicit Room(std::int64_t bytes) : memory(static_cast<std::size_t>(bytes) + 2 * kMargin, kPoison) {}
  std::byte* object() { return memory.data() + kMargin; }
  /// Where a byte is no poison: of the object; -1: nowhere; -2: outside.
  std::pair<std::int64_t, std::int64_t> touched() const {
    std::int64_t first = -1;
    std::int64_t last = -1;
    for (std::size_t i = 0; i < memory.size(); ++i) {
      if (memory[i] == kPoison) continue;
      const auto at = static_cast<std::int64_t>(i) - static_cast<std::int64_t>(kMargin);
      if (first == -1) first = at;
      last = at;
    }
    return {first, last + 1};
  }
};

/// A read of one object, `ranges` of it.
ReadItem read(Engine& engine, Room& room, std::vector<Bytes> ranges = {{0, kBytes}}, Clock::duration time = 10s) {
  std::vector<ReadItem> items{{"x/1", std::move(ranges), room.object(), kBytes}};
  int calls = 0;
  engine.read(items, Clock::now() + time, [&](std::size_t i) { calls += i == 0 ? 1 : 100; });
  EXPECT_EQ(calls, 1);
  return items[0];
}

Answer write(Engine& engine, const std::string& data, Clock::duration time = 10s) {
  std::vector<WriteItem> items{{"x/1", std::as_bytes(std::span(data))}};
  int calls = 0;
  engine.write(items, Clock::now() + time, [&](std::size_t i) { calls += i == 0 ? 1 : 100; });
  EXPECT_EQ(calls, 1);
  return items[0].answer;
}

FindItem find(Engine& engine) {
  std::vector<FindItem> items{{"x/1"}};
  engine.find(items, soon());
  return items[0];
}

// What AWS publishes ("Signature Calculations for the Authorization Header", Amazon S3 API reference).
TEST(S3Sign, GivesTheSignaturesThatAwsPublishes) {
  const AwsCredentials who{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};
  constexpr std::int64_t kThen = 1369353600;  // 2013-05-24
  const auto signature = [&](const Unsigned& request) {
    const std::string line = signed_headers(request, who, "us-east-1", kThen).at("authorization");
    return line.substr(line.find("SignedHeaders="));
  };
  const std::string host = "examplebucket.s3.amazonaws.com";
  EXPECT_EQ(signature({"GET", host, "/test.txt", {}, {{"range", "bytes=0-9"}}, kEmptyHash}),
            "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
            "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
  EXPECT_EQ(signature({"PUT",
                       host,
                       "/" + percent_encoded("test$file.text", true),
                       {},
                       {{"date", "Fri, 24 May 2013 00:00:00 GMT"}, {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
                       "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"}),
            "SignedHeaders=date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class, "
            "Signature=98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
  EXPECT_EQ(signature({"GET", host, "/", {{"lifecycle", ""}}, {}, kEmptyHash}),
            "SignedHeaders=host;x-amz-content-sha256;x-amz-date, "
            "Signature=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
  EXPECT_EQ(signature({"GET", host, "/", {{"max-keys", "2"}, {"prefix", "J"}}, {}, kEmptyHash}),
            "SignedHeaders=host;x-amz-content-sha256;x-amz-date, "
            "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

TEST(S3Sign, SignsTheTokenOfASession) {
  const auto headers = signed_headers({"GET", "h", "/"}, {"id", "secret", "token"}, "r", 0);
  EXPECT_EQ(headers.at("x-amz-security-token"), "token");
  EXPECT_EQ(headers.at("x-amz-date"), "19700101T000000Z");
  EXPECT_EQ(headers.at("x-amz-content-sha256"), "UNSIGNED-PAYLOAD");
  EXPECT_NE(headers.at("authorization").find("host;x-amz-content-sha256;x-amz-date;x-amz-security-token,"),
            std::string::npos);
  EXPECT_EQ(headers.count("host"), 0U);
}

TEST(S3Xml, TakesWhatServersSendAndNothingElse) {
  const auto is_xml = [](const std::string& text) {
    return scan_xml(text, [](std::span<const std::string_view>, const std::string&) { return true; });
  };
  for (const char* right : {"<a/>", "<a></a>", " <?xml version=\"1.0\"?>\n<a>x<b/>y</a>\n", "<s:a s:x='1' y=\"2\" />",
                            "<a>&lt;&#65;&#x42;&amp;</a>"}) {
    EXPECT_TRUE(is_xml(right)) << right;
  }
  for (const char* wrong : {"",
                            "a",
                            "<a>",
                            "<a></b>",
                            "<a/><a/>",
                            "<a>&x;</a>",
                            "<a>&#0;</a>",
                            "<a>&#xD800;</a>",
                            "<a x>",
                            "<a x='<'/>",
                            "<!DOCTYPE a><a/>",
                            "<a><!-- c --></a>",
                            "<a><![CDATA[x]]></a>",
                            "<a>&lt</a>",
                            "<a/>x",
                            "</a>",
                            "<a",
                            "<a x='1'y='2'/>",
                            "<?xml",
                            "<>x</>",
                            "<a>&#x110000;</a>",
                            "< a/>",
                            "<a:b:c/>",
                            "<a:/>"}) {
    EXPECT_FALSE(is_xml(wrong)) << wrong;
  }
  std::string deep;
  for (int i = 0; i < 17; ++i) deep += "<a>";
  for (int i = 0; i < 17; ++i) deep += "</a>";
  EXPECT_FALSE(is_xml(deep));
  EXPECT_TRUE(is_xml(deep.substr(3, deep.size() - 7)));
  EXPECT_EQ(xml_text("<Error><Code>A&amp;B</Code><Message>&#xe9;</Message></Error>", "Message"), "\xC3\xA9");
  EXPECT_EQ(xml_text("<Error><Code>A&amp;B</Code><Mess", "Code"), "A&B");
  EXPECT_EQ(xml_text("<html><body>502", "Code"), "");
}

TEST_F(S3, SaysWhatIsWrongWithAUrl) {
  EXPECT_EQ(why("s3://bucket/p?conections=3"),
            "s3: there is no option conections; there are ca, connections, endpoint, part_bytes, path_style, profile, "
            "region, threads");
  EXPECT_EQ(why("s3://bucket/p?connections=0"), "s3: connections is '0', expected a whole number from 1 to 1024");
  EXPECT_EQ(why("s3://bucket/p?part_bytes=8m"),
            "s3: part_bytes is '8m', expected a whole number from 5242880 to 5368709120");
  EXPECT_EQ(why("s3://bucket/p?path_style=1"), "s3: path_style is '1', expected true or false");
  EXPECT_EQ(why("s3://bucket/p?region="), "s3: the option region is empty");
  EXPECT_EQ(why("s3:///p"), "s3: the bucket is '', expected a name of letters, digits, '-', '.' and '_'");
  EXPECT_EQ(why("s3://bucket:9000/p"),
            "s3: the URL is s3://bucket/prefix; a server goes into endpoint=http://host:port");
  EXPECT_EQ(why("s3://bucket/a/../b"), "s3: the prefix 'a/../b' has a part that is empty or of dots");
  EXPECT_EQ(why("s3://bucket/p?ca=/nowhere"), "s3: ca: the file /nowhere cannot be read");
  for (const char* endpoint :
       {"localhost:80", "ftp://h", "http://h/path", "http://u:pw%40h", "http://h%3Fx=1", "http://"}) {
    EXPECT_EQ(why(std::string("s3://bucket/p?endpoint=") + endpoint),
              "s3: the endpoint must be http://host[:port] or https://host[:port], without a path or a user");
  }
  const std::string secret = why("s3://key:geheim@bucket/p");
  EXPECT_NE(secret.find("credentials do not belong into the URL"), std::string::npos);
  EXPECT_EQ(secret.find("geheim"), std::string::npos);
  set("AWS_SECRET_ACCESS_KEY", nullptr);
  EXPECT_EQ(why("s3://bucket/p"),
            "s3: no credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not both set, and there is no "
            "aws_access_key_id with aws_secret_access_key for the profile default in " +
                home_.path() + "/.aws/credentials or " + home_.path() + "/.aws/config");
}

TEST_F(S3, FindsItsServerAsTheAwsToolsDo) {
  const auto where = [](const std::string& url) { return engine_of(url)->detail(); };
  EXPECT_EQ(where("s3://bucket/a/b/"),
            "s3://bucket/a/b/ at https://s3.us-east-1.amazonaws.com (us-east-1, host style)");
  EXPECT_EQ(where("s3://with.dots"), "s3://with.dots/ at https://s3.us-east-1.amazonaws.com (us-east-1, path style)");
  std::filesystem::create_directory(home_.path(".aws"));
  std::ofstream(home_.path(".aws/config")) << "[default]\nregion = eu-a\n[profile p]\nregion=eu-p\n"
                                              "endpoint_url = https://in.file:443\ns3 =\n  region = no\n";
  EXPECT_EQ(where("s3://b"), "s3://b/ at https://s3.eu-a.amazonaws.com (eu-a, host style)");
  set("AWS_PROFILE", "p");
  EXPECT_EQ(where("s3://b"), "s3://b/ at https://in.file (eu-p, path style)");
  set("AWS_ENDPOINT_URL", "http://All:80");
  set("AWS_DEFAULT_REGION", "eu-d");
  EXPECT_EQ(where("s3://b"), "s3://b/ at http://all (eu-d, path style)");
  set("AWS_ENDPOINT_URL_S3", "http://[::1]:81");
  set("AWS_REGION", "eu-r");
  EXPECT_EQ(where("s3://b?path_style=false"), "s3://b/ at http://[::1]:81 (eu-r, host style)");
  EXPECT_EQ(where("s3://b?endpoint=https%3A%2F%2Furl&region=eu-u"), "s3://b/ at https://url (eu-u, path style)");
}

TEST_F(S3, SendsWhatItShould) {
  HttpServer server([](const Request&) { return HttpServer::reply(200); });
  const EnginePtr own = engine_of("s3://bucket/a b+c?endpoint=" + server.endpoint());
  EXPECT_EQ(write(*own, "data"), Answer::kOk);
  const Request put = server.requests().at(0);
  EXPECT_EQ(put.method, "PUT");
  EXPECT_EQ(put.target, "/bucket/a%20b%2Bc/x/1");
  EXPECT_EQ(put.body, "data");
  EXPECT_EQ("http://" + put.header("host"), server.endpoint());
  EXPECT_EQ(put.header("x-amz-content-sha256"), "UNSIGNED-PAYLOAD");
  EXPECT_EQ(put.header("authorization").substr(0, 39),
            "AWS4-HMAC-SHA256 Credential=AKID/" + put.header("x-amz-date").substr(0, 6));
  for (const char* none : {"expect", "accept", "transfer-encoding", "x-amz-security-token", "content-type"}) {
    EXPECT_EQ(put.headers.count(none), none == std::string("accept") ? 1U : 0U) << none;
  }
  std::vector<RemoveItem> items{{"x/1"}};
  own->remove(items, soon());
  EXPECT_EQ(items[0].answer, Answer::kOk);
  EXPECT_EQ(server.requests().at(1).method, "DELETE");
  EXPECT_EQ(find(*own).bytes, 0);
  EXPECT_EQ(server.requests().at(2).method, "HEAD");
  EXPECT_EQ(server.connections(), 1);
}

struct Refusal {
  int status;
  const char* code;
  Answer read, write;
};
TEST_F(S3, KnowsWhatRefusalsMean) {
  const std::vector<Refusal> refusals{{404, "NoSuchKey", Answer::kAbsent, Answer::kDenied},
                                      {404, "NoSuchBucket", Answer::kDenied, Answer::kDenied},
                                      {403, "AccessDenied", Answer::kDenied, Answer::kDenied},
                                      {400, "AuthorizationHeaderMalformed", Answer::kDenied, Answer::kDenied},
                                      {400, "RequestTimeout", Answer::kBroken, Answer::kBroken},
                                      {403, "QuotaExceeded", Answer::kFull, Answer::kFull},
                                      {400, "EntityTooLarge", Answer::kTooLarge, Answer::kTooLarge},
                                      {413, "", Answer::kTooLarge, Answer::kTooLarge},
                                      {429, "", Answer::kBroken, Answer::kBroken},
                                      {500, "InternalError", Answer::kBroken, Answer::kBroken},
                                      {501, "NotImplemented", Answer::kDenied, Answer::kDenied},
                                      {503, "SlowDown", Answer::kBroken, Answer::kBroken},
                                      {507, "", Answer::kFull, Answer::kFull},
                                      {301, "PermanentRedirect", Answer::kDenied, Answer::kDenied}};
  for (const Refusal& refusal : refusals) {
    HttpServer server([&](const Request&) { return HttpServer::error(refusal.status, refusal.code); });
    const EnginePtr own = engine(server);
    Room room(kBytes);
    EXPECT_EQ(name_of(read(*own, room).answer), std::string(name_of(refusal.read))) << refusal.status << refusal.code;
    EXPECT_EQ(name_of(write(*own, "x")), std::string(name_of(refusal.write))) << refusal.status << refusal.code;
    EXPECT_EQ(room.touched().first, -1);
    EXPECT_EQ(server.requests().size(), 2U) << "nothing is repeated";
  }
  HttpServer server([&](const Request&) { return HttpServer::error(403, "Evil\x01\n"); });
  const EnginePtr own = engine(server);
  write(*own, "x");
  EXPECT_EQ(own->trouble(), "PUT s3://bucket at " + server.endpoint() + ": 403 Evil??: no");
}

/// A reply to GET, what comes of it for all of the object, and for its second quarter.
struct Body {
  const char* what;
  Reply reply;
  Answer whole;
  std::int64_t found;
  Answer part;
  bool part_is_right = false;
};

std::string head(const std::string& headers, int status = 200) {
  return "HTTP/1.1 " + std::to_string(status) + " X\r\n" + headers + "\r\n";
}
std::string chunks(const std::string& body) {
  char size[32];
  std::snprintf(size, sizeof size, "%zx\r\n", body.size());
  return size + body + "\r\n";
}

TEST_F(S3, NeverWritesBesideWhatWasAskedFor) {
  const std::string right = content(kBytes);
  const std::string length = "Content-Length: " + std::to_string(kBytes) + "\r\n";
  const auto range = [&](const std::string& value, const std::string& body) {
    return Reply{
        {head("Content-Length: " + std::to_string(body.size()) + "\r\nContent-Range: " + value + "\r\n", 206) + body}};
  };
  const std::vector<Body> bodies{
      {"right", HttpServer::reply(200, right), Answer::kOk, kBytes, Answer::kOk, true},
      {"cut", {{head(length) + right.substr(0, 3000)}, true}, Answer::kBroken, 0, Answer::kOk, true},
      {"cut in the range", {{head(length) + right.substr(0, 1500)}, true}, Answer::kBroken, 0, Answer::kBroken},
      {"an object that is longer", HttpServer::reply(200, right + right), Answer::kOk, 2 * kBytes, Answer::kOk},
      {"an object that is shorter", HttpServer::reply(200, right.substr(1)), Answer::kOk, kBytes - 1, Answer::kOk},
      {"an object of nothing", HttpServer::reply(200), Answer::kOk, 0, Answer::kOk},
      {"more than was told", {{head(length) + right + right}, true}, Answer::kOk, kBytes, Answer::kOk, true},
      {"no length", {{head("Connection: close\r\n") + right}, true}, Answer::kOk, -1, Answer::kOk, true},
      {"no length, cut",
       {{head("Connection: close\r\n") + right.substr(0, kBytes - 1)}, true},
       Answer::kBroken,
       0,
       Answer::kOk,
       true},
      {"no length, longer",
       {{head("Connection: close\r\n") + right + "x"}, true},
       Answer::kBroken,
       0,
       Answer::kOk,
       true},
      {"chunked",
       {{head("Transfer-Encoding: chunked\r\n") + chunks(right) + "0\r\n\r\n"}},
       Answer::kOk,
       -1,
       Answer::kOk,
       true},
      {"chunked, longer",
       {{head("Transfer-Encoding: chunked\r\n") + chunks(right) + chunks(right) + "0\r\n\r\n"}},
       Answer::kBroken,
       0,
       Answer::kOk,
       true},
      {"chunked, without an end",
       {{head("Transfer-Encoding: chunked\r\n") + chunks(right)}, true},
       Answer::kBroken,
       0,
       Answer::kOk,
       true},
      {"chunks of nonsense",
       {{head("Transfer-Encoding: chunked\r\n") + "zz\r\n" + right}, true},
       Answer::kBroken,
       0,
       Answer::kBroken},
      {"a length that is none", {{head("Content-Length: -5\r\n") + right}, true}, Answer::kBroken, 0, Answer::kBroken},
      {"a length of 2^70",
       {{head("Content-Length: 1180591620717411303424\r\n") + right}, true},
       Answer::kOk,
       -1,
       Answer::kOk,
       true},
      {"another range", range("bytes 512-1535/4096", right.substr(512, 1024)), Answer::kBroken, 0, Answer::kBroken},
      {"a range behind all", range("bytes 4611686018427387904-4611686018427388927/4096", right.substr(0, 1024)),
       Answer::kBroken, 0, Answer::kBroken},
      {"the range of a longer object", range("bytes 1024-2047/8192", right.substr(1024, 1024)), Answer::kBroken, 0,
       Answer::kOk},
      {"the right range", range("bytes 1024-2047/4096", right.substr(1024, 1024)), Answer::kBroken, 0, Answer::kOk,
       true},
      {"a range that is too long", range("bytes 1024-4095/4096", right.substr(1024)), Answer::kBroken, 0, Answer::kOk,
       true},
      {"a range that is too short", range("bytes 1024-2046/4096", right.substr(1024, 1023)), Answer::kBroken, 0,
       Answer::kBroken},
      {"a range without Content-Range",
       {{head("Content-Length: 1024\r\n", 206) + right.substr(1024, 1024)}},
       Answer::kBroken,
       0,
       Answer::kBroken},
      {"a Content-Range of nonsense", range("bytes x-y/z", right.substr(1024, 1024)), Answer::kBroken, 0,
       Answer::kBroken},
      {"no content", {{head("", 204)}}, Answer::kBroken, 0, Answer::kBroken},
      {"no HTTP", {{"SSH-2.0-x\r\n"}, true}, Answer::kBroken, 0, Answer::kBroken},
      {"nothing", {{}, true}, Answer::kBroken, 0, Answer::kBroken},
      {"no status", {{"HTTP/1.1 \r\n\r\n" + right}, true}, Answer::kBroken, 0, Answer::kBroken},
      {"416 of a shorter object",
       {{head("Content-Length: 0\r\nContent-Range: bytes */100\r\n", 416)}},
       Answer::kOk,
       100,
       Answer::kOk},
      {"416 with the length in its text",
       HttpServer::reply(416, "<Error><ActualObjectSize>99</ActualObjectSize></Error>"), Answer::kOk, 99, Answer::kOk},
      {"416 of nothing", HttpServer::error(416, "InvalidRange"), Answer::kBroken, 0, Answer::kBroken},
  };
  for (const Body& body : bodies) {
    SCOPED_TRACE(body.what);
    HttpServer server([&](const Request&) { return body.reply; });
    const EnginePtr own = engine(server);
    Room all(kBytes);
    const ReadItem item = read(*own, all);
    EXPECT_EQ(name_of(item.answer), std::string(name_of(body.whole)));
    if (item.answer == Answer::kOk) {
      EXPECT_EQ(item.found, body.found);
      if (body.found == kBytes || body.found == -1) {
        EXPECT_EQ(std::memcmp(all.object(), right.data(), right.size()), 0);
      }
    }
    EXPECT_GE(all.touched().first, -1);
    EXPECT_LE(all.touched().second, kBytes);

    Room quarter(kBytes);
    const ReadItem part = read(*own, quarter, {{1024, 2048}});
    EXPECT_EQ(name_of(part.answer), std::string(name_of(body.part)));
    if (quarter.touched().first != -1) {
      EXPECT_GE(quarter.touched().first, 1024);
      EXPECT_LE(quarter.touched().second, 2048);
    }
    if (part.answer == Answer::kOk && (part.found == kBytes || part.found == -1)) {
      EXPECT_TRUE(body.part_is_right);
      EXPECT_EQ(std::memcmp(quarter.object() + 1024, right.data() + 1024, 1024), 0);
    } else {
      EXPECT_FALSE(body.part_is_right);
    }
  }
}

TEST_F(S3, RangesOfTwoObjectsAreNotOne) {
  // Replaced between two of its ranges.
  HttpServer server([&](const Request& request) {
    const bool first = request.header("range") == "bytes=0-99";
    const std::string value = first ? "bytes 0-99/4096" : "bytes 200-299/4097";
    return Reply{{head("Content-Length: 100\r\nContent-Range: " + value + "\r\n", 206) + content(100)}};
  });
  Room room(kBytes);
  EXPECT_EQ(read(*engine(server), room, {{0, 100}, {200, 300}}).answer, Answer::kBroken);
}

TEST_F(S3, GoesToNoOtherHost) {
  HttpServer other([](const Request&) { return HttpServer::reply(200, content(kBytes)); });
  HttpServer server([&](const Request&) {
    return HttpServer::reply(307, "", "Location: " + other.endpoint() + "/bucket/pre/x/1\r\n");
  });
  const EnginePtr own = engine(server);
  Room room(kBytes);
  EXPECT_EQ(read(*own, room).answer, Answer::kDenied);
  EXPECT_EQ(write(*own, "x"), Answer::kDenied);
  EXPECT_EQ(other.connections(), 0);
}

TEST_F(S3, EndsAtTheDeadlineAndLeavesTheMemoryAlone) {
  Reply slow{{head("Content-Length: 4096\r\n")}, false, 20ms};
  for (int i = 0; i < 256; ++i) slow.pieces.push_back(content(16));
  HttpServer server([&](const Request& request) { return request.method == "GET" ? slow : Reply{{}, false, 3s}; });
  const EnginePtr own = engine(server);
  Room room(kBytes);
  const auto begin = Clock::now();
  EXPECT_EQ(read(*own, room, {{0, kBytes}}, 300ms).answer, Answer::kLate);
  std::fill(room.memory.begin(), room.memory.end(), kPoison);
  EXPECT_EQ(write(*own, "x", 200ms), Answer::kLate);
  EXPECT_LT(Clock::now() - begin, 2s);
  EXPECT_EQ(room.touched().first, -1);
}

TEST_F(S3, AServerThatIsGone) {
  HttpServer server([](const Request&) { return HttpServer::reply(200); });
  const EnginePtr own = engine(server);
  EXPECT_EQ(write(*own, "x"), Answer::kOk);
  server.stop();
  EXPECT_EQ(write(*own, "x"), Answer::kBroken);
  EXPECT_NE(own->trouble(), "");
  Room room(kBytes);
  EXPECT_EQ(read(*own, room).answer, Answer::kBroken);
}

TEST_F(S3, AServerThatClosesKeptConnections) {
  HttpServer server([](const Request&) {
    Reply reply = HttpServer::reply(200, content(kBytes));
    reply.closes = true;  // without a word of it
    return reply;
  });
  const EnginePtr own = engine(server);
  for (int i = 0; i < 20; ++i) {
    Room room(kBytes);
    EXPECT_EQ(read(*own, room).answer, Answer::kOk) << own->trouble();
  }
}

TEST_F(S3, ReadsRotatedCredentialsAgain) {
  const std::string file = home_.path("keys");
  const auto rotate = [&](const std::string& id) {
    std::ofstream(file) << "# keys\n[other]\naws_access_key_id=no\n[fleet]\naws_access_key_id = " << id
                        << "\naws_secret_access_key = s=/+\naws_session_token = t" << id << "\n";
  };
  set("AWS_SHARED_CREDENTIALS_FILE", file.c_str());
  rotate("OLD");
  HttpServer server([](const Request& request) {
    const bool fresh = request.header("authorization").find("Credential=NEW/") != std::string::npos &&
                       request.header("x-amz-security-token") == "tNEW";
    if (fresh) return HttpServer::reply(200);
    return request.method == "HEAD" ? Reply{{head("Content-Length: 5\r\n", 403)}}
                                    : HttpServer::error(400, "ExpiredToken");
  });
  const EnginePtr own = engine(server, "&profile=fleet");
  EXPECT_EQ(write(*own, "x"), Answer::kDenied);
  std::ofstream(file) << "[fleet]\naws_access_key_id = HALF\n";
  std::this_thread::sleep_for(1100ms);  // files are looked at once a second
  EXPECT_EQ(write(*own, "x"), Answer::kDenied) << "the old ones stay";
  rotate("NEW");
  std::this_thread::sleep_for(1100ms);
  EXPECT_EQ(find(*own).answer, Answer::kBroken) << "trying again helps";
  EXPECT_EQ(find(*own).answer, Answer::kOk);
  EXPECT_EQ(write(*own, "x"), Answer::kOk);
  EXPECT_EQ(own->trouble().find("s=/+"), std::string::npos);
}

TEST_F(S3, TakesTheServersClock) {
  HttpServer server([](const Request& request) {
    const std::time_t theirs = std::time(nullptr) + 7200;
    char date[64];
    char day[16];
    std::tm parts{};
    ::gmtime_r(&theirs, &parts);
    std::strftime(date, sizeof date, "Date: %a, %d %b %Y %H:%M:%S GMT\r\n", &parts);
    const std::time_t before = theirs - 30;
    const std::time_t after = theirs + 30;
    std::string stamps[2];
    for (const auto& [time, stamp] : {std::pair(before, &stamps[0]), std::pair(after, &stamps[1])}) {
      ::gmtime_r(&time, &parts);
      std::strftime(day, sizeof day, "%Y%m%dT%H%M%S", &parts);
      *stamp = day;
    }
    const std::string stamp = request.header("x-amz-date").substr(0, 15);
    if (stamp < stamps[0] || stamp > stamps[1]) return HttpServer::error(403, "RequestTimeTooSkewed", date);
    return HttpServer::reply(200);
  });
  const EnginePtr own = engine(server);
  EXPECT_EQ(write(*own, "x"), Answer::kBroken);
  EXPECT_EQ(write(*own, "x"), Answer::kOk);
}

/// A bucket that knows one upload; `fault` is asked first.
struct Parts {
  std::function<std::optional<Reply>(const Request&)> fault;
  std::mutex mutex;
  std::map<int, std::string> parts;
  std::string list;
  std::atomic<int> aborts{0};

  Reply operator()(const Request& request) {
    if (request.method == "DELETE") {
      EXPECT_NE(request.target.find("/bucket/pre/x/1?uploadId=u%26%20%2F1"), std::string::npos);
      ++aborts;
      return HttpServer::reply(204);
    }
    if (auto reply = fault(request)) return *reply;
    const std::lock_guard lock(mutex);
    if (request.method == "POST" && request.target == "/bucket/pre/x/1?uploads=") {
      return HttpServer::reply(
          200, "<InitiateMultipartUploadResult><UploadId>u&amp; /1</UploadId></InitiateMultipartUploadResult>");
    }
    if (request.method == "PUT") {
      const int part = std::atoi(request.target.c_str() + request.target.find("partNumber=") + 11);
      parts[part] = request.body;
      return HttpServer::reply(200, "", "ETag: \"<" + std::to_string(part) + ">\"\r\n");
    }
    list = request.body;
    return HttpServer::reply(200, "\n <CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>");
  }
};
constexpr const char* kSmallParts = "&part_bytes=5242880";

TEST_F(S3, WritesLargeObjectsInParts) {
  Parts bucket{[](const Request&) { return std::nullopt; }};
  HttpServer server([&](const Request& request) { return bucket(request); });
  const std::string data = content(11 << 20);
  const EnginePtr own = engine(server, kSmallParts);
  EXPECT_EQ(own->largest(), std::int64_t{10'000} * 5242880);
  EXPECT_EQ(write(*own, data), Answer::kOk) << own->trouble();
  ASSERT_EQ(bucket.parts.size(), 3U);
  EXPECT_TRUE(bucket.parts[1] + bucket.parts[2] + bucket.parts[3] == data);
  EXPECT_EQ(bucket.list,
            "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
            "<Part><PartNumber>1</PartNumber><ETag>\"&lt;1&gt;\"</ETag></Part>"
            "<Part><PartNumber>2</PartNumber><ETag>\"&lt;2&gt;\"</ETag></Part>"
            "<Part><PartNumber>3</PartNumber><ETag>\"&lt;3&gt;\"</ETag></Part></CompleteMultipartUpload>");
  EXPECT_EQ(bucket.aborts, 0);
}

TEST_F(S3, LeavesNoPartsBehind) {
  const std::string data = content(11 << 20);
  const auto outcome = [&](const std::function<std::optional<Reply>(const Request&)>& fault, int aborts) {
    Parts bucket{fault};
    HttpServer server([&](const Request& request) { return bucket(request); });
    const Answer answer = write(*engine(server, kSmallParts), data, 2s);
    EXPECT_EQ(bucket.aborts, aborts);
    return std::string(name_of(answer));
  };
  const auto on = [](const char* mark, Reply reply) {
    return [mark, reply](const Request& request) {
      return request.target.find(mark) != std::string::npos ? std::optional<Reply>(reply) : std::nullopt;
    };
  };
  EXPECT_EQ(outcome(on("uploads=", HttpServer::error(403, "AccessDenied")), 0), "denied");
  EXPECT_EQ(outcome(on("uploads=", HttpServer::reply(200, "<html>")), 0), "broken");
  EXPECT_EQ(outcome(on("partNumber=2", HttpServer::error(503, "SlowDown")), 1), "broken");
  EXPECT_EQ(outcome(on("partNumber=2", HttpServer::reply(200)), 1), "broken") << "no ETag";
  EXPECT_EQ(outcome(on("partNumber=3", {{}, true}), 1), "broken");
  EXPECT_EQ(outcome(on("partNumber=1", {{}, false, 10s}), 1), "late");
  const auto last = [](Reply reply) {
    return [reply](const Request& request) {
      const bool is = request.method == "POST" && request.target.find("uploadId=") != std::string::npos;
      return is ? std::optional<Reply>(reply) : std::nullopt;
    };
  };
  EXPECT_EQ(outcome(last(HttpServer::error(200, "InternalError")), 1), "broken");
  EXPECT_EQ(outcome(last(HttpServer::error(200, "QuotaExceeded")), 1), "full");
  EXPECT_EQ(outcome(last(HttpServer::reply(200)), 1), "broken");
  EXPECT_EQ(outcome(last(HttpServer::error(404, "NoSuchUpload")), 1), "broken");
}

std::string page(const std::string& inside, const std::string& token = "") {
  return "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult "
         "xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
         "<Name>bucket</Name><Prefix>pre/d/</Prefix><Delimiter>/</Delimiter>" +
         inside +
         (token.empty()
              ? "<IsTruncated>false</IsTruncated>"
              : "<IsTruncated>true</IsTruncated><NextContinuationToken>" + token + "</NextContinuationToken>") +
         "</ListBucketResult>";
}
std::string object(const std::string& key, const std::string& size = "7") {
  return "<Contents><Key>" + key +
         "</Key><LastModified>2009-10-12T17:50:30.000Z</LastModified><ETag>&quot;e&quot;</ETag><Size>" + size +
         "</Size><Owner><ID>1</ID></Owner></Contents>";
}

TEST_F(S3, ListsPageByPage) {
  HttpServer server([](const Request& request) {
    EXPECT_EQ(request.target.substr(0, 8), "/bucket?");
    if (request.target.find("continuation-token=t%2B%2F1&delimiter=%2F&list-type=2&prefix=pre%2Fd%2F") !=
        std::string::npos) {
      return HttpServer::reply(
          200, page(object("pre/d/b", "-3") + "<CommonPrefixes><Prefix>pre/d/e/</Prefix></CommonPrefixes>"));
    }
    // What others put there is passed over: other prefixes, letters that are not ours, the folder itself.
    return HttpServer::reply(200, page(object("pre/d/a") + object("else/d/x") + object("pre/d/A") + object("pre/d/") +
                                           object("pre/d/&#x2e;&#x2e;") + object("pr"),
                                       "t+/1"));
  });
  const EnginePtr own = engine(server);
  std::vector<ListedObject> all;
  EXPECT_EQ(own->list("d/", soon(), [&](const ListedObject& one) { return all.push_back(one), true; }), Answer::kOk);
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(all[0].name, "d/a");
  EXPECT_EQ(all[0].bytes, 7);
  EXPECT_EQ(all[0].modified, 1255369830);
  EXPECT_EQ(all[1].name, "d/b");
  EXPECT_EQ(all[1].bytes, 0);
  EXPECT_EQ(all[2].name, "d/e/");
  EXPECT_EQ(all[2].bytes, -1);
  all.clear();
  EXPECT_EQ(own->list("d/", soon(), [&](const ListedObject& one) { return all.push_back(one), false; }), Answer::kOk);
  EXPECT_EQ(all.size(), 1U);
  EXPECT_EQ(server.requests().size(), 3U);
}

TEST_F(S3, ListingsThatAreNone) {
  const auto outcome = [&](const Reply& reply) {
    HttpServer server([&](const Request&) { return reply; });
    const EnginePtr own = engine(server);
    return std::string(name_of(own->list("", Clock::now() + 1s, [](const ListedObject&) { return true; })));
  };
  EXPECT_EQ(outcome(HttpServer::reply(200, page(""))), "ok");
  EXPECT_EQ(outcome(HttpServer::reply(200, "<html><body>hello</body></html>")), "broken");
  EXPECT_EQ(outcome(HttpServer::reply(200, page(object("pre/a")).substr(0, 300))), "broken");
  EXPECT_EQ(outcome(HttpServer::reply(200, "")), "broken");
  EXPECT_EQ(outcome(HttpServer::reply(200, "<!DOCTYPE a [<!ENTITY b \"c\">]>" + page(""))), "broken");
  EXPECT_EQ(outcome(HttpServer::reply(200, page("<IsTruncated>true</IsTruncated>"))), "ok") << "the last word counts";
  EXPECT_EQ(outcome(HttpServer::reply(200, "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>")),
            "broken");
  EXPECT_EQ(outcome(HttpServer::reply(200, page(std::string(9 << 20, ' ')))), "broken");
  EXPECT_EQ(outcome(HttpServer::error(404, "NoSuchBucket")), "denied");
  EXPECT_EQ(outcome(HttpServer::reply(200, page(object("pre/a"), "again"))), "late") << "endless";
}

TEST_F(S3, ManyRequestsSideBySideButNotMore) {
  std::atomic<int> now{0};
  std::atomic<int> most{0};
  HttpServer server([&](const Request&) {
    most = std::max(most.load(), ++now);
    std::this_thread::sleep_for(10ms);
    --now;
    return HttpServer::reply(404);
  });
  const EnginePtr own = engine(server, "&connections=8");
  EXPECT_EQ(own->names_a_trip(), 8U);
  std::vector<FindItem> items(100);
  for (FindItem& item : items) item.name = "x/1";
  own->find(items, soon());
  for (const FindItem& item : items) EXPECT_EQ(item.answer, Answer::kAbsent);
  EXPECT_LE(most, 8);
  EXPECT_GE(most, 4);
  EXPECT_LE(server.connections(), 8);
}

TEST_F(S3, AForkedChildHasItsOwnConnections) {
  HttpServer server([](const Request&) { return HttpServer::reply(200, content(kBytes)); });
  EnginePtr own = engine(server);
  Room room(kBytes);
  EXPECT_EQ(read(*own, room).answer, Answer::kOk);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool right = read(*own, room).answer == Answer::kOk;
    own.reset();
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(server.connections(), 2);
  EXPECT_EQ(read(*own, room).answer, Answer::kOk);
  EXPECT_EQ(server.connections(), 2) << "the parent's was not closed";
}

}  // namespace
}  // namespace kvstride::test
