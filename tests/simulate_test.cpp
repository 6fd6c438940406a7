// SPDX-License-Identifier: Apache-2.0
// Traces: lines in and out, reading by pieces; the index at scale. Whole runs are in tests/python/test_cli_simulate.py.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <random>
#include <string>
#include <thread>

#include "kvstride/error.h"
#include "simulate/fleet.h"
#include "simulate/simulation.h"

namespace kvstride::simulate {
namespace {

std::string refusal(const std::string& line) {
  Batch batch;
  batch.ids = {7};
  try {
    parse_line(line, 4, batch);
  } catch (const Error& error) {
    EXPECT_EQ(batch.ids.size(), 1U) << "nothing is left of a bad line";
    EXPECT_TRUE(batch.requests.empty());
    return error.what();
  }
  return "";
}

TEST(Trace, LinesAreWrittenAsTheyAreRead) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 500; ++i) {
    Batch batch;
    Request request;
    request.time = static_cast<std::int64_t>(random() % 4'000'000'000'000'000);
    if (i % 2 == 0) request.time = request.time / 1'000'000 * 1'000'000;
    request.num_ids = random() % 20;
    request.input_tokens = static_cast<std::int64_t>(4 * request.num_ids + (i % 3 == 0 ? 1 : 0));
    request.output_tokens = static_cast<std::int64_t>(random() % 1000);
    for (std::size_t j = 0; j < request.num_ids; ++j) batch.ids.push_back(random() >> (random() % 64));
    std::string line;
    append_line(batch, request, line);
    ASSERT_EQ(line.back(), '\n');
    Batch again;
    parse_line(line, 4, again);
    ASSERT_EQ(again.ids, batch.ids);
    ASSERT_EQ(again.requests.at(0).time, request.time);
    ASSERT_EQ(again.requests[0].input_tokens, request.input_tokens);
    ASSERT_EQ(again.requests[0].output_tokens, request.output_tokens);
  }
}

TEST(Trace, EveryPrefixOfALineIsRefused) {
  const std::string line = R"({"timestamp": 1.25, "x": [{"a": "b\""}, -1e3], "input_length": 5, "hash_ids": [1, 23]})";
  EXPECT_EQ(refusal(line), "") << "the whole line is good";
  for (std::size_t length = 0; length < line.size(); ++length) EXPECT_NE(refusal(line.substr(0, length)), "") << length;
}

/// Reads what is written into a pipe by pieces of any size.
std::vector<std::int64_t> read_pieces(const std::string& text, std::size_t piece, std::size_t num_ids) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  std::thread writer([&] {
    for (std::size_t at = 0; at < text.size(); at += piece) {
      const std::size_t length = std::min(piece, text.size() - at);
      EXPECT_EQ(::write(ends[1], text.data() + at, length), static_cast<ssize_t>(length));
    }
    ::close(ends[1]);
  });
  TraceReader reader(ends[0], "pipe", {4, false});
  std::vector<std::int64_t> out;
  Batch batch;
  while (batch.clear(), reader.read(batch, num_ids)) {
    EXPECT_LT(batch.ids.size(), num_ids + 400'000) << "one request more";
    for (const Request& request : batch.requests) {
      out.push_back(request.time);
      std::uint64_t expected = static_cast<std::uint64_t>(request.time);
      for (const std::uint64_t id : batch.ids_of(request)) EXPECT_EQ(id, expected++);
    }
  }
  writer.join();
  ::close(ends[0]);
  EXPECT_EQ(reader.bytes(), static_cast<std::int64_t>(text.size()));
  return out;
}

TEST(Trace, LinesMayBeCutAnywhere) {
  std::string text;
  std::vector<std::int64_t> times;
  for (std::int64_t i = 0; i < 300; ++i) {
    Batch batch;
    Request request{i * 1'000'000, 0, 1, 0, i == 150 ? std::size_t{400'000} : static_cast<std::size_t>(i % 40)};
    request.input_tokens = static_cast<std::int64_t>(4 * request.num_ids);
    for (std::size_t j = 0; j < request.num_ids; ++j) batch.ids.push_back(static_cast<std::uint64_t>(request.time) + j);
    append_line(batch, request, text);  // one of them is longer than the reader's buffer
    times.push_back(request.time);
  }
  text.pop_back();  // the last line does not end
  for (const std::size_t piece : {977U, 65536U}) {
    for (const std::size_t num_ids : {1U, 100U, 1'000'000U}) {
      EXPECT_EQ(read_pieces(text, piece, num_ids), times);
    }
  }
}

TEST(Fleet, IsAsLongAsItsRateSays) {
  FleetOptions options;
  options.rate = 50;
  options.duration = 1800'000'000'000;
  options.think = 5'000'000'000;
  options.documents = 0.25;
  Fleet fleet(options);
  Batch batch;
  std::int64_t requests = 0;
  std::int64_t last = 0;
  while (batch.clear(), fleet.read(batch, 10'000)) {
    for (const Request& request : batch.requests) {
      EXPECT_GE(request.time, last);
      last = request.time;
      EXPECT_LE(request.input_tokens, options.context);
    }
    requests += static_cast<std::int64_t>(batch.requests.size());
  }
  EXPECT_NEAR(static_cast<double>(requests), 50 * 1800, 50 * 1800 * 0.05);
  EXPECT_LT(last, options.duration);
}

TEST(Scale, IsThatOfAnIndexOfThisSize) {
  // From an index of half as many: what one of the whole size takes.
  constexpr std::int64_t kBlocks = 3'000'001;
  const Scale scale = measure_scale(kBlocks);
  EXPECT_EQ(scale.measured_blocks, 1'500'001);
  store::Index index(store::Policy::kLru);
  for (std::uint64_t i = 0; i < kBlocks; ++i) {
    const std::array<std::uint64_t, 4> words{i, 0, 0, 0};
    index.insert({0, Key(std::as_bytes(std::span(words))), {}}, {0, 1});
  }
  EXPECT_NEAR(static_cast<double>(index.memory()), static_cast<double>(scale.index_bytes_lru),
              0.02 * static_cast<double>(index.memory()));
  EXPECT_GT(scale.index_bytes, scale.index_bytes_lru * 5 / 4);
}

}  // namespace
}  // namespace kvstride::simulate
