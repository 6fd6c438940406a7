// SPDX-License-Identifier: Apache-2.0
// AWS Signature Version 4, in headers: what S3 and its relatives ask of every request.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace kvstride::store {

struct AwsCredentials {
  std::string key_id;
  std::string secret;
  std::string token;  ///< of a session; empty: none

  friend bool operator==(const AwsCredentials&, const AwsCredentials&) = default;
};

/// SHA-256 of nothing, in hex; and what stands in its place where a body is not hashed.
inline constexpr std::string_view kEmptyHash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
inline constexpr std::string_view kUnsignedBody = "UNSIGNED-PAYLOAD";

/// A request as it will be sent.
struct Unsigned {
  std::string method;
  std::string host;                          ///< the Host header
  std::string path;                          ///< percent-encoded, from '/' on
  std::map<std::string, std::string> query;  ///< not encoded
  std::map<std::string, std::string>
      headers;  ///< names in lower case, values without blanks around them; all are signed
  std::string_view body_hash = kUnsignedBody;
};

/// `text` with all but A-Z a-z 0-9 - . _ ~ (and '/', where `slashes`) as %XX.
std::string percent_encoded(std::string_view text, bool slashes = false);
/// name=value&…, encoded, in order of names; a name without value has its '=' too.
std::string query_text(const std::map<std::string, std::string>& query);

/// The headers of `request`, and those that sign it: authorization, x-amz-date, x-amz-content-sha256 and for a session
/// x-amz-security-token. `now`: seconds since 1970, by the server's clock. Throws Error(kStore) where libcrypto has no
/// HMAC.
std::map<std::string, std::string> signed_headers(const Unsigned& request, const AwsCredentials& credentials,
                                                  std::string_view region, std::int64_t now,
                                                  std::string_view service = "s3");

}  // namespace kvstride::store
