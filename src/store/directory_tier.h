// SPDX-License-Identifier: Apache-2.0
// The directory tier with an operating system of the caller's choice: for tests and the `kvstride` program.
#pragma once

#include "kvstride/store.h"
#include "store/directory.h"
#include "store/io.h"

namespace kvstride::store {

TierPtr make_directory_tier(const DirectoryTierOptions& options, std::shared_ptr<Io> io);

}  // namespace kvstride::store
