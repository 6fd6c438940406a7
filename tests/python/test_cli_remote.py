# SPDX-License-Identifier: Apache-2.0
"""`kvstride store` on engines: the program against a real redis-server, and its code against an engine in Python."""

from __future__ import annotations

import ctypes
import hashlib
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import pytest

from kvstride import _core
from kvstride.remote import Engine
from servers.redis import Redis, missing
from store_files import HEAD_BYTES, HEADS, ORDER, image, namespace_text, random_payload
from test_cli import PROGRAM, assert_refused, program_is_there, run  # noqa: F401 (a fixture for all tests)

SPACE = namespace_text()
HEX = hashlib.sha256(SPACE).hexdigest()
OTHER = namespace_text("acme/chat-70b")
OTHER_HEX = hashlib.sha256(OTHER).hexdigest()
FULL = f"0000{HEADS:04x}"
needs_redis = pytest.mark.skipif(bool(missing()), reason=f"not installed: {missing()}")


def key(i: int) -> bytes:
    return hashlib.sha256(b"key %d" % i).digest()


def chunk(space: bytes, of: bytes, heads: tuple[int, int] = (0, HEADS)) -> tuple[str, bytes]:
    """Name and bytes of an object."""
    name = f"{of.hex()}{heads[0]:04x}{heads[1]:04x}"
    data = image(space, of, heads, random_payload(of, heads), ORDER.format(heads[1]), HEAD_BYTES)
    return f"{hashlib.sha256(space).hexdigest()}/{name[0]}/{name}", data


def fill(objects) -> None:
    """4 chunks in 5 objects of SPACE, 1 of OTHER, their markers, and what is none of ours."""
    for i in range(3):
        name, data = chunk(SPACE, key(i))
        objects[name] = data
    for heads in ((0, 2), (2, 2)):
        name, data = chunk(SPACE, key(7), heads)
        objects[name] = data
        objects[f"{HEX}/{heads[0]:04x}{heads[1]:04x}"] = b"1"
    name, data = chunk(OTHER, key(0))
    objects[name] = data
    objects[f"{HEX}/{FULL}"] = objects[f"{OTHER_HEX}/{FULL}"] = b"1"
    objects["README"] = b"of others"


def chunks(objects, space: str = HEX) -> list[str]:
    return sorted(name for name in objects if name.startswith(space) and name.count("/") == 2)


# --- A real redis-server, and the program


class Keys:
    """The strings of a redis-server below kvstride's prefix."""

    def __init__(self, port: int):
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._in = self._socket.makefile("rb")

    def ask(self, *words: str | bytes):
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        self._socket.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
        return self._reply()

    def _reply(self):
        kind, rest = (line := self._in.readline())[:1], line[1:-2]
        assert kind != b"-", rest
        if kind == b"$":
            return None if rest == b"-1" else self._in.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self._reply() for _ in range(int(rest))]
        return rest

    def __setitem__(self, name: str, data: bytes):
        self.ask("SET", f"kvstride:{name}", data)

    def __getitem__(self, name: str) -> bytes:
        return self.ask("GET", f"kvstride:{name}")

    def __iter__(self):
        return iter(sorted(found.decode().removeprefix("kvstride:") for found in self.ask("KEYS", "*")))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Redis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.fixture
def objects(server) -> Keys:
    keys = Keys(server.ports[0])
    keys.ask("FLUSHALL")
    fill(keys)
    return keys


def on_redis(server, command: str, *arguments, code: int = 0) -> dict:
    result = run("store", command, server.url(), *arguments, "--json")
    assert result.returncode == code, (result.stdout, result.stderr)
    assert result.stderr.count("\n") == (code != 0), result.stderr
    return json.loads(result.stdout)


@needs_redis
def test_ls_and_stat_on_redis(server, objects):
    listed = on_redis(server, "ls", "--keys")
    assert listed["path"].startswith(f"redis://127.0.0.1:{server.ports[0]}/0")
    spaces = {space["namespace"]: space for space in listed["namespaces"]}
    assert sorted(spaces) == sorted([HEX, OTHER_HEX]) == [space["namespace"] for space in listed["namespaces"]]
    assert (spaces[HEX]["chunks"], spaces[HEX]["files"]) == (4, 5)
    assert spaces[HEX]["bytes"] == sum(len(objects[name]) for name in chunks(objects))
    assert (spaces[HEX]["model"], spaces[HEX]["error"]) == ("acme/chat-8b", None)
    assert spaces[HEX]["last_write"] is None, "redis does not tell"
    assert "last_use" not in spaces[HEX] and "read_files" not in spaces[HEX]
    names = [f"{k['key']}{k['first_head']:04x}{k['num_heads']:04x}" for k in spaces[HEX]["keys"]]
    assert [f"{HEX}/{name[0]}/{name}" for name in names] == chunks(objects)
    only = on_redis(server, "ls", "--namespace", OTHER_HEX[:9])["namespaces"]
    assert [space["namespace"] for space in only] == [OTHER_HEX] and "keys" not in only[0]

    stat = on_redis(server, "stat")
    assert (stat["chunks"], stat["files"]) == (5, 6)
    assert stat["engine"]["name"] == "redis" and 0 < stat["engine"]["round_trip_seconds"] < 5
    text = run("store", "stat", server.url())
    assert text.returncode == 0 and "5 chunks" in text.stdout and "acme/chat-70b" in text.stdout
    text = run("store", "ls", server.url(), "--keys")
    assert text.returncode == 0 and text.stdout.count(key(7).hex()) == 2 and "LAST WRITE" in text.stdout


@needs_redis
def test_verify_finds_what_is_damaged_and_repair_removes_it(server, objects):
    assert on_redis(server, "verify")["sound"] == 6
    name = chunks(objects)[2]
    data = bytearray(objects[name])
    data[5000] ^= 4
    objects[name] = bytes(data)
    found = on_redis(server, "verify", "--threads", "3", code=5)
    assert (found["files"], found["sound"]) == (6, 5)
    assert [(one["path"], one["repaired"]) for one in found["damaged"]] == [(name, False)]
    assert "checksums do not fit" in found["damaged"][0]["reason"]
    assert name in list(objects)
    found = on_redis(server, "verify", "--repair", "--namespace", HEX, code=5)
    assert [(one["path"], one["repaired"]) for one in found["damaged"]] == [(name, True)]
    assert name not in list(objects)
    assert on_redis(server, "verify")["sound"] == 5
    assert "(removed)" not in run("store", "verify", server.url()).stdout


@needs_redis
def test_rm_on_redis(server, objects):
    before = list(objects)
    dry = on_redis(server, "rm", HEX[:8], "--dry-run")
    assert (dry["removed"]["files"], dry["removed_namespaces"], dry["left"]["files"]) == (5, 1, 0)
    assert list(objects) == before
    assert_refused(run("store", "rm", server.url(), HEX, key(0).hex(), "00" * 32), "no chunk's key")
    assert list(objects) == before
    one = on_redis(server, "rm", HEX, key(7).hex()[:20])
    assert (one["removed"]["files"], one["removed_namespaces"], one["left"]["files"]) == (2, 0, 3)
    assert len(before) - len(list(objects)) == 2
    on_redis(server, "rm", HEX)
    assert not [name for name in objects if name.startswith(HEX)], "markers too"
    assert chunks(objects, OTHER_HEX) and "README" in list(objects)


@needs_redis
def test_what_redis_does_not_tell_or_has_not_is_refused(server, objects):
    before = list(objects)
    url = server.url()
    for words, said in [
        (["gc", url, "--older-than", "1d"], "redis does not tell when"),
        (["gc", url], "give --older-than"),
        (["gc", url, "--max-bytes", "1"], "no --max-bytes"),
        (["gc", url, "--older-than", "1d", "--quarantine"], "no --quarantine"),
        (["gc", url, "--older-than", "soon"], "--older-than"),
        (["ls", url, "--group"], "no --group"),
        (["ls", url, "--namespace", "XYZ"], "lower-case hex"),
        (["verify", url, "--threads", "0"], "--threads"),
        (["verify", url, "--namespace", "0" * 64], "no namespace"),
        (["rm", url, "0" * 64], "no namespace"),
        (["rm", url, ""], "empty"),
        (["convert", url, HEX, "--to", "H N L KV D"], "convert"),
    ]:
        assert_refused(run("store", *words), said)
    assert list(objects) == before


def test_bad_urls_and_dead_servers_are_one_line_without_a_password():
    for url in ("://x", "ftp://host", "redis://u:geheim@host:0", "redis://u:geheim@127.0.0.1:1/?a=b", "s3://"):
        result = run("store", "ls", url)
        assert_refused(result)
        assert "geheim" not in result.stderr
    begin = time.monotonic()
    result = run("store", "ls", "redis://u:geheim@127.0.0.1:1/")
    assert_refused(result, "redis://127.0.0.1:1/0")
    assert "geheim" not in result.stderr
    assert time.monotonic() - begin < 15


# --- An engine in Python, and the same code


class Shelf(Engine):
    """Objects in a dict, with the times of their writing."""

    kind = "shelf"
    detail = "here"
    reads_ranges = True

    def __init__(self):
        self.objects = {}
        self.modified = {}
        self.flips = {}  # name → how many more reads come damaged, and where
        self.lists = True

    def find(self, names, deadline):
        return [("ok", len(self.objects[name])) if name in self.objects else ("absent", -1) for name in names]

    def read(self, names, addresses, sizes, ranges, deadline):
        out = []
        for name, address, _, wanted in zip(names, addresses, sizes, ranges, strict=True):
            data = bytearray(self.objects.get(name, b""))
            left, at = self.flips.get(name, (0, []))
            if left:
                self.flips[name] = (left - 1, at[1:])
                data[at[0]] ^= 1
            for begin, end in wanted:
                ctypes.memmove(address + begin, bytes(data[begin:end]), len(data[begin:end]))
            out.append(("ok", len(data)) if name in self.objects else ("absent", -1))
        return out

    def write(self, *_):
        raise AssertionError

    def remove(self, names, deadline):
        for name in names:
            self.objects.pop(name, None)
        return ["ok"] * len(names)

    def list(self, folder, deadline):
        if not self.lists:
            return None
        out = set()
        for name, data in self.objects.items():
            if name.startswith(folder):
                head, slash, _ = name[len(folder) :].partition("/")
                whole = folder + head + slash
                out.add((whole, -1, 0) if slash else (whole, len(data), self.modified.get(name, int(time.time()))))
        return out


@pytest.fixture
def shelf() -> Shelf:
    out = Shelf()
    fill(out.objects)
    return out


def on_shelf(shelf: Shelf, command: str, code: int = 0, said: str = "", **more) -> dict:
    given = {"command": command, "path": "shelf://", "space": "", "keys": [], "with_keys": False, "repair": False}
    given |= {"dry_run": False, "json": True} | more
    out, message, got = _core.store_command(json.dumps(given), _core.Engine(shelf))
    assert (got, bool(message)) == (code, code != 0), (out, message)
    assert said in message
    return json.loads(out)


def test_gc_removes_what_was_written_before(shelf):
    now = int(time.time())
    for name in shelf.objects:
        shelf.modified[name] = now - 50
    old = [*chunks(shelf.objects)[:2], *(name for name in shelf.objects if name.startswith(OTHER_HEX))]
    for name in old:
        shelf.modified[name] = now - 2 * 86400
    before = dict(shelf.objects)
    dry = on_shelf(shelf, "gc", older_than="1d", dry_run=True)
    assert (dry["removed"]["files"], dry["removed_namespaces"], dry["left"]["files"]) == (3, 1, 3)
    assert shelf.objects == before
    assert on_shelf(shelf, "gc", older_than="1d") == dry | {"dry_run": False}
    assert sorted(before.keys() - shelf.objects.keys()) == sorted(old), "with the marker of what is empty now"
    assert on_shelf(shelf, "gc", older_than="10s", dry_run=True)["left"]["files"] == 0
    assert on_shelf(shelf, "gc", older_than="1d")["removed"]["files"] == 0


def test_gc_leaves_markers_that_somebody_has_just_written(shelf):
    for name in shelf.objects:
        shelf.modified[name] = int(time.time()) - (10 if name.count("/") == 1 else 10 * 86400)
    done = on_shelf(shelf, "gc", older_than="1d")
    assert (done["removed"]["files"], done["removed_namespaces"]) == (6, 0)
    assert sum(name.count("/") == 1 for name in shelf.objects) == 4


def test_times_are_told_where_the_engine_does(shelf):
    for name in shelf.objects:
        shelf.modified[name] = 1_700_000_000 + len(name)
    (space,) = on_shelf(shelf, "ls", space=OTHER_HEX, with_keys=True)["namespaces"]
    (name,) = chunks(shelf.objects, OTHER_HEX)
    assert space["last_write"] == space["oldest_write"] == space["keys"][0]["last_write"] == 1_700_000_000 + len(name)
    assert space["last_write_age"] > 0


def test_repair_leaves_what_is_sound_when_it_is_read_again(shelf):
    first, second, third = chunks(shelf.objects)[:3]
    shelf.flips = {first: (1, [5000]), second: (2, [5000, 9]), third: (9, [6000] * 9)}
    found = on_shelf(shelf, "verify", code=5, said="3 files damaged, 2 could not be removed", repair=True, threads="1")
    assert [one["repaired"] for one in found["damaged"]] == [False, False, True]
    assert first in shelf.objects and second in shelf.objects and third not in shelf.objects


def test_an_engine_that_does_not_list_says_so(shelf):
    shelf.lists = False
    with pytest.raises(OSError, match="here: this engine does not list its objects"):
        on_shelf(shelf, "ls")
    stat = on_shelf(shelf, "stat", code=2, said="does not list")
    assert stat["chunks"] is None and stat["engine"]["name"] == "shelf"


def test_arguments_are_checked_there_too(shelf):
    for more in ({"command": "convert"}, {"older_than": "1y", "command": "gc"}, {"threads": "0"}, {"space": "XY"}):
        with pytest.raises(ValueError):
            on_shelf(shelf, **{"command": "verify"} | more)
    for text in ("", "{}", "[]", '{"command": 1}'):
        with pytest.raises(ValueError, match="its arguments"):
            _core.store_command(text, _core.Engine(shelf))


# --- Mooncake: the program hands over to the Python package


@pytest.fixture
def beside_python(tmp_path) -> pathlib.Path:
    """The program as a wheel installs it."""
    (tmp_path / "python3").symlink_to(sys.executable)
    shutil.copy(PROGRAM, tmp_path / "kvstride")
    return tmp_path / "kvstride"


def test_mooncake_is_asked_from_python(beside_python):
    def ask(*words):
        return subprocess.run([beside_python, "store", *words], capture_output=True, text=True, timeout=60)

    assert_refused(ask("ls", "mooncake://127.0.0.1:1?nonsense=1"), "nonsense")
    assert_refused(ask("convert", "mooncake://h", "00", "--to", "H N L KV D"), "convert")
    assert_refused(ask("gc", "mooncake://h"), "--older-than")
