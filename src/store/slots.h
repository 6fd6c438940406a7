// SPDX-License-Identifier: Apache-2.0
// Storage by number that grows without moving what it holds, and queues through it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "store/arena.h"
#include "store/index.h"

namespace kvstride::store {

/// Neighbours in a queue; of a free slot, `next` is the next free one.
struct Link {
  Slot prev;
  Slot next;
};

/// Values and their nodes, each in an array of its own: a search reads values only, a walk along a queue nodes only.
/// A value or node of a slot that was just taken holds anything.
template <typename Value, typename Node = Link>
class Slots {
  static_assert(std::is_trivially_copyable_v<Value> && std::is_trivially_copyable_v<Node>);

 public:
  Value& operator[](Slot slot) { return at<Value>(slot, 0); }
  const Value& operator[](Slot slot) const { return at<Value>(slot, 0); }
  Node& node(Slot slot) { return at<Node>(slot, kNodes); }
  const Node& node(Slot slot) const { return at<Node>(slot, kNodes); }

  Slot take() {
    if (free_ != kNoSlot) {
      const Slot slot = free_;
      free_ = node(slot).next;
      return slot;
    }
    if (used_ == chunks_.size() << kShift) grow();
    return used_++;
  }
  void give(Slot slot) {
    node(slot).next = free_;
    free_ = slot;
  }

  /// Slots from here on were never taken.
  Slot end() const { return used_; }
  std::size_t memory() const { return chunks_.size() * static_cast<std::size_t>(whole_pages(kChunkBytes)); }

 private:
  static constexpr int kShift = 15;  // 2 MiB of 64-byte values: one huge page
  static constexpr std::size_t kNodes = sizeof(Value) << kShift;
  static constexpr std::int64_t kChunkBytes = static_cast<std::int64_t>((sizeof(Value) + sizeof(Node)) << kShift);

  template <typename T>
  T& at(Slot slot, std::size_t offset) const {
    return reinterpret_cast<T*>(chunks_[slot >> kShift]->data() + offset)[slot & ((1U << kShift) - 1)];
  }
  void grow() {
    if (chunks_.size() == kNoSlot >> kShift) throw std::length_error("store: more than 2^32 pieces");
    chunks_.push_back(std::make_unique<Memory>(kChunkBytes));
  }

  std::vector<std::unique_ptr<Memory>> chunks_;
  Slot used_ = 0;
  Slot free_ = kNoSlot;
};

/// Newest at the head, oldest at the tail; counts entries and their pages.
class Queue {
 public:
  template <typename Value, typename Node>
  void push(Slots<Value, Node>& slots, Slot slot, std::uint32_t pages) {
    link_head(slots, slot);
    ++size_;
    pages_ += pages;
  }
  template <typename Value, typename Node>
  void remove(Slots<Value, Node>& slots, Slot slot, std::uint32_t pages) {
    unlink(slots, slot);
    --size_;
    pages_ -= pages;
  }
  /// An entry of the queue has other pages than it had.
  void resize(std::uint32_t before, std::uint32_t after) { pages_ = pages_ - before + after; }
  template <typename Value, typename Node>
  void to_head(Slots<Value, Node>& slots, Slot slot) {
    if (slot == head_) return;
    unlink(slots, slot);
    link_head(slots, slot);
  }

  Slot tail() const { return tail_; }
  std::uint64_t size() const { return size_; }
  std::uint64_t pages() const { return pages_; }

 private:
  template <typename Value, typename Node>
  void link_head(Slots<Value, Node>& slots, Slot slot) {
    slots.node(slot).prev = kNoSlot;
    slots.node(slot).next = head_;
    (head_ == kNoSlot ? tail_ : slots.node(head_).prev) = slot;
    head_ = slot;
  }
  template <typename Value, typename Node>
  void unlink(Slots<Value, Node>& slots, Slot slot) {
    const Slot prev = slots.node(slot).prev;
    const Slot next = slots.node(slot).next;
    (prev == kNoSlot ? head_ : slots.node(prev).next) = next;
    (next == kNoSlot ? tail_ : slots.node(next).prev) = prev;
  }

  Slot head_ = kNoSlot;
  Slot tail_ = kNoSlot;
  std::uint64_t size_ = 0;
  std::uint64_t pages_ = 0;
};

}  // namespace kvstride::store
