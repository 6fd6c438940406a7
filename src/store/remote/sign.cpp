// SPDX-License-Identifier: Apache-2.0
// Canonical request, text to sign, key, signature: the four steps of AWS's documentation, in its order.
#include "store/remote/sign.h"

#include <fmt/format.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <ctime>

#include "kvstride/error.h"
#include "store/sha256.h"

namespace kvstride::store {
namespace {

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) out += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return out;
}

std::string hmac(std::string_view key, std::string_view text) {
  std::string out(EVP_MAX_MD_SIZE, '\0');
  unsigned length = 0;
  const auto* data = reinterpret_cast<const unsigned char*>(text.data());
  auto* digest = reinterpret_cast<unsigned char*>(out.data());
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), data, text.size(), digest, &length) == nullptr) {
    throw Error(ErrorCode::kStore, "s3: libcrypto has no HMAC-SHA-256");
  }
  out.resize(length);
  return out;
}

std::string hash(std::string_view text) {
  const auto digest = sha256(text);
  return hex({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

}  // namespace

std::string percent_encoded(std::string_view text, bool slashes) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                       c == '.' || c == '_' || c == '~' || (slashes && c == '/');
    if (plain) {
      out += c;
    } else {
      out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return out;
}

std::string query_text(const std::map<std::string, std::string>& query) {
  std::string out;
  for (const auto& [name, value] : query) {
    out += fmt::format("{}{}={}", out.empty() ? "" : "&", percent_encoded(name), percent_encoded(value));
  }
  return out;
}

std::map<std::string, std::string> signed_headers(const Unsigned& request, const AwsCredentials& credentials,
                                                  std::string_view region, std::int64_t now, std::string_view service) {
  std::tm parts{};
  const std::time_t seconds = now;
  ::gmtime_r(&seconds, &parts);
  const std::string day = fmt::format("{:04}{:02}{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
  const std::string time = fmt::format("{}T{:02}{:02}{:02}Z", day, parts.tm_hour, parts.tm_min, parts.tm_sec);

  std::map<std::string, std::string> headers = request.headers;
  headers["x-amz-date"] = time;
  headers["x-amz-content-sha256"] = request.body_hash;
  if (!credentials.token.empty()) headers["x-amz-security-token"] = credentials.token;
  headers["host"] = request.host;
  std::string lines;
  std::string names;
  for (const auto& [name, value] : headers) {
    lines += fmt::format("{}:{}\n", name, value);
    names += fmt::format("{}{}", names.empty() ? "" : ";", name);
  }
  headers.erase("host");  // whoever sends the request writes it

  const std::string canonical = fmt::format("{}\n{}\n{}\n{}\n{}\n{}", request.method, request.path,
                                            query_text(request.query), lines, names, request.body_hash);
  const std::string scope = fmt::format("{}/{}/{}/aws4_request", day, region, service);
  const std::string text = fmt::format("AWS4-HMAC-SHA256\n{}\n{}\n{}", time, scope, hash(canonical));
  const std::string key = hmac(hmac(hmac(hmac("AWS4" + credentials.secret, day), region), service), "aws4_request");
  headers["authorization"] = fmt::format("AWS4-HMAC-SHA256 Credential={}/{}, SignedHeaders={}, Signature={}",
                                         credentials.key_id, scope, names, hex(hmac(key, text)));
  return headers;
}

}  // namespace kvstride::store
