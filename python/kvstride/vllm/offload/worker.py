# SPDX-License-Identifier: Apache-2.0
"""The workers: blocks of the engine to rows of the primary tier and back, by kvstride's block operations.

They only copy memory: there is nothing to fail for data's sake, because a worker that reports a failure ends vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

import kvstride as kv


@dataclass
class _Run:
    """Pages, or the same fragments of all pages, of like tensors: a plan each way for each block of a chunk."""

    store: list[kv.Plan]
    load: list[kv.Plan]
    num_bytes: int  #: of a block
    writers: int
    writer: int


class _Part(NamedTuple):
    """Blocks of a group that a job moves."""

    runs: list[_Run]
    blocks: np.ndarray  #: ids of the engine
    rows: np.ndarray  #: of each block
    subs: np.ndarray  #: its place in the chunk


class BlockWorker(OffloadingWorker):  # type: ignore[misc]
    """vLLM's OffloadingWorker between the engine's blocks and rows in host memory; how a job is run is a subclass's."""

    def __init__(
        self, kv_caches: Any, region: Any, num_rows: int, row_bytes: int, blocks: int, canonical: bool
    ) -> None:
        import torch  # the package is checked where there is none

        self._region = region
        self._blocks = blocks
        rows = np.asarray(region.create_kv_memoryview()).view(np.uint8).reshape(-1)
        self._num_rows, self._row_bytes = num_rows, row_bytes
        sizes = slot_bytes(kv_caches, canonical)
        views = [
            (region.create_next_canonical_view if canonical else region.create_next_worker_view)(size * blocks)
            for size in sizes
        ]
        self.slots = [view.data_ptr() - rows.ctypes.data for view in views]
        self._rows: Any = torch.from_numpy(rows)
        self._groups: list[list[_Run]] = []
        made: dict[Any, _Run] = {}
        for refs in kv_caches.group_data_refs:
            # Tensors that are alike are the layers of one cache: one call moves the blocks of all.
            alike: dict[Any, list[int]] = {}
            for ref in refs:
                tensor = kv_caches.tensors[ref.tensor_idx].tensor
                for run in _runs(ref, canonical):
                    key = (run, tensor.shape[0], tensor.stride(0), tensor.device, sizes[ref.tensor_idx])
                    indices = alike.setdefault(key, [])
                    if ref.tensor_idx not in indices:
                        indices.append(ref.tensor_idx)
            self._groups.append([])
            for key, indices in alike.items():
                whole = (key, tuple(indices))
                if whole not in made:
                    tensors = [kv_caches.tensors[i].tensor for i in indices]
                    made[whole] = self._plans(tensors, [self.slots[i] for i in indices], key[-1], key[0])
                self._groups[-1].append(made[whole])

    def _plans(self, tensors: list[Any], slots: list[int], block_bytes: int, run: tuple[int, ...]) -> _Run:
        local, far, size, num, local_step, far_step, writers, writer = run
        shape = (tensors[0].shape[0], num, size)
        engine = _cache([_strided(self._bytes_of(t), local, shape, (t.stride(0), local_step, 1)) for t in tensors])
        store, load = [], []
        for block in range(self._blocks):
            at = block * block_bytes + far
            shape = (self._num_rows, num, size)
            rows = _cache([_strided(self._rows, slot + at, shape, (self._row_bytes, far_step, 1)) for slot in slots])
            store.append(kv.Plan(engine, rows))
            load.append(kv.Plan(rows, engine))
        return _Run(store, load, num * size * len(tensors), writers, writer)

    def _bytes_of(self, tensor: Any) -> Any:
        """The memory that a tensor of int8 rows starts at, as bytes."""
        import torch

        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return storage[tensor.storage_offset() :]

    def _move(self, parts: list[_Part], store: bool, stream: Any = None) -> int:
        """Bytes that were moved: blocks of the engine to rows (`store`), or back."""
        moved = 0
        for runs, blocks, rows, subs in parts:
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
                    (run.store if store else run.load)[sub].bind(chosen).run(stream=stream)
                    moved += len(chosen) * run.num_bytes
        return moved

    def _parts(self, engine: Any, chunks: np.ndarray) -> list[_Part]:
        """What a job moves, group by group. Nothing of it is the engine's memory."""
        out = []
        at_block = at_chunk = 0
        ids = np.asarray(engine.block_ids, np.int64)
        for runs, size, first in zip(self._groups, engine.group_sizes, engine.block_indices, strict=True):
            if size == 0:
                continue
            # The first chunk may begin with blocks that are not moved.
            place = first % self._blocks + np.arange(size, dtype=np.int64)
            used = int(place[-1]) // self._blocks + 1
            rows = np.asarray(chunks[at_chunk : at_chunk + used], np.int64)[place // self._blocks]
            out.append(_Part(runs, ids[at_block : at_block + size].copy(), rows, place % self._blocks))
            at_block += size
            at_chunk += used
        return out

    def shutdown(self) -> None:
        """Let go of the memory."""
        self._groups = []
        self._rows = None
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class HostWorker(BlockWorker):
    """Over host memory. Transfers are done when they are submitted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._finished: list[Any] = []
        _allow_amx()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Blocks of the engine to rows."""
        return self._now(job_id, src_spec, dst_spec.block_ids, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Rows to blocks of the engine. All loads are as quick as they can be."""
        return self._now(job_id, dst_spec, src_spec.block_ids, False)

    def _now(self, job_id: int, engine: Any, chunks: np.ndarray, store: bool) -> bool:
        begin = time.perf_counter()
        moved = self._move(self._parts(engine, chunks), store)
        took = time.perf_counter() - begin
        self._finished.append(TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=took))
        return True

    def get_finished(self) -> list[Any]:
        """Results since the last call."""
        out, self._finished = self._finished, []
        return out

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""


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


def _strided(flat: Any, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Any:
    return flat.as_strided(tuple(shape), tuple(strides), flat.storage_offset() + offset)


def _cache(layers: list[Any]) -> kv.Cache:
    """Bytes `[block, fragment, byte]` of each layer as a cache of opaque records."""
    blocks, num, size = layers[0].shape
    steps = layers[0].stride()
    order = f"B@{steps[0]} N@{steps[1]} {{state: D[{size}] u8}}" if num > 1 else f"B@{steps[0]} {{state: D[{size}] u8}}"
    sizes = kv.Geometry(num_blocks=blocks, block_size=num, num_kv_heads=1, head_size=size, num_layers=len(layers))
    shaped = layers if num > 1 else [pages[:, 0] for pages in layers]
    return kv.Cache(shaped, kv.Layout(order, sizes))


def _allow_amx() -> None:
    """Asks the system for AMX, for this process.

    vLLM's attention (0.30 to 0.32) uses it and does not ask; a product of a long prompt does, but the first prompt may
    come from the store and have none: SIGILL.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()
