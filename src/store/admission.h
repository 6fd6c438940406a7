// SPDX-License-Identifier: Apache-2.0
// Which chunks a tier takes, and how long it keeps them.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvstride/store.h"
#include "store/index.h"

namespace kvstride::store {

/// How often something was asked for recently: a sketch of counters of 4 bits, two generations of it. A generation ends
/// after `window` asks; then it is kept for as long again, and what was before it is forgotten. So the count of what
/// was asked for c times among the last `window` asks is at least min(c, 15), and that of what was not asked for among
/// the last 2 × window is 0 but for collisions: below one in a hundred where all asks are of different things. Memory
/// does not grow. Not thread-safe.
class RecentAsks {
 public:
  explicit RecentAsks(std::int64_t window);
  void add(std::uint64_t hash);
  int count(std::uint64_t hash) const;  ///< 0 to 15
  std::size_t memory() const { return 2 * sizeof(std::uint64_t) * now_.size(); }
  static constexpr int kMost = 15;

 private:
  using Counters = std::vector<std::uint64_t>;  // lines of 8 words, 16 counters each
  int least(const Counters& counters, std::uint64_t hash) const;

  std::int64_t window_;
  std::int64_t asks_ = 0;  // of this generation
  Counters now_;
  Counters before_;
};

/// Bytes that may be written, in whole bytes and without rounding errors. Not thread-safe.
class WriteBudget {
 public:
  /// A rate of 0: no limit.
  WriteBudget(std::int64_t bytes_a_day, std::int64_t burst);
  /// Whether something may be written at `now`: the level is above 0. A time before an earlier one counts as that.
  bool open(std::chrono::nanoseconds now);
  /// Takes bytes; the level may fall below 0.
  void spend(std::int64_t bytes);
  /// Gives bytes back that were not written after all.
  void refund(std::int64_t bytes);
  std::int64_t level() const { return level_; }

 private:
  std::int64_t rate_;
  std::int64_t burst_;
  std::int64_t level_;
  std::int64_t rest_ = 0;  // of a byte, in 1/(nanoseconds of a day)
  std::optional<std::chrono::nanoseconds> last_;
};

enum class Admit : std::uint8_t {
  kYes,
  kSeldom,  ///< asked for too seldom
  kBudget,  ///< the write budget is used up
  kQuota    ///< the tenant holds as much as it may
};
/// `yes`, `seldom`, `budget`, `quota`.
const char* name_of(Admit admit) noexcept;

/// What one tier takes. Thread-safe: one lock for what counts; without options that count there is none.
///
/// A request asks for each of its chunks once, whether it then finds them or puts them: asked(). Whoever would write a
/// piece (a put, a promotion, what a tier above lets go) calls admit() first, which takes its bytes from the budget
/// and counts them for the tenant; then released() when the piece leaves the tier, or cancelled() where it was not
/// written after all. What a tier finds when it starts is counted by holds().
class Admission {
 public:
  using Time = std::chrono::nanoseconds;  ///< since anything, the same for all calls
  using Tenant = std::uint32_t;
  static constexpr Tenant kNameless = 0;  ///< the tenant ""

  /// Throws Error(kArgument) that names the option, its value and its limit.
  explicit Admission(AdmissionOptions options);

  void asked(std::uint32_t space, std::span<const Key> keys, Heads heads);
  /// Whether a piece of `bytes` may be written. Asked in this order: reuse, quota, budget; only kYes takes anything.
  Admit admit(std::uint32_t space, const Key& key, Heads heads, std::int64_t bytes, Tenant tenant, Time now);
  void cancelled(std::int64_t bytes, Tenant tenant);
  void released(std::int64_t bytes, Tenant tenant);
  void holds(std::int64_t bytes, Tenant tenant);
  bool expired(Time written, Time now) const noexcept {
    return options_.time_to_live.count() > 0 && now - written >= options_.time_to_live;
  }

  /// The number of a tenant, the same for the same name; kNameless where there are no quotas. After 65535 names others
  /// share one number, so that names from requests do not take memory without bound.
  Tenant tenant(std::string_view name);
  std::int64_t held(Tenant tenant) const;  ///< bytes; 0 where there are no quotas

  const AdmissionOptions& options() const noexcept { return options_; }
  std::size_t memory() const;  ///< bytes of counters
  bool has_quotas() const noexcept { return quotas_; }
  bool has_time_to_live() const noexcept { return options_.time_to_live.count() > 0; }

 private:
  struct Account {
    std::int64_t held = 0;
    std::int64_t limit = 0;
  };
  std::int64_t default_limit() const;

  const AdmissionOptions options_;
  const bool quotas_;
  const bool counts_;  // asks, bytes or tenants
  mutable std::mutex mutex_;
  std::optional<RecentAsks> asks_;
  WriteBudget budget_;
  std::vector<Account> accounts_;  // by tenant
  std::map<std::string, Tenant, std::less<>> tenants_;
};

/// Whose a request's chunks are; null: the nameless tenant's.
using TenantName = std::shared_ptr<const std::string>;

/// What admit() said of one write. An admitted one is under way, its bytes taken, until it is written(); where that
/// never comes its end gives them back: whoever drops a write need not think of it. One thread at a time.
class Admitted {
 public:
  Admitted() = default;
  explicit Admitted(Admit why) : why_(why) {}
  Admitted(std::shared_ptr<Admission> by, std::int64_t bytes, Admission::Tenant tenant)
      : by_(std::move(by)), bytes_(bytes), tenant_(tenant) {}
  Admitted(Admitted&& other) noexcept = default;
  Admitted& operator=(Admitted&& other) noexcept {
    give_back();
    by_ = std::move(other.by_);
    bytes_ = other.bytes_;
    tenant_ = other.tenant_;
    why_ = other.why_;
    return *this;
  }
  ~Admitted() { give_back(); }

  Admit why() const { return why_; }
  explicit operator bool() const { return why_ == Admit::kYes; }
  Admission::Tenant tenant() const { return tenant_; }
  /// The bytes are in the tier, which holds() them by now where it counts them.
  void written() {
    if (by_) by_->released(bytes_, tenant_);
    by_ = nullptr;
  }

 private:
  void give_back() noexcept {
    if (by_) by_->cancelled(bytes_, tenant_);
    by_ = nullptr;
  }

  std::shared_ptr<Admission> by_;
  std::int64_t bytes_ = 0;
  Admission::Tenant tenant_ = Admission::kNameless;
  Admit why_ = Admit::kYes;
};

}  // namespace kvstride::store
