# SPDX-License-Identifier: Apache-2.0
"""Real servers, and between them and the stores all that goes wrong: one contract, over each engine (places.py).

Two models' fleets with different layouts, one of them with tensor parallelism, put, get and look up on one engine
while a fault comes and goes. What is `ok` has the right bytes, what is not is untouched; nobody waits beyond a
deadline; what was counted is what happened; nothing is left under way; and soon after the fault all is well again.
"""

import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest

import kvstride as kv
import places
from servers.network import Network
from servers.proxy import Proxy
from test_tiers import HEADER, HEADS, PAYLOAD, SPACE, block, cache, counters, eventually, poisoned

IMAGE = HEADER + PAYLOAD
STAGING = 16 * IMAGE
DEADLINE, LOOKUP = 1.5, 0.5
#: Of this machine, which does other things as well.
SLACK = 3.0
CHUNKS = 4  #: of a request
RIGHT = [cache(fill=model) for model in (1, 2)]  #: what the models' chunks hold
_keys = itertools.count(1000, 1000)

ENGINES = places.kinds(stops=True)


class Scene:
    """An engine's servers, far away where this machine can make such a place."""

    def __init__(self, kind, folder, **environment):
        self.why_near = None
        self.network = None
        try:
            self.network = Network()
        except (OSError, RuntimeError) as error:
            assert not places.REQUIRED, error
            self.why_near = str(error)
        small = places.PLACES[kind].small if self.network else {}
        with self.inside(), pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            self.place = places.PLACES[kind](folder, self.network.host if self.network else "127.0.0.1", **small)

    def inside(self):
        return self.network.inside() if self.network else contextlib.nullcontext()

    def kill(self, part):
        self.place.kill(part)

    def start(self, part):
        with self.inside():
            self.place.start(part)

    def close(self):
        self.place.close()
        if self.network:
            self.network.close()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    with places.started(lambda name: Scene(name, tmp_path_factory.mktemp(name))) as get:
        yield get


@pytest.fixture
def scene(request, scenes):
    return scenes(request.param)


def each(**wanted):
    return pytest.mark.parametrize("scene", places.kinds(stops=True, **wanted), indirect=True)


class Fleet(threading.Thread):
    """A store on a tier of its own, whose outcomes are looked at, each of them.

    `model` says which chunks, `order` how caches hold them, `ranks` over how many of these their heads are spread.
    """

    def __init__(self, address, model=0, order="B H KV N D", ranks=1, patience=1.0, run_id=0):
        super().__init__()
        self.model, self.patience = model, patience
        self.space = kv.Namespace(**(SPACE | {"model": f"test/faults-{os.getpid()}-{run_id}-{model}"}))
        self.tier = kv.RemoteTier(
            address, timeout=patience, lookup_timeout=LOOKUP * patience, staging_bytes=STAGING, queue_bytes=STAGING
        )
        self.store = kv.Store(self.tier, namespace=self.space)
        count = HEADS // ranks
        self.ranks = [(rank * count, count) for rank in range(ranks)]
        self.sources = [cache(order, heads=count) for _ in self.ranks]
        for source, (first, _) in zip(self.sources, self.ranks, strict=True):
            kv.convert_blocks(RIGHT[model], source, [(b, b) for b in range(64)], heads=(first, 0, count))
        self.new_target = lambda: cache(order, heads=count, blocks=CHUNKS)
        self.untouched = deque(maxlen=40)  #: targets and blocks of them that nothing came to
        self.numbers = itertools.count(next(_keys))  # of chunks
        self.mine = []
        self.others = [self]
        self.outcomes = Counter()
        self.before = Counter()
        self.worst = 0.0
        self.well = 0  #: turns in which all was ok, since somebody set this to 0
        self.ends = threading.Event()
        self.error = None

    def _wait(self, verb, jobs, begin):
        assert time.monotonic() - begin < SLACK, "requests are made at once"
        out = [job.wait() for job in jobs]
        seconds = time.monotonic() - begin
        self.worst = max(self.worst, seconds)
        assert seconds < DEADLINE * self.patience + SLACK
        for outcomes in out:
            self.outcomes.update(f"{verb}_{outcome}" for outcome in outcomes)
        return out

    def put(self, numbers):
        keys, blocks = [kv.Key.chain(None, [n]) for n in numbers], [n * 7 % 64 for n in numbers]
        begin = time.monotonic()
        jobs = [
            self.store.put(keys, source, blocks, heads=(0, first, count), deadline=DEADLINE * self.patience)
            for source, (first, count) in zip(self.sources, self.ranks, strict=True)
        ]
        return {outcome for outcomes in self._wait("put", jobs, begin) for outcome in outcomes}

    def get(self, numbers):
        keys = [kv.Key.chain(None, [n]) for n in numbers]
        targets = [self.new_target() for _ in self.ranks]
        begin = time.monotonic()
        jobs = [
            self.store.get(keys, target, range(len(keys)), heads=(first, 0, count), deadline=DEADLINE * self.patience)
            for target, (first, count) in zip(targets, self.ranks, strict=True)
        ]
        out = self._wait("get", jobs, begin)
        for outcomes, target, (first, count) in zip(out, targets, self.ranks, strict=True):
            for i, (outcome, number) in enumerate(zip(outcomes, numbers, strict=True)):
                if outcome == "ok":
                    right = block(RIGHT[self.model], number * 7 % 64, first, count)
                    np.testing.assert_array_equal(block(target, i), right)
                else:
                    assert poisoned(target, i), outcome
                    self.untouched.append((target, i))
        return {outcome for outcomes in out for outcome in outcomes}

    def look_up(self, numbers):
        begin = time.monotonic()
        self.store.lookup_prefix([kv.Key.chain(None, [n]) for n in numbers])
        assert time.monotonic() - begin < LOOKUP + SLACK

    def turn(self):
        """Puts and gets what is new, and looks for what others have, and for older chunks."""
        new = list(itertools.islice(self.numbers, CHUNKS))
        if there := self.put(new) == {"ok"}:
            self.mine += new
        well = self.get(new) == {"ok"} and there
        other = random.choice(self.others)
        if other.mine:
            old = random.choices(other.mine[-40:], k=CHUNKS)
            self.look_up([*old, next(self.numbers)])
            self.get(old)
        self.well += well

    def run(self):
        try:
            while not self.ends.wait(0.1):
                self.turn()
        except BaseException as error:  # bytes that are wrong, a stall
            self.error = error

    def check_accounts(self):
        assert all(poisoned(target, i) for target, i in self.untouched), "nothing comes later"
        counted = self.store.metrics()["counters"]
        assert {n: c for n, c in counted.items() if n[:4] in ("put_", "get_") and c} == self.outcomes
        in_tier = counters(self.tier)
        assert in_tier["reads"] >= self.outcomes["get_ok"]
        assert in_tier["writes"] + in_tier["already_there"] >= self.outcomes["put_ok"]
        # One image that needs all the memory for images on their way, and all the room for writes.
        blob = np.full(STAGING - HEADER, self.model, np.uint8)
        raw = {"planes": {"state": "u8"}, "num_kv_heads": 1, "raw": "r"}
        with kv.Store(self.tier, namespace=kv.Namespace(**(SPACE | {"model": self.space.hex} | raw))) as store:
            key = [kv.Key.chain(None, [next(self.numbers)])]
            eventually(lambda: store.put_bytes(key, [blob], deadline=5.0).wait() == ["ok"])


def is_felt(seen):
    return any(seen[n] for n in ("corrupt", "io_errors", "denied", "timeouts", "put_timeout", "get_timeout"))


class Traffic:
    """Fleets under way. At its end nothing was wrong, and what went wrong in between has left nothing behind."""

    def __init__(self, scene, address=None, **options):
        run_id = next(_keys)
        kinds = [(0, "B H KV N D", 1), (0, "KV B N H D", 2), (1, "B N KV H D", 1)]
        make = lambda kind, **more: Fleet(address or scene.place.address, *kind, run_id=run_id, **(options | more))  # noqa: E731
        self.fleets = [make(kind) for kind in kinds]
        for fleet in self.fleets:
            fleet.others = [other for other in self.fleets if other.model == fleet.model]
        self.patient = lambda: make(kinds[0], patience=20.0)

    def __enter__(self):
        for fleet in self.fleets:
            fleet.start()
        try:
            self.is_well()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind, *_):
        for fleet in self.fleets:
            fleet.ends.set()
        for fleet in self.fleets:
            fleet.join()
        if kind is None:
            for fleet in self.fleets:
                assert fleet.error is None, fleet.error
                fleet.check_accounts()
                # Old chunks too: what is damaged is written anew by whoever has it.
                last = fleet.mine[-24:][-CHUNKS:]
                eventually(lambda fleet=fleet, last=last: {"ok"} == fleet.put(last) | fleet.get(last))
        self.close()

    def close(self):
        for fleet in self.fleets:
            fleet.store.close()
            fleet.tier.close()

    def raise_errors(self):
        for fleet in self.fleets:
            if fleet.error is not None:
                raise fleet.error

    def is_well(self, seconds=40.0):
        """By and by whole turns of each fleet are ok."""
        for fleet in self.fleets:
            fleet.well = 0
        begin = time.monotonic()

        def well():
            self.raise_errors()
            return all(fleet.well >= 2 for fleet in self.fleets)

        try:
            eventually(well, seconds)
        except AssertionError:
            raise AssertionError([(fleet.outcomes, fleet.tier.metrics()) for fleet in self.fleets]) from None
        return time.monotonic() - begin

    def goes_on(self, seconds):
        """What has happened after it, since this was called last: outcomes, and what tiers counted."""
        time.sleep(seconds)
        self.raise_errors()
        seen = Counter()
        for fleet in self.fleets:
            now = Counter(fleet.outcomes) + Counter(counters(fleet.tier))
            seen += now - fleet.before
            fleet.before = now
        return seen

    def serves_the_patient(self):
        """Who waits long enough gets it all."""
        writer, reader = self.patient(), self.patient()
        numbers = list(itertools.islice(writer.numbers, 2))
        try:
            assert writer.put(numbers) == {"ok"}
            assert reader.get(numbers) == {"ok"}
        finally:
            for fleet in (writer, reader):
                fleet.store.close()
                fleet.tier.close()


@pytest.fixture
def link(scene):
    if scene.network is None:
        pytest.skip(f"no network of its own: {scene.why_near}")
    yield scene.network
    scene.network.set()


@pytest.mark.parametrize(
    "fare",
    [{"delay": 0.25}, {"loss": 0.01}, {"twice": 0.05, "late": 0.05}],
    ids=["500 ms more", "1 % lost", "twice and out of order"],
)
@each()
def test_a_bad_link(scene, link, fare):
    with Traffic(scene) as traffic:
        link.set(**fare)
        traffic.serves_the_patient()
        traffic.goes_on(1.0)
        link.set()
        traffic.is_well()


@each()
def test_a_link_that_damages(scene, link):
    with Traffic(scene) as traffic:
        traffic.goes_on(0)
        link.set(damage=0.02)
        seen = traffic.goes_on(2.0)
        link.set()
        assert is_felt(seen), seen
        traffic.is_well()


@each()
def test_a_peer_that_vanishes(scene, link):
    with Traffic(scene) as traffic:
        link.set(loss=1.0)
        traffic.goes_on(0.5)
        eventually(lambda: traffic.goes_on(0.5)["refused_sick"] > 0)
        seen = traffic.goes_on(0.5)
        assert not {"get_ok", "writes", "reads"} & set(seen), seen
        link.set()
        traffic.is_well()


@each()
def test_connections_that_are_half_open(scene, link):
    """The servers have died and come back while nobody could be told."""
    with Traffic(scene) as traffic:
        link.set(loss=1.0)
        traffic.goes_on(0.2)
        for part in scene.place.parts:
            scene.kill(part)
        for part in reversed(scene.place.parts):  # what others need first
            scene.start(part)
        assert traffic.goes_on(1.5)["timeouts"] > 0
        link.set()
        traffic.is_well()


@pytest.fixture
def proxies(scene):
    """Addresses behind proxies of their own, and these."""
    with contextlib.ExitStack() as stack:
        made = []

        def proxy(host, port):
            made.append(stack.enter_context(Proxy(host, port)))
            return made[-1].port

        address = scene.place.through(proxy)
        yield address, made
        scene.place.through(None)


@pytest.mark.parametrize("fare", ["cut", "stall", "flip", "reorder"])
@each()
def test_a_proxy_in_between(scene, proxies, fare):
    address, made = proxies
    often = 10 if fare == "reorder" else scene.place.proxied
    with Traffic(scene, address) as traffic:
        traffic.goes_on(0)
        for proxy in made:
            proxy.set(**{fare: often})
        seen = traffic.goes_on(2.0)
        for proxy in made:
            proxy.set()
        assert is_felt(seen), seen
        traffic.is_well()


@pytest.mark.parametrize(
    "scene, part",
    [(name, part) for name in ENGINES for part in places.PLACES[name].parts],
    indirect=["scene"],
)
def test_killed_in_mid_read_and_mid_write(scene, part):
    with Traffic(scene) as traffic:
        scene.kill(part)
        try:
            traffic.goes_on(1.0)
        finally:
            scene.start(part)
        traffic.is_well()


@each(full=True)
def test_full(scene):
    with Traffic(scene) as traffic:
        scene.place.fill()
        try:
            early = traffic.goes_on(1.0)
            seen = traffic.goes_on(1.0)
        finally:
            scene.place.free()
        assert seen["put_ok"] == seen["already_there"], seen
        # Swift does not say so: it is unavailable, and for a while its proxy leaves the disk alone, reads included.
        assert early["no_space"] + early["trips"] > 0, early
        assert seen["get_ok"] > 0 or early["no_space"] == 0, seen
        traffic.is_well()


@each(read_only=True)
def test_writes_alone_fail(scene):
    """As on a replica, or where no snapshot can be saved: errors that may pass, and reads are as good as ever."""
    with Traffic(scene) as traffic:
        scene.place.refuse_writes(True)
        try:
            traffic.goes_on(1.0)
            seen = traffic.goes_on(2.0)
        finally:
            scene.place.refuse_writes(False)
        assert seen["writes"] == 0 and seen["get_ok"] > 0, seen
        traffic.is_well()


@pytest.mark.parametrize("what", ["write", "all"])
@each(denies=True)
def test_denied(scene, what):
    with Traffic(scene, scene.place.limited) as traffic:
        scene.place.deny(what)
        try:
            traffic.goes_on(1.0)
            seen = traffic.goes_on(1.0)
        finally:
            scene.place.allow()
        assert seen["writes"] == 0 and seen["denied"] + seen["refused_sick"] > 0, seen
        assert (seen["get_ok"] > 0) == (what == "write"), seen
        traffic.is_well()


@each(denies=True)
def test_credentials_that_have_expired(scene):
    with Traffic(scene, scene.place.limited) as traffic:
        with scene.inside():
            scene.place.expire()
        try:
            traffic.goes_on(1.0)
            seen = traffic.goes_on(1.0)
        finally:
            scene.place.renew()
        assert not {"get_ok", "writes", "reads"} & set(seen), seen
        traffic.is_well()


@pytest.fixture
def clocks(tmp_path):
    """What servers' environment must hold so that their clocks go as many seconds wrong as the file says."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        assert not places.REQUIRED, "libfaketime is not installed"
        pytest.skip("libfaketime is not installed")
    file = tmp_path / "clock"
    file.write_text("+0")
    names = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": file, "FAKETIME_CACHE_DURATION": 1}
    return file, {name: str(value) for name, value in {**names, "FAKETIME_DONT_FAKE_MONOTONIC": 1}.items()}


@pytest.mark.parametrize("kind", [name for name in ENGINES if places.PLACES[name].clocks])
def test_clocks_that_are_wrong(kind, clocks, tmp_path):
    file, environment = clocks
    scene = Scene(kind, tmp_path, **environment)
    try:
        with Traffic(scene) as traffic:
            for seconds in ("+3600", "-3600"):
                file.write_text(seconds)
                traffic.goes_on(1.5)
                traffic.is_well()
    finally:
        scene.close()


@each()
def test_fleets_that_share_an_engine(scene):
    """Whatever ranks and layouts they have, those of one model read each other's chunks, and nobody else's."""
    traffic = Traffic(scene, patience=10.0)
    one, two, other = traffic.fleets
    try:
        numbers = [next(one.numbers) for _ in range(CHUNKS)]
        assert one.put(numbers) == other.put(numbers[:2]) == {"ok"}
        assert two.get(numbers) == {"ok"}
        assert other.get(numbers[2:]) == {"miss"} and other.get(numbers[:2]) == {"ok"}
        numbers = [next(two.numbers) for _ in range(CHUNKS)]
        assert two.put(numbers) == {"ok"}
        assert one.get(numbers) == {"ok"}
    finally:
        traffic.close()
