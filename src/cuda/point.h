// SPDX-License-Identifier: Apache-2.0
// What the store holds of CUDA: a point of a caller's stream, and pinned memory.
#pragma once

#include <cstddef>
#include <memory>

#include "cuda/buffers.h"
#include "kvstride/device.h"

namespace kvstride::cuda {

/// Where a stream was when this was made. May be dropped at any time, in a forked child too.
class Point {
 public:
  /// Throws Error(kDevice), also where the stream is being captured into a graph.
  Point(Device device, const Stream& stream);
  ~Point();
  Point(const Point&) = delete;
  Point& operator=(const Point&) = delete;
  /// Whether all that was on the stream is done. Throws Error(kDevice).
  bool reached() const;

 private:
  Device device_;
  std::unique_ptr<Mark> mark_;
};

/// Host memory of others, pinned while this lives. It must not end before copies to and from it have; may be dropped in
/// a forked child.
class Pinned {
 public:
  /// Throws Error(kDevice).
  Pinned(Device device, std::byte* memory, std::size_t bytes);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  Device device_;
  std::byte* memory_;
};

}  // namespace kvstride::cuda
