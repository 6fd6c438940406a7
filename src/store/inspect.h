// SPDX-License-Identifier: Apache-2.0
// A store's directory looked at from outside: what is in it, and whether it is sound. Changes nothing.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/arena.h"
#include "store/chunk.h"
#include "store/image_check.h"
#include "store/io.h"

namespace kvstride::store {

/// A chunk's file, from its name and its times. No header is read.
struct ChunkFile {
  Key key;
  Heads heads;
  std::uint32_t space = 0;  ///< for callers that have files of several namespaces
  std::int64_t length = 0;
  std::int64_t bytes = 0;  ///< on the disk, as the account counts them
  std::int64_t used = 0;   ///< last use, or writing where that was later: nanoseconds since 1970
  bool read = false;       ///< used since it was written

  std::string name() const;
};

/// By key, then by heads.
bool by_name(const ChunkFile& a, const ChunkFile& b);

/// Something that lies where files of the store should, and is never read: a link, another owner's, another name.
struct Stray {
  std::string path;  ///< below the store's directory
  std::string what;
};

/// Error(kArgument) where this is no beginning of a namespace's name.
void check_space_prefix(std::string_view prefix);

/// What a check of one file found.
struct Check {
  enum class State {
    kSound,
    kDamaged,     ///< `why` says how
    kGone,        ///< somebody removed it meanwhile
    kUnreadable,  ///< the system refused: `why`
  };
  State state = State::kSound;
  std::string why;
  std::int64_t bytes = 0;   ///< of the file
  std::uint64_t inode = 0;  ///< that was looked at
};

/// Checks files of a namespace: header, header against name, length, every granule. For one thread.
class ChunkVerifier {
 public:
  virtual ~ChunkVerifier() = default;
  /// How many of the first of `files` (at least one) one call of check() should have.
  virtual std::size_t batch(std::span<const ChunkFile> files) const = 0;
  virtual std::vector<Check> check(std::span<const ChunkFile> files) = 0;
};

/// Files of one namespace, wherever they are.
class ChunkSpace {
 public:
  /// `name`: 64 hex digits.
  explicit ChunkSpace(std::string name);
  virtual ~ChunkSpace() = default;
  ChunkSpace(const ChunkSpace&) = delete;
  ChunkSpace& operator=(const ChunkSpace&) = delete;

  const std::string& name() const { return name_; }
  const Digest& digest() const { return digest_; }
  /// `<namespace>/<digit>/<file>`.
  std::string path_of(const ChunkFile& file) const;

  /// Calls `use` for every chunk's file, one folder after the other. Whether everything could be listed that is no
  /// stray: links and other users' folders are.
  virtual bool list(const std::function<void(const ChunkFile&)>& use, std::vector<Stray>* strays = nullptr) const = 0;
  /// The header, or nothing and why.
  virtual std::optional<Header> header(const ChunkFile& file, std::string* why = nullptr) const = 0;
  /// Must not outlive the namespace.
  virtual std::unique_ptr<ChunkVerifier> verifier() const = 0;

 private:
  std::string name_;
  Digest digest_{};
};

/// Namespaces and their files, wherever they are.
class ChunkStore {
 public:
  ChunkStore() = default;
  virtual ~ChunkStore() = default;
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;

  /// For people.
  virtual std::string where() const = 0;
  /// Names of namespaces (64 hex digits) that begin with `prefix`, sorted. Throws Error(kArgument) where the prefix is
  /// no lower-case hex, Error(kStore) where nothing can be listed.
  virtual std::vector<std::string> spaces(std::string_view prefix = {}) const = 0;
  /// The only one; Error(kArgument) that lists them where there are several or none.
  std::string space(std::string_view prefix) const;
  /// Must not outlive the store.
  virtual std::unique_ptr<ChunkSpace> open(const std::string& name) const = 0;
};

/// A file of tmp/ or quarantine/.
struct LooseFile {
  std::string name;
  std::int64_t bytes = 0;
  bool dead = false;  ///< in tmp/: its process has ended
};

/// What the file `ledger` says.
struct LedgerState {
  bool sound = false;  ///< all else means something
  bool known = false;  ///< `used` does
  bool counting = false;
  std::int64_t max_bytes = 0;  ///< of the process that opened the directory last; 0: not known
  std::int64_t used = 0;
  std::int64_t reserved = 0;
  int processes = 0;                ///< that live
  std::vector<std::string> tokens;  ///< of these
  bool all_tokens = false;          ///< none is missing
};

/// The directory. Safe to share between threads but for list calls; works while processes use the directory, whose
/// files come and go.
class StoreFolder final : public ChunkStore {
 public:
  /// Throws Error(kStore) where `path` is missing, a link, no store (it has no ledger), or another user's and not
  /// `group`. Nothing is made.
  StoreFolder(std::shared_ptr<Io> io, std::string path, bool group);
  ~StoreFolder() override;

  std::string where() const override { return path_; }
  std::vector<std::string> spaces(std::string_view prefix = {}) const override;
  std::unique_ptr<ChunkSpace> open(const std::string& name) const override;

  LedgerState ledger() const;
  /// Files of quarantine/, and of tmp/ (`dead` is then told). `whole` becomes false where not all could be listed, or
  /// it cannot be told which are dead.
  std::vector<LooseFile> quarantine(bool* whole = nullptr) const;
  std::vector<LooseFile> temporaries(bool* whole = nullptr) const;

  Io& io() const { return *io_; }
  std::shared_ptr<Io> shared_io() const { return io_; }
  const std::string& path() const { return path_; }
  int root() const { return root_; }
  /// A folder of the root; −errno, −ENOTDIR where it is a link or another user's.
  int open_folder(const char* name) const;
  bool ours(const struct stat& stat) const;
  bool group() const { return group_; }
  const struct stat& ledger_stat() const { return ledger_; }

 private:
  void open_root();
  std::vector<LooseFile> loose(const char* folder, bool* whole) const;

  std::shared_ptr<Io> io_;
  std::string path_;
  bool group_;
  int root_ = -1;
  struct stat ledger_ {};
};

/// A namespace of a directory. Holds 17 descriptors. Safe to share between threads but for list(). The store must
/// outlive it.
class SpaceFolder final : public ChunkSpace {
 public:
  SpaceFolder(const StoreFolder& store, std::string name);
  ~SpaceFolder() override;

  const StoreFolder& store() const { return store_; }
  bool list(const std::function<void(const ChunkFile&)>& use, std::vector<Stray>* strays = nullptr) const override;
  /// Descriptor of the folder that files of `key` are in; −errno.
  int shard(const Key& key) const;
  int fd() const { return fd_; }
  /// The file, open for reading without an access time; past the page cache if `direct` and the file system can.
  /// −errno; −ENOENT where it has gone, −EACCES where it is another owner's or no regular file.
  int open(const ChunkFile& file, bool direct, struct stat& stat) const;
  std::optional<Header> header(const ChunkFile& file, std::string* why = nullptr) const override;
  std::unique_ptr<ChunkVerifier> verifier() const override;

 private:
  const StoreFolder& store_;
  int fd_ = -1;
  std::array<int, 16> shards_;
};

/// A namespace in numbers.
struct SpaceSummary {
  std::string name;
  std::optional<Header> header;  ///< of one of its files
  std::string why;               ///< there is no header
  std::int64_t chunks = 0;       ///< keys
  std::int64_t files = 0;        ///< one for each head range of a chunk
  std::int64_t bytes = 0;
  std::int64_t read_files = 0;  ///< used since they were written
  std::int64_t last_use = 0;    ///< of any file; nanoseconds since 1970
  std::int64_t oldest_use = 0;  ///< last use of the file that was not used for longest
  bool whole = true;            ///< everything could be listed
};
/// Lists files and reads one header. `use` (if given) is called for each file.
SpaceSummary summarize(const ChunkSpace& space, std::vector<Stray>* strays = nullptr,
                       const std::function<void(const ChunkFile&)>& use = {});

/// What a process that opened the directory here would use. Reads the ledger, writes nothing.
struct IoEngine {
  bool ring = false;
  std::string why_not;  ///< there is no ring
  bool direct = false;  ///< past the page cache
};
IoEngine probe_engine(const StoreFolder& store);

/// Checks files one after the other (image_check.h) with 4 MiB of memory. For one thread.
class Verifier {
 public:
  Verifier();
  ~Verifier();
  Check check(const SpaceFolder& space, const ChunkFile& file);
  /// The same of an open file (which is not closed); empty where it is sound. Throws std::system_error where it cannot
  /// be read.
  std::string check(Io& io, int fd, std::int64_t length, const SpaceFolder& space, const Key& key, Heads heads);

 private:
  struct Window;

  Memory buffer_;
  ImageCheck image_;
};

/// Checks files on several threads. `done` is called for each, by one thread at a time and in no order; where it
/// answers false the rest is left out.
void verify(const ChunkSpace& space, std::span<const ChunkFile> files, int num_threads,
            const std::function<bool(const ChunkFile&, const Check&)>& done);

}  // namespace kvstride::store
