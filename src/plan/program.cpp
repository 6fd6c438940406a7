// SPDX-License-Identifier: Apache-2.0
// Binding a recipe to block ids, and running it.
#include "plan/program.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "cpu/copy.h"
#include "cpu/environment.h"
#include "cpu/pool.h"
#include "cuda/run.h"
#include "kvstride/error.h"

namespace kvstride::plan {

Program::Program(std::shared_ptr<const Recipe> recipe)
    : recipe_(std::move(recipe)), src_(recipe_->src()), dst_(recipe_->dst()) {}

/// Forgets what is bound, and gives its memory back.
void Program::clear() {
  device_ids_.reset();
  {
    std::pmr::vector<Bound> none(&memory_);
    bound_.swap(none);
  }
  memory_.release();
}

std::pmr::vector<Entry>& Program::entries_for(std::int64_t tokens, std::int64_t src_token, std::int64_t dst_token) {
  const Nest* nest = &recipe_->nest(tokens, src_token, dst_token);
  for (auto one = bound_.rbegin(); one != bound_.rend(); ++one) {
    if (one->nest == nest) return one->entries;
  }
  bound_.push_back({nest, std::pmr::vector<Entry>(&memory_)});
  return bound_.back().entries;
}

void Program::add(std::int64_t tokens, std::int64_t src_slot, std::int64_t dst_slot) {
  entries_for(tokens, src_slot % src_.geometry().block_size, dst_slot % dst_.geometry().block_size)
      .push_back({src_slot, dst_slot});
}

void check_block_id(const char* verb, const char* list, std::size_t at, std::int64_t id, std::int64_t limit,
                    const char* side) {
  if (id >= 0 && id < limit) return;
  throw Error(ErrorCode::kBlockIndex, fmt::format("{}: block id {} in {}[{}] is outside the {} (num_blocks is {})",
                                                  verb, id, list, at, side, limit));
}

/// Pairs are for blocks of one size.
void Program::check_block_sizes() const {
  if (src_.geometry().block_size == dst_.geometry().block_size) return;
  throw Error(ErrorCode::kLayout,
              fmt::format("{}: block_size is {} in the source and {} in the destination; give src_blocks=, "
                          "dst_blocks= and tokens=",
                          recipe_->verb(), src_.geometry().block_size, dst_.geometry().block_size));
}

/// For parts of blocks.
void Program::refuse_whole_only() const {
  for (const PlanePair& pair : recipe_->planes()) {
    if (pair.whole_only) {
      throw Error(ErrorCode::kArgument,
                  fmt::format("{}: plane '{}' moves with whole blocks only", recipe_->verb(), pair.src->name));
    }
  }
}

std::int64_t Program::bind(std::span<const Pair> pairs, std::optional<std::int64_t> null_block) {
  check_block_sizes();
  clear();
  const BuildOptions& names = recipe_->options();
  const std::int64_t size = src_.geometry().block_size;
  const auto is_null = [&](const Pair& pair) {
    return null_block && (pair.src == *null_block || pair.dst == *null_block);
  };
  std::pmr::vector<Entry> entries(&memory_);
  entries.reserve(pairs.size());
  bool sorted = true;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const Pair pair = pairs[i];  // read once: the caller's memory may change
    if (is_null(pair)) continue;
    check_block_id(recipe_->verb(), names.ids_name, i, pair.src, recipe_->src_blocks(), names.src_name);
    check_block_id(recipe_->verb(), names.ids_name, i, pair.dst, recipe_->dst_blocks(), names.dst_name);
    sorted = sorted && (entries.empty() || entries.back().dst < pair.dst * size);
    entries.push_back({pair.src * size, pair.dst * size});
  }
  if (!sorted) {
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.dst < b.dst; });
  }
  for (std::size_t i = 1; i < entries.size(); ++i) {
    if (entries[i].dst == entries[i - 1].dst) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: {} block {} is given twice", recipe_->verb(), names.dst_name,
                                                    entries[i].dst / size));
    }
  }
  const auto count = static_cast<std::int64_t>(entries.size());
  if (count > 0) bound_.push_back({&recipe_->nest(size, 0, 0), std::move(entries)});
  return count;
}

void Program::bind_tokens(std::span<const std::int64_t> src_blocks, std::span<const std::int64_t> dst_blocks,
                          RangePair tokens) {
  clear();
  const std::vector<std::int64_t> src_ids(src_blocks.begin(), src_blocks.end());  // the caller's memory may change
  const std::vector<std::int64_t> dst_ids(dst_blocks.begin(), dst_blocks.end());
  const std::int64_t src_size = src_.geometry().block_size;
  const std::int64_t dst_size = dst_.geometry().block_size;
  for (std::size_t i = 0; i < src_ids.size(); ++i)
    check_block_id(recipe_->verb(), "src_blocks", i, src_ids[i], recipe_->src_blocks(), "source");
  for (std::size_t i = 0; i < dst_ids.size(); ++i)
    check_block_id(recipe_->verb(), "dst_blocks", i, dst_ids[i], recipe_->dst_blocks(), "destination");
  const auto check = [&](const char* side, std::int64_t first, std::int64_t blocks, std::int64_t size) {
    if (first < 0 || tokens.count < 0 || tokens.count > blocks * size - first) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: {} tokens from token {} do not fit {} {} blocks of {}",
                                                    recipe_->verb(), tokens.count, first, blocks, side, size));
    }
  };
  check("source", tokens.src_first, static_cast<std::int64_t>(src_ids.size()), src_size);
  check("destination", tokens.dst_first, static_cast<std::int64_t>(dst_ids.size()), dst_size);
  const bool whole = src_size == dst_size && tokens.src_first % src_size == 0 && tokens.dst_first % dst_size == 0 &&
                     tokens.count % src_size == 0;
  if (!whole) refuse_whole_only();
  struct Written {
    std::int64_t first;
    std::int64_t end;
  };
  std::vector<Written> written;
  for (std::int64_t t = 0; t < tokens.count;) {
    const std::int64_t s = tokens.src_first + t;
    const std::int64_t d = tokens.dst_first + t;
    const std::int64_t n = std::min({tokens.count - t, src_size - s % src_size, dst_size - d % dst_size});
    const std::int64_t src_slot = src_ids[static_cast<std::size_t>(s / src_size)] * src_size + s % src_size;
    const std::int64_t dst_slot = dst_ids[static_cast<std::size_t>(d / dst_size)] * dst_size + d % dst_size;
    add(n, src_slot, dst_slot);
    written.push_back({dst_slot, dst_slot + n});
    t += n;
  }
  std::sort(written.begin(), written.end(), [](const Written& a, const Written& b) { return a.first < b.first; });
  for (std::size_t i = 1; i < written.size(); ++i) {
    if (written[i].first < written[i - 1].end) {
      clear();
      throw Error(ErrorCode::kArgument,
                  fmt::format("{}: destination slot {} (block {}, token {}) is given twice", recipe_->verb(),
                              written[i].first, written[i].first / dst_size, written[i].first % dst_size));
    }
  }
}

void Program::check_slot(const char* side, std::size_t at, std::int64_t slot, std::int64_t blocks,
                         std::int64_t block_size) const {
  if (slot >= 0 && slot / block_size < blocks) return;
  throw Error(
      ErrorCode::kBlockIndex,
      fmt::format("{}: slot {} in {}[{}] is outside the {} (num_blocks {} × block_size {} is {})", recipe_->verb(),
                  slot, recipe_->options().ids_name, at, side, blocks, block_size, blocks * block_size));
}

void Program::bind_slots(std::span<const std::int64_t> src_slots, std::span<const std::int64_t> dst_slots,
                         bool skip_negative) {
  const std::size_t count = std::max(src_slots.size(), dst_slots.size());
  const std::int64_t src_size = src_.geometry().block_size;
  const std::int64_t dst_size = dst_.geometry().block_size;
  if (!src_slots.empty() && !dst_slots.empty() && src_slots.size() != dst_slots.size()) {
    throw Error(ErrorCode::kArgument, fmt::format("{}: {} source slots, {} destination slots", recipe_->verb(),
                                                  src_slots.size(), dst_slots.size()));
  }
  if (src_size * dst_size > 1) refuse_whole_only();
  clear();
  std::pmr::vector<Entry> moves(&memory_);
  moves.reserve(count);
  bool sorted = true;
  for (std::size_t i = 0; i < count; ++i) {
    const auto counted = static_cast<std::int64_t>(i);
    const Entry move{src_slots.empty() ? counted : src_slots[i], dst_slots.empty() ? counted : dst_slots[i]};
    if (skip_negative && move.dst < 0) continue;
    check_slot("source", i, move.src, recipe_->src_blocks(), src_size);
    check_slot("destination", i, move.dst, recipe_->dst_blocks(), dst_size);
    sorted = sorted && (moves.empty() || moves.back().dst < move.dst);
    moves.push_back(move);
  }
  // Tokens of one block follow each other: in some layouts they share lines.
  if (!sorted) std::sort(moves.begin(), moves.end(), [](const Entry& a, const Entry& b) { return a.dst < b.dst; });
  const auto twice =
      std::adjacent_find(moves.begin(), moves.end(), [](const Entry& a, const Entry& b) { return a.dst == b.dst; });
  if (twice != moves.end()) {
    throw Error(ErrorCode::kArgument,
                fmt::format("{}: destination slot {} is given twice", recipe_->verb(), twice->dst));
  }
  // Consecutive slots on both sides are one entry.
  for (auto first = moves.begin(); first != moves.end();) {
    const std::int64_t room = std::min(src_size - first->src % src_size, dst_size - first->dst % dst_size);
    std::int64_t n = 1;
    auto next = first + 1;
    while (n < room && next != moves.end() && next->src == first->src + n && next->dst == first->dst + n) {
      ++next;
      ++n;
    }
    add(n, first->src, first->dst);
    first = next;
  }
}

/// Ids for one side, from 0 to `limit` − 1.
cuda::DeviceIds Program::device_list(const DeviceList& list, std::int64_t limit) const {
  if (!(recipe_->src_device() == recipe_->dst_device()) || recipe_->on_host()) {
    throw Error(ErrorCode::kArgument,
                fmt::format("{}: ids in device memory are for caches of that device", recipe_->verb()));
  }
  if (list.item != 4 && list.item != 8) {
    throw Error(ErrorCode::kDType, fmt::format("{}: ids of {} bytes, expected 4 or 8", recipe_->verb(), list.item));
  }
  return {list.ids, list.item, list.stride, limit};
}

void Program::bind_device(const DevicePairs& pairs) {
  check_block_sizes();
  clear();
  if (pairs.src.count != pairs.dst.count) {
    throw Error(ErrorCode::kArgument, fmt::format("{}: {} source blocks, {} destination blocks", recipe_->verb(),
                                                  pairs.src.count, pairs.dst.count));
  }
  cuda::IdSources sources;
  sources.src = device_list(pairs.src, recipe_->src_blocks());
  sources.dst = device_list(pairs.dst, recipe_->dst_blocks());
  if (pairs.src.count == 0) return;
  device_ids_ = DeviceEntries{&recipe_->nest(src_.geometry().block_size, 0, 0), pairs.src.count, sources};
}

void Program::bind_device_slots(const DeviceList* src_slots, const DeviceList* dst_slots, bool skip_negative) {
  const std::int64_t src_size = src_.geometry().block_size;
  const std::int64_t dst_size = dst_.geometry().block_size;
  if (src_size * dst_size > 1) refuse_whole_only();
  clear();
  const std::int64_t count = src_slots != nullptr ? src_slots->count : dst_slots->count;
  const auto side = [&](const DeviceList* list, std::int64_t num_slots) {
    if (list == nullptr && count > num_slots) {  // 0, 1, 2, … end before the slots do
      throw Error(ErrorCode::kArgument, fmt::format("{}: {} slots for {} tokens", recipe_->verb(), count, num_slots));
    }
    return device_list(list != nullptr ? *list : DeviceList{}, num_slots);
  };
  cuda::IdSources sources;
  sources.src = side(src_slots, recipe_->src_blocks() * src_size);
  sources.dst = side(dst_slots, recipe_->dst_blocks() * dst_size);
  sources.are_slots = true;
  sources.skip_negative = skip_negative;
  if (count == 0) return;
  device_ids_ = DeviceEntries{&recipe_->nest(1, 0, 0), count, sources};
}

void Program::place_source(const std::byte* at, std::int64_t bytes) {
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at));
  shift_ = address - static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(recipe_->src_tensors().front()));
  placed_ = Interval{address, address + bytes};
}

void Program::move_source(const std::byte* at, const std::byte* nominal) {
  shift_ = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(nominal));
}

void Program::move_destination(std::byte* at, const std::byte* nominal) {
  dst_shift_ =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(nominal));
}

std::map<std::int64_t, std::int64_t> Program::sizes() const {
  std::map<std::int64_t, std::int64_t> out;
  walk([&](Side, Side, const Loop* loops, std::size_t num, const Strand&, std::int64_t run) {
    out[run] += iterations(loops, num);
  });
  return out;
}

std::int64_t Program::num_copies() const {
  std::int64_t out = 0;
  walk([&](Side, Side, const Loop* loops, std::size_t num, const Strand&, std::int64_t) {
    out += iterations(loops, num);
  });
  return out;
}

std::int64_t Program::num_bytes() const {
  std::int64_t out = 0;
  for (const Bound& one : bound_) out += one.nest->entry_bytes * static_cast<std::int64_t>(one.entries.size());
  return out;
}

/// Whether the memory of source and destination, whatever the ids are, has no byte in common.
bool Program::apart() const {
  if (!placed_) return recipe_->apart();
  std::vector<Interval> reads{*placed_};
  std::vector<Interval> writes;
  hulls(dst_, recipe_->dst_tensors(), writes);
  return !meet(reads, writes);
}

void Program::check_memory_of(std::initializer_list<const Program*> programs) {
  bool apart = true;
  for (const Program* program : programs) {
    const Recipe& recipe = *program->recipe_;
    if (!recipe.has_memory()) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: a plan of layouts has no memory to run on", recipe.verb()));
    }
    if (recipe.read_only()) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: the destination is read-only", recipe.verb()));
    }
    apart = apart && program->apart();
  }
  if (apart || !meet_each_other({programs.begin(), programs.size()})) return;
  throw Error(ErrorCode::kArgument, fmt::format("{}: source and destination share memory: a byte that is read is also "
                                                "written",
                                                (*programs.begin())->recipe_->verb()));
}

namespace {

using cpu::kLine;

/// Bytes of a call from which on writing past the caches is worth it: what would drive everything else out of the
/// second one. KVSTRIDE_STREAM_BYTES overrides it.
std::int64_t stream_threshold() {
  static const std::int64_t threshold = [] {
    if (const auto given = cpu::number_from("KVSTRIDE_STREAM_BYTES", 0, INT64_MAX)) return *given;
    return std::max<std::int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), std::int64_t{1} << 20);
  }();
  return threshold;
}

/// A group of copies, or as many steps of its first loop as start in the part.
void run_group(std::byte* to, const std::byte* from, const Loop* loops, std::size_t num, const Strand& strand,
               std::int64_t run, Part part, bool stream) {
  const auto move = [&](std::byte* dst, const std::byte* src, const Loop* all, std::size_t count, std::int64_t head) {
    if (strand.cast.active) {
      cpu::cast(dst, src, all, count, strand.cast, head, stream);
    } else {
      cpu::copy(dst, src, all, count, run, stream);
    }
  };
  const std::int64_t bytes = iterations(loops, num) * run;
  if (part.begin <= 0 && part.end >= bytes) return move(to, from, loops, num, 0);
  if (num == 0) {
    if (part.begin <= 0) move(to, from, loops, num, 0);  // one element
    return;
  }
  const std::int64_t step = bytes / loops[0].extent;
  const auto cut = [&](std::int64_t edge) {
    return std::clamp<std::int64_t>((edge + step - 1) / step, 0, loops[0].extent);
  };
  const std::int64_t first = part.begin <= 0 ? 0 : cut(part.begin);
  const std::int64_t last = cut(part.end);
  if (last <= first) return;
  std::array<Loop, 32> mine;
  if (num > mine.size()) {
    for (std::int64_t i = first; i < last; ++i) {
      move(to + i * loops[0].dst, from + i * loops[0].src, loops + 1, num - 1, i * loops[0].head);
    }
    return;
  }
  std::copy(loops, loops + num, mine.begin());
  mine[0].extent = last - first;
  move(to + first * loops[0].dst, from + first * loops[0].src, mine.data(), num, first * loops[0].head);
}

/// Runs that wait for their source's lines: each is asked for when it is put in, and copied some runs later.
class Waiting {
 public:
  explicit Waiting(bool stream) : stream_(stream) {}

  void put(std::byte* to, const std::byte* from, std::int64_t run) {
    constexpr std::int64_t kAhead = 4096;  // bytes that wait; longer runs are left to the CPU's own prefetching
    if (run >= kAhead) {
      drain();
      return cpu::copy(to, from, nullptr, 0, run, stream_);
    }
    for (std::int64_t i = 0; i < run; i += kLine) __builtin_prefetch(from + i);
    runs_[(first_ + count_) % kMax] = {to, from, run};
    ++count_;
    bytes_ += run;
    while (bytes_ > kAhead || count_ == kMax) take();
  }
  void drain() {
    while (count_ > 0) take();
  }

 private:
  struct Run {
    std::byte* to;
    const std::byte* from;
    std::int64_t bytes;
  };
  static constexpr std::size_t kMax = 32;

  void take() {
    const Run& run = runs_[first_];
    cpu::copy(run.to, run.from, nullptr, 0, run.bytes, stream_);
    bytes_ -= run.bytes;
    first_ = (first_ + 1) % kMax;
    --count_;
  }

  bool stream_;
  std::array<Run, kMax> runs_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::int64_t bytes_ = 0;
};

}  // namespace

void Program::run_part(Part part, bool stream) const {
  std::int64_t at = 0;
  Waiting waiting(stream);
  for (const Bound& one : bound_) {
    const Part here{part.begin - at, part.end - at};
    plan::walk(*one.nest, one.entries, here,
               [&](Side src, Side dst, const Loop* loops, std::size_t num, const Strand& strand, std::int64_t run,
                   std::int64_t start) {
                 const auto* from = reinterpret_cast<const std::byte*>(src.byte + shift_);
                 auto* to = reinterpret_cast<std::byte*>(dst.byte + dst_shift_);
                 if (strand.runs_only) return waiting.put(to, from, run);  // cut by the walk
                 run_group(to, from, loops, num, strand, run, {here.begin - start, here.end - start}, stream);
               });
    at += one.nest->entry_bytes * static_cast<std::int64_t>(one.entries.size());
  }
  waiting.drain();
  if (stream) cpu::fence();
}

void Program::run(const Stream& stream) const { run_all({this}, stream); }

void Program::run_here(bool past_caches) const {
  if (!recipe_->on_host()) return cuda::run_here(*this);
  run_part({0, num_bytes()}, past_caches);
}

void Program::zero(const Stream& stream) const {
  if (!recipe_->on_host()) return cuda::zero(*this, stream);
  walk([](Side, Side dst, const Loop* loops, std::size_t num, const Strand&, std::int64_t run) {
    cpu::zero(reinterpret_cast<std::byte*>(dst.byte), loops, num, run);
  });
}

void Program::run_all(std::initializer_list<const Program*> programs, const Stream& on) {
  if (!(*programs.begin())->recipe_->on_host()) return cuda::run(programs, on);
  constexpr std::int64_t kPart = std::int64_t{1} << 18;  // bytes of one part: threads that start late take fewer
  std::int64_t bytes = 0;
  for (const Program* program : programs) bytes += program->num_bytes();
  const bool stream = bytes >= stream_threshold();
  const auto run_part_of_all = [&](Part part) {
    for (const Program* program : programs) {
      const std::int64_t size = program->num_bytes();
      if (part.begin < size && part.end > 0) program->run_part(part, stream);
      part = {part.begin - size, part.end - size};
    }
  };
  const int threads = cpu::threads_for(bytes);
  if (threads == 1) return run_part_of_all({0, bytes});
  const auto parts = static_cast<int>(std::clamp<std::int64_t>(bytes / kPart, threads, 4L * threads));
  const auto edge = [&](int i) { return i == parts ? bytes : bytes / parts * i / kLine * kLine; };
  cpu::parallel_for(threads, parts, [&](int i) { run_part_of_all({edge(i), edge(i + 1)}); });
}

}  // namespace kvstride::plan
