// SPDX-License-Identifier: Apache-2.0
// `kvstride simulate`: what it is given.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "commands.h"

namespace CLI {
class App;
}

namespace kvstride::cli {

/// Option values as they were typed; those of tiers, and some others, may be lists.
struct SimulateArguments {
  struct Tier {
    std::optional<std::string> capacity;
    std::optional<std::string> time_to_live;
    std::optional<std::string> min_reuse;
    std::optional<std::string> write_budget;
  };
  static constexpr std::array<const char*, 3> kTiers{"host", "directory", "remote"};

  std::optional<std::string> trace;
  std::optional<std::string> synthetic;
  std::optional<std::string> write_trace;
  std::array<Tier, kTiers.size()> tiers;
  std::optional<std::string> policy;
  std::optional<std::string> chunk_tokens;
  std::optional<std::string> block_tokens;
  std::optional<std::string> bytes_per_token;
  std::optional<std::string> geometry;
  std::optional<std::string> reuse_window;
  std::optional<std::string> scale;
  std::optional<std::string> svg;
  bool skip_bad_lines = false;
  bool json = false;
};

/// Adds `simulate`.
void add_simulate(CLI::App& app, SimulateArguments& given, Outcome& outcome);

}  // namespace kvstride::cli
