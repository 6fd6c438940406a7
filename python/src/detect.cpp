// SPDX-License-Identifier: Apache-2.0
// Detection and binding over shapes; `_tensor.py` reads the shapes off tensors.
#include "module.h"

using namespace kvstride;

namespace {

using Parts = std::vector<std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::int64_t>>;

std::vector<TensorShape> to_shapes(const Parts& parts) {
  std::vector<TensorShape> out;
  for (const auto& [shape, strides, item] : parts) out.push_back({shape, strides, item});
  return out;
}

Hints to_hints(const std::map<std::string, std::int64_t>& sizes, const std::optional<std::string>& dtype) {
  Hints out;
  for (const auto& [name, value] : sizes) {
    if (name == "num_layers") {
      out.num_layers = value;
    } else if (name == "num_blocks") {
      out.num_blocks = value;
    } else if (name == "block_size") {
      out.block_size = value;
    } else if (name == "num_kv_heads") {
      out.num_kv_heads = value;
    } else if (name == "head_size") {
      out.head_size = value;
    } else if (name == "value_head_size") {
      out.value_head_size = value;
    } else {
      out.symbols[name] = value;
    }
  }
  if (dtype) out.dtype = to_dtype(*dtype);
  return out;
}

}  // namespace

void bind_detect(nb::module_& m) {
  nb::class_<Reading>(m, "Reading", "One meaning of a tensor: a geometry and an address for every element.")
      .def_ro("name", &Reading::name, "First registry row that reads so.")
      .def_ro("names", &Reading::names, "All registry rows that read so.")
      .def_ro("order", &Reading::order)
      .def_ro("layout", &Reading::layout, "With the tensor's own strides.")
      .def_prop_ro("geometry", [](const Reading& self) { return self.layout.geometry(); })
      .def_ro("assumes", &Reading::assumes, "'strided': opaque layouts of the same shape are not considered.")
      .def("__repr__", [](const Reading& self) { return "Reading('" + self.name + "', '" + self.layout.str() + "')"; });
  m.def(
      "candidates",
      [](const Parts& parts, const std::map<std::string, std::int64_t>& sizes, const std::optional<std::string>& dtype,
         const std::vector<std::string>& among) { return candidates(to_shapes(parts), to_hints(sizes, dtype), among); },
      nb::arg("parts"), nb::arg("sizes"), nb::arg("dtype").none(), nb::arg("among"));
  m.def(
      "detect",
      [](const Parts& parts, const std::map<std::string, std::int64_t>& sizes, const std::optional<std::string>& dtype,
         const std::vector<std::string>& among) { return detect(to_shapes(parts), to_hints(sizes, dtype), among); },
      nb::arg("parts"), nb::arg("sizes"), nb::arg("dtype").none(), nb::arg("among"));
  m.def(
      "bind_layout",
      [](std::string_view name, const Parts& parts, const std::map<std::string, std::int64_t>& sizes,
         const std::optional<std::string>& dtype, std::int64_t tensors_per_part) {
        return bind_layout(name, to_shapes(parts), to_hints(sizes, dtype), tensors_per_part);
      },
      nb::arg("name_or_order"), nb::arg("parts"), nb::arg("sizes"), nb::arg("dtype").none(),
      nb::arg("tensors_per_part"));
  m.def(
      "differing_element",
      [](const Layout& a, const Layout& b) -> nb::object {
        const auto example = differing_element(a, b);
        if (!example) return nb::none();
        nb::dict out;
        out["plane"] = example->plane;
        const char* names[] = {"layer", "block", "token", "head", "dim"};
        for (std::size_t i = 0; i < kNumAxes; ++i) out[names[i]] = example->index[i];
        out["offsets"] = nb::make_tuple(example->a.byte, example->b.byte);
        return out;
      },
      nb::arg("a"), nb::arg("b"), "An element at which two layouts differ, or None.");
  m.def(
      "same_block_bytes", [](const Layout& a, const Layout& b) { return block_bytes(a) == block_bytes(b); },
      nb::arg("a"), nb::arg("b"), "Whether each block id owns the same bytes in both layouts.");
}
