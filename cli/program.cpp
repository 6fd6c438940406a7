// SPDX-License-Identifier: Apache-2.0
// The command line: commands, their options and their help.
#include <CLI/CLI.hpp>
#include <sstream>

#include "commands.h"
#include "kvstride/error.h"
#include "kvstride/version.h"
#include "simulate.h"
#include "store.h"

namespace kvstride::cli {
namespace {

constexpr const char* kAbout =
    "Layouts of paged KV caches: list them, describe them, find an element's byte, detect them from a shape, and "
    "plan copies between them. And stores of KV chunks: list, check and clean them, simulate them over "
    "a trace of requests; check a set-up of vLLM that offloads into them.";
constexpr const char* kFooter =
    "ORDER is the name of a known layout (kvstride layouts) or layout text such as \"B KV N H D\".\n"
    "Axes: L layer, B block, N token in a block, H KV head, D dim.\n"
    "Exit codes: 0 done, 2 bad usage or bad input (one line on stderr), 3 ambiguous, 4 unknown, 5 damage found or\n"
    "a check failed, 130 interrupted.";
constexpr const char* kGeometryHelp = "Sizes: L=2,B=8,N=16,H=4,D=64[,Dv=..][,k=..]; L is 1 where not given";

using Run = Outcome (*)(const Options&);

CLI::App* add_command(CLI::App& app, const char* name, const char* about, Options& options, Outcome& outcome, Run run) {
  CLI::App* command = app.add_subcommand(name, about);
  command->add_flag("--json", options.json, "Print JSON");
  command->callback([&options, &outcome, run] { outcome = run(options); });
  return command;
}

void add_order(CLI::App& command, Options& options) {
  command.add_option("ORDER", options.order, "Name of a layout, or an order")->required();
}

void add_geometry(CLI::App& command, Options& options) {
  command.add_option("--geometry", options.geometry, kGeometryHelp)->required();
  command.add_option("--dtype", options.dtype,
                     "Dtype of planes that the order gives none: f32, f16, bf16, f8_e4m3 … (bf16)");
}

void add_detect(CLI::App& command, Options& options) {
  command.add_option("--shape", options.shape, "Shape of the tensor; given twice: of a key and of a value tensor")
      ->required()
      ->allow_extra_args(false);
  command.add_option("--strides", options.strides, "Strides in elements, as often as --shape (C-contiguous)")
      ->allow_extra_args(false);
  command.add_option("--layers", options.num_layers, "Number of layers in the tensor (1)");
  command.add_option("--blocks", options.num_blocks, "Number of blocks");
  command.add_option("--block-size", options.block_size, "Tokens in a block");
  command.add_option("--heads", options.num_kv_heads, "Number of KV heads");
  command.add_option("--head-size", options.head_size, "Length of a head");
  command.add_option("--dtype", options.dtype, "Dtype of the tensor (bf16)");
  command.add_option("--among", options.among, "Consider these layouts or engines only");
}

void add_plan(CLI::App& command, Options& options) {
  command.add_option("FROM", options.order, "Layout of the source: a name or an order")->required();
  command.add_option("TO", options.to_order, "Layout of the destination")->required();
  add_geometry(command, options);
  command.add_option("--to-geometry", options.to_geometry, "Sizes of the destination that differ from the source's");
  command.add_option("--pairs", options.pairs, "Block pairs source:destination: 0:3,4:1");
  command.add_option("--src-blocks", options.src_blocks, "Blocks of a token sequence in the source: 0,4");
  command.add_option("--dst-blocks", options.dst_blocks,
                     "Blocks of the same sequence in the destination, of any block size");
  command.add_option("--tokens", options.tokens, "Of the sequence: source first:destination first:count");
  command.add_option("--heads", options.heads, "KV heads: source first:destination first:count");
  command.add_option("--layers", options.layers, "Layers first:count");
  command.add_flag("--cast", options.cast, "Convert values where dtypes differ");
}

}  // namespace

Outcome run_program(int argc, const char* const* argv) {
  Options options;
  StoreArguments store;
  SimulateArguments simulate;
  Outcome outcome;
  CLI::App app(kAbout, "kvstride");
  app.footer(kFooter);
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", "kvstride " + std::string(version()), "Print the version");

  add_command(app, "layouts", "List the known layouts", options, outcome, run_layouts);

  CLI::App* describe = add_command(app, "describe", "Planes, strides, sizes and contiguous runs of a layout", options,
                                   outcome, run_describe);
  add_order(*describe, options);
  add_geometry(*describe, options);
  describe->add_option("--svg", options.svg, "Draw the bytes of the first blocks, coloured by axis, into this file");

  CLI::App* offset =
      add_command(app, "offset", "Print the byte at which an element lies", options, outcome, run_offset);
  add_order(*offset, options);
  add_geometry(*offset, options);
  offset->add_option("--at", options.at, "The element: plane=key,B=1,N=2,H=1,D=3[,L=0]; axes not given are 0")
      ->required();

  add_detect(*add_command(app, "detect", "What a tensor of this shape can be", options, outcome, run_detect), options);
  add_plan(*add_command(app, "plan", "Copies that bring blocks from one layout to another", options, outcome, run_plan),
           options);
  add_command(app, "info", "Version, CPU and what was built in", options, outcome, run_info);
  add_store(app, store, outcome, argc > 0 ? argv[0] : "");
  add_simulate(app, simulate, outcome);
  CLI::App* doctor = app.add_subcommand("doctor", "Check an installation and a configuration of vLLM's offloading");
  doctor->set_help_flag();  // all that follows is the Python package's
  doctor->prefix_command();
  doctor->callback([=, &outcome] { outcome = run_doctor(argc > 0 ? argv[0] : "", doctor->remaining()); });

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help, --version
    std::ostringstream out;
    std::ostringstream err;
    app.exit(asked, out, err);
    return {out.str(), "", kDone};
  } catch (const CLI::ParseError& error) {
    throw Error(ErrorCode::kArgument, std::string(error.what()) + " (see kvstride --help)");
  }
  if (app.get_subcommands().empty()) {
    throw Error(ErrorCode::kArgument,
                "give a command: layouts, describe, offset, detect, plan, info, store, simulate or doctor (see "
                "kvstride --help)");
  }
  return outcome;
}

}  // namespace kvstride::cli
