// SPDX-License-Identifier: Apache-2.0
// Room in a directory: the account, the file system's, and what goes first.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "store/scan.h"

namespace kvstride::store {

/// Whether the file system has room for what is under way, beyond what stays free.
bool Directory::free_on_disk() {
  struct statvfs disk;
  if (io_->statvfs(folders_.root(), disk) < 0) return true;  // writing will tell
  return static_cast<std::int64_t>(disk.f_bavail * disk.f_frsize) - ledger_->under_way() >= keep_free_;
}

std::optional<Outcome> Directory::take_room(std::int64_t bytes) {
  // Each turn frees something, or ends.
  while (true) {
    const Ledger::Room room = ledger_->reserve(bytes);
    if (room == Ledger::Room::kBusy) {
      counters_.add(Count::kRefusedBusy);
      return Outcome::kRefused;
    }
    const bool within = room == Ledger::Room::kTaken;
    if (within && free_on_disk()) return std::nullopt;
    if (within) ledger_->cancel(bytes);
    std::int64_t want = std::max<std::int64_t>(within ? bytes : ledger_->missing(bytes), 1);
    while (want > 0) {
      const std::int64_t freed = evict_one();
      if (freed == 0) {
        counters_.add(within ? Count::kNoSpace : Count::kRefusedFull);
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
    const std::int64_t one = evict_one();
    if (one == 0) break;
    freed += one;
  }
  if (freed >= bytes) return true;
  // Nothing of ours fills the disk: there is no point in trying with every chunk.
  paused_until_ = (Clock::now() + std::chrono::seconds(1)).time_since_epoch().count();
  return false;
}

/// Quarantined files go first: nobody reads them. Bytes that came free; 0: there are none; −EBUSY: somebody counts.
std::int64_t Directory::drop_quarantined() {
  std::vector<std::string> names;
  const Folder listing = folders_.again(folders_.quarantine().fd());
  if (listing.fd() < 0) return 0;
  io_->list(listing.fd(), [&](const char* name, unsigned char) {
    if (is_lower_hex(name)) names.emplace_back(name);
    return names.size() < 64;
  });
  for (const std::string& name : names) {
    const Changing changing = change();
    struct stat stat;
    if (!changing) return -EBUSY;
    if (io_->stat_at(listing.fd(), name.c_str(), stat) < 0 || !S_ISREG(stat.st_mode)) continue;
    if (retry([&] { return io_->unlink(listing.fd(), name.c_str()); }) < 0) continue;
    const std::int64_t freed = bytes_on_disk(stat);
    ledger_->release(freed, changing.mark);
    known_used_ -= freed;
    if (freed > 0) return freed;
  }
  return 0;
}

/// When another process has used a file since this one last knew.
std::optional<std::int64_t> Directory::used_elsewhere(const PieceId& id, std::int64_t last_use) {
  const Folder folder = shard(id, false);
  struct stat stat;
  if (folder.fd() < 0 || io_->stat_at(folder.fd(), file_name(id.key, id.heads).c_str(), stat) < 0) return std::nullopt;
  if (stat.st_atim.tv_sec <= last_use + 1 || stat.st_atim.tv_sec <= stat.st_mtim.tv_sec) return std::nullopt;
  return stat.st_atim.tv_sec;
}

std::int64_t Directory::evict_one() {
  const std::lock_guard one_at_a_time(evict_mutex_);
  if (quarantined_) {
    if (const std::int64_t freed = drop_quarantined(); freed != 0) return std::max<std::int64_t>(freed, 0);
    quarantined_ = false;
  }
  constexpr int kSpared = 16;
  int spared = 0;
  bool rescanned = false;
  while (true) {
    std::optional<PieceId> id;
    File file;
    // While it goes it is in going_: nobody finds its file again, or takes it for one that another process wrote.
    std::unique_lock settling(going_mutex_);
    {
      const std::lock_guard lock(mutex_);
      const Slot slot = index_.victim();
      if (slot != kNoSlot) {
        id = index_.id(slot);
        file = known(slot);
        drop(slot, true);
        going_.push_back({*id, Going::kRemoved});
      }
    }
    if (!id) {
      settling.unlock();
      // Perhaps other processes wrote what fills the directory.
      const Clock::time_point now = Clock::now();
      if (rescanned || now - rescanned_ < std::chrono::seconds(1)) return 0;
      rescanned = true;
      rescanned_ = now;
      Scan found;
      scan(found);
      adopt(found);
      continue;
    }
    if (const auto use = spared < kSpared ? used_elsewhere(*id, file.used) : std::nullopt) {
      ++spared;
      done_going(*id);
      file.used = *use;
      file.read = true;
      insert(*id, file);
      continue;
    }
    std::int64_t freed = 0;
    const int error = unlink_piece(*id, freed);
    done_going(*id);
    if (error == 0) {
      counters_.add(Count::kEvictions);
      if (!file.read) counters_.add(Count::kEvictedUnread);
      const std::lock_guard lock(mutex_);
      tell_gone(*id);
      return std::max<std::int64_t>(freed, 1);
    }
    if (error == -ENOENT) continue;  // another process evicted it and has its room
    insert(*id, file);
    if (error != -EBUSY) counters_.add(Count::kIoErrors);
    return 0;
  }
}

}  // namespace kvstride::store
