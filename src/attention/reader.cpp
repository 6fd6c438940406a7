// SPDX-License-Identifier: Apache-2.0
// Rows of keys and values from a cache of any layout.
#include <cstring>

#include "attention/problem.h"

namespace kvstride::attend {

PlaneReader::PlaneReader(const Cache& cache, std::string_view plane, std::int64_t layer)
    : plane_(&cache.layout().plane(plane)), item_(item_size(plane_->dtype)) {
  if (dtype() == DType::kF8E4M3Fnuz || dtype() == DType::kF8E5M2Fnuz) cast_ = cpu::cast_rows(dtype(), DType::kF32);
  const Layout& layout = cache.layout();
  const std::int64_t tensor = (layout.layered() ? 0 : layer * layout.num_parts()) + plane_->part;
  base_ = cache.tensors()[static_cast<std::size_t>(tensor)] + plane_->base;
  if (layout.layered()) base_ += plane_->axis_offset(Axis::kLayer, layer);
  for (std::int64_t slot = 0; slot < plane_->extent(Axis::kToken); ++slot) {
    slot_offsets_.push_back(plane_->axis_offset(Axis::kToken, slot));
  }
  for (std::int64_t head = 0; head < heads(); ++head) head_offsets_.push_back(plane_->axis_offset(Axis::kHead, head));
  head_step_ = step_of_heads();
  std::vector<std::int64_t> offsets;
  for (std::int64_t d = 0; d < dim(); ++d) offsets.push_back(plane_->axis_offset(Axis::kDim, d));
  // Runs are equally long: an axis is a sum of modes, and all begin where the innermost one wraps.
  run_ = 1;
  while (run_ < dim() && offsets[static_cast<std::size_t>(run_)] == run_ * item_) ++run_;
  while (dim() % run_ != 0) --run_;
  if (run_ == dim()) return;
  for (std::int64_t d = 0; d < dim(); d += run_) dim_offsets_.push_back(offsets[static_cast<std::size_t>(d)]);
}

std::int64_t PlaneReader::step_of_heads() const {
  if (head_offsets_.size() < 2 || slot_offsets_.size() < 2) return 0;
  const std::int64_t step = head_offsets_[1];
  for (std::size_t h = 0; h < head_offsets_.size(); ++h) {
    if (head_offsets_[h] != static_cast<std::int64_t>(h) * step) return 0;
  }
  return step < slot_offsets_[1] ? step : 0;
}

namespace {

template <std::size_t kBytes>
void gather(std::byte* to, const std::byte* from, const std::vector<std::int64_t>& offsets) {
  for (const std::int64_t offset : offsets) {
    std::memcpy(to, from + offset, kBytes);
    to += kBytes;
  }
}

void gather_runs(std::byte* to, const std::byte* from, const std::vector<std::int64_t>& offsets, std::int64_t bytes) {
  switch (bytes) {
    case 1: return gather<1>(to, from, offsets);
    case 2: return gather<2>(to, from, offsets);
    case 4: return gather<4>(to, from, offsets);
    case 8: return gather<8>(to, from, offsets);
    case 16: return gather<16>(to, from, offsets);
    case 32: return gather<32>(to, from, offsets);
    default:
      for (const std::int64_t offset : offsets) {
        std::memcpy(to, from + offset, static_cast<std::size_t>(bytes));
        to += bytes;
      }
  }
}

}  // namespace

void PlaneReader::rows(const BlockTable& blocks, std::int64_t sequence, std::int64_t first, std::int64_t count,
                       std::int64_t head, const std::byte** out, std::byte* staging) const {
  const auto block_size = static_cast<std::int64_t>(slot_offsets_.size());
  const std::byte* base = base_ + head_offsets_[static_cast<std::size_t>(head)];
  for (std::int64_t i = 0, key = first; i < count;) {
    const std::int64_t column = key / block_size;
    const std::byte* block = base + plane_->axis_offset(Axis::kBlock, block_at(blocks, sequence, column));
    const std::int64_t end = std::min(first + count, (column + 1) * block_size);
    for (; key < end; ++key, ++i) out[i] = block + slot_offsets_[static_cast<std::size_t>(key - column * block_size)];
  }
  if (direct()) return;
  const std::int64_t bytes = staged_bytes();
  std::vector<std::byte> together(cast_ == nullptr || dim_offsets_.empty() ? 0
                                                                           : static_cast<std::size_t>(dim() * item_));
  for (std::int64_t i = 0; i < count; ++i) {
    std::byte* to = staging + i * bytes;
    const std::byte* row = out[i];
    if (!dim_offsets_.empty()) {
      std::byte* gathered = cast_ == nullptr ? to : together.data();
      gather_runs(gathered, row, dim_offsets_, run_ * item_);
      row = gathered;
    }
    if (cast_ != nullptr) cast_(to, row, dim(), 1, 0, 1.0F);
    out[i] = to;
  }
}

}  // namespace kvstride::attend
