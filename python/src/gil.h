// SPDX-License-Identifier: Apache-2.0
// Letting go of the interpreter's lock while C++ works, also where the interpreter ends meanwhile.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

/// Gives the interpreter's lock back while it lives; the destructor takes it again.
///
/// CPython up to 3.13 ends a thread that asks for the lock while the interpreter finalizes: a daemon thread that comes
/// back from a verb then. It does so by pthread_exit, which unwinds the stack and meets nanobind's noexcept functions:
/// std::terminate. Such a thread stops here instead and sleeps until the process is gone, as CPython 3.14 does itself.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // nothing but that unwinding comes out of C code, and leaving this handler would go on with it
      while (true) ::pause();
    }
  }

 private:
  PyThreadState* state_;
};
