# SPDX-License-Identifier: Apache-2.0
"""Random layouts as trees that know their text and their addresses, without a parser: splits, padding, gaps, scales."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st


@dataclass
class Tree:
    """Terms (axis, modulus, divisor, is a digit, padding in bytes) around one element or around members."""

    terms: list[tuple[str, int, int, str, int]]
    members: list[tuple[str, int, Tree]] = field(default_factory=list)  #: name, gap before it in bytes
    item: int = 2
    dtype: str = ""

    def size(self) -> int:
        """Bytes, the last term's padding included."""
        return self._wrap()[0]

    def _wrap(self) -> tuple[int, list[int]]:
        size = self.item
        if self.members:
            size = sum(gap + body.size() for _, gap, body in self.members)
        strides = []
        for _, modulus, divisor, _, padding in reversed(self.terms):
            strides.append(size + padding)
            size = (size + padding) * (modulus // divisor)
        return size, strides[::-1]

    def place(self, path: list[str], index: dict[str, int]) -> int:
        """Byte of an element of the plane at `path` of member names."""
        _, strides = self._wrap()
        at = sum(
            (index[axis] % modulus) // divisor * stride
            for (axis, modulus, divisor, _, _), stride in zip(self.terms, strides, strict=True)
        )
        for name, gap, body in self.members:
            at += gap
            if name == path[0]:
                return at + body.place(path[1:], index)
            at += body.size()
        return at

    def text(self) -> str:
        """As the notation writes it."""
        _, strides = self._wrap()
        words = []
        for (_, _, _, word, padding), stride in zip(self.terms, strides, strict=True):
            words.append(word + (f"@{stride}" if padding else ""))
        if self.members:
            at, members = 0, []
            for name, gap, body in self.members:
                at += gap
                members.append(f"{name}{f'@{at}' if gap else ''}: {body.text()}")
                at += body.size()
            words.append("{" + ", ".join(members) + "}")
        return " ".join(words + ([self.dtype] if self.dtype else []))

    def planes(self) -> Iterator[list[str]]:
        """Paths of member names."""
        if not self.members:
            yield []
        for name, _, body in self.members:
            for path in body.planes():
                yield [name, *path]


LENGTHS = {"L": 2, "B": 3, "N": 4, "H": 2, "D": 8}


def split(draw: st.DrawFn, axis: str) -> list[tuple[str, int, int, str]]:
    """One term, or digits whose lengths multiply to the axis, in any order."""
    length = LENGTHS[axis]
    sizes = draw(st.sampled_from([[], [2], [2, 4]])) if axis in "ND" else draw(st.sampled_from([[], [1]]))
    sizes = [s for s in sizes if length % s == 0]
    cuts = [1, *sizes, length] if sizes and sizes[0] != 1 else [1, *sizes[1:], length]
    cuts = sorted(set(cuts))
    if len(cuts) == 2:
        return [(axis, length, 1, axis)]
    out = []
    for low, high in itertools.pairwise(cuts):
        modulus = "" if high == length else f"%{high}"
        divisor = "" if low == 1 else f"/{low}"
        out.append((axis, high, low, axis + modulus + divisor))
    return draw(st.permutations(out))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """A random layout of key, value and, at times, scales, with padding and gaps."""
    padding = st.sampled_from([0, 0, 0, 2, 6, 64])
    gap = st.sampled_from([0, 0, 0, 4, 36])

    def padded(terms: list[tuple[str, int, int, str]]) -> list[tuple[str, int, int, str, int]]:
        return [(*term, draw(padding)) for term in terms]

    axes = [a for a in "LBNH" if a != "L" or draw(st.booleans())]
    outer_axes = draw(st.lists(st.sampled_from(axes), unique=True))
    outer = [term for axis in outer_axes for term in split(draw, axis)]
    outer = draw(st.permutations(outer))
    inner_axes = [a for a in axes if a not in outer_axes] + ["D"]
    members = []
    for name in ("key", "value"):
        inner = [term for axis in inner_axes for term in split(draw, axis)]
        inner = padded(draw(st.permutations(inner)))
        if draw(st.booleans()):
            members.append((name, draw(gap), Tree(inner)))
            continue
        at = draw(st.integers(0, len(inner)))
        scale = [(a, LENGTHS[a], 1, a) for a in inner_axes if a != "D" and all(t[0] != a for t in inner[:at])]
        if any(t[0] == a[0] for a in scale for t in inner[:at]) or any(t[0] == "D" for t in inner[:at]):
            members.append((name, draw(gap), Tree(inner)))
            continue
        started = {t[0] for t in inner[:at]}
        if started & {t[0] for t in inner[at:]}:  # an axis that is split around the members
            members.append((name, draw(gap), Tree(inner)))
            continue
        data = Tree(inner[at:], item=1, dtype="i8")
        scales = Tree([*padded(scale), ("D", 2, 1, "D[2]", 0)], item=4, dtype="f32")
        pair = [("data", 0, data), ("scale", draw(gap), scales)]
        members.append((name, draw(gap), Tree(inner[:at], pair)))
    return Tree(padded(outer), members)
