// SPDX-License-Identifier: Apache-2.0
// `kvstride info`: the version, the instruction sets (the first is used), and what was built in.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "commands.h"
#include "json.h"
#include "kvstride/cpu.h"
#include "kvstride/device.h"
#include "kvstride/registry.h"
#include "kvstride/version.h"

namespace kvstride::cli {
Outcome run_info(const Options& options) {
  const std::vector<std::string> targets = instruction_sets();
  if (options.json) {
    return {dump({{"version", version()},
                  {"cpu", targets},
                  {"matrix", matrix_unit()},
                  {"cuda", cuda_built()},
                  {"cuda_status", cuda_status()},
                  {"layouts", registry().size()}}),
            "", kDone};
  }
  return {fmt::format("version  {}\ncpu      {}\nmatrix   {}\ncuda     {}\nlayouts  {}\n", version(),
                      fmt::join(targets, " "), matrix_unit(), cuda_status(), registry().size()),
          "", kDone};
}

}  // namespace kvstride::cli
