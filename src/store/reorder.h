// SPDX-License-Identifier: Apache-2.0
// A chunk's file in another stored order.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvstride/plan.h"
#include "store/edit.h"
#include "store/form.h"

namespace kvstride::store {

/// What a chunk with `like`'s content is in another order: text without sizes such as `H N L KV D`, or a layout's name.
/// Planes get their dtypes, the payload's order all extents. Where each head has one run of bytes `head_bytes` says so
/// and readers may take a part; otherwise the payload is one section. Throws Error(kLayout) where the order does not
/// suit the namespace or the content, or `like`'s order is none.
Content content_in(const Namespace& space, const Content& like, std::string_view order);

/// Rewrites files of one namespace, one at a time. For one thread.
class Reorderer {
 public:
  enum class State {
    kDone,
    kAlready,  ///< it has this order
    kRaw,      ///< its bytes have no order
    kDamaged,  ///< `why`; it stays as it is
    kGone,     ///< somebody removed it meanwhile
    kFailed,   ///< `why`; it stays as it is
  };
  struct Result {
    State state = State::kDone;
    std::string why;
    std::int64_t before = 0;  ///< bytes of the file
    std::int64_t after = 0;
  };
  /// No editor: everything is done but the writing.
  Reorderer(const SpaceFolder& space, std::string order, StoreEditor* editor);
  ~Reorderer();
  Result reorder(const ChunkFile& file);

 private:
  struct Conversion;
  Conversion& conversion_for(const Namespace& space, const Content& from);
  Result read(const ChunkFile& file, struct stat& stat, std::int64_t& length);

  const SpaceFolder& space_;
  const std::string order_;
  StoreEditor* editor_;
  Verifier verifier_;
  std::optional<Memory> old_;  ///< images
  std::optional<Memory> new_;
  std::optional<Memory> back_;
  std::vector<std::pair<Content, std::unique_ptr<Conversion>>> conversions_;
};

}  // namespace kvstride::store
