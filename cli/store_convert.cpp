// SPDX-License-Identifier: Apache-2.0
// `kvstride store convert`: the chunks of a namespace in another stored order.
#include <fmt/format.h>

#include <map>

#include "kvstride/error.h"
#include "store.h"
#include "store/reorder.h"
#include "table.h"

namespace kvstride::cli {
namespace {

using State = store::Reorderer::State;

struct Failure {
  std::string path;
  std::string why;
  bool damaged;
};

/// What chunks will be, so that an order that does not suit them is refused before any is touched.
std::string check_order(const store::SpaceFolder& space, const std::vector<store::ChunkFile>& files,
                        const std::string& order) {
  std::string out;
  std::map<std::pair<int, int>, bool> seen;  // one of each head range will do
  for (const store::ChunkFile& file : files) {
    bool& known = seen[{file.heads.first, file.heads.count}];
    if (known) continue;
    const auto header = space.header(file);
    if (!header || header->digest != space.digest() || header->content.order.empty()) continue;
    out = store::content_in(Namespace::parse(header->space_text), header->content, order).order;
    known = true;
  }
  return out;
}

}  // namespace

Outcome run_store_convert(const StoreArguments& given) {
  const store::StoreFolder store = open_store(given);
  const store::SpaceFolder space(store, store.space(given.space));
  std::vector<store::ChunkFile> files;
  std::int64_t bytes = 0;
  const bool whole = space.list([&](const store::ChunkFile& file) {
    files.push_back(file);
    bytes += file.length;
  });
  if (!whole) {
    throw Error(ErrorCode::kStore, fmt::format("convert: the folders of '{}' cannot all be listed", space.name()));
  }
  const std::string order = check_order(space, files, given.order);
  if (order.empty() && !files.empty()) {
    throw Error(ErrorCode::kLayout,
                fmt::format("convert: no sound file of '{}' holds bytes with an order", space.name()));
  }
  std::optional<store::StoreEditor> editor;
  if (!given.dry_run) {
    if (store.ledger().max_bytes == 0) {
      throw Error(ErrorCode::kStore, "convert: the directory's limit is not known: its ledger is damaged, or new");
    }
    editor.emplace(store);
  }
  store::Reorderer reorderer(space, given.order, editor ? &*editor : nullptr);
  const Interruption interruption;
  std::map<State, std::int64_t> counts;
  std::int64_t before = 0;
  std::int64_t after = 0;
  std::vector<Failure> failures;
  {
    Progress progress("convert", "files", static_cast<std::int64_t>(files.size()), bytes);
    for (const store::ChunkFile& file : files) {
      if (Interruption::asked()) break;
      const store::Reorderer::Result result = reorderer.reorder(file);
      progress.add(1, file.length);
      ++counts[result.state];
      if (result.state == State::kDone) {
        before += result.before;
        after += result.after;
      } else if (result.state == State::kDamaged || result.state == State::kFailed) {
        failures.push_back({space.path_of(file), result.why, result.state == State::kDamaged});
      }
    }
  }
  Outcome out;
  std::int64_t seen = 0;
  for (const auto& [state, count] : counts) seen += count;
  if (Interruption::asked() && seen < static_cast<std::int64_t>(files.size())) {
    out.message = fmt::format("convert: interrupted after {} of {} files", seen, files.size());
    out.code = kInterrupted;
  } else if (!failures.empty()) {
    out.message = fmt::format("convert: {} damaged, {} could not be converted",
                              counted(counts[State::kDamaged], "file"), counts[State::kFailed]);
    out.code = counts[State::kDamaged] > 0 ? kDamaged : kBadInput;
  }
  if (given.json) {
    Json list = Json::array();
    for (const Failure& failure : failures) {
      list.push_back({{"path", failure.path}, {"reason", failure.why}, {"damaged", failure.damaged}});
    }
    out.out = dump({{"path", store.path()},
                    {"namespace", space.name()},
                    {"order", order},
                    {"dry_run", given.dry_run},
                    {"converted", counts[State::kDone]},
                    {"already", counts[State::kAlready]},
                    {"raw", counts[State::kRaw]},
                    {"gone", counts[State::kGone]},
                    {"bytes_before", before},
                    {"bytes_after", after},
                    {"failed", std::move(list)}});
    return out;
  }
  for (const Failure& failure : failures) {
    out.out +=
        fmt::format("{}: {}: {}\n", failure.damaged ? "damaged" : "failed", failure.path, printable(failure.why));
  }
  out.out +=
      table({{"namespace", space.name()},
             {"order", order.empty() ? "-" : order},
             {given.dry_run ? "would convert" : "converted",
              fmt::format("{}, {} to {}", counted(counts[State::kDone], "file"), size_text(before), size_text(after))},
             {"already so", std::to_string(counts[State::kAlready])},
             {"raw bytes", std::to_string(counts[State::kRaw])},
             {"damaged", std::to_string(counts[State::kDamaged])},
             {"failed", std::to_string(counts[State::kFailed])},
             {"went meanwhile", std::to_string(counts[State::kGone])}},
            80);
  return out;
}

}  // namespace kvstride::cli
