// SPDX-License-Identifier: Apache-2.0
// Calls of the operating system that fail, are interrupted, come back short, or tell a wrong time.
#include "store_faults.h"

#include <set>

namespace kvstride::test {
namespace {

class StoreFaults : public testing::Test {
 protected:
  void open(DirectoryTierOptions options) {
    client.reset();
    tier.reset();
    tier = store::make_directory_tier(options, io);
    client = std::make_unique<Client>(std::vector<TierPtr>{tier});
  }
  void open() { open(small_tier(root)); }
  void close() {
    client.reset();
    tier.reset();
  }
  /// All is as if nothing had been: chunks can be put, are found, and nothing leaks.
  void expect_recovered(int fresh) {
    // A full disk is not tried again for a second; an account that was lost is counted again.
    EXPECT_TRUE(soon([&] { return client->put({fresh}) == all(Outcome::kOk, 1); })) << "puts do not work again";
    EXPECT_EQ(client->get({fresh}), all(Outcome::kOk, 1));
    expect_at_rest(root, tier, io.get());
  }

  Scratch scratch;
  std::string root = scratch.path();
  std::shared_ptr<FaultIo> io = std::make_shared<FaultIo>();
  TierPtr tier;
  std::unique_ptr<Client> client;
};

TEST_F(StoreFaults, InterruptedCallsAreMadeAgain) {
  io->set({.calls = kOpen | kRead | kWrite | kSync | kUnlink | kMkdir | kRename | kLock, .error = EINTR, .share = 0.5});
  auto options = small_tier(root, 1 << 20);
  options.sync = true;
  open(options);
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(client->put(range(i * 10, 10)), all(Outcome::kOk, 10));
    ASSERT_EQ(client->get(range(i * 10, 10)), all(Outcome::kOk, 10));
  }
  EXPECT_EQ(tier->metrics().counters.at("io_errors"), 0U);
  EXPECT_GT(io->hits(), 200);
  io->lift();
  expect_at_rest(root, tier, io.get());
  close();
  expect_closed(root, io.get());
}

TEST_F(StoreFaults, ShortReadsAndWritesGoOn) {
  io->set({.calls = kRead | kWrite, .targets = kDraft | kPiece | kLedger, .effect = Fault::kShort, .share = 0.4});
  open();
  Client large({tier}, 1, 700'000);
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(client->put(range(i * 10, 10)), all(Outcome::kOk, 10));
    ASSERT_EQ(client->get(range(i * 10, 10)), all(Outcome::kOk, 10));
    ASSERT_EQ(large.put({i}), all(Outcome::kOk, 1));
    ASSERT_EQ(large.get({i}), all(Outcome::kOk, 1));
  }
  EXPECT_GT(io->hits(), 30);
  io->lift();
  expect_at_rest(root, tier, io.get());
}

/// One error, at each call in turn that a put or a get makes, of each kind that disks and file systems have.
TEST_F(StoreFaults, EachCallFailsOnce) {
  open();
  int number = 0;
  for (const int error : {EIO, ENOSPC, EMFILE, EACCES, EROFS, ESTALE, ENOMEM, EDQUOT}) {
    for (const Fault::Effect effect : {Fault::kFail, Fault::kDone}) {
      if (effect == Fault::kDone && error != EIO) continue;
      for (int at = 0;; ++at) {
        // Its own files only: what the house keeper does with the account is another test.
        const std::vector<int> numbers{number};
        const unsigned targets = kDraft | kPiece | kFolder;
        io->set({.targets = targets, .effect = effect, .error = error, .after = at, .times = 1});
        const std::int64_t before = io->hits();
        const Outcome put = client->put(numbers)[0];
        const bool put_failed = io->hits() > before;
        io->lift();
        ASSERT_TRUE(put == Outcome::kOk || put == Outcome::kIoError || put == Outcome::kRefused) << name_of(put);
        // Rooms that evictions could make are there: a full disk is no reason to lose what is stored.
        ASSERT_TRUE(soon([&] { return client->put(numbers) == all(Outcome::kOk, 1); })) << error << " at call " << at;
        io->set({.targets = targets, .effect = effect, .error = error, .after = at, .times = 1});
        const Outcome get = client->get(numbers)[0];
        io->lift();
        ASSERT_TRUE(get == Outcome::kOk || get == Outcome::kIoError || get == Outcome::kMiss) << name_of(get);
        ASSERT_EQ(client->get(numbers), all(Outcome::kOk, 1))
            << "an error of the system (" << error << " at call " << at << ", " << effect
            << ") is no reason to lose a chunk";
        ++number;
        if (!put_failed) break;
      }
    }
  }
  EXPECT_GT(number, 50);
  EXPECT_EQ(tier->metrics().counters.at("corrupt"), 0U);
  expect_recovered(100'000);
  close();
  expect_closed(root, io.get());
}

/// While a directory is opened, each call fails once: it opens, or says why not, and leaves nothing open.
TEST_F(StoreFaults, EachCallOfOpeningFailsOnce) {
  open();
  ASSERT_EQ(client->put(range(0, 20)), all(Outcome::kOk, 20));
  close();
  for (const int error : {EIO, EMFILE, ENOSPC}) {
    for (int at = 0;; ++at) {
      io->set({.error = error, .after = at, .times = 1});
      const std::int64_t before = io->hits();
      try {
        open();
      } catch (const Error& failed) {
        EXPECT_EQ(failed.code(), ErrorCode::kStore);
      }
      const bool hit = io->hits() > before;
      io->lift();
      if (tier) {
        EXPECT_EQ(client->get(range(0, 20)), all(Outcome::kOk, 20)) << error << " at call " << at;
        if (at % 32 == 0) expect_recovered(1000 + at);
        close();
      }
      EXPECT_TRUE(soon([&] { return io->num_open() == 0; })) << error << " at call " << at;
      if (!hit || HasFailure()) break;
    }
  }
  open();
  expect_recovered(10'000);
}

TEST_F(StoreFaults, StormsOfErrorsPass) {
  std::mt19937_64 random(seed());
  const auto end = until(3000ms, 0.05);
  int number = 0;
  for (int round = 0; SteadyClock::now() < end; ++round) {
    if (round % 4 == 0) open(small_tier(root, 512 << 10));  // evictions, too
    const std::array<int, 8> errors{EIO, ENOSPC, EMFILE, ENOLCK, EACCES, EINTR, ESTALE, EBUSY};
    io->set({.error = errors[random() % errors.size()], .share = 0.05 + 0.001 * static_cast<double>(random() % 400)},
            0);
    io->set({.calls = kRead | kWrite, .effect = Fault::kShort, .share = 0.2}, 1);
    io->set({.calls = kRead | kWrite, .effect = Fault::kZero, .share = 0.05}, 2);
    io->set({.calls = kOpen | kUnlink | kRename | kSync, .effect = Fault::kDone, .error = EIO, .share = 0.02}, 3);
    for (int i = 0; i < 20; ++i) {
      client->put(range(number, 4));
      client->get(range(number - 8, 12));
      if (random() % 4 == 0) client->remove(range(number - 20, 5));
      number += 3;
    }
    for (std::size_t slot = 0; slot < 4; ++slot) io->lift(slot);
    ASSERT_TRUE(soon([&] { return client->put({number}) == all(Outcome::kOk, 1); }))
        << "round " << round << ": " << told(tier);
    ASSERT_EQ(client->get({number}), all(Outcome::kOk, 1)) << "round " << round;
  }
  close();
  open();
  expect_recovered(number + 1000);
}

TEST_F(StoreFaults, C66AFailedReadIsNotDone) {
  open();
  ASSERT_EQ(client->put(range(0, 4)), all(Outcome::kOk, 4));
  // One at a time, so that the third one is number 2.
  Outcomes got;
  for (int number = 0; number < 4; ++number) {
    if (number == 2) io->set({.calls = kRead, .targets = kPiece, .error = EIO});
    got.push_back(client->get({number})[0]);
    io->lift();
  }
  EXPECT_EQ(got, (Outcomes{Outcome::kOk, Outcome::kOk, Outcome::kIoError, Outcome::kOk}));
  EXPECT_EQ(client->get(range(0, 4)), all(Outcome::kOk, 4));
  EXPECT_EQ(client->counter("get_io_error"), 1U);
  EXPECT_GE(tier->metrics().counters.at("io_errors"), 1U);
}

TEST_F(StoreFaults, C77AFullDiskIsNoDeadEnd) {
  open();
  ASSERT_EQ(client->put(range(0, 50)), all(Outcome::kOk, 50));
  // Once: something is evicted, the write goes on.
  io->set({.calls = kWrite, .targets = kDraft, .error = ENOSPC, .times = 1});
  EXPECT_EQ(client->put({100}), all(Outcome::kOk, 1));
  EXPECT_EQ(io->hits(), 1);
  EXPECT_EQ(tier->metrics().counters.at("evictions"), 1U);
  EXPECT_EQ(client->get({100}), all(Outcome::kOk, 1));
  // Always: refused, nothing half-written, what is there can be read, and there is an end to it.
  io->set({.calls = kWrite, .targets = kDraft, .error = ENOSPC});
  const auto begin = SteadyClock::now();
  EXPECT_EQ(client->put(range(200, 20)), all(Outcome::kRefused, 20));
  EXPECT_LT(SteadyClock::now() - begin, 5s);
  EXPECT_EQ(look(root).temporaries.size(), 0U);
  EXPECT_GE(count(client->get(range(0, 50)), Outcome::kOk), 20)
      << "not all that is stored is thrown away for one chunk";
  EXPECT_GE(tier->metrics().counters.at("no_space"), 1U);
  io->lift();
  expect_recovered(300);
}

/// The account cannot be read or written: puts are refused meanwhile, gets go on.
TEST_F(StoreFaults, TheAccountFails) {
  open();
  ASSERT_EQ(client->put(range(0, 20)), all(Outcome::kOk, 20));
  int fresh = 100;
  for (const unsigned calls : {unsigned{kRead}, unsigned{kWrite}, unsigned{kLock}, unsigned{kRead | kWrite | kLock}}) {
    for (const Fault::Effect effect : {Fault::kFail, Fault::kShort, Fault::kZero}) {
      if (effect != Fault::kFail && calls == kLock) continue;
      io->set({.calls = calls, .targets = kLedger, .effect = effect, .error = EIO});
      std::this_thread::sleep_for(80ms);  // nobody relies on what the account said
      const auto begin = SteadyClock::now();
      for (const Outcome put : client->put(range(fresh, 3)))
        EXPECT_TRUE(put == Outcome::kOk || put == Outcome::kRefused);
      EXPECT_EQ(client->get(range(0, 20)), all(Outcome::kOk, 20));
      EXPECT_LT(SteadyClock::now() - begin, 8s);
      io->lift();
      expect_recovered(fresh + 10);
      fresh += 20;
    }
  }
}

/// Counting fails half-way: the limit holds all the same, and it is counted again.
TEST_F(StoreFaults, CountingFails) {
  constexpr std::int64_t kLimit = 40 * 5 * 4096;
  for (const Fault& fault :
       {Fault{.calls = kList, .error = EIO}, Fault{.calls = kList, .effect = Fault::kDone, .share = 0.5},
        Fault{.calls = kStat, .targets = kPiece, .error = EIO},
        Fault{.calls = kOpen, .targets = kFolder, .error = EMFILE, .after = 8}}) {
    open(small_tier(root, kLimit));
    client->put(range(0, 30));
    close();
    io->set(fault);
    try {
      open(small_tier(root, kLimit));
    } catch (const Error&) {
      io->lift();
      continue;
    }
    client->put(range(100, 30));
    EXPECT_LE(look(root).bytes, kLimit) << "a count that failed was believed";
    io->lift();
    expect_recovered(200);
    EXPECT_LE(look(root).bytes, kLimit);
    close();
  }
}

TEST_F(StoreFaults, ClocksThatJump) {
  auto options = small_tier(root, 60 * 5 * 4096);
  options.eviction = Eviction::kLru;
  open(options);
  int number = 0;
  for (const auto jump : {24h, -48h, 24h * 365 * 40, -24h * 365 * 100, 24h * 365 * 200, -24h * 365 * 250}) {
    io->jump(jump);
    for (int i = 0; i < 10; ++i) {
      ASSERT_EQ(client->put(range(number, 10)), all(Outcome::kOk, 10)) << number;
      ASSERT_EQ(client->get(range(number, 10)), all(Outcome::kOk, 10)) << number;
      number += 10;
    }
    const std::vector<bool> others = client->lookup(range(number + 5000, 10));
    EXPECT_EQ(std::count(others.begin(), others.end(), true), 0);
    expect_at_rest(root, tier, io.get());
    open(options);
    EXPECT_EQ(client->get(range(number - 10, 10)), all(Outcome::kOk, 10)) << "the latest are kept over a restart";
  }
}

}  // namespace
}  // namespace kvstride::test
