// SPDX-License-Identifier: Apache-2.0
// Canonical text of a layout, made from its addresses alone.
#include <fmt/format.h>

#include <algorithm>

#include "kvstride/layout.h"
#include "layout/internal.h"

namespace kvstride {
namespace {

/// A plane whose outer modes were already printed.
struct Rest {
  const Plane* plane;
  std::int64_t base;
  std::vector<Mode> modes;   // normal form, outermost first
  bool head_of_one = false;  // a length-1 H is still to be printed

  std::int64_t end() const { return base + span_of(modes, item_size(plane->dtype)); }
};

/// Text and the size in bytes that the parser would give it.
struct Text {
  std::string text;
  std::int64_t size;
};

void prepend(Text& out, const std::string& word) { out.text = out.text.empty() ? word : word + " " + out.text; }

Text wrap_mode(Text inner, const Mode& mode, const Plane& plane) {
  const std::int64_t full = plane.extent(mode.axis);
  std::string word(1, letter_of(mode.axis));
  if (mode.modulus != full) word += fmt::format("%{}", mode.modulus);
  if (mode.divisor != 1) word += fmt::format("/{}", mode.divisor);
  if (mode.modulus == full) word += fmt::format("[{}]", full);
  if (mode.stride != inner.size) word += fmt::format("@{}", mode.stride);
  prepend(inner, word);
  inner.size = mode.stride * mode.extent;
  return inner;
}

bool same_inside(const Rest& a, const Rest& b) {
  return a.modes == b.modes && a.plane->dtype == b.plane->dtype && a.head_of_one == b.head_of_one;
}

class Printer {
 public:
  explicit Printer(DType dtype) : dtype_(dtype) {}

  Text print(std::vector<Rest> rests) {
    if (rests.size() == 1 && rests[0].base == 0) return print_one(rests[0]);
    if (auto common = take_common(rests)) {
      const Plane& plane = *rests[0].plane;
      return wrap_mode(print(std::move(rests)), *common, plane);
    }
    return print_members(std::move(rests));
  }

 private:
  Text print_one(const Rest& rest) {
    Text out{"", item_size(rest.plane->dtype)};
    if (rest.plane->dtype != dtype_) out.text = name_of(rest.plane->dtype);
    std::vector<Mode> modes = rest.modes;
    bool head = rest.head_of_one;
    for (auto mode = modes.rbegin(); mode != modes.rend(); ++mode) {
      if (head && mode->axis != Axis::kDim) {
        prepend(out, "H[1]");
        head = false;
      }
      out = wrap_mode(std::move(out), *mode, *rest.plane);
    }
    if (head) prepend(out, "H[1]");
    if (modes.empty() && !rest.head_of_one) prepend(out, "D[1]");
    return out;
  }

  /// Removes and returns the outermost mode where all planes share it and it spans all that is inside.
  static std::optional<Mode> take_common(std::vector<Rest>& rests) {
    for (const Rest& rest : rests) {
      if (rest.modes.empty() || !(rest.modes[0] == rests[0].modes[0])) return std::nullopt;
      if (rest.plane->extent(rest.modes[0].axis) != rests[0].plane->extent(rests[0].modes[0].axis)) {
        return std::nullopt;
      }
    }
    const Mode mode = rests[0].modes[0];
    std::vector<Rest> inner = rests;
    std::int64_t low = inner[0].base;
    std::int64_t high = 0;
    for (Rest& rest : inner) {
      rest.modes.erase(rest.modes.begin());
      low = std::min(low, rest.base);
      high = std::max(high, rest.end());
    }
    if (high - low > mode.stride && sequential(rests)) return std::nullopt;
    rests = std::move(inner);
    return mode;
  }

  /// Whether the planes lie one after the other.
  static bool sequential(std::vector<Rest> rests) {
    std::sort(rests.begin(), rests.end(), [](const Rest& a, const Rest& b) { return a.base < b.base; });
    for (std::size_t i = 0; i + 1 < rests.size(); ++i) {
      if (rests[i].end() > rests[i + 1].base) return false;
    }
    return true;
  }

  Text print_members(std::vector<Rest> rests) {
    std::stable_sort(rests.begin(), rests.end(), [](const Rest& a, const Rest& b) { return a.base < b.base; });
    if (rests.size() == 2 && rests[0].plane->name == "key" && rests[1].plane->name == "value" && rests[0].base == 0 &&
        same_inside(rests[0], rests[1]) && rests[0].plane->extents == rests[1].plane->extents) {
      const std::int64_t stride = rests[1].base;
      Text out = print_one({rests[0].plane, 0, rests[0].modes, rests[0].head_of_one});
      const bool natural = stride == out.size;
      prepend(out, natural ? "KV" : fmt::format("KV@{}", stride));
      out.size = 2 * stride;
      return out;
    }
    std::string list;
    std::int64_t end = 0;
    std::int64_t size = 0;
    for (const Rest& rest : rests) {
      const Text inner = print_one({rest.plane, 0, rest.modes, rest.head_of_one});
      list += (list.empty() ? "" : ", ") + rest.plane->name;
      if (rest.base != end) list += fmt::format("@{}", rest.base);
      list += ": " + inner.text;
      end = rest.base + inner.size;
      size = end;
    }
    return {"{" + list + "}", size};
  }

  DType dtype_;
};

}  // namespace

std::string Layout::str() const {
  std::string out;
  for (std::int64_t part = 0; part < num_parts(); ++part) {
    std::vector<Rest> rests;
    for (const Plane& plane : planes_) {
      if (plane.part != part) continue;
      Rest rest{&plane, plane.base, normal_modes(plane), false};
      rest.head_of_one = plane.has_head && plane.extent(Axis::kHead) == 1;
      rests.push_back(std::move(rest));
    }
    if (!out.empty()) out += " | ";
    const bool named = rests.size() == 1 && rests[0].base == 0;
    const std::string name = rests[0].plane->name;
    Text text = Printer(geometry_.dtype).print(std::move(rests));
    out += named ? name + ": " + text.text : text.text;
  }
  return out;
}

}  // namespace kvstride
