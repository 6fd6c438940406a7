// SPDX-License-Identifier: Apache-2.0
// What all tiers have in common: the process that they belong to, and what they admit.
#include "store/tier.h"

#include <fmt/format.h>

#include "kvstride/error.h"

namespace kvstride::store {

void Tier::check_process(const char* what) const {
  if (getpid() == pid_) return;
  throw Error(ErrorCode::kStore,
              fmt::format("{}: a tier belongs to process {}; make tiers after the fork", what, pid_));
}

Admitted Tier::admit(const PieceId& id, std::int64_t bytes, const TenantName& tenant) {
  const Admission::Tenant number = tenant ? admission_->tenant(*tenant) : Admission::kNameless;
  const Admission::Time now = Clock::now().time_since_epoch();
  const Admit said = admission_->admit(id.space, id.key, id.heads, bytes, number, now);
  return said == Admit::kYes ? Admitted(admission_, bytes, number) : Admitted(said);
}

void Tier::count_refusal(Admit why) {
  switch (why) {
    case Admit::kYes: break;
    case Admit::kSeldom: return counters().add(Count::kNotAdmittedSeldom);
    case Admit::kBudget: return counters().add(Count::kNotAdmittedBudget);
    case Admit::kQuota: return counters().add(Count::kNotAdmittedQuota);
  }
}

}  // namespace kvstride::store
