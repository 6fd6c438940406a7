// SPDX-License-Identifier: Apache-2.0
// kvstride_bench: each work beside the best copy of as many bytes, alternating in one process on cold data.
//
// Counters: `ratio` to the best copy, which is the faster of memcpy and the streamed loop (median of the rounds' ratios
// to that one), the medians `GBps`, `best_GBps`, `memcpy_GBps`, and `traffic_GBps` (bytes read and written a second);
// `target` and `speedup_target` where something is asked. The time that google-benchmark reports is ours alone.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

#include "copies.h"
#include "work.h"

namespace bench {
namespace {

template <class Call>
double seconds(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Times of the rounds, in seconds.
struct Rounds {
  std::vector<double> ours;
  std::vector<double> memcpy;
  std::vector<double> streamed;
};

double median_ratio(const std::vector<double>& yardstick, const std::vector<double>& ours) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(yardstick[i] / ours[i]);
  return median(ratios);
}

void report(benchmark::State& state, const Work& work, int threads, const Rounds& rounds) {
  const auto rate = [](std::size_t bytes, const std::vector<double>& times) {
    return static_cast<double>(bytes) / median(times) / 1e9;
  };
  auto& counters = state.counters;
  counters["ratio"] = std::min(median_ratio(rounds.memcpy, rounds.ours), median_ratio(rounds.streamed, rounds.ours));
  counters["GBps"] = rate(work.bytes, rounds.ours);
  counters["memcpy_GBps"] = rate(work.bytes, rounds.memcpy);
  counters["best_GBps"] = std::max(rate(work.bytes, rounds.memcpy), rate(work.bytes, rounds.streamed));
  counters["traffic_GBps"] = rate(work.traffic, rounds.ours);
  counters["ns_per_pair"] = median(rounds.ours) / static_cast<double>(work.pairs) * 1e9;
  const bool elements = threads > 1 && work.kind == Kind::kElements;
  if (work.target > 0 && !elements) counters["target"] = work.target;
  if (elements) counters["speedup_target"] = 1.5;
}

void measure(benchmark::State& state, const Work& work) {
  const auto threads = static_cast<int>(state.range(0));
  kvstride::set_num_threads(threads);
  const auto copy = [&](CopyFunction function) {
    const Spot spot = next_spot(work.bytes);
    return seconds([&] { copy_on(threads, function, spot.dst, spot.src, work.bytes); });
  };
  Rounds rounds;
  std::int64_t round = 0;
  try {
    for (auto _ : state) {
      for (std::int64_t turn = 0; turn < 3; ++turn) {
        switch ((round + turn) % 3) {
          case 0: {
            const auto call = work.prepare(next_spot(work.room), round);
            rounds.ours.push_back(seconds(call));
            break;
          }
          case 1: rounds.memcpy.push_back(copy(memcpy_copy)); break;
          case 2: rounds.streamed.push_back(copy(streamed_copy)); break;
        }
      }
      state.SetIterationTime(rounds.ours.back());
      ++round;
    }
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
    return;
  }
  report(state, work, threads, rounds);
}

/// What this machine's memory gives to plain copies: the roof of everything else. Bytes read and written.
void roofline(benchmark::State& state, CopyFunction copy) {
  constexpr std::size_t kBytes = std::size_t{128} << 20;
  const auto threads = static_cast<int>(state.range(0));
  std::vector<double> times;
  for (auto _ : state) {
    const Spot spot = next_spot(kBytes);
    times.push_back(seconds([&] { copy_on(threads, copy, spot.dst, spot.src, kBytes); }));
    state.SetIterationTime(times.back());
  }
  state.counters["traffic_GBps"] = 2 * static_cast<double>(kBytes) / median(times) / 1e9;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void register_all() {
  const int most = kvstride::num_threads();
  const auto set_up = [&](benchmark::internal::Benchmark* entry) {
    entry->UseManualTime()->Unit(benchmark::kMillisecond)->ArgName("threads")->Arg(1);
    if (most > 1) entry->Arg(most);
  };
  const std::pair<const char*, CopyFunction> kRoofs[] = {{"roofline/memcpy", memcpy_copy},
                                                         {"roofline/stream_copy", stored_copy},
                                                         {"roofline/streamed_copy", streamed_copy},
                                                         {"roofline/paged_copy", paged_copy}};
  for (const auto& [name, copy] : kRoofs) set_up(benchmark::RegisterBenchmark(name, roofline, copy));
  for (const auto& list : {works(), sweeps()}) {
    for (const Work& work : list) set_up(benchmark::RegisterBenchmark(work.name.c_str(), measure, work));
  }
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::AddCustomContext("cpu", bench::cpu_model());
  benchmark::AddCustomContext("kvstride", std::string(kvstride::version()));
  bench::register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
