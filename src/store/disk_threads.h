// SPDX-License-Identifier: Apache-2.0
// The threads of a directory tier, what waits for them, and their memory.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kvstride/store.h"
#include "store/directory.h"
#include "store/io.h"
#include "store/pinning.h"
#include "store/staging.h"
#include "store/tier.h"

namespace kvstride::store {

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
class DiskThreads : public std::enable_shared_from_this<DiskThreads> {
 public:
  /// Opens the directory; start() makes the threads. Throws Error(kStore).
  DiskThreads(const DirectoryTierOptions& options, const std::shared_ptr<Io>& io, std::shared_ptr<Admission> admission);

  void start();
  void stop();

  void add(Operation operation);
  void add_task(std::function<void()> task);
  bool sick() const;
  bool probe(std::uint32_t space, std::vector<Key> keys, Heads heads, bool prefix, Clock::time_point begin);
  /// Which engine it is, as far as threads know.
  std::string engine() const;

  const DirectoryTierOptions options_;
  const std::shared_ptr<Io> io_;
  Counters counters_;
  const std::shared_ptr<Staging> staging_;
  Pinning pinning_;
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

}  // namespace kvstride::store
