# SPDX-License-Identifier: Apache-2.0
"""Tensors as engines make them: the declared shape of a registry row over memory that `kv.layout` addresses."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvstride as kv
from oracle import item_size

WORDS = {"L": "layer", "B": "block", "N": "token", "H": "head", "D": "dim"}
#: Opaque rows whose strides are true for tokens and heads too.
TOKEN_STRIDES = "per-token-head"
NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def geometry_for(entry: kv.Entry, **sizes: int) -> kv.Geometry:
    """A geometry that the row can have: MLA records have 576 dims, LMCache chunks no blocks, AMX f32 is f32."""
    given = {"num_layers": 2, "num_blocks": 5, "block_size": 32, "num_kv_heads": 6, "head_size": 32, "k": 8, "g": 3}
    given |= sizes
    if "576" in entry.shape:
        given["head_size"] = 576
    if entry.name.startswith("vllm/nvfp4") and not sizes:
        given["head_size"] = 64
    if not has_axis(entry, "B"):
        given["num_blocks"] = 1
    return kv.Geometry(**given, dtype="f32" if "amx32" in entry.name else "bf16")


def has_axis(entry: kv.Entry, letter: str) -> bool:
    """Whether the row's order has an axis."""
    return re.search(rf"(^|[\s{{]){letter}\b", entry.order) is not None


def declares_layers(entry: kv.Entry) -> bool:
    """Whether the declared tensor holds all layers."""
    return "L" in entry.shape


def evaluate(expression: str, g: kv.Geometry) -> int:
    """A dimension of a declared shape, such as `2*(D+4)`."""
    sizes = {"L": g.num_layers, "B": g.num_blocks, "N": g.block_size, "H": g.num_kv_heads, "D": g.head_size}
    return int(eval(expression, {"__builtins__": {}}, sizes | g.symbols))


def natural_item(layout: kv.Layout, part: int) -> int:
    """Bytes that shape and strides of a tensor count in."""
    sizes = {item_size(dtype) for plane, dtype in layout.planes.items() if layout.part(plane) == part}
    return sizes.pop() if len(sizes) == 1 else 1


def declared_strides(entry: kv.Entry, layout: kv.Layout, part: int = 0) -> tuple[list[int], list[int], int]:
    """(shape, byte strides, item size) of the engine's tensor, the strides read off `layout.offset`.

    A dimension of length 1 has stride 0. Only the outer strides of opaque rows are true; inside they are contiguous.
    """
    g = layout.geometry
    dims = [dim.strip() for dim in entry.shape.split("|")[part].split(",")]
    first = next(p for p in layout.planes if layout.part(p) == part)
    lengths = dict(zip("LBNHD", layout.extents(first), strict=True))
    item = natural_item(layout, part)

    def step(axis: str, distance: int) -> int:
        if distance >= lengths[axis]:
            return 0
        return layout.offset(first, **{WORDS[axis]: distance})[1] - layout.offset(first)[1]

    def factor(text: str) -> int:
        if text == "2":
            return layout.offset("value")[1] - layout.offset("key")[1]
        if "//" in text:
            axis, size = text.split("//")
            return step(axis, g.symbols[size])
        if text in g.symbols:
            return step({"k": "N", "g": "H"}[text], 1)
        return step(text, 1) if text in WORDS else item

    shape, strides = [], []
    for dim in dims:
        factors = [] if re.search(r"[+()]", dim) else dim.split("*")
        long = [factor(f) for f in factors if evaluate(f, g) > 1]
        shape.append(evaluate(dim, g))
        strides.append(0 if shape[-1] == 1 else min(long) if long else item)
    if entry.opaque:
        literal = {"2", "B", "L"} | ({"N", "H"} if TOKEN_STRIDES in entry.name else set())
        run = item
        for i in reversed(range(len(dims))):
            if dims[i] not in literal:
                strides[i] = run
                run *= shape[i]
    return shape, strides, item


@dataclass
class Engine:
    """A row's tensors as its engine registers them, over byte buffers, and where `kv.layout` says elements lie."""

    tensors: Any
    layout: kv.Layout
    buffers: list[np.ndarray]
    addresses: list[int]  #: of each tensor of `layout`

    def address(self, plane: str, index: tuple[int, ...]) -> int:
        """Where the element must lie."""
        tensor, byte = self.layout.offset(plane, *index)
        return self.addresses[tensor] + byte


def engine_tensors(entry: kv.Entry, g: kv.Geometry, dtypes: dict[int, Any] | None = None) -> Engine:
    """One allocation of random bytes for all layers, one a layer, or one a layer and plane, viewed as declared."""
    dtypes = NUMPY | (dtypes or {})
    layout = kv.layout(entry.name, g)
    rng = np.random.default_rng(math.prod(layout.extents(next(iter(layout.planes)))))
    buffers: list[np.ndarray] = []

    def allocate(num_bytes: int) -> np.ndarray:
        buffers.append(rng.integers(0, 256, num_bytes, dtype=np.uint8))
        return buffers[-1]

    def view(buffer: np.ndarray, byte: int, part: int = 0) -> np.ndarray:
        shape, strides, item = declared_strides(entry, layout, part)
        return np.ndarray(shape, dtypes[item], buffer.data, byte, strides)

    if layout.layered and not declares_layers(entry):
        whole = allocate(layout.num_bytes)
        first = next(iter(layout.planes))
        tensors: Any = [view(whole, layout.offset(first, layer=i)[1]) for i in range(g.num_layers)]
    elif layout.num_parts == 1:
        tensors = [view(allocate(layout.num_bytes), 0) for _ in range(layout.num_tensors)]
    else:
        parts = range(layout.num_parts)
        layers = [[view(allocate(layout.part_bytes(p)), 0, p) for p in parts] for _ in range(g.num_layers)]
        tensors = tuple(list(column) for column in zip(*layers, strict=True))
    if isinstance(tensors, list) and len(tensors) == 1:
        tensors = tensors[0]
    return Engine(tensors, layout, buffers, [b.ctypes.data for b in buffers])
