# SPDX-License-Identifier: Apache-2.0
"""Debian's redis-server: one, or a cluster of masters without replicas, as long as the context lasts."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import signal
import socket
import subprocess
import time


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in ("redis-server", "redis-cli") if shutil.which(name) is None]


class Redis:
    """`nodes` above 1: a cluster. `more`: further words of redis-server's command line."""

    def __init__(self, folder: pathlib.Path, *, nodes: int = 1, host: str = "127.0.0.1", more: tuple[str, ...] = ()):
        self._folder = folder
        self._host = host
        self._more = more
        self._cluster = nodes > 1
        self.ports = _free_ports(nodes, host)
        self.processes: list[subprocess.Popen[bytes]] = []

    def url(self, **options: object) -> str:
        """For kvstride."""
        text = f"redis://{self._host}:{self.ports[0]}/"
        return text + ("?" + "&".join(f"{n}={v}" for n, v in options.items()) if options else "")

    def start(self, number: int) -> None:
        """A node that does not run; of a cluster it is what it was."""
        folder = self._folder / f"node{number}"
        folder.mkdir(exist_ok=True)
        command = ["redis-server", "--bind", self._host, "--port", str(self.ports[number]), "--save", ""]
        command += ["--dir", str(folder), "--appendonly", "no", "--protected-mode", "no", *self._more]
        if self._cluster:
            command += ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
            # A part of the keys may be gone without the rest.
            command += ["--cluster-require-full-coverage", "no"]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if number < len(self.processes):
            self.processes[number] = process
        else:
            self.processes.append(process)

    def kill(self, number: int) -> None:
        """With -9."""
        self.processes[number].kill()
        self.processes[number].wait()

    def __enter__(self) -> Redis:
        try:
            for number in range(len(self.ports)):
                self.start(number)
            for port in self.ports:
                _until(lambda port=port: self._ask(port, "ping") == "PONG")
            if self._cluster:
                where = [f"{self._host}:{port}" for port in self.ports]
                _until(lambda: "OK" in self._cli("--cluster", "create", *where, "--cluster-yes"))
                for port in self.ports:
                    _until(lambda port=port: "cluster_state:ok" in self._ask(port, "cluster", "info"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def _ask(self, port: int, *words: str) -> str:
        return self._cli("-h", self._host, "-p", str(port), *words).strip()

    def _cli(self, *words: str) -> str:
        done = subprocess.run(["redis-cli", *words], capture_output=True, text=True, timeout=30, check=False)
        return done.stdout


def _until(ready, seconds: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise RuntimeError("redis does not come up")
        time.sleep(0.1)


def _free_ports(count: int, host: str) -> list[int]:
    """Below 55536: a node's bus is 10000 above its port."""
    out: list[int] = []
    port = 20000 + time.time_ns() % 30000
    while len(out) < count:
        port = 20000 + (port + 1) % 30000
        with socket.socket() as one, socket.socket() as bus, contextlib.suppress(OSError):
            one.bind((host, port))
            bus.bind((host, port + 10000))
            out.append(port)
    return out
