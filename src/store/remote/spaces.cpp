// SPDX-License-Identifier: Apache-2.0
// Namespaces of a remote tier.
#include "store/remote/spaces.h"

#include <algorithm>

#include "store/folders.h"

namespace kvstride::store {
namespace {

/// Others' first chunk of a new head range is seen after this.
constexpr auto kAskAgain = std::chrono::milliseconds(500);
/// An engine that evicts, or a bucket that expires objects, may have lost a marker.
constexpr auto kMarkAgain = std::chrono::minutes(10);
constexpr std::size_t kMostRanges = 256;  ///< each is a question more for every key

}  // namespace

std::uint32_t Spaces::number(const Namespace& space) {
  const std::lock_guard lock(mutex_);
  const auto same = [&](const Space& one) { return one.digest == space.digest(); };
  const auto at = std::find_if(spaces_.begin(), spaces_.end(), same);
  if (at != spaces_.end()) return static_cast<std::uint32_t>(at - spaces_.begin());
  spaces_.push_back({space.digest(), space.fields().num_kv_heads, space.fields().raw.has_value(), {}, {}});
  return static_cast<std::uint32_t>(spaces_.size() - 1);
}

std::string Spaces::name(const PieceId& id) const {
  const std::string file = file_name(id.key, id.heads);
  const std::lock_guard lock(mutex_);
  return to_hex(spaces_[id.space].digest) + "/" + file.substr(0, 1) + "/" + file;
}

std::string Spaces::marker(std::uint32_t space, Heads heads) const {
  const std::lock_guard lock(mutex_);
  return to_hex(spaces_[space].digest) + "/" + heads_name(heads);
}

/// Whoever wants heads may have written them himself, or everything; so these are asked for though no marker is there.
std::vector<Heads> Spaces::ranges(std::uint32_t space, Heads wanted) const {
  const std::lock_guard lock(mutex_);
  if (spaces_[space].raw) return {Heads{}};
  std::vector<Heads> out{wanted};
  const auto add = [&](Heads heads) {
    if (std::find(out.begin(), out.end(), heads) == out.end()) out.push_back(heads);
  };
  add({0, static_cast<std::uint16_t>(spaces_[space].num_heads)});
  for (const Range& range : spaces_[space].ranges) {
    const Heads heads = range.heads;
    const bool meet = heads.first < wanted.first + wanted.count && wanted.first < heads.first + heads.count;
    if (heads.count == 0 || meet) add(heads);
  }
  return out;
}

std::vector<Heads> Spaces::every_range(std::uint32_t space) const {
  const std::lock_guard lock(mutex_);
  std::vector<Heads> out{Heads{}, {0, static_cast<std::uint16_t>(spaces_[space].num_heads)}};
  for (const Range& range : spaces_[space].ranges) {
    if (std::find(out.begin(), out.end(), range.heads) == out.end()) out.push_back(range.heads);
  }
  return out;
}

bool Spaces::should_ask(std::uint32_t space, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  return now - spaces_[space].asked >= kAskAgain;
}

void Spaces::add(std::uint32_t space, Heads heads) {
  const std::lock_guard lock(mutex_);
  std::vector<Range>& ranges = spaces_[space].ranges;
  if (heads.first + heads.count > spaces_[space].num_heads || ranges.size() >= kMostRanges) return;
  const auto same = [&](const Range& one) { return one.heads == heads; };
  if (std::none_of(ranges.begin(), ranges.end(), same)) ranges.push_back({heads, {}});
}

/// Every range of few heads; of many, those that equal shares for tensor-parallel ranks make.
std::vector<Heads> Spaces::usual(std::int64_t num_heads) const {
  std::vector<Heads> out{{0, 0}};
  const bool few = num_heads <= 16;
  for (std::int64_t count = 1; count <= num_heads; ++count) {
    if (!few && num_heads % count != 0) continue;
    for (std::int64_t first = 0; first + count <= num_heads; first += few ? 1 : count) {
      out.push_back({static_cast<std::uint16_t>(first), static_cast<std::uint16_t>(count)});
    }
  }
  return out;
}

bool Spaces::ask(Engine& engine, std::uint32_t space, Clock::time_point deadline) {
  std::string folder;
  std::int64_t num_heads = 0;
  {
    const std::lock_guard lock(mutex_);
    folder = to_hex(spaces_[space].digest) + "/";
    num_heads = spaces_[space].num_heads;
  }
  const std::vector<Heads> usual_ones = usual(num_heads);
  bool answered = true;
  if (usual_ones.size() <= engine.names_a_trip()) {
    std::vector<FindItem> items;
    for (const Heads heads : usual_ones) items.push_back({folder + heads_name(heads)});
    engine.find(items, deadline);
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (items[i].answer == Answer::kOk) add(space, usual_ones[i]);
      answered = answered && (items[i].answer == Answer::kOk || items[i].answer == Answer::kAbsent);
    }
  } else {
    // Few names lie beside the folders of a namespace, but anybody may have put some there.
    int most = 100'000;
    answered = engine.list(folder, deadline, [&](const ListedObject& one) {
      if (one.name.size() <= folder.size()) return --most > 0;
      if (const auto heads = parse_heads_name(one.name.substr(folder.size()))) add(space, *heads);
      return --most > 0;
    }) == Answer::kOk;
  }
  const std::lock_guard lock(mutex_);
  if (answered) spaces_[space].asked = Clock::now();
  return answered;
}

bool Spaces::should_mark(std::uint32_t space, Heads heads, Clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  for (const Range& one : spaces_[space].ranges) {
    if (one.heads == heads) return one.marked == Clock::time_point{} || now - one.marked >= kMarkAgain;
  }
  return true;
}

void Spaces::marked(std::uint32_t space, Heads heads, Clock::time_point now) {
  add(space, heads);
  const std::lock_guard lock(mutex_);
  for (Range& one : spaces_[space].ranges) {
    if (one.heads == heads) one.marked = now;
  }
}

}  // namespace kvstride::store
