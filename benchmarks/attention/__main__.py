# SPDX-License-Identifier: Apache-2.0
"""kvstride's attention beside vLLM's CPU kernel, torch's SDPA, a plain read of the same bytes, and itself, alternating.

    python benchmarks/attention [--rounds 7] [--filter REGEX] [--isa vec] [--json FILE]

32 query heads and 8 KV heads of 128, blocks of 32 tokens, scattered; as many threads as the machine has. `ratio` is
the median over rounds of the other's time over ours; of `skip`, what is reached of the bound 1 / (f + (1 - s)(1 - f)),
where f is the measured share of Q K in dense time and s the share of skipped tiles. Before a pairing is timed, both
must have given the same output. vLLM is left out where it is absent. `--isa` is the instruction set that vLLM's kernel
uses, its own choice unless given: with `--isa vec` and KVSTRIDE_MATRIX=off neither has AMX.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch

import kvstride as kv

Record = dict[str, Any]
Sides = dict[str, Callable[[], Any]]

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 32
ORDERS = {
    "NHD": "B KV N H D",
    "HND": "B KV H N D",
    "packed": "B H N KV D",
    "K/V first": "KV B N H D",
}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f8_e4m3": torch.uint8}
OURS = "kvstride"
VLLM_ISA = ""  # as --isa has it


class Batch:
    """Sequences of (query rows, keys) with the same random keys and values in any layout."""

    def __init__(self, lengths: list[tuple[int, int]], dtype: str = "bf16") -> None:
        torch.manual_seed(0)
        self.dtype, self.lengths = dtype, lengths
        keys = sum(length for _, length in lengths)
        compute = DTYPES["bf16"] if dtype == "f8_e4m3" else DTYPES[dtype]
        self.k, self.v = (torch.randn(keys, KV_HEADS, DIM).to(compute) for _ in range(2))
        self.q = torch.randn(sum(rows for rows, _ in lengths), HEADS, DIM).to(compute)
        self.lens = np.array([length for _, length in lengths])
        self.starts = np.cumsum([0] + [rows for rows, _ in lengths])
        columns = int(-(-self.lens.max() // BLOCK))
        ids = np.random.default_rng(0).permutation(len(lengths) * columns).astype(np.int32)
        self.table = ids.reshape(len(lengths), columns)
        self.blocks = ids.size
        steps = [np.arange(length) for length in self.lens]
        self.slots = np.concatenate(
            [row[t // BLOCK].astype(np.int64) * BLOCK + t % BLOCK for row, t in zip(self.table, steps, strict=True)]
        )
        self.num_bytes = 2 * keys * KV_HEADS * DIM * (1 if dtype == "f8_e4m3" else self.k.element_size())

    def ours(self, order: str, **options: Any) -> Callable[[], torch.Tensor]:
        """A call over a cache of this order."""
        geometry = kv.Geometry(
            num_blocks=self.blocks, block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=self.dtype
        )
        layout = kv.layout(order, geometry)
        element = DTYPES[self.dtype]
        memory = torch.zeros(layout.num_bytes // element.itemsize, dtype=element)
        cache = kv.Cache(memory, layout)
        kv.write_tokens(cache, 0, self.k, self.v, self.slots)
        out = torch.empty_like(self.q)

        def call() -> torch.Tensor:
            kv.attention(self.q, cache, 0, self.table, self.lens, self.starts, out=out, **options)
            return out

        call.memory = memory  # type: ignore[attr-defined]
        call.cache = cache  # type: ignore[attr-defined]
        return call

    def vllm(self) -> Callable[[], torch.Tensor]:
        """vLLM's kernel over a cache that its own op has written."""
        from vllm import _custom_ops as ops
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        current_platform.import_kernels()
        cache = torch.zeros(self.blocks, KV_HEADS, 2 * BLOCK, DIM, dtype=self.q.dtype)
        keys, values = cache.chunk(2, dim=2)
        isa = VLLM_ISA or _get_attn_isa(self.q.dtype, BLOCK, DIM, "auto")
        ops.cpu_attn_reshape_and_cache(self.k, self.v, keys, values, torch.from_numpy(self.slots), isa)
        table = torch.from_numpy(self.table)
        lens, starts = (torch.from_numpy(a.astype(np.int32)) for a in (self.lens, self.starts))
        out = torch.empty_like(self.q)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self.lens),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            seq_lens=lens,
            dtype=self.q.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
        )

        def call() -> torch.Tensor:
            ops.cpu_attention_with_kv_cache(
                query=self.q,
                key_cache=keys,
                value_cache=values,
                output=out,
                query_start_loc=starts,
                seq_lens=lens,
                scale=DIM**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=table,
                softcap=0.0,
                scheduler_metadata=plan,
                s_aux=None,
            )
            return out

        return call

    def sdpa(self) -> Callable[[], torch.Tensor]:
        """torch's SDPA over contiguous keys and values, all sequences alike."""
        count, (rows, keys) = len(self.lengths), self.lengths[0]
        q = self.q.view(count, rows, HEADS, DIM).transpose(1, 2)
        k, v = (t.view(count, keys, KV_HEADS, DIM).transpose(1, 2) for t in (self.k, self.v))

        def call() -> torch.Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=rows == keys, enable_gqa=True)
            return out.transpose(1, 2).reshape(self.q.shape)

        return call


def turns(sides: Sides, rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round; the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, call in sides.items():
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return times


def check(sides: Sides, tolerance: float) -> None:
    """The same output of all that give one."""
    first = None
    for name, call in sides.items():
        out = call()
        if not isinstance(out, torch.Tensor) or out.ndim != 3:
            continue
        first = out.float() if first is None else first
        far = (out.float() - first).abs().max().item()
        if not far <= tolerance:
            sys.exit(f"{name}: its output is {far} away")


def records(name: str, times: dict[str, list[float]], targets: dict[str, float], rate: float, unit: str) -> Any:
    """One record for each other side; rates are `rate` over the median second."""
    for other in [side for side in times if side != OURS] or [None]:
        record: Record = {"name": name, "threads": str(kv.num_threads()), "unit": unit}
        record["ours"] = rate / median(times[OURS])
        if other is not None:
            record |= {"against": other, "theirs": rate / median(times[other])}
            record["ratio"] = median(b / a for a, b in zip(times[OURS], times[other], strict=True))
        if other in targets:
            record["target"] = targets[other]
        yield record


def decode(name: str, order: str, rounds: int, vllm: bool) -> Iterator[Record]:
    """Eight sequences of 4096 keys, one query row each."""
    batch = Batch([(1, 4096)] * 8)
    ours = batch.ours(order)
    sides: Sides = {OURS: ours, "torch SDPA": batch.sdpa()}
    if vllm:
        sides["vLLM"] = batch.vllm()
    check(sides, 0.02)
    flat = ours.memory.view(torch.float32)  # type: ignore[attr-defined]
    sides["plain read"] = flat.sum
    targets = {"vLLM": 2.0, "torch SDPA": 10.0, "plain read": 0.75}
    yield from records(name, turns(sides, rounds), targets, batch.num_bytes / 1e9, "GB/s")


def compute(
    name: str, lengths: list[tuple[int, int]], rounds: int, vllm: bool, dtype: str = "bf16"
) -> Iterator[Record]:
    """Prompts, whole or in chunks."""
    batch = Batch(lengths, dtype)
    sides: Sides = {OURS: batch.ours(ORDERS["NHD"])}
    if vllm:
        sides["vLLM"] = batch.vllm()
    if lengths[0][0] == lengths[0][1]:
        sides["torch SDPA"] = batch.sdpa()
    check(sides, 0.05)
    work = sum(4 * HEADS * DIM * (keys - rows + i + 1) for rows, keys in lengths for i in range(rows))
    yield from records(name, turns(sides, rounds), {"vLLM": 1.25}, work / 1e9, "GFLOP/s")


def f8(rounds: int) -> Iterator[Record]:
    """fp8 decode beside our own bf16."""
    lengths = [(1, 4096)] * 8
    small, large = Batch(lengths, "f8_e4m3"), Batch(lengths)
    sides: Sides = {OURS: small.ours(ORDERS["HND"]), "our bf16": large.ours(ORDERS["HND"])}
    times = turns(sides, rounds)
    yield from records("decode/f8_e4m3", times, {"our bf16": 1.2}, 8 * 4096 / 1e3, "kkeys/s")


def layouts(rounds: int) -> Iterator[Record]:
    """Layouts whose dims are contiguous beside NHD."""
    for work, lengths in (("decode", [(1, 4096)] * 8), ("chunk", [(256, 4096)])):
        batch = Batch(lengths)
        for name, order in ORDERS.items():
            if name == "NHD":
                continue
            sides: Sides = {OURS: batch.ours(order), "our NHD": batch.ours(ORDERS["NHD"])}
            check(sides, 0.02)
            times = turns(sides, rounds)
            yield from records(f"layout/{work}/{name}", times, {"our NHD": 0.9}, len(batch.slots) / 1e3, "kkeys/s")


def skipping(rounds: int) -> Iterator[Record]:
    """A prompt of 2048 tokens; every second tile of keys is far below the others."""
    batch = Batch([(2048, 2048)])
    batch.q = (batch.q * 0.1 + 1).to(batch.q.dtype)
    tile = (torch.arange(2048) // 128)[:, None, None]
    batch.k = torch.where(tile % 2 == 0, batch.k * 0.1 + 1, batch.k * 0.1).to(batch.k.dtype)
    skip = batch.ours(ORDERS["HND"], skip_lambda=0.01)
    batch.k = torch.where(tile == 0, batch.k * 0.1 + 2, batch.k * 0.1).to(batch.k.dtype)
    all_but_first = batch.ours(ORDERS["HND"], skip_lambda=0.01)
    dense = batch.ours(ORDERS["HND"])
    cache = skip.cache  # type: ignore[attr-defined]
    total, skipped = kv.attention(
        batch.q, cache, 0, batch.table, batch.lens, batch.starts, skip_lambda=0.01, counters=True
    )[1]
    few = all_but_first.cache  # type: ignore[attr-defined]
    most = kv.attention(batch.q, few, 0, batch.table, batch.lens, batch.starts, skip_lambda=0.01, counters=True)[1]
    times = turns({OURS: skip, "dense": dense, "most": all_but_first}, rounds)
    s, s_most = skipped / total, most[1] / most[0]
    ratios = []
    for ours, whole, least in zip(*times.values(), strict=True):
        # least = dense × (f + (1 - s_most)(1 - f))
        f = (least / whole - (1 - s_most)) / s_most
        ratios.append((whole / ours) * (f + (1 - s) * (1 - f)))
    record: Record = {"name": f"skip/{s:.0%} of tiles", "threads": str(kv.num_threads()), "unit": "ms"}
    record |= {
        "ours": 1e3 * median(times[OURS]),
        "against": "dense × the bound",
        "theirs": 1e3 * median(times["dense"]),
    }
    yield record | {"ratio": median(ratios), "target": 0.9}


def works(rounds: int, vllm: bool) -> Iterator[tuple[str, Iterator[Record]]]:
    """Names, and what makes the records of each when it is asked for them."""
    for name, order in ORDERS.items():
        if name != "K/V first":
            yield f"decode/{name}", decode(f"decode/{name}", order, rounds, vllm)
    yield "decode/f8_e4m3", f8(rounds)
    yield "prefill/2048", compute("prefill/2048", [(2048, 2048)], rounds, vllm)
    yield "prefill/f32", compute("prefill/f32", [(2048, 2048)], rounds, vllm, "f32")
    yield "chunk/256 over 4096", compute("chunk/256 over 4096", [(256, 4096)], rounds, vllm)
    yield "skip", skipping(rounds)
    yield "layout", layouts(rounds)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--filter", default="", help="only works whose name matches")
    parser.add_argument("--isa", default="", help="vLLM's: amx, vec, vec16 …")
    parser.add_argument("--json", default="", help="write the records here")
    args = parser.parse_args()
    global VLLM_ISA
    VLLM_ISA = args.isa
    torch.set_num_threads(kv.num_threads())
    vllm = importlib.util.find_spec("vllm") is not None
    found: list[Record] = []
    for name, made in works(args.rounds, vllm):
        if not re.search(args.filter, name):
            continue
        for record in made:
            found.append(record)
            beside = (
                f"{record['against']} {record['theirs']:.1f}, ratio {record['ratio']:.2f}" if "ratio" in record else ""
            )
            print(f"{record['name']}: {record['ours']:.1f} {record['unit']}; {beside}", flush=True)
    if args.json:
        absent = [] if vllm else ["vLLM: its attention was not compared with"]
        with open(args.json, "w") as file:
            json.dump({"attention": found, "absent": absent}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
