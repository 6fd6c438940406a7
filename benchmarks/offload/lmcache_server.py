# SPDX-License-Identifier: Apache-2.0
"""An LMCache server on loopback, for one engine."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: LMCache tells its makers about each start unless this is false.
_SETTINGS = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}


def installed() -> bool:
    """Whether this Python has LMCache."""
    return importlib.util.find_spec("lmcache") is not None


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _await(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers, for a minute."""
    for _ in range(300):
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None:
                break
            time.sleep(0.2)
    raise SystemExit(f"LMCache's server did not start:\n{log.read_text()[-3000:]}")


@contextmanager
def serving(folder: Path, chunk: int) -> Iterator[dict[str, Any]]:
    """A server over `folder` (made where it is absent) that ends with the block; what a job of offload_engine.py needs
    to use it. `chunk`: tokens.

    As fast as it goes on a CPU: the engine copies to and from the server's shared memory, the disk tier is the native
    one with O_DIRECT.
    """
    folder.mkdir(exist_ok=True)
    port, http = _free_ports(2)
    memory, log = f"kvstride-bench-{os.getpid()}-{port}", folder.with_suffix(".log")
    disk = {"type": "fs_native", "base_path": str(folder), "use_odirect": True}
    os.environ.update(_SETTINGS)  # of the engines, too
    command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", "server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--http-port", str(http), "--chunk-size", str(chunk)]
    command += ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(disk)]
    command += ["--supported-transfer-mode", "engine_driven", "--shm-name", memory, "--disable-observability"]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _await(f"http://127.0.0.1:{http}/healthcheck", server, log)
            yield {
                "connector": "LMCacheMPConnector",
                "module": "lmcache_connector",
                "extra": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
            }
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            Path("/dev/shm", memory).unlink(missing_ok=True)
