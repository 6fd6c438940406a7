# SPDX-License-Identifier: Apache-2.0
"""Checks of the directory: rights, file system, room. They look only."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstride import StoreError

from .finding import Finding, Result, Setup, counted, fail, ok, size_text, user_name, warn

#: How folders of the doctor's own trials begin.
TRIAL = ".kvstride-doctor-"
_NETWORK = re.compile(r"nfs4?|cifs|smb3|ceph|lustre|gpfs|glusterfs|9p|virtiofs|fuse(\..*)?")


def nearest(path: str) -> str:
    """The directory itself, or the nearest one above that is there."""
    at = os.path.abspath(path)
    while not os.path.lexists(at):
        at = os.path.dirname(at)
    return at


def may(path: str, rights: int) -> bool:
    """What the kernel would say to this process."""
    return os.access(path, rights, effective_ids=os.access in os.supports_effective_ids)


def read_only(path: str) -> bool:
    """Whether the file system is mounted so."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def usable(setup: Setup) -> bool:
    """Whether there is a point in looking further."""
    found = check_directory(setup)
    return found is not None and found.result is not Result.FAIL


def check_directory(setup: Setup) -> Finding | None:
    """`root_dir` is there or can be made, and is this user's: what `DirectoryTier` refuses is told before."""
    if setup.options is None:
        return None
    given, me = setup.options.root_dir, user_name()
    root = given.rstrip("/") or "/"
    facts: dict[str, Any] = {"path": os.path.abspath(root), "user": me}
    if root.startswith("~") or "$" in root:
        return fail(f"{given}: nobody expands it", "write the path in full", facts=facts)
    above = nearest(root)
    if above != os.path.abspath(root):
        if not os.path.isdir(above):
            return fail(f"{given} cannot be made: {above} is no directory", facts=facts)
        if read_only(above):
            return fail(f"{given} is not there, and {above} is mounted read-only", facts=facts)
        if not may(above, os.W_OK | os.X_OK):
            advice = f"make it as root and give it to {me}: install -d -m 700 -o {me} {root}"
            return fail(f"{given} is not there, and {me} may not write in {above}", advice, facts=facts)
        text = f"{given} is not there: the first start makes it in {above}"
        return _absolute(setup, ok(text, facts={**facts, "exists": False}))
    facts["exists"] = True
    info = os.lstat(root)
    if stat.S_ISLNK(info.st_mode):
        return fail(f"{given} is a link, which is refused", f"give {os.path.realpath(root)}", facts=facts)
    if not stat.S_ISDIR(info.st_mode):
        return fail(f"{given} is no directory", facts=facts)
    group = setup.options.group
    mode = f"{stat.S_IMODE(info.st_mode):04o}"
    facts |= {"owner": user_name(info.st_uid), "mode": mode}
    if info.st_uid != os.geteuid() and not group:
        advice = f'chown it, serve as {user_name(info.st_uid)}, or share it with "group": true'
        return fail(f"{given} is {user_name(info.st_uid)}'s, this is {me}", advice, facts=facts)
    if not may(root, os.R_OK | os.X_OK):
        return fail(f"{given} (mode {mode}) cannot be read by {me}", facts=facts)
    return _absolute(setup, _used(setup, info, facts))


def _used(setup: Setup, info: os.stat_result, facts: dict[str, Any]) -> Finding:
    """What may be done in a directory that is there, and by whom."""
    assert setup.options is not None
    root, me = setup.options.root_dir, user_name()
    store = os.path.exists(os.path.join(root, "ledger"))
    if read_only(root) or not may(root, os.W_OK | os.X_OK):
        if not store:
            return fail(f"{root} (mode {facts['mode']}) cannot be written by {me}, and is no store yet", facts=facts)
        return warn(f"{root} cannot be written by {me}", "chunks are read, none are stored", facts=facts)
    if info.st_mode & (stat.S_IWOTH if setup.options.group else stat.S_IWOTH | stat.S_IWGRP):
        return warn(
            f"{root} (mode {facts['mode']})", "others may remove what is in it: chmod 700, with group 2770", facts=facts
        )
    try:
        found = setup.stat
    except StoreError as error:
        return warn(f"{root}: {error}", facts=facts)
    if found is None:
        others = sum(not name.startswith(TRIAL) for name in os.listdir(root))
        if others:
            return warn(
                f"{root} is no store, and has {counted(others, 'entry', 'entries')}",
                "they are left alone; an empty directory is better",
                facts=facts,
            )
        return ok(f"{root} is empty, {me}'s", facts=facts)
    processes = found["account"]["processes"]
    facts["processes"] = processes
    if not found["account"]["sound"]:
        return warn(f"{root}: its account is damaged", "the next start counts anew", facts=facts)
    theirs, ours = found["max_bytes"], setup.options.max_bytes
    users = f"{counted(processes, 'process uses', 'processes use')} {root}"
    if processes and theirs and ours and theirs != ours:
        return warn(
            f"{users} with a limit of {size_text(theirs)}",
            f"here it is {size_text(ours)}: each keeps the sum within its own; give all the same",
            facts=facts,
        )
    return ok(
        f"{root} is {user_name(info.st_uid)}'s, {counted(processes, 'process uses', 'processes use')} it", facts=facts
    )


def _absolute(setup: Setup, found: Finding) -> Finding:
    assert setup.options is not None
    if os.path.isabs(setup.options.root_dir) or found.result is Result.FAIL:
        return found
    return warn(
        f"{found.text}; it is relative",
        "give the whole path, or it is another one wherever vLLM is started",
        facts=found.facts,
    )


@dataclass(frozen=True)
class Mount:
    """Where a path's file system is mounted, and its kind."""

    point: str
    kind: str
    source: str


def mount_of(path: str, table: str = "/proc/self/mountinfo") -> Mount | None:
    """The mount that a path is in; None where the system does not tell."""
    real, best = Path(os.path.realpath(path)), None
    try:
        lines = Path(table).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 5 or len(rest) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        # Later mounts hide earlier ones.
        if real.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(point, rest[0], rest[1])
    return best


def check_file_system(setup: Setup) -> Finding | None:
    """What is kept there is there after a restart."""
    if setup.options is None or not usable(setup):
        return None
    mount = mount_of(nearest(setup.options.root_dir))
    if mount is None:
        return None
    text = f"{mount.kind} at {mount.point}"
    facts = {"kind": mount.kind, "mount": mount.point, "source": mount.source}
    if mount.kind in ("tmpfs", "ramfs"):
        return warn(text, "this is memory: it counts against it, and is empty after a reboot", facts=facts)
    if mount.kind == "overlay":
        return warn(text, "a container's own layer goes with the container: mount a volume", facts=facts)
    if _NETWORK.fullmatch(mount.kind):
        return ok(f"{text}, shared over a network: it must have byte-range locks", facts=facts)
    return ok(text, facts=facts)


def check_room(setup: Setup) -> Finding | None:
    """The limit fits what the file system has."""
    options = setup.options
    if options is None or options.max_bytes == 0:
        return None
    disk = os.statvfs(nearest(options.root_dir))
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    keep = keep_free(options.keep_free, size)
    try:
        held = setup.stat
    except StoreError:
        held = None
    used = 0 if held is None else held["bytes"] + held["quarantine"]["bytes"] + held["temporaries"]["bytes"]
    most = max(used + free - keep, 0)
    facts = {
        "size_bytes": size,
        "free_bytes": free,
        "keep_free_bytes": keep,
        "used_bytes": used,
        "possible_bytes": most,
        "max_bytes": options.max_bytes,
    }
    limit = f"max_bytes is {size_text(options.max_bytes)}"
    if options.max_bytes > size:
        advice = f"lower it: with what is on it now at most {size_text(most)} are possible"
        return fail(f"{limit}, the file system {size_text(size)}", advice, facts=facts)
    if most == 0:
        advice = "nothing can be stored: make room, or lower keep_free"
        return fail(f"{size_text(free)} are free, {size_text(keep)} of them stay so (keep_free)", advice, facts=facts)
    if options.max_bytes > most:
        advice = "at that chunks are evicted, or refused; lower it or make room"
        text = f"{limit}, possible are {size_text(most)} ({size_text(free)} free, {size_text(keep)} of them stay so"
        return warn(f"{text}; {size_text(used)} in use)", advice, facts=facts)
    chunk = used / held["files"] if held and held["files"] else None
    inodes = disk.f_favail if disk.f_files else None
    if inodes is not None and (inodes < 1000 or (chunk and inodes < (options.max_bytes - used) / chunk)):
        facts["free_inodes"] = inodes
        return warn(
            f"{counted(inodes, 'inode')} are free", "a chunk takes one: they end before max_bytes does", facts=facts
        )
    return ok(
        f"{limit}, possible are {size_text(most)} ({size_text(free)} free, {size_text(used)} in use)", facts=facts
    )


def keep_free(given: int | None, size: int) -> int:
    """Bytes that `DirectoryTier` leaves free."""
    return min(1 << 30, size // 20) if given is None else given
