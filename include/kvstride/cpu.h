// SPDX-License-Identifier: Apache-2.0
// Which instruction set the CPU kernels use.
#pragma once

#include <string>
#include <vector>

namespace kvstride {

/// Instruction sets that this build and this machine have, best first, by Highway's names (AVX3_DL, AVX3, AVX2, SSE4,
/// SSSE3, NEON, SCALAR …). The verbs use the first, unless the environment variable KVSTRIDE_CPU_TARGET names another
/// one when the process starts; results are the same bytes with each. A name that is not among them is reported on
/// standard error and ignored.
std::vector<std::string> instruction_sets();

}  // namespace kvstride
