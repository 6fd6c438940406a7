// SPDX-License-Identifier: Apache-2.0
// Listing a store's directory, and reading its account without taking part in it.
#include "store/inspect.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "kvstride/error.h"
#include "store/directory.h"
#include "store/folders.h"
#include "store/ledger_record.h"
#include "store/listing.h"

namespace kvstride::store {
namespace {

constexpr const char* kDigits = "0123456789abcdef";

std::int64_t nanoseconds(const struct timespec& time) { return time.tv_sec * 1'000'000'000 + time.tv_nsec; }

const char* kind_of(mode_t mode) {
  return S_ISLNK(mode) ? "a link" : S_ISDIR(mode) ? "a folder" : S_ISREG(mode) ? "a file" : "a special file";
}

/// Descriptor of a folder, of ours and no link.
int open_folder_at(const StoreFolder& store, int at, const char* name) {
  Io& io = store.io();
  const int fd = retry([&] { return io.open(at, name, O_RDONLY | O_DIRECTORY, 0); });
  if (fd < 0) return fd == -ELOOP ? -ENOTDIR : fd;
  struct stat stat;
  const int error = io.stat_fd(fd, stat);
  if (error == 0 && store.ours(stat)) return fd;
  io.close(fd);
  return error < 0 ? error : -ENOTDIR;
}

/// Lists a folder with a descriptor of its own, so that nobody else's listing is disturbed.
int list_folder(Io& io, int fd, const std::function<bool(const char*, unsigned char)>& use) {
  const int listing = retry([&] { return io.open(fd, ".", O_RDONLY | O_DIRECTORY, 0); });
  if (listing < 0) return listing;
  const int error = io.list(listing, use);
  io.close(listing);
  return error;
}

/// All of the ledger's file, or nothing where it cannot be read or is damaged. Others may be writing it.
std::optional<LedgerRecord> read_record(Io& io, int fd) {
  constexpr int kTries = 100;
  bool locked = false;
  std::optional<LedgerRecord> out;
  for (int i = 0; i < kTries && !out; ++i) {
    locked = locked || retry([&] { return io.lock(fd, 0, sizeof(LedgerRecord), false); }) == 0;
    LedgerRecord record;
    const auto got = retry([&] { return io.pread(fd, &record, sizeof record, 0); });
    if (got == sizeof record && record.valid()) out = record;
    if (locked) break;  // nobody writes: it is as it is
    if (!out) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (locked) io.unlock(fd, 0, sizeof(LedgerRecord));
  if (out && out->version != kLedgerVersion) return std::nullopt;
  return out;
}

}  // namespace

std::string ChunkFile::name() const { return file_name(key, heads); }

bool by_name(const ChunkFile& a, const ChunkFile& b) {
  const auto left = a.key.bytes();
  const auto right = b.key.bytes();
  if (a.key == b.key) return std::pair(a.heads.first, a.heads.count) < std::pair(b.heads.first, b.heads.count);
  return std::lexicographical_compare(left.begin(), left.end(), right.begin(), right.end());
}

void check_space_prefix(std::string_view prefix) {
  if (is_lower_hex(prefix) && prefix.size() <= kSpaceName) return;
  throw Error(ErrorCode::kArgument,
              fmt::format("store: namespace '{}' is not 1 to 64 digits of lower-case hex", prefix));
}

std::string ChunkStore::space(std::string_view prefix) const {
  if (prefix.empty())
    throw Error(ErrorCode::kArgument, "store: the namespace is empty: give the first digits of its hex");
  const std::vector<std::string> all = spaces(prefix);
  if (all.size() == 1) return all[0];
  if (all.empty()) throw Error(ErrorCode::kArgument, fmt::format("store: no namespace starts with '{}'", prefix));
  constexpr std::size_t kShown = 8;
  const std::size_t digits = std::min(kSpaceName, std::max<std::size_t>(prefix.size() + 8, 16));
  std::string list;
  for (std::size_t i = 0; i < std::min(all.size(), kShown); ++i) {
    list += (i > 0 ? ", " : "") + all[i].substr(0, digits);
  }
  throw Error(ErrorCode::kArgument, fmt::format("store: {} namespaces start with '{}': {}{}", all.size(), prefix, list,
                                                all.size() > kShown ? ", …" : ""));
}

// ----------------------------------------------------------------------------------------------------- the directory

StoreFolder::StoreFolder(std::shared_ptr<Io> io, std::string path, bool group)
    : io_(std::move(io)), path_(std::move(path)), group_(group) {
  try {
    open_root();
  } catch (...) {
    if (root_ >= 0) io_->close(root_);
    throw;
  }
}

StoreFolder::~StoreFolder() { io_->close(root_); }

bool StoreFolder::ours(const struct stat& stat) const { return group_ || stat.st_uid == ::geteuid(); }

int StoreFolder::open_folder(const char* name) const { return open_folder_at(*this, root_, name); }

void StoreFolder::open_root() {
  const auto refuse = [&](const std::string& why) {
    return Error(ErrorCode::kStore, fmt::format("store: '{}' {}", path_, why));
  };
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();  // behind a slash links are followed
  if (path_.empty()) throw Error(ErrorCode::kArgument, "store: the path is empty");
  root_ = retry([&] { return io_->open(AT_FDCWD, path_.c_str(), O_RDONLY | O_DIRECTORY, 0); });
  if (root_ == -ENOENT) throw refuse("does not exist");
  if (root_ == -ELOOP || root_ == -ENOTDIR) throw refuse("is a link or no directory");
  if (root_ < 0) throw refuse(fmt::format("cannot be opened: {}", std::strerror(-root_)));
  struct stat stat;
  if (const int error = io_->stat_fd(root_, stat); error < 0) throw refuse(std::strerror(-error));
  const auto foreign = [&](const char* what, uid_t owner) {
    return refuse(fmt::format("{}belongs to user {}, not {}", what, owner, ::geteuid()));
  };
  if (!ours(stat)) throw foreign("", stat.st_uid);
  const int error = io_->stat_at(root_, "ledger", ledger_);
  if (error == -ENOENT) throw refuse("is no store: it has no ledger");
  if (error < 0) throw refuse(fmt::format("has a ledger that cannot be looked at: {}", std::strerror(-error)));
  if (!S_ISREG(ledger_.st_mode)) throw refuse("is no store: its ledger is no regular file");
  if (!ours(ledger_)) throw foreign("has a ledger that ", ledger_.st_uid);
}

std::vector<std::string> StoreFolder::spaces(std::string_view prefix) const {
  check_space_prefix(prefix);
  std::vector<std::string> out;
  const int error = list_folder(*io_, root_, [&](const char* name, unsigned char) {
    const std::string_view text(name);
    if (text.size() == kSpaceName && is_lower_hex(text) && text.substr(0, prefix.size()) == prefix)
      out.emplace_back(text);
    return true;
  });
  if (error < 0) {
    throw Error(ErrorCode::kStore, fmt::format("store: '{}' cannot be listed: {}", path_, std::strerror(-error)));
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::unique_ptr<ChunkSpace> StoreFolder::open(const std::string& name) const {
  return std::make_unique<SpaceFolder>(*this, name);
}

LedgerState StoreFolder::ledger() const {
  LedgerState out;
  const int fd = retry([&] { return io_->open(root_, "ledger", O_RDONLY | O_NONBLOCK, 0); });
  if (fd < 0) return out;
  const std::optional<LedgerRecord> record = read_record(*io_, fd);
  if (record) {
    out.sound = true;
    out.known = record->known != 0;
    out.max_bytes = record->max_bytes;
    out.used = std::max<std::int64_t>(record->used, 0);
    out.reserved = std::max<std::int64_t>(record->total() - out.used, 0);
    out.all_tokens = true;
    for (std::size_t i = 0; i < kLedgerSlots; ++i) {
      const auto place = static_cast<std::int64_t>(sizeof(LedgerRecord) + i);
      // What cannot be told counts as alive.
      if (record->slots[i].in_use == 0 || retry([&] { return io_->locked(fd, place, 1); }) == 0) continue;
      ++out.processes;
      if (record->slots[i].token == 0) {
        out.all_tokens = false;
      } else {
        out.tokens.push_back(fmt::format("{:016x}", record->slots[i].token));
      }
      if (record->counter != 0 && record->counter == record->slots[i].token) out.counting = true;
    }
  }
  io_->close(fd);
  return out;
}

std::vector<LooseFile> StoreFolder::loose(const char* folder, bool* whole) const {
  std::vector<LooseFile> out;
  const int fd = open_folder(folder);
  int error = fd;
  if (fd >= 0) {
    error = list_folder(*io_, fd, [&](const char* name, unsigned char) {
      if (!is_lower_hex(name)) return true;
      struct stat stat;
      const int failed = retry([&] { return io_->stat_at(fd, name, stat); });
      if (failed == 0 && S_ISREG(stat.st_mode)) out.push_back({name, bytes_on_disk(stat), false});
      if (failed < 0 && failed != -ENOENT && whole != nullptr) *whole = false;
      return true;
    });
    io_->close(fd);
  }
  if (error < 0 && whole != nullptr) *whole = false;
  return out;
}

std::vector<LooseFile> StoreFolder::quarantine(bool* whole) const { return loose("quarantine", whole); }

std::vector<LooseFile> StoreFolder::temporaries(bool* whole) const {
  std::vector<LooseFile> out = loose("tmp", whole);
  const LedgerState state = ledger();  // after the listing: who starts now is not in it
  if (!state.all_tokens) {
    if (whole != nullptr && !out.empty()) *whole = false;
    return out;
  }
  for (LooseFile& file : out) {
    const std::string token = file.name.substr(0, kTokenName);
    file.dead = file.name.size() == kDraftName &&
                std::find(state.tokens.begin(), state.tokens.end(), token) == state.tokens.end();
  }
  return out;
}

// ----------------------------------------------------------------------------------------------------- a namespace

ChunkSpace::ChunkSpace(std::string name) : name_(std::move(name)) {
  const auto bytes = from_hex(name_);
  std::copy(bytes->begin(), bytes->end(), digest_.begin());
}

std::string ChunkSpace::path_of(const ChunkFile& file) const {
  const std::string name = file.name();
  return fmt::format("{}/{}/{}", name_, name[0], name);
}

SpaceFolder::SpaceFolder(const StoreFolder& store, std::string name) : ChunkSpace(std::move(name)), store_(store) {
  fd_ = store.open_folder(this->name().c_str());
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const char digit[2] = {kDigits[i], '\0'};
    shards_[i] = fd_ < 0 ? fd_ : open_folder_at(store, fd_, digit);
  }
}

SpaceFolder::~SpaceFolder() {
  for (const int shard : shards_) {
    if (shard >= 0) store_.io().close(shard);
  }
  if (fd_ >= 0) store_.io().close(fd_);
}

int SpaceFolder::shard(const Key& key) const { return shards_[shard_of(key)]; }

bool SpaceFolder::list(const std::function<void(const ChunkFile&)>& use, std::vector<Stray>* strays) const {
  Io& io = store_.io();
  bool whole = true;
  const auto stray = [&](std::string path, std::string what) {
    if (strays != nullptr) strays->push_back({std::move(path), std::move(what)});
  };
  const auto unlisted = [&](const std::string& path, int error) {
    if (error == -ENOENT) return;
    stray(path, error == -ENOTDIR ? "a link, no folder, or another user's"
                                  : fmt::format("not readable: {}", std::strerror(-error)));
    whole &= not_ours(error);
  };
  if (fd_ < 0) {
    unlisted(name(), fd_);
    return whole;
  }
  const int top = list_folder(io, fd_, [&](const char* text, unsigned char) {
    const std::string_view entry(text);
    const bool known = is_lower_hex(entry) && (entry.size() == 1 || parse_heads_name(entry));
    if (!known) stray(name() + "/" + text, "no name of the store");
    return true;
  });
  if (top < 0) unlisted(name(), top);
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const std::string folder = fmt::format("{}/{}", name(), kDigits[i]);
    if (shards_[i] < 0) {
      unlisted(folder, shards_[i]);
      continue;
    }
    const Folder listing(io, retry([&] { return io.open(shards_[i], ".", O_RDONLY | O_DIRECTORY, 0); }));
    const auto ours = [&](const struct stat& stat) { return store_.ours(stat); };
    const auto each = [&](const Entry& entry) {
      const std::string path = folder + "/" + entry.name;
      switch (entry.kind) {
        case Entry::Kind::kNoName: return stray(path, "no name of a chunk");
        case Entry::Kind::kMisplaced: return stray(path, "in the folder of another digit");
        case Entry::Kind::kFailed: return unlisted(path, entry.error);
        case Entry::Kind::kForeign:
          return stray(path, S_ISREG(entry.stat.st_mode) ? fmt::format("belongs to user {}", entry.stat.st_uid)
                                                         : std::string(kind_of(entry.stat.st_mode)));
        case Entry::Kind::kPiece: break;
      }
      const std::int64_t used = nanoseconds(entry.stat.st_atim);
      const std::int64_t written = nanoseconds(entry.stat.st_mtim);
      use({entry.piece->first, entry.piece->second, 0, entry.stat.st_size, bytes_on_disk(entry.stat),
           std::max(used, written), used > written});
    };
    const int error = listing.fd() < 0 ? listing.fd() : list_shard(io, listing.fd(), i, ours, each);
    if (error < 0) unlisted(folder, error);
  }
  return whole;
}

int SpaceFolder::open(const ChunkFile& file, bool direct, struct stat& stat) const {
  Io& io = store_.io();
  const int at = shard(file.key);
  if (at < 0) return at;
  const int fd = open_payload(io, at, file.name().c_str(), direct);
  if (fd < 0) return fd;
  int error = io.stat_fd(fd, stat);
  if (error == 0 && (!S_ISREG(stat.st_mode) || !store_.ours(stat))) error = -EACCES;
  if (error == 0) return fd;
  io.close(fd);
  return error;
}

std::optional<Header> SpaceFolder::header(const ChunkFile& file, std::string* why) const {
  Io& io = store_.io();
  struct stat stat;
  const int fd = open(file, false, stat);
  const auto refuse = [&](std::string reason) -> std::optional<Header> {
    if (why != nullptr) *why = std::move(reason);
    return std::nullopt;
  };
  if (fd < 0) return refuse(std::strerror(-fd));
  int error = 0;
  std::optional<Header> out = read_header(io, fd, error, why);
  io.close(fd);
  return error < 0 ? refuse(std::strerror(-error)) : out;
}

SpaceSummary summarize(const ChunkSpace& space, std::vector<Stray>* strays,
                       const std::function<void(const ChunkFile&)>& use) {
  constexpr std::size_t kTried = 8;
  SpaceSummary out;
  out.name = space.name();
  std::vector<ChunkFile> samples;
  std::vector<Key> keys;  // of one folder: a key's files are in one
  const auto settle = [&] {
    const auto less = [](const Key& a, const Key& b) {
      return std::lexicographical_compare(a.bytes().begin(), a.bytes().end(), b.bytes().begin(), b.bytes().end());
    };
    std::sort(keys.begin(), keys.end(), less);
    out.chunks += std::unique(keys.begin(), keys.end()) - keys.begin();
    keys.clear();
  };
  out.whole = space.list(
      [&](const ChunkFile& file) {
        if (!keys.empty() && shard_of(keys.back()) != shard_of(file.key)) settle();
        keys.push_back(file.key);
        if (samples.size() < kTried) samples.push_back(file);
        out.last_use = std::max(out.last_use, file.used);
        out.oldest_use = out.files == 0 ? file.used : std::min(out.oldest_use, file.used);
        ++out.files;
        out.bytes += file.bytes;
        out.read_files += file.read ? 1 : 0;
        if (use) use(file);
      },
      strays);
  settle();
  out.why = "no chunks";
  for (const ChunkFile& file : samples) {
    out.header = space.header(file, &out.why);
    if (out.header && out.header->digest == space.digest()) break;
    if (out.header) out.why = "its files are another namespace's";
    out.header.reset();
  }
  return out;
}

IoEngine probe_engine(const StoreFolder& store) {
  IoEngine out;
  out.ring = ring_transfers(1, {}, &out.why_not) != nullptr;
  out.direct = can_be_direct(store.io(), store.root());
  return out;
}

}  // namespace kvstride::store
