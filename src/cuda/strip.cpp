// SPDX-License-Identifier: Apache-2.0
// Strands with absolute addresses; smaller groups, packed copies.
#include "cuda/strip.h"

#include <algorithm>
#include <iterator>

namespace kvstride::cuda {

namespace {

Strip strip_of(const plan::Strand& strand, const plan::Program& program) {
  Strip out;
  out.loops = strand.loops;
  out.run = strand.run;
  out.cast = strand.cast;
  out.starts.reserve(strand.bases.size());
  for (const plan::Base& base : strand.bases) {
    out.starts.push_back({base.src.byte + program.source_shift(), base.dst.byte + program.destination_shift(), 0});
  }
  return out;
}

}  // namespace

std::vector<Strip> strips_of(const plan::Bound& bound, const plan::Program& program) {
  std::vector<Strip> out;
  for (const plan::Strand& strand : bound.nest->strands) {
    Strip strip = strip_of(strand, program);
    strip.steps.reserve(bound.entries.size());
    for (const plan::Entry& entry : bound.entries) {
      strip.steps.push_back({strand.src_slot(entry.src), strand.dst_slot(entry.dst)});
    }
    if (strip.bytes() > 0) out.push_back(std::move(strip));
  }
  return out;
}

std::vector<Strip> strips_of(const plan::Program& program) {
  std::vector<Strip> out;
  if (const auto& ids = program.device_ids()) {
    for (const plan::Strand& strand : ids->nest->strands) {
      Strip strip = strip_of(strand, program);
      strip.num_ids = ids->count;
      strip.src_slot = strand.src_slot;
      strip.dst_slot = strand.dst_slot;
      if (strip.bytes() > 0) out.push_back(std::move(strip));
    }
  }
  for (const plan::Bound& bound : program.bound()) {
    std::vector<Strip> strips = strips_of(bound, program);
    std::move(strips.begin(), strips.end(), std::back_inserter(out));
  }
  return out;
}

void split_groups(Strip& strip, std::int64_t bytes) {
  while (!strip.loops.empty() && strip.group_bytes() > bytes) {
    const plan::Loop outer = strip.loops.front();
    const std::int64_t inner = strip.group_bytes() / outer.extent;
    // As many steps as fit stay together.
    std::int64_t together = std::clamp<std::int64_t>(bytes / std::max<std::int64_t>(inner, 1), 1, outer.extent);
    while (outer.extent % together != 0) --together;
    std::vector<Start> starts;
    starts.reserve(strip.starts.size() * static_cast<std::size_t>(outer.extent / together));
    for (const Start& start : strip.starts) {
      for (std::int64_t i = 0; i < outer.extent; i += together) {
        starts.push_back({start.src + i * outer.src, start.dst + i * outer.dst, start.head + i * outer.head});
      }
    }
    strip.starts = std::move(starts);
    if (together == 1) {
      strip.loops.erase(strip.loops.begin());
    } else {
      strip.loops.front().extent = together;
    }
  }
}

std::vector<Strip> split_runs(std::vector<Strip> strips, std::int64_t bytes) {
  std::vector<Strip> out;
  for (Strip& strip : strips) {
    if (strip.run > bytes) {
      const std::int64_t whole = strip.run / bytes;
      if (const std::int64_t rest = strip.run % bytes; rest > 0) {
        Strip last = strip;
        last.run = rest;
        for (Start& start : last.starts) start = {start.src + whole * bytes, start.dst + whole * bytes, start.head};
        out.push_back(std::move(last));
      }
      strip.loops.push_back({whole, bytes, bytes});
      strip.run = bytes;
    }
    out.push_back(std::move(strip));
  }
  for (Strip& strip : out) split_groups(strip, bytes);
  return out;
}

Strip part_of(const Strip& strip, std::int64_t first_start, std::int64_t num_starts, std::int64_t first_entry,
              std::int64_t num_entries) {
  Strip out;
  out.loops = strip.loops;
  out.run = strip.run;
  out.cast = strip.cast;
  out.starts.assign(strip.starts.begin() + first_start, strip.starts.begin() + first_start + num_starts);
  out.steps.assign(strip.steps.begin() + first_entry, strip.steps.begin() + first_entry + num_entries);
  return out;
}

Packed pack(const Strip& strip, std::int64_t in, std::int64_t out_of, bool by_source) {
  Packed out{strip, strip, 0};
  const std::int64_t item = by_source && strip.cast.active ? item_size(strip.cast.src) : strip.run;
  // The loops' own order gives way to that of the side which the packed memory follows.
  std::vector<plan::Loop> loops = strip.loops;
  const auto stride = [&](const plan::Loop& loop) { return by_source ? loop.src : loop.dst; };
  std::stable_sort(loops.begin(), loops.end(),
                   [&](const plan::Loop& a, const plan::Loop& b) { return stride(a) > stride(b); });
  out.in.loops = out.out.loops = loops;
  std::int64_t inner = item;
  for (std::size_t i = loops.size(); i-- > 0; inner *= loops[i].extent) {
    out.in.loops[i].dst = inner;
    out.out.loops[i].src = inner;
  }
  const std::int64_t group = inner;
  out.bytes = group * strip.groups();
  const auto starts = static_cast<std::int64_t>(strip.starts.size());
  for (std::size_t i = 0; i < strip.starts.size(); ++i) {
    const std::int64_t at = static_cast<std::int64_t>(i) * group;
    out.in.starts[i].dst = in + at;
    out.out.starts[i].src = out_of + at;
  }
  for (std::size_t i = 0; i < strip.steps.size(); ++i) {
    const std::int64_t at = static_cast<std::int64_t>(i) * starts * group;
    out.in.steps[i].dst = at;
    out.out.steps[i].src = at;
  }
  // Values change on the side that does not follow the packed memory.
  Strip& plain = by_source ? out.in : out.out;
  if (plain.cast.active) {
    plain.cast = {};
    plain.run = item;
  }
  for (Strip* half : {&out.in, &out.out}) plan::coalesce(half->loops, half->run, !half->cast.active);
  return out;
}

}  // namespace kvstride::cuda
