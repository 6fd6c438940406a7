// SPDX-License-Identifier: Apache-2.0
// Environment variables and files of the AWS tools.
#include "store/remote/aws_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

constexpr std::size_t kMaxFile = 1 << 20;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::string in_home(std::string path) { return path.substr(0, 2) == "~/" ? variable("HOME") + path.substr(1) : path; }

std::string path_of(const char* name, const char* otherwise) {
  const std::string path = variable(name);
  return in_home(path.empty() ? otherwise : path);
}

std::string trimmed(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return std::string(text);
}

}  // namespace

AwsConfig::AwsConfig(std::string profile)
    : profile_(std::move(profile)),
      named_(!profile_.empty()),
      credentials_file_(path_of("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")),
      config_file_(path_of("AWS_CONFIG_FILE", "~/.aws/config")),
      environment_{variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY"), variable("AWS_SESSION_TOKEN")} {
  if (!named_) profile_ = variable("AWS_PROFILE");
  if (profile_.empty()) profile_ = "default";
}

AwsConfig::Section AwsConfig::read(const std::string& path, const std::string& section) {
  Section out;
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxFile, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  std::istringstream lines(text);
  bool inside = false;
  for (std::string raw; std::getline(lines, raw);) {
    const std::string line = trimmed(raw);
    if (line.empty() || line[0] == '#' || line[0] == ';') continue;
    if (line.front() == '[') {
      const std::size_t end = line.find(']');
      inside = end != std::string::npos && trimmed(std::string_view(line).substr(1, end - 1)) == section;
      continue;
    }
    const std::size_t mark = line.find('=');
    if (!inside || mark == std::string::npos || raw[0] == ' ' || raw[0] == '\t') continue;  // indented: of one service
    std::string name = trimmed(std::string_view(line).substr(0, mark));
    for (char& c : name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    out[name] = trimmed(std::string_view(line).substr(mark + 1));
  }
  return out;
}

AwsCredentials AwsConfig::credentials() const {
  const auto whole = [](const AwsCredentials& one) { return !one.key_id.empty() && !one.secret.empty(); };
  if (!named_ && whole(environment_)) return environment_;
  const std::string in_config = profile_ == "default" ? profile_ : "profile " + profile_;
  for (const auto& [path, section] : {std::pair(credentials_file_, profile_), std::pair(config_file_, in_config)}) {
    Section values = read(path, section);
    const AwsCredentials found{values["aws_access_key_id"], values["aws_secret_access_key"],
                               values["aws_session_token"]};
    if (whole(found)) return found;
  }
  throw Error(ErrorCode::kArgument,
              fmt::format("s3: no credentials: {}there is no aws_access_key_id with aws_secret_access_key for the "
                          "profile {} in {} or {}",
                          named_ ? "" : "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not both set, and ", profile_,
                          credentials_file_, config_file_));
}

std::string AwsConfig::setting(std::initializer_list<const char*> variables, const std::string& name) const {
  for (const char* one : variables) {
    if (std::string value = variable(one); !value.empty()) return value;
  }
  return read(config_file_, profile_ == "default" ? profile_ : "profile " + profile_)[name];
}

}  // namespace kvstride::store
