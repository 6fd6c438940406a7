# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback between a store and its server, which cuts, stalls, damages and reorders what goes through.

with Proxy("10.0.0.7", 6379) as proxy:
    proxy.port
    proxy.set(cut=100_000)

Standard library only.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
import time

from .forwarder import Forwarder, options_said


class Proxy(Forwarder):
    """Connections to `port` go on to a server.

    set() says how they fare. `stall`: nothing goes on. `cut`: a connection ends after up to so many bytes of either
    way. `flip`: a bit changes, once in up to so many bytes. `reorder`: of about so many pieces one comes with its
    halves exchanged.
    """

    def __init__(self, host: str, port: int, seed: int = 1) -> None:
        super().__init__("servers.proxy", host, port, seed)
        self.port = int(self.said[0])


class _Server:
    """A thread for each way of each connection."""

    def __init__(self, host: str, port: int, seed: int) -> None:
        self._target = (host, port)
        self._dice = random.Random(seed)
        self.fare: dict[str, float] = {}
        self._listening = socket.create_server(("127.0.0.1", 0))
        print(self._listening.getsockname()[1], flush=True)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._listening.accept()
            try:
                there = socket.create_connection(self._target, 10)
            except OSError:
                here.close()
                continue
            there.settimeout(None)
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        passed, most = 0, None
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                while "stall" in self.fare:
                    time.sleep(0.01)
                fare = self.fare
                if "flip" in fare:
                    at = self._dice.randrange(int(fare["flip"]))
                    while at < len(data):
                        data[at] ^= 1 << self._dice.randrange(8)
                        at += 1 + self._dice.randrange(int(fare["flip"]))
                if "reorder" in fare and self._dice.randrange(int(fare["reorder"])) == 0:
                    data = data[len(data) // 2 :] + data[: len(data) // 2]
                if "cut" in fare:
                    most = most or passed + self._dice.randrange(int(fare["cut"]))
                    if passed + len(data) > most:
                        target.sendall(data[: most - passed])
                        break
                target.sendall(data)
                passed += len(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """The process."""
    server = _Server(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    while (fare := options_said()) is not None:
        server.fare = fare


if __name__ == "__main__":
    main()
