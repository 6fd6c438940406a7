# SPDX-License-Identifier: Apache-2.0
"""`kvstride store`: what each command prints and does, on directories that are written by hand."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import pty
import random
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from store_files import (
    DIM,
    HEAD_BYTES,
    HEADS,
    LAYERS,
    ORDER,
    TOKENS,
    StoreFiles,
    image,
    namespace_text,
    random_payload,
    read_file,
)
from test_cli import PROGRAM, assert_refused, program_is_there, run  # noqa: F401 (a fixture for all tests)

SPACE = namespace_text()
HEX = hashlib.sha256(SPACE).hexdigest()
OTHER = namespace_text("acme/chat-70b")
NOT_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def key(i: int) -> bytes:
    return hashlib.sha256(b"key %d" % i).digest()


@pytest.fixture
def files(tmp_path) -> StoreFiles:
    return StoreFiles(tmp_path / "store")


def store(command: str, files: StoreFiles | pathlib.Path, *arguments, code: int = 0) -> dict:
    path = files.path if isinstance(files, StoreFiles) else files
    result = run("store", command, str(path), *arguments, "--json")
    assert result.returncode == code, (result.stdout, result.stderr)
    assert result.stderr.count("\n") == (code != 0), result.stderr
    return json.loads(result.stdout)


def text(command: str, files: StoreFiles, *arguments, code: int = 0) -> str:
    result = run("store", command, str(files.path), *arguments)
    assert result.returncode == code, (result.stdout, result.stderr)
    assert result.stderr.count("\n") == (code != 0), result.stderr
    return result.stdout


def assert_account_fits(files: StoreFiles):
    account = files.account()
    assert account["known"] == 1 and account["reserved"] == 0
    assert account["used"] == files.bytes()
    assert account["max_bytes"] == 1 << 30, "the limit of the processes that use it stays"


def names(files: StoreFiles) -> set[str]:
    return {path.name for path in files.files()}


# --- Help and refusals


def test_help_names_commands_units_and_exit_codes():
    for command in [[], ["ls"], ["stat"], ["verify"], ["gc"], ["rm"], ["convert"]]:
        result = run("store", *command, "--help")
        assert result.returncode == 0 and result.stderr == ""
        for word in ("5 damage found", "130 interrupted", "DURATION", "SIZE"):
            assert word in result.stdout
    assert "\n  store " in run("--help").stdout and "5 damage found" in run("--help").stdout


COMMANDS = [["ls"], ["stat"], ["verify"], ["gc"], ["rm", "00"], ["convert", "00", "--to", "H N L KV D"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_is_no_store_is_refused_and_not_made_one(command, tmp_path):
    def refused(path, *words):
        for more in ([], ["--json"]):
            assert_refused(run("store", command[0], str(path), *command[1:], *more), str(path), *words)

    refused(tmp_path / "missing", "does not exist")
    assert not (tmp_path / "missing").exists()
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "no store")
    assert not any((tmp_path / "folder").iterdir())
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "no directory")
    made = StoreFiles(tmp_path / "store")
    (tmp_path / "link").symlink_to(made.path)
    refused(tmp_path / "link", "link")
    assert_refused(run("store", command[0], f"{tmp_path}/link/", *command[1:]), "link")
    assert_refused(run("store", command[0], "", *command[1:]), "empty")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["ls"],
        ["ls", "P", "surplus"],
        ["ls", "P", "--namespace", "XYZ"],
        ["ls", "P", "--namespace", "ABCD"],
        ["verify", "P", "--threads", "0"],
        ["verify", "P", "--threads", "many"],
        ["verify", "P", "--namespace", "0" * 64],
        *(["gc", "P", "--max-bytes", size] for size in ("", "-1", "1.5G", "10X", "10 G", "G", f"{2**63}", "9999999T")),
        *(["gc", "P", "--older-than", age] for age in ("", "10", "-1d", "1y", "d", "99999999999w", "1h30m")),
        ["rm", "P"],
        ["rm", "P", ""],
        ["rm", "P", "../.."],
        ["rm", "P", "0" * 64],
        ["rm", "P", HEX, "00" * 32],
        ["rm", "P", HEX, "../x"],
        ["rm", "P", HEX, ""],
        ["convert", "P", HEX],
        *(
            ["convert", "P", HEX, "--to", order]
            for order in ("", "nonsense", "N H D", "H KV N D", "L KV N D", "H L N {key: D, other: D}", "NHD",
                          "H/3 L H%3 KV N D", "L H N {key: D f16, value: D}", "L H KV N D[11]")
        ),
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)  # fmt: skip
def test_bad_input_is_one_line_and_changes_nothing(arguments, files):
    files.put(SPACE, key(1))
    before = [(path, path.stat().st_mtime_ns) for path in files.path.rglob("*")]
    arguments = [str(files.path) if word == "P" else word for word in arguments]
    assert_refused(run("store", *arguments))
    assert before == [(path, path.stat().st_mtime_ns) for path in files.path.rglob("*")]


def test_ambiguous_prefixes_list_the_candidates(files):
    spaces = [namespace_text(f"model-{i}") for i in range(17)]
    by_digit: dict[str, list[str]] = {}
    for space in spaces:
        files.put(space, key(1))
        name = hashlib.sha256(space).hexdigest()
        by_digit.setdefault(name[0], []).append(name)
    digit, candidates = next((digit, all_) for digit, all_ in by_digit.items() if len(all_) > 1)
    for command in (["rm"], ["convert"]):
        more = ["--to", "H N L KV D"] if command == ["convert"] else []
        result = run("store", *command, str(files.path), digit, *more)
        assert_refused(result, *(name[:16] for name in candidates))
    space = next(space for space in spaces if hashlib.sha256(space).hexdigest() == candidates[0])
    files.put(space, bytes.fromhex("aa01"))
    files.put(space, bytes.fromhex("aa02"))
    assert_refused(run("store", "rm", str(files.path), candidates[0], "aa0"), "aa01", "aa02")
    assert len(files.files()) == 19


@ROOT
def test_foreign_owners_need_group(files):
    files.put(SPACE, key(1))
    files.put(SPACE, key(2))
    for path in [files.path, *files.path.rglob("*")]:
        os.chown(path, 12345, 12345)
    for command in COMMANDS:
        assert_refused(run("store", command[0], str(files.path), *command[1:]), "12345")
    assert store("verify", files, "--group")["sound"] == 2
    assert_refused(run("store", "rm", str(files.path), HEX, "--group"), "run as that user")
    (files.path / "ledger").chmod(0o660)  # a group's store
    assert store("rm", files, HEX, key(1).hex(), "--group")["removed"]["files"] == 1
    assert (files.path / "ledger").stat().st_mode & 0o777 == 0o660
    os.chown(files.path, 0, 0)
    os.chown(files.path / "ledger", 0, 0)
    assert store("ls", files)["namespaces"][0]["files"] == 0, "another's folder is not looked into"


# --- ls, stat


def test_an_empty_store(files):
    assert store("ls", files) == {"path": str(files.path), "namespaces": []}
    out = store("stat", files)
    assert (out["files"], out["bytes"], out["chunks"], out["oldest_use"]) == (0, 0, 0, None)
    assert out["max_bytes"] == 1 << 30 and out["account"]["used_bytes"] == 0 and out["account"]["processes"] == 0
    assert out["quarantine"] == out["temporaries"] == {"files": 0, "bytes": 0}
    assert store("verify", files)["files"] == 0
    assert store("gc", files, "--max-bytes", "0")["left"] == {"files": 0, "bytes": 0}
    assert "0 files checked" in text("verify", files)
    assert_account_fits(files)


def test_ls_and_stat_say_what_is_there(files):
    now = time.time()
    for i in range(6):
        files.put(SPACE, key(i), used=now - 1000 - i, read=i < 2)
    for heads in ((0, 2), (2, 2)):
        files.put(SPACE, key(100), heads, used=now - 50)
    files.put(OTHER, key(7), used=now - 90_000)
    files.put(SPACE, bytes.fromhex("ab"), (0, 0), b"raw" * 2000, used=now - 60)
    out = {one["model"]: one for one in store("ls", files)["namespaces"]}
    one = out["acme/chat-8b"]
    assert one["namespace"] == HEX and one["revision"] == "5f0b02c75b57" and one["adapter"] is None
    assert one["planes"] == {"key": "bf16[10]", "value": "bf16[10]"}
    assert (one["num_layers"], one["num_kv_heads"], one["block_size"]) == (LAYERS, HEADS, TOKENS)
    assert (one["chunks"], one["files"], one["read_files"], one["unread_files"]) == (8, 9, 2, 7)
    assert one["bytes"] + out["acme/chat-70b"]["bytes"] == files.bytes()
    assert 49 <= one["last_use_age"] <= 55 and 1004 <= one["oldest_use_age"] <= 1010
    assert one["error"] is None

    listed = store("ls", files, "--namespace", HEX[:5], "--keys")["namespaces"]
    assert len(listed) == 1
    rows = {(row["key"], row["first_head"], row["num_heads"]): row for row in listed[0]["keys"]}
    assert set(rows) == {(key(i).hex(), 0, HEADS) for i in range(6)} | {
        (key(100).hex(), 0, 2), (key(100).hex(), 2, 2), ("ab", 0, 0)
    }  # fmt: skip
    assert rows[key(1).hex(), 0, HEADS]["read"] and not rows[key(3).hex(), 0, HEADS]["read"]
    assert sum(row["bytes"] for row in rows.values()) == one["bytes"]

    lines = text("ls", files).splitlines()
    assert lines[0].split()[:2] == ["NAMESPACE", "MODEL"]
    assert any(HEX[:12] in line and "acme/chat-8b" in line and "key, value bf16[10]" in line for line in lines)
    assert key(3).hex() in text("ls", files, "--keys")

    (files.path / "quarantine" / (HEX + key(9).hex() + "00000004")).write_bytes(b"x" * 5000)
    (files.path / "tmp" / ("cd" * 16)).write_bytes(b"x")
    out = store("stat", files)
    assert (out["chunks"], out["files"]) == (9, 10)
    assert out["bytes"] + out["quarantine"]["bytes"] == files.bytes()
    assert out["quarantine"] == {"files": 1, "bytes": 8192}
    assert out["temporaries"] == out["dead_temporaries"] == {"files": 1, "bytes": 4096}
    assert 90_000 <= out["oldest_use_age"] <= 90_010
    assert out["engine"]["name"] in ("io_uring", "pread/pwrite") and isinstance(out["engine"]["direct"], bool)
    assert out["file_system"]["free_bytes"] > 0 and out["strays"] == []
    assert {space["namespace"] for space in out["namespaces"]} == {HEX, hashlib.sha256(OTHER).hexdigest()}
    page = text("stat", files)
    assert "1.0 GiB" in page and "1 of dead processes" in page and "25h ago" in page


def test_names_from_files_cannot_drive_a_terminal(files):
    files.put(namespace_text("evil%1B%5B31m%0Amodel%C2%9B"), key(1))
    out = text("ls", files)
    assert "\x1b" not in out and "\x9b" not in out and r"evil\x1b[31m\x0amodel\xc2\x9b" in out
    assert store("ls", files)["namespaces"][0]["model"] == "evil\x1b[31m\nmodel\x9b"


def test_a_damaged_ledger_is_said_and_not_in_the_way(files):
    files.put(SPACE, key(1))
    data = bytearray((files.path / "ledger").read_bytes())
    data[20] ^= 1
    (files.path / "ledger").write_bytes(data)
    out = store("stat", files)
    assert out["account"]["sound"] is False and out["max_bytes"] is None and out["account"]["used_bytes"] is None
    assert "damaged" in text("stat", files)
    assert_refused(run("store", "convert", str(files.path), HEX, "--to", "H N L KV D"), "limit")
    assert store("gc", files)["left"]["files"] == 1
    assert files.account()["used"] == files.bytes()


# --- verify

KINDS = ["header", "payload", "padding", "cut", "cut to pages", "longer", "another's", "other heads"]


def damage(files: StoreFiles, path: pathlib.Path, kind: str, rng: random.Random) -> pathlib.Path:
    data = bytearray(read_file(path))
    end = 4096 + HEADS * HEAD_BYTES

    def flip(begin, stop):
        data[rng.randrange(begin, stop)] ^= 1 << rng.randrange(8)

    match kind:
        case "header":
            flip(0, 4096)
        case "payload":
            flip(4096, end)
        case "padding":
            flip(end, len(data))
        case "cut":
            del data[rng.randrange(len(data)) :]
        case "cut to pages":
            del data[rng.randrange(len(data) // 4096) * 4096 :]
        case "longer":
            data += bytes(rng.choice([1, 17, 512, 4096, 40960]))
        case "another's":  # another key of this namespace, or this key of another one
            mine = path.parts[-3] == HEX
            same_space = rng.random() < 0.5
            name = key(rng.randrange(10**6)) if same_space else bytes.fromhex(path.name[:-8])
            space = SPACE if mine == same_space else OTHER
            payload = random_payload(name, (0, HEADS))
            data = image(space, name, (0, HEADS), payload, ORDER.format(HEADS), HEAD_BYTES)
        case "other heads":
            renamed = path.with_name(path.name[:-8] + rng.choice(["00000002", "00010003", "00000000"]))
            path.rename(renamed)
            return renamed
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("seed", range(2))
def test_verify_finds_exactly_a_hundred_random_damages(files, seed):
    rng = random.Random(seed)
    for i in range(250):
        files.put(rng.choice([SPACE, SPACE, OTHER]), key(i))
    all_ = files.files()
    damaged = {}
    for i, path in enumerate(rng.sample(all_, 100)):
        damaged[str(damage(files, path, KINDS[i % len(KINDS)], rng).relative_to(files.path))] = KINDS[i % len(KINDS)]
    assert len(damaged) == 100
    out = store("verify", files, "--threads", str(1 + 3 * seed), code=5)
    found = {one["path"]: one["reason"] for one in out["damaged"]}
    assert set(found) == set(damaged)
    assert (out["files"], out["sound"], out["gone"], out["complete"]) == (250, 150, 0, True)
    assert out["unreadable"] == out["strays"] == [] and not any(one["repaired"] for one in out["damaged"])
    for path, reason in found.items():
        words = {
            "header": ("header", "chunk file", "cut off", "more than"), "payload": ("checksum",),
            "padding": ("checksum",), "cut": ("cut off",), "cut to pages": ("cut off",),
            "longer": ("more than it should",), "another's": ("another",), "other heads": ("heads 0 to 3",),
        }[damaged[path]]  # fmt: skip
        assert any(word in reason for word in words), (damaged[path], reason)
    page = run("store", "verify", str(files.path))
    assert page.returncode == 5 and page.stderr == "kvstride: verify: 100 files damaged\n"
    assert page.stdout.count("damaged: ") == 100 and "150 sound, 100 damaged" in page.stdout

    before = files.bytes()
    out = store("verify", files, "--repair", code=5)
    assert len(out["damaged"]) == 100 and all(one["repaired"] for one in out["damaged"])
    assert len(list((files.path / "quarantine").iterdir())) == 100 and len(files.files()) == 150
    assert files.bytes() == before
    assert_account_fits(files)
    assert store("verify", files)["sound"] == 150
    assert store("gc", files, "--quarantine")["removed_quarantine"]["files"] == 100
    assert_account_fits(files)


def test_verify_of_a_namespace(files):
    files.put(SPACE, key(1))
    path = files.put(OTHER, key(2))
    path.write_bytes(b"nothing")
    assert store("verify", files, "--namespace", HEX[:8])["files"] == 1
    assert store("verify", files, "--namespace", hashlib.sha256(OTHER).hexdigest(), code=5)["sound"] == 0


def test_strays_are_told_and_left_alone(files):
    path = files.put(SPACE, key(1))
    link = path.with_name("ab" * 32 + "00000004")
    target = files.path / HEX / "a"
    target.mkdir(exist_ok=True)
    link = target / link.name
    link.symlink_to("/etc/passwd")
    (path.parent / ".nfs000123").write_text("x")
    out = store("verify", files, "--repair")
    assert {one["path"]: one["reason"] for one in out["strays"]} == {
        f"{HEX}/a/{link.name}": "a link", f"{HEX}/{path.name[0]}/.nfs000123": "no name of a chunk"
    }  # fmt: skip
    assert link.is_symlink() and "a link" in text("stat", files)


def test_folders_that_are_links_are_told_and_not_looked_into(files):
    path = files.put(SPACE, key(1))
    other = files.put(SPACE, next(k for k in map(key, range(100)) if k.hex()[0] != path.name[0]))
    (files.path / "elsewhere").mkdir()
    path.parent.rename(files.path / "elsewhere" / "0")
    path.parent.symlink_to(files.path / "elsewhere" / "0")
    assert store("ls", files)["namespaces"][0]["files"] == 1
    out = store("stat", files)
    assert out["files"] == 1 and [one["path"] for one in out["strays"]] == [f"{HEX}/{path.name[0]}"]
    assert store("verify", files)["files"] == 1
    assert store("rm", files, HEX)["removed"]["files"] == 1
    assert not other.exists() and (files.path / "elsewhere" / "0" / path.name).exists()


@NOT_ROOT
def test_folders_that_cannot_be_listed_are_told(files):
    path = files.put(SPACE, key(1))
    path.parent.chmod(0)
    try:
        assert store("ls", files, code=2)["namespaces"][0]["files"] == 0
        assert store("stat", files, code=2)["strays"][0]["reason"] == "not readable: Permission denied"
        assert store("verify", files, code=5)["complete"] is False
        for command in COMMANDS[3:]:
            name = [HEX if word == "00" else word for word in command]
            assert_refused(run("store", name[0], str(files.path), *name[1:]), "cannot all be listed")
    finally:
        path.parent.chmod(0o700)


@NOT_ROOT
def test_unreadable_files_are_no_damage_but_not_sound_either(files):
    files.put(SPACE, key(1)).chmod(0)
    files.put(SPACE, key(2))
    out = store("verify", files, "--repair", code=5)
    assert out["sound"] == 1 and out["damaged"] == []
    assert out["unreadable"][0]["reason"] == "Permission denied"
    assert len(files.files()) == 2


def test_verify_leaves_recency_alone(files):
    path = files.put(SPACE, key(1), used=1_500_000_000)
    store("verify", files)
    store("ls", files, "--keys")
    assert path.stat().st_atime == 1_500_000_000


def test_a_progress_bar_only_for_terminals(files):
    for i in range(20):
        files.put(SPACE, key(i))
    main, side = pty.openpty()
    result = subprocess.run(
        [PROGRAM, "store", "verify", str(files.path)], stdout=subprocess.PIPE, stderr=side, timeout=60
    )
    os.close(side)
    shown = b""
    try:
        while piece := os.read(main, 65536):
            shown += piece
    except OSError:
        pass
    os.close(main)
    assert result.returncode == 0 and b"20 sound" in result.stdout and b"\r" not in result.stdout
    assert shown.startswith(b"\rverify [") and shown.endswith(b"\r\x1b[K")


def test_verify_beside_a_process_that_writes_and_evicts(files):
    stop = threading.Event()

    def work():
        i = 0
        while not stop.is_set():
            files.put(SPACE, key(i))
            if i >= 30:
                files.file(SPACE, key(i - 30), (0, HEADS)).unlink()
            i += 1

    threads = [threading.Thread(target=work)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.2)
        for _ in range(25):
            out = store("verify", files)
            assert out["complete"] and out["sound"] == out["files"]
            assert store("ls", files)["namespaces"][0]["chunks"] <= 64
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# --- gc, rm


def test_gc_removes_the_least_recently_used(files):
    now = time.time()
    for i in range(10):
        files.put([SPACE, OTHER][i % 2], key(i), used=now - 1000 * (i + 1))
    one = files.bytes() // 10
    kept = {files.file([SPACE, OTHER][i % 2], key(i), (0, HEADS)).name for i in range(4)}
    before = names(files)
    out = store("gc", files, "--max-bytes", str(4 * one + 17), "--dry-run")
    assert out["removed"] == {"files": 6, "bytes": 6 * one} and out["left"] == {"files": 4, "bytes": 4 * one}
    assert names(files) == before and files.account()["used"] == 0, "nothing is changed"
    out = store("gc", files, "--max-bytes", str(4 * one + 17))
    assert out["removed"] == {"files": 6, "bytes": 6 * one} and out["failed"] == 0 and not out["dry_run"]
    assert names(files) == kept
    assert_account_fits(files)
    assert store("gc", files, "--older-than", "3500s")["removed"]["files"] == 1
    assert store("gc", files, "--older-than", "1h")["removed"]["files"] == 0
    assert store("gc", files, "--older-than", "30m", "--max-bytes", "1T")["removed"]["files"] == 2
    assert names(files) == {files.file(SPACE, key(0), (0, HEADS)).name}
    assert_account_fits(files)
    page = text("gc", files, "--max-bytes", "0")
    assert "1 file" in page and not files.files()
    assert [path.name for path in files.path.iterdir() if len(path.name) == 64] == [], "empty folders go, too"
    assert_account_fits(files)


def test_gc_takes_what_nobody_needs_first(files):
    files.put(SPACE, key(1))
    (files.path / "quarantine" / (HEX + key(9).hex() + "00000004")).write_bytes(b"x" * 50_000)
    (files.path / "tmp" / ("cd" * 16)).write_bytes(b"x" * 9000)
    (files.path / "tmp" / "README").write_bytes(b"not ours")
    out = store("gc", files, "--dry-run")
    assert out["removed_temporaries"] == {"files": 1, "bytes": 12288} and out["removed_quarantine"]["files"] == 0
    out = store("gc", files, "--max-bytes", str(files.bytes() - 1))
    assert out["removed_temporaries"] == {"files": 1, "bytes": 12288}
    assert out["removed_quarantine"]["files"] == 1 and out["removed"]["files"] == 0
    assert (files.path / "tmp" / "README").exists()
    assert_account_fits(files)


def test_gc_counts_anew(files):
    for i in range(3):
        files.put(SPACE, key(i))
    assert files.account()["used"] == 0
    store("gc", files)
    assert_account_fits(files)


def test_rm_of_keys_and_namespaces(files):
    for i in range(6):
        files.put(SPACE, key(i))
    files.put(SPACE, key(0), (0, 2))
    files.put(OTHER, key(0))
    files.put(SPACE, bytes.fromhex("aa"))
    files.put(SPACE, bytes.fromhex("aa01"))
    out = store("rm", files, HEX[:6], key(0).hex(), key(1).hex()[:10], "--dry-run")
    assert out["removed"]["files"] == 3 and len(files.files()) == 10
    out = store("rm", files, HEX[:6], key(0).hex(), key(1).hex()[:10], key(0).hex())
    assert out["removed"]["files"] == 3 and out["left"]["files"] == 6
    assert files.file(OTHER, key(0), (0, HEADS)).exists()
    store("rm", files, HEX, "aa")
    assert not files.file(SPACE, bytes.fromhex("aa"), (0, HEADS)).exists(), "a whole key is no prefix"
    assert files.file(SPACE, bytes.fromhex("aa01"), (0, HEADS)).exists()
    assert_account_fits(files)
    # All or nothing where a key is not there.
    assert_refused(run("store", "rm", str(files.path), HEX, "aa01", "00ff"), "00ff")
    assert files.file(SPACE, bytes.fromhex("aa01"), (0, HEADS)).exists()
    out = store("rm", files, HEX[:6])
    assert out["removed"]["files"] == 5 and out["removed_namespaces"] == 1
    assert not (files.path / HEX).exists() and len(files.files()) == 1
    assert_account_fits(files)


# --- convert


def elements(payload: bytes, heads: int) -> np.ndarray:
    """[head, layer, plane, token, dim] of the standard order."""
    return np.frombuffer(payload, np.uint16).reshape(heads, LAYERS, 2, TOKENS, DIM)


def payload_of(path: pathlib.Path, heads: int) -> bytes:
    return read_file(path)[4096 : 4096 + heads * HEAD_BYTES]


CONVERSIONS = [  # order, its text, the axes of the standard one, bytes of a head's section
    ("H N L KV D", "H[{}] N[6] L[2] {{key: D[10] bf16, value: D[10] bf16}}", (0, 3, 1, 2, 4), HEAD_BYTES),
    ("B N H L KV D", "N[6] H[{}] L[2] {{key: D[10] bf16, value: D[10] bf16}}", (3, 0, 1, 2, 4), 0),
    ("L B KV H N D", "L[2] {{key: H[{0}] N[6] D[10] bf16, value: H[{0}] N[6] D[10] bf16}}", (1, 2, 0, 3, 4), 0),
    ("key: H L D N | value: H L D N",
     "key: H[{0}] L[2] D[10] N[6] bf16 | value: H[{0}] L[2] D[10] N[6] bf16", (2, 0, 1, 4, 3), 0),
]  # fmt: skip


@pytest.mark.parametrize("order, written, axes, head_bytes", CONVERSIONS, ids=[one[0] for one in CONVERSIONS])
def test_convert_and_back(files, order, written, axes, head_bytes):
    for i in range(5):
        files.put(SPACE, key(i), used=1_600_000_000 + i, read=i % 2 == 0)
    for heads in ((0, 2), (2, 2)):
        files.put(SPACE, key(50), heads)
    files.put(OTHER, key(0))
    files.put(SPACE, bytes.fromhex("ab"), payload=b"raw" * 2000)
    before = {path: (read_file(path), path.stat()) for path in files.files()}
    out = store("convert", files, HEX[:9], "--to", order, "--dry-run")
    assert (out["converted"], out["raw"], out["already"]) == (7, 1, 0) and out["order"] in written.format(
        4
    ) + written.format(2)
    assert {path: read_file(path) for path in files.files()} == {path: data for path, (data, _) in before.items()}

    out = store("convert", files, HEX[:9], "--to", order)
    assert (out["converted"], out["raw"], out["gone"], out["failed"]) == (7, 1, 0, [])
    assert set(files.files()) == set(before)
    for path, (data, stat) in before.items():
        now = path.stat()
        assert (now.st_mtime_ns, now.st_atime_ns, now.st_mode) == (stat.st_mtime_ns, stat.st_atime_ns, stat.st_mode)
        name = path.name
        if name[:-8] == "ab" or path.parts[-3] != HEX:
            assert read_file(path) == data
            continue
        first, count = int(name[-8:-4], 16), int(name[-4:], 16)
        old = elements(data[4096 : 4096 + count * HEAD_BYTES], count)
        payload = np.ascontiguousarray(old.transpose(axes)).tobytes()
        expected = image(SPACE, bytes.fromhex(name[:-8]), (first, count), payload, written.format(count), head_bytes)
        assert read_file(path) == expected
    assert_account_fits(files)
    assert store("verify", files)["sound"] == 9
    assert store("convert", files, HEX, "--to", order)["already"] == 7
    assert "7" in text("convert", files, HEX, "--to", "H L KV N D")
    assert {path: read_file(path) for path in files.files()} == {path: data for path, (data, _) in before.items()}
    assert_account_fits(files)


def test_convert_leaves_damaged_files_and_says_so(files):
    for i in range(4):
        files.put(SPACE, key(i))
    path = damage(files, files.files()[1], "payload", random.Random(1))
    data = read_file(path)
    out = store("convert", files, HEX, "--to", "H N L KV D", code=5)
    assert out["converted"] == 3 and [one["damaged"] for one in out["failed"]] == [True]
    assert out["failed"][0]["path"] == str(path.relative_to(files.path)) and read_file(path) == data


def test_convert_interrupted_leaves_every_file_old_or_new(files):
    count = 1500
    for i in range(count):
        files.put(SPACE, key(i))
    old = {path: read_file(path) for path in files.files()}
    order = "N[6] H[4] L[2] {key: D[10] bf16, value: D[10] bf16}"
    new = {}
    for path in old:
        turned = elements(payload_of(path, HEADS), HEADS).transpose(3, 0, 1, 2, 4)
        new[path] = image(
            SPACE, bytes.fromhex(path.name[:-8]), (0, HEADS), np.ascontiguousarray(turned).tobytes(), order, 0
        )
    command = [PROGRAM, "store", "convert", str(files.path), HEX, "--to", "N H L KV D", "--json"]
    inodes = {path: path.stat().st_ino for path in old}
    # It stands still while the files are looked at, yields to this test where the machine is busy, and heeds the
    # signal although a shell may have started this test in the background, where it is ignored.
    started = ["env", "--default-signal=INT", "nice", "-n", "19", *command]
    process = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 30
    while time.time() < deadline:
        process.send_signal(signal.SIGSTOP)
        if any(path.stat().st_ino != inode for path, inode in inodes.items()):
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted after" in err and err.count("\n") == 1
    now = {path: read_file(path) for path in old}
    assert all(data in (old[path], new[path]) for path, data in now.items())
    converted = sum(data == new[path] for path, data in now.items())
    assert 0 < converted < count and json.loads(out)["converted"] == converted
    assert_account_fits(files)
    assert not any((files.path / "tmp").iterdir())
    assert store("convert", files, HEX, "--to", "N H L KV D")["converted"] == count - converted
    assert {path: read_file(path) for path in files.files()} == new
