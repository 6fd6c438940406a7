# SPDX-License-Identifier: Apache-2.0
"""Which dimension of a declared KV tensor is which axis: sizes matched, never guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from math import prod

from kvstride import AmbiguousLayout, LayoutError, UnknownLayout

#: What one dimension can be: axes, or products of axes written as the shape functions of vLLM make them.
ATOMS = ("KV", "B", "N", "H", "D", "KV*D", "H*D", "N*H*D", "2*H", "1", "C")

#: Sizes a probe asks a backend with: no two products, halves or doubles that a layout can form are equal.
PROBE_SIZES: Mapping[str, int] = {
    "num_blocks": 7,
    "block_size": 640,
    "num_kv_heads": 11,
    "head_size": 128,
}
#: Layers of a probe with a layer dimension.
PROBE_LAYERS = 17

#: `logical_axes` words of the facts files that name exactly one atom.
_WORDS = {
    "kv(2)": "KV",
    "num_blocks": "B",
    "block_size": "N",
    "num_kv_heads": "H",
    "head_size": "D",
    "num_layers": "L",
}


def sizes_of(args: Mapping[str, int]) -> dict[str, int]:
    """Length of every atom for the sizes `args` (num_blocks, block_size, num_kv_heads, head_size, and
    value_head_size where K and V differ). "C", a content that no size predicts, is left out."""
    try:
        b, n = int(args["num_blocks"]), int(args["block_size"])
        h, d = int(args["num_kv_heads"]), int(args["head_size"])
    except KeyError as missing:
        raise LayoutError(f"name_layout: args lack {missing}") from None
    dv = int(args.get("value_head_size") or d)
    sizes = {"KV": 2, "B": b, "N": n, "H": h, "KV*D": d + dv, "2*H": 2 * h, "1": 1}
    if d == dv:
        sizes |= {"D": d, "H*D": h * d, "N*H*D": n * h * d}
    if min(b, n, h, d, dv) < 1:
        raise LayoutError(f"name_layout: args {dict(args)}: every size is at least 1")
    return sizes


def match_axes(
    shape: Sequence[int],
    args: Mapping[str, int],
    forms: Sequence[Sequence[str]],
    *,
    in_order: bool = False,
) -> tuple[str, ...]:
    """The atom of each dimension of `shape`.

    `forms` are the sets of atoms that the interior allows, one atom a dimension; "C" takes any length. With
    `in_order` the dimensions must come as the form has them (from vLLM 0.29 on a view is `[B, H, N, C]` by
    contract), else in any sequence. Raises UnknownLayout where no form fits, AmbiguousLayout where two do.
    """
    shape = tuple(int(s) for s in shape)
    sizes = sizes_of(args)
    found: set[tuple[str, ...]] = set()
    for form in forms:
        if len(form) != len(shape):
            continue
        for order in (tuple(form),) if in_order else permutations(form):
            if all(a == "C" or sizes.get(a) == s for a, s in zip(order, shape, strict=True)):
                found.add(order)
    if not found:
        allowed = " or ".join("(" + ", ".join(f) + ")" for f in forms)
        raise UnknownLayout(f"shape {shape} is not {allowed} for {dict(args)}")
    if len(found) > 1:
        readings = " and ".join("(" + ", ".join(f) + ")" for f in sorted(found))
        raise AmbiguousLayout(
            f"shape {shape} reads as {readings} for {dict(args)}: equal sizes tell no axis; give a probe"
        )
    return found.pop()


def check_words(axes: Sequence[str], words: Sequence[str] | None) -> None:
    """Compare matched axes with a facts record's `logical_axes`, as far as those are single words."""
    for axis, word in zip(axes, words or (), strict=False):
        told = _WORDS.get(word)
        if told is not None and axis in _WORDS.values() and told != axis:
            raise UnknownLayout(f"a dimension matched as {axis} is declared as {word!r}")


def byte_strides(
    shape: Sequence[int],
    stride_order: Sequence[int] | None,
    item: int,
    physical_shape: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Byte strides of a tensor that vLLM up to 0.28 allocates densely as
    `physical_shape[i] = shape[stride_order[i]]` (identity where None) and permutes back.

    Raises LayoutError where `stride_order` is no permutation of the dimensions or contradicts `physical_shape`.
    """
    rank = len(shape)
    order = tuple(range(rank)) if stride_order is None else tuple(int(i) for i in stride_order)
    if sorted(order) != list(range(rank)):
        raise LayoutError(f"stride order {order} is no permutation of the {rank} dimensions of shape {tuple(shape)}")
    physical = tuple(int(shape[i]) for i in order)
    if physical_shape is not None and tuple(int(s) for s in physical_shape) != physical:
        raise LayoutError(f"physical shape {tuple(physical_shape)} is not {physical}, what stride order {order} makes")
    strides = [0] * rank
    for position, dimension in enumerate(order):
        strides[dimension] = item * prod(physical[position + 1 :])
    return tuple(strides)
