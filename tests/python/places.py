# SPDX-License-Identifier: Apache-2.0
"""Kinds of tiers for the contract tests: each makes tiers, and does to its engine what the world does."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import kvstride as kv
from servers import mooncake, redis, swift


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

    def __init__(self, folder):
        super().__init__(folder)
        self._servers = mooncake.Mooncake(folder)
        self.address = self._servers.url(replicas=2, timeout=2)
        self.processes = [self._servers.master, *self._servers.nodes]

    def flip(self, space, at):
        assert self._servers.flip(f"{space.hex}/", at) > 0

    def close(self):
        self._servers.stop()


class Redis(Processes):
    """One server."""

    kind = "redis"
    cluster = False

    def __init__(self, folder):
        self.servers = redis.Redis(cluster=self.cluster)
        self.processes = self.servers.processes
        self.address = self.servers.url()

    def flip(self, space, at):
        for number, key in self.servers.keys(f"*{space.hex}*"):
            with self.servers.client(number) as client:
                byte = client("GETRANGE", key, at, at)[0]
                client("SETRANGE", key, at, bytes([byte ^ 1]))

    def close(self):
        self.go()
        self.servers.__exit__()


class RedisCluster(Redis):
    """Three masters."""

    kind = "redis-cluster"
    cluster = True


class S3(Processes):
    kind = "s3"

    def __init__(self, folder):
        super().__init__(folder)
        self._servers = swift.Swift()
        self._servers.__enter__()
        os.environ |= self._servers.environment
        self.processes = list(self._servers.processes.values())
        self.address = self._servers.url()

    def flip(self, space, at):
        # The file that is an object, with the checksum of it that Swift keeps beside it as it was.
        for file in self._servers.disks.rglob("*.data"):
            data = file.read_bytes()
            if len(data) <= at or space.hex.encode() not in data[:4096] + _name_of(file):
                continue
            with file.open("r+b") as f:
                f.seek(at)
                f.write(bytes([data[at] ^ 1]))

    def _signal(self, number):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def close(self):
        self._servers.__exit__()


def _name_of(file):
    """What Swift writes beside a file: its metadata, the object's name in it."""
    return b"".join(os.getxattr(file, name) for name in os.listxattr(file) if "swift" in name)


#: By name; made with a folder for files and logs.
PLACES: dict[str, type[Place]] = {"host": Host, "directory": Directory}
# Those whose servers are installed here; KVSTRIDE_REQUIRE_SERVERS=1: all.
REQUIRED = bool(os.environ.get("KVSTRIDE_REQUIRE_SERVERS"))
if REQUIRED or redis.program() is not None:
    PLACES |= {"redis": Redis, "redis-cluster": RedisCluster}
if REQUIRED or not swift.missing():
    PLACES["s3"] = S3
if mooncake.package() is not None:  # a Python package, where engines are
    PLACES["mooncake"] = Mooncake
