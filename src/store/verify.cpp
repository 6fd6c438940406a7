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

#include "cpu/hash.h"
#include "store/form.h"
#include "store/inspect.h"

namespace kvstride::store {
namespace {

constexpr std::int64_t kWindow = 4 << 20;  ///< more than a header, and than a granule with its padding

std::string text_of(Heads heads) {
  if (heads.count == 0) return "no heads";
  return fmt::format("heads {} to {}", heads.first, heads.first + heads.count - 1);
}

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

/// Whether readers can make sense of a sound header's order. They come in long runs of equal ones.
std::string Verifier::check_order(const Header& header) {
  if (header.content.order.empty()) return {};
  if (sound_content_ == header.content && sound_space_ == header.space_text) return {};
  if (!form_of(Namespace::parse(header.space_text), header.content)) {
    return fmt::format("its order '{}' does not suit its namespace", header.content.order);
  }
  sound_content_ = header.content;
  sound_space_ = header.space_text;
  return {};
}

std::string Verifier::check(Io& io, int fd, std::int64_t length, const SpaceFolder& space, const Key& key,
                            Heads heads) {
  Window window{io, fd, buffer_.data(), (::fcntl(fd, F_GETFL) & O_DIRECT) != 0};
  window.have(0, std::min(length, kWindow));
  const auto start = [&] { return std::span(window.at(0), static_cast<std::size_t>(window.end)); };
  std::string why;
  const std::optional<Header> header = parse_header(start(), &why);
  if (!header) return length < kPage ? fmt::format("cut off: {} bytes, a header has {} or more", length, kPage) : why;
  if (header->digest != space.digest()) return "another namespace's: " + to_hex(header->digest);
  if (!(header->key == key)) return "another chunk's: its header has the key " + header->key.hex();
  const Content& content = header->content;
  if (content.heads != heads) {
    return fmt::format("its header has {}, its name {}", text_of(content.heads), text_of(heads));
  }
  const std::int64_t expected = header->header_bytes + whole_pages(content.payload_bytes());
  if (length < expected) return fmt::format("cut off: {} of {} bytes", length, expected);
  if (length > expected) return fmt::format("{} bytes, {} more than it should have", length, length - expected);
  if (std::string order = check_order(*header); !order.empty()) return order;
  std::size_t bad = 0;
  Bytes first;
  const std::vector<Bytes> all = granules(content, header->header_bytes);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!window.have(all[i].begin, all[i].end)) return fmt::format("cut off: {} of {} bytes", window.end, expected);
    if (cpu::xxh3({window.at(all[i].begin), window.at(all[i].end)}) == header->sums[i]) continue;
    if (bad++ == 0) first = all[i];
  }
  window.drop(window.end);
  if (bad == 0) return {};
  return fmt::format("{} of {} checksums do not fit, the first is that of bytes {} to {}", bad, all.size(), first.begin,
                     first.end - 1);
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

void verify(const SpaceFolder& space, std::span<const ChunkFile> files, int num_threads,
            const std::function<bool(const ChunkFile&, const Check&)>& done) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      Verifier verifier;
      while (!stop) {
        const std::size_t i = next.fetch_add(1);
        if (i >= files.size()) return;
        const Check check = verifier.check(space, files[i]);
        const std::lock_guard lock(mutex);
        if (!stop && !done(files[i], check)) stop = true;
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
