// SPDX-License-Identifier: Apache-2.0
// `kvstride store stat`: what an operator asks of a directory.
#include <fmt/format.h>

#include "store.h"
#include "table.h"

namespace kvstride::cli {
namespace {

std::string account_text(const store::LedgerState& account) {
  if (!account.sound) return "damaged: the next process that opens the directory counts anew";
  std::string out = account.known ? fmt::format("{} used", size_text(account.used)) : std::string("not counted yet");
  out += fmt::format(", {} reserved, {}", size_text(account.reserved),
                     account.processes == 1 ? "1 process" : fmt::format("{} processes", account.processes));
  if (account.counting) out += ", one of them counts";
  return out;
}

std::string limit_text(const store::LedgerState& account) {
  if (!account.sound || account.max_bytes == 0) return "not known";
  std::string out = size_text(account.max_bytes);
  if (account.known) {
    out += fmt::format(", {:.0f} % used",
                       100.0 * static_cast<double>(account.used) / static_cast<double>(account.max_bytes));
  }
  return out;
}

}  // namespace

Outcome run_store_stat(const StoreArguments& given) {
  const store::StoreFolder store = open_store(given);
  const store::LedgerState account = store.ledger();
  std::vector<store::SpaceSummary> spaces;
  std::vector<store::Stray> strays;
  for (const std::string& name : store.spaces()) {
    spaces.push_back(store::summarize(store::SpaceFolder(store, name), &strays));
  }
  Sum quarantine;
  for (const store::LooseFile& file : store.quarantine()) quarantine.add(file.bytes);
  Sum temporaries;
  Sum dead;
  for (const store::LooseFile& file : store.temporaries()) {
    temporaries.add(file.bytes);
    if (file.dead) dead.add(file.bytes);
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
  const store::IoEngine engine = store::probe_engine(store);
  struct statvfs disk {};
  const bool disk_known = store.io().statvfs(store.root(), disk) == 0;
  const auto disk_bytes = static_cast<std::int64_t>(disk.f_blocks * disk.f_frsize);
  const auto disk_free = static_cast<std::int64_t>(disk.f_bavail * disk.f_frsize);
  const std::int64_t now = store.io().now();

  if (given.json) {
    const auto if_known = [](bool known, auto value) { return known ? Json(value) : Json(); };
    Json out{
        {"path", store.path()},
        {"max_bytes", if_known(account.sound && account.max_bytes > 0, account.max_bytes)},
        {"account",
         {{"sound", account.sound},
          {"counting", account.counting},
          {"used_bytes", if_known(account.known, account.used)},
          {"reserved_bytes", if_known(account.sound, account.reserved)},
          {"processes", if_known(account.sound, account.processes)}}},
        {"chunks", chunks},
        {"files", files.files},
        {"bytes", files.bytes},
        {"oldest_use", if_known(files.files > 0, seconds(oldest))},
        {"oldest_use_age", if_known(files.files > 0, std::max<std::int64_t>(seconds(now - oldest), 0))},
        {"quarantine", to_json(quarantine)},
        {"temporaries", to_json(temporaries)},
        {"dead_temporaries", to_json(dead)},
        {"file_system", {{"bytes", if_known(disk_known, disk_bytes)}, {"free_bytes", if_known(disk_known, disk_free)}}},
        {"engine",
         {{"name", engine.ring ? "io_uring" : "pread/pwrite"},
          {"reason", engine.ring ? Json() : Json(engine.why_not)},
          {"direct", engine.direct}}},
        {"namespaces", Json::array()},
        {"strays", to_json(strays)}};
    for (const store::SpaceSummary& space : spaces) out["namespaces"].push_back(to_json(space, now, Place::kDirectory));
    return listed("stat", strays, whole, dump(out));
  }

  std::string loose = sum_text(temporaries);
  if (dead.files > 0) loose += fmt::format(" ({} of dead processes)", dead.files);
  std::string io = engine.ring ? "io_uring" : fmt::format("pread/pwrite (no io_uring: {})", engine.why_not);
  io += engine.direct ? ", O_DIRECT" : ", through the page cache";
  std::vector<std::vector<std::string>> rows{
      {"path", printable(store.path())},
      {"limit", limit_text(account)},
      {"account", account_text(account)},
      {"files",
       fmt::format("{} in {} of {}", size_text(files.bytes), counted(files.files, "file"), counted(chunks, "chunk"))},
      {"oldest use", files.files > 0 ? age_text(oldest, now) + " ago" : "-"},
      {"quarantine", sum_text(quarantine)},
      {"temporaries", loose},
      {"file system", disk_known ? fmt::format("{} free of {}", size_text(disk_free), size_text(disk_bytes)) : "-"},
      {"I/O", io}};
  for (const store::Stray& stray : strays) {
    rows.push_back({&stray == strays.data() ? "strays" : "", printable(stray.path + ": " + stray.what)});
  }
  std::string out = table(rows);
  if (spaces.empty()) return listed("stat", strays, whole, std::move(out));
  rows = {{"NAMESPACE", "MODEL", "CHUNKS", "FILES", "BYTES", "READ", "NEVER READ", "LAST USE", "OLDEST USE"}};
  for (const store::SpaceSummary& space : spaces) {
    const auto age = [&](std::int64_t then) { return space.files > 0 ? age_text(then, now) + " ago" : "-"; };
    rows.push_back({short_name(space.name), model_text(space), std::to_string(space.chunks),
                    std::to_string(space.files), size_text(space.bytes), std::to_string(space.read_files),
                    std::to_string(space.files - space.read_files), age(space.last_use), age(space.oldest_use)});
  }
  return listed("stat", strays, whole, out + "\n" + table(rows));
}

}  // namespace kvstride::cli
