// SPDX-License-Identifier: Apache-2.0
// Finding out what is in a directory, and counting it.
#include "store/scan.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "store/listing.h"

namespace kvstride::store {

void Directory::scan_space(std::uint32_t number, Scan& out) {
  const Digest& of = digest(number);
  for (std::size_t shard = 0; shard < kNumShards; ++shard) {
    const Folder folder = folders_.shard(of, shard, false);
    const Folder listing = folder.fd() < 0 ? folder : folders_.again(folder.fd());
    if (not_ours(listing.fd())) counters_.add(Count::kForeign);
    if (not_ours(listing.fd()) || folder.fd() == -ENOENT) continue;
    if (listing.fd() < 0) {
      out.whole = false;
      continue;
    }
    const auto ours = [&](const struct stat& stat) { return folders_.ours(stat); };
    const int error = list_shard(*io_, listing.fd(), shard, ours, [&](const Entry& entry) {
      const bool refused = entry.kind == Entry::Kind::kFailed && not_ours(entry.error);
      if (entry.kind == Entry::Kind::kFailed && !refused) out.whole = false;
      if (entry.kind == Entry::Kind::kForeign || refused) counters_.add(Count::kForeign);
      if (entry.kind != Entry::Kind::kPiece) return;
      const struct stat& stat = entry.stat;
      out.bytes = add_bytes(out.bytes, bytes_on_disk(stat));
      const PieceId id{number, entry.piece->first, entry.piece->second};
      if (!believable(folder.fd(), entry.name, id, stat)) {
        out.damaged.push_back(id);
        return;
      }
      const std::string_view text(entry.name);
      out.files.push_back({number, static_cast<std::uint32_t>(stat.st_size / kPage), stat.st_atim.tv_sec,
                           stat.st_mtim.tv_sec, out.names.size(), static_cast<std::uint32_t>(text.size())});
      out.names += text;
    });
    if (error < 0) out.whole = false;
  }
}

/// Bytes of the files of a folder without structure. Of drafts, those of dead processes are removed, and those of
/// living ones are covered by what these have reserved.
std::int64_t Directory::scan_flat(const Folder& folder, bool drafts, bool& whole) {
  std::vector<std::string> names;
  const int fd = folder.fd();
  const Folder listing = folders_.again(fd);
  const int error = listing.fd() < 0 ? listing.fd() : io_->list(listing.fd(), [&](const char* name, unsigned char) {
    if (is_lower_hex(name)) names.emplace_back(name);
    return true;
  });
  if (error < 0) {
    whole = false;
    return 0;
  }
  std::int64_t bytes = 0;
  const std::vector<std::string> live = ledger_->live_tokens();  // after the listing: who starts now is not in it
  for (const std::string& name : names) {
    if (!drafts) {
      struct stat stat;
      const int failed = io_->stat_at(fd, name.c_str(), stat);
      if (failed == 0 && S_ISREG(stat.st_mode)) bytes = add_bytes(bytes, bytes_on_disk(stat));
      if (failed < 0 && failed != -ENOENT) whole = false;
    } else if (name.size() == kDraftName && live.empty()) {
      whole = false;  // a dead process's, or covered by what a living one has reserved? It cannot be told
    } else if (name.size() == kDraftName &&
               std::find(live.begin(), live.end(), name.substr(0, kTokenName)) == live.end()) {
      const int failed = retry([&] { return io_->unlink(fd, name.c_str()); });
      if (failed < 0 && failed != -ENOENT && failed != -EISDIR)
        whole = false;  // it takes room that nobody has reserved
    }
  }
  return bytes;
}

void Directory::scan(Scan& out) {
  out.seen = num_gone();
  std::vector<std::string> names;
  const Folder listing = folders_.again(folders_.root());
  const int error = listing.fd() < 0 ? listing.fd() : io_->list(listing.fd(), [&](const char* name, unsigned char) {
    const std::string_view text(name);
    if (text.size() == kSpaceName && is_lower_hex(text)) names.emplace_back(text);
    return true;
  });
  if (error < 0) out.whole = false;
  for (const std::string& name : names) {
    const auto bytes = from_hex(name);
    Digest found;
    std::copy(bytes->begin(), bytes->end(), found.begin());
    scan_space(space(found), out);
  }
}

/// Files that the index does not know enter it, least recently used first.
void Directory::adopt(Scan& scan) {
  // A clock that was wrong makes an odd order, nothing else.
  std::sort(scan.files.begin(), scan.files.end(), [](const Scan::File& a, const Scan::File& b) {
    return std::max(a.used, a.changed) < std::max(b.used, b.changed);
  });
  for (const Scan::File& file : scan.files) {
    const auto parsed = parse_file_name(std::string_view(scan.names).substr(file.name, file.length));
    // The whole second that it was written in has passed.
    constexpr std::int64_t kSecond = 1'000'000'000;
    const std::int64_t written = file.changed * kSecond + kSecond - 1;
    insert({file.space, parsed->first, parsed->second},
           {file.pages * kPage, file.used, written, file.used > file.changed}, scan.seen);
  }
  for (const PieceId& id : scan.damaged) let_go(id, Going::kDamaged);
}

/// Learns the files, and sums them up where that is this process's turn.
void Directory::count_files(bool mine) {
  try {
    const std::unique_lock lock(files_);
    folders_.look_again();  // what others have put into folders that were made again is counted, too
    Scan found;
    scan(found);
    if (mine) {
      scan_flat(folders_.tmp(), true, found.whole);
      const std::int64_t aside = scan_flat(folders_.quarantine(), false, found.whole);
      quarantined_ = aside > 0;
      const std::int64_t bytes = add_bytes(found.bytes, aside);
      found.whole ? ledger_->end_count(bytes) : ledger_->cancel_count();
      known_used_ = bytes;
      mine = false;
    }
    adopt(found);
  } catch (...) {  // no memory
    if (mine) ledger_->cancel_count();
    throw;
  }
  if (ledger_) settle_all();
}

void Directory::keep_house() {
  drop_expired();
  if (!ledger_) return;
  settle_all();
  if (const std::optional<Ledger::Account> account = ledger_->account()) known_used_ = account->used;
  if (ledger_->lost()) {
    // The others that were there come, too: before what they have reserved is known, nobody should count.
    if (ledger_->reopen(folders_.root())) counted_ = Clock::now();
    return;
  }
  // The limit may be lower than that of those who wrote.
  for (int i = 0; i < 1024 && known_used_ > options_.max_bytes && evict_one() > 0; ++i) {
  }
  const Clock::time_point now = Clock::now();
  if (now - counted_ < std::chrono::seconds(1)) return;
  counted_ = now;
  folders_.look_again();  // a lookup does not tell a removed folder from one that lacks the file
  if (ledger_->begin_count() == Ledger::Count::kMine) count_files(true);
}

}  // namespace kvstride::store
