// SPDX-License-Identifier: Apache-2.0
// What the files of the extension module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kvstride/kvstride.h"

namespace nb = nanobind;

/// A C-contiguous int64 array on the host, as `_ids.py` makes it.
using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdPairs = nb::ndarray<const std::int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

inline std::span<const std::int64_t> to_span(const Ids& ids) { return {ids.data(), ids.shape(0)}; }
inline std::span<const kvstride::Pair> to_pairs(const IdPairs& pairs) {
  static_assert(sizeof(kvstride::Pair) == 2 * sizeof(std::int64_t));
  return {reinterpret_cast<const kvstride::Pair*>(pairs.data()), pairs.shape(0)};
}

/// A CUDA stream of the caller's; none: kvstride's own.
using Handle = std::optional<std::uintptr_t>;
inline kvstride::Stream to_stream(Handle handle) {
  return handle ? kvstride::Stream(reinterpret_cast<void*>(*handle)) : kvstride::Stream();
}

/// A Python int of any length; `beyond` is the error for one that does not fit, kDType for what is no int.
std::int64_t to_int64(nb::handle value, const std::string& what, kvstride::ErrorCode beyond, const std::string& limit);
/// One line, where nanobind's own refusal takes many.
void check_no_more(const nb::args& more, const nb::kwargs& named, const std::string& call);
/// A function without arguments.
template <typename F>
void def_plain(nb::module_& m, const char* name, F function, const char* signature, const char* doc) {
  m.def(
      name,
      [name, function](const nb::args& more, const nb::kwargs& named) {
        check_no_more(more, named, std::string(name) + "()");
        return function();
      },
      nb::arg("more"), nb::arg("named"), nb::sig(signature), doc);
}
kvstride::DType to_dtype(const std::string& name);
void bind_layouts(nb::module_& m);
void bind_detect(nb::module_& m);
void bind_blocks(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_identity(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_store(nb::module_& m);
void bind_store_command(nb::module_& m);
