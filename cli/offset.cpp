// SPDX-License-Identifier: Apache-2.0
// `kvstride offset`: the byte at which an element lies.
#include <fmt/format.h>

#include "commands.h"
#include "json.h"
#include "parse.h"

namespace kvstride::cli {

Outcome run_offset(const Options& options) {
  const Layout layout = parse_layout(options.order, parse_sizes(options.geometry, options.dtype), "--geometry");
  const Element element = parse_element(options.at, "--at");
  const Location at = layout.offset(element.plane, element.index);
  if (options.json) return {dump({{"tensor", at.tensor}, {"offset", at.byte}}), "", kDone};
  return {fmt::format("{}\n", at.byte), "", kDone};
}

}  // namespace kvstride::cli
