// SPDX-License-Identifier: Apache-2.0
// The shared account of a directory against a plain one: in one process, in several, and when they die.
#include "store/ledger.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <new>
#include <random>
#include <thread>

#include "child.h"
#include "kvstride/error.h"
#include "store/ledger_record.h"

namespace kvstride::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using Count = Ledger::Count;
using Room = Ledger::Room;

constexpr milliseconds kUnsure{60};  // longer than a process relies on what it has seen

std::unique_ptr<Ledger> open_ledger(const Directory& dir, std::int64_t max_bytes,
                                    milliseconds lock_timeout = milliseconds(2000), mode_t mode = 0600) {
  return std::make_unique<Ledger>(system_io(), dir.fd(),
                                  Ledger::Options{.max_bytes = max_bytes, .lock_timeout = lock_timeout, .mode = mode});
}

/// Opened and counted.
std::unique_ptr<Ledger> counted_ledger(const Directory& dir, std::int64_t max_bytes, std::int64_t used = 0) {
  auto ledger = open_ledger(dir, max_bytes);
  EXPECT_EQ(ledger->begin_count(), Count::kMine);
  ledger->end_count(used);
  return ledger;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kStore);
    return error.what();
  }
  return "none";
}

LedgerRecord record_of(const Directory& dir) {
  LedgerRecord record;
  const int fd = ::openat(dir.fd(), "ledger", O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(::pread(fd, static_cast<void*>(&record), sizeof(record), 0), static_cast<ssize_t>(sizeof(record)));
  ::close(fd);
  EXPECT_TRUE(record.valid());
  return record;
}

/// The account after everything of `ledgers` was written.
Ledger::Account settled(std::initializer_list<Ledger*> ledgers) {
  for (Ledger* ledger : ledgers) EXPECT_TRUE(ledger->flush());
  const auto account = (*ledgers.begin())->account();
  EXPECT_TRUE(account);
  return account.value_or(Ledger::Account{.used = -1});
}

// --- One process -----------------------------------------------------------------------------------------------------

TEST(Ledger, ANewOneMustBeCounted) {
  const Directory dir;
  const auto ledger = open_ledger(dir, 1000);
  EXPECT_EQ(ledger->reserve(10), Room::kBusy);
  EXPECT_EQ(ledger->missing(2000), 0);
  EXPECT_EQ(ledger->mark(), 0U);
  EXPECT_FALSE(ledger->account());
  EXPECT_EQ(ledger->begin_count(), Count::kMine);
  EXPECT_EQ(ledger->begin_count(), Count::kOther) << "another thread of this process";
  EXPECT_EQ(ledger->reserve(10), Room::kBusy);
  ledger->end_count(600);
  EXPECT_EQ(ledger->begin_count(), Count::kNotNeeded);
  EXPECT_NE(ledger->mark(), 0U);
  EXPECT_EQ(ledger->reserve(400), Room::kTaken);
  EXPECT_EQ(ledger->reserve(1), Room::kFull);
  EXPECT_EQ(ledger->missing(1), 1);
  ledger->commit(400, 300);
  EXPECT_EQ(ledger->reserve(101), Room::kFull);
  EXPECT_EQ(ledger->reserve(100), Room::kTaken);
  const auto account = ledger->account();
  ASSERT_TRUE(account);
  EXPECT_EQ(account->used, 900);
  EXPECT_EQ(account->reserved, 100);
  EXPECT_EQ(account->processes, 1);
  EXPECT_FALSE(account->counting);

  EXPECT_EQ(ledger->begin_count(true), Count::kMine);
  EXPECT_TRUE(ledger->account()->counting);
  ledger->cancel_count();
  EXPECT_FALSE(ledger->account());
  EXPECT_EQ(ledger->begin_count(), Count::kMine);
  ledger->end_count(5);
  EXPECT_EQ(ledger->account()->used, 5);
  EXPECT_EQ(ledger->account()->reserved, 100);
}

TEST(Ledger, RandomCallsEqualAPlainAccount) {
  const Directory dir;
  constexpr std::int64_t kLimit = 1'000'000;
  auto ledger = counted_ledger(dir, kLimit);
  std::mt19937_64 random(3);
  std::vector<std::int64_t> files;
  std::vector<std::int64_t> temporaries;
  const auto sum = [](const std::vector<std::int64_t>& sizes) {
    std::int64_t all = 0;
    for (const std::int64_t size : sizes) all += size;
    return all;
  };
  const auto take_one = [&](std::vector<std::int64_t>& from) {
    std::swap(from[random() % from.size()], from.back());
    const std::int64_t size = from.back();
    from.pop_back();
    return size;
  };
  std::array<int, 2> seen{};
  for (int step = 0; step < 20000; ++step) {
    const std::int64_t size = static_cast<std::int64_t>(random() % (step % 50 == 0 ? kLimit : 60000));
    const std::int64_t all = sum(files) + sum(temporaries);
    switch (random() % 5) {
      case 0:
      case 1: {
        ASSERT_EQ(ledger->missing(size), std::max<std::int64_t>(all + size - kLimit, 0));
        const Room room = ledger->reserve(size);
        ASSERT_EQ(room, all + size <= kLimit ? Room::kTaken : Room::kFull) << step;
        ++seen[room == Room::kTaken];
        if (room == Room::kTaken) temporaries.push_back(size);
        break;
      }
      case 2:
        if (!temporaries.empty()) ledger->cancel(take_one(temporaries));
        break;
      case 3:
        if (!temporaries.empty()) {
          const std::int64_t reserved = take_one(temporaries);
          files.push_back(reserved - static_cast<std::int64_t>(random() % 2) * (reserved / 3));
          ledger->commit(reserved, files.back());
        }
        break;
      default:
        if (!files.empty()) ledger->release(take_one(files), ledger->mark());
        break;
    }
    const LedgerRecord record = record_of(dir);
    ASSERT_LE(sum(files) + sum(temporaries), record.total());
    ASSERT_LE(record.total(), kLimit);
    if (step % 100 == 0) {
      const auto account = ledger->account();
      ASSERT_TRUE(account);
      ASSERT_EQ(account->used, sum(files));
      ASSERT_GE(account->reserved, sum(temporaries));
      ASSERT_LE(account->reserved, std::max<std::int64_t>(sum(temporaries) + kLimit / 64, kLimit - account->used));
    }
    if (step % 1000 == 0) {
      for (const std::int64_t reserved : temporaries) ledger->cancel(reserved);
      temporaries.clear();
      ledger.reset();
      ASSERT_EQ(record_of(dir).total(), sum(files));
      ledger = counted_ledger(dir, kLimit, sum(files));
    }
  }
  EXPECT_GT(seen[0], 100);
  EXPECT_GT(seen[1], 1000);
}

TEST(Ledger, FilesThatAreLargerThanReservedAreCountedInFull) {
  const Directory dir;
  const auto ledger = counted_ledger(dir, 1000);
  ASSERT_EQ(ledger->reserve(100), Room::kTaken);
  ledger->commit(100, 1500);
  EXPECT_EQ(ledger->account()->used, 1500);
  EXPECT_EQ(ledger->account()->reserved, 0);
  EXPECT_EQ(ledger->missing(0), 500);
  EXPECT_EQ(ledger->reserve(1), Room::kFull);
  ledger->release(1500);
  EXPECT_EQ(ledger->reserve(1000), Room::kTaken);
}

TEST(Ledger, ThreadsShareOne) {
  const Directory dir;
  constexpr std::int64_t kLimit = 50'000;
  const auto ledger = counted_ledger(dir, kLimit);
  std::atomic<std::int64_t> bytes{0};
  std::atomic<std::int64_t> most{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<unsigned>(t));
      std::int64_t held = 0;
      for (int i = 0; i < 2000; ++i) {
        const auto size = static_cast<std::int64_t>(random() % 10'000);
        if (ledger->reserve(size) == Room::kTaken) {
          const std::int64_t now = bytes.fetch_add(size) + size;
          std::int64_t before = most.load();
          while (now > before && !most.compare_exchange_weak(before, now)) {
          }
          ledger->commit(size, size);
          held += size;
        } else if (held > 0) {
          bytes -= held;
          ledger->release(held);
          held = 0;
        }
      }
      bytes -= held;
      ledger->release(held);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most.load(), kLimit);
  EXPECT_GT(most.load(), kLimit / 2);
  EXPECT_EQ(ledger->account()->used, 0);
}

// --- Two, in one process: each has descriptors, and so locks, of its own ---------------------------------------------

TEST(Ledger, UnusedRoomIsGivenBack) {
  const Directory dir;
  const auto a = counted_ledger(dir, 64'000);
  const auto b = open_ledger(dir, 64'000);
  EXPECT_EQ(b->begin_count(), Count::kNotNeeded);
  ASSERT_EQ(a->reserve(64'000), Room::kTaken);
  EXPECT_EQ(b->reserve(1), Room::kFull);
  EXPECT_EQ(b->missing(1), 1);
  a->cancel(64'000);
  EXPECT_EQ(a->account()->reserved, 1000) << "a step is kept";
  EXPECT_EQ(b->reserve(63'001), Room::kFull);
  EXPECT_EQ(b->missing(63'001), 1);
  EXPECT_EQ(b->reserve(63'000), Room::kTaken);
  EXPECT_EQ(a->reserve(1000), Room::kTaken);
  EXPECT_EQ(a->account()->processes, 2);

  // Room that is made for something large is kept for it, however many files it takes.
  b->commit(63'000, 63'000);
  EXPECT_EQ(a->reserve(20'000), Room::kFull);
  for (int i = 0; i < 200; ++i) a->release(100);
  EXPECT_EQ(b->reserve(2000), Room::kFull);
  EXPECT_EQ(a->reserve(20'000), Room::kTaken);
  EXPECT_EQ(b->missing(0), 0);
}

TEST(Ledger, EachKeepsToItsOwnLimit) {
  const Directory dir;
  const auto large = counted_ledger(dir, 1000);
  const auto small = open_ledger(dir, 500);
  ASSERT_EQ(large->reserve(600), Room::kTaken);
  EXPECT_EQ(small->reserve(1), Room::kFull);
  EXPECT_GE(small->missing(1), 101);
  ASSERT_EQ(large->reserve(400), Room::kTaken);
  EXPECT_EQ(large->reserve(1), Room::kFull);
}

TEST(Ledger, OneCountsAndTheOthersWait) {
  const Directory dir;
  const auto a = open_ledger(dir, 1000);
  const auto b = open_ledger(dir, 1000);
  ASSERT_EQ(a->begin_count(), Count::kMine);
  EXPECT_EQ(b->begin_count(), Count::kOther);
  EXPECT_EQ(b->begin_count(true), Count::kOther);
  EXPECT_EQ(b->reserve(1), Room::kBusy);
  EXPECT_EQ(b->mark(), 0U);
  b->end_count(77);
  EXPECT_FALSE(b->account()) << "it is not b's count";
  a->end_count(300);
  EXPECT_EQ(b->begin_count(), Count::kNotNeeded);
  EXPECT_EQ(b->reserve(600), Room::kTaken);
  EXPECT_EQ(b->account()->used, 300);

  const std::vector<std::string> tokens = a->live_tokens();
  EXPECT_EQ(tokens, (std::vector{a->token(), b->token()}));
  EXPECT_EQ(a->token().size(), 16U);
  EXPECT_EQ(a->token().find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(a->token(), b->token());
}

TEST(Ledger, AClosedCounterLeavesTheCountToOthers) {
  const Directory dir;
  auto a = open_ledger(dir, 1000);
  const auto b = open_ledger(dir, 1000);
  ASSERT_EQ(a->begin_count(), Count::kMine);
  a.reset();
  EXPECT_EQ(b->reserve(1), Room::kBusy);
  EXPECT_EQ(b->begin_count(), Count::kMine);
}

// What a process reports is added to a count or not, depending on when it happened. a counts, b works.
class CountTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(b->reserve(3000), Room::kTaken);
    b->commit(1000, 1000);
    ASSERT_EQ(settled({a.get(), b.get()}).used, 1000);
  }
  std::int64_t used() { return settled({a.get(), b.get()}).used; }

  Directory dir;
  std::unique_ptr<Ledger> a = counted_ledger(dir, 10'000);
  std::unique_ptr<Ledger> b = open_ledger(dir, 10'000);
};

TEST_F(CountTest, WhatHappenedBeforeIsInTheSum) {
  b->commit(500, 400);
  b->release(300, b->mark());
  ASSERT_EQ(a->begin_count(true), Count::kMine);
  a->end_count(1100);
  EXPECT_EQ(used(), 1100);
  EXPECT_GE(b->account()->reserved, 1500);
  b->cancel(1500);
  EXPECT_EQ(settled({b.get()}).reserved, 10'000 / 64);
  EXPECT_EQ(used(), 1100);
}

TEST_F(CountTest, WhatIsReportedDuringACountMayBeMissingInTheSum) {
  const std::uint64_t mark = b->mark();
  ASSERT_NE(mark, 0U);
  ASSERT_EQ(a->begin_count(true), Count::kMine);
  b->commit(500, 400);
  b->release(300, mark);
  b->release(200);
  EXPECT_EQ(b->mark(), 0U);
  b->commit(500, 100);
  EXPECT_EQ(b->begin_count(), Count::kOther);
  a->end_count(1000);
  EXPECT_EQ(used(), 1500);
  b->release(50, mark);
  EXPECT_EQ(used(), 1500) << "the file went while somebody counted, perhaps";
  b->release(50, b->mark());
  EXPECT_EQ(used(), 1450);
  b->commit(1000, 1000);
  EXPECT_EQ(used(), 2450);
}

TEST_F(CountTest, TheCounterIsNoExceptionForWhatItReportsItself) {
  b.reset();  // alone, it does not even wait
  ASSERT_EQ(a->reserve(700), Room::kTaken);
  const std::uint64_t mark = a->mark();
  ASSERT_EQ(a->begin_count(true), Count::kMine);
  a->commit(700, 500);
  a->release(300, mark);
  a->end_count(1000);
  a->release(300, mark);
  EXPECT_EQ(settled({a.get()}).used, 1500);
}

TEST_F(CountTest, RoomInHandIsNotTakenMeanwhile) {
  ASSERT_EQ(b->reserve(1), Room::kTaken);
  ASSERT_EQ(a->begin_count(true), Count::kMine);
  EXPECT_EQ(b->reserve(1), Room::kBusy);
  a->end_count(1000);
  EXPECT_EQ(b->reserve(1), Room::kTaken);
}

TEST_F(CountTest, RoomOfFilesThatTheSumLacksIsNotTakenTwice) {
  while (b->account()->reserved < 10'000 - 1000) ASSERT_EQ(b->reserve(1), Room::kTaken);
  const std::int64_t reserved = b->account()->reserved;
  b->release(300, b->mark());
  ASSERT_EQ(a->begin_count(true), Count::kMine);
  a->end_count(700);
  ASSERT_EQ(a->reserve(10'000 - 700 - reserved), Room::kTaken);
  EXPECT_EQ(b->reserve(1), Room::kFull);
  EXPECT_EQ(used(), 700);
}

TEST_F(CountTest, WhatCannotBeWrittenIsKept) {
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit none = limit;
  none.rlim_cur = 0;
  const std::uint64_t mark = b->mark();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);  // nothing may be printed, either, where that goes to a file
  b->commit(500, 400);
  b->release(300, mark);
  const bool flushed = b->flush();
  const Room room = b->reserve(5000);
  const Count count = a->begin_count(true);
  const std::string error = error_of([&] { open_ledger(dir, 1000); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_FALSE(flushed);
  EXPECT_EQ(room, Room::kBusy);
  EXPECT_EQ(count, Count::kOther);
  EXPECT_EQ(error, "ledger: write: File too large");
  EXPECT_EQ(used(), 1100);
  EXPECT_EQ(a->live_tokens().size(), 2U);
  EXPECT_EQ(b->reserve(10'000 - 1100 - 1500), Room::kTaken);
}

TEST_F(CountTest, WhatIsReportedLateIsCountedExactlyWhereNobodyCounted) {
  std::this_thread::sleep_for(kUnsure);
  b->commit(1000, 700);
  b->release(300);
  EXPECT_EQ(used(), 1400);
  EXPECT_EQ(b->missing(0), 0);
}

TEST_F(CountTest, WhatIsReportedAfterAWholeCountIsCountedOnTop) {
  const std::uint64_t mark = b->mark();
  ASSERT_EQ(a->begin_count(true), Count::kMine);
  a->end_count(1000);
  b->commit(1000, 700);
  b->release(300, mark);
  EXPECT_EQ(used(), 1700);
}

TEST_F(CountTest, ClosingDuringACountLosesNothing) {
  ASSERT_EQ(a->begin_count(true), Count::kMine);
  b->commit(1000, 700);
  b.reset();
  a->end_count(1000);
  EXPECT_EQ(a->account()->used + a->account()->reserved, 1700);
  EXPECT_EQ(a->begin_count(), Count::kMine) << "to learn whether the 700 were in the sum";
  a->end_count(1700);
  EXPECT_EQ(a->account()->used + a->account()->reserved, 1700);
}

// Random calls of three, with counts in between that see or miss what changes meanwhile; calls are reported at once or
// later. The account is never too low, and exact where nobody counted.
TEST(Ledger, RandomCountsAreNeverTooLow) {
  struct Change {
    bool removed;
    std::int64_t bytes;
    std::uint64_t mark;
  };
  struct Process {
    std::unique_ptr<Ledger> ledger;
    std::int64_t reserved = 0;
    std::vector<Change> unreported;
  };
  const Directory dir;
  constexpr std::int64_t kLimit = 1'000'000;
  std::array<Process, 3> processes;
  processes[0].ledger = counted_ledger(dir, kLimit);
  for (int i = 1; i < 3; ++i) processes[static_cast<std::size_t>(i)].ledger = open_ledger(dir, kLimit);
  std::mt19937_64 random(11);
  std::vector<std::int64_t> files;
  std::int64_t sum = 0;        // of files
  std::int64_t uncertain = 0;  // changes while somebody counted
  std::int64_t seen = -1;      // by the count under way
  const auto change = [&](Process& p) {
    const std::uint64_t mark = p.ledger->mark();
    Change made{random() % 2 == 0, 0, mark};
    if (made.removed && !files.empty()) {
      made.bytes = files.back();
      files.pop_back();
      sum -= made.bytes;
    } else if (!made.removed && p.reserved > 0) {
      made.bytes = std::min(p.reserved, static_cast<std::int64_t>(random() % 5000 + 1));
      p.reserved -= made.bytes;
      files.push_back(made.bytes);
      sum += made.bytes;
    }
    if (made.bytes == 0) return;
    p.unreported.push_back(made);
    if (seen >= 0) {
      uncertain += made.bytes;
      if (random() % 2 == 0) seen += made.removed ? -made.bytes : made.bytes;
    }
  };
  const auto report = [&](Process& p) {
    for (const Change& made : p.unreported) {
      made.removed ? p.ledger->release(made.bytes, made.mark) : p.ledger->commit(made.bytes, made.bytes);
    }
    p.unreported.clear();
  };
  for (int round = 0; round < 8; ++round) {
    const bool count = round % 4 != 0;
    Process& counter = processes[random() % 3];
    for (int step = 0; step < 300; ++step) {
      Process& p = processes[random() % 3];
      if (count && step == 100) {
        ASSERT_EQ(counter.ledger->begin_count(true), Count::kMine);
        seen = sum;
        for (const Process& q : processes) {
          for (const Change& made : q.unreported) uncertain += made.bytes;
        }
      }
      if (count && step == 200) {
        counter.ledger->end_count(std::exchange(seen, -1));
        for (const Process& q : processes) {
          for (const Change& made : q.unreported) uncertain += made.bytes;
        }
      }
      const auto size = static_cast<std::int64_t>(random() % 20'000);
      if (random() % 3 == 0 && p.ledger->reserve(size) == Room::kTaken) p.reserved += size;
      change(p);
      if (random() % 2 == 0) report(p);
      const LedgerRecord record = record_of(dir);
      std::int64_t all = sum;
      for (const Process& q : processes) all += q.reserved;
      // Files that were just removed stay in the account until that is reported.
      ASSERT_LE(all, record.total()) << round << " " << step;
    }
    for (Process& p : processes) report(p);
    const Ledger::Account account =
        settled({processes[0].ledger.get(), processes[1].ledger.get(), processes[2].ledger.get()});
    EXPECT_GE(account.used, sum) << round;
    EXPECT_LE(account.used, sum + uncertain) << round;
    if (round == 0) {
      EXPECT_EQ(account.used, sum);
    }
  }
  ASSERT_EQ(processes[0].ledger->begin_count(true), Count::kMine);
  processes[0].ledger->end_count(sum);
  EXPECT_EQ(settled({processes[0].ledger.get(), processes[1].ledger.get(), processes[2].ledger.get()}).used, sum);
}

// --- Damage, locks and other people's files --------------------------------------------------------------------------

TEST(Ledger, ADamagedRecordMeansUnknown) {
  const Directory dir;
  const auto a = counted_ledger(dir, 100'000);
  const auto b = open_ledger(dir, 100'000);
  std::mt19937_64 random(5);
  ASSERT_EQ(a->reserve(3000), Room::kTaken);
  for (int round = 0; round < 6; ++round) {
    ASSERT_EQ(a->reserve(1000), Room::kTaken);
    a->commit(1000, 500);
    const int fd = ::openat(dir.fd(), "ledger", O_RDWR | O_CLOEXEC);
    const auto at = static_cast<off_t>(random() % sizeof(LedgerRecord));
    unsigned char byte = 0;
    ASSERT_EQ(::pread(fd, &byte, 1, at), 1);
    byte = static_cast<unsigned char>(byte ^ (1U << random() % 8));
    ASSERT_EQ(::pwrite(fd, &byte, 1, at), 1);
    if (round >= 4) {
      ASSERT_EQ(::ftruncate(fd, round == 4 ? 100 : 0), 0);
    }
    ::close(fd);
    std::this_thread::sleep_for(kUnsure);

    EXPECT_EQ(b->reserve(1), Room::kBusy) << "byte " << at;
    EXPECT_TRUE(b->live_tokens().empty()) << "a lives, and has not told its token again";
    ASSERT_EQ(b->begin_count(), Count::kMine);
    EXPECT_EQ(a->begin_count(), Count::kOther);
    EXPECT_EQ(b->live_tokens(), (std::vector{a->token(), b->token()}));
    b->end_count(10'000 + round);
    EXPECT_EQ(b->account()->used, 10'000 + round);
    EXPECT_EQ(b->account()->reserved, 3000);
    EXPECT_EQ(a->begin_count(), Count::kNotNeeded);
    EXPECT_EQ(b->missing(87'000), 10'000 + round + 3000 + 87'000 - 100'000);
  }
}

/// Until then its room is in no sum: others could take it once more.
TEST(Ledger, ACountIsNoneBeforeAllHaveToldWhatTheyReserved) {
  const Directory dir;
  const auto a = counted_ledger(dir, 10'000);
  const auto b = open_ledger(dir, 10'000);
  ASSERT_EQ(a->reserve(8000), Room::kTaken);
  ASSERT_EQ(::truncate(dir.path("ledger").c_str(), 0), 0);
  std::this_thread::sleep_for(kUnsure);
  ASSERT_EQ(b->begin_count(), Count::kMine);
  b->end_count(0);
  EXPECT_EQ(b->reserve(5000), Room::kBusy);
  EXPECT_TRUE(a->flush());
  ASSERT_EQ(b->begin_count(), Count::kMine);
  b->end_count(0);
  EXPECT_EQ(b->reserve(5000), Room::kFull);
  EXPECT_EQ(b->reserve(1000), Room::kTaken);
}

TEST(Ledger, AForeignLockIsNotWaitedForLong) {
  const Directory dir;
  const auto ledger = open_ledger(dir, 1000, milliseconds(100));
  ASSERT_EQ(ledger->begin_count(), Count::kMine);
  ledger->end_count(0);
  const auto io = system_io();
  const int other = io->open(dir.fd(), "ledger", O_RDWR, 0);
  ASSERT_EQ(io->lock(other, 0, 4096, true), 0);
  std::this_thread::sleep_for(kUnsure);
  const auto timed = [](const auto& call) {
    const auto start = steady_clock::now();
    call();
    return steady_clock::now() - start;
  };
  const auto first = timed([&] { EXPECT_EQ(ledger->reserve(10), Room::kBusy); });
  EXPECT_GE(first, milliseconds(100));
  EXPECT_LT(first, milliseconds(1000));
  const auto next = timed([&] {
    EXPECT_EQ(ledger->reserve(10), Room::kBusy);
    EXPECT_EQ(ledger->missing(2000), 0);
    EXPECT_EQ(ledger->begin_count(true), Count::kOther);
    EXPECT_TRUE(ledger->live_tokens().empty());
    EXPECT_FALSE(ledger->account());
    EXPECT_FALSE(ledger->flush());
    EXPECT_EQ(ledger->mark(), 0U);
    ledger->commit(0, 5);
    ledger->cancel(0);
  });
  EXPECT_LT(next, milliseconds(100)) << "the limit passed once already";
  EXPECT_EQ(error_of([&] { open_ledger(dir, 1000, milliseconds(50)); }), "ledger: locked by another process for 50 ms");
  ASSERT_EQ(io->unlock(other, 0, 4096), 0);
  EXPECT_EQ(ledger->reserve(10), Room::kTaken);
  EXPECT_EQ(ledger->account()->used, 5);
  EXPECT_FALSE(ledger->lost());
  io->close(other);
}

TEST(Ledger, FileSystemsWithoutLocksAreRefused) {
  const Directory dir;
  for (const int error : {ENOLCK, EOPNOTSUPP, EINVAL}) {
    EXPECT_EQ(in_child([&] {
                refuse(SYS_fcntl, error, F_OFD_SETLK);
                const std::string text = error_of([&] { open_ledger(dir, 1000); });
                return text == std::string("ledger: the file system has no byte-range locks: ") + std::strerror(error)
                           ? 0
                           : 1;
              }),
              0);
  }
}

TEST(Ledger, TheFileMustBeOurs) {
  const Directory dir;
  const auto open = [&](mode_t mode = 0600) {
    return error_of([&] { open_ledger(dir, 1000, milliseconds(100), mode); });
  };
  const auto mode_now = [&] {
    struct stat now {};
    EXPECT_EQ(::fstatat(dir.fd(), "ledger", &now, 0), 0);
    return now.st_mode & 07777;
  };
  ASSERT_EQ(::symlinkat("other", dir.fd(), "ledger"), 0);
  EXPECT_EQ(open(), "ledger: a symbolic link, refused");
  ASSERT_EQ(::unlinkat(dir.fd(), "ledger", 0), 0);
  ASSERT_EQ(::mkfifoat(dir.fd(), "ledger", 0600), 0);
  EXPECT_EQ(open(), "ledger: not a regular file, refused");
  ASSERT_EQ(::unlinkat(dir.fd(), "ledger", 0), 0);
  ASSERT_EQ(::mkdirat(dir.fd(), "ledger", 0700), 0);
  EXPECT_EQ(open(), "ledger: open: Is a directory");
  ASSERT_EQ(::unlinkat(dir.fd(), "ledger", AT_REMOVEDIR), 0);

  const mode_t before = ::umask(077);
  EXPECT_EQ(open(0660), "none");
  EXPECT_EQ(mode_now(), 0660U);
  ::umask(before);
  EXPECT_EQ(open(), "none");
  EXPECT_EQ(mode_now(), 0600U);
  EXPECT_EQ(error_of([&] { open_ledger(dir, -1); }), "ledger: max_bytes -1 is negative");
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  ASSERT_EQ(::fchownat(dir.fd(), "ledger", 12345, static_cast<gid_t>(-1), 0), 0);
  EXPECT_EQ(open(), "ledger: belongs to user 12345, not 0, refused");
  EXPECT_EQ(open(0660), "none");
}

TEST(Ledger, SixtyProcessesAndNoMore) {
  const Directory dir;
  std::vector<std::unique_ptr<Ledger>> all;
  for (int i = 0; i < 60; ++i) all.push_back(open_ledger(dir, 1000));
  EXPECT_EQ(all[59]->live_tokens().size(), 60U);
  EXPECT_EQ(error_of([&] { open_ledger(dir, 1000); }), "ledger: 60 processes have the directory open, the limit");
  all[30].reset();
  all.push_back(open_ledger(dir, 1000));
  EXPECT_EQ(all[59]->live_tokens()[30], all.back()->token());
}

TEST(Ledger, ARemovedFileIsNoticed) {
  const Directory dir;
  const auto ledger = counted_ledger(dir, 1000);
  ASSERT_EQ(::unlinkat(dir.fd(), "ledger", 0), 0);
  EXPECT_FALSE(ledger->lost());
  std::this_thread::sleep_for(kUnsure);
  EXPECT_EQ(ledger->reserve(1), Room::kBusy);
  EXPECT_TRUE(ledger->lost());
  EXPECT_EQ(counted_ledger(dir, 1000)->reserve(1), Room::kTaken);
}

TEST(Ledger, ARemovedFileIsMadeAgain) {
  const Directory dir;
  const auto a = counted_ledger(dir, 1000);
  const auto b = open_ledger(dir, 1000);
  ASSERT_EQ(a->reserve(300), Room::kTaken);
  ASSERT_EQ(b->reserve(200), Room::kTaken);
  const std::string token = a->token();
  ASSERT_EQ(::unlinkat(dir.fd(), "ledger", 0), 0);
  std::this_thread::sleep_for(kUnsure);
  for (Ledger* ledger : {a.get(), b.get()}) {
    EXPECT_FALSE(ledger->flush());
    ASSERT_TRUE(ledger->lost());
    EXPECT_TRUE(ledger->reopen(dir.fd()));
    EXPECT_FALSE(ledger->lost());
    EXPECT_EQ(ledger->reserve(1), Room::kBusy) << "nobody has counted";
  }
  EXPECT_EQ(a->live_tokens(), (std::vector{token, b->token()}));
  ASSERT_EQ(b->begin_count(), Count::kMine);
  b->end_count(100);
  EXPECT_EQ(b->account()->used, 100);
  EXPECT_EQ(b->account()->reserved, 500);
  EXPECT_EQ(b->reserve(401), Room::kFull);
  a->commit(300, 300);
  EXPECT_EQ(settled({a.get(), b.get()}).used, 400);
  // Not where the folder has gone, too.
  ASSERT_EQ(::unlinkat(dir.fd(), "ledger", 0), 0);
  std::filesystem::remove_all(dir.path());
  EXPECT_FALSE(a->flush());
  EXPECT_FALSE(a->reopen(dir.fd()));
  EXPECT_TRUE(a->lost());
}

// --- Several processes -----------------------------------------------------------------------------------------------

TEST(Ledger, AForkedChildLeavesTheAccountAlone) {
  const Directory dir;
  auto ledger = counted_ledger(dir, 1000, 100);
  ASSERT_EQ(ledger->reserve(500), Room::kTaken);
  EXPECT_EQ(in_child([&] {
              if (ledger->reserve(1) != Room::kBusy || ledger->begin_count(true) != Count::kOther) return 1;
              ledger->commit(500, 500);
              ledger->cancel(500);
              ledger->release(100);
              ledger->end_count(0);
              if (ledger->account() || ledger->missing(5000) != 0 || ledger->flush() || ledger->mark() != 0) return 2;
              if (!ledger->live_tokens().empty() || !ledger->lost()) return 3;
              ledger.reset();
              const auto own = open_ledger(dir, 1000);
              return own->live_tokens().size() == 2 && own->reserve(400) == Room::kTaken ? 0 : 4;
            }),
            0);
  EXPECT_EQ(ledger->account()->used, 100);
  EXPECT_EQ(ledger->account()->reserved, 500);
  EXPECT_EQ(ledger->live_tokens(), std::vector{ledger->token()});
}

TEST(Ledger, AParentThatDiedIsDeadThoughItsChildLives) {
  const Directory dir;
  const auto ledger = counted_ledger(dir, 1000);
  std::array<int, 2> gate{};
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(gate.data()), 0);
  ASSERT_EQ(::pipe(ready.data()), 0);
  const pid_t parent = start_child([&] {
    const auto own = open_ledger(dir, 1000);
    if (own->reserve(300) != Room::kTaken) return 1;
    start_child([&] {
      char end = 0;
      ::close(gate[1]);
      return ::write(ready[1], "r", 1) == 1 ? static_cast<int>(::read(gate[0], &end, 1)) : 1;
    });
    ::pause();
    return 0;
  });
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(ledger->live_tokens().size(), 2U);
  ::kill(parent, SIGKILL);
  EXPECT_EQ(wait_for_child(parent), -1);
  EXPECT_EQ(ledger->live_tokens(), std::vector{ledger->token()});
  EXPECT_EQ(ledger->account()->reserved, 300) << "until somebody has counted";
  EXPECT_EQ(ledger->reserve(701), Room::kFull);
  EXPECT_EQ(ledger->begin_count(), Count::kMine);
  ledger->end_count(0);
  EXPECT_EQ(ledger->reserve(1000), Room::kTaken);
  for (const auto& pipe : {gate, ready}) {
    for (const int end : pipe) ::close(end);
  }
}

TEST(Ledger, DeathsThatChangedNothingNeedNoCount) {
  const Directory dir;
  const auto ledger = counted_ledger(dir, 1000, 1000);
  const auto die_after = [&](const std::function<void(Ledger&)>& work) {
    return in_child([&] {
      const auto own = open_ledger(dir, 1000);
      work(*own);
      ::_exit(0);
      return 1;
    });
  };
  EXPECT_EQ(die_after([](Ledger& own) { own.missing(own.account()->used); }), 0);
  EXPECT_EQ(ledger->begin_count(), Count::kNotNeeded);
  EXPECT_EQ(die_after([](Ledger& own) { own.mark(); }), 0) << "and then it removed a file, perhaps";
  EXPECT_EQ(ledger->begin_count(), Count::kMine);
  ledger->end_count(900);
  EXPECT_EQ(die_after([](Ledger& own) { own.reserve(1); }), 0);
  EXPECT_EQ(ledger->begin_count(), Count::kMine);
  ledger->end_count(900);
  EXPECT_EQ(ledger->begin_count(), Count::kNotNeeded);
  EXPECT_EQ(ledger->account()->reserved, 0);
}

TEST(Ledger, ACounterThatDiedLeavesTheCountToOthers) {
  const Directory dir;
  const auto ledger = counted_ledger(dir, 1000);
  EXPECT_EQ(in_child([&] {
              const auto own = open_ledger(dir, 1000);
              const bool mine = own->begin_count(true) == Count::kMine;
              ::_exit(mine ? 7 : 8);
              return 0;
            }),
            7);
  std::this_thread::sleep_for(kUnsure);
  EXPECT_EQ(ledger->reserve(1), Room::kBusy);
  EXPECT_EQ(ledger->begin_count(), Count::kMine);
  ledger->end_count(1);
  EXPECT_EQ(ledger->reserve(999), Room::kTaken);
}

/// What processes that hammer one directory share, in memory.
struct Shared {
  std::atomic<std::int64_t> bytes{0};  // counted before files grow, and after they are gone
  std::atomic<std::int64_t> most{0};
  std::atomic<int> puts{0};
  std::array<std::atomic<int>, 4> puts_of{};
  std::atomic<int> evictions{0};
  std::atomic<bool> stop{false};
};

constexpr std::int64_t kLimit = 1 << 20;
constexpr std::int64_t kMostFile = 32 << 10;

/// Puts files, as a directory tier would, and evicts whatever comes first where there is no room.
int hammer(const Directory& dir, Shared& shared, unsigned index) {
  const auto io = system_io();
  const int at = ::open(dir.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  Ledger ledger(io, at, {.max_bytes = kLimit});
  std::mt19937_64 random(index);
  const std::vector<char> data(kMostFile);
  // Under a name of this process first: another one may remove the file, and a third put a new one, between two calls.
  const std::string going = ledger.token() + ".going";
  const auto evict = [&](std::int64_t wanted) {
    io->list(at, [&](const char* name, unsigned char) {
      if (name[0] != 'x') return true;
      const std::uint64_t mark = ledger.mark();
      if (mark == 0) return false;
      if (io->rename_new(at, name, at, going.c_str()) < 0) return true;
      struct stat now {};
      io->stat_at(at, going.c_str(), now);
      io->unlink(at, going.c_str());
      shared.bytes -= now.st_size;
      ++shared.evictions;
      ledger.release(now.st_size, mark);
      wanted -= now.st_size;
      return wanted > 0;
    });
  };
  for (int i = 0; !shared.stop; ++i) {
    const auto size = static_cast<std::int64_t>(random() % kMostFile);
    const Room room = ledger.reserve(size);
    if (room == Room::kFull) evict(ledger.missing(size));
    if (room == Room::kBusy) std::this_thread::sleep_for(milliseconds(1));
    if (room != Room::kTaken) continue;
    const std::int64_t now = shared.bytes.fetch_add(size) + size;
    for (std::int64_t most = shared.most; now > most && !shared.most.compare_exchange_weak(most, now);) {
    }
    const std::string temporary = ledger.token() + "." + std::to_string(i);
    const int fd = io->open(at, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0600);
    if (fd < 0 || io->pwrite(fd, data.data(), static_cast<std::size_t>(size), 0) != size) return 1;
    io->close(fd);
    const std::string name = "x" + std::to_string(random() % 200);
    if (ledger.mark() != 0 && io->rename_new(at, temporary.c_str(), at, name.c_str()) == 0) {
      ledger.commit(size, size);
      ++shared.puts;
      ++shared.puts_of[index];
    } else {
      io->unlink(at, temporary.c_str());
      shared.bytes -= size;
      ledger.cancel(size);
    }
  }
  return 0;
}

std::int64_t bytes_of_files(const Directory& dir, const std::string& start) {
  std::int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path())) {
    std::error_code gone;
    const auto size = entry.file_size(gone);
    if (!gone && entry.path().filename().string().starts_with(start)) bytes += static_cast<std::int64_t>(size);
  }
  return bytes;
}

/// As a directory tier does it: temporaries of the dead go, files are counted.
void count(const Directory& dir, Ledger& ledger) {
  std::vector<std::string> temporaries;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path())) {
    const std::string name = entry.path().filename().string();
    if (name.find('.') != std::string::npos) temporaries.push_back(name);
  }
  const std::vector<std::string> live = ledger.live_tokens();
  ASSERT_FALSE(live.empty());
  for (const std::string& name : temporaries) {
    if (std::find(live.begin(), live.end(), name.substr(0, 16)) != live.end()) continue;
    EXPECT_EQ(::unlinkat(dir.fd(), name.c_str(), 0), 0);
  }
  ledger.end_count(bytes_of_files(dir, "x"));
}

class Hammer : public testing::Test {
 protected:
  void SetUp() override {
    void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    shared = new (memory) Shared;
    for (unsigned i = 0; i < 4; ++i) {
      children.push_back(start_child([this, i] { return hammer(dir, *shared, i); }));
    }
  }
  void TearDown() override {
    stop();
    ::munmap(shared, sizeof(Shared));
  }
  /// Until there was this much to do, or nothing happens.
  void wait_for(int puts, int evictions) {
    const int puts_before = shared->puts;
    const int evictions_before = shared->evictions;
    for (int i = 0; i < 10'000; ++i) {
      if (shared->puts >= puts_before + puts && shared->evictions >= evictions_before + evictions) return;
      std::this_thread::sleep_for(milliseconds(1));
    }
    ADD_FAILURE() << "no progress";
  }
  void stop() {
    shared->stop = true;
    for (const pid_t child : children) EXPECT_EQ(wait_for_child(child), 0);
    children.clear();
  }

  Directory dir;
  std::unique_ptr<Ledger> ledger = counted_ledger(dir, kLimit);
  Shared* shared = nullptr;
  std::vector<pid_t> children;
};

TEST_F(Hammer, ProcessesTogetherKeepTheLimit) {
  wait_for(500, 300);
  stop();
  EXPECT_LE(shared->most, kLimit);
  EXPECT_GT(shared->most, kLimit / 2);
  const std::int64_t files = bytes_of_files(dir, "x");
  EXPECT_EQ(shared->bytes, files);
  EXPECT_EQ(bytes_of_files(dir, ""), files + static_cast<std::int64_t>(sizeof(LedgerRecord)));
  const auto account = ledger->account();
  ASSERT_TRUE(account);
  EXPECT_EQ(account->used, files);
  EXPECT_EQ(account->reserved, 0);
  EXPECT_EQ(account->processes, 1);
}

TEST_F(Hammer, KilledProcessesAreCountedOutWhileOthersWork) {
  for (int killed = 1; killed <= 2; ++killed) {
    wait_for(100, 50);
    while (shared->puts_of[children.size() - 1] == 0) std::this_thread::sleep_for(milliseconds(1));
    ::kill(children.back(), SIGKILL);
    EXPECT_EQ(wait_for_child(children.back()), -1);
    children.pop_back();
    ASSERT_EQ(ledger->begin_count(), Count::kMine);
    count(dir, *ledger);
    EXPECT_EQ(ledger->begin_count(), Count::kNotNeeded);
    EXPECT_EQ(ledger->live_tokens().size(), children.size() + 1);
    wait_for(50, 20);
    // What the dead ones were about to write stays in `bytes`.
    EXPECT_LE(shared->most, kLimit + killed * kMostFile);
  }
  stop();
  const std::int64_t files = bytes_of_files(dir, "x");
  const auto account = ledger->account();
  ASSERT_TRUE(account);
  EXPECT_GE(account->used, files);
  EXPECT_LE(account->used, files + 2 * 2 * 3 * kMostFile) << "what was under way when a count began or ended";
  EXPECT_EQ(account->reserved, 0);

  ledger.reset();
  ledger = counted_ledger(dir, kLimit, files);
  EXPECT_EQ(ledger->account()->used, files);
}

}  // namespace
}  // namespace kvstride::store
