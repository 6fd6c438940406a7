# SPDX-License-Identifier: Apache-2.0
"""What kvstride's tier costs vLLM's scheduler: processor time of the calling thread a block, in jobs of 64 blocks.

    python offload/scheduler.py [--dir DIR] [--json FILE]

Looked up, loaded, stored and told as finished; the I/O itself is other threads' and is waited for outside the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvstride.vllm.offload.tier import KvstrideTier

ROWS, ROW_BYTES, JOB = 1024, 16384, 64


def make_tier(root: str) -> tuple[KvstrideTier, np.ndarray]:
    """A tier over rows of its own, as vLLM makes it below its own spec."""
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=f"bench-{os.getpid()}",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=parallel,
    )
    rows = np.zeros((ROWS, ROW_BYTES), np.int8)
    spec = SimpleNamespace(config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=False))
    return KvstrideTier(spec, memoryview(rows), "kvstride", root_dir=root, max_bytes=1 << 30, revision="bench"), rows


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and seconds of this thread's processor time."""
    begin = time.thread_time()
    out = work()
    return out, time.thread_time() - begin


def one_pass(tier: KvstrideTier, number: int) -> dict[str, float]:
    """Microseconds a block by work: every row stored, looked up, loaded."""
    keys: list[Any] = [os.urandom(32) + bytes(4) for _ in range(ROWS)]
    context = ReqContext(req_id=f"request-{number}")
    spent = dict.fromkeys(("store", "lookup", "load", "finished"), 0.0)

    def move(submit: Callable[[Any], None], kind: str) -> None:
        for first in range(0, ROWS, JOB):
            ids = np.arange(first, first + JOB, dtype=np.int64)
            job = TransferJob(first, keys[first : first + JOB], ids, kind == "load", context)
            spent[kind] += timed(lambda job=job: submit(job))[1]
            for _, part in tier._jobs[first].parts:
                part.wait()
            results, seconds = timed(lambda: list(tier.get_finished_jobs()))
            spent["finished"] += seconds / 2  # of a store and of a load
            assert [r.success for r in results] == [True]

    move(tier.submit_store, "store")
    found, spent["lookup"] = timed(lambda: [tier.lookup(key, context) for key in keys])
    assert set(found) == {LookupResult.HIT}
    move(tier.submit_load, "load")
    tier.on_request_finished(context)
    return {kind: seconds / ROWS * 1e6 for kind, seconds in spent.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", default="/dev/shm", help="where the store lies while it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        tier, rows = make_tier(str(Path(directory) / "store"))
        passes = [one_pass(tier, number) for number in range(9)]
        tier.shutdown()
        del rows
    found = {kind: statistics.median(p[kind] for p in passes) for kind in passes[0]}
    for kind, micros in found.items():
        print(f"{kind:10} {micros:6.2f} us a block")
    print(f"{'a hit':10} {found['lookup'] + found['load'] + found['finished']:6.2f} us a block, all together")
    print(f"{'a store':10} {found['store'] + found['finished']:6.2f} us a block, all together")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
