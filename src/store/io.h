// SPDX-License-Identifier: Apache-2.0
// Every call to the operating system that the directory tier makes, as an interface: tests make them fail.
#pragma once

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvstride::store {

/// Calls again while the answer is −EINTR.
template <typename Call>
auto retry(const Call& call) {
  while (true) {
    const auto answer = call();
    if (answer != -EINTR) return answer;
  }
}

/// Whether a call found no room on the file system, or within the user's quota.
constexpr bool no_space(int error) { return error == -ENOSPC || error == -EDQUOT; }

/// Calls as in their manual pages, but results are values or −errno. EINTR is passed on: callers `retry`. Thread-safe.
/// `at` is a directory's descriptor; names have one component and links are never followed. `open` waits for the other
/// end of a FIFO that somebody put into the directory: O_NONBLOCK prevents it and changes nothing for regular files.
class Io {
 public:
  virtual ~Io() = default;
  virtual int open(int at, const char* name, int flags, mode_t mode) = 0;  ///< adds O_CLOEXEC | O_NOFOLLOW
  virtual int close(int fd) = 0;                                           ///< never −EINTR: the descriptor is gone
  virtual std::int64_t pread(int fd, void* data, std::size_t bytes, std::int64_t offset) = 0;
  virtual std::int64_t pwrite(int fd, const void* data, std::size_t bytes, std::int64_t offset) = 0;
  virtual int fdatasync(int fd) = 0;
  virtual int chmod_fd(int fd, mode_t mode) = 0;  ///< exactly this mode, whatever the umask
  virtual int stat_fd(int fd, struct stat& out) = 0;
  virtual int stat_at(int at, const char* name, struct stat& out) = 0;
  virtual int unlink(int at, const char* name) = 0;
  virtual int mkdir(int at, const char* name, mode_t mode) = 0;
  virtual int rmdir(int at, const char* name) = 0;
  /// −EEXIST where `to` exists. renameat2(RENAME_NOREPLACE), or link and unlink where the file system lacks it: a crash
  /// (or a failing unlink) in between leaves both names. −EOPNOTSUPP where there are no hard links either.
  virtual int rename_new(int from_at, const char* from, int to_at, const char* to) = 0;
  /// Two files get each other's names, at once (RENAME_EXCHANGE). −ENOENT where one is missing, −EINVAL on file systems
  /// that cannot.
  virtual int exchange(int, const char*, int, const char*) { return -EINVAL; }
  /// Last use and last change, in nanoseconds since 1970; nothing: leave it.
  virtual int set_times(int at, const char* name, std::optional<std::int64_t> used,
                        std::optional<std::int64_t> changed) = 0;
  virtual int statvfs(int fd, struct statvfs& out) = 0;
  /// Names in a directory without `.` and `..`, with d_type; stops where `use` returns false. Starts at the beginning
  /// each time; one listing of a descriptor at a time. Names that come or go meanwhile may be told or not. Never
  /// −EINTR.
  virtual int list(int fd, const std::function<bool(const char* name, unsigned char type)>& use) = 0;
  /// One byte-range lock of the open file description (F_OFD_SETLK); never waits: −EAGAIN where another has it. A
  /// forked child holds it too, until it closes its copy of the descriptor.
  virtual int lock(int fd, std::int64_t start, std::int64_t bytes, bool exclusive) = 0;
  virtual int unlock(int fd, std::int64_t start, std::int64_t bytes) = 0;
  /// Whether another open file description locks any of these bytes (F_OFD_GETLK): 1, 0 or −errno.
  virtual int locked(int fd, std::int64_t start, std::int64_t bytes) = 0;
  virtual std::int64_t now() = 0;  ///< nanoseconds since 1970; may jump
};

/// The operating system itself.
std::shared_ptr<Io> system_io();

/// One read or write of contiguous bytes.
struct Transfer {
  int fd = -1;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::int64_t offset = 0;
  bool write = false;
  std::uint64_t token = 0;
  /// Bytes moved (may be short), or −errno.
  std::int64_t result = 0;
};

/// Transfers under way, for one thread at a time (those of a thread that ended may need cancel() to come back). Short
/// counts, EINTR and EAGAIN come back as they are. A forked child can only destroy its copy; the parent's goes on.
class Transfers {
 public:
  /// The kernel owns the buffers of what is under way: cancels it and waits for it, for ever on a disk that hangs. Who
  /// cannot wait asks `under_way()` first, and never destroys or reuses either the object or the buffers.
  virtual ~Transfers() = default;
  /// The kernel starts at once, or, with `more`, together with those that follow: small neighbours become one request
  /// of the disk. At most `depth()` may be under way: more come back with −EBUSY.
  virtual void submit(const Transfer& transfer, bool more = false) = 0;
  /// What was submitted with `more` starts now; collect() does it, too.
  virtual void start() {}
  /// Appends what has ended to `out`; waits until at least one has where `wait` and something is under way, but no
  /// longer than `timeout`.
  virtual void collect(std::vector<Transfer>& out, bool wait, std::chrono::nanoseconds timeout) = 0;
  /// Asks the kernel to give up what is under way: collect() then returns it soon, with −ECANCELED or as if nothing had
  /// been asked. A disk's requests that have begun cannot be cancelled.
  virtual void cancel() {}
  virtual std::size_t depth() const = 0;
  virtual std::size_t under_way() const = 0;  ///< submitted and not yet collected
  virtual const char* name() const = 0;       ///< `io_uring` or `pread/pwrite`
};

/// Calls io.pread and io.pwrite within submit(); depth 1.
std::unique_ptr<Transfers> blocking_transfers(std::shared_ptr<Io> io);
/// A ring with `memory` registered as fixed buffers (used where a transfer lies inside), or
/// nothing where the kernel or a sandbox does not give one; `why` then says so. Where registering fails
/// (RLIMIT_MEMLOCK) plain reads and writes are used, and `name()` is `io_uring, buffers not registered`. Registered
/// pages are pinned: fork() copies them for the child unless they are MADV_DONTFORK.
std::unique_ptr<Transfers> ring_transfers(std::size_t depth, std::span<const iovec> memory, std::string* why);

}  // namespace kvstride::store
