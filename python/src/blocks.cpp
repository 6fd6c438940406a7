// SPDX-License-Identifier: Apache-2.0
// Caches, plans and the block verbs. All of them release the interpreter lock while bytes move.
#include "gil.h"
#include "module.h"

using namespace kvstride;

namespace {

using Span3 = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
using Span2 = std::pair<std::int64_t, std::int64_t>;
using Scales = std::map<std::string, std::vector<float>>;

std::optional<Range> to_range(const std::optional<Span2>& layers) {
  if (!layers) return std::nullopt;
  return Range{layers->first, layers->second};
}

std::optional<RangePair> to_range_pair(const std::optional<Span3>& span) {
  if (!span) return std::nullopt;
  return RangePair{std::get<0>(*span), std::get<1>(*span), std::get<2>(*span)};
}

PlanOptions to_options(const std::optional<Span3>& heads, const std::optional<Span2>& layers, bool cast,
                       const Scales& scales) {
  return {to_range_pair(heads), to_range(layers), cast, scales};
}

/// numpy's C description of an array (its documented array interface).
struct ArrayStruct {
  int two;
  int nd;
  char kind;
  int item_size;
  int flags;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  void* data;
};

/// Where the memory of a numpy array, or of what has data_ptr(), lies now, and whether it may be written.
std::pair<std::uintptr_t, bool> memory_of(nb::handle owner, bool is_array) {
  if (!is_array) return {nb::cast<std::uintptr_t>(owner.attr("data_ptr")()), true};
  constexpr int kWriteable = 0x400;
  const nb::object capsule = owner.attr("__array_struct__");
  const auto* array = static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (array == nullptr) throw nb::python_error();
  return {reinterpret_cast<std::uintptr_t>(array->data), (array->flags & kWriteable) != 0};
}

}  // namespace

void bind_blocks(nb::module_& m) {
  nb::class_<Cache>(m, "Cache")
      .def(
          "__init__",
          [](Cache* self, const std::vector<std::uintptr_t>& addresses, const Layout& layout, bool read_only) {
            std::vector<std::byte*> tensors;
            for (const std::uintptr_t address : addresses) tensors.push_back(reinterpret_cast<std::byte*>(address));
            new (self) Cache(std::move(tensors), layout, read_only);
          },
          nb::arg("addresses"), nb::arg("layout"), nb::arg("read_only"))
      .def(
          "changed",
          [](const Cache& self, const nb::list& owners, const nb::list& arrays) -> std::int64_t {
            bool writeable = true;
            for (std::size_t i = 0; i < owners.size(); ++i) {
              const auto [address, may_write] = memory_of(owners[i], arrays[i].is(nb::bool_(true)));
              if (address != reinterpret_cast<std::uintptr_t>(self.tensors()[i])) return static_cast<std::int64_t>(i);
              writeable = writeable && may_write;
            }
            return writeable || self.read_only() ? -1 : -2;
          },
          nb::arg("owners"), nb::arg("arrays"),
          "The first tensor whose memory is not where it was; -2 where one is read-only now and none was; else -1. "
          "`owners` are numpy arrays (True in `arrays`) or torch tensors.")
      .def_prop_ro("layout", &Cache::layout)
      .def_prop_ro("read_only", &Cache::read_only);

  m.def(
      "plane_view",
      [](const Layout& layout, std::string_view plane, nb::object layer, bool allow_split) {
        const std::int64_t index = to_int64(layer, "layer", ErrorCode::kBlockIndex, "does not fit int64");
        const PlaneView view = plane_view(layout, plane, index, allow_split);
        return nb::make_tuple(std::string(name_of(view.dtype)), view.tensor, view.byte_offset,
                              nb::tuple(nb::cast(view.shape)), nb::tuple(nb::cast(view.strides)));
      },
      nb::arg("layout"), nb::arg("plane"), nb::arg("layer").none(), nb::arg("allow_split"),
      "(dtype, tensor, byte offset, shape, strides in elements) of a plane's view.");

  nb::class_<Plan>(m, "Plan")
      .def(
          "__init__",
          [](Plan* self, const Cache& src, const Cache& dst, const std::optional<Span3>& heads,
             const std::optional<Span2>& layers, bool cast,
             const Scales& scales) { new (self) Plan(src, dst, to_options(heads, layers, cast, scales)); },
          nb::arg("src"), nb::arg("dst"), nb::arg("heads").none(), nb::arg("layers").none(), nb::arg("cast"),
          nb::arg("scales"))
      .def(
          "__init__",
          [](Plan* self, const Layout& src, const Layout& dst, const std::optional<Span3>& heads,
             const std::optional<Span2>& layers, bool cast,
             const Scales& scales) { new (self) Plan(src, dst, to_options(heads, layers, cast, scales)); },
          nb::arg("src"), nb::arg("dst"), nb::arg("heads").none(), nb::arg("layers").none(), nb::arg("cast"),
          nb::arg("scales"))
      .def(
          "bind", [](Plan& self, const IdPairs& pairs) { self.bind(to_pairs(pairs)); }, nb::arg("pairs"),
          nb::call_guard<GilReleased>())
      .def(
          "bind_tokens",
          [](Plan& self, const Ids& src, const Ids& dst, const Span3& tokens) {
            self.bind_tokens(to_span(src), to_span(dst), *to_range_pair(tokens));
          },
          nb::arg("src_blocks"), nb::arg("dst_blocks"), nb::arg("tokens"), nb::call_guard<GilReleased>())
      .def_prop_ro("num_copies", &Plan::num_copies)
      .def_prop_ro("num_bytes", &Plan::num_bytes)
      .def_prop_ro("sizes", &Plan::sizes)
      .def("check", &Plan::check, nb::call_guard<GilReleased>())
      .def(
          "run", [](Plan& self) { self.run(); }, nb::call_guard<GilReleased>());

  m.def(
      "copy_blocks",
      [](const Cache& cache, const IdPairs& pairs, const std::optional<Span2>& layers,
         std::optional<std::int64_t> null) { return copy_blocks(cache, to_pairs(pairs), to_range(layers), null); },
      nb::arg("cache"), nb::arg("pairs"), nb::arg("layers").none(), nb::arg("null_block").none(),
      nb::call_guard<GilReleased>());
  m.def(
      "swap_blocks",
      [](const Cache& src, const Cache& dst, const IdPairs& pairs, const std::optional<Span2>& layers,
         std::optional<std::int64_t> null) { return swap_blocks(src, dst, to_pairs(pairs), to_range(layers), null); },
      nb::arg("src"), nb::arg("dst"), nb::arg("pairs"), nb::arg("layers").none(), nb::arg("null_block").none(),
      nb::call_guard<GilReleased>());
  m.def(
      "convert_blocks",
      [](const Cache& src, const Cache& dst, const IdPairs& pairs, const std::optional<Span3>& heads,
         const std::optional<Span2>& layers, bool cast, const Scales& scales, std::optional<std::int64_t> null) {
        return convert_blocks(src, dst, to_pairs(pairs), to_options(heads, layers, cast, scales), null);
      },
      nb::arg("src"), nb::arg("dst"), nb::arg("pairs"), nb::arg("heads").none(), nb::arg("layers").none(),
      nb::arg("cast"), nb::arg("scales"), nb::arg("null_block").none(), nb::call_guard<GilReleased>());
  m.def(
      "convert_tokens",
      [](const Cache& src, const Cache& dst, const Ids& src_blocks, const Ids& dst_blocks, const Span3& tokens,
         const std::optional<Span3>& heads, const std::optional<Span2>& layers, bool cast, const Scales& scales) {
        convert_tokens(src, dst, to_span(src_blocks), to_span(dst_blocks), *to_range_pair(tokens),
                       to_options(heads, layers, cast, scales));
      },
      nb::arg("src"), nb::arg("dst"), nb::arg("src_blocks"), nb::arg("dst_blocks"), nb::arg("tokens"),
      nb::arg("heads").none(), nb::arg("layers").none(), nb::arg("cast"), nb::arg("scales"),
      nb::call_guard<GilReleased>());
  m.def(
      "zero_blocks",
      [](const Cache& cache, const Ids& ids, std::optional<std::int64_t> null) {
        zero_blocks(cache, to_span(ids), null);
      },
      nb::arg("cache"), nb::arg("ids"), nb::arg("null_block").none(), nb::call_guard<GilReleased>());
  m.def(
      "gather_tokens",
      [](const Cache& cache, const Ids& slots, const Cache& dense) { gather_tokens(cache, to_span(slots), dense); },
      nb::arg("cache"), nb::arg("slots"), nb::arg("dense"), nb::call_guard<GilReleased>());
  m.def(
      "scatter_tokens",
      [](const Cache& cache, const Ids& slots, const Cache& dense) { scatter_tokens(cache, to_span(slots), dense); },
      nb::arg("cache"), nb::arg("slots"), nb::arg("dense"), nb::call_guard<GilReleased>());
  m.def("dense_layout", &dense_layout, nb::arg("layout"), nb::arg("num_tokens"));
  m.def(
      "write_tokens",
      [](const Cache& cache, std::int64_t layer, std::uintptr_t key, const std::string& key_dtype,
         const std::array<std::int64_t, 3>& key_shape, const std::array<std::int64_t, 3>& key_strides,
         std::uintptr_t value, const std::string& value_dtype, const std::array<std::int64_t, 3>& value_shape,
         const std::array<std::int64_t, 3>& value_strides, const Ids& slots, float key_scale, float value_scale) {
        const TokenTensor k{reinterpret_cast<const std::byte*>(key), to_dtype(key_dtype), key_shape, key_strides};
        const TokenTensor v{reinterpret_cast<const std::byte*>(value), to_dtype(value_dtype), value_shape,
                            value_strides};
        const GilReleased release;
        write_tokens(cache, layer, k, v, to_span(slots), key_scale, value_scale);
      },
      nb::arg("cache"), nb::arg("layer"), nb::arg("key"), nb::arg("key_dtype"), nb::arg("key_shape"),
      nb::arg("key_strides"), nb::arg("value"), nb::arg("value_dtype"), nb::arg("value_shape"),
      nb::arg("value_strides"), nb::arg("slots"), nb::arg("key_scale"), nb::arg("value_scale"));
  def_plain(
      m, "instruction_sets", &instruction_sets, "def instruction_sets() -> list[str]",
      "Instruction sets that the kernels can use here, best first; the first is used, or the one that the environment "
      "variable KVSTRIDE_CPU_TARGET names.");
  def_plain(m, "num_threads", &num_threads, "def num_threads() -> int", "Threads that large calls are split over.");
  m.def(
      "set_num_threads",
      [](std::int64_t threads) {
        const int number = static_cast<int>(threads);
        if (number != threads) {
          throw Error(ErrorCode::kArgument, "set_num_threads: " + std::to_string(threads) + " does not fit int");
        }
        set_num_threads(number);
      },
      nb::arg("threads"),
      "Set them for calls that start later; 0 goes back to the default (KVSTRIDE_NUM_THREADS, or the process's "
      "cores).");
  m.def(
      "expand_block_ids", [](const Ids& ids, std::int64_t ratio) { return expand_block_ids(to_span(ids), ratio); },
      nb::arg("ids"), nb::arg("ratio"));
}
