// SPDX-License-Identifier: Apache-2.0
// What a tier asks of an engine that others run: objects under names. RemoteTier (remote_tier.h) does all the rest.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "store/chunk.h"
#include "store/metrics.h"

namespace kvstride::store {

/// What an engine says of one item.
enum class Answer : std::uint8_t {
  kLate,      ///< the deadline passed; what nobody has answered yet
  kOk,        ///< done. Of a write: the object is there now
  kThere,     ///< of a write that does not replace: an object of that name was there, and stays
  kAbsent,    ///< no such object
  kFull,      ///< no room
  kTooLarge,  ///< never
  kDenied,    ///< credentials, permissions, no such bucket: a person must act
  kBroken,    ///< the connection or the server failed; trying again may help
};
/// `late`, `ok`, `there`, `absent`, `full`, `too_large`, `denied`, `broken`.
const char* name_of(Answer answer);

/// Is there an object of this name, and how long is it?
struct FindItem {
  std::string name;
  Answer answer = Answer::kLate;
  std::int64_t bytes = -1;  ///< with kOk
};

struct ReadItem {
  std::string name;
  std::vector<Bytes> ranges;  ///< of the object, ascending, apart, not empty; each comes to its own place in `into`
  std::byte* into = nullptr;  ///< memory for the whole object
  std::int64_t bytes = 0;     ///< how long the object should be
  Answer answer = Answer::kLate;
  /// With kOk: how long it is; -1: the engine does not tell. Where it is not `bytes` what was read means nothing.
  std::int64_t found = -1;
};

struct WriteItem {
  std::string name;
  std::span<const std::byte> data;
  bool replace = false;  ///< what is there is known to be damaged
  Answer answer = Answer::kLate;
};

struct RemoveItem {
  std::string name;
  Answer answer = Answer::kLate;  ///< kOk, also where nothing was there
};

/// Of a listing: an object, or a folder (its name ends in '/').
struct ListedObject {
  std::string name;  ///< whole
  std::int64_t bytes = -1;
  std::int64_t modified = 0;  ///< seconds since 1970; 0: not told
};

/// Names are relative to what the engine was opened with (a prefix of a bucket, say): characters a-z 0-9 / only, at
/// most 300 of them.
///
/// Calls block, at most until little after `deadline`, and may come from several threads at once. They throw nothing
/// but std::bad_alloc: what goes wrong is the answer of each item. An item's memory belongs to the engine from the call
/// on until `done(i)` for it, which is called once for each item, on the calling thread, as soon as it has its
/// answer; nothing of the engine may touch the memory after that, whatever becomes of the connection. Nobody repeats a
/// request but the caller: engines do not retry on their own.
class Engine {
 public:
  using Done = std::function<void(std::size_t)>;
  virtual ~Engine() = default;

  /// `s3`, `redis`, `mooncake`.
  virtual const char* kind() const = 0;
  /// Where, for people: no password.
  virtual std::string detail() const = 0;
  /// What went wrong last, one line for people, without secrets; empty: nothing has.
  virtual std::string trouble() const { return ""; }
  /// The longest object.
  virtual std::int64_t largest() const = 0;
  /// Whether a range of an object is read without the rest.
  virtual bool reads_ranges() const = 0;
  /// How many threads may usefully call at once.
  virtual int num_threads() const = 0;
  /// How many items a call of read() or write() should have: more are done one after the other anyway.
  virtual std::size_t batch() const = 0;
  /// How many names find() asks in one round trip, by one request or side by side.
  virtual std::size_t names_a_trip() const = 0;
  /// Memory from which items will be read and to which they will be written, before the first of them; for engines
  /// that must register it. False: it could not, and shall be asked again.
  virtual bool memory(std::span<std::byte>) { return true; }

  virtual void find(std::span<FindItem> items, Clock::time_point deadline) = 0;
  virtual void read(std::span<ReadItem> items, Clock::time_point deadline, const Done& done) = 0;
  virtual void write(std::span<WriteItem> items, Clock::time_point deadline, const Done& done) = 0;
  virtual void remove(std::span<RemoveItem> items, Clock::time_point deadline) = 0;

  /// What lies right below `folder` ("" or a name that ends in '/'), in no order; `use` answers false to end it. kOk;
  /// kAbsent: this engine cannot list.
  virtual Answer list(const std::string& folder, Clock::time_point deadline,
                      const std::function<bool(const ListedObject&)>& use) = 0;
};
using EnginePtr = std::shared_ptr<Engine>;

/// A URL in parts: scheme://user:password@host:port/path?name=value&… Percent signs are decoded, but in `host`.
struct Url {
  std::string scheme;
  std::string user;
  std::string password;
  std::string host;
  int port = 0;      ///< 0: none
  std::string path;  ///< without the slash before it
  std::vector<std::pair<std::string, std::string>> options;

  /// Throws Error(kArgument) that names the part (never a password).
  static Url parse(const std::string& text);
};

/// Engines by scheme. Each checks its part of the URL and its options, throws Error(kArgument) for what cannot be, and
/// connects with the first call.
EnginePtr s3_engine(const Url& url);
EnginePtr redis_engine(const Url& url);
/// The one that `text` names; Error(kArgument) that lists the schemes.
EnginePtr engine_of(const std::string& text);

}  // namespace kvstride::store
