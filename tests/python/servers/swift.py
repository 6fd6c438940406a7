#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""OpenStack Swift with its S3 API on loopback, everything of it below a temporary directory.

    python3 tests/python/servers/swift.py [--workers N] COMMAND...

runs COMMAND with S3_ENDPOINT, S3_BUCKET, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY set, and stops the servers after
it. Debian packages: apt-packages-servers.txt. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator

if __package__:
    from .ports import free_ports
else:  # this file is the program
    from ports import free_ports

KEY_ID, SECRET = "test:tester", "testing"
LIMITED = "test:fleet"  #: a user who may what change_bucket() says
PROGRAMS = [f"swift-{kind}-server" for kind in ("account", "container", "object", "proxy")]

SERVER = """\
[DEFAULT]
devices = {root}/disks
mount_check = false
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""

PROXY = """\
[DEFAULT]
[pipeline:main]
pipeline = catch_errors cache s3api tempauth copy slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
error_suppression_interval = 1
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = {host}:{memcached}
error_suppression_interval = 1
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
user_test_fleet = {password}
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
"""


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in [*PROGRAMS, "swift-ring-builder", "memcached"] if shutil.which(name) is None]


def listens(host: str, port: int) -> bool:
    """Whether somebody listens on this port."""
    with socket.socket() as one:
        return one.connect_ex((host, port)) == 0


def _kind(server: str) -> str:
    return server.rstrip("0123456789")


class Swift:
    """The servers on `host`, while the context lasts. Processes by kind are in `processes`, objects below `disks`.

    With `copies` above 1 there are as many object servers, `object`, `object2` and so on, each with a disk of its own,
    and every object is on all of them. `disk_bytes`: of a file system of their own, in memory (needs root).
    """

    bucket = "kvstride"

    def __init__(self, workers: int = 0, host: str = "127.0.0.1", copies: int = 1, disk_bytes: int = 0) -> None:
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="kvstride-swift-"))
        self.disks = self.root / "disks"
        self.workers = workers
        self.host = host
        self.disk_bytes = disk_bytes
        self.password = "fleet"
        self.objects = ["object", *(f"object{number}" for number in range(2, copies + 1))]
        names = ["memcached", "account", "container", *self.objects, "proxy"]
        self.ports = dict(zip(names, free_ports(len(names), host), strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.endpoint = f"http://{host}:{self.ports['proxy']}"

    def __enter__(self) -> Swift:
        try:
            self._configure()
            for kind in self.ports:
                self.start(kind)
            self.await_ports()
            self._make_bucket()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self.disk_bytes:
            subprocess.run(["umount", "--lazy", self.disks], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "S3_ENDPOINT": self.endpoint,
            "S3_BUCKET": self.bucket,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def url(self, prefix: str = "", **options: object) -> str:
        """For kvstride."""
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"s3://{self.bucket}/{prefix}?endpoint={self.endpoint}{more}"

    def start(self, kind: str) -> None:
        """A server that does not run."""
        command = [f"swift-{_kind(kind)}-server", str(self.root / f"{kind}.conf")]
        if kind == "memcached":
            command = [kind, "-l", self.host, "-p", str(self.ports[kind]), "-u", getpass.getuser()]
        self._spawn(kind, command)

    def kill(self, kind: str) -> None:
        """With -9, and its children."""
        process = self.processes.pop(kind)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def change_bucket(self, read: bool, write: bool) -> None:
        """What the limited user may do with it, and nobody else but its owner."""
        acl = {"X-Container-Read": LIMITED if read else "", "X-Container-Write": LIMITED if write else ""}
        self._ask_for_bucket("POST", acl)

    def change_password(self, password: str) -> None:
        """Of the limited user: the proxy starts anew."""
        self.kill("proxy")
        self.password = password
        self._write_conf("proxy")
        self.start("proxy")
        self.await_ports()

    def _configure(self) -> None:
        self.disks.mkdir()
        if self.disk_bytes:
            options = ["-t", "tmpfs", "-o", f"size={self.disk_bytes}", "kvstride"]
            subprocess.run(["mount", *options, self.disks], check=True)
        (self.root / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = test\n")
        for kind, servers in (("account", ["account"]), ("container", ["container"]), ("object", self.objects)):
            builder = str(self.root / f"{kind}.builder")
            commands = [["create", "4", str(len(servers)), "0"]]
            for number, server in enumerate(servers, 1):
                (self.disks / f"d{number}").mkdir(exist_ok=True)
                commands.append(["add", f"r1z{number}-{self.host}:{self.ports[server]}/d{number}", "100"])
            for arguments in (*commands, ["rebalance"]):
                subprocess.run(["swift-ring-builder", builder, *arguments], check=True, stdout=subprocess.DEVNULL)
        for server in self.ports:
            if server != "memcached":
                self._write_conf(server)

    def _write_conf(self, server: str) -> None:
        kind = _kind(server)
        text = (PROXY if kind == "proxy" else SERVER).format(
            root=self.root, kind=kind, host=self.host, password=self.password, memcached=self.ports["memcached"]
        )
        common = {
            "swift_dir": self.root,
            "user": getpass.getuser(),
            "bind_ip": self.host,
            "bind_port": self.ports[server],
            "workers": self.workers if kind in ("object", "proxy") else 0,
            "log_level": "ERROR",
        }
        lines = "".join(f"{name} = {value}\n" for name, value in common.items())
        (self.root / f"{server}.conf").write_text(text.replace("[DEFAULT]\n", "[DEFAULT]\n" + lines))

    def _spawn(self, kind: str, command: list[str]) -> None:
        with (self.root / f"{kind}.log").open("ab") as log:
            self.processes[kind] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def await_ports(self, seconds: float = 60) -> None:
        """The proxy asks for none in vain: it would take it for broken."""
        limit = time.monotonic() + seconds
        for kind in self.processes:
            while not listens(self.host, self.ports[kind]):
                if self.processes[kind].poll() is not None or time.monotonic() > limit:
                    raise RuntimeError(f"{kind} does not listen\n{(self.root / f'{kind}.log').read_text()[-2000:]}")
                time.sleep(0.1)

    def _make_bucket(self, seconds: float = 60) -> None:
        """As soon as all servers answer."""
        limit = time.monotonic() + seconds
        while True:
            try:
                return self._ask_for_bucket("PUT")
            except OSError as error:
                dead = [kind for kind, process in self.processes.items() if process.poll() is not None]
                if dead or time.monotonic() > limit:
                    logs = "".join((self.root / f"{kind}.log").read_text()[-2000:] for kind in self.processes)
                    raise RuntimeError(f"Swift does not answer ({error}; ended: {dead})\n{logs}") from error
                time.sleep(0.2)

    def _ask_for_bucket(self, method: str, headers: dict[str, str] | None = None) -> None:
        """By Swift's own protocol."""
        who = {"X-Auth-User": KEY_ID, "X-Auth-Key": SECRET}
        ask = urllib.request.Request(f"{self.endpoint}/auth/v1.0", headers=who)
        with urllib.request.urlopen(ask, timeout=10) as reply:
            headers = {"X-Auth-Token": reply.headers["X-Auth-Token"], **(headers or {})}
            place = reply.headers["X-Storage-Url"]
        change = urllib.request.Request(f"{place}/{self.bucket}", method=method, headers=headers)
        urllib.request.urlopen(change, timeout=10).close()


@contextlib.contextmanager
def swift(workers: int = 0) -> Iterator[Swift]:
    """Swift, running. `workers`: processes of the proxy and of the object server besides the first; 0: none."""
    with Swift(workers) as server:
        yield server


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if lacking := missing():
        print(f"not installed: {', '.join(lacking)} (apt-packages-servers.txt)", file=sys.stderr)
        return 77
    with swift(options.workers) as server:
        return subprocess.run(options.command, env={**os.environ, **server.environment}, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
