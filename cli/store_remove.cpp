// SPDX-License-Identifier: Apache-2.0
// `kvstride store gc` and `rm`: removing files, least recently used first or by name.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "kvstride/error.h"
#include "parse.h"
#include "store.h"
#include "table.h"

namespace kvstride::cli {
namespace {

/// Removes files or, without an editor, only says that it did; what cannot be removed is counted.
class Remover {
 public:
  Remover(const store::StoreFolder& store, const std::vector<std::string>& spaces, store::StoreEditor* editor)
      : store_(store), spaces_(spaces), editor_(editor) {}

  bool remove(const store::ChunkFile& file, bool unused) {
    if (editor_ == nullptr) return add(chunks_, file.bytes);
    std::int64_t bytes = 0;
    const int error = editor_->remove(folder(file.space), file, unused, bytes);
    return note(chunks_, error, bytes);
  }
  bool remove_quarantined(const store::LooseFile& file) {
    if (editor_ == nullptr) return add(quarantine_, file.bytes);
    std::int64_t bytes = 0;
    const int error = editor_->remove_quarantined(file.name, bytes);
    return note(quarantine_, error, bytes);
  }
  /// Files of dead processes: the editor removed them when it counted.
  void dead(const std::vector<store::LooseFile>& files) {
    for (const store::LooseFile& file : files) add(temporaries_, file.bytes);
  }

  Removed removed(const Sum& left, int namespaces) const { return {chunks_, failed_, why_, namespaces, left}; }
  const Sum& quarantine() const { return quarantine_; }
  const Sum& temporaries() const { return temporaries_; }

 private:
  static bool add(Sum& sum, std::int64_t bytes) {
    sum.add(bytes);
    return true;
  }
  bool note(Sum& sum, int error, std::int64_t bytes) {
    if (error == 0) return add(sum, bytes);
    if (error != -ENOENT && error != -ESTALE) {  // neither gone nor used meanwhile
      ++failed_;
      why_ = error == -EBUSY ? "another process counts" : std::strerror(-error);
    }
    return false;
  }
  /// Each holds 17 descriptors.
  const store::SpaceFolder& folder(std::uint32_t space) {
    constexpr std::size_t kMost = 16;
    std::unique_ptr<store::SpaceFolder>& out = folders_[space];
    if (!out) {
      if (folders_.size() > kMost) {
        folders_.clear();
        return *(folders_[space] = std::make_unique<store::SpaceFolder>(store_, spaces_[space]));
      }
      out = std::make_unique<store::SpaceFolder>(store_, spaces_[space]);
    }
    return *out;
  }

  const store::StoreFolder& store_;
  const std::vector<std::string>& spaces_;
  store::StoreEditor* editor_;
  std::map<std::uint32_t, std::unique_ptr<store::SpaceFolder>> folders_;
  Sum chunks_;
  Sum quarantine_;
  Sum temporaries_;
  std::int64_t failed_ = 0;
  std::string why_;
};

/// What only a directory has.
std::vector<std::pair<const char*, Sum>> more(const Remover& remover) {
  return {{"quarantine", remover.quarantine()}, {"temporaries", remover.temporaries()}};
}

}  // namespace

std::vector<store::ChunkFile> named(const std::vector<store::ChunkFile>& files, const std::vector<std::string>& keys) {
  if (keys.empty()) return files;
  std::map<std::string, std::vector<store::ChunkFile>> by_key;
  for (const store::ChunkFile& file : files) by_key[file.key.hex()].push_back(file);
  std::map<std::string, std::vector<store::ChunkFile>> out;
  for (const std::string& key : keys) {
    if (key.empty() || key.find_first_not_of("0123456789abcdef") != std::string::npos) {
      throw Error(ErrorCode::kArgument, fmt::format("rm: key '{}' is not lower-case hex", key));
    }
    auto found = by_key.find(key);  // a whole key may be the beginning of another
    if (found == by_key.end()) {
      std::vector<std::string> all;
      for (auto at = by_key.lower_bound(key); at != by_key.end() && at->first.compare(0, key.size(), key) == 0; ++at) {
        if (all.empty()) found = at;
        all.push_back(at->first);
      }
      if (all.empty()) throw Error(ErrorCode::kArgument, fmt::format("rm: no chunk's key starts with '{}'", key));
      if (all.size() > 1) {
        std::string list;
        for (std::size_t i = 0; i < std::min<std::size_t>(all.size(), 4); ++i) list += (i > 0 ? ", " : "") + all[i];
        throw Error(ErrorCode::kArgument, fmt::format("rm: {} keys start with '{}': {}{}", all.size(), key, list,
                                                      all.size() > 4 ? ", …" : ""));
      }
    }
    out.insert(*found);
  }
  std::vector<store::ChunkFile> chosen;
  for (const auto& [key, list] : out) chosen.insert(chosen.end(), list.begin(), list.end());
  return chosen;
}

Outcome report(const StoreArguments& given, const std::string& path, const Removed& removed,
               const std::vector<std::pair<const char*, Sum>>& more) {
  Outcome out;
  if (Interruption::asked()) {
    out.message = fmt::format("{}: interrupted after {}", given.command, counted(removed.chunks.files, "file"));
    out.code = kInterrupted;
  } else if (removed.failed > 0) {
    out.message =
        fmt::format("{}: {} could not be removed: {}", given.command, counted(removed.failed, "file"), removed.why);
    out.code = kBadInput;
  }
  if (given.json) {
    Json json{{"path", path}, {"dry_run", given.dry_run}, {"removed", to_json(removed.chunks)}};
    for (const auto& [name, sum] : more) json[std::string("removed_") + name] = to_json(sum);
    json["removed_namespaces"] = removed.namespaces;
    json["failed"] = removed.failed;
    json["left"] = to_json(removed.left);
    out.out = dump(json);
    return out;
  }
  std::vector<std::vector<std::string>> rows{{given.dry_run ? "would remove" : "removed", sum_text(removed.chunks)}};
  for (const auto& [name, sum] : more) rows.push_back({name, sum_text(sum)});
  rows.push_back({"empty namespaces", removed.namespaces == 0 ? "none" : std::to_string(removed.namespaces)});
  rows.push_back({"left", sum_text(removed.left)});
  out.out = table(rows);
  return out;
}

Outcome run_store_gc(const StoreArguments& given) {
  std::optional<std::int64_t> most;
  std::optional<std::int64_t> age;
  if (given.max_bytes) most = parse_bytes(*given.max_bytes, "--max-bytes");
  if (given.older_than) age = parse_duration(*given.older_than, "--older-than");
  const store::StoreFolder store = open_store(given);
  std::optional<store::StoreEditor> editor;
  if (!given.dry_run) editor.emplace(store);
  const Interruption interruption;
  store::Census census = editor ? editor->count() : store::take_census(store);

  Remover remover(store, census.spaces, editor ? &*editor : nullptr);
  Sum left;
  if (editor) remover.dead(editor->removed_temporaries());
  for (const store::LooseFile& file : census.temporaries) {
    if (file.dead && given.dry_run) {
      remover.dead({file});
    } else {
      left.add(file.bytes);
    }
  }
  for (const store::LooseFile& file : census.quarantine) left.add(file.bytes);
  for (const store::ChunkFile& file : census.files) left.add(file.bytes);
  const auto took = [&](std::int64_t bytes) {
    --left.files;
    left.bytes -= bytes;
  };
  const auto too_much = [&] { return most && left.bytes > *most; };

  for (const store::LooseFile& file : census.quarantine) {
    if (Interruption::asked() || !(given.quarantine || too_much())) break;
    if (remover.remove_quarantined(file)) took(file.bytes);
  }
  store::sort_by_use(census.files);
  const std::int64_t now = store.io().now();
  for (const store::ChunkFile& file : census.files) {
    const bool old = age && file.used < now - *age;
    if (Interruption::asked() || !(old || too_much())) break;  // all others were used later
    if (remover.remove(file, true)) took(file.bytes);
  }
  int namespaces = 0;
  if (editor && !Interruption::asked()) namespaces = editor->remove_empty(census.spaces);
  return report(given, store.path(), remover.removed(left, namespaces), more(remover));
}

Outcome run_store_rm(const StoreArguments& given) {
  const store::StoreFolder store = open_store(given);
  const std::vector<std::string> names{store.space(given.space)};
  std::vector<store::ChunkFile> files;
  {
    const store::SpaceFolder space(store, names[0]);
    if (!space.list([&](const store::ChunkFile& file) { files.push_back(file); })) {
      throw Error(ErrorCode::kStore, fmt::format("rm: the folders of '{}' cannot all be listed", names[0]));
    }
  }
  const std::vector<store::ChunkFile> chosen = named(files, given.keys);
  std::optional<store::StoreEditor> editor;
  if (!given.dry_run) editor.emplace(store);
  const Interruption interruption;
  Sum left;
  for (const store::ChunkFile& file : files) left.add(file.bytes);
  Remover remover(store, names, editor ? &*editor : nullptr);
  for (const store::ChunkFile& file : chosen) {
    if (Interruption::asked()) break;
    if (!remover.remove(file, false)) continue;
    --left.files;
    left.bytes -= file.bytes;
  }
  int namespaces = 0;
  if (editor && given.keys.empty() && !Interruption::asked()) namespaces = editor->remove_empty(names);
  return report(given, store.path(), remover.removed(left, namespaces), more(remover));
}

}  // namespace kvstride::cli
