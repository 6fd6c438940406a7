// SPDX-License-Identifier: Apache-2.0
// What a directory tier knows of its files, and reading, writing and removing them.
#include "store/directory.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "kvstride/error.h"
#include "store/key_hash.h"
#include "store/listing.h"

namespace kvstride::store {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

std::int64_t nanoseconds(const struct timespec& time) { return time.tv_sec * kSecond + time.tv_nsec; }
/// Trying again does not help.
bool lasting(int error) {
  return error == -EACCES || error == -EPERM || error == -EROFS || error == -ENOTDIR || error == -EISDIR;
}

}  // namespace

bool sound_length(std::int64_t bytes) { return bytes >= 2 * kPage && bytes <= kMostLength && bytes % kPage == 0; }

std::int64_t bytes_on_disk(const struct stat& stat) {
  const std::int64_t blocks = stat.st_blocks * 512;
  return stat.st_size > kMostLength ? blocks : std::max<std::int64_t>(blocks, whole_pages(stat.st_size));
}

std::int64_t add_bytes(std::int64_t sum, std::int64_t bytes) {
  std::int64_t out = 0;
  return __builtin_add_overflow(sum, bytes, &out) ? std::numeric_limits<std::int64_t>::max() : out;
}

/// ext4 keeps four extents with the file, and others in blocks of 340; at worst each page is one. Small files get
/// nothing for that: in five pieces or more they are rare, and what they take too much is in the account all the same.
std::int64_t room_for(std::int64_t bytes) {
  constexpr std::int64_t kSmall = 1 << 20;
  constexpr std::int64_t kExtents = 340;
  const std::int64_t pages = whole_pages(bytes) / kPage;
  const std::int64_t leaves = bytes > kSmall ? pages / kExtents + 1 : 0;
  return (pages + leaves + (leaves > 4 ? leaves / kExtents + 1 : 0)) * kPage;
}

Directory::Directory(std::shared_ptr<Io> io, Options options, Counters& counters, std::shared_ptr<Admission> admission)
    : io_(std::move(io)),
      options_(std::move(options)),
      counters_(counters),
      admission_(std::move(admission)),
      folders_(io_, options_.path, options_.group),
      index_(options_.policy) {
  struct statvfs disk {};
  io_->statvfs(folders_.root(), disk);
  const auto size = static_cast<std::int64_t>(disk.f_blocks * disk.f_frsize);
  keep_free_ = options_.keep_free.value_or(std::min<std::int64_t>(std::int64_t{1} << 30, size / 20));
  if (!read_only()) {
    Ledger::Options account;
    account.max_bytes = options_.max_bytes;
    if (options_.group) account.mode = 0660;
    try {
      ledger_ = std::make_unique<Ledger>(io_, folders_.root(), account);
    } catch (const NoRoom&) {
      folders_.set_full();
    }
  }
  if (!read_only()) direct_ = can_be_direct(*io_, folders_.root());
  count_files(ledger_ && ledger_->begin_count() == Ledger::Count::kMine);
  if (folders_.full() && index_.size() == 0) {
    throw Error(
        ErrorCode::kStore,
        fmt::format("DirectoryTier: '{}': no store is there, and the disk has no room for a new one", options_.path));
  }
}

Directory::~Directory() {
  for (const Draft& draft : left_) ledger_->abandon(draft.reserved);
}

// ------------------------------------------------------------------------------------------------- what is in memory

std::uint32_t Directory::space(const Digest& digest) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < spaces_.size(); ++i) {
    if (spaces_[i]->digest == digest) return static_cast<std::uint32_t>(i);
  }
  auto space = std::make_unique<Space>();
  space->digest = digest;
  spaces_.push_back(std::move(space));
  return static_cast<std::uint32_t>(spaces_.size() - 1);
}

const Digest& Directory::digest(std::uint32_t space) const {
  const std::lock_guard lock(mutex_);
  return spaces_[space]->digest;
}

void Directory::pieces(std::uint32_t space, const Key& key, std::vector<Piece>& out) const {
  const std::lock_guard lock(mutex_);
  std::vector<Slot> slots;
  index_.find(space, key, slots);
  for (const Slot slot : slots) out.push_back({index_.heads(slot), index_.held(slot).pages * kPage});
}

std::size_t Directory::covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                               std::span<std::uint8_t> out) const {
  const std::lock_guard lock(mutex_);
  return index_.covered(space, keys, heads, prefix, out);
}

bool Directory::holds(const PieceId& id) const {
  const std::lock_guard lock(mutex_);
  return index_.find(id) != kNoSlot;
}

std::optional<Pin> Directory::pin(const PieceId& id) {
  const std::lock_guard lock(mutex_);
  const Slot slot = index_.find(id);
  if (slot == kNoSlot) return std::nullopt;
  if (slot >= generations_.size()) generations_.resize(slot + 1);
  index_.pin(slot);
  return Pin{slot, generations_[slot]};
}

void Directory::unpin(Pin pin) {
  const std::lock_guard lock(mutex_);
  if (generations_[pin.slot] == pin.generation) index_.unpin(pin.slot);
}

std::int64_t Directory::num_pieces() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(index_.size());
}

std::size_t Directory::index_memory() const {
  const std::lock_guard lock(mutex_);
  return index_.memory() + generations_.capacity() * sizeof generations_[0];
}

std::int64_t Directory::used_bytes() const {
  if (ledger_) return known_used_;
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(index_.num_pages()) * kPage;
}

/// The lock must be held.
void Directory::drop(Slot slot, bool remember) {
  if (slot < generations_.size()) ++generations_[slot];
  const File file = known(slot);
  admission_->released(file.bytes, file.tenant);
  index_.remove(slot, remember);
}

/// The lock must be held.
void Directory::tell_gone(const PieceId& id) {
  constexpr std::size_t kMost = 65536;
  Space& space = *spaces_[id.space];
  if (space.watched && space.gone.size() < kMost) space.gone.push_back(id.key);
}

std::vector<Key> Directory::take_gone(std::uint32_t space) {
  const std::lock_guard lock(mutex_);
  spaces_[space]->watched = true;
  return std::exchange(spaces_[space]->gone, {});
}

/// The lock must be held.
bool Directory::lose(const PieceId& id) {
  const Slot slot = index_.find(id);
  if (slot == kNoSlot) return false;
  tell_gone(id);
  drop(slot, false);
  return true;
}

bool Directory::forget(const PieceId& id) {
  const std::lock_guard lock(mutex_);
  return lose(id);
}

void Directory::other_length(const PieceId& id, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!sound_length(bytes) || bytes > options_.largest) {
    lose(id);
  } else if (const Slot slot = index_.find(id); slot != kNoSlot) {
    const File file = known(slot);
    admission_->holds(bytes - file.bytes, file.tenant);
    index_.resize(slot, static_cast<std::uint32_t>(bytes / kPage));
  }
}

/// Whether it is known now: not where it is about to go, or may have gone since num_gone() was `seen`. Who found a file
/// by looking at the directory says so.
bool Directory::insert(const PieceId& id, const File& file, std::optional<std::uint64_t> seen) {
  const std::lock_guard lock(mutex_);
  if (index_.find(id) != kNoSlot) return true;
  if (is_going(id) || (seen && gone_since(id.key, *seen))) return false;
  const Held held{static_cast<std::uint64_t>(std::max<std::int64_t>(file.used, 0)),
                  static_cast<std::uint32_t>(file.bytes / kPage)};
  const Slot slot = index_.insert(id, held, file.read);
  if (admission_->has_time_to_live() || admission_->has_quotas()) {
    if (slot >= kept_.size()) kept_.resize(std::max<std::size_t>(slot + 1, 2 * kept_.size()));
    kept_[slot] = {file.written, file.tenant};
    admission_->holds(file.bytes, file.tenant);
  }
  return true;
}

/// The lock must be held.
Directory::File Directory::known(Slot slot) const {
  const Held& held = index_.held(slot);
  const Kept kept = slot < kept_.size() ? kept_[slot] : Kept{};
  return {held.pages * kPage, static_cast<std::int64_t>(held.place), kept.written, index_.was_read(slot), kept.tenant};
}

bool Directory::is_expired(std::int64_t written) const {
  return admission_->has_time_to_live() && admission_->expired(Admission::Time(written), Admission::Time(io_->now()));
}

/// Now and then, so that lookups do not promise for long what a get will not give; some files at a time.
void Directory::drop_expired() {
  constexpr std::size_t kAtOnce = 4096;
  const Clock::time_point now = Clock::now();
  const auto every = std::min<Clock::duration>(admission_->options().time_to_live / 16, std::chrono::seconds(30));
  if (!admission_->has_time_to_live() || now - swept_ < every) return;
  std::vector<PieceId> old;
  const Admission::Time time(io_->now());
  {
    const std::lock_guard lock(mutex_);
    index_.for_each([&](Slot slot) {
      if (old.size() < kAtOnce && admission_->expired(Admission::Time(known(slot).written), time)) {
        old.push_back(index_.id(slot));
      }
    });
  }
  for (const PieceId& id : old) {
    let_go(id, Going::kExpired);
    settle(id);
  }
  if (old.size() < kAtOnce) swept_ = now;
}

/// The lock must be held.
bool Directory::is_going(const PieceId& id) const {
  return std::any_of(going_.begin(), going_.end(), [&](const Gone& gone) { return gone.id == id; });
}

/// The lock must be held. In doubt it has.
bool Directory::gone_since(const Key& key, std::uint64_t seen) const {
  const auto found = gone_at_.find(KeyHash()(key));
  return seen < gone_known_ || (found != gone_at_.end() && found->second > seen);
}

void Directory::done_going(const PieceId& id) {
  constexpr std::size_t kRemembered = 4096;
  const std::lock_guard lock(mutex_);
  if (gone_at_.size() >= kRemembered) {
    gone_at_.clear();
    gone_known_ = num_gone_;
  }
  gone_at_[KeyHash()(id.key)] = num_gone_ + 1;
  std::erase_if(going_, [&](const Gone& gone) { return gone.id == id; });
  ++num_gone_;
}

std::uint64_t Directory::num_gone() const {
  const std::lock_guard lock(mutex_);
  return num_gone_;
}

void Directory::let_go(const PieceId& id, Going why) {
  const std::lock_guard lock(mutex_);
  const bool known = lose(id);
  if (why == Going::kDamaged) counters_.add(Count::kCorrupt);
  if (why == Going::kExpired && known) counters_.add(Count::kExpired);
  if (!read_only() && !is_going(id)) going_.push_back({id, why});
}

// -------------------------------------------------------------------------------------------------------- head ranges

/// Head ranges that files of a namespace have are known by empty marker files: a lookup of an unknown key asks for
/// these.
void Directory::learn_splits(Space& space) {
  constexpr auto kEvery = std::chrono::milliseconds(20);
  const Clock::time_point now = Clock::now();
  if (now - space.splits_checked < kEvery) return;
  const Folder folder = folders_.space(space.digest, false);
  struct stat stat;
  if (folder.fd() < 0 || io_->stat_fd(folder.fd(), stat) < 0) return;
  if (stat.st_nlink == 0) {
    folders_.look_again();
    return;
  }
  const bool same = nanoseconds(stat.st_mtim) == nanoseconds(space.splits_time);
  // A directory's time has the kernel's ticks: what was just changed may change again within one.
  const bool settled = io_->now() - nanoseconds(stat.st_mtim) > kSecond / 10;
  space.splits_checked = now;
  if (same && settled && !space.splits.empty()) return;
  std::vector<Heads> found;
  const Folder listing = folders_.again(folder.fd());
  if (listing.fd() < 0) return;
  const int error = io_->list(listing.fd(), [&](const char* name, unsigned char) {
    if (const std::optional<Heads> heads = parse_heads_name(name)) found.push_back(*heads);
    return found.size() < 4096;
  });
  if (error < 0) return;
  space.splits_time = stat.st_mtim;
  space.splits = std::move(found);
}

std::vector<Heads> Directory::splits_of(std::uint32_t space) {
  const std::lock_guard lock(splits_mutex_);
  Space* where = nullptr;
  {
    const std::lock_guard spaces(mutex_);
    where = spaces_[space].get();
  }
  learn_splits(*where);
  return where->splits;
}

int Directory::mark_split(std::uint32_t space, Heads heads) {
  const std::lock_guard lock(splits_mutex_);
  Space* where = nullptr;
  {
    const std::lock_guard spaces(mutex_);
    where = spaces_[space].get();
  }
  const Folder folder = folders_.space(where->digest, true);
  if (folder.fd() < 0) return folder.fd();
  // It is looked at each time: the folder may be another one than it was.
  const std::string name = heads_name(heads);
  struct stat stat;
  if (retry([&] { return io_->stat_at(folder.fd(), name.c_str(), stat); }) < 0) {
    const mode_t mode = folders_.file_mode();
    const int marker =
        retry([&] { return io_->open(folder.fd(), name.c_str(), O_WRONLY | O_CREAT | O_NONBLOCK, mode); });
    if (marker < 0) return marker;
    if (options_.group) retry([&] { return io_->chmod_fd(marker, mode); });
    io_->close(marker);
  }
  if (std::find(where->splits.begin(), where->splits.end(), heads) == where->splits.end()) {
    where->splits.push_back(heads);
  }
  return 0;
}

// ------------------------------------------------------------------------------------------------------------- reading

/// Whether a file may be what its name says, as far as that is told without reading it. One that this process could
/// never read, and so never find damaged, is asked for its header: it may be another process's, with more memory, or
/// nothing but a hole.
bool Directory::believable(int folder, const char* name, const PieceId& id, const struct stat& stat) {
  if (!sound_length(stat.st_size)) return false;
  if (stat.st_size <= options_.largest) return true;
  const int fd = open_payload(*io_, folder, name, false);
  if (fd < 0) return true;  // it cannot be told
  int error = 0;
  const std::optional<Header> header = read_header(*io_, fd, error);
  io_->close(fd);
  if (error < 0) return true;
  return header && header->digest == digest(id.space) && header->key == id.key && header->content.heads == id.heads &&
         header->header_bytes + whole_pages(header->content.payload_bytes()) == stat.st_size;
}

bool Directory::probe(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix) {
  const std::vector<Heads> splits = splits_of(space);
  bool found = false;
  for (const Key& key : keys) {
    counters_.add(Count::kProbes);
    bool here = false;
    for (const Heads split : splits) {
      const bool meets =
          split.count == 0 || (split.first < heads.first + heads.count && heads.first < split.first + split.count);
      const PieceId id{space, key, split};
      if (!meets) continue;
      if (holds(id)) {
        here = true;
        continue;
      }
      const Folder folder = shard(id, false);
      if (folder.fd() < 0) continue;
      bool known = false;
      constexpr int kMostLooks = 4;  // others of this process go all the time
      for (int look = 0; look < kMostLooks && !known; ++look) {
        const std::uint64_t seen = num_gone();
        struct stat stat;
        if (retry([&] { return io_->stat_at(folder.fd(), file_name(key, split).c_str(), stat); }) < 0) break;
        if (!S_ISREG(stat.st_mode) || !folders_.ours(stat)) {
          counters_.add(Count::kForeign);
          break;
        }
        const bool expired = is_expired(nanoseconds(stat.st_mtim));
        if (expired || !believable(folder.fd(), file_name(key, split).c_str(), id, stat)) {
          let_go(id, expired ? Going::kExpired : Going::kDamaged);
          settle(id);
          break;
        }
        known = insert(id, {stat.st_size, stat.st_atim.tv_sec, nanoseconds(stat.st_mtim)}, seen);
      }
      here = here || known;
    }
    found = found || here;
    if (!here && prefix) break;
  }
  return found;
}

int Directory::open_piece(const PieceId& id, std::int64_t& bytes) {
  const Folder folder = shard(id, false);
  const int fd =
      folder.fd() < 0 ? folder.fd() : open_payload(*io_, folder.fd(), file_name(id.key, id.heads).c_str(), direct_);
  if (fd == -ENOENT && forget(id)) counters_.add(Count::kVanished);
  int error = fd < 0 ? fd : 0;
  struct stat stat {};
  if (error == 0) error = io_->stat_fd(fd, stat);
  const bool foreign = error == -ELOOP || error == -ENOTDIR || error == -ENXIO ||
                       (error == 0 && (!S_ISREG(stat.st_mode) || !folders_.ours(stat)));
  if (foreign) {
    counters_.add(Count::kForeign);
    forget(id);
    error = -ENOENT;
  }
  if (error == 0 && is_expired(nanoseconds(stat.st_mtim))) {
    let_go(id, Going::kExpired);
    settle(id);
    error = -ENOENT;
  }
  if (error < 0) {
    if (fd >= 0) io_->close(fd);
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
    held.place = static_cast<std::uint64_t>(std::max<std::int64_t>(now / kSecond, 0));
  }
  if (read_only()) return;
  const Folder folder = shard(id, false);
  if (folder.fd() >= 0) io_->set_times(folder.fd(), file_name(id.key, id.heads).c_str(), now, std::nullopt);
}

// ------------------------------------------------------------------------------------------------------------- writing

std::optional<Outcome> Directory::begin(const PieceId& id, std::int64_t bytes, Draft& out) {
  if (read_only()) return Outcome::kRefused;
  const auto failed = [&](int error) {
    counters_.add(no_space(error) ? Count::kNoSpace : Count::kIoErrors);
    return no_space(error) ? Outcome::kRefused : Outcome::kIoError;
  };
  if (Clock::now().time_since_epoch().count() < paused_until_) return failed(-ENOSPC);
  const std::int64_t room = room_for(bytes);
  if (room > options_.max_bytes) {
    counters_.add(Count::kRefusedLarge);
    return Outcome::kRefused;
  }
  folders_.keep(digest(id.space));
  if (!settle(id)) {  // what goes later would take the new file for it
    counters_.add(Count::kRefusedBusy);
    return Outcome::kRefused;
  }
  int error = 0;
  for (int attempt = 0; attempt < 2; ++attempt) {
    error = shard(id, true).fd();
    if (error >= 0) error = mark_split(id.space, id.heads);
    if (error != -ENOENT) break;
    folders_.look_again();
  }
  if (error < 0) return failed(error);
  if (const std::optional<Outcome> refused = take_room(room)) return refused;
  patience_ends_ = 0;  // nobody counts
  out.reserved = room;
  out.name = fmt::format("{}{:016x}", ledger_->token(), ++next_draft_);
  const mode_t mode = folders_.file_mode();
  const int flags = O_WRONLY | O_CREAT | O_EXCL | (direct_ ? O_DIRECT : 0);
  const auto open = [&] {
    return retry([&] { return io_->open(folders_.tmp().fd(), out.name.c_str(), flags, mode); });
  };
  out.fd = open();
  if (out.fd == -ENOENT) {
    folders_.look_again();
    out.fd = open();
  }
  if (out.fd >= 0) {
    if (options_.group) retry([&] { return io_->chmod_fd(out.fd, mode); });  // whatever the umask takes away
    return std::nullopt;
  }
  error = out.fd;
  discard(out);  // who refuses O_DIRECT may have made it all the same
  return failed(error);
}

Outcome Directory::publish(const PieceId& id, Draft& draft, Admission::Tenant tenant) {
  int error = options_.sync ? retry([&] { return io_->fdatasync(draft.fd); }) : 0;
  struct stat stat {};
  if (error == 0) error = io_->stat_fd(draft.fd, stat);
  const int closed = io_->close(draft.fd);  // tells of writes that were lost later
  draft.fd = -1;
  if (error == 0) error = closed;
  const auto refuse = [&] {
    discard(draft);
    counters_.add(Count::kRefusedBusy);
    return Outcome::kRefused;
  };
  const std::string name = file_name(id.key, id.heads);
  constexpr int kMostAttempts = 8;  // others may make and remove the same piece all the time
  for (int attempt = 0; error == 0 && attempt < kMostAttempts; ++attempt) {
    {
      const Folder folder = shard(id, true);
      const Changing changing = change_soon();
      if (!changing) return refuse();
      error = folder.fd() < 0 ? folder.fd() : retry([&] {
        return io_->rename_new(folders_.tmp().fd(), draft.name.c_str(), folder.fd(), name.c_str());
      });
      if (error == 0) {
        ledger_->commit(draft.reserved, bytes_on_disk(stat));
        known_used_ += bytes_on_disk(stat);
        draft.reserved = 0;
        insert(id, {stat.st_size, io_->now() / kSecond, nanoseconds(stat.st_mtim), false, tenant});
        return Outcome::kOk;
      }
    }
    if (error == -ENOENT && attempt == 0) {
      folders_.look_again();
      error = mark_split(id.space, id.heads);
    } else if (error == -EEXIST && !settle(id)) {
      return refuse();
    } else if (error == -EEXIST) {
      probe(id.space, {&id.key, 1}, id.heads, false);
      if (holds(id)) {  // another process was faster, or this one did not know it
        discard(draft);
        counters_.add(Count::kAlreadyThere);
        return Outcome::kOk;
      }
      if (attempt + 1 < kMostAttempts) error = 0;  // it went again
    }
  }
  discard(draft);
  counters_.add(no_space(error) ? Count::kNoSpace : Count::kIoErrors);
  return no_space(error) ? Outcome::kRefused : Outcome::kIoError;
}

/// Nothing waits: a count may take long, and who reads must not wait for those who write.
Directory::Changing Directory::change() {
  Changing out;
  out.lock = std::shared_lock(files_, std::try_to_lock);  // not while this process counts,
  if (out.lock) out.mark = ledger_->mark();               // nor while another one does
  return out;
}

/// Most counts are short, and what was written would be lost. But all calls together wait for one only so long, however
/// many files are ready.
Directory::Changing Directory::change_soon() {
  constexpr std::chrono::milliseconds kPatience(500);
  while (true) {
    Changing out = change();
    if (out) {
      patience_ends_ = 0;
      return out;
    }
    out.lock = {};
    const Clock::rep now = Clock::now().time_since_epoch().count();
    Clock::rep end = 0;
    if (patience_ends_.compare_exchange_strong(end, now + Clock::duration(kPatience).count())) end = now + 1;
    if (now >= end) return out;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void Directory::discard(Draft& draft) {
  if (draft.fd >= 0) io_->close(draft.fd);
  draft.fd = -1;
  const int error = retry([&] { return io_->unlink(folders_.tmp().fd(), draft.name.c_str()); });
  if (error == 0 || error == -ENOENT) {
    if (draft.reserved > 0) ledger_->cancel(draft.reserved);
  } else {  // it still takes its room, and is tried again
    const std::lock_guard lock(mutex_);
    left_.push_back({draft.name, -1, draft.reserved});
  }
  draft.reserved = 0;
}

// ------------------------------------------------------------------------------------------------------------ removing

int Directory::unlink_piece(const PieceId& id, std::int64_t& bytes) {
  const Folder folder = shard(id, false);
  if (folder.fd() < 0) return folder.fd();
  const std::string name = file_name(id.key, id.heads);
  const Changing changing = change();
  if (!changing) return -EBUSY;
  struct stat stat;
  int error = io_->stat_at(folder.fd(), name.c_str(), stat);
  if (error == 0 && !S_ISREG(stat.st_mode)) error = -ENOENT;
  if (error == 0) error = retry([&] { return io_->unlink(folder.fd(), name.c_str()); });
  if (error < 0) return error;
  bytes = bytes_on_disk(stat);
  ledger_->release(bytes, changing.mark);
  known_used_ -= bytes;
  return 0;
}

/// Moves a file to quarantine/. 0 also where it has gone.
int Directory::set_aside(const PieceId& id) {
  const Folder folder = shard(id, false);
  if (folder.fd() < 0) return folder.fd() == -ENOENT ? 0 : folder.fd();
  const std::string name = file_name(id.key, id.heads);
  const std::string there = to_hex(digest(id.space)) + name;
  const Changing changing = change();
  if (!changing) return -EBUSY;
  const auto move = [&] {
    return retry([&] { return io_->rename_new(folder.fd(), name.c_str(), folders_.quarantine().fd(), there.c_str()); });
  };
  int error = move();
  if (error == -ENOENT) {  // the file, or quarantine/?
    struct stat stat;
    const int here = retry([&] { return io_->stat_at(folder.fd(), name.c_str(), stat); });
    if (here < 0) return here == -ENOENT ? 0 : here;
    folders_.look_again();
    error = move();
  }
  if (error == 0) quarantined_ = true;
  return error;
}

/// Whether it is done, and not to be tried again.
bool Directory::settle_one(const Gone& gone) {
  if (gone.why == Going::kDamaged) {
    const int error = set_aside(gone.id);
    if (error == 0) return true;
    if (error == -EBUSY) return false;  // or it would be removed as soon as nobody counts
  }
  // Or one of that name is set aside already, or it cannot be: then it goes.
  std::int64_t freed = 0;
  const int error = unlink_piece(gone.id, freed);
  if (error == 0 && gone.why == Going::kRemoved) counters_.add(Count::kRemoved);
  return error == 0 || error == -ENOENT || lasting(error);
}

bool Directory::settle(const PieceId& id) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_going(id)) return true;
  }
  const std::lock_guard one_at_a_time(going_mutex_);
  std::optional<Gone> found;
  {
    const std::lock_guard lock(mutex_);
    if (!is_going(id)) return true;
    found = *std::find_if(going_.begin(), going_.end(), [&](const Gone& gone) { return gone.id == id; });
  }
  if (!settle_one(*found)) return false;
  done_going(id);
  return true;
}

void Directory::settle_all() {
  std::vector<Gone> all;
  {
    const std::lock_guard lock(mutex_);
    all = going_;
  }
  for (const Gone& gone : all) settle(gone.id);
  std::vector<Draft> left;
  {
    const std::lock_guard lock(mutex_);
    left.swap(left_);
  }
  for (Draft& draft : left) discard(draft);
}

}  // namespace kvstride::store
