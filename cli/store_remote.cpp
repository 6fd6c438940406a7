// SPDX-License-Identifier: Apache-2.0
// `kvstride store` on what an engine holds.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kvstride/error.h"
#include "parse.h"
#include "store.h"
#include "table.h"

namespace kvstride::cli {
namespace {

using store::Answer;
using store::RemoteSpace;
using store::RemoteStore;

/// Objects that go, and what becomes of the sums.
class Remover {
 public:
  Remover(const StoreArguments& given, const RemoteStore& store, Removed& removed)
      : given_(given), store_(store), removed_(removed) {}

  /// How many of them are there no more.
  std::int64_t remove(const RemoteSpace& space, const std::vector<store::ChunkFile>& files, Progress& progress) {
    std::int64_t gone = 0;
    std::vector<std::string> names;
    for (const store::ChunkFile& file : files) names.push_back(space.path_of(file));
    each(names, [&](std::size_t i) {
      removed_.chunks.add(files[i].bytes);
      --removed_.left.files;
      removed_.left.bytes -= files[i].bytes;
      progress.add(1, 0);
      ++gone;
    });
    return gone;
  }
  /// Of a namespace that has no chunks any more.
  void remove(const std::vector<store::Marker>& markers) {
    std::vector<std::string> names;
    for (const store::Marker& marker : markers) names.push_back(marker.name);
    std::size_t gone = 0;
    each(names, [&](std::size_t) { ++gone; });
    if (gone == names.size()) ++removed_.namespaces;
  }

 private:
  template <typename Use>
  void each(const std::vector<std::string>& names, const Use& use) {
    if (given_.dry_run) {
      for (std::size_t i = 0; i < names.size(); ++i) use(i);
      return;
    }
    store_.remove(names, [&](std::size_t i, Answer answer) {
      if (answer == Answer::kOk || answer == Answer::kAbsent) {
        use(i);
      } else {
        ++removed_.failed;
        removed_.why = store_.why(answer);
      }
      return !Interruption::asked();
    });
  }

  const StoreArguments& given_;
  const RemoteStore& store_;
  Removed& removed_;
};

Outcome verify(const StoreArguments& given, const RemoteStore& store) {
  // What came damaged may lie there undamaged: it is read again before it goes.
  const Repair repair = [&](const store::ChunkSpace& space, const store::ChunkFile& file, const store::Check& check) {
    using State = store::Check::State;
    const store::Check again = space.verifier()->check({&file, 1})[0];
    if (again.state == State::kGone) return std::string();
    if (again.state == State::kSound) return std::string("it was sound when it was read again");
    if (again.state == State::kUnreadable) return "it could not be read again: " + again.why;
    if (again.why != check.why) return "it was damaged otherwise when it was read again: " + again.why;
    Answer answer = Answer::kLate;
    const std::array names{space.path_of(file)};
    store.remove(names, [&](std::size_t, Answer one) { return (answer = one, true); });
    return answer == Answer::kOk || answer == Answer::kAbsent ? std::string() : store.why(answer);
  };
  const int threads = given.threads ? threads_of(given) : std::clamp(store.engine().num_threads(), 1, 8);
  return verify_chunks(given, store, threads, given.repair ? repair : Repair(), "removed");
}

/// Whatever was written before the clock of this machine said so. One namespace after the other.
Outcome gc(const StoreArguments& given, const RemoteStore& store) {
  const std::int64_t before = store::system_io()->now() - parse_duration(*given.older_than, "--older-than");
  Removed removed;
  Remover remover(given, store, removed);
  std::vector<store::Stray> strays;
  bool whole = true;
  const std::vector<std::string> names = store.spaces();
  const Interruption interruption;
  for (const std::string& name : names) {
    if (Interruption::asked()) break;
    const RemoteSpace space(store, name);
    std::vector<store::ChunkFile> old;
    std::vector<store::Marker> markers;
    std::int64_t others = 0;
    bool told = true;
    const bool all = space.list(
        [&](const store::ChunkFile& file) {
          told &= file.used > 0;
          removed.left.add(file.bytes);
          file.used < before ? old.push_back(file) : static_cast<void>(++others);
        },
        &strays, &markers);
    if (!told) {
      throw Error(ErrorCode::kArgument,
                  fmt::format("gc: --older-than: {} does not tell when objects were written", store.engine().kind()));
    }
    whole &= all;
    Progress progress("gc", "files", static_cast<std::int64_t>(old.size()), 0);
    const bool empty = remover.remove(space, old, progress) == static_cast<std::int64_t>(old.size()) && others == 0;
    // Whoever writes there marks first.
    const auto is_old = [&](const store::Marker& marker) { return marker.modified < before; };
    if (empty && all && !Interruption::asked() && std::all_of(markers.begin(), markers.end(), is_old)) {
      remover.remove(markers);
    }
  }
  Outcome out = report(given, store.where(), removed);
  return out.code == kDone ? listed("gc", strays, whole, std::move(out.out)) : out;
}

Outcome rm(const StoreArguments& given, const RemoteStore& store) {
  const RemoteSpace space(store, store.space(given.space));
  std::vector<store::ChunkFile> files;
  std::vector<store::Marker> markers;
  if (!space.list([&](const store::ChunkFile& file) { files.push_back(file); }, nullptr, &markers)) {
    throw Error(ErrorCode::kStore, fmt::format("rm: the folders of '{}' cannot all be listed", space.name()));
  }
  const std::vector<store::ChunkFile> chosen = named(files, given.keys);
  Removed removed;
  for (const store::ChunkFile& file : files) removed.left.add(file.bytes);
  Remover remover(given, store, removed);
  const Interruption interruption;
  {
    Progress progress("rm", "files", static_cast<std::int64_t>(chosen.size()), 0);
    remover.remove(space, chosen, progress);
  }
  if (given.keys.empty() && removed.left.files == 0 && !Interruption::asked()) remover.remove(markers);
  return report(given, store.where(), removed);
}

Outcome stat(const StoreArguments& given, const RemoteStore& store) {
  std::vector<std::chrono::nanoseconds> times;
  for (int i = 0; i < 5; ++i) times.push_back(store.ask());
  std::nth_element(times.begin(), times.begin() + 2, times.end());
  const double seconds_a_question = std::chrono::duration<double>(times[2]).count();
  store::Engine& engine = store.engine();
  std::vector<store::SpaceSummary> spaces;
  std::vector<store::Stray> strays;
  std::string unlisted;
  try {
    for (const std::string& name : store.spaces()) {
      spaces.push_back(store::summarize(*store.open(name), &strays));
    }
  } catch (const Error& error) {
    unlisted = error.what();
  }
  Sum files;
  std::int64_t chunks = 0;
  std::int64_t oldest = 0;
  bool whole = true;
  for (const store::SpaceSummary& space : spaces) {
    if (space.files > 0 && (files.files == 0 || space.oldest_use < oldest)) oldest = space.oldest_use;
    files.files += space.files;
    files.bytes += space.bytes;
    chunks += space.chunks;
    whole &= space.whole;
  }
  const std::int64_t now = store::system_io()->now();
  const auto finish = [&](std::string text) -> Outcome {
    if (!unlisted.empty()) return {std::move(text), unlisted, kBadInput};
    return listed("stat", strays, whole, std::move(text));
  };
  if (given.json) {
    const auto if_listed = [&](std::int64_t value) { return unlisted.empty() ? Json(value) : Json(); };
    Json out{{"path", store.where()},
             {"engine",
              {{"name", engine.kind()},
               {"round_trip_seconds", seconds_a_question},
               {"reads_ranges", engine.reads_ranges()},
               {"largest_bytes", engine.largest()},
               {"threads", engine.num_threads()}}},
             {"chunks", if_listed(chunks)},
             {"files", if_listed(files.files)},
             {"bytes", if_listed(files.bytes)}};
    add_time(out, "oldest_write", oldest, now, oldest > 0);
    out["namespaces"] = Json::array();
    for (const store::SpaceSummary& space : spaces) out["namespaces"].push_back(to_json(space, now, Place::kRemote));
    out["strays"] = to_json(strays);
    return finish(dump(out));
  }
  std::vector<std::vector<std::string>> rows{
      {"path", printable(store.where())},
      {"engine",
       fmt::format("{}, {:.1f} ms a question, objects of up to {}, {}", engine.kind(), seconds_a_question * 1000,
                   size_text(engine.largest()), engine.reads_ranges() ? "parts of them alone" : "read whole")}};
  if (unlisted.empty()) {
    rows.push_back({"files", fmt::format("{} in {} of {}", size_text(files.bytes), counted(files.files, "file"),
                                         counted(chunks, "chunk"))});
    rows.push_back({"oldest write", ago_text(oldest, now, oldest > 0)});
  }
  for (const store::Stray& stray : strays) {
    rows.push_back({&stray == strays.data() ? "strays" : "", printable(stray.path + ": " + stray.what)});
  }
  std::string out = table(rows);
  if (spaces.empty()) return finish(std::move(out));
  rows = {{"NAMESPACE", "MODEL", "CHUNKS", "FILES", "BYTES", "LAST WRITE", "OLDEST WRITE"}};
  for (const store::SpaceSummary& space : spaces) {
    rows.push_back({short_name(space.name), model_text(space), std::to_string(space.chunks),
                    std::to_string(space.files), size_text(space.bytes),
                    ago_text(space.last_use, now, space.last_use > 0),
                    ago_text(space.oldest_use, now, space.oldest_use > 0)});
  }
  return finish(out + "\n" + table(rows));
}

}  // namespace

void check_remote(const StoreArguments& given) {
  const auto refuse = [&](const char* option, const char* why) {
    throw Error(ErrorCode::kArgument, fmt::format("{}: {} on an engine: {}", given.command, option, why));
  };
  if (given.command == "convert") refuse("not", "chunks stay there in the order in which they were written");
  if (given.group) refuse("no --group", "objects have no owners");
  if (given.max_bytes) refuse("no --max-bytes", "it has its own limit, and does not tell what was used last");
  if (given.quarantine) refuse("no --quarantine", "nothing is set aside there (verify --repair removes)");
  if (given.command == "gc" && !given.older_than) refuse("give --older-than", "there is nothing else to collect");
}

Outcome run_store_remote(const StoreArguments& given, store::EnginePtr engine) {
  check_remote(given);
  if (given.older_than) parse_duration(*given.older_than, "--older-than");
  if (given.threads) threads_of(given);
  store::check_space_prefix(given.space);
  const RemoteStore store(std::move(engine));
  store.ask();  // whoever does not answer is found out at once
  if (given.command == "ls") return list_chunks(given, store, Place::kRemote);
  if (given.command == "stat") return stat(given, store);
  if (given.command == "verify") return verify(given, store);
  if (given.command == "gc") return gc(given, store);
  if (given.command == "rm") return rm(given, store);
  throw Error(ErrorCode::kArgument, fmt::format("store: no command '{}'", given.command));
}

std::string to_text(const StoreArguments& given) {
  Json out{{"command", given.command},     {"path", given.path},     {"space", given.space},     {"keys", given.keys},
           {"with_keys", given.with_keys}, {"repair", given.repair}, {"dry_run", given.dry_run}, {"json", given.json}};
  if (given.threads) out["threads"] = *given.threads;
  if (given.older_than) out["older_than"] = *given.older_than;
  return out.dump(-1, ' ', true, Json::error_handler_t::replace);
}

StoreArguments store_arguments(const std::string& text) {
  try {
    const Json in = Json::parse(text);
    StoreArguments out;
    in.at("command").get_to(out.command);
    in.at("path").get_to(out.path);
    in.at("space").get_to(out.space);
    in.at("keys").get_to(out.keys);
    in.at("with_keys").get_to(out.with_keys);
    in.at("repair").get_to(out.repair);
    in.at("dry_run").get_to(out.dry_run);
    in.at("json").get_to(out.json);
    if (in.contains("threads")) out.threads = in["threads"].get<std::string>();
    if (in.contains("older_than")) out.older_than = in["older_than"].get<std::string>();
    return out;
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::kArgument, fmt::format("store: its arguments: {}", error.what()));
  }
}

}  // namespace kvstride::cli
