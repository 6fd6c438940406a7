// SPDX-License-Identifier: Apache-2.0
// URLs of buckets.
#include "store/remote/s3_settings.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

constexpr std::array<const char*, 8> kKnown{"ca",         "connections", "endpoint", "part_bytes",
                                            "path_style", "profile",     "region",   "threads"};
constexpr std::int64_t kMinPart = 5 << 20;  // of the protocol
constexpr std::int64_t kMaxPart = std::int64_t{5} << 30;
constexpr std::size_t kMaxPrefix = 700;  // a key has at most 1024 bytes, and a name 300

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kArgument, "s3: " + why); }

std::int64_t whole(const std::string& name, const std::string& text, std::int64_t least, std::int64_t most) {
  std::int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc() || end != text.data() + text.size() || out < least || out > most) {
    refuse(fmt::format("{} is '{}', expected a whole number from {} to {}", name, text, least, most));
  }
  return out;
}

bool is_plain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '.' || c == '_';
}

std::string checked_bucket(const Url& url) {
  if (!url.user.empty() || !url.password.empty()) {
    refuse("credentials do not belong into the URL; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile");
  }
  if (url.port != 0) refuse("the URL is s3://bucket/prefix; a server goes into endpoint=http://host:port");
  const bool plain = std::all_of(url.host.begin(), url.host.end(), is_plain);
  if (url.host.empty() || url.host.size() > 255 || !plain || url.host.front() == '.') {
    refuse(fmt::format("the bucket is '{}', expected a name of letters, digits, '-', '.' and '_'", url.host));
  }
  return url.host;
}

std::string checked_prefix(std::string path) {
  while (!path.empty() && path.back() == '/') path.pop_back();
  while (!path.empty() && path.front() == '/') path.erase(path.begin());
  if (path.empty()) return path;
  const std::string slashed = "/" + path + "/";
  for (const char* odd : {"//", "/./", "/../"}) {
    if (slashed.find(odd) != std::string::npos)
      refuse(fmt::format("the prefix '{}' has a part that is empty or of dots", path));
  }
  if (path.size() > kMaxPrefix)
    refuse(fmt::format("the prefix has {} bytes, at most {} can be", path.size(), kMaxPrefix));
  return path + "/";
}

/// http://host:port as it stands in the Host header: in lower case, no port where it is the scheme's.
std::string checked_endpoint(const std::string& text) {
  Url url;
  try {
    url = Url::parse(text);
  } catch (const Error&) {
  }
  const bool plain = std::all_of(url.host.begin(), url.host.end(), [](char c) { return is_plain(c) || c == ':'; });
  if ((url.scheme != "http" && url.scheme != "https") || url.host.empty() || !plain || !url.path.empty() ||
      !url.user.empty() || !url.options.empty()) {
    refuse("the endpoint must be http://host[:port] or https://host[:port], without a path or a user");
  }
  for (char& c : url.host) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  if (url.host.find(':') != std::string::npos) url.host = "[" + url.host + "]";
  const bool usual = url.port == 0 || url.port == (url.scheme == "http" ? 80 : 443);
  return fmt::format("{}://{}{}", url.scheme, url.host, usual ? "" : fmt::format(":{}", url.port));
}

std::string checked_region(const std::string& text) {
  const bool plain = std::all_of(text.begin(), text.end(), is_plain);
  if (!plain || text.size() > 64) refuse("the region must be of letters, digits, '-', '.' and '_'");
  return text;
}

}  // namespace

std::string S3Settings::scheme() const { return endpoint.substr(0, endpoint.find(':')); }
std::string S3Settings::host() const {
  const std::string host = endpoint.substr(endpoint.find("//") + 2);
  return path_style ? host : bucket + "." + host;
}
std::string S3Settings::path() const { return path_style ? "/" + percent_encoded(bucket) + "/" : "/"; }

std::string s3_profile(const Url& url) {
  for (const auto& [name, value] : url.options) {
    if (name == "profile") return value;
  }
  return "";
}

S3Settings s3_settings(const Url& url, const AwsConfig& aws) {
  S3Settings out;
  out.bucket = checked_bucket(url);
  out.prefix = checked_prefix(url.path);
  std::map<std::string, std::string> options;
  for (const auto& [name, value] : url.options) {
    if (std::find(kKnown.begin(), kKnown.end(), name) == kKnown.end()) {
      refuse(fmt::format("there is no option {}; there are {}", name, fmt::join(kKnown, ", ")));
    }
    if (value.empty()) refuse(fmt::format("the option {} is empty", name));
    options[name] = value;
  }
  const auto option = [&](const char* name, auto otherwise) {
    const auto at = options.find(name);
    return at != options.end() ? at->second : otherwise();
  };
  const std::string region = option("region", [&] {
    return aws.setting({"AWS_REGION", "AWS_DEFAULT_REGION"}, "region");
  });
  out.region = region.empty() ? "us-east-1" : checked_region(region);
  const std::string endpoint = option("endpoint", [&] {
    return aws.setting({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"}, "endpoint_url");
  });
  out.endpoint = checked_endpoint(endpoint.empty() ? fmt::format("https://s3.{}.amazonaws.com", out.region) : endpoint);
  // Servers of one's own seldom have a name for each bucket; certificates of AWS end before a bucket's dot.
  out.path_style = !endpoint.empty() || out.bucket.find('.') != std::string::npos;
  if (const auto at = options.find("path_style"); at != options.end()) {
    if (at->second != "true" && at->second != "false") {
      refuse(fmt::format("path_style is '{}', expected true or false", at->second));
    }
    out.path_style = at->second == "true";
  }
  if (const auto at = options.find("connections"); at != options.end()) {
    out.connections = static_cast<std::size_t>(whole("connections", at->second, 1, 1024));
  }
  if (const auto at = options.find("threads"); at != options.end()) {
    out.threads = static_cast<int>(whole("threads", at->second, 1, 64));
  }
  if (const auto at = options.find("part_bytes"); at != options.end()) {
    out.part_bytes = whole("part_bytes", at->second, kMinPart, kMaxPart);
  }
  out.ca = option("ca", [&] { return aws.setting({"AWS_CA_BUNDLE"}, "ca_bundle"); });
  if (!out.ca.empty() && ::access(out.ca.c_str(), R_OK) != 0)
    refuse(fmt::format("ca: the file {} cannot be read", out.ca));
  return out;
}

}  // namespace kvstride::store
