// SPDX-License-Identifier: Apache-2.0
// Parser of the layout notation; every error points at its column.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstring>

#include "kvstride/error.h"
#include "kvstride/order.h"
#include "layout/internal.h"

namespace kvstride {
namespace {

constexpr int kMaxDepth = 8;
constexpr std::size_t kMaxText = 4096;

struct Token {
  enum Kind { kName, kNumber, kSign, kEnd } kind = kEnd;
  std::string_view text;
  std::size_t begin = 0;
  std::size_t end = 0;
};

[[noreturn]] void fail(std::size_t at, const std::string& what) {
  throw Error(ErrorCode::kLayout, fmt::format("layout, column {}: {}", at + 1, what), static_cast<int>(at + 1));
}

bool name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool digit(char c) { return c >= '0' && c <= '9'; }
bool blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

std::vector<Token> tokenize(std::string_view text) {
  if (text.size() > kMaxText) fail(kMaxText, fmt::format("longer than {} characters", kMaxText));
  std::vector<Token> tokens;
  std::size_t i = 0;
  while (i < text.size()) {
    const char c = text[i];
    if (blank(c)) {
      ++i;
      continue;
    }
    std::size_t j = i + 1;
    Token::Kind kind = Token::kSign;
    if (name_start(c)) {
      kind = Token::kName;
      while (j < text.size() && (name_start(text[j]) || digit(text[j]))) ++j;
    } else if (digit(c)) {
      kind = Token::kNumber;
      while (j < text.size() && digit(text[j])) ++j;
    } else if (std::strchr("{}:,%/@[]|", c) == nullptr || c == '\0') {
      fail(i, c >= ' ' && c <= '~' ? fmt::format("unexpected character '{}'", c) : std::string("unexpected byte"));
    }
    tokens.push_back({kind, text.substr(i, j - i), i, j});
    i = j;
  }
  tokens.push_back({Token::kEnd, "", text.size(), text.size()});
  return tokens;
}

std::optional<Axis> axis_of(std::string_view text) {
  if (text.size() != 1) return std::nullopt;
  switch (text[0]) {
    case 'L': return Axis::kLayer;
    case 'B': return Axis::kBlock;
    case 'N': return Axis::kToken;
    case 'H': return Axis::kHead;
    case 'D': return Axis::kDim;
    default: return std::nullopt;
  }
}

/// vLLM's six layouts of all layers in one allocation (vLLM 0.29 and newer); C = KV D.
constexpr std::string_view kLetterOrders[] = {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"};

/// Words with a meaning of their own.
bool reserved(std::string_view text) {
  return axis_of(text) || text == "KV" || dtype_from_name(text) ||
         std::find(std::begin(kLetterOrders), std::end(kLetterOrders), text) != std::end(kLetterOrders);
}

bool holds_kv(const Section& section) {
  return section.kv || std::any_of(section.members.begin(), section.members.end(),
                                   [](const Member& member) { return holds_kv(member.body); });
}

class Parser {
 public:
  explicit Parser(std::string_view text) : tokens_(tokenize(text)) {}

  std::vector<Part> parse() {
    std::vector<Part> parts;
    do {
      parts.push_back(part());
    } while (accept("|"));
    if (peek().kind != Token::kEnd) fail(peek().begin, fmt::format("unexpected '{}'", peek().text));
    return parts;
  }

 private:
  const Token& peek(std::size_t ahead = 0) const { return tokens_[std::min(i_ + ahead, tokens_.size() - 1)]; }
  Token next() {
    const Token token = peek();
    if (token.kind != Token::kEnd) ++i_;
    return token;
  }
  bool accept(std::string_view sign) {
    if (peek().kind != Token::kSign || peek().text != sign) return false;
    ++i_;
    return true;
  }
  /// A sign that touches the token before it.
  bool accept_adjacent(std::string_view sign) {
    if (i_ == 0 || peek().begin != tokens_[i_ - 1].end) return false;
    return accept(sign);
  }
  void expect(std::string_view sign, const std::string& after) {
    if (!accept(sign)) fail(peek().begin, fmt::format("expected '{}' after {}", sign, after));
  }

  std::int64_t number(const char* what) {
    const Token token = next();
    if (token.kind != Token::kNumber) fail(token.begin, fmt::format("expected {}", what));
    std::int64_t value = 0;
    for (const char c : token.text) {
      if (__builtin_mul_overflow(value, std::int64_t{10}, &value) ||
          __builtin_add_overflow(value, std::int64_t{c - '0'}, &value)) {
        fail(token.begin, fmt::format("{} does not fit 63 bits", what));
      }
    }
    return value;
  }

  Size size(const char* what) {
    const Token token = peek();
    if (token.kind == Token::kName) {
      next();
      if (axis_of(token.text) || token.text == "KV") {
        fail(token.begin, fmt::format("{} is a number or a symbol, not '{}'", what, token.text));
      }
      return std::string(token.text);
    }
    const std::int64_t value = number(what);
    if (value == 0) fail(token.begin, fmt::format("{} is 0", what));
    return value;
  }

  Extent extent() {
    Extent out;
    const Token token = peek();
    if (const auto axis = axis_of(token.text); axis && token.kind == Token::kName) {
      next();
      out.axis = axis;
      expect("/", "the axis");
      const std::size_t at = peek().begin;
      out.divisor = number("a divisor");
      if (out.divisor == 0) fail(at, "a divisor is 0");
      return out;
    }
    out.size = size("an extent");
    return out;
  }

  Term term(Axis axis) {
    Term out{};
    out.axis = axis;
    out.column = static_cast<int>(tokens_[i_ - 1].begin + 1);
    if (accept_adjacent("%")) out.modulus = size("a modulus");
    if (accept_adjacent("/")) out.divisor = size("a divisor");
    if (accept_adjacent("[")) {
      out.extent = extent();
      expect("]", "an extent");
    }
    if (accept_adjacent("@")) out.stride = number("a stride in bytes");
    return out;
  }

  std::vector<Member> members(int depth) {
    std::vector<Member> out;
    do {
      const Token name = next();
      if (name.kind != Token::kName) fail(name.begin, "expected the name of a member, as in `key: N H D`");
      if (reserved(name.text)) fail(name.begin, fmt::format("'{}' cannot be a name", name.text));
      Member member;
      member.name = std::string(name.text);
      member.column = static_cast<int>(name.begin + 1);
      if (accept("@")) member.offset = number("an offset in bytes");
      expect(":", fmt::format("'{}'", name.text));
      member.body = section(depth + 1);
      out.push_back(std::move(member));
    } while (accept(","));
    expect("}", "the last member");
    return out;
  }

  Section section(int depth) {
    if (depth > kMaxDepth) fail(peek().begin, fmt::format("nested deeper than {}", kMaxDepth));
    Section out;
    const std::size_t start = peek().begin;
    out.column = static_cast<int>(start + 1);
    while (true) {
      const Token token = peek();
      if (token.kind == Token::kName && token.text == "KV") {
        next();
        out.kv = true;
        if (accept_adjacent("@")) out.kv_stride = number("a stride in bytes");
        Section body = section(depth + 1);
        if (holds_kv(body)) fail(token.begin, "KV inside KV");
        for (const char* name : {"key", "value"}) {
          Member member;
          member.name = name;
          member.body = body;
          member.column = static_cast<int>(token.begin + 1);
          out.members.push_back(std::move(member));
        }
        break;
      }
      if (accept("{")) {
        out.members = members(depth);
        break;
      }
      if (token.kind != Token::kName) break;
      if (const auto dtype = dtype_from_name(token.text)) {
        next();
        out.dtype = dtype;
        if (peek().kind == Token::kName) fail(peek().begin, "a dtype ends its part of the layout");
        break;
      }
      const auto axis = axis_of(token.text);
      if (!axis) {
        fail(token.begin, fmt::format("unknown term '{}': terms are L B N H D, KV, {{…}} or a dtype, "
                                      "separated by blanks",
                                      token.text));
      }
      next();
      out.terms.push_back(term(*axis));
    }
    if (!out.members.empty() && !out.kv) {
      if (const auto dtype = dtype_from_name(peek().text); dtype && peek().kind == Token::kName) {
        next();
        out.dtype = dtype;
      }
    }
    // A member may be one element (`scale: f32`), a whole layout may not.
    if (depth == 0 && out.terms.empty() && out.members.empty()) fail(start, "an empty layout");
    return out;
  }

  Part part() {
    Part out;
    const Token token = peek();
    out.column = out.body.column = static_cast<int>(token.begin + 1);
    for (const std::string_view letters : kLetterOrders) {
      if (token.kind == Token::kName && token.text == letters) {
        next();
        for (const char c : letters.substr(0, 4)) {
          Term term{};
          term.axis = *axis_of(std::string_view(&c, 1));
          term.column = static_cast<int>(token.begin + 1);
          out.body.terms.push_back(term);
        }
        Term dim{};
        dim.axis = Axis::kDim;
        out.body.kv = true;
        for (const char* name : {"key", "value"}) {
          Member member;
          member.name = name;
          member.body.terms.push_back(dim);
          out.body.members.push_back(std::move(member));
        }
        return out;
      }
    }
    if (token.kind == Token::kName && (token.text == "NHD" || token.text == "HND") && i_ == 0 &&
        peek(1).kind == Token::kEnd) {
      fail(token.begin, fmt::format("'{}' means different bytes in different releases; name one of {}", token.text,
                                    rows_called(token.text)));
    }
    if (token.kind == Token::kName && peek(1).kind == Token::kSign && peek(1).text == ":") {
      if (reserved(token.text)) {
        fail(token.begin, fmt::format("'{}' cannot be a name", token.text));
      }
      out.name = std::string(token.text);
      next();
      next();
    }
    out.body = section(0);
    return out;
  }

  std::vector<Token> tokens_;
  std::size_t i_ = 0;
};

/// `{key: X, value: X}` is `KV X`, but never KV inside KV, which no text can say.
void fold_alike(Section& section, bool inside = false) {
  for (Member& member : section.members) fold_alike(member.body, inside || section.kv);
  if (inside || section.kv || section.members.size() != 2) return;
  Member& key = section.members[0];
  Member& value = section.members[1];
  if (key.name != "key" || value.name != "value" || key.offset || holds_kv(key.body)) return;
  if (print_section(key.body) != print_section(value.body)) return;
  if (value.offset) return;  // kept as written: its size is not 2 × the offset
  section.kv = true;
}

}  // namespace

Order Order::parse(std::string_view text) {
  Order out;
  out.parts_ = Parser(text).parse();
  for (Part& part : out.parts_) fold_alike(part.body);
  out.text_ = std::string(text);
  for (char& c : out.text_) c = blank(c) ? ' ' : c;  // messages are one line
  return out;
}

}  // namespace kvstride
