// SPDX-License-Identifier: Apache-2.0
// A tier in an engine that others run.
#include "store/remote/remote_tier.h"

#include <fmt/format.h>

#include "kvstride/error.h"
#include "store/forked.h"
#include "store/remote/remote_threads.h"

namespace kvstride::store {
namespace {

class RemoteTier final : public Tier {
 public:
  explicit RemoteTier(std::shared_ptr<RemoteThreads> remote)
      : Tier(std::make_shared<Admission>(remote->options_.admission)), remote_(std::move(remote)) {}
  ~RemoteTier() override {
    remote_->stop();
    keep_where_forked(remote_, remote_->pid_);
  }

  const char* kind() const override { return remote_->engine_->kind(); }
  std::uint32_t space(const Namespace& space) override { return remote_->spaces_.number(space); }
  void pieces(std::uint32_t space, const Key& key, std::vector<Piece>& out) override {
    if (!remote_->sick()) remote_->known_.pieces(space, key, Clock::now(), out);
  }
  std::size_t covered(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                      std::span<std::uint8_t> out) override {
    return remote_->sick() ? 0 : remote_->known_.covered(space, keys, heads, prefix, Clock::now(), out);
  }
  bool probe(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
             Clock::time_point begin) override {
    if (!remote_->sick()) return remote_->probe(space, keys, heads, prefix, begin);
    remote_->counters_.add(Count::kRefusedSick);
    return false;
  }
  bool far() const override { return true; }
  BufferPtr buffer(std::int64_t bytes) override { return remote_->staging_->buffer(bytes); }
  std::int64_t largest() const override { return remote_->largest(); }
  bool holds(const PieceId& id) override { return remote_->known_.holds(id, Clock::now()); }
  void read(ReadRequest request) override { remote_->read(std::move(request)); }
  void write(WriteRequest request) override { remote_->write(std::move(request)); }

  /// Nothing is removed there: what came damaged may lie undamaged. It is not read again for a while, and whoever has
  /// the chunk writes it anew.
  void damaged(const PieceId& id) override {
    remote_->counters_.add(Count::kCorrupt);
    remote_->known_.learn_damaged(id, Clock::now());
  }

  bool remove(std::uint32_t space, const Key& key) override {
    std::vector<Piece> known;
    const Clock::time_point now = Clock::now();
    remote_->known_.pieces(space, key, now, known);
    for (const Piece& piece : known) remote_->known_.forget({space, key, piece.heads}, now);
    remote_->counters_.add(Count::kRemoved, known.size());
    remote_->remove(space, key);  // also what is not known
    return !known.empty();
  }

  /// An engine evicts as it likes: this only says that it is there.
  std::shared_ptr<void> pin(std::uint32_t space, const Key& key) override {
    std::vector<Piece> known;
    pieces(space, key, known);
    return known.empty() ? nullptr : std::make_shared<int>();
  }

  void pin_memory(Device device) noexcept override {
    remote_->pinning_.pin(device, remote_->staging_->memory(), remote_->counters_);
  }

  TierMetrics metrics() const override {
    TierMetrics out;
    out.tier = kind();
    out.detail = remote_->engine_->detail();
    if (const std::string pinned = remote_->pinning_.detail(); !pinned.empty()) out.detail += ", " + pinned;
    if (const std::string last = remote_->engine_->trouble(); !last.empty()) out.detail += ", " + last;
    if (remote_->sick()) out.detail += ": it does not answer, or refuses, and is left alone for a while";
    out.chunks = static_cast<std::int64_t>(remote_->known_.size());
    remote_->counters_.fill(out);
    return out;
  }

 private:
  Counters& counters() override { return remote_->counters_; }

  std::shared_ptr<RemoteThreads> remote_;
};

void check(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  throw Error(ErrorCode::kArgument, fmt::format("RemoteTier: {} is {}, of {} to {}", name, value, least, most));
}

}  // namespace

TierPtr make_remote_tier(const RemoteTierOptions& given, EnginePtr engine) {
  RemoteTierOptions options = given;
  constexpr std::int64_t kMost = std::int64_t{1} << 43;
  if (options.staging_bytes == 0) options.staging_bytes = std::int64_t{256} << 20;
  if (options.queue_bytes == 0) options.queue_bytes = options.staging_bytes / 2;
  check("staging_bytes", options.staging_bytes, 2 * kPage, kMost);
  check("queue_bytes", options.queue_bytes, kPage, kMost);
  check("queue_chunks", static_cast<std::int64_t>(options.queue_chunks), 1, 1 << 24);
  check("num_threads", options.num_threads, 0, 256);
  check("known_chunks", static_cast<std::int64_t>(options.known_chunks), 1, std::int64_t{1} << 31);
  check("retries", options.retries, 0, 100);
  check("timeout in ms", std::chrono::ceil<std::chrono::milliseconds>(options.timeout).count(), 1, 3'600'000);
  check("lookup_timeout in ms", std::chrono::ceil<std::chrono::milliseconds>(options.lookup_timeout).count(), 0,
        3'600'000);
  check("known_for in ms", std::chrono::ceil<std::chrono::milliseconds>(options.known_for).count(), 0, 86'400'000);
  const Admission admission(options.admission);  // checks
  if (admission.has_time_to_live()) {
    throw Error(ErrorCode::kArgument,
                "RemoteTier: admission: time_to_live is the engine's own: ttl= of redis://, a bucket's lifecycle");
  }
  if (admission.has_quotas()) {
    throw Error(ErrorCode::kArgument,
                "RemoteTier: admission: tenant_bytes and bytes_of_tenant: what the engine holds is not counted here");
  }
  auto remote = std::make_shared<RemoteThreads>(options, std::move(engine));
  remote->start();
  return std::make_shared<RemoteTier>(std::move(remote));
}

}  // namespace kvstride::store

namespace kvstride {

TierPtr remote_tier(const RemoteTierOptions& options) {
  return store::make_remote_tier(options, store::engine_of(options.url));
}

}  // namespace kvstride
