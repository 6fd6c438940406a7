// SPDX-License-Identifier: Apache-2.0
// Admission: counts of asks against exact ones, the write budget against an oracle in whole numbers, ages, quotas.
#include "store/admission.h"

#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <map>
#include <random>
#include <thread>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

using namespace std::chrono_literals;

Key key_of(std::uint64_t number) { return Key(std::as_bytes(std::span(&number, 1))); }
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  return x ^ x >> 31;
}

std::string refusal(const AdmissionOptions& options) {
  try {
    const Admission made(options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kArgument);
    return error.what();
  }
  return "";
}

TEST(Admission, OptionsAreChecked) {
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({.min_reuse = 15}), "");
  EXPECT_EQ(refusal({.min_reuse = 0}), "Admission: min_reuse is 0, it must be from 1 to 15");
  EXPECT_EQ(refusal({.min_reuse = 16}), "Admission: min_reuse is 16, it must be from 1 to 15");
  EXPECT_EQ(refusal({.reuse_window = 0}), "Admission: reuse_window is 0, it must be from 1 to 1073741824");
  EXPECT_EQ(refusal({.write_bytes_a_day = -1}),
            "Admission: write_bytes_a_day is -1, it must be from 0 to 1152921504606846976");
  EXPECT_EQ(refusal({.write_burst_bytes = 5}), "Admission: write_burst_bytes needs write_bytes_a_day");
  EXPECT_NE(refusal({.time_to_live = -1ns}), "");
  EXPECT_NE(refusal({.tenant_bytes = -1}), "");
  EXPECT_EQ(refusal({.bytes_of_tenant = {{"a", -7}}}),
            "Admission: bytes_of_tenant['a'] is -7, it must be from 0 to 1152921504606846976");
}

TEST(Admission, EverythingIsTakenByDefault) {
  Admission admission({});
  EXPECT_EQ(admission.memory(), 0U);
  const Admission::Tenant tenant = admission.tenant("somebody");
  EXPECT_EQ(tenant, Admission::kNameless);
  EXPECT_EQ(admission.admit(0, key_of(1), {}, std::int64_t{1} << 50, tenant, 0ns), Admit::kYes);
  EXPECT_FALSE(admission.expired(0ns, std::chrono::hours(24 * 365 * 100)));
}

// --- How often something was asked for

/// Asks of two generations, exactly.
class ExactAsks {
 public:
  explicit ExactAsks(std::int64_t window) : window_(window) {}
  void add(std::uint64_t hash) {
    ++now_[hash];
    if (++asks_ < window_) return;
    asks_ = 0;
    before_.swap(now_);
    now_.clear();
  }
  int count(std::uint64_t hash) const {
    const auto in = [&](const auto& map) { return map.count(hash) != 0 ? std::min(map.at(hash), 15) : 0; };
    return std::min(in(now_) + in(before_), 15);
  }

 private:
  std::int64_t window_;
  std::int64_t asks_ = 0;
  std::map<std::uint64_t, int> now_;
  std::map<std::uint64_t, int> before_;
};

TEST(RecentAsks, CountsAreNeverTooLowAndSeldomTooHigh) {
  for (const std::int64_t window : {1, 2, 7, 300, 5000}) {
    RecentAsks asks(window);
    ExactAsks exact(window);
    std::deque<std::uint64_t> last;
    std::mt19937_64 random(static_cast<std::uint64_t>(window));
    int too_high = 0;
    constexpr int kAsks = 30000;
    for (int i = 0; i < kAsks; ++i) {
      // Some are popular, most come once or twice.
      const std::uint64_t hash = mixed(random() % 4 == 0 ? random() % 20 : random() % 20000);
      asks.add(hash);
      exact.add(hash);
      last.push_back(hash);
      if (static_cast<std::int64_t>(last.size()) > window) last.pop_front();
      const std::uint64_t other = random() % 2 == 0 ? hash : mixed(random() % 20000);
      ASSERT_GE(asks.count(other), exact.count(other));
      if (window < 1000 && i % 50 == 0) {
        ASSERT_GE(asks.count(other), std::min<std::int64_t>(std::count(last.begin(), last.end(), other), 15));
      }
      too_high += asks.count(other) > exact.count(other);
    }
    EXPECT_LT(too_high, kAsks / 100) << window;
  }
}

TEST(RecentAsks, StrangersAreSeldomKnownEvenWhenAllAsksAreOfDifferentThings) {
  constexpr std::int64_t kWindow = 1 << 16;
  RecentAsks asks(kWindow);
  std::uint64_t number = 0;
  for (std::int64_t i = 0; i < 2 * kWindow - 1; ++i) asks.add(mixed(number++));  // two full generations
  int known = 0;
  constexpr int kStrangers = 100000;
  for (int i = 0; i < kStrangers; ++i) known += asks.count(mixed(number++)) > 0;
  EXPECT_LT(known, kStrangers / 100);
  EXPECT_GT(known, 0) << "a sketch of this size is not exact: the test looks at something else";
}

TEST(RecentAsks, WhatIsOldIsForgotten) {
  constexpr std::int64_t kWindow = 1000;
  RecentAsks asks(kWindow);
  const std::uint64_t hash = mixed(~std::uint64_t{0});
  for (int i = 0; i < 3; ++i) asks.add(hash);
  std::uint64_t number = 0;
  for (std::int64_t i = 3; i < kWindow; ++i) asks.add(mixed(number++));
  EXPECT_GE(asks.count(hash), 3);
  for (std::int64_t i = 0; i < kWindow - 1; ++i) asks.add(mixed(number++));
  EXPECT_GE(asks.count(hash), 3);
  asks.add(mixed(number++));
  EXPECT_EQ(asks.count(hash), 0);
}

TEST(RecentAsks, MemoryIsBounded) {
  for (const std::int64_t window : {1 << 10, 1 << 20, 1000000}) {
    RecentAsks asks(window);
    EXPECT_GE(asks.memory(), static_cast<std::size_t>(16 * window));
    EXPECT_LE(asks.memory(), static_cast<std::size_t>(32 * window));
  }
  EXPECT_LE(RecentAsks(1).memory(), 4096U);
}

TEST(Admission, MinimumReuseCountsAsksNotOffers) {
  Admission admission({.min_reuse = 2});
  const Key key = key_of(7);
  const std::array<Key, 1> keys{key};
  const auto admit = [&](std::uint32_t space, Heads heads) { return admission.admit(space, key, heads, 1, 0, 0ns); };
  EXPECT_EQ(admit(0, {}), Admit::kSeldom);
  admission.asked(0, keys, {});
  for (int i = 0; i < 5; ++i) EXPECT_EQ(admit(0, {}), Admit::kSeldom);
  admission.asked(0, keys, {});
  EXPECT_EQ(admit(0, {}), Admit::kYes);
  EXPECT_EQ(admit(1, {}), Admit::kSeldom);
  EXPECT_EQ(admit(0, {0, 4}), Admit::kSeldom) << "another rank's piece";
  EXPECT_EQ(admission.admit(0, key_of(8), {}, 1, 0, 0ns), Admit::kSeldom);
}

// --- The write budget

constexpr std::int64_t kDay = 86'400'000'000'000;

TEST(WriteBudget, IsExactOverAnyTimes) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    const auto rate = static_cast<std::int64_t>(1 + random() % (round % 2 == 0 ? 1000 : 100'000'000'000'000));
    const auto burst = static_cast<std::int64_t>(random() % 3 == 0 ? 0 : 1 + random() % 1'000'000'000);
    WriteBudget budget(rate, burst);
    // In bytes × kDay, where nothing is rounded. A full bucket drops what does not fit.
    __extension__ using Wide = __int128;
    const Wide full = Wide{burst > 0 ? burst : std::max<std::int64_t>(rate / 24, 1)} * kDay;
    Wide level = full;
    std::int64_t now = static_cast<std::int64_t>(random() % 1000);
    std::int64_t last = now;
    for (int step = 0; step < 200; ++step) {
      const bool open = budget.open(std::chrono::nanoseconds(now));
      level = std::min(full, level + Wide{std::max<std::int64_t>(now - last, 0)} * rate);
      last = std::max(last, now);
      ASSERT_EQ(open, level >= kDay) << "whole bytes only";
      if (open) {
        const auto bytes = static_cast<std::int64_t>(random() % 2'000'000'000);
        budget.spend(bytes);
        level -= Wide{bytes} * kDay;
        if (random() % 8 == 0) {
          budget.refund(bytes);
          level += Wide{bytes} * kDay;
        }
      }
      now += static_cast<std::int64_t>(random() % 100'000'000'000) - (random() % 16 == 0 ? 200'000'000'000 : 0);
    }
  }
}

TEST(WriteBudget, NoSpanOfTimeSeesMoreThanItsShare) {
  constexpr std::int64_t kRate = 1'000'000'000;
  constexpr std::int64_t kBurst = 5'000'000;
  constexpr std::int64_t kChunk = 1'300'000;
  WriteBudget budget(kRate, kBurst);
  std::vector<std::pair<std::int64_t, std::int64_t>> written;  // when, all bytes until then
  std::int64_t sum = 0;
  std::mt19937_64 random(2);
  std::int64_t now = 0;
  while (now < 2 * kDay) {
    now += static_cast<std::int64_t>(random() % 200'000'000'000);
    if (!budget.open(std::chrono::nanoseconds(now))) continue;
    budget.spend(kChunk);
    written.emplace_back(now, sum);
    sum += kChunk;
  }
  for (std::size_t i = 0; i < written.size(); i += 7) {
    for (std::size_t j = i; j < written.size(); j += 5) {
      const double share = static_cast<double>(kRate) * static_cast<double>(written[j].first - written[i].first) / kDay;
      ASSERT_LE(static_cast<double>(written[j].second + kChunk - written[i].second), share + kBurst + kChunk + 1);
    }
  }
  EXPECT_GT(sum, 2 * kRate * 98 / 100) << "and it is used";
}

TEST(Admission, BudgetOpensAgainAndRefundsWhatWasNotWritten) {
  Admission admission({.write_bytes_a_day = 86'400, .write_burst_bytes = 10});  // a byte a second
  const auto admit = [&](std::int64_t bytes, std::chrono::seconds now) {
    return admission.admit(0, key_of(1), {}, bytes, 0, now);
  };
  EXPECT_EQ(admit(25, 100s), Admit::kYes) << "the last one may overdraw it";
  EXPECT_EQ(admit(1, 100s), Admit::kBudget);
  EXPECT_EQ(admit(1, 115s), Admit::kBudget) << "level 0";
  EXPECT_EQ(admit(1, 116s), Admit::kYes);
  EXPECT_EQ(admit(1, 116s), Admit::kBudget);
  admission.cancelled(1, 0);
  EXPECT_EQ(admit(1, 50s), Admit::kYes) << "a clock that went back stands still";
  EXPECT_EQ(admit(1, 116s), Admit::kBudget);
  EXPECT_EQ(admit(10, 10000s), Admit::kYes) << "no more than the burst is saved up";
  EXPECT_EQ(admit(1, 10000s), Admit::kBudget);
}

// --- Age and tenants

TEST(Admission, EntriesAgeFromTheirWriting) {
  const Admission admission({.time_to_live = 10s});
  EXPECT_FALSE(admission.expired(5s, 5s));
  EXPECT_FALSE(admission.expired(5s, 15s - 1ns));
  EXPECT_TRUE(admission.expired(5s, 15s));
  EXPECT_FALSE(admission.expired(20s, 5s)) << "a clock that went back";
}

TEST(Admission, TenantsHaveRoomOfTheirOwn) {
  Admission admission({.tenant_bytes = 100, .bytes_of_tenant = {{"big", 250}, {"banned", 0}}});
  const auto big = admission.tenant("big");
  const auto one = admission.tenant("one");
  const auto two = admission.tenant("two");
  EXPECT_EQ(admission.tenant("one"), one);
  EXPECT_EQ(admission.tenant(""), Admission::kNameless);
  const auto admit = [&](Admission::Tenant tenant, std::int64_t bytes) {
    return admission.admit(0, key_of(1), {}, bytes, tenant, 0ns);
  };
  EXPECT_EQ(admit(one, 60), Admit::kYes);
  EXPECT_EQ(admit(one, 41), Admit::kQuota);
  EXPECT_EQ(admit(one, 40), Admit::kYes);
  EXPECT_EQ(admission.held(one), 100);
  EXPECT_EQ(admit(two, 100), Admit::kYes);
  EXPECT_EQ(admit(Admission::kNameless, 100), Admit::kYes);
  EXPECT_EQ(admit(Admission::kNameless, 1), Admit::kQuota);
  EXPECT_EQ(admit(big, 250), Admit::kYes);
  EXPECT_EQ(admit(admission.tenant("banned"), 1), Admit::kQuota);
  admission.released(60, one);
  EXPECT_EQ(admit(one, 60), Admit::kYes);
  admission.cancelled(60, one);
  EXPECT_EQ(admission.held(one), 40);
  admission.holds(1000, two);  // found at a restart with a lower limit
  EXPECT_EQ(admit(two, 1), Admit::kQuota);
  EXPECT_EQ(admission.held(two), 1100);
}

TEST(Admission, NamesOfTenantsTakeNoMemoryWithoutBound) {
  Admission admission({.tenant_bytes = 100});
  std::map<Admission::Tenant, int> seen;
  for (int i = 0; i < 70000; ++i) ++seen[admission.tenant("tenant " + std::to_string(i))];
  EXPECT_EQ(seen.size(), 65535U);  // and the nameless one
  EXPECT_EQ(seen.rbegin()->second, 70000 - 65534);
  EXPECT_EQ(admission.tenant("tenant 0"), 1U);
}

TEST(Admission, ARefusalTakesNothing) {
  Admission admission({.min_reuse = 2, .write_bytes_a_day = 86'400, .write_burst_bytes = 10, .tenant_bytes = 8});
  const std::array<Key, 1> keys{key_of(1)};
  admission.asked(0, keys, {});
  admission.asked(0, keys, {});
  EXPECT_EQ(admission.admit(0, key_of(1), {}, 9, 0, 0s), Admit::kQuota);
  EXPECT_EQ(admission.admit(0, key_of(2), {}, 9, 0, 0s), Admit::kSeldom);
  EXPECT_EQ(admission.held(0), 0);
  EXPECT_EQ(admission.admit(0, key_of(1), {}, 8, 0, 0s), Admit::kYes);
  admission.released(8, 0);
  EXPECT_EQ(admission.admit(0, key_of(1), {}, 8, 0, 0s), Admit::kYes) << "2 bytes are left";
  admission.released(8, 0);
  EXPECT_EQ(admission.admit(0, key_of(1), {}, 8, 0, 0s), Admit::kBudget);
  EXPECT_EQ(admission.held(0), 0);
}

TEST(Admission, ManyThreadsKeepTheSums) {
  Admission admission({.min_reuse = 2, .reuse_window = 100, .tenant_bytes = 1000});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto tenant = admission.tenant(t % 2 == 0 ? "even" : "odd");
      const std::array<Key, 1> keys{key_of(static_cast<std::uint64_t>(t))};
      for (int i = 0; i < 5000; ++i) {
        admission.asked(0, keys, {});
        if (admission.admit(0, keys[0], {}, 7, tenant, std::chrono::nanoseconds(i)) != Admit::kYes) continue;
        i % 3 == 0 ? admission.cancelled(7, tenant) : admission.released(7, tenant);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admission.held(admission.tenant("even")), 0);
  EXPECT_EQ(admission.held(admission.tenant("odd")), 0);
}

}  // namespace
}  // namespace kvstride::store
