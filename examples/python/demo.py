# SPDX-License-Identifier: Apache-2.0
"""Carries the KV cache of a running vLLM through many layouts and back, and shows that nothing was lost.

A small seeded Llama answers a 400-token prompt. Its KV blocks are then converted into one layout after
another, under other block ids of poisoned buffers, while the engine's own memory is poisoned; converted
back; and the same prompt is run again. vLLM reports a prefix-cache hit, so it reads the restored blocks:
tokens and logprobs have to be equal to the last bit to those of the engine's own hit before. (The first run
computes the prompt in one part, which some CPUs' kernels round otherwise.) What must differ (K and V exchanged,
heads exchanged, nothing restored) is run too. Exit code 0: everything was as it must be.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from live_engine import Answer, LiveEngine, Write, prepare_process

if TYPE_CHECKING:
    import torch

    import kvstride as kv

POISON = 0xA5
PROMPT_TOKENS = 400
CACHED_TOKENS = 384  # whole blocks of the prompt

# `kvstride layouts` says which engine keeps its cache in which of these.
LAYOUTS = [
    ("blocks-first NHD", "B KV N H D"),
    ("blocks-first HND", "B KV H N D"),
    ("kv-first NHD", "KV B N H D"),
    ("kv-first HND", "KV B H N D"),
    ("kv inside token", "B N KV H D"),
    ("packed NHD", "B N H KV D"),
    ("packed HND", "B H N KV D"),
    ("x-split, kv-first", "{key: B H D/x N D%x, value: B H D N}"),
    ("x-split, blocks-first", "B {key: H D/x N D%x, value: H D N}"),
    ("shuffle", "B {key: H D/x N D%x, value: H N/x D N%x}"),
    ("CPU vector", "B H {key: D N, value: N D}"),
    ("CPU AMX, 16-bit", "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}"),
    ("CPU AMX, f32 form", "B H {key: N/16 D N%16, value: D/16 N D%16}"),
    ("values transposed", "key: B N H D | value: B H D N"),
    ("kernel blocks of 16", "B N/k H N%k KV D"),
    ("all layers in a block", "B L KV H N D"),
    ("heads outermost", "B H L KV N D"),
    ("layers outermost", "KV L B N H D"),
    ("head groups of 2", "B H/g L KV N H%g D"),
    ("K and V padded to 512 B", "B N H KV@512 D"),
]


@dataclass
class Row:
    """One line of the table."""

    layout: str
    order: str
    bytes: int  # of K and V, one way
    copies: int  # runs of bytes that the plan moves, one way
    gb_per_s: float  # bytes over time, there and back
    ratio_to_memcpy: float
    cached_tokens: int
    equal: bool


@dataclass
class Check:
    """One thing that must be so."""

    name: str
    ok: bool


def buffers(layout: kv.Layout) -> list[list[torch.Tensor]]:
    """Poisoned memory for a layout: for each of its parts (`key: … | value: …` has two) one tensor, or one a layer."""
    import torch

    layers = layout.num_tensors // layout.num_parts
    return [
        [torch.full((layout.part_bytes(part),), POISON, dtype=torch.uint8) for _ in range(layers)]
        for part in range(layout.num_parts)
    ]


def seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memcpy_seconds(num_bytes: int) -> float:
    """The time of one plain copy of as many bytes."""
    import torch

    source = torch.full((num_bytes,), POISON, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return seconds(lambda: target.copy_(source), repeats=21)


def read(cache: kv.Cache, layer: int, plane: str) -> torch.Tensor:
    """K or V as [block, token, head, dim]: a view, or, where tiles make that impossible, a copy through one."""
    import kvstride as kv

    try:
        return cache.key(layer) if plane == "key" else cache.value(layer)
    except kv.NotStrided:
        sizes = cache.layout.geometry
        shape = (sizes.num_blocks, sizes.block_size, sizes.num_kv_heads, -1)
        return cache.plane(layer, plane).reshape(shape)


def compare_reads(cache: kv.Cache, writes: list[list[Write]]) -> tuple[int, int]:
    """How many elements of K and V the engine wrote, and how many of them read differently."""
    total = wrong = 0
    for layer, layer_writes in enumerate(writes):
        for plane in ("key", "value"):
            view = read(cache, layer, plane)
            block_size = view.shape[1]
            for write in layer_writes:
                written = getattr(write, plane)[: len(write.slots)]
                found = view[write.slots // block_size, write.slots % block_size]
                total += written.numel()
                wrong += int((found != written).sum())
    return total, wrong


def changed_blocks(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[int]:
    """The block ids (first axis) whose bytes changed in any layer."""
    import torch

    changed = torch.zeros(before[0].shape[0], dtype=torch.bool)
    for old, new in zip(before, after, strict=True):
        changed |= (old.view(torch.uint8) != new.view(torch.uint8)).flatten(1).any(dim=1)
    return torch.nonzero(changed).flatten().tolist()


def with_blocks(sizes: kv.Geometry, num_blocks: int) -> kv.Geometry:
    """The same sizes with another number of blocks, and values for the symbols in LAYOUTS."""
    import kvstride as kv

    return kv.Geometry(
        num_layers=sizes.num_layers, num_blocks=num_blocks, block_size=sizes.block_size,
        num_kv_heads=sizes.num_kv_heads, head_size=sizes.head_size, dtype=sizes.dtype, k=16, g=2,
    )  # fmt: skip


def other_ids(blocks: list[int], num_blocks: int, seed: int) -> list[int]:
    """As many ids below num_blocks, in no order, each another than its block's own."""
    rng = random.Random(seed)
    while True:
        ids = rng.sample(range(num_blocks), len(blocks))
        if all(there != here for here, there in zip(blocks, ids, strict=True)):
            return ids


def round_trip(
    engine: LiveEngine, cache: kv.Cache, hit: Answer, saved: list[torch.Tensor], label: str, order: str, seed: int
) -> tuple[Row, bytes]:
    """Move the used blocks into a layout and back through poison, and let the engine read them."""
    import hashlib

    import torch

    import kvstride as kv

    geometry = with_blocks(cache.layout.geometry, 2 * len(hit.blocks) + 1)
    layout = kv.layout(order, geometry)
    memory = buffers(layout)
    other = kv.Cache(tuple(memory) if len(memory) > 1 else memory[0], layout)
    out = list(zip(hit.blocks, other_ids(hit.blocks, geometry.num_blocks, seed), strict=True))
    back = [(there, here) for here, there in out]

    kv.convert_blocks(cache, other, out)
    engine.poison()
    kv.convert_blocks(other, cache, back)
    pairs = zip(engine.kv_tensors, saved, strict=True)
    restored = all(torch.equal(now[hit.blocks], then[hit.blocks]) for now, then in pairs)
    answer = engine.generate()

    there_plan = kv.Plan(cache, other).bind(out)
    back_plan = kv.Plan(other, cache).bind(back)
    time_both = seconds(there_plan.run) + seconds(back_plan.run)
    digest = hashlib.sha256(b"".join(m.numpy().tobytes() for part in memory for m in part)).digest()
    num_bytes = there_plan.num_bytes
    row = Row(
        layout=label,
        order=order,
        bytes=num_bytes,
        copies=there_plan.num_copies,
        gb_per_s=2 * num_bytes / time_both / 1e9,
        ratio_to_memcpy=2 * memcpy_seconds(num_bytes) / time_both,
        cached_tokens=answer.num_cached_tokens,
        equal=restored and answer.same_as(hit) and answer.num_cached_tokens >= CACHED_TOKENS,
    )
    return row, digest


def swapped_planes(order: str) -> str:
    """The order with the names of K and V exchanged: a layout that says the opposite of the truth."""
    return order.replace("key", "\0").replace("value", "key").replace("\0", "value")


def controls(engine: LiveEngine, cache: kv.Cache, order: str, hit: Answer, saved: list[torch.Tensor]) -> list[Check]:
    """Restore wrongly in the ways that layout faults do; each must change the answer."""
    import kvstride as kv

    geometry = cache.layout.geometry
    same = [(block, block) for block in hit.blocks]
    source = kv.Cache([tensor.flatten() for tensor in saved], cache.layout)
    exchanged = kv.Cache([t.flatten() for t in engine.kv_tensors], swapped_planes(order), geometry=geometry)
    heads = geometry.num_kv_heads

    def exchange_heads() -> None:
        for head in range(heads):
            kv.convert_blocks(source, cache, same, heads=(head, heads - 1 - head, 1))

    def later_block() -> None:
        kv.convert_blocks(source, cache, list(zip(hit.blocks, hit.blocks[1:] + hit.blocks[:1], strict=True)))

    def nothing() -> None:
        pass

    checks = []
    for name, restore in (
        ("K and V exchanged", lambda: kv.convert_blocks(source, exchanged, same)),
        ("heads exchanged", exchange_heads),
        ("every block one late", later_block),
        ("not restored", nothing),
    ):
        engine.poison()
        restore()
        wrong = engine.generate()
        cached = wrong.num_cached_tokens >= CACHED_TOKENS
        differs = wrong.tokens != hit.tokens and wrong.logprobs != hit.logprobs
        checks.append(Check(f"{name}: another answer", cached and differs))
    for tensor, then in zip(engine.kv_tensors, saved, strict=True):
        tensor.copy_(then)
    checks.append(Check("restored after the controls: the hit's answer", engine.generate().same_as(hit)))
    return checks


def pairwise_different(rows: list[Row], own: kv.Layout, digests: list[bytes]) -> Check:
    """No two layouts, the engine's among them, put the elements at the same addresses: by their equality, and by
    the bytes that one and the same content left in their buffers."""
    import kvstride as kv

    geometry = with_blocks(own.geometry, own.geometry.num_blocks)
    layouts = {"the engine's own": own} | {row.layout: kv.Layout(row.order, geometry) for row in rows}
    names = list(layouts)
    same = [f"{a} = {b}" for i, a in enumerate(names) for b in names[:i] if layouts[a] == layouts[b]]
    ok = not same and len(set(digests)) == len(digests)
    return Check(f"{len(rows)} layouts with pairwise different addresses" + "".join(f"; {pair}" for pair in same), ok)


def print_table(rows: list[Row], checks: list[Check]) -> None:
    """The results for people."""
    width = max(len(row.layout) for row in rows)
    print(f"{'layout':{width}}  {'bytes':>9}  {'copies':>7}  {'GB/s':>6}  {'of memcpy':>9}  {'cached':>6}  equal")
    for row in rows:
        print(
            f"{row.layout:{width}}  {row.bytes:>9}  {row.copies:>7}  {row.gb_per_s:>6.2f}  {row.ratio_to_memcpy:>9.2f}"
            f"  {row.cached_tokens:>6}  {'yes' if row.equal else 'NO'}"
        )
    print()
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}")


def run(directory: Path) -> tuple[str, list[Row], list[Check]]:
    """The whole demonstration: the name of the engine's layout, the table, and what else was checked."""
    import kvstride as kv
    from kvstride.vllm import layouts_of_engine
    from tiny_llama import write_tiny_llama

    rng = random.Random(400)
    prompt = [rng.randrange(10, 1000) for _ in range(PROMPT_TOKENS)]
    engine = LiveEngine(write_tiny_llama(directory), prompt)
    engine.poison()
    before = [tensor.clone() for tensor in engine.kv_tensors]
    first, writes = engine.generate_recorded()
    written = changed_blocks(before, engine.kv_tensors)

    (served,) = layouts_of_engine(engine.llm)  # one kind of layer, so one layout
    cache = served.cache
    total, wrong = compare_reads(cache, writes)
    checks = [
        Check(
            f"K and V read through views: {wrong} of {total} elements differ from the engine's", not wrong and total > 0
        ),
        Check("first run: nothing cached", first.num_cached_tokens == 0),
        Check(f"the scheduler's {len(first.blocks)} blocks are those that were written", written == first.blocks),
    ]
    hit = engine.generate()
    saved = [tensor.clone() for tensor in engine.kv_tensors]
    far = max(abs(a[t] - b[t]) for a, b in zip(first.logprobs, hit.logprobs, strict=True) for t in a.keys() & b.keys())
    same = hit.tokens == first.tokens and hit.num_cached_tokens >= CACHED_TOKENS
    checks.append(Check(f"the engine's own hit: the first run's tokens, logprobs {far:.3f} apart", same))
    geometry = with_blocks(cache.layout.geometry, cache.layout.geometry.num_blocks)
    others = [(label, order) for label, order in LAYOUTS if kv.Layout(order, geometry) != cache.layout]
    rows, digests = [], []
    for seed, (label, order) in enumerate(others):
        row, digest = round_trip(engine, cache, hit, saved, label, order, seed)
        rows.append(row)
        digests.append(digest)
    checks.append(pairwise_different(rows, cache.layout, digests))
    checks += controls(engine, cache, served.named.order, hit, saved)
    return f"{served.named.name} = {served.named.order}", rows, checks


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    prepare_process()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        name, rows, checks = run(Path(directory))
    ok = all(row.equal for row in rows) and all(check.ok for check in checks)
    total = time.perf_counter() - start
    if options.json:
        out = {"engine_layout": name, "seconds": round(total, 1), "ok": ok}
        print(json.dumps(out | {"layouts": [asdict(r) for r in rows], "checks": [asdict(c) for c in checks]}))
    else:
        print(f"the engine's own layout: {name}\n")
        print_table(rows, checks)
        print(f"\n{'all as it must be' if ok else 'NOT as it must be'}, {total:.0f} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
