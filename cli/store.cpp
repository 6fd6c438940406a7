// SPDX-License-Identifier: Apache-2.0
// `kvstride store`: the command line of its commands, and the texts that they share.
#include "store.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>

#include "kvstride/error.h"
#include "table.h"

namespace kvstride::cli {
namespace {

constexpr const char* kAbout = "Look after the directory of a store (docs/cli-store.md)";
constexpr const char* kFooter =
    "PATH is a directory that a DirectoryTier made. All commands may run while processes use it.\n"
    "NAMESPACE is the first digits of one (kvstride store ls). SIZE: 500, 64K, 10G (of 1024), 5GB (of 1000).\n"
    "DURATION: 30s, 10m, 2h, 7d.\n"
    "Exit codes: 0 done, 2 bad usage, bad input, or not all could be done (one line on stderr), 5 damage found,\n"
    "130 interrupted.";

using Run = Outcome (*)(const StoreArguments&);

CLI::App* add_command(CLI::App& app, const char* name, const char* about, StoreArguments& given, Outcome& outcome,
                      Run run) {
  CLI::App* command = app.add_subcommand(name, about);
  command->add_option("PATH", given.path, "The store's directory")->required();
  command->add_flag("--group", given.group, "Take files of other users, too (a store in group mode)");
  command->add_flag("--json", given.json, "Print JSON");
  command->callback([&given, &outcome, run] { outcome = run(given); });
  return command;
}

void add_dry_run(CLI::App& command, StoreArguments& given) {
  command.add_flag("--dry-run", given.dry_run, "Say what would be done, and change nothing");
}

}  // namespace

void add_store(CLI::App& app, StoreArguments& given, Outcome& outcome) {
  CLI::App& store = *app.add_subcommand("store", kAbout);
  store.footer(kFooter);
  store.require_subcommand(1);

  CLI::App* ls = add_command(store, "ls", "List namespaces, or chunks", given, outcome, run_store_ls);
  ls->add_option("--namespace", given.space, "Those that start with these digits");
  ls->add_flag("--keys", given.with_keys, "List the chunks, too");

  add_command(store, "stat", "Totals, account, I/O engine, and what is used", given, outcome, run_store_stat);

  CLI::App* verify = add_command(store, "verify", "Check all checksums", given, outcome, run_store_verify);
  verify->add_option("--namespace", given.space, "Namespaces that start with these digits");
  verify->add_option("--threads", given.threads, "Threads that read and check (cores, from 2 to 8)");
  verify->add_flag("--repair", given.repair, "Move damaged files to quarantine/");

  CLI::App* gc = add_command(store, "gc", "Remove what is not needed, and count anew", given, outcome, run_store_gc);
  gc->add_option("--max-bytes", given.max_bytes,
                 "Remove quarantined, then least recently used files until at most SIZE bytes are left")
      ->type_name("SIZE");
  gc->add_option("--older-than", given.older_than, "Remove files that were not used for DURATION")
      ->type_name("DURATION");
  gc->add_flag("--quarantine", given.quarantine, "Remove all quarantined files");
  add_dry_run(*gc, given);

  CLI::App* rm = add_command(store, "rm", "Remove a namespace, or chunks of it", given, outcome, run_store_rm);
  rm->add_option("NAMESPACE", given.space, "Its first digits")->required();
  rm->add_option("KEY", given.keys, "Keys of chunks, or their first digits");
  add_dry_run(*rm, given);

  CLI::App* convert = add_command(store, "convert", "Rewrite a namespace's chunks in another stored order", given,
                                  outcome, run_store_convert);
  convert->add_option("NAMESPACE", given.space, "Its first digits")->required();
  convert->add_option("--to", given.order, "The order, without sizes: \"H N L KV D\"")->type_name("ORDER")->required();
  add_dry_run(*convert, given);
}

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

std::string short_name(const std::string& space) { return space.substr(0, 12); }

std::string heads_text(store::Heads heads) {
  return heads.count == 0 ? "-" : fmt::format("{}-{}", heads.first, heads.first + heads.count - 1);
}

std::int64_t seconds(std::int64_t nanoseconds) { return nanoseconds / 1'000'000'000; }

Json to_json(const store::SpaceSummary& summary, std::int64_t now) {
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
  out["read_files"] = summary.read_files;
  out["unread_files"] = summary.files - summary.read_files;
  const auto time = [&](const char* name, std::int64_t then) {
    out[name] = summary.files > 0 ? Json(seconds(then)) : Json();
    out[std::string(name) + "_age"] = summary.files > 0 ? Json(std::max<std::int64_t>(seconds(now - then), 0)) : Json();
  };
  time("last_use", summary.last_use);
  time("oldest_use", summary.oldest_use);
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
