// SPDX-License-Identifier: Apache-2.0
// What a process knows of an engine's objects.
#include "store/remote/known.h"

#include "store/key_hash.h"

namespace kvstride::store {
namespace {

constexpr std::size_t kMostTimes = 65536;
constexpr auto kDamaged = std::chrono::minutes(10);

template <typename Times>
bool within(const Times& times, const PieceId& id, Clock::time_point now) {
  const auto found = times.find(id);
  return found != times.end() && now < found->second;
}

/// Bounded: where there are too many, all are forgotten.
template <typename Times>
void note(Times& times, const PieceId& id, Clock::time_point until) {
  if (times.size() >= kMostTimes) times.clear();
  times[id] = until;
}

}  // namespace

std::size_t Known::IdHash::operator()(const PieceId& id) const {
  return KeyHash()(id.key) + id.space * 31 + id.heads.first * 65537 + id.heads.count;
}

Known::Known(std::size_t most, Clock::duration keep) : most_(most), keep_(keep) {}

void Known::drop(Slot slot) {
  until_[slot] = {};
  index_.remove(slot, false);
}

void Known::drop_old(Clock::time_point now) {
  while (!due_.empty() && due_.front().when <= now) {
    const Due due = due_.front();
    due_.pop_front();
    if (until_[due.slot] == due.when) drop(due.slot);
  }
}

void Known::learn(const PieceId& id, std::int64_t bytes, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  drop_old(now);
  absent_.erase(id);
  if (within(damaged_, id, now)) return;
  const auto pages = static_cast<std::uint32_t>(bytes / kPage);
  Slot slot = index_.find(id);
  if (slot == kNoSlot) {
    while (index_.size() >= most_) drop(index_.victim());
    slot = index_.insert(id, {0, pages});
    if (slot >= until_.size()) until_.resize(slot + 1);
  } else if (index_.held(slot).pages != pages) {
    index_.resize(slot, pages);
  }
  until_[slot] = now + keep_;
  due_.push_back({slot, now + keep_});
}

void Known::forget(const PieceId& id, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (const Slot slot = index_.find(id); slot != kNoSlot) drop(slot);
  note(absent_, id, now + keep_);
}

void Known::learn_damaged(const PieceId& id, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (const Slot slot = index_.find(id); slot != kNoSlot) drop(slot);
  note(damaged_, id, now + kDamaged);
}

void Known::learn_mended(const PieceId& id) {
  const std::lock_guard lock(mutex_);
  damaged_.erase(id);
}

void Known::used(const PieceId& id) {
  const std::lock_guard lock(mutex_);
  if (const Slot slot = index_.find(id); slot != kNoSlot) index_.touch(slot);
}

bool Known::holds(const PieceId& id, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  drop_old(now);
  return index_.find(id) != kNoSlot;
}

bool Known::is_damaged(const PieceId& id, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  return within(damaged_, id, now);
}

bool Known::was_absent(const PieceId& id, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  return within(absent_, id, now);
}

void Known::pieces(std::uint32_t space, const Key& key, Clock::time_point now, std::vector<Piece>& out) {
  const std::lock_guard lock(mutex_);
  drop_old(now);
  found_.clear();
  index_.find(space, key, found_);
  for (const Slot slot : found_) out.push_back({index_.heads(slot), index_.held(slot).pages * kPage});
}

std::size_t Known::covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                           Clock::time_point now, std::span<std::uint8_t> out) {
  const std::lock_guard lock(mutex_);
  drop_old(now);
  return index_.covered(space, keys, heads, prefix, out);
}

std::size_t Known::size() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(index_.size());
}

}  // namespace kvstride::store
