// SPDX-License-Identifier: Apache-2.0
// Placeholder until the engine is there.
#include "kvstride/error.h"
#include "store/remote/engine.h"

namespace kvstride::store {

EnginePtr redis_engine(const Url&) { throw Error(ErrorCode::kStore, "redis: not in this build yet"); }

}  // namespace kvstride::store
