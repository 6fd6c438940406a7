# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks, C++ and Python, and says where kvstride stands.

    python benchmarks/report.py [--filter REGEX] [--passes 3] [--min-time 0.05] [--no-peers] [--no-store]
                                [--no-attention] [--record] [--strict]

Prints a table for block verbs, peers, the store and attention (work, threads, ours, the best copy's or the other's,
ratio, target, met or not), and what fell by more than the tolerance since docs/performance.json was recorded. Leaves
report.json, report.svg, store.svg and attention.svg in build/bench; --record writes docs/performance.json, the charts
in docs/img and the tables of docs/performance.md instead.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import chart
import tables

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "bench"
RECORD = ROOT / "docs" / "performance.json"
CHARTS = ROOT / "docs" / "img"
PAGE = ROOT / "docs" / "performance.md"
FIELDS = ("GBps", "best_GBps", "memcpy_GBps", "traffic_GBps", "ratio", "target", "speedup_target", "ns_per_pair")


def run_cpp(program: Path, wanted: str, min_time: float) -> dict[str, Any]:
    """kvstride_bench's records, rooflines apart, and what it says of the machine."""
    out = BUILD / "kvstride_bench.json"
    command = [
        str(program),
        f"--benchmark_out={out}",
        "--benchmark_out_format=json",
        f"--benchmark_min_time={min_time}",
    ]
    # The rooflines are always measured: the rest is read against them.
    command.append(f"--benchmark_filter=^roofline/|{wanted}" if wanted else "--benchmark_filter=.")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    read = json.loads(out.read_text())
    works, roofline = [], []
    for entry in read["benchmarks"]:
        name, threads = re.fullmatch(r"(.+)/threads:(\d+)/manual_time", entry["name"]).groups()  # type: ignore[union-attr]
        if entry.get("error_occurred"):
            sys.exit(f"{name}: {entry['error_message']}")
        record = {"name": name, "threads": int(threads)} | {f: entry[f] for f in FIELDS if f in entry}
        (roofline if name.startswith("roofline/") else works).append(record)
    context = read["context"]
    return {"cpu": context["cpu"], "cores": context["num_cpus"], "roofline": roofline, "works": works}


def run_peers(wanted: str, rounds: int) -> dict[str, Any]:
    """benchmarks/peers' records; none where kvstride's package is not installed."""
    if importlib.util.find_spec("kvstride") is None:
        return {"peers": [], "absent": ["kvstride's Python package: nothing was compared with peers"]}
    out = BUILD / "peers.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "peers"), "--json", str(out)]
    command += ["--rounds", str(rounds), "--filter", wanted]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def run_store(args: argparse.Namespace) -> dict[str, Any]:
    """benchmarks/store's records: it makes its own rounds, through which the disk's good and bad minutes go, too."""
    if importlib.util.find_spec("kvstride") is None:
        return {"store": [], "absent": ["kvstride's Python package: the store was not measured"]}
    out = BUILD / "store.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "store"), "--json", str(out)]
    command += ["--disk", str(BUILD / "benchmarks" / "kvstride_disk_bench"), "--dir", str(args.dir)]
    command += ["--rounds", str(args.store_rounds), "--chunks", str(args.chunks), "--filter", args.filter]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def run_attention(args: argparse.Namespace) -> dict[str, Any]:
    """benchmarks/attention's records."""
    for module in ("kvstride", "torch"):
        if importlib.util.find_spec(module) is None:
            return {"attention": [], "absent": [f"{module}: attention was not measured"]}
    out = BUILD / "attention.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "attention"), "--json", str(out)]
    command += ["--rounds", str(args.rounds), "--filter", args.filter]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads(out.read_text())


def combine(passes: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The medians over passes of each record's numbers, and `spread`: how far apart its ratios were.

    A machine that is shared has good and bad minutes; passes through everything meet both.
    """
    out = []
    for same in zip(*passes, strict=True):
        record = {f: median(r[f] for r in same) if isinstance(v, float) else v for f, v in same[0].items()}
        if "ratio" in record and len(same) > 1:
            ratios = [r["ratio"] for r in same]
            record["spread"] = (max(ratios) - min(ratios)) / record["ratio"]
        out.append(record)
    return out


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All passes, in one result."""
    passes = []
    for turn in range(args.passes):
        print(f"pass {turn + 1} of {args.passes}", file=sys.stderr)
        one = run_cpp(args.bench, args.filter, args.min_time)
        passes.append(one | ({"peers": [], "absent": []} if args.no_peers else run_peers(args.filter, args.rounds)))
    merged = {part: combine([one[part] for one in passes]) for part in ("roofline", "works", "peers")}
    print("store", file=sys.stderr)
    store = {"store": [], "absent": []} if args.no_store else run_store(args)
    print("attention", file=sys.stderr)
    attention = {"attention": [], "absent": []} if args.no_attention else run_attention(args)
    absent = list(dict.fromkeys(passes[0]["absent"] + store["absent"] + attention["absent"]))
    given = f' BENCH_ARGS="{os.environ["BENCH_ARGS"]}"' if os.environ.get("BENCH_ARGS") else ""
    about = {"date": datetime.date.today().isoformat(), "command": "make bench" + given, "passes": args.passes}
    more = {"store": store["store"], "attention": attention["attention"], "absent": absent}
    return about | passes[0] | merged | more


def key_of(record: dict[str, Any]) -> tuple[Any, ...]:
    """What a record is of."""
    return record["name"], record["threads"], record.get("peer", record.get("against"))


def judge(result: dict[str, Any]) -> None:
    """Adds `speedup` over one thread, and `met` where there is a target."""
    records = result["works"] + result["peers"]
    alone = {key_of(r): r["GBps"] for r in records if r["threads"] == 1 and "GBps" in r}
    for record in records:
        one = alone.get((record["name"], 1, record.get("peer")))
        if record["threads"] > 1 and one:
            record["speedup"] = record["GBps"] / one
        if "target" in record:
            record["met"] = record["ratio"] >= record["target"]
        if "speedup_target" in record and "speedup" in record:
            record["met"] = record["speedup"] >= record["speedup_target"]
        if "target_us" in record:
            record["met"] = record["overhead_us"] <= record["target_us"]
    for record in result["store"] + result["attention"]:
        if "target" in record:
            record["met"] = record["ratio"] >= record["target"]
        if "limit" in record:
            record["met"] = record["ours"] <= record["limit"]


def fallen(result: dict[str, Any], tolerance: float) -> list[str]:
    """Ratios that are lower than the recorded ones by more than the tolerance."""
    if not RECORD.exists():
        return []
    recorded = json.loads(RECORD.read_text())
    parts = ("works", "peers", "store", "attention")
    before = {key_of(r): r["ratio"] for part in parts for r in recorded.get(part, ()) if "ratio" in r}
    out = []
    if recorded["cpu"] != result["cpu"]:
        out.append(f"(the record is of another CPU: {recorded['cpu']})")
    for record in (record for part in parts for record in result[part]):
        was = before.get(key_of(record))
        if was and record.get("ratio", was) < was * (1 - tolerance):
            work = " ".join(str(part) for part in key_of(record) if part is not None)
            out.append(f"{work}: {was:.2f} -> {record['ratio']:.2f}")
    return out


def text_of(result: dict[str, Any]) -> str:
    """JSON with four digits, which is more than is repeatable."""
    rounded = json.loads(json.dumps(result), parse_float=lambda number: float(f"{float(number):.4g}"))
    return json.dumps(rounded, indent=1) + "\n"


def draw_charts(result: dict[str, Any], works: Path) -> None:
    """The chart of the works, and beside it store.svg and attention.svg."""
    works.parent.mkdir(exist_ok=True)
    works.write_text(chart.draw(result))
    if result["store"]:
        (works.parent / "store.svg").write_text(chart.draw_targets(result, "store", "The store"))
    if result["attention"]:
        (works.parent / "attention.svg").write_text(chart.draw_targets(result, "attention", "Attention"))


def record_page(result: dict[str, Any]) -> None:
    """Rewrites docs: the JSON, the chart, and what lies between each pair of markers of the page."""
    RECORD.write_text(text_of(result))
    draw_charts(result, CHARTS / "performance.svg")
    page = PAGE.read_text()
    for name, text in tables.markdown(result).items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page, found = re.subn(pattern, lambda m, text=text: m[1] + text + m[2], page, flags=re.S)
        if not found:
            sys.exit(f"{PAGE.name}: no marker <!-- {name} -->")
    PAGE.write_text(page)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bench", type=Path, default=BUILD / "benchmarks" / "kvstride_bench")
    parser.add_argument("--filter", default="", help="only works whose name (or peer) matches")
    parser.add_argument("--passes", type=int, default=3, help="times that everything is measured; medians are taken")
    parser.add_argument("--min-time", type=float, default=0.05, help="seconds of a work's own time in a pass")
    parser.add_argument("--rounds", type=int, default=7, help="rounds beside a peer in a pass")
    parser.add_argument("--no-peers", action="store_true", help="only the C++ benchmarks")
    parser.add_argument("--no-store", action="store_true", help="without the store")
    parser.add_argument("--no-attention", action="store_true", help="without attention")
    parser.add_argument("--store-rounds", type=int, default=5, help="rounds of the store beside others")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="of the directory that the store opens")
    parser.add_argument("--dir", type=Path, default=BUILD, help="on the disk that the store is measured on; 8 GiB")
    parser.add_argument("--tolerance", type=float, default=0.15, help="by how much a ratio may fall")
    parser.add_argument("--record", action="store_true", help="write docs/performance.*")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a ratio fell")
    args = parser.parse_args()
    if args.record and (args.filter or args.no_peers or args.no_store or args.no_attention):
        parser.error("--record needs every work")
    BUILD.mkdir(parents=True, exist_ok=True)
    result = measure(args)
    judge(result)
    print(tables.text(result))
    fell = fallen(result, args.tolerance)
    if fell:
        print(f"Fell by more than {args.tolerance:.0%} since the record:", *fell, sep="\n  ")
    if args.record:
        record_page(result)
    else:
        (BUILD / "report.json").write_text(text_of(result))
        draw_charts(result, BUILD / "report.svg")
    return 1 if args.strict and fell else 0


if __name__ == "__main__":
    sys.exit(main())
