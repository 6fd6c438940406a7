# SPDX-License-Identifier: Apache-2.0
"""A verified get from host memory beside memcpy of as many bytes, two threads."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
from cold import Cold
from ours import Chunks, HostMemory

THREADS = 2
# Name, what lies in the cache, what is asked for.
WORKS = (
    ("get_from_host/rows_of_256_bytes", Chunks("2_MiB", 64, layers=32, tokens=16, order="B KV N H D"), 0.75),
    (
        "get_from_host/elements_transposed",
        Chunks("16_MiB", 8, layers=32, tokens=128, order="B H {key: D N, value: N D}", block=128),
        0.40,
    ),
)


class Memcpy:
    """glibc's, by threads that are there already."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS)

    def copy(self, src: np.ndarray, dst: np.ndarray) -> float:
        """Seconds."""
        part = src.size // THREADS
        ends = [(dst.ctypes.data + i * part, src.ctypes.data + i * part, part) for i in range(THREADS)]
        start = time.perf_counter()
        list(self._pool.map(lambda end: ctypes.memmove(*end), ends))
        return time.perf_counter() - start

    def close(self) -> None:
        """Ends its threads."""
        self._pool.shutdown()


def records(rounds: int) -> Iterator[dict[str, Any]]:
    """Both works."""
    cold, memcpy = Cold(), Memcpy()
    for name, chunks, target in WORKS:
        src, dst = cold.spot(chunks.num_bytes)
        held = HostMemory(chunks, src)
        dst[:] = 0xA5
        held.get(dst)
        if not np.array_equal(src, dst):
            raise AssertionError(f"{name}: other bytes came back")
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            for which in (turn % 2, 1 - turn % 2):
                src, dst = cold.spot(chunks.num_bytes)
                times[which].append(memcpy.copy(src, dst) if which else held.get(dst))
        held.close()
        yield {
            "name": name,
            "threads": THREADS,
            "unit": "GB/s",
            "ours": chunks.num_bytes / median(times[0]) / 1e9,
            "against": "memcpy",
            "theirs": chunks.num_bytes / median(times[1]) / 1e9,
            "ratio": median(b / a for a, b in zip(*times, strict=True)),
            "target": target,
        }
    memcpy.close()
