# SPDX-License-Identifier: Apache-2.0
"""Chunks on disk: kvstride beside raw O_DIRECT and other stores' file code, alternating, fresh files each time."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from cold import huge, shared
from files import LmcacheFiles, VllmFiles
from ours import NAME, Chunks, OurFiles

from places import Places

Peer = type[VllmFiles] | type[LmcacheFiles]
RAW = "raw O_DIRECT"
OWN_PAGES, HUGE_PAGES = "", ", 2 MiB pages"
WAYS = ("write", "read")
LARGE = (Chunks("2_MiB", 1024, layers=32, tokens=16), Chunks("32_MiB", 64, layers=32, tokens=256))
SMALL = Chunks("64_KiB", 4096, layers=1, tokens=16)  # as many as a call takes
THREADS = (1, 2, 4)
SMALL_THREADS = (1, 2, 4, 8, 16)
# What is asked of a write and of a read.
RAW_TARGETS, PEER_TARGETS, SMALL_TARGETS = (0.90, 0.90), (1.5, 1.05), (2.0, 2.0)


@dataclass(frozen=True)
class Seconds:
    """Of writing everything, and of reading it back."""

    write: float
    read: float


#: Writes and reads everything once, in a fresh directory.
Side = Callable[[], Seconds]


class Disk:
    """The sides of a comparison: one disk, the same chunks in the same memory."""

    def __init__(self, places: Places, program: Path, chunks: Chunks) -> None:
        self._places, self._program, self._chunks = places, program, chunks
        self._src, self._dst = huge(chunks.num_bytes), huge(chunks.num_bytes)
        self._shared = shared(chunks.num_bytes), shared(chunks.num_bytes)

    def ours(self, threads: int) -> Seconds:
        """kvstride, which converts and checks; 0 threads: its own choice."""
        names = self._names()
        with self._places.fresh() as place:
            files = OurFiles(place, threads, self._chunks, self._src, self._dst)
            took = Seconds(files.write(names), files.read(names))
            files.close()
        return self._checked(took, self._src, self._dst)

    def peer(self, kind: Peer, threads: int, pages: str = OWN_PAGES) -> Seconds:
        """A peer, with the chunks as they lie in memory: in pages of its own kind, or in huge ones that it never has.

        vLLM's tier moves chunks from and to a mapping in /dev/shm, LMCache (without CUDA) from and to pages of 4 KiB.
        """
        size, count = self._chunks.chunk_bytes, self._chunks.count
        sides = self._shared if pages == OWN_PAGES else (self._src, self._dst)
        src, dst = ([side[i * size : (i + 1) * size] for i in range(count)] for side in sides)
        names = self._names()
        with self._places.fresh() as place:
            files = kind(place, threads)
            took = Seconds(files.write(names, src), files.read(names, dst))
            files.close()
        return self._checked(took, *sides)

    def raw(self, options: dict[str, int], part: int = 1) -> Seconds:
        """kvstride_disk_bench, which has buffers of its own, with the chunks or a part of them."""
        num_bytes = self._chunks.num_bytes // part
        with self._places.fresh() as place:
            given = {"dir": place, "chunk": self._chunks.chunk_bytes, "bytes": num_bytes} | options
            command = [str(self._program), *(f"--{name}={value}" for name, value in given.items())]
            rates = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return Seconds(*(num_bytes / rates[f"{way}_GBps"] / 1e9 for way in WAYS))

    def raw_best(self) -> Side:
        """The raw loop at its best: one thread or two, depths of 1 to 64, with and without room taken beforehand."""
        small = self._chunks.chunk_bytes < 1 << 20
        depths = [(1, 1), (4, 1), (16, 1), (16, 4), (64, 16)] if small else [(n, 1) for n in (1, 2, 4, 8, 16)]
        tries = [
            {"threads": threads, "depth": depth, "batch": batch, "allocate": allocate}
            for threads in (1, 2)
            for depth, batch in depths
            for allocate in (0, 1)
        ]
        write, read = fastest([partial(self.raw, options, 4) for options in tries], 3)
        whole = [partial(self.raw, options) for options in tries]
        return either(whole[write], whole[read])

    def records(
        self, threads: str, times: dict[str, list[Seconds]], targets: dict[str, tuple[float, float]]
    ) -> Iterator[dict[str, Any]]:
        """Ours beside each other side, both ways."""
        num_bytes = self._chunks.num_bytes
        for other in (side for side in times if side != NAME):
            for i, way in enumerate(WAYS):
                ours, theirs = ([getattr(took, way) for took in times[side]] for side in (NAME, other))
                record = {
                    "name": f"{way}/{self._chunks.name}",
                    "threads": threads,
                    "unit": "GB/s",
                    "ours": num_bytes / median(ours) / 1e9,
                    "against": other,
                    "theirs": num_bytes / median(theirs) / 1e9,
                    "ratio": median(b / a for a, b in zip(ours, theirs, strict=True)),
                }
                if other in targets:
                    record["target"] = targets[other][i]
                yield record

    def _names(self) -> list[str]:
        """Keys that nobody has used before, in hex."""
        return [os.urandom(32).hex() for _ in range(self._chunks.count)]

    def _checked(self, took: Seconds, src: np.ndarray, dst: np.ndarray) -> Seconds:
        if not np.array_equal(src, dst):
            raise AssertionError(f"{self._chunks.name}: other bytes came back")
        dst[:] = 0xA5  # the next side must not pass with what this one read
        return took


def rotate(sides: dict[str, Side], rounds: int) -> dict[str, list[Seconds]]:
    """Every side once a round, each round starting with another one."""
    names = list(sides)
    out: dict[str, list[Seconds]] = {name: [] for name in names}
    for turn in range(rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            out[name].append(sides[name]())
    return out


def fastest(sides: list[Side], rounds: int) -> tuple[int, int]:
    """Which one writes fastest, and which one reads fastest."""
    times = rotate({str(i): side for i, side in enumerate(sides)}, rounds)
    write, read = (min(times, key=lambda i, way=way: median(getattr(t, way) for t in times[i])) for way in WAYS)
    return int(write), int(read)


def either(write: Side, read: Side) -> Side:
    """Writes as the one does and reads as the other."""
    return write if write is read else lambda: Seconds(write().write, read().read)


def best_of(sides: list[Side], rounds: int) -> Side:
    """The one that writes fastest for writes, the one that reads fastest for reads."""
    write, read = fastest(sides, rounds)
    return either(sides[write], sides[read])
