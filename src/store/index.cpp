// SPDX-License-Identifier: Apache-2.0
// One table of cells, entries by number, and the queues of LRU and S3-FIFO through them.
#include "store/index.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

#include "store/cells.h"
#include "store/slots.h"

namespace kvstride::store {
namespace {

constexpr std::size_t kShortKey = 39;  // longer ones have their first bytes here, and the number of the rest
constexpr std::size_t kFirstBytes = kShortKey - sizeof(Slot);
using Rest = std::array<std::byte, 32>;
static_assert(kFirstBytes + sizeof(Rest) >= Key::kMaxBytes);

/// What a search compares and a tier wants to know: one cache line.
struct alignas(64) Entry {
  Held held;
  std::uint32_t space = 0;
  Heads heads;
  std::uint8_t key_bytes = 0;  // 0: the slot is free
  std::array<std::byte, kShortKey> key{};
};
static_assert(sizeof(Entry) == 64);

/// What queues need.
struct Node : Link {
  std::uint32_t pins : 28;
  std::uint32_t uses : 2;  // since it came into its queue, capped
  std::uint32_t read : 1;
  std::uint32_t main : 1;  // in the main queue
};
static_assert(sizeof(Node) == 12);

constexpr std::uint32_t kMaxUses = 3;
constexpr std::uint32_t kUsesToPromote = 2;
constexpr std::size_t kGroup = 16;  // keys whose cache misses overlap

std::uint64_t hash_of(std::uint32_t space, const Key& key) {
  return XXH3_64bits_withSeed(key.bytes().data(), key.bytes().size(), space);
}
std::uint32_t tag_of(std::uint64_t hash) { return static_cast<std::uint32_t>(hash); }
std::uint32_t fingerprint_of(std::uint64_t hash, Heads heads) {
  return static_cast<std::uint32_t>(hash >> 32) ^ ((std::uint32_t{heads.first} << 16 | heads.count) * 0x9e3779b1U);
}

/// What the small queue let go: 32 bits of a hash each. Two pieces with the same bits count as one, which costs an
/// undeserved place in the main queue once in thousands of millions.
class Ghosts {
 public:
  void remember(std::uint32_t fingerprint, std::uint32_t pages, std::uint64_t max_pages) noexcept {
    Slot slot;
    try {
      cells_.reserve();
      slot = slots_.take();
    } catch (const std::exception&) {
      return;  // no memory for it: a miss that does not count as the second
    }
    slots_[slot] = {fingerprint, pages};
    cells_.insert(fingerprint, slot);
    queue_.push(slots_, slot, pages);
    while (queue_.pages() > max_pages) forget(queue_.tail());
  }
  /// Whether it was there; it no longer is.
  bool recall(std::uint32_t fingerprint) {
    const Slot slot = cells_.find(fingerprint, [](Slot) { return true; });
    if (slot != kNoSlot) forget(slot);
    return slot != kNoSlot;
  }
  std::size_t memory() const { return slots_.memory() + cells_.memory(); }

 private:
  struct Ghost {
    std::uint32_t fingerprint;
    std::uint32_t pages;
  };

  void forget(Slot slot) {
    queue_.remove(slots_, slot, slots_[slot].pages);
    cells_.erase(slots_[slot].fingerprint, slot);
    slots_.give(slot);
  }

  Slots<Ghost> slots_;
  Cells cells_;
  Queue queue_;
};

}  // namespace

class Index::Impl {
 public:
  explicit Impl(Policy policy) : policy_(policy) {}

  template <typename Use>
  Slot search(std::uint32_t tag, std::uint32_t space, const Key& key, Use use) const {
    return cells_.find(tag, [&](Slot slot) { return is(slot, space, key) && use(slot); });
  }
  Slot first(std::uint32_t tag, std::uint32_t space, const Key& key) const {
    return search(tag, space, key, [](Slot) { return true; });
  }

  /// Calls use(i, whether one piece of key i has the heads) until it says false. Memory that several keys need is
  /// fetched at once.
  template <typename Use>
  void for_each_of(std::uint32_t space, std::span<const Key> keys, Heads heads, Use use) const {
    std::array<std::uint32_t, kGroup> tags;
    for (std::size_t from = 0; from < keys.size(); from += kGroup) {
      const auto group = keys.subspan(from, std::min(kGroup, keys.size() - from));
      for (std::size_t i = 0; i < group.size(); ++i) {
        tags[i] = tag_of(hash_of(space, group[i]));
        cells_.prefetch(tags[i]);
      }
      for (std::size_t i = 0; i < group.size(); ++i) {
        const Slot slot = cells_.find(tags[i], [](Slot) { return true; });
        if (slot != kNoSlot) __builtin_prefetch(&entries_[slot]);
      }
      for (std::size_t i = 0; i < group.size(); ++i) {
        const Slot slot = search(tags[i], space, group[i], [&](Slot at) { return covers(entries_[at].heads, heads); });
        if (!use(from + i, slot != kNoSlot)) return;
      }
    }
  }

  Slot insert(const PieceId& id, Held held, bool used) {
    cells_.reserve();
    const Slot slot = entries_.take();
    Entry& entry = entries_[slot];
    try {
      set_key(entry, id.key);
    } catch (...) {
      entries_.give(slot);
      throw;
    }
    entry.held = held;
    entry.space = id.space;
    entry.heads = id.heads;
    const std::uint64_t hash = hash_of(id.space, id.key);
    cells_.insert(tag_of(hash), slot);
    Node& node = entries_.node(slot);
    node.pins = 0;
    node.uses = 0;
    node.read = used;
    // Asked in any case: a piece that is held is not remembered.
    const bool recalled = ghosts_.recall(fingerprint_of(hash, id.heads));
    node.main = policy_ == Policy::kLru || used || recalled;
    queue_of(node).push(entries_, slot, held.pages);
    return slot;
  }

  void remove(Slot slot, bool remember) {
    Entry& entry = entries_[slot];
    const Node& node = entries_.node(slot);
    const std::uint64_t hash = hash_of(entry.space, key_of(entry));
    if (remember && node.main == 0) {
      // As many pages as the main queue is meant to have.
      ghosts_.remember(fingerprint_of(hash, entry.heads), entry.held.pages, num_pages() * 9 / 10);
    }
    queue_of(node).remove(entries_, slot, entry.held.pages);
    if (node.pins > 0) --pinned_;
    cells_.erase(tag_of(hash), slot);
    if (entry.key_bytes > kShortKey) rests_.give(rest_of(entry));
    entry.key_bytes = 0;
    entries_.give(slot);
  }

  void touch(Slot slot) {
    Node& node = entries_.node(slot);
    node.read = 1;
    if (policy_ == Policy::kLru) {
      main_.to_head(entries_, slot);
    } else if (node.uses < kMaxUses) {
      ++node.uses;
    }
  }

  void resize(Slot slot, std::uint32_t pages) {
    queue_of(entries_.node(slot)).resize(entries_[slot].held.pages, pages);
    entries_[slot].held.pages = pages;
  }

  Slot victim(const std::function<bool(Slot)>& skip) {
    if (pinned_ == size()) return kNoSlot;
    const bool small_first = small_.pages() * 10 >= num_pages();
    Slot slot = small_first ? kNoSlot : from_main(skip);
    if (slot == kNoSlot) slot = from_small(skip);
    if (slot == kNoSlot) slot = from_main(skip);
    return slot;
  }

  void pin(Slot slot) {
    if (entries_.node(slot).pins++ == 0) ++pinned_;
  }
  void unpin(Slot slot) {
    if (--entries_.node(slot).pins == 0) --pinned_;
  }

  Key key_of(const Entry& entry) const {
    if (entry.key_bytes <= kShortKey) return Key({entry.key.data(), entry.key_bytes});
    std::array<std::byte, kFirstBytes + sizeof(Rest)> bytes;
    std::memcpy(bytes.data(), entry.key.data(), kFirstBytes);
    std::memcpy(bytes.data() + kFirstBytes, rests_[rest_of(entry)].data(), sizeof(Rest));
    return Key({bytes.data(), entry.key_bytes});
  }

  const Slots<Entry, Node>& entries() const { return entries_; }
  Slots<Entry, Node>& entries() { return entries_; }
  std::uint64_t size() const { return small_.size() + main_.size(); }
  std::uint64_t num_pages() const { return small_.pages() + main_.pages(); }
  std::size_t memory() const {
    return sizeof(*this) + entries_.memory() + rests_.memory() + cells_.memory() + ghosts_.memory();
  }

 private:
  bool is(Slot slot, std::uint32_t space, const Key& key) const {
    const Entry& entry = entries_[slot];
    const std::span<const std::byte> bytes = key.bytes();
    if (entry.key_bytes != bytes.size() || entry.space != space) return false;
    if (bytes.size() <= kShortKey) return std::memcmp(entry.key.data(), bytes.data(), bytes.size()) == 0;
    return std::memcmp(entry.key.data(), bytes.data(), kFirstBytes) == 0 &&
           std::memcmp(rests_[rest_of(entry)].data(), bytes.data() + kFirstBytes, bytes.size() - kFirstBytes) == 0;
  }

  void set_key(Entry& entry, const Key& key) {
    const std::span<const std::byte> bytes = key.bytes();
    if (bytes.size() <= kShortKey) {
      std::memcpy(entry.key.data(), bytes.data(), bytes.size());
    } else {
      const Slot rest = rests_.take();
      std::memcpy(entry.key.data(), bytes.data(), kFirstBytes);
      std::memcpy(entry.key.data() + kFirstBytes, &rest, sizeof(rest));
      std::memcpy(rests_[rest].data(), bytes.data() + kFirstBytes, bytes.size() - kFirstBytes);
    }
    entry.key_bytes = static_cast<std::uint8_t>(bytes.size());
  }
  static Slot rest_of(const Entry& entry) {
    Slot rest;
    std::memcpy(&rest, entry.key.data() + kFirstBytes, sizeof(rest));
    return rest;
  }

  Queue& queue_of(const Node& node) { return node.main != 0 ? main_ : small_; }

  /// Goes through the small queue once, from its tail.
  Slot from_small(const std::function<bool(Slot)>& skip) {
    for (std::uint64_t left = small_.size(); left > 0; --left) {
      const Slot slot = small_.tail();
      Node& node = entries_.node(slot);
      if (node.uses >= kUsesToPromote) {
        const std::uint32_t pages = entries_[slot].held.pages;
        small_.remove(entries_, slot, pages);
        node.uses = 0;
        node.main = 1;
        main_.push(entries_, slot, pages);
      } else if (node.pins == 0 && !(skip && skip(slot))) {
        return slot;
      } else {
        small_.to_head(entries_, slot);
      }
    }
    return kNoSlot;
  }

  /// Goes around the main queue until it has passed all entries without using up a use: at most four times.
  Slot from_main(const std::function<bool(Slot)>& skip) {
    std::uint64_t passed = 0;
    while (passed < main_.size()) {
      const Slot slot = main_.tail();
      Node& node = entries_.node(slot);
      if (node.uses > 0) {
        --node.uses;
        passed = 0;
      } else if (node.pins == 0 && !(skip && skip(slot))) {
        return slot;
      } else {
        ++passed;
      }
      main_.to_head(entries_, slot);
    }
    return kNoSlot;
  }

  Policy policy_;
  Slots<Entry, Node> entries_;
  Slots<Rest> rests_;  // of long keys
  Cells cells_;
  Queue small_;
  Queue main_;  // LRU has this one only
  Ghosts ghosts_;
  std::uint64_t pinned_ = 0;
};

Index::Index(Policy policy) : impl_(std::make_unique<Impl>(policy)) {}
Index::~Index() = default;

void Index::find(std::uint32_t space, const Key& key, std::vector<Slot>& out) const {
  impl_->search(tag_of(hash_of(space, key)), space, key, [&](Slot slot) {
    out.push_back(slot);
    return false;
  });
}
bool Index::contains(std::uint32_t space, const Key& key) const {
  return impl_->first(tag_of(hash_of(space, key)), space, key) != kNoSlot;
}
std::size_t Index::covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                           std::span<std::uint8_t> out) const {
  std::size_t leading = 0;
  impl_->for_each_of(space, keys, heads, [&](std::size_t i, bool held) {
    out[i] = held ? 1 : 0;
    leading += held && leading == i ? 1 : 0;
    return held || !prefix;
  });
  return leading;
}
Slot Index::find(const PieceId& id) const {
  return impl_->search(tag_of(hash_of(id.space, id.key)), id.space, id.key,
                       [&](Slot slot) { return heads(slot) == id.heads; });
}

Slot Index::insert(const PieceId& id, Held held, bool used) { return impl_->insert(id, held, used); }
void Index::remove(Slot slot, bool remember) { impl_->remove(slot, remember); }
void Index::touch(Slot slot) { impl_->touch(slot); }
void Index::resize(Slot slot, std::uint32_t pages) { impl_->resize(slot, pages); }
Slot Index::victim(const std::function<bool(Slot)>& skip) { return impl_->victim(skip); }

void Index::pin(Slot slot) { impl_->pin(slot); }
void Index::unpin(Slot slot) { impl_->unpin(slot); }
std::uint32_t Index::pins(Slot slot) const { return impl_->entries().node(slot).pins; }
bool Index::was_read(Slot slot) const { return impl_->entries().node(slot).read != 0; }

PieceId Index::id(Slot slot) const {
  const Entry& entry = impl_->entries()[slot];
  return {entry.space, impl_->key_of(entry), entry.heads};
}
std::uint32_t Index::space(Slot slot) const { return impl_->entries()[slot].space; }
Heads Index::heads(Slot slot) const { return impl_->entries()[slot].heads; }
Held& Index::held(Slot slot) { return impl_->entries()[slot].held; }
const Held& Index::held(Slot slot) const { return impl_->entries()[slot].held; }

std::uint64_t Index::size() const { return impl_->size(); }
std::uint64_t Index::num_pages() const { return impl_->num_pages(); }
std::size_t Index::memory() const { return sizeof(*this) + impl_->memory(); }
void Index::for_each(const std::function<void(Slot)>& use) const {
  for (Slot slot = 0; slot < impl_->entries().end(); ++slot) {
    if (impl_->entries()[slot].key_bytes != 0) use(slot);
  }
}

}  // namespace kvstride::store
