# SPDX-License-Identifier: Apache-2.0
"""What a small call costs through Python: swap_blocks of one 64 KiB block, over the copy itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
from caches import PAGE, cache
from cold import Cold

import kvstride as kv

NAME = "small_call/swap_blocks_64_KiB"
CALLS = 200


def _each(call: Callable[[], object]) -> float:
    """Seconds a call, over a batch."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def overhead(cold: Cold, rounds: int) -> dict[str, float]:
    """Medians over batches on warm data, in µs.

    The copy is a memoryview's assignment, which is memcpy, less the same assignment of no bytes: what Python itself
    takes is not the copy's.
    """
    src, dst = cold.spot(64 * PAGE)
    ends = [cache(side, "B KV N H D", blocks=64, layers=1) for side in (src, dst)]
    pair = np.array([[3, 5]], np.int64)
    read, write = memoryview(src)[:PAGE], memoryview(dst)[:PAGE]
    nothing = slice(0, 0)

    def copy() -> None:
        write[:] = read

    def no_copy() -> None:
        write[nothing] = read[nothing]

    def swap() -> None:
        kv.swap_blocks(*ends, pair)

    batches = [[_each(call) * 1e6 for call in (copy, no_copy, swap)] for _ in range(rounds)]
    copies = median(b[0] - b[1] for b in batches)
    calls = median(b[2] for b in batches)
    over = median(b[2] - (b[0] - b[1]) for b in batches)
    return {"call_us": calls, "copy_us": copies, "overhead_us": over, "target_us": 2.0}
