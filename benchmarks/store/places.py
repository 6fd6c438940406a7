# SPDX-License-Identifier: Apache-2.0
"""Fresh directories on the disk that is measured."""

from __future__ import annotations

import array
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_TOPDIR_FL = 0x80086601, 0x40086602, 0x00020000


class Places:
    """Makes empty directories below `root`; close() removes them all.

    A directory that is done with keeps its files, cut to no bytes, until then: where ext4 has no journal it passes over
    inodes that were deleted within the last minutes, one by one, which makes the next directory's files up to ten times
    slower to create. For the same reason each directory gets block groups of its own where the file system has them.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = Path(tempfile.mkdtemp(prefix="store-", dir=root))
        spread_out(self.root)

    @contextmanager
    def fresh(self) -> Iterator[Path]:
        """An empty directory."""
        path = Path(tempfile.mkdtemp(dir=self.root))
        try:
            yield path
        finally:
            for folder, _, names in os.walk(path):
                for name in names:
                    os.truncate(f"{folder}/{name}", 0)
            os.sync()  # freed blocks are discarded now, not while the next directory is measured

    def close(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.root)


def spread_out(directory: Path) -> None:
    """chattr +T: directories in this one have nothing to do with each other. Does nothing where that is unknown."""
    with suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            flags = array.array("i", [0])
            fcntl.ioctl(fd, FS_IOC_GETFLAGS, flags)
            flags[0] |= FS_TOPDIR_FL
            fcntl.ioctl(fd, FS_IOC_SETFLAGS, flags)
        finally:
            os.close(fd)
