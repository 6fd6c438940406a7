# SPDX-License-Identifier: Apache-2.0
"""What the remote tier asks of an engine, for engines that are written in Python."""

from __future__ import annotations

import abc
import atexit
from collections.abc import Iterable, Sequence
from typing import Literal

from .. import _core
from ..errors import ArgumentError

#: What an engine says of one item. 'late': nothing yet, and the deadline passed. 'ok': done; of a write, that the
#: object is there now. 'there': of a write that does not replace, that an object of that name was there, and stays.
#: 'absent': no such object. 'full': no room. 'too_large': never. 'denied': a person must act (credentials,
#: permissions). 'broken': the connection or the server failed, and trying again may help.
Answer = Literal["late", "ok", "there", "absent", "full", "too_large", "denied", "broken"]

# Threads of the library call engines, and must not ask for the interpreter when it ends.
atexit.register(_core.end_engines)


class Engine(abc.ABC):
    """Objects under names, in something that others run. `RemoteTier(engine)` does all the rest.

    Names have the characters a-z 0-9 / and at most 300 of them. Calls may come from several threads at once, none of
    which Python has made, and block, at most until little after `deadline` (as `time.monotonic()`; where it is over
    before a call begins, none is made). An address is memory of `size` bytes that is the engine's until the call
    returns, and not a moment longer: not even for a transfer that failed. Nobody repeats a request but the tier.

    A method returns one answer for each item, in their order. Where it raises, or returns something else, every item
    without an answer is 'broken', and the text of the exception is shown as the tier's detail. A method that computes
    in Python holds up the other threads of the process; what waits for the network must let go of the interpreter's
    lock, as sockets and most extension modules do. What is like `kind` is asked once, when the tier is made.
    """

    #: One word, for metrics.
    kind: str = "python"
    #: Where, for people: no password.
    detail: str = ""
    #: The longest object, in bytes.
    largest: int = 1 << 30
    #: Whether a range of an object is read without the rest.
    reads_ranges: bool = False
    #: How many threads may usefully call at once.
    num_threads: int = 2
    #: How many items a call of `read` or `write` should have.
    batch: int = 16
    #: How many names `find` asks in one round trip.
    names_a_trip: int = 1000

    def memory(self, address: int, size: int) -> None:  # noqa: B027 most engines need not know
        """Memory from which items will be read and to which they will be written, before the first of them."""

    @abc.abstractmethod
    def find(self, names: list[str], deadline: float) -> Sequence[tuple[Answer, int]]:
        """'ok' and how many bytes the object has, or another answer and -1."""

    @abc.abstractmethod
    def read(
        self,
        names: list[str],
        addresses: list[int],
        sizes: list[int],
        ranges: list[list[tuple[int, int]]],
        deadline: float,
    ) -> Sequence[tuple[Answer, int]]:
        """Fill memory: of each object the `ranges` (begin, end), ascending and apart, each at the same place behind the
        object's address.

        An object should have `sizes[i]` bytes, and memory for so many is there. 'ok' and how many it really has (-1:
        not known), or another answer and -1. Where it has another length nothing need be read. Without `reads_ranges`
        every range is the whole object.
        """

    @abc.abstractmethod
    def write(
        self, names: list[str], addresses: list[int], sizes: list[int], replace: list[bool], deadline: float
    ) -> Sequence[Answer]:
        """Keep objects: whole, or not at all. `replace`: what is there is known to be damaged."""

    @abc.abstractmethod
    def remove(self, names: list[str], deadline: float) -> Sequence[Answer]:
        """'ok', also where there was nothing."""

    def list(self, folder: str, deadline: float) -> Iterable[tuple[str, int, int]] | None:
        """What lies right below `folder` ('' or a name that ends in '/'), in no order: whole names, bytes (-1: not
        told), seconds since 1970 (0: not told). A folder's name ends in '/'. None: this engine cannot list."""
        return None

    def close(self) -> None:  # noqa: B027 most engines have nothing to close
        """Nobody will call any more. Not called where the interpreter ends before."""


def open_engine(engine: str | Engine) -> _core.Engine:
    """The engine that a URL names, or one that is written in Python.

    Raises ArgumentError for a URL or options that cannot be, StoreError where the engine's client is not installed.
    """
    if isinstance(engine, Engine):
        return _core.Engine(engine)
    if not isinstance(engine, str):
        raise ArgumentError(f"RemoteTier: url is {type(engine).__name__}, expected a str or a kvstride.remote.Engine")
    if engine.partition("://")[0] == "mooncake":
        from .mooncake import Mooncake

        return _core.Engine(Mooncake(engine))
    return _core.open_engine(engine)
