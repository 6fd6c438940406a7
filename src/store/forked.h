// SPDX-License-Identifier: Apache-2.0
// What a forked child has inherited: copies of locks and of bookkeeping, and none of the threads.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <memory>
#include <utility>

namespace kvstride::store {

/// In a forked child the parent's threads seem to wait on what is in `thing`: it cannot even be destroyed, and stays.
template <class T>
void keep_where_forked(std::shared_ptr<T>& thing, pid_t owner) {
  if (::getpid() != owner) new std::shared_ptr<T>(std::move(thing));
}

}  // namespace kvstride::store
