// SPDX-License-Identifier: Apache-2.0
// `kvstride layouts`: the registry.
#include <fmt/format.h>

#include "commands.h"
#include "json.h"
#include "kvstride/registry.h"
#include "table.h"

namespace kvstride::cli {
namespace {

std::string releases(const Entry& entry) {
  if (entry.first.empty() && entry.last.empty()) return "-";
  return entry.last.empty() ? fmt::format("{} –", entry.first) : fmt::format("{} – {}", entry.first, entry.last);
}

Json entry_json(const Entry& entry) {
  return {{"name", entry.name},     {"order", entry.order},       {"shape", entry.shape}, {"opaque", entry.opaque},
          {"engine", entry.engine}, {"backends", entry.backends}, {"first", entry.first}, {"last", entry.last},
          {"source", entry.source}, {"note", entry.note}};
}

}  // namespace

Outcome run_layouts(const Options& options) {
  if (options.json) {
    Json out = Json::array();
    for (const Entry& entry : registry()) out.push_back(entry_json(entry));
    return {dump(out), "", kDone};
  }
  std::vector<std::vector<std::string>> rows{{"", "NAME", "ORDER", "SHAPE", "ENGINE", "RELEASES", "NOTE"}};
  for (const Entry& entry : registry()) {
    rows.push_back({entry.opaque ? "◆" : "", std::string(entry.name), std::string(entry.order),
                    std::string(entry.shape), std::string(entry.engine), releases(entry), std::string(entry.note)});
  }
  return {table(rows) + "\n◆ shape and strides do not tell the bytes: the layout is only ever named, never detected\n",
          "", kDone};
}

}  // namespace kvstride::cli
