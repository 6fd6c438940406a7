# SPDX-License-Identifier: Apache-2.0
"""numpy: memcpy of one run, and take of scattered blocks. One thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from caches import BLOCK, MIB32, PAGE, cache, scattered
from cold import Pairing, Prepare

import kvstride as kv

NUM_BLOCKS = MIB32 // PAGE


def swap(pairs: np.ndarray, *, blocks: int = NUM_BLOCKS, block: int = BLOCK) -> Prepare:
    """kvstride's copy of these blocks of one layer."""

    def prepare(src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        ends = [cache(side, "B KV N H D", block=block, blocks=blocks, layers=1) for side in (src, dst)]
        return lambda: kv.swap_blocks(*ends, pairs)

    return prepare


def one_run() -> Prepare:
    """kvstride's copy of one block that is everything."""
    return swap(np.zeros((1, 2), np.int64), blocks=1, block=BLOCK * NUM_BLOCKS)


def gather() -> tuple[np.ndarray, Prepare]:
    """Scattered block ids, and kvstride's copy of those blocks to blocks in a row."""
    ids = scattered(NUM_BLOCKS)
    return ids, swap(np.stack([ids, np.arange(NUM_BLOCKS)], 1))


def pairings() -> Iterator[Pairing]:
    """What numpy can do."""
    ids, gathered = gather()

    def take(src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        return lambda: np.take(src.reshape(-1, PAGE), ids, 0, out=dst.reshape(-1, PAGE), mode="clip")

    def copyto(src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        return lambda: np.copyto(dst, src)

    yield Pairing("copy/one_run", "memcpy (numpy.copyto)", MIB32, one_run(), copyto, one_thread=True)
    yield Pairing("gather/64_KiB_blocks", "numpy.take", MIB32, gathered, take, one_thread=True)
