// SPDX-License-Identifier: Apache-2.0
// A bucket, and how it is reached: from a URL, and what the AWS tools would read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "store/remote/aws_config.h"
#include "store/remote/engine.h"

namespace kvstride::store {

struct S3Settings {
  std::string bucket;
  std::string prefix;    ///< empty, or it ends in '/'
  std::string endpoint;  ///< http://host[:port] or https://…, without the bucket
  std::string region;
  bool path_style = false;  ///< the bucket in the path, not in the host
  std::size_t connections = 64;
  int threads = 2;
  std::int64_t part_bytes = 64 << 20;
  std::string ca;

  /// Scheme, host and path (encoded, it ends in '/') of the bucket.
  std::string scheme() const;
  std::string host() const;
  std::string path() const;
};

/// Throws Error(kArgument), one line that names the option and those there are.
S3Settings s3_settings(const Url& url, const AwsConfig& aws);
/// The option `profile`, or empty.
std::string s3_profile(const Url& url);

}  // namespace kvstride::store
