// SPDX-License-Identifier: Apache-2.0
// The layout notation: text such as `B KV N H D` as a tree (grammar: docs/layouts.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kvstride/geometry.h"

namespace kvstride {

/// A number, or a symbol that the geometry (or, for `x`, the plane's item size) gives a value.
using Size = std::variant<std::int64_t, std::string>;

/// `[E]`: the length of the axis for this term: a size, or another axis' length divided by an integer.
struct Extent {
  Size size = std::int64_t{0};
  std::optional<Axis> axis;  ///< `[D/16]`: axis D ...
  std::int64_t divisor = 1;  ///< ... divided by 16
};

/// One term: index of the axis → ((i % modulus) / divisor) × stride.
struct Term {
  Axis axis;
  std::optional<Size> modulus;
  std::optional<Size> divisor;
  std::optional<Extent> extent;
  std::optional<std::int64_t> stride;  ///< `@`: padded stride in bytes
  int column = 0;
  /// `B`, not a digit such as `N/k` or `N%k`.
  bool whole() const { return !modulus && !divisor; }
};

struct Member;

/// Terms from outermost to innermost, then nothing, two alike members (`KV`), or named members.
struct Section {
  std::vector<Term> terms;
  std::vector<Member> members;            ///< empty, or two alike members where `kv`
  bool kv = false;                        ///< key and value have the same body
  std::optional<std::int64_t> kv_stride;  ///< `KV@S`: bytes from key to value
  std::optional<DType> dtype;
  int column = 0;
};

struct Member {
  std::string name;
  std::optional<std::int64_t> offset;  ///< `@`: bytes from the start of the section
  Section body;
  int column = 0;
};

/// One tensor's share of the text (`|` separates tensors).
struct Part {
  std::string name;  ///< empty where none is given
  Section body;
  int column = 0;
};

/// A layout before its sizes are known.
class Order {
 public:
  /// Throws Error(kLayout) with the column where the text is no layout. `NHD` and `HND` are refused: they
  /// differ by release. vLLM's six letter orders (`LBHNC` …, vLLM 0.29 and newer) are accepted.
  static Order parse(std::string_view text);

  const std::vector<Part>& parts() const noexcept { return parts_; }
  /// The text as it was written, or made by the functions below.
  const std::string& text() const noexcept { return text_; }
  bool has(Axis axis) const;

  /// This order with `axis` taken out (a single layer's view of an order with L).
  Order without(Axis axis) const;
  /// This order with the byte strides of whole axes, and of value from key (`kv`), set. Throws where an axis
  /// that is given is split or absent.
  struct Strides {
    std::vector<std::pair<Axis, std::int64_t>> axes;
    std::optional<std::int64_t> kv;
  };
  Order with_strides(const Strides& strides) const;

  /// From a tree; the text is printed from it.
  static Order from_parts(std::vector<Part> parts);

 private:
  std::vector<Part> parts_;
  std::string text_;
};

}  // namespace kvstride
