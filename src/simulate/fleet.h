// SPDX-License-Identifier: Apache-2.0
// A synthetic fleet: requests with shared system prompts, sessions of several turns, and one-off documents.
#pragma once

#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

#include "simulate/trace.h"

namespace kvstride::simulate {

/// Lengths are in tokens; those called a mean are exponentially distributed.
struct FleetOptions {
  double rate = 10;                          ///< requests a second, on average once sessions have all their turns
  std::int64_t duration = 3600'000'000'000;  ///< nanoseconds
  std::int64_t seed = 0;
  std::int64_t prompts = 100;           ///< different system prompts
  double zipf = 1;                      ///< the k-th most popular is asked for in proportion to k^−zipf
  std::int64_t prompt_tokens = 2048;    ///< each has from half to one and a half times so many
  double turns = 4;                     ///< mean of a session
  std::int64_t turn_tokens = 256;       ///< mean of what a user adds
  std::int64_t output_tokens = 256;     ///< mean of an answer, part of the next turn's prompt
  std::int64_t think = 60'000'000'000;  ///< mean nanoseconds between the turns of a session
  double documents = 0.1;               ///< the part of all requests that are one-off documents behind a system prompt
  std::int64_t document_tokens = 8192;  ///< mean
  std::int64_t context = 131072;        ///< longer prompts are not sent: documents are cut, sessions end
  std::int64_t block_tokens = 512;
};

/// Makes the requests. The same options make the same ones. Times are whole milliseconds; ids count from 0 on in the
/// order of their first use, as in the published traces. Memory grows with the sessions that are under way.
class Fleet final : public Source {
 public:
  /// Throws Error(kArgument) that names the option, its value and its limit.
  explicit Fleet(const FleetOptions& options);
  bool read(Batch& out, std::size_t num_ids) override;

 private:
  struct Session {
    std::size_t prompt = 0;
    std::int64_t tokens = 0;         // of the conversation so far
    std::vector<std::uint64_t> ids;  // of its whole blocks
  };
  enum class What : std::uint8_t { kSession, kDocument, kTurn };
  struct Event {
    double time;  // nanoseconds
    std::uint64_t order;
    What what;
    std::uint32_t session;
    bool operator>(const Event& other) const { return time != other.time ? time > other.time : order > other.order; }
  };
  struct Prompt {
    std::int64_t tokens = 0;
    std::vector<std::uint64_t> ids;  // of its whole blocks, from its first use on
  };

  double uniform();  ///< in (0, 1]
  double exponential(double mean);
  std::int64_t tokens(std::int64_t mean);
  void at(double time, What what, std::uint32_t session = 0);
  void arrive(double time, What what);
  Session begin();
  void send(double time, Session& session, std::int64_t more, Batch& out);
  void turn(double time, std::uint32_t number, Batch& out);

  const FleetOptions options_;
  std::uint64_t random_;
  std::vector<double> popularity_;  // sums
  std::vector<Prompt> prompts_;
  std::vector<Session> sessions_;
  std::vector<std::uint32_t> free_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t num_events_ = 0;
  std::uint64_t next_id_ = 0;
};

}  // namespace kvstride::simulate
