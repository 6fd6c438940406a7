# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiering on a CPU host with the plainest worker there is: one numpy copy a block and tensor."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstride.vllm.offload.spec import KvstrideSpec


class CopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Rows as vLLM's direct format has them, one block a chunk, one group."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._finished: list[Any] = []
        self._tensors = [t.tensor.numpy() for t in kv_caches.tensors]
        self._rows = [region.create_next_worker_view(t.page_size_bytes).numpy() for t in kv_caches.tensors]

    def _move(self, job_id: int, blocks: Any, rows: Any, store: bool) -> bool:
        begin, moved = time.perf_counter(), 0
        for tensor, view in zip(self._tensors, self._rows, strict=True):
            for block, row in zip(blocks, rows, strict=True):
                if store:
                    view[row] = tensor[block]
                else:
                    tensor[block] = view[row]
                moved += view.shape[1]
        self._finished.append(TransferResult(job_id, True, moved, time.perf_counter() - begin))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Blocks to rows."""
        return self._move(job_id, src_spec.block_ids, dst_spec.block_ids, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """Rows to blocks."""
        return self._move(job_id, dst_spec.block_ids, src_spec.block_ids, False)

    def get_finished(self) -> list[Any]:
        """Results since the last call."""
        out, self._finished = self._finished, []
        return out

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        """Let go of the memory."""
        self._tensors, self._rows = [], []
        self._region.cleanup()


class CopySpec(TieringOffloadingSpec):  # type: ignore[misc]
    """TieringOffloadingSpec with CopyWorker."""

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker."""
        if not self._worker:
            self._worker = CopyWorker(kv_caches, KvstrideSpec._region(self))
        return self._worker
