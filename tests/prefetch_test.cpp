// SPDX-License-Identifier: Apache-2.0
// Prefetches, and the gets and lookups that come while they are under way.
#include <gtest/gtest.h>

#include "memory_engine.h"
#include "store/remote/remote_tier.h"
#include "store_blocks.h"

namespace kvstride::test {
namespace {

std::uint64_t counter(const TierPtr& tier, const char* name) { return tier_metrics(*tier).counters.at(name); }
Outcomes all(Outcome outcome, std::size_t count) { return Outcomes(count, outcome); }

class Prefetch : public testing::TestWithParam<const char*> {
 protected:
  Prefetch() {
    BlockClient writer({remote()}, 1, "B N KV H D");
    EXPECT_EQ(writer.put({1, 2, 3, 4, 5}), all(Outcome::kOk, 5));
  }
  TierPtr remote() const {
    RemoteTierOptions options;
    options.staging_bytes = 16 << 20;
    options.lookup_timeout = 2s;
    return store::make_remote_tier(options, engine_);
  }
  /// What is above the engine.
  TierPtr upper() const {
    return std::string(GetParam()) == "host" ? host_tier({4 << 20}) : directory_tier(small_tier(scratch_.path()));
  }
  /// From now on reads take so long; the objects are known.
  void slow(BlockClient& client, std::chrono::microseconds time) {
    EXPECT_EQ(client.lookup({1, 2, 3, 4, 5}), std::vector<bool>(5, true));
    engine_->latency_us = time.count();
  }
  void damage(int number) {
    for (auto& [name, bytes] : engine_->objects) {
      if (name.find(keys_of({number})[0].hex()) != std::string::npos) bytes.at(5000) ^= std::byte{4};
    }
  }

  const Scratch scratch_;
  std::shared_ptr<MemoryEngine> engine_ = std::make_shared<MemoryEngine>();
};

TEST_P(Prefetch, AGetWaitsForWhatIsOnItsWay) {
  const TierPtr far = remote();
  BlockClient client({upper(), far}, 1, "B KV H N D");
  slow(client, 150ms);
  const Job job = client.store.prefetch(keys_of({1, 2, 3}));
  EXPECT_EQ(client.get({1, 2, 3}), all(Outcome::kOk, 3));
  EXPECT_EQ(Outcomes(job.wait()), all(Outcome::kOk, 3));
  EXPECT_EQ(counter(far, "reads"), 3U) << "each is read once";
  EXPECT_EQ(client.get({4}), all(Outcome::kOk, 1)) << "nobody brings it";
  EXPECT_EQ(counter(far, "reads"), 4U);
  EXPECT_TRUE(client.store.flush(5s));
}

TEST_P(Prefetch, TwoPrefetchesAreOne) {
  const TierPtr far = remote();
  BlockClient client({upper(), far}, 1, "B KV H N D");
  slow(client, 150ms);
  const Job first = client.store.prefetch(keys_of({1, 2}));
  const Job second = client.store.prefetch(keys_of({2, 1, 3}));
  EXPECT_EQ(Outcomes(second.wait()), all(Outcome::kOk, 3));
  EXPECT_EQ(Outcomes(first.wait()), all(Outcome::kOk, 2));
  EXPECT_EQ(counter(far, "reads"), 3U);
}

TEST_P(Prefetch, WhatDoesNotComeIsReadByWhoWaited) {
  damage(2);
  const TierPtr far = remote();
  BlockClient client({upper(), far}, 1, "B KV H N D");
  slow(client, 100ms);
  const Job job = client.store.prefetch(keys_of({1, 2}));
  EXPECT_EQ(client.get({1, 2}), (Outcomes{Outcome::kOk, Outcome::kMiss})) << "found damaged by the prefetch";
  EXPECT_EQ(Outcomes(job.wait()), (Outcomes{Outcome::kOk, Outcome::kCorrupt}));
}

TEST_P(Prefetch, ACancelledOneKeepsNobody) {
  const TierPtr far = remote();
  BlockClient client({host_tier({4 << 20}), far}, 1, "B KV H N D");
  slow(client, 200ms);
  const Job job = client.store.prefetch(keys_of({1, 2, 3, 4, 5}));
  job.cancel();
  EXPECT_EQ(client.get({1, 2, 3, 4, 5}), all(Outcome::kOk, 5));
  for (const Outcome one : job.wait()) EXPECT_TRUE(one == Outcome::kRefused || one == Outcome::kOk);
}

TEST_P(Prefetch, AGetsOwnDeadlineCounts) {
  const TierPtr far = remote();
  BlockClient client({upper(), far}, 1, "B KV H N D");
  slow(client, 1500ms);
  const Job job = client.store.prefetch(keys_of({1}));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(client.get_within({1}, 100ms), all(Outcome::kTimeout, 1));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 1200ms);
  EXPECT_EQ(Outcomes(job.wait()), all(Outcome::kOk, 1));
}

TEST_P(Prefetch, TheEndOfAStoreEndsWhoWaits) {
  for (const auto time : {0ms, 20ms}) {
    auto client = std::make_unique<BlockClient>(std::vector{upper(), remote()}, 1, "B KV H N D");
    slow(*client, 100ms);
    const Job job = client->store.prefetch(keys_of({1, 2, 3}));
    const Job again = client->store.prefetch(keys_of({3, 2, 1}));
    std::this_thread::sleep_for(time);
    client->store.close();
    EXPECT_EQ(job.wait().size(), 3U);
    for (const Outcome one : again.wait()) EXPECT_TRUE(one == Outcome::kRefused || one == Outcome::kOk);
    client = nullptr;
    engine_->latency_us = 0;
  }
}

TEST_P(Prefetch, LookupsBringUpWhatTheyFind) {
  const TierPtr near = upper();
  const TierPtr far = remote();
  StoreOptions options;
  options.prefetch = true;
  Store store({near, far}, block_space(1), options);
  EXPECT_EQ(store.lookup_prefix(keys_of({1, 2, 9, 3})), 2);
  EXPECT_EQ(store.lookup(keys_of({8, 4})), (std::vector<bool>{false, true}));
  ASSERT_TRUE(store.flush(5s));
  for (int i = 0; i < 500 && tier_metrics(*near).chunks < 3; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(tier_metrics(*near).chunks, 3) << "1, 2 and 4; what is behind a gap nobody wants";
  BlockClient client({near, far}, 1, "B KV H N D");
  EXPECT_EQ(client.get({1, 2, 4}), all(Outcome::kOk, 3));
  EXPECT_EQ(counter(far, "reads"), 3U);
  EXPECT_EQ(store.lookup_prefix(keys_of({1, 2})), 2);
  EXPECT_TRUE(store.flush(5s));
  EXPECT_EQ(counter(far, "reads"), 3U) << "it is there";
}

INSTANTIATE_TEST_SUITE_P(Tiers, Prefetch, testing::Values("host", "directory"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace kvstride::test
