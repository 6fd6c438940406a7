// SPDX-License-Identifier: Apache-2.0
// JSON of the things that several commands print.
#include "json.h"

namespace kvstride::cli {

Json to_json(const Geometry& geometry) {
  Json out{{"num_layers", geometry.num_layers},
           {"num_blocks", geometry.num_blocks},
           {"block_size", geometry.block_size},
           {"num_kv_heads", geometry.num_kv_heads},
           {"head_size", geometry.head_size}};
  if (geometry.value_head_size) out["value_head_size"] = *geometry.value_head_size;
  out["dtype"] = name_of(geometry.dtype);
  for (const auto& [name, value] : geometry.symbols) out[name] = value;
  return out;
}

std::string dump(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }

}  // namespace kvstride::cli
