// SPDX-License-Identifier: Apache-2.0
// `kvstride store`: what its commands are given, and what they share.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "commands.h"
#include "json.h"
#include "progress.h"
#include "store/edit.h"
#include "store/remote/inspect.h"

namespace CLI {
class App;
}

namespace kvstride::cli {

/// Option values as they were typed.
struct StoreArguments {
  std::string command;  ///< `ls`
  std::string path;     ///< a directory, or an engine's URL
  std::string space;    ///< first digits of a namespace
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

/// Throws Error(kArgument) for a command or an option that means nothing on an engine.
void check_remote(const StoreArguments& given);
/// The command on an engine. The path is not looked at.
Outcome run_store_remote(const StoreArguments& given, store::EnginePtr engine);
/// Arguments as a text that brings them to another process, and back. Throws Error(kArgument).
std::string to_text(const StoreArguments& given);
StoreArguments store_arguments(const std::string& text);

/// Adds `store` with its commands. `called`: argv[0].
void add_store(CLI::App& app, StoreArguments& given, Outcome& outcome, const std::string& called);

// --- Shared by the commands.

store::StoreFolder open_store(const StoreArguments& given);

/// Whose files these are, and so what their times mean.
enum class Place : std::uint8_t { kDirectory, kRemote };
/// `ls`, once the store is open.
Outcome list_chunks(const StoreArguments& given, const store::ChunkStore& store, Place place);
/// `verify`. Where `repair` is given it mends what is damaged, and answers why it could not (empty: it did), `mended`
/// says what it does: `set aside`.
using Repair = std::function<std::string(const store::ChunkSpace&, const store::ChunkFile&, const store::Check&)>;
Outcome verify_chunks(const StoreArguments& given, const store::ChunkStore& store, int num_threads,
                      const Repair& repair, const char* mended);
/// `--threads`, or as many as cores, from 2 to 8.
int threads_of(const StoreArguments& given);
/// The files that the keys (or their first digits) name; all of them where there are no keys.
std::vector<store::ChunkFile> named(const std::vector<store::ChunkFile>& files, const std::vector<std::string>& keys);

/// Time since `then` (nanoseconds since 1970): `42s`, `3m`, `5h`, `12d`.
std::string age_text(std::int64_t then, std::int64_t now);
/// `1 file`, `3 files`.
std::string counted(std::int64_t number, std::string_view what);
/// Without control characters.
std::string printable(std::string_view text);
/// `key, value bf16[128]; key_scale f32[1]`.
std::string planes_text(const NamespaceFields& fields);
/// The model's name, or why there is no header.
std::string model_text(const store::SpaceSummary& summary);
/// The digits of a namespace that tables show.
std::string short_name(const std::string& space);
/// `0-7`, `-`.
std::string heads_text(store::Heads heads);

/// Whole seconds since 1970.
std::int64_t seconds(std::int64_t nanoseconds);
/// Identity of a namespace and its numbers.
Json to_json(const store::SpaceSummary& summary, std::int64_t now, Place place);
/// Times of a file or namespace: `last_use` or `last_write`, and its age; null where it is not known.
void add_time(Json& out, const char* name, std::int64_t then, std::int64_t now, bool known);
/// `3m ago`; `-` where it is not known.
std::string ago_text(std::int64_t then, std::int64_t now, bool known);
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
/// What gc and rm removed, or with --dry-run would have.
struct Removed {
  Sum chunks;
  std::int64_t failed = 0;
  std::string why;  ///< the last failure
  int namespaces = 0;
  Sum left;
};
/// The end of gc and rm. `more`: what only a directory has, in tables and in JSON (`removed_…`).
Outcome report(const StoreArguments& given, const std::string& path, const Removed& removed,
               const std::vector<std::pair<const char*, Sum>>& more = {});
/// `3 files, 12.0 MiB`.
std::string sum_text(const Sum& sum);

}  // namespace kvstride::cli
