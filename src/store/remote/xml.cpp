// SPDX-License-Identifier: Apache-2.0
// A scanner of XML without what S3 does not use. One pass, memory in proportion to one element's text.
#include "store/remote/xml.h"

#include <cstdint>
#include <vector>

namespace kvstride::store {
namespace {

constexpr std::size_t kMaxDepth = 16;

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }
bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
         c == '.' || c == ':' || static_cast<unsigned char>(c) >= 0x80;
}

void put_utf8(std::uint32_t point, std::string& out) {
  const auto put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
  if (point < 0x80) {
    put(point);
  } else if (point < 0x800) {
    put(0xC0 | point >> 6);
    put(0x80 | (point & 0x3F));
  } else if (point < 0x10000) {
    put(0xE0 | point >> 12);
    put(0x80 | (point >> 6 & 0x3F));
    put(0x80 | (point & 0x3F));
  } else {
    put(0xF0 | point >> 18);
    put(0x80 | (point >> 12 & 0x3F));
    put(0x80 | (point >> 6 & 0x3F));
    put(0x80 | (point & 0x3F));
  }
}

/// What &name; stands for is put to `out`; false: nothing.
bool put_entity(std::string_view name, std::string& out) {
  constexpr struct {
    std::string_view name;
    char c;
  } kNamed[] = {{"lt", '<'}, {"gt", '>'}, {"amp", '&'}, {"quot", '"'}, {"apos", '\''}};
  for (const auto& one : kNamed) {
    if (one.name != name) continue;
    out += one.c;
    return true;
  }
  if (name.size() < 2 || name[0] != '#') return false;
  const bool hex = name[1] == 'x';
  name.remove_prefix(hex ? 2 : 1);
  std::uint32_t point = 0;
  for (const char c : name) {
    std::uint32_t digit = 16;
    if (c >= '0' && c <= '9') digit = static_cast<std::uint32_t>(c - '0');
    if (hex && c >= 'a' && c <= 'f') digit = static_cast<std::uint32_t>(c - 'a') + 10;
    if (hex && c >= 'A' && c <= 'F') digit = static_cast<std::uint32_t>(c - 'A') + 10;
    if (digit >= (hex ? 16U : 10U)) return false;
    point = point * (hex ? 16 : 10) + digit;
    if (point > 0x10FFFF) return false;
  }
  if (name.empty() || point == 0 || (point >= 0xD800 && point < 0xE000)) return false;
  put_utf8(point, out);
  return true;
}

class Scanner {
 public:
  Scanner(std::string_view text, const OnElement& use) : rest_(text), use_(use) {}

  bool run() {
    skip_blanks();
    if (take("<?xml")) {
      const std::size_t end = rest_.find("?>");
      if (end == std::string_view::npos || rest_.substr(0, end).find('<') != std::string_view::npos) return false;
      rest_.remove_prefix(end + 2);
      skip_blanks();
    }
    do {
      if (!(path_.empty() ? tag() : text() && tag())) return false;
    } while (!path_.empty() && !enough_);
    skip_blanks();
    return enough_ || rest_.empty();
  }

 private:
  void skip_blanks() {
    while (!rest_.empty() && is_blank(rest_.front())) rest_.remove_prefix(1);
  }
  bool take(std::string_view mark) {
    if (rest_.substr(0, mark.size()) != mark) return false;
    rest_.remove_prefix(mark.size());
    return true;
  }
  std::string_view name() {
    std::size_t length = 0;
    while (length < rest_.size() && is_name(rest_[length])) ++length;
    const std::string_view out = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return out;
  }
  static std::string_view local(std::string_view whole) { return whole.substr(whole.find(':') + 1); }  // npos + 1 = 0

  bool text() {
    const std::size_t end = rest_.find('<');
    if (end == std::string_view::npos) return false;
    std::string_view raw = rest_.substr(0, end);
    rest_.remove_prefix(end);
    while (!raw.empty()) {
      const std::size_t mark = raw.find('&');
      texts_.back().append(raw.substr(0, mark));
      if (mark == std::string_view::npos) break;
      raw.remove_prefix(mark + 1);
      const std::size_t semicolon = raw.substr(0, 12).find(';');
      if (semicolon == std::string_view::npos || !put_entity(raw.substr(0, semicolon), texts_.back())) return false;
      raw.remove_prefix(semicolon + 1);
    }
    return true;
  }

  bool attributes() {
    for (;;) {
      const bool apart = !rest_.empty() && is_blank(rest_.front());
      skip_blanks();
      if (rest_.empty() || rest_.front() == '>' || rest_.front() == '/') return !rest_.empty();
      if (!apart || name().empty()) return false;
      skip_blanks();
      if (!take("=")) return false;
      skip_blanks();
      const std::string_view quote = rest_.substr(0, 1);
      if (quote != "\"" && quote != "'") return false;
      rest_.remove_prefix(1);
      const std::size_t end = rest_.find(quote);
      if (end == std::string_view::npos || rest_.substr(0, end).find('<') != std::string_view::npos) return false;
      rest_.remove_prefix(end + 1);
    }
  }

  bool tag() {
    if (!take("<")) return false;
    if (take("/")) {
      if (path_.empty() || name() != whole_.back()) return false;
      skip_blanks();
      return take(">") && end_element();
    }
    const std::string_view whole = name();
    if (local(whole).empty() || local(whole).find(':') != whole.npos || path_.size() == kMaxDepth || !attributes())
      return false;
    path_.push_back(local(whole));
    whole_.push_back(whole);
    texts_.emplace_back();
    if (take("/")) return take(">") && end_element();
    return take(">");
  }
  bool end_element() {
    enough_ = !use_(path_, texts_.back());
    path_.pop_back();
    whole_.pop_back();
    texts_.pop_back();
    return true;
  }

  std::string_view rest_;
  const OnElement& use_;
  std::vector<std::string_view> path_;
  std::vector<std::string_view> whole_;  ///< with prefixes
  std::vector<std::string> texts_;
  bool enough_ = false;
};

}  // namespace

bool scan_xml(std::string_view text, const OnElement& use) { return Scanner(text, use).run(); }

std::string xml_text(std::string_view text, std::string_view name) {
  std::string out;
  scan_xml(text, [&](std::span<const std::string_view> path, const std::string& inside) {
    if (path.back() != name) return true;
    out = inside;
    return false;
  });
  return out;
}

std::string xml_escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace kvstride::store
