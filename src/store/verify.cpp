// SPDX-License-Identifier: Apache-2.0
// Checking files against their checksums, past the page cache, with little memory.
#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include "store/inspect.h"

namespace kvstride::store {
namespace {

constexpr std::int64_t kWindow = 4 << 20;  ///< more than a header, and than a granule with its padding

}  // namespace

/// Part of a file in memory: from `begin`, a whole page, to `end`.
struct Verifier::Window {
  Io& io;
  int fd;
  std::byte* data;
  bool direct;  ///< otherwise what was read is dropped from the page cache
  std::int64_t begin = 0;
  std::int64_t end = 0;

  const std::byte* at(std::int64_t offset) const { return data + (offset - begin); }

  /// Goes on to the page of `from` and reads up to `to` at least; false where the file ends before.
  bool have(std::int64_t from, std::int64_t to) {
    if (to <= end) return true;
    const std::int64_t first = std::min(from, end) / kPage * kPage;
    std::memmove(data, at(first), static_cast<std::size_t>(end - first));
    drop(first);
    begin = first;
    while (end < to) {
      const std::int64_t next = end / kPage * kPage;  // direct reads start at whole pages
      const auto room = static_cast<std::size_t>(begin + kWindow - next);
      const auto got = retry([&] { return io.pread(fd, data + (next - begin), room, next); });
      if (got < 0) throw std::system_error(static_cast<int>(-got), std::generic_category());
      if (next + got <= end) return false;
      end = next + got;
    }
    return true;
  }

  void drop(std::int64_t until) const {
    if (!direct && until > begin) ::posix_fadvise(fd, begin, until - begin, POSIX_FADV_DONTNEED);
  }
};

Verifier::Verifier() : buffer_(kWindow) {}
Verifier::~Verifier() = default;

std::string Verifier::check(Io& io, int fd, std::int64_t length, const SpaceFolder& space, const Key& key,
                            Heads heads) {
  Window window{io, fd, buffer_.data(), (::fcntl(fd, F_GETFL) & O_DIRECT) != 0};
  const auto get = [&](std::int64_t begin, std::int64_t end) {
    window.have(begin, end);
    const std::int64_t until = std::clamp(window.end, begin, end);
    return std::span<const std::byte>(window.at(begin), static_cast<std::size_t>(until - begin));
  };
  std::string why = image_.check(length, space.digest(), key, heads, get);
  window.drop(window.end);
  return why;
}

Check Verifier::check(const SpaceFolder& space, const ChunkFile& file) {
  Io& io = space.store().io();
  struct stat stat;
  const int fd = space.open(file, true, stat);
  const auto refused = [](int error) {
    if (error == ENOENT) return Check{Check::State::kGone, {}, 0, 0};
    return Check{Check::State::kUnreadable, std::strerror(error), 0, 0};
  };
  if (fd < 0) return refused(-fd);
  Check out{Check::State::kSound, {}, stat.st_size, stat.st_ino};
  try {
    out.why = check(io, fd, stat.st_size, space, file.key, file.heads);
    if (!out.why.empty()) out.state = Check::State::kDamaged;
  } catch (const std::system_error& error) {
    out.state = Check::State::kUnreadable;
    out.why = std::strerror(error.code().value());
  }
  // Whoever removed it may have used the disk's blocks for something else.
  if (out.state != Check::State::kSound && io.stat_fd(fd, stat) == 0 && stat.st_nlink == 0)
    out.state = Check::State::kGone;
  io.close(fd);
  return out;
}

namespace {

class FileVerifier final : public ChunkVerifier {
 public:
  explicit FileVerifier(const SpaceFolder& space) : space_(space) {}
  std::size_t batch(std::span<const ChunkFile>) const override { return 1; }
  std::vector<Check> check(std::span<const ChunkFile> files) override {
    std::vector<Check> out;
    for (const ChunkFile& file : files) out.push_back(verifier_.check(space_, file));
    return out;
  }

 private:
  const SpaceFolder& space_;
  Verifier verifier_;
};

}  // namespace

std::unique_ptr<ChunkVerifier> SpaceFolder::verifier() const { return std::make_unique<FileVerifier>(*this); }

void verify(const ChunkSpace& space, std::span<const ChunkFile> files, int num_threads,
            const std::function<bool(const ChunkFile&, const Check&)>& done) {
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::size_t next = 0;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      const std::unique_ptr<ChunkVerifier> verifier = space.verifier();
      while (!stop) {
        std::span<const ChunkFile> some;
        {
          const std::lock_guard lock(mutex);
          some = files.subspan(next);
          if (some.empty()) return;
          some = some.first(verifier->batch(some));
          next += some.size();
        }
        const std::vector<Check> checks = verifier->check(some);
        const std::lock_guard lock(mutex);
        for (std::size_t i = 0; i < some.size() && !stop; ++i) {
          if (!done(some[i], checks[i])) stop = true;
        }
      }
    } catch (...) {  // no memory
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
      stop = true;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < std::min<std::int64_t>(num_threads, static_cast<std::int64_t>(files.size())); ++i) {
    try {
      threads.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // fewer will do
    }
  }
  work();
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace kvstride::store
