# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker on CUDA hosts, over the stand-in for CUDA: its streams run late, a producer still writes.

The engine's tensors and its stream are doubles; the worker, its threads, plans and rows are what serves.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import stand_in

pytestmark = [
    pytest.mark.skipif(
        stand_in.LIBRARY is None, reason="a build without the stand-in for CUDA; `make test` runs this on one"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None and not os.environ.get("KVSTRIDE_REQUIRE_VLLM"),
        reason="vLLM is not installed; with KVSTRIDE_REQUIRE_VLLM=1 this fails",
    ),
]

BLOCKS, ROWS, LAYERS = 12, 6, 3


class DeviceBytes(stand_in.FakeArray):
    """What the worker uses of a torch tensor of bytes on a device."""

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> DeviceBytes:
        return DeviceBytes(np.lib.stride_tricks.as_strided(self.array[offset:], shape, strides))

    def storage_offset(self) -> int:
        return 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def __getitem__(self, key: Any) -> DeviceBytes:
        return DeviceBytes(self.array[key])


class Page:
    """One of the engine's tensors: pages of bytes, `gap` bytes apart."""

    device = "cuda:0"

    def __init__(self, page: int, gap: int, seed: int) -> None:
        self.memory = np.random.default_rng(seed).integers(0, 256, BLOCKS * (page + gap), dtype=np.uint8)
        self.page, self.step = page, page + gap
        self.shape = (BLOCKS, page)

    def stride(self, axis: int) -> int:
        return (self.step, 1)[axis]

    def pages(self) -> np.ndarray:
        """Its pages, as they are now."""
        return self.memory.reshape(BLOCKS, self.step)[:, : self.page]


class Region:
    """The primary tier's memory."""

    def __init__(self, row_bytes: int) -> None:
        self.rows = np.zeros((ROWS, row_bytes), np.uint8)
        self.at = 0
        self.closed = False

    def create_kv_memoryview(self) -> np.ndarray:
        return self.rows

    def create_next_worker_view(self, size: int) -> Any:
        at, self.at = self.at, self.at + size
        return SimpleNamespace(data_ptr=lambda: self.rows.ctypes.data + at)

    create_next_canonical_view = create_next_worker_view

    def cleanup(self) -> None:
        self.closed = True


class Engine:
    """The engine's stream: what was put on it is done when somebody waits for it, not before."""

    def __init__(self) -> None:
        self.stream = stand_in.Stream()


def worker_of(kind: str, engine: Engine, tensors: list[Page], refs: Any, region: Region, blocks: int) -> Any:
    """A CudaWorker with doubles for what is torch's."""
    from kvstride.vllm.offload import cuda_worker

    class LateStream(stand_in.Stream):
        def wait_event(self, producer: Any) -> None:
            assert producer is engine.stream
            stand_in.drain()

        def synchronize(self) -> None:
            stand_in.drain()

    class Lane(cuda_worker.Lane):
        def mark(self) -> Any:
            return engine.stream

        def stream(self) -> Any:
            return LateStream()

    class Worker(cuda_worker.CudaWorker):
        def _bytes_of(self, tensor: Any) -> Any:
            return DeviceBytes(tensor.memory)

    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=t, page_size_bytes=t.page) for t in tensors], group_data_refs=refs
    )
    canonical = kind == "canonical"
    return Worker(caches, region, ROWS, region.rows.shape[1], blocks, canonical, lane=Lane)


def job(ids: list[int], rows: list[int], sizes: list[int], firsts: list[int]) -> tuple[Any, Any]:
    """What vLLM says of a transfer: (the engine's side, the rows' side)."""
    engine = SimpleNamespace(block_ids=np.array(ids), group_sizes=sizes, block_indices=firsts)
    return engine, SimpleNamespace(block_ids=np.array(rows))


def whole_pages(tensors: list[Page]) -> list[list[Any]]:
    """One group that has all tensors, pages as they are."""
    return [[SimpleNamespace(tensor_idx=i, page_size_bytes=t.page, mapping=None) for i, t in enumerate(tensors)]]


def test_pages_go_there_and_back_while_the_engine_still_writes() -> None:
    blocks = 2
    tensors = [Page(96, 32, seed) for seed in range(LAYERS)]
    region = Region(LAYERS * 96 * blocks + 64)
    engine = Engine()
    worker = worker_of("raw", engine, tensors, whole_pages(tensors), region, blocks)
    new = [np.random.default_rng(9 + i).integers(0, 256, t.memory.size, dtype=np.uint8) for i, t in enumerate(tensors)]
    for tensor, value in zip(tensors, new, strict=True):
        engine.stream.write(tensor.memory, value)  # not there yet
    # Five blocks from the second half of chunk row 4 on.
    source, target = job([7, 2, 9, 11, 0], [4, 1, 3], [5], [1])
    assert worker.submit_store(1, source, target)
    worker.wait({1})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (1, True, 5 * LAYERS * 96)
    expected = np.zeros_like(region.rows)
    places = [(4, 1), (1, 0), (1, 1), (3, 0), (3, 1)]
    for block, (row, sub) in zip([7, 2, 9, 11, 0], places, strict=True):
        for i, value in enumerate(new):
            page = value.reshape(BLOCKS, 128)[block, :96]
            at = i * 96 * blocks + sub * 96
            expected[row, at : at + 96] = page
    assert (region.rows == expected).all()

    before = [t.memory.copy() for t in tensors]
    target, source = job([1, 3, 4, 5, 6], [4, 1, 3], [5], [1])
    assert worker.submit_load(2, source, target)
    worker.wait({2})
    assert [r.success for r in worker.get_finished()] == [True]
    for tensor, old, value in zip(tensors, before, new, strict=True):
        pages = old.reshape(BLOCKS, 128)
        pages[[1, 3, 4, 5, 6], :96] = value.reshape(BLOCKS, 128)[[7, 2, 9, 11, 0], :96]
        assert (tensor.memory.reshape(BLOCKS, 128) == pages).all()
    worker.shutdown()
    assert region.closed


def test_fragments_go_where_canonical_rows_have_them() -> None:
    """Two of four heads, a token's apart: rank 1 of 2 of a canonical page; replicated pages are written by turns."""
    tensors = [Page(4 * 2 * 8, 0, seed) for seed in range(2)]
    run = SimpleNamespace(
        local_offset=0, canonical_offset=16, fragment_size=16, num_fragments=4, local_stride=16, canonical_stride=32
    )
    mapping = SimpleNamespace(canonical_page_size_bytes=128, runs=[run], num_writers=1, writer_index=0)
    turns = SimpleNamespace(canonical_page_size_bytes=128, runs=[run], num_writers=2, writer_index=1)
    refs = [[SimpleNamespace(tensor_idx=0, mapping=mapping), SimpleNamespace(tensor_idx=1, mapping=turns)]]
    region = Region(256)
    worker = worker_of("canonical", Engine(), tensors, refs, region, 1)
    worker.submit_store(1, *job([5, 6], [2, 3], [2], [0]))
    worker.wait({1})
    (result,) = worker.get_finished()
    assert (result.success, result.transfer_size) == (True, 3 * 64)
    expected = np.zeros_like(region.rows)
    for block, row in ((5, 2), (6, 3)):
        for i, tensor in enumerate(tensors):
            if i == 1 and row % 2 != 1:
                continue  # the other rank's turn
            for n in range(4):
                at = i * 128 + 16 + 32 * n
                expected[row, at : at + 16] = tensor.pages()[block, 16 * n : 16 * n + 16]
    assert (region.rows == expected).all()
    worker.shutdown()


def test_jobs_of_one_direction_run_in_order_and_submitting_does_not_wait() -> None:
    tensors = [Page(64, 0, 1)]
    worker = worker_of("raw", Engine(), tensors, whole_pages(tensors), Region(64), 1)
    gate = threading.Event()
    order: list[int] = []
    move = worker._move

    def slow(parts: Any, store: bool, stream: Any) -> int:
        assert gate.wait(20)
        order.append(int(parts[0].blocks[0]))
        return int(move(parts, store, stream))

    worker._move = slow
    for number in range(4):
        assert worker.submit_store(number, *job([number], [number], [1], [0]))
    assert worker.get_finished() == []
    gate.set()
    worker.wait({3})
    assert order == [0, 1, 2, 3]
    assert [r.job_id for r in worker.get_finished()] == [0, 1, 2, 3]
    worker.wait({3, 99})  # done, and never heard of
    worker.shutdown()


def test_a_device_that_fails_is_reported_and_nobody_waits_for_ever() -> None:
    tensors = [Page(64, 0, 1)]
    worker = worker_of("raw", Engine(), tensors, whole_pages(tensors), Region(64), 1)

    def broken(parts: Any, store: bool, stream: Any) -> int:
        raise RuntimeError("CUDA: an illegal address")

    move, worker._move = worker._move, broken
    worker.submit_load(1, *reversed(job([1], [1], [1], [0])))
    worker.wait({1})
    assert [(r.job_id, r.success, r.transfer_size) for r in worker.get_finished()] == [(1, False, 0)]
    worker._move = move
    worker.submit_load(2, *reversed(job([1], [1], [1], [0])))
    worker.wait({2})
    assert [(r.job_id, r.success) for r in worker.get_finished()] == [(2, True)]
    worker.shutdown()
