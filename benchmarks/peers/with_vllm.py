# SPDX-License-Identifier: Apache-2.0
"""vLLM: the write op of its CPU attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import vllm._C  # noqa: F401  registers the op
from caches import DIM, HEADS, cache, scattered
from cold import Pairing, Prepare
from with_torch import tensor

import kvstride as kv

NEW, BLOCK = 512, 128
ROW = HEADS * DIM * 2  # bytes of a token's keys
ORDERS = {
    "vec": "B H {key: D N, value: N D}",
    "amx": "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}",
}


def _tokens(src: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """New keys and values."""
    return tensor(src, NEW, HEADS, DIM), tensor(src[NEW * ROW :], NEW, HEADS, DIM)


def _ours(order: str, slots: np.ndarray, blocks: int) -> Prepare:
    def prepare(src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        to = cache(dst, order, block=BLOCK, blocks=blocks, layers=1)
        key, value = _tokens(src)
        return lambda: kv.write_tokens(to, 0, key, value, slots)

    return prepare


def _theirs(isa: str, slots: np.ndarray, blocks: int) -> Prepare:
    ids = torch.from_numpy(slots)
    write = torch.ops._C.cpu_attn_reshape_and_cache

    def prepare(src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        halves = tensor(dst, blocks, HEADS, 2 * BLOCK, DIM).chunk(2, dim=2)
        key, value = _tokens(src)
        return lambda: write(key, value, *halves, ids, isa, 1.0, 1.0, "auto")

    return prepare


def pairings() -> Iterator[Pairing]:
    """512 new tokens of one layer, to random slots of 32 blocks, and to a row of slots of five."""
    for isa, order in ORDERS.items():
        for where, blocks, target in (("random", 32, 2), ("sequential", 5, None)):
            slots = scattered(BLOCK * blocks)[:NEW] if where == "random" else np.arange(64, 64 + NEW)
            ours, theirs = _ours(order, slots, blocks), _theirs(isa, slots, blocks)
            room = 2 * BLOCK * blocks * ROW
            name = f"write_tokens/cpu_{isa}_{where}"
            yield Pairing(name, "vLLM cpu_attn_reshape_and_cache", 2 * NEW * ROW, ours, theirs, target, room)
