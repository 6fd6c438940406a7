# SPDX-License-Identifier: Apache-2.0
"""What every tier does, whatever is below it: one contract, run over each kind (places.py)."""

import multiprocessing
import os
import time

import numpy as np
import pytest

import kvstride as kv
import places

LAYERS, HEADS, BLOCK, DIM = 4, 8, 16, 64
SPACE = {
    "model": "test/tiers",
    "revision": "0123abcd",
    "planes": {"key": "bf16", "value": "bf16"},
    "num_layers": LAYERS,
    "num_kv_heads": HEADS,
    "head_size": DIM,
    "block_size": BLOCK,
}
HEADER = 4096
PAYLOAD = LAYERS * HEADS * BLOCK * DIM * 2 * 2


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Places by name; their servers are started once."""
    with places.started(lambda name: places.PLACES[name](tmp_path_factory.mktemp(name))) as get:
        yield get


@pytest.fixture
def place(request, servers):
    return servers(request.param)


def each(**wanted):
    return pytest.mark.parametrize("place", places.kinds(**wanted), indirect=True)


_runs = iter(range(1 << 30))


@pytest.fixture
def space():
    """Of its own for each test: servers stay, and hold what others wrote."""
    return kv.Namespace(**(SPACE | {"model": f"test/tiers-{os.getpid()}-{next(_runs)}"}))


def cache(order="B H KV N D", heads=HEADS, blocks=64, fill=None):
    geometry = kv.Geometry(
        num_layers=LAYERS, num_blocks=blocks, block_size=BLOCK, num_kv_heads=heads, head_size=DIM, dtype="bf16"
    )
    layout = kv.layout(order, geometry)
    tensors = [np.full(layout.num_bytes, 0xA5, np.uint8) for _ in range(LAYERS)]
    if fill is not None:
        random = np.random.default_rng(fill)
        for tensor in tensors:
            tensor[:] = random.integers(0, 256, tensor.size, dtype=np.uint8)
    return kv.Cache(tensors, layout)


def keys(count, first=0):
    return [kv.Key.chain(None, [i]) for i in range(first, first + count)]


def block(a_cache, number, first_head=0, heads=None):
    """Keys and values of a block: [layer, kv, token, head, dim]."""
    heads = slice(first_head, None if heads is None else first_head + heads)
    return np.stack([[a_cache.key(i)[number, :, heads], a_cache.value(i)[number, :, heads]] for i in range(LAYERS)])


def poisoned(a_cache, number):
    return (block(a_cache, number).view(np.uint8) == 0xA5).all()


def eventually(what, seconds=20.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


def counters(tier):
    return tier.metrics()["counters"]


@each()
def test_each_item_has_its_own_outcome(place, space):
    source, target = cache(fill=1), cache("B N KV H D")
    with place.tier() as tier, kv.Store(tier, namespace=space) as store:
        assert store.put(keys(30), source, range(30)).wait() == ["ok"] * 30
        asked = keys(40)[::-1]
        assert store.lookup(asked) == [False] * 10 + [True] * 30
        assert store.lookup_prefix(keys(40)) == 30
        assert store.lookup_prefix(keys(5, 100)) == 0
        outcomes = store.get(asked, target, range(40)).wait()
        assert outcomes == ["miss"] * 10 + ["ok"] * 30
        for i in range(10):
            assert poisoned(target, i)
        for i in range(10, 40):
            np.testing.assert_array_equal(block(target, i), block(source, 39 - i))
        assert all(poisoned(target, i) for i in range(40, 64))


@each(shared=True)
def test_another_process_sees_it_at_once(place, space):
    source = cache(fill=2)
    with (
        place.tier() as tier,
        kv.Store(tier, namespace=space) as store,
        place.tier() as other,
        kv.Store(other, namespace=space) as reader,
    ):
        assert reader.lookup(keys(3)) == [False] * 3
        assert store.put(keys(3), source, range(3)).wait() == ["ok"] * 3
        eventually(lambda: reader.lookup_prefix(keys(3)) == 3, 2.0)
        target = cache("KV B N H D")
        assert reader.get(keys(3), target, [5, 6, 7]).wait() == ["ok"] * 3
        np.testing.assert_array_equal(block(target, 6), block(source, 1))
        assert reader.put(keys(3), source, range(3)).wait() == ["ok"] * 3
        assert counters(other)["writes"] == 0, "what is there is not written again"


@each()
def test_heads_of_any_writer_for_any_reader(place, space):
    whole = cache(fill=3)
    first, second = cache(heads=4), cache(heads=4)
    for i, half in enumerate((first, second)):
        kv.convert_blocks(whole, half, [(b, b) for b in range(4)], heads=(4 * i, 0, 4))
    with place.tier() as tier, kv.Store(tier, namespace=space) as store:
        assert store.put(keys(2), first, range(2), heads=(0, 0, 4)).wait() == ["ok"] * 2
        assert store.lookup(keys(2)) == [False] * 2
        assert store.lookup(keys(2), heads=(0, 4)) == [True] * 2
        assert store.put(keys(2), second, range(2), heads=(0, 4, 4)).wait() == ["ok"] * 2
        assert store.put(keys(2, 2), whole, [2, 3]).wait() == ["ok"] * 2
    if not place.shared:
        return
    with place.tier() as tier, kv.Store(tier, namespace=space) as store:
        target = cache("B N KV H D")
        assert store.get(keys(4), target, range(4)).wait() == ["ok"] * 4, "halves together, and the whole"
        for i in range(4):
            np.testing.assert_array_equal(block(target, i), block(whole, i))
        quarter = cache("KV B H N D", heads=2)
        assert store.get(keys(4), quarter, range(4), heads=(5, 0, 2)).wait()[0] == "ok"
        for i in range(4):
            np.testing.assert_array_equal(block(quarter, i), block(whole, i, 5, 2))


@each(ranges=True, shared=True)
def test_a_head_range_is_read_without_the_rest(place, space):
    source = cache(fill=4)
    with place.tier() as tier, kv.Store(tier, namespace=space) as store:
        assert store.put(keys(8), source, range(8)).wait() == ["ok"] * 8
    with place.tier() as tier, kv.Store(tier, namespace=space) as store:
        quarter = cache(heads=2)
        before = counters(tier)["read_bytes"]
        assert store.get(keys(8), quarter, range(8), heads=(6, 0, 2)).wait() == ["ok"] * 8
        for i in range(8):
            np.testing.assert_array_equal(block(quarter, i), block(source, i, 6, 2))
        moved = counters(tier)["read_bytes"] - before
        # Directories count files, not what was read of them.
        if place.kind != "directory":
            assert moved < 8 * (HEADER + PAYLOAD) // 2


@each()
def test_remove(place, space):
    source = cache(fill=5)
    with place.tier() as tier, kv.Store(tier, namespace=space) as store:
        store.put(keys(4), source, range(4)).wait()
        assert store.remove(keys(2, 1)) == 2
        assert store.lookup(keys(4), ask=False) == [True, False, False, True]

        def gone():
            with place.tier() as other, kv.Store(other, namespace=space) as reader:
                return reader.lookup(keys(4)) == [True, False, False, True]

        if place.shared:
            eventually(gone, 30.0)
        assert store.put(keys(4), source, range(4)).wait() == ["ok"] * 4


@pytest.mark.parametrize("at", [0, 100, HEADER, HEADER + PAYLOAD - 1])
@pytest.mark.parametrize("place", places.kinds(shared=True, flips=True), indirect=True)
def test_a_changed_byte_never_reaches_a_cache(place, space, at):
    source = cache(fill=6)
    with place.tier() as tier, kv.Store(tier, namespace=space) as store:
        assert store.put(keys(3), source, range(3)).wait() == ["ok"] * 3
    place.flip(space, at)
    target = cache()
    with place.tier() as tier, kv.Store(tier, namespace=space) as store:
        assert store.get(keys(3), target, range(3)).wait() == ["corrupt"] * 3
        assert all(poisoned(target, i) for i in range(64))
        assert store.get(keys(3), target, range(3)).wait() == ["miss"] * 3
        assert counters(tier)["corrupt"] == 3
        assert store.put(keys(3), source, range(3)).wait() == ["ok"] * 3, "whoever has it mends it"
    with place.tier() as tier, kv.Store(tier, namespace=space) as store:
        assert store.get(keys(3), target, range(3)).wait() == ["ok"] * 3
        np.testing.assert_array_equal(block(target, 2), block(source, 2))


@each(stops=True)
def test_no_stall_beyond_the_deadline(place, space):
    source = cache(fill=7)
    with place.tier(timeout=1.0, lookup_timeout=0.5) as tier, kv.Store(tier, namespace=space) as store:
        assert store.put(keys(8), source, range(8)).wait() == ["ok"] * 8
        target = cache()
        place.stop()
        try:
            begin = time.monotonic()
            job = store.get(keys(8), target, range(8), deadline=1.0)
            assert store.holds(keys(1)[0]), "what this process knows needs nobody"
            assert store.lookup(keys(8), ask=False) == [True] * 8
            assert time.monotonic() - begin < 0.5
            outcomes = job.wait()
            assert time.monotonic() - begin < 2.5
            assert set(outcomes) <= {"timeout", "miss", "io_error"}
            assert all(poisoned(target, i) for i in range(64))
            begin = time.monotonic()
            assert store.lookup(keys(8, 100)) == [False] * 8
            assert time.monotonic() - begin < 1.5

            # Sooner or later it is left alone: misses at once.
            def at_once():
                begin = time.monotonic()
                outcomes = store.get(keys(8), target, range(8), deadline=1.0).wait()
                return set(outcomes) <= {"miss", "timeout", "refused"} and time.monotonic() - begin < 0.3

            eventually(at_once, 30.0)
            assert all(poisoned(target, i) for i in range(64))
        finally:
            place.go()
        eventually(lambda: store.get(keys(8), target, range(8)).wait() == ["ok"] * 8, 60.0)
        np.testing.assert_array_equal(block(target, 7), block(source, 7))
        assert store.put(keys(1, 50), source, [0]).wait() == ["ok"]


@each(stops=True)
def test_cancelled_and_bounded(place, space):
    source = cache(fill=8)
    image = HEADER + PAYLOAD
    with place.tier(queue_bytes=16 * image, timeout=2.0) as tier, kv.Store(tier, namespace=space) as store:
        assert store.put(keys(1), source, [0]).wait() == ["ok"]
        place.stop()
        try:
            begin = time.monotonic()
            job = store.put(keys(60, 100), source, range(60), deadline=8.0)
            eventually(lambda: job.poll().count("refused") >= 60 - 16, 5.0)
            job.cancel()
            outcomes = job.wait()
            assert time.monotonic() - begin < 10
            assert "ok" not in outcomes
            assert counters(tier)["refused_queue"] >= 60 - 16
        finally:
            place.go()
        eventually(lambda: store.put(keys(4, 200), source, range(4)).wait() == ["ok"] * 4, 60.0)


def _puts(kind, address, options, number):
    """Another process: puts its own chunks and everybody's, and reads all."""
    tier = places.PLACES[kind].open(address)
    space = kv.Namespace(**options)
    source = cache(fill=99)
    with kv.Store(tier, namespace=space) as store:
        for _ in range(5):
            got = store.put(keys(16), source, range(16)).wait()
            got += store.put(keys(4, 100 * number), source, range(4)).wait()
            assert got == ["ok"] * 20, got
        target = cache("B N KV H D")
        assert store.get(keys(16), target, range(16)).wait() == ["ok"] * 16
        for i in range(16):
            np.testing.assert_array_equal(block(target, i), block(source, i))
    tier.close()


@each(shared=True)
def test_processes_at_once(place):
    options = SPACE | {"model": f"test/processes-{os.getpid()}"}
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_puts, args=(place.kind, place.address, options, number)) for number in (1, 2, 3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
