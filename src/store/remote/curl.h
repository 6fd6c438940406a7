// SPDX-License-Identifier: Apache-2.0
// The machine's own libcurl, loaded when it is first needed: a process that talks to no object store needs none.
#pragma once

#include <curl/curl.h>

namespace kvstride::store {

/// Functions of libcurl.so.4; its headers are used for their types only.
struct Curl {
  decltype(&::curl_easy_init) easy_init;
  decltype(&::curl_easy_cleanup) easy_cleanup;
  decltype(&::curl_easy_reset) easy_reset;
  decltype(&::curl_easy_setopt) easy_setopt;
  decltype(&::curl_easy_getinfo) easy_getinfo;
  decltype(&::curl_easy_strerror) easy_strerror;
  decltype(&::curl_multi_init) multi_init;
  decltype(&::curl_multi_cleanup) multi_cleanup;
  decltype(&::curl_multi_setopt) multi_setopt;
  decltype(&::curl_multi_add_handle) multi_add;
  decltype(&::curl_multi_remove_handle) multi_remove;
  decltype(&::curl_multi_perform) multi_perform;
  decltype(&::curl_multi_poll) multi_poll;
  decltype(&::curl_multi_info_read) multi_info_read;
  decltype(&::curl_slist_append) slist_append;
  decltype(&::curl_slist_free_all) slist_free_all;
  decltype(&::curl_getdate) getdate;

  /// Throws Error(kStore), one line that says what to install. Any thread, any time.
  static const Curl& get();
};

}  // namespace kvstride::store
