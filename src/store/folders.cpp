// SPDX-License-Identifier: Apache-2.0
// Opening and making a store's folders, and the names in them.
#include "store/folders.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

constexpr std::size_t kHeadsDigits = 8;

Error failed(const std::string& path, const char* what, int error) {
  return Error(ErrorCode::kStore, fmt::format("DirectoryTier: '{}': {}: {}", path, what, std::strerror(-error)));
}

/// Bytes of the longest name in a path.
std::size_t longest_name(std::string_view path) {
  std::size_t longest = 0;
  std::size_t name = 0;
  for (const char c : path) {
    name = c == '/' ? 0 : name + 1;
    longest = std::max(longest, name);
  }
  return longest;
}

}  // namespace

bool is_lower_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::string heads_name(Heads heads) { return fmt::format("{:04x}{:04x}", heads.first, heads.count); }

std::optional<Heads> parse_heads_name(std::string_view name) {
  if (name.size() != kHeadsDigits || !is_lower_hex(name)) return std::nullopt;
  const std::string copy(name);
  const auto first = static_cast<std::uint16_t>(std::stoul(copy.substr(0, 4), nullptr, 16));
  const auto count = static_cast<std::uint16_t>(std::stoul(copy.substr(4), nullptr, 16));
  if (count == 0 && first != 0) return std::nullopt;
  return Heads{first, count};
}

std::string file_name(const Key& key, Heads heads) { return key.hex() + heads_name(heads); }

std::optional<std::pair<Key, Heads>> parse_file_name(std::string_view name) {
  if (name.size() <= kHeadsDigits || name.size() > 2 * Key::kMaxBytes + kHeadsDigits) return std::nullopt;
  const std::optional<Heads> heads = parse_heads_name(name.substr(name.size() - kHeadsDigits));
  const auto bytes = from_hex(name.substr(0, name.size() - kHeadsDigits));
  if (!heads || !bytes || bytes->empty()) return std::nullopt;
  return std::pair{Key(*bytes), *heads};
}

std::size_t shard_of(const Key& key) { return std::to_integer<std::size_t>(key.bytes()[0]) >> 4; }

Folders::Folders(std::shared_ptr<Io> io, const std::string& given, bool group) : io_(std::move(io)), group_(group) {
  std::string path = given;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (path.empty()) throw Error(ErrorCode::kArgument, "DirectoryTier: path is empty");
  if (path.find('\0') != std::string::npos) throw Error(ErrorCode::kArgument, "DirectoryTier: path holds a NUL");
  const std::size_t longest = longest_name(path);
  if (path.size() >= PATH_MAX || longest > NAME_MAX) {  // before some of it is made
    throw Error(ErrorCode::kStore,
                fmt::format("DirectoryTier: path '{:.40}…' is too long: {} bytes of at most {}, the longest name in it "
                            "{} of at most {}",
                            path, path.size(), PATH_MAX - 1, longest, NAME_MAX));
  }
  const auto slash = path.rfind('/');
  const std::string parent = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  const std::string name = path == "/" ? "." : slash == std::string::npos ? path : path.substr(slash + 1);
  // Parents may be links: they are the administrator's. They are made with the process's own umask.
  for (std::size_t at = 1; at <= parent.size(); ++at) {
    if (at == parent.size() || parent[at] == '/') ::mkdir(parent.substr(0, at).c_str(), 0777);
  }
  const int above = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (above < 0) throw failed(parent, "cannot be opened", -errno);
  root_ = Folder(*io_, open(above, name.c_str(), true));
  ::close(above);
  if (root() == -ENOTDIR || root() == -ELOOP) {
    throw Error(
        ErrorCode::kStore,
        fmt::format("DirectoryTier: '{}' is a link, no directory, or another user's (group=True accepts those)", path));
  }
  if (root() < 0) throw failed(path, "cannot be opened", root());
  tmp_ = Folder(*io_, open(root(), "tmp", true));
  quarantine_ = Folder(*io_, open(root(), "quarantine", true));
  const auto denied = [](int fd) { return fd == -EROFS || fd == -EACCES || fd == -ENOENT; };
  struct statvfs disk;
  read_only_ = (io_->statvfs(root(), disk) == 0 && (disk.f_flag & ST_RDONLY) != 0) || denied(tmp_.fd());
  if (read_only_ || (tmp_.fd() >= 0 && quarantine_.fd() >= 0)) return;
  if (no_space(tmp_.fd()) || no_space(quarantine_.fd())) {
    set_full();
    return;
  }
  throw failed(path, "its folders tmp and quarantine cannot be used", tmp_.fd() < 0 ? tmp_.fd() : quarantine_.fd());
}

bool Folders::ours(const struct stat& stat) const { return group_ || stat.st_uid == geteuid(); }

int Folders::open(int at, const char* name, bool make) {
  const auto try_it = [&] { return retry([&] { return io_->open(at, name, O_RDONLY | O_DIRECTORY, 0); }); };
  int fd = try_it();
  if (fd == -ENOENT && make) {
    const mode_t mode = group_ ? 02770 : 0700;
    const int made = retry([&] { return io_->mkdir(at, name, mode); });
    if (made < 0 && made != -EEXIST) return made;
    fd = try_it();
    if (fd >= 0 && made == 0) retry([&] { return io_->chmod_fd(fd, mode); });
  }
  if (fd < 0) return fd == -ELOOP ? -ENOTDIR : fd;
  struct stat stat;
  const int error = io_->stat_fd(fd, stat);
  if (error == 0 && ours(stat)) {
    // Who made it may have been killed before others were let in.
    constexpr mode_t kGroup = 02770;
    const bool closed = group_ && make && stat.st_uid == geteuid() && (stat.st_mode & kGroup) != kGroup;
    if (closed) retry([&] { return io_->chmod_fd(fd, (stat.st_mode & 07777) | kGroup); });
    return fd;
  }
  io_->close(fd);
  return error < 0 ? error : -ENOTDIR;
}

Folder Folders::tmp() const {
  const std::lock_guard lock(mutex_);
  return tmp_;
}

Folder Folders::quarantine() const {
  const std::lock_guard lock(mutex_);
  return quarantine_;
}

/// The lock must be held.
Folders::Kept* Folders::kept(const Digest& digest) {
  for (const std::unique_ptr<Kept>& one : kept_) {
    if (one->digest == digest) return one.get();
  }
  return nullptr;
}

void Folders::keep(const Digest& digest) {
  std::unique_ptr<Kept> dropped;  // its descriptors are closed after the lock is given back
  const std::lock_guard lock(mutex_);
  if (!kept_.empty() && kept_.back()->digest == digest) return;
  const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const auto& one) { return one->digest == digest; });
  if (found != kept_.end()) {
    std::rotate(found, found + 1, kept_.end());
    return;
  }
  auto one = std::make_unique<Kept>();
  one->digest = digest;
  kept_.push_back(std::move(one));
  if (kept_.size() <= kMostKept) return;
  dropped = std::move(kept_.front());
  kept_.erase(kept_.begin());
}

Folder Folders::space(const Digest& digest, bool make) {
  {
    const std::lock_guard lock(mutex_);
    if (const Kept* one = kept(digest); one != nullptr && one->space.fd() >= 0) return one->space;
  }
  Folder out(*io_, open(root(), to_hex(digest).c_str(), make));
  const std::lock_guard lock(mutex_);
  if (Kept* one = kept(digest); one != nullptr && out.fd() >= 0) one->space = out;
  return out;
}

Folder Folders::shard(const Digest& digest, std::size_t shard, bool make) {
  const char name[2] = {"0123456789abcdef"[shard], '\0'};
  {
    const std::lock_guard lock(mutex_);
    if (const Kept* one = kept(digest); one != nullptr && one->shards[shard].fd() >= 0) return one->shards[shard];
  }
  const Folder above = space(digest, make);
  if (above.fd() < 0) return above;
  Folder out(*io_, open(above.fd(), name, make));
  const std::lock_guard lock(mutex_);
  if (Kept* one = kept(digest); one != nullptr && out.fd() >= 0) one->shards[shard] = out;
  return out;
}

void Folders::look_again() {
  std::vector<Folder> open;  // closed after the lock is given back
  {
    const std::lock_guard lock(mutex_);
    open = {tmp_, quarantine_};
    for (const std::unique_ptr<Kept>& one : kept_) {
      open.push_back(one->space);
      open.insert(open.end(), one->shards.begin(), one->shards.end());
    }
  }
  // Who holds one keeps it open: its number is nobody else's until we are done.
  const auto stays = [&](const Folder& folder) {
    struct stat stat;
    return folder.fd() < 0 || io_->stat_fd(folder.fd(), stat) < 0 || stat.st_nlink > 0;
  };
  open.erase(std::remove_if(open.begin(), open.end(), stays), open.end());
  const auto gone = [&](const Folder& folder) {
    return std::any_of(open.begin(), open.end(), [&](const Folder& one) { return one.fd() == folder.fd(); });
  };
  const Folder tmp = gone(this->tmp()) ? Folder(*io_, this->open(root(), "tmp", true)) : Folder();
  const Folder quarantine = gone(this->quarantine()) ? Folder(*io_, this->open(root(), "quarantine", true)) : Folder();
  const std::lock_guard lock(mutex_);
  if (tmp.fd() >= 0) tmp_ = tmp;
  if (quarantine.fd() >= 0) quarantine_ = quarantine;
  for (const std::unique_ptr<Kept>& one : kept_) {
    for (Folder& shard : one->shards) {
      if (gone(shard)) shard = {};
    }
    if (gone(one->space)) one->space = {};
  }
}

Folder Folders::again(int fd) {
  return {*io_, retry([&] { return io_->open(fd, ".", O_RDONLY | O_DIRECTORY, 0); })};
}

}  // namespace kvstride::store
