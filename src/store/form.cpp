// SPDX-License-Identifier: Apache-2.0
// The stored order of a namespace's planes, and whether a cache suits it.
#include "store/form.h"

#include <fmt/format.h>

#include <algorithm>

#include "kvstride/error.h"
#include "plan/program.h"

namespace kvstride::store {
namespace {

/// The extents that the order of a payload leaves open.
Geometry geometry_of(const Namespace& space, Heads heads) {
  const NamespaceFields& fields = space.fields();
  Geometry out;
  out.num_layers = fields.num_layers;
  out.num_blocks = 1;
  out.block_size = fields.block_size;
  out.num_kv_heads = std::max<std::int64_t>(heads.count, 1);
  out.head_size = fields.head_size;
  out.value_head_size = fields.value_head_size;
  return out;
}

std::int64_t dim_of(const NamespaceFields& fields, const std::string& name, const PlaneSpec& spec) {
  if (spec.dim) return *spec.dim;
  return name.rfind("value", 0) == 0 ? fields.value_head_size.value_or(fields.head_size) : fields.head_size;
}

std::string joined(const std::vector<std::string>& texts) { return fmt::format("{}", fmt::join(texts, ", ")); }

Form form_from(Layout layout, Content content) {
  std::vector<std::string> shared;
  std::vector<std::string> heads;
  for (const Plane& plane : layout.planes()) (plane.has_head ? heads : shared).push_back(plane.name);
  std::vector<std::byte*> tensors{plan::nominal()};
  for (std::int64_t part = 1; part < layout.num_parts(); ++part) {
    tensors.push_back(tensors.back() + layout.part_bytes(part - 1));
  }
  Cache cache(std::move(tensors), layout);
  return {std::move(layout), std::move(content), !shared.empty(), !heads.empty(),
          std::move(shared), std::move(heads),   std::move(cache)};
}

}  // namespace

Form stored_form(const Namespace& space, const Layout& like, Heads heads) {
  const NamespaceFields& fields = space.fields();
  std::vector<std::string> shared;
  std::vector<std::string> sharded;
  for (const auto& [name, spec] : fields.planes) {  // sorted by name
    const Plane& plane = like.plane(name);
    const bool tokens = plane.extent(Axis::kToken) == like.geometry().block_size && !plane.raw();
    std::string text = fmt::format("{}:", name);
    if (!plane.has_head) text += fmt::format(" L[{}]", fields.num_layers);
    if (tokens) text += fmt::format(" N[{}]", fields.block_size);
    text += fmt::format(" D[{}] {}", plane.extent(Axis::kDim), name_of(plane.dtype));
    (plane.has_head ? sharded : shared).push_back(std::move(text));
  }
  std::string order;
  if (!shared.empty()) order = fmt::format("{{{}}}", joined(shared));
  if (!sharded.empty()) {
    if (!order.empty()) order += " | ";
    order += fmt::format("H[{}] L[{}] {{{}}}", heads.count, fields.num_layers, joined(sharded));
  }
  Layout layout(order, geometry_of(space, heads));
  Content content{order, heads, 0, 0};
  if (!shared.empty()) content.shared_bytes = layout.part_bytes(0);
  if (!sharded.empty()) content.head_bytes = layout.part_bytes(layout.num_parts() - 1) / heads.count;
  return form_from(std::move(layout), std::move(content));
}

std::optional<Form> form_of(const Namespace& space, const Content& content) {
  try {
    Layout layout(content.order, geometry_of(space, content.heads));
    std::int64_t bytes = 0;
    for (std::int64_t part = 0; part < layout.num_parts(); ++part) bytes += layout.part_bytes(part);
    if (layout.num_tensors() != layout.num_parts() || bytes != content.payload_bytes()) return std::nullopt;
    const std::map<std::string, PlaneSpec>& specs = space.fields().planes;
    if (layout.planes().size() != specs.size()) return std::nullopt;
    for (const Plane& plane : layout.planes()) {
      const auto spec = specs.find(plane.name);
      if (spec == specs.end() || spec->second.dtype != plane.dtype || plane.extent(Axis::kBlock) != 1 ||
          plane.extent(Axis::kLayer) != space.fields().num_layers ||
          plane.extent(Axis::kDim) != dim_of(space.fields(), plane.name, spec->second) ||
          (plane.has_head && plane.extent(Axis::kHead) != content.heads.count)) {
        return std::nullopt;
      }
    }
    // Where heads have sections of their own, these must be what the order makes of them.
    if (content.head_bytes > 0) {
      for (const Plane& plane : layout.planes()) {
        const std::vector<Mode> modes = plane.merged(Axis::kHead);
        const bool run = modes.empty() || (modes.size() == 1 && modes[0].stride == content.head_bytes);
        const std::int64_t part = layout.num_parts() - 1;
        if (plane.has_head
                ? !run || plane.part != part || layout.part_bytes(part) != content.heads.count * content.head_bytes
                : layout.num_parts() != 2 || plane.part != 0) {
          return std::nullopt;
        }
      }
    }
    return form_from(std::move(layout), content);
  } catch (const Error&) {
    return std::nullopt;
  }
}

HeadMap check_cache(const char* verb, const Namespace& space, const Layout& layout,
                    const std::optional<HeadMap>& heads) {
  const NamespaceFields& fields = space.fields();
  const auto wrong = [&](const std::string& what) {
    return Error(ErrorCode::kLayout, fmt::format("{}: {}", verb, what));
  };
  std::vector<std::string> names;
  std::vector<std::string> wanted;
  for (const Plane& plane : layout.planes()) names.push_back(plane.name);
  for (const auto& [name, spec] : fields.planes) wanted.push_back(name);
  std::sort(names.begin(), names.end());
  if (names != wanted) {
    throw wrong(fmt::format("the cache has the planes {}, the namespace {}", joined(names), joined(wanted)));
  }
  const Geometry& geometry = layout.geometry();
  if (geometry.num_layers != fields.num_layers) {
    throw wrong(fmt::format("the cache has {} layers, the namespace {}", geometry.num_layers, fields.num_layers));
  }
  if (fields.block_size % geometry.block_size != 0) {
    throw wrong(fmt::format("block_size {} of the namespace is no multiple of the cache's {}", fields.block_size,
                            geometry.block_size));
  }
  std::optional<std::int64_t> cache_heads;
  for (const Plane& plane : layout.planes()) {
    const PlaneSpec& spec = fields.planes.at(plane.name);
    if (plane.dtype != spec.dtype) {
      throw Error(ErrorCode::kDType, fmt::format("{}: plane '{}' is {}, in the namespace {}", verb, plane.name,
                                                 name_of(plane.dtype), name_of(spec.dtype)));
    }
    if (const std::int64_t dim = dim_of(fields, plane.name, spec); plane.extent(Axis::kDim) != dim) {
      throw wrong(fmt::format("plane '{}' has {} elements a token, in the namespace {}", plane.name,
                              plane.extent(Axis::kDim), dim));
    }
    const bool tokens = plane.extent(Axis::kToken) == geometry.block_size && !plane.raw();
    if (!tokens && geometry.block_size != fields.block_size) {
      throw wrong(fmt::format("plane '{}' has no tokens: block_size {} of the cache must be the namespace's {}",
                              plane.name, geometry.block_size, fields.block_size));
    }
    if (plane.raw() && !fields.raw) {
      throw wrong(fmt::format("plane '{}' is raw: a namespace with raw= (layout, tensor-parallel size, rank) is needed",
                              plane.name));
    }
    if (!plane.has_head) continue;
    if (cache_heads && *cache_heads != plane.extent(Axis::kHead)) {
      throw wrong(
          fmt::format("plane '{}' has {} heads, others {}", plane.name, plane.extent(Axis::kHead), *cache_heads));
    }
    cache_heads = plane.extent(Axis::kHead);
  }
  if (!cache_heads) return {};
  if (!heads) {
    if (*cache_heads != fields.num_kv_heads) {
      throw Error(ErrorCode::kArgument, fmt::format("{}: the cache has {} of the namespace's {} heads; give heads=",
                                                    verb, *cache_heads, fields.num_kv_heads));
    }
    return {0, 0, *cache_heads};
  }
  const auto inside = [](std::int64_t first, std::int64_t count, std::int64_t limit) {
    return first >= 0 && count >= 1 && first <= limit && count <= limit - first;
  };
  if (!inside(heads->cache_first, heads->count, *cache_heads) ||
      !inside(heads->stored_first, heads->count, fields.num_kv_heads)) {
    throw Error(ErrorCode::kArgument,
                fmt::format("{}: heads: {} from {} of the cache's {} and from {} of the namespace's {}", verb,
                            heads->count, heads->cache_first, *cache_heads, heads->stored_first, fields.num_kv_heads));
  }
  return *heads;
}

}  // namespace kvstride::store
