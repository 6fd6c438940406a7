// SPDX-License-Identifier: Apache-2.0
// The tier in a directory: threads that read and write files, several at a time where the kernel has io_uring.
#include "store/directory_tier.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <thread>

#include "kvstride/error.h"
#include "store/arena.h"
#include "store/forked.h"

namespace kvstride::store {
namespace {

using Engine = DirectoryTierOptions::Engine;

constexpr std::size_t kRingDepth = 32;
constexpr std::int64_t kSmall = 512 << 10;  ///< transfers that are started together
constexpr int kMostTries = 16;              ///< of a page that comes or goes in part only

class Core;

/// Staging memory; the last holder gives it back.
class StagedBuffer final : public Buffer {
 public:
  StagedBuffer(std::shared_ptr<Core> core, std::int64_t offset, std::int64_t bytes);
  ~StagedBuffer() override;

 private:
  std::shared_ptr<Core> core_;
  std::int64_t offset_;
};

/// What a thread is given, and how far it is.
struct Operation {
  std::optional<ReadRequest> read;
  std::optional<WriteRequest> write;
  std::function<void()> task;  ///< neither: something short that must not be done on the caller's thread
  Clock::time_point start;     ///< in the queue
  Clock::time_point begun;     ///< in a thread's hands
  Clock::time_point deadline;
  int fd = -1;
  std::int64_t bytes = 0;     ///< of the file
  std::vector<Bytes> ranges;  ///< still to move; the first one is under way
  Draft draft;
  bool retried = false;  ///< after the file system was full
  int stuck = 0;         ///< transfers in a row that moved less than a page
};

/// What outlives the tier where a disk hangs: threads hold it.
class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(const DirectoryTierOptions& options, const std::shared_ptr<Io>& io)
      : options_(options),
        io_(io),
        staging_(options.staging_bytes),
        extents_(largest()),
        directory_(io,
                   {options.path, options.max_bytes, options.keep_free,
                    options.eviction == Eviction::kLru ? Policy::kLru : Policy::kS3Fifo, options.sync, options.group,
                    largest()},
                   counters_) {
    madvise(staging_.data(), static_cast<std::size_t>(staging_.mapped()), MADV_DONTFORK);
  }

  void start();
  void stop();

  /// The longest image that the memory for I/O holds.
  std::int64_t largest() const { return staging_.size() / kPage * kPage; }

  std::shared_ptr<StagedBuffer> buffer(std::int64_t bytes);
  void give(std::int64_t offset, std::int64_t bytes);
  std::byte* at(std::int64_t offset) const { return staging_.data() + offset; }

  void add(Operation operation);
  void add_task(std::function<void()> task);
  bool sick() const;
  bool probe(std::uint32_t space, std::vector<Key> keys, Heads heads, bool prefix, Clock::time_point begin);
  /// Which engine it is, as far as threads know.
  std::string engine() const;

  const DirectoryTierOptions options_;
  const std::shared_ptr<Io> io_;
  Counters counters_;
  Memory staging_;
  std::mutex staging_mutex_;
  Extents extents_;
  Directory directory_;
  const pid_t pid_ = getpid();

 private:
  /// Where a thread is: a disk that hangs keeps it from getting on.
  struct Busy {
    std::atomic<Clock::rep> until{0};  ///< the earliest deadline of what it has in hand; 0: nothing
  };

  void run(std::size_t number);
  void keep_house();
  void answer();
  std::unique_ptr<Transfers> transfers(std::string& name);
  bool begin(Operation& operation);
  void begin_read(Operation& operation);
  void begin_write(Operation& operation);
  bool moved(Operation& operation, const Transfer& transfer);
  void end_read(Operation& operation, Outcome outcome) noexcept;
  void end_write(Operation& operation, Outcome outcome) noexcept;

  mutable std::mutex mutex_;
  std::string engine_;
  std::condition_variable work_;
  std::condition_variable work_house_;
  std::condition_variable ended_;
  std::deque<Operation> reads_;
  std::deque<Operation> writes_;
  bool stop_ = false;
  std::size_t alive_ = 0;
  std::vector<std::thread> threads_;
  std::vector<std::unique_ptr<Busy>> busy_;

  struct Question {
    std::uint32_t space;
    std::vector<Key> keys;
    Heads heads;
    bool prefix;
    Clock::time_point until;  ///< who asked waits no longer
    bool done = false;
    bool found = false;
  };
  std::condition_variable question_;
  std::condition_variable answered_;
  std::shared_ptr<Question> asked_;
};

StagedBuffer::StagedBuffer(std::shared_ptr<Core> core, std::int64_t offset, std::int64_t bytes)
    : Buffer(core->at(offset), bytes, core.get()), core_(std::move(core)), offset_(offset) {}
StagedBuffer::~StagedBuffer() { core_->give(offset_, bytes()); }

std::shared_ptr<StagedBuffer> Core::buffer(std::int64_t bytes) {
  bytes = whole_pages(bytes);
  std::optional<std::int64_t> offset;
  {
    const std::lock_guard lock(staging_mutex_);
    offset = extents_.take(bytes);
  }
  return offset ? std::make_shared<StagedBuffer>(shared_from_this(), *offset, bytes) : nullptr;
}

void Core::give(std::int64_t offset, std::int64_t bytes) {
  const std::lock_guard lock(staging_mutex_);
  extents_.give(offset, bytes);
}

/// A ring where there is one, unless something else is asked for.
std::unique_ptr<Transfers> Core::transfers(std::string& name) {
  if (options_.engine != Engine::kBlocking) {
    // Only this memory: pinned pages are copied by every fork, and no child needs it.
    const iovec memory{staging_.data(), static_cast<std::size_t>(staging_.size())};
    std::string why;
    if (auto ring = ring_transfers(kRingDepth, {&memory, 1}, &why)) {
      name = ring->name();
      return ring;
    }
    name = fmt::format("pread/pwrite ({})", why);
  } else {
    name = "pread/pwrite";
  }
  return blocking_transfers(io_);
}

void Core::start() {
  // Which engine it will be is found out at once, without pinning memory.
  bool ring = false;
  if (options_.engine != Engine::kBlocking) {
    std::string why;
    ring = ring_transfers(1, {}, &why) != nullptr;
    if (!ring && options_.engine == Engine::kRing) {
      throw Error(ErrorCode::kStore, fmt::format("DirectoryTier: io_uring is not there: {}", why));
    }
    engine_ = ring ? "io_uring" : fmt::format("pread/pwrite ({})", why);
  } else {
    engine_ = "pread/pwrite";
  }
  const std::size_t threads = options_.num_threads > 0 ? static_cast<std::size_t>(options_.num_threads) : ring ? 2 : 8;
  for (std::size_t i = 0; i < threads; ++i) busy_.push_back(std::make_unique<Busy>());
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
      throw Error(ErrorCode::kStore, fmt::format("DirectoryTier: no thread can be made: {}", error.what()));
    }
  };
  for (std::size_t i = 0; i < threads; ++i) add_thread([i](Core& core) { core.run(i); });
  add_thread([](Core& core) { core.keep_house(); });
  add_thread([](Core& core) { core.answer(); });
}

/// Threads that a disk keeps are left behind with all that they use.
void Core::stop() {
  if (getpid() != pid_) {  // a forked child has none of them
    for (std::thread& thread : threads_) thread.detach();
    threads_.clear();
    return;
  }
  std::deque<Operation> dropped;
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    dropped.swap(writes_);
    std::move(reads_.begin(), reads_.end(), std::back_inserter(dropped));
    reads_.clear();
  }
  work_.notify_all();
  work_house_.notify_all();
  question_.notify_all();
  answered_.notify_all();
  for (Operation& one : dropped) {
    if (one.read) end_read(one, Outcome::kRefused);
    if (one.write) end_write(one, Outcome::kRefused);
  }
  std::unique_lock lock(mutex_);
  // The last one to let go of a tier may be one of its own threads.
  const auto is_this = [](const std::thread& thread) { return thread.get_id() == std::this_thread::get_id(); };
  const std::size_t own = std::any_of(threads_.begin(), threads_.end(), is_this) ? 1 : 0;
  const bool all = ended_.wait_for(lock, std::chrono::seconds(10), [&] { return alive_ == own; });
  lock.unlock();
  for (std::thread& thread : threads_) all && !is_this(thread) ? thread.join() : thread.detach();
  threads_.clear();
  try {
    if (all) directory_.settle_all();
  } catch (...) {  // no memory: the next one finds it
  }
}

std::string Core::engine() const {
  const std::lock_guard lock(mutex_);
  return directory_.direct() ? engine_ + ", O_DIRECT" : engine_;
}

bool Core::sick() const {
  const Clock::rep now = Clock::now().time_since_epoch().count();
  return std::all_of(busy_.begin(), busy_.end(), [&](const std::unique_ptr<Busy>& busy) {
    const Clock::rep until = busy->until.load(std::memory_order_relaxed);
    return until != 0 && until < now;
  });
}

void Core::add_task(std::function<void()> task) {
  Operation operation;
  operation.task = std::move(task);
  const std::lock_guard lock(mutex_);
  if (stop_) return;
  reads_.push_back(std::move(operation));
  work_.notify_one();
}

void Core::add(Operation operation) {
  operation.start = Clock::now();
  const bool read = operation.read.has_value();
  bool full = false;
  const bool is_sick = sick();
  if (!is_sick) {
    const std::lock_guard lock(mutex_);
    full = stop_ || reads_.size() + writes_.size() >= options_.queue_chunks;
    if (!full) {
      (read ? reads_ : writes_).push_back(std::move(operation));
      work_.notify_one();
      return;
    }
  }
  counters_.add(is_sick ? Count::kRefusedSick : Count::kRefusedQueue);
  if (read) {
    end_read(operation, is_sick ? Outcome::kTimeout : Outcome::kRefused);
  } else {
    end_write(operation, Outcome::kRefused);
  }
}

/// One thread: starts files while it has room for more, and goes on with what has ended.
void Core::run(std::size_t number) {
  {
    // Nothing is pinned for I/O before there is some.
    std::unique_lock lock(mutex_);
    work_.wait(lock, [&] { return options_.prepare || stop_ || !reads_.empty() || !writes_.empty(); });
  }
  std::string name;
  const std::unique_ptr<Transfers> io = transfers(name);
  {
    const std::lock_guard lock(mutex_);
    engine_ = name;
  }
  std::vector<std::unique_ptr<Operation>> active;  // by token
  std::vector<std::size_t> free;
  std::vector<Transfer> ended;
  active.reserve(io->depth() + 1);
  free.reserve(io->depth() + 1);
  ended.reserve(io->depth());
  const auto note = [&] {
    // A deadline that nobody could meet does not say that the disk hangs.
    constexpr auto kPatience = std::chrono::milliseconds(200);
    Clock::time_point until = Clock::time_point::max();
    for (const auto& one : active) {
      if (one) until = std::min(until, std::max(one->deadline, one->begun + kPatience));
    }
    busy_[number]->until = until == Clock::time_point::max() ? 0 : until.time_since_epoch().count();
  };
  const auto submit = [&](std::size_t token) {
    const Operation& operation = *active[token];
    const Bytes& range = operation.ranges.front();
    std::byte* data = operation.read ? operation.read->into->data() : operation.write->image->data();
    const std::int64_t bytes = range.end - range.begin;
    io->submit({operation.fd, data + range.begin, static_cast<std::size_t>(bytes), range.begin,
                operation.write.has_value(), token, 0},
               bytes < kSmall);
  };
  while (true) {
    while (io->under_way() < io->depth()) {
      std::unique_ptr<Operation> next;
      {
        std::unique_lock lock(mutex_);
        const auto some = [&] { return stop_ || !reads_.empty() || !writes_.empty(); };
        if (io->under_way() == 0) work_.wait(lock, some);
        std::deque<Operation>& from = reads_.empty() ? writes_ : reads_;  // somebody waits for a read
        if (from.empty()) {
          if (stop_ && io->under_way() == 0) return;
          break;
        }
        try {
          next = std::make_unique<Operation>(std::move(from.front()));
        } catch (...) {  // no memory: what is under way gives some back
          break;
        }
        from.pop_front();
      }
      std::size_t token = active.size();
      if (free.empty()) {
        active.push_back(std::move(next));
      } else {
        token = free.back();
        free.pop_back();
        active[token] = std::move(next);
      }
      Operation& started = *active[token];
      started.begun = Clock::now();
      started.deadline = started.read    ? started.read->deadline
                         : started.write ? started.write->deadline
                                         : Clock::now() + std::chrono::seconds(10);
      note();
      if (begin(started)) {
        submit(token);
      } else {
        active[token].reset();
        free.push_back(token);
      }
      note();
    }
    io->start();
    ended.clear();
    // Not for long: somebody may come with more.
    io->collect(ended, true, std::chrono::milliseconds(5));
    for (const Transfer& transfer : ended) {
      const auto token = static_cast<std::size_t>(transfer.token);
      if (moved(*active[token], transfer)) {
        submit(token);
      } else {
        active[token].reset();
        free.push_back(token);
      }
      note();
    }
  }
}

/// Whether there is something to move.
bool Core::begin(Operation& operation) {
  if (operation.task) {
    try {
      operation.task();
    } catch (...) {  // no memory: it is done when it is found again
    }
    return false;
  }
  try {
    if (Clock::now() >= operation.deadline) {
      counters_.add(Count::kTimeouts);
      operation.read ? end_read(operation, Outcome::kTimeout) : end_write(operation, Outcome::kTimeout);
    } else {
      operation.read ? begin_read(operation) : begin_write(operation);
    }
  } catch (...) {  // no memory
    operation.ranges.clear();
    operation.read ? end_read(operation, Outcome::kIoError) : end_write(operation, Outcome::kIoError);
  }
  return !operation.ranges.empty();
}

void Core::begin_read(Operation& operation) {
  ReadRequest& request = *operation.read;
  operation.fd = directory_.open_piece(request.id, operation.bytes);
  if (operation.fd < 0) {
    const bool gone = operation.fd == -ENOENT;
    if (!gone) counters_.add(Count::kIoErrors);
    return end_read(operation, gone ? Outcome::kMiss : Outcome::kIoError);
  }
  if (operation.bytes < kPage || operation.bytes % kPage != 0) return end_read(operation, Outcome::kCorrupt);
  // Another length than the index has: damaged, or in another order (`kvstride store convert`). Whoever asks again, and
  // for all of it, will see.
  const std::int64_t needed = request.ranges.empty() ? 0 : request.ranges.back().end;
  if (operation.bytes > request.into->bytes() || operation.bytes < needed) {
    directory_.forget(request.id);
    return end_read(operation, Outcome::kMiss);
  }
  operation.ranges = request.ranges;
  if (operation.ranges.empty()) operation.ranges = {{0, operation.bytes}};
}

void Core::begin_write(Operation& operation) {
  const WriteRequest& request = *operation.write;
  operation.bytes = request.bytes;
  if (directory_.holds(request.id)) {
    counters_.add(Count::kAlreadyThere);
    return end_write(operation, Outcome::kOk);
  }
  if (const std::optional<Outcome> refused = directory_.begin(request.id, request.bytes, operation.draft)) {
    return end_write(operation, *refused);
  }
  operation.fd = operation.draft.fd;
  operation.ranges = {{0, operation.bytes}};
}

/// Goes on after a transfer. Whether there is more to move.
bool Core::moved(Operation& operation, const Transfer& transfer) {
  Bytes& range = operation.ranges.front();
  try {
    if (transfer.result == -EINTR || transfer.result == -EAGAIN) return true;
    if (transfer.result > 0) {
      // Short: the rest, from a whole page on. Less than a page is moved again, a few times.
      const std::int64_t moved = transfer.result / kPage * kPage;
      range.begin = std::min(range.begin + moved, range.end);
      operation.stuck = moved > 0 ? 0 : operation.stuck + 1;
      if (range.begin < range.end && operation.stuck < kMostTries) return true;
      if (range.begin < range.end) {
        counters_.add(Count::kIoErrors);
        operation.read ? end_read(operation, Outcome::kIoError) : end_write(operation, Outcome::kIoError);
        return false;
      }
      operation.ranges.erase(operation.ranges.begin());
      if (!operation.ranges.empty()) return true;
      operation.read ? end_read(operation, Outcome::kOk) : end_write(operation, Outcome::kOk);
      return false;
    }
    if (operation.write && (transfer.result == -ENOSPC || transfer.result == -EDQUOT) && !operation.retried) {
      operation.retried = true;
      if (directory_.make_space(operation.bytes)) {
        range = {0, operation.bytes};
        return true;
      }
    }
    if (operation.read) {
      if (transfer.result < 0) counters_.add(Count::kIoErrors);
      end_read(operation, transfer.result == 0 ? Outcome::kCorrupt : Outcome::kIoError);
    } else {
      const bool full = transfer.result == -ENOSPC || transfer.result == -EDQUOT;
      counters_.add(full ? Count::kNoSpace : Count::kIoErrors);
      end_write(operation, full ? Outcome::kRefused : Outcome::kIoError);
    }
  } catch (...) {
    operation.read ? end_read(operation, Outcome::kIoError) : end_write(operation, Outcome::kIoError);
  }
  return false;
}

void Core::end_read(Operation& operation, Outcome outcome) noexcept {
  if (operation.fd >= 0) io_->close(operation.fd);
  operation.fd = -1;
  ReadRequest request = std::move(*operation.read);
  if (outcome == Outcome::kOk) {
    counters_.add(Count::kReads);
    counters_.add(Count::kReadBytes, static_cast<std::uint64_t>(operation.bytes));
    try {
      directory_.used(request.id);
    } catch (...) {  // no memory: it counts as unused
    }
  }
  if (operation.start != Clock::time_point{}) counters_.read_seconds.add(Clock::now() - operation.start);
  request.done({outcome, std::move(request.into), operation.bytes});
}

void Core::end_write(Operation& operation, Outcome outcome) noexcept {
  WriteRequest request = std::move(*operation.write);
  const bool written = outcome == Outcome::kOk && operation.draft.fd >= 0;
  try {
    if (written) outcome = directory_.publish(request.id, operation.draft);
  } catch (...) {  // no memory
    outcome = Outcome::kIoError;
  }
  try {
    if (operation.draft.fd >= 0 || operation.draft.reserved > 0) directory_.discard(operation.draft);
  } catch (...) {  // who counts finds it
  }
  if (written && outcome == Outcome::kOk) {
    counters_.add(Count::kWrites);
    counters_.add(Count::kWriteBytes, static_cast<std::uint64_t>(operation.bytes));
  }
  counters_.write_seconds.add(Clock::now() - operation.start);
  request.image = nullptr;
  request.done(outcome);
}

/// Now and then: the account, and what dead processes left.
void Core::keep_house() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    work_house_.wait_for(lock, std::chrono::milliseconds(200), [&] { return stop_; });
    lock.unlock();
    try {
      directory_.keep_house();
    } catch (...) {  // a directory that went away; requests say so
    }
    lock.lock();
  }
}

/// Answers questions about keys that this process does not know.
void Core::answer() {
  std::unique_lock lock(mutex_);
  while (true) {
    question_.wait(lock, [&] { return stop_ || (asked_ && !asked_->done); });
    if (stop_) return;
    const std::shared_ptr<Question> question = asked_;
    lock.unlock();
    bool found = false;
    try {
      found = directory_.probe(question->space, question->keys, question->heads, question->prefix);
    } catch (...) {
    }
    lock.lock();
    question->found = found;
    question->done = true;
    answered_.notify_all();
  }
}

bool Core::probe(std::uint32_t space, std::vector<Key> keys, Heads heads, bool prefix, Clock::time_point begin) {
  const Clock::time_point until = begin + options_.lookup_timeout;
  if (Clock::now() >= until) return false;
  const auto question = std::make_shared<Question>(Question{space, std::move(keys), heads, prefix, until});
  std::unique_lock lock(mutex_);
  // One at a time. Who comes while the file system keeps an old one waits no longer than that one did.
  const auto answered = [&] { return stop_ || !asked_ || asked_->done; };
  while (!answered()) {
    const Clock::time_point limit = std::min(until, asked_->until);
    if (!answered_.wait_until(lock, limit, answered)) return false;
  }
  if (stop_) return false;
  asked_ = question;
  question_.notify_one();
  answered_.wait_until(lock, until, [&] { return stop_ || question->done; });
  return question->found;
}

class DirectoryTier final : public Tier {
 public:
  explicit DirectoryTier(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  ~DirectoryTier() override {
    core_->stop();
    keep_where_forked(core_, core_->pid_);
  }

  const char* kind() const override { return "directory"; }
  std::uint32_t space(const Namespace& space) override { return core_->directory_.space(space.digest()); }
  void pieces(std::uint32_t space, const Key& key, std::vector<Piece>& out) override {
    if (!core_->sick()) core_->directory_.pieces(space, key, out);
  }
  std::size_t covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                      std::span<std::uint8_t> out) override {
    return core_->sick() ? 0 : core_->directory_.covered(space, keys, heads, prefix, out);
  }
  bool probe(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
             Clock::time_point begin) override {
    return !core_->sick() && core_->probe(space, {keys.begin(), keys.end()}, heads, prefix, begin);
  }
  BufferPtr buffer(std::int64_t bytes) override { return core_->buffer(bytes); }
  std::int64_t largest() const override { return core_->largest(); }
  bool holds(const PieceId& id) override { return core_->directory_.holds(id); }
  void read(ReadRequest request) override {
    Operation operation;
    operation.read = std::move(request);
    core_->add(std::move(operation));
  }
  void write(WriteRequest request) override {
    Operation operation;
    operation.write = std::move(request);
    core_->add(std::move(operation));
  }
  void damaged(const PieceId& id) override { let_go(id, Going::kDamaged); }
  bool remove(std::uint32_t space, const Key& key) override {
    std::vector<Piece> known;
    core_->directory_.pieces(space, key, known);
    for (const Piece& piece : known) let_go({space, key, piece.heads}, Going::kRemoved);
    return !known.empty();
  }

  std::shared_ptr<void> pin(std::uint32_t space, const Key& key) override {
    struct Pinned {
      std::shared_ptr<Core> core;
      std::vector<Pin> pins;
      ~Pinned() {
        for (const Pin one : pins) core->directory_.unpin(one);
      }
    };
    auto out = std::make_shared<Pinned>();
    out->core = core_;
    std::vector<Piece> known;
    core_->directory_.pieces(space, key, known);
    for (const Piece& piece : known) {
      if (const std::optional<Pin> pin = core_->directory_.pin({space, key, piece.heads})) out->pins.push_back(*pin);
    }
    return out->pins.empty() ? nullptr : out;
  }

  std::vector<Key> take_gone(std::uint32_t space) override { return core_->directory_.take_gone(space); }

  TierMetrics metrics() const override {
    TierMetrics out;
    out.tier = kind();
    out.detail = fmt::format("{}, {}", core_->options_.path, core_->engine());
    if (core_->directory_.read_only()) out.detail += ", read-only";
    if (core_->directory_.lost()) out.detail += ", its account is lost: nothing can be written";
    out.capacity_bytes = core_->options_.max_bytes;
    out.used_bytes = core_->directory_.used_bytes();
    out.chunks = core_->directory_.num_pieces();
    core_->counters_.fill(out);
    return out;
  }

 private:
  void let_go(const PieceId& id, Going why) {
    core_->directory_.let_go(id, why);
    core_->add_task([core = core_.get(), id] { core->directory_.settle(id); });
  }

  std::shared_ptr<Core> core_;
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
  auto core = std::make_shared<Core>(options, std::move(io));
  core->start();
  return std::make_shared<DirectoryTier>(std::move(core));
}

}  // namespace kvstride::store

namespace kvstride {

TierPtr directory_tier(const DirectoryTierOptions& options) {
  return store::make_directory_tier(options, store::system_io());
}

}  // namespace kvstride
