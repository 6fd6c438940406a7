// SPDX-License-Identifier: Apache-2.0
// The Redis engine against servers that are wrong in one way at a time.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "kvstride/error.h"
#include "redis_server.h"
#include "store/remote/engine.h"
#include "store/remote/redis_cluster.h"

namespace kvstride::test {
namespace {

using namespace store;
using namespace std::chrono_literals;
using Words = RedisServer::Words;
using Said = RedisServer::Answer;

constexpr std::byte kPoison{0xA5};
constexpr std::int64_t kBytes = 4096;

Clock::time_point in(std::chrono::milliseconds time) { return Clock::now() + time; }
std::string bulk(const std::string& text) { return "$" + std::to_string(text.size()) + "\r\n" + text + "\r\n"; }
/// An object's bytes: its name's last character, again and again.
std::string object(const std::string& key, std::int64_t bytes = kBytes) {
  return std::string(static_cast<std::size_t>(bytes), key.back());
}
/// A sound server of objects of kBytes.
Said sound(const Words& words) {
  if (words[0] == "GET") return {bulk(object(words[1]))};
  if (words[0] == "STRLEN") return {":4096\r\n"};
  if (words[0] == "UNLINK") return {":1\r\n"};
  return {"+OK\r\n"};
}
std::string slots(const std::string& host, int port) {
  return "*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n" + bulk(host) + ":" + std::to_string(port) + "\r\n" + bulk("id");
}

/// Objects a, b, c, … one behind the other in poisoned memory, each with kBytes of room behind it.
struct Reads {
  explicit Reads(std::size_t count = 1) : memory(count * 2 * kBytes, kPoison), calls(count) {
    for (std::size_t i = 0; i < count; ++i) {
      items.push_back({std::string(1, static_cast<char>('a' + i)), {{0, kBytes}}, place(i), kBytes});
    }
  }
  std::byte* place(std::size_t i) { return memory.data() + i * 2 * kBytes; }
  void run(Engine& engine, std::chrono::milliseconds time = 10s) {
    const auto begin = Clock::now();
    engine.read(items, begin + time, [&](std::size_t i) {
      ++calls[i];
      if (wipes) std::fill_n(place(i), kBytes, kPoison);
    });
    took = Clock::now() - begin;
    EXPECT_TRUE(std::all_of(calls.begin(), calls.end(), [](int n) { return n == 1; }));
    for (std::size_t i = 0; i < items.size(); ++i) EXPECT_TRUE(poisoned(i, kBytes)) << "behind item " << i;
  }
  bool poisoned(std::size_t i, std::int64_t from = 0) {
    return std::all_of(place(i) + from, place(i) + kBytes + from, [](std::byte b) { return b == kPoison; });
  }
  bool right(std::size_t i) {
    const auto same = [&](std::byte b) { return b == static_cast<std::byte>('a' + i); };
    return items[i].answer == Answer::kOk && items[i].found == kBytes && std::all_of(place(i), place(i) + kBytes, same);
  }

  std::vector<std::byte> memory;
  std::vector<ReadItem> items;
  std::vector<int> calls;
  Clock::duration took{};
  bool wipes = false;
};

Answer written(Engine& engine, std::string_view text, std::chrono::milliseconds time = 10s, bool replace = false) {
  std::vector<WriteItem> items{{"a", std::as_bytes(std::span(text)), replace}};
  int calls = 0;
  engine.write(items, in(time), [&](std::size_t) { ++calls; });
  EXPECT_EQ(calls, 1);
  return items[0].answer;
}
Answer found(Engine& engine) {
  std::vector<FindItem> items{{"a"}};
  engine.find(items, in(10s));
  return items[0].answer;
}
std::string why(const std::string& url) {
  try {
    engine_of(url);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(RedisUrl, SaysWhatIsWrong) {
  const std::string is = "URL of a store: ";
  EXPECT_EQ(why("redis:///"), is + "no host: redis://host:port/database");
  EXPECT_EQ(why("redis://h/one"), is + "the database is 'one', of 0 to 1048576");
  EXPECT_EQ(why("redis://me@h/"), is + "a user without a password; a password alone is :password@");
  EXPECT_EQ(why("redis://h/?ttl=0"), is + "ttl is '0', of 1 to 3162240000");
  EXPECT_EQ(why("redis://h/?largest=1g"), is + "largest is '1g', of 1 to 536870912");
  EXPECT_EQ(why("redis://h/?connections=0"), is + "connections is '0', of 1 to 64");
  EXPECT_EQ(why("redis://h/?cluster=on"), is + "cluster is 'on', expected auto, yes or no");
  EXPECT_EQ(why("redis://h/2?cluster=yes"), is + "a cluster has no database but 0");
  EXPECT_EQ(why("redis://h/?tls=1"), is + "no option tls; redis has cluster, connections, largest, prefix and ttl");
  EXPECT_EQ(why("redis://h/?prefix=" + std::string(201, 'p')), is + "prefix has 201 characters, of at most 200");
  EXPECT_NE(why("rediss://h/").find("needs hiredis with TLS"), std::string::npos);
  const EnginePtr engine = engine_of("redis://u:secret@h/3?prefix=p:&ttl=60&largest=1048576&connections=2");
  EXPECT_EQ(engine->detail(), "redis://h:6379/3 p:*");
  EXPECT_EQ(engine->largest(), 1 << 20);
  EXPECT_EQ(engine->num_threads(), 2);
}

TEST(RedisCluster, SlotsOfKeys) {
  EXPECT_EQ(redis::slot_of("123456789"), 0x31C3);
  EXPECT_EQ(redis::slot_of("foo"), 12182);
  EXPECT_EQ(redis::slot_of("{user1000}.following"), redis::slot_of("user1000"));
  EXPECT_EQ(redis::slot_of("foo{{bar}}zap"), redis::slot_of("{bar"));
  EXPECT_EQ(redis::slot_of("foo{bar}{zap}"), redis::slot_of("bar"));
  EXPECT_NE(redis::slot_of("foo{}{bar}"), redis::slot_of("bar"));
}

TEST(RedisCluster, RedirectsInErrors) {
  const redis::Node asked{"h", 1};
  EXPECT_FALSE(redis::redirect_of("ERR MOVED 1 a:1", asked));
  EXPECT_EQ(redis::redirect_of("MOVED 3999 127.0.0.1:6381", asked)->to, (redis::Node{"127.0.0.1", 6381}));
  EXPECT_EQ(redis::redirect_of("ASK 3999 ::1:6381", asked)->to, (redis::Node{"::1", 6381}));
  EXPECT_TRUE(redis::redirect_of("ASK 3999 ::1:6381", asked)->ask);
  EXPECT_EQ(redis::redirect_of("MOVED 3999 :6381", asked)->to, (redis::Node{"h", 6381}));
  for (const char* odd :
       {"MOVED ", "MOVED 1", "MOVED 1 a", "MOVED 1 a:", "MOVED 1 a:0", "MOVED 1 a:65536", "ASK 1 a:1x"}) {
    EXPECT_EQ(redis::redirect_of(odd, asked)->to.port, 0) << odd;
  }
}

TEST(RedisEngine, SendsWhatItShould) {
  RedisServer server(sound);
  const EnginePtr engine =
      engine_of("redis://me:p%20w@127.0.0.1:" + std::to_string(server.port()) + "/5?prefix=x:&cluster=no&ttl=60");
  EXPECT_EQ(written(*engine, "bytes"), Answer::kOk);
  EXPECT_EQ(written(*engine, "bytes", 10s, true), Answer::kOk);
  EXPECT_EQ(found(*engine), Answer::kOk);
  Reads reads;
  reads.items[0].ranges = {{0, 1}, {8, 4096}};
  reads.run(*engine);
  const std::vector<Words> right{{"AUTH", "me", "p w"},
                                 {"SELECT", "5"},
                                 {"SET", "x:a", "bytes", "NX", "PX", "60000"},
                                 {"SET", "x:a", "bytes", "PX", "60000"},
                                 {"STRLEN", "x:a"},
                                 {"STRLEN", "x:a"},
                                 {"GETRANGE", "x:a", "0", "0"},
                                 {"GETRANGE", "x:a", "8", "4095"}};
  EXPECT_EQ(server.commands(), right);
  EXPECT_EQ(server.num_connections(), 1);
}

TEST(RedisEngine, ReadsManyEachIntoItsPlace) {
  RedisServer server(sound);
  const EnginePtr engine = engine_of(server.url());
  Reads reads(20);
  reads.run(*engine);
  for (std::size_t i = 0; i < 20; ++i) EXPECT_TRUE(reads.right(i)) << i;
}

/// Neither a byte of memory, nor the next call, suffers from a reply that is none.
TEST(RedisEngine, RepliesThatAreNone) {
  const std::string half = "$4096\r\n" + object("x", 2048);
  const std::vector<Said> odd{
      {"+OK\r\n"},
      {":5\r\n"},
      {"*1\r\n$1\r\na\r\n"},
      {"*0\r\n"},
      {"*-1\r\n"},
      {"garbage\r\n"},
      {"\r\n"},
      {std::string(100, '\0')},
      {std::string(1 << 20, '$')},
      {std::string(1 << 20, '+'), true},
      {"$abc\r\n"},
      {"$-2\r\n"},
      {"$4096\n" + object("x") + "\r\n"},
      {"$99999999999999999999\r\n"},
      {"$9223372036854775807\r\n"},
      {"$536870913\r\n"},
      {"*2147483647\r\n"},
      {"*4294967297\r\n"},
      {"$4096\r\n" + object("x") + "XX"},
      {"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n$1\r\na\r\n"},
      {half, true},
      {"$40", true},
      {"", true},
  };
  for (std::size_t i = 0; i < odd.size(); ++i) {
    RedisServer server([&](const Words& words) { return words[1] == "b" ? odd[i] : sound(words); });
    const EnginePtr engine = engine_of(server.url());
    Reads reads(3);
    reads.run(*engine);
    EXPECT_TRUE(reads.right(0)) << i;
    EXPECT_EQ(reads.items[1].answer, Answer::kBroken) << i << ": " << name_of(reads.items[1].answer);
    EXPECT_EQ(reads.items[2].answer, Answer::kBroken) << i << ": what follows cannot be told apart";
    EXPECT_TRUE(reads.poisoned(2)) << i;
    EXPECT_LT(reads.took, 5s) << i;
    EXPECT_FALSE(engine->trouble().empty());
    server.set(sound);
    Reads again(3);
    again.run(*engine);
    for (std::size_t n = 0; n < 3; ++n) EXPECT_TRUE(again.right(n)) << i;
  }
}

TEST(RedisEngine, LengthsThatAreOthers) {
  for (const std::int64_t bytes : {std::int64_t{1}, kBytes - 1, kBytes + 1, 2 * kBytes, std::int64_t{20} << 20}) {
    RedisServer server(
        [&](const Words& words) { return words[1] == "b" ? Said{bulk(object(words[1], bytes))} : sound(words); });
    const EnginePtr engine = engine_of(server.url());
    Reads reads(3);
    reads.run(*engine);
    EXPECT_TRUE(reads.right(0));
    EXPECT_TRUE(reads.right(2));
    EXPECT_EQ(reads.items[1].answer, Answer::kOk);
    EXPECT_EQ(reads.items[1].found, bytes);
    if (bytes > kBytes) {
      EXPECT_TRUE(reads.poisoned(1));
    }
  }
}

TEST(RedisEngine, RangesThatAreOthers) {
  const auto run = [](const std::string& length, const std::string& range) {
    RedisServer server([&](const Words& words) { return Said{words[0] == "STRLEN" ? length : range}; });
    const EnginePtr engine = engine_of(server.url());
    Reads reads;
    reads.items[0].ranges = {{1024, 2048}};
    reads.run(*engine);
    EXPECT_TRUE(std::all_of(reads.place(0), reads.place(0) + 1024, [](std::byte b) { return b == kPoison; }));
    EXPECT_TRUE(reads.poisoned(0, 2048));
    return std::pair(reads.items[0].answer, reads.items[0].found);
  };
  EXPECT_EQ(run(":4096\r\n", bulk(object("a", 1024))), std::pair(Answer::kOk, kBytes));
  EXPECT_EQ(run(":4096\r\n", bulk(object("a", 1023))).first, Answer::kBroken) << "gone in between";
  EXPECT_EQ(run(":4096\r\n", bulk(object("a", 1025))).first, Answer::kBroken);
  EXPECT_EQ(run(":4096\r\n", "$0\r\n\r\n").first, Answer::kBroken);
  EXPECT_EQ(run(":0\r\n", "$0\r\n\r\n").first, Answer::kAbsent);
  EXPECT_EQ(run(":8192\r\n", bulk(object("a", 1024))), std::pair(Answer::kOk, std::int64_t{8192}));
  EXPECT_EQ(run(":-5\r\n", bulk(object("a", 1024))).first, Answer::kBroken);
  EXPECT_EQ(run("-NOPERM no\r\n", bulk(object("a", 1024))).first, Answer::kDenied);
  EXPECT_EQ(run(":4096\r\n", "-LOADING\r\n").first, Answer::kBroken);
}

TEST(RedisEngine, ErrorsHaveAnswers) {
  std::string error;
  RedisServer server([&](const Words&) { return Said{"-" + error + "\r\n"}; });
  const EnginePtr engine = engine_of(server.url());
  const auto is = [&](const char* text) {
    server.set([text](const Words&) { return Said{std::string("-") + text + "\r\n"}; });
    const Answer answer = written(*engine, "bytes");
    EXPECT_EQ(found(*engine), answer);
    EXPECT_NE(engine->trouble().find(text), std::string::npos);
    return answer;
  };
  EXPECT_EQ(is("OOM command not allowed when used memory > 'maxmemory'."), Answer::kFull);
  EXPECT_EQ(is("NOAUTH Authentication required."), Answer::kDenied);
  EXPECT_EQ(is("NOPERM this user has no permissions"), Answer::kDenied);
  EXPECT_EQ(is("ERR Protocol error: invalid bulk length"), Answer::kTooLarge);
  for (const char* other : {"LOADING Redis is loading the dataset in memory", "TRYAGAIN Multiple keys",
                            "CLUSTERDOWN The cluster is down", "READONLY You can't write against a read only replica.",
                            "WRONGTYPE Operation against a key holding the wrong kind of value", "MOVED 1 127.0.0.1:1",
                            "ASK 1 127.0.0.1:1", "ERR unknown", "X"}) {
    EXPECT_EQ(is(other), Answer::kBroken) << other;
  }
  EXPECT_EQ(server.num_connections(), 1) << "an error is no reason to connect again";
}

TEST(RedisEngine, WhatIsThereStays) {
  RedisServer server([](const Words& words) { return Said{words.size() > 3 ? "$-1\r\n" : "+OK\r\n"}; });
  const EnginePtr engine = engine_of(server.url());
  EXPECT_EQ(written(*engine, "bytes"), Answer::kThere);
  EXPECT_EQ(written(*engine, "bytes", 10s, true), Answer::kOk);
  const EnginePtr small = engine_of(server.url("cluster=no&largest=4"));
  EXPECT_EQ(written(*small, "bytes"), Answer::kTooLarge);
}

/// A reply that comes late is read by nobody, least of all as another's.
TEST(RedisEngine, LateReplies) {
  for (const bool midway : {false, true}) {
    RedisServer server([&](const Words& words) {
      const std::string reply = bulk(object(words[1]));
      return midway ? Said{reply.substr(0, 2000), false, 300, reply.substr(2000)} : Said{"", false, 300, reply};
    });
    const EnginePtr engine = engine_of(server.url());
    Reads reads(2);
    reads.wipes = true;
    reads.run(*engine, 150ms);
    EXPECT_EQ(reads.items[0].answer, Answer::kLate);
    EXPECT_EQ(reads.items[1].answer, Answer::kLate);
    EXPECT_GE(reads.took, 150ms);
    EXPECT_LT(reads.took, 1s);
    server.set(sound);
    Reads again(4);
    std::swap(again.items[0].name, again.items[3].name);
    std::swap(again.items[0].into, again.items[3].into);
    again.run(*engine);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(again.items[i].answer, Answer::kOk);
      const auto letter = static_cast<std::byte>('a' + i);
      EXPECT_TRUE(std::all_of(again.place(i), again.place(i) + kBytes, [&](std::byte b) { return b == letter; })) << i;
    }
    std::this_thread::sleep_for(300ms);
    EXPECT_TRUE(reads.poisoned(0)) << "touched after it was done";
    EXPECT_TRUE(reads.poisoned(1));
  }
}

TEST(RedisEngine, RepliesThatNobodyAskedFor) {
  std::atomic<int> after{0};
  RedisServer server([&](const Words& words) {
    const std::string reply = bulk(object(words[1]));
    const std::string more = bulk(object("z"));
    return after == 0 ? Said{reply + more} : Said{reply, false, after, more};  // with it, or while it is kept
  });
  const EnginePtr engine = engine_of(server.url());
  for (after = 0; after < 20; after = after + 5) {
    for (int round = 0; round < 3; ++round) {
      Reads reads;
      reads.run(*engine);
      EXPECT_TRUE(reads.right(0)) << after;
      std::this_thread::sleep_for(30ms);
    }
  }
}

TEST(RedisEngine, ServersThatDoNotRead) {
  RedisServer server(sound);
  server.reads = false;
  const EnginePtr engine = engine_of(server.url());
  const std::string large(64 << 20, 'x');
  const auto begin = Clock::now();
  EXPECT_EQ(written(*engine, large, 300ms), Answer::kLate);
  EXPECT_LT(Clock::now() - begin, 2s);
  server.reads = true;
  EXPECT_EQ(written(*engine, "bytes"), Answer::kOk);
}

TEST(RedisEngine, ServersThatAreNotThere) {
  std::string url;
  {
    const RedisServer server(sound);
    url = server.url();
  }
  EXPECT_EQ(found(*engine_of(url)), Answer::kBroken);
  EXPECT_EQ(found(*engine_of("redis://no-such-host.invalid/")), Answer::kBroken);
  std::vector<FindItem> items{{"a"}};
  engine_of(url)->find(items, Clock::now() - 1s);
  EXPECT_EQ(items[0].answer, Answer::kLate);
}

TEST(RedisEngine, ConnectionsThatEndedMeanwhile) {
  RedisServer server([](const Words& words) {
    Said out = sound(words);
    out.close = true;
    return out;
  });
  const EnginePtr engine = engine_of(server.url());
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(found(*engine), Answer::kOk);
    std::this_thread::sleep_for(20ms);
  }
  EXPECT_EQ(server.num_connections(), 5);
}

TEST(RedisEngine, Greetings) {
  const auto is = [](const std::string& error, const std::string& verb, Answer expected) {
    RedisServer server(
        [&](const Words& words) { return words[0] == verb ? Said{"-" + error + "\r\n"} : sound(words); });
    const EnginePtr engine = engine_of("redis://:hunter2@127.0.0.1:" + std::to_string(server.port()) + "/3?cluster=no");
    EXPECT_EQ(written(*engine, "bytes"), expected) << error;
    EXPECT_EQ(engine->trouble().find("hunter2"), std::string::npos);
    for (const Words& words : server.commands()) EXPECT_NE(words[0], "SET") << "before it was let in";
  };
  is("WRONGPASS invalid username-password pair or user is disabled.", "AUTH", Answer::kDenied);
  is("ERR unknown command 'AUTH', with args beginning with: 'hunter2'", "AUTH", Answer::kDenied);
  is("ERR max number of clients reached", "AUTH", Answer::kBroken);
  is("LOADING Redis is loading", "SELECT", Answer::kBroken);
  is("ERR DB index is out of range", "SELECT", Answer::kDenied);
}

TEST(RedisEngine, MapsOfSlotsThatMakeNoSense) {
  const std::string id = bulk("id");
  const std::vector<std::string> odd{
      "+OK\r\n",
      ":1\r\n",
      "*0\r\n",
      "*1\r\n:1\r\n",
      "*1\r\n*2\r\n:0\r\n:1\r\n",
      "*1\r\n*3\r\n:0\r\n:16384\r\n*2\r\n" + bulk("127.0.0.1") + ":1\r\n",
      "*1\r\n*3\r\n:-1\r\n:5\r\n*2\r\n" + bulk("127.0.0.1") + ":1\r\n",
      "*1\r\n*3\r\n:5\r\n:4\r\n*2\r\n" + bulk("127.0.0.1") + ":1\r\n",
      "*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n" + bulk("127.0.0.1") + ":0\r\n",
      "*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n" + bulk("127.0.0.1") + ":65536\r\n",
      "*1\r\n*3\r\n:0\r\n:5\r\n*1\r\n" + bulk("127.0.0.1"),
      "*1\r\n*3\r\n:0\r\n:5\r\n:7\r\n",
      "*1\r\n*3\r\n$1\r\n0\r\n:5\r\n*2\r\n" + bulk("127.0.0.1") + ":1\r\n",
      "-LOADING wait\r\n",
      "*2000000000\r\n",
  };
  for (const std::string& reply : odd) {
    RedisServer server([&](const Words& words) { return words[0] == "CLUSTER" ? Said{reply} : sound(words); });
    const EnginePtr engine = engine_of(server.url("cluster=auto"));
    EXPECT_EQ(found(*engine), Answer::kBroken) << reply;
    Reads reads(2);
    reads.run(*engine);
    EXPECT_EQ(reads.items[1].answer, Answer::kBroken) << reply;
  }
}

TEST(RedisEngine, FindsOutWhetherItIsACluster) {
  for (const char* error : {"ERR This instance has cluster support disabled", "ERR unknown command 'CLUSTER'",
                            "NOPERM this user has no permissions to run the 'cluster|slots' command"}) {
    RedisServer server([&](const Words& words) {
      return words[0] == "CLUSTER" ? Said{std::string("-") + error + "\r\n"} : sound(words);
    });
    EXPECT_EQ(found(*engine_of(server.url("cluster=auto"))), Answer::kOk);
    EXPECT_EQ(found(*engine_of(server.url("cluster=yes"))), Answer::kDenied);
    const EnginePtr engine = engine_of(server.url("cluster=auto"));
    EXPECT_EQ(found(*engine), Answer::kOk);
    EXPECT_EQ(engine->trouble(), "") << "it is none";
  }
}

TEST(RedisEngine, FollowsRedirects) {
  RedisServer second(sound);
  std::string host = "127.0.0.1";
  for (const std::string how : {"MOVED", "ASK"}) {
    const std::size_t before = second.commands().size();
    int port = 0;
    RedisServer first([&](const Words& words) {
      if (words[0] == "CLUSTER") return Said{slots("", port)};  // no host: the one that is asked
      return Said{"-" + how + " 15495 127.0.0.1:" + std::to_string(second.port()) + "\r\n"};
    });
    port = first.port();
    const EnginePtr engine = engine_of(first.url("cluster=auto"));
    Reads reads(3);
    reads.run(*engine);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(reads.right(i));
    const auto commands = second.commands();
    ASSERT_EQ(commands.size() - before, how == "ASK" ? 6U : 3U);
    EXPECT_EQ(commands[before][0], how == "ASK" ? "ASKING" : "GET");
    const auto maps = [&] {
      const auto all = first.commands();
      return std::count_if(all.begin(), all.end(), [](const Words& words) { return words[0] == "CLUSTER"; });
    };
    EXPECT_EQ(maps(), 1);
    std::this_thread::sleep_for(300ms);
    EXPECT_EQ(found(*engine), Answer::kOk);
    EXPECT_EQ(maps(), how == "ASK" ? 1 : 2) << "what moved makes the map old";
  }
}

TEST(RedisEngine, RedirectsWithoutEnd) {
  for (const char* how : {"MOVED", "ASK"}) {
    int port = 0;
    RedisServer server([&](const Words& words) {
      if (words[0] == "CLUSTER") return Said{slots("127.0.0.1", port)};
      if (words[0] == "ASKING") return Said{"+OK\r\n"};
      return Said{std::string("-") + how + " 15495 127.0.0.1:" + std::to_string(port) + "\r\n"};
    });
    port = server.port();
    const EnginePtr engine = engine_of(server.url("cluster=yes"));
    Reads reads(2);
    reads.run(*engine);
    EXPECT_EQ(reads.items[0].answer, Answer::kBroken);
    EXPECT_EQ(reads.items[1].answer, Answer::kBroken);
    EXPECT_LT(reads.took, 2s);
    EXPECT_LE(server.commands().size(), 30U);
  }
}

TEST(RedisEngine, RedirectsToManyStrangers) {
  int port = 0, stranger = 2;
  RedisServer server([&](const Words& words) {
    if (words[0] == "CLUSTER") return Said{slots("127.0.0.1", port)};
    const std::string host = "127.0.0." + std::to_string(stranger++ % 250);
    return Said{"-MOVED 15495 " + host + ":" + std::to_string(port) + "\r\n"};
  });
  port = server.port();
  const EnginePtr engine = engine_of(server.url("cluster=yes"));
  std::vector<FindItem> items(200, {"a"});
  const auto begin = Clock::now();
  engine->find(items, in(10s));
  EXPECT_LT(Clock::now() - begin, 5s);
  for (const FindItem& item : items) EXPECT_EQ(item.answer, Answer::kBroken);
}

/// A node that hangs costs its own items, the others' are done at once; and the map is asked of those that answer.
TEST(RedisEngine, OneNodeThatHangs) {
  int first = 0, second = 0;
  const auto script = [&](const Words& words) {
    if (words[0] != "CLUSTER") return sound(words);
    const auto range = [](int begin, int end, int port) {
      return "*3\r\n:" + std::to_string(begin) + "\r\n:" + std::to_string(end) + "\r\n*2\r\n" + bulk("127.0.0.1") +
             ":" + std::to_string(port) + "\r\n";
    };
    return Said{"*2\r\n" + range(0, 8191, first) + range(8192, 16383, second)};
  };
  RedisServer one(script), two(script);
  first = one.port();
  second = two.port();
  const EnginePtr engine = engine_of(one.url("cluster=auto"));
  Reads reads(12);
  reads.run(*engine);
  std::set<bool> sides;
  for (std::size_t i = 0; i < 12; ++i) {
    EXPECT_TRUE(reads.right(i));
    sides.insert(redis::slot_of(reads.items[i].name) > 8191);
  }
  ASSERT_EQ(sides.size(), 2U);
  one.reads = false;  // the one that the URL names
  for (int round = 0; round < 3; ++round) {
    Reads again(12);
    again.run(*engine, 500ms);
    for (std::size_t i = 0; i < 12; ++i) {
      const bool hangs = redis::slot_of(again.items[i].name) < 8192;
      EXPECT_EQ(again.items[i].answer, hangs ? Answer::kLate : Answer::kOk) << i;
      if (!hangs) {
        EXPECT_TRUE(again.right(i));
      }
    }
    EXPECT_LT(again.took, 1s);
  }
  one.reads = true;
  Reads last(12);
  last.run(*engine);
  for (std::size_t i = 0; i < 12; ++i) EXPECT_TRUE(last.right(i));
}

TEST(RedisEngine, Listings) {
  const auto page = [](const std::string& cursor, const std::vector<std::string>& keys) {
    std::string out = "*2\r\n" + bulk(cursor) + "*" + std::to_string(keys.size()) + "\r\n";
    for (const std::string& one : keys) out += bulk(one);
    return out;
  };
  Words scan;
  RedisServer server([&](const Words& words) {
    if (words[0] == "STRLEN") return Said{words[1] == "p*:f/gone" ? ":0\r\n" : ":4096\r\n"};
    scan = words;
    return Said{words[1] == "0" ? page("17", {"p*:f/one", "p*:f/sub/x", "p*:f/gone"})
                                : page("0", {"p*:f/one", "p*:f/sub/y", "p*:f/two"})};
  });
  const EnginePtr engine = engine_of("redis://127.0.0.1:" + std::to_string(server.port()) + "/?prefix=p*:&cluster=no");
  std::vector<std::string> names;
  const auto use = [&](const ListedObject& one) {
    names.push_back(one.name + " " + std::to_string(one.bytes));
    return true;
  };
  EXPECT_EQ(engine->list("f/", in(10s), use), Answer::kOk);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"f/one 4096", "f/sub/ -1", "f/two 4096"}));
  EXPECT_EQ(scan, (Words{"SCAN", "17", "MATCH", "p\\*:f/*", "COUNT", "1000"}));
  int calls = 0;
  EXPECT_EQ(engine->list("f/", in(10s), [&](const ListedObject&) { return ++calls < 2; }), Answer::kOk);
  EXPECT_EQ(calls, 2);
  const std::vector<std::string> odd{
      "*0\r\n", "*2\r\n:0\r\n*0\r\n", "*2\r\n$1\r\n0\r\n:1\r\n", page("0", {"else"}), "*2\r\n$1\r\n0\r\n*1\r\n:1\r\n",
      "+OK\r\n"};
  for (const std::string& reply : odd) {
    server.set([&](const Words&) { return Said{reply}; });
    EXPECT_EQ(engine->list("f/", in(10s), use), Answer::kBroken) << reply;
  }
  server.set([&](const Words&) { return Said{page("5", {})}; });  // without end
  EXPECT_EQ(engine->list("f/", in(200ms), use), Answer::kLate);
}

}  // namespace
}  // namespace kvstride::test
