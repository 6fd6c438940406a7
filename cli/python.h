// SPDX-License-Identifier: Apache-2.0
// Handing over to the Python package.
#pragma once

#include <string>
#include <vector>

namespace kvstride::cli {

/// Becomes main() of a module of the Python package, which finds `arguments` behind sys.argv[0]. `called` is how this
/// program was, `verb` what it was asked for. Throws Error(kArgument) where no Python has the package.
[[noreturn]] void run_python(const std::string& verb, const std::string& module, const std::string& called,
                             const std::vector<std::string>& arguments);

}  // namespace kvstride::cli
