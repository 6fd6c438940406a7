// SPDX-License-Identifier: Apache-2.0
// The store: verified chunks of KV blocks in host memory, in a directory, or elsewhere (docs/store.md).
//
// Every byte is checked before it reaches a cache; what cannot be proved right is a miss. Nothing here waits for a disk
// on the caller's thread, and no exception crosses a thread: what may be expected to go wrong is an Outcome.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvstride/cache.h"
#include "kvstride/identity.h"
#include "kvstride/plan.h"

namespace kvstride {

namespace store {
class Tier;
struct JobState;
class StoreImpl;
class PinsImpl;
}  // namespace store

/// What became of one chunk of a request.
enum class Outcome : std::uint8_t {
  kOk,       ///< put: a tier holds it (it may have held it before). get: the blocks have its bytes
  kMiss,     ///< no tier holds all of it. The blocks are as they were
  kCorrupt,  ///< it was damaged, is set aside and will be a miss. The blocks are as they were
  /// The system refused to read or write it; the blocks are as they were. Or a device failed in the midst of moving it;
  /// the blocks of a get may then hold anything.
  kIoError,
  kTimeout,  ///< the deadline passed. The blocks are as they were, and will not be touched any more
  kRefused,  ///< no room, a full queue, a store that is closed, cancelled, or no tier admits it
};
/// `ok`, `miss`, `corrupt`, `io_error`, `timeout`, `refused`.
std::string_view name_of(Outcome outcome) noexcept;

/// Which entries a tier lets go first.
enum class Eviction : std::uint8_t { kS3Fifo, kLru };

/// A place for chunks. May be given to several stores, of other namespaces too, which then share its room. Thread-safe.
/// When a store of a tier has the first cache on a device, one of its threads pins the memory in which images lie, all
/// of it, so that the device copies from and to it; where CUDA refuses, the driver stages. `detail` and the counter
/// `not_pinned` of its metrics say so.
using TierPtr = std::shared_ptr<store::Tier>;

/// What a tier takes and how long it keeps it; by default everything, until it is evicted. docs/store.md has the rules.
struct AdmissionOptions {
  /// A chunk is taken when it has been asked for so many times recently, the request that brings it included; 1 to 15.
  int min_reuse = 1;
  /// "Recently": an ask counts for at least the next so many asks of this tier, and at most twice as many. Takes 16 to
  /// 32 bytes for each, where min_reuse is above 1. Up to 2^30.
  std::int64_t reuse_window = 1 << 20;
  /// Bytes that may be written in a day; 0: no limit. Any span of time sees at most its share of them, a burst and one
  /// chunk, whatever the chunk's size.
  std::int64_t write_bytes_a_day = 0;
  /// What may be written at once after a pause, and at the start; 0: an hour's share.
  std::int64_t write_burst_bytes = 0;
  /// After so long since it was written to this tier a chunk is no longer found; 0: never.
  std::chrono::nanoseconds time_to_live{0};
  /// Bytes that a tenant may hold, each for itself, the nameless one included; 0: no limit.
  std::int64_t tenant_bytes = 0;
  /// Other limits for some tenants; here 0 means nothing at all.
  std::map<std::string, std::int64_t> bytes_of_tenant;
};

struct HostTierOptions {
  std::int64_t num_bytes = 0;  ///< exactly so many are mapped (rounded up to 4 KiB), headers of 4 KiB a chunk included
  Eviction eviction = Eviction::kS3Fifo;
  /// Not empty: the memory is /dev/shm/kvstride-<name> (0600), which other processes can map; chunks are not shared by
  /// it. Removed when the tier ends or, where this process was killed, when the next tier with a shared name is made.
  std::string shared_name;
  AdmissionOptions admission;
};
/// Throws Error(kArgument) for options that cannot be, Error(kStore) where the memory cannot be had.
TierPtr host_tier(const HostTierOptions& options);

struct DirectoryTierOptions {
  std::string path;            ///< made (mode 0700) if it is not there
  std::int64_t max_bytes = 0;  ///< of all files together, temporary ones included, also with several processes
  /// Bytes that stay free on the file system; not given: 1 GiB, but at most 5 % of it.
  std::optional<std::int64_t> keep_free;
  Eviction eviction = Eviction::kS3Fifo;
  /// fdatasync before a file gets its name. Without it a file may be damaged after a power cut, which reading finds
  /// out.
  bool sync = false;
  /// Files 0660 and directories 2770, files of other owners accepted: for volumes whose user ids vary.
  bool group = false;
  enum class Engine : std::uint8_t { kAuto, kRing, kBlocking } engine = Engine::kAuto;
  int num_threads = 0;              ///< of I/O; 0: 2 with io_uring, 8 without
  std::int64_t staging_bytes = 0;   ///< memory for chunks on their way; 0: 256 MiB
  std::size_t queue_chunks = 4096;  ///< that may wait for the disk; more are refused
  bool prepare = false;             ///< take the memory for I/O at once, not with the first request
  /// How long a lookup may wait for the file system's word on keys that this process does not know.
  std::chrono::nanoseconds lookup_timeout = std::chrono::milliseconds(50);
  /// A file's time of change counts as when it was written; what was there before or comes from other processes is the
  /// nameless tenant's. Asks, budget and quotas are of this process.
  AdmissionOptions admission;
};
/// Throws Error(kArgument) for options that cannot be, Error(kStore) where the directory cannot be used: a link,
/// somebody else's, no locks, not writable.
TierPtr directory_tier(const DirectoryTierOptions& options);

struct RemoteTierOptions {
  /// `s3://bucket/prefix?…`, `redis://host:port/db?…`: docs/remote.md has the options of each engine.
  std::string url;
  std::int64_t staging_bytes = 0;   ///< memory for chunks on their way; 0: 256 MiB
  std::size_t queue_chunks = 4096;  ///< that may wait; more are refused
  /// Images of writes that wait or are under way, more are refused; 0: half of staging_bytes. They lie in the memory of
  /// the tier above, and keep it.
  std::int64_t queue_bytes = 0;
  int num_threads = 0;                   ///< that call the engine; 0: as it likes
  std::size_t known_chunks = 1'000'000;  ///< whose being there is remembered
  std::chrono::nanoseconds known_for = std::chrono::seconds(60);
  /// How long one attempt may take; failed ones are repeated within the request's deadline.
  std::chrono::nanoseconds timeout = std::chrono::seconds(5);
  int retries = 2;  ///< attempts after the first one that failed
  /// How long a lookup may wait for the engine's word on keys that this process does not know.
  std::chrono::nanoseconds lookup_timeout = std::chrono::seconds(1);
  /// Without time_to_live and tenants, which are the engine's own.
  AdmissionOptions admission;
};
/// A tier in an engine that others run. It connects with the first request, and what the engine does wrong is a miss.
/// Throws Error(kArgument) for a URL or options that cannot be, Error(kStore) where the engine's client is not there.
TierPtr remote_tier(const RemoteTierOptions& options);

/// Counts by powers of two: counts[i] took less than 2^i microseconds, the last one everything else.
struct HistogramSnapshot {
  std::array<std::uint64_t, 28> counts{};
  std::uint64_t count = 0;
  double sum_seconds = 0;
};
struct TierMetrics {
  std::string tier;    ///< `host`, `directory`
  std::string detail;  ///< where, and by which I/O engine (once there was I/O: as it turned out)
  std::int64_t capacity_bytes = 0;
  std::int64_t used_bytes = 0;
  std::int64_t chunks = 0;  ///< pieces: one for each head range of a chunk
  std::map<std::string, std::uint64_t> counters;
  std::map<std::string, HistogramSnapshot> seconds;
};
struct StoreMetrics {
  std::map<std::string, std::uint64_t> counters;
  std::map<std::string, HistogramSnapshot> seconds;
  std::vector<TierMetrics> tiers;
};

/// What one tier has and has done.
TierMetrics tier_metrics(const store::Tier& tier);

/// A request under way. Copies are the same job. Dropping it does not stop it: the cache must stay until it is done.
class Job {
 public:
  explicit Job(std::shared_ptr<store::JobState> state) : state_(std::move(state)) {}
  bool done() const;
  /// Whether every chunk has its outcome, and all are kOk.
  bool ok() const;
  /// Waits until every chunk has its outcome, which is never much later than the deadline.
  std::vector<Outcome> wait() const;
  /// The same, but no longer than `time`; whether it is done.
  bool wait_for(std::chrono::nanoseconds time) const;
  /// So far; chunks under way are not in it.
  std::vector<std::optional<Outcome>> poll() const;
  /// What has not started is refused.
  void cancel() const;

 private:
  std::shared_ptr<store::JobState> state_;
};

struct RequestOptions {
  /// Which heads of the cache are which of the namespace's: cache first, stored first, count.
  struct Heads {
    std::int64_t cache_first = 0;
    std::int64_t stored_first = 0;
    std::int64_t count = 0;
  };
  std::optional<Heads> heads;
  /// Nothing is read from or written to the cache before this answers true. Asked again and again by the store's
  /// threads; must be quick and not throw.
  std::function<bool()> after;
  /// From now; not given: StoreOptions::deadline.
  std::optional<std::chrono::nanoseconds> deadline;
  /// Of puts, and of gets and prefetches for what they bring into upper tiers: whose quota pays. A salt or, better, a
  /// digest of it; at most 256 bytes. Never written anywhere.
  std::string tenant;
};

struct StoreOptions {
  int num_threads = 0;              ///< that convert and check; 0: the cores, at most 4
  std::size_t queue_chunks = 4096;  ///< that may wait; more are refused at once
  std::chrono::nanoseconds deadline = std::chrono::seconds(10);
  /// A put is done when the first tier has the chunk; the others get it behind the caller's back.
  bool write_behind = false;
  bool promote = true;  ///< whole chunks that are read from a lower tier go to the upper ones
  /// Lookups bring up what they find below the first tier, as prefetch() does, behind the caller's back.
  bool prefetch = false;
};

/// Keeps chunks from being evicted while it lives. Movable.
class Pins {
 public:
  explicit Pins(std::unique_ptr<store::PinsImpl> impl);
  ~Pins();
  Pins(Pins&&) noexcept;
  Pins& operator=(Pins&&) noexcept;
  /// Whether each key was there, and so is pinned.
  const std::vector<bool>& found() const;

 private:
  std::unique_ptr<store::PinsImpl> impl_;
};

/// Chunks of one namespace in tiers, fastest first. Thread-safe.
class Store {
 public:
  Store(std::vector<TierPtr> tiers, Namespace space, const StoreOptions& options = {});
  /// close().
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// Chunk i is block_size / cache.block_size blocks of `cache`: blocks[i × ratio] to blocks[i × ratio + ratio − 1].
  /// Both lists are copied; the blocks must not change until the job is done. Throws Error for what is wrong whatever
  /// the store holds: sizes, dtypes, planes, block ids, heads, a device that is not there.
  /// `stream`, of a cache on a device: the blocks are not touched before what is on the stream now is done. What is put
  /// on it, or on any other, once a chunk has its outcome comes after what was done for that chunk. The stream itself
  /// is not used later, and is refused while it is being captured into a graph.
  Job put(std::span<const Key> keys, const Cache& cache, std::span<const std::int64_t> blocks,
          const RequestOptions& options = {}, const Stream& stream = {});
  /// The reverse; blocks must be distinct. A block is written whole or not at all.
  Job get(std::span<const Key> keys, const Cache& cache, std::span<const std::int64_t> blocks,
          const RequestOptions& options = {}, const Stream& stream = {});
  /// Bytes whose layout is not known; the namespace must have `raw`. The memory must stay until the job is done.
  Job put_bytes(std::span<const Key> keys, std::span<const std::span<const std::byte>> bytes,
                const RequestOptions& options = {});
  /// Chunks of another size are misses.
  Job get_bytes(std::span<const Key> keys, std::span<const std::span<std::byte>> bytes,
                const RequestOptions& options = {});

  /// Whether tiers hold all heads (or heads `first` to `first + count − 1`) of each chunk. Without `ask` only what this
  /// process knows, which waits for nothing; with it the file system is asked about the rest, for a bounded time.
  std::vector<bool> lookup(std::span<const Key> keys, std::optional<Range> heads = {}, bool ask = true);
  /// How many chunks from the first on are held without a gap.
  std::int64_t lookup_prefix(std::span<const Key> keys, std::optional<Range> heads = {}, bool ask = true);
  /// Brings chunks that only lower tiers hold into the upper ones, verified, so that a get finds them there. kOk: the
  /// first tier had it, or an upper tier was given it; kRefused: none of them admits it. A get of a chunk that is on
  /// its way waits for it, and reads by itself where it does not come.
  Job prefetch(std::span<const Key> keys, std::optional<Range> heads = {}, const RequestOptions& options = {});
  /// Pins what is there until the result is dropped. Another process may still remove a file.
  Pins pin(std::span<const Key> keys);
  /// Forgets chunks in all tiers. Returns how many keys were there.
  std::int64_t remove(std::span<const Key> keys);

  /// Keys of chunks of which a directory has lost a piece (evicted, removed, damaged, vanished) since the last call;
  /// the first call begins. For those who tell others what is where: of more than 65536 the rest is not told.
  std::vector<Key> take_gone();

  const Namespace& space() const;
  StoreMetrics metrics() const;
  /// Waits until nothing is under way any more, so that what was put is in all tiers that took it, or `time` is over;
  /// whether nothing is.
  bool flush(std::chrono::nanoseconds time);
  /// Refuses what has not started and waits for the rest, at most until the deadlines. Then requests are refused;
  /// lookups, pin, remove and take_gone throw Error(kStore); metrics and flush answer.
  void close();

 private:
  std::shared_ptr<store::StoreImpl> impl_;
};

}  // namespace kvstride
