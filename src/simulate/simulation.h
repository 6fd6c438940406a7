// SPDX-License-Identifier: Apache-2.0
// A store over a trace: the index, the eviction and the admission are the real ones, bytes and disks there are none.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "simulate/trace.h"
#include "store/admission.h"
#include "store/index.h"

namespace kvstride::simulate {

struct TierSetup {
  std::string name;
  std::int64_t capacity_bytes = 0;
  store::Policy policy = store::Policy::kS3Fifo;
  AdmissionOptions admission;
  /// As the host tier does: what the tier below refused when it was put is offered to it again when it leaves this one.
  bool demotes = false;
};
struct Setup {
  std::vector<TierSetup> tiers;  ///< fastest first
  std::int64_t block_tokens = 512;
  std::int64_t chunk_tokens = 512;  ///< a multiple of block_tokens
  std::int64_t bytes_per_token = 0;
};

/// Numbers are chunks where nothing else is said; a chunk takes Result::chunk_bytes.
struct TierResult {
  std::int64_t hits = 0;        ///< read here: the tiers above lacked them
  std::int64_t writes = 0;      ///< puts, promotions and demotions
  std::int64_t promotions = 0;  ///< of them from a tier below
  std::int64_t demotions = 0;   ///< of them from the tier above, which let them go
  std::int64_t evictions = 0;
  std::int64_t evicted_unread = 0;
  std::int64_t expired = 0;  ///< found too old by a request and dropped
  std::int64_t refused_seldom = 0;
  std::int64_t refused_budget = 0;
  std::int64_t refused_large = 0;  ///< larger than the tier
  std::int64_t entries = 0;        ///< at the end
  std::int64_t peak_entries = 0;
  std::int64_t index_bytes = 0;    ///< memory of the index, at the end
  std::int64_t counter_bytes = 0;  ///< of the counters of asks
};
struct Result {
  std::int64_t chunk_bytes = 0;  ///< header included, whole pages
  std::int64_t requests = 0;
  std::int64_t block_events = 0;  ///< ids of all requests
  std::int64_t input_tokens = 0;
  std::int64_t chunks = 0;        ///< whole chunks of all prompts, as often as they were asked for
  std::int64_t hits = 0;          ///< of them, read from a tier
  std::int64_t saved_tokens = 0;  ///< of the hits: not prefilled
  std::int64_t full_hits = 0;     ///< requests with a chunk or more, all of which were hits
  std::int64_t first_time = 0;    ///< nanoseconds, of requests
  std::int64_t last_time = 0;
  double seconds = 0;  ///< of CPU that run() took
  std::vector<TierResult> tiers;
};

/// One store. A request takes its chunks from the first on from the uppermost tier that has them, as long as one has;
/// what came from below is promoted to the tiers above. The rest is computed and put: every tier that lacks a chunk is
/// offered it. All of it happens at the request's time. Not thread-safe.
class Simulation {
 public:
  /// Throws Error(kArgument) for sizes that do not fit together.
  explicit Simulation(Setup setup);
  void run(const Batch& batch);
  Result result() const;
  const Setup& setup() const { return setup_; }

 private:
  struct Tier {
    explicit Tier(const TierSetup& setup) : index(setup.policy), admission(setup.admission) {}
    store::Index index;
    store::Admission admission;
    TierResult counts;
  };
  using Time = store::Admission::Time;
  enum class From { kPut, kBelow, kAbove };

  void step(const Request& request, std::span<const std::uint64_t> ids);
  store::Slot find(Tier& tier, const Key& key, Time now);
  bool read(const Key& key, Time now);
  void put(const Key& key, Time now);
  bool offer(std::size_t number, const Key& key, From from, Time now);
  void evict(std::size_t number, Time now);

  const Setup setup_;
  const std::size_t ids_of_chunk_;
  std::uint32_t pages_ = 0;  // of a chunk
  std::vector<std::unique_ptr<Tier>> tiers_;
  std::vector<Key> keys_;  // of the request
  std::vector<std::uint8_t> flags_;
  Result counts_;
};

/// What an index of very many blocks takes, from a measured one.
struct Scale {
  std::int64_t blocks = 0;           ///< asked for
  std::int64_t measured_blocks = 0;  ///< a power of two less, so that the table is as full
  double bytes_per_block = 0;
  double bytes_per_block_lru = 0;  ///< without ghosts
  double lookups_per_second = 0;   ///< of held keys in random order, in runs of 64
  std::int64_t index_bytes = 0;    ///< for `blocks`, S3-FIFO
  std::int64_t index_bytes_lru = 0;
  std::int64_t indexes = 1;  ///< that are needed at least: entries have numbers of 32 bits
};
/// Measures an index of a million to two million keys of 32 bytes (all there are, where `blocks` is less), with as many
/// ghosts as there can be. Takes a second or two. Throws Error(kArgument) for less than one block or more than 10^15.
Scale measure_scale(std::int64_t blocks);

}  // namespace kvstride::simulate
