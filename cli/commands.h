// SPDX-License-Identifier: Apache-2.0
// The commands of the program: what each is given, and what it leaves.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace kvstride::cli {

/// Exit codes of every command.
enum ExitCode : int {
  kDone = 0,
  kBadInput = 2,
  kAmbiguousShape = 3,
  kUnknownShape = 4,
  kDamaged = 5,
  kInterrupted = 130
};

/// What a command leaves behind. Errors of the input are thrown as kvstride::Error instead.
struct Outcome {
  std::string out;      ///< for standard output, complete lines
  std::string message;  ///< for standard error, one line without its end; empty for none
  int code = kDone;
};

/// Option values as they were typed; each command parses what it uses (parse.h).
struct Options {
  std::string order;     ///< ORDER: a registry name or an order; FROM of `plan`
  std::string to_order;  ///< TO of `plan`
  std::string geometry;
  std::optional<std::string> to_geometry;
  std::optional<std::string> dtype;
  std::string at;
  std::optional<std::string> svg;
  std::vector<std::string> shape;
  std::vector<std::string> strides;
  std::optional<std::string> num_layers;
  std::optional<std::string> num_blocks;
  std::optional<std::string> block_size;
  std::optional<std::string> num_kv_heads;
  std::optional<std::string> head_size;
  std::vector<std::string> among;
  std::optional<std::string> pairs;
  std::optional<std::string> src_blocks;
  std::optional<std::string> dst_blocks;
  std::optional<std::string> tokens;
  std::optional<std::string> heads;
  std::optional<std::string> layers;
  bool cast = false;
  bool json = false;
};

Outcome run_layouts(const Options& options);
Outcome run_describe(const Options& options);
Outcome run_offset(const Options& options);
Outcome run_detect(const Options& options);
Outcome run_plan(const Options& options);
Outcome run_info(const Options& options);
/// Becomes the doctor of the Python package, which gets `arguments`: returns by throwing kvstride::Error only. `called`
/// is how this program was.
Outcome run_doctor(const std::string& called, const std::vector<std::string>& arguments);

/// Reads the command line and runs its command. Throws kvstride::Error for bad input.
Outcome run_program(int argc, const char* const* argv);

}  // namespace kvstride::cli
