# SPDX-License-Identifier: Apache-2.0
"""The program `kvstride`: each command, its JSON, its exit codes, bad input, and the picture."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest

import kvstride as kv

ROOT = pathlib.Path(__file__).resolve().parents[2]
X_SPLIT = "{key: B H D/8 N D%8, value: B H D N}"
GEOMETRY = "B=8,N=16,H=4,D=64"
COMMANDS = ["layouts", "describe", "offset", "detect", "plan", "info"]


def find_program() -> str:
    if given := os.environ.get("KVSTRIDE_PROGRAM"):
        return given
    if found := shutil.which("kvstride"):
        return found
    built = sorted(ROOT.glob("build/*/cli/kvstride"), key=lambda path: path.stat().st_mtime)
    return str(built[-1]) if built else ""


PROGRAM = find_program()


@pytest.fixture(autouse=True)
def program_is_there():
    if not PROGRAM or not os.access(PROGRAM, os.X_OK):
        pytest.fail(
            f"the program is not built ({PROGRAM or 'nothing on PATH or in build/*/cli'}); set KVSTRIDE_PROGRAM"
        )


def run(*arguments, timeout=60, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, timeout=timeout, text=True, errors="replace", **more
    )


def run_json(*arguments, code=0):
    result = run(*arguments, "--json")
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout)


def assert_refused(result, *words):
    """Exit code 2, nothing on stdout, one line on stderr that holds `words`."""
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert result.stdout == ""
    assert result.stderr.startswith("kvstride: ")
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    for word in words:
        assert word in result.stderr


def pack(geometry: dict) -> str:
    """The JSON of a geometry as an option."""
    letters = {
        "num_layers": "L", "num_blocks": "B", "block_size": "N", "num_kv_heads": "H", "head_size": "D",
        "value_head_size": "Dv",
    }  # fmt: skip
    return ",".join(f"{letters.get(name, name)}={value}" for name, value in geometry.items())


# --- help, version, info, layouts


def test_help_documents_commands_and_exit_codes():
    text = run("--help").stdout
    for command in COMMANDS:
        assert f"\n  {command} " in text
    for command in [[]] + [[name] for name in COMMANDS]:
        result = run(*command, "--help")
        assert result.returncode == 0 and result.stderr == ""
        assert (
            "Exit codes: 0 done, 2 bad usage or bad input (one line on stderr), 3 ambiguous, 4 unknown" in result.stdout
        )


def test_version_is_that_of_info():
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout == f"kvstride {run_json('info')['version']}\n"


def test_info():
    info = run_json("info")
    assert isinstance(info["cuda"], bool)
    assert all(isinstance(name, str) for name in info["cpu"])
    assert info["layouts"] == len(run_json("layouts"))
    text = run("info").stdout
    assert info["version"] in text and f"cuda     {info['cuda_status']}" in text
    flags = pathlib.Path("/proc/cpuinfo")
    if flags.exists() and " avx2 " in flags.read_text():
        assert "AVX2" in info["cpu"]
    assert info["cpu"] == kv.instruction_sets()
    assert info["matrix"] in ("amx", "none")


def test_layouts_lists_the_registry():
    rows = {row["name"]: row for row in run_json("layouts")}
    assert len(rows) >= 60
    assert rows["vllm/flashinfer-nhd"]["order"] == "B KV N H D"
    assert rows["vllm/flashinfer-nhd"]["opaque"] is False
    assert rows["vllm/paged-attention"]["opaque"] is True
    assert rows["vllm/flashinfer-nhd"]["last"] == "0.25.1"
    text = run("layouts").stdout
    for name, row in rows.items():
        lines = [line for line in text.splitlines() if name in line.split()]
        assert lines, name
        assert any(line.startswith("◆") == row["opaque"] for line in lines)
        assert row["note"] in text and row["order"] in text


# --- offset


@pytest.mark.parametrize("plane", ["key", "value"])
def test_offset_of_the_x_split_agrees_with_its_formula(plane):
    num_blocks, size, heads, dim, item = 8, 16, 4, 64, 2
    rng = random.Random(5)
    for _ in range(40):
        b, n, h, d = (rng.randrange(end) for end in (num_blocks, size, heads, dim))
        if plane == "key":
            element = (((b * heads + h) * (dim // 8) + d // 8) * size + n) * 8 + d % 8
        else:
            element = num_blocks * heads * dim * size + ((b * heads + h) * dim + d) * size + n
        at = f"plane={plane},B={b},N={n},H={h},D={d}"
        assert run("offset", X_SPLIT, "--geometry", GEOMETRY, "--at", at).stdout == f"{element * item}\n"


def test_offset_json_has_the_tensor():
    at = "plane=value,L=2,B=1"
    flat = run_json("offset", "B KV N H D", "--geometry", f"L=3,{GEOMETRY}", "--at", at)
    assert flat == {"tensor": 2, "offset": 3 * 16 * 4 * 64 * 2}
    pair = run_json("offset", "key: B N H D | value: B N H D", "--geometry", f"L=3,{GEOMETRY}", "--at", at)
    assert pair == {"tensor": 5, "offset": 16 * 4 * 64 * 2}
    layered = run_json("offset", "L B KV N H D", "--geometry", f"L=3,{GEOMETRY}", "--at", at)
    assert layered == {"tensor": 0, "offset": (2 * 8 * 2 + 3) * 16 * 4 * 64 * 2}


def test_offset_uses_symbols_dtypes_and_the_head_size_of_values():
    kernel = "B N/k H N%k KV D"
    n, h, d, k = 6, 1, 3, 4
    expected = ((((n // k) * 2 + h) * k + n % k) * 2 + 1) * 8 + d
    assert run("offset", kernel, "--geometry", f"B=1,N=8,H=2,D=8,k={k}", "--dtype", "u8", "--at",
               f"plane=value,N={n},H={h},D={d}").stdout == f"{expected}\n"  # fmt: skip
    # value rows have 4 dims, keys 6: B 1 has all of block 0 before it, then its own keys
    expected = (2 * 3 * (6 + 4) + 2 * 3 * 6 + 1 * 3 * 4 + 2 * 4 + 3) * 4
    assert run("offset", "B {key: N H D, value: N H D}", "--geometry", "B=2,N=2,H=3,D=6,Dv=4,dtype=f32", "--at",
               "plane=value,B=1,N=1,H=2,D=3").stdout == f"{expected}\n"  # fmt: skip


# --- describe


def test_describe_json():
    out = run_json("describe", "vllm/paged-attention", "--geometry", f"L=2,{GEOMETRY}", "--dtype", "bf16")
    assert out["name"] == "vllm/paged-attention"
    assert out["order"] == "{key: B H D/x N D%x, value: B H D N}"
    assert out["num_tensors"] == 2
    assert out["num_bytes"] == 2 * 8 * 16 * 4 * 64 * 2
    key, value = out["planes"]
    assert (key["name"], key["dtype"], key["base"], value["base"]) == ("key", "bf16", 0, 65536)
    assert [(m["axis"], m["extent"], m["stride"]) for m in key["modes"]] == [
        ("B", 8, 8192), ("H", 4, 2048), ("D", 8, 256), ("N", 16, 16), ("D", 8, 2)
    ]  # fmt: skip
    assert key["block_runs"] == [{"bytes": 8192, "count": 1}]
    assert out["parts"][0]["block_runs"] == [{"bytes": 8192, "count": 2}]
    again = run_json("describe", out["layout"], "--geometry", pack(out["geometry"]))
    assert again["layout"] == out["layout"]


def test_describe_tells_runs():
    packed = run_json("describe", "B N H KV D", "--geometry", GEOMETRY)
    assert packed["parts"][0]["block_runs"] == [{"bytes": 16 * 4 * 2 * 64 * 2, "count": 1}]
    assert packed["planes"][0]["block_runs"] == [{"bytes": 128, "count": 64}]
    assert packed["parts"][0]["shape"] == [8, 16, 4, 2, 64]
    assert packed["parts"][0]["strides"] == [8192, 512, 128, 64, 1]
    by_head = run_json("describe", "L H B N KV D", "--geometry", f"L=3,{GEOMETRY}")
    assert by_head["num_tensors"] == 1
    assert by_head["parts"][0]["block_runs"] == [{"bytes": 16 * 2 * 64 * 2, "count": 12}]


@pytest.mark.parametrize(
    "row", ["vllm/flashinfer-nhd", "vllm/cpu-amx16", "vllm/ds-mla-584", "transformers/dynamic-cache"]
)
def test_describe_for_people(row):
    result = run("describe", row, "--geometry", "L=2,B=4,N=32,H=2,D=64")
    assert result.returncode == 0 and result.stderr == ""
    out = run_json("describe", row, "--geometry", "L=2,B=4,N=32,H=2,D=64")
    assert row in result.stdout and out["layout"] in result.stdout
    for plane in out["planes"]:
        assert any(line.split()[:2] == [plane["name"], plane["dtype"]] for line in result.stdout.splitlines())


def test_every_row_of_the_registry_is_described_and_drawn(tmp_path):
    for row in run_json("layouts"):
        picture = tmp_path / "row.svg"
        out = run("describe", row["name"], "--geometry", "L=2,B=3,N=32,H=4,D=64,k=16,g=2", "--svg", str(picture))
        assert out.returncode == 0, (row["name"], out.stderr)
        assert len(cells(picture)) >= 2, row["name"]


# --- the picture

SVG = "{http://www.w3.org/2000/svg}"


def cells(path) -> dict[str, list]:
    """Rectangles of each panel."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    out: dict[str, list] = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "cells":
            out.setdefault(group.get("data-panel"), []).extend(group.iter(f"{SVG}rect"))
    return out


def count_runs(bytes_of_blocks: list, row_bytes: int) -> int:
    """Runs of equal neighbours in rows of `row_bytes`."""
    return sum(
        len(list(itertools.groupby(bytes_of_blocks[start : start + row_bytes])))
        for start in range(0, len(bytes_of_blocks), row_bytes)
    )


def paint(num_bytes, item, address, blocks, size, heads, dim):
    """(plane, block, token, head, dim) of each byte, by naive loops."""
    out = [None] * num_bytes
    for plane, b, n, h, d in itertools.product(("key", "value"), range(blocks), range(size), range(heads), range(dim)):
        start = address(plane, b, n, h, d) * item
        for i in range(item):
            assert out[start + i] is None
            out[start + i] = (plane, b, n, h, d)
    return out


@pytest.mark.parametrize("case", ["blocks-first", "x-split", "padded"])
def test_the_picture_of_a_small_block_has_a_rectangle_for_each_run(tmp_path, case):
    blocks, size, heads, dim, item = 2, 4, 2, 16, 2
    if case == "blocks-first":
        order = "B KV N H D"
        num_bytes = blocks * 2 * size * heads * dim * item

        def address(plane, b, n, h, d):
            return (((b * 2 + (plane == "value")) * size + n) * heads + h) * dim + d
    elif case == "x-split":
        order = X_SPLIT
        num_bytes = blocks * 2 * size * heads * dim * item

        def address(plane, b, n, h, d):
            if plane == "key":
                return (((b * heads + h) * (dim // 8) + d // 8) * size + n) * 8 + d % 8
            return blocks * size * heads * dim + ((b * heads + h) * dim + d) * size + n
    else:
        order = "B N@160 H KV D"  # 128 bytes of each 160 are used
        size = 2
        num_bytes = blocks * size * 160

        def address(plane, b, n, h, d):
            return (b * size + n) * 80 + (h * 2 + (plane == "value")) * dim + d

    picture = tmp_path / "small.svg"
    result = run("describe", order, "--geometry", f"B={blocks},N={size},H={heads},D={dim}", "--svg", str(picture))
    assert result.returncode == 0, result.stderr
    root = ElementTree.parse(picture).getroot()
    row_bytes = int(root.get("data-row-bytes"))
    assert int(root.get("data-blocks")) == blocks
    painted = paint(num_bytes, item, address, blocks, size, heads, dim)
    panels = cells(picture)
    assert list(panels) == ["plane", "B", "N", "H", "D"]
    for at, (panel, distinct) in enumerate(zip(panels, (2, blocks, size, heads, dim), strict=True)):
        colors = [element and element[at] for element in painted]
        assert len(panels[panel]) == count_runs(colors, row_bytes), panel
        fills = {rect.get("fill") for rect in panels[panel]} - {"url(#padding)"}
        assert len(fills) == distinct, panel


@pytest.mark.parametrize(
    ("order", "geometry"),
    [
        ("KV N H D", "N=1,H=1,D=1"),
        ("B KV N H D", "B=281474976710656,N=1024,H=1,D=1"),
        ("B KV N H D", "B=2,N=2,H=1,D=1000000000"),
        ("L H B N KV D", "L=128,B=1000000,N=256,H=64,D=576"),
        ("N H L D B KV", "L=64,B=100000,N=256,H=64,D=128"),
        ("B@131072 {state: D[68608] u8}", "B=4"),
        ("vllm/ds-mla-584", "B=1000,N=64"),
        ("vllm/nvfp4-hnd-sm100", "B=1000,N=16,H=8,D=128"),
    ],
)
def test_pictures_of_tiny_and_huge_layouts_stay_small(tmp_path, order, geometry):
    picture = tmp_path / "p.svg"
    result = run("describe", order, "--geometry", geometry, "--svg", str(picture), timeout=20)
    assert result.returncode == 0, result.stderr
    panels = cells(picture)
    assert 1 <= sum(map(len, panels.values())) <= 20_000
    assert picture.stat().st_size < 2_000_000


def test_the_picture_marks_padding(tmp_path):
    picture = tmp_path / "p.svg"
    assert run("describe", "vllm/ds-mla-584", "--geometry", "B=4,N=2", "--svg", str(picture)).returncode == 0
    text = picture.read_text()
    assert "padding</text>" in text
    plane = cells(picture)["plane"]
    # of each record of 584 bytes: 448 of latent, 64 ropes, 7 scales, one byte of padding
    assert len(plane) % 4 == 0
    assert sum(rect.get("fill") == "url(#padding)" for rect in plane) == len(plane) // 4


# --- detect


def test_detect_names_the_ambiguity_of_a_cache_of_two_blocks():
    out = run_json("detect", "--shape", "2,2,16,8,64", code=3)
    assert out["status"] == "ambiguous"
    readings = {reading["name"]: reading for reading in out["readings"]}
    blocks_first = readings["vllm/flashinfer-nhd"]
    kv_first = readings["vllm/flash-attention-nhd"]
    element = {name: blocks_first["example"][name] for name in ("plane", "B", "N", "H", "D")}
    assert element == {name: kv_first["example"][name] for name in element}
    assert blocks_first["example"]["offset"] != kv_first["example"]["offset"]
    b, n, h, d = (element[axis] for axis in "BNHD")
    kv = int(element["plane"] == "value")
    assert blocks_first["example"]["offset"] == 2 * ((((b * 2 + kv) * 16 + n) * 8 + h) * 64 + d)
    assert kv_first["example"]["offset"] == 2 * ((((kv * 2 + b) * 16 + n) * 8 + h) * 64 + d)


@pytest.mark.parametrize(
    "shape",
    ["2,2,16,8,64", "2,16,2,8,64", "4,16,8,128", "2,2,2,2,2", "1,2,1,1,1", "3,5,2,4,6,8", "7,3,16,64", "2,3,48"],
)
def test_examples_are_where_the_readings_say(shape):
    result = run("detect", "--shape", shape, "--json")
    out = json.loads(result.stdout)
    count = len(out["readings"])
    assert (out["status"], result.returncode) == (("unknown", 4), ("ok", 0), ("ambiguous", 3))[min(count, 2)]
    for reading in out["readings"]:
        example = reading["example"]
        at = ",".join(f"{name}={example[name]}" for name in ("plane", "L", "B", "N", "H", "D") if name in example)
        # the layout in its canonical text has the tensor's own strides
        found = run("offset", reading["layout"], "--geometry", pack(reading["geometry"]), "--at", at)
        assert found.stdout == f"{example['offset']}\n", (reading["layout"], found.stderr)
    if count > 1:
        offsets = {json.dumps(reading["example"], sort_keys=True) for reading in out["readings"]}
        assert len(offsets) > 1


def test_detect_is_sure_where_the_hints_leave_one_reading():
    out = run_json("detect", "--shape", "7,2,16,3,32", "--heads", "3", "--head-size", "32", "--block-size", "16",
                   "--blocks", "7")  # fmt: skip
    assert out["status"] == "ok"
    (reading,) = out["readings"]
    assert reading["name"] == "vllm/flashinfer-nhd" and reading["order"] == "B KV N H D"
    assert reading["name"] in reading["names"]
    assert reading["geometry"] == {
        "num_layers": 1, "num_blocks": 7, "block_size": 16, "num_kv_heads": 3, "head_size": 32, "dtype": "bf16"
    }  # fmt: skip
    assert set(reading["example"]) >= {"plane", "B", "N", "H", "D", "offset"}
    text = run(
        "detect", "--shape", "7,2,16,3,32", "--heads", "3", "--head-size", "32", "--block-size", "16", "--blocks", "7"
    )
    assert text.returncode == 0 and text.stderr == "" and "vllm/flashinfer-nhd" in text.stdout


def test_detect_reads_strides_layers_pairs_and_among():
    # HND memory under an NHD shape
    among = ["--among", "vllm/flashinfer-hnd", "vllm/flashinfer-nhd"]
    out = run_json("detect", "--shape", "7,2,16,3,32", "--strides", "3072,1536,32,512,1", *among, "--heads", "3")
    assert [reading["name"] for reading in out["readings"]] == ["vllm/flashinfer-hnd"]
    out = run_json("detect", "--shape", "7,16,3,32", "--shape", "7,16,3,32", "--heads", "3", "--block-size", "16")
    assert out["readings"][0]["order"] == "key: B N H D | value: B N H D"
    hints = ["--layers", "5", "--heads", "3", "--block-size", "16", "--blocks", "7", "--dtype", "f32"]
    out = run_json("detect", "--shape", "7,5,2,3,16,32", *hints, "--among", "tensorrt-llm")
    assert out["readings"][0]["name"] == "trtllm/pool"
    assert out["readings"][0]["geometry"]["num_layers"] == 5
    assert out["readings"][0]["geometry"]["dtype"] == "f32"


def test_detect_unknown():
    out = run_json("detect", "--shape", "7,3,5,11,13,17,19", code=4)
    assert out == {"status": "unknown", "readings": []}
    result = run("detect", "--shape", "7,3,5,11,13,17,19")
    assert result.returncode == 4 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "[7, 3, 5, 11, 13, 17, 19]" in result.stderr


def test_detect_ambiguous_for_people():
    result = run("detect", "--shape", "2,2,16,8,64")
    assert result.returncode == 3
    assert "vllm/flashinfer-nhd" in result.stdout and "vllm/flash-attention-nhd" in result.stdout
    assert result.stderr.startswith("kvstride: ") and result.stderr.count("\n") == 1


# --- plan


def test_plan_counts_copies():
    out = run_json("plan", "B KV N H D", "KV B H N D", "--geometry", f"L=2,{GEOMETRY}", "--pairs", "0:3,4:1")
    # each (layer, pair, plane, token, head) is a run of its own
    assert out == {"copies": 2 * 2 * 2 * 16 * 4, "bytes": 2 * 2 * 2 * 16 * 4 * 128, "sizes": {"128": 512}}
    same = run_json("plan", "B KV N H D", "vllm/flashinfer-nhd", "--geometry", GEOMETRY, "--pairs", "0:3,4:1")
    assert same == {"copies": 2, "bytes": 2 * 2 * 16 * 4 * 128, "sizes": {str(2 * 16 * 4 * 128): 2}}
    first = run_json("plan", "B KV N H D", "KV B N H D", "--geometry", GEOMETRY, "--pairs", "7:0")
    assert first == {"copies": 2, "bytes": 2 * 16 * 4 * 128, "sizes": {str(16 * 4 * 128): 2}}


def test_plan_between_geometries():
    more = ["--geometry", GEOMETRY, "--to-geometry"]
    out = run_json("plan", "B H KV N D", "B H KV N D", *more, "B=2", "--pairs", "7:1")
    assert out["copies"] == 1
    assert_refused(run("plan", "B H KV N D", "B H KV N D", *more, "B=2", "--pairs", "7:2"), "2", "num_blocks")
    # 16-token blocks into the middle of a 48-token block: one run a (token range, plane)
    out = run_json("plan", "B KV N H D", "B KV N H D", *more, "B=2,N=48", "--src-blocks", "5,2", "--dst-blocks", "1",
                   "--tokens", "0:8:32")  # fmt: skip
    assert out["bytes"] == 32 * 2 * 4 * 128
    assert out["sizes"] == {str(16 * 4 * 128): 4}
    assert_refused(run("plan", "B KV N H D", "B KV N H D", *more, "N=48", "--pairs", "0:1"), "16", "48")
    # one head of two of a smaller shard
    out = run_json("plan", "B H KV N D", "B H KV N D", *more, "H=2", "--heads", "1:0:2", "--pairs", "0:1")
    assert out == {"copies": 1, "bytes": 2 * 2 * 16 * 128, "sizes": {str(2 * 2 * 16 * 128): 1}}
    out = run_json(
        "plan", "B KV N H D", "B KV N H D", "--geometry", f"L=4,{GEOMETRY}", "--layers", "1:2", "--pairs", "0:1"
    )
    assert out["copies"] == 2
    cast = ["plan", "B KV N H D", "B KV N H D", *more, "dtype=f32", "--pairs", "0:1"]
    assert_refused(run(*cast), "cast")
    assert run_json(*cast, "--cast")["bytes"] == 2 * 16 * 4 * 64 * 4


def test_plan_for_people():
    result = run("plan", "B KV N H D", "KV B H N D", "--geometry", GEOMETRY, "--pairs", "0:3,4:1")
    assert result.returncode == 0
    assert "copies  256\n" in result.stdout and "256 × 128 bytes" in result.stdout


# --- bad input

HUGE = "99999999999999999999999999"
BAD = [
    [],
    [""],
    ["no-such-command"],
    ["--no-such-option"],
    ["layouts", "surplus"],
    ["info", "--json=maybe"],
    ["offset"],
    ["offset", "B KV N H D"],
    ["offset", "B KV N H D", "--geometry", GEOMETRY],
    ["offset", "B KV N H D", "--geometry", GEOMETRY, "--geometry", GEOMETRY, "--at", "plane=key"],
    ["offset", "", "--geometry", GEOMETRY, "--at", "plane=key"],
    ["offset", "B\nKV\nQ", "--geometry", GEOMETRY, "--at", "plane=key"],
    ["offset", "B N H D", "--geometry", GEOMETRY, "--at", "plane=key"],
    ["offset", "NHD", "--geometry", GEOMETRY, "--at", "plane=key"],
    ["offset", "vllm/no-such-row", "--geometry", GEOMETRY, "--at", "plane=key"],
    ["offset", "B KV N H D/7 D%7", "--geometry", GEOMETRY, "--at", "plane=key"],
    *(
        ["offset", "B KV N H D", "--geometry", geometry, "--at", "plane=key"]
        for geometry in [
            "", ",", "B", "B=", "=1", "B=8,N=16,H=4", "B=8,N=16,H=4,D=0", "B=8,N=16,H=4,D=-1", "B=8,N=16,H=4,D=64x",
            "B=8,N=16,H=4,D= 64", "B=8,N=16,H=4,D=+64", "B=8,N=16,H=4,D=0x40", "B=8,N=16,H=4,D=6e1",
            "B=8,N=16,H=4,D=64,",
            "B=8,N=16,H=4,D=64,D=64", f"B=8,N=16,H=4,D={HUGE}", "B=8,N=16,H=4,D=281474976710657",
            "B=281474976710656,N=281474976710656,H=4,D=64", "B=8,N=16,H=4,D=64,x=8", "B=8,N=16,H=4,D=64,9=1",
            "B=8,N=16,H=4,D=64,dtype=f15", "B=8;N=16;H=4;D=64", "B=8,N=16,H=4,D=64,Dv=0",
        ]
    ),
    *(
        ["offset", "B KV N H D", "--geometry", GEOMETRY, "--at", at]
        for at in [
            "", "B=1", "plane=", "plane=rope", "plane=key,B=8", "plane=key,B=-1", "plane=key,Q=1", "plane=key,B=1,B=1",
            "plane=key,B=1x", f"plane=key,B={HUGE}", "plane=key,L=1", "plane=key,plane=key", "key,1,2",
        ]
    ),
    ["offset", "B KV N H D", "--geometry", GEOMETRY, "--dtype", "float", "--at", "plane=key"],
    ["offset", "B KV N H D", "--geometry", f"{GEOMETRY},dtype=f32", "--dtype", "bf16", "--at", "plane=key"],
    ["describe", "B N/k H N%k KV D", "--geometry", GEOMETRY],
    ["describe", "B KV N H D", "--geometry", GEOMETRY, "--svg", "/no/such/folder/x.svg"],
    ["describe", "B KV N H D", "--geometry", GEOMETRY, "--svg", ""],
    ["describe", "B KV N H D", "--geometry", GEOMETRY, "--svg", "/"],
    ["describe", "B KV N H D", "--geometry", GEOMETRY, "--svg", "/dev/full"],
    ["detect"],
    *(
        ["detect", "--shape", shape]
        for shape in ["", ",", "7,2,", "7;2", "7,2,x", "7,-2,16", "0,2,16,3,32", HUGE, ",".join("1" * 14), "[7,2]"]
    ),
    ["detect", "--shape", "7,2,16,3,32", "--strides", "1,2"],
    ["detect", "--shape", "7,2,16,3,32", "--strides", "-1,1,1,1,1"],
    ["detect", "--shape", "7,2,16,3,32", "--strides", "1,1,1,1,1", "--strides", "1,1,1,1,1"],
    ["detect", "--shape", "7,2", "--shape", "7,2", "--shape", "7,2"],
    ["detect", "--shape", "7,2,16,3,32", "--heads", "0"],
    ["detect", "--shape", "7,2,16,3,32", "--heads", "three"],
    ["detect", "--shape", "7,2,16,3,32", "--dtype", "float"],
    ["detect", "--shape", "7,2,16,3,32", "--among", "nobody"],
    ["detect", "--shape", "7,2,16,3,32", "--among", "vllm/paged-attention"],
    ["plan", "B KV N H D", "--geometry", GEOMETRY, "--pairs", "0:1"],
    ["plan", "B KV N H D", "KV B N H D", "--geometry", GEOMETRY],
    *(
        ["plan", "B KV N H D", "KV B N H D", "--geometry", GEOMETRY, "--pairs", pairs]
        for pairs in ["", "0", "0:", "0:1:2", "0:8", "8:0", "-1:0", "0:1,2:1", "0:1,", "a:b", f"0:{HUGE}", f"{2**40}:0"]
    ),
    ["plan", "B KV N H D", "KV B N H D", "--geometry", GEOMETRY, "--pairs", "0:1", "--heads", "0:0:5"],
    ["plan", "B KV N H D", "KV B N H D", "--geometry", GEOMETRY, "--pairs", "0:1", "--heads", "0:4"],
    ["plan", "B KV N H D", "KV B N H D", "--geometry", GEOMETRY, "--pairs", "0:1", "--layers", "1:1"],
    ["plan", "B KV N H D", "KV B N H D", "--geometry", GEOMETRY, "--pairs", "0:1", "--tokens", "0:0:1"],
    ["plan", "B KV N H D", "KV B N H D", "--geometry", GEOMETRY, "--src-blocks", "0", "--tokens", "0:0:1"],
    ["plan", "B KV N H D", "KV B N H D", "--geometry", GEOMETRY, "--to-geometry", "H=2", "--pairs", "0:1"],
    ["plan", "B KV N H D", "B N {latent: D[512], rope: D[64]}", "--geometry", GEOMETRY, "--pairs", "0:1"],
    ["plan", "B KV N H D", "KV B N H D", "--geometry", f"L={2**48},{GEOMETRY}", "--pairs", "0:1"],
    ["plan", "B KV N H D", "KV B N H D", "--geometry", f"B=1,N={2**40},H=1,D=1", "--pairs", "0:0"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", BAD, ids=lambda arguments: " ".join(arguments)[:90])
def test_bad_input_is_one_line_and_exit_code_2(arguments):
    assert_refused(run(*arguments))
    if arguments and arguments[0] in COMMANDS and "--json=maybe" not in arguments:
        assert_refused(run(*arguments, "--json"))


def test_errors_name_the_culprit():
    assert_refused(run("offset", "B KV N Q D", "--geometry", GEOMETRY, "--at", "plane=key"), "column 8", "Q")
    assert_refused(run("offset", "B KV N H D", "--geometry", "B=8,N=16,D=64", "--at", "plane=key"), "H=")
    assert_refused(run("offset", "B KV N H D", "--geometry", "B=8,N=1_6,H=4,D=64", "--at", "plane=key"), "'1_6'")
    assert_refused(run("offset", "B KV N H D", "--geometry", GEOMETRY, "--at", "plane=key,B=8"), "block 8", "8")
    assert_refused(run("offset", "vllm/nothing", "--geometry", GEOMETRY, "--at", "plane=key"), "vllm/nothing")
    assert_refused(run("plan", "B KV N H D", "KV B N H D", "--geometry", GEOMETRY, "--pairs", "0:1,2:1"), "block 1")


def test_a_refused_picture_leaves_no_file(tmp_path):
    picture = tmp_path / "p.svg"
    assert_refused(run("describe", "B KV N H D", "--geometry", "B=8", "--svg", str(picture)))
    assert not picture.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_standard_output_is_an_error():
    with open("/dev/full", "w") as full:
        result = subprocess.run([PROGRAM, "layouts"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("kvstride: cannot write to standard output") and result.stderr.count("\n") == 1


def test_a_closed_standard_output_is_an_error_and_stays_out_of_files(tmp_path):
    picture = tmp_path / "p.svg"
    command = f'"{PROGRAM}" describe "B KV N H D" --geometry {GEOMETRY} --svg "{picture}"'
    closed = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, text=True, timeout=60)
    assert closed.returncode == 2 and closed.stderr.count("\n") == 1
    ElementTree.parse(picture)  # and nothing else was written into it
    everything = subprocess.run(["sh", "-c", f"{command} <&- >&- 2>&-"], timeout=60)
    assert everything.returncode == 2
    ElementTree.parse(picture)


def test_a_reader_that_leaves_is_an_error():
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([PROGRAM, "layouts", "--json"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert result.returncode == 2 and result.stderr.count("\n") == 1


def test_random_arguments_never_crash():
    rng = random.Random(20)
    words = [
        *COMMANDS, "--json", "--geometry", "--shape", "--at", "--pairs", "--dtype", "--heads", "--strides",
        "--among", "--svg",
        "B KV N H D", X_SPLIT, "vllm/packed-nhd", "B N/k H N%k KV D", GEOMETRY, "B=2,N=2,H=2,D=2,k=2", "B=1",
        "plane=key",
        "2,2,16,8,64", "0:1", "bf16", "vllm", "", "-", "--", "{}", "[]", "%%", "{", "D@0", "KV@0 B D",
        "B@1 KV N H D", HUGE, "-1",
        "\x01", "ä", b"\xff\xfe", "B=1,N=1,H=1,D=1,B=1", "L B N H KV D", "L=9999999999,B=1,N=1,H=1,D=1", "/dev/null",
        "4611686018427387904,2", "1,1,1,1", f"{2**62},{2**62},2,2", "key: D | value: N", "{a: {b: {c: D}}}",
    ]  # fmt: skip
    for _ in range(400):
        arguments = [rng.choice(COMMANDS)] if rng.random() < 0.8 else []
        arguments += rng.choices(words, k=rng.randrange(8))
        arguments = [w for i, w in enumerate(arguments) if i == 0 or arguments[i - 1] != "--svg"]
        arguments = [w for w in arguments if w != "--svg"]
        result = run(*arguments, timeout=30)
        assert result.returncode in (0, 2, 3, 4), (arguments, result.returncode, result.stderr)
        assert result.stderr.count("\n") <= 1, (arguments, result.stderr)
        if result.returncode == 2:
            assert result.stdout == "" and result.stderr, arguments
