// SPDX-License-Identifier: Apache-2.0
// kvstride_cuda_bench: the verbs on a device's memory beside one plain copy of as many bytes.
//
//   kvstride_cuda_bench [--mib 1024] [--rounds 15] [--json FILE] [--strict] [--stand-in]
//
// The yardstick is one cudaMemcpyAsync: device to device, or between the device and pinned memory. Ours and the
// yardstick take turns; `ratio` is the median of the rounds' ratios. Inside the device a round is four calls put on a
// stream one behind the other, as an engine does; `host_us` is what one of them keeps the caller. --strict ends with 1
// where a target is missed; without a device it says why and ends with 77. --stand-in runs on the tests' stand-in for
// CUDA, so that this program can be tried where there is no device: its numbers mean nothing.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cuda/runtime.h"
#include "cuda_host.h"
#include "kvstride/kvstride.h"
#include "work.h"

namespace bench {
namespace {

namespace cuda = kvstride::cuda;
using kvstride::Cache;
using kvstride::Device;
using kvstride::Geometry;
using kvstride::Layout;

struct Options {
  std::int64_t mib = 1024;
  int rounds = 15;
  std::string json;
  bool strict = false;
  bool stand_in = false;
};

/// One thing to measure: all blocks of a cache, scattered, to another one.
struct CudaWork {
  const char* name;
  double target;
  const char* src;
  const char* dst;
  bool src_on_device;
  bool dst_on_device;
  std::int64_t heads = 8;
};

// 16 tokens, 128 dims of two bytes: 4 KiB a head of a block.
constexpr CudaWork kWorks[] = {
    {"device/blocks, runs of 16 KiB", 0.9, "KV B N H D", "KV B N H D", true, true, 4},
    {"device/blocks, runs of 64 KiB", 0.9, "B KV N H D", "B KV N H D", true, true},
    {"device/NHD to HND", 0.8, "B KV N H D", "B KV H N D", true, true},
    {"device/HND to NHD", 0.8, "B KV H N D", "B KV N H D", true, true},
    {"device/NHD to transposed keys", 0, "B KV N H D", "B H {key: D N, value: N D}", true, true},
    {"to the device/blocks, runs of 64 KiB", 0.9, "B KV N H D", "B KV N H D", false, true},
    {"to the host/blocks, runs of 64 KiB", 0.9, "B KV N H D", "B KV N H D", true, false},
    {"to the device/rows of 256 bytes", 0.7, "B KV H N D", "B KV N H D", false, true},
    {"to the host/rows of 256 bytes", 0.7, "B KV N H D", "B KV H N D", true, false},
};

struct Result {
  std::string name;
  double target;
  double ratio;
  double gbps;
  double memcpy_gbps;
  double host_us;
  bool met() const { return ratio >= target; }
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

template <class Call>
double seconds(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Bench {
 public:
  Bench(cuda::Runtime& runtime, const Options& options)
      : runtime_(runtime), options_(options), stream_(runtime.make_stream(0)), event_(runtime.make_event(0)) {
    for (int side = 0; side < 2; ++side) {
      device_[side] = runtime.make_device_memory(0, static_cast<std::size_t>(bytes(true)));
      host_[side] = runtime.make_pinned_memory(0, static_cast<std::size_t>(bytes(false)));
    }
    // Zeroes would be moved faster by some.
    std::mt19937_64 random(1);
    for (std::int64_t i = 0; i < bytes(false); i += 8) {
      const std::uint64_t value = random();
      for (std::byte* host : host_) std::memcpy(host + i, &value, 8);
    }
    for (std::int64_t i = 0; i < bytes(true); i += bytes(false)) copy(device_[0] + i, host_[0], bytes(false));
    finish();
  }

  Result measure(const CudaWork& work) {
    const bool inside = work.src_on_device && work.dst_on_device;
    Geometry g;
    g.num_layers = 4;
    g.block_size = 16;
    g.num_kv_heads = work.heads;
    g.head_size = 128;
    const std::int64_t block = Layout(work.src, g).num_bytes() * g.num_layers;
    g.num_blocks = std::max<std::int64_t>(bytes(inside) / block, 1);
    const std::int64_t moved = g.num_blocks * block;
    std::byte* from = work.src_on_device ? device_[0] : host_[0];
    std::byte* to = work.dst_on_device ? device_[1] : host_[1];
    const Cache src = cache(from, Layout(work.src, g), work.src_on_device);
    const Cache dst = cache(to, Layout(work.dst, g), work.dst_on_device);
    const auto pairs = scattered_pairs(g.num_blocks);
    const int calls = inside ? 4 : 1;
    std::vector<double> host, ours, theirs, ratios;
    const auto verb = [&] {
      double waited = 0;
      ours.push_back(seconds([&] {
        waited = seconds([&] {
          for (int i = 0; i < calls; ++i) convert_blocks(src, dst, pairs, {}, {}, kvstride::Stream(stream_));
        });
        finish();
      }));
      host.push_back(waited / calls);
    };
    const auto plain = [&] {
      theirs.push_back(seconds([&] {
        for (int i = 0; i < calls; ++i) copy(to, from, moved);
        finish();
      }));
    };
    for (int round = -2; round < options_.rounds; ++round) {
      if (round == 0) ours.clear(), theirs.clear(), host.clear();  // those before were to get warm
      if (round % 2 == 0) {
        verb();
        plain();
      } else {
        plain();
        verb();
      }
    }
    for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(theirs[i] / ours[i]);
    const auto rate = [&](const std::vector<double>& times) {
      return static_cast<double>(moved) * calls / median(times) / 1e9;
    };
    return {work.name, work.target, median(ratios), rate(ours), rate(theirs), median(host) * 1e6};
  }

 private:
  /// Inside a device, or between it and the host, which is slower.
  std::int64_t bytes(bool inside) const { return (options_.mib << 20) / (inside ? 1 : 4); }
  static Cache cache(std::byte* memory, const Layout& layout, bool on_device) {
    const Cache host = cache_at(memory, layout);
    return Cache(host.tensors(), layout, false, Device{on_device ? 0 : -1});
  }
  void copy(std::byte* dst, const std::byte* src, std::int64_t bytes) {
    const auto address = [](const std::byte* at) { return reinterpret_cast<std::int64_t>(at); };
    runtime_.copy(0, std::array{cuda::Copy{address(dst), address(src), bytes}}, stream_);
  }
  void finish() {
    runtime_.record(0, event_, stream_);
    runtime_.finish(0, event_);
  }

  cuda::Runtime& runtime_;
  const Options& options_;
  cuda::StreamHandle stream_;
  cuda::EventHandle event_;
  std::array<std::byte*, 2> device_{};
  std::array<std::byte*, 2> host_{};
};

void write_json(const std::string& file, const std::string& device, const std::vector<Result>& results) {
  std::string text = fmt::format("{{\"device\": \"{}\", \"works\": [", device);
  for (const Result& r : results) {
    text += fmt::format(
        "{}\n  {{\"name\": \"{}\", \"target\": {}, \"ratio\": {:.3f}, \"GBps\": {:.1f}, \"memcpy_GBps\": {:.1f}, "
        "\"host_us\": {:.1f}, \"met\": {}}}",
        &r == results.data() ? "" : ",", r.name, r.target, r.ratio, r.gbps, r.memcpy_gbps, r.host_us, r.met());
  }
  std::ofstream(file) << text << "\n]}\n";
}

Options parse(int argc, char** argv) {
  Options out;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string {
      if (++i < argc) return argv[i];
      throw std::runtime_error(name + " wants a value");
    };
    if (name == "--mib") {
      out.mib = std::stoll(value());
    } else if (name == "--rounds") {
      out.rounds = std::stoi(value());
    } else if (name == "--json") {
      out.json = value();
    } else if (name == "--strict") {
      out.strict = true;
    } else if (name == "--stand-in") {
      out.stand_in = true;
    } else {
      throw std::runtime_error("unknown option " + name);
    }
  }
  if (out.mib < 4 || out.rounds < 1) throw std::runtime_error("--mib is at least 4, --rounds at least 1");
  return out;
}

int run(const Options& options) {
  constexpr int kNoDevice = 77;
  kvstride::test::HostRuntime stand_in;
  if (options.stand_in) cuda::set_runtime(&stand_in);
  std::string why;
  cuda::Runtime* runtime = cuda::runtime(&why);
  if (runtime == nullptr) {
    std::printf("no CUDA device: %s\n", why.c_str());
    return kNoDevice;
  }
  const std::string device = runtime->status();
  std::printf("%s\n%-38s %9s %9s %6s %6s %8s\n", device.c_str(), "", "GB/s", "memcpy", "ratio", "target", "host us");
  std::vector<Result> results;
  {
    Bench bench(*runtime, options);
    for (const CudaWork& work : kWorks) {
      results.push_back(bench.measure(work));
      const Result& r = results.back();
      std::printf("%-38s %9.1f %9.1f %6.2f %6s %8.1f %s\n", work.name, r.gbps, r.memcpy_gbps, r.ratio,
                  r.target > 0 ? fmt::format("{:.2f}", r.target).c_str() : "-", r.host_us, r.met() ? "" : "missed");
      std::fflush(stdout);
    }
  }
  const auto missed = std::count_if(results.begin(), results.end(), [](const Result& r) { return !r.met(); });
  const auto asked = std::count_if(results.begin(), results.end(), [](const Result& r) { return r.target > 0; });
  std::printf("%td of %td targets met\n", asked - missed, asked);
  if (!options.json.empty()) write_json(options.json, device, results);
  if (options.stand_in) cuda::set_runtime(nullptr);
  return options.strict && missed > 0 ? 1 : 0;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  try {
    return bench::run(bench::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvstride_cuda_bench: %s\n", error.what());
    return 2;
  }
}
