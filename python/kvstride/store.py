# SPDX-License-Identifier: Apache-2.0
"""The store: verified chunks of KV blocks in host memory and in a directory (docs/store.md)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import numpy as np

from . import _core
from ._args import to_flag, to_int, to_numbers, to_size
from ._ids import to_vector
from ._stream import put as put_on
from ._tensor import is_torch, refuse_masked
from .admission import Admission, to_core, to_tenant
from .blocks import core_of
from .cache import Cache
from .errors import ArgumentError, DTypeError, Error, StoreError
from .identity import Key, Namespace
from .remote import Engine, open_engine

#: A number of bytes: a whole number, of type float too (8e9).
Bytes = int | float
#: Of a key.
_MOST_KEY_BYTES: int = _core.max_key_bytes
#: (first, second, count): of put the cache's first head and the stored one, of get the stored and the cache's.
Heads = tuple[int, int, int]


class _OfProcess:
    """What has threads and locks: in a forked child nobody holds up the one and gives back the other."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def _check_process(self, verb: str) -> None:
        if os.getpid() != self._pid:
            kind = type(self).__name__
            raise StoreError(f"{verb}: the {kind} belongs to process {self._pid}; open a store after the fork")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: it belongs to this process and cannot be pickled or copied")


class Tier(_OfProcess):
    """A place for chunks. May be given to several stores, of other namespaces too, which then share its room.

    A context manager, which closes it.
    """

    _core: _core.Tier

    def metrics(self) -> dict[str, Any]:
        """Capacity, use, counters and latencies; see docs/store.md. Raises StoreError where the tier is closed."""
        self._check_process("metrics")
        return self._core.metrics()

    def close(self) -> None:
        """Let go of it: no more stores can be made with it. More than once does nothing.

        Stores that have it go on; the tier's memory and threads end with the last of them, or here. That may take until
        a disk has answered.
        """
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HostTier(Tier):
    """Host memory of exactly `num_bytes`, 4 KiB of header for each chunk included.

    `eviction` is 's3fifo' or 'lru'. With `shared_name` the memory is the file /dev/shm/kvstride-<name>, which other
    processes of the user can map. It is not for sharing chunks: a DirectoryTier is. The file goes when the tier ends
    or, where its process was killed, when the next tier with a `shared_name` is made. `admission` says what it takes
    and for how long. Raises StoreError where the memory cannot be had, or a living process has the name.
    """

    def __init__(
        self,
        num_bytes: Bytes,
        *,
        eviction: str = "s3fifo",
        shared_name: str | None = None,
        admission: Admission | None = None,
    ) -> None:
        super().__init__()
        size = _bytes_of(num_bytes, "HostTier: num_bytes")
        name = "" if shared_name is None else _text(shared_name, "HostTier: shared_name")
        policy = _choice(eviction, ("s3fifo", "lru"), "HostTier: eviction")
        self._core = _core.host_tier(size, policy, name, to_core(admission, "HostTier: admission"))


class DirectoryTier(Tier):
    """Files in a directory, at most `max_bytes` of them, also with several processes and over restarts.

    `keep_free` bytes stay free on the file system (1 GiB, at most 5 % of it). `sync`: fdatasync before a file gets its
    name; without it a power cut may damage files, which reading finds out. `group`: files 0660 and directories 2770,
    other owners accepted, for volumes whose user ids vary. `engine` is 'auto', 'io_uring' or 'blocking'. `num_threads`
    do I/O (0: 2 with io_uring, 8 without); `staging_bytes` are memory for chunks on their way (256 MiB);
    `queue_chunks` may wait for the disk, more are refused. `lookup_timeout` (seconds) bounds what a lookup waits for
    the file system's word on unknown keys. `prepare`: take the memory for I/O at once; otherwise the first request
    does, and waits for it some tenths of a second. `admission` says what it takes and for how long; a file's age goes
    by its time of change. Raises StoreError where the directory cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: Bytes,
        *,
        keep_free: Bytes | None = None,
        eviction: str = "s3fifo",
        sync: bool = False,
        group: bool = False,
        engine: str = "auto",
        num_threads: int = 0,
        staging_bytes: Bytes = 0,
        queue_chunks: int = 4096,
        lookup_timeout: float = 0.05,
        prepare: bool = False,
        admission: Admission | None = None,
    ) -> None:
        super().__init__()
        where = os.fspath(path)
        self._core = _core.directory_tier(
            _text(where, "DirectoryTier: path"),
            _bytes_of(max_bytes, "DirectoryTier: max_bytes"),
            None if keep_free is None else _bytes_of(keep_free, "DirectoryTier: keep_free"),
            _choice(eviction, ("s3fifo", "lru"), "DirectoryTier: eviction"),
            to_flag(sync, "DirectoryTier: sync"),
            to_flag(group, "DirectoryTier: group"),
            _choice(engine, ("auto", "io_uring", "blocking"), "DirectoryTier: engine"),
            _small(num_threads, "DirectoryTier: num_threads", 0, 256),
            _bytes_of(staging_bytes, "DirectoryTier: staging_bytes"),
            _small(queue_chunks, "DirectoryTier: queue_chunks", 1, 1 << 24),
            _seconds(lookup_timeout, "DirectoryTier: lookup_timeout"),
            to_flag(prepare, "DirectoryTier: prepare"),
            to_core(admission, "DirectoryTier: admission"),
        )


class RemoteTier(Tier):
    """Chunks in an engine that others run, which several machines share (docs/remote.md).

    `url` names it: `s3://bucket/prefix?endpoint=…`, `redis://host:port/db`, `mooncake://master:port`; or it is a
    `kvstride.remote.Engine`, which is then this tier's alone. It connects with the first request; whatever the engine
    does wrong is a miss, and one that fails again and again is left alone until it answers. `timeout` (seconds) bounds
    one attempt, `retries` are made after one that failed, all within the request's deadline.
    `lookup_timeout` bounds what a lookup waits for the engine's word on unknown keys; what is known to be there is
    believed for `known_for` seconds, of `known_chunks` at most. `staging_bytes` are memory for chunks on their way
    (256 MiB), `queue_bytes` bounds images of writes that wait or are under way (half of that), which keep memory of
    the tier above; `queue_chunks` may wait; more are refused. `num_threads` call the engine (0: as it likes).
    `admission` says what it takes; `ttl` and tenants are the engine's own and refused. Raises ArgumentError for a URL
    or an option that cannot be, StoreError where the engine's client is not there.
    """

    def __init__(
        self,
        url: str | Engine,
        *,
        staging_bytes: Bytes = 0,
        queue_chunks: int = 4096,
        queue_bytes: Bytes = 0,
        num_threads: int = 0,
        known_chunks: int = 1_000_000,
        known_for: float = 60.0,
        timeout: float = 5.0,
        retries: int = 2,
        lookup_timeout: float = 1.0,
        admission: Admission | None = None,
    ) -> None:
        super().__init__()
        self._core = _core.remote_tier(
            open_engine(_text(url, "RemoteTier: url") if isinstance(url, str) else url),
            _bytes_of(staging_bytes, "RemoteTier: staging_bytes"),
            _small(queue_chunks, "RemoteTier: queue_chunks", 1, 1 << 24),
            _bytes_of(queue_bytes, "RemoteTier: queue_bytes"),
            _small(num_threads, "RemoteTier: num_threads", 0, 256),
            _small(known_chunks, "RemoteTier: known_chunks", 1, 1 << 31),
            _seconds(known_for, "RemoteTier: known_for"),
            _seconds(timeout, "RemoteTier: timeout"),
            _small(retries, "RemoteTier: retries", 0, 100),
            _seconds(lookup_timeout, "RemoteTier: lookup_timeout"),
            to_core(admission, "RemoteTier: admission"),
        )


class Job(_OfProcess):
    """A request under way. The store keeps the memory that it uses until it is done."""

    _core: _core.Job

    def __init__(self, keeps: tuple[Any, ...]) -> None:
        super().__init__()
        self._keeps = keeps
        #: What `after` raised, if it did; the chunks are then 'refused'.
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether every chunk has its outcome."""
        if self._core.done:
            self._keeps = ()  # caches, buffers and the store
        return self._core.done

    @property
    def ok(self) -> bool:
        """Whether every chunk has its outcome, and all are 'ok'."""
        return self._core.ok

    def wait(self, timeout: float | None = None) -> list[str]:
        """One outcome for each key: 'ok', 'miss', 'corrupt', 'io_error', 'timeout' or 'refused'.

        Never much later than the request's deadline. Raises TimeoutError where `timeout` (seconds) is over before; the
        request goes on.
        """
        self._check_process("wait")
        if not _in_steps(self._core.wait_for, None if timeout is None else _seconds(timeout, "wait: timeout")):
            raise TimeoutError(f"wait: not done after {timeout} s")
        self._keeps = ()
        return self._core.wait()

    def poll(self) -> list[str | None]:
        """Outcomes so far, None for chunks under way."""
        return self._core.poll()

    def cancel(self) -> None:
        """What has not started is 'refused'."""
        self._core.cancel()

    def __repr__(self) -> str:
        return f"Job({self.poll()})"


class Pins:
    """Keeps chunks from being evicted until `release`, or the end of a with block."""

    def __init__(self, core: _core.Pins) -> None:
        self._core: _core.Pins | None = core
        #: Whether each key was there.
        self.found: list[bool] = core.found

    def release(self) -> None:
        """Lets them go; more than once does nothing."""
        self._core = None

    def __enter__(self) -> Pins:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Store(_OfProcess):
    """Chunks of one namespace in tiers, fastest first. A context manager. Thread-safe.

    Every byte is verified before it reaches a cache. `num_threads` convert and check (0: the cores, at most 4);
    `queue_chunks` may wait, more are refused at once; `deadline` (seconds) bounds every request that gives none.
    `write_behind`: a put is done when the first tier has the chunk. `promote`: whole chunks read from a lower tier go
    to the upper ones. `prefetch`: lookups bring up what they find below the first tier, as `prefetch()` does, behind
    the caller's back.
    """

    def __init__(
        self,
        tiers: Tier | Sequence[Tier],
        *,
        namespace: Namespace,
        num_threads: int = 0,
        queue_chunks: int = 4096,
        deadline: float = 10.0,
        write_behind: bool = False,
        promote: bool = True,
        prefetch: bool = False,
    ) -> None:
        super().__init__()
        self._live: dict[Job, None] = {}  # the eldest first
        # May be asked for again by a signal's handler.
        self._lock = threading.RLock()
        self._closing = threading.RLock()
        if isinstance(tiers, Tier):
            tiers = [tiers]
        if not isinstance(tiers, (list, tuple)) or not all(isinstance(tier, Tier) for tier in tiers):
            raise ArgumentError(f"Store: tiers is {tiers!r:.100}, expected tiers such as HostTier(num_bytes)")
        if not isinstance(namespace, Namespace):
            raise ArgumentError(f"Store: namespace is {type(namespace).__name__}, expected a Namespace")
        self.namespace = namespace
        for tier in tiers:
            tier._check_process("Store")
        self.tiers = tuple(tiers)
        self._core = _core.Store(
            [tier._core for tier in tiers],
            namespace._core,
            _small(num_threads, "Store: num_threads", 0, 256),
            _small(queue_chunks, "Store: queue_chunks", 1, 1 << 24),
            _seconds(deadline, "Store: deadline"),
            to_flag(write_behind, "Store: write_behind"),
            to_flag(promote, "Store: promote"),
            to_flag(prefetch, "Store: prefetch"),
        )

    def put(
        self,
        keys: Sequence[Key | bytes],
        cache: Cache,
        blocks: Any,
        *,
        heads: Heads | None = None,
        after: Any = None,
        deadline: float | None = None,
        stream: Any = None,
        tenant: str | None = None,
    ) -> Job:
        """Keep blocks of `cache`, of any layout, under `keys`.

        `blocks` has block_size / cache.block_size neighbouring ids for each key. `heads` is (cache first, stored first,
        count) where the cache has some of the namespace's heads. `after` is an event (`threading.Event`, `torch.Event`,
        a future, a function that answers True): nothing is read before it; None means that the bytes are ready. Events
        are first asked here; functions only by a thread of ours, one after the other, so that a slow one keeps other
        functions waiting and not the caller. The blocks must not change until the job is done; ids are copied. A cache
        on a CUDA device is read after what is on `stream` now, as the verbs have it (torch's current one by default).
        `tenant` is whose quota pays in tiers that have quotas: a cache salt or, better, a digest of it.
        Raises for what is wrong whatever the store holds (LayoutError, DTypeError, BlockIndexError, ArgumentError,
        DeviceError); everything else is an outcome.
        """
        return self._transfer("put", keys, cache, blocks, heads, after, deadline, stream, tenant)

    def get(
        self,
        keys: Sequence[Key | bytes],
        cache: Cache,
        blocks: Any,
        *,
        heads: Heads | None = None,
        after: Any = None,
        deadline: float | None = None,
        stream: Any = None,
        tenant: str | None = None,
    ) -> Job:
        """Fill blocks of `cache` from `keys`; a chunk's blocks are written whole, or not at all.

        `heads` is (stored first, cache first, count); the rest is as with `put`. A chunk that several tensor-parallel
        writers wrote is put together from their files. A cache on a CUDA device gets them after what is on `stream`
        now; work that reads them is put on a stream when the job is done. Only verified bytes are sent there; after an
        'io_error' of the device the blocks may hold anything. `tenant` pays for what is promoted into upper tiers.
        """
        if heads is not None:
            stored, first, count = to_numbers(heads, ("stored first", "cache first", "count"), "get: heads")
            heads = (first, stored, count)
        return self._transfer("get", keys, cache, blocks, heads, after, deadline, stream, tenant)

    def _transfer(
        self,
        verb: str,
        keys: Any,
        cache: Any,
        blocks: Any,
        heads: Any,
        after: Any,
        deadline: float | None,
        stream: Any,
        tenant: Any,
    ) -> Job:
        names = to_keys(keys, verb)
        core = core_of(cache, f"{verb}: cache")
        ids = to_vector(blocks, f"{verb}: blocks")
        span = to_numbers(heads, ("cache first", "stored first", "count"), f"{verb}: heads")
        call = self._core.put if verb == "put" else self._core.get
        on_stream = functools.partial(put_on, verb, stream, (cache,), ids, call)
        return self._request(verb, on_stream, (names, core, ids, span), (cache, self), after, deadline, tenant)

    def put_bytes(
        self,
        keys: Sequence[Key | bytes],
        buffers: Sequence[Any],
        *,
        after: Any = None,
        deadline: float | None = None,
        tenant: str | None = None,
    ) -> Job:
        """Keep raw bytes, one contiguous buffer for each key; the namespace must have `raw`. `tenant` as with `put`."""
        return self._bytes("put_bytes", keys, buffers, after, deadline, tenant)

    def get_bytes(
        self,
        keys: Sequence[Key | bytes],
        buffers: Sequence[Any],
        *,
        after: Any = None,
        deadline: float | None = None,
        tenant: str | None = None,
    ) -> Job:
        """Fill writable buffers; a chunk of another size is a 'miss'. `tenant` as with `get`."""
        return self._bytes("get_bytes", keys, buffers, after, deadline, tenant)

    def _bytes(self, verb: str, keys: Any, buffers: Any, after: Any, deadline: float | None, tenant: Any) -> Job:
        names = to_keys(keys, verb)
        if not isinstance(buffers, (list, tuple)):
            raise ArgumentError(f"{verb}: buffers is {type(buffers).__name__}, expected a list of buffers")
        views = [_buffer(one, f"{verb}: buffers[{i}]", verb == "get_bytes") for i, one in enumerate(buffers)]
        spans = [(address, size) for address, size, _ in views]
        if verb == "get_bytes":
            _check_apart(spans)
        call = self._core.put_bytes if verb == "put_bytes" else self._core.get_bytes
        return self._request(verb, call, (names, spans), (views, buffers, self), after, deadline, tenant)

    def _request(
        self,
        verb: str,
        call: Any,
        args: tuple[Any, ...],
        keeps: tuple[Any, ...],
        after: Any,
        deadline: float | None,
        tenant: Any,
    ) -> Job:
        """Everything is checked before the library hears of it: what raises has not been asked for."""
        self._check_process(verb)
        time_limit = None if deadline is None else _seconds(deadline, f"{verb}: deadline")
        owner = to_tenant(tenant, f"{verb}: tenant")
        ready = None if after is None else _question(after, verb)
        gate = None
        if ready is not None:
            gate = _core.Gate()
            _WATCHER.start()
        job = Job(keeps)
        # Kept before it begins: Ctrl-C is heard right after the call, when threads may be using the memory.
        with self._lock:
            self._drop_done(8)
            self._live[job] = None
        try:
            job._core = call(*args, gate, time_limit, owner)
        except Error:
            with self._lock:
                self._live.pop(job, None)
            raise
        if gate is not None:
            # A function may take its time: the caller shall not wait for it.
            _WATCHER.add(gate, ready, job, ask=ready is not after)
        return job

    def lookup(
        self, keys: Sequence[Key | bytes], *, heads: tuple[int, int] | None = None, ask: bool = True
    ) -> list[bool]:
        """Whether all heads, or `heads` (first, count), of each chunk are held. Nothing is read. With `ask=False` only
        what this process knows: the file system is not asked about other processes' chunks, and nothing waits."""
        return self._lookup("lookup", self._core.lookup, keys, heads, ask)

    def holds(self, key: Key | bytes) -> bool:
        """Whether this process knows all heads of one chunk: `lookup([key], ask=False)`, at a part of its cost, for
        schedulers that ask for thousands one by one."""
        return self._core.holds(key if type(key) is bytes else to_keys([key], "holds")[0])

    def lookup_prefix(
        self, keys: Sequence[Key | bytes], *, heads: tuple[int, int] | None = None, ask: bool = True
    ) -> int:
        """How many chunks from the first on are held without a gap. `ask` as for `lookup`."""
        return self._lookup("lookup_prefix", self._core.lookup_prefix, keys, heads, ask)

    def _lookup(self, verb: str, call: Any, keys: Any, heads: Any, ask: Any) -> Any:
        self._check_process(verb)
        numbers = to_numbers(heads, ("first", "count"), f"{verb}: heads")
        return call(to_keys(keys, verb), numbers, to_flag(ask, f"{verb}: ask"))

    def prefetch(
        self,
        keys: Sequence[Key | bytes],
        *,
        heads: tuple[int, int] | None = None,
        deadline: float | None = None,
        tenant: str | None = None,
    ) -> Job:
        """Bring chunks that only lower tiers hold into the upper ones, verified, so that a get finds them there.

        'ok': the first tier had it, or an upper tier was given it; 'refused': none of them admits it. A get of a chunk
        that is on its way waits for it, and reads by itself where it does not come. `tenant` as with `get`.
        """
        names = to_keys(keys, "prefetch")
        numbers = to_numbers(heads, ("first", "count"), "prefetch: heads")
        return self._request("prefetch", self._core.prefetch, (names, numbers), (self,), None, deadline, tenant)

    def pin(self, keys: Sequence[Key | bytes]) -> Pins:
        """Keep what is there from being evicted, until the result is released."""
        self._check_process("pin")
        return Pins(self._core.pin(to_keys(keys, "pin")))

    def remove(self, keys: Sequence[Key | bytes]) -> int:
        """Forget chunks in all tiers. Returns how many keys were there."""
        self._check_process("remove")
        return self._core.remove(to_keys(keys, "remove"))

    def take_gone(self) -> list[bytes]:
        """Keys of chunks of which a directory has lost a piece (evicted, removed, damaged, vanished) since the last
        call; the first call begins. For those who tell others what is where; of more than 65536 the rest is not told.
        """
        self._check_process("take_gone")
        return self._core.take_gone()

    def metrics(self) -> dict[str, Any]:
        """Counters, latencies and tiers; see docs/store.md, and `kvstride.prometheus` for a collector."""
        self._check_process("metrics")
        return self._core.metrics()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything that was put is in all tiers; whether it is."""
        self._check_process("flush")
        return _in_steps(self._core.flush, _seconds(timeout, "flush: timeout"))

    def close(self) -> None:
        """Refuse what has not started, wait for the rest (at most until the deadlines), and refuse later requests.

        Then `lookup`, `lookup_prefix`, `pin`, `remove` and `take_gone` raise StoreError; `metrics` and `flush` answer.
        Whoever closes it while another thread does waits, too. Does nothing in a forked child.
        """
        if not hasattr(self, "_core") or os.getpid() != self._pid:
            return
        with self._closing:
            self._core.close()
        with self._lock:
            self._drop_done()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _drop_done(self, most: int | None = None) -> None:
        """Lets go of requests that are done, of the eldest `most`. Threads may still use the memory of the others."""
        for job in list(itertools.islice(self._live, most)):
            if hasattr(job, "_core") and job.done:
                self._live.pop(job, None)


def _in_steps(wait: Callable[[float], bool], timeout: float | None) -> bool:
    """What `wait` says at last; in steps, so that Ctrl-C is heard."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = 0.2 if end is None else end - time.monotonic()
        if wait(max(0.0, min(left, 0.2))):
            return True
        if left <= 0.2 and end is not None:
            return False


class _Watcher:
    """One thread that asks the events of `after`, so that the library's threads never need the interpreter."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """As new: a forked child has no such thread, and somebody may have held the lock at the fork."""
        self._changed = threading.Condition()
        self._waiting: list[tuple[_core.Gate, Any, Job]] = []
        self._pid = 0

    def start(self) -> None:
        """See to it that there is a thread. Raises StoreError where there can be none."""
        with self._changed:
            if self._pid == os.getpid():
                return
            self._waiting = []  # of a fork that Python did not see
            try:
                threading.Thread(target=self._run, name="kvstride-after", daemon=True).start()
            except RuntimeError as error:
                raise StoreError(f"after: no thread can be made: {error}") from None
            self._pid = os.getpid()

    def add(self, gate: _core.Gate, ready: Any, job: Job, *, ask: bool) -> None:
        """Open the gate when `ready` says so. `ask`: the first time here and now, else by the thread only."""
        if ask and self._ask(gate, ready, job):
            return
        with self._changed:
            self._waiting.append((gate, ready, job))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                waiting, self._waiting = self._waiting, []
            waiting = [one for one in waiting if not self._ask(*one)]
            with self._changed:
                self._waiting += waiting
            time.sleep(0.0005)

    @staticmethod
    def _ask(gate: _core.Gate, ready: Any, job: Job) -> bool:
        """Whether the job needs no more attention."""
        try:
            if ready():
                gate.open()
                return True
        except BaseException as error:
            job.error = error
            job.cancel()
            return True
        return job.done


_WATCHER = _Watcher()


def _of_future(done: Callable[[], bool], result: Callable[[], Any]) -> Callable[[], bool]:
    """A future that failed or was cancelled is done, too, but its bytes are not what was asked: its result raises."""

    def ready() -> bool:
        if not done():
            return False
        result()
        return True

    return ready


def _question(event: Any, verb: str) -> Any:
    """A function that answers whether an event has happened."""
    for name in ("is_set", "query", "done"):
        method = getattr(event, name, None)
        if callable(method):
            result = getattr(event, "result", None)
            return _of_future(method, result) if name == "done" and callable(result) else method
    if callable(event):
        return event
    kind = type(event).__name__
    raise ArgumentError(f"{verb}: after: {kind} has none of is_set(), query() and done(), and is no function")


def to_keys(keys: Any, verb: str) -> list[bytes]:
    """The bytes of keys."""
    if isinstance(keys, (Key, bytes, str)) or not isinstance(keys, Sequence):
        raise ArgumentError(f"{verb}: keys is {type(keys).__name__}, expected a list of Key or bytes")
    # Bytes of a right length, as engines have them, are taken as they are: schedulers ask for thousands.
    return [
        key if type(key) is bytes and 0 < len(key) <= _MOST_KEY_BYTES else _key(key, i, verb)
        for i, key in enumerate(keys)
    ]


def _key(key: Any, at: int, verb: str) -> bytes:
    try:
        return key._bytes if isinstance(key, Key) else Key(key)._bytes
    except (ArgumentError, DTypeError) as error:
        raise type(error)(f"{verb}: keys[{at}]: {error}") from None


def _buffer(buffer: Any, what: str, writable: bool) -> tuple[int, int, Any]:
    """Address, bytes and what keeps them, of contiguous memory."""
    if is_torch(buffer):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ArgumentError(f"{what}: a tensor on {buffer.device} or not contiguous")
        return buffer.data_ptr(), buffer.numel() * buffer.element_size(), buffer
    refuse_masked(buffer, what)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise ArgumentError(f"{what}: {type(buffer).__name__} is no buffer") from None
    if not view.c_contiguous:
        raise ArgumentError(f"{what}: not contiguous")
    if writable and view.readonly:
        raise ArgumentError(f"{what}: read-only")
    if view.nbytes == 0:
        raise ArgumentError(f"{what}: empty")
    flat = np.frombuffer(view, dtype=np.uint8)
    return flat.__array_interface__["data"][0], view.nbytes, (view, flat)


def _check_apart(spans: list[tuple[int, int]]) -> None:
    order = sorted(spans)
    for (first, size), (second, _) in itertools.pairwise(order):
        if first + size > second:
            raise ArgumentError("get_bytes: two buffers share memory")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"{what} is {type(value).__name__}, expected a str")
    with contextlib.suppress(UnicodeEncodeError):
        value.encode()
        return value
    raise ArgumentError(f"{what} is not UTF-8")


def _choice(value: Any, choices: tuple[str, ...], what: str) -> str:
    if value not in choices:
        raise ArgumentError(f"{what} is {value!r}, expected {' or '.join(repr(one) for one in choices)}")
    return str(value)


def _bytes_of(value: Any, what: str) -> int:
    """A number of bytes; 8e9 is one, too."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    size = to_size(value, what)
    if size < 0:
        raise ArgumentError(f"{what} is {size}, below 0")
    return size


def _small(value: Any, what: str, least: int, most: int) -> int:
    number = to_int(value, what)
    if not least <= number <= most:
        raise ArgumentError(f"{what} is {number}, must be from {least} to {most}")
    return number


def _seconds(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(f"{what} is {value!r}, expected seconds")
    return float(value)
