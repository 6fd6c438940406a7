# SPDX-License-Identifier: Apache-2.0
"""The Redis engine on real servers: one, with passwords, with little memory, and a cluster that people work on."""

import contextlib
import threading
import time

import numpy as np
import pytest

from engine_contract import POISON, EngineContract, soon
from kvstride.remote import open_engine
from servers import redis

if redis.program() is None:
    pytest.skip("redis-server is not installed", allow_module_level=True)

SIZE = 60_000


@pytest.fixture(scope="module")
def lasting_server():
    with redis.Redis() as servers:
        yield servers


@pytest.fixture(scope="module")
def lasting_cluster():
    with redis.Redis(cluster=True) as servers:
        yield servers


@pytest.fixture
def cluster():
    with redis.Redis(cluster=True) as servers:
        yield servers


class TestContractOfOneServer(EngineContract):
    @pytest.fixture
    def engine(self, lasting_server):
        return open_engine(lasting_server.url(2))


class TestContractOfACluster(EngineContract):
    @pytest.fixture
    def engine(self, lasting_cluster):
        return open_engine(lasting_cluster.url())


class Objects:
    """`count` objects of random bytes under names of their own, written and read by an engine."""

    def __init__(self, engine, count, number=0, size=SIZE):
        self.engine, self.count, self.size = engine, count, size
        self.names = [f"t{number}/{i}" for i in range(count)]
        self.bytes = np.random.default_rng(number).integers(0, 256, (count, size), dtype=np.uint8)

    def write(self, replace=False, seconds=10.0):
        places = [row.ctypes.data for row in self.bytes]
        return self.engine.write(self.names, places, [self.size] * self.count, [replace] * self.count, soon(seconds))

    def read(self, seconds=10.0):
        """Answers. What is `ok` has the right bytes, and what is absent was not touched."""
        into = np.full((self.count, self.size), POISON, np.uint8)
        places, ranges = [row.ctypes.data for row in into], [[(0, self.size)]] * self.count
        answers = self.engine.read(self.names, places, [self.size] * self.count, ranges, soon(seconds))
        for i, (answer, _) in enumerate(answers):
            if answer == "ok":
                assert (into[i] == self.bytes[i]).all(), i
            if answer == "absent":
                assert (into[i] == POISON).all(), i
        return [answer for answer, _ in answers]


def eventually(what, seconds=20.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def test_who_may():
    with redis.Redis(requirepass="sesame") as servers:
        with servers.client() as client:
            client("ACL", "SETUSER", "reader", "on", ">only", "~kvstride:*", "+@read", "+cluster|slots")
        owner = Objects(open_engine(servers.url(user=":sesame")), 2)
        assert owner.write() == ["ok"] * 2
        assert Objects(open_engine(servers.url(user="default:sesame")), 2).read() == ["ok"] * 2
        reader = Objects(open_engine(servers.url(user="reader:only")), 2)
        assert reader.read() == ["ok"] * 2
        assert reader.write() == ["denied"] * 2
        assert "NOPERM" in reader.engine.trouble
        for user in ("", ":wrong-one", "nobody:wrong-one"):
            stranger = Objects(open_engine(servers.url(user=user)), 2)
            assert stranger.read() == ["denied"] * 2
            assert stranger.write() == ["denied"] * 2
            assert stranger.engine.trouble.split(": ")[1].split()[0] in ("NOAUTH", "WRONGPASS")
            assert "wrong-one" not in stranger.engine.trouble
    with redis.Redis() as servers:
        assert Objects(open_engine(servers.url(user="nobody:secret")), 1).read() == ["denied"]


def test_databases_and_time_to_live():
    with redis.Redis() as servers:
        objects = Objects(open_engine(servers.url(3, ttl=100, prefix="x:")), 2)
        assert objects.write() == ["ok"] * 2
        assert objects.write() == ["there"] * 2
        assert Objects(open_engine(servers.url(1, prefix="x:")), 2).read() == ["absent"] * 2
        assert Objects(open_engine(servers.url(16)), 2).read() == ["denied"] * 2
        with servers.client() as client:
            assert client("DBSIZE") == 0
            client("SELECT", 3)
            assert sorted(client("KEYS", "*")) == [b"x:t0/0", b"x:t0/1"]
            assert all(90 < client("TTL", f"x:{name}") <= 100 for name in objects.names)


def test_keys_of_others():
    with redis.Redis() as servers:
        objects = Objects(open_engine(servers.url()), 3)
        with servers.client() as client:
            client("LPUSH", "kvstride:t0/1", "x")
        assert objects.write() == ["ok", "there", "ok"]
        assert objects.read() == ["ok", "broken", "ok"]
        assert objects.write(replace=True) == ["ok"] * 3
        assert objects.read() == ["ok"] * 3


def test_no_room():
    with redis.Redis(maxmemory="8mb") as servers:
        objects = Objects(open_engine(servers.url()), 200)
        answers = objects.write()
        assert set(answers) == {"ok", "full"}
        assert 50 < answers.count("ok") < 150
        assert objects.read() == ["ok" if answer == "ok" else "absent" for answer in answers]
        assert "OOM" in objects.engine.trouble


def test_too_large_for_the_server():
    """Its limit is lower than what the engine was told: it says so and closes."""
    with redis.Redis(proto_max_bulk_len="1mb") as servers:
        engine = open_engine(servers.url())
        large = Objects(engine, 1, size=2 << 20)
        assert large.write() in (["too_large"], ["broken"])
        assert Objects(engine, 3).write() == ["ok"] * 3
        assert Objects(open_engine(servers.url(largest=1 << 20)), 1, size=(1 << 20) + 1).write() == ["too_large"]


def test_replies_wait_for_requests_and_requests_for_replies(lasting_server):
    """More each way than any buffer holds, from four threads at once."""
    engine = open_engine(lasting_server.url(connections=4))
    bad = []

    def work(number):
        objects = Objects(engine, 12, number=100 + number, size=8 << 20)
        for _ in range(2):
            bad.extend(a for a in objects.write(replace=True, seconds=60.0) + objects.read(60.0) if a != "ok")
        engine.remove(objects.names, soon())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == []


def test_killed_and_restarted():
    with redis.Redis() as servers:
        objects = Objects(open_engine(servers.url()), 4)
        assert objects.write() == ["ok"] * 4
        servers.kill(0)
        begin = time.monotonic()
        assert objects.read() == ["broken"] * 4
        assert objects.write() == ["broken"] * 4
        assert time.monotonic() - begin < 1
        servers.start(0)
        assert objects.read() == ["absent"] * 4
        assert objects.write() == ["ok"] * 4


def test_killed_in_the_midst():
    with redis.Redis() as servers:
        objects = Objects(open_engine(servers.url()), 16, size=8 << 20)
        assert objects.write() == ["ok"] * 16
        answers = []
        thread = threading.Thread(target=lambda: answers.extend(objects.read() + objects.write(replace=True)))
        thread.start()
        time.sleep(0.03)
        servers.kill(0)
        thread.join(20)
        assert len(answers) == 32
        assert set(answers) <= {"ok", "broken"}
        assert "broken" in answers


def test_stopped_in_the_midst():
    with redis.Redis() as servers:
        objects = Objects(open_engine(servers.url()), 16, size=8 << 20)
        assert objects.write() == ["ok"] * 16
        servers.stop(0)
        for verb in (objects.read, lambda seconds: objects.write(True, seconds)):
            begin = time.monotonic()
            assert verb(seconds=1.0) == ["late"] * 16
            assert 0.9 < time.monotonic() - begin < 2
        servers.go(0)
        assert objects.read() == ["ok"] * 16


class Traffic(threading.Thread):
    """Writes and reads batches of its own until told to end."""

    def __init__(self, url, number):
        super().__init__()
        self.batches = [Objects(open_engine(url), 16, number=10 * number + i) for i in range(4)]
        self.ends = threading.Event()
        self.answers = []
        self.longest = 0.0
        self.error = None

    def run(self):
        turn = 0
        try:
            while not self.ends.is_set():
                objects = self.batches[turn % len(self.batches)]
                for verb in (lambda o: o.write(seconds=2.0), lambda o: o.read(2.0)):
                    begin = time.monotonic()
                    answers = verb(objects)
                    self.longest = max(self.longest, time.monotonic() - begin)
                    self.answers += answers
                turn += 1
        except BaseException as error:  # bytes that are wrong
            self.error = error


@contextlib.contextmanager
def traffic(url, count=2):
    """Threads under way; at the end no byte was wrong and no call went on beyond its deadline."""
    threads = [Traffic(url, number) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.ends.set()
        for thread in threads:
            thread.join()
    for thread in threads:
        assert thread.error is None
        assert thread.longest < 3


def num_keys(servers):
    total = 0
    for number in range(len(servers.ports)):
        with servers.client(number) as client:
            total += client("DBSIZE")
    return total


def slots_with_keys(servers):
    with servers.client() as client:
        return sorted({client("CLUSTER", "KEYSLOT", key) for _, key in servers.keys("kvstride:*")})


def test_slots_move_under_traffic(cluster):
    with traffic(cluster.url()) as threads:
        eventually(lambda: num_keys(cluster) == 2 * 4 * 16)
        for slot in slots_with_keys(cluster)[:30]:
            cluster.migrate(slot, (cluster.owner(slot) + 1) % 3, pause=0.05)
    for thread in threads:
        # MIGRATE has a key on both sides for a moment, and then on none that it says; nothing else is lost on the way.
        assert set(thread.answers) <= {"ok", "there"}
        assert len(thread.answers) > 500


def test_a_node_dies_and_comes_back(cluster):
    with traffic(cluster.url()) as threads:
        eventually(lambda: num_keys(cluster) == 2 * 4 * 16)
        cluster.kill(1)
        time.sleep(3)
        seen = {answer for thread in threads for answer in thread.answers}
        assert "broken" in seen
        assert seen <= {"ok", "there", "absent", "broken", "late"}
        cluster.start(1)
        cluster.wait_until_whole()
        eventually(lambda: all(set(thread.answers[-128:]) <= {"ok", "there"} for thread in threads))


def test_a_node_dies_and_the_others_go_on(cluster):
    for number in range(3):
        with cluster.client(number) as client:
            client("CONFIG", "SET", "cluster-require-full-coverage", "no")
    objects = Objects(open_engine(cluster.url()), 60)
    assert objects.write() == ["ok"] * 60
    with cluster.client() as client:
        slots = [client("CLUSTER", "KEYSLOT", f"kvstride:{name}") for name in objects.names]
    owners = [cluster.owner(slot) for slot in slots]
    cluster.kill(0)  # the one that the URL names
    for _ in range(20):
        answers = objects.read(2.0)
        assert answers == ["broken" if owner == 0 else "ok" for owner in owners]
        time.sleep(0.1)


def test_a_node_stops_and_goes_on(cluster):
    objects = Objects(open_engine(cluster.url()), 60)
    assert objects.write() == ["ok"] * 60
    cluster.stop(2)
    try:
        begin = time.monotonic()
        answers = objects.read(0.5)
        assert time.monotonic() - begin < 1
        assert set(answers) == {"ok", "late"}, "the others answer"
    finally:
        cluster.go(2)
    eventually(lambda: objects.read() == ["ok"] * 60, 60)


def test_the_node_of_the_url_goes_away(cluster):
    objects = Objects(open_engine(cluster.url()), 30)
    assert objects.write() == ["ok"] * 30
    for number in range(3):
        with cluster.client(number) as client:
            client("CONFIG", "SET", "cluster-require-full-coverage", "no")
    for slot in slots_with_keys(cluster):
        if cluster.owner(slot) == 0:
            cluster.migrate(slot, 1)
    cluster.kill(0)
    eventually(lambda: objects.read(2.0) == ["ok"] * 30)


def test_lists_all_nodes(cluster):
    objects = Objects(open_engine(cluster.url()), 50, number=7)
    assert objects.write() == ["ok"] * 50
    assert {number for number, _ in cluster.keys("kvstride:*")} == {0, 1, 2}
    answer, found = objects.engine.list("", soon())
    assert (answer, found) == ("ok", [("t7/", -1, 0)])
    answer, found = objects.engine.list("t7/", soon())
    assert answer == "ok"
    assert sorted(found) == sorted((name, SIZE, 0) for name in objects.names)
    cluster.stop(1)
    assert objects.engine.list("t7/", soon(0.5))[0] == "late"
