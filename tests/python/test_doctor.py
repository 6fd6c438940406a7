# SPDX-License-Identifier: Apache-2.0
"""`kvstride doctor`: what each check finds, that nothing is left behind, and how the program calls it. Without vLLM."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

import kvstride as kv
from kvstride import ArgumentError
from kvstride.vllm.doctor import __main__ as doctor
from kvstride.vllm.doctor import directory, engine_facts, installation, memory, speed
from kvstride.vllm.doctor.config import check_options, load, understand
from kvstride.vllm.doctor.directory import check_directory, check_file_system, check_room, mount_of
from kvstride.vllm.doctor.finding import Finding, Result, Setup
from kvstride.vllm.doctor.memory import check_leftovers, check_memory
from kvstride.vllm.doctor.speed import check_speed
from kvstride.vllm.doctor.stored import check_model, check_stored
from kvstride.vllm.offload.weights import fingerprint
from store_files import StoreFiles, namespace_text
from test_cli import PROGRAM, assert_refused, program_is_there, run  # noqa: F401 (a fixture for all tests)

NOT_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
GB = 10**9


def extra(root: pathlib.Path | str, **more: object) -> dict:
    """The kv_connector_extra_config that a user gives."""
    return {"spec_name": "kvstride", "cpu_bytes_to_use": 1e6, "root_dir": str(root), "max_bytes": 1e9, **more}


def whole(root: pathlib.Path | str, **more: object) -> dict:
    """The --kv-transfer-config."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra(root, **more),
    }


def setup_of(given: dict, **more: object) -> Setup:
    return dataclasses.replace(understand(given), program=PROGRAM, **more)


def assert_found(finding: Finding | None, result: str, *words: str):
    assert finding is not None
    assert finding.result is Result(result), finding
    for word in words:
        assert word in finding.line, finding.line
    assert "\n" not in finding.line


def tree(path: pathlib.Path) -> dict[str, object]:
    """All that lies below a directory, with contents, modes and times of change."""
    return {
        str(p.relative_to(path)): (p.stat().st_mode, p.stat().st_ino, p.read_bytes() if p.is_file() else "")
        for p in path.rglob("*")
    }


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    """Importing an engine takes seconds; tests of the live one are in test_vllm_offload.py."""
    monkeypatch.setattr(Setup, "has_vllm", False)


# --- Configurations


def test_every_form_of_a_configuration_gives_the_same_options(tmp_path):
    here = extra("/data", keep_free=5, group=True)
    tier = {"type": "kvstride", "root_dir": "/data", "max_bytes": 1e9, "keep_free": 5, "group": True}
    tiered = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1e6, "secondary_tiers": [{"type": "fs"}, tier]}
    full = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": here}
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}, full]},
    }
    options = understand(full).options
    assert options is not None and (options.root_dir, options.max_bytes, options.keep_free) == ("/data", GB, 5)
    for form in (here, tier, tiered, several):
        assert understand(form).options == options, form
    file = tmp_path / "config.json"
    file.write_text(json.dumps(full))
    assert load(str(file)) == load(json.dumps(full)) == load(f"\n {json.dumps(full)}") == full


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"spec_name": "kvstride", "root_', ["no JSON", "single quotes"]),
        ("{spec_name: kvstride}", ["no JSON", "column 2"]),
        ("[1]", ["list is no configuration"]),
        ("/nowhere/config.json", ["/nowhere/config.json", "No such file"]),
        ("/", ["Is a directory"]),
        ('{"model": 1, "zzz": 2}', ["neither", "model, zzz"]),
        ('{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": 5}', ["kv_connector_extra_config is 5"]),
    ],
)
def test_what_is_no_configuration_is_one_line(given, words, capsys):
    assert doctor.main(["--config", given]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and error.startswith("kvstride: doctor: --config")
    for word in words:
        assert word in error


def test_a_binary_or_cut_file_is_named(tmp_path):
    file = tmp_path / "c.json"
    for content, word in ((b"\xff\xfe{", "UTF-8"), (b'{"root_dir": ', "no JSON"), (b" " * (2 << 20), "larger than")):
        file.write_bytes(content)
        with pytest.raises(ArgumentError, match=word) as caught:
            load(str(file))
        assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_byte": 1e9}, ["unknown option 'max_byte'", "'max_bytes'"]),
        ({"max_bytes": None}, ["max_bytes is missing"]),
        ({"max_bytes": "200G"}, ["max_bytes is '200G'", "whole number"]),
        ({"max_bytes": float("inf")}, ["max_bytes is inf"]),
        ({"cpu_bytes_to_use": 0}, ["cpu_bytes_to_use is 0"]),
        ({"cuda_worker": "mine"}, ["cuda_worker is 'mine'", "'vllm' or 'kvstride'"]),
        ({"cpu_bytes_to_use": float("nan")}, ["cpu_bytes_to_use is nan"]),
        ({"deadline": 0}, ["deadline is 0"]),
        ({"engine": "aio"}, ["'aio'", "io_uring"]),
        ({"secondary_tiers": "fs"}, ["secondary_tiers must be a list"]),
        ({"spec_name": None}, ["kvstride is not used"]),
        ({"spec_name": "TieringOffloadingSpec"}, ["kvstride is not used"]),
        ({"secondary_tiers": [{"type": "kvstride", "root_dir": "/x"}]}, ["tier 'kvstride'", "max_bytes is missing"]),
    ],
)
def test_options_that_cannot_be_are_named(tmp_path, change, words):
    assert_found(check_options(understand(whole(tmp_path, **change))), "fail", *words)


def test_all_that_is_wrong_is_told(tmp_path):
    given = {**whole(tmp_path, max_byte=1, deadline=0, max_bytes=None), "kv_connector": "Nixl"}
    found = check_options(understand(given))
    assert_found(found, "fail", "kv_connector is 'Nixl'")
    told = "\n".join(found.details)
    assert all(word in told for word in ("unknown option 'max_byte'", "max_bytes is missing", "deadline is 0"))
    assert len(found.details) == 3


def test_the_connector_and_its_role():
    for change, words in (
        ({"kv_connector": "NixlConnector"}, ["kv_connector is 'NixlConnector'", "'OffloadingConnector'"]),
        ({"kv_role": None}, ["kv_role is None", "'kv_both'"]),
    ):
        assert_found(check_options(understand({**whole("/x"), **change})), "fail", *words)
    assert_found(check_options(understand(whole("/x"))), "ok", "/x", "1.0 GB")


def test_the_tier_alone_needs_a_revision():
    tier = {"type": "kvstride", "root_dir": "/x", "max_bytes": 1e9}
    for form in (tier, {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}):
        assert_found(check_options(understand(form)), "fail", "revision")
    tier["revision"] = "1"
    for form in (tier, {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}):
        assert_found(check_options(understand(form)), "ok", "tier kvstride alone")
    # vLLM's default spec has no tiers below it.
    assert_found(check_options(understand({"secondary_tiers": [tier]})), "fail", "spec_name is None")


def test_a_wrong_option_does_not_hide_the_rest(tmp_path, capsys):
    given = json.dumps(whole(tmp_path / "kv", max_byte=1))
    assert doctor.main(["--config", given, "--json"]) == 5
    out, error = capsys.readouterr()
    found = {check["check"]: check["result"] for check in json.loads(out)["checks"]}
    assert found["configuration"] == "fail" and found["directory"] == "ok" and found["speed"] != "fail"
    assert error.startswith("kvstride: doctor: ") and "configuration" in error and error.count("\n") == 1


# --- The directory


def test_directories_that_cannot_be(tmp_path):
    file = tmp_path / "file"
    file.touch()
    link = tmp_path / "link"
    (tmp_path / "real").mkdir(0o700)
    link.symlink_to("real")
    for root, words in (
        (file, ["is no directory"]),
        (file / "kv", ["cannot be made", f"{file} is no directory"]),
        (link, ["is a link", f"give {tmp_path / 'real'}"]),
        (f"{link}/", ["is a link"]),
        ("~/kv", ["nobody expands"]),
        ("$HOME/kv", ["nobody expands"]),
    ):
        assert_found(check_directory(setup_of(extra(root))), "fail", *words)
        assert_found(check_options(understand(extra(root))), "ok")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "real"]
    # A link above it is the administrator's.
    assert_found(check_directory(setup_of(extra(link / "kv"))), "ok", "is not there")


def test_directories_that_warn(tmp_path, monkeypatch):
    kv = tmp_path / "kv"
    kv.mkdir(0o700)
    assert_found(check_directory(setup_of(extra(kv))), "ok", "is empty")
    kv.chmod(0o777)
    assert_found(check_directory(setup_of(extra(kv))), "warn", "0777", "chmod 700")
    kv.chmod(0o2770)
    assert_found(check_directory(setup_of(extra(kv))), "warn", "2770")
    assert_found(check_directory(setup_of(extra(kv, group=True))), "ok")
    kv.chmod(0o700)
    (kv / "photo.jpg").touch()
    assert_found(check_directory(setup_of(extra(kv))), "warn", "1 entry")
    monkeypatch.chdir(tmp_path)
    assert_found(check_directory(setup_of(extra("new"))), "warn", "relative")


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    kv = tmp_path / "kv"
    kv.mkdir(0o700)
    monkeypatch.setattr(directory, "may", lambda path, rights: not rights & os.W_OK)
    assert_found(check_directory(setup_of(extra(kv))), "fail", "cannot be written", "no store yet")
    assert_found(check_directory(setup_of(extra(kv / "a" / "b"))), "fail", "may not write in", "install -d -m 700")
    monkeypatch.chdir(tmp_path)
    assert_found(check_directory(setup_of(extra("kv"))), "fail", "cannot be written")
    (kv / "ledger").touch()
    assert_found(check_directory(setup_of(extra(kv))), "warn", "none are stored")


@NOT_ROOT
def test_the_kernel_is_asked_for_rights(tmp_path):
    kv = tmp_path / "kv"
    kv.mkdir(0o500)
    assert_found(check_directory(setup_of(extra(kv))), "fail", "cannot be written")
    kv.chmod(0)
    assert_found(check_directory(setup_of(extra(kv))), "fail", "cannot be read")
    kv.chmod(0o700)


@ROOT
def test_another_users_directory(tmp_path):
    kv = tmp_path / "kv"
    kv.mkdir(0o700)
    os.chown(kv, 12345, 12345)
    assert_found(check_directory(setup_of(extra(kv))), "fail", "user 12345's", '"group": true')
    kv.chmod(0o2770)
    assert_found(check_directory(setup_of(extra(kv, group=True))), "ok")


def test_the_limit_against_the_file_system(tmp_path):
    disk = os.statvfs(tmp_path)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    found = check_room(setup_of(extra(tmp_path / "kv", max_bytes=2 * size)))
    assert_found(found, "fail", "max_bytes is", "are possible")
    assert found.facts["max_bytes"] == 2 * size and found.facts["size_bytes"] == size
    # What others take meanwhile must not matter.
    assert_found(check_room(setup_of(extra(tmp_path, max_bytes=GB, keep_free=2 * size))), "fail", "keep_free")
    assert_found(
        check_room(setup_of(extra(tmp_path, max_bytes=free // 2, keep_free=free - free // 4))), "warn", "lower"
    )
    found = check_room(setup_of(extra(tmp_path, max_bytes=1 << 20, keep_free=0)))
    assert_found(found, "ok", "1.0 MB")
    assert found.facts["possible_bytes"] <= size


def test_what_a_store_holds_counts_as_room(tmp_path):
    files = StoreFiles(tmp_path / "kv")
    files.put(namespace_text(), b"k" * 32)
    found = check_room(setup_of(extra(files.path, max_bytes=1 << 20, keep_free=0)))
    assert found.facts["used_bytes"] == files.bytes() > 0


def test_mounts(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - overlay overlay rw\n"
        "2 1 8:2 / /mnt rw,noatime shared:1 - ext4 /dev/sdb rw\n"
        "3 2 0:40 / /mnt/with\\040blank rw - nfs4 server:/x rw\n"
        "4 2 0:41 / /mnt/hidden rw - ext4 /dev/sdc rw\n"
        "5 4 0:42 / /mnt/hidden rw - tmpfs tmpfs rw\n"
        "garbage\n"
    )
    for path, kind in (
        ("/var/x", "overlay"),
        ("/mnt/x", "ext4"),
        ("/mntx", "overlay"),
        ("/mnt/with blank/kv", "nfs4"),
        ("/mnt/hidden/kv", "tmpfs"),
    ):
        found = mount_of(path, str(table))
        assert found is not None and found.kind == kind, path
    assert mount_of("/", str(tmp_path / "none")) is None


@pytest.mark.parametrize(("kind", "result"), [("tmpfs", "warn"), ("overlay", "warn"), ("nfs4", "ok"), ("xfs", "ok")])
def test_file_systems_that_do_not_last(kind, result, monkeypatch):
    monkeypatch.setattr(directory, "mount_of", lambda path: directory.Mount("/data", kind, "x"))
    assert_found(check_file_system(setup_of(extra("/data/kv"))), result, kind, "/data")


# --- The trial


def test_a_trial_leaves_nothing(tmp_path):
    files = StoreFiles(tmp_path / "kv")
    files.put(namespace_text(), b"k" * 32)
    before = tree(tmp_path)
    found = check_speed(setup_of(extra(files.path)))
    assert_found(found, "ok" if found.result is Result.OK else "warn", "read and verified", "/s written")
    assert found.facts["chunks"] >= 1 and found.facts["read_bytes_per_second"] > 0
    assert tree(tmp_path) == before
    # A directory that is not there is not made.
    check_speed(setup_of(extra(tmp_path / "not" / "there")))
    assert tree(tmp_path) == before


def test_beside_a_process_that_uses_the_directory(tmp_path, capsys):
    space = kv.Namespace(
        model="m", revision="1", planes={"state": "u8"}, num_layers=1, num_kv_heads=1, head_size=1, block_size=16,
        raw="x",
    )  # fmt: skip
    limit = 64 << 10  # full: whatever were put there too would evict
    with kv.DirectoryTier(tmp_path, limit, keep_free=0) as tier, kv.Store([tier], namespace=space) as store:
        for i in range(12):
            store.put_bytes([bytes([i])], [bytearray(4096)]).wait()
        before, files = tier.metrics(), tree(tmp_path)
        given = json.dumps(extra(tmp_path, max_bytes=1e9, keep_free=0))
        assert doctor.main(["--config", given, "--json", "--program", PROGRAM]) == 5  # there is no vLLM
        assert tree(tmp_path) == files
        after = tier.metrics()
        assert {k: after[k] for k in ("chunks", "used_bytes")} == {k: before[k] for k in ("chunks", "used_bytes")}
        assert after["counters"]["evictions"] == before["counters"]["evictions"] > 0
    found = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["speed"]["facts"]["chunks"] > 0
    assert found["directory"]["facts"]["processes"] == 1
    assert found["directory"]["result"] == "warn" and "a limit of 65.5 kB" in found["directory"]["text"]


def test_a_trial_uses_the_options(tmp_path):
    found = check_speed(setup_of(extra(tmp_path, engine="blocking", sync=True, max_bytes=40 << 20)))
    assert "pread" in found.facts["engine"] and "io_uring" not in found.facts["engine"]
    assert found.facts["chunks"] == 5, "half of the limit"
    assert_found(check_speed(setup_of(extra(tmp_path, max_bytes=1 << 20))), "warn", "too little room")
    assert list(tmp_path.iterdir()) == []


def test_a_trial_sees_other_bytes(tmp_path, monkeypatch):
    """The control of its comparison: what a store would have to do that lies."""

    def lying(self, keys, buffers, **more):
        for buffer in buffers:
            buffer[:] = 7
        return self.put_bytes(keys, buffers, **more)

    monkeypatch.setattr(speed.kv.Store, "get_bytes", lying)
    assert_found(check_speed(setup_of(extra(tmp_path))), "fail", "other bytes came back")
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_is_refused_or_interrupted(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(speed, "keep_free", lambda given, size: 0)  # the tier keeps to it
        found = check_speed(setup_of(extra(tmp_path, keep_free=2**61)))
    assert_found(found, "fail", "could not be written", "no_space")
    assert found.facts["counters"]["no_space"] > 0

    def interrupted(*_):
        assert [p.name.startswith(".kvstride-doctor-") for p in tmp_path.iterdir()] == [True]
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(speed, "_move", interrupted)
    try:
        assert doctor.main(["--config", json.dumps(extra(tmp_path))]) == 130
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGHUP, before[1])
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_trial_left_goes_with_the_next(tmp_path):
    dead, young, used, other = (
        tmp_path / n for n in (".kvstride-doctor-a", ".kvstride-doctor-b", ".kvstride-doctor-c", "d")
    )
    for folder in (dead, young, used, other):
        folder.mkdir(0o700)
        (folder / "x").touch()
    for folder in (dead, used, other):
        os.utime(folder, (1, 1))
    link = tmp_path / ".kvstride-doctor-link"
    link.symlink_to("d")
    lock = os.open(used, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_speed(setup_of(extra(tmp_path)))
    finally:
        os.close(lock)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in (young, used, link, other))
    assert (other / "x").exists()


# --- What is stored


def model_at(path: pathlib.Path, **config: object) -> pathlib.Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"weights of " + path.name.encode())
    return path


def test_what_a_restart_finds(tmp_path):
    root, model = tmp_path / "kv", model_at(tmp_path / "llama")
    assert_found(check_stored(setup_of(extra(root))), "ok", "nothing is stored yet")
    files = StoreFiles(root)
    assert_found(check_stored(setup_of(extra(root))), "ok", "nothing is stored yet")
    revision = f"files-{fingerprint(model)}"
    mine = namespace_text("llama", revision=f"{revision}+settings")
    for i in range(3):
        files.put(mine, bytes([i]) * 32)
    files.put(namespace_text("acme/chat"), b"x" * 32)
    found = check_stored(setup_of(extra(root)))
    assert_found(found, "ok", "4 chunks", "2 namespaces", "--model")
    assert len(found.details) == 2 and any("llama" in line and "3 chunks" in line for line in found.details)
    found = check_stored(setup_of(extra(root), model=str(model)))
    assert_found(found, "ok", "4 chunks", "3 of llama with these weights")
    assert found.facts["of_model"] == 3
    # Other weights of the same name, another name, a revision that the user says.
    (model / "model.safetensors").write_bytes(b"trained further")
    assert_found(check_stored(setup_of(extra(root), model=str(model))), "warn", "3 chunks of llama", "other weights")
    assert_found(check_stored(setup_of(extra(root), model=str(model_at(tmp_path / "new")))), "ok", "none of new")
    said = setup_of(extra(root, revision=revision), model="llama")
    assert_found(check_stored(said), "ok", "3 of llama")


def test_raw_chunks_of_other_ranks(tmp_path):
    space = kv.Namespace(
        model="llama", revision="7+settings", planes={"state": "u8"}, num_layers=1, num_kv_heads=1, head_size=1,
        block_size=16, raw="vLLM rows; release=0.32.0; world=2; tp=2; pp=1",
    )  # fmt: skip
    with kv.DirectoryTier(tmp_path / "kv", GB) as tier, kv.Store([tier], namespace=space) as store:
        assert store.put_bytes([b"key"], [bytearray(8192)]).wait() == ["ok"]
    for ranks, result in ((2, "ok"), (1, "warn"), (None, "ok")):
        setup = setup_of(extra(tmp_path / "kv", revision="7"), model="llama", tensor_parallel=ranks)
        assert_found(check_stored(setup), result, "1 of llama")


def test_stored_where_it_cannot_be_told(tmp_path):
    files = StoreFiles(tmp_path / "kv")
    files.put(namespace_text(), b"k" * 32)
    alone = dataclasses.replace(setup_of(extra(files.path)), program="")
    assert_found(check_stored(alone), "warn", "no program 'kvstride'", "cannot be told")
    (files.path / ("0" * 64)).symlink_to("tmp")
    assert_found(check_stored(setup_of(extra(files.path))), "warn", "no chunks", "0" * 64)


def test_models(tmp_path):
    setup = setup_of(extra("/x"), model=str(model_at(tmp_path / "m", kv_lora_rank=512)))
    assert_found(check_model(setup), "ok", "m, revision files-")
    assert_found(check_model(setup_of(extra("/x"), model=str(tmp_path))), "fail", "no weights", '"revision"')
    assert check_model(setup_of(extra("/x"))) is None


def test_mla_on_the_cpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Setup, "has_vllm", True)
    model = str(model_at(tmp_path / "m", text_config={"kv_lora_rank": 512}))
    for where, result in (("cpu", "fail"), ("cuda", "ok")):
        monkeypatch.setattr(Setup, "engine", {"platform": where})
        assert_found(check_model(setup_of(extra("/x"), model=model)), result, "m")


# --- Memory


def test_memory_that_is_not_there(tmp_path, monkeypatch):
    shm = os.statvfs("/dev/shm")
    most = shm.f_blocks * shm.f_frsize
    assert_found(check_memory(setup_of(extra("/x", cpu_bytes_to_use=2 * most))), "fail", "/dev/shm", "--shm-size")
    assert_found(check_memory(setup_of(extra("/x"))), "ok", "1.0 MB")
    assert check_memory(setup_of({"type": "kvstride", "root_dir": "/x", "max_bytes": 1})) is None
    info = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_MEMORY", info)
    for total, free, result in ((500, 400, "fail"), (5000, 400, "warn"), (5000, 4000, "ok")):
        info.write_text(f"MemTotal: {total} kB\nMemAvailable: {free} kB\nHugePages_Total: 0\n")
        assert_found(check_memory(setup_of(extra("/x"))), result)


def test_memory_of_a_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_own_group", lambda: "a/b")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    group = tmp_path / "a"
    for most, used, cache, result in (
        (500_000, 0, 0, "fail"),
        (5_000_000, 4_500_000, 100_000, "warn"),
        (5_000_000, 4_500_000, 4_000_000, "ok"),
    ):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
        assert_found(check_memory(setup_of(extra("/x"))), result, *(["/a"] if result != "ok" else []))


def test_leftovers_are_told_and_stay():
    name = f"doctor-test-{os.getpid()}"
    files = [pathlib.Path(f"/dev/shm/kvstride_{name}.0.json"), pathlib.Path(f"/dev/shm/vllm_offload_{name}.mmap")]
    try:
        for file in files:
            file.write_bytes(b"x" * 8192)
        found = check_leftovers(setup_of(extra("/x")))
        assert_found(found, "warn", "killed engines")
        assert {str(f) for f in files} <= set(found.facts["files"]) and found.facts["bytes"] >= 16384
        with files[0].open("rb") as used:
            fcntl.flock(used, fcntl.LOCK_EX)
            assert not {str(f) for f in files} & set(check_leftovers(setup_of(extra("/x"))).facts.get("files", ()))
        assert all(file.exists() for file in files)
    finally:
        for file in files:
            file.unlink()


# --- The installation

GOOD = {
    "release": "0.32.0", "missing": [], "tested": True, "platform": "cpu", "refused": "", "registered": True,
    "hashing": "sha256", "hashes_repeat": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "result", "words"),
    [
        ({}, "ok", ["0.32.0 on cpu"]),
        ({"tested": False}, "warn", ["nobody has run", "0.32"]),
        ({"missing": ["a.b is missing", "c", "d", "e"]}, "fail", ["a.b is missing", "and 1 more"]),
        ({"refused": "kv_rol: Unexpected"}, "fail", ["kv_rol"]),
        ({"died": "importing it ends the process by SIGABRT"}, "fail", ["SIGABRT"]),
        ({"error": "no vLLM here"}, "fail", ["no vLLM here"]),
    ],
)
def test_what_an_engine_says(monkeypatch, change, result, words):
    monkeypatch.setattr(Setup, "has_vllm", True)
    monkeypatch.setattr(Setup, "engine", {**GOOD, **change})
    assert_found(installation.check_vllm(setup_of(whole("/x"))), result, *words)


def test_an_engine_that_offloads_nothing_there(monkeypatch):
    assert_found(installation.check_vllm(setup_of(whole("/x"))), "fail", sys.executable, "vLLM's environment")
    assert (
        installation.check_hashes(setup_of(whole("/x"))) is installation.check_backends(setup_of(whole("/x"))) is None
    )
    monkeypatch.setattr(Setup, "has_vllm", True)
    monkeypatch.setattr(Setup, "engine", GOOD)
    tiering = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1}
    assert_found(installation.check_vllm(setup_of(tiering)), "fail", "TieringOffloadingSpec refuses")
    monkeypatch.setattr(Setup, "engine", {**GOOD, "platform": "cuda"})
    assert_found(installation.check_vllm(setup_of(tiering)), "ok")


def test_block_hashes(monkeypatch):
    monkeypatch.setattr(Setup, "has_vllm", True)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for change, result, word in (
        ({}, "ok", "sha256"),
        ({"hashes_repeat": False}, "fail", "PYTHONHASHSEED"),
        ({"hashing": "xxhash"}, "warn", "--prefix-caching-hash-algo"),
    ):
        monkeypatch.setattr(Setup, "engine", {**GOOD, **change})
        assert_found(installation.check_hashes(setup_of(whole("/x"))), result, word)


def test_the_entry_point_and_its_filter(monkeypatch):
    entry = installation.importlib.metadata.EntryPoint("kvstride", installation._ENTRY, installation._GROUP)
    monkeypatch.setattr(installation.importlib.metadata, "entry_points", lambda group: [entry])
    for plugins, result in (
        (None, "ok"),
        ("lora,kvstride", "ok"),
        ("lora", "fail"),
        ("", "fail"),
        ("kvstride2", "fail"),
    ):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if plugins is not None:
            monkeypatch.setenv("VLLM_PLUGINS", plugins)
        assert_found(installation.check_plugin(setup_of(whole("/x"))), result)
    monkeypatch.setattr(installation.importlib.metadata, "entry_points", lambda group: [])
    assert_found(installation.check_plugin(setup_of(whole("/x"))), "fail", "no entry point")


def test_a_process_that_dies_says_what_it_had():
    def told(code: str) -> dict:
        return engine_facts.lines_of([sys.executable, "-c", f"import os, sys; {code}"])

    assert told(
        "print('noise\\n{\"a\": 1}', flush=True); sys.stderr.write('  what():  two libraries\\n'); os.abort()"
    ) == {
        "a": 1,
        "died": "importing it ends the process by SIGABRT:  two libraries",
    }
    assert told("print('{\"a\": 1}'); print('{\"b\": 2}')") == {"a": 1, "b": 2}
    assert "no such module" in told("sys.exit('no such module')")["died"]


def test_versions_of_package_and_program(tmp_path):
    assert_found(installation.check_kvstride(setup_of(extra("/x"))), "ok", "CPython")
    other = tmp_path / "kvstride"
    other.write_text("#!/bin/sh\necho kvstride 9.9\n")
    other.chmod(0o755)
    for program, word in ((str(other), "9.9"), ("", "no program"), ("/nowhere/kvstride", "does not run")):
        setup = dataclasses.replace(setup_of(extra("/x")), program=program)
        assert_found(installation.check_kvstride(setup), "warn", word)


# --- The whole


def test_a_table_for_people_and_json_for_programs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Setup, "has_vllm", True)
    monkeypatch.setattr(Setup, "engine", GOOD)
    monkeypatch.setattr(doctor, "CHECKS", [c for c in doctor.CHECKS if c[0] not in ("plug-in", "backends")])
    given = ["--config", json.dumps(whole(tmp_path / "kv")), "--program", PROGRAM]
    assert doctor.main([*given, "--json"]) == 0
    out, error = capsys.readouterr()
    found = json.loads(out)
    assert found["ok"] is True and error == ""
    assert [c["check"] for c in found["checks"]] == [n for n, _ in doctor.CHECKS if n not in ("model", "remote")]
    assert all(set(c) == {"check", "result", "text", "advice", "details", "facts"} for c in found["checks"])
    assert doctor.main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["configuration", "kvstride"]
    assert all(line[:4].strip() in ("ok", "warn") for line in lines[:-2])
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_breaks_is_one_that_failed(tmp_path, capsys, monkeypatch):
    def broken(setup):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "CHECKS", [("one", broken), ("other", check_options)])
    assert doctor.main(["--config", json.dumps(extra("/x"))]) == 5
    out, error = capsys.readouterr()
    assert out.splitlines()[0].startswith("fail  one") and "RuntimeError: two lines" in out and "ok    other" in out
    assert error == "kvstride: doctor: 1 check failed: one\n"


@pytest.mark.parametrize(
    "arguments", [[], ["--config"], ["--config", "{}", "--tp", "0"], ["--config", "{}", "--tp", "x"], ["--conf", "{}"]]
)
def test_bad_usage_is_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        doctor.main(arguments)
    out, error = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and error.count("\n") == 1 and error.startswith("kvstride: doctor: ")


# --- The program


def test_the_program_calls_the_package(tmp_path):
    """With the Python that the package is in; everything after `doctor` is the package's."""
    path = {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    path["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, **path}
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")  # in the working directory
    assert_refused(run("doctor", "--config", "{}", env=env, cwd=tmp_path), "neither")
    help_ = run("doctor", "--help", env=env)
    assert help_.returncode == 0 and "usage: kvstride doctor" in help_.stdout and "5 a check failed" in help_.stdout
    package = tmp_path / "broken" / "kvstride"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import numpy_of_another_python")
    broken = run("doctor", "--config", "{}", env={**env, "PYTHONPATH": str(package.parent)})
    assert_refused(broken, "does not import: ModuleNotFoundError: No module named 'numpy_of_another_python'")


def test_the_program_looks_beside_itself_and_on_path(tmp_path):
    beside, there = tmp_path / "venv" / "bin", tmp_path / "path"
    for folder in (beside, there):
        folder.mkdir(parents=True)
    program = shutil.copy(PROGRAM, beside / "kvstride")

    def python(folder: pathlib.Path, has: bool):
        script = folder / "python3"
        script.write_text(
            f'#!/bin/sh\ncase "$3" in *find_spec*) exit {0 if has else 1};; esac\n'
            f'shift 5; printf "%s\\n" {folder.name} "$@"\nexit 5\n'
        )
        script.chmod(0o755)

    def call(*arguments: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "PATH": str(there)}
        return subprocess.run([program, "doctor", *arguments], capture_output=True, text=True, env=env, timeout=60)

    none = call("--config", "x")
    assert_refused(none, "needs the Python package kvstride", "python3")
    python(there, True)
    given = ["--config", "{ }", "--json", "--", "-x", "--version"]
    found = call(*given)
    assert found.returncode == 5
    lines = found.stdout.splitlines()
    assert lines[:2] == ["path", "--program"] and lines[3:] == given
    assert subprocess.run([lines[2], "--version"], capture_output=True).stdout.startswith(b"kvstride ")
    python(beside, False)
    assert call("--help").stdout.startswith("path\n")
    python(beside, True)
    assert call("--help").stdout.startswith("bin\n")
    python(beside, False)
    python(there, False)
    assert_refused(call(), f"{beside}/python3 and python3 do not")
    if pathlib.Path(program).read_bytes()[:2] == b"#!":
        return  # an installed wheel, whose script is what follows
    # As a wheel has it that brings libraries along: a script, and the program elsewhere.
    elsewhere = tmp_path / "kvstride.scripts"
    elsewhere.mkdir()
    shutil.move(program, elsewhere / "kvstride")
    pathlib.Path(program).write_text(f'#!/bin/bash\nexec -a "$0" {elsewhere}/kvstride "$@"\n')
    pathlib.Path(program).chmod(0o755)
    python(beside, True)
    python(there, True)
    assert call("--help").stdout.startswith("bin\n")
    (tmp_path / "link").symlink_to(program)
    program = str(tmp_path / "link")
    assert call("--help").stdout.startswith("bin\n")


def test_standard_output_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvstride.vllm.doctor", "--config", '{"type": "kvstride", "root_dir": "~"}'],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("kvstride: doctor: cannot write to standard output")
