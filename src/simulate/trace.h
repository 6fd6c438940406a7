// SPDX-License-Identifier: Apache-2.0
// Traces of block hashes: requests, the lines that hold them, and a reader of files of such lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvstride::simulate {

/// A prompt as the store sees it.
struct Request {
  std::int64_t time = 0;  ///< nanoseconds since the trace began
  std::int64_t input_tokens = 0;
  std::int64_t output_tokens = 0;
  std::size_t first_id = 0;  ///< in its batch
  std::size_t num_ids = 0;
};

/// Some requests and the ids of their blocks. An id stands for a block and all that is before it in the prompt.
struct Batch {
  std::vector<Request> requests;
  std::vector<std::uint64_t> ids;

  void clear() {
    requests.clear();
    ids.clear();
  }
  std::span<const std::uint64_t> ids_of(const Request& request) const {
    return std::span(ids).subspan(request.first_id, request.num_ids);
  }
};

/// Where requests come from, in the order of their times.
class Source {
 public:
  virtual ~Source() = default;
  /// Appends requests until the batch has `num_ids` ids or more; false, and nothing is appended, when there are no
  /// more. What throws may have appended some.
  virtual bool read(Batch& out, std::size_t num_ids) = 0;
};

/// Appends the request of one line of the published Mooncake traces:
///   {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
/// timestamp: milliseconds, an integer or a decimal. hash_ids: integers from 0 to 2^64 − 1, one for each `block_tokens`
/// tokens of the prompt; the last block may be partial, and then may also be left out. output_length may be left out,
/// other members are skipped. Throws Error(kArgument) that says what is wrong; nothing is appended then.
void parse_line(std::string_view line, std::int64_t block_tokens, Batch& out);
/// Appends the line of a request, with its end.
void append_line(const Batch& batch, const Request& request, std::string& out);

/// Reads lines from a file descriptor, which it does not close. Holds one batch's lines at a time.
class TraceReader final : public Source {
 public:
  struct Options {
    std::int64_t block_tokens = 512;
    bool skip_bad_lines = false;
  };
  /// `name` is for messages: `FILE, line 7: …`.
  TraceReader(int fd, std::string name, Options options);

  /// Throws Error(kArgument) for a bad line (unless they are skipped), a time before that of an earlier line, a line of
  /// more than 64 MiB, and what read() reports. Empty lines are nothing.
  bool read(Batch& out, std::size_t num_ids) override;

  std::int64_t bytes() const { return bytes_; }  ///< read so far
  std::int64_t skipped_lines() const { return skipped_; }

 private:
  bool next_line(std::string_view& out);
  void take(std::string_view line, Batch& out);

  const int fd_;
  const std::string name_;
  const Options options_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0;  // of what is not used yet
  std::size_t end_ = 0;
  bool ended_ = false;
  std::int64_t bytes_ = 0;
  std::int64_t line_ = 0;
  std::int64_t skipped_ = 0;
  std::int64_t time_ = 0;
};

}  // namespace kvstride::simulate
