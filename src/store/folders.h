// SPDX-License-Identifier: Apache-2.0
// The folders of a store's directory, as descriptors: nothing below the root is ever named by a path.
#pragma once

#include <array>
#include <cerrno>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvstride/identity.h"
#include "store/index.h"
#include "store/io.h"

namespace kvstride::store {

/// Name of a piece's file: key and heads as lower-case hex, four digits each for the first head and their number.
std::string file_name(const Key& key, Heads heads);
/// The reverse; nothing for any other name.
std::optional<std::pair<Key, Heads>> parse_file_name(std::string_view name);
/// Name of the empty file that says that somebody wrote these heads.
std::string heads_name(Heads heads);
std::optional<Heads> parse_heads_name(std::string_view name);
bool is_lower_hex(std::string_view text);
/// Which of a namespace's 16 folders has the key.
constexpr std::size_t kNumShards = 16;
std::size_t shard_of(const Key& key);

/// A descriptor that is closed when nobody has it any more; or an error.
class Folder {
 public:
  Folder() = default;
  explicit Folder(int error) : fd_(error) {}
  Folder(Io& io, int fd) : fd_(fd) {
    if (fd >= 0) open_ = std::make_shared<const Open>(io, fd);
  }
  int fd() const { return fd_; }  ///< −errno where it could not be opened

 private:
  struct Open {
    Open(Io& from, int number) : io(from), fd(number) {}
    ~Open() { io.close(fd); }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;
    Io& io;
    int fd;
  };
  std::shared_ptr<const Open> open_;
  int fd_ = -ENOENT;
};

/// Thread-safe. Folders and links of other owners are answered with −ENOTDIR.
class Folders {
 public:
  /// Opens the root without following a link at its end, makes it and its parents where they are missing. Throws
  /// Error(kStore).
  Folders(std::shared_ptr<Io> io, const std::string& path, bool group);

  int root() const { return root_.fd(); }
  Folder tmp() const;
  Folder quarantine() const;
  bool read_only() const { return read_only_; }
  /// Read-only because there was no room for what a writer needs.
  bool full() const { return full_; }
  void set_full() { read_only_ = full_ = true; }
  mode_t file_mode() const { return group_ ? 0660 : 0600; }
  bool ours(const struct stat& stat) const;

  /// A namespace's folder and its shards. Descriptors of the namespaces that were last given to keep() are kept (17
  /// each), others opened each time.
  Folder space(const Digest& digest, bool make);
  Folder shard(const Digest& digest, std::size_t shard, bool make);
  static constexpr std::size_t kMostKept = 16;
  void keep(const Digest& digest);
  /// After −ENOENT where a folder should be: those that were removed under us are opened anew when they are next
  /// needed.
  void look_again();
  /// A descriptor of its own for listing.
  Folder again(int fd);

 private:
  struct Kept {
    Digest digest;
    Folder space;
    std::array<Folder, kNumShards> shards;
  };
  int open(int at, const char* name, bool make);
  Kept* kept(const Digest& digest);

  const std::shared_ptr<Io> io_;
  const bool group_;
  bool read_only_ = false;
  bool full_ = false;
  Folder root_;
  mutable std::mutex mutex_;  ///< held over no I/O
  Folder tmp_;
  Folder quarantine_;
  std::vector<std::unique_ptr<Kept>> kept_;  ///< last used at the end
};

}  // namespace kvstride::store
