# SPDX-License-Identifier: Apache-2.0
"""LMCache: the block op that it has for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from caches import BLOCK, DIM, HEADS, LAYERS, MIB32, TOKENS, cache, scattered
from cold import Pairing, Prepare
from lmcache import device_ops
from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection
from with_torch import tensor

import kvstride as kv

BLOCKS = TOKENS // BLOCK


@dataclass(frozen=True)
class Format:
    """One of LMCache's formats of a paged cache, and what kvstride calls it."""

    name: str
    theirs: str
    order: str
    shape: tuple[int, ...]  # of a layer, or of all
    target: float | None = None

    @property
    def packed(self) -> bool:
        """K and V are one plane of twice the head size."""
        return self.theirs.endswith("TWO_HS")

    @property
    def dense(self) -> str:
        """kvstride's name of their chunk of tokens."""
        return "L N H KV D" if self.packed else "KV L N H D"


FORMATS = [
    Format("NHD", "NL_X_NB_TWO_BS_NH_HS", "B KV N H D", (BLOCKS, 2, BLOCK, HEADS, DIM), 6),
    Format("HND", "NL_X_NB_TWO_NH_BS_HS", "B KV H N D", (BLOCKS, 2, HEADS, BLOCK, DIM), 6),
    Format("kv_first_NHD", "NL_X_TWO_NB_BS_NH_HS", "KV B N H D", (2, BLOCKS, BLOCK, HEADS, DIM)),
    Format("packed_HND", "NL_X_NB_NH_BS_TWO_HS", "B H N KV D", (BLOCKS, HEADS, BLOCK, 2 * DIM)),
    Format("all_layers_NHD", "NB_NL_TWO_BS_NH_HS", "B L KV N H D", (BLOCKS, LAYERS, 2, BLOCK, HEADS, DIM)),
]


def _sizes(packed: bool) -> PageBufferShapeDesc:
    sizes = PageBufferShapeDesc()
    sizes.kv_size, sizes.hs = (1, 2 * DIM) if packed else (2, DIM)
    sizes.nl, sizes.nb, sizes.bs, sizes.nh = LAYERS, BLOCKS, BLOCK, HEADS
    sizes.element_size, sizes.block_stride_elems, sizes.dtype = 2, 0, torch.bfloat16
    return sizes


def _theirs(form: Format, ids: torch.Tensor, gather: bool) -> Prepare:
    chunk = (LAYERS, TOKENS, HEADS * 2 * DIM) if form.packed else (2, LAYERS, TOKENS, HEADS * DIM)
    direction = TransferDirection.D2H if gather else TransferDirection.H2D
    kind = EngineKVFormat.__members__[form.theirs]
    sizes = _sizes(form.packed)

    def prepare(src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        paged, flat = (src, dst) if gather else (dst, src)
        layered = len(form.shape) == 6
        caches = tensor(paged, *form.shape) if layered else list(tensor(paged, LAYERS, *form.shape).unbind(0))
        objects = [tensor(flat, *chunk)]
        move = device_ops.multi_layer_block_kv_transfer
        return lambda: move(caches, objects, ids, "cpu", direction, sizes, TOKENS, kind, 0)

    return prepare


def _ours(form: Format, ids: np.ndarray, gather: bool) -> Prepare:
    chunk_ids = np.zeros(1, np.int64)

    def prepare(src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        if gather:
            paged, flat = cache(src, form.order), cache(dst, form.dense, block=TOKENS, blocks=1)
            return lambda: kv.convert_blocks(paged, flat, src_blocks=ids, dst_blocks=chunk_ids)
        paged, flat = cache(dst, form.order), cache(src, form.dense, block=TOKENS, blocks=1)
        return lambda: kv.convert_blocks(flat, paged, src_blocks=chunk_ids, dst_blocks=ids)

    return prepare


def pairings() -> Iterator[Pairing]:
    """16 random blocks of 16 tokens to one chunk of 256 and back."""
    ids = scattered(BLOCKS)
    peer_ids = torch.from_numpy(ids)
    for form in FORMATS:
        for gather in (True, False):
            name = ("gather/" if gather else "scatter/") + form.name
            target = form.target if gather else None
            ours, theirs = _ours(form, ids, gather), _theirs(form, peer_ids, gather)
            yield Pairing(name, "LMCache block op", MIB32, ours, theirs, target)
