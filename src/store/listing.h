// SPDX-License-Identifier: Apache-2.0
// What is in a store's folders, for the tier and for `kvstride store` alike.
#pragma once

#include <cerrno>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "store/chunk.h"
#include "store/folders.h"

namespace kvstride::store {

/// A namespace's folder, a draft, and half of it: the process that writes it.
constexpr std::size_t kSpaceName = 64;
constexpr std::size_t kDraftName = 32;
constexpr std::size_t kTokenName = 16;

/// Folders and files that are links, other users', or closed to this one: neither counted nor read. Or nobody could
/// ever finish counting.
constexpr bool not_ours(int error) { return error == -ENOTDIR || error == -ELOOP || error == -EACCES; }

/// One name in a shard.
struct Entry {
  enum class Kind : std::uint8_t {
    kPiece,      ///< a chunk's file
    kMisplaced,  ///< of a chunk that belongs to another shard
    kNoName,     ///< no name of ours
    kForeign,    ///< no regular file, or another user's
    kFailed,     ///< it cannot be looked at: `error`
  };
  Kind kind;
  const char* name;
  const std::pair<Key, Heads>* piece;  ///< of kPiece, kMisplaced, kForeign and kFailed
  struct stat stat;                    ///< of kPiece and kForeign
  int error;
};

/// Tells of every name in a shard but those that vanish meanwhile. `fd` is only used for this. 0 or −errno.
int list_shard(Io& io, int fd, std::size_t shard, const std::function<bool(const struct stat&)>& ours,
               const std::function<void(const Entry&)>& use);

/// A piece's file for reading, its last use left alone where the system allows; past the page cache with `direct`,
/// where the file system can. A descriptor or −errno.
int open_payload(Io& io, int at, const char* name, bool direct);
/// Whether files of this directory can be read and written past the page cache. Writes nothing: the ledger is read.
bool can_be_direct(Io& io, int root);
/// The header of an open file. Nothing where it is none, and `why` then says so, or where it cannot be read: `error`
/// is then −errno.
std::optional<Header> read_header(Io& io, int fd, int& error, std::string* why = nullptr);

}  // namespace kvstride::store
