// SPDX-License-Identifier: Apache-2.0
// The remote tier over an engine in memory that fails as others do.
#include "store/remote/remote_tier.h"

#include <gtest/gtest.h>

#include <numeric>

#include "memory_engine.h"
#include "store/remote/breaker.h"
#include "store/remote/known.h"
#include "store_blocks.h"

namespace kvstride::test {
namespace {

using store::Answer;
using store::Clock;

constexpr std::int64_t kImage = 8192;  ///< of a chunk of BlockClient with all heads: a header and 4 KiB

RemoteTierOptions quick() {
  RemoteTierOptions out;
  out.staging_bytes = 16 << 20;
  out.timeout = 2s;
  out.lookup_timeout = 500ms;
  return out;
}
TierPtr tier_over(const std::shared_ptr<MemoryEngine>& engine, const RemoteTierOptions& options = quick()) {
  return store::make_remote_tier(options, engine);
}
std::uint64_t counter(const TierPtr& tier, const char* name) { return tier_metrics(*tier).counters.at(name); }
Outcomes all(Outcome outcome, std::size_t count) { return Outcomes(count, outcome); }

TEST(RemoteTier, AnotherProcessReadsWhatWasPut) {
  const auto engine = std::make_shared<MemoryEngine>();
  BlockClient writer({tier_over(engine)}, 1, "B N KV H D");
  EXPECT_EQ(writer.put({1, 2, 3}), all(Outcome::kOk, 3));
  BlockClient reader({tier_over(engine)}, 1, "B KV H N D");
  EXPECT_EQ(reader.get({2, 9, 1}), (Outcomes{Outcome::kOk, Outcome::kMiss, Outcome::kOk}));
  EXPECT_EQ(reader.lookup({1, 2, 3, 4}), (std::vector<bool>{true, true, true, false}));
  BlockClient other({tier_over(engine)}, 2, "B KV H N D");
  EXPECT_EQ(other.get({1}), all(Outcome::kMiss, 1)) << "another namespace";
}

TEST(RemoteTier, ObjectsAreFilesOfADirectory) {
  const auto engine = std::make_shared<MemoryEngine>();
  const Scratch scratch;
  {
    BlockClient writer({tier_over(engine)}, 1, "B N KV H D");
    ASSERT_EQ(writer.put({1, 2}), all(Outcome::kOk, 2));
    BlockClient disk({directory_tier(small_tier(scratch.path()))}, 1, "B N KV H D");
    ASSERT_EQ(disk.put({1}), all(Outcome::kOk, 1));
  }
  int chunks = 0;
  for (const auto& [name, bytes] : engine->objects) {
    if (name.find('/') == name.rfind('/')) continue;  // a marker
    ++chunks;
    const std::filesystem::path path = scratch.path() + "/" + name;
    if (std::filesystem::exists(path)) {
      std::ifstream file(path, std::ios::binary);
      const std::string same((std::istreambuf_iterator<char>(file)), {});
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), reinterpret_cast<const std::byte*>(same.data()),
                             reinterpret_cast<const std::byte*>(same.data()) + same.size()));
      continue;
    }
    std::filesystem::create_directories(path.parent_path());
    std::filesystem::permissions(path.parent_path(), std::filesystem::perms::owner_all);
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    std::filesystem::permissions(path, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  }
  EXPECT_EQ(chunks, 2);
  BlockClient reader({directory_tier(small_tier(scratch.path()))}, 1, "B KV H N D");
  EXPECT_EQ(reader.get({1, 2}), all(Outcome::kOk, 2)) << "an object copied into a directory is a chunk there";
}

TEST(RemoteTier, HeadRangesOfOthersAreFoundAndReadAlone) {
  const auto engine = std::make_shared<MemoryEngine>();
  {
    BlockClient whole({tier_over(engine)}, 1, "B N KV H D");
    ASSERT_EQ(whole.put({1}), all(Outcome::kOk, 1));
    BlockClient odd({tier_over(engine)}, 1, "B N KV H D", 3, 4);  // no rank's share
    ASSERT_EQ(odd.put({2}), all(Outcome::kOk, 1));
    BlockClient first({tier_over(engine)}, 1, "B N KV H D", 0, 4);
    BlockClient second({tier_over(engine)}, 1, "B N KV H D", 4, 4);
    ASSERT_EQ(first.put({3}), all(Outcome::kOk, 1));
    ASSERT_EQ(second.put({3}), all(Outcome::kOk, 1));
  }
  const TierPtr tier = tier_over(engine);
  BlockClient quarter({tier}, 1, "B KV H N D", 4, 2);
  EXPECT_EQ(quarter.get({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(quarter.get({2}), all(Outcome::kOk, 1));
  EXPECT_EQ(quarter.get({3}), all(Outcome::kOk, 1));
  BlockClient everything({tier}, 1, "B KV H N D");
  EXPECT_EQ(everything.get({3}), all(Outcome::kOk, 1)) << "put together from two";
  EXPECT_EQ(everything.get({2}), all(Outcome::kMiss, 1)) << "only some of its heads are there";
}

TEST(RemoteTier, MarkersThatAreGoneHideNothingUsual) {
  const auto engine = std::make_shared<MemoryEngine>();
  {
    BlockClient whole({tier_over(engine)}, 1, "B N KV H D");
    ASSERT_EQ(whole.put({1}), all(Outcome::kOk, 1));
    BlockClient half({tier_over(engine)}, 1, "B N KV H D", 4, 4);
    ASSERT_EQ(half.put({2}), all(Outcome::kOk, 1));
  }
  std::erase_if(engine->objects, [](const auto& one) { return one.first.find('/') == one.first.rfind('/'); });
  BlockClient whole({tier_over(engine)}, 1, "B N KV H D");
  EXPECT_EQ(whole.get({1}), all(Outcome::kOk, 1));
  BlockClient half({tier_over(engine)}, 1, "B N KV H D", 4, 4);
  EXPECT_EQ(half.get({1, 2}), all(Outcome::kOk, 2));
}

TEST(RemoteTier, EveryFlippedByteIsAMissAndMendedByTheNextPut) {
  const auto engine = std::make_shared<MemoryEngine>();
  BlockClient writer({tier_over(engine)}, 1, "B N KV H D");
  ASSERT_EQ(writer.put({1}), all(Outcome::kOk, 1));
  const auto chunk = [&]() -> std::pair<const std::string, std::vector<std::byte>>& {
    return *std::find_if(engine->objects.begin(), engine->objects.end(),
                         [](const auto& one) { return one.second.size() > 1; });
  };
  ASSERT_EQ(static_cast<std::int64_t>(chunk().second.size()), kImage);
  std::mt19937 dice(3);
  for (int i = 0; i < 40; ++i) {
    const std::size_t at = dice() % chunk().second.size();
    chunk().second[at] ^= std::byte{1};
    const TierPtr tier = tier_over(engine);
    BlockClient reader({tier}, 1, "B KV H N D");
    EXPECT_EQ(reader.get({1}), all(Outcome::kCorrupt, 1)) << at;
    EXPECT_EQ(reader.get({1}), all(Outcome::kMiss, 1)) << "not read again";
    EXPECT_EQ(counter(tier, "corrupt"), 1U);
    EXPECT_EQ(engine->objects.count(chunk().first), 1U) << "nobody removes what may be sound there";
    EXPECT_EQ(reader.put({1}), all(Outcome::kOk, 1));
    EXPECT_EQ(reader.get({1}), all(Outcome::kOk, 1));
  }
}

TEST(RemoteTier, CutLongAndForeignObjectsAreNoChunks) {
  const auto engine = std::make_shared<MemoryEngine>();
  BlockClient writer({tier_over(engine)}, 1, "B N KV H D");
  ASSERT_EQ(writer.put({1}), all(Outcome::kOk, 1));
  for (const std::size_t bytes : {0UL, 1UL, 4095UL, 4096UL, 8191UL, 8193UL, 12288UL, 40UL << 20}) {
    for (auto& [name, content] : engine->objects) {
      if (content.size() > 1) content.resize(bytes);
    }
    BlockClient reader({tier_over(engine)}, 1, "B KV H N D");
    const Outcome outcome = reader.get({1})[0];
    EXPECT_TRUE(outcome == Outcome::kMiss || outcome == Outcome::kCorrupt) << bytes << ' ' << name_of(outcome);
    std::erase_if(engine->objects, [](const auto& one) { return one.second.size() != 1; });
    BlockClient healer({tier_over(engine)}, 1, "B N KV H D");
    ASSERT_EQ(healer.put({1}), all(Outcome::kOk, 1));
  }
}

TEST(RemoteTier, WhatChangedItsLengthIsReadAgainWhole) {
  const auto engine = std::make_shared<MemoryEngine>();
  BlockClient writer({tier_over(engine)}, 1, "B N KV H D");
  ASSERT_EQ(writer.put({1}), all(Outcome::kOk, 1));
  const TierPtr tier = tier_over(engine);
  BlockClient reader({tier}, 1, "B KV H N D");
  ASSERT_EQ(reader.lookup({1}), std::vector<bool>{true});
  for (auto& [name, content] : engine->objects) {
    if (content.size() > 1) content.resize(4096);
  }
  EXPECT_EQ(reader.get({1}), all(Outcome::kCorrupt, 1));
}

TEST(RemoteTier, FailuresAreTriedAgainAndThenAreMisses) {
  const auto engine = std::make_shared<MemoryEngine>();
  BlockClient writer({tier_over(engine)}, 1, "B N KV H D");
  std::atomic<int> failures{2};
  const auto fail_some = [&](const std::string& what, const std::string& name) -> std::optional<Answer> {
    if (name.find('/') == name.rfind('/') || what == "find") return std::nullopt;
    return failures-- > 0 ? std::optional(Answer::kBroken) : std::nullopt;
  };
  engine->set_fault(fail_some);
  EXPECT_EQ(writer.put({1}), all(Outcome::kOk, 1)) << "the third attempt";
  const TierPtr tier = tier_over(engine);
  BlockClient reader({tier}, 1, "B KV H N D");
  failures = 2;
  EXPECT_EQ(reader.get({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(counter(tier, "retries"), 2U);
  failures = 3;
  EXPECT_EQ(reader.get({1}), all(Outcome::kIoError, 1)) << "two are enough";
  EXPECT_EQ(counter(tier, "retries"), 4U);
  failures = 0;
  EXPECT_EQ(reader.get({1}), all(Outcome::kOk, 1)) << "and it is not forgotten";
  failures = 1;
  engine->latency_us = 600'000;
  EXPECT_EQ(reader.get({1}), all(Outcome::kIoError, 1)) << "somebody waits for it: one slow failure is enough";
  EXPECT_EQ(counter(tier, "retries"), 4U);
}

TEST(RemoteTier, OneCutOfManyChunksLeavesItAlone) {
  const auto engine = std::make_shared<MemoryEngine>();
  const TierPtr tier = tier_over(engine);
  BlockClient client({tier}, 1, "B N KV H D");
  ASSERT_EQ(client.put({1, 2, 3, 4, 5, 6}), all(Outcome::kOk, 6));
  std::atomic<bool> cut{true};
  engine->set_fault([&](const std::string& what, const std::string&) -> std::optional<Answer> {
    return what == "read" && cut ? std::optional(Answer::kBroken) : std::nullopt;
  });
  std::thread end([&] {
    std::this_thread::sleep_for(10ms);
    cut = false;
  });
  EXPECT_EQ(client.get({1, 2, 3, 4, 5, 6}), all(Outcome::kOk, 6)) << "by the second attempt";
  end.join();
  EXPECT_EQ(counter(tier, "trips"), 0U);
}

// Whatever is asked first, and however short its time: questions, writes, of a process that knows nothing.
TEST(RemoteTier, ASilentEngineIsLeftAloneByWhoeverAsks) {
  for (const bool write : {false, true}) {
    const auto engine = std::make_shared<MemoryEngine>();
    RemoteTierOptions options = quick();
    options.timeout = 300ms;
    options.lookup_timeout = 200ms;
    const TierPtr tier = tier_over(engine, options);
    BlockClient client({tier}, 1, "B N KV H D");
    engine->latency_us = 60'000'000;
    for (int i = 0; i < 12 && counter(tier, "trips") == 0; ++i) {
      write ? static_cast<void>(client.put({10 + i})) : static_cast<void>(client.lookup({10 + i}));
    }
    EXPECT_EQ(counter(tier, "trips"), 1U) << (write ? "writes" : "questions");
    const auto begin = Clock::now();
    EXPECT_EQ(client.lookup({1}), std::vector<bool>{false});
    EXPECT_LT(Clock::now() - begin, 150ms);
    EXPECT_GE(counter(tier, "refused_sick"), 1U);
    engine->latency_us = 0;
    const auto limit = Clock::now() + 20s;
    while (client.put({1})[0] != Outcome::kOk && Clock::now() < limit) std::this_thread::sleep_for(20ms);
    EXPECT_EQ(client.lookup({1}), std::vector<bool>{true});
  }
}

TEST(RemoteTier, WhatIsRemovedWhileItIsSickGoesWhenItIsWell) {
  const auto engine = std::make_shared<MemoryEngine>();
  const TierPtr tier = tier_over(engine);
  BlockClient client({tier}, 1, "B N KV H D");
  ASSERT_EQ(client.put({1, 2}), all(Outcome::kOk, 2));
  const auto count = [&] {
    const std::lock_guard lock(engine->mutex);
    return engine->objects.size();
  };
  const std::size_t before = count();
  engine->set_fault([](const std::string&, const std::string&) { return std::optional(Answer::kDenied); });
  EXPECT_NE(client.get({1})[0], Outcome::kOk);
  client.store.remove(keys_of({1, 2}));
  std::this_thread::sleep_for(50ms);
  engine->set_fault({});
  const auto limit = Clock::now() + 20s;
  while (count() != before - 2 && Clock::now() < limit) std::this_thread::sleep_for(20ms);
  EXPECT_EQ(count(), before - 2);
  EXPECT_EQ(client.put({1}), all(Outcome::kOk, 1));
}

// Somebody else fills the engine: what is found there says nothing about whether this process may write.
TEST(RemoteTier, FoundIsNotWritten) {
  const auto engine = std::make_shared<MemoryEngine>();
  BlockClient other({tier_over(engine)}, 1, "B N KV H D");
  ASSERT_EQ(other.put({1, 2, 3, 4}), all(Outcome::kOk, 4));
  engine->set_fault([](const std::string& what, const std::string&) -> std::optional<Answer> {
    return what == "write" ? std::optional(Answer::kDenied) : std::nullopt;
  });
  const TierPtr tier = tier_over(engine);
  BlockClient client({tier}, 1, "B N KV H D");
  EXPECT_NE(client.put({9})[0], Outcome::kOk);
  EXPECT_EQ(client.lookup({1}), std::vector<bool>{true});
  for (int i = 0; i < 5; ++i) client.put({1});
  EXPECT_EQ(client.put({8}), all(Outcome::kRefused, 1)) << "writes pause still";
  EXPECT_EQ(counter(tier, "denied"), 1U);
}

TEST(RemoteTier, ASickEngineIsAMissAtOnceUntilItIsWell) {
  const auto engine = std::make_shared<MemoryEngine>();
  const TierPtr tier = tier_over(engine);
  BlockClient client({tier}, 1, "B N KV H D");
  ASSERT_EQ(client.put({1, 2}), all(Outcome::kOk, 2));
  std::atomic<bool> down{true};
  engine->set_fault([&](const std::string&, const std::string&) -> std::optional<Answer> {
    return down ? std::optional(Answer::kBroken) : std::nullopt;
  });
  for (int i = 0; i < 5; ++i) EXPECT_NE(client.get({1})[0], Outcome::kOk);
  EXPECT_EQ(counter(tier, "trips"), 1U);
  const int asked = engine->finds + engine->reads + engine->writes;
  const auto begin = Clock::now();
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(client.get({1}), all(Outcome::kMiss, 1));
    EXPECT_EQ(client.put({3}), all(Outcome::kRefused, 1));
    EXPECT_EQ(client.lookup({1, 2}), (std::vector<bool>{false, false}));
  }
  EXPECT_LT(Clock::now() - begin, 3s);
  EXPECT_LE(engine->finds + engine->reads + engine->writes, asked + 16) << "it is left alone";
  down = false;
  const auto limit = Clock::now() + 20s;
  while (client.get({1})[0] != Outcome::kOk && Clock::now() < limit) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(client.get({1, 2}), all(Outcome::kOk, 2)) << "well again, without a restart";
  EXPECT_EQ(client.put({3}), all(Outcome::kOk, 1));
}

TEST(RemoteTier, WhoMayNotWriteStillReads) {
  const auto engine = std::make_shared<MemoryEngine>();
  {
    BlockClient writer({tier_over(engine)}, 1, "B N KV H D");
    ASSERT_EQ(writer.put({1}), all(Outcome::kOk, 1));
  }
  for (const Answer answer : {Answer::kDenied, Answer::kFull, Answer::kBroken}) {
    std::atomic<bool> refuses{true};
    engine->set_fault([&](const std::string& what, const std::string&) -> std::optional<Answer> {
      return what == "write" && refuses ? std::optional(answer) : std::nullopt;
    });
    const TierPtr tier = tier_over(engine);
    BlockClient client({tier}, 1, "B N KV H D");
    for (int i = 10; i < 20; ++i) EXPECT_NE(client.put({i})[0], Outcome::kOk);
    EXPECT_EQ(client.get({1}), all(Outcome::kOk, 1));
    const char* name = answer == Answer::kFull ? "no_space" : answer == Answer::kDenied ? "denied" : "io_errors";
    EXPECT_GE(counter(tier, name), 1U);
    EXPECT_GE(counter(tier, "refused_sick"), 1U) << "writes pause";
    refuses = false;
    const auto limit = Clock::now() + 20s;
    while (client.put({21})[0] != Outcome::kOk && Clock::now() < limit) std::this_thread::sleep_for(20ms);
    EXPECT_EQ(client.put({22}), all(Outcome::kOk, 1));
    engine->set_fault({});
  }
}

TEST(RemoteTier, AnEngineThatHangsKeepsNobody) {
  const auto engine = std::make_shared<MemoryEngine>();
  engine->threads = 2;
  const TierPtr tier = tier_over(engine);
  BlockClient client({tier}, 1, "B N KV H D");
  ASSERT_EQ(client.put({1, 2, 3, 4}), all(Outcome::kOk, 4));
  engine->hangs = true;
  auto begin = Clock::now();
  for (const int first : {1, 3}) {  // each job keeps a thread
    EXPECT_EQ(client.get_within({first, first + 1}, 300ms), all(Outcome::kTimeout, 2));
  }
  EXPECT_LT(Clock::now() - begin, 2s);
  std::this_thread::sleep_for(1s);
  begin = Clock::now();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(client.get_within({1}, 5s), all(Outcome::kMiss, 1));
  EXPECT_LT(Clock::now() - begin, 2s) << "all threads are kept: misses at once";
  engine->hangs = false;
  const auto limit = Clock::now() + 20s;
  while (client.get({1})[0] != Outcome::kOk && Clock::now() < limit) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(client.get({1, 2, 3, 4}), all(Outcome::kOk, 4));
}

TEST(RemoteTier, WritesUnderWayAreBounded) {
  const auto engine = std::make_shared<MemoryEngine>();
  RemoteTierOptions options = quick();
  options.queue_bytes = 3 * kImage;
  const TierPtr tier = tier_over(engine, options);
  BlockClient client({tier}, 1, "B N KV H D");
  engine->latency_us = 200'000;
  Outcomes outcomes = client.put({1, 2, 3, 4, 5, 6});
  EXPECT_EQ(std::count(outcomes.begin(), outcomes.end(), Outcome::kOk), 3);
  EXPECT_EQ(std::count(outcomes.begin(), outcomes.end(), Outcome::kRefused), 3);
  EXPECT_EQ(counter(tier, "refused_queue"), 3U);
  EXPECT_EQ(client.put({7, 8, 9}), all(Outcome::kOk, 3)) << "the room comes back";
}

TEST(RemoteTier, SomebodyElsesChunkIsNotSentAgain) {
  const auto engine = std::make_shared<MemoryEngine>();
  const TierPtr one = tier_over(engine);
  const TierPtr two = tier_over(engine);
  BlockClient first({one}, 1, "B N KV H D");
  BlockClient second({two}, 1, "B N KV H D");
  ASSERT_EQ(first.put({1, 2}), all(Outcome::kOk, 2));
  ASSERT_EQ(second.put({1, 2}), all(Outcome::kOk, 2));
  EXPECT_EQ(counter(one, "writes"), 2U);
  EXPECT_EQ(counter(two, "writes"), 0U);
  EXPECT_EQ(counter(two, "already_there"), 2U);
}

// Chunks come one by one from the store's threads; the first shall not go alone.
TEST(RemoteTier, AJobsChunksGoTogether) {
  const auto engine = std::make_shared<MemoryEngine>();
  engine->threads = 3;
  BlockClient client({tier_over(engine)}, 1, "B N KV H D");
  ASSERT_EQ(client.put({1, 2, 3, 4, 5, 6}), all(Outcome::kOk, 6));
  int least = 100;
  for (int i = 0; i < 50 && least > 1; ++i) {  // a busy machine may need more than the tier's patience
    const int before = engine->reads;
    ASSERT_EQ(client.get({1, 2, 3, 4, 5, 6}), all(Outcome::kOk, 6));
    least = std::min(least, engine->reads - before);
  }
  EXPECT_EQ(least, 1);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 50; ++i) ASSERT_EQ(client.get({1}), all(Outcome::kOk, 1));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

TEST(RemoteTier, AThousandKeysAreOneJourney) {
  const auto engine = std::make_shared<MemoryEngine>();
  engine->names = 4000;
  const TierPtr tier = tier_over(engine);
  Store store({tier}, block_space(1));
  std::vector<int> numbers(1000);
  std::iota(numbers.begin(), numbers.end(), 0);
  const std::vector<Key> keys = keys_of(numbers);
  EXPECT_EQ(store.lookup_prefix(keys), 0);
  EXPECT_LE(engine->finds, 2) << "head ranges, names";
  {
    BlockClient writer({tier_over(engine)}, 1, "B N KV H D");
    for (int i = 0; i < 1000; i += 6) {
      std::vector<int> some;
      for (int k = i; k < std::min(i + 6, 1000); ++k) some.push_back(k);
      ASSERT_EQ(writer.put(some), all(Outcome::kOk, some.size()));
    }
  }
  const int before = engine->finds;
  EXPECT_EQ(store.lookup_prefix(keys), 1000);
  EXPECT_LE(engine->finds - before, 2);
  EXPECT_EQ(store.lookup_prefix(keys), 1000);
  EXPECT_LE(engine->finds - before, 2) << "now it is known";
}

TEST(RemoteTier, RemoveReachesEveryRange) {
  const auto engine = std::make_shared<MemoryEngine>();
  {
    BlockClient half({tier_over(engine)}, 1, "B N KV H D", 0, 4);
    ASSERT_EQ(half.put({1}), all(Outcome::kOk, 1));
  }
  BlockClient client({tier_over(engine)}, 1, "B N KV H D");
  ASSERT_EQ(client.put({1}), all(Outcome::kOk, 1));
  EXPECT_EQ(client.store.remove(keys_of({1})), 1);
  const auto chunks = [&] {
    const std::lock_guard lock(engine->mutex);
    return std::count_if(engine->objects.begin(), engine->objects.end(),
                         [](const auto& one) { return one.second.size() > 1; });
  };
  const auto limit = Clock::now() + 10s;
  while (chunks() > 0 && Clock::now() < limit) std::this_thread::sleep_for(5ms);
  EXPECT_EQ(chunks(), 0);
  EXPECT_EQ(client.get({1}), all(Outcome::kMiss, 1));
}

TEST(RemoteTier, BelowHostMemoryItPromotesAndIsWrittenBehind) {
  const auto engine = std::make_shared<MemoryEngine>();
  engine->latency_us = 20'000;
  const TierPtr host = host_tier({4 << 20});
  {
    BlockClient writer({host, tier_over(engine)}, 1, "B N KV H D");
    ASSERT_EQ(writer.put({1, 2, 3}), all(Outcome::kOk, 3));
    const std::lock_guard lock(engine->mutex);
    EXPECT_EQ(engine->regions.size(), 2U) << "host memory and staging: images go out from where they lie";
  }
  const TierPtr fresh = host_tier({4 << 20});
  BlockClient reader({fresh, tier_over(engine)}, 1, "B KV H N D");
  EXPECT_EQ(reader.get({1, 2, 3}), all(Outcome::kOk, 3));
  const int reads = engine->reads;
  EXPECT_EQ(reader.get({1, 2, 3}), all(Outcome::kOk, 3));
  EXPECT_EQ(engine->reads, reads) << "they are in host memory now";
}

TEST(RemoteTier, PrefetchBringsItUp) {
  const auto engine = std::make_shared<MemoryEngine>();
  {
    BlockClient writer({tier_over(engine)}, 1, "B N KV H D");
    ASSERT_EQ(writer.put({1, 2, 3}), all(Outcome::kOk, 3));
    BlockClient half({tier_over(engine)}, 1, "B N KV H D", 0, 4);
    ASSERT_EQ(half.put({4}), all(Outcome::kOk, 1));
  }
  const auto damaged = std::find_if(engine->objects.begin(), engine->objects.end(), [](const auto& one) {
    return one.first.find(keys_of({3})[0].hex()) != std::string::npos;
  });
  damaged->second[5000] ^= std::byte{4};
  const TierPtr host = host_tier({4 << 20});
  BlockClient reader({host, tier_over(engine)}, 1, "B KV H N D");
  EXPECT_EQ(Outcomes(reader.store.prefetch(keys_of({1, 2, 3, 4, 9})).wait()),
            (Outcomes{Outcome::kOk, Outcome::kOk, Outcome::kCorrupt, Outcome::kMiss, Outcome::kMiss}));
  EXPECT_EQ(Outcomes(reader.store.prefetch(keys_of({4}), Range{2, 2}).wait()), all(Outcome::kOk, 1));
  EXPECT_EQ(tier_metrics(*host).chunks, 3);
  const int reads = engine->reads;
  EXPECT_EQ(reader.get({1, 2}), all(Outcome::kOk, 2));
  EXPECT_EQ(Outcomes(reader.store.prefetch(keys_of({1, 2})).wait()), all(Outcome::kOk, 2));
  EXPECT_EQ(engine->reads, reads);
  EXPECT_THROW(reader.store.prefetch(keys_of({1}), Range{7, 2}), Error);
}

TEST(RemoteTier, BadOptionsAreNamed) {
  const auto why = [](RemoteTierOptions options) -> std::string {
    try {
      store::make_remote_tier(options, std::make_shared<MemoryEngine>());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  RemoteTierOptions options = quick();
  options.staging_bytes = 4096;
  EXPECT_EQ(why(options), "RemoteTier: staging_bytes is 4096, of 8192 to 8796093022208");
  options = quick();
  options.retries = -1;
  EXPECT_EQ(why(options), "RemoteTier: retries is -1, of 0 to 100");
  EXPECT_EQ(why(quick()), "");
  options.url = "ftp://host/";
  EXPECT_THROW(remote_tier(options), Error);
}

TEST(Breaker, OpensAfterFailuresAndLetsOneTry) {
  store::Breaker breaker;
  Clock::time_point now{};
  now += 1h;
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(breaker.bad(now, now));
  breaker.good();
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(breaker.bad(now, now));
  EXPECT_TRUE(breaker.allows(now));
  EXPECT_TRUE(breaker.bad(now, now));
  EXPECT_TRUE(breaker.open());
  EXPECT_FALSE(breaker.allows(now + 100ms));
  EXPECT_TRUE(breaker.allows(now + 250ms));
  EXPECT_FALSE(breaker.allows(now + 251ms)) << "one at a time";
  EXPECT_FALSE(breaker.bad(now + 300ms, now + 300ms)) << "it was open before";
  EXPECT_FALSE(breaker.allows(now + 500ms)) << "and waits longer";
  EXPECT_TRUE(breaker.allows(now + 300ms + 500ms));
  breaker.good();
  EXPECT_FALSE(breaker.open());
  EXPECT_TRUE(breaker.bad(now, now, true)) << "hopeless";
}

TEST(Breaker, WhatFailsTogetherIsOneFailure) {
  store::Breaker breaker;
  Clock::time_point now{};
  now += 1h;
  for (int i = 0; i < 32; ++i) EXPECT_FALSE(breaker.bad(now - 1ms, now));
  EXPECT_TRUE(breaker.allows(now));
  for (int i = 1; i < 4; ++i) EXPECT_FALSE(breaker.bad(now + i * 1ms, now + i * 1ms));
  EXPECT_TRUE(breaker.bad(now + 4ms, now + 4ms));
  for (int i = 0; i < 32; ++i) EXPECT_FALSE(breaker.bad(now, now + 10ms)) << "begun before it opened";
  EXPECT_TRUE(breaker.allows(now + 4ms + 250ms)) << "the first pause";
}

TEST(Known, ForgetsWhatIsOldAndTheLeastUsed) {
  store::Known known(3, 10s);
  Clock::time_point now{};
  now += 1h;
  const auto id = [](int i) { return store::PieceId{0, keys_of({i})[0], {0, 8}}; };
  for (int i = 0; i < 3; ++i) known.learn(id(i), kImage, now + std::chrono::seconds(i));
  known.used(id(0));
  known.learn(id(3), kImage, now + 3s);
  EXPECT_EQ(known.size(), 3U);
  EXPECT_TRUE(known.holds(id(0), now + 3s));
  EXPECT_FALSE(known.holds(id(1), now + 3s)) << "the least used";
  EXPECT_TRUE(known.holds(id(2), now + 3s));
  known.learn(id(2), kImage, now + 9s);  // learnt again: ten seconds more
  EXPECT_FALSE(known.holds(id(0), now + 10s));
  EXPECT_TRUE(known.holds(id(2), now + 18s));
  EXPECT_FALSE(known.holds(id(2), now + 19s));
  EXPECT_EQ(known.size(), 0U);
  known.learn_damaged(id(5), now);
  known.learn(id(5), kImage, now + 1s);
  EXPECT_FALSE(known.holds(id(5), now + 1s));
  known.learn_mended(id(5));
  known.learn(id(5), kImage, now + 1s);
  EXPECT_TRUE(known.holds(id(5), now + 1s));
  known.forget(id(5), now + 2s);
  EXPECT_FALSE(known.holds(id(5), now + 2s));
  EXPECT_TRUE(known.was_absent(id(5), now + 11s));
  EXPECT_FALSE(known.was_absent(id(5), now + 12s));
}

}  // namespace
}  // namespace kvstride::test
