# SPDX-License-Identifier: Apache-2.0
"""Many small chunks: what opening their directory costs, and looking for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from ours import Tiny

from places import Places

LOOKUPS = 10_000  # keys a round
ASKED = 1_000_000  # chunks of the directory for which there are targets


def fill(directory: Path, count: int) -> None:
    """Puts so many chunks."""
    tiny = Tiny(directory)
    for first in range(0, count, Tiny.MOST):
        tiny.put(range(first, min(first + Tiny.MOST, count)))
    tiny.close()


def open_once(directory: str) -> dict[str, float]:
    """Opens the directory in this process: seconds, and bytes of memory that came with it."""
    before = _resident()
    start = time.perf_counter()
    tiny = Tiny(Path(directory))
    seconds = time.perf_counter() - start
    grown = _resident() - before
    tiny.close()
    return {"seconds": seconds, "bytes": grown}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _open(directory: Path) -> dict[str, float]:
    """In a process of its own, which has not opened anything before."""
    program = "import json, sys, keys; print(json.dumps(keys.open_once(sys.argv[1])))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", program, str(directory)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def _lookup(directory: Path, count: int, rounds: int) -> tuple[list[float], list[float]]:
    """µs a key: ours, and os.stat of the same chunks' files."""
    paths = [f"{folder}/{name}" for folder, _, names in os.walk(directory) for name in names if len(name) > 64]
    step = max(len(paths) // LOOKUPS, 1)
    paths = paths[::step][:LOOKUPS]
    tiny = Tiny(directory)
    wanted = tiny.keys(range(0, count, step))[:LOOKUPS]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (turn % 2, 1 - turn % 2):
            start = time.perf_counter()
            if which:
                for path in paths:
                    os.stat(path)
            else:
                found = tiny.lookup(wanted)
            times[which].append((time.perf_counter() - start) / LOOKUPS * 1e6)
    if not all(found):
        raise AssertionError(f"lookup: {found.count(False)} of {len(found)} chunks were not found")
    tiny.close()
    return times


def records(places: Places, count: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Opening `count` chunks, and lookups among them."""
    place, nothing = places.root / "many", places.root / "nothing"
    fill(place, count)
    ours, theirs = _lookup(place, count, 3 * rounds)
    base = {"threads": 1, "unit": "µs a key", "ours": median(ours)}
    yield base | {"name": "lookup/in_memory", "limit": 0.3}
    ratio = median(b / a for a, b in zip(ours, theirs, strict=True))
    yield base | {
        "name": "lookup/in_memory",
        "against": "os.stat",
        "theirs": median(theirs),
        "ratio": ratio,
        "target": 10.0,
    }
    empty = median(_open(nothing)["bytes"] for _ in range(3))
    opened = [_open(place) for _ in range(3)]
    opening = {
        "s": (median(o["seconds"] for o in opened), 5.0),
        "bytes a chunk": ((median(o["bytes"] for o in opened) - empty) / count, 120.0),
    }
    for unit, (value, limit) in opening.items():
        record = {"name": f"open/{count}_chunks", "threads": 1, "unit": unit, "ours": value}
        yield record | ({"limit": limit} if count >= ASKED else {})  # of fewer nothing is asked
