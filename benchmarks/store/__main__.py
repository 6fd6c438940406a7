# SPDX-License-Identifier: Apache-2.0
"""kvstride's store beside raw files, other stores' file code, memcpy and stat, alternating.

    python benchmarks/store --disk PROGRAM [--dir DIR] [--rounds 5] [--chunks 1000000] [--filter REGEX] [--json FILE]

PROGRAM is kvstride_disk_bench. DIR is on the disk to measure, with 8 GiB of room. vLLM and LMCache are left out
where they are absent. `ratio` is the other's time over ours; every read is checked to bring back the same bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

# Before they are loaded: the peers shall not log.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
sys.path.append(str(Path(__file__).resolve().parent.parent / "peers"))

import disk
import host
import keys
from files import LmcacheFiles, VllmFiles
from ours import NAME, Chunks

from places import Places

Record = dict[str, Any]


def peers() -> tuple[list[Any], list[str]]:
    """What is installed, and what is absent."""
    found, absent = [], []
    for kind, module in ((VllmFiles, "vllm"), (LmcacheFiles, "lmcache")):
        if importlib.util.find_spec(module):
            found.append(kind)
        else:
            absent.append(f"{kind.name}: No module named '{module}'")
    return found, absent


def large(places: Places, args: argparse.Namespace, chunks: Chunks, kinds: list[Any]) -> Iterator[Record]:
    """With its own number of threads beside the best raw loop; with equal numbers beside the peers."""
    on = disk.Disk(places, args.disk, chunks)
    sides = {NAME: partial(on.ours, 0), disk.RAW: on.raw_best()}
    yield from on.records("own", disk.rotate(sides, args.rounds), {disk.RAW: disk.RAW_TARGETS})
    targets = {kind.name: disk.PEER_TARGETS for kind in kinds}
    for threads in disk.THREADS:
        sides = {NAME: partial(on.ours, threads)}
        for kind in kinds:
            for pages in (disk.OWN_PAGES, disk.HUGE_PAGES):
                sides[kind.name + pages] = partial(on.peer, kind, threads, pages)
        yield from on.records(str(threads), disk.rotate(sides, args.rounds), targets)


def small(places: Places, args: argparse.Namespace, kinds: list[Any]) -> Iterator[Record]:
    """Everybody with the number of threads that suits it best."""
    on = disk.Disk(places, args.disk, disk.SMALL)
    sides = {NAME: disk.best_of([partial(on.ours, threads) for threads in disk.SMALL_THREADS], 3)}
    for kind in kinds:
        sides[kind.name] = disk.best_of([partial(on.peer, kind, threads) for threads in disk.SMALL_THREADS], 3)
    sides[disk.RAW] = on.raw_best()
    times = disk.rotate(sides, 2 * args.rounds)
    yield from on.records("best", times, {VllmFiles.name: disk.SMALL_TARGETS})


def works(args: argparse.Namespace, places: Places, kinds: list[Any]) -> Iterator[tuple[str, Iterator[Record]]]:
    """Names, and what makes the records of each when it is asked for them."""
    for chunks in disk.LARGE:
        yield f"disk/{chunks.name}", large(places, args, chunks, kinds)
    yield f"disk/{disk.SMALL.name}", small(places, args, kinds)
    yield "get_from_host", host.records(3 * args.rounds)
    yield "keys", keys.records(places, args.chunks, args.rounds)


def line(record: Record) -> str:
    """A record as it is made."""
    text = f"{record['name']:34} {record['threads']:>4} {record['ours']:8.3f} {record['unit']}"
    if "against" in record:
        text += f"  {record['against']} {record['theirs']:.3f}, ratio {record['ratio']:.2f}"
    return text


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/store", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--disk", type=Path, required=True, help="kvstride_disk_bench")
    parser.add_argument("--dir", type=Path, default=Path("build/bench"), help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=1_000_000, help="of the directory that is opened")
    parser.add_argument("--filter", default="", help="only works whose name matches: disk/2_MiB, get_from_host, keys")
    parser.add_argument("--json", type=Path, help="write the records to this file")
    args = parser.parse_args()
    kinds, absent = peers()
    records: list[Record] = []
    with closing(Places(args.dir)) as places:
        for name, made in works(args, places, kinds):
            if re.search(args.filter, name):
                for record in made:
                    records.append(record)
                    print(line(record), flush=True)
    for text in absent:
        print("absent:", text)
    if args.json:
        args.json.write_text(json.dumps({"store": records, "absent": absent}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
