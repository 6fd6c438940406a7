# SPDX-License-Identifier: Apache-2.0
"""Naive truth: every element, one at a time, by the layout's own offset."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import kvstride as kv
from stand_in import PLACES, FakeArray

_turn = itertools.count()
ITEM = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2}


def item_size(dtype: str) -> int:
    """Bytes of an element."""
    return ITEM.get(dtype, 1)


def fixture_f() -> np.ndarray:
    """Blocks-first NHD, (NB=5, 2, BS=4, NH=3, HS=8), int32, F[i] = 1 + flat index."""
    return np.arange(1, 5 * 2 * 4 * 3 * 8 + 1, dtype=np.int32).reshape(5, 2, 4, 3, 8)


def elements(layout: kv.Layout, plane: str) -> Iterator[tuple[int, int, int, int, int]]:
    """All (layer, block, token, head, dim) of a plane."""
    yield from itertools.product(*(range(n) for n in layout.extents(plane)))


class Memory:
    """A layout over byte buffers of its own, poisoned or filled with random bytes."""

    def __init__(self, layout: kv.Layout, seed: int | None = None, pad: int = 0) -> None:
        self.layout = layout
        self.buffers = []
        rng = np.random.default_rng(seed)
        parts = layout.num_parts
        for tensor in range(layout.num_tensors):
            size = layout.part_bytes(tensor % parts) + pad
            data = np.full(size, 0xA5, np.uint8) if seed is None else rng.integers(0, 256, size, dtype=np.uint8)
            self.buffers.append(data)

    def cache(self) -> kv.Cache:
        """The cache over these buffers, as flat tensors, on the stand-in's devices if KVSTRIDE_TEST_CUDA says so."""
        parts = self.layout.num_parts
        buffers: list[Any] = self.buffers
        if PLACES:
            device = PLACES[next(_turn) % len(PLACES)]
            buffers = [FakeArray(b, device) for b in buffers] if device >= 0 else buffers
        columns = [buffers[p::parts] for p in range(parts)]
        return kv.Cache(columns[0] if parts == 1 else tuple(columns), self.layout)

    def get(self, plane: str, index: tuple[int, int, int, int, int]) -> bytes:
        """Bytes of one element."""
        tensor, byte = self.layout.offset(plane, *index)
        return self.buffers[tensor][byte : byte + item_size(self.layout.planes[plane])].tobytes()

    def set(self, plane: str, index: tuple[int, int, int, int, int], value: bytes) -> None:
        """Write the bytes of one element."""
        tensor, byte = self.layout.offset(plane, *index)
        self.buffers[tensor][byte : byte + len(value)] = np.frombuffer(value, np.uint8)

    def copy(self) -> Memory:
        """The same layout over copies of the buffers."""
        out = Memory.__new__(Memory)
        out.layout = self.layout
        out.buffers = [b.copy() for b in self.buffers]
        return out

    def same(self, other: Any) -> bool:
        """Whether all bytes, padding included, are equal."""
        return all(np.array_equal(a, b) for a, b in zip(self.buffers, other.buffers, strict=True))


def convert(src: Memory, dst: Memory, pairs: list[tuple[int, int]], layers: Any = None, heads: Any = None) -> None:
    """What convert_blocks means: all sources read first, then all destinations written."""
    writes = []
    for plane in src.layout.planes:
        num_layers, _, tokens, num_heads, dims = src.layout.extents(plane)
        first, count = layers or (0, num_layers)
        sharded = src.layout.has_head(plane) and heads is not None
        h_src, h_dst, h_count = heads if sharded else (0, 0, num_heads)
        for (s, d), layer, t, h, e in itertools.product(
            pairs, range(first, first + count), range(tokens), range(h_count), range(dims)
        ):
            value = src.get(plane, (layer, s, t, h_src + h, e))
            writes.append((plane, (layer, d, t, h_dst + h, e), value))
    for plane, index, value in writes:
        dst.set(plane, index, value)


def convert_tokens(src: Memory, dst: Memory, src_blocks: list[int], dst_blocks: list[int], tokens: Any) -> None:
    """What the token form of convert_blocks means."""
    n_src = src.layout.geometry.block_size
    n_dst = dst.layout.geometry.block_size
    first_src, first_dst, count = tokens
    for plane in src.layout.planes:
        num_layers, _, _, num_heads, dims = src.layout.extents(plane)
        for t, layer, h, e in itertools.product(range(count), range(num_layers), range(num_heads), range(dims)):
            s, d = first_src + t, first_dst + t
            value = src.get(plane, (layer, src_blocks[s // n_src], s % n_src, h, e))
            dst.set(plane, (layer, dst_blocks[d // n_dst], d % n_dst, h, e), value)
