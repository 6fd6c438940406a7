// SPDX-License-Identifier: Apache-2.0
// The store: requests over tiers. Its threads convert and check; tiers do their own I/O.
#include "kvstride/store.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "kvstride/error.h"
#include "plan/program.h"
#include "store/job.h"
#include "store/tier.h"

namespace kvstride::store {
namespace {

/// What the store counts beside its tiers: outcomes by verb, and why chunks were missed.
enum class Tally : std::uint8_t {
  kPutOk,  // … the outcomes in their order
  kGetOk = kPutOk + 6,
  kMissAbsent = kGetOk + 6,
  kMissHeads,
  kMissVanished,
  kMissOther,
  kMissSize,
  kPromoted,
  kUnreachable,
  kNumTallies
};
constexpr std::array<const char*, 7> kTallyNames{"miss_absent",       "miss_heads",      "miss_vanished",
                                                 "miss_other_planes", "miss_other_size", "promotions",
                                                 "unreachable_prefix"};

/// One piece that a get reads.
struct Reading {
  std::size_t tier;
  PieceId id;
  std::int64_t first_head = 0;  ///< of the model's: the part that is taken from this piece
  std::int64_t num_heads = 0;
  bool shared = false;  ///< the planes without heads are taken from it
  bool whole = false;
  BufferPtr into;
  ReadResult result;
};

/// A get under way.
struct Fetch {
  std::shared_ptr<JobState> job;
  std::size_t chunk = 0;
  std::vector<Reading> readings;
  std::atomic<std::size_t> left{0};
  bool saw_damage = false;
  bool saw_error = false;
  bool saw_timeout = false;
  bool saw_refusal = false;
  bool everything = false;                             ///< read whole images: a header was not the expected one
  std::vector<std::pair<std::size_t, Heads>> refused;  ///< pieces that failed before
};

/// A put under way.
struct Stow {
  std::shared_ptr<JobState> job;
  std::size_t chunk = 0;
  std::atomic<std::size_t> left{0};
  std::atomic<bool> held{false};
  std::atomic<Outcome> worst{Outcome::kRefused};
};

/// How images of some heads look; no form: raw bytes.
struct Shape {
  std::optional<Form> form;
  Frame frame;
};

/// Bytes from which on a chunk is written past the caches: more than a core's own cache holds.
constexpr std::int64_t kStreamed = 1 << 20;

struct Task {
  std::shared_ptr<JobState> job;
  std::size_t chunk = 0;
};

}  // namespace

class StoreImpl : public std::enable_shared_from_this<StoreImpl> {
 public:
  StoreImpl(std::vector<TierPtr> tiers, Namespace space, const StoreOptions& options)
      : tiers_(std::move(tiers)), space_(std::move(space)), options_(options) {
    if (tiers_.empty()) throw Error(ErrorCode::kArgument, "Store: no tiers are given");
    for (const TierPtr& tier : tiers_) {
      if (!tier) throw Error(ErrorCode::kArgument, "Store: a tier is null");
      numbers_.push_back(tier->space(space_));
    }
    for (std::size_t i = 0; i < tiers_.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (tiers_[i] == tiers_[j]) throw Error(ErrorCode::kArgument, "Store: a tier is given twice");
        tiers_[i]->expect_memory(tiers_[j]->memory());
      }
    }
  }

  void start() {
    int threads = options_.num_threads;
    if (threads <= 0) threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 4U));
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    threads_.emplace_back([this] { watch(); });
  }

  Job submit(std::shared_ptr<JobState> job) {
    check_process();
    const std::size_t chunks = job->keys.size();
    std::size_t taken = 0;
    {
      const std::lock_guard lock(mutex_);
      if (!closed_) {
        taken = std::min(chunks, options_.queue_chunks - std::min(options_.queue_chunks, waiting_.size()));
        for (std::size_t i = 0; i < taken; ++i) waiting_.push_back({job, i});
        if (taken > 0) jobs_.insert({job->deadline, job});
      }
    }
    work_.notify_all();
    watch_.notify_one();
    for (std::size_t i = taken; i < chunks; ++i) end(*job, i, Stage::kQueued, Outcome::kRefused);
    return Job(std::move(job));
  }

  /// A forked child has none of the threads.
  void check_process() const {
    if (getpid() == pid_) return;
    throw Error(ErrorCode::kStore, fmt::format("Store: it belongs to process {}; open one after the fork", pid_));
  }

  std::shared_ptr<JobState> job(Verb verb, std::span<const Key> keys, const RequestOptions& options) {
    auto out = std::make_shared<JobState>(keys.size());
    out->verb = verb;
    out->keys.assign(keys.begin(), keys.end());
    out->after = options.after;
    out->start = Clock::now();
    const std::chrono::nanoseconds time = options.deadline.value_or(options_.deadline);
    // Far deadlines would overflow the clock.
    out->deadline = out->start + std::min<std::chrono::nanoseconds>(time, std::chrono::hours(24 * 365));
    return out;
  }

  Job transfer(const char* name, Verb verb, std::span<const Key> keys, const Cache& cache,
               std::span<const std::int64_t> blocks, const RequestOptions& options) {
    std::shared_ptr<JobState> out = job(verb, keys, options);
    std::optional<HeadMap> heads;
    if (options.heads) heads = HeadMap{options.heads->cache_first, options.heads->stored_first, options.heads->count};
    out->heads = check_cache(name, space_, cache.layout(), heads);
    out->ratio = space_.fields().block_size / cache.layout().geometry().block_size;
    out->blocks.assign(blocks.begin(), blocks.end());
    if (out->blocks.size() != keys.size() * static_cast<std::size_t>(out->ratio)) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: {} blocks for {} keys, {} a key are needed", name,
                                                    blocks.size(), keys.size(), out->ratio));
    }
    const std::int64_t limit = cache.layout().geometry().num_blocks;
    for (std::size_t i = 0; i < out->blocks.size(); ++i) {
      if (out->blocks[i] < 0 || out->blocks[i] >= limit) {
        throw Error(ErrorCode::kBlockIndex,
                    fmt::format("{}: block id {} in blocks[{}] is outside the cache (num_blocks "
                                "is {})",
                                name, out->blocks[i], i, limit));
      }
    }
    if (verb == Verb::kGet) {
      if (cache.read_only()) throw Error(ErrorCode::kArgument, fmt::format("{}: the cache is read-only", name));
      std::vector<std::int64_t> sorted = out->blocks;
      std::sort(sorted.begin(), sorted.end());
      const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
      if (twice != sorted.end()) {
        throw Error(ErrorCode::kArgument, fmt::format("{}: block {} is given twice", name, *twice));
      }
    }
    out->cache.emplace(cache);
    return submit(std::move(out));
  }

  Job transfer_bytes(const char* name, Verb verb, std::span<const Key> keys,
                     std::vector<std::span<const std::byte>> from, std::vector<std::span<std::byte>> to,
                     const RequestOptions& options) {
    const std::size_t given = verb == Verb::kPutBytes ? from.size() : to.size();
    if (given != keys.size()) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: {} buffers for {} keys", name, given, keys.size()));
    }
    if (!space_.fields().raw) {
      throw Error(ErrorCode::kArgument,
                  fmt::format("{}: a namespace with raw= is needed: what the bytes depend on, such as layout, "
                              "instruction set, tensor-parallel size and rank",
                              name));
    }
    if (options.heads) throw Error(ErrorCode::kArgument, fmt::format("{}: raw bytes have no heads", name));
    for (std::size_t i = 0; i < given; ++i) {
      if ((verb == Verb::kPutBytes ? from[i].size() : to[i].size()) == 0) {
        throw Error(ErrorCode::kArgument, fmt::format("{}: buffer {} is empty", name, i));
      }
    }
    std::shared_ptr<JobState> out = job(verb, keys, options);
    out->from = std::move(from);
    out->to = std::move(to);
    return submit(std::move(out));
  }

  /// What a reader of all, or of `heads`, needs.
  Heads want(const std::optional<Range>& heads) const {
    const std::int64_t limit = space_.fields().num_kv_heads;
    if (!heads) return {0, static_cast<std::uint16_t>(limit)};
    if (heads->first < 0 || heads->count < 1 || heads->first > limit || heads->count > limit - heads->first) {
      throw Error(ErrorCode::kArgument,
                  fmt::format("lookup: heads: {} from {} of the namespace's {}", heads->count, heads->first, limit));
    }
    return {static_cast<std::uint16_t>(heads->first), static_cast<std::uint16_t>(heads->count)};
  }

  std::size_t lookup(std::span<const Key> keys, Heads heads, bool prefix, std::vector<std::uint8_t>& out);
  StoreMetrics metrics() const;
  bool flush(std::chrono::nanoseconds time);
  void close();
  void count(Tally tally, std::uint64_t by = 1) {
    tallies_[static_cast<std::size_t>(tally)].fetch_add(by, std::memory_order_relaxed);
  }

  const std::vector<TierPtr> tiers_;
  std::vector<std::uint32_t> numbers_;  ///< of the namespace, in each tier
  const Namespace space_;
  const StoreOptions options_;
  const pid_t pid_ = getpid();

 private:
  enum class Begun { kYes, kLater, kStarved };

  // The threads.
  void work();
  void watch();
  Begun begin(const Task& task);
  void end(JobState& job, std::size_t chunk, Stage stage, Outcome outcome);
  bool is_ready(const JobState& job);
  void leave();

  // Puts.
  Begun begin_put(const Task& task);
  void fill(const JobState& job, std::size_t chunk, const Shape& shape, std::byte* image);
  void wrote(const std::shared_ptr<Stow>& stow, Outcome outcome);

  // Gets.
  Begun begin_get(const std::shared_ptr<Fetch>& fetch);
  bool choose(Fetch& fetch);
  void plan_reads(Fetch& fetch);
  void arrived(const std::shared_ptr<Fetch>& fetch);
  void finish_get(const std::shared_ptr<Fetch>& fetch);
  void give_up(Fetch& fetch);
  void deliver(Fetch& fetch, const std::vector<std::shared_ptr<const Shape>>& shapes);
  void promote(Fetch& fetch);

  std::shared_ptr<const Shape> shape_for(const JobState& job, std::size_t chunk, Heads heads);
  std::shared_ptr<const Shape> shape_of(const Reading& reading, const Key& key);
  std::shared_ptr<const Shape> shape_for_new(const JobState& job, std::size_t bytes, Heads heads) const;
  BufferPtr buffer_for(std::int64_t bytes, std::size_t first_tier);
  bool fits(std::int64_t bytes) const;

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable watch_;
  std::condition_variable idle_;
  std::deque<Task> waiting_;                                // not started
  std::deque<std::shared_ptr<Fetch>> ready_;                // read, to be checked; hold memory, so they go first
  std::deque<std::pair<Clock::time_point, Task>> delayed_;  // their `after` said no
  Clock::time_point starved_until_{};                       // no buffer was free
  std::multimap<Clock::time_point, std::weak_ptr<JobState>> jobs_;
  std::size_t under_way_ = 0;  // puts and gets between begin and their last step
  bool closed_ = false;
  bool stop_ = false;
  std::vector<std::thread> threads_;

  std::mutex shapes_mutex_;
  std::map<std::string, std::shared_ptr<const Shape>> shapes_;
  std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(Tally::kNumTallies)> tallies_{};
  Histogram put_seconds_;
  Histogram get_seconds_;
};

void StoreImpl::end(JobState& job, std::size_t chunk, Stage stage, Outcome outcome) {
  if (!job.claim(chunk, stage)) return;
  // Counted first: who sees the job done sees it counted.
  const bool put = is_put(job.verb);
  const auto first = static_cast<std::size_t>(put ? Tally::kPutOk : Tally::kGetOk);
  tallies_[first + static_cast<std::size_t>(outcome)].fetch_add(1, std::memory_order_relaxed);
  (put ? put_seconds_ : get_seconds_).add(Clock::now() - job.start);
  job.settle(chunk, outcome);
}

bool StoreImpl::is_ready(const JobState& job) {
  if (!job.after) return true;
  try {
    return job.after();
  } catch (...) {
    return false;  // it must not throw; the deadline ends it
  }
}

/// Threads check what has been read before they start anything new: that is what gives memory back.
void StoreImpl::work() {
  constexpr auto kPause = std::chrono::microseconds(200);
  std::unique_lock lock(mutex_);
  while (true) {
    if (!ready_.empty()) {
      const std::shared_ptr<Fetch> fetch = std::move(ready_.front());
      ready_.pop_front();
      lock.unlock();
      finish_get(fetch);
      lock.lock();
      continue;
    }
    if (stop_) return;
    const Clock::time_point now = Clock::now();
    if (!delayed_.empty() && delayed_.front().first <= now) {
      waiting_.push_front(std::move(delayed_.front().second));
      delayed_.pop_front();
    }
    if (!waiting_.empty() && starved_until_ <= now) {
      const Task task = std::move(waiting_.front());
      waiting_.pop_front();
      ++under_way_;
      lock.unlock();
      const Begun begun = begin(task);
      lock.lock();
      if (begun != Begun::kYes) {
        if (begun == Begun::kLater) {
          delayed_.emplace_back(Clock::now() + kPause, task);
        } else {
          waiting_.push_front(task);
          starved_until_ = Clock::now() + kPause;
        }
        if (--under_way_ == 0) idle_.notify_all();
      }
      continue;
    }
    if (!waiting_.empty()) {
      work_.wait_until(lock, starved_until_);
    } else if (!delayed_.empty()) {
      work_.wait_until(lock, delayed_.front().first);
    } else {
      work_.wait(lock);
    }
  }
}

/// Ends what is past its deadline.
void StoreImpl::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (jobs_.empty()) {
      watch_.wait(lock);
      continue;
    }
    if (jobs_.begin()->first > Clock::now()) {
      watch_.wait_until(lock, jobs_.begin()->first);
      continue;
    }
    const std::shared_ptr<JobState> job = jobs_.begin()->second.lock();
    jobs_.erase(jobs_.begin());
    if (!job) continue;
    lock.unlock();
    for (std::size_t i = 0; i < job->keys.size(); ++i) {
      end(*job, i, Stage::kQueued, Outcome::kTimeout);
      end(*job, i, Stage::kWaiting, Outcome::kTimeout);
    }
    lock.lock();
    // What moves memory at this moment is looked at again.
    if (job->left.load() > 0) jobs_.insert({Clock::now() + std::chrono::milliseconds(5), job});
  }
}

StoreImpl::Begun StoreImpl::begin(const Task& task) {
  JobState& job = *task.job;
  if (job.cancelled) end(job, task.chunk, Stage::kQueued, Outcome::kRefused);
  if (job.stages[task.chunk].load() == Stage::kDone) {
    leave();
    return Begun::kYes;
  }
  if (!is_ready(job)) return Begun::kLater;
  try {
    if (is_put(job.verb)) return begin_put(task);
    auto fetch = std::make_shared<Fetch>();
    fetch->job = task.job;
    fetch->chunk = task.chunk;
    return begin_get(fetch);
  } catch (...) {  // no memory
    end(job, task.chunk, Stage::kQueued, Outcome::kRefused);
    end(job, task.chunk, Stage::kWaiting, Outcome::kRefused);
    leave();
    return Begun::kYes;
  }
}

void StoreImpl::leave() {
  const std::lock_guard lock(mutex_);
  if (--under_way_ == 0) idle_.notify_all();
}

/// Memory for an image: of a tier that can keep it, else of one that is fast with it.
BufferPtr StoreImpl::buffer_for(std::int64_t bytes, std::size_t first_tier) {
  for (std::size_t i = first_tier; i < tiers_.size(); ++i) {
    if (BufferPtr out = tiers_[i]->buffer(bytes)) return out;
  }
  return nullptr;
}

bool StoreImpl::fits(std::int64_t bytes) const {
  return std::any_of(tiers_.begin(), tiers_.end(), [&](const TierPtr& tier) { return bytes <= tier->largest(); });
}

/// The shape of what a put writes, or of what a get expects of a piece with these heads.
std::shared_ptr<const Shape> StoreImpl::shape_for(const JobState& job, std::size_t chunk, Heads heads) {
  std::string name;
  const bool raw = !job.cache;
  const std::size_t bytes = job.verb == Verb::kPutBytes ? job.from[chunk].size() : raw ? job.to[chunk].size() : 0;
  if (raw) {
    name = fmt::format("raw {}", bytes);
  } else {
    name = fmt::format("{} {}", heads.first, heads.count);
    for (const Plane& plane : job.cache->layout().planes()) name += plane.has_head ? " h" : " -";
  }
  const std::lock_guard lock(shapes_mutex_);
  std::shared_ptr<const Shape>& out = shapes_[name];
  if (out) return out;
  if (shapes_.size() > 1024) {  // raw bytes of ever other sizes
    shapes_.clear();
    return shape_for_new(job, bytes, heads);
  }
  out = shape_for_new(job, bytes, heads);
  return out;
}

std::shared_ptr<const Shape> StoreImpl::shape_for_new(const JobState& job, std::size_t bytes, Heads heads) const {
  if (!job.cache) {
    return std::make_shared<Shape>(Shape{{}, Frame(space_, Content{"", {}, static_cast<std::int64_t>(bytes), 0})});
  }
  Form form = stored_form(space_, job.cache->layout(), heads);
  Frame frame(space_, form.content);
  return std::make_shared<Shape>(Shape{std::move(form), std::move(frame)});
}

// ---------------------------------------------------------------------------------------------------------------- puts

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
  const BufferPtr image = buffer_for(bytes, 0);
  if (!image) return Begun::kStarved;
  if (!job.advance(chunk, Stage::kQueued, Stage::kMoving)) {
    leave();
    return Begun::kYes;
  }
  try {
    fill(job, chunk, *shape, image->data());
  } catch (...) {  // nothing that check_cache() lets pass ends here but a lack of memory
    end(job, chunk, Stage::kMoving, Outcome::kRefused);
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
    tiers_[i]->write(
        {id_in(i), image, bytes, job.deadline, [self, stow](Outcome outcome) { self->wrote(stow, outcome); }});
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
    program.move_destination(payload, Form::nominal());
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
  }
  if (stow->left.fetch_sub(1) > 1) return;
  end(*stow->job, stow->chunk, Stage::kWaiting, stow->held ? Outcome::kOk : stow->worst.load());
  leave();
}

// ---------------------------------------------------------------------------------------------------------------- gets

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
  bool more = false;
  for (std::size_t i = 0; i < tiers_.size(); ++i)
    more = tiers_[i]->probe(numbers_[i], {&key, 1}, wanted, false) || more;
  if (more) {
    collect();
    if (cover()) return true;
  }
  if (fetch.refused.empty()) count(all.empty() ? Tally::kMissAbsent : Tally::kMissHeads);
  return false;
}

/// What to read of each piece.
void StoreImpl::plan_reads(Fetch& fetch) {
  for (Reading& reading : fetch.readings) {
    const Heads has = reading.id.heads;
    reading.whole = fetch.everything || has.count == 0 || (reading.shared && reading.num_heads == has.count);
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
  plan_reads(*fetch);
  for (Reading& reading : fetch->readings) {
    if (tiers_[reading.tier]->lends()) continue;
    if (!fits(reading.result.bytes)) {
      end(job, chunk, Stage::kQueued, Outcome::kRefused);
      end(job, chunk, Stage::kWaiting, Outcome::kRefused);
      leave();
      return Begun::kYes;
    }
    // A whole image may stay in an upper tier.
    reading.into = buffer_for(reading.result.bytes, options_.promote && reading.whole ? 0 : reading.tier);
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
    ReadRequest request{reading.id, {}, std::move(reading.into), job.deadline, {}};
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
    tiers_[reading.tier]->read(std::move(request));
  }
  return Begun::kYes;
}

void StoreImpl::arrived(const std::shared_ptr<Fetch>& fetch) {
  {
    const std::lock_guard lock(mutex_);
    if (!stop_) {
      ready_.push_back(fetch);
      work_.notify_one();
      return;
    }
  }
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

/// The shape of an image whose header was read; null where the header is damaged, or another chunk's.
std::shared_ptr<const Shape> StoreImpl::shape_of(const Reading& reading, const Key& key) {
  const std::byte* image = reading.result.image->data();
  const auto bytes = static_cast<std::size_t>(reading.whole ? reading.result.bytes : kPage);
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
        case Outcome::kCorrupt: fetch->saw_damage = true; break;
        case Outcome::kIoError: fetch->saw_error = true; break;
        case Outcome::kTimeout: fetch->saw_timeout = true; break;
        case Outcome::kRefused: fetch->saw_refusal = true; break;
        case Outcome::kMiss: count(Tally::kMissVanished); break;
      }
      if (reading.result.outcome != Outcome::kOk) {
        refuse();
        continue;
      }
      const std::byte* image = reading.result.image->data();
      std::shared_ptr<const Shape> shape = shape_for(job, fetch->chunk, reading.id.heads);
      if (shape->frame.image_bytes() != reading.result.bytes || !shape->frame.matches(image, key)) {
        shape = shape_of(reading, key);
        if (shape && !reading.whole) {  // sound, but not where we looked
          reread = true;
          continue;
        }
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
    deliver(*fetch, shapes);
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
      programs.back()->move_source(payload, Form::nominal());
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
  for (const auto& program : programs) program->run_here(program->num_bytes() >= kStreamed);
  if (!job.cache) {
    std::memcpy(job.to[chunk].data(), fetch.readings[0].result.image->data() + shapes[0]->frame.header_bytes(),
                job.to[chunk].size());
  }
  end(job, chunk, Stage::kMoving, Outcome::kOk);
  if (options_.promote) promote(fetch);
  fetch.readings.clear();
  leave();
}

/// Whole images of lower tiers go to the upper ones.
void StoreImpl::promote(Fetch& fetch) {
  for (Reading& reading : fetch.readings) {
    if (!reading.whole) continue;
    for (std::size_t i = 0; i < reading.tier; ++i) {
      const PieceId id{numbers_[i], reading.id.key, reading.id.heads};
      if (tiers_[i]->holds(id)) continue;
      count(Tally::kPromoted);
      tiers_[i]->write({id, reading.result.image, reading.result.bytes, fetch.job->deadline, [](Outcome) {}});
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- the
// rest

std::size_t StoreImpl::lookup(std::span<const Key> keys, Heads heads, bool prefix, std::vector<std::uint8_t>& out) {
  check_process();
  out.assign(keys.size(), 0);
  std::size_t leading = 0;
  std::vector<std::uint8_t> one(keys.size());
  for (std::size_t i = 0; i < tiers_.size() && leading < keys.size(); ++i) {
    // Of a prefix only what the tiers above have not counted.
    const std::size_t from = prefix ? leading : 0;
    const std::span<std::uint8_t> part(one.data() + from, keys.size() - from);
    std::fill(part.begin(), part.end(), std::uint8_t{0});
    tiers_[i]->covered(numbers_[i], keys.subspan(from), heads, prefix, part);
    for (std::size_t k = from; k < keys.size(); ++k) out[k] = out[k] != 0 || one[k] != 0 ? 1 : 0;
    while (leading < keys.size() && out[leading] != 0) ++leading;
  }
  // What no tier has in one piece: several pieces, or somebody else's.
  std::vector<Piece> pieces;
  const auto together = [&](const Key& key) {
    pieces.clear();
    for (std::size_t i = 0; i < tiers_.size(); ++i) tiers_[i]->pieces(numbers_[i], key, pieces);
    std::int64_t head = heads.first;
    const std::int64_t last = heads.first + heads.count;
    for (bool more = true; more && head < last;) {
      more = false;
      for (const Piece& piece : pieces) {
        if (piece.heads.count == 0) return true;
        if (piece.heads.first <= head && piece.heads.first + piece.heads.count > head) {
          head = piece.heads.first + piece.heads.count;
          more = true;
        }
      }
    }
    return head >= last;
  };
  const auto ask = [&](std::span<const Key> unknown) {
    bool more = false;
    for (std::size_t i = 0; i < tiers_.size(); ++i) {
      more = tiers_[i]->probe(numbers_[i], unknown, heads, prefix) || more;
    }
    return more;
  };
  if (prefix) {
    // Others' chunks and ours may alternate: every question asks for the rest.
    while (leading < keys.size()) {
      if (!together(keys[leading]) && !(ask(keys.subspan(leading)) && together(keys[leading]))) break;
      while (leading < keys.size() && together(keys[leading])) out[leading++] = 1;
    }
  } else {
    std::vector<Key> unknown;
    std::vector<std::size_t> at;
    for (std::size_t k = 0; k < keys.size(); ++k) {
      if (out[k] != 0) continue;
      if (together(keys[k])) {
        out[k] = 1;
      } else {
        unknown.push_back(keys[k]);
        at.push_back(k);
      }
    }
    if (!unknown.empty() && ask(unknown)) {
      for (std::size_t i = 0; i < unknown.size(); ++i) out[at[i]] = together(unknown[i]) ? 1 : 0;
    }
  }
  if (prefix && leading < keys.size()) {
    // Chunks behind a gap are never read by prefix: somebody should know.
    const std::span<const Key> behind =
        keys.subspan(leading + 1).first(std::min<std::size_t>(keys.size() - leading - 1, 8));
    for (std::size_t i = 0; i < tiers_.size(); ++i) {
      std::fill(one.begin(), one.end(), std::uint8_t{0});
      tiers_[i]->covered(numbers_[i], behind, heads, false, one);
      count(Tally::kUnreachable, static_cast<std::uint64_t>(std::count(one.begin(), one.end(), 1)));
    }
  }
  return leading;
}

StoreMetrics StoreImpl::metrics() const {
  StoreMetrics out;
  for (std::size_t i = 0; i < 6; ++i) {
    const std::string outcome(name_of(static_cast<Outcome>(i)));
    out.counters["put_" + outcome] = tallies_[static_cast<std::size_t>(Tally::kPutOk) + i];
    out.counters["get_" + outcome] = tallies_[static_cast<std::size_t>(Tally::kGetOk) + i];
  }
  for (std::size_t i = 0; i < kTallyNames.size(); ++i) {
    out.counters[kTallyNames[i]] = tallies_[static_cast<std::size_t>(Tally::kMissAbsent) + i];
  }
  out.seconds["put"] = put_seconds_.snapshot();
  out.seconds["get"] = get_seconds_.snapshot();
  for (const TierPtr& tier : tiers_) out.tiers.push_back(tier->metrics());
  return out;
}

bool StoreImpl::flush(std::chrono::nanoseconds time) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, time, [&] { return under_way_ == 0 && waiting_.empty() && delayed_.empty(); });
}

void StoreImpl::close() {
  std::vector<std::thread> threads;
  if (getpid() != pid_) {
    for (std::thread& thread : threads_) thread.detach();
    threads_.clear();
    return;
  }
  {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    Clock::time_point last = Clock::now();
    for (const auto& [deadline, job] : jobs_) last = std::max(last, deadline);
    std::deque<Task> dropped;
    dropped.swap(waiting_);
    for (auto& [when, task] : delayed_) dropped.push_back(std::move(task));
    delayed_.clear();
    lock.unlock();
    for (const Task& task : dropped) end(*task.job, task.chunk, Stage::kQueued, Outcome::kRefused);
    lock.lock();
    idle_.wait_until(lock, last + std::chrono::milliseconds(100), [&] { return under_way_ == 0; });
    stop_ = true;
    threads.swap(threads_);
  }
  work_.notify_all();
  watch_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

/// Chunks that nobody evicts.
class PinsImpl {
 public:
  std::vector<bool> found;
  std::vector<std::shared_ptr<void>> pins;
  std::vector<TierPtr> tiers;
};

}  // namespace kvstride::store

namespace kvstride {

TierMetrics tier_metrics(const store::Tier& tier) { return tier.metrics(); }

Pins::Pins(std::unique_ptr<store::PinsImpl> impl) : impl_(std::move(impl)) {}
Pins::~Pins() = default;
Pins::Pins(Pins&&) noexcept = default;
Pins& Pins::operator=(Pins&&) noexcept = default;
const std::vector<bool>& Pins::found() const { return impl_->found; }

Store::Store(std::vector<TierPtr> tiers, Namespace space, const StoreOptions& options)
    : impl_(std::make_shared<store::StoreImpl>(std::move(tiers), std::move(space), options)) {
  impl_->start();
}
Store::~Store() { close(); }

Job Store::put(std::span<const Key> keys, const Cache& cache, std::span<const std::int64_t> blocks,
               const RequestOptions& options) {
  return impl_->transfer("put", store::Verb::kPut, keys, cache, blocks, options);
}
Job Store::get(std::span<const Key> keys, const Cache& cache, std::span<const std::int64_t> blocks,
               const RequestOptions& options) {
  return impl_->transfer("get", store::Verb::kGet, keys, cache, blocks, options);
}
Job Store::put_bytes(std::span<const Key> keys, std::span<const std::span<const std::byte>> bytes,
                     const RequestOptions& options) {
  return impl_->transfer_bytes("put_bytes", store::Verb::kPutBytes, keys, {bytes.begin(), bytes.end()}, {}, options);
}
Job Store::get_bytes(std::span<const Key> keys, std::span<const std::span<std::byte>> bytes,
                     const RequestOptions& options) {
  return impl_->transfer_bytes("get_bytes", store::Verb::kGetBytes, keys, {}, {bytes.begin(), bytes.end()}, options);
}

std::vector<bool> Store::lookup(std::span<const Key> keys, std::optional<Range> heads) {
  std::vector<std::uint8_t> found;
  impl_->lookup(keys, impl_->want(heads), false, found);
  return {found.begin(), found.end()};
}
std::int64_t Store::lookup_prefix(std::span<const Key> keys, std::optional<Range> heads) {
  std::vector<std::uint8_t> found;
  return static_cast<std::int64_t>(impl_->lookup(keys, impl_->want(heads), true, found));
}

Pins Store::pin(std::span<const Key> keys) {
  auto out = std::make_unique<store::PinsImpl>();
  out->tiers = impl_->tiers_;
  for (const Key& key : keys) {
    bool found = false;
    for (std::size_t i = 0; i < impl_->tiers_.size(); ++i) {
      if (std::shared_ptr<void> pin = impl_->tiers_[i]->pin(impl_->numbers_[i], key)) {
        out->pins.push_back(std::move(pin));
        found = true;
      }
    }
    out->found.push_back(found);
  }
  return Pins(std::move(out));
}

std::int64_t Store::remove(std::span<const Key> keys) {
  std::int64_t removed = 0;
  for (const Key& key : keys) {
    bool there = false;
    for (std::size_t i = 0; i < impl_->tiers_.size(); ++i) {
      there = impl_->tiers_[i]->remove(impl_->numbers_[i], key) || there;
    }
    removed += there ? 1 : 0;
  }
  return removed;
}

const Namespace& Store::space() const { return impl_->space_; }
StoreMetrics Store::metrics() const { return impl_->metrics(); }
bool Store::flush(std::chrono::nanoseconds time) { return impl_->flush(time); }
void Store::close() { impl_->close(); }

}  // namespace kvstride
