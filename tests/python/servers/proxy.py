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
import threading
import time


class Proxy:
    """Connections to `port` go on to a server. A thread for each way of each connection; a context manager."""

    def __init__(self, host: str, port: int, seed: int = 1) -> None:
        self._target = (host, port)
        self._dice = random.Random(seed)
        self._fare: dict[str, int] = {}
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets = [self._listening]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def set(self, **options: int) -> None:
        """How connections fare from now on; without options all passes.

        `stall`: nothing goes on. `cut`: a connection ends after up to so many bytes of either way. `flip`: a bit
        changes, once in up to so many bytes. `reorder`: of about so many pieces one comes with its halves exchanged.
        """
        self._fare = options

    def close(self) -> None:
        self._fare = {}
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for one in self._sockets:
            one.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            self._sockets.append(here)
            try:
                there = socket.create_connection(self._target, 10)
            except OSError:
                here.shutdown(socket.SHUT_RDWR)
                continue
            there.settimeout(None)
            self._sockets.append(there)
            for ends in ((here, there), (there, here)):
                self._threads.append(threading.Thread(target=self._pass, args=ends))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        passed, most = 0, None
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                while "stall" in self._fare:
                    time.sleep(0.01)
                fare = self._fare
                if "flip" in fare:
                    at = self._dice.randrange(fare["flip"])
                    while at < len(data):
                        data[at] ^= 1 << self._dice.randrange(8)
                        at += 1 + self._dice.randrange(fare["flip"])
                if "reorder" in fare and self._dice.randrange(fare["reorder"]) == 0:
                    data = data[len(data) // 2 :] + data[: len(data) // 2]
                if "cut" in fare:
                    most = most or passed + self._dice.randrange(fare["cut"])
                    if passed + len(data) > most:
                        target.sendall(data[: most - passed])
                        break
                target.sendall(data)
                passed += len(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
