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

std::vector<std::string> cells(const store::SpaceSummary& summary, std::int64_t now) {
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
                         summary.files > 0 ? age_text(summary.last_use, now) + " ago" : "-"});
  return out;
}

Json to_json(const std::vector<store::ChunkFile>& files, std::int64_t now) {
  Json out = Json::array();
  for (const store::ChunkFile& file : files) {
    out.push_back({{"key", file.key.hex()},
                   {"first_head", file.heads.first},
                   {"num_heads", file.heads.count},
                   {"bytes", file.bytes},
                   {"last_use", seconds(file.used)},
                   {"last_use_age", std::max<std::int64_t>(seconds(now - file.used), 0)},
                   {"read", file.read}});
  }
  return out;
}

}  // namespace

Outcome run_store_ls(const StoreArguments& given) {
  const store::StoreFolder store = open_store(given);
  std::vector<Listed> all;
  std::vector<store::Stray> strays;
  bool whole = true;
  for (const std::string& name : store.spaces(given.space)) {
    const store::SpaceFolder space(store, name);
    Listed one;
    one.summary = store::summarize(space, &strays, [&](const store::ChunkFile& file) {
      if (given.with_keys) one.files.push_back(file);
    });
    std::sort(one.files.begin(), one.files.end(), [](const store::ChunkFile& a, const store::ChunkFile& b) {
      const auto left = a.key.bytes();
      const auto right = b.key.bytes();
      if (a.key == b.key) return std::pair(a.heads.first, a.heads.count) < std::pair(b.heads.first, b.heads.count);
      return std::lexicographical_compare(left.begin(), left.end(), right.begin(), right.end());
    });
    whole &= one.summary.whole;
    all.push_back(std::move(one));
  }
  const std::int64_t now = store.io().now();
  if (given.json) {
    Json spaces = Json::array();
    for (const Listed& one : all) {
      Json space = cli::to_json(one.summary, now);
      if (given.with_keys) space["keys"] = to_json(one.files, now);
      spaces.push_back(std::move(space));
    }
    return listed("ls", strays, whole, dump({{"path", store.path()}, {"namespaces", std::move(spaces)}}));
  }
  std::vector<std::vector<std::string>> rows{
      {"NAMESPACE", "MODEL", "REVISION", "PLANES", "LAYERS", "HEADS", "BLOCK", "CHUNKS", "FILES", "BYTES", "LAST USE"}};
  for (const Listed& one : all) rows.push_back(cells(one.summary, now));
  std::string out = table(rows);
  for (const Listed& one : all) {
    if (!given.with_keys || one.files.empty()) continue;
    rows = {{"KEY", "HEADS", "BYTES", "LAST USE", "READ"}};
    for (const store::ChunkFile& file : one.files) {
      rows.push_back({file.key.hex(), heads_text(file.heads), size_text(file.bytes), age_text(file.used, now) + " ago",
                      file.read ? "yes" : "no"});
    }
    out += "\n" + one.summary.name + "\n" + table(rows, 2 * Key::kMaxBytes);
  }
  return listed("ls", strays, whole, std::move(out));
}

}  // namespace kvstride::cli
