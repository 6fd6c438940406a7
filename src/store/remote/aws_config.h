// SPDX-License-Identifier: Apache-2.0
// What the AWS tools read before they ask: their environment variables and their two files.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "store/remote/sign.h"

namespace kvstride::store {

/// The environment at one time, and the files as often as they are asked for: tools that rotate credentials write these
/// anew. Files are bounded (1 MiB); lines that are neither `[section]` nor `name = value` are passed over. Safe to use
/// from several threads at once.
class AwsConfig {
 public:
  /// `profile`: of the files, and then its credentials come before those of the environment, as with `aws --profile`;
  /// empty: AWS_PROFILE or `default`. Call it where nobody changes the environment.
  explicit AwsConfig(std::string profile);

  /// Throws Error(kArgument) that says where was looked.
  AwsCredentials credentials() const;
  /// The first variable of `variables` that is not empty, else `name` in the profile of the config file, else empty.
  std::string setting(std::initializer_list<const char*> variables, const std::string& name) const;

 private:
  using Section = std::map<std::string, std::string>;
  static Section read(const std::string& path, const std::string& section);

  std::string profile_;
  bool named_ = false;  ///< by the caller
  std::string credentials_file_;
  std::string config_file_;
  AwsCredentials environment_;
};

}  // namespace kvstride::store
