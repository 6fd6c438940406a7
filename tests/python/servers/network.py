# SPDX-License-Identifier: Apache-2.0
"""A network namespace far away, at the end of a link that delays, loses, repeats and damages packets.

with Network() as network:
    with network.inside():             # this thread, and the processes that it starts
        servers = Redis(host=network.host)
    network.set(delay=0.25, loss=0.01)

Needs root and /dev/net/tun, and no netem: two TUN devices, and a process that passes packets from one to the other. It
ends with whoever has made it, and takes devices, namespace and all that still runs in it along. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

from .forwarder import Forwarder, options_said

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Network(Forwarder):
    """`host` is the far end, `near` this one. Raises RuntimeError where such a thing is not allowed.

    set() says how packets fare, both ways. `delay`: seconds. Shares of them: `loss` (1: nobody is there any more),
    `twice`, `late` (20 ms after those that follow), `damage` (of full ones: bytes change places, and the checksum still
    fits). At its end whatever still runs far away ends, too.
    """

    def __init__(self, seed: int = 1) -> None:
        super().__init__("servers.network", seed)
        self.near, self.host = self.said
        self._namespace = os.open(f"/proc/{self.process.pid}/ns/net", os.O_RDONLY)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread is in the far namespace."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _check(_libc.setns(self._namespace, CLONE_NEWNET))
        try:
            yield
        finally:
            _check(_libc.setns(here, CLONE_NEWNET))
            os.close(here)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(AttributeError):  # it has never run
            os.close(self._namespace)


def _device(name: str, address: str, peer: str) -> int:
    """A TUN device in this thread's namespace, as long as it is open."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    for words in (["addr", "add", address, "peer", peer, "dev", name], ["link", "set", name, "mtu", "1500", "up"]):
        subprocess.run(["ip", *words], check=True)
    return tun


def _damaged(packet: bytes, dice: random.Random) -> bytes:
    """Two words of the payload exchanged, which TCP's sum does not see."""
    begin = 4 * (packet[0] & 15)
    begin += 4 * (packet[begin + 12] >> 4)
    out = bytearray(packet)
    one, other = (begin + 2 * dice.randrange((len(packet) - begin) // 2) for _ in range(2))
    out[one : one + 2], out[other : other + 2] = packet[other : other + 2], packet[one : one + 2]
    return bytes(out)


def _forward(ends: tuple[int, int], dice: random.Random) -> None:
    """Until nobody says anything any more."""
    fare: dict[str, float] = {}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    chance = lambda what: dice.random() < fare.get(what, 0)  # noqa: E731
    while True:
        pause = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        ready = select.select([0, *ends], [], [], pause)[0]
        if 0 in ready:
            said = options_said()
            if said is None:
                return
            fare = said
        now = time.monotonic()
        for end, other in (ends, ends[::-1]):
            with contextlib.suppress(BlockingIOError):
                for _ in range(64 if end in ready else 0):
                    packet = os.read(end, 2048)
                    if chance("loss"):
                        continue
                    if len(packet) > 1400 and packet[0] >> 4 == 4 and packet[9] == 6 and chance("damage"):
                        packet = _damaged(packet, dice)
                    for _ in range(2 if chance("twice") else 1):
                        count += 1
                        due = now + fare.get("delay", 0) + (0.02 if chance("late") else 0)
                        heapq.heappush(waiting, (due, count, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # full, or down
                os.write(end, packet)


def main() -> None:
    """The forwarder."""
    # Of the networks that RFC 2544 sets aside for tests, two addresses that go by this process's number.
    number = 2 * (os.getpid() % 65536)
    near, far = (f"198.{18 + (n >> 16)}.{n >> 8 & 255}.{n & 255}" for n in (number, number + 1))
    name = f"kvs{os.getpid()}"
    ends = [_device(name, near, far)]
    _check(_libc.unshare(CLONE_NEWNET))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    ends.append(_device(name, far, near))
    print(near, far, flush=True)
    _forward((ends[0], ends[1]), random.Random(int(sys.argv[1])))
    mine = os.stat("/proc/self/ns/net")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if pid != str(os.getpid()) and os.path.samestat(mine, os.stat(f"/proc/{pid}/ns/net")):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
