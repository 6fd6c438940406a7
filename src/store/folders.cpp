// SPDX-License-Identifier: Apache-2.0
// Opening and making a store's folders, and the names in them.
#include "store/folders.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

constexpr std::size_t kHeadsDigits = 8;

Error failed(const std::string& path, const char* what, int error) {
  return Error(ErrorCode::kStore, fmt::format("DirectoryTier: '{}': {}: {}", path, what, std::strerror(-error)));
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
  const auto slash = path.rfind('/');
  const std::string parent = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  const std::string name = path == "/" ? "." : slash == std::string::npos ? path : path.substr(slash + 1);
  // Parents may be links: they are the administrator's. They are made with the process's own umask.
  for (std::size_t at = 1; at <= parent.size(); ++at) {
    if (at == parent.size() || parent[at] == '/') ::mkdir(parent.substr(0, at).c_str(), 0777);
  }
  const int above = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (above < 0) throw failed(parent, "cannot be opened", -errno);
  root_ = open(above, name.c_str(), true);
  ::close(above);
  if (root_ == -ENOTDIR || root_ == -ELOOP) {
    throw Error(
        ErrorCode::kStore,
        fmt::format("DirectoryTier: '{}' is a link, no directory, or another user's (group=True accepts those)", path));
  }
  if (root_ < 0) throw failed(path, "cannot be opened", root_);
  tmp_ = open(root_, "tmp", true);
  quarantine_ = open(root_, "quarantine", true);
  const auto denied = [](int fd) { return fd == -EROFS || fd == -EACCES || fd == -ENOENT; };
  struct statvfs disk;
  read_only_ = (io_->statvfs(root_, disk) == 0 && (disk.f_flag & ST_RDONLY) != 0) || denied(tmp_);
  if (read_only_ || (tmp_ >= 0 && quarantine_ >= 0)) return;
  const int error = tmp_ < 0 ? tmp_ : quarantine_;
  for (const int fd : {tmp_.load(), quarantine_.load(), root_}) {
    if (fd >= 0) io_->close(fd);
  }
  throw failed(path, "its folders tmp and quarantine cannot be used", error);
}

Folders::~Folders() {
  for (const std::unique_ptr<Kept>& one : kept_) {
    for (const int fd : one->shards) {
      if (fd >= 0) io_->close(fd);
    }
    if (one->fd >= 0) io_->close(one->fd);
  }
  for (const int fd : retired_) io_->close(fd);
  for (const int fd : {quarantine_.load(), tmp_.load(), root_}) {
    if (fd >= 0) io_->close(fd);
  }
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
  if (error == 0 && ours(stat)) return fd;
  io_->close(fd);
  return error < 0 ? error : -ENOTDIR;
}

Folders::Kept* Folders::kept(const Digest& digest) {
  for (const std::unique_ptr<Kept>& one : kept_) {
    if (one->digest == digest) return one.get();
  }
  return nullptr;
}

void Folders::keep(const Digest& digest) {
  const std::lock_guard lock(mutex_);
  if (kept(digest) != nullptr) return;
  auto one = std::make_unique<Kept>();
  one->digest = digest;
  one->shards.fill(-1);
  kept_.push_back(std::move(one));
}

Folder Folders::space(const Digest& digest, bool make) {
  const std::lock_guard lock(mutex_);
  Kept* one = kept(digest);
  if (one == nullptr) return {io_.get(), open(root_, to_hex(digest).c_str(), make), true};
  if (one->fd < 0) {
    const int fd = open(root_, to_hex(digest).c_str(), make);
    if (fd < 0) return {io_.get(), fd, false};
    one->fd = fd;
  }
  return {io_.get(), one->fd, false};
}

Folder Folders::shard(const Digest& digest, std::size_t shard, bool make) {
  const char name[2] = {"0123456789abcdef"[shard], '\0'};
  {
    const std::lock_guard lock(mutex_);
    if (const Kept* one = kept(digest); one != nullptr && one->shards[shard] >= 0) {
      return {io_.get(), one->shards[shard], false};
    }
  }
  const Folder above = space(digest, make);
  if (above.fd() < 0) return {io_.get(), above.fd(), false};
  const int fd = open(above.fd(), name, make);
  const std::lock_guard lock(mutex_);
  Kept* one = kept(digest);
  if (fd < 0 || one == nullptr) return {io_.get(), fd, true};
  if (one->shards[shard] >= 0) {  // another thread was faster
    io_->close(fd);
  } else {
    one->shards[shard] = fd;
  }
  return {io_.get(), one->shards[shard], false};
}

void Folders::look_again() {
  const std::lock_guard lock(mutex_);
  const auto gone = [&](int fd) {
    struct stat stat;
    return fd >= 0 && io_->stat_fd(fd, stat) == 0 && stat.st_nlink == 0;
  };
  const auto retire = [&](int& fd) {
    if (!gone(fd)) return;
    retired_.push_back(fd);
    fd = -1;
  };
  for (const std::unique_ptr<Kept>& one : kept_) {
    for (int& fd : one->shards) retire(fd);
    retire(one->fd);
  }
  for (auto [folder, name] : {std::pair{&tmp_, "tmp"}, {&quarantine_, "quarantine"}}) {
    const int old = *folder;
    if (!gone(old)) continue;
    const int fd = open(root_, name, true);
    if (fd < 0) continue;
    retired_.push_back(old);
    *folder = fd;
  }
}

Folder Folders::again(int fd) {
  return {io_.get(), retry([&] { return io_->open(fd, ".", O_RDONLY | O_DIRECTORY, 0); }), true};
}

}  // namespace kvstride::store
