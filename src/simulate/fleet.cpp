// SPDX-License-Identifier: Apache-2.0
// A synthetic fleet, event by event.
#include "simulate/fleet.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kvstride/error.h"

namespace kvstride::simulate {
namespace {

template <typename T>
void check(const char* name, T value, T least, T most) {
  if (value >= least && value <= most) return;  // a NaN is not
  throw Error(ErrorCode::kArgument, fmt::format("{} is {}, it must be from {} to {}", name, value, least, most));
}

FleetOptions checked(const FleetOptions& options) {
  constexpr std::int64_t kTokens = 1 << 24;
  constexpr std::int64_t kYear = std::int64_t{365} * 86'400 * 1'000'000'000;
  check("rate", options.rate, 1e-6, 1e6);
  check("duration", options.duration, std::int64_t{1}, kYear);
  check("seed", options.seed, std::int64_t{0}, std::numeric_limits<std::int64_t>::max());
  check("prompts", options.prompts, std::int64_t{1}, std::int64_t{1'000'000});
  check("zipf", options.zipf, 0.0, 10.0);
  check("prompt_tokens", options.prompt_tokens, std::int64_t{0}, kTokens);
  check("turns", options.turns, 1.0, 1e4);
  check("turn_tokens", options.turn_tokens, std::int64_t{1}, kTokens);
  check("output_tokens", options.output_tokens, std::int64_t{1}, kTokens);
  check("think", options.think, std::int64_t{0}, kYear);
  check("documents", options.documents, 0.0, 1.0);
  check("document_tokens", options.document_tokens, std::int64_t{1}, kTokens);
  check("context", options.context, std::int64_t{1}, kTokens);
  check("block_tokens", options.block_tokens, std::int64_t{1}, kTokens);
  return options;
}

}  // namespace

Fleet::Fleet(const FleetOptions& options)
    : options_(checked(options)), random_(static_cast<std::uint64_t>(options.seed)) {
  double sum = 0;
  for (std::int64_t i = 0; i < options_.prompts; ++i) {
    sum += std::pow(static_cast<double>(i + 1), -options_.zipf);
    popularity_.push_back(sum);
    const double length = static_cast<double>(options_.prompt_tokens) * (0.5 + uniform());
    prompts_.push_back({std::min(static_cast<std::int64_t>(length), options_.context), {}});
  }
  arrive(0, What::kSession);
  arrive(0, What::kDocument);
}

double Fleet::uniform() {
  // SplitMix64: the same numbers everywhere, which the standard library's distributions do not promise.
  std::uint64_t x = random_ += 0x9e3779b97f4a7c15U;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  x ^= x >> 31;
  return static_cast<double>((x >> 11) + 1) * 0x1p-53;
}

double Fleet::exponential(double mean) { return -std::log(uniform()) * mean; }

std::int64_t Fleet::tokens(std::int64_t mean) {
  return 1 + static_cast<std::int64_t>(exponential(static_cast<double>(mean - 1)));
}

void Fleet::at(double time, What what, std::uint32_t session) { events_.push({time, num_events_++, what, session}); }

/// The next session or document after `time`; none where the fleet has no such requests.
void Fleet::arrive(double time, What what) {
  const double documents = options_.rate * options_.documents;
  const double rate = what == What::kDocument ? documents : (options_.rate - documents) / options_.turns;
  if (rate > 0) at(time + exponential(1e9 / rate), what);
}

Fleet::Session Fleet::begin() {
  const double popularity = uniform() * popularity_.back();
  const auto found = std::lower_bound(popularity_.begin(), popularity_.end(), popularity);
  Session out;
  out.prompt = std::min(static_cast<std::size_t>(found - popularity_.begin()), prompts_.size() - 1);
  Prompt& prompt = prompts_[out.prompt];
  out.tokens = prompt.tokens;
  while (static_cast<std::int64_t>(prompt.ids.size()) < prompt.tokens / options_.block_tokens) {
    prompt.ids.push_back(next_id_++);
  }
  out.ids = prompt.ids;
  return out;
}

/// A request with `more` tokens behind the conversation.
void Fleet::send(double time, Session& session, std::int64_t more, Batch& out) {
  session.tokens += more;
  while (static_cast<std::int64_t>(session.ids.size()) < session.tokens / options_.block_tokens) {
    session.ids.push_back(next_id_++);
  }
  Request request;
  request.time = static_cast<std::int64_t>(time) / 1'000'000 * 1'000'000;
  request.input_tokens = session.tokens;
  request.first_id = out.ids.size();
  out.ids.insert(out.ids.end(), session.ids.begin(), session.ids.end());
  // The last block, as far as it is filled; when there is more in it, it is another one.
  if (session.tokens % options_.block_tokens > 0) out.ids.push_back(next_id_++);
  request.num_ids = out.ids.size() - request.first_id;
  request.output_tokens = tokens(options_.output_tokens);
  session.tokens += request.output_tokens;
  out.requests.push_back(request);
}

void Fleet::turn(double time, std::uint32_t number, Batch& out) {
  Session& session = sessions_[number];
  const std::int64_t more = tokens(options_.turn_tokens);
  const bool fits = session.tokens + more <= options_.context;
  if (fits) send(time, session, more, out);
  if (fits && uniform() > 1 / options_.turns) {
    at(time + exponential(static_cast<double>(options_.think)), What::kTurn, number);
  } else {
    session = {};
    free_.push_back(number);
  }
}

bool Fleet::read(Batch& out, std::size_t num_ids) {
  const std::size_t before = out.requests.size();
  while (out.ids.size() < num_ids && !events_.empty() && events_.top().time < static_cast<double>(options_.duration)) {
    const Event event = events_.top();
    events_.pop();
    switch (event.what) {
      case What::kSession: {
        arrive(event.time, event.what);
        if (free_.empty()) {
          free_.push_back(static_cast<std::uint32_t>(sessions_.size()));
          sessions_.emplace_back();
        }
        const std::uint32_t number = free_.back();
        free_.pop_back();
        sessions_[number] = begin();
        turn(event.time, number, out);
        break;
      }
      case What::kDocument: {
        arrive(event.time, event.what);
        Session session = begin();
        const std::int64_t room = options_.context - session.tokens;
        if (const std::int64_t more = std::min(tokens(options_.document_tokens), room); more > 0) {
          send(event.time, session, more, out);
        }
        break;
      }
      case What::kTurn: turn(event.time, event.session, out); break;
    }
  }
  return out.requests.size() > before;
}

}  // namespace kvstride::simulate
