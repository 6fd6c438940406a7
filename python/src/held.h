// SPDX-License-Identifier: Apache-2.0
// Objects of the library that Python holds and that have threads.
#pragma once

#include <memory>

#include "gil.h"
#include "store/remote/engine.h"

/// What waits for threads, and so for a disk, when it ends. It ends without the interpreter's lock; in a forked child,
/// which has none of those threads, never.
template <typename T>
class Held {
 public:
  explicit Held(std::shared_ptr<T> thing) : thing_(std::move(thing)) {}
  Held(Held&&) noexcept = default;
  ~Held() { drop(); }

  void drop() {
    std::shared_ptr<T> thing = std::move(thing_);
    if (!thing) return;
    if (getpid() != pid_) {
      new std::shared_ptr<T>(std::move(thing));
      return;
    }
    // An engine in Python has something to call at its end, perhaps while an exception of its caller is on its way.
    PyObject* type = nullptr;
    PyObject* value = nullptr;
    PyObject* trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    {
      const GilReleased release;
      thing.reset();
    }
    PyErr_Restore(type, value, trace);
  }
  T& operator*() const { return *thing_; }
  T* operator->() const { return thing_.get(); }
  /// Null after drop().
  const std::shared_ptr<T>& share() const { return thing_; }

 private:
  std::shared_ptr<T> thing_;
  pid_t pid_ = getpid();
};
using EngineHandle = Held<kvstride::store::Engine>;
