// SPDX-License-Identifier: Apache-2.0
// What the verbs share.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "kvstride/blocks.h"
#include "plan/program.h"

namespace kvstride {

/// The pairs without those that name the engine's null block.
std::vector<Pair> without_null(std::span<const Pair> pairs, std::optional<std::int64_t> null_block);

inline plan::End end_of(const Cache& cache) { return {&cache.layout(), &cache}; }

}  // namespace kvstride
