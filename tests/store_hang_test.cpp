// SPDX-License-Identifier: Apache-2.0
// A disk that hangs: requests end at their deadlines, the rest goes on, memory is not reused, and there is an end to
// it.
#include <set>

#include "store_faults.h"

namespace kvstride::test {
namespace {

constexpr std::size_t kBytes = 3 * 4096 + 100;
constexpr std::int64_t kImage = 5 * 4096;

class StoreHang : public testing::Test {
 protected:
  /// A store over memory (if `host_bytes`) and a directory.
  void open(std::int64_t host_bytes, DirectoryTierOptions options) {
    options.lookup_timeout = 50ms;
    std::vector<TierPtr> tiers;
    if (host_bytes > 0) tiers.push_back(host_tier({.num_bytes = host_bytes}));
    tiers.push_back(tier = store::make_directory_tier(options, io));
    StoreOptions store;
    store.deadline = 200ms;
    store.num_threads = 2;
    client = std::make_unique<Client>(tiers, 0, kBytes, store);
  }
  void open(std::int64_t host_bytes = 0) { open(host_bytes, small_tier(root)); }
  ~StoreHang() override { io->lift(); }

  /// A call that must be over within a second of the deadline.
  template <typename Call>
  auto bounded(const Call& call, std::chrono::milliseconds limit = 3000ms) {
    const auto begin = SteadyClock::now();
    auto answer = call();
    EXPECT_LT(SteadyClock::now() - begin, limit);
    return answer;
  }
  Job get_later(const std::vector<int>& numbers, std::vector<std::vector<std::byte>>& into) {
    into.assign(numbers.size(), std::vector<std::byte>(kBytes, kPoison));
    RequestOptions options;
    options.deadline = 800ms;  // on a busy machine, too, they all begin
    return client->store.get_bytes(keys_of(numbers), std::vector<std::span<std::byte>>(into.begin(), into.end()),
                                   options);
  }

  Scratch scratch;
  std::string root = scratch.path();
  std::shared_ptr<FaultIo> io = std::make_shared<FaultIo>();
  TierPtr tier;
  std::unique_ptr<Client> client;
};

TEST_F(StoreHang, C92AReadThatHangsEndsAtItsDeadline) {
  open();
  ASSERT_EQ(client->put(range(0, 20)), all(Outcome::kOk, 20));
  io->set({.calls = kRead, .targets = kPiece, .effect = Fault::kHang, .times = 1});
  std::vector<std::vector<std::byte>> stuck;
  const Job job = get_later({0}, stuck);
  ASSERT_TRUE(soon([&] { return io->hanging() == 1; }));
  EXPECT_EQ(bounded([&] { return client->get(range(1, 19)); }), all(Outcome::kOk, 19)) << "another thread reads on";
  EXPECT_EQ(bounded([&] { return Outcomes(job.wait()); }), all(Outcome::kTimeout, 1));
  EXPECT_EQ(stuck[0], std::vector<std::byte>(kBytes, kPoison));
  io->lift();
  EXPECT_TRUE(soon([&] { return io->hanging() == 0; }));
  EXPECT_TRUE(soon([&] { return client->get({0}) == all(Outcome::kOk, 1); }));
  EXPECT_EQ(stuck[0], std::vector<std::byte>(kBytes, kPoison)) << "what came late was delivered";
  expect_at_rest(root, tier, io.get());
}

TEST_F(StoreHang, AllOfTheDiskHangs) {
  open();
  ASSERT_EQ(client->put(range(0, 50)), all(Outcome::kOk, 50));
  for (const Fault& fault :
       {Fault{.targets = kPiece | kDraft, .effect = Fault::kHang}, Fault{.effect = Fault::kHang}}) {
    io->set(fault);
    EXPECT_EQ(count(bounded([&] { return client->get(range(0, 50)); }), Outcome::kOk), 0);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(count(bounded([&] { return client->put(range(1000, 50)); }), Outcome::kOk), 0);
      EXPECT_EQ(count(bounded([&] { return client->get(range(0, 50)); }), Outcome::kOk), 0);
      bounded([&] { return client->get(range(5000, 50)); });  // nobody has them
      // What an engine's scheduler calls waits for nobody.
      bounded([&] { return client->lookup(range(5000, 4)); }, 1000ms);
      bounded([&] { return client->store.lookup_prefix(keys_of(range(5000, 4))); }, 1000ms);
      bounded([&] { return client->store.pin(keys_of(range(0, 4))).found().size(); }, 1000ms);
      bounded([&] { return client->remove({40 + i}); }, 1000ms);
      bounded([&] { return client->store.metrics().tiers.size(); }, 1000ms);
    }
    EXPECT_GE(tier->metrics().counters.at("refused_sick"), 1U);
    io->lift();
    ASSERT_TRUE(soon([&] { return io->hanging() == 0; }));
    EXPECT_TRUE(soon([&] { return client->get(range(0, 40)) == all(Outcome::kOk, 40); })) << "no recovery";
    EXPECT_TRUE(soon([&] { return client->put(range(2000, 20)) == all(Outcome::kOk, 20); })) << "no recovery";
    expect_at_rest(root, tier, io.get());
  }
}

/// What the first tier holds is served all the while, also where the second one has all the memory in hand.
TEST_F(StoreHang, TheOtherTierGoesOn) {
  open(60 * kImage);
  ASSERT_EQ(client->put(range(0, 20)), all(Outcome::kOk, 20));
  const Pins pins = client->store.pin(keys_of(range(0, 20)));  // or the puts evict them
  io->set({.effect = Fault::kHang});
  for (int i = 0; i < 3; ++i) {
    std::vector<std::vector<std::byte>> absent;
    const Job lost = get_later(range(7000, 300), absent);
    std::vector<std::vector<std::byte>> chunks(100, std::vector<std::byte>(kBytes));
    const Job puts = client->store.put_bytes(keys_of(range(100 * (i + 1), 100)),
                                             std::vector<std::span<const std::byte>>(chunks.begin(), chunks.end()));
    RequestOptions quick;
    quick.deadline = 1s;
    EXPECT_EQ(client->get(range(0, 20), quick), all(Outcome::kOk, 20)) << i;
    lost.wait();
    puts.wait();
  }
  io->lift();
  ASSERT_TRUE(soon([&] { return io->hanging() == 0; }));
  // Those puts were of zeros: nothing may be asked of these keys.
  EXPECT_TRUE(soon([&] { return client->put(range(9000, 10)) == all(Outcome::kOk, 10); }));
  EXPECT_EQ(client->get(range(9000, 10)), all(Outcome::kOk, 10));
}

/// Memory that a stuck read will write to belongs to nobody else until then.
TEST_F(StoreHang, BuffersOfStuckReadsAreNotReused) {
  auto options = small_tier(root);
  options.num_threads = 4;
  options.staging_bytes = 4 * kImage;
  open(0, options);
  ASSERT_EQ(client->put(range(0, 8)), all(Outcome::kOk, 8));
  for (int round = 0; round < 5; ++round) {
    io->set({.calls = kRead, .targets = kPiece, .effect = Fault::kHang, .times = 3});
    std::vector<std::vector<std::byte>> stuck;
    const Job job = get_later({0, 1, 2}, stuck);
    ASSERT_TRUE(soon([&] { return io->hanging() == 3; })) << io->hanging();
    EXPECT_EQ(Outcomes(job.wait()), all(Outcome::kTimeout, 3));
    // One buffer is left, and one thread.
    std::thread release([&] {
      std::this_thread::sleep_for(20ms);
      io->lift();
    });
    for (int i = 0; i < 50; ++i) {
      for (const Outcome got : client->get({3, 4, 5})) EXPECT_NE(got, Outcome::kCorrupt);
    }
    release.join();
    for (const auto& one : stuck) EXPECT_EQ(one, std::vector<std::byte>(kBytes, kPoison));
    ASSERT_TRUE(soon([&] { return client->get(range(0, 8)) == all(Outcome::kOk, 8); }));
    // On a busy machine one may still be asleep; the next round would have it hang on.
    ASSERT_TRUE(soon([&] { return io->hanging() == 0; })) << io->hanging();
  }
  EXPECT_EQ(tier->metrics().counters.at("corrupt"), 0U);
  expect_at_rest(root, tier, io.get());
}

TEST_F(StoreHang, AStuckWriteIsNeverHalfThere) {
  open();
  io->set({.calls = kWrite, .targets = kDraft, .effect = Fault::kHang, .times = 1});
  EXPECT_EQ(bounded([&] { return client->put({1}); }), all(Outcome::kTimeout, 1));
  EXPECT_EQ(client->get({1}), all(Outcome::kMiss, 1));
  EXPECT_EQ(client->put({2}), all(Outcome::kOk, 1));
  io->lift();
  ASSERT_TRUE(soon([&] { return io->hanging() == 0; }));
  EXPECT_TRUE(soon([&] { return client->get({1}) == all(Outcome::kOk, 1); })) << "it was written after all";
  expect_at_rest(root, tier, io.get());
}

/// The end does not wait for a disk for ever, and what is left behind ends when the disk comes back.
TEST_F(StoreHang, ClosingIsBounded) {
  open(60 * kImage);
  ASSERT_EQ(client->put(range(0, 20)), all(Outcome::kOk, 20));
  io->set({.effect = Fault::kHang});
  std::vector<std::vector<std::byte>> into;
  get_later(range(500, 5), into);
  client->put(range(100, 10));
  const auto begin = SteadyClock::now();
  client.reset();
  tier.reset();
  EXPECT_LT(SteadyClock::now() - begin, 12s);
  io->lift();
  EXPECT_TRUE(soon([&] { return io.use_count() == 1; })) << "threads and memory are still there";
  expect_closed(root, io.get());
  open();
  expect_at_rest(root, tier, io.get());
}

/// A thread that is asking `after` while the store closes.
TEST_F(StoreHang, ClosingEndsWhatWaitsForAnEvent) {
  for (int round = 0; round < 20; ++round) {
    open();
    RequestOptions never;
    never.deadline = 60s;
    never.after = [] {
      std::this_thread::sleep_for(3ms);
      return false;
    };
    std::vector<std::byte> chunk(kBytes);
    const std::vector<std::span<const std::byte>> from(6, chunk);
    const Job job = client->store.put_bytes(keys_of(range(0, 6)), from, never);
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 7));
    client->store.close();
    ASSERT_TRUE(job.wait_for(2s)) << "nobody ends it";
    EXPECT_EQ(Outcomes(job.wait()), all(Outcome::kRefused, 6));
    client.reset();
    tier.reset();
  }
}

}  // namespace
}  // namespace kvstride::test
