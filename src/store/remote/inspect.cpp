// SPDX-License-Identifier: Apache-2.0
// Listing and reading an engine's objects, a few times where its connection breaks.
#include "store/remote/inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <thread>

#include "kvstride/error.h"
#include "store/folders.h"
#include "store/listing.h"

namespace kvstride::store {
namespace {

constexpr int kAttempts = 3;
constexpr std::int64_t kBatchBytes = 16 << 20;  ///< of one call; a longer object goes alone
constexpr std::size_t kMostNames = 1000;        ///< of one call

/// Calls `call` with the items, and again with those that are broken.
template <typename Item, typename Call>
void with_repetition(std::vector<Item>& items, Clock::duration pause, const Call& call) {
  call(std::span<Item>(items));
  for (int attempt = 1; attempt < kAttempts; ++attempt, pause *= 2) {
    std::vector<std::size_t> places;
    std::vector<Item> again;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (items[i].answer != Answer::kBroken) continue;
      places.push_back(i);
      again.push_back(items[i]);
      again.back().answer = Answer::kLate;
    }
    if (places.empty()) return;
    std::this_thread::sleep_for(pause);
    call(std::span<Item>(again));
    for (std::size_t k = 0; k < places.size(); ++k) items[places[k]] = std::move(again[k]);
  }
}

std::string text_of(Answer answer) {
  switch (answer) {
    case Answer::kLate: return "no answer in time";
    case Answer::kAbsent: return "not there";
    case Answer::kFull: return "no room";
    case Answer::kTooLarge: return "too large";
    case Answer::kDenied: return "denied: credentials, permissions, or no such place";
    case Answer::kBroken: return "the connection or the server failed";
    case Answer::kOk:
    case Answer::kThere: break;
  }
  return name_of(answer);
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- the engine

RemoteStore::RemoteStore(EnginePtr engine, Patience patience) : engine_(std::move(engine)), patience_(patience) {}

std::string RemoteStore::why(Answer answer) const {
  const std::string trouble = engine_->trouble();
  return text_of(answer) + (trouble.empty() ? "" : " (" + trouble + ")");
}

std::chrono::nanoseconds RemoteStore::ask() const {
  std::vector<FindItem> items{{"kvstride"}};
  Clock::duration time{};
  with_repetition(items, patience_.pause, [&](std::span<FindItem> some) {
    const Clock::time_point begun = Clock::now();
    engine_->find(some, begun + patience_.question);
    time = Clock::now() - begun;
  });
  const Answer answer = items[0].answer;
  if (answer == Answer::kOk || answer == Answer::kAbsent) return time;
  throw Error(ErrorCode::kStore, fmt::format("store: {}: {}", where(), why(answer)));
}

Answer RemoteStore::list(const std::string& folder, const std::function<bool(const ListedObject&)>& keep,
                         std::vector<ListedObject>& out) const {
  Answer answer = Answer::kBroken;
  Clock::duration pause = patience_.pause;
  for (int attempt = 0; attempt < kAttempts && answer == Answer::kBroken; ++attempt) {
    if (attempt > 0) {
      std::this_thread::sleep_for(pause);
      pause *= 2;
    }
    out.clear();
    answer = engine_->list(folder, Clock::now() + patience_.listing, [&](const ListedObject& one) {
      if (one.name.size() > folder.size() && one.name.compare(0, folder.size(), folder) == 0 && keep(one)) {
        out.push_back(one);
      }
      return true;
    });
  }
  const auto less = [](const ListedObject& a, const ListedObject& b) { return a.name < b.name; };
  const auto same = [](const ListedObject& a, const ListedObject& b) { return a.name == b.name; };
  std::sort(out.begin(), out.end(), less);
  out.erase(std::unique(out.begin(), out.end(), same), out.end());
  return answer;
}

void RemoteStore::find(std::vector<FindItem>& items) const {
  const std::size_t most = std::clamp<std::size_t>(engine_->names_a_trip(), 1, kMostNames);
  with_repetition(items, patience_.pause, [&](std::span<FindItem> some) {
    for (std::size_t at = 0; at < some.size(); at += most) {
      engine_->find(some.subspan(at, std::min(most, some.size() - at)), Clock::now() + patience_.batch);
    }
  });
}

void RemoteStore::read(std::vector<ReadItem>& items) const {
  with_repetition(items, patience_.pause, [&](std::span<ReadItem> some) {
    engine_->read(some, Clock::now() + patience_.batch, [](std::size_t) {});
  });
}

void RemoteStore::remove(std::span<const std::string> names,
                         const std::function<bool(std::size_t, Answer)>& done) const {
  for (std::size_t at = 0; at < names.size();) {
    std::vector<RemoveItem> items;
    for (; at + items.size() < names.size() && items.size() < kMostNames;) items.push_back({names[at + items.size()]});
    with_repetition(items, patience_.pause,
                    [&](std::span<RemoveItem> some) { engine_->remove(some, Clock::now() + patience_.batch); });
    for (const RemoveItem& item : items) {
      if (!done(at++, item.answer)) return;
    }
  }
}

std::vector<std::string> RemoteStore::spaces(std::string_view prefix) const {
  check_space_prefix(prefix);
  const auto keep = [&](const ListedObject& one) {
    const std::string_view name = std::string_view(one.name).substr(0, kSpaceName);
    return one.name.size() == kSpaceName + 1 && one.name.back() == '/' && is_lower_hex(name) &&
           name.substr(0, prefix.size()) == prefix;
  };
  std::vector<ListedObject> found;
  const Answer answer = list("", keep, found);
  if (answer != Answer::kOk) {
    const std::string reason = answer == Answer::kAbsent
                                   ? "this engine does not list its objects, or not without an option of its URL"
                                   : "cannot be listed: " + why(answer);
    throw Error(ErrorCode::kStore, fmt::format("store: {}: {}", where(), reason));
  }
  std::vector<std::string> out;
  for (const ListedObject& one : found) out.push_back(one.name.substr(0, kSpaceName));
  return out;
}

std::unique_ptr<ChunkSpace> RemoteStore::open(const std::string& name) const {
  return std::make_unique<RemoteSpace>(*this, name);
}

// ------------------------------------------------------------------------------------------------------- a namespace

RemoteSpace::RemoteSpace(const RemoteStore& store, std::string name) : ChunkSpace(std::move(name)), store_(store) {}

bool RemoteSpace::list(const std::function<void(const ChunkFile&)>& use, std::vector<Stray>* strays) const {
  return list(use, strays, nullptr);
}

bool RemoteSpace::list(const std::function<void(const ChunkFile&)>& use, std::vector<Stray>* strays,
                       std::vector<Marker>* markers) const {
  constexpr std::int64_t kSecond = 1'000'000'000;
  static constexpr std::int64_t kMostSeconds = std::int64_t{1} << 33;  // what an engine tells may be anything
  const auto when = [](const ListedObject& one) {
    return std::clamp<std::int64_t>(one.modified, 0, kMostSeconds) * kSecond;
  };
  bool whole = true;
  const auto stray = [&](std::string path, std::string what) {
    if (strays != nullptr) strays->push_back({std::move(path), std::move(what)});
  };
  const auto unlisted = [&](std::string path, Answer answer) {
    whole = false;
    stray(std::move(path), "not readable: " + store_.why(answer));
  };
  const auto any = [](const ListedObject&) { return true; };
  std::vector<ListedObject> found;
  const std::string top = name() + "/";
  if (const Answer answer = store_.list(top, any, found); answer != Answer::kOk) {
    unlisted(name(), answer);
    return whole;
  }
  std::vector<std::string> shards;
  for (const ListedObject& one : found) {
    const std::string_view rest = std::string_view(one.name).substr(top.size());
    if (rest.size() == 2 && rest[1] == '/' && is_lower_hex(rest.substr(0, 1))) {
      shards.push_back(one.name);
    } else if (!parse_heads_name(rest)) {
      stray(one.name, "no name of the store");
    } else if (markers != nullptr) {
      markers->push_back({one.name, when(one)});
    }
  }
  for (const std::string& shard : shards) {
    if (const Answer answer = store_.list(shard, any, found); answer != Answer::kOk) unlisted(shard, answer);
    std::vector<ChunkFile> files;
    std::vector<FindItem> lengths;  // of those of which the listing does not tell
    std::vector<std::size_t> of;
    for (const ListedObject& one : found) {
      const std::string_view file = std::string_view(one.name).substr(shard.size());
      const auto piece = parse_file_name(file);
      if (!piece || file[0] != shard[top.size()]) {
        stray(one.name, piece ? "in the folder of another digit" : "no name of a chunk");
        continue;
      }
      if (one.bytes < 0) {
        of.push_back(files.size());
        lengths.push_back({one.name});
      }
      files.push_back({piece->first, piece->second, 0, one.bytes, one.bytes, when(one), false});
    }
    found.clear();
    store_.find(lengths);
    for (std::size_t i = 0; i < of.size(); ++i) {
      if (lengths[i].answer == Answer::kOk) {
        files[of[i]].length = files[of[i]].bytes = std::max<std::int64_t>(lengths[i].bytes, 0);
      } else if (lengths[i].answer != Answer::kAbsent) {
        unlisted(lengths[i].name, lengths[i].answer);
      }
    }
    std::erase_if(files, [](const ChunkFile& file) { return file.length < 0; });
    std::sort(files.begin(), files.end(), by_name);
    for (const ChunkFile& file : files) use(file);
  }
  return whole;
}

std::optional<Header> RemoteSpace::header(const ChunkFile& file, std::string* why) const {
  const auto refuse = [&](std::string reason) -> std::optional<Header> {
    if (why != nullptr) *why = std::move(reason);
    return std::nullopt;
  };
  if (file.length < kFixedHeader) return refuse("not a chunk file");
  try {
    const Memory memory(whole_pages(file.length));
    store_.engine().memory({memory.data(), static_cast<std::size_t>(memory.mapped())});
    std::int64_t have = 0;
    for (std::int64_t wanted = kPage; have < wanted;) {
      have = store_.engine().reads_ranges() ? std::min(wanted, file.length) : file.length;
      std::vector<ReadItem> items{{path_of(file), {{0, have}}, memory.data(), file.length}};
      store_.read(items);
      if (items[0].answer != Answer::kOk) return refuse(store_.why(items[0].answer));
      if (items[0].found >= 0 && items[0].found != file.length) return refuse("it was replaced meanwhile");
      const std::span<const std::byte> bytes(memory.data(), static_cast<std::size_t>(have));
      wanted = std::min(header_length(bytes).value_or(0), file.length);
    }
    return parse_header({memory.data(), static_cast<std::size_t>(have)}, why);
  } catch (const Error& error) {  // no memory for an object of that length
    return refuse(error.what());
  }
}

// ------------------------------------------------------------------------------------------------------- every byte

namespace {

/// Reads whole objects and checks them, some at once, with 16 MiB of memory or that of a longer object.
class RemoteVerifier final : public ChunkVerifier {
 public:
  explicit RemoteVerifier(const RemoteSpace& space) : space_(space) { have_memory(kBatchBytes); }
  std::size_t batch(std::span<const ChunkFile> files) const override;
  std::vector<Check> check(std::span<const ChunkFile> files) override;

 private:
  struct NotRead {
    bool gone = false;
    std::string why;
  };
  void have_memory(std::int64_t bytes);
  std::string check_image(const ReadItem& item, const ChunkFile& file);

  const RemoteSpace& space_;
  std::unique_ptr<Memory> memory_;
  ImageCheck image_;
};

/// At least so much, which the engine knows.
void RemoteVerifier::have_memory(std::int64_t bytes) {
  if (memory_ && memory_->size() >= bytes) return;
  auto more = std::make_unique<Memory>(bytes);
  space_.store().engine().memory({more->data(), static_cast<std::size_t>(more->mapped())});
  memory_ = std::move(more);
}

std::size_t RemoteVerifier::batch(std::span<const ChunkFile> files) const {
  const std::size_t most = std::min(files.size(), std::max<std::size_t>(space_.store().engine().batch(), 1));
  std::size_t out = 0;
  for (std::int64_t bytes = 0; out < most; ++out) {
    bytes += whole_pages(files[out].length);
    if (out > 0 && bytes > kBatchBytes) break;
  }
  return out;
}

std::vector<Check> RemoteVerifier::check(std::span<const ChunkFile> files) {
  using State = Check::State;
  std::vector<Check> out(files.size());
  std::vector<ReadItem> items;
  std::vector<std::size_t> of;
  std::int64_t bytes = 0;
  for (const ChunkFile& file : files) bytes += whole_pages(file.length);
  try {
    have_memory(bytes);
  } catch (const Error& error) {
    for (Check& one : out) one = {State::kUnreadable, error.what(), 0, 0};
    return out;
  }
  std::byte* into = memory_->data();
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::int64_t length = files[i].length;
    out[i].bytes = length;
    if (length <= 0) {
      out[i] = {State::kDamaged, "cut off: 0 bytes", 0, 0};
      continue;
    }
    // Whether an object should be so long its header says.
    const bool part = length > kBatchBytes && space_.store().engine().reads_ranges();
    items.push_back({space_.path_of(files[i]), {{0, part ? kLargestHeader : length}}, into, length});
    of.push_back(i);
    into += whole_pages(length);
  }
  space_.store().read(items);
  for (std::size_t k = 0; k < items.size(); ++k) {
    Check& one = out[of[k]];
    try {
      one.why = check_image(items[k], files[of[k]]);
      one.state = one.why.empty() ? State::kSound : State::kDamaged;
    } catch (const NotRead& failure) {
      one.state = failure.gone ? State::kGone : State::kUnreadable;
      one.why = failure.why;
    }
  }
  return out;
}

/// `item` was read from its beginning on; what is missing is read as it is needed. Throws NotRead.
std::string RemoteVerifier::check_image(const ReadItem& item, const ChunkFile& file) {
  const auto settle = [&](const ReadItem& read) {
    if (read.answer == Answer::kAbsent) throw NotRead{true, {}};
    if (read.answer != Answer::kOk) throw NotRead{false, space_.store().why(read.answer)};
    // Somebody replaced it since it was listed.
    if (read.found >= 0 && read.found != read.bytes) throw NotRead{true, {}};
  };
  settle(item);
  std::int64_t have = item.ranges[0].end;
  const auto get = [&](std::int64_t begin, std::int64_t end) {
    while (have < end) {
      const std::int64_t next = std::min(have + kBatchBytes, item.bytes);
      std::vector<ReadItem> more{{item.name, {{have, next}}, item.into, item.bytes}};
      space_.store().read(more);
      settle(more[0]);
      have = next;
    }
    return std::span<const std::byte>(item.into + begin, static_cast<std::size_t>(end - begin));
  };
  return image_.check(item.bytes, space_.digest(), file.key, file.heads, get);
}

}  // namespace

std::unique_ptr<ChunkVerifier> RemoteSpace::verifier() const { return std::make_unique<RemoteVerifier>(*this); }

}  // namespace kvstride::store
