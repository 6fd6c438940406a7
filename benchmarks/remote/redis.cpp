// SPDX-License-Identifier: Apache-2.0
// kvstride_redis_bench HOST PORT [ROUNDS]: one server; our engine's batches and hiredis' own pipelines take turns at
// the same keys. Prints both speeds (medians) and the median of their ratios in each round.
#include <hiredis/hiredis.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "store/remote/engine.h"

using namespace kvstride::store;

namespace {

struct Load {
  std::size_t bytes;
  std::size_t count;
  std::vector<std::byte> memory = std::vector<std::byte>(bytes * count, std::byte{0x5A});
  std::byte* place(std::size_t i) { return memory.data() + i * bytes; }
  static std::string name(std::size_t i) { return "bench/" + std::to_string(i); }
};

void need(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

void write_ours(Engine& engine, Load& load) {
  std::vector<WriteItem> items;
  for (std::size_t i = 0; i < load.count; ++i) items.push_back({Load::name(i), {load.place(i), load.bytes}, true});
  engine.write(items, Clock::now() + std::chrono::seconds(60), [](std::size_t) {});
  for (const WriteItem& item : items) need(item.answer == Answer::kOk, engine.trouble());
}
void read_ours(Engine& engine, Load& load) {
  const auto length = static_cast<std::int64_t>(load.bytes);
  std::vector<ReadItem> items;
  for (std::size_t i = 0; i < load.count; ++i) items.push_back({Load::name(i), {{0, length}}, load.place(i), length});
  engine.read(items, Clock::now() + std::chrono::seconds(60), [](std::size_t) {});
  for (const ReadItem& item : items) need(item.answer == Answer::kOk && item.found == length, engine.trouble());
}

/// Commands appended, then replies taken, `at_once` of them: what keeps neither side's memory from being bounded.
void pipeline(redisContext* context, Load& load, std::size_t at_once, const std::function<void(std::size_t)>& append,
              const std::function<void(std::size_t, redisReply*)>& take) {
  for (std::size_t begin = 0; begin < load.count; begin += at_once) {
    const std::size_t end = std::min(load.count, begin + at_once);
    for (std::size_t i = begin; i < end; ++i) append(i);
    for (std::size_t i = begin; i < end; ++i) {
      void* reply = nullptr;
      need(redisGetReply(context, &reply) == REDIS_OK, context->errstr);
      take(i, static_cast<redisReply*>(reply));
      freeReplyObject(reply);
    }
  }
}
void write_theirs(redisContext* context, Load& load, std::size_t at_once) {
  pipeline(
      context, load, at_once,
      [&](std::size_t i) {
        const std::string key = "kvstride:" + Load::name(i);
        redisAppendCommand(context, "SET %b %b", key.data(), key.size(), load.place(i), load.bytes);
      },
      [](std::size_t, const redisReply* reply) { need(reply->type == REDIS_REPLY_STATUS, "SET failed"); });
}
/// `copies`: the value goes from the reply to where it is wanted, as it must for a store.
void read_theirs(redisContext* context, Load& load, std::size_t at_once, bool copies) {
  pipeline(
      context, load, at_once,
      [&](std::size_t i) {
        const std::string key = "kvstride:" + Load::name(i);
        redisAppendCommand(context, "GET %b", key.data(), key.size());
      },
      [&](std::size_t i, const redisReply* reply) {
        need(reply->type == REDIS_REPLY_STRING && reply->len == load.bytes, "GET failed");
        if (copies) std::memcpy(load.place(i), reply->str, load.bytes);
      });
}

double seconds(const std::function<void()>& run) {
  const auto begin = Clock::now();
  run();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}
double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) {
    std::fprintf(stderr, "kvstride_redis_bench HOST PORT [ROUNDS]\n");
    return 2;
  }
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  const EnginePtr engine = engine_of(std::string("redis://") + argv[1] + ":" + argv[2]);
  redisContext* context = redisConnect(argv[1], std::atoi(argv[2]));
  need(context != nullptr && context->err == 0, "cannot connect");
  std::printf("%-6s %9s %6s %12s %12s %7s\n", "verb", "bytes", "count", "ours GB/s", "hiredis GB/s", "ratio");
  for (const std::size_t bytes : {std::size_t{64} << 10, std::size_t{1} << 20, std::size_t{8} << 20}) {
    Load load{bytes, std::min<std::size_t>(512, (std::size_t{128} << 20) / bytes)};
    const std::size_t at_once = std::max<std::size_t>(1, (std::size_t{16} << 20) / bytes);
    const auto compare = [&](const char* verb, const std::function<void()>& ours, const std::function<void()>& theirs) {
      std::vector<double> mine, other, ratios;
      for (int round = -1; round < rounds; ++round) {  // the first warms up
        const bool first = round % 2 == 0;
        const double a = first ? seconds(ours) : 0;
        const double b = seconds(theirs);
        const double both[] = {first ? a : seconds(ours), b};
        if (round < 0) continue;
        mine.push_back(both[0]);
        other.push_back(both[1]);
        ratios.push_back(both[1] / both[0]);
      }
      const double all = static_cast<double>(load.bytes * load.count) * 1e-9;
      std::printf("%-6s %9zu %6zu %12.2f %12.2f %7.2f\n", verb, bytes, load.count, all / median(mine),
                  all / median(other), median(ratios));
    };
    compare(
        "write", [&] { write_ours(*engine, load); }, [&] { write_theirs(context, load, at_once); });
    compare(
        "read", [&] { read_ours(*engine, load); }, [&] { read_theirs(context, load, at_once, true); });
    compare(
        "read*", [&] { read_ours(*engine, load); }, [&] { read_theirs(context, load, at_once, false); });
    for (std::size_t i = 0; i < load.count; ++i) {
      freeReplyObject(redisCommand(context, "DEL kvstride:%s", Load::name(i).c_str()));
    }
  }
  std::printf("read*: hiredis' reply is thrown away, not copied to where it is wanted\n");
  redisFree(context);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "kvstride_redis_bench: %s\n", error.what());
  return 1;
}
