// SPDX-License-Identifier: Apache-2.0
// Gets: pieces that cover the heads are read and verified, then the blocks change.
#include <algorithm>
#include <array>
#include <cstring>

#include "kvstride/error.h"
#include "plan/program.h"
#include "store/store_impl.h"

namespace kvstride::store {
namespace {

constexpr int kMostLooks = 8;  ///< at files of other lengths than were known, in one get

}  // namespace

/// Pieces of all tiers that together have the heads that are wanted, upper tiers first; false where there are none.
bool StoreImpl::choose(Fetch& fetch) {
  const JobState& job = *fetch.job;
  const Key& key = job.keys[fetch.chunk];
  const Heads wanted = job.heads.stored();
  struct Candidate {
    std::size_t tier;
    Piece piece;
  };
  std::vector<Candidate> all;
  const auto collect = [&] {
    all.clear();
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < tiers_.size(); ++i) {
      pieces.clear();
      tiers_[i]->pieces(numbers_[i], key, pieces);
      for (const Piece& piece : pieces) {
        const auto failed = [&](const auto& one) { return one.first == i && one.second == piece.heads; };
        // A cache without heads needs a piece without, and the reverse.
        if ((piece.heads.count == 0) != (wanted.count == 0)) continue;
        if (std::none_of(fetch.refused.begin(), fetch.refused.end(), failed)) all.push_back({i, piece});
      }
    }
  };
  const auto cover = [&] {
    fetch.readings.clear();
    const std::int64_t last = wanted.first + wanted.count;
    std::int64_t head = wanted.first;
    do {
      const Candidate* best = nullptr;
      const auto end_of = [](const Candidate& one) { return one.piece.heads.first + one.piece.heads.count; };
      for (const Candidate& one : all) {
        if (wanted.count > 0 && (one.piece.heads.first > head || end_of(one) <= head)) continue;
        if (best == nullptr || (one.tier == best->tier && end_of(one) > end_of(*best))) best = &one;
      }
      if (best == nullptr) return false;
      const std::int64_t until = wanted.count > 0 ? std::min<std::int64_t>(end_of(*best), last) : head;
      Reading reading{best->tier, {numbers_[best->tier], key, best->piece.heads}};
      reading.first_head = head;
      reading.num_heads = until - head;
      reading.shared = fetch.readings.empty();
      reading.result.bytes = best->piece.bytes;
      fetch.readings.push_back(std::move(reading));
      head = until;
    } while (head < last);
    return true;
  };
  collect();
  if (cover()) return true;
  bool more = ask_far(*fetch.job);
  for (std::size_t i = 0; i < tiers_.size(); ++i) {
    if (!tiers_[i]->far()) more = tiers_[i]->probe(numbers_[i], {&key, 1}, wanted, false, Clock::now()) || more;
  }
  if (more) {
    collect();
    if (cover()) return true;
  }
  if (fetch.refused.empty()) count(all.empty() ? Tally::kMissAbsent : Tally::kMissHeads);
  return false;
}

/// Asks far tiers, once in a job's life, about all its keys; who comes meanwhile waits for that answer. Whether more
/// may be known than when the caller looked.
bool StoreImpl::ask_far(JobState& job) {
  const std::lock_guard lock(job.asking);
  if (!job.asked) {
    job.asked = true;
    for (std::size_t i = 0; i < tiers_.size(); ++i) {
      if (!tiers_[i]->far()) continue;
      tiers_[i]->probe(numbers_[i], job.keys, job.heads.stored(), false, Clock::now());
    }
  }
  return true;
}

/// What to read of each piece.
void StoreImpl::plan_reads(Fetch& fetch) {
  for (Reading& reading : fetch.readings) {
    const Heads has = reading.id.heads;
    reading.whole = fetch.everything || has.count == 0 || reading.num_heads == has.count;
    if (reading.whole) continue;
    const std::shared_ptr<const Shape> shape = shape_for(*fetch.job, fetch.chunk, has);
    reading.whole = shape->frame.image_bytes() != reading.result.bytes;  // not the stored order that we expect
  }
}

StoreImpl::Begun StoreImpl::begin_get(const std::shared_ptr<Fetch>& fetch) {
  JobState& job = *fetch->job;
  const std::size_t chunk = fetch->chunk;
  if (!choose(*fetch)) {
    give_up(*fetch);
    return Begun::kYes;
  }
  if (wait_for_prefetch(*fetch)) return Begun::kYes;
  if (job.verb == Verb::kPrefetch) {
    std::erase_if(fetch->readings, [](const Reading& one) { return one.tier == 0; });
    if (fetch->readings.empty()) {
      end(job, chunk, Stage::kQueued, Outcome::kOk);
      end(job, chunk, Stage::kWaiting, Outcome::kOk);
      leave();
      return Begun::kYes;
    }
  }
  plan_reads(*fetch);
  for (Reading& reading : fetch->readings) {
    if (!fetch->asked) ask(reading.id);
    if (reading.whole && may_promote(job)) {
      reading.offers = offer(job, reading.id, reading.result.bytes, reading.tier);
    }
  }
  fetch->asked = true;
  if (job.verb == Verb::kPrefetch && !some_wanted(*fetch)) {
    end(job, chunk, Stage::kQueued, Outcome::kRefused);
    end(job, chunk, Stage::kWaiting, Outcome::kRefused);
    leave();
    return Begun::kYes;
  }
  for (Reading& reading : fetch->readings) {
    if (tiers_[reading.tier]->lends()) continue;
    if (!fits(reading.result.bytes)) {
      end(job, chunk, Stage::kQueued, Outcome::kRefused);
      end(job, chunk, Stage::kWaiting, Outcome::kRefused);
      leave();
      return Begun::kYes;
    }
    // A whole image may stay in an upper tier.
    reading.into = buffer_for(reading.result.bytes, first_admitted(reading.offers).value_or(reading.tier));
    if (!reading.into && !(reading.into = buffer_for(reading.result.bytes, 0))) {
      fetch->readings.clear();
      return Begun::kStarved;
    }
  }
  if (job.stages[chunk].load() != Stage::kWaiting && !job.advance(chunk, Stage::kQueued, Stage::kWaiting)) {
    leave();
    return Begun::kYes;
  }
  const std::size_t num_readings = fetch->readings.size();
  fetch->left = num_readings;
  const std::shared_ptr<StoreImpl> self = shared_from_this();
  // When the last read is done `fetch` may be in another thread's hands: nothing of it is touched after that.
  for (std::size_t i = 0; i < num_readings; ++i) {
    Reading& reading = fetch->readings[i];
    ReadRequest request{reading.id, {}, std::move(reading.into), job.deadline, cancelled_by(fetch->job), {}};
    if (!reading.whole) {
      const Frame& frame = shape_for(job, chunk, reading.id.heads)->frame;
      const Bytes start = reading.shared ? frame.shared_range(true) : Bytes{0, frame.header_bytes()};
      const Bytes heads = frame.heads_range(reading.first_head - reading.id.heads.first, reading.num_heads);
      constexpr std::int64_t kGap = 64 << 10;  // less is read rather than skipped
      if (heads.begin <= start.end + kGap) {
        request.ranges = {{start.begin, std::max(start.end, heads.end)}};
      } else {
        request.ranges = {start, heads};
      }
    }
    request.done = [self, fetch, i](ReadResult result) {
      fetch->readings[i].result = std::move(result);
      if (fetch->left.fetch_sub(1) == 1) self->arrived(fetch);
    };
    request.more = job.more();
    tiers_[reading.tier]->read(std::move(request));
  }
  return Begun::kYes;
}

/// Somebody else is bringing up what would be read from a lower tier: the chunk begins anew when that is over, well or
/// not. Until then it is under way; its deadline ends it all the same.
bool StoreImpl::wait_for_prefetch(const Fetch& fetch) {
  const JobState& job = *fetch.job;
  const auto upper = [](const Reading& one) { return one.tier == 0; };
  if (fetch.brings || job.stages[fetch.chunk].load() != Stage::kQueued) return false;
  if (std::all_of(fetch.readings.begin(), fetch.readings.end(), upper)) return false;
  return bringing_.wait(job.keys[fetch.chunk], {fetch.job, fetch.chunk, {}});
}

void StoreImpl::arrived(const std::shared_ptr<Fetch>& fetch) {
  try {
    const std::lock_guard lock(mutex_);
    if (!stop_) {
      ready_.push_back(fetch);
      work_.notify_one();
      return;
    }
  } catch (...) {  // no memory
  }
  // The store has ended without it.
  end(*fetch->job, fetch->chunk, Stage::kWaiting, Outcome::kTimeout);
  leave();
}

/// Nothing is left to try.
void StoreImpl::give_up(Fetch& fetch) {
  const Outcome outcome = fetch.saw_damage    ? Outcome::kCorrupt
                          : fetch.saw_error   ? Outcome::kIoError
                          : fetch.saw_timeout ? Outcome::kTimeout
                          : fetch.saw_refusal ? Outcome::kRefused
                                              : Outcome::kMiss;
  fetch.readings.clear();
  end(*fetch.job, fetch.chunk, Stage::kQueued, outcome);
  end(*fetch.job, fetch.chunk, Stage::kWaiting, outcome);
  leave();
}

/// The shape of a whole image; null where the header is damaged, or another chunk's.
std::shared_ptr<const Shape> StoreImpl::shape_of(const Reading& reading, const Key& key) {
  const std::byte* image = reading.result.image->data();
  const auto bytes = static_cast<std::size_t>(reading.result.bytes);
  const std::optional<Header> header = parse_header({image, bytes});
  if (!header || header->digest != space_.digest() || !(header->key == key) ||
      header->content.heads != reading.id.heads) {
    return nullptr;
  }
  std::optional<Form> form;
  if (!header->content.order.empty() && !(form = form_of(space_, header->content))) return nullptr;
  return std::make_shared<Shape>(Shape{std::move(form), Frame(space_, header->content)});
}

void StoreImpl::finish_get(const std::shared_ptr<Fetch>& fetch) {
  JobState& job = *fetch->job;
  const Key& key = job.keys[fetch->chunk];
  if (job.stages[fetch->chunk].load() == Stage::kDone) return leave();
  try {
    std::vector<std::shared_ptr<const Shape>> shapes;
    bool again = false;
    bool reread = false;
    for (Reading& reading : fetch->readings) {
      const auto refuse = [&] {
        fetch->refused.emplace_back(reading.tier, reading.id.heads);
        again = true;
      };
      switch (reading.result.outcome) {
        case Outcome::kOk: break;
        case Outcome::kCorrupt:
          fetch->saw_damage = true;
          tiers_[reading.tier]->damaged(reading.id);
          break;
        case Outcome::kIoError: fetch->saw_error = true; break;
        case Outcome::kTimeout: fetch->saw_timeout = true; break;
        case Outcome::kRefused: fetch->saw_refusal = true; break;
        case Outcome::kMiss:
          // Replaced meanwhile; who replaces files all the time is not followed for ever.
          if (reading.result.bytes > 0 && fetch->other_lengths < kMostLooks) {
            ++fetch->other_lengths;
            fetch->everything = again = true;
            continue;
          }
          count(Tally::kMissVanished);
          break;
      }
      if (reading.result.outcome != Outcome::kOk) {
        refuse();
        continue;
      }
      const std::byte* image = reading.result.image->data();
      std::shared_ptr<const Shape> shape;
      if (job.verb != Verb::kPrefetch) shape = shape_for(job, fetch->chunk, reading.id.heads);
      if (!shape || shape->frame.image_bytes() != reading.result.bytes || !shape->frame.matches(image, key)) {
        // Damaged, or in an order of its own: the whole image tells.
        if (!reading.whole) {
          reread = true;
          continue;
        }
        shape = shape_of(reading, key);
        if (shape && shape->frame.image_bytes() != reading.result.bytes) shape = nullptr;
      }
      const bool parts = shape && shape->frame.content().head_bytes > 0 && !reading.whole;
      if (shape && (parts ? shape->frame.verify(image, reading.shared, reading.first_head - reading.id.heads.first,
                                                reading.num_heads)
                          : shape->frame.verify(image))) {
        shapes.push_back(std::move(shape));
        continue;
      }
      fetch->saw_damage = true;
      tiers_[reading.tier]->damaged(reading.id);
      refuse();
    }
    if (again || reread) {
      fetch->everything = fetch->everything || reread;
      for (Reading& reading : fetch->readings) reading.result.image = nullptr;
      if (begin_get(fetch) == Begun::kStarved) {
        // Rather than wait with nothing to wait for: a miss, and the next get reads the other copy.
        fetch->saw_refusal = true;
        give_up(*fetch);
      }
      return;
    }
    job.verb == Verb::kPrefetch ? keep(*fetch) : deliver(*fetch, shapes);
  } catch (...) {  // no memory
    end(job, fetch->chunk, Stage::kWaiting, Outcome::kRefused);
    leave();
  }
}

/// Everything is verified: the caller's memory changes.
void StoreImpl::deliver(Fetch& fetch, const std::vector<std::shared_ptr<const Shape>>& shapes) {
  JobState& job = *fetch.job;
  const std::size_t chunk = fetch.chunk;
  std::vector<std::unique_ptr<plan::Program>> programs;
  Tally why = Tally::kNumTallies;
  try {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const Reading& reading = fetch.readings[i];
      const std::byte* payload = reading.result.image->data() + shapes[i]->frame.header_bytes();
      if (!job.cache) {
        if (shapes[i]->form ||
            shapes[i]->frame.content().payload_bytes() != static_cast<std::int64_t>(job.to[chunk].size())) {
          why = Tally::kMissSize;
        }
        continue;
      }
      if (!shapes[i]->form) {
        why = Tally::kMissOther;
        break;
      }
      plan::BuildOptions build;
      const Form& form = *shapes[i]->form;
      if (form.has_heads) {
        build.plan.heads =
            RangePair{reading.first_head - reading.id.heads.first,
                      job.heads.cache_first + reading.first_head - job.heads.stored_first, reading.num_heads};
      }
      if (!reading.shared) build.planes = form.head_planes;
      programs.push_back(
          std::make_unique<plan::Program>(plan::recipe_for("get", form.cache, *job.cache, std::move(build))));
      programs.back()->bind_tokens(std::array<std::int64_t, 1>{0}, job.blocks_of(chunk),
                                   {0, 0, space_.fields().block_size});
      programs.back()->move_source(payload, plan::nominal());
    }
  } catch (const Error&) {  // planes of another kind under the same names
    why = Tally::kMissOther;
  }
  if (why != Tally::kNumTallies) {
    count(why);
    end(job, chunk, Stage::kWaiting, Outcome::kMiss);
    return leave();
  }
  if (!job.advance(chunk, Stage::kWaiting, Stage::kMoving)) return leave();
  try {  // nothing in the host's memory throws
    for (const auto& program : programs) program->run_here(program->num_bytes() >= kStreamed);
  } catch (...) {
    for (Reading& reading : fetch.readings) keep_unsettled(job.device(), std::move(reading.result.image));
    fetch.readings.clear();
    end(job, chunk, Stage::kMoving, Outcome::kIoError);
    return leave();
  }
  if (!job.cache) {
    std::memcpy(job.to[chunk].data(), fetch.readings[0].result.image->data() + shapes[0]->frame.header_bytes(),
                job.to[chunk].size());
  }
  // Before the end: who removes the chunk after its get shall not find it in an upper tier.
  try {
    promote(fetch);
  } catch (...) {  // no memory
  }
  fetch.readings.clear();  // who sees the get done can have the memory
  end(job, chunk, Stage::kMoving, Outcome::kOk);
  leave();
}

/// The end of a prefetch: what was verified goes to the upper tiers.
void StoreImpl::keep(Fetch& fetch) {
  promote(fetch, fetch.job->take_token(fetch.chunk));
  fetch.readings.clear();
  end(*fetch.job, fetch.chunk, Stage::kWaiting, Outcome::kOk);
  leave();
}

/// Whole images of lower tiers go to the upper ones that admit them; `token` goes when each is in the first of these.
void StoreImpl::promote(Fetch& fetch, const std::shared_ptr<void>& token) {
  for (Reading& reading : fetch.readings) {
    count_refusals(reading.offers);
    const std::optional<std::size_t> first = first_admitted(reading.offers);
    for (Offer& one : reading.offers) {
      if (!one.admitted) continue;
      count(Tally::kPromoted);
      tiers_[one.tier]->write({in_tier(one.tier, reading.id),
                               reading.result.image,
                               reading.result.bytes,
                               fetch.job->deadline,
                               {},
                               [held = one.tier == first ? token : nullptr](Outcome) {},
                               std::move(one.admitted),
                               fetch.job->tenant});
    }
  }
}

/// Of a prefetch only what an upper tier takes is read; whether that is anything.
bool StoreImpl::some_wanted(Fetch& fetch) {
  std::erase_if(fetch.readings, [&](const Reading& reading) {
    const bool wanted = first_admitted(reading.offers).has_value();
    if (!wanted) count_refusals(reading.offers);
    return !wanted;
  });
  return !fetch.readings.empty();
}

}  // namespace kvstride::store
