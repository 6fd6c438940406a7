// SPDX-License-Identifier: Apache-2.0
// `kvstride store` on engines that are written in Python: the program's own code, in this process.
#include "../../cli/store.h"
#include "held.h"
#include "module.h"

using namespace kvstride;

void bind_store_command(nb::module_& m) {
  m.def(
      "store_command",
      [](const std::string& arguments, const EngineHandle& engine) {
        if (!engine.share()) throw Error(ErrorCode::kStore, "store: the engine is closed");
        cli::Outcome out;
        {
          const GilReleased release;
          out = cli::run_store_remote(cli::store_arguments(arguments), engine.share());
        }
        // Paths and names that others chose need not be UTF-8.
        return nb::make_tuple(nb::bytes(out.out.data(), out.out.size()), out.message, out.code);
      },
      nb::arg("arguments"), nb::arg("engine"),
      "What a command of `kvstride store` prints, its message and its exit code.");
}
