# SPDX-License-Identifier: Apache-2.0
"""Ports for servers of tests."""

import contextlib
import random
import socket

#: Below those that the system gives to connections; chosen at random, so that processes beside each other take others.
_FIRST, _LAST = 10000, 32767


def free_ports(count: int, host: str, second: int = 0) -> list[int]:
    """Ports on which nobody listens now; with `second` also not on those that are so much higher."""
    found: set[int] = set()
    for _ in range(1000):
        port = random.randrange(_FIRST, _LAST - second)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for one in {port, port + second}:
                stack.enter_context(socket.socket()).bind((host, one))
            found.add(port)
        if len(found) == count:
            return list(found)
    raise RuntimeError(f"no {count} free ports on {host}")
