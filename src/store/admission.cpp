// SPDX-License-Identifier: Apache-2.0
// Which chunks a tier takes, and how long it keeps them.
#include "store/admission.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

__extension__ using Wide = __int128;

constexpr std::int64_t kDay = std::chrono::nanoseconds(std::chrono::hours(24)).count();
constexpr std::size_t kWordsOfLine = 8;  // one cache line: 128 counters
constexpr std::int64_t kCountersAnAsk = 16;
constexpr std::int64_t kMaxWindow = std::int64_t{1} << 30;
constexpr std::size_t kMaxTenants = 65536;

/// Pieces of one chunk with other heads are other things: ranks ask for their own.
std::uint64_t hash_of(std::uint32_t space, const Key& key, Heads heads) {
  const std::uint64_t seed = space | std::uint64_t{heads.first} << 48 | std::uint64_t{heads.count} << 32;
  return XXH3_64bits_withSeed(key.bytes().data(), key.bytes().size(), seed);
}

/// Where the four counters of a hash lie: each in two words of its own, so that none is given twice.
struct Place {
  std::size_t word;
  int shift;
};
std::array<Place, 4> places_of(std::uint64_t hash, std::size_t num_words) {
  const std::size_t line = hash & (num_words / kWordsOfLine - 1);
  std::array<Place, 4> out;
  for (std::size_t i = 0; i < 4; ++i) {
    // Five bits say which of their 32 counters.
    const auto bits = static_cast<unsigned>(hash >> (40 + 6 * i)) & 31;
    out[i] = {line * kWordsOfLine + 2 * i + (bits >> 4), static_cast<int>(bits & 15) * 4};
  }
  return out;
}

template <typename T>
void check(const char* name, T value, T least, T most) {
  if (value >= least && value <= most) return;
  throw Error(ErrorCode::kArgument,
              fmt::format("Admission: {} is {}, it must be from {} to {}", name, value, least, most));
}

AdmissionOptions checked(AdmissionOptions options) {
  constexpr std::int64_t kMost = std::int64_t{1} << 60;
  check("min_reuse", options.min_reuse, 1, RecentAsks::kMost);
  check("reuse_window", options.reuse_window, std::int64_t{1}, kMaxWindow);
  check("write_bytes_a_day", options.write_bytes_a_day, std::int64_t{0}, kMost);
  check("write_burst_bytes", options.write_burst_bytes, std::int64_t{0}, kMost);
  check("time_to_live", std::int64_t{options.time_to_live.count()}, std::int64_t{0}, kMost);  // nanoseconds
  check("tenant_bytes", options.tenant_bytes, std::int64_t{0}, kMost);
  for (const auto& [name, bytes] : options.bytes_of_tenant) {
    check(fmt::format("bytes_of_tenant['{}']", name).c_str(), bytes, std::int64_t{0}, kMost);
  }
  if (options.write_burst_bytes > 0 && options.write_bytes_a_day == 0) {
    throw Error(ErrorCode::kArgument, "Admission: write_burst_bytes needs write_bytes_a_day");
  }
  if (options.bytes_of_tenant.size() >= kMaxTenants - 1) {
    throw Error(ErrorCode::kArgument, fmt::format("Admission: bytes_of_tenant has {} tenants, at most {} are allowed",
                                                  options.bytes_of_tenant.size(), kMaxTenants - 2));
  }
  return options;
}

}  // namespace

RecentAsks::RecentAsks(std::int64_t window) : window_(window) {
  constexpr std::int64_t kFewest = 4096;  // a page
  const std::int64_t counters = std::max(window * kCountersAnAsk, kFewest);
  now_.resize(std::bit_ceil(static_cast<std::size_t>(counters)) / 16);
  before_.resize(now_.size());
}

int RecentAsks::least(const Counters& counters, std::uint64_t hash) const {
  int out = kMost;
  for (const Place& place : places_of(hash, counters.size())) {
    out = std::min(out, static_cast<int>(counters[place.word] >> place.shift & 15));
  }
  return out;
}

void RecentAsks::add(std::uint64_t hash) {
  const int before = least(now_, hash);
  if (before < kMost) {
    // Only the lowest ones: the others already count somebody else's asks.
    for (const Place& place : places_of(hash, now_.size())) {
      std::uint64_t& word = now_[place.word];
      if (static_cast<int>(word >> place.shift & 15) == before) word += std::uint64_t{1} << place.shift;
    }
  }
  if (++asks_ < window_) return;
  asks_ = 0;
  now_.swap(before_);
  std::fill(now_.begin(), now_.end(), 0);
}

int RecentAsks::count(std::uint64_t hash) const { return std::min(least(now_, hash) + least(before_, hash), kMost); }

WriteBudget::WriteBudget(std::int64_t bytes_a_day, std::int64_t burst)
    : rate_(bytes_a_day), burst_(burst > 0 ? burst : std::max<std::int64_t>(bytes_a_day / 24, 1)), level_(burst_) {}

bool WriteBudget::open(std::chrono::nanoseconds now) {
  if (rate_ == 0) return true;
  if (last_ && now > *last_) {
    const Wide time = Wide{now.count()} - last_->count();
    const Wide earned = time * rate_ + rest_;
    const Wide level = level_ + earned / kDay;
    if (level >= burst_) {
      level_ = burst_;
      rest_ = 0;
    } else {
      level_ = static_cast<std::int64_t>(level);
      rest_ = static_cast<std::int64_t>(earned % kDay);
    }
  }
  last_ = std::max(last_.value_or(now), now);
  return level_ > 0;
}

void WriteBudget::spend(std::int64_t bytes) {
  if (rate_ > 0) level_ -= bytes;
}

void WriteBudget::refund(std::int64_t bytes) {
  if (rate_ > 0) level_ = std::min(burst_, level_ + bytes);
}

const char* name_of(Admit admit) noexcept {
  switch (admit) {
    case Admit::kYes: return "yes";
    case Admit::kSeldom: return "seldom";
    case Admit::kBudget: return "budget";
    case Admit::kQuota: return "quota";
  }
  return "";
}

Admission::Admission(AdmissionOptions options)
    : options_(checked(std::move(options))),
      quotas_(options_.tenant_bytes > 0 || !options_.bytes_of_tenant.empty()),
      counts_(quotas_ || options_.min_reuse > 1 || options_.write_bytes_a_day > 0),
      budget_(options_.write_bytes_a_day, options_.write_burst_bytes) {
  if (options_.min_reuse > 1) asks_.emplace(options_.reuse_window);
  if (!quotas_) return;
  accounts_.push_back({0, default_limit()});
  tenants_.emplace("", kNameless);
  for (const auto& [name, bytes] : options_.bytes_of_tenant) {
    if (name.empty()) {
      accounts_[kNameless].limit = bytes;
    } else {
      tenants_.emplace(name, static_cast<Tenant>(accounts_.size()));
      accounts_.push_back({0, bytes});
    }
  }
}

std::int64_t Admission::default_limit() const {
  return options_.tenant_bytes > 0 ? options_.tenant_bytes : std::numeric_limits<std::int64_t>::max();
}

void Admission::asked(std::uint32_t space, std::span<const Key> keys, Heads heads) {
  if (!asks_) return;
  const std::lock_guard lock(mutex_);
  for (const Key& key : keys) asks_->add(hash_of(space, key, heads));
}

Admit Admission::admit(std::uint32_t space, const Key& key, Heads heads, std::int64_t bytes, Tenant tenant, Time now) {
  if (!counts_) return Admit::kYes;
  const std::lock_guard lock(mutex_);
  if (asks_ && asks_->count(hash_of(space, key, heads)) < options_.min_reuse) return Admit::kSeldom;
  if (quotas_ && bytes > accounts_[tenant].limit - accounts_[tenant].held) return Admit::kQuota;
  if (!budget_.open(now)) return Admit::kBudget;
  budget_.spend(bytes);
  if (quotas_) accounts_[tenant].held += bytes;
  return Admit::kYes;
}

void Admission::cancelled(std::int64_t bytes, Tenant tenant) {
  if (!counts_) return;
  const std::lock_guard lock(mutex_);
  budget_.refund(bytes);
  if (quotas_) accounts_[tenant].held -= bytes;
}

void Admission::released(std::int64_t bytes, Tenant tenant) { holds(-bytes, tenant); }

void Admission::holds(std::int64_t bytes, Tenant tenant) {
  if (!quotas_) return;
  const std::lock_guard lock(mutex_);
  accounts_[tenant].held += bytes;
}

Admission::Tenant Admission::tenant(std::string_view name) {
  if (!quotas_) return kNameless;
  const std::lock_guard lock(mutex_);
  const auto at = tenants_.find(name);
  if (at != tenants_.end()) return at->second;
  // The last number is that of everybody who comes too late.
  const auto number = static_cast<Tenant>(std::min(accounts_.size(), kMaxTenants - 1));
  if (number == accounts_.size()) accounts_.push_back({0, default_limit()});
  if (number + 1 < kMaxTenants) tenants_.emplace(name, number);
  return number;
}

std::int64_t Admission::held(Tenant tenant) const {
  if (!quotas_) return 0;
  const std::lock_guard lock(mutex_);
  return accounts_[tenant].held;
}

std::size_t Admission::memory() const { return asks_ ? asks_->memory() : 0; }

}  // namespace kvstride::store
