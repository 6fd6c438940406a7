# SPDX-License-Identifier: Apache-2.0
"""The sizes of the works, and caches over a side: 32 layers, 256 tokens, K and V, 8 heads of 128, bf16 make 32 MiB."""

from __future__ import annotations

import numpy as np

import kvstride as kv

LAYERS, TOKENS, BLOCK, HEADS, DIM = 32, 256, 16, 8, 128
MIB32 = LAYERS * TOKENS * 2 * HEADS * DIM * 2
PAGE = BLOCK * 2 * HEADS * DIM * 2  # one block of one layer: 64 KiB


def scattered(n: int) -> np.ndarray:
    """0 … n − 1 at random, the same every time."""
    return np.random.default_rng(1).permutation(n).astype(np.int64)


def cache(
    memory: np.ndarray, order: str, *, block: int = BLOCK, blocks: int = TOKENS // BLOCK, layers: int = LAYERS
) -> kv.Cache:
    """A cache over a side's first bytes, the tensors of its layers one after the other."""
    geometry = kv.Geometry(num_layers=layers, num_blocks=blocks, block_size=block, num_kv_heads=HEADS, head_size=DIM)
    layout = kv.layout(order, geometry)
    layered = "L" in order.split()
    words = memory[: (1 if layered else layers) * layout.num_bytes].view(np.uint16)
    return kv.Cache(words if layered else list(words.reshape(layers, -1)), layout)
