// SPDX-License-Identifier: Apache-2.0
// Pictures: of the bytes of the first blocks; texts and files of all of them.
#pragma once

#include <string>
#include <string_view>

#include "kvstride/layout.h"

namespace kvstride::cli {

/// SVG with one panel for the planes and one for each axis: the same rows of bytes, coloured by the index along
/// that axis. `name` is the layout's name, or empty.
std::string draw_svg(const Layout& layout, const std::string& name);

/// As it stands in XML: control characters are blanks.
std::string escape_xml(std::string_view text);
/// Writes the file of `--svg`. Throws Error(kArgument) that says why it cannot.
void write_svg(const std::string& path, const std::string& text);

}  // namespace kvstride::cli
