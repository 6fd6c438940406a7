// SPDX-License-Identifier: Apache-2.0
// Reads, checks and writes the shared account under its lock; keeps what this process has not written yet.
#include "store/ledger.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "kvstride/error.h"
#include "store/ledger_record.h"

namespace kvstride::store {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr const char* kName = "ledger";
constexpr std::int64_t kRecordBytes = sizeof(LedgerRecord);
constexpr std::int64_t kMostStep = std::int64_t{32} << 20;
constexpr int kMostChanges = 64;
constexpr milliseconds kSure{50};    // how long a process relies on having seen that nobody counts
constexpr milliseconds kSettle{75};  // how long one that begins to count waits; clocks may run a little apart

std::int64_t lock_of(std::size_t slot) { return kRecordBytes + static_cast<std::int64_t>(slot); }

std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (number == 0) {
    if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) number = 0;
  }
  return number;
}

std::string text_of(std::uint64_t token) { return fmt::format("{:016x}", token); }

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorCode::kStore, "ledger: " + what); }
/// A call that cannot be done without.
[[noreturn]] void fail(const char* call, int error) {
  const std::string what = fmt::format("ledger: {}: {}", call, std::strerror(-error));
  if (no_space(error)) throw NoRoom(ErrorCode::kStore, what);
  throw Error(ErrorCode::kStore, what);
}

/// How often this process was forked off from others with ledgers.
std::atomic<int> forks{0};

/// Descriptors of all ledgers. A forked child closes its copies: with them, a parent that died would seem to live.
struct Descriptors {
  std::mutex mutex;
  std::vector<std::pair<Io*, int>> open;
};

Descriptors& descriptors() {
  static auto* all = new Descriptors;  // never destroyed: a fork may happen at any time
  static const int at_fork = pthread_atfork([] { all->mutex.lock(); }, [] { all->mutex.unlock(); },
                                            [] {
                                              for (const auto& [io, fd] : all->open) io->close(fd);
                                              all->open.clear();
                                              ++forks;
                                              all->mutex.unlock();
                                            });
  (void)at_fork;
  return *all;
}

}  // namespace

// --- Opening and closing ---------------------------------------------------------------------------------------------

Ledger::Ledger(std::shared_ptr<Io> io, int dir_fd, const Options& options)
    : io_(std::move(io)),
      options_(options),
      step_(std::min(kMostStep, options.max_bytes / 64)),
      forks_(forks.load()),
      pid_(::getpid()),
      token_(random_number()),
      token_text_(text_of(token_)) {
  if (options.max_bytes < 0) fail(fmt::format("max_bytes {} is negative", options.max_bytes));
  enter(dir_fd);
}

void Ledger::enter(int dir_fd) {
  open_file(dir_fd, options_.mode);
  try {
    take_slot();
    Descriptors& all = descriptors();
    const std::lock_guard lock(all.mutex);
    all.open.emplace_back(io_.get(), fd_);
  } catch (...) {
    io_->close(fd_);  // and with it its locks
    fd_ = -1;
    throw;
  }
}

void Ledger::leave() {
  if (fd_ < 0) return;
  Descriptors& all = descriptors();
  const std::lock_guard lock(all.mutex);
  std::erase(all.open, std::pair(io_.get(), fd_));
  io_->close(fd_);
  fd_ = -1;
}

Ledger::~Ledger() {
  if (forked() || ::getpid() != pid_) return;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    // Where this fails, the slot is one of a dead process, and somebody counts.
    with_record(true, [&](LedgerRecord& record) {
      if (record.counter == token_) record.counter = record.known = 0;
      // Files that a count under way may miss, and files that are left behind.
      if (local_.late_commits > 0 || abandoned_ > 0) {
        record.lost_since += std::max<std::int64_t>(local_.late_commits, 0);
        (record.counter == 0 ? record.lost : record.lost_since) += abandoned_;
        record.unsettled = 1;
      }
      record.slots[slot_] = {};
    });
  }
  leave();
}

/// The token stays, and with it files under way; what is known of the old account is of no use in the new one.
bool Ledger::reopen(int dir_fd) {
  if (forked() || ::getpid() != pid_) return false;
  const std::lock_guard lock(mutex_);
  if (!lost_) return true;
  leave();
  Local anew;
  anew.outstanding = std::max<std::int64_t>(local_.outstanding, 0);
  anew.written = anew.outstanding;
  anew.mark = local_.mark + 1;
  anew.active = local_.active;
  local_ = anew;
  try {
    enter(dir_fd);
  } catch (const Error&) {
    return false;
  }
  lost_ = false;
  return true;
}

void Ledger::open_file(int dir_fd, mode_t mode) {
  // Not blocking: somebody may have put a FIFO there.
  fd_ = retry([&] { return io_->open(dir_fd, kName, O_RDWR | O_CREAT | O_NONBLOCK, mode); });
  if (fd_ == -ELOOP) fail("a symbolic link, refused");
  if (fd_ < 0) fail("open", fd_);
  std::string why;
  struct stat now {};
  if (const int got = retry([&] { return io_->stat_fd(fd_, now); }); got < 0) {
    why = fmt::format("stat: {}", std::strerror(-got));
  } else if (!S_ISREG(now.st_mode)) {
    why = "not a regular file, refused";
  } else if (now.st_uid != ::geteuid() && (mode & 070) == 0) {
    why = fmt::format("belongs to user {}, not {}, refused", now.st_uid, ::geteuid());
  } else if ((now.st_mode & 07777) != mode) {
    const int set = retry([&] { return io_->chmod_fd(fd_, mode); });
    if (set < 0) why = fmt::format("chmod to {:o}: {}", mode, std::strerror(-set));
  }
  if (why.empty()) return;
  io_->close(std::exchange(fd_, -1));
  fail(why);
}

void Ledger::take_slot() {
  const int locked = lock_record(true);
  if (locked == -EAGAIN) {
    fail(fmt::format("locked by another process for {} ms",
                     std::chrono::duration_cast<milliseconds>(options_.lock_timeout).count()));
  }
  const auto no_locks = [](int error) {
    fail(fmt::format("the file system has no byte-range locks: {}", std::strerror(-error)));
  };
  if (locked < 0) no_locks(locked);
  LedgerRecord record;
  if (!read_record(record)) fail("read: input/output error");
  if (record.version != kLedgerVersion) fail(fmt::format("version {}, not {}", record.version, kLedgerVersion));
  slot_ = kLedgerSlots;
  bury(record);
  bool alone = true;
  for (std::size_t i = 0; i < kLedgerSlots; ++i) {
    if (record.slots[i].in_use != 0) {
      alone = false;
    } else if (slot_ == kLedgerSlots) {
      const int got = retry([&] { return io_->lock(fd_, lock_of(i), 1, true); });
      if (got == 0) slot_ = i;
      if (got < 0 && got != -EAGAIN) no_locks(got);
    }
  }
  if (slot_ == kLedgerSlots) fail(fmt::format("{} processes have the directory open, the limit", kLedgerSlots));
  if (alone || lost_) record.known = 0;  // who knows what happened to the files
  record.slots[slot_] = {.token = token_, .reserved = local_.written, .in_use = 1, .active = local_.active ? 1U : 0U};
  record.max_bytes = options_.max_bytes;
  local_.count = record.count;
  local_.counting = count_under_way(record);
  if (const int error = write_record(record); error < 0) fail("write", error);
  io_->unlock(fd_, 0, kRecordBytes);
}

/// Not getpid(), which costs as much as all the rest of a call.
bool Ledger::forked() const { return forks.load(std::memory_order_relaxed) != forks_; }

// --- The record ------------------------------------------------------------------------------------------------------

int Ledger::lock_record(bool patient) {
  const auto deadline = steady_clock::now() + (patient && !stuck_ ? options_.lock_timeout : nanoseconds(0));
  microseconds pause{20};
  while (true) {
    const int got = retry([&] { return io_->lock(fd_, 0, kRecordBytes, true); });
    if (got != -EAGAIN || steady_clock::now() >= deadline) {
      stuck_ = got < 0 && (patient || stuck_);
      return got;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, microseconds(1000));
  }
}

/// A damaged record is replaced by one that knows nothing; false where the file cannot be read.
bool Ledger::read_record(LedgerRecord& record) {
  std::size_t have = 0;
  while (have < sizeof(record)) {
    const auto got = retry([&] {
      return io_->pread(fd_, reinterpret_cast<char*>(&record) + have, sizeof(record) - have,
                        static_cast<std::int64_t>(have));
    });
    if (got < 0) return false;
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  if (have < sizeof(record) || !record.valid()) rebuild(record);
  return true;
}

/// 0 or −errno. A write that fails half-way leaves a record that nobody takes for whole.
int Ledger::write_record(LedgerRecord& record) {
  record.checksum = record.sum();
  for (std::size_t done = 0; done < sizeof(record);) {
    const auto put = retry([&] {
      return io_->pwrite(fd_, reinterpret_cast<const char*>(&record) + done, sizeof(record) - done,
                         static_cast<std::int64_t>(done));
    });
    if (put <= 0) return put < 0 ? static_cast<int>(put) : -EIO;
    done += static_cast<std::size_t>(put);
  }
  return 0;
}

/// What cannot be told counts as alive.
bool Ledger::lives(std::size_t slot) {
  return retry([&] { return io_->locked(fd_, lock_of(slot), 1); }) != 0;
}

void Ledger::rebuild(LedgerRecord& record) {
  record = {};
  record.max_bytes = options_.max_bytes;
  record.count = random_number();
  for (std::size_t i = 0; i < kLedgerSlots; ++i) record.slots[i].in_use = record.slots[i].active = lives(i) ? 1 : 0;
}

/// Slots of processes that died are free again; what they had reserved stays reserved until a count has ended.
void Ledger::bury(LedgerRecord& record) {
  for (std::size_t i = 0; i < kLedgerSlots; ++i) {
    LedgerSlot& slot = record.slots[i];
    if (i == slot_ || slot.in_use == 0 || lives(i)) continue;
    (record.counter == 0 ? record.lost : record.lost_since) += slot.reserved;
    record.unsettled |= slot.active;
    slot = {};
  }
}

/// Whether the record has what every living process has reserved: not where it was damaged, and one of them has not
/// written its part again.
bool Ledger::all_told(const LedgerRecord& record) {
  return std::none_of(record.slots.begin(), record.slots.end(),
                      [](const LedgerSlot& slot) { return slot.in_use != 0 && slot.token == 0; });
}

/// Ends the count of a process that died.
bool Ledger::count_under_way(LedgerRecord& record) {
  if (record.counter == 0) return false;
  const LedgerSlot& slot = record.slots[record.counter_slot];
  if (record.counter == token_) return true;
  if (slot.token == record.counter && lives(record.counter_slot)) return true;
  record.counter = record.known = 0;
  return false;
}

/// With the file, its locks are of no use: the next process makes another one.
bool Ledger::removed() {
  struct stat now {};
  return retry([&] { return io_->stat_fd(fd_, now); }) == 0 && now.st_nlink == 0;
}

/// The entry is lost when the record was damaged, or when others took this process for dead. −EAGAIN where somebody
/// else has the slot, or an error that may pass.
int Ledger::register_again(LedgerRecord& record) {
  LedgerSlot& mine = record.slots[slot_];
  if (mine.in_use != 0 && mine.token == token_) return 0;
  if (mine.token != 0) return -EAGAIN;
  if (const int locked = retry([&] { return io_->lock(fd_, lock_of(slot_), 1, true); }); locked < 0) return locked;
  mine = {.token = token_, .in_use = 1};
  record.known = 0;
  local_.sure = local_.allowance = 0;
  return 0;
}

/// Takes notice of counts: sorts out what was reported when nobody knew whether one was under way.
void Ledger::look(LedgerRecord& record, steady_clock::time_point since) {
  const bool counting = count_under_way(record);
  if (record.count == local_.count && !local_.counting) {
    local_.sure += local_.late_commits - local_.late_releases;
    local_.allowance += local_.late_releases;
    local_.late_commits = 0;
  } else {
    local_.allowance += local_.sure;  // the count's sum has it
    local_.sure = 0;
    if (!counting) local_.sure = std::exchange(local_.late_commits, 0);
    ++local_.mark;
  }
  local_.late_releases = 0;
  local_.count = record.count;
  local_.counting = counting;
  if (local_.result) finish_count(record);
  local_.others = 0;
  for (std::size_t i = 0; i < kLedgerSlots; ++i) {
    if (i != slot_) local_.others += std::max<std::int64_t>(record.slots[i].reserved - step_, 0);
  }
  local_.sure_until = record.known != 0 && !local_.counting ? since + kSure : steady_clock::time_point{};
}

void Ledger::finish_count(LedgerRecord& record) {
  const std::int64_t bytes = *std::exchange(local_.result, std::nullopt);
  if (record.counter != token_) return;
  record.counter = 0;
  record.known = bytes >= 0 && all_told(record) ? 1 : 0;
  if (record.known != 0) {
    record.used = bytes;
    record.lost = 0;
  }
  local_.counting = false;
  local_.sure += std::exchange(local_.late_commits, 0);
}

/// Most room that is kept unused: a step, or what there was no room for and is being made.
std::int64_t Ledger::most_unused() const { return std::max(step_, wanted_); }

/// This process's changes into the record.
void Ledger::put(LedgerRecord& record) {
  record.used += std::exchange(local_.sure, 0);
  local_.allowance = std::clamp<std::int64_t>(local_.allowance, 0, most_unused());
  local_.written = std::max<std::int64_t>(local_.late_commits + local_.outstanding + local_.allowance, 0);
  if (!closing_) {
    record.slots[slot_].reserved = local_.written;
    record.slots[slot_].active = local_.active ? 1 : 0;
  }
  local_.changes = 0;
}

/// Calls `use` with the record as it is, locked, and writes what has changed. False, and nothing has changed, where
/// that did not work.
bool Ledger::with_record(bool patient, const std::function<void(LedgerRecord&)>& use) {
  const auto since = steady_clock::now();
  if (::getpid() != pid_) return false;  // of a fork that calls no handlers
  if (lost_ || lock_record(patient) < 0) return false;
  const std::unique_ptr<Ledger, void (*)(Ledger*)> unlock(
      this, [](Ledger* ledger) { ledger->io_->unlock(ledger->fd_, 0, kRecordBytes); });
  LedgerRecord record;
  if (!read_record(record)) return false;
  const LedgerRecord read = record;
  const Local before = local_;
  const int entered = removed() || record.version != kLedgerVersion ? -EAGAIN : register_again(record);
  lost_ = entered == -EAGAIN;
  if (entered < 0) return false;
  look(record, since);
  use(record);
  put(record);
  if (std::memcmp(&read, &record, sizeof(record)) == 0 || write_record(record) == 0) return true;
  local_ = before;
  local_.sure_until = {};
  return false;
}

// --- Counting --------------------------------------------------------------------------------------------------------

std::vector<std::string> Ledger::live_tokens() {
  if (forked()) return {};
  const std::lock_guard lock(mutex_);
  std::vector<std::string> tokens;
  bool all = false;
  const bool done = with_record(true, [&](LedgerRecord& record) {
    bury(record);
    all = all_told(record);
    for (const LedgerSlot& slot : record.slots) {
      if (slot.in_use != 0) tokens.push_back(text_of(slot.token));
    }
  });
  if (!done || !all) tokens.clear();
  return tokens;
}

Ledger::Count Ledger::begin_count(bool force) {
  if (forked()) return Count::kOther;
  Count answer = Count::kOther;
  bool alone = true;
  {
    const std::lock_guard lock(mutex_);
    const bool done = with_record(true, [&](LedgerRecord& record) {
      if (record.counter != 0) return;
      bury(record);
      if (!force && record.known != 0 && record.unsettled == 0) {
        answer = Count::kNotNeeded;
        return;
      }
      for (std::size_t i = 0; i < kLedgerSlots; ++i) alone &= i == slot_ || record.slots[i].in_use == 0;
      record.unsettled = 0;
      record.lost += std::exchange(record.lost_since, 0);
      record.counter = token_;
      record.counter_slot = static_cast<std::uint32_t>(slot_);
      record.count = local_.count = random_number();
      local_.counting = true;
      local_.sure_until = {};
      answer = Count::kMine;
    });
    if (!done) return Count::kOther;
  }
  if (answer == Count::kMine && !alone) std::this_thread::sleep_for(kSettle);
  return answer;
}

void Ledger::end_count(std::int64_t bytes) {
  if (forked()) return;
  const std::lock_guard lock(mutex_);
  local_.result = std::clamp<std::int64_t>(bytes, 0, LedgerRecord::kMost / 2);  // a record must not be too large
  with_record(true, [](LedgerRecord&) {});                                      // or with the next look
}

void Ledger::cancel_count() {
  if (forked()) return;
  const std::lock_guard lock(mutex_);
  local_.result = -1;
  with_record(true, [](LedgerRecord&) {});
}

// --- Room ------------------------------------------------------------------------------------------------------------

bool Ledger::is_sure() const { return steady_clock::now() <= local_.sure_until; }

void Ledger::changed() {
  const bool too_much = local_.allowance < 0 || local_.allowance > 2 * most_unused();
  if (++local_.changes < kMostChanges && local_.active && !too_much) return;
  with_record(false, [&](LedgerRecord&) { local_.active = true; });
}

Ledger::Room Ledger::reserve(std::int64_t bytes) {
  if (forked()) return Room::kBusy;
  const std::lock_guard lock(mutex_);
  const auto take = [&] {
    local_.allowance -= bytes;
    local_.outstanding += bytes;
    wanted_ = 0;
    return Room::kTaken;
  };
  if (local_.active && local_.allowance >= bytes && local_.changes < kMostChanges && is_sure()) return take();
  Room answer = Room::kBusy;
  const bool done = with_record(true, [&](LedgerRecord& record) {
    if (record.known == 0 || local_.counting) return;
    local_.active = true;
    const std::int64_t needed = bytes - local_.allowance;
    const std::int64_t room = options_.max_bytes - record.total();
    if (needed > room && needed > 0) {
      wanted_ = bytes;
      answer = Room::kFull;
      return;
    }
    if (needed > 0) local_.allowance += room >= std::max(needed, step_) ? std::max(needed, step_) : needed;
    answer = take();
  });
  return done ? answer : Room::kBusy;
}

void Ledger::cancel(std::int64_t bytes) {
  if (forked()) return;
  const std::lock_guard lock(mutex_);
  local_.outstanding -= bytes;
  local_.allowance += bytes;
  changed();
}

void Ledger::abandon(std::int64_t bytes) {
  if (forked()) return;
  const std::lock_guard lock(mutex_);
  abandoned_ += bytes;
}

void Ledger::commit(std::int64_t reserved, std::int64_t actual) {
  if (forked()) return;
  const std::lock_guard lock(mutex_);
  local_.outstanding -= reserved;
  local_.allowance += reserved - actual;
  (is_sure() ? local_.sure : local_.late_commits) += actual;
  changed();
}

std::int64_t Ledger::under_way() {
  if (forked()) return 0;
  const std::lock_guard lock(mutex_);
  return std::max<std::int64_t>(local_.outstanding, 0) + local_.others;
}

std::uint64_t Ledger::mark() {
  if (forked()) return 0;
  const std::lock_guard lock(mutex_);
  if (!local_.active || !is_sure()) with_record(true, [&](LedgerRecord&) { local_.active = true; });
  return local_.active && is_sure() ? local_.mark : 0;
}

void Ledger::release(std::int64_t bytes, std::uint64_t mark) {
  if (forked()) return;
  const std::lock_guard lock(mutex_);
  if (mark != kNow && mark != local_.mark) return;
  if (is_sure()) {
    local_.sure -= bytes;
    local_.allowance += bytes;
  } else {
    local_.late_releases += bytes;
  }
  changed();
}

std::int64_t Ledger::missing(std::int64_t bytes) {
  if (forked()) return 0;
  const std::lock_guard lock(mutex_);
  std::int64_t more = 0;
  with_record(true, [&](LedgerRecord& record) {
    if (record.known == 0 || local_.counting) return;
    more = std::max<std::int64_t>(record.total() - local_.allowance + bytes - options_.max_bytes, 0);
  });
  return more;
}

std::optional<Ledger::Account> Ledger::account() {
  if (forked()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  std::optional<Account> account;
  const bool done = with_record(true, [&](LedgerRecord& record) {
    if (record.known == 0) return;
    put(record);
    account = Account{.used = std::max<std::int64_t>(record.used, 0),
                      .reserved = record.total() - record.used,
                      .counting = local_.counting};
    for (std::size_t i = 0; i < kLedgerSlots; ++i) {
      account->processes += i == slot_ || (record.slots[i].in_use != 0 && lives(i)) ? 1 : 0;
    }
  });
  return done ? account : std::nullopt;
}

bool Ledger::lost() const { return forked() || lost_; }

bool Ledger::flush() {
  if (forked()) return false;
  const std::lock_guard lock(mutex_);
  return with_record(true, [](LedgerRecord&) {});
}

}  // namespace kvstride::store
