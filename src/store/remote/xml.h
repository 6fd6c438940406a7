// SPDX-License-Identifier: Apache-2.0
// The XML that S3 servers send: elements and text, from anywhere.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace kvstride::store {

/// An element that has ended: the names from the root to it, without namespace prefixes, and the text that is directly
/// in it with its entities resolved. False: it will do.
using OnElement = std::function<bool(std::span<const std::string_view> path, const std::string& text)>;

/// Whether `text` is one well-formed element (attributes are passed over) with at most a declaration before it.
/// Elements come as they end. At most 16 levels; no comments, document types, processing instructions or CDATA: S3 has
/// none.
bool scan_xml(std::string_view text, const OnElement& use);

/// The text of the first element of this name; empty: there is none, or `text` is not well-formed up to there.
std::string xml_text(std::string_view text, std::string_view name);
/// With & < > as entities.
std::string xml_escaped(std::string_view text);

}  // namespace kvstride::store
