// SPDX-License-Identifier: Apache-2.0
// Names, descriptors, the account and eviction of a directory tier.
#include "store/directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

constexpr std::size_t kSpaceName = 64;
constexpr std::size_t kHeadsName = 8;
constexpr std::size_t kDraftName = 32;
constexpr std::int64_t kSecond = 1'000'000'000;

std::int64_t nanoseconds(const struct timespec& time) { return time.tv_sec * kSecond + time.tv_nsec; }

bool is_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::string heads_name(Heads heads) { return fmt::format("{:04x}{:04x}", heads.first, heads.count); }

std::optional<Heads> parse_heads(std::string_view text) {
  if (text.size() != kHeadsName || !is_hex(text)) return std::nullopt;
  const std::string copy(text);
  const auto first = static_cast<std::uint16_t>(std::stoul(copy.substr(0, 4), nullptr, 16));
  const auto count = static_cast<std::uint16_t>(std::stoul(copy.substr(4), nullptr, 16));
  if (count == 0 && first != 0) return std::nullopt;
  return Heads{first, count};
}

std::size_t shard_of(const Key& key) { return std::to_integer<std::size_t>(key.bytes()[0]) >> 4; }

Error failed(const std::string& path, const char* what, int error) {
  return Error(ErrorCode::kStore, fmt::format("DirectoryTier: '{}': {}: {}", path, what, std::strerror(-error)));
}

}  // namespace

std::int64_t bytes_on_disk(const struct stat& stat) {
  return std::max<std::int64_t>(stat.st_blocks * 512, whole_pages(stat.st_size));
}
std::int64_t room_for(std::int64_t bytes) { return whole_pages(bytes) + (bytes > (1 << 20) ? kPage : 0); }

std::string file_name(const Key& key, Heads heads) { return key.hex() + heads_name(heads); }

std::optional<std::pair<Key, Heads>> parse_file_name(std::string_view name) {
  if (name.size() <= kHeadsName || name.size() > 2 * Key::kMaxBytes + kHeadsName) return std::nullopt;
  const std::optional<Heads> heads = parse_heads(name.substr(name.size() - kHeadsName));
  const auto bytes = from_hex(name.substr(0, name.size() - kHeadsName));
  if (!heads || !bytes || bytes->empty()) return std::nullopt;
  return std::pair{Key(*bytes), *heads};
}

/// What the files say.
struct Directory::Scan {
  struct File {
    std::uint32_t space;
    std::uint32_t name;  ///< in names
    std::uint32_t pages;
    std::int64_t used;     ///< seconds
    std::int64_t changed;  ///< seconds
  };
  std::vector<File> files;
  std::vector<std::string> names;
  std::int64_t bytes = 0;
  bool whole = true;  ///< everything could be listed
};

// ------------------------------------------------------------------------------------------------------------- opening

Directory::Directory(std::shared_ptr<Io> io, Options options, Counters& counters)
    : io_(std::move(io)), options_(std::move(options)), counters_(counters), index_(options_.policy) {
  open_root();
  struct statvfs disk;
  if (const int error = io_->statvfs(root_, disk); error < 0) throw failed(options_.path, "statvfs", error);
  const auto size = static_cast<std::int64_t>(disk.f_blocks * disk.f_frsize);
  keep_free_ = options_.keep_free.value_or(std::min<std::int64_t>(std::int64_t{1} << 30, size / 20));
  if (!read_only_) {
    Ledger::Options account;
    account.max_bytes = options_.max_bytes;
    if (options_.group) account.mode = 0660;
    ledger_ = std::make_unique<Ledger>(io_, root_, account);
    probe_direct();
  }
  count_files(ledger_ && ledger_->begin_count() == Ledger::Count::kMine);
}

Directory::~Directory() {
  for (const auto& space : spaces_) {
    for (const int shard : space->shards) {
      if (shard >= 0) io_->close(shard);
    }
    if (space->fd >= 0) io_->close(space->fd);
  }
  ledger_.reset();
  for (const int fd : {quarantine_, tmp_, root_}) {
    if (fd >= 0) io_->close(fd);
  }
}

bool Directory::ours(const struct stat& stat) const { return options_.group || stat.st_uid == geteuid(); }

/// A directory below one of ours; made if it is not there and `make`.
int Directory::open_directory(int at, const char* name, bool make) {
  const auto open = [&] { return retry([&] { return io_->open(at, name, O_RDONLY | O_DIRECTORY, 0); }); };
  int fd = open();
  const mode_t mode = options_.group ? 02770 : 0700;
  if (fd == -ENOENT && make) {
    const int made = retry([&] { return io_->mkdir(at, name, mode); });
    if (made < 0 && made != -EEXIST) return made;
    fd = open();
    if (fd >= 0 && made == 0) retry([&] { return io_->chmod_fd(fd, mode); });
  }
  if (fd < 0) return fd;
  struct stat stat;
  if (const int error = io_->stat_fd(fd, stat); error < 0 || !ours(stat)) {
    io_->close(fd);
    if (error < 0) return error;
    counters_.add(Count::kForeign);
    return -EACCES;
  }
  return fd;
}

/// Opens the root without following a link at its end, making it and its parents where they are missing.
void Directory::open_root() {
  std::string path = options_.path;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (path.empty()) throw Error(ErrorCode::kArgument, "DirectoryTier: path is empty");
  if (path.find('\0') != std::string::npos) throw Error(ErrorCode::kArgument, "DirectoryTier: path holds a NUL");
  const auto parent_end = path.rfind('/');
  const std::string parent = parent_end == std::string::npos ? "." : parent_end == 0 ? "/" : path.substr(0, parent_end);
  const std::string name = path == "/" ? "." : parent_end == std::string::npos ? path : path.substr(parent_end + 1);
  // Parents may be links: they are the administrator's. They are made with the process's own umask.
  for (std::size_t at = 1; at <= parent.size(); ++at) {
    if (at == parent.size() || parent[at] == '/') mkdir(parent.substr(0, at).c_str(), 0777);
  }
  const int above = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (above < 0) throw failed(parent, "cannot be opened", -errno);
  root_ = open_directory(above, name.c_str(), true);
  io_->close(above);
  if (root_ == -ELOOP || root_ == -ENOTDIR) {
    throw Error(ErrorCode::kStore, fmt::format("DirectoryTier: '{}' is a link or no directory", path));
  }
  if (root_ == -EACCES && counters_.get(Count::kForeign) > 0) {
    throw Error(ErrorCode::kStore,
                fmt::format("DirectoryTier: '{}' belongs to another user (group=True accepts it)", path));
  }
  if (root_ < 0) throw failed(path, "cannot be opened", root_);
  tmp_ = open_directory(root_, "tmp", true);
  quarantine_ = open_directory(root_, "quarantine", true);
  if (tmp_ == -EROFS || (tmp_ == -EACCES && counters_.get(Count::kForeign) == 0)) read_only_ = true;
  if (!read_only_ && (tmp_ < 0 || quarantine_ < 0)) {
    throw failed(path, "its folders cannot be used", tmp_ < 0 ? tmp_ : quarantine_);
  }
  struct statvfs disk;
  if (io_->statvfs(root_, disk) == 0 && (disk.f_flag & ST_RDONLY) != 0) read_only_ = true;
}

/// Whether files can be written past the page cache here.
void Directory::probe_direct() {
  const std::string name = ledger_->token() + "0000000000000000";
  const int fd = retry([&] { return io_->open(tmp_, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_DIRECT, 0600); });
  if (fd < 0) return;
  alignas(kPage) static const std::array<std::byte, kPage> page{};
  direct_ = retry([&] { return io_->pwrite(fd, page.data(), page.size(), 0); }) == kPage;
  io_->close(fd);
  io_->unlink(tmp_, name.c_str());
}

// ----------------------------------------------------------------------------------------------- spaces and
// descriptors

std::uint32_t Directory::space(const Digest& digest) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < spaces_.size(); ++i) {
    if (spaces_[i]->digest == digest) return static_cast<std::uint32_t>(i);
  }
  auto space = std::make_unique<Space>();
  space->digest = digest;
  space->name = to_hex(digest);
  space->shards.fill(-1);
  spaces_.push_back(std::move(space));
  return static_cast<std::uint32_t>(spaces_.size() - 1);
}

int Directory::space_fd(Space& space, bool make) {
  if (space.fd < 0) {
    const int fd = open_directory(root_, space.name.c_str(), make);
    if (fd < 0) return fd;
    space.fd = fd;
  }
  return space.fd;
}

/// Descriptors are kept: 17 a namespace. They are never closed before the end, so no other thread meets a closed one.
int Directory::shard_fd(std::uint32_t space, const Key& key, bool make) {
  const std::lock_guard lock(splits_mutex_);
  Space& where = [&]() -> Space& {
    const std::lock_guard spaces(mutex_);
    return *spaces_[space];
  }();
  int& shard = where.shards[shard_of(key)];
  if (shard >= 0) return shard;
  const int fd = space_fd(where, make);
  if (fd < 0) return fd;
  const char name[2] = {"0123456789abcdef"[shard_of(key)], '\0'};
  const int opened = open_directory(fd, name, make);
  if (opened < 0) return opened;
  return shard = opened;
}

/// Head ranges that files of a namespace have are known by empty marker files: a lookup of an unknown key asks for
/// these.
void Directory::learn_splits(Space& space) {
  constexpr auto kEvery = std::chrono::milliseconds(20);
  const Clock::time_point now = Clock::now();
  if (now - space.splits_checked < kEvery) return;
  const int fd = space_fd(space, false);
  struct stat stat;
  if (fd < 0 || io_->stat_fd(fd, stat) < 0) return;
  space.splits_checked = now;
  const bool same =
      stat.st_mtim.tv_sec == space.splits_time.tv_sec && stat.st_mtim.tv_nsec == space.splits_time.tv_nsec;
  // A directory's time has the kernel's ticks: what was just changed may change again within one.
  const bool settled = io_->now() - nanoseconds(stat.st_mtim) > kSecond / 10;
  if (same && settled && !space.splits.empty()) return;
  space.splits_time = stat.st_mtim;
  space.splits.clear();
  io_->list(fd, [&](const char* name, unsigned char) {
    if (const std::optional<Heads> heads = parse_heads(name)) space.splits.push_back(*heads);
    return space.splits.size() < 4096;
  });
}

std::vector<Heads> Directory::splits_of(std::uint32_t space) {
  const std::lock_guard lock(splits_mutex_);
  Space& where = [&]() -> Space& {
    const std::lock_guard spaces(mutex_);
    return *spaces_[space];
  }();
  learn_splits(where);
  return where.splits;
}

int Directory::mark_split(std::uint32_t space, Heads heads) {
  const std::lock_guard lock(splits_mutex_);
  Space& where = [&]() -> Space& {
    const std::lock_guard spaces(mutex_);
    return *spaces_[space];
  }();
  if (std::find(where.splits.begin(), where.splits.end(), heads) != where.splits.end()) return 0;
  const int fd = space_fd(where, true);
  if (fd < 0) return fd;
  const mode_t mode = options_.group ? 0660 : 0600;
  const int marker =
      retry([&] { return io_->open(fd, heads_name(heads).c_str(), O_WRONLY | O_CREAT | O_NONBLOCK, mode); });
  if (marker < 0) return marker;
  if (options_.group) retry([&] { return io_->chmod_fd(marker, mode); });
  io_->close(marker);
  where.splits.push_back(heads);
  return 0;
}

// -------------------------------------------------------------------------------------------------- what is in memory

void Directory::pieces(std::uint32_t space, const Key& key, std::vector<Piece>& out) const {
  const std::lock_guard lock(mutex_);
  std::vector<Slot> slots;
  index_.find(space, key, slots);
  for (const Slot slot : slots) out.push_back({index_.heads(slot), index_.held(slot).pages * kPage});
}

std::size_t Directory::covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                               std::span<std::uint8_t> out) const {
  const std::lock_guard lock(mutex_);
  return store::covered(index_, space, keys, heads, prefix, out);
}

bool Directory::holds(const PieceId& id) const {
  const std::lock_guard lock(mutex_);
  return index_.find(id) != kNoSlot;
}

bool Directory::pin(const PieceId& id) {
  const std::lock_guard lock(mutex_);
  const Slot slot = index_.find(id);
  if (slot == kNoSlot) return false;
  index_.pin(slot);
  return true;
}

void Directory::unpin(const PieceId& id) {
  const std::lock_guard lock(mutex_);
  const Slot slot = index_.find(id);
  if (slot != kNoSlot && index_.pins(slot) > 0) index_.unpin(slot);
}

std::int64_t Directory::num_pieces() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(index_.size());
}

std::size_t Directory::index_memory() const {
  const std::lock_guard lock(mutex_);
  return index_.memory();
}

std::int64_t Directory::used_bytes() const {
  if (ledger_) {
    if (const auto account = ledger_->account()) return account->used;
  }
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(index_.num_pages()) * kPage;
}

bool Directory::forget(const PieceId& id) {
  const std::lock_guard lock(mutex_);
  const Slot slot = index_.find(id);
  if (slot != kNoSlot) index_.remove(slot, false);
  return slot != kNoSlot;
}

// ------------------------------------------------------------------------------------------------------------- reading

bool Directory::probe(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix) {
  const std::vector<Heads> splits = splits_of(space);
  bool found = false;
  for (const Key& key : keys) {
    counters_.add(Count::kProbes);
    bool here = false;
    const int shard = splits.empty() ? -ENOENT : shard_fd(space, key, false);
    for (const Heads split : splits) {
      const bool meets =
          split.count == 0 || (split.first < heads.first + heads.count && heads.first < split.first + split.count);
      if (shard < 0 || !meets) continue;
      const PieceId id{space, key, split};
      if (holds(id)) {
        here = true;
        continue;
      }
      struct stat stat;
      if (retry([&] { return io_->stat_at(shard, file_name(key, split).c_str(), stat); }) < 0) continue;
      if (!S_ISREG(stat.st_mode) || !ours(stat)) {
        counters_.add(Count::kForeign);
        continue;
      }
      here = found = true;
      const std::lock_guard lock(mutex_);
      if (index_.find(id) == kNoSlot) {
        index_.insert(id, {static_cast<std::uint64_t>(stat.st_atim.tv_sec),
                           static_cast<std::uint32_t>(whole_pages(stat.st_size) / kPage)});
      }
    }
    if (!here && prefix) break;
  }
  return found;
}

int Directory::open_piece(const PieceId& id, std::int64_t& bytes, bool direct) {
  const int shard = shard_fd(id.space, id.key, false);
  if (shard == -ENOENT && forget(id)) counters_.add(Count::kVanished);
  if (shard < 0) return shard;
  const std::string name = file_name(id.key, id.heads);
  // O_NOATIME: the times are ours. It is the owner's right only.
  int flags = O_RDONLY | O_NONBLOCK | O_NOATIME | (direct ? O_DIRECT : 0);
  const auto open = [&] { return retry([&] { return io_->open(shard, name.c_str(), flags, 0); }); };
  int fd = open();
  if (fd == -EPERM) {
    flags &= ~O_NOATIME;
    fd = open();
  }
  if (fd == -EINVAL && direct) {
    flags &= ~O_DIRECT;
    fd = open();
  }
  if (fd == -ENOENT && forget(id)) counters_.add(Count::kVanished);
  if (fd == -ELOOP) counters_.add(Count::kForeign);
  if (fd < 0) return fd;
  struct stat stat;
  int error = io_->stat_fd(fd, stat);
  if (error == 0 && (!S_ISREG(stat.st_mode) || !ours(stat))) {
    counters_.add(Count::kForeign);
    error = -EACCES;
  }
  if (error < 0) {
    io_->close(fd);
    return error;
  }
  bytes = stat.st_size;
  return fd;
}

/// The times that a restart orders by: last use and writing. Not more often than once a minute for a file.
void Directory::used(const PieceId& id) {
  constexpr std::int64_t kMinute = 60;
  const std::int64_t now = io_->now();
  {
    const std::lock_guard lock(mutex_);
    const Slot slot = index_.find(id);
    if (slot == kNoSlot) return;
    const bool first = !index_.was_read(slot);
    index_.touch(slot);
    Held& held = index_.held(slot);
    const std::int64_t ago = now / kSecond - static_cast<std::int64_t>(held.place);
    if (!first && ago >= 0 && ago < kMinute) return;
    held.place = static_cast<std::uint64_t>(now / kSecond);
  }
  if (read_only_) return;
  const int shard = shard_fd(id.space, id.key, false);
  if (shard >= 0) io_->set_times(shard, file_name(id.key, id.heads).c_str(), now, std::nullopt);
}

// ------------------------------------------------------------------------------------------------------------- writing

std::optional<Outcome> Directory::begin(const PieceId& id, std::int64_t bytes, Draft& out) {
  if (read_only_) return Outcome::kRefused;
  if (Clock::now().time_since_epoch().count() < paused_until_) {
    counters_.add(Count::kNoSpace);
    return Outcome::kRefused;
  }
  if (room_for(bytes) > options_.max_bytes) {
    counters_.add(Count::kRefusedLarge);
    return Outcome::kRefused;
  }
  const int shard = shard_fd(id.space, id.key, true);
  const int marked = shard < 0 ? shard : mark_split(id.space, id.heads);
  if (marked < 0) {
    counters_.add(marked == -ENOSPC ? Count::kNoSpace : Count::kIoErrors);
    return marked == -ENOSPC ? Outcome::kRefused : Outcome::kIoError;
  }
  out.reserved = room_for(bytes);
  if (const std::optional<Outcome> refused = take_room(out.reserved)) {
    out.reserved = 0;
    return refused;
  }
  out.name = fmt::format("{}{:016x}", ledger_->token(), ++next_draft_);
  out.direct = direct_;
  const mode_t mode = options_.group ? 0660 : 0600;
  const int flags = O_WRONLY | O_CREAT | O_EXCL | (direct_ ? O_DIRECT : 0);
  out.fd = retry([&] { return io_->open(tmp_, out.name.c_str(), flags, mode); });
  if (out.fd >= 0) {
    // Any umask: what it takes away is given back, what the file system adds is taken away.
    if (options_.group) retry([&] { return io_->chmod_fd(out.fd, mode); });
    return std::nullopt;
  }
  const int error = out.fd;
  ledger_->cancel(out.reserved);
  out.reserved = 0;
  counters_.add(error == -ENOSPC || error == -EDQUOT ? Count::kNoSpace : Count::kIoErrors);
  return error == -ENOSPC || error == -EDQUOT ? Outcome::kRefused : Outcome::kIoError;
}

Outcome Directory::publish(const PieceId& id, Draft& draft) {
  int error = options_.sync ? retry([&] { return io_->fdatasync(draft.fd); }) : 0;
  struct stat stat {};
  if (error == 0) error = io_->stat_fd(draft.fd, stat);
  io_->close(draft.fd);
  draft.fd = -1;
  const int shard = shard_fd(id.space, id.key, true);
  if (error == 0 && shard < 0) error = shard;
  if (error == 0 && !may_change()) {
    discard(draft);
    counters_.add(Count::kRefusedBusy);
    return Outcome::kRefused;
  }
  const std::shared_lock lock(files_);
  if (error == 0) {
    error =
        retry([&] { return io_->rename_new(tmp_, draft.name.c_str(), shard, file_name(id.key, id.heads).c_str()); });
  }
  if (error < 0) {
    discard(draft);
    if (error != -EEXIST) {
      counters_.add(Count::kIoErrors);
      return Outcome::kIoError;
    }
    counters_.add(Count::kAlreadyThere);  // another process was faster, or this one did not know it
    probe(id.space, {&id.key, 1}, id.heads, false);
    return Outcome::kOk;
  }
  ledger_->commit(draft.reserved, bytes_on_disk(stat));
  draft.reserved = 0;
  const std::lock_guard index(mutex_);
  if (index_.find(id) == kNoSlot) {
    index_.insert(id, {static_cast<std::uint64_t>(io_->now() / kSecond),
                       static_cast<std::uint32_t>(whole_pages(stat.st_size) / kPage)});
  }
  return Outcome::kOk;
}

/// While another process counts, files stay as they are; that is soon over.
bool Directory::may_change() {
  for (int i = 0; i < 200; ++i) {
    if (ledger_->mark() != 0) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

void Directory::discard(Draft& draft) {
  if (draft.fd >= 0) io_->close(draft.fd);
  draft.fd = -1;
  const int error = retry([&] { return io_->unlink(tmp_, draft.name.c_str()); });
  // What cannot be removed still takes its room; the next one that opens the directory removes it.
  if (draft.reserved > 0 && (error == 0 || error == -ENOENT)) ledger_->cancel(draft.reserved);
  draft.reserved = 0;
}

// ------------------------------------------------------------------------------------------------------ room, eviction

/// Whether the file system has `bytes` beyond what stays free.
bool Directory::free_on_disk(std::int64_t bytes) {
  struct statvfs disk;
  if (io_->statvfs(root_, disk) < 0) return true;  // writing will tell
  return static_cast<std::int64_t>(disk.f_bavail * disk.f_frsize) - bytes >= keep_free_;
}

std::optional<Outcome> Directory::take_room(std::int64_t bytes) {
  // Each turn frees something, or ends.
  while (true) {
    const bool disk = free_on_disk(bytes);
    const Ledger::Room room = disk ? ledger_->reserve(bytes) : Ledger::Room::kFull;
    if (room == Ledger::Room::kTaken) return std::nullopt;
    if (room == Ledger::Room::kBusy) {
      counters_.add(Count::kRefusedBusy);
      return Outcome::kRefused;
    }
    std::int64_t want = std::max<std::int64_t>(disk ? ledger_->missing(bytes) : bytes, 1);
    while (want > 0) {
      std::int64_t freed = 0;
      if (evict_one(freed) == Freed::kNothing) {
        counters_.add(disk ? Count::kRefusedFull : Count::kNoSpace);
        return Outcome::kRefused;
      }
      want -= freed;
    }
  }
}

bool Directory::make_space(std::int64_t bytes) {
  counters_.add(Count::kNoSpace);
  std::int64_t freed = 0;
  while (freed < bytes) {
    std::int64_t one = 0;
    if (evict_one(one) == Freed::kNothing) break;
    freed += one;
  }
  if (freed >= bytes) return true;
  // Nothing of ours fills the disk: there is no point in trying with every chunk.
  paused_until_ = (Clock::now() + std::chrono::seconds(1)).time_since_epoch().count();
  return false;
}

int Directory::unlink_piece(const PieceId& id, std::int64_t& bytes) {
  const int shard = shard_fd(id.space, id.key, false);
  if (shard < 0) return shard;
  const std::string name = file_name(id.key, id.heads);
  const std::shared_lock lock(files_);
  const std::uint64_t mark = ledger_->mark();
  if (mark == 0) return -EBUSY;
  struct stat stat;
  int error = io_->stat_at(shard, name.c_str(), stat);
  if (error == 0) error = retry([&] { return io_->unlink(shard, name.c_str()); });
  if (error < 0) return error;
  bytes = bytes_on_disk(stat);
  ledger_->release(bytes, mark);
  return 0;
}

/// Quarantined files go first: nobody reads them.
bool Directory::drop_quarantined(std::int64_t& freed) {
  if (quarantine_ < 0) return false;
  std::string name;
  io_->list(quarantine_, [&](const char* one, unsigned char) {
    name = one;
    return !is_hex(name);
  });
  if (name.empty() || !is_hex(name)) return false;
  const std::shared_lock lock(files_);
  const std::uint64_t mark = ledger_->mark();
  struct stat stat;
  if (mark == 0 || io_->stat_at(quarantine_, name.c_str(), stat) < 0) return true;
  if (retry([&] { return io_->unlink(quarantine_, name.c_str()); }) < 0) return true;  // another one took it
  freed = bytes_on_disk(stat);
  ledger_->release(freed, mark);
  return true;
}

/// Whether another process has used a file since this one last knew; it then counts as used here too.
bool Directory::used_elsewhere(const PieceId& id, std::int64_t last_use) {
  const int shard = shard_fd(id.space, id.key, false);
  struct stat stat;
  if (shard < 0 || io_->stat_at(shard, file_name(id.key, id.heads).c_str(), stat) < 0) return false;
  if (stat.st_atim.tv_sec <= last_use + 1 || stat.st_atim.tv_sec <= stat.st_mtim.tv_sec) return false;
  const std::lock_guard lock(mutex_);
  if (index_.find(id) == kNoSlot) {
    index_.insert(id,
                  {static_cast<std::uint64_t>(stat.st_atim.tv_sec),
                   static_cast<std::uint32_t>(whole_pages(stat.st_size) / kPage)},
                  true);
  }
  return true;
}

Directory::Freed Directory::evict_one(std::int64_t& freed) {
  const std::lock_guard one_at_a_time(evict_mutex_);
  if (quarantined_.exchange(0) > 0) {
    if (drop_quarantined(freed)) {
      quarantined_ = 1;  // there may be more
      return Freed::kSome;
    }
  }
  bool rescanned = false;
  int spared = 0;
  while (true) {
    std::optional<PieceId> id;
    bool unread = false;
    std::int64_t last_use = 0;
    {
      const std::lock_guard lock(mutex_);
      const Slot slot = index_.victim();
      if (slot != kNoSlot) {
        id = index_.id(slot);
        unread = !index_.was_read(slot);
        last_use = static_cast<std::int64_t>(index_.held(slot).place);
        index_.remove(slot, true);
      }
    }
    if (!id) {
      // Perhaps other processes wrote what fills the directory.
      const Clock::time_point now = Clock::now();
      if (rescanned || now - rescanned_ < std::chrono::seconds(1)) return Freed::kNothing;
      rescanned = true;
      rescanned_ = now;
      Scan found;
      scan(found);
      adopt(found);
      continue;
    }
    constexpr int kSpared = 16;
    if (spared < kSpared && used_elsewhere(*id, last_use)) {
      ++spared;
      continue;
    }
    const int error = unlink_piece(*id, freed);
    if (error == 0) {
      counters_.add(Count::kEvictions);
      if (unread) counters_.add(Count::kEvictedUnread);
      return Freed::kSome;
    }
    if (error == -ENOENT) continue;  // another process evicted it and has its room
    if (error == -EBUSY) probe(id->space, {&id->key, 1}, id->heads, false);
    counters_.add(Count::kIoErrors);
    return Freed::kNothing;
  }
}

void Directory::set_aside(const PieceId& id) {
  counters_.add(Count::kCorrupt);
  if (read_only_) return;
  const int shard = shard_fd(id.space, id.key, false);
  if (shard < 0) return;
  const std::string name = file_name(id.key, id.heads);
  std::string there;
  {
    const std::lock_guard lock(mutex_);
    there = spaces_[id.space]->name + name;
  }
  {
    const std::shared_lock lock(files_);
    if (ledger_->mark() == 0) return;  // it is found damaged again
    const int error = retry([&] { return io_->rename_new(shard, name.c_str(), quarantine_, there.c_str()); });
    if (error == 0) {
      quarantined_ = 1;
      return;
    }
    if (error == -ENOENT) return;
  }
  std::int64_t freed = 0;  // one of that name is set aside already, or it cannot be: then it goes
  unlink_piece(id, freed);
}

void Directory::remove(const PieceId& id) {
  std::int64_t freed = 0;
  if (!read_only_ && unlink_piece(id, freed) == 0) counters_.add(Count::kRemoved);
}

// ------------------------------------------------------------------------------------------------------------ counting

void Directory::scan_space(std::uint32_t number, Scan& out) {
  for (int shard = 0; shard < 16; ++shard) {
    const std::array<std::byte, 1> first{static_cast<std::byte>(shard << 4)};
    const int fd = shard_fd(number, Key(first), false);
    if (fd < 0) {
      if (fd != -ENOENT) out.whole = false;
      continue;
    }
    // A descriptor of its own: nobody else's listing is disturbed.
    const int listing = retry([&] { return io_->open(fd, ".", O_RDONLY | O_DIRECTORY, 0); });
    if (listing < 0) {
      out.whole = false;
      continue;
    }
    const int error = io_->list(listing, [&](const char* name, unsigned char) {
      const auto parsed = parse_file_name(name);
      struct stat stat;
      if (!parsed || shard_of(parsed->first) != static_cast<std::size_t>(shard)) return true;
      if (io_->stat_at(listing, name, stat) < 0) return true;
      if (!S_ISREG(stat.st_mode) || !ours(stat)) {
        counters_.add(Count::kForeign);
        return true;
      }
      out.bytes += bytes_on_disk(stat);
      out.files.push_back({number, static_cast<std::uint32_t>(out.names.size()),
                           static_cast<std::uint32_t>(whole_pages(stat.st_size) / kPage), stat.st_atim.tv_sec,
                           stat.st_mtim.tv_sec});
      out.names.emplace_back(name);
      return true;
    });
    io_->close(listing);
    if (error < 0) out.whole = false;
  }
}

/// Bytes of the files of a folder without structure. In tmp/, those of dead processes are removed, and those of living
/// ones are covered by what these have reserved.
std::int64_t Directory::scan_flat(int fd, const char* what, bool remove_dead) {
  const int listing = retry([&] { return io_->open(fd, ".", O_RDONLY | O_DIRECTORY, 0); });
  if (listing < 0) throw failed(options_.path, what, listing);
  std::vector<std::string> names;
  io_->list(listing, [&](const char* name, unsigned char) {
    if (is_hex(name)) names.emplace_back(name);
    return true;
  });
  io_->close(listing);
  std::int64_t bytes = 0;
  const std::vector<std::string> live = ledger_->live_tokens();  // after the listing: who starts now is not in it
  for (const std::string& name : names) {
    if (!remove_dead) {
      struct stat stat;
      if (io_->stat_at(fd, name.c_str(), stat) == 0) bytes += bytes_on_disk(stat);
    } else if (name.size() == kDraftName && !live.empty() &&
               std::find(live.begin(), live.end(), name.substr(0, kDraftName / 2)) == live.end()) {
      retry([&] { return io_->unlink(fd, name.c_str()); });
    }
  }
  return bytes;
}

void Directory::scan(Scan& out) {
  std::vector<std::string> names;
  const int listing = retry([&] { return io_->open(root_, ".", O_RDONLY | O_DIRECTORY, 0); });
  if (listing < 0) {
    out.whole = false;
    return;
  }
  io_->list(listing, [&](const char* name, unsigned char) {
    const std::string_view text(name);
    if (text.size() == kSpaceName && is_hex(text)) names.emplace_back(text);
    return true;
  });
  io_->close(listing);
  for (const std::string& name : names) {
    const auto bytes = from_hex(name);
    Digest digest;
    std::copy(bytes->begin(), bytes->end(), digest.begin());
    scan_space(space(digest), out);
  }
}

/// Files that the index does not know enter it, least recently used first.
void Directory::adopt(Scan& scan) {
  // A clock that was wrong makes an odd order, nothing else.
  std::sort(scan.files.begin(), scan.files.end(), [](const Scan::File& a, const Scan::File& b) {
    return std::max(a.used, a.changed) < std::max(b.used, b.changed);
  });
  for (const Scan::File& file : scan.files) {
    const auto parsed = parse_file_name(scan.names[file.name]);
    const PieceId id{file.space, parsed->first, parsed->second};
    const std::lock_guard lock(mutex_);
    if (index_.find(id) == kNoSlot) {
      index_.insert(id, {static_cast<std::uint64_t>(std::max<std::int64_t>(file.used, 0)), file.pages},
                    file.used > file.changed);
    }
  }
}

/// Learns the files, and sums them up where that is this process's turn.
void Directory::count_files(bool mine) {
  const std::unique_lock lock(files_);
  Scan found;
  scan(found);
  if (mine) {
    scan_flat(tmp_, "tmp cannot be listed", true);
    const std::int64_t aside = scan_flat(quarantine_, "quarantine cannot be listed", false);
    quarantined_ = aside > 0 ? 1 : 0;
    found.whole ? ledger_->end_count(found.bytes + aside) : ledger_->cancel_count();
  }
  adopt(found);
}

void Directory::keep_house() {
  if (!ledger_) return;
  ledger_->flush();
  const Clock::time_point now = Clock::now();
  if (now - counted_ < std::chrono::seconds(1)) return;
  counted_ = now;
  if (ledger_->begin_count() == Ledger::Count::kMine) count_files(true);
}

}  // namespace kvstride::store
