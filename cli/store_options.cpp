// SPDX-License-Identifier: Apache-2.0
// `kvstride store`: the command line of its commands.
#include <CLI/CLI.hpp>

#include "python.h"
#include "store.h"

namespace kvstride::cli {
namespace {

constexpr const char* kAbout = "Look after a store: a directory, or what an engine holds (docs/cli-store.md)";
constexpr const char* kFooter =
    "PATH is a directory that a DirectoryTier made, or the URL of a RemoteTier's engine (s3://bucket/prefix,\n"
    "redis://host/db, mooncake://master). All commands may run while processes use it.\n"
    "NAMESPACE is the first digits of one (kvstride store ls). SIZE: 500, 64K, 10G (of 1024), 5GB (of 1000).\n"
    "DURATION: 30s, 10m, 2h, 7d.\n"
    "Exit codes: 0 done, 2 bad usage, bad input, or not all could be done (one line on stderr), 5 damage found,\n"
    "130 interrupted.";

using Run = Outcome (*)(const StoreArguments&);

/// The options of `store`, and what its commands need.
struct Commands {
  CLI::App& app;
  StoreArguments& given;
  Outcome& outcome;
  std::string called;
};

/// On what a URL names: with an engine of the library, or in Python, which this process then becomes.
Outcome run_remote(const StoreArguments& given, const std::string& called) {
  check_remote(given);
  if (store::Url::parse(given.path).scheme != "mooncake") return run_store_remote(given, store::engine_of(given.path));
  run_python("store " + given.command + " on mooncake://", "kvstride.remote.store_command", called, {to_text(given)});
}

CLI::App* add_command(const Commands& to, const char* name, const char* about, Run run) {
  CLI::App* command = to.app.add_subcommand(name, about);
  StoreArguments& given = to.given;
  command->add_option("PATH", given.path, "The store's directory or URL")->required();
  command->add_flag("--group", given.group, "Take files of other users, too (a store in group mode)");
  command->add_flag("--json", given.json, "Print JSON");
  command->callback([&given, &outcome = to.outcome, name, run, called = to.called] {
    given.command = name;
    outcome = given.path.find("://") != std::string::npos ? run_remote(given, called) : run(given);
  });
  return command;
}

void add_dry_run(CLI::App& command, StoreArguments& given) {
  command.add_flag("--dry-run", given.dry_run, "Say what would be done, and change nothing");
}

}  // namespace

void add_store(CLI::App& app, StoreArguments& given, Outcome& outcome, const std::string& called) {
  CLI::App& store = *app.add_subcommand("store", kAbout);
  store.footer(kFooter);
  store.require_subcommand(1);
  const Commands commands{store, given, outcome, called};

  CLI::App* ls = add_command(commands, "ls", "List namespaces, or chunks", run_store_ls);
  ls->add_option("--namespace", given.space, "Those that start with these digits");
  ls->add_flag("--keys", given.with_keys, "List the chunks, too");

  add_command(commands, "stat", "Totals, account, I/O engine, and what is used", run_store_stat);

  CLI::App* verify = add_command(commands, "verify", "Check all checksums", run_store_verify);
  verify->add_option("--namespace", given.space, "Namespaces that start with these digits");
  verify->add_option("--threads", given.threads, "Threads that read and check (cores, from 2 to 8)");
  verify->add_flag("--repair", given.repair, "Move damaged files to quarantine/ (objects: remove them)");

  CLI::App* gc = add_command(commands, "gc", "Remove what is not needed, and count anew", run_store_gc);
  gc->add_option("--max-bytes", given.max_bytes,
                 "Remove quarantined, then least recently used files until at most SIZE bytes are left")
      ->type_name("SIZE");
  gc->add_option("--older-than", given.older_than, "Remove files that were not used (objects: written) for DURATION")
      ->type_name("DURATION");
  gc->add_flag("--quarantine", given.quarantine, "Remove all quarantined files");
  add_dry_run(*gc, given);

  CLI::App* rm = add_command(commands, "rm", "Remove a namespace, or chunks of it", run_store_rm);
  rm->add_option("NAMESPACE", given.space, "Its first digits")->required();
  rm->add_option("KEY", given.keys, "Keys of chunks, or their first digits");
  add_dry_run(*rm, given);

  CLI::App* convert =
      add_command(commands, "convert", "Rewrite a namespace's chunks in another stored order", run_store_convert);
  convert->add_option("NAMESPACE", given.space, "Its first digits")->required();
  convert->add_option("--to", given.order, "The order, without sizes: \"H N L KV D\"")->type_name("ORDER")->required();
  add_dry_run(*convert, given);
}

}  // namespace kvstride::cli
