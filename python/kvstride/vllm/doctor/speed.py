# SPDX-License-Identifier: Apache-2.0
"""A trial of the directory: some chunks written, read back and compared, in a store of its own that is removed after.

It lies in a folder inside `root_dir`, or beside where that will be, so that neither the account, the limit nor the
chunks of running engines are touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np

import kvstride as kv
from kvstride import Error, StoreError

from ..offload.options import TierOptions
from .directory import TRIAL, keep_free, may, nearest, read_only, usable
from .finding import Finding, Setup, fail, ok, size_text, warn

#: Of what engines write, the usual order of magnitude; of these at most 32, and no more are begun after 2 s.
CHUNK_BYTES = 4 << 20
MOST_CHUNKS = 32
_BATCH = 8
_SECONDS = 2.0
_DEADLINE = 5.0
#: Bytes a second, below which computing may be as fast.
_SLOW = 100e6


def check_speed(setup: Setup) -> Finding | None:
    """Chunks can be written and read as configured, and how fast."""
    options = setup.options
    if options is None or options.max_bytes == 0 or not usable(setup):
        return None
    base = nearest(options.root_dir)
    if read_only(base) or not may(base, os.W_OK | os.X_OK):
        return None  # of a store, which can be read all the same
    disk = os.statvfs(base)
    room = disk.f_bavail * disk.f_frsize - keep_free(options.keep_free, disk.f_blocks * disk.f_frsize)
    chunks = min(MOST_CHUNKS, options.max_bytes // (2 * CHUNK_BYTES), room // (2 * CHUNK_BYTES))
    if chunks < 1:
        return warn("not measured", f"there is too little room for {size_text(2 * CHUNK_BYTES)} more")
    try:
        with _folder(base) as path:
            return _trial(path, options, int(chunks))
    except (Error, OSError) as error:
        return fail(f"a trial store in {base} does not work: {error}")


@contextlib.contextmanager
def _folder(base: str) -> Iterator[str]:
    """A folder of this process alone. What earlier runs left that were killed goes first."""
    for entry in os.scandir(base):
        if entry.name.startswith(TRIAL) and entry.is_dir(follow_symlinks=False):
            _remove_dead(entry.path)
    path = tempfile.mkdtemp(prefix=TRIAL, dir=base)
    lock = -1
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _remove_dead(path: str) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            info = os.fstat(lock)
            # A minute, for one that has made its folder and not yet locked it.
            if info.st_uid == os.geteuid() and time.time() - info.st_mtime > 60:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _trial(path: str, options: TierOptions, chunks: int) -> Finding:
    """Writes and reads with the options of the configuration."""
    space = kv.Namespace(
        model="kvstride doctor", revision="1", planes={"state": "u8"}, num_layers=1, num_kv_heads=1, head_size=1,
        block_size=1, raw="trial",
    )  # fmt: skip
    tier = options.taking_everything().directory(path)
    source = np.random.default_rng().integers(0, 256, (_BATCH, CHUNK_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)
    keys = [kv.Key(b"doctor" + i.to_bytes(4, "big")) for i in range(chunks)]
    with tier, kv.Store([tier], namespace=space, deadline=_DEADLINE) as store:
        written, write_speed = _move(store, keys, source, False)
        if not written:
            return _stopped(store, "written")
        read, read_speed = _move(store, keys[:written], target, True, source)
        if not read:
            return _stopped(store, "read back")
        detail = tier.metrics()["detail"].removeprefix(f"{path}, ")
    facts = {
        "write_bytes_per_second": int(write_speed),
        "read_bytes_per_second": int(read_speed),
        "chunks": written,
        "chunk_bytes": CHUNK_BYTES,
        "engine": detail,
    }
    text = f"{size_text(write_speed)}/s written, {size_text(read_speed)}/s read and verified ({detail}; "
    text += f"{written} chunks of 4 MiB)"
    if options.engine == "io_uring" and "io_uring" not in detail:
        return warn(text, "io_uring is asked for and not to be had here", facts=facts)
    if read_speed < _SLOW:
        return warn(text, "computing may be as fast as reading", facts=facts)
    if write_speed < _SLOW:
        return warn(text, "what the disk cannot keep up with is not stored", facts=facts)
    return ok(text, facts=facts)


def _move(
    store: kv.Store, keys: Sequence[kv.Key], buffers: np.ndarray, load: bool, expected: np.ndarray | None = None
) -> tuple[int, float]:
    """How many chunks it were and bytes a second; (0, 0) where one of them was not `ok`. Raises StoreError where other
    bytes came back than `expected`."""
    done, spent = 0, 0.0
    for first in range(0, len(keys), _BATCH):
        mine = keys[first : first + _BATCH]
        rows = [buffers[i] for i in range(len(mine))]
        begin = time.perf_counter()
        outcomes = (store.get_bytes if load else store.put_bytes)(mine, rows).wait()
        spent += time.perf_counter() - begin
        if set(outcomes) != {"ok"}:
            return 0, 0.0
        if expected is not None:
            if not np.array_equal(buffers[: len(mine)], expected[: len(mine)]):
                raise StoreError("other bytes came back than were written, with right checksums: tell the authors")
            buffers[:] = 0
        done += len(mine)
        if spent > _SECONDS:
            break
    return done, done * CHUNK_BYTES / spent


def _stopped(store: kv.Store, verb: str) -> Finding:
    """Why the trial ended."""
    tier = store.metrics()["tiers"][0]
    counters = {name: number for name, number in tier["counters"].items() if number}
    why = [name for name in counters if name.startswith(("refused", "no_space", "io_err", "timeout", "corrupt", "van"))]
    return fail(
        f"a chunk could not be {verb}: {', '.join(why) or 'no reason counted'}",
        "docs/store.md, a tier's counters",
        facts={"counters": counters},
    )
