# SPDX-License-Identifier: Apache-2.0
"""Engines that are written in Python: the contract, and what may go wrong in them."""

import ctypes
import gc
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest

import kvstride as kv
from engine_contract import EngineContract, Memory, soon
from kvstride import _core
from kvstride.remote import Engine


class Dictionary(Engine):
    """Objects in a dict."""

    kind = "dictionary"
    detail = "here"
    reads_ranges = True

    def __init__(self):
        self.objects = {}
        self.regions = []
        self.closed = 0
        self.lock = threading.Lock()

    def memory(self, address, size):
        self.regions.append((address, size))

    def find(self, names, deadline):
        return [("ok", len(self.objects[name])) if name in self.objects else ("absent", -1) for name in names]

    def read(self, names, addresses, sizes, ranges, deadline):
        out = []
        for name, address, size, wanted in zip(names, addresses, sizes, ranges, strict=True):
            found = self.objects.get(name)
            if found is not None and len(found) == size:
                for begin, end in wanted:
                    ctypes.memmove(address + begin, found[begin:end], end - begin)
            out.append(("absent", -1) if found is None else ("ok", len(found)))
        return out

    def write(self, names, addresses, sizes, replace, deadline):
        out = []
        for name, address, size, again in zip(names, addresses, sizes, replace, strict=True):
            with self.lock:
                there = name in self.objects and not again
                if not there:
                    self.objects[name] = ctypes.string_at(address, size)
            out.append("there" if there else "ok")
        return out

    def remove(self, names, deadline):
        for name in names:
            self.objects.pop(name, None)
        return ["ok"] * len(names)

    def list(self, folder, deadline):
        below = [name[len(folder) :].partition("/") for name in self.objects if name.startswith(folder)]
        return {(folder + head + slash, -1, 0) for head, slash, _ in below}

    def close(self):
        self.closed += 1


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self):
        return _core.Engine(Dictionary())


class TestDocumentation(EngineContract):
    @pytest.fixture
    def engine(self):
        page = (pathlib.Path(__file__).parents[2] / "docs" / "remote.md").read_text()
        (code,) = re.findall(r"```python\n(.*?)```", page.partition("## An engine of your own")[2], re.DOTALL)
        names: dict = {}
        exec(code, names)
        names["tier"].close()
        return _core.Engine(names["Dictionary"]())


def with_method(name, function, **more):
    """An engine one of whose methods is `function(self, *arguments)`."""
    return type("Other", (Dictionary,), {name: function, **more})()


def raises(*_):
    raise ValueError("two\nlines " + "ä" * 300)


def returns(value):
    return lambda *_: value


@pytest.mark.parametrize(
    ("returned", "answers", "trouble"),
    [
        ([("ok", 5), ("full", -1)], [("ok", 5), ("full", -1)], ""),
        (iter([("late", -1), ("denied", -1)]), [("late", -1), ("denied", -1)], ""),
        ([("ok", 5)], [("broken", -1)] * 2, "find(): 1 answers for 2 items"),
        ([("ok", 5)] * 3, [("broken", -1)] * 2, "find(): 3 answers for 2 items"),
        (None, [("broken", -1)] * 2, "find(): TypeError: 'NoneType' object is not iterable"),
        ([("ok", 5), ("OK", 5)], [("ok", 5), ("broken", -1)], "find(): no answer: 'OK'"),
        ([("ok", 5), (7, 5)], [("ok", 5), ("broken", -1)], "find(): no answer: 7"),
        ([("ok", 5), ("ok", "x")], [("ok", 5), ("broken", -1)], "find(): not what it should return"),
        ([("ok", 5), ("ok", 1 << 70)], [("ok", 5), ("broken", -1)], "find(): not what it should return"),
        ([("ok", 5), "ok"], [("ok", 5), ("broken", -1)], "find(): no answer: 'o'"),
    ],
)
def test_wrong_answers_are_broken(returned, answers, trouble):
    engine = _core.Engine(with_method("find", returns(returned)))
    assert engine.find(["a", "b"], soon()) == answers
    assert (engine.detail, engine.trouble) == ("here", trouble)


@pytest.mark.parametrize("verb", ["find", "read", "write", "remove", "list", "memory"])
def test_exceptions_are_broken_and_told(verb):
    engine = _core.Engine(with_method(verb, raises))
    calls = {
        "find": lambda: engine.find(["a"], soon()),
        "read": lambda: engine.read(["a"], [0], [1], [[(0, 1)]], soon()),
        "write": lambda: engine.write(["a"], [0], [0], [False], soon()),
        "remove": lambda: engine.remove(["a"], soon()),
        "list": lambda: engine.list("", soon()),
        "memory": lambda: engine.memory(0, 4096),
    }
    expected = {"find": [("broken", -1)], "read": [("broken", -1)], "list": ("broken", []), "memory": False}
    assert calls[verb]() == expected.get(verb, ["broken"])
    said = engine.trouble.removeprefix(f"{verb}(): ")
    assert said.startswith("ValueError: two lines ää")
    assert len(said.encode()) <= 200
    # The next call that works clears it.
    assert engine.trouble.isprintable()
    if verb != "remove":
        assert engine.remove(["a"], soon()) == ["ok"]
        assert engine.trouble == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError(), StopIteration()])
def test_no_exception_ends_a_thread(error):
    def raising(*_):
        raise error

    engine = _core.Engine(with_method("find", raising))
    assert engine.find(["a"], soon()) == [("broken", -1)]
    assert type(error).__name__ in engine.trouble


def test_an_exception_whose_text_raises():
    class Nasty(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def raising(*_):
        raise Nasty

    engine = _core.Engine(with_method("find", raising))
    assert engine.find(["a"], soon()) == [("broken", -1)]
    assert engine.trouble == "find(): Nasty"


def test_nothing_is_asked_too_late():
    calls = []
    engine = _core.Engine(with_method("find", lambda *arguments: calls.append(arguments)))
    assert engine.find(["a"], time.monotonic() - 0.001) == [("late", -1)]
    assert engine.find([], soon()) == []
    assert calls == []


def test_what_comes_late_is_still_an_answer():
    def slow(self, names, deadline):
        time.sleep(0.1)
        assert deadline == pytest.approx(time.monotonic() - 0.05, abs=0.04)
        return [("ok", 1)]

    assert _core.Engine(with_method("find", slow)).find(["a"], time.monotonic() + 0.05) == [("ok", 1)]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("kind", 7, "an engine's kind is 7, expected a str"),
        ("largest", 0, "an engine's largest is 0, of 1 to 8796093022208"),
        ("largest", "1", "an engine's largest is '1', expected a whole number"),
        ("num_threads", 257, "an engine's num_threads is 257, of 1 to 256"),
        ("reads_ranges", 1, "an engine's reads_ranges is 1, expected True or False"),
        ("batch", 0, "an engine's batch is 0, of 1 to 1048576"),
    ],
)
def test_properties_are_checked(name, value, why):
    with pytest.raises(kv.ArgumentError) as caught:
        kv.RemoteTier(type("Other", (Dictionary,), {name: value})())
    assert str(caught.value) == why


def test_only_engines_are_engines():
    with pytest.raises(kv.ArgumentError, match="url is dict, expected a str"):
        kv.RemoteTier({})
    with pytest.raises(TypeError, match="abstract"):
        Engine()


def test_is_closed_and_freed():
    python = Dictionary()
    engine = _core.Engine(python)
    gone = weakref.ref(python)
    engine.close()
    assert python.closed == 1
    with pytest.raises(kv.StoreError, match="the engine is closed"):
        engine.find(["a"], soon())
    del python
    gc.collect()
    assert gone() is None


SIZES = {"num_layers": 1, "block_size": 16, "num_kv_heads": 4, "head_size": 64}


def store_over(engine, blocks=32):
    layout = kv.layout("B N H KV D", kv.Geometry(num_blocks=blocks, **SIZES))
    data = np.random.default_rng(1).integers(0, 256, layout.num_bytes, np.uint8)
    cache = kv.Cache([data], layout)
    copy = np.zeros_like(data)
    other = kv.Cache([copy], layout)
    other.right, other.bytes = data, copy
    space = kv.Namespace(model="m", revision="1", planes={"key": "bf16", "value": "bf16"}, **SIZES)
    tier = kv.RemoteTier(engine, staging_bytes=64 << 20)
    return kv.Store(tier, namespace=space), cache, other, [kv.Key.chain(None, [i]) for i in range(blocks)]


def test_a_store_over_it():
    engine = Dictionary()
    store, cache, other, keys = store_over(engine)
    with store:
        assert store.put(keys, cache, list(range(32))).wait() == ["ok"] * 32
        assert len(engine.regions) >= 1
        assert store.get(keys, other, list(range(32))).wait() == ["ok"] * 32
        assert (other.bytes == other.right).all()
        assert store.metrics()["tiers"][0]["tier"] == "dictionary"
        # A byte of one object changes behind our back.
        name = max(engine.objects, key=lambda one: len(engine.objects[one]))
        damaged = bytearray(engine.objects[name])
        damaged[5000] ^= 1
        engine.objects[name] = bytes(damaged)
        outcomes = store.get(keys, other, list(range(32))).wait()
        assert sorted(outcomes) == ["corrupt"] + ["ok"] * 31


def test_calls_run_side_by_side_with_python():
    """The interpreter's lock is not kept while the library works, nor by a method that waits without it."""
    engine = with_method("read", lambda self, *a: time.sleep(0.05) or Dictionary.read(self, *a))
    store, cache, other, keys = store_over(engine)
    with store:
        assert store.put(keys, cache, list(range(32))).wait() == ["ok"] * 32
        job = store.get(keys, other, list(range(32)))
        worst, last = 0.0, time.perf_counter()
        while not job.done:
            time.sleep(0.001)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
        assert job.ok
        assert worst < 0.5


def test_in_a_forked_child_it_answers_nothing():
    engine = _core.Engine(Dictionary())
    memory = Memory(engine, 1 << 20)
    assert memory.write("a", np.ones(100, np.uint8)) == "ok"
    child = os.fork()
    if child == 0:
        try:
            ok = engine.find([memory.folder + "a"], soon()) == [("broken", -1)]
            fresh = Memory(_core.Engine(Dictionary()), 1 << 20)  # one of its own works
            ok = ok and fresh.write("a", np.ones(100, np.uint8)) == "ok"
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert memory.read("a", 100)[0] == "ok"


EXIT = """
    import sys, threading, time
    sys.path.insert(0, {folder!r})
    from test_python_engine import Dictionary, store_over, with_method

    def slow(self, *arguments):
        time.sleep(0.02)
        return Dictionary.read(self, *arguments)

    store, cache, other, keys = store_over(with_method("read", slow))
    assert store.put(keys, cache, list(range(32))).wait() == ["ok"] * 32
    {how}
    time.sleep(0.05)
    print("the end", flush=True)
"""


@pytest.mark.parametrize(
    "how",
    [
        "jobs = [store.get(keys, other, list(range(32))) for _ in range(20)]",
        """
    def work():
        while True:
            store.get(keys, other, list(range(32))).wait()
            store.lookup(keys)
    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()""",
    ],
    ids=["jobs", "daemons"],
)
def test_the_interpreter_ends_in_mid_call(how):
    script = textwrap.dedent(EXIT.format(folder=os.path.dirname(os.path.abspath(__file__)), how=how))
    for _ in range(3):
        child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert (child.returncode, child.stdout, child.stderr) == (0, "the end\n", "")
