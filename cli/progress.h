// SPDX-License-Identifier: Apache-2.0
// Long commands: a line that says how far they are, and Ctrl-C.
#pragma once

#include <cstdint>
#include <string>

namespace kvstride::cli {

/// While it lives, the first Ctrl-C (or SIGTERM) asks a command to stop; the second one ends the process.
class Interruption {
 public:
  Interruption();
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;
  static bool asked();
};

/// A line on standard error that grows, where that is a terminal.
class Progress {
 public:
  /// So many things called `unit` and so many bytes are ahead; 0: that is not known, and left out.
  Progress(std::string what, std::string unit, std::int64_t number, std::int64_t bytes);
  ~Progress();  ///< wipes it
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void add(std::int64_t number, std::int64_t bytes);

 private:
  void draw();

  const std::string what_;
  const std::string unit_;
  const std::int64_t number_;
  const std::int64_t bytes_;
  const bool shown_;
  std::int64_t done_ = 0;
  std::int64_t done_bytes_ = 0;
  std::int64_t start_ = 0;  ///< nanoseconds
  std::int64_t drawn_ = 0;
};

}  // namespace kvstride::cli
