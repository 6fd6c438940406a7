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
  const PieceId piece{0, job.keys[chunk], job.heads.stored()};
  if (!task.starved) ask(piece);
  std::vector<Offer> offers = offer(job, piece, bytes, tiers_.size());
  const bool held = offers.size() < tiers_.size();
  const std::optional<std::size_t> first = first_admitted(offers);
  if (!first || !fits(bytes)) {
    count_refusals(offers);
    if (held && !offers.empty()) only_here(piece);
    end(job, chunk, Stage::kQueued, held ? Outcome::kOk : Outcome::kRefused);
    leave();
    return Begun::kYes;
  }
  // A tier that does not take it shall not evict for it, unless no other one has so much memory.
  BufferPtr image = buffer_for(bytes, fits(bytes, *first) ? *first : 0);
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
  count_refusals(offers);
  auto stow = std::make_shared<Stow>();
  stow->job = task.job;
  stow->chunk = chunk;
  stow->held = held;
  stow->failed = std::erase_if(offers, [](const Offer& one) { return !one.admitted; }) > 0;
  stow->left = offers.size();
  const std::shared_ptr<StoreImpl> self = shared_from_this();
  for (Offer& one : offers) {
    WriteRequest request{in_tier(one.tier, piece), image,      bytes,     job.deadline, cancelled_by(task.job), {},
                         std::move(one.admitted),  job.tenant, job.more()};
    if (&one == &offers.back()) image = nullptr;  // who sees the put done can have the memory
    request.done = [self, stow](Outcome outcome) { self->wrote(stow, outcome); };
    tiers_[one.tier]->write(std::move(request));
  }
  return Begun::kYes;
}

/// Some tier did not take it. Those above may have it alone: they offer it again when they let it go.
void StoreImpl::only_here(const PieceId& piece) {
  for (std::size_t i = 0; i < tiers_.size(); ++i) tiers_[i]->only_here(in_tier(i, piece));
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
    const JobState& job = *stow->job;
    only_here({0, job.keys[stow->chunk], job.heads.stored()});
  }
  end(*stow->job, stow->chunk, Stage::kWaiting, stow->held ? Outcome::kOk : stow->worst.load());
  leave();
}

}  // namespace kvstride::store
