// SPDX-License-Identifier: Apache-2.0
// Fitting a tensor's shape and strides to an order: the one rule under detection and binding.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvstride/detect.h"

namespace kvstride {

/// How the dimensions of a tensor are to be understood.
struct Declared {
  std::string_view shape;    ///< `B,H,N,2*D`; parts separated by `|`
  std::string_view literal;  ///< opaque layouts: dimensions whose strides are true, outermost first
};

/// Layouts with the tensors' own strides that `order` can have over `parts`, by its natural shape (with
/// neighbours fused). Several where neighbours can be fused in several ways.
std::vector<Layout> fit_natural(const Order& order, const std::vector<TensorShape>& parts, const Hints& hints);
/// The same by a shape that an engine declares.
std::optional<Layout> fit_declared(const Order& order, const Declared& declared, const std::vector<TensorShape>& parts,
                                   const Hints& hints);

/// C-contiguous strides of `shape`, in elements.
std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& shape);
/// The dtype that an element of `item` bytes has where nobody says.
DType default_dtype(std::int64_t item);
/// Shape, strides and item size on one line, for messages.
std::string describe(const std::vector<TensorShape>& parts);

}  // namespace kvstride
