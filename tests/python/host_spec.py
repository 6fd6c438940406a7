# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiering on a CPU host, which vLLM refuses: our worker, and nobody who describes the rows."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstride.vllm.offload.spec import KvstrideSpec, _slots
from kvstride.vllm.offload.worker import HostWorker


class HostSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """TieringOffloadingSpec with HostWorker."""

    _row_offset = KvstrideSpec._row_offset
    _region = KvstrideSpec._region
    _our_worker = KvstrideSpec._our_worker

    def get_worker(self, kv_caches: Any) -> Any:
        """HostWorker over rows as vLLM has them."""
        if not self._worker:
            canonical = self.config.canonical_layout
            slots = _slots(kv_caches, canonical, self.blocks_per_chunk, self._row_offset(canonical))
            self._worker = self._our_worker(HostWorker, kv_caches, canonical, slots)
        return self._worker
