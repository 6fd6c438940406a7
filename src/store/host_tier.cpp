// SPDX-License-Identifier: Apache-2.0
// The tier in host memory: images in one arena, lent without a copy.
#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "kvstride/error.h"
#include "store/arena.h"
#include "store/pinning.h"
#include "store/tier.h"

namespace kvstride::store {
namespace {

class HostTier;

/// An image's place in the arena; the last holder gives it back.
class Extent {
 public:
  Extent(HostTier* tier, std::int64_t offset, std::int64_t bytes) : tier_(tier), offset_(offset), bytes_(bytes) {}
  ~Extent();
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;
  std::int64_t offset() const { return offset_; }
  std::int64_t bytes() const { return bytes_; }
  /// For the tier, which gives it back itself: the destructor does not.
  void disown() { tier_ = nullptr; }

 private:
  HostTier* tier_;
  std::int64_t offset_;
  std::int64_t bytes_;
};
using ExtentPtr = std::shared_ptr<Extent>;

/// An extent in somebody's hands, which keeps the tier too.
class HostBuffer final : public Buffer {
 public:
  HostBuffer(std::shared_ptr<HostTier> tier, ExtentPtr extent);
  Region region() const override;
  const ExtentPtr& extent() const { return extent_; }

 private:
  std::shared_ptr<HostTier> tier_;
  ExtentPtr extent_;  // goes before the tier
};

class HostTier final : public Tier, public std::enable_shared_from_this<HostTier> {
 public:
  explicit HostTier(const HostTierOptions& options)
      : memory_(options.shared_name.empty() ? std::make_unique<Memory>(options.num_bytes)
                                            : std::make_unique<Memory>(options.num_bytes, options.shared_name)),
        extents_(memory_->size() / kPage * kPage),
        index_(options.eviction == Eviction::kLru ? Policy::kLru : Policy::kS3Fifo) {}

  ~HostTier() override {
    for (const ExtentPtr& extent : images_) {
      if (extent) extent->disown();
    }
  }

  const char* kind() const override { return "host"; }

  std::uint32_t space(const Namespace& space) override {
    const std::lock_guard lock(mutex_);
    const auto at = std::find(spaces_.begin(), spaces_.end(), space.digest());
    if (at != spaces_.end()) return static_cast<std::uint32_t>(at - spaces_.begin());
    spaces_.push_back(space.digest());
    return static_cast<std::uint32_t>(spaces_.size() - 1);
  }

  void pieces(std::uint32_t space, const Key& key, std::vector<Piece>& out) override {
    const std::lock_guard lock(mutex_);
    found_.clear();
    index_.find(space, key, found_);
    for (const Slot slot : found_) out.push_back({index_.heads(slot), index_.held(slot).pages * kPage});
  }

  std::size_t covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                      std::span<std::uint8_t> out) override {
    const std::lock_guard lock(mutex_);
    return index_.covered(space, keys, heads, prefix, out);
  }

  bool probe(std::uint32_t, std::span<const Key>, Heads, bool, Clock::time_point) override { return false; }

  bool lends() const override { return true; }
  std::int64_t largest() const override { return memory_->size() / kPage * kPage; }

  BufferPtr buffer(std::int64_t bytes) override {
    bytes = whole_pages(bytes);
    if (bytes > largest()) return nullptr;
    std::optional<std::int64_t> offset;
    std::vector<Demotion> demotions;
    {
      const std::lock_guard lock(mutex_);
      while (!(offset = extents_.take(bytes)) && evict(demotions)) {
      }
    }
    for (Demotion& demotion : demotions) demote(std::move(demotion));
    if (!offset) return nullptr;
    return std::make_shared<HostBuffer>(shared_from_this(), std::make_shared<Extent>(this, *offset, bytes));
  }

  void give(std::int64_t offset, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    extents_.give(offset, bytes);
  }

  bool holds(const PieceId& id) override {
    const std::lock_guard lock(mutex_);
    return index_.find(id) != kNoSlot;
  }

  void read(ReadRequest request) override {
    const auto begin = Clock::now();
    ReadResult result;
    {
      const std::lock_guard lock(mutex_);
      if (const Slot slot = index_.find(request.id); slot != kNoSlot) {
        index_.touch(slot);
        result = {Outcome::kOk, std::make_shared<HostBuffer>(shared_from_this(), images_[slot]),
                  index_.held(slot).pages * kPage};
      }
    }
    if (result.image) {
      counters_.add(Count::kReads);
      counters_.add(Count::kReadBytes, static_cast<std::uint64_t>(result.bytes));
      counters_.read_seconds.add(Clock::now() - begin);
    }
    request.done(std::move(result));
  }

  /// Keeps the image where it is if it lies in this tier's memory, otherwise copies it.
  void write(WriteRequest request) override {
    const auto begin = Clock::now();
    if (request.bytes > largest()) {
      counters_.add(Count::kRefusedLarge);
      return request.done(Outcome::kRefused);
    }
    BufferPtr image = request.image;
    if (image->home() != this || image->bytes() != whole_pages(request.bytes)) {
      image = buffer(request.bytes);
      if (!image) {
        counters_.add(Count::kRefusedFull);
        return request.done(Outcome::kRefused);
      }
      std::copy_n(request.image->data(), request.bytes, image->data());
    }
    {
      const std::lock_guard lock(mutex_);
      if (const Slot there = index_.find(request.id); there != kNoSlot) {
        counters_.add(Count::kAlreadyThere);
        index_.touch(there);
      } else {
        const ExtentPtr& extent = static_cast<HostBuffer&>(*image).extent();
        const Slot slot = index_.insert(request.id, {static_cast<std::uint64_t>(extent->offset()),
                                                     static_cast<std::uint32_t>(extent->bytes() / kPage)});
        if (slot >= images_.size()) images_.resize(std::max<std::size_t>(slot + 1, 2 * images_.size()));
        images_[slot] = extent;
        counters_.add(Count::kWrites);
        counters_.add(Count::kWriteBytes, static_cast<std::uint64_t>(image->bytes()));
      }
    }
    counters_.write_seconds.add(Clock::now() - begin);
    image = request.image = nullptr;
    request.done(Outcome::kOk);
  }

  void damaged(const PieceId& id) override {
    if (drop(id)) counters_.add(Count::kCorrupt);
  }

  bool remove(std::uint32_t space, const Key& key) override {
    std::vector<ExtentPtr> dropped;  // given back after the lock
    const std::lock_guard lock(mutex_);
    found_.clear();
    index_.find(space, key, found_);
    for (const Slot slot : found_) {
      dropped.push_back(std::move(images_[slot]));
      index_.remove(slot, false);
    }
    counters_.add(Count::kRemoved, dropped.size());
    return !dropped.empty();
  }

  std::shared_ptr<void> pin(std::uint32_t space, const Key& key) override {
    auto pinned = std::make_shared<std::vector<HostBuffer>>();
    const std::lock_guard lock(mutex_);
    found_.clear();
    index_.find(space, key, found_);
    for (const Slot slot : found_) pinned->emplace_back(shared_from_this(), images_[slot]);
    return pinned->empty() ? nullptr : pinned;
  }

  void demote_to(std::uint32_t space, std::weak_ptr<Tier> lower, std::uint32_t space_there) override {
    const std::lock_guard lock(mutex_);
    if (space >= lower_.size()) lower_.resize(space + 1);
    lower_[space] = {std::move(lower), space_there};
  }

  void only_here(const PieceId& id) override {
    const std::lock_guard lock(mutex_);
    if (const Slot slot = index_.find(id); slot != kNoSlot) index_.held(slot).place = kOnlyHere;
  }

  void pin_memory(Device device) noexcept override { pinning_.pin(device, *memory_, counters_); }

  TierMetrics metrics() const override {
    TierMetrics out;
    out.tier = kind();
    out.detail = memory_->path();
    if (const std::string pinned = pinning_.detail(); !pinned.empty()) {
      out.detail += (out.detail.empty() ? "" : ", ") + pinned;
    }
    out.capacity_bytes = largest();
    {
      const std::lock_guard lock(mutex_);
      out.used_bytes = largest() - extents_.free_bytes();
      out.chunks = static_cast<std::int64_t>(index_.size());
    }
    counters_.fill(out);
    return out;
  }

  std::byte* at(std::int64_t offset) const { return memory_->data() + offset; }

 private:
  static constexpr std::uint64_t kOnlyHere = 1;  ///< Held::place

  struct Demotion {
    PieceId id;
    BufferPtr image;
    std::shared_ptr<Tier> to;
  };
  struct Lower {
    std::weak_ptr<Tier> tier;
    std::uint32_t space = 0;
  };

  /// Lets go of the entry whose turn it is, if nobody has it in hand. What the lower tier lacks goes to `demotions`, a
  /// few at a time; its room is free when the lower tier is done with it.
  bool evict(std::vector<Demotion>& demotions) {
    constexpr std::size_t kAtOnce = 8;
    const Slot slot = index_.victim([&](Slot at) { return images_[at].use_count() > 1; });
    if (slot == kNoSlot) return false;
    ExtentPtr extent = std::move(images_[slot]);
    counters_.add(Count::kEvictions);
    if (!index_.was_read(slot)) counters_.add(Count::kEvictedUnread);
    PieceId id = index_.id(slot);
    const bool only_here = index_.held(slot).place == kOnlyHere;
    index_.remove(slot, true);
    if (only_here && id.space < lower_.size() && demotions.size() < kAtOnce) {
      if (std::shared_ptr<Tier> lower = lower_[id.space].tier.lock()) {
        id.space = lower_[id.space].space;
        demotions.push_back(
            {id, std::make_shared<HostBuffer>(shared_from_this(), std::move(extent)), std::move(lower)});
        return true;
      }
    }
    extents_.give(extent->offset(), extent->bytes());
    extent->disown();
    return true;
  }

  void demote(Demotion demotion) {
    counters_.add(Count::kDemotions);
    const std::int64_t bytes = demotion.image->bytes();
    demotion.to->write(
        {demotion.id, std::move(demotion.image), bytes, Clock::now() + std::chrono::seconds(10), {}, [](Outcome) {}});
  }

  bool drop(const PieceId& id) {
    ExtentPtr dropped;  // given back after the lock
    const std::lock_guard lock(mutex_);
    const Slot slot = index_.find(id);
    if (slot == kNoSlot) return false;
    dropped = std::move(images_[slot]);
    index_.remove(slot, false);
    return true;
  }

  std::unique_ptr<Memory> memory_;
  Pinning pinning_;
  mutable std::mutex mutex_;
  Extents extents_;
  Index index_;
  std::vector<ExtentPtr> images_;  ///< by slot
  std::vector<Digest> spaces_;
  std::vector<Slot> found_;
  std::vector<Lower> lower_;  ///< by namespace
  Counters counters_;

  friend class Extent;
  friend class HostBuffer;
};

Extent::~Extent() {
  if (tier_ != nullptr) tier_->give(offset_, bytes_);
}

HostBuffer::HostBuffer(std::shared_ptr<HostTier> tier, ExtentPtr extent)
    : Buffer(tier->memory_->data() + extent->offset(), extent->bytes(), tier.get()),
      tier_(std::move(tier)),
      extent_(std::move(extent)) {}

Buffer::Region HostBuffer::region() const {
  return {{tier_->memory_->data(), static_cast<std::size_t>(tier_->memory_->size())}, tier_};
}

}  // namespace
}  // namespace kvstride::store

namespace kvstride {

TierPtr host_tier(const HostTierOptions& options) {
  if (options.num_bytes < store::kPage) {
    throw Error(ErrorCode::kArgument,
                fmt::format("HostTier: num_bytes is {}, at least {} are needed", options.num_bytes, store::kPage));
  }
  return std::make_shared<store::HostTier>(options);
}

}  // namespace kvstride
