// SPDX-License-Identifier: Apache-2.0
// Namespaces as canonical text; the format is in docs/formats/identity.md.
#include "kvstride/identity.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "kvstride/error.h"
#include "store/sha256.h"

namespace kvstride {
namespace {

constexpr std::string_view kFirstLine = "kvstride-namespace 1\n";
constexpr std::string_view kPlane = "plane.";
constexpr std::int64_t kMaxSize = std::int64_t{1} << 48;
constexpr std::size_t kMaxText = 4096;
constexpr std::size_t kMaxPlanes = 64;
constexpr std::size_t kMaxPlaneName = 64;
constexpr std::string_view kDigits = "0123456789ABCDEF";

[[noreturn]] void fail(const std::string& message) { throw Error(ErrorCode::kArgument, "namespace: " + message); }

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_word(char c) { return is_letter(c) || is_digit(c) || c == '_'; }
bool is_plain(char c) { return is_word(c) || std::string_view("./:+@,-").find(c) != std::string_view::npos; }

std::string encode(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (is_plain(c)) {
      out += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      out += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return out;
}

std::string decode(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    const auto high = kDigits.find(i + 1 < text.size() ? text[i + 1] : ' ');
    const auto low = kDigits.find(i + 2 < text.size() ? text[i + 2] : ' ');
    if (high == std::string_view::npos || low == std::string_view::npos) fail("% without two digits of hex");
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return out;
}

/// One line of at most some bytes of a text that may hold anything.
std::string shown(std::string_view text) {
  constexpr std::size_t kMost = 60;
  return "'" + encode(text.substr(0, kMost)) + (text.size() > kMost ? "'…" : "'");
}

/// Lower case, without blanks and control characters at both ends.
std::string bare(std::string_view text) {
  const auto blank = [](char c) { return static_cast<unsigned char>(c) <= ' ' || c == '\x7F'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

/// Without overlong forms, surrogates and what is beyond U+10FFFF.
bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto at = [&](std::size_t k) { return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0U; };
    const unsigned first = at(0);
    const std::size_t more = first < 0x80 ? 0 : first >> 5 == 6 ? 1 : first >> 4 == 14 ? 2 : first >> 3 == 30 ? 3 : 4;
    if (more == 4) return false;
    unsigned code = more == 0 ? first : first & (0x3FU >> more);
    for (std::size_t k = 1; k <= more; ++k) {
      if (at(k) >> 6 != 2) return false;
      code = code << 6 | (at(k) & 0x3F);
    }
    constexpr unsigned kLeast[] = {0, 0x80, 0x800, 0x10000};
    if (code < kLeast[more] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return false;
    i += more + 1;
  }
  return true;
}

void check_text(const char* field, std::string_view text) {
  if (text.empty()) fail(fmt::format("{} is empty", field));
  if (text.size() > kMaxText) fail(fmt::format("{} has {} bytes, may have {}", field, text.size(), kMaxText));
  if (!is_utf8(text)) fail(fmt::format("{} is {}, which is not UTF-8", field, shown(text)));
  if (bare(text).empty()) fail(fmt::format("{} is {}, nothing but blanks", field, shown(text)));
  if (bare(text) == "auto") fail(fmt::format("{} is {}; say what it stands for", field, shown(text)));
}

/// Names that say something else tomorrow, or what is printed where none is known.
void check_fixed(const char* field, std::string_view text, std::string_view name) {
  constexpr std::string_view kMoving[] = {"main",   "master",  "trunk", "head",    "tip",  "latest", "default",
                                          "stable", "nightly", "dev",   "develop", "none", "null",   "unknown"};
  if (std::find(std::begin(kMoving), std::end(kMoving), bare(name)) == std::end(kMoving)) return;
  fail(fmt::format("{} is {}, which names no fixed weights; give a commit or a fingerprint", field, shown(text)));
}

/// Raw texts are lists such as `order=…,isa=…`.
void check_raw(std::string_view text) {
  for (auto i = text.begin(); i != text.end();) {
    const auto end = std::find_if_not(i, text.end(), is_word);
    if (bare({i, end}) == "auto")
      fail(fmt::format("raw is {}, which holds 'auto'; say what it stands for", shown(text)));
    i = std::find_if(end, text.end(), is_word);
  }
}

void check_size(const std::string& field, std::int64_t value, std::int64_t least) {
  if (value >= least && value <= kMaxSize) return;
  fail(fmt::format("{} is {}, must be from {} to {}", field, value, least, kMaxSize));
}

void check_plane(const std::string& name, const PlaneSpec& plane) {
  const bool word = !name.empty() && name.size() <= kMaxPlaneName && !is_digit(name[0]) &&
                    std::all_of(name.begin(), name.end(), is_word);
  if (!word || bare(name) == "auto") {
    fail(fmt::format("planes: {} is no plane's name, as key and key_scale are", shown(name)));
  }
  if (plane.dtype > DType::kI32) fail(fmt::format("planes: dtype of {} is {}", name, static_cast<int>(plane.dtype)));
  check_size("planes: dim of " + name, *plane.dim, 1);
}

/// The fields as the text has them, checked.
NamespaceFields canonical(NamespaceFields fields) {
  check_text("model", fields.model);
  check_text("revision", fields.revision);
  check_fixed("revision", fields.revision, std::string_view(fields.revision).substr(fields.revision.rfind('/') + 1));
  if (fields.adapter) {
    check_text("adapter", *fields.adapter);
    check_fixed("adapter", *fields.adapter, *fields.adapter);
  }
  check_text("salt_policy", fields.salt_policy);
  if (fields.raw) {
    check_text("raw", *fields.raw);
    check_raw(*fields.raw);
  }
  check_size("num_layers", fields.num_layers, 1);
  check_size("first_layer", fields.first_layer, 0);
  check_size("num_kv_heads", fields.num_kv_heads, 1);
  check_size("head_size", fields.head_size, 1);
  if (fields.value_head_size) check_size("value_head_size", *fields.value_head_size, 1);
  check_size("block_size", fields.block_size, 1);
  check_size("group", fields.group, 0);
  if (fields.planes.empty()) fail("planes are missing; give at least one, such as key: bf16");
  if (fields.planes.size() > kMaxPlanes) fail(fmt::format("{} planes, may be {}", fields.planes.size(), kMaxPlanes));
  const std::int64_t value_dim = fields.value_head_size.value_or(fields.head_size);
  for (auto& [name, plane] : fields.planes) {
    if (!plane.dim) plane.dim = name.rfind("value", 0) == 0 ? value_dim : fields.head_size;
    check_plane(name, plane);
  }
  // Made from the planes again, so that fields are equal where texts are.
  fields.value_head_size.reset();
  if (const auto value = fields.planes.find("value"); value != fields.planes.end()) {
    if (value->second.dim != fields.head_size) fields.value_head_size = value->second.dim;
  }
  return fields;
}

std::string render(const NamespaceFields& fields) {
  std::string out(kFirstLine);
  const auto text = [&](const char* name, const std::string& value) {
    out += fmt::format("{}={}\n", name, encode(value));
  };
  const auto number = [&](const char* name, std::int64_t value) { out += fmt::format("{}={}\n", name, value); };
  text("model", fields.model);
  text("revision", fields.revision);
  if (fields.adapter) text("adapter", *fields.adapter);
  for (const auto& [name, plane] : fields.planes) {
    out += fmt::format("{}{}={}[{}]\n", kPlane, name, name_of(plane.dtype), *plane.dim);
  }
  number("num_layers", fields.num_layers);
  number("first_layer", fields.first_layer);
  number("num_kv_heads", fields.num_kv_heads);
  number("head_size", fields.head_size);
  number("block_size", fields.block_size);
  number("group", fields.group);
  if (fields.raw) text("raw", *fields.raw);
  text("salt_policy", fields.salt_policy);
  return out;
}

std::optional<std::int64_t> to_number(std::string_view text) {
  std::int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (text.empty() || !is_digit(text[0]) || error != std::errc() || end != text.data() + text.size()) return {};
  return out;
}

/// Whatever order and number the lines have: writing the fields again tells whether the text was canonical.
NamespaceFields read(std::string_view text) {
  if (text.substr(0, kFirstLine.size()) != kFirstLine) {
    fail(fmt::format("the first line of {} is not {}", shown(text), kFirstLine.substr(0, kFirstLine.size() - 1)));
  }
  text.remove_prefix(kFirstLine.size());
  NamespaceFields out;
  const std::map<std::string_view, std::int64_t*> numbers{
      {"num_layers", &out.num_layers}, {"first_layer", &out.first_layer}, {"num_kv_heads", &out.num_kv_heads},
      {"head_size", &out.head_size},   {"block_size", &out.block_size},   {"group", &out.group}};
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    if (line.size() == text.size()) fail(fmt::format("the last line, {}, has no end", shown(line)));
    text.remove_prefix(line.size() + 1);
    const auto equals = line.find('=');
    if (equals == std::string_view::npos) fail(fmt::format("the line {} has no '='", shown(line)));
    const std::string_view name = line.substr(0, equals);
    const std::string_view value = line.substr(equals + 1);
    if (name.substr(0, kPlane.size()) == kPlane) {
      const std::string_view plane = name.substr(kPlane.size());
      out.planes.insert_or_assign(std::string(plane), PlaneSpec::parse(value, plane));
    } else if (const auto size = numbers.find(name); size != numbers.end()) {
      const auto parsed = to_number(value);
      if (!parsed) fail(fmt::format("{} is {}, no number", name, shown(value)));
      *size->second = *parsed;
    } else if (name == "model") {
      out.model = decode(value);
    } else if (name == "revision") {
      out.revision = decode(value);
    } else if (name == "adapter") {
      out.adapter = decode(value);
    } else if (name == "salt_policy") {
      out.salt_policy = decode(value);
    } else if (name == "raw") {
      out.raw = decode(value);
    } else {
      fail(fmt::format("the line {} has no known field", shown(line)));
    }
  }
  return out;
}

}  // namespace

PlaneSpec PlaneSpec::parse(std::string_view text, std::string_view plane) {
  const auto at = [&] { return fmt::format("namespace: planes: {} is {}", shown(plane), shown(text)); };
  const auto open = text.find('[');
  const std::string_view name = text.substr(0, open);
  PlaneSpec out;
  if (open != std::string_view::npos) {
    if (text.back() == ']') out.dim = to_number(text.substr(open + 1, text.size() - open - 2));
    if (!out.dim) throw Error(ErrorCode::kArgument, at() + ", expected a form such as bf16 or bf16[512]");
  }
  if (bare(name) == "auto") throw Error(ErrorCode::kArgument, at() + "; say which dtype it stands for");
  const auto dtype = dtype_from_name(name);
  if (!dtype) throw Error(ErrorCode::kDType, at() + ", none of " + std::string(dtype_names()));
  out.dtype = *dtype;
  return out;
}

Namespace::Namespace(NamespaceFields fields)
    : fields_(canonical(std::move(fields))), text_(render(fields_)), digest_(store::sha256(text_)) {}

Namespace Namespace::parse(std::string_view text) {
  try {
    Namespace out(read(text));
    if (out.text_ == text) return out;
    const auto common = std::mismatch(text.begin(), text.end(), out.text_.begin(), out.text_.end()).first;
    fail(fmt::format("line {} is not in canonical form", std::count(text.begin(), common, '\n') + 1));
  } catch (const Error& error) {
    throw Error(ErrorCode::kArgument, fmt::format("{} (in the text of a namespace)", error.what()));
  }
}

}  // namespace kvstride
