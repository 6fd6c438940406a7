# SPDX-License-Identifier: Apache-2.0
"""The worker on CUDA hosts. It orders its work against the engine's as vLLM's own worker does.

Stores read what the engine's stream has still to write, and loads may not overtake what it has still to do with their
blocks: a job comes after all that was on the engine's stream when it was submitted. Jobs of one direction run in the
order of their submission.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import TransferResult

from .worker import BlockWorker

logger = init_logger("vllm.kvstride")


class Lane:
    """Jobs of one direction: a thread that runs them one by one on a stream of its own."""

    def __init__(self, name: str, device: Any) -> None:
        self._device = device
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._under_way: set[int] = set()
        self._finished: list[Any] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job_id: int, work: Callable[[Any], int]) -> None:
        """`work(stream)`, which gives the bytes that it moved, behind all that the engine's stream has now."""
        mark = self.mark()
        with self._changed:
            self._under_way.add(job_id)
        self._jobs.put((job_id, mark, work))

    def mark(self) -> Any:
        """An event at the end of the engine's stream."""
        import torch  # the package is checked where there is none

        return torch.cuda.current_stream(self._device).record_event()

    def stream(self) -> Any:
        """A stream for this thread."""
        import torch

        torch.cuda.set_device(self._device)
        return torch.cuda.Stream(self._device)

    def finished(self) -> list[Any]:
        """Results since the last call."""
        with self._changed:
            out, self._finished = self._finished, []
        return out

    def wait(self, job_ids: set[int]) -> None:
        """Until none of these is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way & job_ids)

    def close(self) -> None:
        """When all jobs are done."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        stream = None
        while (job := self._jobs.get()) is not None:
            job_id, mark, work = job
            begin = time.perf_counter()
            moved = None
            try:
                stream = stream or self.stream()
                stream.wait_event(mark)
                try:
                    moved = work(stream)
                finally:
                    stream.synchronize()  # what it had begun may be under way still
            except Exception as error:  # whatever it is, vLLM must be told, or it would wait for ever
                moved = None
                logger.error("kvstride: offloading job %d failed: %s", job_id, error)
            took = time.perf_counter() - begin
            result = TransferResult(
                job_id=job_id, success=moved is not None, transfer_size=moved or 0, transfer_time=took
            )
            with self._changed:
                self._finished.append(result)
                self._under_way.discard(job_id)
                self._changed.notify_all()


class CudaWorker(BlockWorker):
    """Between device memory and rows; submitting returns at once."""

    def __init__(self, kv_caches: Any, *args: Any, lane: Callable[[str, Any], Lane] = Lane) -> None:
        super().__init__(kv_caches, *args)
        device = kv_caches.tensors[0].tensor.device
        self._stores = lane("kvstride-store", device)
        self._loads = lane("kvstride-load", device)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Blocks of the engine to rows."""
        parts = self._parts(src_spec, dst_spec.block_ids)
        self._stores.put(job_id, lambda stream: self._move(parts, True, stream))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Rows to blocks of the engine. All loads are as quick as they can be."""
        parts = self._parts(dst_spec, src_spec.block_ids)
        self._loads.put(job_id, lambda stream: self._move(parts, False, stream))
        return True

    def get_finished(self) -> list[Any]:
        """Results since the last call."""
        return [*self._stores.finished(), *self._loads.finished()]

    def wait(self, job_ids: set[int]) -> None:
        """Until these jobs are done."""
        self._stores.wait(job_ids)
        self._loads.wait(job_ids)

    def shutdown(self) -> None:
        """When all jobs are done, let go of the memory."""
        self._stores.close()
        self._loads.close()
        super().shutdown()
