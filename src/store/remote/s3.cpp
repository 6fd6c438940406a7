// SPDX-License-Identifier: Apache-2.0
// Placeholder until the engine is there.
#include "kvstride/error.h"
#include "store/remote/engine.h"

namespace kvstride::store {

EnginePtr s3_engine(const Url&) { throw Error(ErrorCode::kStore, "s3: not in this build yet"); }

}  // namespace kvstride::store
