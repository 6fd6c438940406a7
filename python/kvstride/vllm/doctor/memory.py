# SPDX-License-Identifier: Apache-2.0
"""Checks of memory: vLLM's primary tier, which lies in /dev/shm, and what killed engines left there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..offload.region import leftovers
from .finding import Finding, Setup, counted, fail, ok, size_text, warn

_SHM = Path("/dev/shm")
_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check_memory(setup: Setup) -> Finding | None:
    """`cpu_bytes_to_use` has room in /dev/shm, in memory and in the control group."""
    want = (setup.extra or {}).get("cpu_bytes_to_use")
    if isinstance(want, bool) or not isinstance(want, (int, float)) or not 0 < want < 2**62:
        return None  # the options' check says so
    said = f"cpu_bytes_to_use is {size_text(want)}"
    try:
        shm = os.statvfs(_SHM)
    except OSError as error:
        return fail(f"{said}, for which vLLM needs {_SHM}: {error.strerror}")
    room = shm.f_bavail * shm.f_frsize
    facts = {"cpu_bytes_to_use": int(want), "shm_free_bytes": room}
    if want > room:
        return fail(
            f"{said}, {_SHM} has {size_text(room)} free of {size_text(shm.f_blocks * shm.f_frsize)}",
            "lower it or enlarge /dev/shm (containers: --shm-size, --ipc=host)",
            facts=facts,
        )
    total, free = _host_memory()
    for what, most, left in [("the machine", total, free), *_groups()]:
        if want > most:
            return fail(f"{said}, the memory of {what} is {size_text(most)}", "lower it", facts=facts)
        if want > left:
            return warn(
                f"{said}, {what} has {size_text(left)} of memory left",
                "stop what uses it or lower it: it is taken at start",
                facts=facts,
            )
        free = min(free, left)
    facts["memory_free_bytes"] = int(free)
    return ok(f"{said}; free are {size_text(room)} of {_SHM} and {size_text(free)} of memory", facts=facts)


def _host_memory() -> tuple[float, float]:
    """All of it and what is available."""
    numbers = {}
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMORY.read_text().splitlines():
            name, _, rest = line.partition(":")
            numbers[name] = int(rest.split()[0]) * 1024
    return numbers.get("MemTotal", float("inf")), numbers.get("MemAvailable", float("inf"))


def _groups() -> Iterator[tuple[str, float, float]]:
    """Limits of the control groups (version 2) that this process is in: name, limit, what is left."""
    own = _CGROUP / _own_group()
    for folder in [own, *own.parents]:
        if folder != _CGROUP and _CGROUP not in folder.parents:
            return
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            most = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used -= int(stat.get("inactive_file", 0))  # the kernel takes it back
            yield f"control group /{folder.relative_to(_CGROUP)}", most, most - used


def _own_group() -> str:
    """Path of this process's control group, below their root."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        return next((line[3:] for line in lines if line.startswith("0::")), "/").lstrip("/")
    return ""


def check_leftovers(setup: Setup) -> Finding:
    """Shared memory that nobody uses any more."""
    dead = leftovers()
    taken = 0
    for path in dead:
        with contextlib.suppress(OSError):
            taken += path.stat().st_blocks * 512
    if dead:
        return warn(
            f"{counted(len(dead), 'file')} of killed engines in {_SHM}, {size_text(taken)}",
            "the next start with kvstride removes them",
            facts={"files": [str(p) for p in dead], "bytes": taken},
        )
    return ok(f"nothing of killed engines in {_SHM}")
