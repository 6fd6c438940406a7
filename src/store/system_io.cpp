// SPDX-License-Identifier: Apache-2.0
// The operating system behind Io, and transfers that wait.
#include <dirent.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "store/io.h"

namespace kvstride::store {
namespace {

template <typename Result>
Result answer(Result result) {
  return result < 0 ? static_cast<Result>(-errno) : result;
}

timespec time_of(std::optional<std::int64_t> nanoseconds) {
  if (!nanoseconds) return {.tv_sec = 0, .tv_nsec = UTIME_OMIT};
  constexpr std::int64_t kSecond = 1'000'000'000;
  std::int64_t rest = *nanoseconds % kSecond;
  if (rest < 0) rest += kSecond;
  return {.tv_sec = (*nanoseconds - rest) / kSecond, .tv_nsec = rest};
}

struct flock range(int type, std::int64_t start, std::int64_t bytes) {
  struct flock lock {};
  lock.l_type = static_cast<short>(type);
  lock.l_whence = SEEK_SET;
  lock.l_start = start;
  lock.l_len = bytes;
  return lock;
}

/// For file systems without renameat2: a hard link refuses a name that exists, too.
int link_and_unlink(int from_at, const char* from, int to_at, const char* to) {
  const int linked = answer(::linkat(from_at, from, to_at, to, 0));
  if (linked == -EPERM || linked == -ENOSYS) return -EOPNOTSUPP;
  if (linked < 0) return linked;
  retry([&] { return answer(::unlinkat(from_at, from, 0)); });
  return 0;
}

/// What getdents64 writes; a name of any length follows.
struct Entry {
  std::uint64_t inode;
  std::int64_t next;
  std::uint16_t bytes;
  std::uint8_t type;
  char name[1];
};
constexpr std::size_t kNameAt = offsetof(Entry, name);

class SystemIo final : public Io {
 public:
  int open(int at, const char* name, int flags, mode_t mode) override {
    return answer(::openat(at, name, flags | O_CLOEXEC | O_NOFOLLOW, mode));
  }
  int close(int fd) override {
    const int closed = answer(::close(fd));
    return closed == -EINTR ? 0 : closed;
  }
  std::int64_t pread(int fd, void* data, std::size_t bytes, std::int64_t offset) override {
    return answer(::pread(fd, data, bytes, offset));
  }
  std::int64_t pwrite(int fd, const void* data, std::size_t bytes, std::int64_t offset) override {
    return answer(::pwrite(fd, data, bytes, offset));
  }
  int fdatasync(int fd) override { return answer(::fdatasync(fd)); }
  int chmod_fd(int fd, mode_t mode) override { return answer(::fchmod(fd, mode)); }
  int stat_fd(int fd, struct stat& out) override { return answer(::fstat(fd, &out)); }
  int stat_at(int at, const char* name, struct stat& out) override {
    return answer(::fstatat(at, name, &out, AT_SYMLINK_NOFOLLOW));
  }
  int unlink(int at, const char* name) override { return answer(::unlinkat(at, name, 0)); }
  int mkdir(int at, const char* name, mode_t mode) override { return answer(::mkdirat(at, name, mode)); }
  int rmdir(int at, const char* name) override { return answer(::unlinkat(at, name, AT_REMOVEDIR)); }

  int rename_new(int from_at, const char* from, int to_at, const char* to) override {
    const int renamed = answer(::renameat2(from_at, from, to_at, to, RENAME_NOREPLACE));
    if (renamed != -EINVAL && renamed != -ENOSYS) return renamed;
    return link_and_unlink(from_at, from, to_at, to);
  }

  int exchange(int one_at, const char* one, int other_at, const char* other) override {
    const int renamed = answer(::renameat2(one_at, one, other_at, other, RENAME_EXCHANGE));
    return renamed == -ENOSYS ? -EINVAL : renamed;
  }

  int set_times(int at, const char* name, std::optional<std::int64_t> used,
                std::optional<std::int64_t> changed) override {
    const std::array<timespec, 2> times{time_of(used), time_of(changed)};
    return answer(::utimensat(at, name, times.data(), AT_SYMLINK_NOFOLLOW));
  }

  int statvfs(int fd, struct statvfs& out) override { return answer(::fstatvfs(fd, &out)); }

  int list(int fd, const std::function<bool(const char* name, unsigned char type)>& use) override {
    if (const auto at = answer(::lseek(fd, 0, SEEK_SET)); at < 0) return static_cast<int>(at);
    alignas(Entry) std::array<char, 32768> buffer;
    while (true) {
      const auto bytes = retry([&] { return answer(::syscall(SYS_getdents64, fd, buffer.data(), buffer.size())); });
      if (bytes <= 0) return static_cast<int>(bytes);
      for (std::size_t at = 0; at < static_cast<std::size_t>(bytes);) {
        Entry entry;
        std::memcpy(&entry, buffer.data() + at, kNameAt);
        const char* name = buffer.data() + at + kNameAt;
        at += entry.bytes;
        if (std::strcmp(name, ".") == 0 || std::strcmp(name, "..") == 0) continue;
        if (!use(name, entry.type)) return 0;
      }
    }
  }

  int lock(int fd, std::int64_t start, std::int64_t bytes, bool exclusive) override {
    struct flock what = range(exclusive ? F_WRLCK : F_RDLCK, start, bytes);
    const int got = answer(::fcntl(fd, F_OFD_SETLK, &what));
    return got == -EACCES ? -EAGAIN : got;
  }
  int unlock(int fd, std::int64_t start, std::int64_t bytes) override {
    struct flock what = range(F_UNLCK, start, bytes);
    return answer(::fcntl(fd, F_OFD_SETLK, &what));
  }
  int locked(int fd, std::int64_t start, std::int64_t bytes) override {
    struct flock what = range(F_WRLCK, start, bytes);
    const int asked = answer(::fcntl(fd, F_OFD_GETLK, &what));
    return asked < 0 ? asked : what.l_type != F_UNLCK;
  }

  std::int64_t now() override {
    timespec time{};
    ::clock_gettime(CLOCK_REALTIME, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
  }
};

class BlockingTransfers final : public Transfers {
 public:
  explicit BlockingTransfers(std::shared_ptr<Io> io) : io_(std::move(io)) {}

  void submit(const Transfer& transfer, bool) override {
    ended_.push_back(transfer);
    Transfer& t = ended_.back();
    t.result = t.write ? io_->pwrite(t.fd, t.data, t.bytes, t.offset) : io_->pread(t.fd, t.data, t.bytes, t.offset);
  }
  void collect(std::vector<Transfer>& out, bool, std::chrono::nanoseconds) override {
    out.insert(out.end(), ended_.begin(), ended_.end());
    ended_.clear();
  }
  std::size_t depth() const override { return 1; }
  std::size_t under_way() const override { return ended_.size(); }
  const char* name() const override { return "pread/pwrite"; }

 private:
  std::shared_ptr<Io> io_;
  std::vector<Transfer> ended_;
};

}  // namespace

std::shared_ptr<Io> system_io() {
  static const auto io = std::make_shared<SystemIo>();
  return io;
}

std::unique_ptr<Transfers> blocking_transfers(std::shared_ptr<Io> io) {
  return std::make_unique<BlockingTransfers>(std::move(io));
}

}  // namespace kvstride::store
