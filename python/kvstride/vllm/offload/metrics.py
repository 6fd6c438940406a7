# SPDX-License-Identifier: Apache-2.0
"""kvstride's counters on vLLM's own /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

CHUNKS = "vllm:kvstride_chunks"
EVENTS = "vllm:kvstride_directory_events"
USED = "vllm:kvstride_directory_used_bytes"
CAPACITY = "vllm:kvstride_directory_capacity_bytes"
HELD = "vllm:kvstride_directory_chunks"
REMOTE_EVENTS = "vllm:kvstride_remote_events"
REMOTE_KNOWN = "vllm:kvstride_remote_known_chunks"


def definitions() -> dict[str, Any]:
    """What vLLM must know of these metrics."""
    return {
        CHUNKS: OffloadingCounterMetadata(
            documentation="Chunks stored and loaded, by outcome (ok, miss, corrupt, io_error, timeout, refused).",
            labelnames=("verb", "outcome"),
        ),
        EVENTS: OffloadingCounterMetadata(
            documentation="What happened in the directory, by kind: docs/store.md, a tier's counters.",
            labelnames=("event",),
        ),
        REMOTE_EVENTS: OffloadingCounterMetadata(
            documentation="What happened in the remote engine, by kind: docs/store.md, a tier's counters.",
            labelnames=("event",),
        ),
        REMOTE_KNOWN: OffloadingGaugeMetadata(documentation="Objects that this process knows in the remote engine."),
        USED: OffloadingGaugeMetadata(documentation="Bytes of all files in the directory."),
        CAPACITY: OffloadingGaugeMetadata(documentation="The directory's limit in bytes."),
        HELD: OffloadingGaugeMetadata(documentation="Files that this process knows in the directory."),
    }


class Stats:
    """What vLLM has not been told yet."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[str, str], int] = {}
        self._told: dict[tuple[str, str], int] = {}

    def count(self, verb: str, outcome: str, number: int = 1) -> None:
        """The outcome of so many chunks."""
        self._chunks[verb, outcome] = self._chunks.get((verb, outcome), 0) + number

    def take(self, tiers: Sequence[Mapping[str, Any]] | None) -> Any:
        """All of it, with metrics of the directory, and of a tier below it, where they are given; None where there is
        nothing."""
        if tiers is None and not self._chunks:
            return None
        out = OffloadingConnectorStats()
        for labels, number in self._chunks.items():
            out.increase_counter(CHUNKS, number, labels)
        self._chunks = {}
        if tiers is None:
            return out
        for tier, events in zip(tiers, (EVENTS, REMOTE_EVENTS), strict=False):
            for name, number in tier["counters"].items():
                told = self._told.get((events, name), -1)
                if number > told:  # also 0, once: what begins with 1 has not grown, for Prometheus
                    told = max(told, 0)
                    out.increase_counter(events, number - told, (name,))
                    self._told[events, name] = number
        for name, key in ((USED, "used_bytes"), (CAPACITY, "capacity_bytes"), (HELD, "chunks")):
            out.set_gauge(name, tiers[0][key])
        if len(tiers) > 1:
            out.set_gauge(REMOTE_KNOWN, tiers[1]["chunks"])
        return out
