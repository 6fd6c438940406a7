// SPDX-License-Identifier: Apache-2.0
// Ending chunks of a request, and waiting for it.
#include "store/job.h"

#include <algorithm>

namespace kvstride {
namespace store {

void JobState::settle(std::size_t chunk, Outcome outcome) {
  outcomes[chunk] = outcome;
  stages[chunk].store(Stage::kDone);
  if (left.fetch_sub(1) == 1) {
    const std::lock_guard lock(mutex);
    changed.notify_all();
  }
}

}  // namespace store

std::string_view name_of(Outcome outcome) noexcept {
  switch (outcome) {
    case Outcome::kOk: return "ok";
    case Outcome::kMiss: return "miss";
    case Outcome::kCorrupt: return "corrupt";
    case Outcome::kIoError: return "io_error";
    case Outcome::kTimeout: return "timeout";
    case Outcome::kRefused: return "refused";
  }
  return "";
}

bool Job::done() const { return state_->left.load() == 0; }

bool Job::ok() const {
  const auto is_ok = [](Outcome outcome) { return outcome == Outcome::kOk; };
  return done() && std::all_of(state_->outcomes.begin(), state_->outcomes.end(), is_ok);
}

std::vector<Outcome> Job::wait() const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return done(); });
  return state_->outcomes;
}

bool Job::wait_for(std::chrono::nanoseconds time) const {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, time, [&] { return done(); });
}

std::vector<std::optional<Outcome>> Job::poll() const {
  std::vector<std::optional<Outcome>> out(state_->stages.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (state_->stages[i].load() == store::Stage::kDone) out[i] = state_->outcomes[i];
  }
  return out;
}

void Job::cancel() const { state_->cancelled = true; }

}  // namespace kvstride
