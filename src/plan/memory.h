// SPDX-License-Identifier: Apache-2.0
// Whether bytes that are read meet bytes that are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvstride/layout.h"

namespace kvstride::plan {

class Program;

/// Addresses [begin, end).
struct Interval {
  std::int64_t begin;
  std::int64_t end;
};

/// Sorts, and joins what touches.
void merge(std::vector<Interval>& list);
/// Whether two sets of intervals meet; both are merged.
bool meet(std::vector<Interval>& a, std::vector<Interval>& b);
/// The memory from the first to the last byte of each plane of each tensor.
void hulls(const Layout& layout, const std::vector<std::byte*>& tensors, std::vector<Interval>& out);
/// Whether a byte that one of the programs reads is one that one of them writes. Exact; takes a few MiB whatever the
/// number of copies.
bool meet_each_other(std::span<const Program* const> programs);

}  // namespace kvstride::plan
