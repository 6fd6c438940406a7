// SPDX-License-Identifier: Apache-2.0
// Strips to the table of one launch.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "cuda/strip.h"
#include "cuda/table.h"

namespace kvstride::cuda {

/// Strips and the table that does them. `data` is where the bytes lie that the caller has to bring to the device; it
/// sets the table's `data` and, where there are ids, `fault`.
class Lowering {
 public:
  void add(Strip strip, bool zero = false);
  void set_ids(const IdSources& ids);
  bool empty() const { return works_.empty(); }
  bool has_ids() const { return ids_.has_value(); }

  /// Bytes of all arrays.
  std::size_t size() const;
  /// Writes them to `to`, a multiple of 16, and returns the table without `data`.
  Table write(std::byte* to) const;

 private:
  void add_work(const Strip& strip, Work work);

  std::vector<Work> works_;
  std::vector<Digit> digits_;
  std::vector<Start> starts_;
  std::vector<Step> steps_;
  std::vector<float> scales_;
  std::vector<IdMode> modes_;
  std::optional<IdSources> ids_;
  std::int64_t num_tiles_ = 0;
};

}  // namespace kvstride::cuda
