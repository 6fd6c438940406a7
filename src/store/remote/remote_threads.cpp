// SPDX-License-Identifier: Apache-2.0
// A remote tier's threads: queues, attempts and their repetition, what failures lead to.
#include "store/remote/remote_threads.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <system_error>
#include <type_traits>

#include "kvstride/error.h"

namespace kvstride::store {
namespace {

constexpr std::int64_t kBatchBytes = 64 << 20;            ///< of one call; a longer item goes alone
constexpr auto kTogether = std::chrono::milliseconds(1);  ///< for the rest of a job's chunks
constexpr auto kPatience = std::chrono::milliseconds(500);
constexpr auto kMarkTime = std::chrono::seconds(2);

/// Between half of it and all of it, longer with each attempt.
Clock::duration pause_after(int attempts) {
  thread_local std::minstd_rand dice(std::random_device{}());
  const auto longest = std::chrono::milliseconds(50) * (1 << std::min(attempts, 6));
  return std::chrono::duration_cast<Clock::duration>(longest * std::uniform_real_distribution<>(0.5, 1.0)(dice));
}

}  // namespace

RemoteThreads::RemoteThreads(const RemoteTierOptions& options, EnginePtr engine)
    : options_(options),
      engine_(std::move(engine)),
      staging_(std::make_shared<Staging>(options.staging_bytes)),
      known_(options.known_chunks, std::chrono::duration_cast<Clock::duration>(options.known_for)) {}

void RemoteThreads::start() {
  const int threads = options_.num_threads > 0 ? options_.num_threads : std::max(engine_->num_threads(), 1);
  for (int i = 0; i < threads; ++i) busy_.push_back(std::make_unique<Busy>());
  const auto add_thread = [&](auto body) {
    {
      const std::lock_guard lock(mutex_);
      ++alive_;
    }
    try {
      threads_.emplace_back([self = shared_from_this(), body] {
        body(*self);
        const std::lock_guard lock(self->mutex_);
        --self->alive_;
        self->ended_.notify_all();
      });
    } catch (const std::system_error& error) {
      {
        const std::lock_guard lock(mutex_);
        --alive_;
      }
      stop();
      throw Error(ErrorCode::kStore, fmt::format("RemoteTier: no thread can be made: {}", error.what()));
    }
  };
  for (std::size_t i = 0; i < busy_.size(); ++i) add_thread([i](RemoteThreads& remote) { remote.run(i); });
  add_thread([](RemoteThreads& remote) { remote.answer(); });
}

/// Threads that the engine keeps are left behind with all that they use.
void RemoteThreads::stop() {
  if (getpid() != pid_) {  // a forked child has none of them
    for (std::thread& thread : threads_) thread.detach();
    threads_.clear();
    return;
  }
  std::vector<Read> reads;
  std::vector<Write> writes;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    for (Read& one : reads_.ready) reads.push_back(std::move(one));
    for (auto& [when, one] : reads_.later) reads.push_back(std::move(one));
    for (Write& one : writes_.ready) writes.push_back(std::move(one));
    for (auto& [when, one] : writes_.later) writes.push_back(std::move(one));
    reads_ = {};
    writes_ = {};
    removals_.clear();
  }
  work_.notify_all();
  question_.notify_all();
  answered_.notify_all();
  for (Read& one : reads) end(std::move(one), Outcome::kRefused);
  for (Write& one : writes) end(std::move(one), Outcome::kRefused);
  std::unique_lock lock(mutex_);
  // The last one to let go of a tier may be one of its own threads.
  const auto is_this = [](const std::thread& thread) { return thread.get_id() == std::this_thread::get_id(); };
  const std::size_t own = std::any_of(threads_.begin(), threads_.end(), is_this) ? 1 : 0;
  const bool all = ended_.wait_for(lock, std::chrono::seconds(10), [&] { return alive_ == own; });
  lock.unlock();
  for (std::thread& thread : threads_) all && !is_this(thread) ? thread.join() : thread.detach();
  threads_.clear();
}

bool RemoteThreads::sick() const {
  if (breaker_.open()) return true;
  const Clock::rep now = Clock::now().time_since_epoch().count();
  return std::all_of(busy_.begin(), busy_.end(), [&](const std::unique_ptr<Busy>& busy) {
    const Clock::rep until = busy->until.load(std::memory_order_relaxed);
    return until != 0 && until < now;
  });
}

void RemoteThreads::read(ReadRequest request) {
  Read operation{std::move(request), {}, 0, Clock::now()};
  operation.bytes = operation.request.into->bytes();
  const bool is_sick = sick();
  if (!is_sick) {
    operation.name = spaces_.name(operation.request.id);
    const std::lock_guard lock(mutex_);
    if (!stop_ && reads_.size() + writes_.size() < options_.queue_chunks) {
      add(reads_, std::move(operation));
      return;
    }
  }
  counters_.add(is_sick ? Count::kRefusedSick : Count::kRefusedQueue);
  end(std::move(operation), is_sick ? Outcome::kTimeout : Outcome::kRefused);
}

void RemoteThreads::write(WriteRequest request) {
  Write operation{std::move(request), {}, Clock::now()};
  Count why = Count::kRefusedQueue;
  if (operation.request.bytes > engine_->largest()) {
    why = Count::kRefusedLarge;
  } else if (sick() || !write_breaker_.allows(operation.start)) {
    why = Count::kRefusedSick;
  } else {
    operation.name = spaces_.name(operation.request.id);
    const std::lock_guard lock(mutex_);
    const bool room = write_bytes_ == 0 || write_bytes_ + operation.request.bytes <= options_.queue_bytes;
    if (!stop_ && room && reads_.size() + writes_.size() < options_.queue_chunks) {
      write_bytes_ += operation.request.bytes;
      std::erase_if(removals_, [&](const Removal& one) {
        return one.space == operation.request.id.space && one.key == operation.request.id.key;
      });
      add(writes_, std::move(operation));
      return;
    }
  }
  counters_.add(why);
  operation.request.finish(Outcome::kRefused);
}

/// One call for a job's chunks, which come one by one, rather than one for the first and one for the rest. The lock
/// must be held.
template <typename Operation>
void RemoteThreads::add(Queue<Operation>& queue, Operation operation) {
  const bool first = queue.ready.empty();
  const bool enough = !operation.request.more || queue.ready.size() + 1 >= engine_->batch();
  queue.ready.push_back(std::move(operation));
  if (enough) {
    queue.begin = {};
  } else if (first) {
    queue.begin = Clock::now() + kTogether;
  }
  if (enough || first) work_.notify_one();
}

void RemoteThreads::remove(std::uint32_t space, const Key& key) {
  const std::lock_guard lock(mutex_);
  if (stop_ || removals_.size() >= options_.queue_chunks) return;
  removals_.push_back({space, key});
  question_.notify_one();
}

Clock::time_point RemoteThreads::limit_of(Clock::time_point deadline) const {
  return std::min(deadline, Clock::now() + std::chrono::duration_cast<Clock::duration>(options_.timeout));
}

/// As many as one call should have: what is cut up further is no faster, and what cannot be (a call that waits by
/// spinning, as Mooncake's) is slower. The lock must be held.
template <typename Operation, typename Bytes>
static std::vector<Operation> take_some(std::deque<Operation>& from, std::size_t most, const Bytes& bytes_of) {
  std::vector<Operation> out;
  std::int64_t bytes = 0;
  while (out.size() < std::max<std::size_t>(most, 1) && !from.empty() &&
         (out.empty() || bytes + bytes_of(from.front()) <= kBatchBytes)) {
    bytes += bytes_of(from.front());
    out.push_back(std::move(from.front()));
    from.pop_front();
  }
  return out;
}

std::vector<RemoteThreads::Read> RemoteThreads::take_reads() {
  return take_some(reads_.ready, engine_->batch(), [](const Read& one) { return one.bytes; });
}
std::vector<RemoteThreads::Write> RemoteThreads::take_writes() {
  return take_some(writes_.ready, engine_->batch(), [](const Write& one) { return one.request.bytes; });
}

/// One thread: batches of reads, and of writes where no read waits; one thread is always left for reads.
void RemoteThreads::run(std::size_t number) {
  std::unique_lock lock(mutex_);
  const auto due = [](auto& queue, Clock::time_point now) {
    while (!queue.later.empty() && queue.later.begin()->first <= now) {
      queue.ready.push_back(std::move(queue.later.begin()->second));
      queue.later.erase(queue.later.begin());
    }
  };
  const auto ready = [](const auto& queue, Clock::time_point now) {
    return !queue.ready.empty() && now >= queue.begin;
  };
  while (true) {
    const Clock::time_point now = Clock::now();
    due(reads_, now);
    due(writes_, now);
    const bool may_write = writers_ + 1 < std::max<std::size_t>(busy_.size(), 2);
    std::vector<Read> reads;
    std::vector<Write> writes;
    try {
      if (ready(reads_, now)) {
        reads = take_reads();
      } else if (may_write && ready(writes_, now)) {
        writes = take_writes();
      }
    } catch (...) {  // no memory: what is under way gives some back
      work_.wait_for(lock, std::chrono::milliseconds(10));
      continue;
    }
    if (reads.empty() && writes.empty()) {
      if (stop_) return;
      Clock::time_point until = Clock::time_point::max();
      if (!reads_.later.empty()) until = reads_.later.begin()->first;
      if (!writes_.later.empty()) until = std::min(until, writes_.later.begin()->first);
      if (!reads_.ready.empty()) until = std::min(until, reads_.begin);
      if (!writes_.ready.empty() && may_write) until = std::min(until, writes_.begin);
      until == Clock::time_point::max() ? work_.wait(lock) : static_cast<void>(work_.wait_until(lock, until));
      continue;
    }
    const bool writing = !writes.empty();
    writers_ += writing ? 1 : 0;
    if (!reads_.ready.empty() || !writes_.ready.empty()) work_.notify_one();
    lock.unlock();
    Clock::time_point deadline = now;
    for (const Read& one : reads) deadline = std::max(deadline, one.request.deadline);
    for (const Write& one : writes) deadline = std::max(deadline, one.request.deadline);
    const Clock::time_point limit = limit_of(deadline);
    busy_[number]->until = (std::max(limit, now) + kPatience).time_since_epoch().count();
    writing ? write_batch(std::move(writes), limit) : read_batch(std::move(reads), limit);
    busy_[number]->until = 0;
    lock.lock();
    writers_ -= writing ? 1 : 0;
    if (writing) work_.notify_one();
  }
}

/// Memory that the engine has not seen yet.
void RemoteThreads::tell_memory(const Buffer& buffer) {
  const std::lock_guard lock(memory_mutex_);
  const auto has = [&](const Buffer::Region& one) {
    return one.bytes.data() <= buffer.data() && buffer.data() < one.bytes.data() + one.bytes.size();
  };
  if (std::any_of(told_.begin(), told_.end(), has)) return;
  Buffer::Region region = buffer.region();
  if (engine_->memory(region.bytes)) told_.push_back(std::move(region));
}

template <typename Operation>
bool RemoteThreads::drop(Operation& operation, Clock::time_point now) {
  operation.begun = now;
  if (is_cancelled(operation.request.cancelled)) {
    end(std::move(operation), Outcome::kRefused);
  } else if (now >= operation.request.deadline) {
    counters_.add(Count::kTimeouts);
    end(std::move(operation), Outcome::kTimeout);
  } else if (breaker_.open()) {
    counters_.add(Count::kRefusedSick);
    end(std::move(operation), Outcome::kRefused);
  } else {
    return false;
  }
  return true;
}

void RemoteThreads::read_batch(std::vector<Read> batch, Clock::time_point limit) {
  std::vector<Read> left;
  std::vector<ReadItem> items;
  try {
    left.reserve(batch.size());
    items.reserve(batch.size());
    const Clock::time_point now = Clock::now();
    for (Read& one : batch) {
      if (!drop(one, now)) {
        tell_memory(*one.request.into);
        ReadItem item{one.name, one.request.ranges, one.request.into->data(), one.bytes};
        if (item.ranges.empty() || !engine_->reads_ranges()) item.ranges = {{0, one.bytes}};
        items.push_back(std::move(item));
        left.push_back(std::move(one));
      }
    }
    if (!items.empty()) {
      std::vector<std::uint8_t> done(items.size());
      engine_->read(items, limit, [&](std::size_t i) {
        if (done[i]++ == 0) settle(std::move(left[i]), items[i]);
      });
      for (std::size_t i = 0; i < items.size(); ++i) {
        if (done[i] == 0) settle(std::move(left[i]), items[i]);
      }
      return;
    }
  } catch (...) {  // no memory
    for (Read& one : batch) {
      if (one.request.done) end(std::move(one), Outcome::kIoError);
    }
    for (Read& one : left) {
      if (one.request.done) end(std::move(one), Outcome::kIoError);
    }
  }
}

void RemoteThreads::write_batch(std::vector<Write> batch, Clock::time_point limit) {
  std::vector<Write> left;
  std::vector<WriteItem> items;
  try {
    left.reserve(batch.size());
    items.reserve(batch.size());
    // Of the one that finds out whether writing is possible again nobody is asked before.
    const std::vector<bool> there = write_breaker_.open() ? std::vector<bool>(batch.size()) : are_there(batch, limit);
    const Clock::time_point now = Clock::now();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      Write& one = batch[i];
      if (drop(one, now)) continue;
      const Answer marked = there[i] ? Answer::kThere : mark(one.request.id, limit);
      if (there[i] || marked != Answer::kOk) {
        settle(std::move(one), marked, there[i]);
      } else {
        tell_memory(*one.request.image);
        const auto bytes = static_cast<std::size_t>(one.request.bytes);
        items.push_back({one.name, {one.request.image->data(), bytes}, known_.is_damaged(one.request.id, now)});
        left.push_back(std::move(one));
      }
    }
    if (items.empty()) return;
    std::vector<std::uint8_t> done(items.size());
    engine_->write(items, limit, [&](std::size_t i) {
      if (done[i]++ == 0) settle(std::move(left[i]), items[i].answer);
    });
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (done[i] == 0) settle(std::move(left[i]), items[i].answer);
    }
  } catch (...) {  // no memory
    for (Write& one : batch) {
      if (one.request.done) end(std::move(one), Outcome::kIoError);
    }
    for (Write& one : left) {
      if (one.request.done) end(std::move(one), Outcome::kIoError);
    }
  }
}

/// Somebody else may have written it meanwhile: asking costs less than sending. Who was asked lately is not asked
/// again.
std::vector<bool> RemoteThreads::are_there(const std::vector<Write>& batch, Clock::time_point limit) {
  std::vector<bool> out(batch.size());
  std::vector<FindItem> items;
  std::vector<std::size_t> at;
  const Clock::time_point now = Clock::now();
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const PieceId& id = batch[i].request.id;
    if (known_.is_damaged(id, now)) continue;
    out[i] = known_.holds(id, now);
    if (out[i] || known_.was_absent(id, now)) continue;
    items.push_back({batch[i].name});
    at.push_back(i);
  }
  if (!items.empty()) {
    engine_->find(items, limit);
    note_finds(items, now, options_.timeout);
  }
  for (std::size_t k = 0; k < items.size(); ++k) {
    // Of another length it may be damaged, or in an order of its own: whoever reads it finds out.
    out[at[k]] = items[k].answer == Answer::kOk && items[k].bytes == batch[at[k]].request.bytes;
  }
  return out;
}

/// Writes the marker of a head range, now and then. kOk: it is there.
Answer RemoteThreads::mark(const PieceId& id, Clock::time_point limit) {
  if (!spaces_.should_mark(id.space, id.heads, Clock::now())) return Answer::kOk;
  const BufferPtr byte = staging_->buffer(1);
  if (!byte) return Answer::kOk;  // with the next one
  *byte->data() = std::byte{'\n'};
  tell_memory(*byte);
  std::vector<WriteItem> items{{spaces_.marker(id.space, id.heads), {byte->data(), 1}}};
  engine_->write(items, std::min(limit, Clock::now() + kMarkTime), [](std::size_t) {});
  const Answer answer = items[0].answer;
  if (answer != Answer::kOk && answer != Answer::kThere) return answer;
  spaces_.marked(id.space, id.heads, Clock::now());
  return Answer::kOk;
}

/// What an answer says about the engine. Who fails to write (a replica, a full disk, a missing permission) may still
/// read, and what is wrong with everything reads and questions find out.
/// `longest`: what such a call may take.
void RemoteThreads::note(Answer answer, bool write, Clock::time_point begun, Seconds longest) {
  const Clock::time_point now = Clock::now();
  const auto bad = [&](bool hopeless) {
    if (!(write ? write_breaker_ : breaker_).bad(begun, now, hopeless)) return;
    counters_.add(Count::kTrips);
    if (write) return;
    const std::lock_guard lock(mutex_);
    question_.notify_one();  // from now on somebody finds out when it is well again
  };
  switch (answer) {
    case Answer::kOk:
    case Answer::kThere:
      if (write) write_breaker_.good();
      breaker_.good();
      break;
    case Answer::kAbsent:
    case Answer::kTooLarge: breaker_.good(); break;
    case Answer::kFull:
      counters_.add(Count::kNoSpace);
      write_breaker_.bad(begun, now);
      break;
    case Answer::kDenied:
      counters_.add(Count::kDenied);
      bad(true);
      break;
    case Answer::kBroken:
    case Answer::kLate:
      counters_.add(answer == Answer::kLate ? Count::kTimeouts : Count::kIoErrors);
      // A deadline that nobody could meet says nothing.
      if (answer == Answer::kLate && now - begun < std::min<Seconds>(kPatience, 0.9 * longest)) break;
      bad(false);
      break;
  }
}

/// Whether it is tried again: everything that a tier asks may be asked twice, but what was late would only make it
/// worse, and a read that took its time to fail is a miss that somebody waits for. (Mooncake's client asks a dead node
/// for a second.)
template <typename Operation>
bool RemoteThreads::again(Operation& operation, Queue<Operation>& queue, Answer answer) {
  constexpr bool kIsRead = std::is_same_v<Operation, Read>;
  if (answer != Answer::kBroken || operation.attempts >= options_.retries || breaker_.open()) return false;
  if (!kIsRead && write_breaker_.open()) return false;
  const Clock::time_point now = Clock::now();
  const Clock::time_point when = now + pause_after(operation.attempts);
  if (when >= operation.request.deadline) return false;
  if (kIsRead && now - operation.begun > kPatience) return false;
  ++operation.attempts;
  counters_.add(Count::kRetries);
  const std::lock_guard lock(mutex_);
  if (stop_) return false;
  queue.later.emplace(when, std::move(operation));
  work_.notify_one();
  return true;
}

void RemoteThreads::settle(Read&& operation, const ReadItem& item) noexcept {
  try {
    const Clock::time_point now = Clock::now();
    const PieceId& id = operation.request.id;
    note(item.answer, false, operation.begun, options_.timeout);
    switch (item.answer) {
      case Answer::kOk: {
        const std::int64_t found = item.found < 0 ? operation.bytes : item.found;
        if (found != operation.bytes) {
          // In another order than was thought, or damaged: whoever asks again, and for all of it, will see.
          const bool sound = found >= kPage && found % kPage == 0 && found <= largest();
          sound ? known_.learn(id, found, now) : known_.learn_damaged(id, now);
          return end(std::move(operation), sound ? Outcome::kMiss : Outcome::kCorrupt, sound ? found : 0);
        }
        known_.used(id);
        counters_.add(Count::kReads);
        std::uint64_t moved = 0;
        for (const Bytes& range : item.ranges) moved += static_cast<std::uint64_t>(range.end - range.begin);
        counters_.add(Count::kReadBytes, moved);
        return end(std::move(operation), Outcome::kOk, found);
      }
      case Answer::kAbsent:
        counters_.add(Count::kVanished);
        known_.forget(id, now);
        return end(std::move(operation), Outcome::kMiss);
      case Answer::kLate: return end(std::move(operation), Outcome::kTimeout);
      default: break;
    }
    if (again(operation, reads_, item.answer)) return;
  } catch (...) {  // no memory
  }
  end(std::move(operation), Outcome::kIoError);
}

/// `found`: nobody tried to write it.
void RemoteThreads::settle(Write&& operation, Answer answer, bool found) noexcept {
  Outcome outcome = Outcome::kIoError;
  try {
    const Clock::time_point now = Clock::now();
    const PieceId& id = operation.request.id;
    if (!found) note(answer, true, operation.begun, options_.timeout);
    switch (answer) {
      case Answer::kOk:
        known_.learn_mended(id);
        known_.learn(id, operation.request.bytes, now);
        counters_.add(Count::kWrites);
        counters_.add(Count::kWriteBytes, static_cast<std::uint64_t>(operation.request.bytes));
        operation.request.admitted.written();
        return end(std::move(operation), Outcome::kOk);
      case Answer::kThere:
        counters_.add(Count::kAlreadyThere);
        known_.learn(id, operation.request.bytes, now);
        return end(std::move(operation), Outcome::kOk);
      case Answer::kTooLarge: counters_.add(Count::kRefusedLarge); [[fallthrough]];
      case Answer::kFull: outcome = Outcome::kRefused; break;
      case Answer::kLate: outcome = Outcome::kTimeout; break;
      default: break;
    }
    if (again(operation, writes_, answer)) return;
  } catch (...) {  // no memory
  }
  end(std::move(operation), outcome);
}

void RemoteThreads::end(Read&& operation, Outcome outcome, std::int64_t bytes) noexcept {
  ReadRequest request = std::move(operation.request);
  counters_.read_seconds.add(Clock::now() - operation.start);
  request.done({outcome, std::move(request.into), bytes});
}

void RemoteThreads::end(Write&& operation, Outcome outcome) noexcept {
  WriteRequest request = std::move(operation.request);
  counters_.write_seconds.add(Clock::now() - operation.start);
  {
    const std::lock_guard lock(mutex_);
    write_bytes_ -= request.bytes;
  }
  request.finish(outcome);
}

}  // namespace kvstride::store
