// SPDX-License-Identifier: Apache-2.0
// The files of a directory tier: names, the account, eviction, what other processes do (docs/formats/directory.md).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "store/io.h"
#include "store/ledger.h"
#include "store/tier.h"

namespace kvstride::store {

/// Name of a piece's file: key and heads as lower-case hex, four digits each for the first head and their number.
std::string file_name(const Key& key, Heads heads);
/// The reverse; nothing for any other name.
std::optional<std::pair<Key, Heads>> parse_file_name(std::string_view name);

/// What a file takes of the disk: delayed allocation must not hide it.
std::int64_t bytes_on_disk(const struct stat& stat);
/// Room for a file of `bytes`, with that for the tree of a file in many extents.
std::int64_t room_for(std::int64_t bytes);

/// A file on its way to its name.
struct Draft {
  std::string name;  ///< in tmp/
  int fd = -1;
  bool direct = false;
  std::int64_t reserved = 0;
};

/// All calls but those marked may wait for the file system: they belong on the tier's own threads. Thread-safe.
class Directory {
 public:
  struct Options {
    std::string path;
    std::int64_t max_bytes = 0;
    std::optional<std::int64_t> keep_free;
    Policy policy = Policy::kS3Fifo;
    bool sync = false;
    bool group = false;
  };
  /// Opens or makes the directory, and learns what is in it from names and sizes: no payload is read. Throws
  /// Error(kStore).
  Directory(std::shared_ptr<Io> io, Options options, Counters& counters);
  ~Directory();

  // --- In memory; no call of the file system.
  std::uint32_t space(const Digest& digest);
  void pieces(std::uint32_t space, const Key& key, std::vector<Piece>& out) const;
  std::size_t covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                      std::span<std::uint8_t> out) const;
  bool holds(const PieceId& id) const;
  bool pin(const PieceId& id);
  void unpin(const PieceId& id);
  bool forget(const PieceId& id);

  /// Asks the file system about keys, in their order; with `prefix` up to the first that it has not. Whether anything
  /// was found.
  bool probe(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix);

  /// An open file and its bytes, or −errno. What is gone is forgotten.
  int open_piece(const PieceId& id, std::int64_t& bytes, bool direct);
  /// After a read: it is among the last used, here and in the file's times.
  void used(const PieceId& id);

  /// Room for a file of `bytes` and an open draft, or why not.
  std::optional<Outcome> begin(const PieceId& id, std::int64_t bytes, Draft& out);
  /// Gives the draft its name. kOk also where another one has it.
  Outcome publish(const PieceId& id, Draft& draft);
  void discard(Draft& draft);
  /// The file system was full: makes room for `bytes` by evicting, if it can.
  bool make_space(std::int64_t bytes);

  /// Moves a damaged file to quarantine/, or removes it; the index has forgotten it.
  void set_aside(const PieceId& id);
  void remove(const PieceId& id);

  /// Writes the account, counts anew where that is needed, removes what dead processes left. For a thread that does it
  /// now and then.
  void keep_house();

  std::shared_ptr<Io> io() const { return io_; }
  bool read_only() const { return read_only_; }
  bool direct() const { return direct_; }
  std::int64_t max_bytes() const { return options_.max_bytes; }
  std::int64_t used_bytes() const;
  std::int64_t num_pieces() const;
  std::size_t index_memory() const;

 private:
  struct Space {
    Digest digest;
    std::string name;
    int fd = -1;
    std::array<int, 16> shards;
    std::vector<Heads> splits;  ///< head ranges that somebody wrote
    struct timespec splits_time {};
    Clock::time_point splits_checked{};
  };
  /// A directory's descriptor, opened (and made) when it is first needed; −errno.
  int space_fd(Space& space, bool make);
  int shard_fd(std::uint32_t space, const Key& key, bool make);
  int open_directory(int at, const char* name, bool make);
  bool ours(const struct stat& stat) const;
  void learn_splits(Space& space);
  std::vector<Heads> splits_of(std::uint32_t space);
  int mark_split(std::uint32_t space, Heads heads);

  void open_root();
  void probe_direct();
  struct Scan;
  void scan(Scan& out);
  void scan_space(std::uint32_t number, Scan& out);
  std::int64_t scan_flat(int fd, const char* what, bool remove_dead);
  void adopt(Scan& scan);
  void count_files(bool mine);
  bool may_change();

  enum class Freed { kSome, kNothing };
  Freed evict_one(std::int64_t& freed);
  std::optional<Outcome> take_room(std::int64_t bytes);
  bool free_on_disk(std::int64_t bytes);
  bool drop_quarantined(std::int64_t& freed);
  bool used_elsewhere(const PieceId& id, std::int64_t last_use);
  int unlink_piece(const PieceId& id, std::int64_t& bytes);

  std::shared_ptr<Io> io_;
  Options options_;
  Counters& counters_;
  int root_ = -1;
  int tmp_ = -1;
  int quarantine_ = -1;
  bool read_only_ = false;
  bool direct_ = false;
  std::int64_t keep_free_ = 0;
  std::unique_ptr<Ledger> ledger_;
  std::atomic<std::uint64_t> next_draft_{0};
  std::atomic<std::int64_t> paused_until_{0};  ///< writes, after the file system was full; Clock ticks
  std::atomic<int> quarantined_{0};            ///< not 0: there may be files in quarantine/
  Clock::time_point rescanned_{};
  Clock::time_point counted_{};

  /// Held shared while files come and go, exclusively while they are counted.
  std::shared_mutex files_;
  mutable std::mutex mutex_;  ///< index and spaces
  Index index_;
  std::vector<std::unique_ptr<Space>> spaces_;
  std::mutex splits_mutex_;
  std::mutex evict_mutex_;
};

}  // namespace kvstride::store
