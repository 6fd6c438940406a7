// SPDX-License-Identifier: Apache-2.0
// A request under way: what was asked, and how far each chunk is.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/point.h"
#include "kvstride/store.h"
#include "store/admission.h"
#include "store/form.h"
#include "store/metrics.h"

namespace kvstride::store {

/// Where a chunk of a request is. Whoever changes it by compare-and-swap owns the next step.
enum class Stage : std::uint8_t {
  kQueued,   ///< nothing has happened
  kMoving,   ///< a thread reads or writes the caller's memory; short
  kWaiting,  ///< somebody else works on it; the caller's memory is not touched
  kDone,
};

enum class Verb : std::uint8_t { kPut, kGet, kPutBytes, kGetBytes, kPrefetch };
constexpr bool is_put(Verb verb) { return verb == Verb::kPut || verb == Verb::kPutBytes; }

struct JobState {
  Verb verb = Verb::kPut;
  std::vector<Key> keys;
  std::optional<Cache> cache;        ///< of put and get
  std::vector<std::int64_t> blocks;  ///< `ratio` for each key
  std::int64_t ratio = 1;
  HeadMap heads;
  std::vector<std::span<const std::byte>> from;  ///< of put_bytes
  std::vector<std::span<std::byte>> to;          ///< of get_bytes
  std::function<bool()> after;
  TenantName tenant;
  std::unique_ptr<cuda::Point> point;  ///< nothing is touched before it is reached; goes then
  Clock::time_point start;
  Clock::time_point deadline;

  explicit JobState(std::size_t chunks) : stages(chunks), outcomes(chunks, Outcome::kRefused), left(chunks) {}

  /// Of a prefetch, of each chunk: lets those go on who wait for it. Goes with the chunk's outcome at the latest.
  /// Filled before anybody else has the job; its elements under `mutex`.
  std::vector<std::shared_ptr<void>> tokens;

  std::atomic<std::size_t> begun{0};  ///< chunks, or more where one began anew
  bool more() const { return begun < keys.size(); }

  std::mutex asking;
  bool asked = false;  ///< far tiers, about all keys; under `asking`

  std::vector<std::atomic<Stage>> stages;
  std::vector<Outcome> outcomes;       ///< written by the owner of the last step
  std::atomic<bool> cancelled{false};  ///< what has not started is refused when a thread comes to it
  std::atomic<bool> lost{false};       ///< nobody knows whether `point` is reached: the same is an I/O error
  std::atomic<std::size_t> left;
  std::mutex mutex;
  std::condition_variable changed;

  std::shared_ptr<void> take_token(std::size_t chunk) {
    if (tokens.empty()) return nullptr;
    const std::lock_guard lock(mutex);
    return std::move(tokens[chunk]);
  }
  bool has_token(std::size_t chunk) {
    if (tokens.empty()) return false;
    const std::lock_guard lock(mutex);
    return tokens[chunk] != nullptr;
  }
  /// Where the caller's memory is.
  Device device() const { return cache ? cache->device() : Device{}; }
  std::span<const std::int64_t> blocks_of(std::size_t chunk) const {
    return std::span(blocks).subspan(chunk * static_cast<std::size_t>(ratio), static_cast<std::size_t>(ratio));
  }
  /// Moves a chunk from one stage to the next; false where somebody else did.
  bool advance(std::size_t chunk, Stage from_stage, Stage to_stage) {
    return stages[chunk].compare_exchange_strong(from_stage, to_stage);
  }
  /// The right to settle() a chunk that is at `stage`; whoever has it in kMoving has it already.
  bool claim(std::size_t chunk, Stage stage) {
    return stage == Stage::kMoving || advance(chunk, stage, Stage::kMoving);
  }
  /// The outcome of a chunk, for all to see.
  void settle(std::size_t chunk, Outcome outcome);
};

}  // namespace kvstride::store
