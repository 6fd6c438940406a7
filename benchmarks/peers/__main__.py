# SPDX-License-Identifier: Apache-2.0
"""kvstride beside the peers that are installed: the same work and threads, alternating in one process, cold data.

    python benchmarks/peers [--rounds 15] [--threads 1,2] [--filter REGEX] [--json FILE]

torch, vLLM and LMCache are left out where they are absent. `ratio` is the peer's time over ours. Before a pairing is
timed, both sides must have left the same bytes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

# Before the peers are loaded: they shall neither report nor log.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import small_call
from cold import Cold, Pairing, alternate

import kvstride as kv

PEERS = ("numpy", "torch", "vllm", "lmcache")


def pairings() -> tuple[list[Pairing], list[str]]:
    """All comparisons that can be made here, and what is absent."""
    found: list[Pairing] = []
    absent: list[str] = []
    for peer in PEERS:
        try:
            found += importlib.import_module(f"with_{peer}").pairings()
        except ImportError as error:
            absent.append(f"{peer}: {error}")
    return found, absent


def set_threads(count: int) -> None:
    """For kvstride, and for torch where it is loaded."""
    kv.set_num_threads(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


def compare(rounds: int, threads: list[int], wanted: str) -> dict[str, Any]:
    """Every comparison with every number of threads, as records."""
    cold = Cold()
    found, absent = pairings()
    records: list[dict[str, Any]] = []
    for count in threads:
        set_threads(count)
        for pairing in found:
            if not re.search(wanted, f"{pairing.name} {pairing.peer}") or (pairing.one_thread and count > 1):
                continue
            record = {"name": pairing.name, "peer": pairing.peer, "threads": count}
            record |= alternate(pairing, cold, rounds)
            if pairing.target:
                record["target"] = pairing.target
            records.append(record)
            print(
                "{name:32} {peer:32} {threads} {GBps:7.2f} {peer_GBps:7.2f} {ratio:6.2f}".format(**record), flush=True
            )
    if re.search(wanted, small_call.NAME):
        set_threads(threads[0])
        record = {"name": small_call.NAME, "peer": "memcpy", "threads": threads[0]}
        record |= small_call.overhead(cold, 5 * rounds)
        records.append(record)
        print("{name:32} {peer:32} {threads} {call_us:.2f} µs, the copy {copy_us:.2f} µs".format(**record))
    for line in absent:
        print("absent:", line)
    return {"peers": records, "absent": absent}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", default=f"1,{kv.num_threads()}", help="numbers of threads, comma separated")
    parser.add_argument("--filter", default="", help="only works whose name or peer matches")
    parser.add_argument("--json", type=Path, help="write the records to this file")
    args = parser.parse_args()
    result = compare(args.rounds, sorted({int(n) for n in args.threads.split(",")}), args.filter)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
