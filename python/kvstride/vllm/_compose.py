# SPDX-License-Identifier: Apache-2.0
"""From the axes and byte strides of a tensor to the text of the layout notation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: The K/V axis among the outer terms.
KV = "KV"


@dataclass(frozen=True)
class Term:
    """One dimension outside the interior: axis letter or `KV`, length, byte stride."""

    axis: str
    extent: int
    stride: int


@dataclass(frozen=True)
class Body:
    """What lies inside all outer terms, for K and for V: notation and bytes."""

    key: str
    value: str
    key_bytes: int
    value_bytes: int

    @property
    def alike(self) -> bool:
        """K and V are written the same way."""
        return self.key == self.value and self.key_bytes == self.value_bytes


def nest(terms: Sequence[Term], body: Body) -> tuple[str, str]:
    """The notation of `terms` around `body`: (order, the same with the byte strides that are not natural).

    `terms` may come in any sequence; the strides decide. Exactly one of them is `KV`. Terms of equal stride keep
    their sequence: they differ only where one has length 1, whose stride means nothing. Raises ValueError where
    elements would overlap or where members of unequal size would have to share a term.
    """
    ordered = sorted(terms, key=lambda t: -t.stride)
    split = next(i for i, t in enumerate(ordered) if t.axis == KV)
    outer, kv, inner = ordered[:split], ordered[split], ordered[split + 1 :]
    if inner and body.key_bytes != body.value_bytes:
        raise ValueError("K and V of different sizes are not next to each other")

    plain, exact, size = _chain(inner, body.key_bytes)
    value_offset = kv.stride
    if value_offset < size:
        raise ValueError(f"V starts {value_offset} bytes after K, inside K's {size}")
    padded = value_offset != size
    total = 2 * value_offset if padded else size + (size if inner else body.value_bytes)
    at = f"@{value_offset}" if padded else ""
    if body.alike:
        tail_plain = _words(KV, plain, body.key)
        tail_exact = _words(KV + at, exact, body.key)
    else:
        tail_plain = f"{{key: {_words(plain, body.key)}, value: {_words(plain, body.value)}}}"
        tail_exact = f"{{key: {_words(exact, body.key)}, value{at}: {_words(exact, body.value)}}}"
    # Where the value is moved, only KV@ says how far the pair reaches: the next stride is always given.
    plain, exact, _ = _chain(outer, total, always=padded and not body.alike)
    return _words(plain, tail_plain), _words(exact, tail_exact)


def single(terms: Sequence[Term], body: str, size: int) -> tuple[str, str]:
    """The notation of `terms` around one body of `size` bytes: (order, the same with strides)."""
    plain, exact, _ = _chain(sorted(terms, key=lambda t: -t.stride), size)
    return _words(plain, body), _words(exact, body)


def _chain(terms: Sequence[Term], size: int, always: bool = False) -> tuple[str, str, int]:
    """Terms, outermost first, around `size` bytes: (plain text, text with strides, bytes in all)."""
    plain: list[str] = []
    exact: list[str] = []
    for term in reversed(terms):
        stride = size if term.extent == 1 else term.stride
        if stride < size:
            raise ValueError(f"{term.axis} steps by {stride} bytes over {size} bytes of content")
        plain.insert(0, term.axis)
        exact.insert(0, f"{term.axis}@{stride}" if always or stride != size else term.axis)
        always = False
        size = stride * term.extent
    return " ".join(plain), " ".join(exact), size


def _words(*parts: str) -> str:
    return " ".join(p for p in parts if p)
