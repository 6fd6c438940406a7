# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store as an engine of the remote tier: its own servers, one master and two nodes, TCP on loopback."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import kvstride as kv
from engine_contract import POISON, EngineContract, Memory, content, soon
from kvstride import _core
from kvstride.remote import open_engine
from servers import mooncake as servers

if servers.package() is None:
    if os.environ.get("KVSTRIDE_REQUIRE_MOONCAKE"):
        pytest.fail("KVSTRIDE_REQUIRE_MOONCAKE is set and the package mooncake is not installed")
    pytest.skip("Mooncake is not installed (mooncake-transfer-engine-non-cuda)", allow_module_level=True)

#: Of the engines here: how long one waits for somebody who does not answer.
TIMEOUT = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with servers.Mooncake(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


@pytest.fixture
def own(tmp_path):
    """A cluster that a test may break."""
    with servers.Mooncake(tmp_path) as running:
        yield running


def open_one(running, **options):
    return open_engine(running.url(**{"timeout": TIMEOUT, **options}))


@pytest.fixture(scope="module", params=["", "fleet/a"], ids=["bare", "prefix"])
def arena(request, cluster):
    """Memory of an engine; Mooncake's client wants each piece once."""
    url = cluster.url(replicas=2, timeout=TIMEOUT)
    engine = open_engine(url.replace("?", f"/{request.param}?"))
    yield Memory(engine)
    engine.close()


class TestContract(EngineContract):
    @pytest.fixture
    def memory(self, arena):
        arena.folder = Memory.new_folder()
        arena.poison()
        return arena


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mooncake://h?replica=2", "the option replica is none of metadata, protocol, devices, replicas, segment"),
        ("mooncake://h?replicas=0", "replicas is 0, of 1 to 64"),
        ("mooncake://h?buffer=64X", "buffer is 64X, expected a number"),
        ("mooncake://h?segment=-1G", "segment is -1G, of 0 to"),
        ("mooncake://h?protocol=udp", "protocol is udp, expected tcp or rdma"),
        ("mooncake://?replicas=1", "it must be mooncake://host:port/prefix?option=value"),
        ("mooncake://me:secret@h", "it must be mooncake://host:port/prefix?option=value"),
        ("mooncake://h:99999", "its port is '99999', of 1 to 65535"),
    ],
)
def test_urls_that_cannot_be(url, why):
    with pytest.raises(kv.ArgumentError, match=re.escape(why)) as caught:
        kv.RemoteTier(url)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_prefixes_do_not_meet(cluster):
    engines = [open_engine(cluster.url(timeout=TIMEOUT).replace("?", f"/{one}?")) for one in ("a", "b")]
    memories = [Memory(engine, 1 << 20) for engine in engines]
    for number, memory in enumerate(memories):
        memory.folder = "same/"
        assert memory.write("x", content(4096, number)) == "ok"
    for number, memory in enumerate(memories):
        assert memory.read("x", 4096) == ("ok", 4096)
        assert (memory.bytes[:4096] == content(4096, number)).all()
        assert memory.engine.list("", soon()) == ("ok", [("same/", -1, 0)])


def test_memory_that_it_does_not_know_is_refused(cluster):
    engine = open_one(cluster)
    memory = Memory(engine, 1 << 20)
    assert memory.write("a", content(8192, 1)) == "ok"
    other = np.full(8192, POISON, np.uint8)
    name = [memory.folder + "a"]
    assert engine.read(name, [other.ctypes.data], [8192], [[(0, 8192)]], soon()) == [("broken", -1)]
    assert engine.read(name, [memory.address + (1 << 20) - 4096], [8192], [[(0, 8192)]], soon()) == [("broken", -1)]
    assert (other == POISON).all()


def test_memory_at_an_address_that_was_anothers(cluster):
    engine = open_one(cluster)
    memory = Memory(engine, 1 << 20)
    assert memory.write("a", content(8192, 1)) == "ok"  # it is connected
    engine.memory(memory.address, 1 << 19)
    engine.memory(memory.address + (1 << 19), 1 << 19)
    assert engine.detail.endswith(str(cluster.port))
    assert memory.read("a", 8192) == ("ok", 8192)
    assert (memory.bytes[:8192] == content(8192, 1)).all()


def test_a_lease_does_not_keep_what_is_damaged(cluster):
    memory = Memory(open_one(cluster, replicas=2), 1 << 20)
    assert memory.write("a", content(8192, 1)) == "ok"
    for seed, size in ((2, 8192), (3, 4096), (4, 65536)):
        assert memory.read("a", 8192)[0] in ("ok", "broken")  # now it has a lease
        assert memory.write("a", content(size, seed), replace=True) == "ok"
        assert memory.find("a") == [("ok", size)]
        assert memory.read("a", size) == ("ok", size)
        assert (memory.bytes[:size] == content(size, seed)).all()
    assert memory.engine.remove([memory.folder + "a"], soon()) == ["ok"]
    assert memory.find("a") == [("absent", -1)]


def test_a_full_engine(tmp_path):
    with servers.Mooncake(tmp_path, nodes=1, segment=32 << 20, lease_ms=60_000) as small:
        memory = Memory(open_one(small), 16 << 20)
        answers = []
        for i in range(6):  # what was found has a lease, for a minute, and is not evicted
            answers.append(memory.write(str(i), content(8 << 20, i)))
            memory.find(str(i))
        assert answers[:3] == ["ok"] * 3
        assert answers[4:] == ["full"] * 2
        # It serves what it has.
        for i, answer in enumerate(answers):
            assert memory.find(str(i))[0] == (("ok", 8 << 20) if answer == "ok" else ("absent", -1))
            if answer == "ok":
                assert memory.read(str(i), 8 << 20) == ("ok", 8 << 20)
                assert (memory.bytes[: 8 << 20] == content(8 << 20, i)).all()


class Ticks:
    """Another thread of Python's, which must go on meanwhile."""

    def __enter__(self):
        self.worst, self._end = 0.0, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.begin = time.monotonic()
        return self

    def _run(self):
        last = time.perf_counter()
        while not self._end:
            time.sleep(0.001)
            now = time.perf_counter()
            self.worst, last = max(self.worst, now - last), now

    def __exit__(self, *_):
        self.seconds = time.monotonic() - self.begin
        self._end = True
        self._thread.join()


def test_a_dead_node(own):
    memory = Memory(open_one(own, replicas=2), 16 << 20)
    rights = [content(1 << 20, i) for i in range(8)]
    for i, right in enumerate(rights):
        assert memory.write(str(i), right) == "ok"
    own.kill(own.nodes[0])
    # Until the master has noticed: right bytes or none, and nobody waits for long.
    with Ticks() as ticks:
        for i, right in enumerate(rights):
            answer, _ = memory.read(str(i), 1 << 20)
            assert answer in ("ok", "broken")
            assert answer != "ok" or (memory.bytes[: 1 << 20] == right).all()
        assert memory.write("new", rights[0]) in ("ok", "broken")
    assert ticks.worst < 1
    assert ticks.seconds < 9 * (TIMEOUT + 2)
    own.wait_for_segments(1)
    # Afterwards all is there, and written again.
    for i, right in enumerate(rights):
        assert memory.read(str(i), 1 << 20) == ("ok", 1 << 20)
        assert (memory.bytes[: 1 << 20] == right).all()
    assert memory.write("later", rights[0]) == "ok"


def test_a_node_that_hangs(own):
    memory = Memory(open_one(own, replicas=2), 16 << 20)
    right = content(1 << 20, 1)
    for i in range(8):
        assert memory.write(str(i), right) == "ok"
    own.nodes[0].send_signal(signal.SIGSTOP)
    names, places = [f"{memory.folder}{i}" for i in range(8)], [memory.address + (i << 20) for i in range(8)]
    memory.poison()
    with Ticks() as ticks:
        answers = memory.engine.read(names, places, [1 << 20] * 8, [[(0, 1 << 20)]] * 8, soon())
    assert ticks.worst < 1
    # Twice: for what the connection was doing, and for what waited behind it.
    assert ticks.seconds < 2 * TIMEOUT + 3
    assert "broken" in {answer for answer, _ in answers}
    own.nodes[0].send_signal(signal.SIGCONT)
    before = memory.bytes.copy()
    time.sleep(1)
    assert (memory.bytes == before).all(), "memory changed after the call"
    for i, (answer, _) in enumerate(answers):
        assert answer != "ok" or (memory.bytes[i << 20 : (i + 1) << 20] == right).all()


def test_a_node_killed_in_mid_read_and_mid_write(own):
    memory = Memory(open_one(own), 40 << 20)
    right = content(16 << 20, 1)
    for i in range(8):
        assert memory.write(str(i), right) == "ok"
    # A fast machine does all that follows in 0.15 s.
    threading.Timer(0.05, own.kill, [own.nodes[0]]).start()
    answers = []
    for i in range(8):
        answer, _ = memory.read(str(i), 16 << 20)
        answers.append(answer)
        assert answer != "ok" or (memory.bytes[: 16 << 20] == right).all()
        answer = memory.write(f"new{i}", right, at=20 << 20)
        answers.append(answer)
        assert answer in ("ok", "broken")
    assert "broken" in answers
    own.wait_for_segments(1)
    for i in range(8):
        answer, _ = memory.read(f"new{i}", 16 << 20)
        assert answer in ("ok", "absent")
        assert answer != "ok" or (memory.bytes[: 16 << 20] == right).all()


def test_a_master_that_hangs_and_one_that_starts_anew(own):
    engine = open_one(own)
    memory = Memory(engine, 4 << 20)
    right = content(1 << 20, 1)
    assert memory.write("a", right) == "ok"
    own.master.send_signal(signal.SIGSTOP)
    with Ticks() as ticks:
        assert memory.find("a") == [("broken", -1)]
        assert memory.read("a", 1 << 20) == ("broken", -1)
    assert ticks.worst < 1
    assert ticks.seconds < 2 * TIMEOUT + 2
    own.kill(own.master)
    with Ticks() as ticks:
        assert memory.find("a") == [("broken", -1)]
        assert memory.write("b", right) == "broken"
        assert memory.read("a", 1 << 20) == ("broken", -1)
    assert ticks.worst < 1
    # After one failure it is asked whether anybody is there, which Mooncake's own client tries for seconds.
    assert ticks.seconds < 1
    assert "find(): ConnectionRefusedError" in engine.trouble or "read(): ConnectionRefusedError" in engine.trouble
    own.start_master()
    own.wait_for_segments(2)
    # It knows nothing of what was there.
    assert memory.find("a") == [("absent", -1)]
    assert memory.write("a", right) == "ok"
    assert memory.read("a", 1 << 20) == ("ok", 1 << 20)
    assert (memory.bytes[: 1 << 20] == right).all()


@pytest.mark.parametrize("what", ["nobody", "hangs"])
def test_connecting_keeps_no_thread_of_pythons_waiting(tmp_path, what):
    with servers.Mooncake(tmp_path, nodes=0) as running:
        if what == "nobody":
            running.kill(running.master)
        else:
            running.master.send_signal(signal.SIGSTOP)
        engine = open_one(running)
        with Ticks() as ticks:
            assert engine.find(["a"], soon()) == [("broken", -1)]
            assert engine.find(["a"], time.monotonic() + 0.2) == [("broken", -1)]
        assert ticks.worst < 1
        assert ticks.seconds < TIMEOUT + 2
        assert "find(): " in engine.trouble


def test_large_transfers_keep_no_thread_of_pythons_waiting(own):
    memory = Memory(open_one(own), 200 << 20)
    right = content(100 << 20, 1)
    with Ticks() as ticks:
        assert memory.write("a", right) == "ok"
        memory.engine.read([memory.folder + "a"], [memory.address], [100 << 20], [[(0, 100 << 20)]], soon())
    assert (memory.bytes[: 100 << 20] == right).all()
    assert ticks.worst < 0.5


@pytest.mark.skipif(not os.environ.get("KVSTRIDE_LONG"), reason="a minute: KVSTRIDE_LONG is not set")
def test_a_transfer_that_mooncake_gives_up_touches_memory_no_more(tmp_path):
    """After 60 seconds it says that a transfer has failed, and goes on with it."""
    with servers.Mooncake(tmp_path, nodes=1, segment=1 << 30, lease_ms=300_000, ttl=120) as slow:
        memory = Memory(open_one(slow, timeout=30), 700 << 20)
        right = content(600 << 20, 1)
        assert memory.write("a", right, deadline=soon(100)) == "ok"
        end = threading.Event()

        def hold_up():
            while not end.is_set():
                slow.nodes[0].send_signal(signal.SIGSTOP)
                time.sleep(1.2)
                slow.nodes[0].send_signal(signal.SIGCONT)
                time.sleep(0.006)

        thread = threading.Thread(target=hold_up)
        thread.start()
        begin = time.monotonic()
        answer = memory.read("a", 600 << 20, deadline=soon(200))
        seconds = time.monotonic() - begin
        memory.bytes[:] = 1
        end.set()
        thread.join()
        if answer[0] == "ok" or seconds < 55:
            pytest.skip(f"{answer} after {seconds:.0f} s: this machine was too fast or too slow")
        time.sleep(5)
        assert (memory.bytes == 1).all()
        assert memory.read("a", 600 << 20, deadline=soon(60)) == ("ok", 600 << 20)
        assert (memory.bytes[: 600 << 20] == right).all()


SIZES = {"num_layers": 1, "block_size": 64, "num_kv_heads": 4, "head_size": 64}


class Chunks:
    """A store over an engine alone, and blocks for it."""

    def __init__(self, url, blocks=16, **options):
        layout = kv.layout("B N H KV D", kv.Geometry(num_blocks=blocks, **SIZES))
        self.right = content(layout.num_bytes, 1)
        self.got = np.full_like(self.right, POISON)
        self.caches = [kv.Cache([array], layout) for array in (self.right, self.got)]
        self.blocks = list(range(blocks))
        self.keys = [kv.Key.chain(None, [i]) for i in self.blocks]
        space = kv.Namespace(model="m", revision="1", planes={"key": "bf16", "value": "bf16"}, **SIZES)
        tier = kv.RemoteTier(url, staging_bytes=32 << 20, timeout=3.0, **options)
        self.store = kv.Store(tier, namespace=space)

    def put(self, **options):
        return self.store.put(self.keys, self.caches[0], self.blocks, **options).wait()

    def get(self, **options):
        self.got[:] = POISON
        return self.store.get(self.keys, self.caches[1], self.blocks, **options).wait()

    def check(self, outcomes):
        """Blocks that came are right, the others untouched."""
        rows, rights = self.got.reshape(len(self.blocks), -1), self.right.reshape(len(self.blocks), -1)
        for i, outcome in enumerate(outcomes):
            assert (rows[i] == (rights[i] if outcome == "ok" else POISON)).all(), (i, outcome)


def test_a_store_of_another_process_has_it(cluster):
    url = cluster.url(timeout=TIMEOUT)
    chunks = Chunks(url)
    with chunks.store:
        assert chunks.put() == ["ok"] * 16
        script = f"""
            import sys
            sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
            from test_mooncake import Chunks
            chunks = Chunks({url!r})
            assert chunks.store.lookup_prefix(chunks.keys) == 16
            outcomes = chunks.get()
            chunks.check(outcomes)
            print(outcomes)
        """
        command = [sys.executable, "-c", textwrap.dedent(script)]
        child = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert child.stdout == f"{['ok'] * 16}\n", child.stderr
        assert child.returncode == 0, child.stderr


def test_a_byte_flipped_in_a_nodes_memory_is_found(own):
    chunks = Chunks(own.url(timeout=TIMEOUT))
    with chunks.store:
        assert chunks.put() == ["ok"] * 16
        (name,) = [key for key in own.ask("/get_all_keys").split() if chunks.keys[5].hex in key]
        assert own.flip(name, 5000) == 1
        outcomes = chunks.get()
        assert outcomes == ["ok"] * 5 + ["corrupt"] + ["ok"] * 10
        chunks.check(outcomes)
        assert chunks.get()[5] == "miss"
        # The next put of it heals it.
        assert chunks.put() == ["ok"] * 16
        outcomes = chunks.get()
        assert outcomes == ["ok"] * 16
        chunks.check(outcomes)


def test_a_store_goes_on_while_a_node_dies(own):
    chunks = Chunks(own.url(timeout=TIMEOUT, replicas=2))
    with chunks.store:
        assert chunks.put() == ["ok"] * 16
        own.kill(own.nodes[0])
        for _ in range(4):
            begin = time.monotonic()
            outcomes = chunks.get(deadline=2.0)
            assert time.monotonic() - begin < 3.0
            chunks.check(outcomes)
        own.wait_for_segments(1)
        end = time.monotonic() + 30
        while (outcomes := chunks.get(deadline=5.0)) != ["ok"] * 16:
            chunks.check(outcomes)
            assert time.monotonic() < end, (outcomes, chunks.store.metrics()["tiers"])
            time.sleep(0.5)
        chunks.check(outcomes)


@pytest.mark.parametrize("call", ["get", "put"])
def test_the_interpreter_ends_in_mid_call(own, call):
    url = own.url(timeout=TIMEOUT)
    script = f"""
        import sys, time
        sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
        from test_mooncake import Chunks
        chunks = Chunks({url!r}, blocks=256)
        jobs = [chunks.store.{call}(chunks.keys, chunks.caches[{call != "put":d}], chunks.blocks) for _ in range(4)]
        time.sleep(0.15)
        print("the end", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    for _ in range(2):
        child = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (child.returncode, child.stdout) == (0, "the end\n"), child.stderr[-2000:]


def test_what_the_environment_says_is_left_alone(cluster):
    script = f"""
        import os
        os.environ["MC_RPC_TIMEOUT_MS"] = "1234"
        from kvstride.remote import open_engine
        open_engine({cluster.url(timeout=7)!r})
        print(os.environ["MC_RPC_TIMEOUT_MS"], os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"])
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean)
    assert child.stdout == "1234 7\n", child.stderr


def test_engines_say_what_they_are(cluster):
    engine = open_one(cluster, threads=3)
    assert (engine.kind, engine.num_threads, engine.reads_ranges) == ("mooncake", 3, True)
    assert engine.detail == f"mooncake://127.0.0.1:{cluster.port}"
    assert isinstance(engine, _core.Engine)
    without = open_engine(f"mooncake://127.0.0.1:{cluster.port}")
    assert without.list("", soon()) == ("absent", [])
