# SPDX-License-Identifier: Apache-2.0
"""Kinds of tiers for the contract tests: each makes tiers, and does to its engine what the world does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

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
    """An engine of server processes on `host`; `options` are those of the servers' class."""

    flips = True
    stops = True
    parts: tuple[str, ...] = ()  #: which kill() ends with -9 and start() starts again
    full = False  #: fill() leaves no room for more, free() makes some
    #: `limited` is an address for a user who may only what kvstride needs. deny() takes writing from him, or
    #: everything, allow() gives it back; after expire() his password is another, and after renew() he has a right one.
    denies = False
    read_only = False  #: refuse_writes() makes writes fail, and nothing else
    clocks = True  #: servers run with libfaketime
    #: Options for servers that hold little, so that there is an end to it.
    small: ClassVar[dict[str, object]] = {}
    proxied = 300_000  #: about how many bytes come through() a proxy until something of it matters

    @property
    def processes(self) -> list:
        raise NotImplementedError

    def kill(self, part: str) -> None:
        raise NotImplementedError

    def start(self, part: str) -> None:
        raise NotImplementedError

    def through(self, proxy: Callable[[str, int], int] | None) -> str:
        """An address behind proxies: `proxy` makes one in front of a host's port, and says which port it has. None:
        the servers tell clients of no proxy any more."""
        raise NotImplementedError

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
    parts = ("node", "master")
    # Leases as masters have them by default: slow readers need them. A node that dies is soon known to be dead.
    small: ClassVar = {"lease_ms": 10_000, "ttl": 3}
    proxied = 3_000

    def __init__(self, folder, host="127.0.0.1", ttl=30, **options):
        super().__init__(folder)
        # Longer than stop() lasts: a master that was stopped longer may take its nodes for dead, and forgets all.
        self._servers = mooncake.Mooncake(folder, host=host, ttl=ttl, **options)
        self.address = self._servers.url(replicas=2, timeout=2)

    @property
    def processes(self):
        return [self._servers.master, *self._servers.nodes]

    def kill(self, part):
        servers = self._servers
        servers.kill(servers.master if part == "master" else servers.nodes.pop(0))

    def start(self, part):
        if part == "node":
            self._servers.start_node()
        else:
            self._servers.start_master()
            self._servers.wait_for_segments(len(self._servers.nodes))

    def through(self, proxy):
        """Of the master alone: nodes tell where they are themselves."""
        servers = self._servers
        return (
            self.address.replace(
                f"//{servers.host}:{servers.port}?", f"//127.0.0.1:{proxy(servers.host, servers.port)}?"
            )
            if proxy
            else self.address
        )

    def flip(self, space, at):
        assert self._servers.flip(f"{space.hex}/", at) > 0

    def close(self):
        self._servers.stop()


class Redis(Processes):
    """One server."""

    kind = "redis"
    cluster = False
    clocks = False  # libfaketime clashes with its allocator
    parts = ("0",)
    full = True
    denies = True
    read_only = True
    small: ClassVar = {"maxmemory": "128mb", "maxmemory_policy": "allkeys-lru"}

    def __init__(self, folder, host="127.0.0.1", **options):
        self.servers = redis.Redis(cluster=self.cluster, host=host, **options)
        self.address = self.servers.url()
        self.limited = self.servers.url(user="fleet:sesame")
        self.allow()

    @property
    def processes(self):
        return self.servers.processes

    def _everywhere(self, *commands):
        for number in range(len(self.servers.ports)):
            with self.servers.client(number) as client:
                for command in commands:
                    client(*command.split())

    def kill(self, part):
        self.servers.kill(int(part))

    def start(self, part):
        self.servers.start(int(part))
        if self.cluster:
            self.servers.wait_until_whole()
        self.allow()

    def through(self, proxy):
        servers = self.servers
        if proxy is None:
            if self.cluster:
                self._everywhere("CONFIG SET cluster-announce-port 0 cluster-preferred-endpoint-type ip")
            return self.address
        ports = [proxy(servers.host, port) for port in servers.ports]
        for number, port in enumerate(ports if self.cluster else ()):
            with servers.client(number) as client:
                client("CONFIG", "SET", "cluster-announce-bus-port", servers.ports[number] + 10000)
                client("CONFIG", "SET", "cluster-announce-port", port, "cluster-announce-hostname", "localhost")
                client("CONFIG", "SET", "cluster-preferred-endpoint-type", "hostname")
        return self.address.replace(f"{servers.host}:{servers.ports[0]}", f"127.0.0.1:{ports[0]}")

    def fill(self):
        self._everywhere("CONFIG SET maxmemory 1mb maxmemory-policy noeviction")

    def free(self):
        for name, value in self.servers.options.items():
            self._everywhere(f"CONFIG SET {name} {value}")

    def refuse_writes(self, on):
        self._everywhere(f"CONFIG SET min-replicas-to-write {int(on)}")

    def deny(self, what):
        self._everywhere("ACL SETUSER fleet -set -unlink" if what == "write" else "ACL SETUSER fleet -@all")

    def allow(self):
        may = "+get +set +strlen +getrange +unlink +scan +select +cluster|slots +asking"  # as docs/remote.md says
        self._everywhere(f"ACL SETUSER fleet on >sesame ~kvstride:* {may}")

    def expire(self):
        self._everywhere("ACL SETUSER fleet resetpass >another", "CLIENT KILL USER fleet")

    def renew(self):
        self._everywhere("ACL SETUSER fleet resetpass >sesame")

    def flip(self, space, at):
        for number, key in self.servers.keys(f"*{space.hex}*"):
            with self.servers.client(number) as client:
                byte = client("GETRANGE", key, at, at)
                if byte:  # some objects are shorter: what says which head ranges there are
                    client("SETRANGE", key, at, bytes([byte[0] ^ 1]))

    def close(self):
        self.go()
        self.servers.__exit__()


class RedisCluster(Redis):
    """Three masters."""

    kind = "redis-cluster"
    cluster = True
    parts = ("1",)


class S3(Processes):
    kind = "s3"
    parts = ("object", "container", "proxy", "account", "memcached")
    full = True
    denies = True
    small: ClassVar = {"disk_bytes": 1 << 30}

    def __init__(self, folder, host="127.0.0.1", **options):
        super().__init__(folder)
        self._servers = swift.Swift(host=host, **options)
        self._servers.__enter__()
        self._credentials = folder / "credentials"
        self.renew()
        os.environ |= {**self._servers.environment, "AWS_SHARED_CREDENTIALS_FILE": str(self._credentials)}
        self.address = self._servers.url()
        self.limited = self._servers.url(profile="fleet")
        self.allow()

    @property
    def processes(self):
        return list(self._servers.processes.values())

    def kill(self, part):
        self._servers.kill(part)

    def start(self, part):
        self._servers.start(part)
        self._servers.await_ports()

    def through(self, proxy):
        servers = self._servers
        there = f"{servers.host}:{servers.ports['proxy']}"
        return (
            self.address.replace(there, f"127.0.0.1:{proxy(servers.host, servers.ports['proxy'])}")
            if proxy
            else self.address
        )

    def fill(self):
        """The file system that objects are on."""
        with (self._servers.disks / "others").open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))

    def free(self):
        (self._servers.disks / "others").unlink(missing_ok=True)

    def deny(self, what):
        self._servers.change_bucket(read=what == "write", write=False)

    def allow(self):
        self._servers.change_bucket(read=True, write=True)

    def expire(self):
        self._servers.change_password(f"{self._servers.password}x")

    def renew(self):
        """By somebody who looks after this machine's credentials."""
        new = self._credentials.with_suffix(".new")
        new.write_text(
            f"[fleet]\naws_access_key_id = {swift.LIMITED}\naws_secret_access_key = {self._servers.password}\n"
        )
        new.replace(self._credentials)

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


def kinds(**wanted) -> list[str]:
    """The places that have what a test needs; KVSTRIDE_TEST_TIERS (names with commas) leaves out others."""
    only = os.environ.get("KVSTRIDE_TEST_TIERS")
    names = [n for n in PLACES if only is None or n in only.split(",")]
    return [n for n in names if all(getattr(PLACES[n], a) == v for a, v in wanted.items())]


@contextlib.contextmanager
def started(make):
    """What `make(name)` gives, by name; each is made once, and closed at the end."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = make(name)
        return made[name]

    yield get
    for one in made.values():
        one.close()
