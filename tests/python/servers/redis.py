#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Redis or Valkey on loopback: one server, or a cluster of three masters, below a temporary directory.

    python3 tests/python/servers/redis.py [--cluster] [--program valkey-server] COMMAND...

runs COMMAND with KVSTRIDE_TEST_ENGINES set to the URL, and stops the servers after it. Debian package: redis-server.
Needs the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

if __package__:
    from .ports import free_ports
else:  # this file is the program
    from ports import free_ports

NUM_SLOTS = 16384


def program() -> str | None:
    """The server that tests start: KVSTRIDE_TEST_REDIS, redis-server or valkey-server."""
    names = [os.environ.get("KVSTRIDE_TEST_REDIS"), "redis-server", "valkey-server"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


class ReplyError(Exception):
    """An error that a server replied."""


class Client:
    """A connection, for tests: one command at a time, replies as Python values."""

    def __init__(self, port: int, seconds: float = 10, password: str = "", host: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection((host, port), seconds)
        self._file = self._socket.makefile("rb")
        if password:
            self("AUTH", password)

    def __call__(self, *words: object) -> Any:
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        data = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        self._socket.sendall(b"*%d\r\n%s" % (len(parts), data))
        return self._reply()

    def _reply(self) -> Any:
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("closed")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise ReplyError(rest.decode())
        if kind == b"+":
            return rest.decode()
        number = int(rest)
        if kind == b"*":
            return [self._reply() for _ in range(number)]
        if kind == b"$" and number >= 0:
            return self._file.read(number + 2)[:-2]
        return number if kind == b":" else None

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Redis:
    """Servers, as long as the context lasts: one, or with `cluster` three masters that share all slots.

    They listen on `host`. `options` are directives of redis.conf, with _ for -. `processes` and `ports` are those of
    the servers by number.
    """

    def __init__(
        self, *, cluster: bool = False, server: str | None = None, host: str = "127.0.0.1", **options: object
    ) -> None:
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="kvstride-redis-"))
        self.cluster = cluster
        self.host = host
        self.server = server or program() or "redis-server"
        self.options = {name.replace("_", "-"): str(value) for name, value in options.items()}
        self.ports = free_ports(3 if cluster else 1, host, second=10000)  # a cluster's second ones
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(len(self.ports)):
                self.start(number)
            if cluster:
                self._join()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Redis:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def url(self, database: int = 0, user: str = "", **options: object) -> str:
        """For kvstride; `user` is what stands before the @."""
        more = "&".join(f"{name}={value}" for name, value in options.items())
        who = f"{user}@" if user else ""
        return f"redis://{who}{self.host}:{self.ports[0]}/{database}{'?' if more else ''}{more}"

    def client(self, number: int = 0) -> Client:
        """To one of the servers."""
        return Client(self.ports[number], password=self.options.get("requirepass", ""), host=self.host)

    def start(self, number: int) -> None:
        """A server that does not run, on its port and with what it had written down (a cluster's nodes.conf)."""
        folder = self.root / str(number)
        folder.mkdir(exist_ok=True)
        flags = {"bind": self.host, "port": str(self.ports[number]), "dir": str(folder), "save": ""}
        flags |= {"protected-mode": "yes" if self.host.startswith("127.") else "no", **self.options}
        if self.cluster:
            flags |= {"cluster-enabled": "yes", "cluster-node-timeout": "1000"}
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen([self.server, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.processes[number : number + 1] = [process]
        self._wait(f"server {number}", lambda: self._answers(number))

    def kill(self, number: int) -> None:
        """With signal 9."""
        self.processes[number].kill()
        self.processes[number].wait()

    def stop(self, number: int) -> None:
        """It answers no more, its connections stand."""
        self.processes[number].send_signal(signal.SIGSTOP)

    def go(self, number: int) -> None:
        """It answers again."""
        self.processes[number].send_signal(signal.SIGCONT)

    def owner(self, slot: int) -> int:
        """The number of the server that has a slot, by the word of the first that answers."""
        for number in range(len(self.ports)):
            with contextlib.suppress(OSError), self.client(number) as client:
                for first, last, master, *_ in client("CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return self.ports.index(master[1])
        raise RuntimeError(f"nobody has slot {slot}")

    def migrate(self, slot: int, to: int, pause: float = 0.0) -> None:
        """Move a slot to another server as redis-cli's reshard does; `pause` seconds while it is half there."""
        source = self.owner(slot)
        if source == to:
            return
        with self.client(source) as old, self.client(to) as new:
            ids = {"old": old("CLUSTER", "MYID"), "new": new("CLUSTER", "MYID")}
            new("CLUSTER", "SETSLOT", slot, "IMPORTING", ids["old"])
            old("CLUSTER", "SETSLOT", slot, "MIGRATING", ids["new"])
            time.sleep(pause)
            while keys := old("CLUSTER", "GETKEYSINSLOT", slot, 10):
                old("MIGRATE", self.host, self.ports[to], "", 0, 10000, "KEYS", *keys)
            time.sleep(pause)
            new("CLUSTER", "SETSLOT", slot, "NODE", ids["new"])
            old("CLUSTER", "SETSLOT", slot, "NODE", ids["new"])

    def wait_until_whole(self, seconds: float = 30) -> None:
        """Until every server of the cluster says that all slots are served."""
        self._wait("cluster", lambda: all(self._whole(number) for number in range(len(self.ports))), seconds)

    def keys(self, pattern: str = "*") -> list[tuple[int, bytes]]:
        """(server, key) of all that match."""
        found = []
        for number in range(len(self.ports)):
            with self.client(number) as client:
                found += [(number, key) for key in client("KEYS", pattern)]
        return found

    def _join(self) -> None:
        """Slots in the order i * 16384 / 3, then all meet the first."""
        count = len(self.ports)
        for number in range(count):
            with self.client(number) as client:
                first, end = NUM_SLOTS * number // count, NUM_SLOTS * (number + 1) // count
                client("CLUSTER", "ADDSLOTS", *range(first, end))
                client("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if number:
                    client("CLUSTER", "MEET", self.host, self.ports[0])
        self.wait_until_whole()

    def _whole(self, number: int) -> bool:
        try:
            with self.client(number) as client:
                info = client("CLUSTER", "INFO").decode()
                slots = client("CLUSTER", "SLOTS")
        except (OSError, ReplyError):
            return False
        return "cluster_state:ok" in info and len({master[1] for _, _, master, *_ in slots}) == len(self.ports)

    def _answers(self, number: int) -> bool:
        try:
            with self.client(number) as client:
                return bool(client("PING") == "PONG")
        except ReplyError:
            return True  # it wants another password
        except OSError:
            return False

    def _wait(self, what: str, ready: Any, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end or self.processes[-1].poll() is not None:
                logs = "".join(file.read_text(errors="replace")[-2000:] for file in self.root.glob("*/log"))
                raise RuntimeError(f"no {what} in {seconds} s\n{logs}")
            time.sleep(0.05)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--program", help="redis-server, valkey-server, or a path", default=program())
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.program is None or shutil.which(options.program) is None:
        print("not installed: redis-server (apt-packages-servers.txt)", file=sys.stderr)
        return 77
    with Redis(cluster=options.cluster, server=options.program) as servers:
        environment = {**os.environ, "KVSTRIDE_TEST_ENGINES": servers.url()}
        return subprocess.run(options.command, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
