// SPDX-License-Identifier: Apache-2.0
// The tier in a directory: files that are known, and threads that read and write them.
#include "store/directory_tier.h"

#include <fmt/format.h>

#include "kvstride/error.h"
#include "store/disk_threads.h"
#include "store/forked.h"

namespace kvstride::store {
namespace {

class DirectoryTier final : public Tier {
 public:
  DirectoryTier(std::shared_ptr<DiskThreads> disk, std::shared_ptr<Admission> admission)
      : Tier(std::move(admission)), disk_(std::move(disk)) {}
  ~DirectoryTier() override {
    disk_->stop();
    keep_where_forked(disk_, disk_->pid_);
  }

  const char* kind() const override { return "directory"; }
  std::uint32_t space(const Namespace& space) override { return disk_->directory_.space(space.digest()); }
  void pieces(std::uint32_t space, const Key& key, std::vector<Piece>& out) override {
    if (!disk_->sick()) disk_->directory_.pieces(space, key, out);
  }
  std::size_t covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                      std::span<std::uint8_t> out) override {
    return disk_->sick() ? 0 : disk_->directory_.covered(space, keys, heads, prefix, out);
  }
  bool probe(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
             Clock::time_point begin) override {
    return !disk_->sick() && disk_->probe(space, {keys.begin(), keys.end()}, heads, prefix, begin);
  }
  BufferPtr buffer(std::int64_t bytes) override { return disk_->staging_->buffer(bytes); }
  std::int64_t largest() const override { return disk_->staging_->largest(); }
  bool holds(const PieceId& id) override { return disk_->directory_.holds(id); }
  void read(ReadRequest request) override {
    Operation operation;
    operation.read = std::move(request);
    disk_->add(std::move(operation));
  }
  void write(WriteRequest request) override {
    Operation operation;
    operation.write = std::move(request);
    disk_->add(std::move(operation));
  }
  void damaged(const PieceId& id) override { let_go(id, Going::kDamaged); }
  bool remove(std::uint32_t space, const Key& key) override {
    std::vector<Piece> known;
    disk_->directory_.pieces(space, key, known);
    for (const Piece& piece : known) let_go({space, key, piece.heads}, Going::kRemoved);
    return !known.empty();
  }

  std::shared_ptr<void> pin(std::uint32_t space, const Key& key) override {
    struct Pinned {
      std::shared_ptr<DiskThreads> disk;
      std::vector<Pin> pins;
      ~Pinned() {
        for (const Pin one : pins) disk->directory_.unpin(one);
      }
    };
    auto out = std::make_shared<Pinned>();
    out->disk = disk_;
    std::vector<Piece> known;
    disk_->directory_.pieces(space, key, known);
    for (const Piece& piece : known) {
      if (const std::optional<Pin> pin = disk_->directory_.pin({space, key, piece.heads})) out->pins.push_back(*pin);
    }
    return out->pins.empty() ? nullptr : out;
  }

  std::vector<Key> take_gone(std::uint32_t space) override { return disk_->directory_.take_gone(space); }

  void pin_memory(Device device) noexcept override {
    disk_->pinning_.pin(device, disk_->staging_->memory(), disk_->counters_);
  }

  TierMetrics metrics() const override {
    TierMetrics out;
    out.tier = kind();
    out.detail = fmt::format("{}, {}", disk_->options_.path, disk_->engine());
    if (const std::string pinned = disk_->pinning_.detail(); !pinned.empty()) out.detail += ", " + pinned;
    if (disk_->directory_.read_only()) out.detail += ", read-only";
    if (disk_->directory_.full()) out.detail += ": the disk was full when it was opened";
    if (disk_->directory_.lost()) out.detail += ", its account is lost: nothing can be written";
    out.capacity_bytes = disk_->options_.max_bytes;
    out.used_bytes = disk_->directory_.used_bytes();
    out.chunks = disk_->directory_.num_pieces();
    disk_->counters_.fill(out);
    return out;
  }

 private:
  Counters& counters() override { return disk_->counters_; }
  void let_go(const PieceId& id, Going why) {
    disk_->directory_.let_go(id, why);
    disk_->add_task([disk = disk_.get(), id] { disk->directory_.settle(id); });
  }

  std::shared_ptr<DiskThreads> disk_;
};

}  // namespace

TierPtr make_directory_tier(const DirectoryTierOptions& given, std::shared_ptr<Io> io) {
  DirectoryTierOptions options = given;
  if (options.max_bytes < 2 * kPage) {
    throw Error(ErrorCode::kArgument,
                fmt::format("DirectoryTier: max_bytes is {}, at least {} are needed", options.max_bytes, 2 * kPage));
  }
  if (options.keep_free && *options.keep_free < 0) {
    throw Error(ErrorCode::kArgument, fmt::format("DirectoryTier: keep_free is {}, below 0", *options.keep_free));
  }
  if (options.num_threads < 0 || options.num_threads > 256) {
    throw Error(ErrorCode::kArgument,
                fmt::format("DirectoryTier: num_threads is {}, of 0 to 256", options.num_threads));
  }
  if (options.staging_bytes == 0) options.staging_bytes = std::int64_t{256} << 20;
  if (options.staging_bytes < 2 * kPage) {
    throw Error(ErrorCode::kArgument, fmt::format("DirectoryTier: staging_bytes is {}, at least {} are needed",
                                                  options.staging_bytes, 2 * kPage));
  }
  auto admission = std::make_shared<Admission>(options.admission);
  auto disk = std::make_shared<DiskThreads>(options, std::move(io), admission);
  disk->start();
  return std::make_shared<DirectoryTier>(std::move(disk), std::move(admission));
}

}  // namespace kvstride::store

namespace kvstride {

TierPtr directory_tier(const DirectoryTierOptions& options) {
  return store::make_directory_tier(options, store::system_io());
}

}  // namespace kvstride
