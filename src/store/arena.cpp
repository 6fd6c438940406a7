// SPDX-License-Identifier: Apache-2.0
// Mappings of exact size, the protocol of files in /dev/shm, and exact best fit over a range of pages.
#include "store/arena.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <limits>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

constexpr std::int64_t kHugePage = 2 << 20;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 56;  // more than any address space
constexpr const char* kSharedDirectory = "/dev/shm";
constexpr std::string_view kPrefix = "kvstride-";
constexpr std::size_t kLongestName = 100;

std::string message_of(int error) { return std::generic_category().message(error); }

/// What the kernel could give to processes, in bytes; the largest number where it does not say.
std::int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::int64_t kib = 0;
  std::string unit;
  std::int64_t sum = 0;
  bool known = false;
  while (file >> name >> kib && std::getline(file, unit)) {
    known = known || name == "MemAvailable:";
    if (name == "MemAvailable:" || name == "SwapFree:") sum += kib * 1024;
  }
  return known ? sum : std::numeric_limits<std::int64_t>::max();
}

/// Maps the bytes, anonymous where fd is -1, at a multiple of 2 MiB if they are as many. Null and errno if that fails.
std::byte* map(std::int64_t bytes, int fd) {
  // An aligned range is cut out of a larger one that is only reserved.
  const std::int64_t unit = bytes >= kHugePage ? kHugePage : kPage;
  const auto size = static_cast<std::size_t>(bytes);
  const std::size_t reserved = size + static_cast<std::size_t>(unit - kPage);
  void* range = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(range);
  const auto past = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(begin) % static_cast<std::size_t>(unit));
  const std::size_t before = past == 0 ? 0 : static_cast<std::size_t>(unit) - past;
  if (before > 0) munmap(begin, before);
  std::byte* data = begin + before;
  if (reserved - before > size) munmap(data + size, reserved - before - size);
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  if (mmap(data, size, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(data, size);
    errno = error;
    return nullptr;
  }
  // Both are wishes: a kernel without huge pages serves as well.
  madvise(data, size, MADV_HUGEPAGE);
  madvise(data, size, MADV_DONTDUMP);
  return data;
}

/// A descriptor that is closed at the end.
class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

bool is_shared_name(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
  };
  return !name.empty() && name.size() <= kLongestName && std::all_of(name.begin(), name.end(), allowed);
}

/// Whether the path names the file that is open.
bool names(const std::string& path, int fd) {
  struct stat at_path {};
  struct stat open_file {};
  return lstat(path.c_str(), &at_path) == 0 && fstat(fd, &open_file) == 0 && at_path.st_ino == open_file.st_ino &&
         at_path.st_dev == open_file.st_dev;
}

enum class Left { kRemoved, kVanished, kInUse, kNotOurs };

/// Removes a file that a dead process of this user left. Only who holds the lock of the file that a path names may
/// remove it, so between the check and the removal nobody else does.
Left remove_left(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return errno == ENOENT ? Left::kVanished : Left::kNotOurs;
  struct stat status {};
  if (fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != geteuid()) return Left::kNotOurs;
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) return errno == EWOULDBLOCK ? Left::kInUse : Left::kNotOurs;
  if (!names(path, fd.get())) return Left::kVanished;
  return unlink(path.c_str()) == 0 ? Left::kRemoved : Left::kNotOurs;
}

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kStore, fmt::format("HostTier: '{}' {}", path, why));
}

/// A new, locked file at the path.
int make_file(const std::string& path) {
  // Another start or clean-up holds a dead process's lock for a moment; a live owner holds it for longer.
  constexpr auto kPatience = std::chrono::milliseconds(200);
  auto give_up = std::chrono::steady_clock::now();
  ino_t waited_for = 0;
  while (true) {
    Fd fd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (fd.get() >= 0) {
      if (flock(fd.get(), LOCK_EX | LOCK_NB) == 0 && names(path, fd.get())) {
        fchmod(fd.get(), 0600);  // whatever the umask
        return fd.release();
      }
      continue;  // another was quicker, took it for a dead process's, and removes it
    }
    if (errno != EEXIST) fail(path, fmt::format("cannot be made: {}", message_of(errno)));
    const Left left = remove_left(path);
    if (left == Left::kNotOurs) fail(path, "exists and is no file of this user that could be replaced");
    struct stat status {};
    if (left != Left::kInUse || lstat(path.c_str(), &status) != 0) continue;
    const auto now = std::chrono::steady_clock::now();
    if (status.st_ino != waited_for) {
      waited_for = status.st_ino;
      give_up = now + kPatience;
    } else if (now > give_up) {
      fail(path, "is in use by a live process");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

/// Takes the room at once: memory that is missing later would be a SIGBUS.
void take_room(const std::string& path, int fd, std::int64_t bytes) {
  std::int64_t free = available_memory();
  struct statvfs room {};
  if (fstatvfs(fd, &room) == 0 && room.f_blocks > 0) {  // 0: no limit
    free = std::min(free, static_cast<std::int64_t>(room.f_bavail * room.f_frsize));
  }
  const auto refuse = [&](const std::string& why) {
    fail(path, fmt::format("has no room: {} bytes wanted, {} free{}", bytes, free, why));
  };
  if (bytes > free) refuse("");
  constexpr std::int64_t kStep = 64 << 20;  // short enough to end between two signals
  for (std::int64_t at = 0; at < bytes;) {
    const std::int64_t step = std::min(kStep, bytes - at);
    const int error = posix_fallocate(fd, at, step);
    if (error == EINTR) continue;
    if (error != 0) refuse(fmt::format(" ({})", message_of(error)));
    at += step;
  }
}

void check_size(std::int64_t bytes) {
  if (bytes < 1) throw Error(ErrorCode::kArgument, fmt::format("HostTier: num_bytes {} is less than 1", bytes));
}

}  // namespace

Memory::Memory(std::int64_t bytes) : size_(bytes), owner_(getpid()) {
  check_size(bytes);
  if (bytes <= kMostBytes) {
    mapped_ = whole_pages(bytes);
    data_ = map(mapped_, -1);
  } else {
    errno = ENOMEM;
  }
  if (data_ == nullptr) {
    const int error = errno;
    throw Error(ErrorCode::kStore, fmt::format("store: {} bytes of memory wanted, {} free ({})", bytes,
                                               available_memory(), message_of(error)));
  }
}

Memory::Memory(std::int64_t bytes, const std::string& shared_name) : size_(bytes), owner_(getpid()) {
  check_size(bytes);
  if (!is_shared_name(shared_name)) {
    throw Error(ErrorCode::kArgument,
                fmt::format("HostTier: a shared name of {} characters is not one of 1 to {} of a-z 0-9 . _ -",
                            shared_name.size(), kLongestName));
  }
  remove_stale_shared();
  path_ = fmt::format("{}/{}{}", kSharedDirectory, kPrefix, shared_name);
  Fd fd(make_file(path_));
  try {
    mapped_ = bytes > kMostBytes ? bytes : whole_pages(bytes);
    take_room(path_, fd.get(), mapped_);
    data_ = map(mapped_, fd.get());
    if (data_ == nullptr) fail(path_, fmt::format("cannot be mapped, {} bytes: {}", mapped_, message_of(errno)));
  } catch (...) {
    unlink(path_.c_str());
    throw;
  }
  fd_ = fd.release();
}

void Memory::keep_from_children() noexcept {
  if (fd_ >= 0) return;
  kept_from_children_ = true;
  madvise(data_, static_cast<std::size_t>(mapped_), MADV_DONTFORK);
}

Memory::~Memory() {
  // A child that did not get it may have something else there.
  if (!kept_from_children_ || owner_ == getpid()) munmap(data_, static_cast<std::size_t>(mapped_));
  if (fd_ < 0) return;
  // A forked child has a copy of this object, but the file is its parent's.
  if (owner_ == getpid() && names(path_, fd_)) unlink(path_.c_str());
  close(fd_);
}

int remove_stale_shared() {
  DIR* directory = opendir(kSharedDirectory);
  if (directory == nullptr) return 0;
  int removed = 0;
  while (const dirent* entry = readdir(directory)) {
    const std::string_view name = entry->d_name;
    if (!name.starts_with(kPrefix) || !is_shared_name(name.substr(kPrefix.size()))) continue;
    if (remove_left(fmt::format("{}/{}", kSharedDirectory, name)) == Left::kRemoved) ++removed;
  }
  closedir(directory);
  return removed;
}

/// Exact best fit in constant time: a list of free extents for each length of up to an eighth of the range, and a tree
/// of bitmaps over the lengths that have one, 64 to a node. Of longer extents there are seven at most, in one list.
class Extents::Impl {
 public:
  explicit Impl(std::int64_t num_pages)
      : num_pages_(static_cast<std::uint32_t>(num_pages)),
        longest_listed_(num_pages_ / 8 + 1),
        memory_(bookkeeping(num_pages_, longest_listed_)) {
    auto* at = memory_.data();
    for (std::uint64_t bits = std::uint64_t{longest_listed_} + 1, words = 0; words != 1; bits = words) {
      words = (bits + 63) / 64;
      levels_[num_levels_++] = {reinterpret_cast<std::uint64_t*>(at), words};
      at += words * sizeof(std::uint64_t);
    }
    pages_ = reinterpret_cast<Page*>(at);
    lists_ = reinterpret_cast<std::uint32_t*>(pages_ + num_pages_);
    add(0, num_pages_);
  }

  std::optional<std::uint32_t> take(std::uint32_t length) {
    const std::uint32_t from = fitting(length);
    if (from == kNone) return {};
    const std::uint32_t rest = pages_[from].length - length;
    remove(from);
    // The extent is cut at one end, so that one free extent is left and not two. Large ones take the end that is
    // aligned, small ones the end where they do not shift large ones.
    std::uint32_t start = from;
    if (length < kHugePages || (from % kHugePages != 0 && (from + rest) % kHugePages == 0)) start = from + rest;
    if (rest > 0) add(start == from ? from + length : from, rest);
    return start;
  }

  void give(std::uint32_t from, std::uint32_t length) {
    if (from > 0 && pages_[from - 1].length > 0) {
      const std::uint32_t before = pages_[from - 1].length;
      from -= before;
      length += before;
      remove(from);
    }
    if (from + length < num_pages_ && pages_[from + length].length > 0) {
      const std::uint32_t after = pages_[from + length].length;
      remove(from + length);
      length += after;
    }
    add(from, length);
  }

  std::uint32_t num_pages() const { return num_pages_; }
  std::uint32_t free_pages() const { return free_pages_; }
  std::uint32_t largest() const {
    std::uint32_t best = 0;
    for (std::uint32_t at = lists_[0]; at != 0; at = pages_[at - 1].next) best = std::max(best, pages_[at - 1].length);
    return best > 0 ? best : last_listed();
  }
  std::size_t memory() const { return sizeof(*this) + static_cast<std::size_t>(memory_.mapped()); }

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  static constexpr std::uint32_t kHugePages = kHugePage / kPage;

  /// Of the first page of a free extent. Its last page has the length too; that of all others is 0.
  struct Page {
    std::uint32_t length;
    std::uint32_t prev;  // as `next`
    std::uint32_t next;  // page + 1 of an extent in the same list; 0: none
  };
  struct Level {
    std::uint64_t* words;  // bit n: there is a free extent of n pages; above: word n of the level below is not 0
    std::uint64_t size;
  };

  static std::int64_t bookkeeping(std::uint32_t num_pages, std::uint32_t longest_listed) {
    std::uint64_t bytes = std::uint64_t{num_pages} * sizeof(Page) + (std::uint64_t{longest_listed} + 1) * 4;
    for (std::uint64_t bits = std::uint64_t{longest_listed} + 1, words = 0; words != 1; bits = words) {
      words = (bits + 63) / 64;
      bytes += words * sizeof(std::uint64_t);
    }
    return static_cast<std::int64_t>(bytes);
  }

  std::uint32_t& list_of(std::uint32_t length) { return lists_[length <= longest_listed_ ? length : 0]; }

  void add(std::uint32_t from, std::uint32_t length) {
    std::uint32_t& list = list_of(length);
    pages_[from + length - 1].length = length;
    pages_[from] = {length, 0, list};
    if (list != 0) pages_[list - 1].prev = from + 1;
    if (list == 0 && length <= longest_listed_) mark(length);
    list = from + 1;
    free_pages_ += length;
  }
  void remove(std::uint32_t from) {
    const Page page = pages_[from];
    std::uint32_t& list = list_of(page.length);
    (page.prev == 0 ? list : pages_[page.prev - 1].next) = page.next;
    if (page.next != 0) pages_[page.next - 1].prev = page.prev;
    if (list == 0 && page.length <= longest_listed_) unmark(page.length);
    pages_[from].length = 0;
    pages_[from + page.length - 1].length = 0;
    free_pages_ -= page.length;
  }

  /// First page of the shortest free extent that is long enough, the one given back last among equals.
  std::uint32_t fitting(std::uint32_t length) const {
    const std::uint32_t listed = length <= longest_listed_ ? first_listed(length) : 0;
    if (listed != 0) return lists_[listed] - 1;
    std::uint32_t best = kNone;
    for (std::uint32_t at = lists_[0]; at != 0; at = pages_[at - 1].next) {
      const std::uint32_t found = pages_[at - 1].length;
      if (found >= length && (best == kNone || found < pages_[best].length)) best = at - 1;
    }
    return best;
  }

  void mark(std::uint64_t bit) {
    for (std::size_t level = 0; level < num_levels_; ++level, bit /= 64) {
      std::uint64_t& word = levels_[level].words[bit / 64];
      const bool was_empty = word == 0;
      word |= std::uint64_t{1} << bit % 64;
      if (!was_empty) return;
    }
  }
  void unmark(std::uint64_t bit) {
    for (std::size_t level = 0; level < num_levels_; ++level, bit /= 64) {
      std::uint64_t& word = levels_[level].words[bit / 64];
      word &= ~(std::uint64_t{1} << bit % 64);
      if (word != 0) return;
    }
  }
  /// The smallest length of at least this that has a list; 0: none.
  std::uint32_t first_listed(std::uint64_t bit) const {
    for (std::size_t level = 0; level < num_levels_ && bit / 64 < levels_[level].size; ++level) {
      const std::uint64_t word = levels_[level].words[bit / 64] & ~std::uint64_t{0} << bit % 64;
      if (word != 0) {
        bit = bit / 64 * 64 + static_cast<std::uint64_t>(std::countr_zero(word));
        while (level-- > 0) {
          bit = bit * 64 + static_cast<std::uint64_t>(std::countr_zero(levels_[level].words[bit]));
        }
        return static_cast<std::uint32_t>(bit);
      }
      bit = bit / 64 + 1;
    }
    return 0;
  }
  std::uint32_t last_listed() const {
    if (levels_[num_levels_ - 1].words[0] == 0) return 0;
    std::uint64_t bit = 0;
    for (std::size_t level = num_levels_; level-- > 0;) {
      bit = bit * 64 + static_cast<std::uint64_t>(63 - std::countl_zero(levels_[level].words[bit]));
    }
    return static_cast<std::uint32_t>(bit);
  }

  std::uint32_t num_pages_;
  std::uint32_t longest_listed_;
  Memory memory_;
  std::array<Level, 6> levels_{};
  std::size_t num_levels_ = 0;
  Page* pages_ = nullptr;
  std::uint32_t* lists_ = nullptr;  // by length: first page + 1, 0: none; [0]: the longer ones
  std::uint32_t free_pages_ = 0;
};

Extents::Extents(std::int64_t bytes) {
  const std::int64_t num_pages = bytes / kPage;
  constexpr std::int64_t kMostPages = std::numeric_limits<std::uint32_t>::max() - 1;
  if (num_pages < 1 || num_pages > kMostPages) {
    throw Error(ErrorCode::kArgument,
                fmt::format("HostTier: num_bytes {} is not from {} to {}", bytes, kPage, kMostPages * kPage));
  }
  impl_ = std::make_unique<Impl>(num_pages);
}
Extents::~Extents() = default;

std::optional<std::int64_t> Extents::take(std::int64_t bytes) {
  if (bytes < 1 || bytes > largest_free()) return {};
  const auto page = impl_->take(static_cast<std::uint32_t>(whole_pages(bytes) / kPage));
  if (!page) return {};
  return *page * kPage;
}
void Extents::give(std::int64_t offset, std::int64_t bytes) {
  impl_->give(static_cast<std::uint32_t>(offset / kPage), static_cast<std::uint32_t>(whole_pages(bytes) / kPage));
}
std::int64_t Extents::free_bytes() const { return impl_->free_pages() * kPage; }
std::int64_t Extents::largest_free() const { return impl_->largest() * kPage; }
std::size_t Extents::memory() const { return sizeof(*this) + impl_->memory(); }

}  // namespace kvstride::store
