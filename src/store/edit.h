// SPDX-License-Identifier: Apache-2.0
// Changes to a store's directory from outside, while processes may be using it: the account stays right.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/inspect.h"
#include "store/ledger.h"

namespace kvstride::store {

/// All files of a directory.
struct Census {
  std::vector<std::string> spaces;  ///< ChunkFile::space is an index into it
  std::vector<ChunkFile> files;
  std::vector<LooseFile> quarantine;
  std::vector<LooseFile> temporaries;
  bool whole = true;  ///< everything could be listed

  /// What the account should say: files and quarantine.
  std::int64_t bytes() const;
};
Census take_census(const StoreFolder& store);

/// Least recently used first; equal times in the order of their names, so that the same files go each time.
void sort_by_use(std::vector<ChunkFile>& files);

/// One of the processes that share the directory, with a slot in its ledger. Calls wait for some seconds where another
/// process counts. For one thread.
class StoreEditor {
 public:
  /// Throws Error(kStore): the user is not the owner and the store not of a group, a read-only file system, no slot
  /// free, the directory cannot be counted.
  explicit StoreEditor(const StoreFolder& store);
  ~StoreEditor();

  /// Counts the directory anew (unless that was just done, to open it) and removes what dead processes left in tmp/:
  /// `temporaries` are those of living ones. Throws Error(kStore) where another process keeps counting.
  Census count();
  /// Files of dead processes that went.
  const std::vector<LooseFile>& removed_temporaries() const { return removed_; }

  // All of these: 0, or −errno. −ENOENT: it has gone; −EBUSY: another process counts.

  /// Removes a chunk's file; `bytes` are then free. With `unused` only if nobody used it since it was listed: −ESTALE.
  int remove(const SpaceFolder& space, const ChunkFile& file, bool unused, std::int64_t& bytes);
  int remove_quarantined(const std::string& name, std::int64_t& bytes);
  /// Moves the damaged file that `check` saw to quarantine/, or removes it where one of its name is there. −ENOENT also
  /// where another one has its name now.
  int set_aside(const SpaceFolder& space, const ChunkFile& file, const Check& check);

  /// Removes folders of namespaces that hold no file, if no other process has the directory open (these keep their
  /// descriptors). Returns how many.
  int remove_empty(std::span<const std::string> spaces);

  /// Replaces the file with inode `inode` by `image`, at once: whatever ends this process, the name has the one or the
  /// other. What the disk has of the image is checked first. The times stay. −ENOSPC: no room within the directory's
  /// limit, or on the disk; −EILSEQ: the disk has other bytes than were written; −ESTALE: another file has the name.
  int replace(const SpaceFolder& space, const ChunkFile& file, const struct stat& old, std::span<const std::byte> image,
              Verifier& verifier);

  Ledger& ledger() { return *ledger_; }

 private:
  void wait_for_tokens();
  Census settle();
  std::uint64_t mark();
  bool remove_if_empty(const std::string& name);
  int write_draft(const std::string& name, std::span<const std::byte> image);
  int exchange(const SpaceFolder& space, const ChunkFile& file, const std::string& draft, std::string& old);
  int unlink_at(int at, const char* name, std::int64_t& bytes, std::optional<std::int64_t> used_until);

  const StoreFolder& store_;
  Io& io_;
  int tmp_ = -1;
  int quarantine_ = -1;
  std::uint64_t next_draft_ = 0;
  std::unique_ptr<Ledger> ledger_;
  std::optional<Census> counted_;
  std::vector<LooseFile> removed_;
};

}  // namespace kvstride::store
