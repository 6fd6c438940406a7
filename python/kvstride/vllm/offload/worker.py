# SPDX-License-Identifier: Apache-2.0
"""The worker on CPU hosts: blocks of the engine to rows of the primary tier and back, by kvstride's block operations.

It only copies memory: there is nothing to fail for data's sake, because a worker that reports a failure ends vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

import kvstride as kv


@dataclass
class _Run:
    """Pages, or the same fragments of all pages, of one tensor: a plan each way for each block of a chunk."""

    store: list[kv.Plan]
    load: list[kv.Plan]
    num_bytes: int
    writers: int = 1
    writer: int = 0


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """vLLM's OffloadingWorker over host memory. Transfers are done when they are submitted."""

    def __init__(
        self, kv_caches: Any, region: Any, num_rows: int, row_bytes: int, blocks: int, canonical: bool
    ) -> None:
        self._region = region
        self._blocks = blocks
        self._finished: list[Any] = []
        self._rows = np.asarray(region.create_kv_memoryview()).view(np.uint8).reshape(-1)
        self._num_rows, self._row_bytes = num_rows, row_bytes
        sizes = slot_bytes(kv_caches, canonical)
        views = [
            (region.create_next_canonical_view if canonical else region.create_next_worker_view)(size * blocks)
            for size in sizes
        ]
        self.slots = [view.data_ptr() - self._rows.ctypes.data for view in views]
        self._groups: list[list[_Run]] = []
        made: dict[Any, _Run] = {}
        for refs in kv_caches.group_data_refs:
            runs = []
            for ref in refs:
                tensor = kv_caches.tensors[ref.tensor_idx].tensor
                for run in _runs(ref, canonical):
                    key = (ref.tensor_idx, run)
                    if key not in made:
                        made[key] = self._plans(tensor, self.slots[ref.tensor_idx], sizes[ref.tensor_idx], run)
                    runs.append(made[key])
            self._groups.append(runs)

    def _plans(self, tensor: Any, slot: int, block_bytes: int, run: tuple[int, ...]) -> _Run:
        local, far, size, num, local_step, far_step, writers, writer = run
        flat = _bytes_of(tensor)
        engine = _strided(flat, local, (tensor.shape[0], num, size), (tensor.stride(0), local_step, 1))
        store, load = [], []
        for block in range(self._blocks):
            at = slot + block * block_bytes + far
            rows = _strided(self._rows, at, (self._num_rows, num, size), (self._row_bytes, far_step, 1))
            ends = _cache(engine), _cache(rows)
            store.append(kv.Plan(*ends))
            load.append(kv.Plan(*ends[::-1]))
        return _Run(store, load, num * size, writers, writer)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Blocks of the engine to rows."""
        return self._move(job_id, src_spec, dst_spec.block_ids, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Rows to blocks of the engine. All loads are as quick as they can be."""
        return self._move(job_id, dst_spec, src_spec.block_ids, False)

    def _move(self, job_id: int, engine: Any, chunks: np.ndarray, store: bool) -> bool:
        begin = time.perf_counter()
        moved = 0
        for runs, blocks, rows, subs in self._parts(engine, chunks):
            for sub in np.unique(subs):
                mine = subs == sub
                pairs = np.stack((blocks[mine], rows[mine]) if store else (rows[mine], blocks[mine]), axis=1)
                pages = rows[mine] * self._blocks + sub
                for run in runs:
                    chosen = pairs
                    if store and run.writers > 1:  # ranks that hold the same bytes take turns
                        chosen = pairs[pages % run.writers == run.writer]
                    if not len(chosen):
                        continue
                    (run.store if store else run.load)[sub].bind(chosen).run()
                    moved += len(chosen) * run.num_bytes
        took = time.perf_counter() - begin
        self._finished.append(TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=took))
        return True

    def _parts(self, engine: Any, chunks: np.ndarray) -> Any:
        """For each group: its runs, block ids, and for each block its row and its place in the chunk."""
        at_block = at_chunk = 0
        ids = np.asarray(engine.block_ids, np.int64)
        for runs, size, first in zip(self._groups, engine.group_sizes, engine.block_indices, strict=True):
            if size == 0:
                continue
            # The first chunk may begin with blocks that are not moved.
            place = first % self._blocks + np.arange(size, dtype=np.int64)
            used = int(place[-1]) // self._blocks + 1
            rows = np.asarray(chunks[at_chunk : at_chunk + used], np.int64)[place // self._blocks]
            yield runs, ids[at_block : at_block + size], rows, place % self._blocks
            at_block += size
            at_chunk += used

    def get_finished(self) -> list[Any]:
        """Results since the last call."""
        out, self._finished = self._finished, []
        return out

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        """Let go of the memory."""
        self._groups = []
        self._rows = None  # type: ignore[assignment]
        if self._region is not None:
            self._region.cleanup()
            self._region = None


def slot_bytes(kv_caches: Any, canonical: bool) -> list[int]:
    """Bytes of a block in a row, by tensor."""
    if not canonical:
        return [t.page_size_bytes for t in kv_caches.tensors]
    out = [0] * len(kv_caches.tensors)
    for refs in kv_caches.group_data_refs:
        for ref in refs:
            out[ref.tensor_idx] = max(out[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    return out


def _runs(ref: Any, canonical: bool) -> list[tuple[int, ...]]:
    """(offset here, in the row, bytes, how many, step here, in the row, number of writers, which of them)."""
    if not canonical:
        return [(0, 0, ref.page_size_bytes, 1, ref.page_size_bytes, ref.page_size_bytes, 1, 0)]
    turn = (ref.mapping.num_writers, ref.mapping.writer_index)
    return [
        (
            r.local_offset,
            r.canonical_offset,
            r.fragment_size,
            r.num_fragments,
            r.local_stride,
            r.canonical_stride,
            *turn,
        )
        for r in ref.mapping.runs
    ]


def _bytes_of(tensor: Any) -> np.ndarray:
    """The memory that a tensor of int8 rows starts at."""
    import torch

    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return np.asarray(storage.numpy())[tensor.storage_offset() :]


def _strided(flat: np.ndarray, offset: int, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(flat[offset:], tuple(shape), tuple(strides))


def _cache(pages: np.ndarray) -> kv.Cache:
    """Bytes `[block, fragment, byte]` as a cache of opaque records."""
    blocks, num, size = pages.shape
    order = (
        f"B@{pages.strides[0]} N@{pages.strides[1]} {{state: D[{size}] u8}}"
        if num > 1
        else (f"B@{pages.strides[0]} {{state: D[{size}] u8}}")
    )
    sizes = kv.Geometry(num_blocks=blocks, block_size=num, num_kv_heads=1, head_size=size)
    shaped = pages if num > 1 else pages[:, 0]
    return kv.Cache(shaped, kv.Layout(order, sizes))
