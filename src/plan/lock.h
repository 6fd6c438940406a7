// SPDX-License-Identifier: Apache-2.0
// The one lock over what is kept between calls.
#pragma once

#include <mutex>

namespace kvstride::plan {

/// Held while kept recipes, their nests and kept sources are looked up or changed, never while bytes move. A fork waits
/// for it, so that a child never inherits it locked by a thread that it does not have.
std::mutex& kept_lock();

}  // namespace kvstride::plan
