// SPDX-License-Identifier: Apache-2.0
// A picture of the bytes of the first blocks.
#pragma once

#include <string>

#include "kvstride/layout.h"

namespace kvstride::cli {

/// SVG with one panel for the planes and one for each axis: the same rows of bytes, coloured by the index along
/// that axis. `name` is the layout's name, or empty.
std::string draw_svg(const Layout& layout, const std::string& name);

}  // namespace kvstride::cli
