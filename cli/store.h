// SPDX-License-Identifier: Apache-2.0
// `kvstride store`: what its commands are given, and what they share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "commands.h"
#include "json.h"
#include "progress.h"
#include "store/edit.h"

namespace CLI {
class App;
}

namespace kvstride::cli {

/// Option values as they were typed.
struct StoreArguments {
  std::string path;
  std::string space;  ///< first digits of a namespace
  std::vector<std::string> keys;
  std::string order;
  std::optional<std::string> threads;
  std::optional<std::string> max_bytes;
  std::optional<std::string> older_than;
  bool with_keys = false;
  bool repair = false;
  bool quarantine = false;
  bool dry_run = false;
  bool group = false;
  bool json = false;
};

Outcome run_store_ls(const StoreArguments& given);
Outcome run_store_stat(const StoreArguments& given);
Outcome run_store_verify(const StoreArguments& given);
Outcome run_store_gc(const StoreArguments& given);
Outcome run_store_rm(const StoreArguments& given);
Outcome run_store_convert(const StoreArguments& given);

/// Adds `store` with its commands.
void add_store(CLI::App& app, StoreArguments& given, Outcome& outcome);

// --- Shared by the commands.

store::StoreFolder open_store(const StoreArguments& given);

/// Time since `then` (nanoseconds since 1970): `42s`, `3m`, `5h`, `12d`.
std::string age_text(std::int64_t then, std::int64_t now);
/// `1 file`, `3 files`.
std::string counted(std::int64_t number, std::string_view what);
/// Without control characters.
std::string printable(std::string_view text);
/// `key, value bf16[128]; key_scale f32[1]`.
std::string planes_text(const NamespaceFields& fields);
/// The digits of a namespace that tables show.
std::string short_name(const std::string& space);
/// `0-7`, `-`.
std::string heads_text(store::Heads heads);

/// Whole seconds since 1970.
std::int64_t seconds(std::int64_t nanoseconds);
/// Identity of a namespace and its numbers.
Json to_json(const store::SpaceSummary& summary, std::int64_t now);
Json to_json(const std::vector<store::Stray>& strays);
/// Of ls and stat, which go on where a folder cannot be listed.
Outcome listed(const char* verb, const std::vector<store::Stray>& strays, bool whole, std::string out);
/// Files and their bytes.
struct Sum {
  std::int64_t files = 0;
  std::int64_t bytes = 0;
  void add(std::int64_t more) {
    ++files;
    bytes += more;
  }
};
Json to_json(const Sum& sum);
/// `3 files, 12.0 MiB`.
std::string sum_text(const Sum& sum);

}  // namespace kvstride::cli
