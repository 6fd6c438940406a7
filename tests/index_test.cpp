// SPDX-License-Identifier: Apache-2.0
// The store's index: what it holds against naive maps, the order of victims against naive lists, memory at a million.
#include "store/index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <list>
#include <map>
#include <random>
#include <set>
#include <string>

namespace kvstride::store {
namespace {

Key key_of(const std::string& text) { return Key(std::as_bytes(std::span(text))); }
std::string text_of(const Key& key) { return {reinterpret_cast<const char*>(key.bytes().data()), key.bytes().size()}; }
/// Of 36 bytes, as an engine's SHA-256 with a group number; no two are alike.
Key long_key(std::uint32_t number) {
  std::array<std::uint32_t, 9> words;
  std::mt19937 random(number);
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random());
  words[8] = number;
  return Key(std::as_bytes(std::span(words)));
}

struct Id {
  std::uint32_t space = 0;
  std::string key;
  std::uint16_t first_head = 0;
  std::uint16_t num_heads = 0;
  auto operator<=>(const Id&) const = default;
};
PieceId piece_of(const Id& id) { return {id.space, key_of(id.key), {id.first_head, id.num_heads}}; }
Id id_of(const PieceId& piece) { return {piece.space, text_of(piece.key), piece.heads.first, piece.heads.count}; }

/// The rules of index.h one by one, on lists whose front is the head.
class Model {
 public:
  struct Item {
    Id id;
    std::uint32_t pages;
    int uses = 0;
    std::uint32_t pins = 0;
    bool read = false;
  };
  using Skip = std::function<bool(const Id&)>;

  explicit Model(Policy policy) : lru_(policy == Policy::kLru) {}

  Item* find(const Id& id) {
    for (auto* queue : {&small_, &main_}) {
      for (Item& item : *queue) {
        if (item.id == id) return &item;
      }
    }
    return nullptr;
  }
  void insert(const Id& id, std::uint32_t pages, bool used) {
    const auto ghost = std::find_if(ghosts_.begin(), ghosts_.end(), [&](const auto& g) { return g.first == id; });
    const bool remembered = ghost != ghosts_.end();
    if (remembered) ghosts_.erase(ghost);
    num_recalled_ += remembered;
    (lru_ || used || remembered ? main_ : small_).push_front({id, pages, 0, 0, used});
  }
  void touch(const Id& id) {
    Item& item = *find(id);
    item.read = true;
    if (!lru_) {
      item.uses = std::min(item.uses + 1, 3);
    } else {
      const auto at = std::find_if(main_.begin(), main_.end(), [&](const Item& i) { return i.id == id; });
      main_.splice(main_.begin(), main_, at);
    }
  }
  void remove(const Id& id, bool remember) {
    const std::uint64_t total = num_pages();
    for (auto* queue : {&small_, &main_}) {
      const auto at = std::find_if(queue->begin(), queue->end(), [&](const Item& i) { return i.id == id; });
      if (at == queue->end()) continue;
      if (remember && queue == &small_) {
        ghosts_.emplace_front(id, at->pages);
        while (10 * pages_of(ghosts_) > 9 * total) ghosts_.pop_back();
      }
      queue->erase(at);
    }
  }
  const Id* victim(const Skip& skip) {
    bool all_pinned = true;
    for (const auto* queue : {&small_, &main_}) {
      for (const Item& item : *queue) all_pinned = all_pinned && item.pins > 0;
    }
    if (all_pinned) return nullptr;
    const bool small_first = 10 * pages_of(small_) >= num_pages();
    const Id* found = small_first ? from_small(skip) : from_main(skip);
    if (found == nullptr) found = small_first ? from_main(skip) : from_small(skip);
    // Promotions may have given the main queue something to give.
    if (found == nullptr && !small_first) found = from_main(skip);
    return found;
  }

  std::vector<Id> ids() const {
    std::vector<Id> out;
    for (const auto* queue : {&small_, &main_}) {
      for (const Item& item : *queue) out.push_back(item.id);
    }
    return out;
  }
  std::uint64_t num_pages() const { return pages_of(small_) + pages_of(main_); }
  int num_promoted() const { return num_promoted_; }
  int num_recalled() const { return num_recalled_; }

 private:
  template <typename List>
  static std::uint64_t pages_of(const List& list) {
    std::uint64_t sum = 0;
    for (const auto& one : list) {
      if constexpr (requires { one.pages; }) {
        sum += one.pages;
      } else {
        sum += one.second;
      }
    }
    return sum;
  }
  const Id* from_small(const Skip& skip) {
    for (std::size_t n = small_.size(); n > 0; --n) {
      Item& tail = small_.back();
      if (tail.uses > 1) {
        tail.uses = 0;
        main_.splice(main_.begin(), small_, std::prev(small_.end()));
        ++num_promoted_;
      } else if (tail.pins > 0 || skip(tail.id)) {
        small_.splice(small_.begin(), small_, std::prev(small_.end()));
      } else {
        return &tail.id;
      }
    }
    return nullptr;
  }
  const Id* from_main(const Skip& skip) {
    std::size_t in_a_row = 0;
    while (in_a_row < main_.size()) {
      Item& tail = main_.back();
      if (tail.uses > 0) {
        --tail.uses;
        in_a_row = 0;
      } else if (tail.pins > 0 || skip(tail.id)) {
        ++in_a_row;
      } else {
        return &tail.id;
      }
      main_.splice(main_.begin(), main_, std::prev(main_.end()));
    }
    return nullptr;
  }

  bool lru_;
  std::list<Item> small_;
  std::list<Item> main_;
  std::list<std::pair<Id, std::uint32_t>> ghosts_;
  int num_promoted_ = 0;
  int num_recalled_ = 0;
};

/// An index and a model that are told the same.
class Pair {
 public:
  Pair(Policy policy, std::uint32_t seed) : index_(policy), model_(policy), random_(seed) {
    // Every length, keys that are the beginning of others, and keys that differ in the last byte only.
    for (std::size_t length = 1; length <= Key::kMaxBytes; ++length) {
      for (const char last : {'a', 'b'}) keys_.push_back(std::string(length - 1, 'a') + last);
    }
  }

  void step() {
    const std::uint32_t dice = below(100);
    if (dice < 30) {
      insert(any_id());
    } else if (dice < 70) {
      on_any([&](const Id& id, Slot slot) {
        index_.touch(slot);
        model_.touch(id);
      });
    } else if (dice < 80) {
      on_any([&](const Id& id, Slot slot) {
        const bool pin = index_.pins(slot) == 0 || below(3) == 0;
        pin ? index_.pin(slot) : index_.unpin(slot);
        model_.find(id)->pins += pin ? 1U : ~0U;
      });
    } else if (dice < 82) {
      on_any([&](const Id& id, Slot slot) { remove(id, slot, below(2) == 0); });
    } else {
      check(any_id());
    }
    while (index_.num_pages() > kMostPages && evict()) {
    }
    ASSERT_EQ(index_.size(), slots_.size());
    ASSERT_EQ(index_.num_pages(), model_.num_pages());
  }

  /// All is let go in the order that the model says.
  void drain() {
    for (const auto& [id, slot] : slots_) {
      while (index_.pins(slot) > 0) index_.unpin(slot);
      model_.find(id)->pins = 0;
    }
    while (!slots_.empty()) ASSERT_TRUE(evict());
    EXPECT_EQ(index_.size(), 0U);
    EXPECT_EQ(index_.num_pages(), 0U);
    EXPECT_EQ(index_.victim(), kNoSlot);
  }

  const Model& model() const { return model_; }
  int num_evicted() const { return num_evicted_; }
  int num_kept() const { return num_kept_; }

 private:
  static constexpr std::uint64_t kMostPages = 900;

  std::uint32_t below(std::size_t n) { return static_cast<std::uint32_t>(random_() % n); }
  Id any_id() {
    constexpr std::array<std::array<std::uint16_t, 2>, 3> kHeads{{{0, 0}, {0, 4}, {4, 4}}};
    const auto heads = kHeads[below(3)];
    return {below(3), keys_[below(keys_.size())], heads[0], heads[1]};
  }
  template <typename Use>
  void on_any(Use use) {
    if (slots_.empty()) return;
    const auto at = std::next(slots_.begin(), below(slots_.size()));
    use(Id(at->first), at->second);
  }
  void insert(const Id& id) {
    if (slots_.contains(id)) return;
    const std::uint32_t pages = below(8) == 0 ? 40 : 1 + below(9);
    const bool used = below(12) == 0;
    const std::uint64_t place = random_();
    const Slot slot = index_.insert(piece_of(id), {place, pages}, used);
    model_.insert(id, pages, used);
    slots_[id] = slot;
    places_[id] = place;
  }
  void remove(const Id& id, Slot slot, bool remember) {
    index_.remove(slot, remember);
    model_.remove(id, remember);
    slots_.erase(id);
  }
  bool evict() {
    // One in seven is kept back, others each time.
    const std::uint32_t salt = below(7);
    const auto keep = [&](const Id& id) { return (id.key.size() + salt) % 7 == 0 && slots_.size() > 40; };
    const Id* want = model_.victim(keep);
    const Slot slot = index_.victim([&](Slot candidate) { return keep(id_of(index_.id(candidate))); });
    EXPECT_EQ(slot == kNoSlot, want == nullptr);
    if (slot == kNoSlot || want == nullptr) return false;
    const Id id = *want;
    EXPECT_EQ(id_of(index_.id(slot)), id) << "after " << num_evicted_ << " evictions";
    EXPECT_EQ(index_.pins(slot), 0U);
    ++num_evicted_;
    if (below(16) == 0) return ++num_kept_ != 0 && !testing::Test::HasFailure();  // only asked
    remove(id, slot, true);
    return !testing::Test::HasFailure();
  }
  /// What the index says of an id and of its key.
  void check(const Id& id) {
    std::set<Slot> want;
    for (const auto& [other, slot] : slots_) {
      if (other.space == id.space && other.key == id.key) want.insert(slot);
    }
    std::vector<Slot> found;
    index_.find(id.space, key_of(id.key), found);
    EXPECT_EQ(std::set<Slot>(found.begin(), found.end()), want);
    EXPECT_EQ(found.size(), want.size());
    EXPECT_EQ(index_.contains(id.space, key_of(id.key)), !want.empty());
    const auto held = slots_.find(id);
    const Slot slot = index_.find(piece_of(id));
    ASSERT_EQ(slot, held == slots_.end() ? kNoSlot : held->second);
    if (slot == kNoSlot) return;
    const Model::Item& item = *model_.find(id);
    EXPECT_EQ(id_of(index_.id(slot)), id);
    EXPECT_EQ(index_.space(slot), id.space);
    EXPECT_EQ(index_.heads(slot), (Heads{id.first_head, id.num_heads}));
    EXPECT_EQ(index_.held(slot).pages, item.pages);
    EXPECT_EQ(index_.held(slot).place, places_[id]);
    EXPECT_EQ(index_.pins(slot), item.pins);
    EXPECT_EQ(index_.was_read(slot), item.read);
  }

  Index index_;
  Model model_;
  std::mt19937 random_;
  std::vector<std::string> keys_;
  std::map<Id, Slot> slots_;
  std::map<Id, std::uint64_t> places_;
  int num_evicted_ = 0;
  int num_kept_ = 0;
};

class Policies : public testing::TestWithParam<Policy> {};
INSTANTIATE_TEST_SUITE_P(Index, Policies, testing::Values(Policy::kS3Fifo, Policy::kLru),
                         [](const auto& p) { return p.param == Policy::kLru ? "Lru" : "S3Fifo"; });

TEST_P(Policies, RandomCallsGiveTheVictimsOfTheNaiveModel) {
  int evicted = 0;
  int kept = 0;
  int promoted = 0;
  int recalled = 0;
  for (std::uint32_t seed = 1; seed <= 8; ++seed) {
    Pair pair(GetParam(), seed);
    for (int i = 0; i < 5000; ++i) {
      pair.step();
      if (HasFailure()) FAIL() << "seed " << seed << ", step " << i;
    }
    pair.drain();
    if (HasFailure()) FAIL() << "seed " << seed << ", drain";
    evicted += pair.num_evicted();
    kept += pair.num_kept();
    promoted += pair.model().num_promoted();
    recalled += pair.model().num_recalled();
  }
  // The calls were such that every rule was needed.
  EXPECT_GT(evicted, 5000);
  EXPECT_GT(kept, 100);
  if (GetParam() == Policy::kS3Fifo) {
    EXPECT_GT(promoted, 500);
    EXPECT_GT(recalled, 200);
  }
}

TEST_P(Policies, VictimsAreNeverPinnedAndTheSearchEnds) {
  Index index(GetParam());
  EXPECT_EQ(index.victim(), kNoSlot);
  std::vector<Slot> slots;
  for (std::uint32_t i = 0; i < 100; ++i) {
    slots.push_back(index.insert({0, long_key(i), {}}, {i, 1}, i % 3 == 0));
    for (std::uint32_t hit = 0; hit < i % 5; ++hit) index.touch(slots.back());
    index.pin(slots.back());
    index.pin(slots.back());
  }
  EXPECT_EQ(index.victim(), kNoSlot);
  index.unpin(slots[57]);
  EXPECT_EQ(index.victim(), kNoSlot);
  index.unpin(slots[57]);
  EXPECT_EQ(index.victim(), slots[57]);
  EXPECT_EQ(index.victim([](Slot) { return true; }), kNoSlot);
  EXPECT_EQ(index.victim(), slots[57]);
  index.remove(slots[58], false);  // pinned as it is
  index.remove(slots[57], true);
  EXPECT_EQ(index.victim(), kNoSlot);
  EXPECT_EQ(index.size(), 98U);
}

TEST(Index, WhatIsPromotedOnTheWayCanBeTheVictim) {
  Index index(Policy::kS3Fifo);
  const Slot large = index.insert({0, long_key(0), {}}, {0, 90}, true);
  const Slot small = index.insert({0, long_key(1), {}}, {0, 1});
  for (int i = 0; i < 2; ++i) index.touch(small);
  index.pin(large);
  EXPECT_EQ(index.victim(), small);
}

TEST(Index, WhereAllIsPinnedNothingChanges) {
  Index index(Policy::kS3Fifo);
  const Slot older = index.insert({0, long_key(0), {}}, {0, 1}, true);
  const Slot newer = index.insert({0, long_key(1), {}}, {0, 1}, true);
  index.touch(newer);
  for (const Slot slot : {older, newer}) index.pin(slot);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(index.victim(), kNoSlot);
  for (const Slot slot : {older, newer}) index.unpin(slot);
  EXPECT_EQ(index.victim(), older);
  index.remove(older, true);
  const Slot newest = index.insert({0, long_key(2), {}}, {0, 1}, true);
  EXPECT_EQ(index.victim(), newest) << "a use that was there still counts";
}

TEST(Index, LruLetsGoWhatWasNotUsedForLongest) {
  Index index(Policy::kLru);
  std::vector<Slot> slots;
  for (std::uint32_t i = 0; i < 4; ++i) slots.push_back(index.insert({0, long_key(i), {}}, {i, 1}));
  index.touch(slots[0]);
  index.touch(slots[2]);
  for (const std::size_t want : {1U, 3U, 0U, 2U}) {
    ASSERT_EQ(index.victim(), slots[want]);
    index.remove(slots[want], true);
  }
}

/// Three used pieces outlive a scan of pieces that nobody reads, however long it is.
TEST(Index, S3FifoKeepsWhatIsUsedWhileAScanGoesBy) {
  Index index(Policy::kS3Fifo);
  std::vector<Slot> used;
  for (std::uint32_t i = 0; i < 3; ++i) {
    used.push_back(index.insert({0, long_key(i), {}}, {i, 10}));
    index.touch(used.back());
    if (i < 2) index.touch(used.back());
  }
  for (std::uint32_t i = 3; i < 1000; ++i) {
    index.insert({0, long_key(i), {}}, {i, 10});
    if (index.num_pages() <= 100) continue;
    const Slot slot = index.victim();
    ASSERT_NE(slot, used[0]);
    ASSERT_NE(slot, used[1]);
    index.remove(slot, true);
  }
  EXPECT_FALSE(index.contains(0, long_key(2))) << "one hit is not enough";
  // Its ghost is gone by now, that of a recent one is not: it comes back into the main queue, where a scan spares it.
  EXPECT_FALSE(index.contains(0, long_key(985)));
  const Slot again = index.insert({0, long_key(985), {}}, {0, 10});
  const Slot late = index.insert({0, long_key(2), {}}, {0, 10});
  bool late_went = false;
  for (std::uint32_t i = 1000; i < 1050; ++i) {
    index.insert({0, long_key(i), {}}, {i, 10});
    while (index.num_pages() > 100) {
      const Slot slot = index.victim();
      ASSERT_NE(slot, again);
      late_went = late_went || slot == late;
      index.remove(slot, true);
    }
  }
  EXPECT_TRUE(late_went);
}

TEST(Index, SizesCountInPagesNotInEntries) {
  Index index(Policy::kS3Fifo);
  // One large piece in the main queue, nine small ones: a tenth of the pages at 10, less at 9.
  const Slot large = index.insert({0, long_key(0), {}}, {0, 90}, true);
  std::vector<Slot> small;
  for (std::uint32_t i = 1; i <= 9; ++i) small.push_back(index.insert({0, long_key(i), {}}, {i, 1}));
  EXPECT_EQ(index.victim(), large);
  small.push_back(index.insert({0, long_key(10), {}}, {10, 1}));
  EXPECT_EQ(index.victim(), small[0]);
}

TEST(Index, ANewSizeCountsAndThePlaceStays) {
  for (const Policy policy : {Policy::kLru, Policy::kS3Fifo}) {
    Index index(policy);
    const Slot first = index.insert({0, long_key(1), {}}, {7, 3});
    index.insert({0, long_key(2), {}}, {8, 4});
    index.resize(first, 10);
    EXPECT_EQ(index.num_pages(), 14U);
    EXPECT_EQ(index.held(first).pages, 10U);
    EXPECT_EQ(index.held(first).place, 7U);
    EXPECT_EQ(index.victim(), first);
    index.remove(first, true);
    EXPECT_EQ(index.num_pages(), 4U);
  }
}

TEST(Index, BatchesSayWhatSingleCallsSay) {
  Index index(Policy::kS3Fifo);
  std::vector<Key> keys;
  for (std::uint32_t i = 0; i < 100; ++i) keys.push_back(long_key(i));
  std::vector<std::uint8_t> out(100);
  EXPECT_EQ(index.covered(0, keys, {}, true, out), 0U);
  for (const std::size_t absent : {100U, 99U, 50U, 17U, 16U, 15U, 1U, 0U}) {
    Index some(Policy::kLru);
    for (std::uint32_t i = 0; i < 100; ++i) {
      // One piece of all heads, or two that have them together, which is not what is asked.
      if (i != absent) some.insert({7, keys[i], {0, 4}}, {i, 1});
      if (i == absent) some.insert({7, keys[i], {0, 2}}, {i, 1});
      if (i == absent) some.insert({7, keys[i], {2, 2}}, {i, 1});
    }
    EXPECT_EQ(some.covered(7, keys, {1, 3}, true, out), absent);
    EXPECT_EQ(some.covered(7, keys, {0, 5}, true, out), 0U);
    EXPECT_EQ(some.covered(8, keys, {0, 4}, true, out), 0U);
    EXPECT_EQ(some.covered(7, keys, {2, 2}, false, out), 100U);
    EXPECT_EQ(some.covered(7, keys, {1, 2}, false, out), absent);
    for (std::size_t i = 0; i < 100; ++i) EXPECT_EQ(out[i] != 0, i != absent);
    EXPECT_EQ(some.covered(7, {}, {0, 4}, true, out), 0U);
  }
}

TEST(Index, MemoryOfWhatIsGoneIsUsedAgain) {
  Index index(Policy::kS3Fifo);
  const auto numbered = [](std::uint32_t number) {
    const std::string digits = std::to_string(number);
    return key_of(std::string(Key::kMaxBytes - digits.size(), 'k') + digits);
  };
  std::size_t after_some = 0;
  for (std::uint32_t i = 0; i < 100'000; ++i) {
    index.insert({0, numbered(i), {}}, {i, 1});
    if (index.size() > 1000) index.remove(index.victim(), true);
    if (i == 10'000) after_some = index.memory();
  }
  EXPECT_EQ(index.memory(), after_some);
}

TEST(Index, AMillionEntriesInAHundredMegabytes) {
  constexpr std::uint32_t kCount = 1'000'000;
  Index index(Policy::kS3Fifo);
  std::vector<std::uint32_t> key(9);
  const auto numbered = [&](std::uint32_t number) {
    key[0] = number * 0x9e3779b1U;
    key[8] = number;
    return Key(std::as_bytes(std::span(key)));
  };
  for (std::uint32_t i = 0; i < kCount; ++i) index.insert({i % 2, numbered(i), {}}, {i, 512});
  EXPECT_EQ(index.size(), kCount);
  EXPECT_EQ(index.num_pages(), 512ULL * kCount);
  EXPECT_LE(index.memory(), 120ULL * kCount);
  EXPECT_GE(index.memory(), (64ULL + 12 + 8) * kCount) << "what it cannot be without";
  for (std::uint32_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(index.contains(i % 2, numbered(i)));
    ASSERT_FALSE(index.contains(1 - i % 2, numbered(i)));
  }
  std::uint64_t places = 0;
  index.for_each([&](Slot slot) { places += index.held(slot).place; });
  EXPECT_EQ(places, std::uint64_t{kCount} * (kCount - 1) / 2);
  const std::size_t before = index.memory();
  for (std::uint32_t i = 0; i < kCount; ++i) {
    const Slot slot = index.victim();
    ASSERT_EQ(index.held(slot).place, i);
    index.remove(slot, false);
  }
  EXPECT_EQ(index.size(), 0U);
  index.for_each([](Slot) { FAIL(); });
  for (std::uint32_t i = 0; i < kCount; ++i) index.insert({0, numbered(i), {}}, {i, 1});
  EXPECT_EQ(index.memory(), before) << "slots are used again";
}

}  // namespace
}  // namespace kvstride::store
