// SPDX-License-Identifier: Apache-2.0
// `kvstride store verify`: every byte of every file.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>

#include "kvstride/error.h"
#include "parse.h"
#include "store.h"
#include "table.h"

namespace kvstride::cli {
namespace {

using State = store::Check::State;

struct Found {
  store::ChunkFile file;
  std::string path;
  store::Check check;
  std::string repair;  ///< with --repair: empty where it worked
};

}  // namespace

int threads_of(const StoreArguments& given) {
  if (!given.threads) return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 2U, 8U));
  const std::int64_t number = parse_integer(*given.threads, "--threads");
  if (number < 1 || number > 256)
    throw Error(ErrorCode::kArgument, fmt::format("--threads: {} is not from 1 to 256", number));
  return static_cast<int>(number);
}

Outcome run_store_verify(const StoreArguments& given) {
  const int threads = threads_of(given);
  const store::StoreFolder store = open_store(given);
  // Refused before hours of reading.
  std::optional<store::StoreEditor> editor;
  if (given.repair) editor.emplace(store);
  Repair repair;
  if (editor) {
    repair = [&](const store::ChunkSpace& space, const store::ChunkFile& file, const store::Check& check) {
      const int error = editor->set_aside(dynamic_cast<const store::SpaceFolder&>(space), file, check);
      if (error == 0 || error == -ENOENT) return std::string();
      return std::string(error == -EBUSY ? "another process counts" : std::strerror(-error));
    };
  }
  return verify_chunks(given, store, threads, repair, "set aside");
}

Outcome verify_chunks(const StoreArguments& given, const store::ChunkStore& store, int num_threads,
                      const Repair& repair, const char* mended) {
  const std::vector<std::string> names = store.spaces(given.space);
  if (names.empty() && !given.space.empty()) store.space(given.space);  // says that there is none
  std::vector<std::vector<store::ChunkFile>> files(names.size());
  std::vector<store::Stray> strays;
  std::int64_t num_files = 0;
  std::int64_t num_bytes = 0;
  bool whole = true;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::unique_ptr<store::ChunkSpace> space = store.open(names[i]);
    const auto add = [&](store::ChunkFile file) {
      file.space = static_cast<std::uint32_t>(i);
      files[i].push_back(file);
      ++num_files;
      num_bytes += file.length;
    };
    whole &= space->list(add, &strays);
  }
  Sum sound;
  Sum checked;
  std::int64_t gone = 0;
  std::vector<Found> damaged;
  std::vector<Found> unreadable;
  std::int64_t failed = 0;
  const Interruption interruption;
  {
    Progress progress("verify", "files", num_files, num_bytes);
    for (std::size_t i = 0; i < names.size() && !Interruption::asked(); ++i) {
      const std::unique_ptr<store::ChunkSpace> space = store.open(names[i]);
      store::verify(*space, files[i], num_threads, [&](const store::ChunkFile& file, const store::Check& check) {
        progress.add(1, file.length);
        if (check.state == State::kGone) {
          ++gone;
          return !Interruption::asked();
        }
        checked.add(check.bytes);
        if (check.state == State::kSound) {
          sound.add(check.bytes);
          return !Interruption::asked();
        }
        Found found{file, space->path_of(file), check, {}};
        if (repair && check.state == State::kDamaged) {
          found.repair = repair(*space, file, check);
          failed += found.repair.empty() ? 0 : 1;
        }
        (check.state == State::kDamaged ? damaged : unreadable).push_back(std::move(found));
        return !Interruption::asked();
      });
    }
  }
  const auto by_path = [&](const Found& a, const Found& b) {
    return a.file.space != b.file.space ? a.file.space < b.file.space : a.file.name() < b.file.name();
  };
  std::sort(damaged.begin(), damaged.end(), by_path);
  std::sort(unreadable.begin(), unreadable.end(), by_path);

  const bool interrupted = Interruption::asked();
  Outcome out;
  if (interrupted) {
    out.message = fmt::format("verify: interrupted after {} of {} files", checked.files + gone, num_files);
    out.code = kInterrupted;
  } else if (!damaged.empty() || !unreadable.empty() || !whole) {
    out.message = fmt::format("verify: {} damaged{}{}{}", counted(static_cast<std::int64_t>(damaged.size()), "file"),
                              unreadable.empty() ? "" : fmt::format(", {} unreadable", unreadable.size()),
                              whole ? "" : ", not all folders could be listed",
                              failed > 0 ? fmt::format(", {} could not be {}", failed, mended) : "");
    out.code = kDamaged;
  }
  if (given.json) {
    const auto list = [&](const std::vector<Found>& all, bool with_repair) {
      Json json = Json::array();
      for (const Found& found : all) {
        Json one{{"namespace", names[found.file.space]},
                 {"key", found.file.key.hex()},
                 {"first_head", found.file.heads.first},
                 {"num_heads", found.file.heads.count},
                 {"path", found.path},
                 {"reason", found.check.why}};
        if (with_repair) one["repaired"] = repair && found.repair.empty();
        json.push_back(std::move(one));
      }
      return json;
    };
    out.out = dump({{"path", store.where()},
                    {"files", checked.files},
                    {"bytes", checked.bytes},
                    {"sound", sound.files},
                    {"damaged", list(damaged, true)},
                    {"unreadable", list(unreadable, false)},
                    {"gone", gone},
                    {"strays", to_json(strays)},
                    {"complete", whole && !interrupted}});
    return out;
  }
  for (const Found& found : damaged) {
    out.out += fmt::format("damaged: {}: {}{}\n", found.path, printable(found.check.why),
                           !repair                ? ""
                           : found.repair.empty() ? fmt::format(" ({})", mended)
                                                  : fmt::format(" (not {}: {})", mended, found.repair));
  }
  for (const Found& found : unreadable) out.out += fmt::format("unreadable: {}: {}\n", found.path, found.check.why);
  for (const store::Stray& stray : strays)
    out.out += fmt::format("stray: {}\n", printable(stray.path + ": " + stray.what));
  out.out += fmt::format("{} checked, {}: {} sound, {} damaged, {} unreadable{}\n", counted(checked.files, "file"),
                         size_text(checked.bytes), sound.files, damaged.size(), unreadable.size(),
                         gone > 0 ? fmt::format(", {} went meanwhile", gone) : "");
  return out;
}

}  // namespace kvstride::cli
