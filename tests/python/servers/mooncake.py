# SPDX-License-Identifier: Apache-2.0
"""Mooncake as its users start it: one master, some store nodes, TCP on loopback.

with Mooncake(tmp_path, nodes=2) as servers:
    servers.url(replicas=2)      # what an engine is opened with
    servers.kill_node(0)
"""

import importlib.util
import json
import pathlib
import subprocess
import time
import urllib.request

from .ports import free_ports


def package() -> pathlib.Path | None:
    """Where Mooncake's package is installed in this environment."""
    found = importlib.util.find_spec("mooncake")
    return None if found is None or found.origin is None else pathlib.Path(found.origin).parent


class Mooncake:
    """A master and `nodes` stores of `segment` bytes each, on `host`. A context manager; logs go below `folder`."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        nodes: int = 2,
        segment: int = 256 << 20,
        lease_ms: int = 1000,
        ttl: int = 3,
        host: str = "127.0.0.1",
    ) -> None:
        where = package()
        assert where is not None, "mooncake is not installed"
        self._package = where
        self._folder = folder
        self._segment = segment
        self.host = host
        self._flags = [f"--default_kv_lease_ttl={lease_ms}", f"--client_ttl={ttl}"]
        self.port, self.admin = free_ports(2, host)
        self._running: list[subprocess.Popen[bytes]] = []
        self.master: subprocess.Popen[bytes] | None = None
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._pids: dict[str, int] = {}
        try:
            self.start_master()
            for _ in range(nodes):
                self.start_node()
        except BaseException:
            self.stop()
            raise

    def url(self, **options: object) -> str:
        """Of an engine of this cluster."""
        options = {"admin": f"{self.host}:{self.admin}", **options}
        return f"mooncake://{self.host}:{self.port}?" + "&".join(f"{name}={value}" for name, value in options.items())

    def start_master(self) -> None:
        """On the same port each time. It keeps nothing over its end."""
        flags = [f"--rpc_port={self.port}", f"--metrics_port={self.admin}", f"--metrics_host={self.host}"]
        self.master = self._start("mooncake_master", *flags, "--rpc_thread_num=2", *self._flags)
        self._wait("the master", lambda: self.ask("/health") is not None)

    def start_node(self) -> None:
        """One more store."""
        before = self.endpoints()
        # Its own service's port, which is not the one that it transfers by.
        (port,) = free_ports(1, self.host)
        flags = [f"--master_server_address={self.host}:{self.port}", "--metadata_server=P2PHANDSHAKE"]
        sizes = [f"--global_segment_size={self._segment}", "--local_buffer_size=16777216"]
        self.nodes.append(self._start("mooncake_client", *flags, f"--host={self.host}", f"--port={port}", *sizes))
        self._wait("a node", lambda: len(self.endpoints()) > len(before))
        self._pids |= dict.fromkeys(self.endpoints() - before, self.nodes[-1].pid)

    def endpoints(self) -> set[str]:
        """By which nodes transfer."""
        detail = json.loads(self.ask("/get_segments_detail") or "{}")
        return {segment["te_endpoint"] for segment in detail.get("segments", [])}

    def flip(self, folder: str, at: int) -> int:
        """Change the byte at `at` of all objects below a folder, in the memory of their nodes. How many there were."""
        found = 0
        for key in (self.ask("/get_all_keys") or "").split():
            if not key.startswith(folder):
                continue
            for copy in json.loads(self.ask(f"/query_key?key={key}") or "{}").get("data", []):
                if copy["size_"] <= at:
                    continue
                with open(f"/proc/{self._pids[copy['transport_endpoint_']]}/mem", "r+b", buffering=0) as memory:
                    memory.seek(copy["buffer_address_"] + at)
                    byte = memory.read(1)[0]
                    memory.seek(copy["buffer_address_"] + at)
                    memory.write(bytes([byte ^ 1]))
                found += 1
        return found

    def segments(self) -> list[str]:
        """What the master knows of."""
        return (self.ask("/get_all_segments") or "").split()

    def wait_for_segments(self, count: int, seconds: float = 30) -> None:
        """Until the master has noticed."""
        self._wait(f"{count} segments", lambda: len(self.segments()) == count, seconds)

    def ask(self, path: str) -> str | None:
        """The master's administration."""
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.admin}{path}", timeout=2) as answer:
                return answer.read().decode()
        except OSError:
            return None

    def kill(self, process: subprocess.Popen[bytes] | None) -> None:
        """With signal 9."""
        assert process is not None
        process.kill()
        process.wait()

    def stop(self) -> None:
        """End what this object has started."""
        for process in reversed(self._running):
            if process.poll() is None:
                process.kill()
        for process in self._running:
            process.wait()
        self._running = []

    def __enter__(self) -> "Mooncake":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, program: str, *flags: str) -> "subprocess.Popen[bytes]":
        log = (self._folder / f"{program}{len(self._running)}.log").open("wb")
        with log:
            command = [str(self._package / program), "--logtostderr", *flags]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder)
        process.log = log.name  # type: ignore[attr-defined]
        self._running.append(process)
        return process

    def _wait(self, what: str, ready, seconds: float = 30) -> None:  # type: ignore[no-untyped-def]
        end = time.monotonic() + seconds
        while not ready():
            last = self._running[-1]
            tail = pathlib.Path(last.log).read_text(errors="replace")[-2000:]  # type: ignore[attr-defined]
            assert last.poll() is None, f"{what} ended with {last.returncode}: {tail}"
            assert time.monotonic() < end, f"no {what} after {seconds} s: {tail}"
            time.sleep(0.05)
