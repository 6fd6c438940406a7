// SPDX-License-Identifier: Apache-2.0
// What the verbs share.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "kvstride/blocks.h"
#include "plan/program.h"

namespace kvstride {

inline plan::End end_of(const Cache& cache) { return {&cache.layout(), &cache}; }

}  // namespace kvstride
