// SPDX-License-Identifier: Apache-2.0
// URLs of engines.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "kvstride/error.h"
#include "store/remote/engine.h"

namespace kvstride::store {
namespace {

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kArgument, "URL of a store: " + why); }

/// Percent signs decoded. `part` is named in errors, and may be a password's.
std::string decoded(std::string_view text, const char* part) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '%') {
      const int high = i + 2 < text.size() ? digit(text[i + 1]) : -1;
      const int low = i + 2 < text.size() ? digit(text[i + 2]) : -1;
      if (high < 0 || low < 0) refuse(fmt::format("a % in the {} is not followed by two hex digits", part));
      c = static_cast<char>(high * 16 + low);
      i += 2;
    }
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) refuse(fmt::format("a control character in the {}", part));
    out += c;
  }
  return out;
}

/// What stands before `mark`, which goes with it; or all.
std::string_view take(std::string_view& text, std::string_view mark) {
  const std::size_t at = text.find(mark);
  const std::string_view out = text.substr(0, at);
  text = at == std::string_view::npos ? std::string_view() : text.substr(at + mark.size());
  return out;
}

}  // namespace

Url Url::parse(const std::string& text) {
  Url out;
  std::string_view rest = text;
  const std::size_t colon = rest.find("://");
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '+'; };
  if (colon == std::string_view::npos || colon == 0 ||
      !std::all_of(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(colon), is_letter)) {
    refuse("it must be scheme://host/path, such as s3://bucket/prefix");
  }
  out.scheme = take(rest, "://");
  std::string_view front = take(rest, "?");
  if (rest.find('#') != std::string_view::npos || front.find('#') != std::string_view::npos) refuse("a # in it");
  // Before anything is quoted: what looks like a port or a path may be a piece of a password.
  const std::size_t slash = front.find('/');
  if (rest.find('@') != std::string_view::npos ||
      (slash != std::string_view::npos && front.find('@', slash) != std::string_view::npos)) {
    refuse("an @ behind the first / or ?: in a password / is written %2F, ? %3F and @ %40; elsewhere @ is %40");
  }
  while (!rest.empty()) {
    std::string_view value = take(rest, "&");
    if (value.empty()) continue;
    const std::string name = decoded(take(value, "="), "name of an option");
    const auto same = [&](const auto& other) { return other.first == name; };
    if (std::any_of(out.options.begin(), out.options.end(), same)) {
      refuse(fmt::format("the option {} is given twice", name));
    }
    out.options.emplace_back(name, decoded(value, "value of an option"));
  }
  std::string_view authority = take(front, "/");
  out.path = decoded(front, "path");
  if (const std::size_t at = authority.rfind('@'); at != std::string_view::npos) {
    std::string_view who = authority.substr(0, at);
    authority = authority.substr(at + 1);
    out.user = decoded(take(who, ":"), "user");
    out.password = decoded(who, "password");
  }
  std::string_view port;
  if (!authority.empty() && authority.front() == '[') {  // an IPv6 address
    const std::size_t end = authority.find(']');
    if (end == std::string_view::npos) refuse("a [ without a ]");
    out.host = authority.substr(1, end - 1);
    port = authority.substr(end + 1);
    if (!port.empty() && port.front() != ':') refuse("something between ] and the port");
  } else {
    const std::size_t at = authority.find(':');
    out.host = authority.substr(0, at);
    if (at != std::string_view::npos) port = authority.substr(at);
  }
  if (!port.empty()) {
    port.remove_prefix(1);
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), out.port);
    if (error != std::errc() || end != port.data() + port.size() || out.port < 1 || out.port > 65535) {
      refuse(fmt::format("its port is '{}', of 1 to 65535", std::string(port)));
    }
  }
  const auto odd = [](char c) { return static_cast<unsigned char>(c) <= 0x20 || c == 0x7F; };
  if (std::any_of(out.host.begin(), out.host.end(), odd)) refuse("a space or a control character in the host");
  return out;
}

const char* name_of(Answer answer) {
  switch (answer) {
    case Answer::kLate: return "late";
    case Answer::kOk: return "ok";
    case Answer::kThere: return "there";
    case Answer::kAbsent: return "absent";
    case Answer::kFull: return "full";
    case Answer::kTooLarge: return "too_large";
    case Answer::kDenied: return "denied";
    case Answer::kBroken: return "broken";
  }
  return "?";
}

EnginePtr engine_of(const std::string& text) {
  const Url url = Url::parse(text);
  if (url.scheme == "s3") return s3_engine(url);
  if (url.scheme == "redis" || url.scheme == "rediss") return redis_engine(url);
  if (url.scheme == "mooncake") refuse("Mooncake's client is a Python package: only kvstride's Python can open it");
  throw Error(ErrorCode::kArgument,
              fmt::format("URL of a store: its scheme is {}, expected s3, redis or rediss", url.scheme));
}

}  // namespace kvstride::store
