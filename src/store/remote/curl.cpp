// SPDX-License-Identifier: Apache-2.0
// Loading libcurl.
#include "store/remote/curl.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <string>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

constexpr const char* kLibrary = "libcurl.so.4";

struct Loaded {
  Curl curl{};
  std::string why;  ///< it cannot be used; empty: it can
};

Loaded load() {
  Loaded out;
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = ::dlerror();
    out.why = fmt::format("s3: {} cannot be loaded ({}); install libcurl 7.66 or newer (Debian: libcurl4)", kLibrary,
                          reason != nullptr ? reason : "no reason given");
    return out;
  }
  const auto find = [&](auto& function, const char* name) {
    void* symbol = ::dlsym(library, name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    if (symbol == nullptr && out.why.empty()) {
      out.why = fmt::format("s3: {} has no {}; libcurl 7.66 or newer is needed", kLibrary, name);
    }
  };
  decltype(&::curl_global_init) global_init = nullptr;
  find(global_init, "curl_global_init");
  find(out.curl.easy_init, "curl_easy_init");
  find(out.curl.easy_cleanup, "curl_easy_cleanup");
  find(out.curl.easy_reset, "curl_easy_reset");
  find(out.curl.easy_setopt, "curl_easy_setopt");
  find(out.curl.easy_getinfo, "curl_easy_getinfo");
  find(out.curl.easy_strerror, "curl_easy_strerror");
  find(out.curl.multi_init, "curl_multi_init");
  find(out.curl.multi_cleanup, "curl_multi_cleanup");
  find(out.curl.multi_setopt, "curl_multi_setopt");
  find(out.curl.multi_add, "curl_multi_add_handle");
  find(out.curl.multi_remove, "curl_multi_remove_handle");
  find(out.curl.multi_perform, "curl_multi_perform");
  find(out.curl.multi_poll, "curl_multi_poll");
  find(out.curl.multi_info_read, "curl_multi_info_read");
  find(out.curl.slist_append, "curl_slist_append");
  find(out.curl.slist_free_all, "curl_slist_free_all");
  find(out.curl.getdate, "curl_getdate");
  if (out.why.empty() && global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
    out.why = fmt::format("s3: {} cannot be initialised", kLibrary);
  }
  return out;
}

}  // namespace

const Curl& Curl::get() {
  static const Loaded loaded = load();  // never unloaded: its threads and its TLS library outlive any engine
  if (!loaded.why.empty()) throw Error(ErrorCode::kStore, loaded.why);
  return loaded.curl;
}

}  // namespace kvstride::store
