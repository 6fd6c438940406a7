// SPDX-License-Identifier: Apache-2.0
// Images in staging memory; the last holder gives the place back.
#include "store/staging.h"

#include <utility>

namespace kvstride::store {

class Staging::Staged final : public Buffer {
 public:
  Staged(std::shared_ptr<Staging> staging, std::int64_t offset, std::int64_t bytes)
      : Buffer(staging->memory_.data() + offset, bytes, staging.get()), staging_(std::move(staging)), offset_(offset) {}
  ~Staged() override {
    const std::lock_guard lock(staging_->mutex_);
    staging_->extents_.give(offset_, bytes());
  }
  Region region() const override {
    return {{staging_->memory_.data(), static_cast<std::size_t>(staging_->memory_.size())}, staging_};
  }

 private:
  std::shared_ptr<Staging> staging_;
  std::int64_t offset_;
};

BufferPtr Staging::buffer(std::int64_t bytes) {
  bytes = whole_pages(bytes);
  std::optional<std::int64_t> offset;
  {
    const std::lock_guard lock(mutex_);
    offset = extents_.take(bytes);
  }
  return offset ? std::make_shared<Staged>(shared_from_this(), *offset, bytes) : nullptr;
}

}  // namespace kvstride::store
