// SPDX-License-Identifier: Apache-2.0
// Programs on device memory: one launch inside a device, packed waves or direct copies between memories.
#include "cuda/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "cpu/copy.h"
#include "cpu/pool.h"
#include "cuda/lower.h"
#include "cuda/on_device.h"
#include "cuda/xxh3.h"
#include "kvstride/error.h"

namespace kvstride::cuda {
namespace {

constexpr std::int64_t kDirectBytes = 8192;  ///< runs from here on are copied by the device's own copy engine

/// Copies of whole runs, neighbours joined.
class Direct {
 public:
  explicit Direct(OnDevice& on) : on_(on) {}

  void add(const Strip& strip) {
    const std::int64_t steps = plan::iterations(strip.loops.data(), strip.loops.size());
    for (const Start& start : strip.starts) {
      for (std::int64_t index = 0; index < steps; ++index) {
        std::int64_t src = start.src;
        std::int64_t dst = start.dst;
        std::int64_t rest = index;
        for (std::size_t i = strip.loops.size(); i-- > 0; rest /= strip.loops[i].extent) {
          src += rest % strip.loops[i].extent * strip.loops[i].src;
          dst += rest % strip.loops[i].extent * strip.loops[i].dst;
        }
        for (const Step& step : strip.steps) put({dst + step.dst, src + step.src, strip.run});
      }
    }
  }
  void flush() {
    if (!copies_.empty()) on_.copy(copies_);
    copies_.clear();
  }

 private:
  void put(const Copy& copy) {
    constexpr std::size_t kMost = std::size_t{1} << 16;
    if (!copies_.empty()) {
      Copy& last = copies_.back();
      if (last.dst + last.bytes == copy.dst && last.src + last.bytes == copy.src) {
        last.bytes += copy.bytes;
        return;
      }
    }
    if (copies_.size() == kMost) flush();
    copies_.push_back(copy);
  }

  OnDevice& on_;
  std::vector<Copy> copies_;
};

void copy_runs(const Strip& strip, OnDevice& on) {
  Direct runs(on);
  runs.add(strip);
  runs.flush();
}

/// A strip between two pieces of host memory, on several threads.
void run_on_host(const Strip& strip) {
  const auto starts = static_cast<std::int64_t>(strip.starts.size());
  cpu::for_each_in_parallel(strip.bytes(), strip.groups(), [&](std::int64_t group) {
    const Start& start = strip.starts[static_cast<std::size_t>(group % starts)];
    const Step& step = strip.steps[static_cast<std::size_t>(group / starts)];
    cpu::copy(reinterpret_cast<std::byte*>(start.dst + step.dst),
              reinterpret_cast<const std::byte*>(start.src + step.src), strip.loops.data(), strip.loops.size(),
              strip.run, false);
  });
}

/// Calls `use(part)` for parts of a strip that pack into a buffer.
template <class Use>
void in_waves(Strip strip, bool by_source, const Use& use) {
  constexpr auto kBytes = static_cast<std::int64_t>(kBufferBytes);
  const std::int64_t item = by_source && strip.cast.active ? item_size(strip.cast.src) : strip.run;
  split_groups(strip, kBytes / item * strip.run);
  const auto num_starts = static_cast<std::int64_t>(strip.starts.size());
  const std::int64_t groups = std::max<std::int64_t>(kBytes / (strip.group_bytes() / strip.run * item), 1);
  const std::int64_t starts = std::min(groups, num_starts);
  const std::int64_t entries = std::max<std::int64_t>(groups / starts, 1);
  for (std::int64_t entry = 0; entry < strip.entries(); entry += entries) {
    for (std::int64_t start = 0; start < num_starts; start += starts) {
      use(part_of(strip, start, std::min(starts, num_starts - start), entry,
                  std::min(entries, strip.entries() - entry)));
    }
  }
}

/// Between two memories: long runs are copied as they are, by `on`; `use(wave)` is for what has to be packed.
template <class Use>
void transfer(const std::vector<Strip>& strips, OnDevice& on, bool by_source, const Use& use) {
  Direct direct(on);
  for (const Strip& strip : strips) {
    if (!strip.cast.active && strip.run >= kDirectBytes) {
      direct.add(strip);
    } else {
      in_waves(strip, by_source, use);
    }
  }
  direct.flush();
}

Lowering lowered(Strip strip) {
  Lowering out;
  out.add(std::move(strip));
  return out;
}

std::int64_t address(const std::byte* at) { return reinterpret_cast<std::int64_t>(at); }

/// Host memory to a device.
void upload(const std::vector<Strip>& strips, OnDevice& on) {
  transfer(strips, on, true, [&](const Strip& wave) {
    Lease room = on.lease(kBufferBytes);
    const std::int64_t there = address(room.device());
    Packed packed = pack(wave, address(room.pinned()), there, true);
    if (packed.in.run >= kDirectBytes) {
      copy_runs(pack(wave, there, there, true).in, on);
    } else {
      run_on_host(packed.in);
      on.copy(std::array{Copy{there, address(room.pinned()), packed.bytes}});
    }
    on.launch(lowered(std::move(packed.out)));
  });
}

/// A device to host memory. What needs the host's help is done before this returns.
void download(const std::vector<Strip>& strips, OnDevice& on) {
  struct Pending {
    Lease room;
    Strip out;
  };
  std::deque<Pending> pending;
  const auto take = [&] {
    Pending& first = pending.front();
    first.room.finish();
    run_on_host(first.out);
    pending.pop_front();
  };
  constexpr std::size_t kAhead = 2;  // waves on their way while one is unpacked
  transfer(strips, on, false, [&](const Strip& wave) {
    Lease room = on.lease(kBufferBytes);
    const std::int64_t there = address(room.device());
    Packed packed = pack(wave, there, address(room.pinned()), false);
    on.launch(lowered(std::move(packed.in)));
    if (packed.out.run >= kDirectBytes) return copy_runs(pack(wave, there, there, false).out, on);
    on.copy(std::array{Copy{address(room.pinned()), there, packed.bytes}});
    room.mark();
    pending.push_back({std::move(room), std::move(packed.out)});
    if (pending.size() > kAhead) take();
  });
  while (!pending.empty()) take();
}

/// One device to another.
void across(const std::vector<Strip>& strips, OnDevice& from, OnDevice& to) {
  from.follow(to);
  transfer(strips, from, false, [&](const Strip& wave) {
    Lease there = to.lease(kBufferBytes);
    Lease here = from.lease(kBufferBytes);
    Packed packed = pack(wave, address(here.device()), address(there.device()), false);
    from.launch(lowered(std::move(packed.in)));
    from.copy(std::array{Copy{address(there.device()), address(here.device()), packed.bytes}});
    to.follow(from);
    to.launch(lowered(std::move(packed.out)));
  });
  to.follow(from);
}

std::vector<Strip> all_strips(std::initializer_list<const plan::Program*> programs) {
  std::vector<Strip> out;
  for (const plan::Program* program : programs) {
    std::vector<Strip> strips = strips_of(*program);
    std::move(strips.begin(), strips.end(), std::back_inserter(out));
  }
  return out;
}

/// The entries of a strip that `wanted` says, by number.
template <class Wanted>
Strip entries_of(const Strip& strip, const Wanted& wanted) {
  Strip out = strip;
  out.steps.clear();
  for (std::size_t i = 0; i < strip.steps.size(); ++i) {
    if (wanted(i)) out.steps.push_back(strip.steps[i]);
  }
  return out;
}

/// All strips in one launch; `zero`: zeroed.
void launch_all(std::vector<Strip> strips, const plan::Program& ids_of, bool zero, OnDevice& on) {
  Lowering lowering;
  if (ids_of.device_ids()) lowering.set_ids(ids_of.device_ids()->sources);
  for (Strip& strip : strips) lowering.add(std::move(strip), zero);
  on.launch(lowering, &ids_of.recipe());
}

/// Pairs whose source another one overwrites go through a buffer: piece by piece of a block, all of them at once.
void copy_entangled(const plan::Bound& bound, const plan::Program& program, OnDevice& on) {
  std::vector<bool> saved;
  for (const plan::Entry& entry : bound.entries) saved.push_back(bound.overwrites(entry.src));
  const auto num_saved = static_cast<std::int64_t>(std::count(saved.begin(), saved.end(), true));
  std::vector<Strip> strips = strips_of(bound, program);
  if (num_saved == 0) return launch_all(std::move(strips), program, false, on);
  on.refuse_capture("pairs whose source another one overwrites");
  const std::int64_t share = std::max<std::int64_t>(static_cast<std::int64_t>(kBufferBytes) / num_saved, 16);
  for (const Strip& strip : split_runs(std::move(strips), share)) {
    const auto num_starts = static_cast<std::int64_t>(strip.starts.size());
    const std::int64_t starts = std::max<std::int64_t>(share / strip.group_bytes(), 1);
    for (std::int64_t start = 0; start < num_starts; start += starts) {
      const Strip piece = part_of(strip, start, std::min(starts, num_starts - start), 0, strip.entries());
      const Strip through = entries_of(piece, [&](std::size_t i) { return saved[i]; });
      Lease room = on.lease(static_cast<std::size_t>(through.bytes()));
      Packed packed = pack(through, address(room.device()), address(room.device()), true);
      on.launch(lowered(std::move(packed.in)));
      Lowering rest;
      rest.add(entries_of(piece, [&](std::size_t i) { return !saved[i]; }));
      rest.add(std::move(packed.out));
      on.launch(rest);
    }
  }
}

/// Calls `put(on)`, which puts a program's work on its stream, and waits where the caller cannot. What the runtime
/// answers is the verb's error; host memory is the caller's again then, too.
template <class Put>
void on_stream(const plan::Program& program, const Stream& stream, bool faults, const Put& put) {
  const plan::Recipe& recipe = program.recipe();
  const Device dst = recipe.dst_device();
  const bool host = dst.on_host() || recipe.src_device().on_host();
  std::optional<OnDevice> on;
  try {
    on.emplace(dst.on_host() ? recipe.src_device() : dst, stream, faults);
    if (!(dst == recipe.src_device())) on->refuse_capture("copies from one memory to another");
    put(*on);
    if (host || !stream.given) on->finish();
    if (program.device_ids() && !stream.given) on->wait_for_faults();
  } catch (const std::exception& error) {
    try {
      if (on && host && !on->capturing()) on->finish();
    } catch (const Error&) {  // it answers no more
    }
    const auto* answer = dynamic_cast<const Error*>(&error);
    if (answer == nullptr || answer->code() != ErrorCode::kDevice) throw;
    throw Error(ErrorCode::kDevice, fmt::format("{}: {}", recipe.verb(), error.what()));
  }
}

/// Programs of the same two places as one.
void run_all(std::initializer_list<const plan::Program*> programs, const Stream& stream, bool faults) {
  const plan::Program& first = **programs.begin();
  const Device src = first.recipe().src_device();
  const Device dst = first.recipe().dst_device();
  on_stream(first, stream, faults, [&](OnDevice& on) {
    std::vector<Strip> strips = all_strips(programs);
    if (src == dst) {
      launch_all(std::move(strips), first, false, on);
    } else if (src.on_host()) {
      upload(strips, on);
    } else if (dst.on_host()) {
      download(strips, on);
    } else {
      OnDevice from(src, Stream());
      across(strips, from, on);
    }
  });
}

}  // namespace

void run(std::initializer_list<const plan::Program*> programs, const Stream& stream) {
  run_all(programs, stream, true);
}

void run_here(const plan::Program& program) { run_all({&program}, Stream(), false); }

bool settle(Device device) noexcept {
  try {
    OnDevice(device, Stream(), false).finish();
    return true;
  } catch (...) {
    return false;
  }
}

void zero(const plan::Program& program, const Stream& stream) {
  on_stream(program, stream, true, [&](OnDevice& on) { launch_all(strips_of(program), program, true, on); });
}

void copy_inside(const plan::Program& program, const Stream& stream) {
  on_stream(program, stream, true, [&](OnDevice& on) {
    for (const plan::Bound& bound : program.bound()) copy_entangled(bound, program, on);
  });
}

void checksums(plan::Program& program, const std::byte* nominal, const Pieces& pieces, std::span<std::uint64_t> sums,
               const Stream& stream) {
  on_stream(program, stream, true, [&](OnDevice& on) {
    on.refuse_capture("what the host waits for");
    const std::int64_t data_bytes = pieces.count * pieces.stride;
    Lease room = on.lease(static_cast<std::size_t>(data_bytes) + sums.size_bytes());
    program.move_destination(room.device(), nominal);
    launch_all(strips_of(program), program, false, on);
    Checksums work{};
    work.data = address(room.device());
    work.stride = pieces.stride;
    work.bytes = pieces.bytes;
    work.granules = static_cast<std::int64_t>(sums.size()) / pieces.count;
    work.pieces = pieces.count;
    work.sums = work.data + data_bytes;
    set_secret(work);
    on.checksum(work);
    on.copy(std::array{Copy{address(room.pinned()), work.sums, static_cast<std::int64_t>(sums.size_bytes())}});
    room.mark();
    room.finish();
    std::memcpy(sums.data(), room.pinned(), sums.size_bytes());
  });
}

}  // namespace kvstride::cuda
