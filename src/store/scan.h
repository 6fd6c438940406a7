// SPDX-License-Identifier: Apache-2.0
// What a directory's files say, before the index knows them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "store/directory.h"

namespace kvstride::store {

struct Directory::Scan {
  struct File {
    std::uint32_t space;
    std::uint32_t pages;
    std::int64_t used;     ///< seconds
    std::int64_t changed;  ///< seconds
    std::uint64_t name;    ///< where it starts in names
    std::uint32_t length;  ///< of the name
  };
  std::vector<File> files;
  std::string names;
  std::vector<PieceId> damaged;  ///< no whole pages
  std::uint64_t seen = 0;        ///< num_gone() when it began
  std::int64_t bytes = 0;
  bool whole = true;  ///< everything could be listed
};

}  // namespace kvstride::store
