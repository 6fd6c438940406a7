// SPDX-License-Identifier: Apache-2.0
// An open-addressing hash table from 32 bits of a hash to slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "store/arena.h"
#include "store/index.h"

namespace kvstride::store {

/// Linear probing, at most three quarters full. A cell's home are the upper bits of its tag, so that a table of twice
/// the size has the same order and is filled from one end to the other. Several cells may have one tag.
class Cells {
 public:
  /// Makes room for one more; the only call that can throw.
  void reserve() {
    if (cells_ == nullptr) {
      grow(kFirstBits);
    } else if ((count_ + 1) * 4 > 3 * (std::size_t{1} << bits_)) {
      if (bits_ == 32) throw std::length_error("store: more than 3 * 2^30 pieces");  // a tag has no more bits
      grow(bits_ + 1);
    }
  }
  /// There must be room for it.
  void insert(std::uint32_t tag, Slot slot) {
    std::size_t at = home(tag);
    while (cells_[at].number != 0) at = next(at);
    cells_[at] = {tag, slot + 1};
    ++count_;
  }
  /// The pair must be there.
  void erase(std::uint32_t tag, Slot slot) {
    std::size_t hole = home(tag);
    while (cells_[hole].tag != tag || cells_[hole].number != slot + 1) hole = next(hole);
    // What follows moves up as far as its home allows, so that no search ends too early.
    for (std::size_t at = next(hole); cells_[at].number != 0; at = next(at)) {
      const std::size_t way = (at - home(cells_[at].tag)) & mask_;
      if (way < ((at - hole) & mask_)) continue;
      cells_[hole] = cells_[at];
      hole = at;
    }
    cells_[hole] = {};
    --count_;
  }
  /// The first slot with the tag that `wanted` says yes to, or kNoSlot.
  template <typename Wanted>
  Slot find(std::uint32_t tag, Wanted wanted) const {
    if (cells_ == nullptr) return kNoSlot;
    for (std::size_t at = home(tag); cells_[at].number != 0; at = next(at)) {
      if (cells_[at].tag == tag && wanted(cells_[at].number - 1)) return cells_[at].number - 1;
    }
    return kNoSlot;
  }
  void prefetch(std::uint32_t tag) const {
    if (cells_ != nullptr) __builtin_prefetch(&cells_[home(tag)]);
  }
  std::size_t memory() const { return memory_ == nullptr ? 0 : static_cast<std::size_t>(memory_->mapped()); }

 private:
  struct Cell {
    std::uint32_t tag = 0;
    std::uint32_t number = 0;  // slot + 1; 0: empty, as fresh memory is
  };
  static constexpr int kFirstBits = 9;  // one page

  std::size_t home(std::uint32_t tag) const { return tag >> (32 - bits_); }
  std::size_t next(std::size_t at) const { return (at + 1) & mask_; }
  void grow(int bits) {
    auto memory = std::make_unique<Memory>(static_cast<std::int64_t>(sizeof(Cell) << bits));
    const Cell* old = cells_;
    const std::size_t old_size = old == nullptr ? 0 : std::size_t{1} << bits_;
    cells_ = reinterpret_cast<Cell*>(memory->data());
    bits_ = bits;
    mask_ = (std::size_t{1} << bits) - 1;
    count_ = 0;
    for (std::size_t i = 0; i < old_size; ++i) {
      if (old[i].number != 0) insert(old[i].tag, old[i].number - 1);
    }
    memory_ = std::move(memory);
  }

  std::unique_ptr<Memory> memory_;
  Cell* cells_ = nullptr;
  int bits_ = 0;
  std::size_t mask_ = 0;
  std::size_t count_ = 0;
};

}  // namespace kvstride::store
