// SPDX-License-Identifier: Apache-2.0
// `kvstride info`: the version, what this CPU can do, and what was built in.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "commands.h"
#include "json.h"
#include "kvstride/registry.h"
#include "kvstride/version.h"

namespace kvstride::cli {
namespace {

/// Instruction sets of this CPU that kernels may use.
std::vector<std::string> cpu_targets() {
  std::vector<std::string> out;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const auto add = [&](const char* name, int supported) {
    if (supported != 0) out.emplace_back(name);
  };
  add("sse4.2", __builtin_cpu_supports("sse4.2"));
  add("avx", __builtin_cpu_supports("avx"));
  add("avx2", __builtin_cpu_supports("avx2"));
  add("fma", __builtin_cpu_supports("fma"));
  add("avx512f", __builtin_cpu_supports("avx512f"));
  add("avx512bw", __builtin_cpu_supports("avx512bw"));
  add("avx512vl", __builtin_cpu_supports("avx512vl"));
  add("avx512vnni", __builtin_cpu_supports("avx512vnni"));
  add("avx512bf16", __builtin_cpu_supports("avx512bf16"));
#elif defined(__aarch64__)
  out.emplace_back("neon");  // part of the architecture
#endif
  return out;
}

}  // namespace

Outcome run_info(const Options& options) {
  const std::vector<std::string> targets = cpu_targets();
  if (options.json) {
    return {dump({{"version", version()}, {"cpu", targets}, {"cuda", cuda_built()}, {"layouts", registry().size()}}),
            "", kDone};
  }
  return {fmt::format("version  {}\ncpu      {}\ncuda     {}\nlayouts  {}\n", version(),
                      targets.empty() ? "baseline" : fmt::format("{}", fmt::join(targets, " ")),
                      cuda_built() ? "yes" : "no", registry().size()),
          "", kDone};
}

}  // namespace kvstride::cli
