# SPDX-License-Identifier: Apache-2.0
"""Kinds of tiers for the contract tests: each makes tiers, and does to its engine what the world does."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import kvstride as kv
from servers import mooncake


class Place:
    """Where chunks go. `shared`: another tier here sees what one wrote. `ranges`: heads are read without the rest.
    `flips`: flip() changes what is stored. `stops`: stop() and go() keep all servers from answering, and let them
    again."""

    kind = ""
    shared = True
    ranges = True
    flips = False
    stops = False

    def __init__(self, folder: Path):
        self.address = str(folder / "store")

    @staticmethod
    def open(address: str, **options) -> kv.Tier:
        """A new tier at an address, from any process. Options of RemoteTier; others take what they know of them."""
        raise NotImplementedError

    def tier(self, **options) -> kv.Tier:
        return self.open(self.address, **options)

    def flip(self, space: kv.Namespace, at: int) -> None:
        """Change the byte at `at` of every chunk of a namespace, behind the engine's back."""
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def go(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Host(Place):
    kind = "host"
    shared = False

    @staticmethod
    def open(address, **_):
        return kv.HostTier(64 << 20)


class Directory(Place):
    kind = "directory"
    flips = True

    @staticmethod
    def open(address, **_):
        return kv.DirectoryTier(address, 64 << 20)

    def flip(self, space, at):
        for file in (Path(self.address) / space.hex).glob("?/*"):
            with file.open("r+b") as f:
                f.seek(at)
                byte = f.read(1)[0]
                f.seek(at)
                f.write(bytes([byte ^ 1]))


class Processes(Place):
    """An engine of server processes."""

    flips = True
    stops = True
    processes: list

    @staticmethod
    def open(address, **options):
        return kv.RemoteTier(address, **options)

    def _signal(self, number):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def stop(self):
        self._signal(signal.SIGSTOP)

    def go(self):
        self._signal(signal.SIGCONT)


class Mooncake(Processes):
    """One master and two nodes."""

    kind = "mooncake"

    def __init__(self, folder: Path):
        self.servers = mooncake.Mooncake(folder)
        self.address = self.servers.url(replicas=2, timeout=2)
        self.processes = [self.servers.master, *self.servers.nodes]

    def flip(self, space, at):
        assert self.servers.flip(f"{space.hex}/", at) > 0

    def close(self):
        self.servers.stop()


#: By name; made with a folder for files and logs.
PLACES: dict[str, type[Place]] = {"host": Host, "directory": Directory}
if mooncake.package() is not None:
    PLACES["mooncake"] = Mooncake
