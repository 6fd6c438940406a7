// SPDX-License-Identifier: Apache-2.0
// Puts: blocks are gathered into an image, sealed, and given to the tiers that lack it.
#include <array>
#include <cstring>

#include "plan/program.h"
#include "store/store_impl.h"

namespace kvstride::store {

StoreImpl::Begun StoreImpl::begin_put(const Task& task) {
  JobState& job = *task.job;
  const std::size_t chunk = task.chunk;
  const std::shared_ptr<const Shape> shape = shape_for(job, chunk, job.heads.stored());
  const std::int64_t bytes = shape->frame.image_bytes();
  std::vector<std::size_t> lacking;
  const auto id_in = [&](std::size_t tier) { return PieceId{numbers_[tier], job.keys[chunk], job.heads.stored()}; };
  for (std::size_t i = 0; i < tiers_.size(); ++i) {
    if (!tiers_[i]->holds(id_in(i))) lacking.push_back(i);
  }
  if (lacking.empty() || !fits(bytes)) {
    end(job, chunk, Stage::kQueued, lacking.empty() ? Outcome::kOk : Outcome::kRefused);
    leave();
    return Begun::kYes;
  }
  BufferPtr image = buffer_for(bytes, 0);
  if (!image) return Begun::kStarved;
  if (!job.advance(chunk, Stage::kQueued, Stage::kMoving)) {
    leave();
    return Begun::kYes;
  }
  try {
    fill(job, chunk, *shape, image->data());
  } catch (...) {  // nothing that check_cache() lets pass ends here but a device, or a lack of memory
    const bool device = !job.device().on_host();
    if (device) keep_unsettled(job.device(), std::move(image));
    end(job, chunk, Stage::kMoving, device ? Outcome::kIoError : Outcome::kRefused);
    leave();
    return Begun::kYes;
  }
  job.stages[chunk].store(Stage::kWaiting);
  auto stow = std::make_shared<Stow>();
  stow->job = task.job;
  stow->chunk = chunk;
  stow->left = lacking.size();
  stow->held = lacking.size() < tiers_.size();
  const std::shared_ptr<StoreImpl> self = shared_from_this();
  for (const std::size_t i : lacking) {
    WriteRequest request{id_in(i), image, bytes, job.deadline, cancelled_by(task.job), {}};
    if (i == lacking.back()) image = nullptr;  // who sees the put done can have the memory
    request.done = [self, stow](Outcome outcome) { self->wrote(stow, outcome); };
    tiers_[i]->write(std::move(request));
  }
  return Begun::kYes;
}

void StoreImpl::fill(const JobState& job, std::size_t chunk, const Shape& shape, std::byte* image) {
  std::byte* payload = image + shape.frame.header_bytes();
  if (!job.cache) {
    std::memcpy(payload, job.from[chunk].data(), job.from[chunk].size());
  } else {
    plan::BuildOptions build;
    if (shape.form->has_heads) build.plan.heads = RangePair{job.heads.cache_first, 0, job.heads.count};
    plan::Program program(plan::recipe_for("put", *job.cache, shape.form->cache, std::move(build)));
    program.bind_tokens(job.blocks_of(chunk), std::array<std::int64_t, 1>{0}, {0, 0, space_.fields().block_size});
    program.move_destination(payload, plan::nominal());
    program.run_here(false);  // it is hashed next
  }
  shape.frame.seal(image, job.keys[chunk]);
}

void StoreImpl::wrote(const std::shared_ptr<Stow>& stow, Outcome outcome) {
  if (outcome == Outcome::kOk) {
    stow->held = true;
    if (options_.write_behind) end(*stow->job, stow->chunk, Stage::kWaiting, Outcome::kOk);
  } else {
    stow->worst = outcome;
    stow->failed = true;
  }
  if (stow->left.fetch_sub(1) > 1) return;
  if (stow->held && stow->failed) {
    // The upper tiers may have it alone: they pass it on when they let it go.
    const JobState& job = *stow->job;
    for (std::size_t i = 0; i < tiers_.size(); ++i) {
      tiers_[i]->only_here({numbers_[i], job.keys[stow->chunk], job.heads.stored()});
    }
  }
  end(*stow->job, stow->chunk, Stage::kWaiting, stow->held ? Outcome::kOk : stow->worst.load());
  leave();
}

}  // namespace kvstride::store
