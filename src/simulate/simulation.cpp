// SPDX-License-Identifier: Apache-2.0
// A store over a trace, request by request.
#include "simulate/simulation.h"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>

#include "kvstride/error.h"
#include "store/arena.h"

namespace kvstride::simulate {
namespace {

using store::Admit;
using store::Heads;
using store::kNoSlot;
using store::kPage;
using store::PieceId;
using store::Slot;

// Held::place: when it was written, and whether the tier below lacks it.
constexpr std::uint64_t kOnlyHere = 1;
std::uint64_t place_of(std::chrono::nanoseconds written) { return static_cast<std::uint64_t>(written.count()) << 1; }
std::chrono::nanoseconds written_of(std::uint64_t place) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(place >> 1));
}

/// As long as an engine's SHA-256, which is what an index holds.
Key key_of(std::uint64_t id) {
  const std::array<std::uint64_t, 4> words{id, 0, 0, 0};
  return Key(std::as_bytes(std::span(words)));
}
PieceId piece_of(const Key& key) { return {0, key, Heads{}}; }

/// Of this thread on a CPU: others on the machine do not count.
double cpu_seconds() {
  struct timespec time {};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

[[noreturn]] void fail(std::string what) { throw Error(ErrorCode::kArgument, std::move(what)); }

Setup checked(Setup setup) {
  if (setup.tiers.empty()) fail("simulate: no tiers are given");
  for (const TierSetup& tier : setup.tiers) {
    if (tier.capacity_bytes < 0) fail(fmt::format("simulate: capacity {} of {}", tier.capacity_bytes, tier.name));
  }
  if (setup.block_tokens < 1) fail(fmt::format("simulate: block_tokens is {}, at least 1", setup.block_tokens));
  if (setup.bytes_per_token < 1)
    fail(fmt::format("simulate: bytes_per_token is {}, at least 1", setup.bytes_per_token));
  if (setup.chunk_tokens < 1 || setup.chunk_tokens % setup.block_tokens != 0) {
    fail(fmt::format("simulate: chunk_tokens is {}, it must be a multiple of block_tokens {}", setup.chunk_tokens,
                     setup.block_tokens));
  }
  return setup;
}

}  // namespace

Simulation::Simulation(Setup setup)
    : setup_(checked(std::move(setup))),
      ids_of_chunk_(static_cast<std::size_t>(setup_.chunk_tokens / setup_.block_tokens)) {
  constexpr std::int64_t kMostBytes = kPage << 32;  // an entry's pages are a number of 32 bits
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(setup_.chunk_tokens, setup_.bytes_per_token, &bytes) || bytes >= kMostBytes - kPage) {
    fail(fmt::format("simulate: a chunk of {} tokens of {} bytes is above {} bytes", setup_.chunk_tokens,
                     setup_.bytes_per_token, kMostBytes));
  }
  counts_.chunk_bytes = store::whole_pages(bytes) + kPage;  // its header
  pages_ = static_cast<std::uint32_t>(counts_.chunk_bytes / kPage);
  for (const TierSetup& tier : setup_.tiers) tiers_.push_back(std::make_unique<Tier>(tier));
}

void Simulation::run(const Batch& batch) {
  const double begin = cpu_seconds();
  for (const Request& request : batch.requests) step(request, batch.ids_of(request));
  counts_.seconds += cpu_seconds() - begin;
}

void Simulation::step(const Request& request, std::span<const std::uint64_t> ids) {
  const Time now(request.time);
  if (counts_.requests++ == 0) counts_.first_time = request.time;
  counts_.last_time = request.time;
  counts_.block_events += static_cast<std::int64_t>(ids.size());
  counts_.input_tokens += request.input_tokens;
  const auto whole = static_cast<std::size_t>(request.input_tokens / setup_.chunk_tokens);
  const std::size_t chunks = std::min(whole, ids.size() / ids_of_chunk_);
  keys_.clear();
  for (std::size_t i = 1; i <= chunks; ++i) keys_.push_back(key_of(ids[i * ids_of_chunk_ - 1]));
  for (const auto& tier : tiers_) tier->admission.asked(0, keys_, Heads{});
  // For its prefetching: what follows finds its memory near.
  flags_.resize(chunks);
  for (const auto& tier : tiers_) {
    if (tier->index.covered(0, keys_, Heads{}, true, flags_) == chunks) break;
  }
  std::size_t hits = 0;
  while (hits < chunks && read(keys_[hits], now)) ++hits;
  for (std::size_t i = hits; i < chunks; ++i) put(keys_[i], now);
  counts_.chunks += static_cast<std::int64_t>(chunks);
  counts_.hits += static_cast<std::int64_t>(hits);
  counts_.saved_tokens += static_cast<std::int64_t>(hits) * setup_.chunk_tokens;
  counts_.full_hits += chunks > 0 && hits == chunks;
}

/// The entry of a chunk; one that is too old goes.
Slot Simulation::find(Tier& tier, const Key& key, Time now) {
  const Slot slot = tier.index.find(piece_of(key));
  if (slot == kNoSlot || !tier.admission.expired(written_of(tier.index.held(slot).place), now)) return slot;
  tier.index.remove(slot, false);
  ++tier.counts.expired;
  return kNoSlot;
}

/// From the first tier that has it.
bool Simulation::read(const Key& key, Time now) {
  for (std::size_t i = 0; i < tiers_.size(); ++i) {
    Tier& tier = *tiers_[i];
    const Slot slot = find(tier, key, now);
    if (slot == kNoSlot) continue;
    tier.index.touch(slot);
    ++tier.counts.hits;
    for (std::size_t above = 0; above < i; ++above) offer(above, key, From::kBelow, now);
    return true;
  }
  return false;
}

void Simulation::put(const Key& key, Time now) {
  bool held = false;
  bool refused = false;
  for (std::size_t i = 0; i < tiers_.size(); ++i) {
    const bool has = find(*tiers_[i], key, now) != kNoSlot || offer(i, key, From::kPut, now);
    (has ? held : refused) = true;
  }
  if (!held || !refused) return;
  for (std::size_t i = 0; i < tiers_.size(); ++i) {
    if (!setup_.tiers[i].demotes) continue;
    const Slot slot = tiers_[i]->index.find(piece_of(key));
    if (slot != kNoSlot) tiers_[i]->index.held(slot).place |= kOnlyHere;
  }
}

/// Gives a tier a chunk that it lacks; whether it has it now.
bool Simulation::offer(std::size_t number, const Key& key, From from, Time now) {
  Tier& tier = *tiers_[number];
  const std::int64_t capacity = setup_.tiers[number].capacity_bytes;
  if (counts_.chunk_bytes > capacity) {
    ++tier.counts.refused_large;
    return false;
  }
  switch (tier.admission.admit(0, key, Heads{}, counts_.chunk_bytes, store::Admission::kNameless, now)) {
    case Admit::kYes: break;
    case Admit::kBudget: ++tier.counts.refused_budget; return false;
    default: ++tier.counts.refused_seldom; return false;
  }
  const auto fits = [&] { return static_cast<std::int64_t>(tier.index.num_pages() + pages_) <= capacity / kPage; };
  while (!fits()) evict(number, now);
  tier.index.insert(piece_of(key), {place_of(now), pages_});
  ++tier.counts.writes;
  tier.counts.promotions += from == From::kBelow;
  tier.counts.demotions += from == From::kAbove;
  tier.counts.peak_entries = std::max(tier.counts.peak_entries, static_cast<std::int64_t>(tier.index.size()));
  return true;
}

void Simulation::evict(std::size_t number, Time now) {
  Tier& tier = *tiers_[number];
  const Slot slot = tier.index.victim();  // nothing is pinned
  ++tier.counts.evictions;
  tier.counts.evicted_unread += !tier.index.was_read(slot);
  const std::uint64_t place = tier.index.held(slot).place;
  const bool demotes =
      (place & kOnlyHere) != 0 && number + 1 < tiers_.size() && !tier.admission.expired(written_of(place), now);
  if (!demotes) return tier.index.remove(slot, true);
  const Key key = tier.index.id(slot).key;
  tier.index.remove(slot, true);
  if (find(*tiers_[number + 1], key, now) == kNoSlot) offer(number + 1, key, From::kAbove, now);
}

Result Simulation::result() const {
  Result out = counts_;
  for (const auto& tier : tiers_) {
    TierResult one = tier->counts;
    one.entries = static_cast<std::int64_t>(tier->index.size());
    one.index_bytes = static_cast<std::int64_t>(tier->index.memory());
    one.counter_bytes = static_cast<std::int64_t>(tier->admission.memory());
    out.tiers.push_back(one);
  }
  return out;
}

namespace {

/// An index that was full of other keys before: as many ghosts as it may have.
double measured_bytes(std::int64_t blocks, store::Policy policy, double* lookups_per_second) {
  store::Index index(policy);
  std::uint64_t id = 0;
  const auto insert = [&] { index.insert(piece_of(key_of(id++)), {0, 1}); };
  for (std::int64_t i = 0; i < blocks; ++i) insert();
  for (std::int64_t i = 0; i < blocks; ++i) {
    index.remove(index.victim(), true);
    insert();
  }
  if (lookups_per_second != nullptr) {
    constexpr std::int64_t kRun = 64;  // a prefix of a prompt
    std::vector<Key> keys;
    std::vector<std::uint8_t> flags(kRun);
    std::uint64_t random = 1;
    std::int64_t done = 0;
    double time = 0;
    while (time < 0.3) {
      keys.clear();
      for (std::int64_t i = 0; i < kRun; ++i) {
        random = random * 6364136223846793005U + 1442695040888963407U;
        keys.push_back(key_of(id - 1 - (random >> 33) % static_cast<std::uint64_t>(blocks)));
      }
      const double begin = cpu_seconds();
      index.covered(0, keys, Heads{}, false, flags);
      time += cpu_seconds() - begin;
      done += kRun;
    }
    *lookups_per_second = static_cast<double>(done) / time;
  }
  return static_cast<double>(index.memory()) / static_cast<double>(blocks);
}

}  // namespace

Scale measure_scale(std::int64_t blocks) {
  constexpr std::int64_t kMost = 1'000'000'000'000'000;
  constexpr std::int64_t kMeasured = 1 << 21;
  if (blocks < 1 || blocks > kMost) fail(fmt::format("simulate: scale is {}, it must be from 1 to {}", blocks, kMost));
  Scale out;
  out.blocks = blocks;
  // A table is doubled: it is as full with half as many.
  out.measured_blocks = blocks;
  while (out.measured_blocks > kMeasured) out.measured_blocks = (out.measured_blocks + 1) / 2;
  out.bytes_per_block = measured_bytes(out.measured_blocks, store::Policy::kS3Fifo, &out.lookups_per_second);
  out.bytes_per_block_lru = measured_bytes(out.measured_blocks, store::Policy::kLru, nullptr);
  out.index_bytes = static_cast<std::int64_t>(out.bytes_per_block * static_cast<double>(blocks));
  out.index_bytes_lru = static_cast<std::int64_t>(out.bytes_per_block_lru * static_cast<double>(blocks));
  out.indexes = (blocks + store::Index::kMaxEntries - 1) / store::Index::kMaxEntries;
  return out;
}

}  // namespace kvstride::simulate
