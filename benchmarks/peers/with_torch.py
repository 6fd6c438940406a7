# SPDX-License-Identifier: Apache-2.0
"""torch: indexed and permuted copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from caches import BLOCK, DIM, HEADS, MIB32, PAGE, cache
from cold import Pairing, Prepare
from with_numpy import NUM_BLOCKS, gather, one_run, swap

import kvstride as kv


def tensor(memory: np.ndarray, *shape: int) -> torch.Tensor:
    """A side's first bytes as bf16."""
    count = int(np.prod(shape))
    return torch.from_numpy(memory[: 2 * count].view(np.uint16)).view(torch.bfloat16).view(*shape)


def _rows(call: Callable[[torch.Tensor, torch.Tensor], object]) -> Prepare:
    """`call` with both sides as one row a block."""

    def prepare(src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        rows = [tensor(side, NUM_BLOCKS, PAGE // 2) for side in (src, dst)]
        return lambda: call(*rows)

    return prepare


def _convert(src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
    hnd = cache(src, "B KV H N D", blocks=NUM_BLOCKS, layers=1)
    nhd = cache(dst, "B KV N H D", blocks=NUM_BLOCKS, layers=1)
    same = np.stack([np.arange(NUM_BLOCKS)] * 2, 1)
    return lambda: kv.convert_blocks(hnd, nhd, same)


def _permute(src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
    hnd = tensor(src, 2 * NUM_BLOCKS, HEADS, BLOCK, DIM).permute(0, 2, 1, 3)
    nhd = tensor(dst, 2 * NUM_BLOCKS, BLOCK, HEADS, DIM)
    return lambda: nhd.copy_(hnd)


def pairings() -> Iterator[Pairing]:
    """One run, scattered blocks, and the permuted copy."""
    ids, gathered = gather()
    torch_ids = torch.from_numpy(ids)
    back = swap(np.stack([np.arange(NUM_BLOCKS), ids], 1))

    def copy_each(src: torch.Tensor, dst: torch.Tensor) -> None:
        for row, block in zip(src, ids.tolist(), strict=True):
            dst[block].copy_(row)

    select = _rows(lambda src, dst: torch.index_select(src, 0, torch_ids, out=dst))
    index_copy = _rows(lambda src, dst: dst.index_copy_(0, torch_ids, src))
    yield Pairing("copy/one_run", "torch copy_", MIB32, one_run(), _rows(lambda src, dst: dst.copy_(src)))
    yield Pairing("gather/64_KiB_blocks", "torch index_select", MIB32, gathered, select)
    yield Pairing("scatter/64_KiB_blocks", "torch index_copy_", MIB32, back, index_copy)
    yield Pairing("scatter/64_KiB_blocks", "torch copy_ of each row", MIB32, back, _rows(copy_each))
    yield Pairing("convert/HND_to_NHD", "torch copy_ of permute", MIB32, _convert, _permute, target=3)
