// SPDX-License-Identifier: Apache-2.0
// The thread of a remote tier that asks: what is there, whether a sick engine is well again, what shall be removed.
#include <algorithm>

#include "store/remote/remote_threads.h"

namespace kvstride::store {
namespace {

constexpr std::size_t kMostNames = 20'000;  ///< of one call
constexpr auto kPatience = std::chrono::milliseconds(200);
constexpr std::size_t kMostRemovals = 64;  ///< keys of one call
constexpr int kMostAttempts = 3;           ///< to remove a key

}  // namespace

bool RemoteThreads::probe(std::uint32_t space, std::span<const Key> keys, Heads heads, bool prefix,
                          Clock::time_point begin) {
  const auto question = std::make_shared<Question>();
  question->space = space;
  question->keys.assign(keys.begin(), keys.end());
  question->heads = heads;
  question->prefix = prefix;
  question->until = begin + std::chrono::duration_cast<Clock::duration>(options_.lookup_timeout);
  std::unique_lock lock(mutex_);
  // While the engine keeps an old question nobody waits for a new one.
  const Clock::time_point now = Clock::now();
  if (stop_ || now >= question->until || (answer_until_ && now > *answer_until_)) return false;
  asked_.push_back(question);
  question_.notify_one();
  answered_.wait_until(lock, question->until, [&] { return stop_ || question->done; });
  // What was answered for a question that nobody waits for any more is known too.
  if (!question->done) std::erase(asked_, question);
  return true;
}

/// One thread. Questions of several lookups are asked one after the other, each in as few calls as its keys allow.
void RemoteThreads::answer() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const bool tripped = breaker_.open();
    if (asked_.empty() && !tripped && removals_.empty()) {
      question_.wait(lock);
      continue;  // what there is to do may have come with a breaker that opened
    }
    // Somebody must find out when a sick engine is well.
    if (asked_.empty() && tripped) question_.wait_for(lock, std::chrono::milliseconds(20));
    if (stop_) return;
    std::shared_ptr<Question> question;
    std::vector<Removal> removals;
    if (!asked_.empty()) {
      question = std::move(asked_.front());
      asked_.pop_front();
      answer_until_ = question->until + kPatience;
    } else if (!tripped) {
      // Not so many that questions wait long for them.
      const auto end = removals_.begin() + static_cast<std::ptrdiff_t>(std::min(removals_.size(), kMostRemovals));
      removals.assign(std::make_move_iterator(removals_.begin()), std::make_move_iterator(end));
      removals_.erase(removals_.begin(), end);
      if (!removals.empty()) answer_until_ = Clock::now() + kPatience;
    }
    lock.unlock();
    try {
      if (breaker_.open()) find_out();
      if (question && !breaker_.open()) ask(*question);
      if (!removals.empty()) remove_now(std::move(removals));
    } catch (...) {  // no memory: nobody knows more
    }
    lock.lock();
    answer_until_.reset();
    if (question) {
      question->done = true;
      answered_.notify_all();
    }
  }
}

/// One harmless question, when it is time for it.
void RemoteThreads::find_out() {
  const Clock::time_point now = Clock::now();
  if (!breaker_.allows(now)) return;
  Answer answer = Answer::kBroken;
  // Broken may mean that there are other credentials now, or another server: once more.
  for (int i = 0; i < 2 && answer == Answer::kBroken; ++i) {
    std::vector<FindItem> items{{"kvstride"}};
    engine_->find(items, limit_of(now + std::chrono::seconds(2)));
    answer = items[0].answer;
  }
  if (answer == Answer::kOk || answer == Answer::kAbsent) {
    breaker_.good();
  } else {
    breaker_.bad(now, Clock::now(), answer == Answer::kDenied);
  }
}

void RemoteThreads::ask(Question& question) {
  const Clock::time_point now = Clock::now();
  if (now >= question.until) return;
  if (spaces_.should_ask(question.space, now)) {
    // Where it did not answer the usual ranges are asked for all the same.
    spaces_.ask(*engine_, question.space, limit_of(question.until));
  }
  const std::vector<Heads> ranges = spaces_.ranges(question.space, question.heads);
  const std::size_t names = std::clamp<std::size_t>(engine_->names_a_trip(), 1, kMostNames);
  // Of a prefix no more than one journey's names at a time: most end soon.
  const std::size_t at_once = std::max<std::size_t>((question.prefix ? names : kMostNames) / ranges.size(), 1);
  for (std::size_t from = 0; from < question.keys.size();) {
    const std::size_t count = std::min(at_once, question.keys.size() - from);
    std::vector<FindItem> items;
    for (std::size_t k = from; k < from + count; ++k) {
      for (const Heads heads : ranges) items.push_back({spaces_.name({question.space, question.keys[k], heads})});
    }
    counters_.add(Count::kProbes, count);
    // What was asked before these names used up their time.
    const Clock::time_point begun = from == 0 ? now : Clock::now();
    engine_->find(items, limit_of(question.until));
    const bool bad = note_finds(items, begun, std::min<Seconds>(options_.lookup_timeout, options_.timeout));
    bool gap = false;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const PieceId id{question.space, question.keys[from + i / ranges.size()], ranges[i % ranges.size()]};
      const bool there = items[i].answer == Answer::kOk;
      if (there && (items[i].bytes < kPage || items[i].bytes % kPage != 0 || items[i].bytes > largest())) {
        counters_.add(Count::kForeign);
      } else if (there) {
        known_.learn(id, items[i].bytes, Clock::now());
      } else if (items[i].answer == Answer::kAbsent) {
        known_.forget(id, Clock::now());
      }
    }
    if (question.prefix) {
      std::vector<Piece> pieces;
      for (std::size_t k = from; !gap && k < from + count; ++k) {
        pieces.clear();
        known_.pieces(question.space, question.keys[k], Clock::now(), pieces);
        gap = pieces.empty();
      }
    }
    from += count;
    if (gap || bad || Clock::now() >= question.until) return;
  }
}

/// What could not be removed is tried again later.
void RemoteThreads::remove_now(std::vector<Removal> removals) {
  const Clock::time_point limit = limit_of(Clock::now() + std::chrono::seconds(10));
  std::vector<RemoveItem> items;
  std::vector<std::size_t> of;
  for (std::size_t i = 0; i < removals.size(); ++i) {
    const std::uint32_t space = removals[i].space;
    if (spaces_.should_ask(space, Clock::now())) spaces_.ask(*engine_, space, limit);
    for (const Heads heads : spaces_.every_range(space)) {
      items.push_back({spaces_.name({space, removals[i].key, heads})});
      of.push_back(i);
    }
  }
  const Clock::time_point begun = Clock::now();
  engine_->remove(items, limit);
  std::vector<bool> failed(removals.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Answer answer = items[i].answer;
    const bool passes = answer == Answer::kBroken || answer == Answer::kLate;
    if (passes) failed[of[i]] = true;
    if (answer != Answer::kOk) note(answer, true, begun, options_.timeout);
  }
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < removals.size(); ++i) {
    if (failed[i] && ++removals[i].attempts < kMostAttempts) removals_.push_back(std::move(removals[i]));
  }
}

/// One call is one sign of health or illness, however many names it had; whether it is one of illness.
bool RemoteThreads::note_finds(std::span<const FindItem> items, Clock::time_point begun, Seconds longest) {
  const auto known = [](const FindItem& one) { return one.answer == Answer::kOk || one.answer == Answer::kAbsent; };
  const auto bad = std::find_if_not(items.begin(), items.end(), known);
  if (bad != items.end()) {
    note(bad->answer, false, begun, longest);
  } else if (!items.empty()) {
    breaker_.good();
  }
  return bad != items.end();
}

}  // namespace kvstride::store
