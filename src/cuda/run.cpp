// SPDX-License-Identifier: Apache-2.0
// Programs on device memory: one launch inside a device, packed waves or direct copies between memories.
#include "cuda/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <optional>
#include <string_view>

#include "cpu/copy.h"
#include "cpu/pool.h"
#include "cuda/buffers.h"
#include "cuda/lower.h"
#include "kvstride/error.h"
#include "kvstride/threads.h"

namespace kvstride::cuda {
namespace {

constexpr std::int64_t kDirectBytes = 8192;  ///< runs from here on are copied by the device's own copy engine

Runtime& needed_runtime(const char* verb, Device device) {
  std::string why;
  Runtime* found = runtime(&why);
  if (found == nullptr) throw Error(ErrorCode::kDevice, fmt::format("{}: {}: {}", verb, name_of(device), why));
  return *found;
}

/// A stream of one device while a verb puts work on it.
class OnDevice {
 public:
  OnDevice(const char* verb, Device device, const Stream& stream)
      : runtime_(needed_runtime(verb, device)), device_(device.cuda), verb_(verb) {
    if (device_ >= runtime_.num_devices()) {
      throw Error(ErrorCode::kDevice,
                  fmt::format("{}: {}: there are {} devices", verb, name_of(device), runtime_.num_devices()));
    }
    report_faults(runtime_, device_, false);
    stream_ = stream.given ? stream.handle : own_stream(runtime_, device_);
  }

  Lease lease(std::size_t bytes) { return {runtime_, device_, stream_, bytes}; }
  void copy(std::span<const Copy> copies) { runtime_.copy(device_, copies, stream_); }
  /// Waits for all that is on the stream now.
  void finish() {
    const Mark mark(runtime_, device_, stream_);
    runtime_.finish(device_, mark.event());
  }
  /// Work that is put on this stream from now on comes after what is on the other one now.
  void follow(OnDevice& other) {
    const Mark mark(runtime_, other.device_, other.stream_);
    runtime_.wait(device_, stream_, mark.event());
  }

  void launch(const Lowering& lowering, const plan::Program* ids_of = nullptr) {
    if (lowering.empty()) return;
    const std::size_t bytes = lowering.size();
    if (bytes <= kInlineBytes && !lowering.has_ids()) {
      alignas(16) std::byte data[kInlineBytes];
      const Table table = lowering.write(data);
      runtime_.launch(device_, table, data, bytes, stream_);
      return;
    }
    constexpr std::size_t kFaultBytes = (sizeof(Fault) + 15) / 16 * 16;
    Lease room = lease(kFaultBytes + bytes);
    Fault none{};
    std::memcpy(room.pinned(), &none, sizeof none);
    Table table = lowering.write(room.pinned() + kFaultBytes);
    table.data = room.device() + kFaultBytes;
    table.fault = reinterpret_cast<Fault*>(room.device());
    const auto there = reinterpret_cast<std::int64_t>(room.device());
    const auto here = reinterpret_cast<std::int64_t>(room.pinned());
    copy(std::array{Copy{there, here, static_cast<std::int64_t>(kFaultBytes + bytes)}});
    runtime_.launch(device_, table, nullptr, 0, stream_);
    if (!lowering.has_ids()) return;
    room.watch(verb_, ids_of->recipe().options().ids_name, table.src_ids.limit, table.dst_ids.limit);
    copy(std::array{Copy{here, there, sizeof(Fault)}});
  }

  void wait_for_faults() { report_faults(runtime_, device_, true); }

 private:
  Runtime& runtime_;
  int device_;
  const char* verb_;
  StreamHandle stream_ = nullptr;
};

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

/// A strip between two pieces of host memory, on several threads.
void run_on_host(const Strip& strip) {
  constexpr std::int64_t kShare = std::int64_t{1} << 19;  // bytes below which a thread is not worth waking
  const auto starts = static_cast<std::int64_t>(strip.starts.size());
  const std::int64_t groups = strip.groups();
  const auto threads = static_cast<int>(std::clamp<std::int64_t>(strip.bytes() / kShare, 1, num_threads()));
  const auto parts = static_cast<int>(std::min<std::int64_t>(groups, threads == 1 ? 1 : 4 * threads));
  const auto part = [&](int i) {
    for (std::int64_t group = groups * i / parts; group < groups * (i + 1) / parts; ++group) {
      const Start& start = strip.starts[static_cast<std::size_t>(group % starts)];
      const Step& step = strip.steps[static_cast<std::size_t>(group / starts)];
      cpu::copy(reinterpret_cast<std::byte*>(start.dst + step.dst),
                reinterpret_cast<const std::byte*>(start.src + step.src), strip.loops.data(), strip.loops.size(),
                strip.run, false);
    }
  };
  if (parts == 1) return part(0);
  cpu::parallel_for(threads, parts, part);
}

/// Calls `use(part)` for parts of a strip that pack into so many bytes.
template <class Use>
void in_waves(Strip strip, std::int64_t bytes, bool by_source, const Use& use) {
  const std::int64_t item = by_source && strip.cast.active ? item_size(strip.cast.src) : strip.run;
  const auto packed = [&](std::int64_t of_destination) { return of_destination / strip.run * item; };
  split_groups(strip, bytes / item * strip.run);
  const auto num_starts = static_cast<std::int64_t>(strip.starts.size());
  const std::int64_t groups = std::max<std::int64_t>(bytes / packed(strip.group_bytes()), 1);
  const std::int64_t starts = std::min(groups, num_starts);
  const std::int64_t entries = std::max<std::int64_t>(groups / starts, 1);
  for (std::int64_t entry = 0; entry < strip.entries(); entry += entries) {
    for (std::int64_t start = 0; start < num_starts; start += starts) {
      use(part_of(strip, start, std::min(starts, num_starts - start), entry,
                  std::min(entries, strip.entries() - entry)));
    }
  }
}

Lowering lowered(Strip strip) {
  Lowering out;
  out.add(std::move(strip));
  return out;
}

std::int64_t packed_bytes(const Packed& packed, bool by_source) {
  // The half that does not convert has the packed memory's type.
  return (by_source ? packed.in : packed.out).bytes();
}

std::int64_t address(const std::byte* at) { return reinterpret_cast<std::int64_t>(at); }

/// Host memory to a device.
void upload(const std::vector<Strip>& strips, OnDevice& on) {
  Direct direct(on);
  for (const Strip& strip : strips) {
    if (!strip.cast.active && strip.run >= kDirectBytes) {
      direct.add(strip);
      continue;
    }
    in_waves(strip, kBufferBytes, true, [&](const Strip& wave) {
      Lease room = on.lease(kBufferBytes);
      Packed packed = pack(wave, address(room.device()), true);
      if (packed.in.run >= kDirectBytes) {
        Direct runs(on);
        runs.add(packed.in);
        runs.flush();
      } else {
        const Packed staged = pack(wave, address(room.pinned()), true);
        run_on_host(staged.in);
        on.copy(std::array{Copy{address(room.device()), address(room.pinned()), packed_bytes(staged, true)}});
      }
      on.launch(lowered(std::move(packed.out)));
    });
  }
  direct.flush();
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
  Direct direct(on);
  for (const Strip& strip : strips) {
    if (!strip.cast.active && strip.run >= kDirectBytes) {
      direct.add(strip);
      continue;
    }
    in_waves(strip, kBufferBytes, false, [&](const Strip& wave) {
      Lease room = on.lease(kBufferBytes);
      Packed packed = pack(wave, address(room.device()), false);
      on.launch(lowered(std::move(packed.in)));
      if (packed.out.run >= kDirectBytes) {
        Direct runs(on);
        runs.add(packed.out);
        runs.flush();
        return;
      }
      Packed staged = pack(wave, address(room.pinned()), false);
      on.copy(std::array{Copy{address(room.pinned()), address(room.device()), packed_bytes(staged, false)}});
      room.mark();
      pending.push_back({std::move(room), std::move(staged.out)});
      if (pending.size() > kAhead) take();
    });
  }
  direct.flush();
  while (!pending.empty()) take();
}

/// One device to another.
void across(const std::vector<Strip>& strips, OnDevice& from, OnDevice& to) {
  from.follow(to);
  Direct direct(from);
  for (const Strip& strip : strips) {
    if (!strip.cast.active && strip.run >= kDirectBytes) {
      direct.add(strip);
      continue;
    }
    in_waves(strip, kBufferBytes, false, [&](const Strip& wave) {
      Lease there = to.lease(kBufferBytes);
      Lease here = from.lease(kBufferBytes);
      Packed packed = pack(wave, address(here.device()), false);
      const std::int64_t bytes = packed_bytes(packed, false);
      from.launch(lowered(std::move(packed.in)));
      from.copy(std::array{Copy{address(there.device()), address(here.device()), bytes}});
      to.follow(from);
      to.launch(lowered(pack(wave, address(there.device()), false).out));
    });
  }
  direct.flush();
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

/// What the runtime answers is the verb's error.
template <class Work>
void named(const char* verb, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDevice || std::string_view(error.what()).starts_with(verb)) throw;
    throw Error(ErrorCode::kDevice, fmt::format("{}: {}", verb, error.what()));
  }
}

void run_named(std::initializer_list<const plan::Program*> programs, const Stream& stream) {
  const plan::Program& first = **programs.begin();
  const char* verb = first.recipe().verb();
  const Device src = first.recipe().src_device();
  const Device dst = first.recipe().dst_device();
  const std::vector<Strip> strips = all_strips(programs);
  OnDevice on(verb, dst.on_host() ? src : dst, stream);
  if (strips.empty()) return;
  const bool by_ids = first.device_ids().has_value();
  if (by_ids && !(src == dst)) {
    throw Error(ErrorCode::kArgument, fmt::format("{}: ids in device memory are for caches of that device", verb));
  }
  if (src == dst) {
    Lowering lowering;
    if (by_ids) lowering.set_ids(first.device_ids()->sources);
    for (const Strip& strip : strips) lowering.add(strip);
    on.launch(lowering, &first);
  } else if (src.on_host()) {
    upload(strips, on);
  } else if (dst.on_host()) {
    download(strips, on);
  } else {
    OnDevice from(verb, src, Stream());
    across(strips, from, on);
  }
  const bool host = src.on_host() || dst.on_host();
  if (host || !stream.given) on.finish();
  if (by_ids && !stream.given) on.wait_for_faults();
}

void zero_named(const plan::Program& program, const Stream& stream) {
  OnDevice on(program.recipe().verb(), program.recipe().dst_device(), stream);
  Lowering lowering;
  if (program.device_ids()) lowering.set_ids(program.device_ids()->sources);
  for (Strip& strip : strips_of(program)) lowering.add(std::move(strip), true);
  on.launch(lowering, &program);
  if (!stream.given) on.finish();
  if (program.device_ids() && !stream.given) on.wait_for_faults();
}

void copy_named(const plan::Program& program, const Stream& stream) {
  OnDevice on(program.recipe().verb(), program.recipe().dst_device(), stream);
  // Entries whose source another one overwrites go through a buffer: piece by piece of a block, all of them at once.
  for (const plan::Bound& bound : program.bound()) {
    const auto& entries = bound.entries;
    std::vector<bool> saved(entries.size());
    std::int64_t num_saved = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      saved[i] = std::binary_search(entries.begin(), entries.end(), plan::Entry{0, entries[i].src},
                                    [](const plan::Entry& a, const plan::Entry& b) { return a.dst < b.dst; });
      num_saved += saved[i] ? 1 : 0;
    }
    std::vector<Strip> strips = strips_of(bound, program);
    if (num_saved == 0) {
      Lowering at_once;
      for (Strip& strip : strips) at_once.add(std::move(strip));
      on.launch(at_once);
      continue;
    }
    const std::int64_t share = std::max<std::int64_t>(static_cast<std::int64_t>(kBufferBytes) / num_saved, 16);
    for (const Strip& strip : split_runs(std::move(strips), share)) {
      const auto num_starts = static_cast<std::int64_t>(strip.starts.size());
      const std::int64_t starts = std::max<std::int64_t>(share / strip.group_bytes(), 1);
      for (std::int64_t start = 0; start < num_starts; start += starts) {
        const Strip piece = part_of(strip, start, std::min(starts, num_starts - start), 0, strip.entries());
        const Strip through = entries_of(piece, [&](std::size_t i) { return saved[i]; });
        Lease room = on.lease(static_cast<std::size_t>(through.bytes()));
        Packed packed = pack(through, address(room.device()), true);
        on.launch(lowered(std::move(packed.in)));
        Lowering rest;
        rest.add(entries_of(piece, [&](std::size_t i) { return !saved[i]; }));
        rest.add(std::move(packed.out));
        on.launch(rest);
      }
    }
  }
  if (!stream.given) on.finish();
}

}  // namespace

void run(std::initializer_list<const plan::Program*> programs, const Stream& stream) {
  named((*programs.begin())->recipe().verb(), [&] { run_named(programs, stream); });
}

void zero(const plan::Program& program, const Stream& stream) {
  named(program.recipe().verb(), [&] { zero_named(program, stream); });
}

void copy_inside(const plan::Program& program, const Stream& stream) {
  named(program.recipe().verb(), [&] { copy_named(program, stream); });
}

}  // namespace kvstride::cuda
