// SPDX-License-Identifier: Apache-2.0
// Caches, plans and the block verbs. All of them release the interpreter lock while bytes move.
#include <nanobind/stl/variant.h>

#include <type_traits>
#include <variant>

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

/// A CUDA stream of the caller's; none: kvstride's own.
using Handle = std::optional<std::uintptr_t>;
Stream to_stream(Handle handle) { return handle ? Stream(reinterpret_cast<void*>(*handle)) : Stream(); }

/// Ids in device memory: (address, bytes of an id, stride in ids, count); of pairs first the sources', then the
/// destinations'.
using There = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;
using AnyIds = std::variant<Ids, There>;
using AnyPairs = std::variant<IdPairs, std::pair<There, There>>;

DeviceList to_list(const There& ids) {
  const auto& [address, item, stride, count] = ids;
  return {reinterpret_cast<const void*>(address), item, stride, count};
}

/// Calls `use` with a span or a DeviceList.
template <class Use>
void with_ids(const AnyIds& ids, const Use& use) {
  if (const auto* here = std::get_if<Ids>(&ids)) {
    use(to_span(*here));
  } else {
    use(to_list(std::get<There>(ids)));
  }
}

/// Nobody reads ids in device memory before the work is done.
void refuse_null_block(const char* verb, std::optional<std::int64_t> null_block) {
  if (!null_block) return;
  throw Error(ErrorCode::kArgument, std::string(verb) + ": null_block goes with ids in host memory");
}

DevicePairs to_device_pairs(const char* verb, const AnyPairs& pairs, std::optional<std::int64_t> null_block) {
  refuse_null_block(verb, null_block);
  const auto& [src, dst] = std::get<1>(pairs);
  return {to_list(src), to_list(dst)};
}

/// (address, dtype, shape, strides, device)
using Tokens = std::tuple<std::uintptr_t, std::string, std::array<std::int64_t, 3>, std::array<std::int64_t, 3>, int>;

TokenTensor to_tokens(const Tokens& tokens) {
  const auto& [address, dtype, shape, strides, device] = tokens;
  return {reinterpret_cast<const std::byte*>(address), to_dtype(dtype), shape, strides, {device}};
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
          [](Cache* self, const std::vector<std::uintptr_t>& addresses, const Layout& layout, bool read_only,
             int device) {
            std::vector<std::byte*> tensors;
            for (const std::uintptr_t address : addresses) tensors.push_back(reinterpret_cast<std::byte*>(address));
            new (self) Cache(std::move(tensors), layout, read_only, {device});
          },
          nb::arg("addresses"), nb::arg("layout"), nb::arg("read_only"), nb::arg("device") = -1)
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
          "`owners` are numpy arrays (True in `arrays`) or have data_ptr().")
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
          "run", [](Plan& self, std::optional<std::uintptr_t> stream) { self.run(to_stream(stream)); },
          nb::arg("stream").none(), nb::call_guard<GilReleased>());

  // The last argument of each verb is the stream.
  m.def(
      "copy_blocks",
      [](const Cache& cache, const AnyPairs& pairs, const std::optional<Span2>& layers,
         std::optional<std::int64_t> null, Handle stream) {
        const Stream on = to_stream(stream);
        if (const auto* here = std::get_if<IdPairs>(&pairs)) {
          return copy_blocks(cache, to_pairs(*here), to_range(layers), null, on);
        }
        const DevicePairs there = to_device_pairs("copy_blocks", pairs, null);
        copy_blocks(cache, there, to_range(layers), on);
        return there.src.count;
      },
      nb::arg("cache"), nb::arg("pairs"), nb::arg("layers").none(), nb::arg("null_block").none(),
      nb::arg("stream").none(), nb::call_guard<GilReleased>());
  m.def(
      "swap_blocks",
      [](const Cache& src, const Cache& dst, const AnyPairs& pairs, const std::optional<Span2>& layers,
         std::optional<std::int64_t> null, Handle stream) {
        const Stream on = to_stream(stream);
        if (const auto* here = std::get_if<IdPairs>(&pairs)) {
          return swap_blocks(src, dst, to_pairs(*here), to_range(layers), null, on);
        }
        const DevicePairs there = to_device_pairs("swap_blocks", pairs, null);
        swap_blocks(src, dst, there, to_range(layers), on);
        return there.src.count;
      },
      nb::arg("src"), nb::arg("dst"), nb::arg("pairs"), nb::arg("layers").none(), nb::arg("null_block").none(),
      nb::arg("stream").none(), nb::call_guard<GilReleased>());
  m.def(
      "convert_blocks",
      [](const Cache& src, const Cache& dst, const AnyPairs& pairs, const std::optional<Span3>& heads,
         const std::optional<Span2>& layers, bool cast, const Scales& scales, std::optional<std::int64_t> null,
         Handle stream) {
        const PlanOptions options = to_options(heads, layers, cast, scales);
        const Stream on = to_stream(stream);
        if (const auto* here = std::get_if<IdPairs>(&pairs)) {
          return convert_blocks(src, dst, to_pairs(*here), options, null, on);
        }
        const DevicePairs there = to_device_pairs("convert_blocks", pairs, null);
        convert_blocks(src, dst, there, options, on);
        return there.src.count;
      },
      nb::arg("src"), nb::arg("dst"), nb::arg("pairs"), nb::arg("heads").none(), nb::arg("layers").none(),
      nb::arg("cast"), nb::arg("scales"), nb::arg("null_block").none(), nb::arg("stream").none(),
      nb::call_guard<GilReleased>());
  m.def(
      "convert_tokens",
      [](const Cache& src, const Cache& dst, const Ids& src_blocks, const Ids& dst_blocks, const Span3& tokens,
         const std::optional<Span3>& heads, const std::optional<Span2>& layers, bool cast, const Scales& scales,
         Handle stream) {
        convert_tokens(src, dst, to_span(src_blocks), to_span(dst_blocks), *to_range_pair(tokens),
                       to_options(heads, layers, cast, scales), to_stream(stream));
      },
      nb::arg("src"), nb::arg("dst"), nb::arg("src_blocks"), nb::arg("dst_blocks"), nb::arg("tokens"),
      nb::arg("heads").none(), nb::arg("layers").none(), nb::arg("cast"), nb::arg("scales"), nb::arg("stream").none(),
      nb::call_guard<GilReleased>());
  m.def(
      "zero_blocks",
      [](const Cache& cache, const AnyIds& ids, std::optional<std::int64_t> null, Handle stream) {
        with_ids(ids, [&](const auto& list) {
          if constexpr (std::is_same_v<decltype(list), const DeviceList&>) {
            refuse_null_block("zero_blocks", null);
            zero_blocks(cache, list, to_stream(stream));
          } else {
            zero_blocks(cache, list, null, to_stream(stream));
          }
        });
      },
      nb::arg("cache"), nb::arg("ids"), nb::arg("null_block").none(), nb::arg("stream").none(),
      nb::call_guard<GilReleased>());
  m.def(
      "gather_tokens",
      [](const Cache& cache, const AnyIds& slots, const Cache& dense, Handle stream) {
        with_ids(slots, [&](const auto& list) { gather_tokens(cache, list, dense, to_stream(stream)); });
      },
      nb::arg("cache"), nb::arg("slots"), nb::arg("dense"), nb::arg("stream").none(), nb::call_guard<GilReleased>());
  m.def(
      "scatter_tokens",
      [](const Cache& cache, const AnyIds& slots, const Cache& dense, Handle stream) {
        with_ids(slots, [&](const auto& list) { scatter_tokens(cache, list, dense, to_stream(stream)); });
      },
      nb::arg("cache"), nb::arg("slots"), nb::arg("dense"), nb::arg("stream").none(), nb::call_guard<GilReleased>());
  m.def("dense_layout", &dense_layout, nb::arg("layout"), nb::arg("num_tokens"));
  m.def(
      "write_tokens",
      [](const Cache& cache, std::int64_t layer, const Tokens& key, const Tokens& value, const AnyIds& slots,
         float key_scale, float value_scale, Handle stream) {
        const GilReleased release;
        with_ids(slots, [&](const auto& list) {
          write_tokens(cache, layer, to_tokens(key), to_tokens(value), list, key_scale, value_scale, to_stream(stream));
        });
      },
      nb::arg("cache"), nb::arg("layer"), nb::arg("key"), nb::arg("value"), nb::arg("slots"), nb::arg("key_scale"),
      nb::arg("value_scale"), nb::arg("stream").none());
  def_plain(m, "cuda_status", &cuda_status, "def cuda_status() -> str",
            "What the CUDA back end is here, in one line: 'not built', 'built with CUDA 13.0; no driver was found' …");
  def_plain(m, "num_cuda_devices", &num_cuda_devices, "def num_cuda_devices() -> int",
            "Devices that can be used; 0 without CUDA or a driver.");
  m.def(
      "cuda_check", [](int device) { cuda_check({device}); }, nb::arg("device"), nb::call_guard<GilReleased>());
  m.def(
      "device_of",
      [](std::uintptr_t address) -> std::optional<int> {
        const std::optional<Device> found = device_of(reinterpret_cast<const void*>(address));
        if (!found) return std::nullopt;
        return found->cuda;
      },
      nb::arg("address"),
      "The CUDA device of memory, -1 for pinned memory of the host, None for what CUDA does not know.");
  m.def(
      "wait_for", [](int device, std::uintptr_t stream) { wait_for({device}, to_stream(stream)); }, nb::arg("device"),
      nb::arg("stream"), nb::call_guard<GilReleased>(), "Waits for what is on a stream now.");
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
