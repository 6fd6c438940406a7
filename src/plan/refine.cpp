// SPDX-License-Identifier: Apache-2.0
// Common refinement of one axis as two layouts see it, and coalescing of loops.
#include <algorithm>
#include <numeric>

#include "plan/recipe.h"

namespace kvstride::plan {
namespace {

std::int64_t offset_of(const std::vector<Mode>& modes, std::int64_t index) {
  std::int64_t out = 0;
  for (const Mode& mode : modes) out += (index % mode.modulus) / mode.divisor * mode.stride;
  return out;
}

/// Divisors at which either side's address bends, ascending, 1 first.
std::vector<std::int64_t> bends(const std::vector<Mode>& src, const std::vector<Mode>& dst) {
  std::vector<std::int64_t> out{1};
  for (const auto* modes : {&src, &dst}) {
    for (const Mode& mode : *modes) out.push_back(mode.divisor);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace

std::vector<Piece> refine(const std::vector<Mode>& src, std::int64_t src_first, const std::vector<Mode>& dst,
                          std::int64_t dst_first, std::int64_t count) {
  const std::vector<std::int64_t> digits = bends(src, dst);
  bool nested = true;
  for (std::size_t i = 0; i + 1 < digits.size(); ++i) nested &= digits[i + 1] % digits[i] == 0;
  const std::int64_t unit = digits.back();
  nested &= src_first % unit == 0 && dst_first % unit == 0 && count % unit == 0;
  const std::int64_t src0 = offset_of(src, src_first);
  const std::int64_t dst0 = offset_of(dst, dst_first);
  if (nested) {
    Piece piece{src0, dst0, {}};
    for (std::size_t i = digits.size(); i-- > 0;) {
      const std::int64_t below = digits[i];
      const std::int64_t above = i + 1 < digits.size() ? digits[i + 1] : count;
      if (above / below <= 1) continue;
      piece.loops.push_back(
          {above / below, offset_of(src, src_first + below) - src0, offset_of(dst, dst_first + below) - dst0});
    }
    return {piece};
  }
  // Ranges that cut a digit, or splits that do not nest: runs of constant step on both sides.
  std::vector<Piece> out;
  std::int64_t i = 0;
  while (i < count) {
    const std::int64_t s = offset_of(src, src_first + i);
    const std::int64_t d = offset_of(dst, dst_first + i);
    std::int64_t n = 1;
    Loop loop{1, 0, 0};
    while (i + n < count) {
      const std::int64_t s_step = offset_of(src, src_first + i + n) - s;
      const std::int64_t d_step = offset_of(dst, dst_first + i + n) - d;
      if (n == 1) {
        loop.src = s_step;
        loop.dst = d_step;
      } else if (s_step != n * loop.src || d_step != n * loop.dst) {
        break;
      }
      ++n;
    }
    loop.extent = n;
    out.push_back({s, d, n > 1 ? std::vector<Loop>{loop} : std::vector<Loop>{}});
    i += n;
  }
  return out;
}

void coalesce(std::vector<Loop>& loops, std::int64_t& run, bool join) {
  std::erase_if(loops, [](const Loop& loop) { return loop.extent == 1; });
  std::sort(loops.begin(), loops.end(),
            [](const Loop& a, const Loop& b) { return a.dst != b.dst ? a.dst > b.dst : a.src > b.src; });
  for (bool again = join; again;) {
    again = false;
    for (std::size_t i = 0; i < loops.size(); ++i) {
      if (loops[i].src == run && loops[i].dst == run) {
        run *= loops[i].extent;
        loops.erase(loops.begin() + static_cast<std::ptrdiff_t>(i));
        again = true;
        break;
      }
    }
  }
  for (bool again = true; again;) {
    again = false;
    for (std::size_t i = 0; i < loops.size() && !again; ++i) {
      for (std::size_t j = 0; j < loops.size() && !again; ++j) {
        const Loop& outer = loops[i];
        const Loop& inner = loops[j];
        if (i == j || outer.src != inner.src * inner.extent || outer.dst != inner.dst * inner.extent ||
            outer.head != inner.head * inner.extent) {
          continue;
        }
        loops[j].extent *= outer.extent;
        loops.erase(loops.begin() + static_cast<std::ptrdiff_t>(i));
        again = true;
      }
    }
  }
}

namespace {

/// Bases at equal distances (planes, layers) become a loop; again for what is left.
void fold_bases(Strand& strand) {
  std::vector<Base>& bases = strand.bases;
  while (bases.size() > 1) {
    const std::int64_t src = bases[1].src.byte - bases[0].src.byte;
    const std::int64_t dst = bases[1].dst.byte - bases[0].dst.byte;
    const auto follows = [&](std::size_t i) {
      return bases[i].src.tensor == bases[i - 1].src.tensor && bases[i].dst.tensor == bases[i - 1].dst.tensor &&
             bases[i].src.byte - bases[i - 1].src.byte == src && bases[i].dst.byte - bases[i - 1].dst.byte == dst;
    };
    std::size_t length = 1;
    while (length < bases.size() && follows(length)) ++length;
    if (length == 1 || bases.size() % length != 0 || src <= 0) return;
    std::vector<Base> heads;
    for (std::size_t i = 0; i < bases.size(); ++i) {
      if (i % length == 0) {
        heads.push_back(bases[i]);
      } else if (!follows(i)) {
        return;
      }
    }
    strand.loops.push_back({static_cast<std::int64_t>(length), src, dst});
    bases = std::move(heads);
  }
}

}  // namespace

std::vector<Strand> join_strands(std::vector<Strand> strands) {
  for (bool again = true; again;) {
    again = false;
    std::vector<Strand> next;
    // Strands that differ in their run only can hold neighbours.
    std::vector<bool> taken(strands.size(), false);
    for (std::size_t i = 0; i < strands.size(); ++i) {
      if (taken[i]) continue;
      struct Item {
        Base base;
        std::int64_t run;
      };
      std::vector<Item> items;
      for (std::size_t j = i; j < strands.size(); ++j) {
        const Strand& a = strands[i];
        const Strand& b = strands[j];
        if (taken[j] || a.loops != b.loops || !(a.cast == b.cast) || !(a.src_slot == b.src_slot) ||
            !(a.dst_slot == b.dst_slot)) {
          continue;
        }
        taken[j] = true;
        for (const Base& base : b.bases) items.push_back({base, b.run});
      }
      std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
        if (a.base.dst.tensor != b.base.dst.tensor) return a.base.dst.tensor < b.base.dst.tensor;
        return a.base.dst.byte < b.base.dst.byte;
      });
      std::vector<Item> joined;
      for (const Item& item : items) {
        if (!joined.empty() && !strands[i].cast.active) {
          Item& last = joined.back();
          if (last.base.src.tensor == item.base.src.tensor && last.base.dst.tensor == item.base.dst.tensor &&
              last.base.src.byte + last.run == item.base.src.byte &&
              last.base.dst.byte + last.run == item.base.dst.byte) {
            last.run += item.run;
            again = true;
            continue;
          }
        }
        joined.push_back(item);
      }
      std::map<std::int64_t, Strand> by_run;
      for (const Item& item : joined) {
        auto [at, added] = by_run.try_emplace(item.run, strands[i]);
        if (added) {
          at->second.run = item.run;
          at->second.bases.clear();
        }
        at->second.bases.push_back(item.base);
      }
      for (auto& [run, strand] : by_run) {
        coalesce(strand.loops, strand.run, !strand.cast.active);
        next.push_back(std::move(strand));
      }
    }
    strands = std::move(next);
  }
  for (Strand& strand : strands) {
    fold_bases(strand);
    coalesce(strand.loops, strand.run, !strand.cast.active);
  }
  return strands;
}

}  // namespace kvstride::plan
