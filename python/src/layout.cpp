// SPDX-License-Identifier: Apache-2.0
// Geometry, Layout and the registry.
#include "module.h"

using namespace kvstride;

kvstride::DType to_dtype(const std::string& name) {
  if (const auto dtype = dtype_from_name(name)) return *dtype;
  throw Error(ErrorCode::kDType, "dtype: '" + name + "' is none of " + std::string(dtype_names()));
}

std::int64_t to_int64(nb::handle value, const std::string& what, ErrorCode beyond, const std::string& limit) {
  const auto shown = [&] { return what + " is " + nb::cast<std::string>(nb::repr(value)).substr(0, 80) + ", "; };
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid() || PyBool_Check(value.ptr())) {
    PyErr_Clear();
    throw Error(ErrorCode::kDType, shown() + "must be a whole number");
  }
  int overflow = 0;
  const long long out = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) throw Error(beyond, shown() + limit);
  return out;
}

namespace {

std::int64_t to_size(nb::handle value, const std::string& field) {
  return to_int64(value, "geometry: " + field, ErrorCode::kLayout, "must be from 1 to 2^48");
}

std::string type_of(nb::handle value) { return nb::cast<std::string>(value.type().attr("__name__")); }

std::string to_text(nb::handle value, const std::string& what, const std::string& expected) {
  if (!nb::isinstance<nb::str>(value)) {
    throw Error(ErrorCode::kArgument, what + " is " + type_of(value) + ", expected " + expected);
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    throw Error(ErrorCode::kArgument, what + " is not text that UTF-8 can hold");
  }
  return {text, static_cast<std::size_t>(size)};
}

const Plane& to_plane(const Layout& layout, nb::handle name, const std::string& verb) {
  return layout.plane(to_text(name, verb + ": plane", "a name"));
}

const Geometry& to_geometry(nb::handle value, const std::string& what) {
  if (!nb::isinstance<Geometry>(value)) {
    throw Error(ErrorCode::kArgument, what + ": geometry is " + type_of(value) + ", expected a Geometry");
  }
  return nb::cast<const Geometry&>(value);
}

nb::tuple to_tuple(const std::vector<std::int64_t>& values) { return nb::tuple(nb::cast(values)); }

nb::object per_part(const Layout& layout, std::vector<std::int64_t> (Layout::*get)(std::int64_t) const) {
  if (layout.num_parts() == 1) return to_tuple((layout.*get)(0));
  nb::list out;
  for (std::int64_t part = 0; part < layout.num_parts(); ++part) out.append(to_tuple((layout.*get)(part)));
  return nb::tuple(out);
}

}  // namespace

void check_no_more(const nb::args& more, const nb::kwargs& named, const std::string& call) {
  if (more.size() == 0 && named.size() == 0) return;
  const std::string surplus =
      named.size() == 0 ? std::to_string(more.size()) + " more" : to_text((*named.begin()).first, call, "a name") + "=";
  throw Error(ErrorCode::kArgument, call + ": given " + surplus);
}

void bind_layouts(nb::module_& m) {
  nb::class_<Geometry>(m, "Geometry",
                       "Sizes of a cache, in elements: num_layers, num_blocks, block_size (tokens in a block), "
                       "num_kv_heads, head_size, value_head_size (of `value…` planes), dtype, and values of the "
                       "symbols that an order uses (k, g). Raises LayoutError for sizes below 1.")
      .def(
          "__init__",
          [](Geometry* self, const nb::args& unnamed, nb::object num_layers, nb::object num_blocks,
             nb::object block_size, nb::object num_kv_heads, nb::object head_size, nb::object value_head_size,
             nb::object dtype, const nb::kwargs& symbols) {
            if (unnamed.size() != 0) {
              throw Error(ErrorCode::kArgument, "geometry: sizes are given by name, such as num_blocks=8");
            }
            Geometry out;
            out.num_layers = to_size(num_layers, "num_layers");
            out.num_blocks = to_size(num_blocks, "num_blocks");
            out.block_size = to_size(block_size, "block_size");
            out.num_kv_heads = to_size(num_kv_heads, "num_kv_heads");
            out.head_size = to_size(head_size, "head_size");
            if (!value_head_size.is_none()) out.value_head_size = to_size(value_head_size, "value_head_size");
            if (!nb::isinstance<nb::str>(dtype)) {
              throw Error(ErrorCode::kDType, "geometry: dtype is " + nb::cast<std::string>(nb::repr(dtype)) +
                                                 ", expected one of " + std::string(dtype_names()));
            }
            out.dtype = to_dtype(nb::cast<std::string>(dtype));
            for (auto [name, value] : symbols) {
              const auto key = to_text(name, "geometry: a symbol", "a name");
              out.symbols[key] = to_size(value, key);
            }
            check_geometry(out);
            new (self) Geometry(std::move(out));
          },
          nb::arg("unnamed"), nb::arg("num_layers").none() = 1, nb::arg("num_blocks").none() = nb::none(),
          nb::arg("block_size").none() = nb::none(), nb::arg("num_kv_heads").none() = nb::none(),
          nb::arg("head_size").none() = nb::none(), nb::arg("value_head_size").none() = nb::none(),
          nb::arg("dtype").none() = "bf16", nb::arg("symbols"),
          nb::sig("def __init__(self, *, num_layers: int = 1, num_blocks: int, block_size: int, num_kv_heads: int, "
                  "head_size: int, value_head_size: int | None = None, dtype: str = 'bf16', **symbols: int) -> None"))
      .def_ro("num_layers", &Geometry::num_layers)
      .def_ro("num_blocks", &Geometry::num_blocks)
      .def_ro("block_size", &Geometry::block_size)
      .def_ro("num_kv_heads", &Geometry::num_kv_heads)
      .def_ro("head_size", &Geometry::head_size)
      .def_ro("value_head_size", &Geometry::value_head_size)
      .def_prop_ro("dtype", [](const Geometry& g) { return std::string(name_of(g.dtype)); })
      .def_ro("symbols", &Geometry::symbols)
      .def(
          "__eq__", [](const Geometry& a, const Geometry& b) { return a == b; }, nb::is_operator())
      .def("__hash__", [](const Geometry& g) { return nb::hash(nb::str(to_string(g).c_str())); })
      .def("__repr__", [](const Geometry& g) { return "Geometry(" + to_string(g) + ")"; });

  nb::class_<Layout>(m, "Layout",
                     "An order with its sizes: a map (plane, layer, block, token, head, dim) -> (tensor, byte "
                     "offset). Immutable. Raises LayoutError (with .column) for text that is no layout.")
      .def(
          "__init__",
          [](Layout* self, nb::object order, nb::object geometry, const nb::args& more, const nb::kwargs& named) {
            check_no_more(more, named, "Layout(order, geometry)");
            const std::string text = to_text(order, "Layout: order", "text such as 'B KV N H D'");
            new (self) Layout(text, to_geometry(geometry, "Layout"));
          },
          nb::arg("order").none() = nb::none(), nb::arg("geometry").none() = nb::none(), nb::arg("more"),
          nb::arg("named"), nb::sig("def __init__(self, order: str, geometry: Geometry) -> None"))
      .def(
          "offset",
          [](const Layout& self, nb::object name, nb::object layer, nb::object block, nb::object token, nb::object head,
             nb::object dim, const nb::args& more, const nb::kwargs& named) {
            check_no_more(more, named, "offset(plane, layer, block, token, head, dim)");
            const Plane& plane = to_plane(self, name, "offset");
            Index index{};
            const nb::object given[] = {layer, block, token, head, dim};
            for (std::size_t a = 0; a < kNumAxes; ++a) {
              index[a] = to_int64(given[a], std::string("offset: ") + word_of(static_cast<Axis>(a)),
                                  ErrorCode::kBlockIndex, "does not fit int64");
            }
            const Location at = self.offset(plane, index);
            return std::pair(at.tensor, at.byte);
          },
          nb::arg("plane").none() = nb::none(), nb::arg("layer").none() = 0, nb::arg("block").none() = 0,
          nb::arg("token").none() = 0, nb::arg("head").none() = 0, nb::arg("dim").none() = 0, nb::arg("more"),
          nb::arg("named"),
          nb::sig("def offset(self, plane: str, layer: int = 0, block: int = 0, token: int = 0, head: int = 0, "
                  "dim: int = 0) -> tuple[int, int]"),
          "(tensor, byte) of an element. Raises BlockIndexError outside the plane.")
      .def_prop_ro(
          "planes",
          [](const Layout& self) {
            nb::dict out;
            for (const Plane& plane : self.planes()) {
              out[plane.name.c_str()] = std::string(name_of(plane.dtype));
            }
            return out;
          },
          "Plane name -> dtype.")
      .def_prop_ro(
          "order", [](const Layout& self) { return self.order().text(); }, "The order as written.")
      .def_prop_ro("geometry", &Layout::geometry)
      .def_prop_ro("num_bytes", &Layout::num_bytes, "Bytes of one tensor (of the largest, where they differ).")
      .def_prop_ro("num_tensors", &Layout::num_tensors)
      .def_prop_ro("num_parts", &Layout::num_parts, "Tensors of one layer.")
      .def(
          "part_bytes",
          [](const Layout& self, nb::object part, const nb::args& more, const nb::kwargs& named) {
            check_no_more(more, named, "part_bytes(part)");
            return self.part_bytes(to_int64(part, "part_bytes: part", ErrorCode::kBlockIndex, "does not fit int64"));
          },
          nb::arg("part").none() = nb::none(), nb::arg("more"), nb::arg("named"),
          nb::sig("def part_bytes(self, part: int) -> int"), "Bytes of tensor `part` of a layer.")
      .def_prop_ro("layered", &Layout::layered, "One tensor holds all layers.")
      .def_prop_ro(
          "shape", [](const Layout& self) { return per_part(self, &Layout::shape); },
          "Natural shape: one dimension a term, KV as 2; a tuple of shapes for several tensors.")
      .def_prop_ro(
          "strides", [](const Layout& self) { return per_part(self, &Layout::strides); },
          "Strides of the natural shape, in elements.")
      .def(
          "extents",
          [](const Layout& self, nb::object plane, const nb::args& more, const nb::kwargs& named) {
            check_no_more(more, named, "extents(plane)");
            const auto& e = to_plane(self, plane, "extents").extents;
            return std::tuple(e[0], e[1], e[2], e[3], e[4]);
          },
          nb::arg("plane").none() = nb::none(), nb::arg("more"), nb::arg("named"),
          nb::sig("def extents(self, plane: str) -> tuple[int, int, int, int, int]"),
          "(layers, blocks, tokens, heads, dims) of a plane.")
      .def(
          "modes",
          [](const Layout& self, nb::object plane, const nb::args& more, const nb::kwargs& named) {
            check_no_more(more, named, "modes(plane)");
            nb::list out;
            for (const Mode& mode : to_plane(self, plane, "modes").modes) {
              out.append(nb::make_tuple(std::string(1, letter_of(mode.axis)), mode.modulus, mode.divisor, mode.extent,
                                        mode.stride));
            }
            return out;
          },
          nb::arg("plane").none() = nb::none(), nb::arg("more"), nb::arg("named"),
          nb::sig("def modes(self, plane: str) -> list[tuple[str, int, int, int, int]]"),
          "[(axis, modulus, divisor, extent, byte stride)] of a plane, outermost first.")
      .def(
          "part",
          [](const Layout& self, nb::object plane, const nb::args& more, const nb::kwargs& named) {
            check_no_more(more, named, "part(plane)");
            return to_plane(self, plane, "part").part;
          },
          nb::arg("plane").none() = nb::none(), nb::arg("more"), nb::arg("named"),
          nb::sig("def part(self, plane: str) -> int"), "Which of a layer's tensors holds the plane.")
      .def(
          "has_head",
          [](const Layout& self, nb::object plane, const nb::args& more, const nb::kwargs& named) {
            check_no_more(more, named, "has_head(plane)");
            return to_plane(self, plane, "has_head").has_head;
          },
          nb::arg("plane").none() = nb::none(), nb::arg("more"), nb::arg("named"),
          nb::sig("def has_head(self, plane: str) -> bool"),
          "Whether the order gives the plane an H: it is sharded, not replicated.")
      .def(
          "with_layers",
          [](const Layout& self, nb::object num_layers, const nb::args& more, const nb::kwargs& named) {
            check_no_more(more, named, "with_layers(num_layers)");
            Geometry geometry = self.geometry();
            geometry.num_layers = to_size(num_layers, "num_layers");
            return Layout(self.order(), geometry);
          },
          nb::arg("num_layers").none() = nb::none(), nb::arg("more"), nb::arg("named"),
          nb::sig("def with_layers(self, num_layers: int) -> Layout"), "The same order for another number of layers.")
      .def("__str__", &Layout::str)
      .def("__repr__", [](const Layout& self) { return "Layout('" + self.str() + "')"; })
      .def(
          "__eq__", [](const Layout& a, const Layout& b) { return a == b; }, nb::is_operator())
      .def("__hash__", [](const Layout& self) {
        nb::list key;  // equal layouts have equal bases, extents and dtypes
        for (const Plane& plane : self.planes()) {
          key.append(nb::make_tuple(plane.name, std::string(name_of(plane.dtype)), plane.part, plane.base,
                                    to_tuple({plane.extents.begin(), plane.extents.end()})));
        }
        key.sort();
        return nb::hash(nb::tuple(key));
      });

  nb::class_<Entry>(m, "Entry", "One known layout of the registry.")
#define KVSTRIDE_FIELD(field) .def_prop_ro(#field, [](const Entry& e) { return std::string(e.field); })
      KVSTRIDE_FIELD(name) KVSTRIDE_FIELD(order) KVSTRIDE_FIELD(shape) KVSTRIDE_FIELD(engine) KVSTRIDE_FIELD(first)
          KVSTRIDE_FIELD(last) KVSTRIDE_FIELD(source) KVSTRIDE_FIELD(note)
#undef KVSTRIDE_FIELD
              .def_prop_ro(
                  "backends",
                  [](const Entry& e) {
                    nb::list out;
                    for (std::string_view rest = e.backends; !rest.empty();) {
                      const std::size_t end = std::min(rest.find(','), rest.size());
                      out.append(std::string(rest.substr(0, end)));
                      rest.remove_prefix(std::min(end + 1, rest.size()));
                    }
                    return nb::tuple(out);
                  },
                  "Classes of the engine that use it.")
              .def_prop_ro(
                  "opaque", [](const Entry& e) { return e.opaque; },
                  "Shape and strides do not tell the bytes: only ever named, never observed.")
              .def("__repr__", [](const Entry& e) {
                return "Entry('" + std::string(e.name) + "', '" + std::string(e.order) + "')";
              });

  def_plain(
      m, "registry", [] { return std::vector<Entry>(registry().begin(), registry().end()); },
      "def registry() -> list[Entry]", "All known layouts, in the order in which readings are named.");
  m.def(
      "layout",
      [](nb::object name_or_order, nb::object geometry, const nb::args& more, const nb::kwargs& named) {
        check_no_more(more, named, "layout(name_or_order, geometry)");
        const std::string text = to_text(name_or_order, "layout: name_or_order", "a registry name or an order");
        return make_layout(text, to_geometry(geometry, "layout"));
      },
      nb::arg("name_or_order").none() = nb::none(), nb::arg("geometry").none() = nb::none(), nb::arg("more"),
      nb::arg("named"), nb::sig("def layout(name_or_order: str, geometry: Geometry) -> Layout"),
      "Layout of a registry name such as 'vllm/flashinfer-nhd' or of an order such as 'B KV N H D'.");
  m.def(
      "num_parts", [](std::string_view text) { return order_of(text).parts().size(); }, nb::arg("name_or_order"),
      "Tensors of one layer.");
  m.def(
      "make_reading",
      [](std::string name, std::vector<std::string> names, std::string order, const Layout& layout,
         std::string assumes) {
        return Reading{std::move(name), std::move(names), std::move(order), layout, std::move(assumes)};
      },
      nb::arg("name"), nb::arg("names"), nb::arg("order"), nb::arg("layout"), nb::arg("assumes"),
      "A reading from its parts, as pickles have them.");
}
