// SPDX-License-Identifier: Apache-2.0
// XML from servers: scanning ends, paths are balanced and bounded, and what it accepts has one root and says it last.
#include <cstdlib>
#include <string>
#include <vector>

#include "fuzz.h"
#include "store/remote/xml.h"

using kvstride::store::scan_xml;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::size_t elements = 0;
  std::size_t roots = 0;
  std::size_t bytes = 0;
  const bool right = scan_xml(text, [&](std::span<const std::string_view> path, const std::string& inside) {
    fuzz::require(!path.empty() && path.size() <= 16, "an element has a path", text);
    for (const std::string_view name : path) {
      fuzz::require(!name.empty() && name.find_first_of(" <>&/=:") == std::string_view::npos, "names are names", name);
      fuzz::require(name.data() >= text.data() && name.data() + name.size() <= text.data() + text.size(),
                    "names lie in the text", name);
    }
    fuzz::require(roots == 0, "nothing comes after the root", text);
    roots += path.size() == 1 ? 1 : 0;
    bytes += inside.size();
    ++elements;
    return true;
  });
  fuzz::require(bytes <= size, "entities are longer than what they stand for", text);
  fuzz::require(!right || roots == 1, "one root", text);
  fuzz::require(elements <= size / 4, "an element takes four bytes at least", text);

  // Any text comes back from an element, and the first element of a name is found where scanning gets to it.
  const std::string escaped = "<a><b>" + kvstride::store::xml_escaped(text) + "</b></a>";
  std::string back;
  fuzz::require(scan_xml(escaped,
                         [&](std::span<const std::string_view> path, const std::string& inside) {
                           if (path.size() == 2) back = inside;
                           return true;
                         }),
                "escaped text is text", text);
  fuzz::require(back == text && kvstride::store::xml_text(escaped, "b") == text, "escaped text comes back", text);
  return 0;
}
