// SPDX-License-Identifier: Apache-2.0
// Admission in the store: what each tier takes, for how long, and whose it is; beside the simulation of the same trace.
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "memory_engine.h"
#include "simulate/simulation.h"
#include "store/remote/remote_tier.h"
#include "store_faults.h"

namespace kvstride::test {
namespace {

using store::Clock;

constexpr std::int64_t kImage = 16384;          ///< of a chunk of Client: a header and whole pages
constexpr std::size_t kBytes = 3 * 4096 - 100;  ///< of a chunk
constexpr std::int64_t kNothing = 1;            ///< bytes a day: only the burst is written
constexpr const char* kKinds[] = {"host", "directory", "remote"};

/// One tier of each kind, in a directory of its own.
class StoreAdmission : public testing::Test {
 protected:
  TierPtr host(std::int64_t images, const AdmissionOptions& admission = {}) {
    HostTierOptions options;
    options.num_bytes = images * kImage;
    options.eviction = Eviction::kLru;
    options.admission = admission;
    return host_tier(options);
  }
  TierPtr directory(const AdmissionOptions& admission = {}, std::int64_t max_bytes = 64 << 20) {
    DirectoryTierOptions options = small_tier(scratch.path(), max_bytes);
    options.num_threads = 1;  // in the order of the requests
    options.eviction = Eviction::kLru;
    options.admission = admission;
    return store::make_directory_tier(options, io);
  }
  TierPtr remote(const AdmissionOptions& admission = {}) {
    RemoteTierOptions options;
    options.staging_bytes = 4 << 20;
    options.admission = admission;
    return store::make_remote_tier(options, engine);
  }
  TierPtr tier(const std::string& kind, const AdmissionOptions& admission) {
    return kind == "host" ? host(64, admission) : kind == "directory" ? directory(admission) : remote(admission);
  }

  Scratch scratch;
  std::shared_ptr<FaultIo> io = std::make_shared<FaultIo>(store::system_io());
  std::shared_ptr<MemoryEngine> engine = std::make_shared<MemoryEngine>();
};

std::int64_t counter(const TierPtr& tier, const char* name) {
  return static_cast<std::int64_t>(tier_metrics(*tier).counters.at(name));
}
RequestOptions of(const std::string& tenant) {
  RequestOptions out;
  out.tenant = tenant;
  return out;
}
std::string refusal(const std::function<void()>& make) {
  try {
    make();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kArgument);
    return error.what();
  }
  return "";
}
const Outcomes kOk{Outcome::kOk};
const Outcomes kMiss{Outcome::kMiss};
const Outcomes kRefused{Outcome::kRefused};

TEST_F(StoreAdmission, EachTierTakesWhatIsAskedForTheSecondTime) {
  for (const char* kind : kKinds) {
    SCOPED_TRACE(kind);
    const TierPtr one = tier(kind, {.min_reuse = 2});
    Client client({one}, 0, kBytes);
    EXPECT_EQ(client.put({1}), kRefused);
    EXPECT_EQ(counter(one, "not_admitted_seldom"), 1);
    EXPECT_EQ(counter(one, "writes"), 0);
    EXPECT_EQ(client.get({1}), kMiss);
    EXPECT_EQ(client.get({2}), kMiss);
    EXPECT_EQ(client.get({2}), kMiss);
    EXPECT_EQ(client.put({2}), kRefused) << "a miss and the put of the same request are one ask";
    EXPECT_EQ(client.put({1, 2, 3}), (Outcomes{Outcome::kOk, Outcome::kOk, Outcome::kRefused}));
    EXPECT_EQ(client.get({1, 2, 3}), (Outcomes{Outcome::kOk, Outcome::kOk, Outcome::kMiss}));
    EXPECT_EQ(counter(one, "writes"), 2);
    EXPECT_EQ(counter(one, "not_admitted_seldom"), 3);
    EXPECT_EQ(client.counter("put_refused"), 3U);
  }
}

TEST_F(StoreAdmission, AChunkIsOkWhereAnotherTierTakesIt) {
  const TierPtr upper = host(64);
  const TierPtr lower = directory({.min_reuse = 3});
  Client client({upper, lower}, 0, kBytes);
  EXPECT_EQ(client.put({1}), kOk);
  EXPECT_EQ(counter(lower, "writes"), 0);
  EXPECT_EQ(client.get({1}), kOk);
  EXPECT_EQ(client.put({1}), kOk) << "the third ask";
  EXPECT_EQ(counter(lower, "writes"), 1);
  EXPECT_EQ(counter(upper, "writes"), 1);
  EXPECT_EQ(client.put({1}), kOk);
  EXPECT_EQ(counter(lower, "not_admitted_seldom"), 1) << "what is there is not offered";
}

TEST_F(StoreAdmission, APromotionIsAdmittedLikeAPut) {
  const TierPtr upper = host(64, {.min_reuse = 2});
  const TierPtr lower = directory();
  Client client({upper, lower}, 0, kBytes);
  EXPECT_EQ(client.put({1, 2}), all(Outcome::kOk, 2));
  EXPECT_EQ(counter(upper, "writes"), 0);
  EXPECT_EQ(tier_metrics(*upper).used_bytes, 0) << "nor does it lend its memory to what it does not take";
  EXPECT_EQ(Outcomes(client.store.prefetch(keys_of({1})).wait()), kRefused) << "a prefetch is no ask";
  EXPECT_EQ(counter(lower, "reads"), 0) << "nothing is read for nobody";
  EXPECT_EQ(client.get({1}), kOk);
  EXPECT_EQ(counter(upper, "writes"), 1);
  EXPECT_EQ(client.counter("promotions"), 1U);
  EXPECT_EQ(client.get({1}), kOk);
  EXPECT_EQ(counter(lower, "reads"), 1);
}

TEST_F(StoreAdmission, TheBudgetIsKept) {
  for (const char* kind : kKinds) {
    SCOPED_TRACE(kind);
    const TierPtr one = tier(kind, {.write_bytes_a_day = kNothing, .write_burst_bytes = 3 * kImage});
    Client client({one}, 0, kBytes);
    EXPECT_EQ(client.put({10, 11}), all(Outcome::kOk, 2));
    EXPECT_EQ(client.put({10, 11}), all(Outcome::kOk, 2)) << "costs nothing";
    EXPECT_EQ(client.put({12}), kOk);
    EXPECT_EQ(client.put({13}), kRefused);
    EXPECT_EQ(client.put({13}), kRefused);
    EXPECT_EQ(counter(one, "write_bytes"), 3 * kImage);
    EXPECT_EQ(counter(one, "not_admitted_budget"), 2);
    client.remove({10});
    EXPECT_EQ(client.put({10}), kRefused) << "what was written stays written";
  }
}

TEST_F(StoreAdmission, TheBudgetIsKeptOverTime) {
  // 200 chunks a second, 4 at once.
  const TierPtr one = host(4096, {.write_bytes_a_day = 86'400 * 200 * kImage, .write_burst_bytes = 4 * kImage});
  Client client({one}, 0, kBytes);
  const auto begin = Clock::now();
  int number = 0;
  while (Clock::now() - begin < 400ms) client.put({number++});
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  const std::int64_t written = counter(one, "writes");
  EXPECT_LE(static_cast<double>(written), 4 + 200 * seconds + 1);
  EXPECT_GE(written, 20);
  EXPECT_EQ(counter(one, "not_admitted_budget"), number - written);
}

TEST_F(StoreAdmission, WhatFailsIsGivenBack) {
  const TierPtr one = remote({.write_bytes_a_day = kNothing, .write_burst_bytes = kImage});
  Client client({one}, 0, kBytes);
  engine->set_fault([](const std::string& what, const std::string&) -> std::optional<store::Answer> {
    if (what == "write") return store::Answer::kTooLarge;
    return std::nullopt;
  });
  EXPECT_NE(client.put({1}), kOk);
  EXPECT_NE(client.put({1}), kOk);
  EXPECT_EQ(counter(one, "not_admitted_budget"), 0);
  engine->set_fault(nullptr);
  EXPECT_EQ(client.put({1}), kOk);
  EXPECT_EQ(client.put({2}), kRefused);
  EXPECT_EQ(counter(one, "not_admitted_budget"), 1);
}

TEST_F(StoreAdmission, AHostTiersChunksExpire) {
  const TierPtr one = host(64, {.time_to_live = 300ms});
  Client client({one}, 0, kBytes);
  const auto begin = Clock::now();
  EXPECT_EQ(client.put({1, 2, 3}), all(Outcome::kOk, 3));
  const bool found = client.lookup({1}).at(0);
  if (Clock::now() - begin < 300ms) EXPECT_TRUE(found);
  std::this_thread::sleep_for(350ms);
  const auto pins = client.store.pin(keys_of({1}));
  EXPECT_EQ(pins.found(), std::vector<bool>{false});
  EXPECT_EQ(client.get({2}), kMiss);
  EXPECT_EQ(client.store.lookup_prefix(keys_of({3})), 0);
  EXPECT_EQ(counter(one, "expired"), 3);
  EXPECT_EQ(tier_metrics(*one).used_bytes, 0);
  EXPECT_EQ(tier_metrics(*one).chunks, 0);
  EXPECT_EQ(client.put({1}), kOk);
  EXPECT_EQ(counter(one, "writes"), 4);
}

TEST_F(StoreAdmission, ADirectorysFilesExpire) {
  const TierPtr one = directory({.time_to_live = 1h});
  Client client({one}, 0, kBytes);
  EXPECT_EQ(client.put({1, 2}), all(Outcome::kOk, 2));
  io->jump(59min);
  EXPECT_EQ(client.get({1, 2}), all(Outcome::kOk, 2));
  io->jump(2min);
  EXPECT_EQ(client.get({1}), kMiss) << "found out where it is opened";
  EXPECT_FALSE(std::filesystem::exists(piece_path(scratch.path(), 0, 1)));
  EXPECT_EQ(counter(one, "expired") >= 1, true);
  const TierPtr another = directory({.time_to_live = 1h});
  Client reader({another}, 0, kBytes);
  EXPECT_TRUE(soon([&] { return !reader.lookup({2})[0]; })) << "found at start, too old";
  EXPECT_TRUE(soon([&] { return !std::filesystem::exists(piece_path(scratch.path(), 0, 2)); }));
  EXPECT_EQ(client.get({2}), kMiss);
}

TEST_F(StoreAdmission, ADirectoryIsSweptOfOldFiles) {
  const TierPtr one = directory({.time_to_live = 2s});
  Client client({one}, 0, kBytes);
  EXPECT_EQ(client.put(range(0, 20)), all(Outcome::kOk, 20));
  io->jump(10s);
  EXPECT_TRUE(soon([&] { return tier_metrics(*one).chunks == 0; })) << "without anybody asking";
  EXPECT_EQ(counter(one, "expired"), 20);
  EXPECT_TRUE(soon([&] { return look(scratch.path()).pieces.empty(); }));
  EXPECT_EQ(counter(one, "corrupt"), 0);
}

TEST_F(StoreAdmission, TenantsHaveQuotas) {
  for (const char* kind : {"host", "directory"}) {
    SCOPED_TRACE(kind);
    AdmissionOptions admission;
    admission.tenant_bytes = 2 * kImage;
    admission.bytes_of_tenant = {{"big", 4 * kImage}, {"none", 0}};
    const TierPtr one = tier(kind, admission);
    Client client({one}, 0, kBytes);
    const auto taken = [&](int first, int number, const std::string& tenant) {
      int out = 0;
      for (int i = 0; i < number; ++i) out += client.put({first + i}, of(tenant)) == kOk ? 1 : 0;
      return out;
    };
    EXPECT_EQ(taken(100, 3, "a"), 2);
    EXPECT_EQ(taken(200, 3, "b"), 2);
    EXPECT_EQ(taken(300, 3, ""), 2) << "the nameless one is a tenant like others";
    EXPECT_EQ(taken(400, 6, "big"), 4);
    EXPECT_EQ(taken(500, 2, "none"), 0);
    EXPECT_EQ(counter(one, "not_admitted_quota"), 1 + 1 + 1 + 2 + 2);
    EXPECT_EQ(taken(200, 1, "a"), 1) << "it is there: nothing is written";
    client.remove({100});
    EXPECT_EQ(taken(110, 2, "a"), 1) << "what is removed is released";
    EXPECT_EQ(client.get({101, 110, 403}), all(Outcome::kOk, 3));
    EXPECT_EQ(taken(120, 1, "a"), 0);
  }
}

TEST_F(StoreAdmission, WhatIsEvictedIsReleased) {
  const TierPtr one = host(4, {.tenant_bytes = 3 * kImage});
  Client client({one}, 0, kBytes);
  for (const int number : {1, 2, 3}) EXPECT_EQ(client.put({number}, of("a")), kOk);
  EXPECT_EQ(client.put({4}, of("a")), kRefused);
  for (const int number : {11, 12, 13}) EXPECT_EQ(client.put({number}, of("b")), kOk);
  // 3 of a's is left, and goes for 5; then b's go.
  for (const int number : {5, 6, 7}) EXPECT_EQ(client.put({number}, of("a")), kOk);
  EXPECT_EQ(client.put({8}, of("a")), kRefused);
  EXPECT_EQ(counter(one, "evictions"), 5);
}

TEST_F(StoreAdmission, ADirectoryReleasesWhatItEvicts) {
  const TierPtr one = directory({.tenant_bytes = 60 * kImage}, 64 * kImage);
  Client client({one}, 0, kBytes);
  for (int i = 0; i < 60; ++i) ASSERT_EQ(client.put({i}, of("a")), kOk);
  ASSERT_EQ(client.put({99}, of("a")), kRefused);
  for (int i = 100; i < 150; ++i) ASSERT_EQ(client.put({i}, of("b")), kOk);
  const std::int64_t gone = counter(one, "evictions");
  ASSERT_GE(gone, 46);
  int taken = 0;
  while (client.put({200 + taken}, of("a")) == kOk) ++taken;
  // What a puts evicts a's own first, as long as there are older ones.
  EXPECT_EQ(taken, 60);
}

TEST_F(StoreAdmission, FilesThatAreFoundAreTheNamelessTenants) {
  {
    Client writer({directory()}, 0, kBytes);
    EXPECT_EQ(writer.put({1, 2, 3}), all(Outcome::kOk, 3));
  }
  const TierPtr one = directory({.tenant_bytes = 4 * kImage});
  Client client({one}, 0, kBytes);
  EXPECT_EQ(client.put({4}), kOk);
  EXPECT_EQ(client.put({5}), kRefused);
  EXPECT_EQ(client.put({5}, of("a")), kOk);
}

TEST_F(StoreAdmission, WhatWasRefusedIsOfferedAgainWhenTheHostLetsItGo) {
  const TierPtr upper = host(4);
  const TierPtr lower = directory({.min_reuse = 2});
  Client client({upper, lower}, 0, kBytes);
  for (const int number : {1, 2, 3, 4}) EXPECT_EQ(client.put({number}), kOk);
  EXPECT_EQ(client.get({1}), kOk);
  // LRU: 2, 3, 4 are refused again, then 1 is taken.
  for (const int number : {5, 6, 7, 8}) EXPECT_EQ(client.put({number}), kOk);
  EXPECT_TRUE(client.store.flush(5s));
  EXPECT_TRUE(soon([&] { return counter(lower, "writes") == 1; }));
  EXPECT_EQ(counter(upper, "demotions"), 1);
  EXPECT_EQ(counter(lower, "not_admitted_seldom") >= 8 + 3, true);
  EXPECT_EQ(client.get({1, 2, 3}), (Outcomes{Outcome::kOk, Outcome::kMiss, Outcome::kMiss}));
  EXPECT_EQ(counter(lower, "reads"), 1);
}

TEST_F(StoreAdmission, ADemotionIsItsTenants) {
  const TierPtr upper = host(2);
  const TierPtr lower = directory({.tenant_bytes = kImage});
  Client client({upper, lower}, 0, kBytes);
  EXPECT_EQ(client.put({1}, of("a")), kOk);
  EXPECT_EQ(client.put({2}, of("a")), kOk);
  EXPECT_EQ(counter(lower, "not_admitted_quota"), 1);
  client.remove({1});
  EXPECT_TRUE(soon([&] { return !std::filesystem::exists(piece_path(scratch.path(), 0, 1)); }));
  EXPECT_EQ(client.put({11}, of("b")), kOk);
  EXPECT_EQ(client.put({12}, of("c")), kOk);  // 2 goes from the host tier
  EXPECT_TRUE(soon([&] { return counter(lower, "writes") == 4; })) << "1, 11, 12 and 2";
  EXPECT_EQ(client.put({3}, of("a")), kOk) << "in the host tier";
  EXPECT_EQ(counter(lower, "not_admitted_quota"), 2) << "a has 2 there";
}

TEST_F(StoreAdmission, OptionsAreRefusedWhereTheyAreGiven) {
  for (const char* kind : kKinds) {
    EXPECT_EQ(refusal([&] { tier(kind, {.min_reuse = 16}); }), "Admission: min_reuse is 16, it must be from 1 to 15");
  }
  EXPECT_EQ(refusal([&] { remote({.time_to_live = 1s}); }),
            "RemoteTier: admission: time_to_live is the engine's own: ttl= of redis://, a bucket's lifecycle");
  const std::string quotas = refusal([&] { remote({.tenant_bytes = 1}); });
  EXPECT_EQ(quotas.rfind("RemoteTier: admission: tenant_bytes", 0), 0U) << quotas;
  Client client({host(4)}, 0, kBytes);
  EXPECT_EQ(refusal([&] { client.put({1}, of(std::string(257, 'x'))); }),
            "put_bytes: tenant has 257 bytes, at most 256 are allowed");
}

// --- Beside the simulation -------------------------------------------------------------------------------------------

struct Case {
  const char* name;
  simulate::TierSetup upper;
  simulate::TierSetup lower;
  bool host_below = false;  ///< the lower tier is host memory: what goes there is there at once
};

/// Prompts with shared beginnings: ids of chunks, each of which stands for all that is before it.
simulate::Batch trace_of(int requests) {
  std::mt19937_64 random(seed());
  simulate::Batch out;
  for (int i = 0; i < requests; ++i) {
    simulate::Request request;
    request.time = i;
    request.first_id = out.ids.size();
    // A few popular beginnings, many endings.
    const std::uint64_t prompt = random() % (1 + random() % 12);
    const std::uint64_t shared = 1 + prompt % 3;
    for (std::uint64_t k = 0; k < shared; ++k) out.ids.push_back(prompt << 16 | k);
    const std::uint64_t ending = 1 + random() % (1 + random() % 60);
    for (std::uint64_t k = 0; k < random() % 3; ++k) out.ids.push_back(prompt << 16 | ending << 4 | k);
    request.num_ids = out.ids.size() - request.first_id;
    request.input_tokens = static_cast<std::int64_t>(request.num_ids);
    out.requests.push_back(request);
  }
  return out;
}

class StoreBesideSimulation : public StoreAdmission, public testing::WithParamInterface<Case> {};

TEST_P(StoreBesideSimulation, HitsWritesAndRefusalsAreTheSame) {
  const Case& given = GetParam();
  const simulate::Batch batch = trace_of(many(400, 4000));
  simulate::Setup setup;
  setup.block_tokens = setup.chunk_tokens = 1;
  setup.bytes_per_token = static_cast<std::int64_t>(kBytes);
  setup.tiers = {given.upper, given.lower};
  simulate::Simulation simulation(setup);
  simulation.run(batch);
  const simulate::Result expected = simulation.result();
  ASSERT_EQ(expected.chunk_bytes, kImage);

  const auto options_of = [](const simulate::TierSetup& from, auto out) {
    out.eviction = from.policy == store::Policy::kLru ? Eviction::kLru : Eviction::kS3Fifo;
    out.admission = from.admission;
    return out;
  };
  HostTierOptions host;
  host.num_bytes = given.upper.capacity_bytes;
  const TierPtr upper = host_tier(options_of(given.upper, host));
  host.num_bytes = given.lower.capacity_bytes;
  DirectoryTierOptions disk = small_tier(scratch.path(), given.lower.capacity_bytes);
  disk.num_threads = 1;
  const TierPtr lower = given.host_below ? host_tier(options_of(given.lower, host))
                                         : store::make_directory_tier(options_of(given.lower, disk), io);
  std::int64_t hits = 0;
  {
    StoreOptions options;
    options.num_threads = 1;
    Client client({upper, lower}, 0, kBytes, options);
    for (const simulate::Request& request : batch.requests) {
      std::vector<int> numbers;
      for (const std::uint64_t id : batch.ids_of(request)) numbers.push_back(static_cast<int>(id));
      const auto found = static_cast<std::size_t>(client.store.lookup_prefix(keys_of(numbers)));
      hits += static_cast<std::int64_t>(found);
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        if (i < found) {
          ASSERT_EQ(client.get({numbers[i]}), kOk);
        } else {
          client.put({numbers[i]});
        }
        ASSERT_TRUE(client.store.flush(10s));
      }
    }
  }
  EXPECT_EQ(hits, expected.hits);
  EXPECT_GT(hits, 0);
  const TierPtr tiers[] = {upper, lower};
  for (std::size_t i = 0; i < 2; ++i) {
    SCOPED_TRACE(i);
    const simulate::TierResult& right = expected.tiers[i];
    EXPECT_EQ(counter(tiers[i], "reads"), right.hits);
    EXPECT_EQ(counter(tiers[i], "writes"), right.writes);
    EXPECT_EQ(counter(tiers[i], "evictions"), right.evictions);
    EXPECT_EQ(counter(tiers[i], "evicted_unread"), right.evicted_unread);
    EXPECT_EQ(counter(tiers[i], "not_admitted_seldom"), right.refused_seldom);
    EXPECT_EQ(counter(tiers[i], "not_admitted_budget"), right.refused_budget);
    EXPECT_EQ(tier_metrics(*tiers[i]).chunks, right.entries);
  }
  EXPECT_EQ(counter(upper, "demotions"), expected.tiers[1].demotions);
}

simulate::TierSetup setup_of(std::int64_t images, store::Policy policy, const AdmissionOptions& admission = {},
                             bool demotes = false) {
  return {"", images * kImage, policy, admission, demotes};
}
constexpr store::Policy kLru = store::Policy::kLru;
constexpr store::Policy kS3Fifo = store::Policy::kS3Fifo;

INSTANTIATE_TEST_SUITE_P(
    Cases, StoreBesideSimulation,
    testing::Values(Case{"plain", setup_of(20, kS3Fifo, {}, true), setup_of(60, kS3Fifo)},
                    Case{"upper_min_reuse", setup_of(20, kLru, {.min_reuse = 2}, true), setup_of(60, kLru)},
                    Case{"lower_budget", setup_of(20, kS3Fifo, {}, true),
                         setup_of(60, kS3Fifo, {.write_bytes_a_day = kNothing, .write_burst_bytes = 80 * kImage})},
                    Case{"lower_min_reuse", setup_of(20, kLru, {}, true), setup_of(60, kLru, {.min_reuse = 2}), true},
                    Case{"both", setup_of(20, kLru, {.min_reuse = 3}, true), setup_of(60, kLru, {.min_reuse = 2}),
                         true}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace kvstride::test
