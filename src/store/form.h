// SPDX-License-Identifier: Apache-2.0
// How planes lie in a payload: the stored order, as a layout that the plan can convert from and to.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kvstride/cache.h"
#include "kvstride/plan.h"
#include "store/chunk.h"

namespace kvstride::store {

/// A payload's layout. Its tensors are the shared section (planes without heads) and the section of the heads, where
/// there are such planes.
struct Form {
  Layout layout;
  Content content;
  bool has_shared = false;
  bool has_heads = false;
  std::vector<std::string> shared_planes;
  std::vector<std::string> head_planes;
  /// A cache over a payload at plan::nominal(); programs are moved to where payloads really lie.
  Cache cache;
};

/// The stored order for these planes (`H L {key: N D, value: N D}`, shared planes before it), for `heads` of the
/// model's.
Form stored_form(const Namespace& space, const Layout& like, Heads heads);
/// The form of a chunk that somebody wrote; nothing where its order is none that suits the namespace.
std::optional<Form> form_of(const Namespace& space, const Content& content);

/// Which heads of a cache are which of the model's.
struct HeadMap {
  std::int64_t cache_first = 0;
  std::int64_t stored_first = 0;
  std::int64_t count = 0;  ///< 0: no plane has heads
  Heads stored() const { return {static_cast<std::uint16_t>(stored_first), static_cast<std::uint16_t>(count)}; }
};

/// Throws Error where a cache does not hold what the namespace says (planes, dtypes, sizes, heads), or a block is
/// larger than a chunk. `heads` as given by the caller.
HeadMap check_cache(const char* verb, const Namespace& space, const Layout& layout,
                    const std::optional<HeadMap>& heads);

}  // namespace kvstride::store
