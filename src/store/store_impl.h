// SPDX-License-Identifier: Apache-2.0
// The store's inside: requests over tiers. Its threads convert and check; tiers do their own I/O.
#pragma once

#include <unistd.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "kvstride/store.h"
#include "store/bringing.h"
#include "store/job.h"
#include "store/tier.h"

namespace kvstride::store {

/// What the store counts beside its tiers: outcomes by verb, and why chunks were missed.
enum class Tally : std::uint8_t {
  kPutOk,  // … the outcomes in their order
  kGetOk = kPutOk + 6,
  kMissAbsent = kGetOk + 6,
  kMissHeads,
  kMissVanished,
  kMissOther,
  kMissSize,
  kPromoted,
  kUnreachable,
  kNumTallies
};
constexpr std::array<const char*, 7> kTallyNames{"miss_absent",       "miss_heads",      "miss_vanished",
                                                 "miss_other_planes", "miss_other_size", "promotions",
                                                 "unreachable_prefix"};

/// What a tier that lacks a piece says of it.
struct Offer {
  std::size_t tier;
  Admitted admitted;
};

/// One piece that a get reads.
struct Reading {
  std::size_t tier;
  PieceId id;
  std::int64_t first_head = 0;  ///< of the model's: the part that is taken from this piece
  std::int64_t num_heads = 0;
  bool shared = false;  ///< the planes without heads are taken from it
  bool whole = false;
  std::vector<Offer> offers;  ///< the tiers above
  BufferPtr into;
  ReadResult result;
};

/// A get under way. One thread at a time has it; reads only touch their own Reading.
struct Fetch {
  std::shared_ptr<JobState> job;
  std::size_t chunk = 0;
  std::vector<Reading> readings;
  std::atomic<std::size_t> left{0};
  bool saw_damage = false;
  bool saw_error = false;
  bool saw_timeout = false;
  bool saw_refusal = false;
  bool brings = false;                                 ///< a prefetch for which others wait
  bool asked = false;                                  ///< tiers were told that somebody asks for it
  bool everything = false;                             ///< read whole images: a header was not the expected one
  int other_lengths = 0;                               ///< how often a file had another length than was known
  std::vector<std::pair<std::size_t, Heads>> refused;  ///< pieces that failed before
};

/// A put under way.
struct Stow {
  std::shared_ptr<JobState> job;
  std::size_t chunk = 0;
  std::atomic<std::size_t> left{0};
  std::atomic<bool> held{false};    ///< by some tier
  std::atomic<bool> failed{false};  ///< in some tier
  std::atomic<Outcome> worst{Outcome::kRefused};
};

/// How images of some heads look; no form: raw bytes.
struct Shape {
  std::optional<Form> form;
  Frame frame;
};

/// For tiers: whether the job was cancelled.
inline Cancelled cancelled_by(const std::shared_ptr<JobState>& job) { return {job, &job->cancelled}; }

/// Bytes from which on a chunk is written past the caches: more than a core's own cache holds.
constexpr std::int64_t kStreamed = 1 << 20;

struct Task {
  std::shared_ptr<JobState> job;
  std::size_t chunk = 0;
  std::optional<Clock::time_point> starved;  ///< since when there is no memory for it
};

/// Chunks 0 to `chunks` − 1 of a job whose `after` has not answered true yet.
struct Later {
  Clock::time_point when;  ///< it is asked again
  std::shared_ptr<JobState> job;
  std::size_t chunks;
  std::chrono::microseconds pause{200};  ///< until the next time; longer the longer it takes
};

class StoreImpl : public std::enable_shared_from_this<StoreImpl> {
 public:
  /// Throws Error(kArgument) where tiers or namespace cannot be used.
  StoreImpl(std::vector<TierPtr> tiers, Namespace space, const StoreOptions& options);
  void start();

  Job transfer(const char* name, Verb verb, std::span<const Key> keys, const Cache& cache,
               std::span<const std::int64_t> blocks, const RequestOptions& options, const Stream& stream);
  Job transfer_bytes(const char* name, Verb verb, std::span<const Key> keys,
                     std::vector<std::span<const std::byte>> from, std::vector<std::span<std::byte>> to,
                     const RequestOptions& options);
  Job prefetch(std::span<const Key> keys, const std::optional<Range>& heads, const RequestOptions& options);
  /// What a reader of all, or of `heads`, needs.
  Heads want(const std::optional<Range>& heads) const;
  std::size_t lookup(std::span<const Key> keys, Heads heads, bool prefix, bool ask, std::vector<std::uint8_t>& out);
  StoreMetrics metrics() const;
  bool flush(std::chrono::nanoseconds time);
  void close();
  /// Throws Error(kStore) in a forked child.
  void check_process() const;
  /// Throws Error(kStore) there, and after close().
  void check_open(const char* verb) const;
  void count(Tally tally, std::uint64_t by = 1) {
    tallies_[static_cast<std::size_t>(tally)].fetch_add(by, std::memory_order_relaxed);
  }

  const std::vector<TierPtr> tiers_;
  std::vector<std::uint32_t> numbers_;  ///< of the namespace, in each tier
  const Namespace space_;
  const StoreOptions options_;
  const pid_t pid_ = getpid();

 private:
  enum class Begun { kYes, kStarved };

  std::size_t look(std::span<const Key> keys, Heads heads, bool prefix, bool may_ask, std::vector<std::uint8_t>& out);

  // Requests.
  std::shared_ptr<JobState> job(const char* name, Verb verb, std::span<const Key> keys,
                                const RequestOptions& options) const;
  Job submit(std::shared_ptr<JobState> job);
  void bring(std::span<const Key> keys, Heads heads, std::span<const std::uint8_t> found);
  void resume(std::vector<Task> tasks) noexcept;

  // The threads.
  void work();
  void watch();
  Begun begin(const Task& task);
  bool take(Task& out, Clock::time_point now);
  bool ask_later(std::unique_lock<std::mutex>& lock, Clock::time_point now);
  bool put_back(Task& task);
  void end(JobState& job, std::size_t chunk, Stage stage, Outcome outcome);
  bool is_ready(JobState& job);
  void leave();

  // Admission.
  void ask(const PieceId& piece);
  std::vector<Offer> offer(const JobState& job, const PieceId& piece, std::int64_t bytes, std::size_t num_tiers);
  void count_refusals(const std::vector<Offer>& offers);
  static std::optional<std::size_t> first_admitted(const std::vector<Offer>& offers);
  PieceId in_tier(std::size_t tier, const PieceId& piece) const { return {numbers_[tier], piece.key, piece.heads}; }

  // Puts.
  Begun begin_put(const Task& task);
  void fill(const JobState& job, std::size_t chunk, const Shape& shape, std::byte* image);
  void wrote(const std::shared_ptr<Stow>& stow, Outcome outcome);
  void only_here(const PieceId& piece);

  // Gets.
  Begun begin_get(const std::shared_ptr<Fetch>& fetch);
  bool choose(Fetch& fetch);
  bool ask_far(JobState& job);
  void plan_reads(Fetch& fetch);
  void arrived(const std::shared_ptr<Fetch>& fetch);
  void finish_get(const std::shared_ptr<Fetch>& fetch);
  void give_up(Fetch& fetch);
  void deliver(Fetch& fetch, const std::vector<std::shared_ptr<const Shape>>& shapes);
  void keep(Fetch& fetch);
  bool wait_for_prefetch(const Fetch& fetch);
  void promote(Fetch& fetch, const std::shared_ptr<void>& token = {});
  bool some_wanted(Fetch& fetch);
  bool may_promote(const JobState& job) const { return options_.promote || job.verb == Verb::kPrefetch; }

  std::shared_ptr<const Shape> shape_for(const JobState& job, std::size_t chunk, Heads heads);
  std::shared_ptr<const Shape> shape_of(const Reading& reading, const Key& key);
  std::shared_ptr<const Shape> shape_for_new(const JobState& job, std::size_t bytes, Heads heads) const;
  BufferPtr buffer_for(std::int64_t bytes, std::size_t first_tier);
  bool fits(std::int64_t bytes, std::size_t first_tier = 0) const;

  // Devices.
  void pin_tiers(Device device);
  void keep_unsettled(Device device, BufferPtr image) noexcept;

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable watch_;
  std::condition_variable idle_;
  std::deque<Task> waiting_;                  // not started
  std::deque<std::shared_ptr<Fetch>> ready_;  // read, to be checked; hold memory, so they go first
  std::deque<Later> delayed_;                 // their `after` has not said yes
  std::size_t delayed_chunks_ = 0;
  bool asked_ = false;        // the last thing a thread did was asking: work goes first
  std::deque<Task> starved_;  // no memory was free; the eldest is tried now and then
  Clock::time_point starved_until_{};
  std::multimap<Clock::time_point, std::weak_ptr<JobState>> jobs_;
  std::vector<std::pair<Device, BufferPtr>> unsettled_;  // a device that failed may still be at them
  std::size_t under_way_ = 0;                            // puts and gets between begin and their last step
  std::atomic<bool> closed_{false};                      // changes under the lock
  bool stop_ = false;
  bool ended_ = false;  // all of close() is done
  std::vector<std::thread> threads_;

  Bringing<Task> bringing_;
  std::atomic<bool> pinned_{false};  // tiers were asked to
  std::mutex shapes_mutex_;
  std::map<std::string, std::shared_ptr<const Shape>> shapes_;
  std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(Tally::kNumTallies)> tallies_{};
  Histogram put_seconds_;
  Histogram get_seconds_;
};

}  // namespace kvstride::store
