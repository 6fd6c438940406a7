# SPDX-License-Identifier: Apache-2.0
import gc
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import typing
import weakref
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import kvstride as kv

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HEADS, HEAD_SIZE, BLOCK = 2, 8, 32, 16


def namespace(**changes):
    fields = {
        "model": "test/model",
        "revision": "0123abcd",
        "planes": {"key": "bf16", "value": "bf16"},
        "num_layers": LAYERS,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "block_size": BLOCK,
    }
    return kv.Namespace(**(fields | changes))


def cache(order="KV B N H D", heads=HEADS, block_size=BLOCK, blocks=16, seed=1, **changes):
    sizes = {"num_layers": LAYERS, "num_blocks": blocks, "block_size": block_size, "num_kv_heads": heads}
    layout = kv.layout(order, kv.Geometry(**(sizes | {"head_size": HEAD_SIZE} | changes)))
    random = np.random.default_rng(seed)
    parts = layout.num_parts
    tensors = [
        random.integers(0, 256, layout.num_bytes, dtype=np.uint8)
        for _ in range(1 if "L" in order.split() else LAYERS)
        for _ in range(parts)
    ]
    return kv.Cache(tensors, layout)


def keys(count, first=0):
    return [kv.Key.chain(None, [i]) for i in range(first, first + count)]


def planes(a_cache, layer):
    """[block, token, head, dim] of keys and values."""
    return [np.ascontiguousarray(a_cache.key(layer)), np.ascontiguousarray(a_cache.value(layer))]


@pytest.fixture(params=["host", "directory", "both"])
def tiers(request, tmp_path):
    out = []
    if request.param in ("host", "both"):
        out.append(kv.HostTier(8 << 20))
    if request.param in ("directory", "both"):
        out.append(kv.DirectoryTier(tmp_path / "store", 16 << 20, keep_free=0))
    return out


def test_c16_a_reader_with_another_layout_gets_converted_values(tiers):
    src, dst = cache("KV B N H D"), cache("B H N KV D", seed=2)
    before = [np.array(plane) for layer in range(LAYERS) for plane in planes(dst, layer)]
    with kv.Store(tiers, namespace=namespace()) as store:
        assert store.put(keys(3), src, [1, 4, 7]).wait() == ["ok"] * 3
        assert store.lookup(keys(4)) == [True, True, True, False]
        assert store.lookup_prefix(keys(4)) == 3
        assert store.get(keys(3), dst, [0, 2, 5]).wait() == ["ok"] * 3
        assert store.get(keys(1, 9), dst, [15]).wait() == ["miss"]
    for layer in range(LAYERS):
        for i, (want, got) in enumerate(zip(planes(src, layer), planes(dst, layer), strict=True)):
            assert (got[[0, 2, 5]] == want[[1, 4, 7]]).all()
            rest = [b for b in range(16) if b not in (0, 2, 5)]
            assert (got[rest] == before[2 * layer + i][rest]).all()


def test_two_readers_of_four_heads_read_what_a_writer_of_eight_wrote(tmp_path):
    src = cache("KV B N H D")
    with kv.Store(kv.DirectoryTier(tmp_path, 16 << 20, keep_free=0), namespace=namespace()) as store:
        assert store.put(keys(4), src, range(4)).wait() == ["ok"] * 4
    for rank in range(2):
        dst = cache("B H N KV D", heads=4, seed=3)
        with kv.Store(kv.DirectoryTier(tmp_path, 16 << 20, keep_free=0), namespace=namespace()) as store:
            assert store.lookup_prefix(keys(4), heads=(4 * rank, 4)) == 4
            assert store.get(keys(4), dst, range(8, 12), heads=(4 * rank, 0, 4)).wait() == ["ok"] * 4
        for layer in range(LAYERS):
            for want, got in zip(planes(src, layer), planes(dst, layer), strict=True):
                assert (got[8:12] == want[:4, :, 4 * rank : 4 * rank + 4]).all()


def test_put_takes_cache_heads_first_and_get_stored_heads_first():
    src, dst = cache(heads=6), cache(heads=3, seed=2)
    with kv.Store(kv.HostTier(4 << 20), namespace=namespace()) as store:
        assert store.put(keys(1), src, [0], heads=(1, 5, 3)).wait() == ["ok"]
        assert store.get(keys(1), dst, [0], heads=(6, 1, 2)).wait() == ["ok"]
        assert store.get(keys(1), dst, [1], heads=(4, 0, 2)).wait() == ["miss"]
    assert (dst.key(0)[0, :, 1:3] == src.key(0)[0, :, 2:4]).all()


def test_c91_ids_are_copied_when_they_are_given(tiers):
    src = cache()
    event = threading.Event()
    blocks = np.array([1, 2])
    with kv.Store(tiers, namespace=namespace()) as store:
        job = store.put(keys(2), src, blocks, after=event)
        blocks[:] = [5, 6]
        assert not job.done
        event.set()
        assert job.wait() == ["ok", "ok"]
        dst = cache(seed=2)
        store.get(keys(2), dst, [0, 1]).wait()
    assert (dst.key(0)[:2] == src.key(0)[1:3]).all()


@pytest.mark.parametrize("verb", ["put", "get"])
def test_c89_c90_nothing_moves_before_the_event(tiers, verb):
    src, dst = cache(), cache(seed=2)
    with kv.Store(tiers, namespace=namespace()) as store:
        store.put(keys(1), src, [0]).wait()
        for kind in ("event", "function"):
            event = threading.Event()
            after = event if kind == "event" else event.is_set
            old = np.array(dst.key(0)[3])
            name = keys(1, 10 if kind == "event" else 11)
            job = store.get(keys(1), dst, [3], after=after) if verb == "get" else store.put(name, src, [3], after=after)
            time.sleep(0.02)
            assert not job.done
            if verb == "get":
                assert (dst.key(0)[3] == old).all()
                dst.key(0)[3] = 7  # the reader of before is still at it
            else:
                src.key(0)[3] = 9 if kind == "event" else 10  # the producer writes late
            event.set()
            assert job.wait() == ["ok"]
            if verb == "get":
                assert (dst.key(0)[3] == src.key(0)[0]).all()
            else:
                store.get(name, dst, [5]).wait()
                assert (dst.key(0)[5] == (9 if kind == "event" else 10)).all()


def test_an_event_that_raises_refuses_the_chunks():
    with kv.Store(kv.HostTier(1 << 20), namespace=namespace()) as store:
        job = store.put(keys(2), cache(), [0, 1], after=lambda: 1 / 0)
        assert job.wait() == ["refused", "refused"]
        assert isinstance(job.error, ZeroDivisionError)


@pytest.mark.parametrize("kind", ["function", "event", "future"])
def test_a_slow_function_does_not_hold_up_the_caller(kind):
    """Events answer at once, and are asked at once; what a function does nobody knows."""
    threads, wait = [], threading.Event()

    class Event:
        def is_set(self):
            threads.append(threading.current_thread())
            return True

    def slow():
        threads.append(threading.current_thread())
        return wait.wait(60)

    future = Future()
    future.set_result(None)
    after = {"function": slow, "event": Event(), "future": future}[kind]
    with kv.Store(kv.HostTier(1 << 20), namespace=namespace()) as store:
        job = store.put(keys(1), cache(), [0], after=after)
        assert not (kind == "function" and job.done)
        wait.set()
        assert job.wait() == ["ok"]
    asked_here = threading.current_thread() in threads
    assert asked_here == (kind == "event")


def test_a_number_of_bytes_may_be_a_float():
    """As type checkers see it, too."""
    for tier, name in (
        (kv.HostTier, "num_bytes"),
        (kv.DirectoryTier, "max_bytes"),
        (kv.DirectoryTier, "staging_bytes"),
    ):
        assert float in typing.get_args(typing.get_type_hints(tier.__init__)[name])
    assert kv.HostTier(1e6).metrics()["capacity_bytes"] == 999424  # the whole pages in it
    with pytest.raises(kv.DTypeError, match=r"num_bytes is 1000000\.5"):
        kv.HostTier(1000000.5)


def test_a_closed_store_does_nothing(tmp_path):
    store = kv.Store(kv.DirectoryTier(tmp_path, 16 << 20, keep_free=0), namespace=namespace())
    assert store.put(keys(1), cache(), [0]).wait() == ["ok"]
    store.close()
    for verb in ("lookup", "lookup_prefix", "pin", "remove"):
        with pytest.raises(kv.StoreError, match=f"^{verb}: the store is closed$"):
            getattr(store, verb)(keys(1))
    with pytest.raises(kv.StoreError, match=r"^take_gone: the store is closed$"):
        store.take_gone()
    assert store.put(keys(1, 1), cache(), [0]).wait() == ["refused"]
    assert store.get(keys(1), cache(), [0]).wait() == ["refused"]
    assert store.flush()
    assert store.metrics()["counters"]["get_refused"] == 1
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("path", ["x" * 256, "x/" * 2100], ids=["a name", "all of it"])
def test_a_path_that_is_too_long(tmp_path, path):
    with pytest.raises(
        kv.StoreError, match=r"^DirectoryTier: path '.{40}…' is too long: \d+ bytes of at most 4095, "
    ) as e:
        kv.DirectoryTier(tmp_path / "a" / path, 16 << 20)
    assert len(str(e.value)) < 200
    assert not list(tmp_path.iterdir())


def test_deadline_and_timeout():
    with kv.Store(kv.HostTier(1 << 20), namespace=namespace()) as store:
        job = store.put(keys(1), cache(), [0], after=lambda: False, deadline=0.1)
        with pytest.raises(TimeoutError):
            job.wait(0.01)
        assert job.wait() == ["timeout"]
        job = store.put(keys(1), cache(), [0], after=lambda: False)
        job.cancel()
        assert job.wait() == ["refused"]


def test_c92_c93_a_full_queue_refuses_at_once():
    gate = threading.Event()
    with kv.Store(kv.HostTier(4 << 20), namespace=namespace(), queue_chunks=4) as store:
        first = store.put(keys(4), cache(), range(4), after=gate)
        begin = time.perf_counter()
        outcomes = [store.put(keys(16, 4), cache(), range(16), after=gate) for _ in range(20)]
        assert time.perf_counter() - begin < 1
        gate.set()
        assert first.wait() == ["ok"] * 4
        assert any("refused" in job.wait() for job in outcomes)
        assert store.metrics()["counters"]["put_refused"] > 0


@pytest.mark.parametrize("kind", ["host", "directory"])
def test_c78_pinned_chunks_stay(kind, tmp_path):
    tiers = kv.HostTier(8 << 20) if kind == "host" else kv.DirectoryTier(tmp_path, 16 << 20, keep_free=0)
    chunk = LAYERS * 2 * BLOCK * HEADS * HEAD_SIZE * 2 + 4096
    src = cache(blocks=64)
    with kv.Store(tiers, namespace=namespace()) as store:
        store.put(keys(2), src, [0, 1]).wait()
        with store.pin(keys(3)) as pins:
            assert pins.found == [True, True, False]
            capacity = store.metrics()["tiers"][0]["capacity_bytes"]
            for i in range(2 * capacity // chunk // 32):
                store.put(keys(32, 100 + 32 * i), src, range(32)).wait()
            assert store.lookup(keys(2)) == [True, True]
        for i in range(2 * capacity // chunk // 32):
            store.put(keys(32, 5000 + 32 * i), src, range(32)).wait()
        assert store.lookup(keys(2)) == [False, False]


def test_c78_all_pinned_is_refused_and_recovers():
    chunk = LAYERS * 2 * BLOCK * HEADS * HEAD_SIZE * 2 + 4096
    src = cache()
    with kv.Store(kv.HostTier(2 * chunk), namespace=namespace(), deadline=0.2) as store:
        assert store.put(keys(2), src, [0, 1]).wait() == ["ok", "ok"]
        pins = store.pin(keys(2))
        assert store.put(keys(1, 2), src, [2]).wait()[0] in ("refused", "timeout")
        dst = cache(seed=2)
        assert store.get(keys(2), dst, [0, 1]).wait() == ["ok", "ok"]
        assert (dst.key(1)[:2] == src.key(1)[:2]).all()
        pins.release()
        assert store.put(keys(1, 2), src, [2]).wait() == ["ok"]


def test_raw_bytes(tiers):
    raw = namespace(raw="layout=mamba,tp=2,rank=1")
    with kv.Store(tiers, namespace=raw) as store:
        one, two = np.arange(5000, dtype=np.uint8), bytes(range(256)) * 16
        assert store.put_bytes(keys(2), [one, two]).wait() == ["ok", "ok"]
        back = [np.zeros(5000, np.uint8), bytearray(4096)]
        assert store.get_bytes(keys(2), back).wait() == ["ok", "ok"]
        assert (back[0] == one).all()
        assert bytes(back[1]) == two
        with pytest.raises(kv.ArgumentError, match="read-only"):
            store.get_bytes(keys(1), [bytes(5000)])
        with pytest.raises(kv.ArgumentError, match="share memory"):
            store.get_bytes(keys(2), [back[0], back[0][10:]])
        with pytest.raises(kv.ArgumentError, match="not contiguous"):
            store.put_bytes(keys(1), [one[::2]])
    with pytest.raises(kv.ArgumentError, match="raw="):
        kv.Store(kv.HostTier(1 << 20), namespace=namespace()).put_bytes(keys(1), [one])


def test_c32_state_of_each_rank_is_its_own(tmp_path):
    states = [np.full(1000, rank + 1, np.uint8) for rank in range(2)]
    for rank, state in enumerate(states):
        with kv.Store(
            kv.DirectoryTier(tmp_path, 1 << 20, keep_free=0), namespace=namespace(raw=f"rank={rank}")
        ) as store:
            assert store.put_bytes(keys(1), [state]).wait() == ["ok"]
    for rank, state in enumerate(states):
        with kv.Store(
            kv.DirectoryTier(tmp_path, 1 << 20, keep_free=0), namespace=namespace(raw=f"rank={rank}")
        ) as store:
            back = np.zeros(1000, np.uint8)
            assert store.get_bytes(keys(1), [back]).wait() == ["ok"]
            assert (back == state).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, c: s.put(keys(2), c, [0]), "1 blocks for 2 keys"),
        (lambda s, c: s.put(keys(1), c, [16]), "block id 16 .*num_blocks is 16"),
        (lambda s, c: s.get(keys(2), c, [3, 3]), "block 3 is given twice"),
        (lambda s, c: s.put("ab", c, [0]), "keys is str"),
        (lambda s, c: s.put([b""], c, [0]), r"keys\[0\]: key: 0 bytes"),
        (lambda s, c: s.put([1], c, [0]), r"keys\[0\]"),
        (lambda s, c: s.put(keys(1), np.zeros(3), [0]), "cache is ndarray"),
        (lambda s, c: s.put(keys(1), c, [0], heads=(0, 4)), "heads"),
        (lambda s, c: s.put(keys(1), c, [0], heads=(0, 4, 8)), "heads: 8 from 0 of the cache's 8 and from 4"),
        (lambda s, c: s.put(keys(1), c, [0], after=3), "after: int"),
        (lambda s, c: s.get(keys(1), c, [0], after="x"), "get: after: str"),
        (lambda s, c: s.put(keys(1), c, [0], deadline=-1), "deadline"),
        (lambda s, c: s.put(keys(1), c, [0], after=threading.Event(), deadline="x"), "deadline"),
        (lambda s, c: s.put(keys(1), cache(head_size=64), [0]), "64 elements a token, in the namespace 32"),
        (lambda s, c: s.put(keys(1), cache(dtype="f16"), [0]), "f16, in the namespace bf16"),
        (lambda s, c: s.put(keys(1), cache(block_size=32), [0]), "block_size 16 of the namespace is no multiple"),
        (lambda s, c: s.put(keys(1), cache(heads=4), [0]), "4 of the namespace's 8 heads; give heads="),
        (lambda s, c: s.lookup(keys(1), heads=(4, 5)), "heads: 5 from 4"),
        (lambda s, c: kv.Store([], namespace=namespace()), "no tiers"),
        (lambda s, c: kv.Store(s.tiers * 2, namespace=namespace()), "given twice"),
        (lambda s, c: kv.Store(s.tiers, namespace="x"), "namespace is str"),
        (lambda s, c: kv.HostTier(0), "num_bytes"),
        (lambda s, c: kv.HostTier(1 << 20, eviction="arc"), "'s3fifo' or 'lru'"),
        (lambda s, c: kv.HostTier(1 << 20, shared_name="../x"), "name"),
        (lambda s, c: kv.DirectoryTier("/proc/kvstride", 1 << 20), "/proc"),
        (lambda s, c: kv.DirectoryTier("x\0y", 1 << 20), "NUL"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with (
        kv.Store(kv.HostTier(1 << 20), namespace=namespace()) as store,
        pytest.raises(kv.Error, match=message) as error,
    ):
        call(store, cache())
    assert "\n" not in str(error.value)
    assert sum(store.metrics()["counters"].values()) == 0  # nothing of it was begun, not even what close() refuses


def in_child(action):
    """Runs it in a forked child, which must not hang."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_store_belongs_to_its_process(tiers):
    store = kv.Store(tiers, namespace=namespace())
    job = store.put(keys(1), cache(), [0])
    pins = store.pin(keys(1))
    for thing in (store, job, *store.tiers):
        with pytest.raises(TypeError):
            pickle.dumps(thing)

    def child():
        src = cache()
        for call in (
            lambda: store.put(keys(1), src, [0]),
            lambda: store.get(keys(1), src, [0], after=threading.Event()),
            lambda: store.lookup(keys(1)),
            lambda: store.lookup_prefix(keys(1)),
            lambda: store.pin(keys(1)),
            lambda: store.remove(keys(1)),
            lambda: store.metrics(),
            lambda: store.flush(),
            lambda: store.tiers[0].metrics(),
            lambda: kv.Store(store.tiers, namespace=namespace()),
            lambda: job.wait(),
        ):
            with pytest.raises(kv.StoreError, match=r"belongs to process .* after the fork"):
                call()
        store.close()
        pins.release()
        with store:
            pass
        for tier in store.tiers:
            tier.close()

    in_child(child)
    assert store.put(keys(1), cache(), [0]).wait() == ["ok"]
    store.close()
    assert store.put(keys(1), cache(), [0]).wait() == ["refused"]


def test_a_forked_child_may_drop_a_store(tiers):
    held = [kv.Store(tiers, namespace=namespace())]
    store = held[0]
    store.put(keys(1), cache(), [0]).wait()
    held.append(store.pin(keys(1)))
    del store

    def child():
        held.clear()
        tiers.clear()
        gc.collect()

    in_child(child)
    dst = cache(seed=2)
    assert held[0].get(keys(1), dst, [0]).wait() == ["ok"]
    assert (dst.key(0)[0] == cache().key(0)[0]).all()


def test_a_fork_while_events_are_asked():
    def child():
        event = threading.Event()
        with kv.Store(kv.HostTier(1 << 20), namespace=namespace()) as store:
            job = store.put(keys(1), cache(), [0], after=event)
            event.set()
            assert job.wait() == ["ok"]

    child()
    held, go = threading.Event(), threading.Event()

    def hold():
        with kv.store._WATCHER._changed:
            held.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        in_child(child)
    finally:
        go.set()
        thread.join()
    child()


def test_no_thread_for_events(monkeypatch):
    """The request is not made; the next one tries again."""
    monkeypatch.setattr(kv.store, "_WATCHER", kv.store._Watcher())
    event = threading.Event()
    with kv.Store(kv.HostTier(1 << 20), namespace=namespace()) as store:
        with monkeypatch.context() as patch, pytest.raises(kv.StoreError, match="no thread can be made: none left"):
            patch.setattr(threading.Thread, "start", lambda self: exec("raise RuntimeError('none left')"))
            store.put(keys(1), cache(), [0], after=event)
        job = store.put(keys(1), cache(), [0], after=event)
        event.set()
        assert job.wait() == ["ok"]
        assert store.metrics()["counters"]["put_ok"] == sum(store.metrics()["counters"].values())


class Instead:
    """A store's core with some verbs replaced."""

    def __init__(self, core, **verbs):
        self._core = core
        self.__dict__ |= verbs

    def __getattr__(self, name):
        return getattr(self._core, name)


def test_who_closes_waits_for_who_is_closing():
    """And what is not done keeps its memory, whatever the library says."""
    store = kv.Store(kv.HostTier(1 << 20), namespace=namespace())
    core = store._core
    closing, go, done = threading.Event(), threading.Event(), threading.Event()

    def close():
        if not closing.is_set():  # later callers return at once
            closing.set()
            go.wait(60)

    store._core = Instead(core, close=close)
    done_before = store.put(keys(1), cache(), [0])
    done_before.wait()
    job = store.put(keys(1, 1), cache(), [0], after=done)
    first = threading.Thread(target=store.close)
    first.start()
    assert closing.wait(60)
    second = threading.Thread(target=store.__exit__)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert job in store._live
    go.set()
    first.join()
    second.join()
    assert list(store._live) == [job]
    done.set()
    assert job.wait() == ["ok"]
    store._core = core
    store.close()
    assert not store._live


@pytest.mark.parametrize("verb", ["put", "get", "put_bytes", "get_bytes"])
def test_what_has_begun_keeps_its_memory_after_ctrl_c(verb):
    def interrupted(*args):
        call(*args)
        raise KeyboardInterrupt  # as the interpreter does when the call returns

    raw = verb.endswith("bytes")
    store = kv.Store(kv.HostTier(1 << 20), namespace=namespace(**({"raw": "x"} if raw else {})))
    call = getattr(store._core, verb)
    store._core = Instead(store._core, **{verb: interrupted})
    memory = np.zeros(5000, np.uint8) if raw else cache()
    args = ([memory],) if raw else (memory, [0])
    with pytest.raises(KeyboardInterrupt):
        getattr(store, verb)(keys(1), *args)
    with pytest.raises(kv.ArgumentError):
        getattr(store, verb)(keys(2), *args)  # is not begun, and not kept
    assert len(store._live) == 1
    weak = weakref.ref(memory)
    del memory, args
    gc.collect()
    assert weak() is not None


def test_other_threads_run_while_a_tier_ends(tmp_path):
    """Nobody takes the lock from this thread: others only run where it is given away."""
    ran, stop = 0, threading.Event()

    def count():
        nonlocal ran
        while not stop.is_set():
            ran += 1
            time.sleep(0)

    def drop(kind):
        things = [kv.DirectoryTier(tmp_path, 1 << 24, keep_free=0)]
        store = kv.Store(things, namespace=namespace())
        store.close()
        if kind == "store":  # has the last of the tier
            things = [store.__dict__.pop("_core")]
        del store
        gc.collect()
        before = ran
        things.clear()
        return ran > before

    thread = threading.Thread(target=count)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for kind in ("tier", "store"):
            assert any(drop(kind) for _ in range(200)), kind
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_a_closed_tier(tmp_path):
    """Stores that have it go on; no others can be made."""
    with kv.DirectoryTier(tmp_path, 1 << 24, keep_free=0) as tier:
        store = kv.Store(tier, namespace=namespace())
        assert tier.metrics()["chunks"] == 0
    tier.close()
    for call in (tier.metrics, lambda: kv.Store(tier, namespace=namespace())):
        with pytest.raises(kv.StoreError, match="the tier is closed"):
            call()
    assert store.put(keys(1), cache(), [0]).wait() == ["ok"]
    assert store.lookup(keys(2)) == [True, False]
    assert store.metrics()["tiers"][0]["chunks"] == 1
    store.close()


def test_a_closed_tier_gives_its_memory_back():
    name = f"test-{os.getpid()}"
    path = Path("/dev/shm", f"kvstride-{name}")
    tier = kv.HostTier(1 << 20, shared_name=name)
    store = kv.Store(tier, namespace=namespace())
    tier.close()
    assert path.exists()
    del store
    gc.collect()
    assert not path.exists()


def test_jobs_that_nobody_waits_for_keep_their_memory():
    dst = [cache(seed=i) for i in range(8)]
    store = kv.Store(kv.HostTier(4 << 20), namespace=namespace())
    store.put(keys(8), cache(), range(8)).wait()
    for one in dst:
        store.get(keys(8), one, range(8))
    dst.clear()
    one = None
    gc.collect()
    assert store.flush(10)
    del store


def test_c85_the_same_in_another_process(tmp_path):
    text = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_store import *
with kv.Store(kv.DirectoryTier({str(tmp_path)!r}, 1 << 24, keep_free=0), namespace=namespace()) as store:
    assert store.put(keys(4), cache(), range(4)).wait() == ["ok"] * 4
"""
    subprocess.run([sys.executable, "-c", text], check=True, env=os.environ | {"PYTHONHASHSEED": "5"})
    dst = cache("B H N KV D", seed=2)
    with kv.Store(kv.DirectoryTier(tmp_path, 1 << 24, keep_free=0), namespace=namespace()) as store:
        assert store.lookup_prefix(keys(5)) == 4
        assert store.get(keys(4), dst, range(4)).wait() == ["ok"] * 4
    assert (dst.key(0)[:4] == cache().key(0)[:4]).all()


def test_another_process_is_seen_at_once(tmp_path):
    """Two tiers on one directory stand for two processes: nothing but the file system is between them."""
    a = kv.Store(kv.DirectoryTier(tmp_path, 1 << 24, keep_free=0), namespace=namespace())
    b = kv.Store(kv.DirectoryTier(tmp_path, 1 << 24, keep_free=0), namespace=namespace())
    src, dst = cache(), cache(seed=2)
    for i in range(5):
        assert b.lookup_prefix(keys(3, 10 * i)) == 0
        assert a.put(keys(2, 10 * i), src, [0, 1]).wait() == ["ok", "ok"]
        until = time.monotonic() + 0.1
        while b.lookup_prefix(keys(3, 10 * i)) != 2:
            assert time.monotonic() < until
        assert b.get(keys(2, 10 * i), dst, [0, 1]).wait() == ["ok", "ok"]
    a.close()
    b.close()


def test_metrics(tiers):
    src, dst = cache(), cache(seed=2)
    with kv.Store(tiers, namespace=namespace()) as store:
        store.put(keys(3), src, range(3)).wait()
        store.get(keys(4), dst, range(4)).wait()
        metrics = store.metrics()
    assert metrics["counters"]["put_ok"] == 3
    assert metrics["counters"]["get_ok"] == 3
    assert metrics["counters"]["get_miss"] == 1
    assert metrics["counters"]["miss_absent"] == 1
    assert metrics["seconds"]["get"]["count"] == 4
    assert sum(metrics["seconds"]["get"]["buckets"]) == 4
    for tier in metrics["tiers"]:
        assert tier["counters"]["writes"] == 3
        assert tier["chunks"] == 3
        assert 0 < tier["used_bytes"] <= tier["capacity_bytes"]
    assert metrics["tiers"][0]["counters"]["reads"] == 3


def reader():
    pytest.importorskip("xxhash")
    spec = importlib.util.spec_from_file_location("read_chunk", ROOT / "examples" / "python" / "read_chunk.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.read_chunk


def files(path):
    return [p for p in path.rglob("*") if p.is_file() and p.stat().st_size >= 8192 and p.parent.parent.name]


def test_the_example_reads_every_file(tmp_path):
    read_chunk = reader()
    src = cache()
    with kv.Store(kv.DirectoryTier(tmp_path, 16 << 20, keep_free=0), namespace=namespace()) as store:
        store.put(keys(3), src, range(3)).wait()
        store.put(keys(1, 5), src, [5], heads=(2, 2, 3)).wait()
    found = {}
    for path in files(tmp_path):
        space, key, first, heads, arrays = read_chunk(path)
        assert space == namespace().text
        assert set(arrays) == {"key", "value"}
        found[key, first, heads] = arrays
        data = bytearray(path.read_bytes())
        for at in (0, 15, 200, 4095, 4096, len(data) - 1):
            data[at] ^= 1
            damaged = tmp_path / path.name
            damaged.write_bytes(data)
            with pytest.raises(ValueError, match=r"damaged|version|chunk"):
                read_chunk(damaged)
            data[at] ^= 1
    assert len(found) == 4
    for i in range(3):
        arrays = found[keys(1, i)[0].bytes, 0, HEADS]
        for layer in range(LAYERS):
            assert (arrays["key"][:, layer].transpose(1, 0, 2) == src.key(layer)[i]).all()
            assert (arrays["value"][:, layer].transpose(1, 0, 2) == src.value(layer)[i]).all()
    arrays = found[keys(1, 5)[0].bytes, 2, 3]
    assert (arrays["key"][:, 1].transpose(1, 0, 2) == src.key(1)[5][:, 2:5]).all()


def test_the_example_reads_files_of_every_kind(tmp_path):
    """Planes without heads, some without and some with, raw bytes."""
    read_chunk = reader()
    tier = kv.DirectoryTier(tmp_path, 16 << 20, keep_free=0)
    sizes = {"num_layers": LAYERS, "num_blocks": 4, "block_size": BLOCK, "num_kv_heads": 2, "head_size": 64}
    random = np.random.default_rng(3)
    for order, planes in (
        ("B N {latent: D[64], rope: D[16]}", {"latent": "bf16[64]", "rope": "bf16[16]"}),
        ("B {key: N H D, index: N D[8] i8}", {"key": "bf16", "index": "i8[8]"}),
    ):
        layout = kv.layout(order, kv.Geometry(**sizes))
        made = [random.integers(0, 256, layout.num_bytes, dtype=np.uint8) for _ in range(LAYERS)]
        src = kv.Cache(made, layout)
        space = namespace(planes=planes, num_kv_heads=2, head_size=64)
        with kv.Store(tier, namespace=space) as store:
            assert store.put(keys(1), src, [2]).wait() == ["ok"]
        (path,) = (tmp_path / space.hex).glob("?/*")
        text, key, _, _, arrays = read_chunk(path)
        assert (text, key, set(arrays)) == (space.text, keys(1)[0].bytes, set(planes))
        for layer in range(LAYERS):
            for plane, array in arrays.items():
                if plane == "key":  # [head, layer, token, dim]
                    assert (array[:, layer].transpose(1, 0, 2) == src.key(layer)[2]).all()
                else:  # [layer, token, dim]
                    assert (array[layer] == src.plane(layer, plane)[2].reshape(BLOCK, -1)).all()
    space = namespace(raw="state of rank 0")
    with kv.Store(tier, namespace=space) as store:
        assert store.put_bytes(keys(1), [bytes(range(250)) * 40]).wait() == ["ok"]
    (path,) = (tmp_path / space.hex).glob("?/*")
    assert read_chunk(path)[4]["raw"].tobytes() == bytes(range(250)) * 40


def test_c86_a_file_is_its_header_and_payload(tmp_path):
    sizes = {"num_layers": LAYERS, "num_blocks": 4, "block_size": BLOCK, "num_kv_heads": 1, "head_size": 64}
    layout = kv.layout("B N {latent: D[64], rope: D[16]}", kv.Geometry(**sizes))
    mla = kv.Cache([np.zeros(layout.num_bytes, np.uint8) for _ in range(LAYERS)], layout)
    space = namespace(planes={"latent": "bf16[64]", "rope": "bf16[16]"}, num_kv_heads=1, head_size=64)
    with kv.Store(kv.DirectoryTier(tmp_path, 16 << 20, keep_free=0), namespace=space) as store:
        store.put(keys(1), mla, [0]).wait()
    with kv.Store(kv.DirectoryTier(tmp_path, 16 << 20, keep_free=0), namespace=namespace()) as store:
        store.put(keys(1), cache(), [0]).wait()
    payloads = sorted([LAYERS * BLOCK * 80 * 2, LAYERS * 2 * BLOCK * HEADS * HEAD_SIZE * 2])
    assert sorted(p.stat().st_size for p in files(tmp_path)) == [4096 + -(-one // 4096) * 4096 for one in payloads]


def test_c75_modes_of_files_and_folders(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o755)
    old = os.umask(0)
    try:
        for path in (tmp_path / "made", kept):
            with kv.Store(kv.DirectoryTier(path, 16 << 20, keep_free=0), namespace=namespace()) as store:
                store.put(keys(2), cache(), [0, 1]).wait()
            for one in path.rglob("*"):
                assert one.stat().st_mode & 0o7777 == (0o700 if one.is_dir() else 0o600), one
    finally:
        os.umask(old)
    assert (tmp_path / "made").stat().st_mode & 0o7777 == 0o700
    assert kept.stat().st_mode & 0o7777 == 0o755


def test_prometheus_text():
    prometheus = pytest.importorskip("prometheus_client")
    from kvstride.prometheus import StoreCollector

    with kv.Store(kv.HostTier(4 << 20), namespace=namespace()) as store:
        store.put(keys(2), cache(), [0, 1]).wait()
        store.get(keys(3), cache(seed=2), range(3)).wait()
        registry = prometheus.CollectorRegistry()
        registry.register(StoreCollector({"a": store}))
        value = registry.get_sample_value
        assert value("kvstride_store_requests_total", {"store": "a", "verb": "put", "outcome": "ok"}) == 2
        assert value("kvstride_store_requests_total", {"store": "a", "verb": "get", "outcome": "miss"}) == 1
        assert value("kvstride_store_misses_total", {"store": "a", "reason": "absent"}) == 1
        assert value("kvstride_store_request_seconds_count", {"store": "a", "verb": "get"}) == 3
        assert value("kvstride_tier_reads_total", {"store": "a", "tier": "host"}) == 2
        assert value("kvstride_tier_capacity_bytes", {"store": "a", "tier": "host"}) == 4 << 20
        text = prometheus.generate_latest(registry).decode()
    assert 'kvstride_tier_seconds_bucket{le="+Inf",operation="read",store="a",tier="host"} 2.0' in text


def test_who_does_not_ask_knows_what_this_process_knows(tmp_path):
    mine, theirs = (kv.DirectoryTier(tmp_path / "store", 16 << 20, keep_free=0, lookup_timeout=5) for _ in range(2))
    with kv.Store(mine, namespace=namespace()) as store, kv.Store(theirs, namespace=namespace()) as other:
        assert other.put(keys(2), cache(), [0, 1]).wait() == ["ok"] * 2
        assert store.lookup(keys(2), ask=False) == [False, False]
        assert store.lookup_prefix(keys(2), ask=False) == 0
        assert store.lookup(keys(2)) == [True, True]
        assert store.lookup(keys(3), ask=False) == [True, True, False]
        assert store.lookup_prefix(keys(3), ask=False) == 2
        with pytest.raises(kv.ArgumentError, match="ask is 1"):
            store.lookup(keys(1), ask=1)


def test_what_has_gone_is_told_once(tmp_path):
    chunk = 2 * LAYERS * HEADS * HEAD_SIZE * BLOCK * 2 + 4096
    tier = kv.DirectoryTier(tmp_path / "store", 4 * chunk, keep_free=0, eviction="lru", prepare=True)
    with kv.Store(tier, namespace=namespace()) as store:
        assert store.take_gone() == []
        assert store.put(keys(4, 1), cache(), range(4)).wait() == ["ok"] * 4
        assert store.put(keys(2, 5), cache(), range(2)).wait() == ["ok"] * 2
        store.remove(keys(1, 5))
        *evicted, removed = store.take_gone()
        assert removed == bytes(keys(1, 5)[0])
        # A file that is on its way may take room for two.
        assert len(set(evicted)) == len(evicted) >= 2 and set(evicted) <= {bytes(k) for k in keys(6, 1)}
        assert not any(store.lookup(evicted))
        assert store.take_gone() == []


def test_what_a_failed_producer_left_is_not_stored(tmp_path):
    """A future that raised or was cancelled is done, and yet not what was asked for."""
    with kv.Store(kv.HostTier(8 << 20), namespace=namespace()) as store:
        failed, cancelled, right = Future(), Future(), Future()
        failed.set_exception(RuntimeError("half way"))
        cancelled.cancel()
        right.set_result(None)
        for event in (failed, cancelled):
            job = store.put(keys(1), cache(), [0], after=event)
            assert job.wait() == ["refused"] and job.error is not None
        assert store.lookup(keys(1)) == [False]
        assert store.put(keys(1), cache(), [0], after=right).wait() == ["ok"]


def test_who_is_done_keeps_nothing(tmp_path):
    with kv.Store(kv.HostTier(8 << 20), namespace=namespace()) as store:
        source = cache()
        kept = weakref.ref(source)
        job = store.put(keys(1), source, [0])
        del source
        job.wait()
        gc.collect()
        assert kept() is None


def test_one_key_and_one_answer_for_all():
    """What schedulers ask most: `holds` for one key, `ok` for all chunks of a job."""
    with kv.Store(kv.HostTier(8 << 20), namespace=namespace()) as store:
        gate = threading.Event()
        job = store.put(keys(2), cache(), [0, 1], after=gate)
        assert not job.ok and not store.holds(keys(1)[0])
        gate.set()
        assert job.wait() == ["ok", "ok"] and job.ok
        assert store.holds(keys(1)[0]) and store.holds(bytes(keys(1)[0])) and not store.holds(b"other")
        some = store.get(keys(3), cache(seed=2), [0, 1, 2])
        assert some.wait() == ["ok", "ok", "miss"] and some.done and not some.ok
        for wrong in (b"", bytes(65), "text"):
            with pytest.raises((kv.ArgumentError, kv.DTypeError), match="key"):
                store.holds(wrong)
    with pytest.raises(kv.StoreError, match="closed"):
        store.holds(keys(1)[0])


def test_all_pieces_of_a_chunk_are_promoted(tmp_path):
    host, directory = kv.HostTier(8 << 20), kv.DirectoryTier(tmp_path / "store", 16 << 20, keep_free=0)
    with kv.Store(directory, namespace=namespace()) as store:
        for first in (0, 4):
            half = cache(heads=4, seed=first)
            assert store.put(keys(3), half, [0, 1, 2], heads=(0, first, 4)).wait() == ["ok"] * 3
    with kv.Store([host, directory], namespace=namespace()) as store:
        assert store.get(keys(3), cache(seed=9), [3, 4, 5]).wait() == ["ok"] * 3
        assert store.flush()
        assert store.metrics()["tiers"][0]["chunks"] == 6
