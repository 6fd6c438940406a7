# SPDX-License-Identifier: Apache-2.0
"""What the backend has attended: tokens, and tiles of the sparse methods, by phase."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

PHASES = ("prefill", "decode")
#: What is counted, with its help text. Prometheus: kvstride_attention_<name>_total{phase}.
NAMES = {
    "tokens": "Query tokens of all layers",
    "tiles": "Tiles of query heads that skip-softmax looked at",
    "tiles_skipped": "Tiles of query heads that skip-softmax skipped",
}

_lock = threading.Lock()
_counts: dict[str, dict[str, int]] = {phase: dict.fromkeys(NAMES, 0) for phase in PHASES}
_exported: dict[str, Any] = {}


def attended() -> dict[str, dict[str, int]]:
    """{"prefill" | "decode": {"tokens", "tiles", "tiles_skipped"}} of this process since it started.

    A vLLM worker is a process of its own: ask it by `collective_rpc`, or read vLLM's `/metrics`, where the counters are
    where PROMETHEUS_MULTIPROC_DIR is set or the engine runs in the server's process."""
    with _lock:
        return {phase: dict(_counts[phase]) for phase in PHASES}


def add(phase: str, tokens: int, tiles: int, skipped: int) -> None:
    """Count one call of one layer."""
    with _lock:
        for name, number in (("tokens", tokens), ("tiles", tiles), ("tiles_skipped", skipped)):
            _counts[phase][name] += number
            if number and name in _exported:
                _exported[name].labels(phase).inc(number)


def export() -> None:
    """Count in prometheus_client's registry, too, where it is installed."""
    with contextlib.suppress(ImportError):
        from prometheus_client import Counter

        for name, text in NAMES.items():
            # Another import of this package may have made it.
            with contextlib.suppress(ValueError):
                _exported[name] = Counter(f"kvstride_attention_{name}", text, ["phase"])
