// SPDX-License-Identifier: Apache-2.0
// `kvstride store ls`: namespaces and chunks, from names and times.
#include <fmt/format.h>

#include <algorithm>

#include "store.h"
#include "table.h"

namespace kvstride::cli {
namespace {

struct Listed {
  store::SpaceSummary summary;
  std::vector<store::ChunkFile> files;  ///< with --keys
};

std::vector<std::string> cells(const store::SpaceSummary& summary, std::int64_t now, Place place) {
  std::vector<std::string> out{short_name(summary.name)};
  if (summary.header) {
    const Namespace space = Namespace::parse(summary.header->space_text);
    const NamespaceFields& fields = space.fields();
    const std::string adapter = fields.adapter ? " + " + printable(*fields.adapter) : "";
    out.insert(out.end(), {printable(fields.model) + adapter, printable(fields.revision).substr(0, 12),
                           planes_text(fields), std::to_string(fields.num_layers), std::to_string(fields.num_kv_heads),
                           std::to_string(fields.block_size)});
  } else {
    out.insert(out.end(), {"(" + summary.why + ")", "", "", "", "", ""});
  }
  out.insert(out.end(), {std::to_string(summary.chunks), std::to_string(summary.files), size_text(summary.bytes),
                         ago_text(summary.last_use, now,
                                  summary.files > 0 && (place == Place::kDirectory || summary.last_use > 0))});
  return out;
}

Json to_json(const std::vector<store::ChunkFile>& files, std::int64_t now, Place place) {
  Json out = Json::array();
  for (const store::ChunkFile& file : files) {
    Json one{{"key", file.key.hex()},
             {"first_head", file.heads.first},
             {"num_heads", file.heads.count},
             {"bytes", file.bytes}};
    if (place == Place::kDirectory) {
      add_time(one, "last_use", file.used, now, true);
      one["read"] = file.read;
    } else {
      add_time(one, "last_write", file.used, now, file.used > 0);
    }
    out.push_back(std::move(one));
  }
  return out;
}

}  // namespace

Outcome list_chunks(const StoreArguments& given, const store::ChunkStore& store, Place place) {
  const bool directory = place == Place::kDirectory;
  std::vector<Listed> all;
  std::vector<store::Stray> strays;
  bool whole = true;
  for (const std::string& name : store.spaces(given.space)) {
    Listed one;
    one.summary = store::summarize(*store.open(name), &strays, [&](const store::ChunkFile& file) {
      if (given.with_keys) one.files.push_back(file);
    });
    std::sort(one.files.begin(), one.files.end(), store::by_name);
    whole &= one.summary.whole;
    all.push_back(std::move(one));
  }
  const std::int64_t now = store::system_io()->now();
  if (given.json) {
    Json spaces = Json::array();
    for (const Listed& one : all) {
      Json space = cli::to_json(one.summary, now, place);
      if (given.with_keys) space["keys"] = to_json(one.files, now, place);
      spaces.push_back(std::move(space));
    }
    return listed("ls", strays, whole, dump({{"path", store.where()}, {"namespaces", std::move(spaces)}}));
  }
  const char* last = directory ? "LAST USE" : "LAST WRITE";
  std::vector<std::vector<std::string>> rows{
      {"NAMESPACE", "MODEL", "REVISION", "PLANES", "LAYERS", "HEADS", "BLOCK", "CHUNKS", "FILES", "BYTES", last}};
  for (const Listed& one : all) rows.push_back(cells(one.summary, now, place));
  std::string out = table(rows);
  for (const Listed& one : all) {
    if (!given.with_keys || one.files.empty()) continue;
    rows = {{"KEY", "HEADS", "BYTES", last}};
    if (directory) rows[0].push_back("READ");
    for (const store::ChunkFile& file : one.files) {
      rows.push_back({file.key.hex(), heads_text(file.heads), size_text(file.bytes),
                      ago_text(file.used, now, directory || file.used > 0)});
      if (directory) rows.back().push_back(file.read ? "yes" : "no");
    }
    out += "\n" + one.summary.name + "\n" + table(rows, 2 * Key::kMaxBytes);
  }
  return listed("ls", strays, whole, std::move(out));
}

Outcome run_store_ls(const StoreArguments& given) { return list_chunks(given, open_store(given), Place::kDirectory); }

}  // namespace kvstride::cli
