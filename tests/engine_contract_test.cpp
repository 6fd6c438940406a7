// SPDX-License-Identifier: Apache-2.0
// What every engine must do (src/store/remote/engine.h). Over one in memory, and over those that the environment
// variable KVSTRIDE_TEST_ENGINES names: URLs with spaces between them, of servers where names below a random folder may
// be written and removed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <sstream>

#include "kvstride/error.h"
#include "memory_engine.h"

namespace kvstride::test {
namespace {

using namespace store;
using namespace std::chrono_literals;

struct Place {
  std::string url;  ///< empty: in memory
};
std::vector<Place> places() {
  std::vector<Place> out{{}};
  const char* urls = std::getenv("KVSTRIDE_TEST_ENGINES");
  std::istringstream words(urls != nullptr ? urls : "");
  for (std::string url; words >> url;) out.push_back({url});
  return out;
}

std::vector<std::byte> content(std::size_t bytes, unsigned seed) {
  std::mt19937 dice(seed);
  std::vector<std::byte> out(bytes);
  for (std::byte& one : out) one = static_cast<std::byte>(dice());
  return out;
}

class EngineContract : public testing::TestWithParam<Place> {
 protected:
  static constexpr std::byte kPoison{0xA5};

  EngineContract()
      : engine_(GetParam().url.empty() ? std::make_shared<MemoryEngine>() : engine_of(GetParam().url)),
        folder_("test" + std::to_string(std::random_device()()) + "/") {
    engine_->memory(std::span(arena_));
  }
  ~EngineContract() override {
    std::vector<RemoveItem> items;
    for (const std::string& name : written_) items.push_back({name});
    engine_->remove(items, soon());
  }

  static Clock::time_point soon() { return Clock::now() + 20s; }
  std::string name(int i) const { return folder_ + "a" + std::to_string(i % 16) + "/" + std::to_string(i); }

  /// Memory that the engine knows; the same bytes each time.
  std::byte* place(std::size_t& at, std::size_t bytes) {
    std::byte* out = arena_.data() + at;
    at += (bytes + 4095) / 4096 * 4096;
    EXPECT_LE(at, arena_.size());
    return out;
  }

  Answer write(const std::string& name, const std::vector<std::byte>& bytes, bool replace = false) {
    std::size_t at = 0;
    std::byte* data = place(at, bytes.size());
    std::copy(bytes.begin(), bytes.end(), data);
    std::vector<WriteItem> items{{name, {data, bytes.size()}, replace}};
    int calls = 0;
    engine_->write(items, soon(), [&](std::size_t i) { calls += i == 0 ? 1 : 100; });
    EXPECT_EQ(calls, 1);
    written_.push_back(name);
    return items[0].answer;
  }

  ReadItem read(const std::string& name, std::vector<Bytes> ranges, std::int64_t bytes) {
    std::fill(arena_.begin(), arena_.end(), kPoison);
    std::vector<ReadItem> items{{name, std::move(ranges), arena_.data(), bytes}};
    int calls = 0;
    const auto thread = std::this_thread::get_id();
    engine_->read(items, soon(), [&](std::size_t i) {
      calls += i == 0 ? 1 : 100;
      EXPECT_EQ(std::this_thread::get_id(), thread);
    });
    EXPECT_EQ(calls, 1);
    return items[0];
  }
  ReadItem read(const std::string& name, std::size_t bytes) {
    const auto length = static_cast<std::int64_t>(bytes);
    return read(name, {{0, length}}, length);
  }

  std::vector<std::byte> arena_ = std::vector<std::byte>(48 << 20);
  EnginePtr engine_;
  std::string folder_;
  std::vector<std::string> written_;
};

TEST_P(EngineContract, SaysWhatIsNotThere) {
  std::vector<FindItem> find{{name(1)}, {name(2)}};
  engine_->find(find, soon());
  EXPECT_EQ(find[0].answer, Answer::kAbsent);
  EXPECT_EQ(find[1].answer, Answer::kAbsent);
  EXPECT_EQ(read(name(1), 4096).answer, Answer::kAbsent);
  EXPECT_TRUE(std::all_of(arena_.begin(), arena_.end(), [](std::byte b) { return b == kPoison; }));
  std::vector<RemoveItem> remove{{name(1)}};
  engine_->remove(remove, soon());
  EXPECT_EQ(remove[0].answer, Answer::kOk);
}

TEST_P(EngineContract, GivesBackWhatWasWritten) {
  int i = 0;
  for (const std::size_t bytes : {1UL, 4096UL, 65536UL, (1UL << 20) + 4096, 9UL << 20, 33UL << 20}) {
    if (static_cast<std::int64_t>(bytes) > engine_->largest()) continue;
    const std::vector<std::byte> right = content(bytes, 7);
    ASSERT_EQ(write(name(i), right), Answer::kOk) << bytes;
    std::vector<FindItem> find{{name(i)}};
    engine_->find(find, soon());
    EXPECT_EQ(find[0].answer, Answer::kOk);
    if (find[0].bytes >= 0) {
      EXPECT_EQ(find[0].bytes, static_cast<std::int64_t>(bytes));
    }
    const ReadItem item = read(name(i), bytes);
    ASSERT_EQ(item.answer, Answer::kOk) << bytes;
    if (item.found >= 0) {
      EXPECT_EQ(item.found, static_cast<std::int64_t>(bytes));
    }
    EXPECT_TRUE(std::equal(right.begin(), right.end(), arena_.begin())) << bytes;
    EXPECT_EQ(arena_[bytes], kPoison) << "touched what is behind the item";
    std::vector<RemoveItem> remove{{name(i)}};
    // A lease may keep it for some seconds.
    const auto limit = Clock::now() + 30s;
    do {
      remove[0].answer = Answer::kLate;
      engine_->remove(remove, soon());
      if (remove[0].answer != Answer::kOk) std::this_thread::sleep_for(200ms);
    } while (remove[0].answer != Answer::kOk && Clock::now() < limit);
    EXPECT_EQ(remove[0].answer, Answer::kOk);
    engine_->find(find, soon());
    EXPECT_EQ(find[0].answer, Answer::kAbsent);
    ++i;
  }
}

TEST_P(EngineContract, ManyItemsEachWithItsOwnBytes) {
  std::size_t at = 0;
  std::vector<WriteItem> items;
  std::vector<std::vector<std::byte>> right;
  for (int i = 0; i < 40; ++i) {
    right.push_back(content(static_cast<std::size_t>(1 + i % 7) * 4096, static_cast<unsigned>(i)));
    std::byte* data = place(at, right.back().size());
    std::copy(right.back().begin(), right.back().end(), data);
    items.push_back({name(i), {data, right.back().size()}});
    written_.push_back(name(i));
  }
  std::vector<int> calls(items.size());
  engine_->write(items, soon(), [&](std::size_t i) { ++calls[i]; });
  for (std::size_t i = 0; i < items.size(); ++i) {
    EXPECT_EQ(calls[i], 1);
    EXPECT_EQ(items[i].answer, Answer::kOk);
  }
  std::fill(arena_.begin(), arena_.end(), kPoison);
  at = 0;
  std::vector<ReadItem> reads;
  for (std::size_t n = 0; n < items.size() + 3; ++n) {
    const std::size_t i = (n * 17) % (items.size() + 3);  // in another order; three that are not there
    const std::size_t bytes = i < items.size() ? right[i].size() : 4096;
    const auto length = static_cast<std::int64_t>(bytes);
    reads.push_back({name(static_cast<int>(i)), {{0, length}}, place(at, bytes), length});
  }
  std::fill(calls.begin(), calls.end(), 0);
  calls.resize(reads.size());
  engine_->read(reads, soon(), [&](std::size_t i) { ++calls[i]; });
  for (std::size_t n = 0; n < reads.size(); ++n) {
    const std::size_t i = (n * 17) % (items.size() + 3);
    EXPECT_EQ(calls[n], 1);
    ASSERT_EQ(reads[n].answer, i < items.size() ? Answer::kOk : Answer::kAbsent) << i;
    if (i < items.size()) {
      EXPECT_TRUE(std::equal(right[i].begin(), right[i].end(), reads[n].into)) << i;
    }
  }
}

TEST_P(EngineContract, ReadsRanges) {
  if (!engine_->reads_ranges()) GTEST_SKIP() << "whole objects only";
  const std::vector<std::byte> right = content(1 << 20, 3);
  ASSERT_EQ(write(name(0), right), Answer::kOk);
  const std::vector<Bytes> ranges{{0, 4096}, {65536, 131072}, {(1 << 20) - 4096, 1 << 20}};
  const ReadItem item = read(name(0), ranges, 1 << 20);
  ASSERT_EQ(item.answer, Answer::kOk);
  for (std::int64_t i = 0; i < 1 << 20; ++i) {
    const bool in = std::any_of(ranges.begin(), ranges.end(), [&](Bytes r) { return r.begin <= i && i < r.end; });
    const auto at = static_cast<std::size_t>(i);
    ASSERT_EQ(arena_[at], in ? right[at] : kPoison) << i;
  }
}

TEST_P(EngineContract, SaysHowLongItReallyIs) {
  const std::vector<std::byte> right = content(3 * 4096, 5);
  ASSERT_EQ(write(name(0), right), Answer::kOk);
  for (const std::int64_t expected : {2 * 4096, 4 * 4096}) {
    const ReadItem item = read(name(0), {{0, expected}}, expected);
    EXPECT_NE(arena_[static_cast<std::size_t>(expected)], std::byte{0}) << "behind the item's memory";
    EXPECT_EQ(arena_[static_cast<std::size_t>(expected)], kPoison);
    // It may also say that nothing came of it, but never that all is well.
    if (item.answer == Answer::kOk) {
      EXPECT_EQ(item.found, 3 * 4096);
    }
  }
}

TEST_P(EngineContract, ReplacesOnlyWhenTold) {
  const std::vector<std::byte> first = content(8192, 1);
  const std::vector<std::byte> second = content(8192, 2);
  ASSERT_EQ(write(name(0), first), Answer::kOk);
  const Answer again = write(name(0), second);
  EXPECT_TRUE(again == Answer::kThere || again == Answer::kOk) << name_of(again);
  ASSERT_EQ(read(name(0), 8192).answer, Answer::kOk);
  const auto& is = again == Answer::kThere ? first : second;
  EXPECT_TRUE(std::equal(is.begin(), is.end(), arena_.begin()));
  const std::vector<std::byte> third = content(12288, 3);
  ASSERT_EQ(write(name(0), third, true), Answer::kOk);
  ASSERT_EQ(read(name(0), 12288).answer, Answer::kOk);
  EXPECT_TRUE(std::equal(third.begin(), third.end(), arena_.begin()));
}

TEST_P(EngineContract, FindsThousandNames) {
  std::vector<FindItem> items;
  for (int i = 0; i < 1000; ++i) items.push_back({name(i)});
  for (int i = 0; i < 1000; i += 100) ASSERT_EQ(write(name(i), content(4096, 1)), Answer::kOk);
  engine_->find(items, soon());
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(items[static_cast<std::size_t>(i)].answer, i % 100 == 0 ? Answer::kOk : Answer::kAbsent) << i;
  }
}

TEST_P(EngineContract, EndsAtItsDeadline) {
  const std::vector<std::byte> right = content(4096, 1);
  ASSERT_EQ(write(name(0), right), Answer::kOk);
  const auto begin = Clock::now();
  std::vector<FindItem> find{{name(0)}};
  engine_->find(find, begin - 1s);
  std::vector<ReadItem> reads{{name(0), {{0, 4096}}, arena_.data(), 4096}};
  int calls = 0;
  engine_->read(reads, begin - 1s, [&](std::size_t) { ++calls; });
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(reads[0].answer == Answer::kLate || reads[0].answer == Answer::kOk) << name_of(reads[0].answer);
  EXPECT_LT(Clock::now() - begin, 5s);
  // And what comes after it is not spoilt by it.
  ASSERT_EQ(read(name(0), 4096).answer, Answer::kOk);
  EXPECT_TRUE(std::equal(right.begin(), right.end(), arena_.begin()));
}

TEST_P(EngineContract, ServesThreadsAtOnce) {
  constexpr std::size_t kEach = 4 << 20;
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 5; ++round) {
        std::byte* memory = arena_.data() + static_cast<std::size_t>(t) * kEach;
        const std::vector<std::byte> right = content(65536, static_cast<unsigned>(10 * t + round));
        std::copy(right.begin(), right.end(), memory);
        const std::string own = name(10 * t + round);
        std::vector<WriteItem> write{{own, {memory, right.size()}}};
        engine_->write(write, soon(), [](std::size_t) {});
        std::fill_n(memory, right.size(), kPoison);
        std::vector<ReadItem> read{{own, {{0, 65536}}, memory, 65536}};
        engine_->read(read, soon(), [](std::size_t) {});
        const bool same = std::equal(right.begin(), right.end(), memory);
        good += write[0].answer == Answer::kOk && read[0].answer == Answer::kOk && same ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 40; ++i) written_.push_back(name(i));
  EXPECT_EQ(good, 20);
}

TEST_P(EngineContract, ListsFolders) {
  for (const char* tail : {"one", "two", "sub/three", "sub/four", "sub/deep/five"}) {
    ASSERT_EQ(write(folder_ + tail, content(4096, 1)), Answer::kOk);
  }
  const auto list = [&](const std::string& folder, Answer& answer) {
    std::map<std::string, std::int64_t> out;
    answer = engine_->list(folder, soon(), [&](const ListedObject& one) {
      EXPECT_EQ(out.count(one.name), 0U) << one.name << " twice";
      out[one.name] = one.bytes;
      return true;
    });
    return out;
  };
  Answer answer{};
  const auto top = list(folder_, answer);
  if (answer == Answer::kAbsent) GTEST_SKIP() << "cannot list";
  ASSERT_EQ(answer, Answer::kOk);
  ASSERT_EQ(top.size(), 3U);
  EXPECT_EQ(top.count(folder_ + "sub/"), 1U);
  EXPECT_EQ(top.count(folder_ + "one"), 1U);
  const auto sub = list(folder_ + "sub/", answer);
  EXPECT_EQ(sub.size(), 3U);
  EXPECT_EQ(sub.count(folder_ + "sub/deep/"), 1U);
}

INSTANTIATE_TEST_SUITE_P(Places, EngineContract, testing::ValuesIn(places()), [](const auto& one) {
  const std::string& url = one.param.url;
  return url.empty() ? std::string("memory") : Url::parse(url).scheme + std::to_string(one.index);
});

TEST(EngineUrl, IsTakenApart) {
  const Url url = Url::parse("redis://us%65r:p%40ss@[::1]:6379/3/x?ttl=60&prefix=a%2Fb");
  EXPECT_EQ(url.scheme, "redis");
  EXPECT_EQ(url.user, "user");
  EXPECT_EQ(url.password, "p@ss");
  EXPECT_EQ(url.host, "::1");
  EXPECT_EQ(url.port, 6379);
  EXPECT_EQ(url.path, "3/x");
  const std::vector<std::pair<std::string, std::string>> options{{"ttl", "60"}, {"prefix", "a/b"}};
  EXPECT_EQ(url.options, options);
  EXPECT_EQ(Url::parse("s3://bucket").path, "");
}

TEST(EngineUrl, SaysWhatIsWrong) {
  const auto why = [](const std::string& text) -> std::string {
    try {
      Url::parse(text);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(why("bucket/prefix"), "URL of a store: it must be scheme://host/path, such as s3://bucket/prefix");
  EXPECT_EQ(why("redis://h:0/"), "URL of a store: its port is '0', of 1 to 65535");
  EXPECT_EQ(why("redis://h:6379x/"), "URL of a store: its port is '6379x', of 1 to 65535");
  for (const char* text :
       {"redis://:s3cr/et@h:6379", "redis://u:s3/cr/et@h", "redis://u:1?s3cr@h/0", "redis://u:p@s3/cr@h"}) {
    EXPECT_EQ(why(text).find("s3"), std::string::npos) << "no piece of a password in a message";
    EXPECT_NE(why(text), "") << text;
  }
  EXPECT_EQ(why("redis://u:sec%2@h/"), "URL of a store: a % in the password is not followed by two hex digits");
  EXPECT_EQ(why("s3://b/p?a=1&a=2"), "URL of a store: the option a is given twice");
  EXPECT_EQ(why("s3://b/p#x"), "URL of a store: a # in it");
}

}  // namespace
}  // namespace kvstride::test
