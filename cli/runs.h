// SPDX-License-Identifier: Apache-2.0
// Which bytes of a block lie together.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "json.h"
#include "kvstride/layout.h"

namespace kvstride::cli {

/// Contiguous pieces of a block in one tensor: number by length in bytes.
using Runs = std::map<std::int64_t, std::int64_t>;

/// What a block id owns in each tensor of a layer; nothing where a block has too many runs to count.
std::optional<std::vector<Runs>> runs_of_block(const Layout& layout);
/// The same for the elements of one plane.
Runs runs_of_plane(const Plane& plane);

/// `16 × 256 bytes`.
std::string to_text(const Runs& runs);
Json to_json(const Runs& runs);

}  // namespace kvstride::cli
