// SPDX-License-Identifier: Apache-2.0
// The remote tier over an engine of the caller's choice.
#pragma once

#include "kvstride/store.h"
#include "store/remote/engine.h"

namespace kvstride::store {

/// `options.url` is not looked at. Throws as remote_tier().
TierPtr make_remote_tier(const RemoteTierOptions& options, EnginePtr engine);

}  // namespace kvstride::store
