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

/// What multiplies bf16 in attention over many query rows: `amx` where the processor, the kernel and
/// KVSTRIDE_CPU_TARGET allow it, `emulated` or `none` as KVSTRIDE_MATRIX says or where there is nothing. Asks Linux for
/// the use of AMX, as the first such call of attention() does; a signal stack of less than about 12 KB is refused from
/// then on.
std::string matrix_unit();

}  // namespace kvstride
