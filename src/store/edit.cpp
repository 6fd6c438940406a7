// SPDX-License-Identifier: Apache-2.0
// Removing, setting aside and replacing files of a store's directory, with the account.
#include "store/edit.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "kvstride/error.h"
#include "store/directory.h"
#include "store/ledger_record.h"

namespace kvstride::store {
namespace {

constexpr auto kPatience = std::chrono::seconds(10);  ///< with another process that counts
constexpr auto kPause = std::chrono::milliseconds(10);

std::int64_t nanoseconds(const struct timespec& time) { return time.tv_sec * 1'000'000'000 + time.tv_nsec; }

}  // namespace

std::int64_t Census::bytes() const {
  std::int64_t sum = 0;
  for (const ChunkFile& file : files) sum = add_bytes(sum, file.bytes);
  for (const LooseFile& file : quarantine) sum = add_bytes(sum, file.bytes);
  return sum;
}

Census take_census(const StoreFolder& store) {
  Census out;
  out.spaces = store.spaces();
  for (std::size_t i = 0; i < out.spaces.size(); ++i) {
    const SpaceFolder space(store, out.spaces[i]);
    out.whole &= space.list([&](ChunkFile file) {
      file.space = static_cast<std::uint32_t>(i);
      out.files.push_back(file);
    });
  }
  out.quarantine = store.quarantine(&out.whole);
  out.temporaries = store.temporaries(&out.whole);
  return out;
}

void sort_by_use(std::vector<ChunkFile>& files) {
  std::sort(files.begin(), files.end(), [](const ChunkFile& a, const ChunkFile& b) {
    if (a.used != b.used) return a.used < b.used;
    if (a.space != b.space) return a.space < b.space;
    const auto left = a.key.bytes();
    const auto right = b.key.bytes();
    if (!(a.key == b.key)) return std::lexicographical_compare(left.begin(), left.end(), right.begin(), right.end());
    return std::pair(a.heads.first, a.heads.count) < std::pair(b.heads.first, b.heads.count);
  });
}

StoreEditor::StoreEditor(const StoreFolder& store) : store_(store), io_(store.io()) {
  const auto refuse = [&](const std::string& why) {
    return Error(ErrorCode::kStore, fmt::format("store: '{}' cannot be changed: {}", store.path(), why));
  };
  // The ledger's owner and mode say whose store it is; neither may change, nor may files of another owner come into it.
  const struct stat& ledger = store.ledger_stat();
  const bool group = (ledger.st_mode & 070) != 0;
  if (!group && ledger.st_uid != ::geteuid()) {
    throw refuse(fmt::format("it belongs to user {}; run as that user", ledger.st_uid));
  }
  struct statvfs disk;
  if (io_.statvfs(store.root(), disk) == 0 && (disk.f_flag & ST_RDONLY) != 0) throw refuse("a read-only file system");
  try {
    tmp_ = store.open_folder("tmp");
    quarantine_ = store.open_folder("quarantine");
    if (tmp_ < 0 || quarantine_ < 0) {
      throw refuse(fmt::format("its folder {}: {}", tmp_ < 0 ? "tmp" : "quarantine",
                               std::strerror(tmp_ < 0 ? -tmp_ : -quarantine_)));
    }
    Ledger::Options options;
    options.max_bytes = std::max<std::int64_t>(store.ledger().max_bytes, 0);
    options.mode = ledger.st_mode & 07777;
    ledger_ = std::make_unique<Ledger>(store.shared_io(), store.root(), options);
    // Alone, or after a crash: nobody knows yet what is in the directory.
    if (ledger_->begin_count() == Ledger::Count::kMine) counted_ = settle();
  } catch (...) {
    for (const int fd : {tmp_, quarantine_}) {
      if (fd >= 0) io_.close(fd);
    }
    throw;
  }
}

StoreEditor::~StoreEditor() {
  ledger_.reset();
  io_.close(tmp_);
  io_.close(quarantine_);
}

Census StoreEditor::count() {
  if (counted_) {
    Census out = std::move(*counted_);
    counted_.reset();
    return out;
  }
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (ledger_->begin_count(true) != Ledger::Count::kMine) {
    if (std::chrono::steady_clock::now() > until) {
      throw Error(ErrorCode::kStore, fmt::format("store: '{}': another process keeps counting", store_.path()));
    }
    std::this_thread::sleep_for(kPause);
  }
  return settle();
}

/// After a damaged record, living processes write their part of it again when they next look at it. Until then nobody
/// can tell whose a temporary file is.
void StoreEditor::wait_for_tokens() {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (ledger_->live_tokens().empty()) {
    if (std::chrono::steady_clock::now() > until) {
      throw Error(ErrorCode::kStore,
                  fmt::format("store: '{}': a process that has it open does not answer", store_.path()));
    }
    std::this_thread::sleep_for(kPause);
  }
}

/// The count that was begun.
Census StoreEditor::settle() {
  try {
    wait_for_tokens();
    Census out = take_census(store_);
    if (!out.whole) {
      throw Error(ErrorCode::kStore, fmt::format("store: '{}': its folders cannot all be listed", store_.path()));
    }
    // Temporaries are in no sum: those of the dead were covered by what these had reserved, which ends with the count.
    std::vector<LooseFile> living;
    for (LooseFile& file : out.temporaries) {
      const int error = file.dead ? retry([&] { return io_.unlink(tmp_, file.name.c_str()); }) : 0;
      if (error < 0 && error != -ENOENT) {
        throw Error(ErrorCode::kStore, fmt::format("store: '{}': tmp/{} cannot be removed: {}", store_.path(),
                                                   file.name, std::strerror(-error)));
      }
      (file.dead ? removed_ : living).push_back(std::move(file));
    }
    out.temporaries = std::move(living);
    ledger_->end_count(out.bytes());
    return out;
  } catch (...) {
    ledger_->cancel_count();
    throw;
  }
}

/// Leave to change files, or 0 where another process counts for too long.
std::uint64_t StoreEditor::mark() {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    if (const std::uint64_t mark = ledger_->mark(); mark != 0) return mark;
    if (std::chrono::steady_clock::now() > until) return 0;
    std::this_thread::sleep_for(kPause);
  }
}

int StoreEditor::unlink_at(int at, const char* name, std::int64_t& bytes, std::optional<std::int64_t> used_until) {
  if (at < 0) return at;
  const std::uint64_t mark = this->mark();
  if (mark == 0) return -EBUSY;
  struct stat stat;
  if (const int error = io_.stat_at(at, name, stat); error < 0) return error;
  if (!S_ISREG(stat.st_mode) || !store_.ours(stat)) return -EACCES;
  if (used_until && std::max(nanoseconds(stat.st_atim), nanoseconds(stat.st_mtim)) > *used_until) return -ESTALE;
  if (const int error = retry([&] { return io_.unlink(at, name); }); error < 0) return error;
  bytes = bytes_on_disk(stat);
  ledger_->release(bytes, mark);
  return 0;
}

int StoreEditor::remove(const SpaceFolder& space, const ChunkFile& file, bool unused, std::int64_t& bytes) {
  return unlink_at(space.shard(file.key), file.name().c_str(), bytes, unused ? std::optional(file.used) : std::nullopt);
}

int StoreEditor::remove_quarantined(const std::string& name, std::int64_t& bytes) {
  return unlink_at(quarantine_, name.c_str(), bytes, std::nullopt);
}

int StoreEditor::set_aside(const SpaceFolder& space, const ChunkFile& file, const Check& check) {
  const int shard = space.shard(file.key);
  if (shard < 0) return shard;
  const std::string name = file.name();
  const std::string there = space.name() + name;
  if (mark() == 0) return -EBUSY;
  struct stat stat;
  if (const int error = io_.stat_at(shard, name.c_str(), stat); error < 0) return error;
  if (stat.st_ino != check.inode) return -ENOENT;
  int error = retry([&] { return io_.rename_new(shard, name.c_str(), quarantine_, there.c_str()); });
  if (error == -EEXIST) {
    std::int64_t bytes = 0;
    return unlink_at(shard, name.c_str(), bytes, std::nullopt);
  }
  if (error < 0) return error;
  // In between somebody else may have set it aside and written a sound one.
  if (io_.stat_at(quarantine_, there.c_str(), stat) == 0 && stat.st_ino != check.inode) {
    retry([&] { return io_.rename_new(quarantine_, there.c_str(), shard, name.c_str()); });
    return -ENOENT;
  }
  return 0;
}

/// Folders and markers of a namespace, where no other file is there.
bool StoreEditor::remove_if_empty(const std::string& name) {
  const int space = store_.open_folder(name.c_str());
  if (space < 0) return false;
  std::vector<std::string> entries;
  const int listed = io_.list(space, [&](const char* entry, unsigned char) {
    entries.emplace_back(entry);
    return true;
  });
  bool empty = listed == 0;
  std::vector<std::string> markers;
  for (const std::string& entry : entries) {
    struct stat stat {};
    if (io_.stat_at(space, entry.c_str(), stat) < 0) continue;
    if (entry.size() == 8 && S_ISREG(stat.st_mode) && stat.st_size == 0) {
      markers.push_back(entry);
    } else {
      empty &= entry.size() == 1 && retry([&] { return io_.rmdir(space, entry.c_str()); }) == 0;
    }
  }
  for (const std::string& marker : markers) {
    if (empty) retry([&] { return io_.unlink(space, marker.c_str()); });
  }
  io_.close(space);
  return empty && retry([&] { return io_.rmdir(store_.root(), name.c_str()); }) == 0;
}

int StoreEditor::remove_empty(std::span<const std::string> spaces) {
  // Whoever opens the directory locks the record first: nobody comes while we hold it.
  const int fd = retry([&] { return io_.open(store_.root(), "ledger", O_RDWR | O_NONBLOCK, 0); });
  if (fd < 0) return 0;
  int removed = 0;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  int locked = 0;
  while ((locked = retry([&] { return io_.lock(fd, 0, sizeof(LedgerRecord), true); })) == -EAGAIN &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(kPause);
  }
  int processes = 0;
  for (std::size_t i = 0; i < kLedgerSlots && locked == 0; ++i) {
    const auto place = static_cast<std::int64_t>(sizeof(LedgerRecord) + i);
    processes += retry([&] { return io_.locked(fd, place, 1); }) != 0 ? 1 : 0;
  }
  if (processes == 1) {  // this one
    for (const std::string& name : spaces) removed += remove_if_empty(name) ? 1 : 0;
  }
  io_.close(fd);  // and with it the lock
  return removed;
}

// ---------------------------------------------------------------------------------------------------------- replacing

int StoreEditor::write_draft(const std::string& name, std::span<const std::byte> image) {
  const mode_t mode = store_.ledger_stat().st_mode & 0660;
  const int fd = retry([&] { return io_.open(tmp_, name.c_str(), O_WRONLY | O_CREAT | O_EXCL, mode); });
  if (fd < 0) return fd;
  int error = retry([&] { return io_.chmod_fd(fd, mode); });
  for (std::size_t at = 0; error == 0 && at < image.size();) {
    const auto put =
        retry([&] { return io_.pwrite(fd, image.data() + at, image.size() - at, static_cast<std::int64_t>(at)); });
    if (put <= 0) error = put < 0 ? static_cast<int>(put) : -EIO;
    if (put > 0) at += static_cast<std::size_t>(put);
  }
  if (error == 0) error = retry([&] { return io_.fdatasync(fd); });
  io_.close(fd);
  return error;
}

/// Gives the draft the file's name; `old` is then the old file's name in tmp/.
int StoreEditor::exchange(const SpaceFolder& space, const ChunkFile& file, const std::string& draft, std::string& old) {
  const int shard = space.shard(file.key);
  const std::string name = file.name();
  old = draft;
  int error = retry([&] { return io_.exchange(tmp_, draft.c_str(), shard, name.c_str()); });
  if (error != -EINVAL && error != -EOPNOTSUPP) return error;
  // A file system that cannot (NFS): for a moment there is no file of that name. Who is killed then loses a chunk.
  old = fmt::format("{}{:016x}", ledger_->token(), ++next_draft_);
  error = retry([&] { return io_.rename_new(shard, name.c_str(), tmp_, old.c_str()); });
  if (error < 0) return error;
  error = retry([&] { return io_.rename_new(tmp_, draft.c_str(), shard, name.c_str()); });
  if (error < 0) retry([&] { return io_.rename_new(tmp_, old.c_str(), shard, name.c_str()); });
  return error;
}

int StoreEditor::replace(const SpaceFolder& space, const ChunkFile& file, const struct stat& old,
                         std::span<const std::byte> image, Verifier& verifier) {
  const auto length = static_cast<std::int64_t>(image.size());
  const std::int64_t room = room_for(length);
  if (mark() == 0) return -EBUSY;
  if (const Ledger::Room taken = ledger_->reserve(room); taken != Ledger::Room::kTaken) {
    return taken == Ledger::Room::kFull ? -ENOSPC : -EBUSY;
  }
  const std::string draft = fmt::format("{}{:016x}", ledger_->token(), ++next_draft_);
  const auto give_up = [&](int error) {
    const int gone = retry([&] { return io_.unlink(tmp_, draft.c_str()); });
    gone == 0 || gone == -ENOENT ? ledger_->cancel(room) : ledger_->abandon(room);
    return error;
  };
  if (const int error = write_draft(draft, image); error < 0) return give_up(error);
  int fd = retry([&] { return io_.open(tmp_, draft.c_str(), O_RDONLY | O_NOATIME | O_DIRECT, 0); });
  if (fd == -EINVAL) fd = retry([&] { return io_.open(tmp_, draft.c_str(), O_RDONLY | O_NOATIME, 0); });
  if (fd < 0) return give_up(fd);
  std::string wrong;
  struct stat stat {};
  int error = io_.stat_fd(fd, stat);
  try {
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);  // the disk's bytes, not those that we have in memory
    wrong = verifier.check(io_, fd, length, space, file.key, file.heads);
  } catch (const std::system_error& failed) {
    error = -failed.code().value();
  }
  io_.close(fd);
  if (error == 0 && !wrong.empty()) error = -EILSEQ;
  if (error < 0) return give_up(error);
  io_.set_times(tmp_, draft.c_str(), nanoseconds(old.st_atim), nanoseconds(old.st_mtim));

  const std::uint64_t mark = this->mark();
  if (mark == 0) return give_up(-EBUSY);
  struct stat now;
  error = io_.stat_at(space.shard(file.key), file.name().c_str(), now);
  if (error == 0 && now.st_ino != old.st_ino) error = -ESTALE;
  std::string there;
  if (error == 0) error = exchange(space, file, draft, there);
  if (error < 0) return give_up(error);
  ledger_->commit(room, bytes_on_disk(stat));
  // What we have now in tmp/ is what the name had at that moment, and nobody else's any more.
  if (io_.stat_at(tmp_, there.c_str(), now) == 0 && retry([&] { return io_.unlink(tmp_, there.c_str()); }) == 0) {
    ledger_->release(bytes_on_disk(now), mark);
  }
  return 0;
}

}  // namespace kvstride::store
