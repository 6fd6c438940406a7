// SPDX-License-Identifier: Apache-2.0
// kvstride_engine URL write|read|find|remove COUNT BYTES: one verb on objects `bench/<i>` of an engine, in as many
// threads as it likes; prints the seconds of that, without the start of the process. For other programs to compare
// with.
#include "store/remote/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

using namespace kvstride::store;

namespace {

constexpr auto kLimit = std::chrono::minutes(5);

struct Work {
  Engine& engine;
  std::size_t bytes;
  std::vector<std::byte>& memory;
  std::atomic<int> failed{0};

  std::span<std::byte> place(std::size_t i) const { return std::span(memory).subspan(i * bytes, bytes); }
  static std::string name(std::size_t i) { return "bench/" + std::to_string(i); }

  /// Objects begin to end - 1.
  void run(const std::string& verb, std::size_t begin, std::size_t end) {
    const auto deadline = Clock::now() + kLimit;
    const auto count = [&](Answer answer) { failed += answer != Answer::kOk ? 1 : 0; };
    if (verb == "write") {
      std::vector<WriteItem> items;
      for (std::size_t i = begin; i < end; ++i) items.push_back({name(i), place(i), true});
      engine.write(items, deadline, [&](std::size_t i) { count(items[i].answer); });
    } else if (verb == "read") {
      const auto length = static_cast<std::int64_t>(bytes);
      std::vector<ReadItem> items;
      for (std::size_t i = begin; i < end; ++i) items.push_back({name(i), {{0, length}}, place(i).data(), length});
      engine.read(items, deadline, [&](std::size_t i) { count(items[i].answer); });
    } else if (verb == "find") {
      std::vector<FindItem> items;
      for (std::size_t i = begin; i < end; ++i) items.push_back({name(i)});
      engine.find(items, deadline);
      for (const FindItem& item : items) count(item.answer);
    } else {
      std::vector<RemoveItem> items;
      for (std::size_t i = begin; i < end; ++i) items.push_back({name(i)});
      engine.remove(items, deadline);
      for (const RemoveItem& item : items) count(item.answer);
    }
  }
};

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 5) {
    std::fprintf(stderr, "kvstride_engine URL write|read|find|remove COUNT BYTES\n");
    return 2;
  }
  const std::string verb = argv[2];
  const std::size_t objects = std::strtoull(argv[3], nullptr, 10);
  const std::size_t bytes = std::strtoull(argv[4], nullptr, 10);
  const EnginePtr engine = engine_of(argv[1]);
  std::vector<std::byte> memory(verb == "write" || verb == "read" ? objects * bytes : 0, std::byte{0x5A});
  engine->memory(memory);
  Work work{*engine, bytes, memory};

  const auto begin = Clock::now();
  const auto num_threads = static_cast<std::size_t>(engine->num_threads());
  const std::size_t each = std::max<std::size_t>((objects + num_threads - 1) / num_threads, 1);
  std::vector<std::thread> threads;
  for (std::size_t at = 0; at < objects; at += each) {
    threads.emplace_back([&, at] { work.run(verb, at, std::min(objects, at + each)); });
  }
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  std::printf("%.6f\n", seconds.count());
  if (work.failed == 0) return 0;
  std::fprintf(stderr, "%d of %zu failed; last: %s\n", work.failed.load(), objects, engine->trouble().c_str());
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "kvstride_engine: %s\n", error.what());
  return 2;
}
