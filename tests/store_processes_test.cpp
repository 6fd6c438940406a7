// SPDX-License-Identifier: Apache-2.0
// Several processes on one directory: the same keys, one limit, files that others evict and remove under a reader.
#include <sys/mount.h>
#include <sys/statvfs.h>

#include <set>

#include "child.h"
#include "store_faults.h"

namespace kvstride::test {
namespace {

constexpr std::int64_t kImage = 5 * 4096;

class StoreProcesses : public testing::Test {
 protected:
  DirectoryTierOptions options(std::int64_t max_bytes) const {
    auto out = small_tier(root, max_bytes);
    out.engine = DirectoryTierOptions::Engine::kAuto;
    return out;
  }
  /// Runs `work(i)` in `num` processes at once; each must end without a failure.
  void run(int num, const std::function<void(int)>& work) {
    std::vector<pid_t> children;
    for (int i = 0; i < num; ++i) {
      children.push_back(start_child([&] {
        work(i);
        return testing::Test::HasFailure() ? 7 : 0;
      }));
    }
    for (const pid_t child : children) EXPECT_EQ(wait_for_child(child), 0);
  }
  void expect_sound(std::int64_t max_bytes) {
    const auto io = std::make_shared<FaultIo>();
    {
      auto all = small_tier(root, max_bytes);
      const TierPtr tier = store::make_directory_tier(all, io);
      expect_at_rest(root, tier, io.get());
    }
    expect_closed(root, io.get());
  }
  Scratch scratch;
  std::string root = scratch.path();
};

TEST_F(StoreProcesses, C74TwoAndEightWriteTheSameKeys) {
  for (const int num : {2, 8}) {
    const int saves = many(2000, 40'000) / num;
    run(num, [&](int process) {
      const TierPtr tier = directory_tier(options(8 << 20));
      Client client({tier});
      std::mt19937_64 random(seed() + static_cast<std::uint64_t>(process));
      const auto enough = [&] { return client.counter("put_ok") >= static_cast<std::uint64_t>(saves) / 3; };
      const auto patience = SteadyClock::now() + 20s;
      // Beside others a start costs a count, and a count refuses puts for a while.
      for (int i = 0; i < saves || (!enough() && SteadyClock::now() < patience); ++i) {
        const int number = static_cast<int>(random() % 20);
        const Outcome put = client.put({number})[0];
        // Counts by others may refuse, nothing else may.
        EXPECT_TRUE(put == Outcome::kOk || put == Outcome::kRefused) << name_of(put);
        const Outcome got = client.get({static_cast<int>(random() % 20)})[0];
        EXPECT_TRUE(got == Outcome::kOk || got == Outcome::kMiss) << name_of(got);
        if (random() % 3 == 0) client.remove({number});  // so that it is written again
      }
      EXPECT_TRUE(enough()) << told(tier);
      EXPECT_EQ(client.counter("get_corrupt"), 0U);
    });
    const OnDisk disk = look(root);
    EXPECT_TRUE(disk.temporaries.empty());
    EXPECT_LE(disk.pieces.size(), 20U);
    for (const std::string& piece : disk.pieces) {
      const std::string bytes = read_file(piece);
      EXPECT_TRUE(store::parse_header(std::as_bytes(std::span(bytes)))) << piece;
    }
    expect_sound(8 << 20);
  }
}

/// Small room, many writers: readers meet files that are evicted and removed while they read.
TEST_F(StoreProcesses, EvictedAndRemovedUnderReaders) {
  const std::int64_t limit = 30 * kImage;
  const auto end = until(1500ms, 0.03);
  run(4, [&](int process) {
    Client client({directory_tier(options(limit))});
    std::mt19937_64 random(seed() + static_cast<std::uint64_t>(process));
    while (SteadyClock::now() < end) {
      const std::vector<int> numbers = range(static_cast<int>(random() % 60), 5);
      if (process < 2) {
        for (const Outcome put : client.put(numbers))
          EXPECT_TRUE(put == Outcome::kOk || put == Outcome::kRefused) << name_of(put);
      }
      for (const Outcome got : client.get(numbers))
        EXPECT_TRUE(got == Outcome::kOk || got == Outcome::kMiss) << name_of(got);
      if (process == 3) client.remove({numbers[0]});
    }
    EXPECT_EQ(client.counter("get_corrupt"), 0U);
    EXPECT_TRUE(process >= 2 || client.counter("put_ok") > 50);
    EXPECT_GT(client.counter("get_ok"), 50U);
  });
  expect_sound(limit);
}

/// Written by one, seen by the other: found, read, and its absence noticed.
TEST_F(StoreProcesses, SeenWithin100Milliseconds) {
  Client mine({directory_tier(options(8 << 20))});
  // A second tier of this process is as far from the first as another process, but for the clock that they share.
  Client other({directory_tier(options(8 << 20))});
  std::chrono::nanoseconds best = 1h;
  for (int i = 0; i < 8; ++i) {
    ASSERT_EQ(mine.lookup({i}), std::vector<bool>{false});
    ASSERT_EQ(other.put({i}), all(Outcome::kOk, 1));
    const auto begin = SteadyClock::now();
    ASSERT_TRUE(soon([&]() -> bool { return mine.lookup({i})[0]; }));
    best = std::min<std::chrono::nanoseconds>(best, SteadyClock::now() - begin);
    ASSERT_EQ(mine.get({i}), all(Outcome::kOk, 1));
    ASSERT_EQ(mine.store.lookup_prefix(keys_of(range(0, i + 1))), i + 1);
  }
  EXPECT_LT(best, 100ms);
}

/// The limit as the file system sees it, temporaries included, at all times. Needs a file system of its own.
TEST_F(StoreProcesses, TheLimitHoldsAtAllTimes) {
  const std::int64_t limit = 24 * kImage;
  const int code = in_child([&] {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return 77;
    std::filesystem::create_directory(root);
    if (::mount("none", root.c_str(), "tmpfs", 0, "size=64m,mode=700") != 0) return 77;
    const auto end = until(1500ms, 0.03);
    std::vector<pid_t> children;
    for (int process = 0; process < 4; ++process) {
      children.push_back(start_child([&] {
        Client client({directory_tier(options(limit))});
        std::mt19937_64 random(seed() + static_cast<std::uint64_t>(process));
        while (SteadyClock::now() < end) {
          client.put(
              range(static_cast<int>(random() % 1000), 4));  // no gets: what is removed while it is read takes room
        }
        return client.counter("put_ok") > 20 && !testing::Test::HasFailure() ? 0 : 7;
      }));
    }
    // The account's file and the probe for O_DIRECT of each process are not of the limit.
    const std::int64_t beside = 4096 + 4 * 4096;
    std::int64_t most = 0;
    while (SteadyClock::now() < end) {
      struct statvfs disk;
      if (::statvfs(root.c_str(), &disk) != 0) return 7;
      most = std::max(most, static_cast<std::int64_t>((disk.f_blocks - disk.f_bfree) * disk.f_frsize));
    }
    for (const pid_t child : children) EXPECT_EQ(wait_for_child(child), 0);
    EXPECT_LE(most, limit + beside);
    EXPECT_GT(most, limit / 2);
    expect_sound(limit);
    return testing::Test::HasFailure() ? 7 : 0;
  });
  if (code == 77) GTEST_SKIP() << "no tmpfs can be mounted here (needs CAP_SYS_ADMIN)";
  EXPECT_EQ(code, 0);
}

/// A forked child has a copy of the bookkeeping and none of the threads: it can neither use tiers and stores nor harm
/// them, and getting rid of them does not wait for anybody.
TEST_F(StoreProcesses, AForkedChildCanOnlyDropWhatItInherits) {
  HostTierOptions shared{.num_bytes = 20 * kImage};
  shared.shared_name = "kvtest-fork-" + std::to_string(::getpid());
  const TierPtr host = host_tier(shared);
  auto tier = directory_tier(small_tier(root));
  auto client = std::make_unique<Client>(std::vector<TierPtr>{host, tier});
  ASSERT_EQ(client->put(range(0, 5)), all(Outcome::kOk, 5));
  const int code = in_child([&] {
    ::alarm(20);
    const auto refused = [](const auto& call) {
      try {
        call();
        return false;
      } catch (const Error& error) {
        return error.code() == ErrorCode::kStore;
      }
    };
    if (!refused([&] { Client({host}); }) || !refused([&] { Client({tier}); })) return 1;
    if (!refused([&] { client->get({0}); }) || !refused([&] { client->lookup({0}); })) return 2;
    if (!refused([&] { client->remove({0}); }) || !refused([&] { client->store.pin(keys_of({0})); })) return 3;
    if (!refused([&] { client->store.metrics(); }) || !refused([&] { client->store.flush(1s); })) return 4;
    if (!refused([&] { tier_metrics(*tier); })) return 5;
    client->store.close();
    client.reset();
    tier.reset();
    return 0;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(client->get(range(0, 5)), all(Outcome::kOk, 5));
  EXPECT_EQ(client->put(range(5, 5)), all(Outcome::kOk, 5));
}

}  // namespace
}  // namespace kvstride::test
