// SPDX-License-Identifier: Apache-2.0
// The folders of a store's directory, as descriptors: nothing below the root is ever named by a path.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
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

/// A descriptor that is closed at the end, or belongs to somebody else; or an error.
class Folder {
 public:
  Folder(Io* io, int fd, bool owned) : io_(io), fd_(fd), owned_(owned) {}
  Folder(Folder&& other) noexcept : io_(other.io_), fd_(other.fd_), owned_(std::exchange(other.owned_, false)) {}
  Folder& operator=(Folder&&) = delete;
  ~Folder() {
    if (owned_ && fd_ >= 0) io_->close(fd_);
  }
  int fd() const { return fd_; }  ///< −errno where it could not be opened

 private:
  Io* io_;
  int fd_;
  bool owned_;
};

/// Thread-safe. Folders and links of other owners are answered with −ENOTDIR.
class Folders {
 public:
  /// Opens the root without following a link at its end, makes it and its parents where they are missing. Throws
  /// Error(kStore).
  Folders(std::shared_ptr<Io> io, const std::string& path, bool group);
  ~Folders();

  int root() const { return root_; }
  int tmp() const { return tmp_; }
  int quarantine() const { return quarantine_; }
  bool read_only() const { return read_only_; }
  mode_t file_mode() const { return group_ ? 0660 : 0600; }
  bool ours(const struct stat& stat) const;

  /// A namespace's folder and its shards. Descriptors of namespaces in use are kept (17 each), others opened each time.
  Folder space(const Digest& digest, bool make);
  Folder shard(const Digest& digest, std::size_t shard, bool make);
  void keep(const Digest& digest);
  /// After −ENOENT where a folder should be: those that were removed under us are opened anew when they are next
  /// needed.
  void look_again();
  /// A descriptor of its own for listing.
  Folder again(int fd);

 private:
  struct Kept {
    Digest digest;
    int fd = -1;
    std::array<int, kNumShards> shards;
  };
  int open(int at, const char* name, bool make);
  Kept* kept(const Digest& digest);

  std::shared_ptr<Io> io_;
  bool group_;
  bool read_only_ = false;
  int root_ = -1;
  std::atomic<int> tmp_{-1};
  std::atomic<int> quarantine_{-1};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Kept>> kept_;
  std::vector<int> retired_;  ///< of removed folders: other threads may still use them
};

}  // namespace kvstride::store
