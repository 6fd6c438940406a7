// SPDX-License-Identifier: Apache-2.0
// An engine's objects looked at from outside: what is there, and whether it is sound. Names are those of spaces.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/inspect.h"
#include "store/remote/engine.h"

namespace kvstride::store {

/// How long an engine may take.
struct Patience {
  Clock::duration question = std::chrono::seconds(10);
  Clock::duration batch = std::chrono::seconds(60);  ///< of reads or removals
  Clock::duration listing = std::chrono::minutes(10);
  Clock::duration pause = std::chrono::milliseconds(100);  ///< before a second attempt; then twice that
};

/// All that an engine holds. What failed and may be repeated (Answer::kBroken) is tried three times. Processes may be
/// using it: objects come and go. Thread-safe.
class RemoteStore final : public ChunkStore {
 public:
  explicit RemoteStore(EnginePtr engine, Patience patience = {});

  Engine& engine() const { return *engine_; }
  const Patience& patience() const { return patience_; }

  /// Why the engine did not do it, for people: `the connection or the server failed`, with what it says
  /// itself.
  std::string why(Answer answer) const;

  /// How long one harmless question takes. Throws Error(kStore) where it is not answered.
  std::chrono::nanoseconds ask() const;

  std::string where() const override { return engine_->detail(); }
  std::vector<std::string> spaces(std::string_view prefix = {}) const override;
  std::unique_ptr<ChunkSpace> open(const std::string& name) const override;

  /// What lies right below `folder` and `keep` wants, each once, in the order of names.
  Answer list(const std::string& folder, const std::function<bool(const ListedObject&)>& keep,
              std::vector<ListedObject>& out) const;
  /// With `bytes` where it is there.
  void find(std::vector<FindItem>& items) const;
  void read(std::vector<ReadItem>& items) const;
  /// One batch after the other; calls `done` with the index of each name. Where it answers false the rest is left out.
  void remove(std::span<const std::string> names, const std::function<bool(std::size_t, Answer)>& done) const;

 private:
  EnginePtr engine_;
  Patience patience_;
};

/// A marker of a head range.
struct Marker {
  std::string name;           ///< whole
  std::int64_t modified = 0;  ///< nanoseconds since 1970; 0: not told
};

/// Objects of one namespace, as ChunkFiles: `used` is when they were written (0 where the engine does not tell), `read`
/// is never known. The store must outlive it. Thread-safe.
class RemoteSpace final : public ChunkSpace {
 public:
  RemoteSpace(const RemoteStore& store, std::string name);

  const RemoteStore& store() const { return store_; }
  /// Each folder in the order of keys and heads. A folder's names are in memory at once.
  bool list(const std::function<void(const ChunkFile&)>& use, std::vector<Stray>* strays = nullptr) const override;
  /// The same, with the markers.
  bool list(const std::function<void(const ChunkFile&)>& use, std::vector<Stray>* strays,
            std::vector<Marker>* markers) const;
  /// Reads its pages only where the engine can.
  std::optional<Header> header(const ChunkFile& file, std::string* why = nullptr) const override;
  std::unique_ptr<ChunkVerifier> verifier() const override;

 private:
  const RemoteStore& store_;
};

}  // namespace kvstride::store
