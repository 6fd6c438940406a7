# SPDX-License-Identifier: Apache-2.0
"""What every engine must do (src/store/remote/engine.h), from Python: tests/engine_contract_test.cpp has the same for
those in C++. A test class derives from EngineContract and has a fixture `engine`, a `_core.Engine`.
"""

import itertools
import threading
import time

import numpy as np
import pytest

POISON = 0xA5
_FOLDERS = itertools.count()


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


class Memory:
    """Memory that an engine knows. `put` copies bytes into it, `get` makes room."""

    def __init__(self, engine, size=48 << 20) -> None:
        self.bytes = np.full(size, POISON, np.uint8)
        self.address = self.bytes.ctypes.data
        self.engine = engine
        self.folder = self.new_folder()
        engine.memory(self.address, size)

    @staticmethod
    def new_folder() -> str:
        return f"t{next(_FOLDERS)}x{time.time_ns() % 10**9}/"

    def poison(self) -> None:
        self.bytes[:] = POISON

    def write(self, name, content, *, replace=False, at=0, deadline=None):
        self.bytes[at : at + len(content)] = content
        (answer,) = self.engine.write(
            [self.folder + name], [self.address + at], [len(content)], [replace], deadline or soon()
        )
        return answer

    def read(self, name, size, ranges=None, *, deadline=None):
        self.poison()
        (answer,) = self.engine.read(
            [self.folder + name], [self.address], [size], [ranges or [(0, size)]], deadline or soon()
        )
        return answer

    def find(self, *names):
        return self.engine.find([self.folder + name for name in names], soon())

    def remove(self, name, seconds=30.0):
        """A lease may keep it for some seconds."""
        end = soon(seconds)
        while (answer := self.engine.remove([self.folder + name], soon())) != ["ok"] and time.monotonic() < end:
            time.sleep(0.2)
        return answer[0]


def content(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class EngineContract:
    @pytest.fixture
    def memory(self, engine):
        return Memory(engine)

    def test_says_what_is_not_there(self, memory):
        assert memory.find("1", "a/2") == [("absent", -1)] * 2
        assert memory.read("1", 4096)[0] == "absent"
        assert (memory.bytes == POISON).all()
        assert memory.remove("1") == "ok"

    @pytest.mark.parametrize("size", [1, 4096, 65536, (1 << 20) + 4096, 9 << 20, 33 << 20])
    def test_gives_back_what_was_written(self, memory, size):
        right = content(size, 7)
        assert memory.write("a", right) == "ok"
        assert memory.find("a")[0] in [("ok", size), ("ok", -1)]
        answer, found = memory.read("a", size)
        assert answer == "ok"
        assert found in (size, -1)
        assert (memory.bytes[:size] == right).all()
        assert memory.bytes[size] == POISON
        assert memory.remove("a") == "ok"
        assert memory.find("a")[0][0] == "absent"

    def test_many_items_each_with_its_own_bytes(self, memory):
        rights = [content((1 + i % 7) * 4096, i) for i in range(40)]
        names = [f"{memory.folder}{i % 16}/{i}" for i in range(43)]
        places = [memory.address + i * 32768 for i in range(60)]
        for i, right in enumerate(rights):
            memory.bytes[i * 32768 : i * 32768 + len(right)] = right
        sizes = [len(right) for right in rights]
        assert memory.engine.write(names[:40], places[:40], sizes, [False] * 40, soon()) == ["ok"] * 40
        memory.poison()
        # In another order; three that are not there, and some twice.
        order = [i * 17 % 43 for i in range(43)] + [3, 3, 5, 39]
        lengths = [sizes[i] if i < 40 else 4096 for i in order]
        ranges = [[(0, length)] for length in lengths]
        answers = memory.engine.read([names[i] for i in order], places[: len(order)], lengths, ranges, soon())
        for n, i in enumerate(order):
            assert answers[n][0] == ("ok" if i < 40 else "absent"), (n, i)
            if i < 40:
                assert (memory.bytes[n * 32768 :][: sizes[i]] == rights[i]).all(), (n, i)

    def test_reads_ranges(self, memory):
        if not memory.engine.reads_ranges:
            pytest.skip("whole objects only")
        right = content(1 << 20, 3)
        assert memory.write("a", right) == "ok"
        ranges = [(0, 4096), (65536, 131072), ((1 << 20) - 4096, 1 << 20)]
        assert memory.read("a", 1 << 20, ranges) == ("ok", 1 << 20)
        expected = np.full(1 << 20, POISON, np.uint8)
        for begin, end in ranges:
            expected[begin:end] = right[begin:end]
        assert (memory.bytes[: 1 << 20] == expected).all()
        assert (memory.bytes[1 << 20 :] == POISON).all()

    @pytest.mark.parametrize("expected", [2 * 4096, 4 * 4096])
    @pytest.mark.parametrize("part", [False, True])
    def test_says_how_long_it_really_is(self, memory, expected, part):
        assert memory.write("a", content(3 * 4096, 5)) == "ok"
        answer, found = memory.read("a", expected, [(0, 4096)] if part else None)
        assert (memory.bytes[expected:] == POISON).all()
        # It may also say that nothing came of it, but never that all is well.
        assert answer != "ok" or found == 3 * 4096

    def test_replaces_only_when_told(self, memory):
        first, second, third = content(8192, 1), content(8192, 2), content(12288, 3)
        assert memory.write("a", first) == "ok"
        again = memory.write("a", second)
        assert again in ("there", "ok")
        assert memory.read("a", 8192)[0] == "ok"
        assert (memory.bytes[:8192] == (first if again == "there" else second)).all()
        assert memory.write("a", third, replace=True) == "ok"
        assert memory.read("a", 12288)[0] == "ok"
        assert (memory.bytes[:12288] == third).all()

    def test_finds_thousand_names(self, memory):
        for i in range(0, 1000, 100):
            assert memory.write(str(i), content(4096, 1)) == "ok"
        found = memory.find(*map(str, range(1000)))
        assert [answer == "ok" for answer, _ in found] == [i % 100 == 0 for i in range(1000)]
        assert {answer for answer, _ in found} == {"ok", "absent"}

    def test_ends_at_its_deadline(self, memory):
        right = content(4096, 1)
        assert memory.write("a", right) == "ok"
        begin = time.monotonic()
        assert memory.read("a", 4096, deadline=begin - 1)[0] in ("late", "ok")
        assert time.monotonic() - begin < 5
        assert memory.read("a", 4096)[0] == "ok"
        assert (memory.bytes[:4096] == right).all()

    def test_serves_threads_at_once(self, memory):
        bad = []

        def work(t):
            for r in range(5):
                at = t << 22
                right = content(65536, 10 * t + r)
                memory.bytes[at : at + 65536] = right
                name, place = [f"{memory.folder}{t}/{r}"], [memory.address + at]
                if memory.engine.write(name, place, [65536], [False], soon()) != ["ok"]:
                    bad.append("write")
                memory.bytes[at : at + 65536] = POISON
                (answer,) = memory.engine.read(name, place, [65536], [[(0, 65536)]], soon())
                if answer[0] != "ok" or not (memory.bytes[at : at + 65536] == right).all():
                    bad.append(answer)

        threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bad == []

    def test_lists_folders(self, memory):
        for tail in ("one", "two", "sub/three", "sub/four", "sub/deep/five"):
            assert memory.write(tail, content(4096, 1)) == "ok"
        answer, found = memory.engine.list(memory.folder, soon())
        if answer == "absent":
            pytest.skip("cannot list")
        assert answer == "ok"
        assert sorted(name for name, _, _ in found) == [memory.folder + tail for tail in ("one", "sub/", "two")]
        answer, found = memory.engine.list(memory.folder + "sub/", soon())
        assert sorted(name for name, _, _ in found) == [memory.folder + "sub/" + t for t in ("deep/", "four", "three")]
