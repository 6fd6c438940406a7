# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store as an engine, over its own client (the package mooncake-transfer-engine, or one of its variants)."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .. import _core
from ..errors import ArgumentError, StoreError
from .engine import Answer, Engine

_OPTIONS = {
    "metadata": "P2PHANDSHAKE",
    "protocol": "tcp",
    "devices": "",
    "replicas": "1",
    "segment": "0",
    "buffer": "64M",
    "local": "",
    "admin": "",
    "timeout": "3",
    "threads": "2",
}

# mooncake-store/include/types.h, release 0.3.13.
_INVALID_PARAMS = -600
_RPC_FAILURES = (-900, -901)
_ANSWERS: dict[int, Answer] = {
    -101: "full",  # no segments: all nodes are gone, or none has come yet
    -200: "full",  # no room, and nothing that may be evicted
    -703: "absent",  # somebody is writing it
    -704: "absent",
    -705: "there",
    -710: "absent",
    -712: "absent",
    -1700: "full",  # a tenant's quota
    -1701: "denied",
}
#: Mooncake gives up on a transfer after 60 seconds, and does not stop it.
_ABANDONED = 55.0


class Mooncake(Engine):
    """`mooncake://master:50051/prefix?…`; docs/remote.md has the options.

    One client of Mooncake's for each engine, made with the first request. Raises ArgumentError for a URL or options
    that cannot be, StoreError where Mooncake's package is not installed.
    """

    kind = "mooncake"
    largest = 1 << 32
    reads_ranges = True
    # One call at a time: it waits by spinning, and two of them take two cores from those that convert.
    batch = 64
    names_a_trip = 10_000

    def __init__(self, url: str) -> None:
        _, user, _, host, port, path, given = _core.parse_url(url)
        for name in given:
            if name not in _OPTIONS:
                raise ArgumentError(f"URL of Mooncake: the option {name} is none of {', '.join(_OPTIONS)}")
        if not host or user:
            raise ArgumentError("URL of Mooncake: it must be mooncake://host:port/prefix?option=value")
        options = {**_OPTIONS, **given}
        if options["protocol"] not in ("tcp", "rdma"):
            raise ArgumentError(f"URL of Mooncake: protocol is {options['protocol']}, expected tcp or rdma")
        self._master = (host, port or 50051)
        self._prefix = path.strip("/") + "/" if path.strip("/") else ""
        self._options = options
        self._replicas = int(_number(options, "replicas", 1, 64))
        self._segment = int(_number(options, "segment", 0, 1 << 46))
        self._buffer = int(_number(options, "buffer", 1 << 20, 1 << 40))
        self._timeout = _number(options, "timeout", 1, 60)
        self.num_threads = int(_number(options, "threads", 1, 256))
        self._address = f"[{host}]:{port or 50051}" if ":" in host else f"{host}:{port or 50051}"
        self.detail = "mooncake://" + self._address + (f"/{self._prefix}" if self._prefix else "")
        self._module = _client(self._timeout)
        self._config = self._module.ReplicateConfig()
        self._config.replica_num = self._replicas
        #: Of the client, the memory it knows and how many calls are under way; whoever replaces it waits for these.
        self._changed = threading.Condition()
        self._store: Any = None
        self._regions: tuple[tuple[int, int], ...] = ()
        self._calls = 0
        self._changing = False
        #: The master did not answer somebody: the next call finds out first whether it lives.
        self._doubtful = False

    # --- What the tier calls ------------------------------------------------------------------------------------------

    def memory(self, address: int, size: int) -> None:
        """Memory at an address that was another's before replaces it."""
        with self._changed:
            kept = []
            for other, length in self._regions:
                if other + length <= address or address + size <= other:
                    kept.append((other, length))
                elif self._store is not None:
                    self._store.unregister_buffer(other)
            self._regions = tuple(kept)
            if self._store is not None:
                _register(self._store, address, size)
            self._regions = (*kept, (address, size))

    def find(self, names: list[str], deadline: float) -> Sequence[tuple[Answer, int]]:
        """One round trip for what is not there, one more for the lengths of what is."""
        keys = self._keys(names)
        with self._client(deadline) as store:
            there = store.batch_is_exist(keys)
            # Only of what is there: each key that is not makes a line in Mooncake's log.
            sizes = self._sizes(store, [key for key, code in zip(keys, there, strict=True) if code == 1])
        out: list[tuple[Answer, int]] = []
        for key, code in zip(keys, there, strict=True):
            size = sizes[key] if code == 1 else code
            if code == 0:
                out.append(("absent", -1))
            else:
                out.append(("ok", size) if size >= 0 else (self._answer(size), -1))
        return out

    def read(
        self,
        names: list[str],
        addresses: list[int],
        sizes: list[int],
        ranges: list[list[tuple[int, int]]],
        deadline: float,
    ) -> Sequence[tuple[Answer, int]]:
        """Whole objects in one call, parts in another."""
        keys = self._keys(names)
        out: list[tuple[Answer, int]] = [("broken", -1)] * len(keys)
        usable = [i for i in range(len(keys)) if self._is_registered(addresses[i], sizes[i])]
        whole = [i for i in usable if ranges[i] == [(0, sizes[i])]]
        parts = [i for i in usable if ranges[i] != [(0, sizes[i])]]
        begin = time.monotonic()
        with self._client(deadline) as store:
            lengths: dict[str, int] = {}
            for chosen in _rounds(keys, whole):
                columns = ([column[i] for i in chosen] for column in (keys, addresses, sizes))
                for i, code in zip(chosen, store.batch_get_into(*columns), strict=True):
                    out[i] = ("ok", code) if code >= 0 else (self._answer(code), code)
            if parts:
                lengths = self._read_parts(store, keys, addresses, sizes, ranges, parts, out)
            # Mooncake says this of an object that is longer than the memory.
            longer = [keys[i] for i in whole if out[i][1] == _INVALID_PARAMS]
            if longer:
                lengths.update(self._sizes(store, longer))
        if time.monotonic() - begin > _ABANDONED and any(answer == "broken" for answer, _ in out):
            self._replace()
        for i, (answer, found) in enumerate(out):
            if found == _INVALID_PARAMS and lengths.get(keys[i], -1) >= 0:
                out[i] = ("ok", lengths[keys[i]])
            elif answer != "ok":
                out[i] = (answer, -1)
        return out

    def write(
        self, names: list[str], addresses: list[int], sizes: list[int], replace: list[bool], deadline: float
    ) -> Sequence[Answer]:
        """Mooncake says of an object that was there what it says of one that it has taken: so it is asked before."""
        keys = self._keys(names)
        out: list[Answer] = ["broken"] * len(keys)
        usable = [i for i in range(len(keys)) if self._is_registered(addresses[i], sizes[i])]
        with self._client(deadline) as store:
            fresh = [i for i in usable if not replace[i]]
            there = store.batch_is_exist([keys[i] for i in fresh]) if fresh else []
            for i, code in zip(fresh, there, strict=True):
                if code:
                    out[i] = "there" if code == 1 else self._answer(code)
            fresh = [i for i, code in zip(fresh, there, strict=True) if code == 0]
            begin = time.monotonic()
            for verb, some in (
                (store.batch_put_from, fresh),
                (store.batch_upsert_from, [i for i in usable if replace[i]]),
            ):
                for chosen in _rounds(keys, some):
                    columns = ([column[i] for i in chosen] for column in (keys, addresses, sizes))
                    for i, code in zip(chosen, verb(*columns, self._config), strict=True):
                        out[i] = "ok" if code == 0 else self._answer(code)
        if time.monotonic() - begin > _ABANDONED and "broken" in out:
            self._replace()
        return out

    def remove(self, names: list[str], deadline: float) -> Sequence[Answer]:
        """Leases of readers are not waited for: what they get is verified."""
        with self._client(deadline) as store:
            codes = store.batch_remove(self._keys(names), True)
        return ["ok" if code == 0 or self._answer(code) == "absent" else self._answer(code) for code in codes]

    def close(self) -> None:
        """Gives back what this process lent to the pool."""
        with self._changed:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    # --- The client ---------------------------------------------------------------------------------------------------

    def _keys(self, names: list[str]) -> list[str]:
        return [self._prefix + name for name in names]

    def _is_registered(self, address: int, size: int) -> bool:
        """Mooncake may take other memory for a failure of the network, or not look."""
        return any(base <= address and address + size <= base + length for base, length in self._regions)

    def _answer(self, code: int) -> Answer:
        """Of what is below 0. Everything that is not known to be otherwise may be better next time."""
        self._doubtful = self._doubtful or code in _RPC_FAILURES
        return _ANSWERS.get(code, "broken")

    def _sizes(self, store: Any, keys: list[str]) -> dict[str, int]:
        """How many bytes, or a code below 0, of each key."""
        described = store.batch_get_replica_desc(keys) if keys else {}
        out = {}
        for key in keys:
            memory = [one for one in described.get(key, ()) if one.is_memory_replica()]
            if memory:
                out[key] = memory[0].get_memory_descriptor().buffer_descriptor.size
            else:  # on a node's disk, or gone
                out[key] = _RPC_FAILURES[0] if self._doubtful else store.get_size(key)
                if out[key] < 0:
                    self._answer(out[key])
        return out

    def _read_parts(
        self,
        store: Any,
        keys: list[str],
        addresses: list[int],
        sizes: list[int],
        ranges: list[list[tuple[int, int]]],
        parts: list[int],
        out: list[tuple[Answer, int]],
    ) -> dict[str, int]:
        """Mooncake does not tell how long an object is of which it reads a part: that is one more question."""
        wanted = [keys[i] for i in parts]
        there = dict(zip(wanted, store.batch_is_exist(wanted), strict=True))
        lengths = self._sizes(store, [key for key, code in there.items() if code == 1])
        known = []
        for i in parts:
            length = lengths.get(keys[i], there[keys[i]] or -704)
            if length == sizes[i]:
                known.append(i)
            else:
                out[i] = ("ok", length) if length >= 0 else (self._answer(length), -1)
        if not known:
            return lengths
        begins = [[[begin for begin, _ in ranges[i]]] for i in known]
        counts = [[[end - begin for begin, end in ranges[i]]] for i in known]
        names = [[keys[i]] for i in known]
        for i, (codes,) in zip(
            known, store.get_into_ranges([addresses[i] for i in known], names, begins, begins, counts), strict=True
        ):
            bad = [code for code in codes if code < 0]
            out[i] = (self._answer(bad[0]), -1) if bad else ("ok", sizes[i])
        return lengths

    @contextlib.contextmanager
    def _client(self, deadline: float) -> Iterator[Any]:
        """Mooncake's client, connected."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._changing, max(deadline - time.monotonic(), 0)):
                raise TimeoutError("another thread connects")
            doubtful = self._doubtful
            self._changing = self._store is None
            self._calls += not self._changing
            store = self._store
        if doubtful and store is not None:
            try:
                self._knock(deadline)
            except BaseException:
                self._leave()
                raise
        if store is None:
            try:
                store = self._connect(deadline)
            finally:
                with self._changed:
                    self._changing = False
                    self._calls += self._store is not None
                    self._changed.notify_all()
        try:
            yield store
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def _knock(self, deadline: float) -> str:
        """Whether the master lives; this machine's address on the way to it.

        Its protocol begins otherwise than with zeros: a master that lives ends such a connection at once. Mooncake's
        client tries for seconds where nobody is there, and its setup() keeps the interpreter's lock meanwhile.
        """
        seconds = max(min(deadline - time.monotonic(), self._timeout), 0.001)
        with socket.create_connection(self._master, timeout=seconds) as probe:
            probe.settimeout(seconds)
            with contextlib.suppress(ConnectionError):
                probe.sendall(bytes(64))
                probe.recv(1)
            self._doubtful = False
            return str(probe.getsockname()[0])

    def _connect(self, deadline: float) -> Any:
        """Makes the client, for whoever has `_changing`."""
        local = self._knock(deadline)
        store = self._module.MooncakeDistributedStore()
        protocol, devices = self._options["protocol"], self._options["devices"]
        arguments = (self._options["metadata"], self._segment, self._buffer, protocol, devices, self._address)
        code = store.setup(self._options["local"] or local, *arguments)
        if code != 0:
            raise ConnectionError(f"Mooncake's setup() says {code}")
        with self._changed:
            for address, size in self._regions:
                _register(store, address, size)
            self._store = store
        return store

    def _replace(self) -> None:
        """A transfer that Mooncake has given up may still touch memory: not after the end of its client."""
        with self._changed:
            if self._changing:
                self._changed.wait_for(lambda: not self._changing)
                return
            self._changing = True
            self._changed.wait_for(lambda: self._calls == 0)
            store, self._store = self._store, None
        try:
            if store is not None:
                store.close()
        finally:
            with self._changed:
                self._changing = False
                self._changed.notify_all()

    # At the end: what comes behind it in a class does not see the other `list`.
    def list(self, folder: str, deadline: float) -> Iterable[tuple[str, int, int]] | None:
        """From the master's administration, which tells all names at once; the client cannot list."""
        if not self._options["admin"]:
            return None
        seconds = max(deadline - time.monotonic(), 0.001)
        with urllib.request.urlopen(f"http://{self._options['admin']}/get_all_keys", timeout=seconds) as answer:
            keys = answer.read().decode().split("\n")
        return sorted(set(_below(self._prefix + folder, len(self._prefix), keys)))


def _register(store: Any, address: int, size: int) -> None:
    code = store.register_buffer(address, size)
    if code != 0:
        raise ConnectionError(f"Mooncake's register_buffer() says {code}")


def _rounds(keys: list[str], chosen: list[int]) -> Iterator[list[int]]:
    """In one call Mooncake fills memory for a name once only, however often it is asked for."""
    while chosen:
        first = list({keys[i]: i for i in reversed(chosen)}.values())
        yield first
        chosen = sorted(set(chosen) - set(first))


def _client(timeout: float) -> Any:
    """Mooncake's extension module. What it takes from the environment only it reads now, or with each connection."""
    milliseconds = str(int(timeout * 1000))
    seconds = str(max(int(timeout), 1))
    for name, value in (
        ("MC_LOG_LEVEL", "ERROR"),  # it writes much to stderr
        ("MC_RPC_TIMEOUT_MS", milliseconds),
        ("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds),
        ("MC_TCP_STATUS_TIMEOUT_SEC", seconds),
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", seconds),
        ("MC_STORE_CLIENT_SETUP_RETRIES", "1"),
    ):
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreError(
            f"URL of Mooncake: its client is not there ({error}); pip install mooncake-transfer-engine-non-cuda"
        ) from None


def _number(options: dict[str, str], name: str, least: int, most: int) -> float:
    """A number, with K, M, G or T for bytes."""
    text = options[name]
    unit = {"K": 10, "M": 20, "G": 30, "T": 40}.get(text[-1:].upper(), 0)
    try:
        number = float(text[:-1] if unit else text) * (1 << unit)
    except ValueError:
        raise ArgumentError(f"URL of Mooncake: {name} is {text}, expected a number") from None
    if not least <= number <= most:
        raise ArgumentError(f"URL of Mooncake: {name} is {text}, of {least} to {most}")
    return number


def _below(folder: str, skip: int, keys: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    for key in keys:
        if key.startswith(folder) and key != folder:
            name, slash, _ = key[len(folder) :].partition("/")
            yield (folder + name + slash)[skip:], -1, 0
