# SPDX-License-Identifier: Apache-2.0
"""`kvstride simulate`: the same numbers as a naive simulator, sweeps, charts, and what it refuses."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import pty
import random
import signal
import subprocess
import time
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulate_oracle import Simulation, Tier
from test_cli import PROGRAM, assert_refused, program_is_there, run  # noqa: F401 (a fixture for all tests)

CHUNK = 2 * 4096  # bytes of a chunk of 4 tokens of 1024 bytes, and its header
FLEET = "rate=5,duration=10m,prompts=10,prompt_tokens=600,think=20s,document_tokens=2000,seed=7"


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def simulate(*arguments, text: str | None = None, code: int = 0) -> dict:
    result = run("simulate", *arguments, "--json", input=text)
    assert result.returncode == code, (result.stdout, result.stderr)
    return json.loads(result.stdout)


def row(time_ms: int, ids: list[int], tokens: int | None = None) -> dict:
    return {
        "timestamp": time_ms,
        "input_length": 4 * len(ids) if tokens is None else tokens,
        "output_length": 1,
        "hash_ids": ids,
    }


def small(*arguments, rows: list[dict]) -> dict:
    """One run over rows with blocks of 4 tokens of 1024 bytes."""
    given = ["-", "--block-tokens", "4", "--bytes-per-token", "1024", *arguments]
    return simulate(*given, text=lines(rows))["runs"][0]


# --- The same as a naive simulator


def random_rows(seed: int, num_requests: int, num_ids: int, repeat: float) -> list[dict]:
    """Prefixes of a random tree: an id stands for the way to it, as in real traces; with `repeat` ids are any."""
    dice = random.Random(seed)
    known: dict[tuple[int, ...], int] = {(): -1}
    rows, now = [], 0
    for _ in range(num_requests):
        path: tuple[int, ...] = ()
        ids = []
        for _ in range(dice.randrange(9)):
            path += (min(int(dice.expovariate(1.2)), 4),)
            known.setdefault(path, len(known))
            ids.append(dice.randrange(num_ids) if dice.random() < repeat else known[path])
        now += dice.choice([0, 1, 1000, 60_000])
        rows.append(row(now, ids, max(4 * len(ids) - dice.choice([0, 0, 0, 1, 3]), 0)))
    return rows


capacities = st.sampled_from([0, 1, CHUNK - 1, CHUNK, 3 * CHUNK, 10 * CHUNK + 17, 30 * CHUNK, 1000 * CHUNK])
tiers = st.tuples(
    capacities,
    st.sampled_from([0, 0, 1, 90, 3600]),  # seconds to live
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([0, 0, CHUNK, 10**7, 10**9]),  # bytes a day
)
CASES = int(os.environ.get("KVSTRIDE_SIMULATE_CASES", "150"))


@settings(max_examples=CASES, deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from([5, 40, 150]), st.sampled_from([0, 0.1]), st.tuples(tiers, tiers, tiers),
    st.booleans(), st.sampled_from([4, 8, 12]), st.sampled_from([1, 7, 50, 100_000]),
)  # fmt: skip
def test_the_same_as_a_naive_simulator(seed, num_requests, repeat, setups, lru, chunk_tokens, window):
    rows = random_rows(seed, num_requests, 50, repeat)
    arguments, made = [], []
    for name, (capacity, ttl, reuse, budget) in zip(("host", "directory", "remote"), setups, strict=True):
        arguments += [f"--{name}", str(capacity), f"--{name}-ttl", f"{ttl}s"]
        arguments += [f"--{name}-min-reuse", str(reuse), f"--{name}-write-budget", str(budget)]
        if capacity:
            made.append(Tier(name, capacity, lru, ttl * 10**9, reuse, budget, window))
    if not made:
        return
    oracle = Simulation(made, 4, chunk_tokens, 1024)
    for one in rows:
        oracle.request(one)
    policy = "lru" if lru else "s3-fifo"
    arguments += ["--policy", policy, "--chunk-tokens", str(chunk_tokens), "--reuse-window", str(window)]
    got = small(*arguments, rows=rows)
    expected = oracle.result()
    for tier, want in zip(got["tiers"], expected["tiers"], strict=True):
        assert {name: tier[name] for name in want} == want
    assert {name: got[name] for name in expected if name != "tiers"} == {
        name: value for name, value in expected.items() if name != "tiers"
    }


def test_the_oracle_sees_everything_that_is_counted():
    """Else the test above could be right about nothing."""
    seen = dict.fromkeys(Tier("", 0).counts, 0)
    for seed in range(30):
        made = [
            Tier("host", 5 * CHUNK, ttl=90 * 10**9),
            Tier("directory", 20 * CHUNK, min_reuse=2, window=50, ttl=3600 * 10**9),
            Tier("remote", 60 * CHUNK if seed % 3 else 1, budget=10**7),
        ]
        oracle = Simulation(made, 4, 4, 1024)
        for one in random_rows(seed, 150, 50, 0.1):
            oracle.request(one)
        for tier in oracle.result()["tiers"]:
            for name in seen:
                seen[name] += tier[name]
    assert all(seen.values()), seen


# --- What it models, on traces that can be followed by hand


def test_a_prefix_is_read_from_the_first_tier_that_has_it():
    rows = [row(0, [1, 2, 3]), row(1, [1, 2, 9]), row(2, [1, 2, 3])]
    got = small("--host", str(2 * CHUNK), "--directory", "1G", "--policy", "lru", rows=rows)
    host, directory = got["tiers"]
    # 1 2 3 are put: the host keeps 2 3. 1 and 2 come from the directory (1 pushes 2 out, 2 pushes 3 out); 9 is put.
    # The host has 2 9: 1 from the directory pushes 2 out, and so on: 2 and 3 as well.
    assert (got["chunks"], got["hits"], got["saved_tokens"], got["full_hits"]) == (9, 5, 20, 1)
    assert (host["hits"], directory["hits"]) == (0, 5)
    assert (host["writes"], host["promotions"], host["evictions"]) == (9, 5, 7)
    assert (directory["writes"], directory["read_bytes"], directory["entries"]) == (4, 5 * CHUNK, 4)
    assert directory["evicted_unread"] == 0 and host["evicted_unread"] == 7


def test_a_gap_ends_the_prefix():
    rows = [row(0, [1]), row(1, [5, 1]), row(2, [5, 1])]
    got = small("--host", "1G", rows=rows)
    assert (got["chunks"], got["hits"]) == (5, 2)
    assert got["tiers"][0]["writes"] == 2


def test_partial_blocks_and_partial_chunks_are_not_stored():
    rows = [row(0, [1, 2, 3], 11), row(1, [1, 2, 3], 11), row(2, [1, 2], 11)]
    got = small("--host", "1G", rows=rows)
    assert (got["chunks"], got["hits"], got["tiers"][0]["entries"]) == (6, 4, 2)
    got = small("--host", "1G", "--chunk-tokens", "8", rows=[row(0, [1, 2, 3]), row(1, [1, 2, 4])])
    assert (got["chunks"], got["hits"], got["saved_tokens"], got["chunk_bytes"]) == (2, 1, 8, 3 * 4096)


def test_minimum_reuse_writes_only_what_came_twice():
    rows = [row(i, [i, 100]) for i in range(50)] + [row(60, [100])]
    got = small("--directory", "1G", "--directory-min-reuse", "2", rows=rows)
    assert (got["tiers"][0]["writes"], got["hits"], got["tiers"][0]["refused_seldom"]) == (1, 1, 51)


def test_what_the_directory_refused_is_offered_again_when_the_host_lets_it_go():
    rows = [row(0, [1]), row(1, [1]), row(2, [2]), row(3, [3]), row(4, [1])]
    got = small("--host", str(CHUNK), "--directory", "1G", "--directory-min-reuse", "2", rows=rows)
    host, directory = got["tiers"]
    # 1 was asked for twice when 2 pushes it out; 2 was not when 3 does.
    assert (directory["writes"], directory["demotions"], directory["hits"], host["hits"]) == (1, 1, 1, 1)


def test_write_budget_bounds_what_is_written():
    rows = [row(i * 1000, [i]) for i in range(3600)]
    a_day = 24 * 100 * CHUNK
    got = small("--directory", "10G", "--directory-write-budget", str(a_day), rows=rows)["tiers"][0]
    assert 198 <= got["writes"] <= 202, "a burst of an hour's share, and the hour's"
    assert got["writes"] + got["refused_budget"] == 3600


def test_time_to_live():
    rows = [row(0, [1]), row(9_999, [1]), row(10_000, [1]), row(15_000, [1])]
    got = small("--host", "1G", "--host-ttl", "10s", rows=rows)
    assert (got["hits"], got["tiers"][0]["expired"], got["tiers"][0]["writes"]) == (2, 1, 2)


def test_s3_fifo_keeps_what_is_popular_beside_a_scan():
    rows = [row(i, [i % 5 + 1] if i % 2 else [1000 + i]) for i in range(4000)]
    hits = {}
    for policy in ("s3-fifo", "lru"):
        hits[policy] = small("--host", str(8 * CHUNK), "--policy", policy, rows=rows)["hits"]
    assert hits["s3-fifo"] > 1900 and hits["lru"] == 0


# --- Input


def test_every_form_of_a_line_is_read():
    text = (
        '{"hash_ids":[],"input_length":0,"timestamp":0}\r\n'
        "\n"
        ' { "timestamp" : 1.5e0 , "type": {"a": [1, -2.5e3, "x\\"]", null, true, {}], "b": []}, "input_length": 4,'
        '"hash_ids": [ 18446744073709551615 ] } \n'
        '{"timestamp": 2, "input_length": 4, "output_length": 7, "hash_ids": [18446744073709551615]}'
    )
    got = simulate("-", "--block-tokens", "4", "--bytes-per-token", "1K", "--host", "1G", text=text)
    assert got["trace"]["requests"] == 3 and got["runs"][0]["hits"] == 1
    assert got["trace"]["block_events"] == 2 and got["trace"]["input_tokens"] == 8
    assert got["trace"]["seconds"] == pytest.approx(0.002)


GOOD = '{"timestamp": 5, "input_length": 4, "output_length": 1, "hash_ids": [1]}'
BAD_LINES = [
    ("nonsense", "no JSON object"),
    ("[1]", "no JSON object"),
    ("\x1f\x8b\x08", "no JSON object"),
    ("{}", "timestamp is missing"),
    ('{"timestamp": 5}', "input_length is missing"),
    ('{"timestamp": 5, "input_length": 4}', "hash_ids is missing"),
    (GOOD[:-1], "'}' is missing"),
    (GOOD + "}", "something follows"),
    (GOOD.replace("[1]", "[1"), "']' is missing"),
    (GOOD.replace("[1]", "[1,]"), "an id of hash_ids is no integer"),
    (GOOD.replace("[1]", "[-1]"), "an id of hash_ids is no integer"),
    (GOOD.replace("[1]", "[1.5]"), "an id of hash_ids is no integer"),
    (GOOD.replace("[1]", "[01]"), "an id of hash_ids is no integer"),
    (GOOD.replace("[1]", "[18446744073709551616]"), "above 18446744073709551615"),
    (GOOD.replace("[1]", '["1"]'), "an id of hash_ids is no integer"),
    (GOOD.replace("[1]", "1"), "'[' is missing"),
    (GOOD.replace("[1]", "[1, 2, 3]"), "3 hash_ids for input_length 4: with 4 tokens a block there would be 1"),
    (GOOD.replace("4,", "9,"), "1 hash_ids for input_length 9"),
    (GOOD.replace("4,", "1099511627777,"), "input_length is above"),
    (GOOD.replace("5", "-5"), "timestamp is -5"),
    (GOOD.replace("5", "4000000000001"), "timestamp is 4000000000001"),
    (GOOD.replace("5", '"5"'), "timestamp is no number"),
    (GOOD.replace("5", "05"), "timestamp is no number"),
    (GOOD.replace("5", "1e999"), "timestamp is 1e999"),
    (GOOD.replace("5", "NaN"), "timestamp is no number"),
    (GOOD.replace("5", "4"), "is before the 5 ms of an earlier line"),
    (GOOD.replace('"timestamp": 5', '"timestamp": 5, "timestamp": 5'), "timestamp is given twice"),
    (GOOD.replace("{", '{"x": ' + "[" * 100 + "]" * 100 + ","), "levels"),
    (GOOD.replace("{", '{"x": "a\tb",'), "control character"),
    (GOOD.replace("{", '{"x": nul,'), "a value is no number"),
    ('{"x": "abc', "a text does not end"),
    ('{"x": "abc\\', "a text does not end"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_one_error_with_its_number(line, words, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    given = ["--block-tokens", "4", "--bytes-per-token", "1K", "--host", "1G"]
    assert_refused(run("simulate", str(trace), *given), f"{trace}, line 3: ", words)
    got = simulate(str(trace), *given, "--skip-bad-lines")
    assert got["trace"]["skipped_lines"] == 1 and got["trace"]["requests"] == 2 and got["runs"][0]["hits"] == 1


ENOUGH = ["--host", "1G", "--bytes-per-token", "1K"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a TRACE, --synthetic or --scale"),
        (["/nowhere/trace", *ENOUGH], "cannot open '/nowhere/trace'"),
        (["/", *ENOUGH], "cannot read /"),
        (["-", "--synthetic", "rate=1", *ENOUGH], "not both"),
        (["-", "--host", "1G"], "--bytes-per-token"),
        (["-", *ENOUGH, "--geometry", "L=2,H=2,D=2"], "give one"),
        (["-", "--host", "1G", "--geometry", "L=2,H=2"], "give D="),
        (["-", "--host", "1G", "--geometry", "L=2,H=2,D=99999999999"], "99999999999"),
        (["-", "--bytes-per-token", "1K"], "no tier is given"),
        (["-", "--host", "0", "--bytes-per-token", "1K"], "all its capacities are 0"),
        (["-", "--host-ttl", "1s", "--bytes-per-token", "1K"], "--host SIZE"),
        (["-", "--host", "1G,,2G", "--bytes-per-token", "1K"], "--host: '' is not a size"),
        (["-", "--host", "1G,1G", "--bytes-per-token", "1K"], "1G is given twice"),
        (["-", "--host", "-1", "--bytes-per-token", "1K"], "--host"),
        (["-", "--host", "1G", "--bytes-per-token", "0"], "bytes_per_token is 0"),
        (["-", "--host", "1G", "--bytes-per-token", "1T"], "above 17592186044416 bytes"),
        (["-", *ENOUGH, "--policy", "fifo"], "'fifo' is none of s3-fifo, lru"),
        (["-", *ENOUGH, "--chunk-tokens", "700"], "chunk_tokens is 700, it must be a multiple of block_tokens 512"),
        (["-", *ENOUGH, "--block-tokens", "0"], "--block-tokens: 0"),
        (["-", *ENOUGH, "--host-min-reuse", "0"], "min_reuse is 0"),
        (["-", *ENOUGH, "--host-min-reuse", "99999999999999999999"], "does not fit 64 bits"),
        (["-", *ENOUGH, "--host-min-reuse", "4294967297"], "min_reuse is 1000"),
        (["-", *ENOUGH, "--host-ttl", "5"], "'5' is not a duration"),
        (["-", *ENOUGH, "--reuse-window", "0"], "reuse_window is 0"),
        (["-", *ENOUGH, "--write-trace", "x"], "--write-trace writes what --synthetic makes"),
        (["-", "--host", ",".join(map(str, range(1, 1100))), "--bytes-per-token", "1K"], "more than 1000 combinations"),
        (["--scale", "0"], "scale is 0"),
        (["--scale", "1000", "--host", "1G"], "give a TRACE or --synthetic"),
        (["--synthetic", "rate=0", *ENOUGH], "rate is 0"),
        (["--synthetic", "rate=nan", *ENOUGH], "'nan' is not a number"),
        (["--synthetic", "documents=1.5", *ENOUGH], "documents is 1.5, it must be from 0 to 1"),
        (["--synthetic", "turns=0.5", *ENOUGH], "turns is 0.5"),
        (["--synthetic", "speed=1", *ENOUGH], "'speed' is none of its options"),
        (["--synthetic", "", *ENOUGH], "'' is not name=value"),
        (["--synthetic", FLEET, "--write-trace", "/nowhere/t", *ENOUGH], "cannot write '/nowhere/t'"),
    ],
)
def test_bad_usage_is_refused(arguments, words):
    for more in ([], ["--json"]):
        assert_refused(run("simulate", *arguments, *more, input=""), words)


def test_help():
    result = run("simulate", "--help")
    assert result.returncode == 0 and "130 interrupted" in result.stdout and "--directory-min-reuse" in result.stdout
    assert "\n  simulate " in run("--help").stdout


def test_an_empty_trace_is_nothing():
    got = simulate("-", *ENOUGH, text="")
    assert got["trace"]["requests"] == 0 and got["runs"][0]["hit_rate"] == 0
    assert run("simulate", "-", *ENOUGH, input="").stdout.startswith("0 requests, ")


# --- Fleets


def trace_of(fleet: str, tmp_path: pathlib.Path, name: str = "t") -> list[dict]:
    path = tmp_path / name
    assert run("simulate", "--synthetic", fleet, "--write-trace", str(path)).returncode == 0
    assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_fleet_is_what_its_numbers_say(tmp_path):
    rows = trace_of(FLEET, tmp_path)
    assert rows == trace_of(FLEET, tmp_path, "again") != trace_of(FLEET.replace("=7", "=8"), tmp_path, "other")
    assert 5 * 600 * 0.75 < len(rows) < 5 * 600 * 1.2
    assert all(a["timestamp"] <= b["timestamp"] for a, b in itertools.pairwise(rows))
    assert rows[-1]["timestamp"] < 600_000
    parents: dict[int, int] = {}
    seen = -1
    for one in rows:
        ids = one["hash_ids"]
        assert len(ids) == -(-one["input_length"] // 512)
        for before, block in zip([-1, *ids], ids, strict=False):
            assert parents.setdefault(block, before) == before, "an id stands for all that is before it"
            assert block <= seen + 1, "ids count up in the order of their first use"
            seen = max(seen, block)
    firsts = [one["hash_ids"][0] for one in rows if one["input_length"] >= 512]
    popular = max(set(firsts), key=firsts.count)
    assert firsts.count(popular) > 0.1 * len(firsts), "the most popular of ten prompts"


def test_a_fleet_and_its_trace_give_the_same(tmp_path):
    path = tmp_path / "trace.jsonl"
    setup = ["--host", "1G,4G", "--directory", "20G", "--bytes-per-token", "128K", "--policy", "lru,s3-fifo"]
    made = simulate("--synthetic", FLEET, "--write-trace", str(path), *setup)
    read = simulate(str(path), *setup)
    again = simulate("-", *setup, text=path.read_text())
    timing = {"seconds", "block_events_per_second"}
    strip = [[{k: v for k, v in one.items() if k not in timing} for one in got["runs"]] for got in (made, read, again)]
    assert strip[0] == strip[1] == strip[2]
    assert made["trace"] == read["trace"]


# --- Sweeps, tables, charts


def test_a_sweep_has_a_run_for_each_combination_each_as_if_alone(tmp_path):
    arguments = ["--synthetic", FLEET, "--bytes-per-token", "128K"]
    got = simulate(*arguments, "--host", "0,1G", "--directory", "10G,40G", "--policy", "lru,s3-fifo")["runs"]
    assert len(got) == 8
    setups = [(len(one["tiers"]), one["tiers"][-1]["capacity_bytes"], one["tiers"][0]["policy"]) for one in got]
    assert len(set(setups)) == 8
    alone = simulate(*arguments, "--host", "1G", "--directory", "40G", "--policy", "s3-fifo")["runs"][0]
    for one in (got[-1], alone):
        del one["seconds"], one["block_events_per_second"]
    assert got[-1] == alone
    assert all(one["hits"] == sum(tier["hits"] for tier in one["tiers"]) for one in got)
    text = run("simulate", *arguments, "--host", "0,1G", "--directory", "10G,40G", "--policy", "lru,s3-fifo").stdout
    table = [line.split() for line in text.splitlines()]
    assert table[2][:5] == ["HOST", "DIRECTORY", "POLICY", "HIT", "RATE"]
    assert [line[:3] for line in table[3:5]] == [["0", "10G", "lru"], ["0", "10G", "s3-fifo"]]
    assert len(table[3:11]) == 8 and table[11] == []


def test_more_room_is_never_worse_for_lru():
    got = simulate(
        "--synthetic", FLEET, "--bytes-per-token", "128K", "--directory", "1G,2G,4G,8G,16G,32G,64G", "--policy", "lru"
    )["runs"]
    rates = [one["hit_rate"] for one in got]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_the_chart_is_well_formed(tmp_path):
    picture = tmp_path / "chart.svg"
    result = run(
        "simulate", "--synthetic", FLEET, "--bytes-per-token", "128K", "--host", "1G", "--directory", "1G,4G,16G",
        "--policy", "lru,s3-fifo", "--directory-ttl", "5m,1h", "--svg", str(picture),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    root = ElementTree.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    lines = root.findall(f"{space}polyline")
    assert len(lines) == 4 and all(len(line.get("points", "").split()) == 3 for line in lines)
    words = [text.text for text in root.findall(f"{space}text")]
    assert {"capacity of directory", "1G", "16G", "directory-ttl 5m, policy lru"} <= set(words)
    for line in lines:
        for point in (line.get("points") or "").split():
            x, y = map(float, point.split(","))
            assert 0 < x < float(root.get("width", "0")) and 0 < y < float(root.get("height", "0"))
    refused = run("simulate", "--synthetic", FLEET, *ENOUGH, "--svg", "/nowhere/x.svg")
    assert_refused(refused, "--svg: cannot write '/nowhere/x.svg'")


def test_scale_is_known_by_computation():
    got = simulate("--scale", "1000000000")["scale"]
    assert got["blocks"] == 10**9 and got["measured_blocks"] == 1953125 and got["indexes"] == 1
    assert 90 <= got["bytes_per_block_lru"] <= 100, "76 of an entry, 17 of the table"
    assert 110 <= got["bytes_per_block"] <= 150
    assert got["index_bytes"] == pytest.approx(got["bytes_per_block"] * 10**9)
    more = simulate("--scale", "10000000000")["scale"]
    assert more["indexes"] == 4 and more["most_blocks_of_an_index"] == 3 << 30
    text = run("simulate", "--scale", "10000000000").stdout
    assert "at least 4 of them are needed" in text
    # Beside a run, too.
    both = simulate("--synthetic", FLEET, *ENOUGH, "--scale", "1000")
    assert both["scale"]["measured_blocks"] == 1000 and len(both["runs"]) == 1


# --- Long runs


def test_an_interrupted_run_says_so_and_leaves_no_file(tmp_path):
    path = tmp_path / "long.jsonl"
    # It heeds the signal although a shell may have started this test in the background, where it is ignored.
    program = [
        "env",
        "--default-signal=INT",
        PROGRAM,
        "simulate",
        "--synthetic",
        "rate=1000,duration=52w",
        "--write-trace",
        str(path),
        *ENOUGH,
        "--json",
    ]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and err.startswith("kvstride: interrupted after ") and err.count("\n") == 1
    got = json.loads(out)
    assert got["trace"]["whole"] is False and got["trace"]["requests"] > 0
    assert list(tmp_path.iterdir()) == []


def test_progress_is_for_terminals_only():
    arguments = [PROGRAM, "simulate", "--synthetic", FLEET, *ENOUGH]
    assert subprocess.run(arguments, capture_output=True, timeout=60).stderr == b""
    master, slave = pty.openpty()
    result = subprocess.run(arguments, stdout=subprocess.DEVNULL, stderr=slave, timeout=60)
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert result.returncode == 0 and "requests" in shown and shown.endswith("\r\x1b[K")
