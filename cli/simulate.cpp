// SPDX-License-Identifier: Apache-2.0
// `kvstride simulate`: stores of many sizes over one trace.
#include "simulate.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "chart.h"
#include "json.h"
#include "kvstride/error.h"
#include "parse.h"
#include "progress.h"
#include "simulate/fleet.h"
#include "simulate/simulation.h"
#include "svg.h"
#include "table.h"

namespace kvstride::cli {
namespace {

using simulate::Result;
using simulate::Setup;
using simulate::TierResult;

constexpr const char* kAbout = "Hit rates and bytes moved of stores over a trace of requests (docs/cli-simulate.md)";
constexpr const char* kFooter =
    "TRACE has a JSON object a line, as the published Mooncake traces: timestamp (ms), input_length, output_length,\n"
    "hash_ids. Options of tiers, --policy and --chunk-tokens take lists: one run for each combination.\n"
    "SIZE: 500, 64K, 10G, 2T (of 1024), 5GB (of 1000). DURATION: 30s, 10m, 2h, 7d.\n"
    "--synthetic: rate, duration, seed, prompts, zipf, prompt_tokens, turns, turn_tokens, output_tokens, think,\n"
    "documents, document_tokens, context.\n"
    "Exit codes: 0 done, 2 bad usage or bad input (one line on stderr), 130 interrupted (what was run is printed).";
constexpr std::size_t kIdsAtOnce = std::size_t{1} << 16;
constexpr std::size_t kMostRuns = 1000;

[[noreturn]] void fail(std::string what) { throw Error(ErrorCode::kArgument, std::move(what)); }

// --- What is to be run

/// What may differ between runs.
struct Parameter {
  std::string name;
  std::vector<std::string> values;
  std::function<void(Setup&, std::size_t)> apply;  ///< the i-th value
  bool capacity = false;
};

/// The list of an option; `use` takes what `parse` made of a value.
template <typename Parse, typename Use>
void add_parameter(std::vector<Parameter>& out, std::string name, const std::optional<std::string>& text, Parse parse,
                   Use use) {
  if (!text) return;
  Parameter one{std::move(name), {}, {}};
  std::vector<decltype(parse(std::string_view(), std::string()))> values;
  std::set<std::string_view> seen;
  for (const std::string_view value : split(*text, ',')) {
    values.push_back(parse(value, "--" + one.name));
    one.values.emplace_back(value);
    if (!seen.insert(value).second) fail(fmt::format("--{}: {} is given twice", one.name, value));
  }
  one.apply = [values, use](Setup& setup, std::size_t i) { use(setup, values[i]); };
  out.push_back(std::move(one));
}

store::Policy parse_policy(std::string_view text, const std::string& option) {
  if (text == "s3-fifo") return store::Policy::kS3Fifo;
  if (text == "lru") return store::Policy::kLru;
  fail(fmt::format("{}: '{}' is none of s3-fifo, lru", option, text));
}
const char* name_of(store::Policy policy) { return policy == store::Policy::kLru ? "lru" : "s3-fifo"; }

std::vector<Parameter> parameters_of(const SimulateArguments& given) {
  std::vector<Parameter> out;
  for (std::size_t i = 0; i < given.tiers.size(); ++i) {
    const SimulateArguments::Tier& tier = given.tiers[i];
    const std::string name = SimulateArguments::kTiers[i];
    if (!tier.capacity && (tier.time_to_live || tier.min_reuse || tier.write_budget)) {
      fail(fmt::format("options of the tier {0} need --{0} SIZE", name));
    }
    add_parameter(out, name, tier.capacity, parse_bytes,
                  [i](Setup& setup, std::int64_t value) { setup.tiers[i].capacity_bytes = value; });
    if (tier.capacity) out.back().capacity = true;
    add_parameter(out, name + "-ttl", tier.time_to_live, parse_duration, [i](Setup& setup, std::int64_t value) {
      setup.tiers[i].admission.time_to_live = std::chrono::nanoseconds(value);
    });
    add_parameter(out, name + "-min-reuse", tier.min_reuse, parse_integer, [i](Setup& setup, std::int64_t value) {
      setup.tiers[i].admission.min_reuse = static_cast<int>(std::clamp<std::int64_t>(value, -1, 1000));
    });
    add_parameter(out, name + "-write-budget", tier.write_budget, parse_bytes,
                  [i](Setup& setup, std::int64_t value) { setup.tiers[i].admission.write_bytes_a_day = value; });
  }
  add_parameter(out, "policy", given.policy, parse_policy, [](Setup& setup, store::Policy value) {
    for (simulate::TierSetup& tier : setup.tiers) tier.policy = value;
  });
  add_parameter(out, "chunk-tokens", given.chunk_tokens, parse_integer,
                [](Setup& setup, std::int64_t value) { setup.chunk_tokens = value; });
  return out;
}

std::int64_t bytes_per_token(const SimulateArguments& given) {
  if (given.bytes_per_token && given.geometry) fail("--bytes-per-token and --geometry say the same: give one");
  if (given.bytes_per_token) return parse_bytes(*given.bytes_per_token, "--bytes-per-token");
  if (!given.geometry) fail("give --bytes-per-token SIZE, or --geometry L=..,H=..,D=..");
  const Sizes sizes = parse_sizes(*given.geometry, std::nullopt);
  for (const Axis axis : {Axis::kLayer, Axis::kHead, Axis::kDim}) {
    if (!sizes.given[static_cast<int>(axis)]) fail(fmt::format("--geometry: give {}=", letter_of(axis)));
  }
  const Geometry& geometry = sizes.geometry;
  for (const std::int64_t size : {geometry.num_layers, geometry.num_kv_heads, geometry.head_size}) {
    if (size < 1 || size > (1 << 20)) fail(fmt::format("--geometry: {} is not from 1 to {}", size, 1 << 20));
  }
  const std::int64_t value_size = geometry.value_head_size.value_or(geometry.head_size);
  if (value_size < 0 || value_size > (1 << 20)) fail(fmt::format("--geometry: Dv={}", value_size));
  return geometry.num_layers * geometry.num_kv_heads * (geometry.head_size + value_size) * item_size(geometry.dtype);
}

/// One combination: its setup and which value of each parameter.
struct Run {
  std::vector<std::size_t> values;
  std::unique_ptr<simulate::Simulation> simulation;
};

std::vector<Run> runs_of(const SimulateArguments& given, const std::vector<Parameter>& parameters,
                         std::int64_t block_tokens) {
  std::vector<Run> out;
  if (std::none_of(parameters.begin(), parameters.end(), [](const Parameter& one) { return one.capacity; })) {
    if (parameters.empty() && (given.scale || given.write_trace)) return out;
    fail("no tier is given: --host, --directory or --remote with a SIZE");
  }
  Setup base;
  base.block_tokens = block_tokens;
  base.chunk_tokens = block_tokens;
  base.bytes_per_token = bytes_per_token(given);
  for (const char* name : SimulateArguments::kTiers) {
    simulate::TierSetup tier{name, 0, store::Policy::kS3Fifo, {}, out.empty() && base.tiers.empty()};
    if (given.reuse_window) tier.admission.reuse_window = parse_integer(*given.reuse_window, "--reuse-window");
    base.tiers.push_back(std::move(tier));
  }
  std::vector<std::size_t> at(parameters.size(), 0);
  while (true) {
    if (out.size() == kMostRuns) fail(fmt::format("more than {} combinations", kMostRuns));
    Setup setup = base;
    for (std::size_t i = 0; i < at.size(); ++i) parameters[i].apply(setup, at[i]);
    std::erase_if(setup.tiers, [](const simulate::TierSetup& tier) { return tier.capacity_bytes == 0; });
    if (setup.tiers.empty()) fail("a combination has no tier: all its capacities are 0");
    out.push_back({at, std::make_unique<simulate::Simulation>(std::move(setup))});
    // The last parameter changes fastest.
    std::size_t i = at.size();
    while (i > 0 && ++at[i - 1] == parameters[i - 1].values.size()) at[--i] = 0;
    if (i == 0) return out;
  }
}

// --- Where requests come from

struct File {
  int fd = -1;
  ~File() {
    if (fd > 2) ::close(fd);
  }
};

simulate::FleetOptions fleet_options(std::string_view text, std::int64_t block_tokens) {
  simulate::FleetOptions out;
  out.block_tokens = block_tokens;
  const std::map<std::string, std::int64_t*> integers{{"seed", &out.seed},
                                                      {"prompts", &out.prompts},
                                                      {"prompt_tokens", &out.prompt_tokens},
                                                      {"turn_tokens", &out.turn_tokens},
                                                      {"output_tokens", &out.output_tokens},
                                                      {"document_tokens", &out.document_tokens},
                                                      {"context", &out.context}};
  const std::map<std::string, double*> numbers{
      {"rate", &out.rate}, {"zipf", &out.zipf}, {"turns", &out.turns}, {"documents", &out.documents}};
  const std::map<std::string, std::int64_t*> durations{{"duration", &out.duration}, {"think", &out.think}};
  for (const auto& [name, value] : parse_assignments(text, "--synthetic")) {
    const std::string option = "--synthetic " + name;
    if (const auto integer = integers.find(name); integer != integers.end()) {
      *integer->second = parse_integer(value, option);
    } else if (const auto number = numbers.find(name); number != numbers.end()) {
      *number->second = parse_number(value, option);
    } else if (const auto duration = durations.find(name); duration != durations.end()) {
      *duration->second = parse_duration(value, option);
    } else {
      fail(fmt::format("--synthetic: '{}' is none of its options (see kvstride simulate --help)", name));
    }
  }
  return out;
}

/// The file of --write-trace: it has its name when it is whole.
class TraceFile {
 public:
  explicit TraceFile(std::string path) : path_(std::move(path)), part_(path_ + ".part") {
    file_ = std::fopen(part_.c_str(), "wb");
    if (file_ == nullptr) failed();
  }
  ~TraceFile() {
    if (file_ != nullptr) std::fclose(file_);
    if (!kept_) std::remove(part_.c_str());
  }
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  void write(const simulate::Batch& batch) {
    text_.clear();
    for (const simulate::Request& request : batch.requests) simulate::append_line(batch, request, text_);
    if (std::fwrite(text_.data(), 1, text_.size(), file_) != text_.size()) failed();
  }
  void keep() {
    if (std::fclose(std::exchange(file_, nullptr)) != 0) failed();
    if (std::rename(part_.c_str(), path_.c_str()) != 0) failed();
    kept_ = true;
  }

 private:
  [[noreturn]] void failed() {
    const std::string why = std::strerror(errno);
    std::remove(part_.c_str());
    fail(fmt::format("--write-trace: cannot write '{}': {}", path_, why));
  }

  const std::string path_;
  const std::string part_;
  std::FILE* file_ = nullptr;
  bool kept_ = false;
  std::string text_;
};

struct Read {
  std::int64_t requests = 0;
  std::int64_t skipped_lines = 0;
  bool whole = false;  ///< not interrupted
};

Read run_all(const SimulateArguments& given, std::int64_t block_tokens, std::vector<Run>& runs) {
  File file;
  std::unique_ptr<simulate::TraceReader> reader;
  std::unique_ptr<simulate::Fleet> fleet;
  std::int64_t bytes = 0;
  if (given.trace) {
    const bool standard = *given.trace == "-";
    file.fd = standard ? STDIN_FILENO : ::open(given.trace->c_str(), O_RDONLY | O_CLOEXEC);
    if (file.fd < 0) fail(fmt::format("cannot open '{}': {}", *given.trace, std::strerror(errno)));
    struct stat stat {};
    if (::fstat(file.fd, &stat) == 0 && S_ISREG(stat.st_mode)) bytes = stat.st_size;
    reader =
        std::make_unique<simulate::TraceReader>(file.fd, standard ? "standard input" : *given.trace,
                                                simulate::TraceReader::Options{block_tokens, given.skip_bad_lines});
  } else {
    fleet = std::make_unique<simulate::Fleet>(fleet_options(*given.synthetic, block_tokens));
  }
  std::optional<TraceFile> written;
  if (given.write_trace) written.emplace(*given.write_trace);
  simulate::Source& source = reader ? static_cast<simulate::Source&>(*reader) : *fleet;
  Read out;
  const Interruption interruption;
  Progress progress("simulate", "requests", 0, bytes);
  simulate::Batch batch;
  std::int64_t before = 0;
  while (!Interruption::asked()) {
    batch.clear();
    if (!source.read(batch, kIdsAtOnce)) {
      out.whole = true;
      break;
    }
    for (Run& run : runs) run.simulation->run(batch);
    if (written) written->write(batch);
    const auto requests = static_cast<std::int64_t>(batch.requests.size());
    out.requests += requests;
    const std::int64_t now = reader ? reader->bytes() : 0;
    progress.add(requests, now - std::exchange(before, now));
  }
  if (written && out.whole) written->keep();
  if (reader) out.skipped_lines = reader->skipped_lines();
  return out;
}

// --- What is said about it

double part(std::int64_t of, std::int64_t all) {
  return all > 0 ? static_cast<double>(of) / static_cast<double>(all) : 0.0;
}
std::string percent(std::int64_t of, std::int64_t all) { return fmt::format("{:.1f} %", 100 * part(of, all)); }
double events_per_second(const Result& result) {
  return result.seconds > 0 ? static_cast<double>(result.block_events) / result.seconds : 0;
}

Json to_json(const simulate::TierSetup& setup, const TierResult& result, std::int64_t chunk_bytes) {
  return {{"tier", setup.name},
          {"capacity_bytes", setup.capacity_bytes},
          {"policy", name_of(setup.policy)},
          {"ttl_seconds", static_cast<double>(setup.admission.time_to_live.count()) * 1e-9},
          {"min_reuse", setup.admission.min_reuse},
          {"write_bytes_a_day", setup.admission.write_bytes_a_day},
          {"hits", result.hits},
          {"read_bytes", result.hits * chunk_bytes},
          {"writes", result.writes},
          {"written_bytes", result.writes * chunk_bytes},
          {"promotions", result.promotions},
          {"demotions", result.demotions},
          {"evictions", result.evictions},
          {"evicted_bytes", result.evictions * chunk_bytes},
          {"evicted_unread", result.evicted_unread},
          {"expired", result.expired},
          {"refused_seldom", result.refused_seldom},
          {"refused_budget", result.refused_budget},
          {"refused_large", result.refused_large},
          {"entries", result.entries},
          {"peak_entries", result.peak_entries},
          {"index_bytes", result.index_bytes},
          {"counter_bytes", result.counter_bytes}};
}

Json to_json(const Setup& setup, const Result& result) {
  Json out{{"chunk_tokens", setup.chunk_tokens},
           {"chunk_bytes", result.chunk_bytes},
           {"chunks", result.chunks},
           {"hits", result.hits},
           {"hit_rate", part(result.hits, result.chunks)},
           {"saved_tokens", result.saved_tokens},
           {"saved_part", part(result.saved_tokens, result.input_tokens)},
           {"full_hits", result.full_hits},
           {"block_events", result.block_events},
           {"seconds", result.seconds},
           {"block_events_per_second", events_per_second(result)}};
  out["tiers"] = Json::array();
  for (std::size_t i = 0; i < setup.tiers.size(); ++i) {
    out["tiers"].push_back(to_json(setup.tiers[i], result.tiers[i], result.chunk_bytes));
  }
  return out;
}

Json to_json(const simulate::Scale& scale) {
  return {{"blocks", scale.blocks},
          {"index_bytes", scale.index_bytes},
          {"bytes_per_block", scale.bytes_per_block},
          {"index_bytes_lru", scale.index_bytes_lru},
          {"bytes_per_block_lru", scale.bytes_per_block_lru},
          {"measured_blocks", scale.measured_blocks},
          {"lookups_per_second", scale.lookups_per_second},
          {"most_blocks_of_an_index", store::Index::kMaxEntries},
          {"indexes", scale.indexes}};
}

std::string scale_text(const simulate::Scale& scale) {
  std::string out = fmt::format(
      "{} blocks: {} of index with S3-FIFO ({:.1f} bytes a block, ghosts included), {} with LRU ({:.1f}); "
      "measured at {}, where a process looks up {:.1f} million blocks a second.\n",
      scale.blocks, size_text(scale.index_bytes), scale.bytes_per_block, size_text(scale.index_bytes_lru),
      scale.bytes_per_block_lru, scale.measured_blocks, scale.lookups_per_second * 1e-6);
  out += fmt::format("An index numbers its entries with 32 bits and holds at most {}", store::Index::kMaxEntries);
  return out + (scale.indexes > 1 ? fmt::format(": at least {} of them are needed.\n", scale.indexes) : ".\n");
}

/// The tiers of all runs that have it, in their order.
const TierResult* tier_of(const Setup& setup, const Result& result, const std::string& name) {
  for (std::size_t i = 0; i < setup.tiers.size(); ++i) {
    if (setup.tiers[i].name == name) return &result.tiers[i];
  }
  return nullptr;
}

std::string upper(std::string text) {
  for (char& c : text) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c == '-' ? ' ' : c;
  return text;
}

std::string runs_text(const std::vector<Parameter>& parameters, const std::vector<Run>& runs) {
  std::vector<std::string> head;
  for (const Parameter& one : parameters) head.push_back(upper(one.name));
  head.insert(head.end(), {"HIT RATE", "TOKENS SAVED"});
  std::vector<std::string> tiers;
  for (const Parameter& one : parameters) {
    if (one.capacity) tiers.push_back(one.name);
  }
  for (const std::string& name : tiers) head.push_back(upper(name) + " HITS");
  for (const std::string& name : tiers) head.push_back(upper(name) + " READ");
  for (const std::string& name : tiers) head.push_back(upper(name) + " WRITTEN");
  std::vector<std::vector<std::string>> rows{head};
  for (const Run& run : runs) {
    const Setup& setup = run.simulation->setup();
    const Result result = run.simulation->result();
    std::vector<std::string> row;
    for (std::size_t i = 0; i < parameters.size(); ++i) row.push_back(parameters[i].values[run.values[i]]);
    row.insert(row.end(), {percent(result.hits, result.chunks), percent(result.saved_tokens, result.input_tokens)});
    const auto add = [&](auto text) {
      for (const std::string& name : tiers) {
        const TierResult* tier = tier_of(setup, result, name);
        row.push_back(tier != nullptr ? text(*tier) : "-");
      }
    };
    add([&](const TierResult& tier) { return percent(tier.hits, result.chunks); });
    add([&](const TierResult& tier) { return size_text(tier.hits * result.chunk_bytes); });
    add([&](const TierResult& tier) { return size_text(tier.writes * result.chunk_bytes); });
    rows.push_back(std::move(row));
  }
  return table(rows);
}

/// All numbers of one run's tiers.
std::string tiers_text(const Setup& setup, const Result& result) {
  std::vector<std::vector<std::string>> rows{{"TIER", "WRITES", "PROMOTED", "DEMOTED", "EVICTED", "NEVER READ",
                                              "EXPIRED", "SELDOM", "OVER BUDGET", "PEAK CHUNKS", "INDEX"}};
  for (std::size_t i = 0; i < setup.tiers.size(); ++i) {
    const TierResult& tier = result.tiers[i];
    rows.push_back({setup.tiers[i].name, std::to_string(tier.writes), std::to_string(tier.promotions),
                    std::to_string(tier.demotions), std::to_string(tier.evictions), std::to_string(tier.evicted_unread),
                    std::to_string(tier.expired), std::to_string(tier.refused_seldom),
                    std::to_string(tier.refused_budget), std::to_string(tier.peak_entries),
                    size_text(tier.index_bytes + tier.counter_bytes)});
  }
  return table(rows);
}

/// Hit rate over the capacity that has most values, a line for each combination of the rest.
std::string chart_of(const std::vector<Parameter>& parameters, const std::vector<Run>& runs, const std::string& note) {
  std::size_t across = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const bool better = !parameters[across].capacity || parameters[i].values.size() > parameters[across].values.size();
    if (parameters[i].capacity && better) across = i;
  }
  Chart chart{"Chunks found in the store", note, "capacity of " + parameters[across].name, "hit rate",
              parameters[across].values,   {}};
  std::map<std::string, std::size_t> lines;
  for (const Run& run : runs) {
    std::string name;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (i == across || parameters[i].values.size() == 1) continue;
      name += fmt::format("{}{} {}", name.empty() ? "" : ", ", parameters[i].name, parameters[i].values[run.values[i]]);
    }
    if (name.empty()) name = "hit rate";
    const auto [at, is_new] = lines.emplace(name, chart.lines.size());
    if (is_new) chart.lines.push_back({name, std::vector<std::optional<double>>(chart.ticks.size())});
    const Result result = run.simulation->result();
    chart.lines[at->second].values[run.values[across]] = 100 * part(result.hits, result.chunks);
  }
  return draw_chart(chart);
}

Outcome run_simulate(const SimulateArguments& given) {
  if (given.trace && given.synthetic) fail("give a TRACE or --synthetic, not both");
  if (!given.trace && !given.synthetic && !given.scale) fail("give a TRACE, --synthetic or --scale");
  if (given.write_trace && !given.synthetic) fail("--write-trace writes what --synthetic makes");
  const std::int64_t block_tokens = given.block_tokens ? parse_integer(*given.block_tokens, "--block-tokens") : 512;
  if (block_tokens < 1 || block_tokens > (1 << 24)) {
    fail(fmt::format("--block-tokens: {} is not from 1 to {}", block_tokens, 1 << 24));
  }
  const std::vector<Parameter> parameters = parameters_of(given);
  std::optional<simulate::Scale> scale;
  std::vector<Run> runs;
  Read read;
  read.whole = true;
  const bool has_trace = given.trace || given.synthetic;
  if (has_trace) {
    runs = runs_of(given, parameters, block_tokens);
    if (runs.empty() && !given.write_trace) fail("no tier is given: --host, --directory or --remote with a SIZE");
    if (given.svg && runs.empty()) fail("--svg draws tiers, and none is given");
  } else if (!parameters.empty() || given.svg) {
    fail("give a TRACE or --synthetic");
  }
  if (given.scale) scale = simulate::measure_scale(parse_integer(*given.scale, "--scale"));
  if (has_trace) read = run_all(given, block_tokens, runs);

  Json json = Json::object();
  std::string text;
  if (has_trace) {
    const Result first = runs.empty() ? Result{} : runs.front().simulation->result();
    const double seconds = static_cast<double>(first.last_time - first.first_time) * 1e-9;
    json["trace"] = {{"requests", read.requests},
                     {"skipped_lines", read.skipped_lines},
                     {"block_events", first.block_events},
                     {"input_tokens", first.input_tokens},
                     {"seconds", seconds},
                     {"whole", read.whole}};
    std::string about = fmt::format("{} requests", read.requests);
    if (!runs.empty()) {
      about += fmt::format(", {} blocks of {} tokens, {} tokens in {:.0f} s", first.block_events, block_tokens,
                           first.input_tokens, seconds);
    }
    if (read.skipped_lines > 0) about += fmt::format(", {} bad lines skipped", read.skipped_lines);
    text += about + "\n";
    json["runs"] = Json::array();
    double slowest = 0;
    for (const Run& run : runs) {
      const Result result = run.simulation->result();
      json["runs"].push_back(to_json(run.simulation->setup(), result));
      const double speed = events_per_second(result);
      slowest = slowest == 0 ? speed : std::min(slowest, speed);
    }
    if (!runs.empty()) {
      text += "\n" + runs_text(parameters, runs) + "\n";
      if (runs.size() == 1) text += tiers_text(runs[0].simulation->setup(), first) + "\n";
      text += fmt::format("A chunk takes {}. Simulated at {:.1f} million block events a second{}.\n",
                          runs.size() == 1 ? size_text(first.chunk_bytes)
                                           : fmt::format("{} for {} tokens", size_text(first.chunk_bytes),
                                                         runs[0].simulation->setup().chunk_tokens),
                          slowest * 1e-6, runs.size() > 1 ? " or more" : "");
    }
    if (given.svg && read.whole) write_svg(*given.svg, chart_of(parameters, runs, about));
  }
  if (scale) {
    json["scale"] = to_json(*scale);
    text += (text.empty() ? "" : "\n") + scale_text(*scale);
  }
  Outcome out{given.json ? dump(json) : text, "", kDone};
  if (!read.whole) {
    out.message = fmt::format("interrupted after {} requests", read.requests);
    out.code = kInterrupted;
  }
  return out;
}

}  // namespace

void add_simulate(CLI::App& app, SimulateArguments& given, Outcome& outcome) {
  CLI::App& command = *app.add_subcommand("simulate", kAbout);
  command.footer(kFooter);
  command.add_option("TRACE", given.trace, "A trace's file; - for standard input");
  command.add_option("--synthetic", given.synthetic, "Instead of a trace: a fleet's requests, made from these numbers")
      ->type_name("NAME=VALUE,..");
  command.add_option("--write-trace", given.write_trace, "Write the fleet's requests into this file");
  for (std::size_t i = 0; i < given.tiers.size(); ++i) {
    SimulateArguments::Tier& tier = given.tiers[i];
    const std::string name = SimulateArguments::kTiers[i];
    const std::string option = "--" + name;
    command.add_option(option, tier.capacity, "Bytes of the " + name + " tier; 0: none")->type_name("SIZE,..");
    command.add_option(option + "-ttl", tier.time_to_live, "Its chunks are not found after so long (0s: they are)")
        ->type_name("DURATION,..");
    command.add_option(option + "-min-reuse", tier.min_reuse, "It takes what was asked for so often recently (1)")
        ->type_name("N,..");
    command.add_option(option + "-write-budget", tier.write_budget, "Bytes written to it in a day (0: no limit)")
        ->type_name("SIZE,..");
  }
  command.add_option("--policy", given.policy, "What tiers let go first: s3-fifo, lru (s3-fifo)")->type_name("NAME,..");
  command
      .add_option("--chunk-tokens", given.chunk_tokens, "Tokens of a chunk, a multiple of --block-tokens (the same)")
      ->type_name("N,..");
  command.add_option("--block-tokens", given.block_tokens, "Tokens that an id of hash_ids stands for (512)");
  command.add_option("--bytes-per-token", given.bytes_per_token, "KV bytes of a token, all layers")->type_name("SIZE");
  command.add_option("--geometry", given.geometry, "Or the model's sizes: L=32,H=8,D=128[,Dv=..][,dtype=bf16]");
  command.add_option("--reuse-window", given.reuse_window, "How many asks of a tier are recent (1048576)");
  command.add_option("--scale", given.scale, "Measure an index, and say what one of so many blocks takes");
  command.add_option("--svg", given.svg, "Draw the hit rate over the capacity into this file");
  command.add_flag("--skip-bad-lines", given.skip_bad_lines, "Count bad lines of the trace, and go on");
  command.add_flag("--json", given.json, "Print JSON");
  command.callback([&given, &outcome] { outcome = run_simulate(given); });
}

}  // namespace kvstride::cli
