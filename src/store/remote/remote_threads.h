// SPDX-License-Identifier: Apache-2.0
// The threads of a remote tier, and what waits for them.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "store/pinning.h"
#include "store/remote/breaker.h"
#include "store/remote/engine.h"
#include "store/remote/known.h"
#include "store/remote/spaces.h"
#include "store/staging.h"
#include "store/tier.h"

namespace kvstride::store {

/// What outlives the tier where an engine's call does not come back: threads hold it.
class RemoteThreads : public std::enable_shared_from_this<RemoteThreads> {
 public:
  /// start() makes the threads. Throws Error(kStore).
  RemoteThreads(const RemoteTierOptions& options, EnginePtr engine);

  void start();
  void stop();

  void read(ReadRequest request);
  void write(WriteRequest request);
  /// Removes every piece of a key, behind the caller's back.
  void remove(std::uint32_t space, const Key& key);
  /// Asks the engine, for a bounded time; whether more may be known now.
  bool probe(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix, Clock::time_point begin);
  /// The engine is left alone, or keeps every thread.
  bool sick() const;
  std::int64_t largest() const { return std::min(staging_->largest(), engine_->largest()); }

  const RemoteTierOptions options_;
  const EnginePtr engine_;
  const std::shared_ptr<Staging> staging_;
  Pinning pinning_;
  Counters counters_;
  Spaces spaces_;
  Known known_;
  const pid_t pid_ = getpid();

 private:
  using Seconds = std::chrono::duration<double>;

  /// A request, and how far it is.
  struct Read {
    ReadRequest request;
    std::string name;
    std::int64_t bytes = 0;  ///< as was known
    Clock::time_point start;
    Clock::time_point begun;  ///< the attempt
    int attempts = 0;
  };
  struct Write {
    WriteRequest request;
    std::string name;
    Clock::time_point start;
    Clock::time_point begun;
    int attempts = 0;
  };
  template <typename Operation>
  struct Queue {
    std::deque<Operation> ready;
    std::multimap<Clock::time_point, Operation> later;  ///< they failed, and are tried again then
    Clock::time_point begin;                            ///< until then more are expected in `ready`
    std::size_t size() const { return ready.size() + later.size(); }
  };
  struct Removal {
    std::uint32_t space = 0;
    Key key;
    int attempts = 0;
  };
  struct Question {
    std::uint32_t space = 0;
    std::vector<Key> keys;
    Heads heads;
    bool prefix = false;
    Clock::time_point until;
    bool done = false;
  };
  /// Where a thread is: an engine that hangs keeps it from getting on.
  struct Busy {
    std::atomic<Clock::rep> until{0};  ///< when its call should have ended; 0: it has none
  };

  void run(std::size_t number);
  void answer();
  void ask(Question& question);
  void find_out();
  void remove_now(std::vector<Removal> removals);
  std::vector<Read> take_reads();
  std::vector<Write> take_writes();
  void read_batch(std::vector<Read> batch, Clock::time_point limit);
  void write_batch(std::vector<Write> batch, Clock::time_point limit);
  void settle(Read&& operation, const ReadItem& item) noexcept;
  void settle(Write&& operation, Answer answer, bool found = false) noexcept;
  template <typename Operation>
  void add(Queue<Operation>& queue, Operation operation);
  /// Ends what shall not be attempted any more; whether it did.
  template <typename Operation>
  bool drop(Operation& operation, Clock::time_point now);
  template <typename Operation>
  bool again(Operation& operation, Queue<Operation>& queue, Answer answer);
  void note(Answer answer, bool write, Clock::time_point begun, Seconds longest);
  bool note_finds(std::span<const FindItem> items, Clock::time_point begun, Seconds longest);
  void end(Read&& operation, Outcome outcome, std::int64_t bytes = 0) noexcept;
  void end(Write&& operation, Outcome outcome) noexcept;
  void tell_memory(const Buffer& buffer);
  std::vector<bool> are_there(const std::vector<Write>& batch, Clock::time_point limit);
  Answer mark(const PieceId& id, Clock::time_point limit);
  Clock::time_point limit_of(Clock::time_point deadline) const;

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable question_;
  std::condition_variable answered_;
  std::condition_variable ended_;
  Queue<Read> reads_;
  Queue<Write> writes_;
  std::int64_t write_bytes_ = 0;  ///< of writes that wait or are under way
  std::size_t writers_ = 0;       ///< threads that write now
  std::deque<Removal> removals_;
  std::deque<std::shared_ptr<Question>> asked_;
  std::optional<Clock::time_point> answer_until_;  ///< when the question in hand is overdue
  bool stop_ = false;
  std::size_t alive_ = 0;
  std::vector<std::thread> threads_;
  std::vector<std::unique_ptr<Busy>> busy_;

  Breaker breaker_;        ///< of everything
  Breaker write_breaker_;  ///< of writes alone: full, or not allowed

  std::mutex memory_mutex_;
  std::vector<Buffer::Region> told_;  ///< to the engine
};

}  // namespace kvstride::store
