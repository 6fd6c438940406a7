// SPDX-License-Identifier: Apache-2.0
// Lines of traces from anywhere: parsing ends, a refusal leaves nothing, and what is accepted reads back the same.
#include <string>
#include <string_view>

#include "fuzz.h"
#include "simulate/trace.h"

using namespace kvstride;
using namespace kvstride::simulate;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view line(reinterpret_cast<const char*>(data), size);
  Batch batch;
  try {
    parse_line(line, 4, batch);
  } catch (const Error& error) {
    fuzz::check_error(error, size);
    fuzz::require(batch.ids.empty() && batch.requests.empty(), "a bad line leaves nothing");
    return 0;
  }
  fuzz::require(batch.requests.size() == 1, "a line is a request");
  const Request& request = batch.requests[0];
  fuzz::require(request.time >= 0 && request.input_tokens >= 0 && request.output_tokens >= 0, "nothing is negative");
  fuzz::require(request.num_ids == batch.ids.size() && request.first_id == 0, "the ids are the request's");
  const auto num_ids = static_cast<std::int64_t>(request.num_ids);
  fuzz::require(request.input_tokens / 4 <= num_ids && num_ids <= (request.input_tokens + 3) / 4, "ids for its tokens");
  std::string text;
  append_line(batch, request, text);
  Batch again;
  parse_line(text, 4, again);
  fuzz::require(again.ids == batch.ids && again.requests[0].time == request.time &&
                    again.requests[0].input_tokens == request.input_tokens &&
                    again.requests[0].output_tokens == request.output_tokens,
                "what is written reads back", text);
  return 0;
}
