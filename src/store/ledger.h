// SPDX-License-Identifier: Apache-2.0
// The account of a directory that several processes, and machines, share.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kvstride/error.h"
#include "store/io.h"

namespace kvstride::store {

struct LedgerRecord;

/// Error(kStore): the file system is full, and the account is not there yet.
class NoRoom : public Error {
 public:
  using Error::Error;
};

/// A file `ledger` in the directory: bytes in files (temporaries included) never exceed used + what is reserved, and
/// that never exceeds max_bytes. One object a process and directory; thread-safe. No lock is held over other I/O, and
/// none is waited for longer than `lock_timeout` (after it passed once, not at all until a lock is got again).
///
/// Changes are kept in the process and written with the next look at the file: every 50 ms while something happens,
/// after 64 changes, when more room is needed, and by flush(). Until then the process's reservation in the file covers
/// them.
///
/// A count cannot stop other processes, which look at the file only now and then. So each may rely for 50 ms on having
/// seen that nobody counts, and whoever begins a count waits longer than that before files are looked at. What a
/// process changed within its 50 ms is in the sum, and is not added again; what it reports later (a rename that took
/// long) is added, or not subtracted, in case that the sum lacks it: the account may then be too high, never too low,
/// until the next count. Callers that ask mark() before they change files avoid even that.
///
/// Processes may have different limits: each keeps used + reserved within its own when it reserves. After a count, used
/// + reserved may be above the limit (bytes are not) until every process has looked at the file again.
///
/// In a forked child every call answers kBusy, nothing or an empty list, and the parent's account stays as it is.
class Ledger {
 public:
  struct Options {
    std::int64_t max_bytes = 0;
    std::chrono::nanoseconds lock_timeout = std::chrono::seconds(2);
    mode_t mode = 0600;  ///< with bits for the group: files of other users are taken, too
  };
  /// Opens or makes the file and takes a free slot (a byte-range lock of its own tells others that this process lives).
  /// Throws Error(kStore): no locks on this file system, another owner, a link, all 60 slots taken, a lock not got; and
  /// NoRoom.
  Ledger(std::shared_ptr<Io> io, int dir_fd, const Options& options);
  /// Gives the slot and what it has reserved back, but for what was abandoned.
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  /// 16 lower-case hex digits, random, of this slot: temporaries of this process start with it.
  const std::string& token() const { return token_text_; }
  /// Tokens of live processes (this one included): temporaries with other tokens may be removed, if they were listed
  /// *before* this call. Empty where it cannot be told: remove nothing.
  std::vector<std::string> live_tokens();

  enum class Count { kNotNeeded, kMine, kOther };
  /// Starts a count where one is needed and nobody else counts: no other process was there when this one opened, the
  /// file was new or damaged, a process died that had reserved room or asked mark(), or a count was not finished.
  /// kOther: somebody else counts, or the file could not be locked; ask again later. Until end_count(), reserve() says
  /// kBusy in every process. Takes 75 ms where others live.
  Count begin_count(bool force = false);
  /// Ends it: these are the bytes of all files but temporaries of live processes (what those have reserved covers
  /// them). Reservations of processes that were dead when it began are dropped. Counts for nothing while a living
  /// process has yet to write its part of a damaged record again: what it has reserved is then in no sum.
  void end_count(std::int64_t bytes);
  /// Ends it without a result: somebody must count again.
  void cancel_count();

  /// kBusy: a lock not got in time, a count under way or needed.
  enum class Room { kTaken, kFull, kBusy };
  /// Takes room if used + everything reserved + bytes ≤ max_bytes: from what this process has in hand, or a step (32
  /// MiB or max_bytes / 64, whichever is less) and more from the file. Nothing more than a step is kept unused for
  /// long.
  Room reserve(std::int64_t bytes);
  /// Reserved room that is not needed after all.
  void cancel(std::int64_t bytes);
  /// Reserved room of a file that cannot be removed: it stays in force when this object goes, until somebody has
  /// counted.
  void abandon(std::int64_t bytes);
  /// `reserved` bytes were reserved for a file that now exists with `actual` bytes (no more, or the limit may be passed
  /// by the difference).
  void commit(std::int64_t reserved, std::int64_t actual);

  /// Room for files that are not all written yet, as far as it can be known: this process's, and what others were last
  /// seen to have reserved beyond a step.
  std::int64_t under_way();

  /// To be asked before a file is renamed into place or unlinked: 0 while somebody counts or must (better do neither
  /// then), otherwise a mark for release().
  std::uint64_t mark();
  static constexpr std::uint64_t kNow = ~std::uint64_t{0};
  /// A file of `bytes` is gone (this process unlinked it, and knows that it was of so many bytes when it did): room
  /// that this process may reuse at once. Ignored where a count began or ended since `mark` was given, or the mark is
  /// 0: its sum may have lacked the file.
  void release(std::int64_t bytes, std::uint64_t mark = kNow);

  /// Bytes by which used + reserved would exceed the limit if `bytes` more were reserved now (0: there is room, or it
  /// cannot be told).
  std::int64_t missing(std::int64_t bytes);
  struct Account {
    std::int64_t used = 0;
    std::int64_t reserved = 0;  ///< of dead processes, too
    int processes = 0;
    bool counting = false;
  };
  /// As the file has it after flush(); nothing where the sum is not known or the lock was not got.
  std::optional<Account> account();
  /// Writes what was changed; false where the lock was not got.
  bool flush();
  /// Somebody removed the file, replaced it by another version's, or took this process for dead (a file server that
  /// dropped its locks) and the slot: all calls fail from now on. Waits for nothing.
  bool lost() const;
  /// What helps then: opens or makes the file anew, and takes a slot; somebody must count. What callers have reserved
  /// stays so. False where that did not work.
  bool reopen(int dir_fd);

 private:
  /// What the process knows beyond the file. Always: written = sure + late_commits + outstanding + allowance.
  struct Local {
    std::int64_t sure = 0;           ///< bytes committed less released while surely nobody counted
    std::int64_t late_commits = 0;   ///< reported when a count might have begun
    std::int64_t late_releases = 0;  ///< the same; not yet in `allowance`
    std::int64_t outstanding = 0;    ///< reserved by callers
    std::int64_t allowance = 0;      ///< reserved in the file, free to be taken
    std::int64_t written = 0;        ///< reserved, as the file has it
    std::int64_t others = 0;         ///< reserved by other processes beyond a step, as last seen
    std::uint64_t count = 0;         ///< the file's, as last seen
    std::uint64_t mark = 1;
    bool counting = false;
    bool active = false;  ///< the file says that this process changes files
    int changes = 0;
    std::chrono::steady_clock::time_point sure_until{};
    std::optional<std::int64_t> result;  ///< of our count, to be written; negative: none
  };

  bool forked() const;
  bool is_sure() const;
  std::int64_t most_unused() const;
  void enter(int dir_fd);
  void leave();
  void open_file(int dir_fd, mode_t mode);
  void take_slot();
  int lock_record(bool patient);
  bool read_record(LedgerRecord& record);
  int write_record(LedgerRecord& record);
  bool lives(std::size_t slot);
  static bool all_told(const LedgerRecord& record);
  void rebuild(LedgerRecord& record);
  void bury(LedgerRecord& record);
  bool count_under_way(LedgerRecord& record);
  bool removed();
  int register_again(LedgerRecord& record);
  void look(LedgerRecord& record, std::chrono::steady_clock::time_point since);
  void finish_count(LedgerRecord& record);
  void put(LedgerRecord& record);
  bool with_record(bool patient, const std::function<void(LedgerRecord&)>& use);
  void changed();

  const std::shared_ptr<Io> io_;
  const Options options_;
  const std::int64_t step_;
  const int forks_;
  const pid_t pid_;
  int fd_ = -1;
  std::size_t slot_ = 0;
  std::uint64_t token_ = 0;
  std::string token_text_;

  std::mutex mutex_;
  Local local_;
  std::int64_t wanted_ = 0;  ///< what reserve() last had no room for
  bool stuck_ = false;       ///< the last attempt to lock the record ran out of time
  std::int64_t abandoned_ = 0;
  bool closing_ = false;
  std::atomic<bool> lost_{false};
};

}  // namespace kvstride::store
