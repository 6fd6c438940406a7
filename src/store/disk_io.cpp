// SPDX-License-Identifier: Apache-2.0
// Reading and writing files of a directory: what one thread does, several at a time where the kernel has io_uring.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "store/disk_threads.h"

namespace kvstride::store {
namespace {

using Engine = DirectoryTierOptions::Engine;

constexpr std::size_t kRingDepth = 32;
constexpr std::int64_t kSmall = 512 << 10;  ///< transfers that are started together
/// With so many bytes under way a thread starts no other file: the disk has enough to do, and files that end one after
/// the other are checked or made while the next ones move, where many at once would all end, and begin, together.
constexpr std::int64_t kEnough = 16 << 20;
constexpr int kMostTries = 16;  ///< of a page that comes or goes in part only

}  // namespace

/// A ring where there is one, unless something else is asked for.
std::unique_ptr<Transfers> DiskThreads::transfers(std::string& name) {
  if (options_.engine != Engine::kBlocking) {
    // Only this memory: pinned pages are copied by every fork, and no child needs it.
    const iovec memory{staging_->memory().data(), static_cast<std::size_t>(staging_->memory().size())};
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

/// One thread: starts files while it has room for more, and goes on with what has ended.
void DiskThreads::run(std::size_t number) {
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
  std::int64_t bytes_under_way = 0;
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
    bytes_under_way += bytes;
    io->submit({operation.fd, data + range.begin, static_cast<std::size_t>(bytes), range.begin,
                operation.write.has_value(), token, 0},
               bytes < kSmall);
  };
  while (true) {
    while (io->under_way() < io->depth() && bytes_under_way < kEnough) {
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
      bytes_under_way -= static_cast<std::int64_t>(transfer.bytes);
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
bool DiskThreads::begin(Operation& operation) {
  if (operation.task) {
    try {
      operation.task();
    } catch (...) {  // no memory: it is done when it is found again
    }
    return false;
  }
  try {
    if (is_cancelled(operation.read ? operation.read->cancelled : operation.write->cancelled)) {
      operation.read ? end_read(operation, Outcome::kRefused) : end_write(operation, Outcome::kRefused);
    } else if (Clock::now() >= operation.deadline) {
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

void DiskThreads::begin_read(Operation& operation) {
  ReadRequest& request = *operation.read;
  operation.fd = directory_.open_piece(request.id, operation.bytes);
  if (operation.fd < 0) {
    const bool gone = operation.fd == -ENOENT;
    if (!gone) counters_.add(Count::kIoErrors);
    return end_read(operation, gone ? Outcome::kMiss : Outcome::kIoError);
  }
  if (operation.bytes < kPage || operation.bytes % kPage != 0) return end_read(operation, Outcome::kCorrupt);
  // Another length than the index had: damaged, or in another order (`kvstride store convert`). Whoever asks again,
  // and for all of it, will see.
  const std::int64_t needed = request.ranges.empty() ? 0 : request.ranges.back().end;
  if (operation.bytes > request.into->bytes() || operation.bytes < needed) {
    directory_.other_length(request.id, operation.bytes);
    return end_read(operation, Outcome::kMiss);
  }
  operation.ranges = request.ranges;
  if (operation.ranges.empty()) operation.ranges = {{0, operation.bytes}};
}

void DiskThreads::begin_write(Operation& operation) {
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
bool DiskThreads::moved(Operation& operation, const Transfer& transfer) {
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
    const bool full = no_space(static_cast<int>(transfer.result));
    if (operation.write && full && !operation.retried) {
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
      counters_.add(full ? Count::kNoSpace : Count::kIoErrors);
      end_write(operation, full ? Outcome::kRefused : Outcome::kIoError);
    }
  } catch (...) {
    operation.read ? end_read(operation, Outcome::kIoError) : end_write(operation, Outcome::kIoError);
  }
  return false;
}

void DiskThreads::end_read(Operation& operation, Outcome outcome) noexcept {
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

void DiskThreads::end_write(Operation& operation, Outcome outcome) noexcept {
  WriteRequest request = std::move(*operation.write);
  const bool written = outcome == Outcome::kOk && operation.draft.fd >= 0;
  try {
    if (written) outcome = directory_.publish(request.id, operation.draft, request.admitted.tenant());
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
    request.admitted.written();
  }
  counters_.write_seconds.add(Clock::now() - operation.start);
  request.finish(outcome);
}

}  // namespace kvstride::store
