# SPDX-License-Identifier: Apache-2.0
"""Kinds of tiers for the contract tests: each makes tiers, and does to its engine what the world does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import kvstride as kv
import servers.redis
import servers.swift


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


class Redis(Processes):
    kind = "redis"
    nodes = 1

    def __init__(self, folder):
        super().__init__(folder)
        self._servers = servers.redis.Redis(folder, nodes=self.nodes)
        self._servers.__enter__()
        self.processes = self._servers.processes
        self.address = self._servers.url()

    def flip(self, space, at):
        for port in self._servers.ports:
            cli = ["redis-cli", "-p", str(port)]
            keys = subprocess.run([*cli, "--scan", "--pattern", f"*{space.hex}/?/*"], capture_output=True, check=True)
            for key in keys.stdout.split():
                byte = subprocess.run(
                    [*cli, "--raw", "getrange", key, str(at), str(at)], capture_output=True, check=True
                )
                value = bytes([byte.stdout[0] ^ 1])
                subprocess.run([*cli, "-x", "setrange", key, str(at)], input=value, capture_output=True, check=True)

    def close(self):
        self._servers.__exit__()


class RedisCluster(Redis):
    kind = "redis-cluster"
    nodes = 3


class S3(Processes):
    kind = "s3"

    def __init__(self, folder):
        super().__init__(folder)
        self._servers = servers.swift.Swift()
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
if REQUIRED or not servers.redis.missing():
    PLACES |= {"redis": Redis, "redis-cluster": RedisCluster}
if REQUIRED or not servers.swift.missing():
    PLACES["s3"] = S3
