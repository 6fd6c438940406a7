// SPDX-License-Identifier: Apache-2.0
// One range of memory of exactly the bytes asked for, handed out in extents of whole 4 KiB pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace kvstride::store {

inline constexpr std::int64_t kPage = 4096;
constexpr std::int64_t whole_pages(std::int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

/// Memory for chunks: private, or a file in /dev/shm that other processes can map. 2 MiB pages where the kernel gives
/// them: from 2 MiB on it starts at a multiple of that. Zeros. Not touched until it is used, but for shared memory,
/// whose room is taken at once so that it cannot run out later (SIGBUS). Not part of core dumps.
class Memory {
 public:
  /// Throws Error(kStore) that says how much was wanted and how much is free, Error(kArgument) for less than a byte.
  explicit Memory(std::int64_t bytes);
  /// `/dev/shm/kvstride-<name>`, mode 0600, locked (flock) while this process or a child forked from it lives. Files
  /// that dead processes of this user left are removed first, whatever their names; one of a live process is an error.
  /// The destructor removes the file only if it is still its own (inode) and not in a forked child. Names have 1 to 100
  /// characters of a-z 0-9 . _ -. Throws as above; no file is left then.
  Memory(std::int64_t bytes, const std::string& shared_name);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  /// Children that are forked from now on do not get private memory: they must not look at it, and may drop this.
  void keep_from_children() noexcept;

  std::byte* data() const noexcept { return data_; }
  std::int64_t size() const noexcept { return size_; }
  /// Of the mapping: bytes asked for, rounded to pages of 4 KiB. Nothing is rounded to powers of two.
  std::int64_t mapped() const noexcept { return mapped_; }
  const std::string& path() const noexcept { return path_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t size_ = 0;
  std::int64_t mapped_ = 0;
  std::string path_;
  int fd_ = -1;
  int owner_ = 0;  // process
  bool kept_from_children_ = false;
};

/// Removes `/dev/shm/kvstride-*` files of this user that no process has locked, and says how many.
int remove_stale_shared();

/// Hands out extents of a range of pages; offsets and sizes are in bytes, multiples of kPage. Constant time, no
/// allocation for each extent but bookkeeping of 13 bytes a page, made once and touched as it is used. The same calls
/// give the same offsets. Not thread-safe.
class Extents {
 public:
  /// Of the whole pages in `bytes`. Throws Error(kArgument) for none, or for 16 TiB and more.
  explicit Extents(std::int64_t bytes);
  ~Extents();
  /// Offset of a free extent of `bytes` (rounded up to pages); nothing exactly where largest_free() is less. It comes
  /// from the shortest free extent that is long enough, so that equal sizes leave no holes, and from one end of it: the
  /// small ones' end is the last. Extents of 2 MiB and more get the end where their offset is a multiple of 2 MiB, if
  /// one is.
  std::optional<std::int64_t> take(std::int64_t bytes);
  /// Gives back what take() gave; neighbours that are free become one.
  void give(std::int64_t offset, std::int64_t bytes);
  std::int64_t free_bytes() const;
  std::int64_t largest_free() const;
  std::size_t memory() const;  ///< bytes of the bookkeeping

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvstride::store
