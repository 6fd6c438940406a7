// SPDX-License-Identifier: Apache-2.0
// Building a recipe from two layouts; keeping recipes for later calls.
#include "plan/recipe.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <numeric>
#include <string_view>

#include "kvstride/error.h"
#include "layout/internal.h"
#include "plan/lock.h"
#include "plan/memory.h"

namespace kvstride::plan {
namespace {

/// Tokens below the outermost token mode.
std::int64_t period_of(const Plane& plane) {
  const std::vector<Mode> modes = plane.merged(Axis::kToken);
  return modes.empty() ? 1 : modes.front().divisor;
}

/// Says how many heads each loop steps over, and where each piece starts.
void number_heads(std::vector<Piece>& pieces) {
  std::int64_t first = 0;
  for (Piece& piece : pieces) {
    piece.head = first;
    std::int64_t below = 1;
    for (std::size_t i = piece.loops.size(); i-- > 0; below *= piece.loops[i].extent) piece.loops[i].head = below;
    first += below;
  }
}

}  // namespace

std::int64_t iterations(const Loop* loops, std::size_t num_loops) {
  std::int64_t out = 1;
  for (std::size_t i = 0; i < num_loops; ++i) out *= loops[i].extent;
  return out;
}

std::int64_t SlotOffset::operator()(std::int64_t slot) const {
  const std::int64_t id = slot / block_size;
  std::int64_t out = 0;
  if (block.size() == 1 && block.front().divisor == 1) {
    out = id * block.front().stride;  // ids are inside their cache
  } else {
    for (const Mode& mode : block) out += (id % mode.modulus) / mode.divisor * mode.stride;
  }
  if (!token.empty()) {
    const std::int64_t t = slot % block_size;
    const Mode& outermost = token.front();
    out += t / outermost.divisor * outermost.stride;
  }
  return out;
}

std::int64_t SlotOffset::largest_step() const {
  std::int64_t out = 0;
  for (const Mode& mode : block) out = std::max(out, mode.stride);
  return out;
}

Recipe::Recipe(const char* verb, End src, End dst, BuildOptions options)
    : verb_(verb), src_(*src.layout), dst_(*dst.layout), options_(std::move(options)) {
  const auto blocks = [](const Layout& layout) {
    return layout.order().has(Axis::kBlock) ? layout.geometry().num_blocks : 1;
  };
  src_blocks_ = blocks(src_);
  dst_blocks_ = blocks(dst_);
  has_memory_ = src.cache != nullptr && dst.cache != nullptr;
  if (has_memory_) {
    src_tensors_ = src.cache->tensors();
    dst_tensors_ = dst.cache->tensors();
    read_only_ = dst.cache->read_only();
    src_device_ = src.cache->device();
    dst_device_ = dst.cache->device();
    std::vector<Interval> reads;
    std::vector<Interval> writes;
    hulls(src_, src_tensors_, reads);
    hulls(dst_, dst_tensors_, writes);
    apart_ = !meet(reads, writes);
  }
  const auto fail = [&](ErrorCode code, const std::string& what) {
    throw Error(code, fmt::format("{}: {}", verb_, what));
  };
  // Layers.
  src_first_layer_ = options_.src_first_layer;
  dst_first_layer_ = options_.dst_first_layer;
  std::optional<std::int64_t> num_layers = options_.num_layers;
  const std::int64_t src_layers = src_.geometry().num_layers;
  const std::int64_t dst_layers = dst_.geometry().num_layers;
  if (options_.plan.layers) {
    src_first_layer_ = dst_first_layer_ = options_.plan.layers->first;
    num_layers = options_.plan.layers->count;
  }
  if (num_layers) {
    layers_ = *num_layers;
    const std::int64_t limit = std::min(src_layers - src_first_layer_, dst_layers - dst_first_layer_);
    if (src_first_layer_ < 0 || dst_first_layer_ < 0 || layers_ < 0 || layers_ > limit) {
      fail(ErrorCode::kBlockIndex, fmt::format("layers ({}, {}) are outside the caches (num_layers is {} and {})",
                                               dst_first_layer_, layers_, src_layers, dst_layers));
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
  for (const Plane& plane : dst_.planes()) {
    if (wanted(plane.name) && src_.find_plane(plane.name) == nullptr) {
      fail(ErrorCode::kLayout, fmt::format("the source has no plane '{}' ('{}' → '{}')", plane.name,
                                           src_.order().text(), dst_.order().text()));
    }
  }
  for (const auto& [name, values] : options_.plan.scales) {
    if (src_.find_plane(name) == nullptr) fail(ErrorCode::kArgument, fmt::format("scales: no plane '{}'", name));
    for (const float value : values) {
      if (!(value > 0.0F) || value > 3.0e38F) {
        fail(ErrorCode::kArgument,
             fmt::format("scales: {} of plane '{}' is not a positive finite number", value, name));
      }
    }
  }
  for (const Plane& plane : src_.planes()) {
    if (!wanted(plane.name)) continue;
    const Plane* twin = dst_.find_plane(plane.name);
    if (twin == nullptr) {
      fail(ErrorCode::kLayout, fmt::format("the destination has no plane '{}' ('{}' → '{}')", plane.name,
                                           src_.order().text(), dst_.order().text()));
    }
    if (plane.extent(Axis::kDim) != twin->extent(Axis::kDim)) {
      fail(ErrorCode::kLayout, fmt::format("plane '{}': dim {} in the source, {} in the destination", plane.name,
                                           plane.extent(Axis::kDim), twin->extent(Axis::kDim)));
    }
    for (const auto& [layout, one] : {std::pair{&src_, &plane}, std::pair{&dst_, twin}}) {
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
                options_.plan.heads->count != src_.geometry().num_kv_heads ||
                options_.plan.heads->count != dst_.geometry().num_kv_heads)) {
      fail(ErrorCode::kArgument, fmt::format("plane '{}' is raw: a head range of it has no meaning", plane.name));
    }
    const bool tokenless = plane.extent(Axis::kToken) != src_.geometry().block_size ||
                           twin->extent(Axis::kToken) != dst_.geometry().block_size;
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
      const std::int64_t heads = (is_f8(plane.dtype) ? plane : *twin).extent(Axis::kHead);
      if (count != 1 && count != heads) {
        fail(ErrorCode::kArgument,
             fmt::format("scales: {} values for plane '{}', expected 1 or {}, the heads of its {} side", count,
                         plane.name, heads, is_f8(plane.dtype) ? "source" : "destination"));
      }
    }
    if (!pair.whole_only) {
      src_period_ = std::lcm(src_period_, period_of(plane));
      dst_period_ = std::lcm(dst_period_, period_of(*twin));
    }
    planes_.push_back(pair);
  }
}

void Recipe::build_strands(Nest& nest) const {
  std::vector<Strand> strands;
  const std::int64_t src_size = src_.geometry().block_size;
  const std::int64_t dst_size = dst_.geometry().block_size;
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
    if (const auto given = options_.plan.scales.find(src.name); given != options_.plan.scales.end() && cast.active) {
      cast.scales = given->second;
    }
    const std::int64_t first_scale = is_f8(src.dtype) ? pair.heads.src_first : pair.heads.dst_first;
    SlotOffset src_slot{src.merged(Axis::kBlock), src_token, src_size};
    SlotOffset dst_slot{dst.merged(Axis::kBlock), dst_token, dst_size};
    if (pair.whole_only) src_slot.token = dst_slot.token = {};
    auto head_pieces = refine(src.merged(Axis::kHead), pair.heads.src_first, dst.merged(Axis::kHead),
                              pair.heads.dst_first, pair.heads.count);
    if (cast.by_head()) number_heads(head_pieces);
    // Splits that do not nest fall into single elements; a plan of such pieces would outgrow the data.
    constexpr std::int64_t kMaxBases = std::int64_t{1} << 22;
    std::int64_t pieces = 1;
    for (const std::size_t count :
         {token_pieces.size(), head_pieces.size(), dim_pieces.size(), static_cast<std::size_t>(layers_)}) {
      if (__builtin_mul_overflow(std::max<std::int64_t>(pieces, 1), static_cast<std::int64_t>(count), &pieces) ||
          pieces > kMaxBases) {
        throw Error(ErrorCode::kArgument,
                    fmt::format("{}: plane '{}' falls into more than {} pieces between '{}' and '{}'", verb_, src.name,
                                kMaxBases, src_.order().text(), dst_.order().text()));
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
          if (cast.by_head()) {  // from the first head of the piece on
            strand.cast.scales.erase(strand.cast.scales.begin(),
                                     strand.cast.scales.begin() + static_cast<std::ptrdiff_t>(first_scale + head.head));
          }
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
            strand.bases.push_back({side(src_, src, src_first_layer_ + l, src_byte, src_tensors_),
                                    side(dst_, dst, dst_first_layer_ + l, dst_byte, dst_tensors_)});
          }
          if (layers_ > 0) strands.push_back(std::move(strand));
        }
      }
    }
  }
  nest.strands = join_strands(std::move(strands));
  for (Strand& strand : nest.strands) {
    strand.group_bytes = iterations(strand.loops.data(), strand.loops.size()) * strand.run;
    nest.entry_bytes += strand.group_bytes * static_cast<std::int64_t>(strand.bases.size());
    const std::int64_t src_step = strand.src_slot.largest_step();
    const std::int64_t dst_step = strand.dst_slot.largest_step();
    strand.runs_only = !strand.cast.active &&
                       std::all_of(strand.loops.begin(), strand.loops.end(),
                                   [&](const Loop& loop) { return loop.src > src_step && loop.dst > dst_step; });
  }
}

std::mutex& kept_lock() {
  static std::mutex& mutex = *new std::mutex;  // never destroyed
  static const int at_fork = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  (void)at_fork;
  return mutex;
}

const Nest& Recipe::nest(std::int64_t tokens, std::int64_t src_token, std::int64_t dst_token) const {
  const std::array<std::int64_t, 3> key{tokens, src_token % src_period_, dst_token % dst_period_};
  const std::lock_guard lock(kept_lock());
  if (const auto found = nests_.find(key); found != nests_.end()) return found->second;
  Nest built{key[0], key[1], key[2], {}, 0};
  build_strands(built);
  for (const Strand& strand : built.strands) weight_ += 1 + strand.bases.size();
  return nests_.emplace(key, std::move(built)).first->second;
}

namespace {

struct Kept {
  std::uint64_t src;
  std::uint64_t dst;
  std::shared_ptr<const Recipe> recipe;
};

/// The latest recipes, newest first.
class Recipes {
 public:
  std::shared_ptr<const Recipe> find(const char* verb, std::uint64_t src, std::uint64_t dst,
                                     const BuildOptions& options) {
    const std::lock_guard lock(kept_lock());
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      const Kept& one = kept_[i];
      if (one.src != src || one.dst != dst || std::string_view(one.recipe->verb()) != verb ||
          !(one.recipe->options() == options))
        continue;
      if (one.recipe->weight() > kMaxWeight) {  // it grew: its nests start anew
        kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(i));
        return nullptr;
      }
      std::rotate(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(i),
                  kept_.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      return kept_.front().recipe;
    }
    return nullptr;
  }

  void keep(std::uint64_t src, std::uint64_t dst, std::shared_ptr<const Recipe> recipe) {
    const std::lock_guard lock(kept_lock());
    std::erase_if(kept_, [](const Kept& one) { return one.recipe->weight() > kMaxWeight; });
    if (kept_.size() == kMaxKept) kept_.pop_back();
    kept_.insert(kept_.begin(), {src, dst, std::move(recipe)});
  }

 private:
  static constexpr std::size_t kMaxKept = 64;
  static constexpr std::size_t kMaxWeight = 1 << 14;
  std::vector<Kept> kept_;
};

}  // namespace

std::shared_ptr<const Recipe> recipe_for(const char* verb, const Cache& src, const Cache& dst, BuildOptions options,
                                         void (*check)(const Cache&, const Cache&)) {
  static Recipes& recipes = *new Recipes;  // never destroyed: other threads may call until the process ends
  if (auto found = recipes.find(verb, src.id(), dst.id(), options)) return found;
  if (check != nullptr) check(src, dst);
  auto made = std::make_shared<const Recipe>(verb, end_of(src), end_of(dst), options);
  recipes.keep(src.id(), dst.id(), made);
  return made;
}

}  // namespace kvstride::plan
