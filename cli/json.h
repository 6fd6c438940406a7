// SPDX-License-Identifier: Apache-2.0
// JSON of the things that several commands print.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "kvstride/geometry.h"

namespace kvstride::cli {

using Json = nlohmann::ordered_json;

/// The arguments of Python's `kvstride.Geometry`.
Json to_json(const Geometry& geometry);
/// Indented, with a line end. Bytes of the user that are not UTF-8 are replaced.
std::string dump(const Json& json);

}  // namespace kvstride::cli
