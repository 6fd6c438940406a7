// SPDX-License-Identifier: Apache-2.0
#include "store/listing.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <vector>

namespace kvstride::store {

int list_shard(Io& io, int fd, std::size_t shard, const std::function<bool(const struct stat&)>& ours,
               const std::function<void(const Entry&)>& use) {
  return io.list(fd, [&](const char* name, unsigned char) {
    const auto piece = parse_file_name(name);
    Entry entry{Entry::Kind::kNoName, name, piece ? &*piece : nullptr, {}, 0};
    if (piece && shard_of(piece->first) != shard) {
      entry.kind = Entry::Kind::kMisplaced;
    } else if (piece) {
      entry.error = retry([&] { return io.stat_at(fd, name, entry.stat); });
      if (entry.error == -ENOENT) return true;
      entry.kind = entry.error < 0                                   ? Entry::Kind::kFailed
                   : S_ISREG(entry.stat.st_mode) && ours(entry.stat) ? Entry::Kind::kPiece
                                                                     : Entry::Kind::kForeign;
    }
    use(entry);
    return true;
  });
}

int open_payload(Io& io, int at, const char* name, bool direct) {
  // O_NOATIME: the times are ours. It is the owner's right only.
  int flags = O_RDONLY | O_NONBLOCK | O_NOATIME | (direct ? O_DIRECT : 0);
  const auto open = [&] { return retry([&] { return io.open(at, name, flags, 0); }); };
  int fd = open();
  if (fd == -EPERM) {
    flags &= ~O_NOATIME;
    fd = open();
  }
  if (fd == -EINVAL && direct) {
    flags &= ~O_DIRECT;
    fd = open();
  }
  return fd;
}

bool can_be_direct(Io& io, int root) {
  const int fd = retry([&] { return io.open(root, "ledger", O_RDONLY | O_NONBLOCK | O_DIRECT, 0); });
  if (fd < 0) return false;
  alignas(kPage) std::array<std::byte, kPage> page;
  const bool direct = retry([&] { return io.pread(fd, page.data(), page.size(), 0); }) >= 0;
  io.close(fd);
  return direct;
}

std::optional<Header> read_header(Io& io, int fd, int& error, std::string* why) {
  std::vector<std::byte> bytes;
  std::int64_t failed = 0;
  const auto read_to = [&](std::int64_t size) {
    auto at = static_cast<std::int64_t>(bytes.size());
    bytes.resize(static_cast<std::size_t>(size));
    while (at < size) {
      const auto got = retry([&] { return io.pread(fd, bytes.data() + at, static_cast<std::size_t>(size - at), at); });
      failed = std::min<std::int64_t>(failed, got);
      if (got <= 0) break;
      at += got;
    }
    bytes.resize(static_cast<std::size_t>(at));
  };
  read_to(kPage);
  const std::optional<std::int64_t> length = header_length(bytes);
  if (length && *length > kPage && bytes.size() == static_cast<std::size_t>(kPage)) read_to(*length);
  error = static_cast<int>(failed);
  if (error < 0) return std::nullopt;
  return parse_header(bytes, why);
}

}  // namespace kvstride::store
