// SPDX-License-Identifier: Apache-2.0
// `kvstride store`: the texts that its commands share.
#include "store.h"

#include <fmt/format.h>

#include <map>

#include "kvstride/error.h"
#include "table.h"

namespace kvstride::cli {
store::StoreFolder open_store(const StoreArguments& given) {
  return store::StoreFolder(store::system_io(), given.path, given.group);
}

std::string age_text(std::int64_t then, std::int64_t now) {
  const std::int64_t age = std::max<std::int64_t>(seconds(now - then), 0);  // clocks may differ
  if (age < 120) return fmt::format("{}s", age);
  if (age < 120 * 60) return fmt::format("{}m", age / 60);
  if (age < 48 * 3600) return fmt::format("{}h", age / 3600);
  return fmt::format("{}d", age / 86400);
}

std::string counted(std::int64_t number, std::string_view what) {
  return fmt::format("{} {}{}", number, what, number == 1 ? "" : "s");
}

std::string printable(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
    const bool control = byte < 0x20 || byte == 0x7F || (byte == 0xC2 && next >= 0x80 && next < 0xA0);
    if (control) {
      out += fmt::format("\\x{:02x}", byte);
      if (byte == 0xC2) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[++i]));
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string planes_text(const NamespaceFields& fields) {
  std::vector<std::pair<std::string, std::string>> groups;  // elements, names
  for (const auto& [name, spec] : fields.planes) {
    const std::string elements = fmt::format("{}[{}]", name_of(spec.dtype), spec.dim.value_or(fields.head_size));
    if (groups.empty() || groups.back().first != elements) {
      groups.emplace_back(elements, name);
    } else {
      groups.back().second += ", " + name;
    }
  }
  std::string out;
  for (const auto& [elements, names] : groups) out += (out.empty() ? "" : "; ") + names + " " + elements;
  return out;
}

std::string model_text(const store::SpaceSummary& summary) {
  if (!summary.header) return "(" + summary.why + ")";
  return printable(Namespace::parse(summary.header->space_text).fields().model);
}

std::string short_name(const std::string& space) { return space.substr(0, 12); }

std::string heads_text(store::Heads heads) {
  return heads.count == 0 ? "-" : fmt::format("{}-{}", heads.first, heads.first + heads.count - 1);
}

std::int64_t seconds(std::int64_t nanoseconds) { return nanoseconds / 1'000'000'000; }

void add_time(Json& out, const char* name, std::int64_t then, std::int64_t now, bool known) {
  out[name] = known ? Json(seconds(then)) : Json();
  out[std::string(name) + "_age"] = known ? Json(std::max<std::int64_t>(seconds(now - then), 0)) : Json();
}

std::string ago_text(std::int64_t then, std::int64_t now, bool known) {
  return known ? age_text(then, now) + " ago" : "-";
}

Json to_json(const store::SpaceSummary& summary, std::int64_t now, Place place) {
  Json out{{"namespace", summary.name}};
  if (summary.header) {
    const Namespace space = Namespace::parse(summary.header->space_text);
    const NamespaceFields& fields = space.fields();
    out["model"] = fields.model;
    out["revision"] = fields.revision;
    out["adapter"] = fields.adapter ? Json(*fields.adapter) : Json();
    Json planes = Json::object();
    for (const auto& [name, spec] : fields.planes) {
      planes[name] = fmt::format("{}[{}]", name_of(spec.dtype), spec.dim.value_or(fields.head_size));
    }
    out["planes"] = std::move(planes);
    out["num_layers"] = fields.num_layers;
    out["first_layer"] = fields.first_layer;
    out["num_kv_heads"] = fields.num_kv_heads;
    out["head_size"] = fields.head_size;
    out["block_size"] = fields.block_size;
    out["group"] = fields.group;
    out["salt_policy"] = fields.salt_policy;
    out["raw"] = fields.raw ? Json(*fields.raw) : Json();
    out["order"] = summary.header->content.order;
    out["error"] = nullptr;
  } else {
    out["error"] = summary.why;
  }
  out["chunks"] = summary.chunks;
  out["files"] = summary.files;
  out["bytes"] = summary.bytes;
  const bool some = summary.files > 0;
  if (place == Place::kDirectory) {
    out["read_files"] = summary.read_files;
    out["unread_files"] = summary.files - summary.read_files;
    add_time(out, "last_use", summary.last_use, now, some);
    add_time(out, "oldest_use", summary.oldest_use, now, some);
  } else {
    add_time(out, "last_write", summary.last_use, now, some && summary.last_use > 0);
    add_time(out, "oldest_write", summary.oldest_use, now, some && summary.oldest_use > 0);
  }
  return out;
}

Json to_json(const std::vector<store::Stray>& strays) {
  Json out = Json::array();
  for (const store::Stray& stray : strays) out.push_back({{"path", stray.path}, {"reason", stray.what}});
  return out;
}

Outcome listed(const char* verb, const std::vector<store::Stray>& strays, bool whole, std::string out) {
  if (whole) return {std::move(out), "", kDone};
  std::string which;
  for (const store::Stray& stray : strays) {
    if (stray.what.rfind("not readable", 0) == 0) which = stray.path + ": " + stray.what;
  }
  return {std::move(out), fmt::format("{}: not all folders could be listed: {}", verb, which), kBadInput};
}

Json to_json(const Sum& sum) { return {{"files", sum.files}, {"bytes", sum.bytes}}; }

std::string sum_text(const Sum& sum) {
  return sum.files == 0 ? "none" : fmt::format("{}, {}", counted(sum.files, "file"), size_text(sum.bytes));
}

}  // namespace kvstride::cli
