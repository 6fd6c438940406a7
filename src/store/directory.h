// SPDX-License-Identifier: Apache-2.0
// The files of a directory tier: what is known of them, the account, eviction (docs/formats/directory.md).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/folders.h"
#include "store/io.h"
#include "store/ledger.h"
#include "store/tier.h"

namespace kvstride::store {

/// Longer than any image: a header of 1 MiB has checksums for less than 32 GiB.
inline constexpr std::int64_t kMostLength = std::int64_t{1} << 36;
/// What a file takes of the disk: delayed allocation must not hide it. What is longer than any of ours has holes: its
/// length says nothing.
std::int64_t bytes_on_disk(const struct stat& stat);
/// What a file of ours can be: whole pages, a header at least, no longer than kMostLength.
bool sound_length(std::int64_t bytes);
/// Sums of sizes that somebody may have made up do not overflow.
std::int64_t add_bytes(std::int64_t sum, std::int64_t bytes);
/// Room for a file of `bytes`; where it is large, also for the tree of as many extents as it can have.
std::int64_t room_for(std::int64_t bytes);

/// A file on its way to its name.
struct Draft {
  std::string name;  ///< in tmp/
  int fd = -1;
  std::int64_t reserved = 0;
};

/// A pinned entry: an entry that takes its place later is another one.
struct Pin {
  Slot slot = kNoSlot;
  std::uint32_t generation = 0;
};

/// Why a piece goes.
enum class Going : std::uint8_t { kDamaged, kRemoved, kExpired };

/// Thread-safe. Calls of the second part wait for the file system: they belong on the tier's own threads.
class Directory {
 public:
  struct Options {
    std::string path;
    std::int64_t max_bytes = 0;
    std::optional<std::int64_t> keep_free;
    Policy policy = Policy::kS3Fifo;
    bool sync = false;
    bool group = false;
    std::int64_t largest = kMostLength;  ///< the longest file that can be read: longer ones show a header first
  };
  /// Opens or makes the directory, and learns what is in it from names and sizes: no payload is read. Throws
  /// Error(kStore).
  Directory(std::shared_ptr<Io> io, Options options, Counters& counters,
            std::shared_ptr<Admission> admission = std::make_shared<Admission>(AdmissionOptions{}));
  ~Directory();

  // --- In memory.
  std::uint32_t space(const Digest& digest);
  void pieces(std::uint32_t space, const Key& key, std::vector<Piece>& out) const;
  std::size_t covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                      std::span<std::uint8_t> out) const;
  bool holds(const PieceId& id) const;
  std::optional<Pin> pin(const PieceId& id);
  void unpin(Pin pin);
  /// Forgets a piece that shall go; settle() or settle_all() then moves or removes its file. Until that is done nobody
  /// finds it again, and no other file takes its name.
  void let_go(const PieceId& id, Going why);
  /// Keys of pieces that went since the last call; the first call begins. Of more than 65536 the rest is not told.
  std::vector<Key> take_gone(std::uint32_t space);
  std::int64_t used_bytes() const;
  std::int64_t num_pieces() const;
  std::size_t index_memory() const;
  bool read_only() const { return folders_.read_only(); }
  bool full() const { return folders_.full(); }
  bool direct() const { return direct_; }
  /// Nothing can be written: the account was removed, or others took this process for dead, and it cannot be had again.
  bool lost() const { return ledger_ && ledger_->lost(); }

  // --- With the file system.

  /// Asks it about keys, in their order; with `prefix` up to the first that it has not. Whether any of them is known
  /// now, by this call or by another one meanwhile.
  bool probe(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix);
  /// Takes a piece out of the index; the file stays. Whether it was in it.
  bool forget(const PieceId& id);
  /// The file of a piece has another length than was known: a replaced or a damaged one. It stays known, so that
  /// nobody misses it, unless it is none that can be read.
  void other_length(const PieceId& id, std::int64_t bytes);
  /// An open file and its bytes, or −errno. What is gone, or is no file of ours, is forgotten.
  int open_piece(const PieceId& id, std::int64_t& bytes);
  /// After a read: it is among the last used, here and in the file's times.
  void used(const PieceId& id);

  /// Room for a file of `bytes` and an open draft, or why not.
  std::optional<Outcome> begin(const PieceId& id, std::int64_t bytes, Draft& out);
  /// Gives the draft its name; the piece is the tenant's then. kOk also where another one has the name.
  Outcome publish(const PieceId& id, Draft& draft, Admission::Tenant tenant = Admission::kNameless);
  void discard(Draft& draft);
  /// The file system was full: makes room for `bytes` by evicting, if it can.
  bool make_space(std::int64_t bytes);

  /// What let_go() was called for. Whether it is done: not while another process counts.
  bool settle(const PieceId& id);
  /// All of it, and drafts that could not be removed.
  void settle_all();
  /// Writes the account, counts anew where that is needed, removes what dead processes left. To be called now and then.
  void keep_house();

 private:
  struct Space {
    Digest digest;
    std::vector<Heads> splits;  ///< head ranges that somebody wrote
    struct timespec splits_time {};
    Clock::time_point splits_checked{};
    bool watched = false;
    std::vector<Key> gone;  ///< since take_gone(), where it is watched
  };
  struct Gone {
    PieceId id;
    Going why;
  };
  /// What is known of a file.
  struct File {
    std::int64_t bytes = 0;
    std::int64_t used = 0;     ///< last, in seconds
    std::int64_t written = 0;  ///< in nanoseconds
    bool read = false;         ///< since it was written
    Admission::Tenant tenant = Admission::kNameless;
  };
  /// By slot, where one of the two counts.
  struct Kept {
    std::int64_t written = 0;
    Admission::Tenant tenant = Admission::kNameless;
  };
  struct Scan;

  const Digest& digest(std::uint32_t space) const;
  Folder shard(const PieceId& id, bool make) { return folders_.shard(digest(id.space), shard_of(id.key), make); }
  std::vector<Heads> splits_of(std::uint32_t space);
  void learn_splits(Space& space);
  /// Says in the namespace's folder that somebody wrote these heads. It must be done before a file gets its name:
  /// other processes look for nothing else.
  int mark_split(std::uint32_t space, Heads heads);

  bool insert(const PieceId& id, const File& file, std::optional<std::uint64_t> seen = std::nullopt);
  File known(Slot slot) const;
  bool is_expired(std::int64_t written) const;
  void drop_expired();
  void drop(Slot slot, bool remember);
  void tell_gone(const PieceId& id);
  bool lose(const PieceId& id);
  bool is_going(const PieceId& id) const;
  void done_going(const PieceId& id);
  bool gone_since(const Key& key, std::uint64_t seen) const;
  std::uint64_t num_gone() const;
  int set_aside(const PieceId& id);
  bool settle_one(const Gone& gone);
  int unlink_piece(const PieceId& id, std::int64_t& bytes);

  /// Leave to change files, while it lasts; false while somebody counts.
  struct Changing {
    std::shared_lock<std::shared_mutex> lock;
    std::uint64_t mark = 0;
    explicit operator bool() const { return mark != 0; }
  };
  Changing change();
  Changing change_soon();

  std::optional<Outcome> take_room(std::int64_t bytes);
  bool free_on_disk();
  /// Bytes that came free; 0: nothing can be evicted.
  std::int64_t evict_one();
  std::int64_t drop_quarantined();
  std::optional<std::int64_t> used_elsewhere(const PieceId& id, std::int64_t last_use);

  bool believable(int folder, const char* name, const PieceId& id, const struct stat& stat);
  void scan(Scan& out);
  void scan_space(std::uint32_t number, Scan& out);
  std::int64_t scan_flat(const Folder& folder, bool drafts, bool& whole);
  void adopt(Scan& scan);
  void count_files(bool mine);

  const std::shared_ptr<Io> io_;
  const Options options_;
  Counters& counters_;
  const std::shared_ptr<Admission> admission_;
  Folders folders_;
  bool direct_ = false;
  std::int64_t keep_free_ = 0;
  std::unique_ptr<Ledger> ledger_;
  std::atomic<std::uint64_t> next_draft_{0};
  std::atomic<std::int64_t> paused_until_{0};  ///< writes, after the file system was full; Clock ticks
  /// Until when who has written waits for the end of the count under way, Clock ticks; 0: none was met.
  std::atomic<Clock::rep> patience_ends_{0};
  std::atomic<bool> quarantined_{false};     ///< there may be files in quarantine/
  std::atomic<std::int64_t> known_used_{0};  ///< by the account, and what this process has changed since
  Clock::time_point rescanned_{};
  Clock::time_point counted_{};
  Clock::time_point swept_{};  ///< for what is past its time to live

  /// Held shared while files come and go, exclusively while they are counted.
  std::shared_mutex files_;
  mutable std::mutex mutex_;  ///< the index, spaces and what is going
  Index index_;
  std::vector<std::uint32_t> generations_;  ///< by slot; empty until something is pinned
  std::vector<Kept> kept_;                  ///< by slot; empty without time to live and quotas
  std::vector<std::unique_ptr<Space>> spaces_;
  std::vector<Gone> going_;
  std::uint64_t num_gone_ = 0;  ///< files that were in going_, and are no longer
  /// By hashes of keys: num_gone_ when a file of theirs went. What went before `gone_known_` is not in it.
  std::unordered_map<std::size_t, std::uint64_t> gone_at_;
  std::uint64_t gone_known_ = 0;
  std::vector<Draft> left_;  ///< drafts that could not be removed
  std::mutex going_mutex_;   ///< held while one of going_ is settled
  std::mutex splits_mutex_;
  std::mutex evict_mutex_;
};

}  // namespace kvstride::store
