// SPDX-License-Identifier: Apache-2.0
// Lines of traces. They come from anywhere: a small strict parser, five times as fast as a general one.
#include "simulate/trace.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <utility>

#include "kvstride/error.h"

namespace kvstride::simulate {
namespace {

constexpr std::int64_t kMaxMilliseconds = 4'000'000'000'000;  // in nanoseconds below 2^62; dates since 1970 fit
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;
constexpr std::size_t kMaxLine = std::size_t{64} << 20;
constexpr std::size_t kRead = std::size_t{1} << 20;
constexpr int kMaxDepth = 64;

[[noreturn]] void fail(std::string what) { throw Error(ErrorCode::kArgument, std::move(what)); }

/// Walks through one line.
class Walk {
 public:
  explicit Walk(std::string_view text) : at_(text.data()), begin_(text.data()), end_(text.data() + text.size()) {}

  void blanks() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n')) ++at_;
  }
  bool ended() const { return at_ == end_; }
  bool next_is(char c) const { return at_ != end_ && *at_ == c; }
  /// Whether `c` comes next, blanks before it left out; it is passed.
  bool pass(char c) {
    blanks();
    if (!next_is(c)) return false;
    ++at_;
    return true;
  }
  void expect(char c, const char* where) {
    if (!pass(c)) fail(fmt::format("'{}' is missing at column {}, {}", c, column(), where));
  }
  std::ptrdiff_t column() const { return at_ - begin_ + 1; }

  /// What is between quotes, escapes as they are.
  std::string_view string() {
    expect('"', "a name or text in quotes");
    const char* const from = at_;
    for (; at_ != end_ && *at_ != '"'; ++at_) {
      if (static_cast<unsigned char>(*at_) < 0x20) fail(fmt::format("a control character at column {}", column()));
      if (*at_ == '\\' && ++at_ == end_) break;
    }
    if (at_ == end_) fail("a text does not end");
    return {from, static_cast<std::size_t>(at_++ - from)};
  }

  /// The characters of a number.
  std::string_view number(const char* what) {
    blanks();
    const char* const from = at_;
    const auto digits = [&] {
      const char* const first = at_;
      while (at_ != end_ && *at_ >= '0' && *at_ <= '9') ++at_;
      return at_ - first;
    };
    if (next_is('-')) ++at_;
    const bool zero = next_is('0');
    const auto whole = digits();
    bool good = whole > 0 && !(zero && whole > 1);
    if (good && next_is('.')) {
      ++at_;
      good = digits() > 0;
    }
    if (good && (next_is('e') || next_is('E'))) {
      ++at_;
      if (next_is('+') || next_is('-')) ++at_;
      good = digits() > 0;
    }
    if (!good) fail(fmt::format("{} is no number at column {}", what, from - begin_ + 1));
    return {from, static_cast<std::size_t>(at_ - from)};
  }

  /// An integer from 0 on. Plain digits, which nearly all of a trace is, go this way only.
  std::uint64_t integer(const char* what, std::uint64_t most) {
    blanks();
    const char* const from = at_;
    std::uint64_t value = 0;
    const auto [after, error] = std::from_chars(at_, end_, value);
    const bool longer = after != end_ && (*after == '.' || *after == 'e' || *after == 'E');
    const bool zeros = after - from > 1 && *from == '0';
    if (error == std::errc::invalid_argument || longer || zeros) {
      fail(fmt::format("{} is no integer from 0 on at column {}", what, column()));
    }
    if (error != std::errc() || value > most) {
      fail(fmt::format("{} is above {} at column {}", what, most, column()));
    }
    at_ = after;
    return value;
  }

  /// Passes any value.
  void skip(int depth = 0) {
    if (depth > kMaxDepth) fail(fmt::format("more than {} levels at column {}", kMaxDepth, column()));
    blanks();
    if (next_is('"')) {
      string();
    } else if (pass('[')) {
      if (pass(']')) return;
      do skip(depth + 1);
      while (pass(','));
      expect(']', "the end of a list");
    } else if (pass('{')) {
      if (pass('}')) return;
      do {
        string();
        expect(':', "behind a name");
        skip(depth + 1);
      } while (pass(','));
      expect('}', "the end of an object");
    } else if (!(word("true") || word("false") || word("null"))) {
      number("a value");
    }
  }

 private:
  bool word(std::string_view text) {
    if (static_cast<std::size_t>(end_ - at_) < text.size() || std::string_view(at_, text.size()) != text) return false;
    at_ += text.size();
    return true;
  }

  const char* at_;
  const char* const begin_;
  const char* const end_;
};

std::int64_t time_of(Walk& walk) {
  const std::string_view text = walk.number("timestamp");
  double milliseconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), milliseconds);
  if (error != std::errc() || !(milliseconds >= 0 && milliseconds <= static_cast<double>(kMaxMilliseconds))) {
    fail(fmt::format("timestamp is {}, it must be milliseconds from 0 to {}", text, kMaxMilliseconds));
  }
  if (text.find_first_of("eE-") != std::string_view::npos) return std::llround(milliseconds * 1e6);
  // Digits, perhaps a point and digits: exact to the nanosecond.
  std::int64_t out = 0;
  const char* at = std::from_chars(text.data(), end, out).ptr;
  if (at != end) ++at;
  for (int i = 0; i < 6; ++i) out = out * 10 + (at != end ? *at++ - '0' : 0);
  return out;
}

void parse(std::string_view line, std::int64_t block_tokens, Batch& out) {
  enum Member { kTime, kInput, kOutput, kIds, kNumMembers };
  constexpr const char* kNames[kNumMembers] = {"timestamp", "input_length", "output_length", "hash_ids"};
  bool given[kNumMembers] = {};
  Walk walk(line);
  if (!walk.pass('{')) fail("no JSON object");
  Request request;
  request.first_id = out.ids.size();
  if (!walk.pass('}')) {
    do {
      const std::string_view name = walk.string();
      walk.expect(':', "behind a name");
      const auto member = std::find(std::begin(kNames), std::end(kNames), name) - std::begin(kNames);
      if (member < kNumMembers && std::exchange(given[member], true)) fail(fmt::format("{} is given twice", name));
      switch (member) {
        case kTime: request.time = time_of(walk); break;
        case kInput: request.input_tokens = static_cast<std::int64_t>(walk.integer("input_length", kMaxTokens)); break;
        case kOutput:
          request.output_tokens = static_cast<std::int64_t>(walk.integer("output_length", kMaxTokens));
          break;
        case kIds:
          walk.expect('[', "hash_ids is a list");
          if (walk.pass(']')) break;
          do out.ids.push_back(walk.integer("an id of hash_ids", ~std::uint64_t{0}));
          while (walk.pass(','));
          walk.expect(']', "the end of hash_ids");
          break;
        default: walk.skip();
      }
    } while (walk.pass(','));
    walk.expect('}', "the end of the object");
  }
  walk.blanks();
  if (!walk.ended()) fail(fmt::format("something follows the object at column {}", walk.column()));
  for (const Member needed : {kTime, kInput, kIds}) {
    if (!given[needed]) fail(fmt::format("{} is missing", kNames[needed]));
  }
  request.num_ids = out.ids.size() - request.first_id;
  const auto num_ids = static_cast<std::int64_t>(request.num_ids);
  const std::int64_t whole = request.input_tokens / block_tokens;
  const std::int64_t all = whole + (request.input_tokens % block_tokens > 0 ? 1 : 0);
  if (num_ids != whole && num_ids != all) {
    fail(fmt::format("{} hash_ids for input_length {}: with {} tokens a block there would be {}", num_ids,
                     request.input_tokens, block_tokens, all));
  }
  out.requests.push_back(request);
}

}  // namespace

void parse_line(std::string_view line, std::int64_t block_tokens, Batch& out) {
  const std::size_t ids = out.ids.size();
  try {
    parse(line, block_tokens, out);
  } catch (...) {
    out.ids.resize(ids);
    throw;
  }
}

void append_line(const Batch& batch, const Request& request, std::string& out) {
  const auto to = std::back_inserter(out);
  fmt::format_to(to, "{{\"timestamp\": {}", request.time / 1'000'000);
  if (const std::int64_t rest = request.time % 1'000'000; rest > 0) fmt::format_to(to, ".{:06}", rest);
  fmt::format_to(to, ", \"input_length\": {}, \"output_length\": {}, \"hash_ids\": [", request.input_tokens,
                 request.output_tokens);
  const char* separator = "";
  for (const std::uint64_t id : batch.ids_of(request)) {
    fmt::format_to(to, "{}{}", separator, id);
    separator = ", ";
  }
  out += "]}\n";
}

TraceReader::TraceReader(int fd, std::string name, Options options)
    : fd_(fd), name_(std::move(name)), options_(options), buffer_(2 * kRead) {}

bool TraceReader::next_line(std::string_view& out) {
  std::size_t looked = begin_;
  while (true) {
    if (const void* found = std::memchr(buffer_.data() + looked, '\n', end_ - looked)) {
      const auto at = static_cast<std::size_t>(static_cast<const char*>(found) - buffer_.data());
      out = {buffer_.data() + begin_, at - begin_};
      begin_ = at + 1;
      return true;
    }
    if (ended_) {
      out = {buffer_.data() + begin_, end_ - begin_};
      begin_ = end_;
      return !out.empty();
    }
    if (end_ - begin_ > kMaxLine) fail(fmt::format("{}, line {}: longer than {} bytes", name_, line_ + 1, kMaxLine));
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    looked = end_;
    if (buffer_.size() - end_ < kRead) buffer_.resize(2 * buffer_.size());
    ssize_t got;
    do got = ::read(fd_, buffer_.data() + end_, kRead);
    while (got < 0 && errno == EINTR);
    if (got < 0) fail(fmt::format("cannot read {}: {}", name_, std::strerror(errno)));
    ended_ = got == 0;
    end_ += static_cast<std::size_t>(got);
    bytes_ += got;
  }
}

void TraceReader::take(std::string_view line, Batch& out) {
  try {
    parse_line(line, options_.block_tokens, out);
    const Request& request = out.requests.back();
    if (request.time < time_) {
      const std::int64_t before = request.time;
      out.ids.resize(request.first_id);
      out.requests.pop_back();
      fail(fmt::format("timestamp {} ms is before the {} ms of an earlier line", static_cast<double>(before) / 1e6,
                       static_cast<double>(time_) / 1e6));
    }
    time_ = request.time;
  } catch (const Error& error) {
    if (!options_.skip_bad_lines) fail(fmt::format("{}, line {}: {}", name_, line_, error.what()));
    ++skipped_;
  }
}

bool TraceReader::read(Batch& out, std::size_t num_ids) {
  const std::size_t before = out.requests.size();
  std::string_view line;
  while (out.ids.size() < num_ids && next_line(line)) {
    ++line_;
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) take(line, out);
  }
  return out.requests.size() > before;
}

}  // namespace kvstride::simulate
