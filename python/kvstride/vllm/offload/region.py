# SPDX-License-Identifier: Apache-2.0
"""The shared memory of vLLM's primary tier, and descriptions of its rows beside it.

vLLM names the memory /dev/shm/vllm_offload_<engine>.mmap and leaves it behind where a process is killed. Each worker
writes kvstride_<engine>.<rank>.json and holds a lock on it for as long as it lives, so that the next start can tell
what nobody uses; when the scheduler's process has mapped the memory its name is removed, and nothing is left at all.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from kvstride import StoreError

from .rows import Rows

_SHM = Path("/dev/shm")
_NAME = re.compile(r"kvstride_(?P<engine>[\w.-]{1,200})\.(?P<rank>\d{1,5})\.json")
_MOST = 16 << 20


def _memory_of(engine: str) -> list[Path]:
    """vLLM's files for an engine: one, or several segments (0.33)."""
    return [p for p in _SHM.glob("vllm_offload_*") if re.fullmatch(rf"vllm_offload_{re.escape(engine)}\b.*", p.name)]


def _safe(engine: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,200}", engine):
        raise StoreError(f"the engine's id {engine!r} is no file name")
    return engine


class Description:
    """This worker's description, there until it is closed or the process ends."""

    def __init__(self, engine: str, rank: int, rows: Rows) -> None:
        self._path = _SHM / f"kvstride_{_safe(engine)}.{rank}.json"
        draft = self._path.with_suffix(f".{os.getpid()}.tmp")
        self._fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.write(self._fd, rows.to_json().encode())
            os.rename(draft, self._path)
        except BaseException:
            os.close(self._fd)
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        atexit.register(self.close)

    def close(self) -> None:
        """Remove it. Does nothing the second time."""
        if self._fd < 0:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._fd)
        self._fd = -1


def read_descriptions(engine: str, world_size: int) -> list[Rows] | None:
    """What the workers of an engine have written, None where they are not all there (workers that are not ours)."""
    found = []
    for rank in range(world_size):
        path = _SHM / f"kvstride_{_safe(engine)}.{rank}.json"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            if os.fstat(fd).st_uid != os.geteuid():
                raise StoreError(f"{path} belongs to another user")
            found.append(Rows.from_json(file.read(_MOST).decode()))
    return found


def forget_name(engine: str) -> None:
    """Everybody who needs the memory has mapped it: it ends with the last of them, however they end."""
    for path in _memory_of(_safe(engine)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _abandoned() -> Iterator[list[Path]]:
    """Files of each engine of this user that was killed, nobody else's while they are looked at."""
    for path in _SHM.glob("kvstride_*.json"):
        match = _NAME.fullmatch(path.name)
        if not match:
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            info = os.fstat(fd)
            if info.st_uid != os.geteuid() or not stat.S_ISREG(info.st_mode):
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.stat(path).st_ino != info.st_ino:
                continue
            yield [*_memory_of(match["engine"]), path]
        except BlockingIOError:
            continue  # it lives
        finally:
            os.close(fd)


def leftovers() -> list[Path]:
    """What `sweep` would remove."""
    return [path for files in _abandoned() for path in files]


def sweep() -> int:
    """Remove what engines of this user left behind that were killed. Returns how many files."""
    removed = 0
    for files in _abandoned():
        for path in files:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed += 1
    return removed
