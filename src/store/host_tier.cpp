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
      : Tier(std::make_shared<Admission>(options.admission)),
        memory_(options.shared_name.empty() ? std::make_unique<Memory>(options.num_bytes)
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
    std::vector<ExtentPtr> dropped;
    const std::lock_guard lock(mutex_);
    find_live(space, key, dropped);
    for (const Slot slot : found_) out.push_back({index_.heads(slot), index_.held(slot).pages * kPage});
  }

  std::size_t covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                      std::span<std::uint8_t> out) override {
    std::vector<ExtentPtr> dropped;
    const std::lock_guard lock(mutex_);
    if (admission_->has_time_to_live()) {
      for (const Key& key : keys) find_live(space, key, dropped);
    }
    return index_.covered(space, keys, heads, prefix, out);
  }

  bool probe(std::uint32_t, std::span<const Key>, Heads, bool, Clock::time_point) override { return false; }

  bool lends() const override { return true; }
  std::int64_t largest() const override { return memory_->size() / kPage * kPage; }

  BufferPtr buffer(std::int64_t bytes) override {
    bytes = whole_pages(bytes);
    if (bytes > largest()) return nullptr;
    std::optional<std::int64_t> offset;
    constexpr int kAtOnce = 8;
    for (int demotions = 0; !offset;) {
      std::optional<Demotion> demotion;
      {
        const std::lock_guard lock(mutex_);
        offset = extents_.take(bytes);
        if (!offset && !evict(demotions < kAtOnce ? &demotion : nullptr)) return nullptr;
      }
      if (demotion && demote(std::move(*demotion))) ++demotions;
    }
    return std::make_shared<HostBuffer>(shared_from_this(), std::make_shared<Extent>(this, *offset, bytes));
  }

  void give(std::int64_t offset, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    extents_.give(offset, bytes);
  }

  bool holds(const PieceId& id) override {
    std::vector<ExtentPtr> dropped;
    const std::lock_guard lock(mutex_);
    return find_live(id, dropped) != kNoSlot;
  }

  void read(ReadRequest request) override {
    const auto begin = Clock::now();
    ReadResult result;
    {
      std::vector<ExtentPtr> dropped;
      const std::lock_guard lock(mutex_);
      if (const Slot slot = find_live(request.id, dropped); slot != kNoSlot) {
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
      return request.finish(Outcome::kRefused);
    }
    BufferPtr image = request.image;
    if (image->home() != this || image->bytes() != whole_pages(request.bytes)) {
      image = buffer(request.bytes);
      if (!image) {
        counters_.add(Count::kRefusedFull);
        return request.finish(Outcome::kRefused);
      }
      std::copy_n(request.image->data(), request.bytes, image->data());
    }
    {
      std::vector<ExtentPtr> dropped;
      const std::lock_guard lock(mutex_);
      if (const Slot there = find_live(request.id, dropped); there != kNoSlot) {
        counters_.add(Count::kAlreadyThere);
        index_.touch(there);
      } else {
        const ExtentPtr& extent = static_cast<HostBuffer&>(*image).extent();
        const Slot slot =
            index_.insert(request.id, {place_of(begin), static_cast<std::uint32_t>(extent->bytes() / kPage)});
        if (slot >= images_.size()) images_.resize(std::max<std::size_t>(slot + 1, 2 * images_.size()));
        images_[slot] = extent;
        set_tenant(slot, request.tenant);
        admission_->holds(extent->bytes(), tenant_of(slot));
        request.admitted.written();
        counters_.add(Count::kWrites);
        counters_.add(Count::kWriteBytes, static_cast<std::uint64_t>(image->bytes()));
      }
    }
    counters_.write_seconds.add(Clock::now() - begin);
    image = nullptr;
    request.finish(Outcome::kOk);
  }

  void damaged(const PieceId& id) override {
    if (drop(id)) counters_.add(Count::kCorrupt);
  }

  bool remove(std::uint32_t space, const Key& key) override {
    std::vector<ExtentPtr> dropped;
    const std::lock_guard lock(mutex_);
    find_live(space, key, dropped);
    for (const Slot slot : found_) {
      dropped.emplace_back();  // may throw
      dropped.back() = take_out(slot, false);
    }
    counters_.add(Count::kRemoved, found_.size());
    return !found_.empty();
  }

  std::shared_ptr<void> pin(std::uint32_t space, const Key& key) override {
    auto pinned = std::make_shared<std::vector<HostBuffer>>();
    std::vector<ExtentPtr> dropped;
    const std::lock_guard lock(mutex_);
    find_live(space, key, dropped);
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
    if (const Slot slot = index_.find(id); slot != kNoSlot) index_.held(slot).place |= kOnlyHere;
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
  // Held::place: when it was written, and whether some tier below lacks it.
  static constexpr std::uint64_t kOnlyHere = 1;
  static std::uint64_t place_of(Clock::time_point written) {
    return static_cast<std::uint64_t>(Admission::Time(written.time_since_epoch()).count()) << 1;
  }
  bool is_expired(Slot slot) const {
    if (!admission_->has_time_to_live()) return false;
    const Admission::Time written(static_cast<std::int64_t>(index_.held(slot).place >> 1));
    return admission_->expired(written, Clock::now().time_since_epoch());
  }

  struct Demotion {
    PieceId id;
    BufferPtr image;
    std::shared_ptr<Tier> to;
    TenantName tenant;
  };
  struct Lower {
    std::weak_ptr<Tier> tier;
    std::uint32_t space = 0;
  };

  // The lock must be held for all of these; what they drop is given back after it.

  /// An entry's image; the entry goes.
  ExtentPtr take_out(Slot slot, bool remember) {
    ExtentPtr out = std::move(images_[slot]);
    admission_->released(out->bytes(), tenant_of(slot));
    if (slot < tenants_.size()) tenants_[slot] = nullptr;
    index_.remove(slot, remember);
    return out;
  }

  Slot live(Slot slot, std::vector<ExtentPtr>& dropped) {
    if (slot == kNoSlot || !is_expired(slot)) return slot;
    dropped.emplace_back();  // may throw
    dropped.back() = take_out(slot, false);
    counters_.add(Count::kExpired);
    return kNoSlot;
  }
  Slot find_live(const PieceId& id, std::vector<ExtentPtr>& dropped) { return live(index_.find(id), dropped); }
  /// Fills found_; what is too old goes.
  void find_live(std::uint32_t space, const Key& key, std::vector<ExtentPtr>& dropped) {
    found_.clear();
    index_.find(space, key, found_);
    std::erase_if(found_, [&](Slot slot) { return live(slot, dropped) == kNoSlot; });
  }

  void set_tenant(Slot slot, const TenantName& tenant) {
    if (!tenant && slot >= tenants_.size()) return;
    if (slot >= tenants_.size()) tenants_.resize(std::max<std::size_t>(slot + 1, images_.size()));
    tenants_[slot] = tenant;
  }
  Admission::Tenant tenant_of(Slot slot) {
    return slot < tenants_.size() && tenants_[slot] ? admission_->tenant(*tenants_[slot]) : Admission::kNameless;
  }

  /// Lets go of the entry whose turn it is, if nobody has it in hand. What a lower tier lacks goes to `demotion`, if
  /// that is given; its room is free when the lower tier is done with it.
  bool evict(std::optional<Demotion>* demotion) {
    const Slot slot = index_.victim([&](Slot at) { return images_[at].use_count() > 1; });
    if (slot == kNoSlot) return false;
    counters_.add(Count::kEvictions);
    if (!index_.was_read(slot)) counters_.add(Count::kEvictedUnread);
    PieceId id = index_.id(slot);
    const bool offered = (index_.held(slot).place & kOnlyHere) != 0 && demotion != nullptr && !is_expired(slot);
    TenantName tenant = slot < tenants_.size() ? tenants_[slot] : nullptr;
    ExtentPtr extent = take_out(slot, true);
    if (offered && id.space < lower_.size()) {
      if (std::shared_ptr<Tier> lower = lower_[id.space].tier.lock()) {
        id.space = lower_[id.space].space;
        *demotion = Demotion{std::move(id), std::make_shared<HostBuffer>(shared_from_this(), std::move(extent)),
                             std::move(lower), std::move(tenant)};
        return true;
      }
    }
    extents_.give(extent->offset(), extent->bytes());
    extent->disown();
    return true;
  }

  /// Whether the lower tier lacks it and admits it.
  bool demote(Demotion demotion) {
    if (demotion.to->holds(demotion.id)) return false;
    const std::int64_t bytes = demotion.image->bytes();
    Admitted admitted = demotion.to->admit(demotion.id, bytes, demotion.tenant);
    if (!admitted) {
      demotion.to->count_refusal(admitted.why());
      return false;
    }
    counters_.add(Count::kDemotions);
    demotion.to->write({demotion.id,
                        std::move(demotion.image),
                        bytes,
                        Clock::now() + std::chrono::seconds(10),
                        {},
                        [](Outcome) {},
                        std::move(admitted),
                        demotion.tenant});
    return true;
  }

  Counters& counters() override { return counters_; }

  bool drop(const PieceId& id) {
    ExtentPtr dropped;
    const std::lock_guard lock(mutex_);
    const Slot slot = index_.find(id);
    if (slot == kNoSlot) return false;
    dropped = take_out(slot, false);
    return true;
  }

  std::unique_ptr<Memory> memory_;
  Pinning pinning_;
  mutable std::mutex mutex_;
  Extents extents_;
  Index index_;
  std::vector<ExtentPtr> images_;    ///< by slot
  std::vector<TenantName> tenants_;  ///< by slot: who brought it, here and below; empty until somebody has a name
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
