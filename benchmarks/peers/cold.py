# SPDX-License-Identifier: Apache-2.0
"""Cold memory on huge pages, and two calls that alternate on it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

PAGE = 2 << 20
ROTATION = 512 << 20

#: Places what a call needs on a source and a destination, untimed, and returns the call.
Prepare = Callable[[np.ndarray, np.ndarray], Callable[[], object]]


def huge(num_bytes: int) -> np.ndarray:
    """Touched bytes on 2 MiB pages, filled with finite bf16 values."""
    mapping = mmap.mmap(-1, num_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapping, np.uint8)
    skip = -raw.ctypes.data % PAGE
    return _filled(raw[skip : skip + num_bytes])


def shared(num_bytes: int) -> np.ndarray:
    """The same on pages of shared memory, which are of 4 KiB unless the administrator wants it otherwise."""
    return _filled(np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8))


def _filled(out: np.ndarray) -> np.ndarray:
    words = np.random.default_rng(0).integers(0, 1 << 16, PAGE // 2, dtype=np.uint16)
    out.reshape(-1, PAGE)[:] = (0x3C00 + (words & 0x83FF)).astype(np.uint16).view(np.uint8)
    return out


class Cold:
    """A source and a destination side; each use takes the next piece, so that none is still in a cache."""

    def __init__(self, rotation: int = ROTATION) -> None:
        self.size = rotation
        self.src, self.dst = huge(rotation), huge(rotation)
        self.at = 0

    def spot(self, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """The next piece of both sides."""
        piece = -(-num_bytes // PAGE) * PAGE
        if self.at + piece > self.size:
            self.at = 0
        part = slice(self.at, self.at + num_bytes)
        self.at += piece
        return self.src[part], self.dst[part]


@dataclass(frozen=True)
class Pairing:
    """kvstride and a peer at the same work."""

    name: str
    peer: str
    num_bytes: int
    ours: Prepare
    theirs: Prepare
    target: float | None = None
    room: int = 0  # bytes of a side where more than what moves
    one_thread: bool = False  # the peer knows no more

    @property
    def side(self) -> int:
        """Bytes that each side needs."""
        return self.room or self.num_bytes


def check(pairing: Pairing, cold: Cold) -> None:
    """Both must leave the same bytes."""
    src, first = cold.spot(pairing.side)
    _, second = cold.spot(pairing.side)
    first[:] = second[:] = 0
    pairing.ours(src, first)()
    pairing.theirs(src, second)()
    if not first.any() or not np.array_equal(first, second):
        raise AssertionError(f"{pairing.name}: kvstride and {pairing.peer} left different bytes")


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(pairing: Pairing, cold: Cold, rounds: int) -> dict[str, float]:
    """Medians over rounds, in each of which both ran once; `ratio` is the peer's time over ours."""
    check(pairing, cold)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (turn % 2, 1 - turn % 2):
            prepare = (pairing.ours, pairing.theirs)[which]
            times[which].append(_time(prepare(*cold.spot(pairing.side))))
    ours, theirs = times
    return {
        "GBps": pairing.num_bytes / median(ours) / 1e9,
        "peer_GBps": pairing.num_bytes / median(theirs) / 1e9,
        "ratio": median(b / a for a, b in zip(ours, theirs, strict=True)),
    }
