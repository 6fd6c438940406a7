// SPDX-License-Identifier: Apache-2.0
// Building a program from two layouts, binding it to blocks, and running it.
#include "plan/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>

#include "cpu/copy.h"
#include "cpu/pool.h"
#include "kvstride/error.h"
#include "kvstride/threads.h"
#include "layout/internal.h"

namespace kvstride::plan {
namespace {

bool is_f8(DType dtype) {
  return dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2 || dtype == DType::kF8E4M3Fnuz ||
         dtype == DType::kF8E5M2Fnuz;
}

/// Tokens below the outermost token mode.
std::int64_t period_of(const Plane& plane) {
  const std::vector<Mode> modes = plane.merged(Axis::kToken);
  return modes.empty() ? 1 : modes.front().divisor;
}

std::int64_t iterations(const Loop* loops, std::size_t num_loops) {
  std::int64_t out = 1;
  for (std::size_t i = 0; i < num_loops; ++i) out *= loops[i].extent;
  return out;
}

}  // namespace

std::int64_t SlotOffset::operator()(std::int64_t slot) const {
  const std::int64_t id = slot / block_size;
  std::int64_t out = 0;
  for (const Mode& mode : block) out += (id % mode.modulus) / mode.divisor * mode.stride;
  if (!token.empty()) {
    const std::int64_t t = slot % block_size;
    const Mode& outermost = token.front();
    out += t / outermost.divisor * outermost.stride;
  }
  return out;
}

Program::Program(const char* verb, End src, End dst, BuildOptions options) : verb_(verb), options_(std::move(options)) {
  has_memory_ = src.cache != nullptr && dst.cache != nullptr;
  own_src_ = *src.layout;
  own_dst_ = *dst.layout;
  src_ = &*own_src_;
  dst_ = &*own_dst_;
  if (has_memory_) {
    src_tensors_ = src.cache->tensors();
    dst_tensors_ = dst.cache->tensors();
    read_only_ = dst.cache->read_only();
  }
  const auto fail = [&](ErrorCode code, const std::string& what) {
    throw Error(code, fmt::format("{}: {}", verb_, what));
  };
  // Layers.
  const std::int64_t src_layers = src_->geometry().num_layers;
  const std::int64_t dst_layers = dst_->geometry().num_layers;
  if (options_.plan.layers) {
    options_.src_first_layer = options_.dst_first_layer = options_.plan.layers->first;
    options_.num_layers = options_.plan.layers->count;
  }
  if (options_.num_layers) {
    layers_ = *options_.num_layers;
    const std::int64_t limit = std::min(src_layers - options_.src_first_layer, dst_layers - options_.dst_first_layer);
    if (options_.src_first_layer < 0 || options_.dst_first_layer < 0 || layers_ < 0 || layers_ > limit) {
      fail(ErrorCode::kBlockIndex, fmt::format("layers ({}, {}) are outside the caches (num_layers is {} and {})",
                                               options_.dst_first_layer, layers_, src_layers, dst_layers));
    }
  } else {
    if (src_layers != dst_layers) {
      fail(ErrorCode::kLayout,
           fmt::format("the source has {} layers, the destination {}; give layers=", src_layers, dst_layers));
    }
    layers_ = src_layers;
  }
  // Planes.
  const auto wanted = [&](const std::string& name) {
    return options_.planes.empty() ||
           std::find(options_.planes.begin(), options_.planes.end(), name) != options_.planes.end();
  };
  for (const Plane& plane : dst_->planes()) {
    if (wanted(plane.name) && src_->find_plane(plane.name) == nullptr) {
      fail(ErrorCode::kLayout, fmt::format("the source has no plane '{}' ('{}' → '{}')", plane.name,
                                           src_->order().text(), dst_->order().text()));
    }
  }
  for (const auto& [name, values] : options_.plan.scales) {
    if (src_->find_plane(name) == nullptr) fail(ErrorCode::kArgument, fmt::format("scales: no plane '{}'", name));
    for (const float value : values) {
      if (!(value > 0.0F) || value > 3.0e38F) {
        fail(ErrorCode::kArgument,
             fmt::format("scales: {} of plane '{}' is not a positive finite number", value, name));
      }
    }
  }
  for (const Plane& plane : src_->planes()) {
    if (!wanted(plane.name)) continue;
    const Plane* twin = dst_->find_plane(plane.name);
    if (twin == nullptr) {
      fail(ErrorCode::kLayout, fmt::format("the destination has no plane '{}' ('{}' → '{}')", plane.name,
                                           src_->order().text(), dst_->order().text()));
    }
    if (plane.extent(Axis::kDim) != twin->extent(Axis::kDim)) {
      fail(ErrorCode::kLayout, fmt::format("plane '{}': dim {} in the source, {} in the destination", plane.name,
                                           plane.extent(Axis::kDim), twin->extent(Axis::kDim)));
    }
    for (const auto& [layout, one] : {std::pair{src_, &plane}, std::pair{dst_, twin}}) {
      if (one->extent(Axis::kBlock) == 1 && layout->geometry().num_blocks > 1 && layout->order().has(Axis::kBlock)) {
        fail(ErrorCode::kLayout,
             fmt::format("plane '{}' of '{}' has no block axis", plane.name, layout->order().text()));
      }
    }
    if (plane.dtype != twin->dtype) {
      if (!options_.plan.cast) {
        fail(ErrorCode::kDType, fmt::format("plane '{}' is {} in the source and {} in the destination; pass cast to "
                                            "convert values",
                                            plane.name, name_of(plane.dtype), name_of(twin->dtype)));
      }
      if (!is_castable(plane.dtype) || !is_castable(twin->dtype)) {
        fail(ErrorCode::kDType,
             fmt::format("plane '{}': no cast from {} to {}", plane.name, name_of(plane.dtype), name_of(twin->dtype)));
      }
    }
    PlanePair pair{&plane, twin, {0, 0, plane.extent(Axis::kHead)}, false};
    const bool sharded = plane.has_head || twin->has_head;
    if (options_.plan.heads && sharded) {
      const RangePair& heads = *options_.plan.heads;
      if (heads.src_first < 0 || heads.dst_first < 0 || heads.count < 1 ||
          heads.count > plane.extent(Axis::kHead) - heads.src_first ||
          heads.count > twin->extent(Axis::kHead) - heads.dst_first) {
        fail(ErrorCode::kBlockIndex,
             fmt::format("heads ({}, {}, {}) are outside plane '{}' (num_kv_heads is {} and {})", heads.src_first,
                         heads.dst_first, heads.count, plane.name, plane.extent(Axis::kHead),
                         twin->extent(Axis::kHead)));
      }
      pair.heads = heads;
    } else if (plane.extent(Axis::kHead) != twin->extent(Axis::kHead)) {
      fail(ErrorCode::kLayout, fmt::format("plane '{}': {} heads in the source, {} in the destination; give heads=",
                                           plane.name, plane.extent(Axis::kHead), twin->extent(Axis::kHead)));
    } else if (options_.plan.heads && plane.raw() &&
               (options_.plan.heads->src_first != 0 || options_.plan.heads->dst_first != 0 ||
                options_.plan.heads->count != src_->geometry().num_kv_heads ||
                options_.plan.heads->count != dst_->geometry().num_kv_heads)) {
      fail(ErrorCode::kArgument, fmt::format("plane '{}' is raw: a head range of it has no meaning", plane.name));
    }
    const bool tokenless = plane.extent(Axis::kToken) != src_->geometry().block_size ||
                           twin->extent(Axis::kToken) != dst_->geometry().block_size;
    pair.whole_only = plane.raw() || tokenless;
    if (pair.whole_only && plane.extent(Axis::kToken) != twin->extent(Axis::kToken)) {
      fail(ErrorCode::kLayout, fmt::format("plane '{}': {} tokens a block in the source, {} in the destination",
                                           plane.name, plane.extent(Axis::kToken), twin->extent(Axis::kToken)));
    }
    if (const auto scales = options_.plan.scales.find(plane.name); scales != options_.plan.scales.end()) {
      if (plane.dtype == twin->dtype) {
        fail(ErrorCode::kArgument, fmt::format("scales: plane '{}' is {} on both sides, nothing is scaled", plane.name,
                                               name_of(plane.dtype)));
      }
      if (!is_f8(plane.dtype) && !is_f8(twin->dtype)) {
        fail(ErrorCode::kArgument, fmt::format("scales: neither side of plane '{}' is an f8 type", plane.name));
      }
      const auto count = static_cast<std::int64_t>(scales->second.size());
      if (count != 1 && count != plane.extent(Axis::kHead)) {
        fail(ErrorCode::kArgument, fmt::format("scales: {} values for plane '{}', expected 1 or {}", count, plane.name,
                                               plane.extent(Axis::kHead)));
      }
    }
    if (!pair.whole_only) {
      src_period_ = std::lcm(src_period_, period_of(plane));
      dst_period_ = std::lcm(dst_period_, period_of(*twin));
    }
    planes_.push_back(pair);
  }
}

void Program::build_strands(Nest& nest) const {
  std::vector<Strand> strands;
  const std::int64_t src_size = src_->geometry().block_size;
  const std::int64_t dst_size = dst_->geometry().block_size;
  for (const PlanePair& pair : planes_) {
    const Plane& src = *pair.src;
    const Plane& dst = *pair.dst;
    const std::vector<Mode> src_token = src.merged(Axis::kToken);
    const std::vector<Mode> dst_token = dst.merged(Axis::kToken);
    const std::int64_t tokens = pair.whole_only ? src.extent(Axis::kToken) : nest.tokens;
    const std::int64_t src_phase = pair.whole_only ? 0 : nest.src_phase % period_of(src);
    const std::int64_t dst_phase = pair.whole_only ? 0 : nest.dst_phase % period_of(dst);
    const auto token_pieces = refine(src_token, src_phase, dst_token, dst_phase, tokens);
    const auto dim_pieces = refine(src.merged(Axis::kDim), 0, dst.merged(Axis::kDim), 0, src.extent(Axis::kDim));
    Cast cast;
    cast.active = src.dtype != dst.dtype;
    cast.src = src.dtype;
    cast.dst = dst.dtype;
    std::vector<float> scales{1.0F};
    if (const auto given = options_.plan.scales.find(src.name); given != options_.plan.scales.end() && cast.active) {
      scales = given->second;
    }
    std::vector<RangePair> head_ranges{pair.heads};
    if (scales.size() > 1) {
      head_ranges.clear();
      for (std::int64_t h = 0; h < pair.heads.count; ++h) {
        head_ranges.push_back({pair.heads.src_first + h, pair.heads.dst_first + h, 1});
      }
    }
    SlotOffset src_slot{src.merged(Axis::kBlock), src_token, src_size};
    SlotOffset dst_slot{dst.merged(Axis::kBlock), dst_token, dst_size};
    if (pair.whole_only) src_slot.token = dst_slot.token = {};
    for (const RangePair& range : head_ranges) {
      if (scales.size() > 1) cast.scale = scales[static_cast<std::size_t>(range.src_first)];
      if (scales.size() == 1) cast.scale = scales[0];
      const auto head_pieces =
          refine(src.merged(Axis::kHead), range.src_first, dst.merged(Axis::kHead), range.dst_first, range.count);
      // Splits that do not nest fall into single elements; a plan of such pieces would outgrow the data.
      constexpr std::int64_t kMaxBases = std::int64_t{1} << 22;
      std::int64_t pieces = 1;
      for (const std::size_t count :
           {token_pieces.size(), head_pieces.size(), dim_pieces.size(), static_cast<std::size_t>(layers_)}) {
        if (__builtin_mul_overflow(std::max<std::int64_t>(pieces, 1), static_cast<std::int64_t>(count), &pieces) ||
            pieces > kMaxBases) {
          throw Error(ErrorCode::kArgument,
                      fmt::format("{}: plane '{}' falls into more than {} pieces between '{}' and '{}'", verb_,
                                  src.name, kMaxBases, src_->order().text(), dst_->order().text()));
        }
      }
      for (const Piece& token : token_pieces) {
        for (const Piece& head : head_pieces) {
          for (const Piece& dim : dim_pieces) {
            Strand strand;
            strand.loops = token.loops;
            strand.loops.insert(strand.loops.end(), head.loops.begin(), head.loops.end());
            strand.loops.insert(strand.loops.end(), dim.loops.begin(), dim.loops.end());
            strand.run = item_size(dst.dtype);
            strand.cast = cast.active ? cast : Cast{};
            strand.src_slot = src_slot;
            strand.dst_slot = dst_slot;
            coalesce(strand.loops, strand.run, !cast.active);
            const std::int64_t src_byte = src.base + token.src + head.src + dim.src;
            const std::int64_t dst_byte = dst.base + token.dst + head.dst + dim.dst;
            for (std::int64_t l = 0; l < layers_; ++l) {
              const auto side = [&](const Layout& layout, const Plane& plane, std::int64_t layer, std::int64_t byte,
                                    const std::vector<std::byte*>& tensors) {
                std::int64_t tensor = plane.part;
                if (layout.layered()) {
                  byte += plane.axis_offset(Axis::kLayer, layer);
                } else {
                  tensor += layer * layout.num_parts();
                }
                if (!has_memory_) return Side{tensor, byte};
                const auto address = reinterpret_cast<std::uintptr_t>(tensors[static_cast<std::size_t>(tensor)]);
                return Side{0, static_cast<std::int64_t>(address) + byte};
              };
              strand.bases.push_back({side(*src_, src, options_.src_first_layer + l, src_byte, src_tensors_),
                                      side(*dst_, dst, options_.dst_first_layer + l, dst_byte, dst_tensors_)});
            }
            if (layers_ > 0) strands.push_back(std::move(strand));
          }
        }
      }
    }
  }
  nest.strands = join_strands(std::move(strands));
  for (const Strand& strand : nest.strands) {
    nest.entry_bytes += iterations(strand.loops.data(), strand.loops.size()) * strand.run *
                        static_cast<std::int64_t>(strand.bases.size());
  }
}

Nest& Program::nest_for(std::int64_t tokens, std::int64_t src_token, std::int64_t dst_token) {
  const std::int64_t src_phase = src_token % src_period_;
  const std::int64_t dst_phase = dst_token % dst_period_;
  for (auto nest = nests_.rbegin(); nest != nests_.rend(); ++nest) {
    if (nest->tokens == tokens && nest->src_phase == src_phase && nest->dst_phase == dst_phase) return *nest;
  }
  nests_.push_back({tokens, src_phase, dst_phase, {}, {}, 0});
  build_strands(nests_.back());
  return nests_.back();
}

void Program::add(std::int64_t tokens, std::int64_t src_slot, std::int64_t dst_slot) {
  nest_for(tokens, src_slot % src_->geometry().block_size, dst_slot % dst_->geometry().block_size)
      .entries.push_back({src_slot, dst_slot});
}

void Program::clear() {
  for (Nest& nest : nests_) nest.entries.clear();
}

void Program::check_block(const char* what, std::size_t at, std::int64_t id, const Layout& layout,
                          const char* side) const {
  const std::int64_t limit = layout.order().has(Axis::kBlock) ? layout.geometry().num_blocks : 1;
  if (id < 0 || id >= limit) {
    throw Error(ErrorCode::kBlockIndex, fmt::format("{}: block id {} in {}[{}] is outside the {} (num_blocks is {})",
                                                    verb_, id, what, at, side, limit));
  }
}

void Program::bind(std::span<const Pair> pairs) {
  if (src_->geometry().block_size != dst_->geometry().block_size) {
    throw Error(ErrorCode::kLayout,
                fmt::format("{}: block_size is {} in the source and {} in the destination; give src_blocks=, "
                            "dst_blocks= and tokens=",
                            verb_, src_->geometry().block_size, dst_->geometry().block_size));
  }
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    check_block(options_.ids_name, i, pairs[i].src, *src_, options_.src_name);
    check_block(options_.ids_name, i, pairs[i].dst, *dst_, options_.dst_name);
  }
  clear();
  if (pairs.empty()) return;
  const std::int64_t size = src_->geometry().block_size;
  std::vector<Entry>& entries = nest_for(size, 0, 0).entries;
  entries.reserve(pairs.size());
  for (const Pair& pair : pairs) entries.push_back({pair.src * size, pair.dst * size});
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.dst < b.dst; });
  for (std::size_t i = 1; i < entries.size(); ++i) {
    if (entries[i].dst == entries[i - 1].dst) {
      const std::int64_t id = entries[i].dst / size;
      clear();
      throw Error(ErrorCode::kArgument, fmt::format("{}: {} block {} is given twice", verb_, options_.dst_name, id));
    }
  }
}

void Program::bind_tokens(std::span<const std::int64_t> src_blocks, std::span<const std::int64_t> dst_blocks,
                          RangePair tokens) {
  const std::int64_t src_size = src_->geometry().block_size;
  const std::int64_t dst_size = dst_->geometry().block_size;
  for (std::size_t i = 0; i < src_blocks.size(); ++i) check_block("src_blocks", i, src_blocks[i], *src_, "source");
  for (std::size_t i = 0; i < dst_blocks.size(); ++i) check_block("dst_blocks", i, dst_blocks[i], *dst_, "destination");
  const auto check = [&](const char* side, std::int64_t first, std::int64_t blocks, std::int64_t size) {
    if (first < 0 || tokens.count < 0 || tokens.count > blocks * size - first) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: {} tokens from token {} do not fit {} {} blocks of {}", verb_,
                                                    tokens.count, first, blocks, side, size));
    }
  };
  check("source", tokens.src_first, static_cast<std::int64_t>(src_blocks.size()), src_size);
  check("destination", tokens.dst_first, static_cast<std::int64_t>(dst_blocks.size()), dst_size);
  const bool whole = src_size == dst_size && tokens.src_first % src_size == 0 && tokens.dst_first % dst_size == 0 &&
                     tokens.count % src_size == 0;
  if (!whole) {
    for (const PlanePair& pair : planes_) {
      if (pair.whole_only) {
        throw Error(ErrorCode::kArgument,
                    fmt::format("{}: plane '{}' moves with whole blocks only", verb_, pair.src->name));
      }
    }
  }
  clear();
  struct Written {
    std::int64_t first;
    std::int64_t end;
  };
  std::vector<Written> written;
  for (std::int64_t t = 0; t < tokens.count;) {
    const std::int64_t s = tokens.src_first + t;
    const std::int64_t d = tokens.dst_first + t;
    const std::int64_t n = std::min({tokens.count - t, src_size - s % src_size, dst_size - d % dst_size});
    const std::int64_t src_slot = src_blocks[static_cast<std::size_t>(s / src_size)] * src_size + s % src_size;
    const std::int64_t dst_slot = dst_blocks[static_cast<std::size_t>(d / dst_size)] * dst_size + d % dst_size;
    add(n, src_slot, dst_slot);
    written.push_back({dst_slot, dst_slot + n});
    t += n;
  }
  std::sort(written.begin(), written.end(), [](const Written& a, const Written& b) { return a.first < b.first; });
  for (std::size_t i = 1; i < written.size(); ++i) {
    if (written[i].first < written[i - 1].end) {
      clear();
      throw Error(ErrorCode::kArgument,
                  fmt::format("{}: destination slot {} (block {}, token {}) is given twice", verb_, written[i].first,
                              written[i].first / dst_size, written[i].first % dst_size));
    }
  }
}

void Program::bind_slots(std::span<const std::int64_t> src_slots, std::span<const std::int64_t> dst_slots) {
  if (src_slots.size() != dst_slots.size()) {
    throw Error(ErrorCode::kArgument,
                fmt::format("{}: {} source slots, {} destination slots", verb_, src_slots.size(), dst_slots.size()));
  }
  for (const PlanePair& pair : planes_) {
    if (pair.whole_only && src_->geometry().block_size * dst_->geometry().block_size > 1) {
      throw Error(ErrorCode::kArgument,
                  fmt::format("{}: plane '{}' moves with whole blocks only", verb_, pair.src->name));
    }
  }
  const auto check = [&](const char* side, std::size_t i, std::int64_t slot, const Layout& layout) {
    const Geometry& g = layout.geometry();
    const std::int64_t blocks = layout.order().has(Axis::kBlock) ? g.num_blocks : 1;
    const bool inside = slot >= 0 && slot / g.block_size < blocks;
    if (!inside) {
      throw Error(ErrorCode::kBlockIndex,
                  fmt::format("{}: slot {} in slots[{}] is outside the {} (num_blocks {} × block_size {} is {})", verb_,
                              slot, i, side, blocks, g.block_size, blocks * g.block_size));
    }
  };
  std::vector<std::int64_t> sorted(dst_slots.begin(), dst_slots.end());
  for (std::size_t i = 0; i < src_slots.size(); ++i) {
    check("source", i, src_slots[i], *src_);
    check("destination", i, dst_slots[i], *dst_);
  }
  if (!std::is_sorted(sorted.begin(), sorted.end())) std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw Error(ErrorCode::kArgument, fmt::format("{}: destination slot {} is given twice", verb_, *twice));
  }
  clear();
  for (std::size_t i = 0; i < src_slots.size(); ++i) add(1, src_slots[i], dst_slots[i]);
}

std::map<std::int64_t, std::int64_t> Program::sizes() const {
  std::map<std::int64_t, std::int64_t> out;
  for (const Nest& nest : nests_) {
    for_each_copy(nest, options_.merge,
                  [&](Side, Side, const Loop* loops, std::size_t num, const Strand&, std::int64_t run) {
                    out[run] += iterations(loops, num);
                  });
  }
  return out;
}

std::int64_t Program::num_copies() const {
  std::int64_t out = 0;
  for (const auto& [size, count] : sizes()) out += count;
  return out;
}

std::int64_t Program::num_bytes() const {
  std::int64_t out = 0;
  for (const Nest& nest : nests_) out += nest.entry_bytes * static_cast<std::int64_t>(nest.entries.size());
  return out;
}

bool Program::streams() const {
  static const std::int64_t threshold = [] {
    const char* given = std::getenv("KVSTRIDE_STREAM_BYTES");
    return given != nullptr ? std::atoll(given) : std::int64_t{4} << 20;
  }();
  return num_bytes() >= threshold;
}

namespace {

struct Interval {
  std::int64_t begin;
  std::int64_t end;
};

/// Whether two sets of intervals meet.
bool meet(std::vector<Interval>& a, std::vector<Interval>& b) {
  const auto by_begin = [](const Interval& x, const Interval& y) { return x.begin < y.begin; };
  std::sort(a.begin(), a.end(), by_begin);
  std::sort(b.begin(), b.end(), by_begin);
  const auto merge = [](std::vector<Interval>& list) {
    std::vector<Interval> out;
    for (const Interval& one : list) {
      if (!out.empty() && one.begin <= out.back().end) {
        out.back().end = std::max(out.back().end, one.end);
      } else {
        out.push_back(one);
      }
    }
    list = std::move(out);
  };
  merge(a);
  merge(b);
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < a.size() && j < b.size()) {
    if (a[i].end <= b[j].begin) {
      ++i;
    } else if (b[j].end <= a[i].begin) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

void hulls(const Layout& layout, const std::vector<std::byte*>& tensors, std::vector<Interval>& out) {
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const auto at = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensors[t]));
    for (const Plane& plane : layout.planes()) {
      if (plane.part != static_cast<int>(static_cast<std::int64_t>(t) % layout.num_parts())) continue;
      out.push_back({at + plane.base, at + plane.base + span_of(plane.modes, item_size(plane.dtype))});
    }
  }
}

}  // namespace

void Program::check_memory() const {
  if (!has_memory_)
    throw Error(ErrorCode::kArgument, fmt::format("{}: a plan of layouts has no memory to run on", verb_));
  if (read_only_) throw Error(ErrorCode::kArgument, fmt::format("{}: the destination is read-only", verb_));
  std::vector<Interval> reads;
  std::vector<Interval> writes;
  hulls(*src_, src_tensors_, reads);
  hulls(*dst_, dst_tensors_, writes);
  if (!meet(reads, writes)) return;
  // From coarse to exact: whole groups of copies, then every copy.
  for (const bool exact : {false, true}) {
    reads.clear();
    writes.clear();
    for (const Nest& nest : nests_) {
      for_each_copy(
          nest, options_.merge,
          [&](Side src, Side dst, const Loop* loops, std::size_t num, const Strand& strand, std::int64_t run) {
            const std::int64_t src_run = strand.cast.active ? item_size(strand.cast.src) : run;
            if (!exact) {
              Interval read{src.byte, src.byte + src_run};
              Interval write{dst.byte, dst.byte + run};
              for (std::size_t i = 0; i < num; ++i) {  // steps may go backwards
                const std::int64_t s = (loops[i].extent - 1) * loops[i].src;
                const std::int64_t d = (loops[i].extent - 1) * loops[i].dst;
                (s < 0 ? read.begin : read.end) += s;
                (d < 0 ? write.begin : write.end) += d;
              }
              reads.push_back(read);
              writes.push_back(write);
              return;
            }
            std::vector<std::int64_t> at(num, 0);
            while (true) {
              std::int64_t s = src.byte;
              std::int64_t d = dst.byte;
              for (std::size_t i = 0; i < num; ++i) {
                s += at[i] * loops[i].src;
                d += at[i] * loops[i].dst;
              }
              reads.push_back({s, s + src_run});
              writes.push_back({d, d + run});
              std::size_t i = num;
              while (i > 0 && ++at[i - 1] == loops[i - 1].extent) at[--i] = 0;
              if (i == 0) break;
            }
          });
    }
    if (!meet(reads, writes)) return;
  }
  throw Error(ErrorCode::kArgument,
              fmt::format("{}: source and destination share memory: a byte that is read is also written", verb_));
}

namespace {

/// Bytes [begin, end) of all that a program writes, as seen from one group of copies.
struct Part {
  std::int64_t begin;
  std::int64_t end;

  /// The share of `count` pieces of `size` bytes from `at` on that starts in this part. Neighbouring parts agree.
  std::pair<std::int64_t, std::int64_t> of(std::int64_t at, std::int64_t count, std::int64_t size) const {
    const auto cut = [&](std::int64_t edge) {
      return std::clamp<std::int64_t>((edge - at + size - 1) / size, 0, count);
    };
    return {begin <= at ? 0 : cut(begin), end <= at ? 0 : cut(end)};
  }
};

}  // namespace

void Program::run_part(std::int64_t begin, std::int64_t end, bool stream) const {
  constexpr std::int64_t kLine = 64;
  const Part part{begin, end};
  std::int64_t at = 0;
  for (const Nest& nest : nests_) {
    for_each_copy(nest, options_.merge,
                  [&](Side src, Side dst, const Loop* loops, std::size_t num, const Strand& strand, std::int64_t run) {
                    const std::int64_t start = at;
                    const std::int64_t bytes = iterations(loops, num) * run;
                    at += bytes;
                    if (at <= begin || start >= end) return;
                    const auto* from = reinterpret_cast<const std::byte*>(src.byte);
                    auto* to = reinterpret_cast<std::byte*>(dst.byte);
                    if (strand.cast.active && num == 0) {
                      if (part.of(start, 1, run).second > part.of(start, 1, run).first)
                        cpu::cast(to, from, loops, num, strand.cast, stream);
                      return;
                    }
                    if (num == 0) {
                      const auto [first, last] = part.of(start, (run + kLine - 1) / kLine, kLine);
                      const std::int64_t low = first * kLine;
                      const std::int64_t high = std::min(run, last * kLine);
                      if (high > low) cpu::copy(to + low, from + low, loops, num, high - low, stream);
                      return;
                    }
                    const auto [first, last] = part.of(start, loops[0].extent, bytes / loops[0].extent);
                    if (last <= first) return;
                    std::array<Loop, 32> mine;
                    std::vector<Loop> many;
                    Loop* copy = mine.data();
                    if (num > mine.size()) {
                      many.resize(num);
                      copy = many.data();
                    }
                    std::copy(loops, loops + num, copy);
                    copy[0].extent = last - first;
                    from += first * loops[0].src;
                    to += first * loops[0].dst;
                    if (strand.cast.active) {
                      cpu::cast(to, from, copy, num, strand.cast, stream);
                    } else {
                      cpu::copy(to, from, copy, num, run, stream);
                    }
                  });
  }
  if (stream) cpu::fence();
}

void Program::run() const {
  constexpr std::int64_t kShare = std::int64_t{1} << 19;  // bytes below which a thread is not worth waking
  const std::int64_t bytes = num_bytes();
  const bool stream = streams();
  const auto threads =
      static_cast<int>(std::min<std::int64_t>(num_threads(), std::max<std::int64_t>(bytes / kShare, 1)));
  if (threads == 1) return run_part(0, bytes, stream);
  cpu::parallel_for(threads, [&](int i) { run_part(bytes * i / threads, bytes * (i + 1) / threads, stream); });
}

}  // namespace kvstride::plan
