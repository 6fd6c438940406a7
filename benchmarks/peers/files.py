# SPDX-License-Identifier: Apache-2.0
"""The file code of other KV stores: vLLM's fs tier (its C extension) and LMCache's fs_native, both with O_DIRECT.

Each is the plain core of its product: one file a chunk, written under another name and renamed, no checksums, no limit,
buffers as they are. All files lie in one directory, which is the best case for both. write() and read() give the
seconds that they took.
"""

from __future__ import annotations

import importlib
import select
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


class VllmFiles:
    """vllm.fs_io_C as its fs tier calls it: a batch of chunks a job, jobs on a pool of threads, no GIL in a batch."""

    name = "vLLM fs_io_C"

    def __init__(self, directory: Path, threads: int) -> None:
        self._io = importlib.import_module("vllm.fs_io_C")
        self._directory, self._threads = directory, threads
        self._pool = ThreadPoolExecutor(threads)
        list(self._pool.map(time.sleep, [0.01] * threads))  # its threads are there before anything is timed

    def _run(self, call: Any, *lists: list[Any]) -> float:
        # Neighbours go to different threads, so that all end together.
        jobs = [[part[i :: self._threads] for part in lists] for i in range(self._threads)]
        start = time.perf_counter()
        for done in [self._pool.submit(call, *job, True) for job in jobs]:
            done.result()
        return time.perf_counter() - start

    def write(self, names: Sequence[str], buffers: Sequence[np.ndarray]) -> float:
        """A new file for each name."""
        paths = [f"{self._directory}/{name}.bin" for name in names]
        return self._run(self._io.batch_store_block, [path + "_1.tmp" for path in paths], paths, list(buffers))

    def read(self, names: Sequence[str], buffers: Sequence[np.ndarray]) -> float:
        """The same files."""
        paths = [f"{self._directory}/{name}.bin" for name in names]
        return self._run(self._io.batch_load_block, paths, list(buffers))

    def close(self) -> None:
        """Ends its threads."""
        self._pool.shutdown()


class LmcacheFiles:
    """LMCache's native connector of fs_native with `use_odirect`; it has its own threads and splits batches itself."""

    name = "LMCache fs_native"

    def __init__(self, directory: Path, threads: int) -> None:
        importlib.import_module("torch")  # the extension is linked to it
        client = importlib.import_module("lmcache.lmcache_fs").LMCacheFSClient
        self._client = client(str(directory), threads, "", True, 0)

    def _wait(self) -> None:
        while True:
            select.select([self._client.event_fd()], [], [])
            for _, succeeded, error, _ in self._client.drain_completions():
                if not succeeded:
                    raise OSError(f"LMCache: {error}")
                return

    def write(self, names: Sequence[str], buffers: Sequence[np.ndarray]) -> float:
        """A new file for each name."""
        keys, views = _lmcache_keys(names), [memoryview(buffer) for buffer in buffers]
        start = time.perf_counter()
        self._client.submit_batch_set(keys, views)
        self._wait()
        return time.perf_counter() - start

    def read(self, names: Sequence[str], buffers: Sequence[np.ndarray]) -> float:
        """The same files."""
        keys, views = _lmcache_keys(names), [memoryview(buffer) for buffer in buffers]
        start = time.perf_counter()
        self._client.submit_batch_get(keys, views)
        self._wait()
        return time.perf_counter() - start

    def close(self) -> None:
        """Ends its threads."""
        self._client.close()


def _lmcache_keys(names: Sequence[str]) -> list[str]:
    return [f"m@00000001@0@{name}" for name in names]


PEERS = (VllmFiles, LmcacheFiles)
