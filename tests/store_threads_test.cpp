// SPDX-License-Identifier: Apache-2.0
// Many threads on one store, several stores on the same tiers, and the end of a store in the middle of it all.
#include "store_blocks.h"

namespace kvstride::test {
namespace {

constexpr std::size_t kBytes = 3 * 4096 + 100;
constexpr std::int64_t kImage = 5 * 4096;

class StoreThreads : public testing::Test {
 protected:
  /// Runs `work(i)` on `num` threads.
  static void run(int num, const std::function<void(int)>& work) {
    std::vector<std::thread> threads;
    for (int i = 0; i < num; ++i) threads.emplace_back(work, i);
    for (std::thread& thread : threads) thread.join();
  }
  std::vector<TierPtr> tiers(std::int64_t host_images, std::int64_t disk_images) {
    auto options = small_tier(root, disk_images * kImage);
    options.engine = DirectoryTierOptions::Engine::kAuto;
    host = host_tier({.num_bytes = host_images * kImage});
    disk = directory_tier(options);
    return {host, disk};
  }
  Scratch scratch;
  std::string root = scratch.path();
  TierPtr host;
  TierPtr disk;
};

/// All verbs at once, small rooms, two namespaces and two stores of each: every byte that is delivered is right.
TEST_F(StoreThreads, AllVerbsAtOnce) {
  const std::vector<TierPtr> both = tiers(25, 60);
  {
    std::vector<std::unique_ptr<Client>> clients;
    for (int i = 0; i < 4; ++i) clients.push_back(std::make_unique<Client>(both, i / 2));
    const auto end = until(1500ms, 0.03);
    run(8, [&](int thread) {
      std::mt19937_64 random(seed() * 100 + static_cast<std::uint64_t>(thread));
      while (SteadyClock::now() < end) {
        Client& client = *clients[random() % clients.size()];
        const std::vector<int> numbers = range(static_cast<int>(random() % 80), 1 + static_cast<int>(random() % 8));
        switch (random() % 8) {
          case 0:
          case 1: client.put(numbers); break;
          case 2: client.lookup(numbers); break;
          case 3: {
            const Pins pins = client.store.pin(keys_of(numbers));
            const Outcomes got = client.get(numbers);
            for (std::size_t i = 0; i < got.size(); ++i) {
              // Pinned against eviction; others may still remove it, or find all memory in use.
              EXPECT_TRUE(!pins.found()[i] || got[i] != Outcome::kCorrupt);
            }
            break;
          }
          case 4:
            if (random() % 4 == 0) client.remove(numbers);
            client.store.metrics();
            break;
          default:
            for (const Outcome got : client.get(numbers)) {
              EXPECT_TRUE(got == Outcome::kOk || got == Outcome::kMiss || got == Outcome::kRefused) << name_of(got);
            }
        }
      }
    });
    std::uint64_t ok = 0;
    for (const auto& client : clients) {
      EXPECT_EQ(client->counter("get_corrupt") + client->counter("get_io_error"), 0U);
      ok += client->counter("get_ok");
      EXPECT_TRUE(client->store.flush(5s));
    }
    EXPECT_GT(ok, 100U);
    for (int space = 0; space < 2; ++space) clients[static_cast<std::size_t>(space) * 2]->remove(range(0, 100));
  }
  EXPECT_TRUE(soon([&] { return host->metrics().used_bytes == 0; }))
      << host->metrics().used_bytes << " bytes of memory are lost";
  EXPECT_EQ(host->metrics().chunks, 0);
  expect_at_rest(root, disk);
}

/// Readers and writers of other head ranges and layouts, each with a cache of its own.
TEST_F(StoreThreads, HeadRangesAtOnce) {
  const std::vector<TierPtr> both = tiers(10, 40);
  const auto end = until(1000ms, 0.02);
  run(4, [&](int thread) {
    const std::vector<const char*> orders{"KV B N H D", "B H N KV D", "L B H N KV D", "B KV H N D"};
    const auto at = static_cast<std::size_t>(thread);
    BlockClient whole(both, 0, orders[at]);
    BlockClient part(both, 0, orders[3 - at], thread * 2, 2, thread % 2 == 0 ? kChunkTokens : kChunkTokens / 2);
    std::mt19937_64 random(seed() * 100 + static_cast<std::uint64_t>(thread));
    while (SteadyClock::now() < end) {
      const std::vector<int> numbers = range(static_cast<int>(random() % 30), 1 + static_cast<int>(random() % 5));
      BlockClient& client = random() % 3 == 0 ? whole : part;
      random() % 2 == 0 ? client.put(numbers) : client.get(numbers);
      if (random() % 16 == 0) client.store.remove(keys_of({numbers[0]}));
    }
    EXPECT_EQ(part.store.metrics().counters.at("get_corrupt"), 0U);
  });
  expect_at_rest(root, disk);
}

/// Every chunk of every job ends, whenever the store does, and is counted once.
TEST_F(StoreThreads, ClosingInTheMiddle) {
  const auto end = until(1000ms, 0.01);
  for (int round = 0; SteadyClock::now() < end; ++round) {
    const std::vector<TierPtr> both = tiers(25, 60);
    auto client = std::make_unique<Client>(both);
    std::atomic<std::uint64_t> asked{0};
    std::atomic<bool> closed{false};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937_64 random(seed() + static_cast<std::uint64_t>(round * 10 + thread));
        while (!closed) {
          const std::vector<int> numbers = range(static_cast<int>(random() % 80), 8);
          std::vector<std::vector<std::byte>> chunks;
          for (const int number : numbers) chunks.push_back(chunk_of(0, number, kBytes));
          RequestOptions options;
          options.deadline = std::chrono::milliseconds(random() % 20);
          const Job job =
              random() % 2 == 0
                  ? client->store.put_bytes(keys_of(numbers),
                                            std::vector<std::span<const std::byte>>(chunks.begin(), chunks.end()),
                                            options)
                  : client->store.get_bytes(keys_of(numbers),
                                            std::vector<std::span<std::byte>>(chunks.begin(), chunks.end()), options);
          asked += numbers.size();
          if (random() % 3 == 0) job.cancel();
          EXPECT_TRUE(job.wait_for(10s)) << "a chunk never ended";
          if (!job.done()) std::abort();
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5 + round % 30));
    client->store.close();
    closed = true;
    for (std::thread& thread : threads) thread.join();
    const StoreMetrics metrics = client->store.metrics();
    std::uint64_t told = 0;
    for (const auto& [name, number] : metrics.counters) {
      if (name.rfind("put_", 0) == 0 || name.rfind("get_", 0) == 0) told += number;
    }
    EXPECT_EQ(told, asked) << "counters add up";
    client.reset();
    host.reset();
    disk.reset();
  }
}

/// Whoever closes a store can count on its end, also where somebody else is at it.
TEST_F(StoreThreads, ClosingTwiceAtOnce) {
  for (int round = 0; round < 20; ++round) {
    const auto io = std::make_shared<FaultIo>();
    const TierPtr slow = store::make_directory_tier(small_tier(root, 60 * kImage), io);
    Client client({slow});
    client.put(range(0, 20));
    io->set({.calls = kRead, .targets = kPiece, .effect = Fault::kHang});
    std::vector<std::vector<std::byte>> chunks(20, std::vector<std::byte>(kBytes));
    const Job job =
        client.store.get_bytes(keys_of(range(0, 20)), std::vector<std::span<std::byte>>(chunks.begin(), chunks.end()));
    run(4, [&](int thread) {
      if (thread == 0) {
        std::this_thread::sleep_for(5ms);
        io->lift();
      }
      client.store.close();
      EXPECT_TRUE(job.done()) << "memory is still written to";
    });
  }
}

/// Puts that wait for their blocks keep nobody else waiting, however many they are.
TEST_F(StoreThreads, ManyThatWaitForTheirBlocks) {
  const std::vector<TierPtr> both = tiers(100, 60);
  Client client(both);
  ASSERT_EQ(client.put({0}), all(Outcome::kOk, 1));
  std::atomic<bool> go{false};
  std::atomic<int> asked{0};
  RequestOptions waits;
  waits.deadline = 30s;
  waits.after = [&] {
    ++asked;
    return go.load();
  };
  std::vector<std::byte> chunk = chunk_of(0, 1, kBytes);
  std::vector<Job> jobs;
  for (int i = 0; i < 4000; i += 40) {
    const std::vector<std::span<const std::byte>> same(40, chunk);
    jobs.push_back(client.store.put_bytes(keys_of(std::vector<int>(40, 1)), same, waits));
  }
  const int before = asked;
  EXPECT_EQ(client.get({0}), all(Outcome::kOk, 1));
  EXPECT_LT(asked - before, 4000) << "asked for each chunk, not for each job";
  EXPECT_EQ(client.counter("put_ok"), 1U);
  jobs[0].cancel();
  EXPECT_EQ(Outcomes(jobs[0].wait()), all(Outcome::kRefused, 40)) << "while it waits";
  go = true;
  for (std::size_t i = 1; i < jobs.size(); ++i) EXPECT_EQ(Outcomes(jobs[i].wait()), all(Outcome::kOk, 40));
}

}  // namespace
}  // namespace kvstride::test
