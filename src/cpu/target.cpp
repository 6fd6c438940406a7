// SPDX-License-Identifier: Apache-2.0
// The choice of an instruction set.
#include "cpu/target.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwy/targets.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "kvstride/cpu.h"

namespace kvstride {

namespace {

/// Highway's bits of what this build and this machine have, best first.
std::vector<std::int64_t> targets() {
  std::vector<std::int64_t> out;
  const auto available = static_cast<std::int64_t>(hwy::SupportedTargets() & HWY_TARGETS);
  for (std::int64_t bit = 1; bit > 0 && bit <= available; bit <<= 1) {
    if ((available & bit) != 0) out.push_back(bit);
  }
  return out;
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> out;
  for (const std::int64_t bit : targets()) out.emplace_back(hwy::TargetName(bit));
  return out;
}

namespace cpu {

bool choose_target() {
  const char* wanted = std::getenv("KVSTRIDE_CPU_TARGET");
  if (wanted == nullptr || *wanted == '\0') return false;
  for (const std::int64_t bit : targets()) {
    if (std::string_view(hwy::TargetName(bit)) != wanted) continue;
    hwy::DisableTargets(bit - 1);  // those that are better
    return true;
  }
  std::fprintf(stderr, "kvstride: KVSTRIDE_CPU_TARGET is '%.40s', ignored: this machine has %s\n", wanted,
               fmt::format("{}", fmt::join(instruction_sets(), ", ")).c_str());
  return false;
}

}  // namespace cpu
}  // namespace kvstride
