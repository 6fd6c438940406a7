// SPDX-License-Identifier: Apache-2.0
// kill -9: before each call that a process makes, in the middle of writes, and at random times with io_uring.
#include <set>

#include "child.h"
#include "store_faults.h"

namespace kvstride::test {
namespace {

constexpr std::int64_t kImage = 5 * 4096;

class StoreCrash : public testing::Test {
 protected:
  DirectoryTierOptions options(std::int64_t max_bytes) const {
    auto out = small_tier(root, max_bytes);
    out.num_threads = 1;
    return out;
  }

  /// What a process does until it is killed; 0 where it came to its end.
  int life(const std::function<int()>& work) {
    const int code = in_child([&] {
      const int answer = work();
      return testing::Test::HasFailure() ? 7 : answer;
    });
    EXPECT_NE(code, 7);
    return code;
  }

  /// Everything that was ever put is right or a miss; nothing is damaged (that takes more than a killed process), no
  /// temporary counts or stays, and the directory is as good as before.
  void check(int num_keys, std::int64_t max_bytes, bool all_keys = true) {
    const auto io = std::make_shared<FaultIo>();
    {
      const TierPtr tier = store::make_directory_tier(options(max_bytes), io);
      Client client({tier});
      const int first = std::max(num_keys - (all_keys ? 2000 : 12), 0);
      const std::vector<int> numbers = range(first, num_keys - first);
      const Outcomes got = client.get(numbers);
      EXPECT_EQ(count(got, Outcome::kOk) + count(got, Outcome::kMiss), num_keys - first);
      const std::vector<bool> found = client.lookup(numbers);
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(found[i], got[i] == Outcome::kOk) << i;
      expect_at_rest(root, tier, io.get());
      ASSERT_EQ(client.put({num_keys + 1000}), all(Outcome::kOk, 1));
      ASSERT_EQ(client.get({num_keys + 1000}), all(Outcome::kOk, 1));
      client.remove({num_keys + 1000});
    }
    expect_closed(root, io.get());
  }

  Scratch scratch;
  std::string root = scratch.path();
};

/// The n-th life ends before the n-th call of the process.
TEST_F(StoreCrash, C63BeforeEachCall) {
  const int num_puts = many(3, 60);
  int points = 0;
  for (const bool fresh : {true, false}) {
    for (const std::int64_t limit : {8 << 20, 12 * static_cast<int>(kImage)}) {  // the latter evicts all the time
      int num_keys = 0;
      std::filesystem::remove_all(root);
      for (int at = 0;; ++at) {
        if (fresh) std::filesystem::remove_all(root);
        const int first = fresh ? 0 : num_keys;
        const int code = life([&] {
          const auto io = std::make_shared<FaultIo>();
          io->set({.effect = Fault::kKill, .after = at});
          Client client({store::make_directory_tier(options(limit), io)});
          client.put(range(first, num_puts));
          if (!fresh) client.get(range(std::max(first - 3, 0), 4));
          client.remove({first});
          return 0;
        });
        num_keys = std::max(num_keys, first + num_puts);
        ++points;
        // Each state is met by the next life, too; looking at every third one is enough every day.
        if (at % many(3, 1) == 0 || code == 0) check(num_keys, limit, code == 0);
        if (HasFatalFailure()) return;
        if (code == 0) break;
        ASSERT_EQ(code, -1);
      }
    }
  }
  RecordProperty("points", points);
  EXPECT_GT(points, 200);
}

TEST_F(StoreCrash, InTheMiddleOfEachWrite) {
  int num_keys = 0;
  for (const unsigned targets : {unsigned{kDraft}, unsigned{kLedger}}) {
    for (int at = 0;; ++at) {
      const int code = life([&] {
        const auto io = std::make_shared<FaultIo>();
        io->set({.calls = kWrite, .targets = targets, .effect = Fault::kTear, .after = at});
        Client client({store::make_directory_tier(options(20 * kImage), io)});
        client.put(range(num_keys, 4));
        return 0;
      });
      num_keys += 4;
      check(num_keys, 20 * kImage);
      if (HasFatalFailure() || code == 0) break;
    }
  }
  EXPECT_GT(num_keys, 4 * 8);
}

/// Damage is being set aside, files are being counted, and the process is killed.
TEST_F(StoreCrash, WhileDamageIsSetAside) {
  for (int at = 0;; ++at) {
    {
      Client client({directory_tier(options(8 << 20))});
      ASSERT_EQ(client.put(range(0, 3)), all(Outcome::kOk, 3));
    }
    damage(piece_path(root, 0, 1));
    const int code = life([&] {
      const auto io = std::make_shared<FaultIo>();
      const TierPtr tier = store::make_directory_tier(options(8 << 20), io);
      Client client({tier});
      io->set({.effect = Fault::kKill, .after = at});
      client.get(range(0, 3));
      soon([&] { return look(root).set_aside.size() == 1; }, 500ms);
      return 0;
    });
    // Now, or when it is met again, it is no answer.
    {
      const TierPtr tier = directory_tier(options(8 << 20));
      Client client({tier});
      const Outcomes got = client.get(range(0, 3));
      EXPECT_EQ(got[0], Outcome::kOk);
      EXPECT_TRUE(got[1] == Outcome::kMiss || got[1] == Outcome::kCorrupt) << name_of(got[1]);
      EXPECT_TRUE(soon([&] { return look(root).pieces.size() == 2; }));
      expect_at_rest(root, tier);
      client.remove(range(0, 3));
      EXPECT_TRUE(soon([&] { return look(root).pieces.empty(); }));
    }
    if (HasFailure() || code == 0) break;
  }
}

/// Many threads, io_uring where it is, evictions, removals: killed at any time.
TEST_F(StoreCrash, AtRandomTimes) {
  std::mt19937_64 random(seed());
  const std::int64_t limit = 60 * kImage;
  const auto end = until(2500ms, 0.1);
  int kills = 0;
  while (SteadyClock::now() < end && !HasFailure()) {
    const std::uint64_t dice = random();
    const pid_t child = start_child([&] {
      auto wide = options(limit);
      wide.engine = DirectoryTierOptions::Engine::kAuto;
      wide.num_threads = 2;
      Client client({host_tier({.num_bytes = 20 * kImage}), directory_tier(wide)});
      std::mt19937_64 mine(dice);
      while (true) {
        const int first = static_cast<int>(mine() % 200);
        client.put(range(first, 1 + static_cast<int>(mine() % 8)));
        client.get(range(static_cast<int>(mine() % 200), 8));
        if (mine() % 8 == 0) client.remove(range(first, 2));
        if (testing::Test::HasFailure()) return 7;
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(3000 + random() % 50'000));
    ::kill(child, SIGKILL);
    EXPECT_EQ(wait_for_child(child), -1);
    check(210, limit);
    ++kills;
  }
  RecordProperty("kills", kills);
}

/// Others live on while one dies: its room comes back, its temporaries go.
TEST_F(StoreCrash, OthersLiveOn) {
  std::mt19937_64 random(seed() + 1);
  const std::int64_t limit = 40 * kImage;
  const auto work = [&](std::uint64_t dice) {
    Client client({directory_tier(options(limit))});
    std::mt19937_64 mine(dice);
    while (!std::filesystem::exists(scratch.path("stop"))) {
      client.put(range(static_cast<int>(mine() % 100), 3));
      client.get(range(static_cast<int>(mine() % 100), 3));
    }
    return testing::Test::HasFailure() ? 7 : 0;
  };
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) children.push_back(start_child([&] { return work(random()); }));
  const auto end = until(2000ms, 0.02);
  while (SteadyClock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 100'000));
    ::kill(children[0], SIGKILL);
    wait_for_child(children[0]);
    const std::uint64_t dice = random();
    children[0] = start_child([&] { return work(dice); });
  }
  write_file(scratch.path("stop"), "");
  for (const pid_t child : children) EXPECT_EQ(wait_for_child(child), 0);
  check(110, limit);
}

}  // namespace
}  // namespace kvstride::test
