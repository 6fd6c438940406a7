// SPDX-License-Identifier: Apache-2.0
// What the store asks of a place for chunks.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvstride/store.h"
#include "store/admission.h"
#include "store/chunk.h"
#include "store/index.h"
#include "store/metrics.h"

namespace kvstride::store {

/// Memory for one image, page-aligned. Whoever holds a pointer to it may use it; the last one gives it back.
class Buffer {
 public:
  virtual ~Buffer() = default;
  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  /// The tier, or the tier's memory, that it came from.
  const void* home() const { return home_; }

  /// All the memory that buffers of its home lie in, and what keeps that.
  struct Region {
    std::span<std::byte> bytes;
    std::shared_ptr<const void> owner;
  };
  virtual Region region() const = 0;

 protected:
  Buffer(std::byte* data, std::int64_t bytes, const void* home) : data_(data), bytes_(bytes), home_(home) {}

 private:
  std::byte* data_;
  std::int64_t bytes_;
  const void* home_;
};
using BufferPtr = std::shared_ptr<Buffer>;

/// A piece that a tier holds.
struct Piece {
  Heads heads;
  std::int64_t bytes = 0;  ///< of the image, whole pages
};

/// Nobody wants it any more: what the tier has not started is refused. Null: it is always wanted.
using Cancelled = std::shared_ptr<const std::atomic<bool>>;
inline bool is_cancelled(const Cancelled& cancelled) { return cancelled && cancelled->load(); }

struct ReadResult {
  Outcome outcome = Outcome::kMiss;  ///< with `bytes`: it is there, but longer or shorter than was known
  BufferPtr image;                   ///< with the ranges that were asked for at their places
  std::int64_t bytes = 0;            ///< of the whole image
};
struct ReadRequest {
  PieceId id;
  std::vector<Bytes> ranges;  ///< whole pages, ascending, apart; none: the whole image
  BufferPtr into;             ///< may be left out where the tier lends() its memory
  Clock::time_point deadline;
  Cancelled cancelled;
  std::function<void(ReadResult)> done;  ///< called once, from any thread, perhaps before read() returns
  bool more = false;                     ///< others of the same job follow at once: a tier may wait a moment for them
};
struct WriteRequest {
  PieceId id;
  BufferPtr image;
  std::int64_t bytes = 0;  ///< whole pages
  Clock::time_point deadline;
  Cancelled cancelled;
  std::function<void(Outcome)> done;  ///< as above; the tier has let go of `image` unless it keeps it
  Admitted admitted;                  ///< by this tier, which says where it is written()
  TenantName tenant;
  bool more = false;  ///< as above

  /// The last thing a tier does with it: nothing is held any more when `done` is told.
  void finish(Outcome outcome) {
    image = nullptr;
    admitted = {};
    done(outcome);
  }
};

/// All calls are thread-safe, throw nothing but std::bad_alloc, and wait for no disk.
class Tier {
 public:
  explicit Tier(std::shared_ptr<Admission> admission) : admission_(std::move(admission)) {}
  virtual ~Tier() = default;
  /// Throws Error(kStore) in a forked child: it has a copy of the bookkeeping and none of the threads, and would spoil
  /// what it shares with the parent.
  void check_process(const char* what) const;
  virtual const char* kind() const = 0;

  /// This tier's number of a namespace.
  virtual std::uint32_t space(const Namespace& space) = 0;

  /// Pieces of a chunk that are known without asking anybody, appended.
  virtual void pieces(std::uint32_t space, const Key& key, std::vector<Piece>& out) = 0;
  /// For each key whether one known piece has all of `heads`; with `prefix` only up to the first that has not. Returns
  /// the number of leading keys that have.
  virtual std::size_t covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                              std::span<std::uint8_t> out) = 0;
  /// Asks whoever may know more about these keys (files that another process wrote), in their order and for a bounded
  /// time from `begin` on; with `prefix` up to the first that nobody has. Whether pieces() knows more now.
  virtual bool probe(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                     Clock::time_point begin) = 0;

  /// An answer of probe() takes a journey: it is asked once about all keys of a request, not about one after the other.
  virtual bool far() const { return false; }

  /// Whether images in this tier's memory are read without a copy; read() then needs no `into`.
  virtual bool lends() const { return false; }
  /// Memory for an image that write() of this tier may keep without a copy, or that its I/O is fast with; null where
  /// there is none at the moment.
  virtual BufferPtr buffer(std::int64_t bytes) = 0;
  /// The largest image that fits at all.
  virtual std::int64_t largest() const = 0;
  virtual bool holds(const PieceId& id) = 0;

  /// A request asks for a piece, which it reads or brings; once a request.
  void asked(const PieceId& id) { admission_->asked(id.space, {&id.key, 1}, id.heads); }
  /// Whether a piece that the tier lacks may be written to it; what is yes goes into the WriteRequest.
  Admitted admit(const PieceId& id, std::int64_t bytes, const TenantName& tenant);
  /// Counts that a piece was not written because admit() said so.
  void count_refusal(Admit why);

  virtual void read(ReadRequest request) = 0;
  virtual void write(WriteRequest request) = 0;
  /// The piece failed verification: it is set aside, and no longer found.
  virtual void damaged(const PieceId& id) = 0;
  virtual bool remove(std::uint32_t space, const Key& key) = 0;
  /// Keeps all known pieces of a chunk until the result is dropped; null where there are none.
  virtual std::shared_ptr<void> pin(std::uint32_t space, const Key& key) = 0;

  /// Where chunks of a namespace go that only this tier holds, when it evicts them.
  virtual void demote_to(std::uint32_t, std::weak_ptr<Tier>, std::uint32_t /*its number of the namespace*/) {}
  /// The piece is one of those: some tier did not take it.
  virtual void only_here(const PieceId&) {}

  /// Keys of pieces that have left for good since the last call; the first call begins. Bounded. Nothing of tiers
  /// above others.
  virtual std::vector<Key> take_gone(std::uint32_t) { return {}; }

  /// A cache on a device is there: the memory that images lie in is pinned, if it is not yet and if CUDA lets it. May
  /// take seconds.
  virtual void pin_memory(Device) noexcept = 0;

  virtual TierMetrics metrics() const = 0;

 protected:
  virtual Counters& counters() = 0;
  const std::shared_ptr<Admission> admission_;

 private:
  const pid_t pid_ = ::getpid();
};

}  // namespace kvstride::store
