# SPDX-License-Identifier: Apache-2.0
"""A store over Mooncake beside Mooncake's own batch_put_from and batch_get_into of the same bytes, alternating.

    python benchmarks/remote/with_mooncake.py [--rounds 15] [--chunks 32] [--nodes 2] [--threads N] [--json FILE]

Starts a master and nodes on this machine. `store`: put and get of chunks of a cache, verified and converted from and to
the cache's layout, over a RemoteTier; `engine`: the same images by the engine alone. `ratio` is Mooncake's time over
ours, the median of the rounds. Who is first changes from round to round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))

import numpy as np

import kvstride as kv
from kvstride.remote import open_engine
from servers.mooncake import Mooncake

#: One chunk: 64 tokens of 8 layers, K and V of 4 heads of 128, bf16: 1 MiB.
SIZES = {"num_layers": 8, "num_kv_heads": 4, "head_size": 128}
TOKENS = 64
PAGE = 4096


class Raw:
    """Mooncake's own client, and memory that it knows."""

    def __init__(self, port: int, bytes_each: int, chunks: int) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self.store, self.config = MooncakeDistributedStore(), ReplicateConfig()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{port}")
        assert self.store.setup(*arguments) == 0
        self.memory = np.random.default_rng(2).integers(0, 256, bytes_each * chunks, np.uint8)
        assert self.store.register_buffer(self.memory.ctypes.data, self.memory.nbytes) == 0
        self.places = [self.memory.ctypes.data + i * bytes_each for i in range(chunks)]
        self.sizes = [bytes_each] * chunks

    def put(self, names: list[str]) -> None:
        """Of all its memory."""
        assert self.store.batch_put_from(names, self.places, self.sizes, self.config) == [0] * len(names)

    def get(self, names: list[str]) -> None:
        """Into all its memory."""
        assert self.store.batch_get_into(names, self.places, self.sizes) == self.sizes

    def remove(self, names: list[str]) -> None:
        """Makes room."""
        self.store.batch_remove(names, True)


def timed(call: Callable[[], Any]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def alternate(rounds: int, ours: Callable[[int], float], other: Callable[[int], float]) -> tuple[list[float], ...]:
    """Seconds of both, in pairs; the first pair warms up."""
    pairs = []
    for i in range(rounds + 1):
        first, second = (ours, other) if i % 2 else (other, ours)
        a, b = first(i), second(i)
        pairs.append((a, b) if i % 2 else (b, a))
    return [a for a, _ in pairs[1:]], [b for _, b in pairs[1:]]


def compare(rounds: int, chunks: int, nodes: int, threads: int) -> list[dict[str, Any]]:
    """The four comparisons, as records."""
    out = []
    with tempfile.TemporaryDirectory() as folder, Mooncake(Path(folder), nodes=nodes, segment=2 << 30) as servers:
        layout = kv.layout("L B KV N H D", kv.Geometry(num_blocks=4 * chunks, block_size=16, **SIZES))
        array = np.random.default_rng(1).integers(0, 256, layout.num_bytes, np.uint8)
        cache, copy = kv.Cache([array], layout), np.zeros_like(array)
        target = kv.Cache([copy], layout)
        planes = {"key": "bf16", "value": "bf16"}
        space = kv.Namespace(model="m", revision="1", planes=planes, block_size=TOKENS, **SIZES)
        image = array.nbytes // chunks + PAGE
        blocks = list(range(4 * chunks))
        raw = Raw(servers.port, image, chunks)
        engine = open_engine(servers.url())
        memory = np.random.default_rng(3).integers(0, 256, image * chunks, np.uint8)
        engine.memory(memory.ctypes.data, memory.nbytes)
        places = [memory.ctypes.data + i * image for i in range(chunks)]
        tier = kv.RemoteTier(servers.url(), staging_bytes=4 * image * chunks, num_threads=threads)

        def names(kind: str, i: int) -> list[str]:
            return [f"{kind}/{i}/{j}" for j in range(chunks)]

        def soon() -> float:
            return time.monotonic() + 60

        with kv.Store(tier, namespace=space) as store:

            def keys(i: int) -> list[kv.Key]:
                return [kv.Key.chain(None, [i, j]) for j in range(chunks)]

            def store_put(i: int) -> float:
                job = keys(i)
                return timed(lambda: check(store.put(job, cache, blocks).wait(), ["ok"] * chunks))

            def store_get(i: int) -> float:
                job = keys(i)
                copy[:] = 0
                seconds = timed(lambda: check(store.get(job, target, blocks).wait(), ["ok"] * chunks))
                check(bool((copy == array).all()), True)
                return seconds

            def engine_put(i: int) -> float:
                arguments = (names("e", i), places, [image] * chunks, [False] * chunks, soon())
                return timed(lambda: check(engine.write(*arguments), ["ok"] * chunks))

            def engine_get(i: int) -> float:
                arguments = (names("e", i), places, [image] * chunks, [[(0, image)]] * chunks, soon())
                return timed(lambda: check(engine.read(*arguments), [("ok", image)] * chunks))

            for who, put, get in (("engine", engine_put, engine_get), ("store", store_put, store_get)):
                for verb, ours, other in (("put", put, raw.put), ("get", get, raw.get)):
                    group = f"raw-{who}"
                    mine, theirs = alternate(rounds, ours, lambda i, o=other, g=group: timed(lambda: o(names(g, i))))
                    ratio = median(b / a for a, b in zip(mine, theirs, strict=True))
                    out.append(
                        {
                            "name": f"{who}/{verb}",
                            "bytes": image * chunks,
                            "GBps": image * chunks / median(mine) / 1e9,
                            "raw_GBps": image * chunks / median(theirs) / 1e9,
                            "ratio": ratio,
                        }
                    )
                for i in range(rounds + 1):
                    raw.remove(names(f"raw-{who}", i) + names("e", i))
        engine.close()
    return out


def check(got: Any, expected: Any) -> None:
    """What is timed must have happened."""
    if got != expected:
        sys.exit(f"{got!r:.200} instead of {expected!r:.200}")


def main() -> None:
    """Prints a line for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="that call Mooncake; 0: as it likes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    records = compare(args.rounds, args.chunks, args.nodes, args.threads)
    for one in records:
        print(f"{one['name']:12} {one['GBps']:6.2f} GB/s, raw {one['raw_GBps']:6.2f} GB/s, ratio {one['ratio']:.2f}")
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
