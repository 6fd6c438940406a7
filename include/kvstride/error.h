// SPDX-License-Identifier: Apache-2.0
// The one exception type of the library and its codes.
#pragma once

#include <stdexcept>
#include <string>

namespace kvstride {

/// What kind of fault an Error reports. Python maps each code to an exception class (see docs/architecture.md).
enum class ErrorCode {
  kArgument,    ///< lengths, duplicates, overlap, read-only memory
  kLayout,      ///< text that is no layout, or a tensor that contradicts one
  kAmbiguous,   ///< several readings fit and differ
  kUnknown,     ///< no reading fits
  kNotStrided,  ///< the bytes have no [block, token, head, dim] view
  kBlockIndex,  ///< a block, slot, layer or element index out of range
  kDType,       ///< dtypes that differ or that a verb cannot handle
  kStore,       ///< a store cannot be opened or configured
  kDevice,      ///< a device that is not there, or a call of the CUDA runtime that failed
};

/// Thrown by every function of the library that refuses its input. Nothing was written when it is thrown.
/// The message is one line: the verb, the argument, the value, the limit.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& what, int column = 0)
      : std::runtime_error(what), code_(code), column_(column) {}
  ErrorCode code() const noexcept { return code_; }
  /// 1-based column in the notation text that the error points at; 0 where there is none.
  int column() const noexcept { return column_; }

 private:
  ErrorCode code_;
  int column_;
};

}  // namespace kvstride
