# SPDX-License-Identifier: Apache-2.0
"""Bad input: the exact exception, which is also the built-in; one line that names value and limit; nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvstride as kv
import oracle
from kvstride.vllm import name_layout

#: The built-in that a caller would catch.
BASES = {
    kv.LayoutError: ValueError,
    kv.AmbiguousLayout: ValueError,
    kv.UnknownLayout: RuntimeError,
    kv.NotStrided: ValueError,
    kv.ArgumentError: ValueError,
    kv.BlockIndexError: IndexError,
    kv.DTypeError: TypeError,
    kv.StoreError: OSError,
    kv.EngineError: ImportError,
}
SIZES = {"num_blocks": 5, "block_size": 4, "num_kv_heads": 3, "head_size": 8}


def refused(kind: type[kv.Error], call: Callable[[], Any], words: tuple[str, ...], *memories: Any) -> None:
    """`call` raises exactly `kind` with one line that has all words, and leaves the memories as they were."""
    before = [m.copy() for m in memories]
    with pytest.raises(Exception) as caught:
        call()
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    assert isinstance(caught.value, BASES[kind])
    assert isinstance(caught.value, kv.Error)
    message = str(caught.value)
    assert "\n" not in message
    assert 0 < len(message) < 1500
    for word in words:
        assert word in message, message
    for memory, old in zip(memories, before, strict=True):
        same = memory.same(old) if isinstance(memory, oracle.Memory) else np.array_equal(memory, old)
        assert same, "bytes were written"


def geometry(dtype: str = "f32", **sizes: int) -> kv.Geometry:
    """Small sizes, some of them replaced."""
    return kv.Geometry(**(SIZES | sizes), dtype=dtype)


def memory(order: str = "B KV N H D", seed: int = 1, dtype: str = "f32", **sizes: int) -> oracle.Memory:
    """Random bytes in a layout."""
    return oracle.Memory(kv.Layout(order, geometry(dtype, **sizes)), seed)


def test_every_exception_is_a_built_in() -> None:
    for kind, base in BASES.items():
        assert issubclass(kind, kv.Error)
        assert issubclass(kind, base)
    assert issubclass(kv.AmbiguousLayout, kv.LayoutError)
    assert issubclass(kv.UnknownLayout, kv.LayoutError)
    assert issubclass(kv.NotStrided, kv.LayoutError)


# --- Block ids.

BAD_PAIRS: list[tuple[str, Any, type[kv.Error], tuple[str, ...]]] = [
    ("source at the limit", [(5, 0)], kv.BlockIndexError, ("5", "num_blocks is 5")),
    ("destination at the limit", [(0, 5)], kv.BlockIndexError, ("5", "num_blocks is 5")),
    ("negative source", [(-1, 0)], kv.BlockIndexError, ("-1", "num_blocks is 5")),
    ("negative destination", [(0, -2)], kv.BlockIndexError, ("-2", "num_blocks is 5")),
    ("the last of many", [(0, 1), (1, 2), (2, 7)], kv.BlockIndexError, ("7", "[2]", "num_blocks is 5")),
    ("2^31", [(2**31, 0)], kv.BlockIndexError, (str(2**31), "num_blocks is 5")),
    ("2^32", [(0, 2**32)], kv.BlockIndexError, (str(2**32), "num_blocks is 5")),
    ("2^32 + 1, which 32 bits make 1", [(2**32 + 1, 0)], kv.BlockIndexError, (str(2**32 + 1), "num_blocks is 5")),
    ("2^63 - 1", [(2**63 - 1, 0)], kv.BlockIndexError, (str(2**63 - 1), "num_blocks is 5")),
    ("-2^63", [(0, -(2**63))], kv.BlockIndexError, (str(-(2**63)), "num_blocks is 5")),
    ("2^63", [(2**63, 0)], kv.BlockIndexError, (str(2**63), "int64")),
    ("2^64", [(0, 2**64)], kv.BlockIndexError, (str(2**64), "int64")),
    ("-2^70", [(0, -(2**70))], kv.BlockIndexError, (str(-(2**70)), "int64")),
    ("uint64", np.array([[2**63 + 5, 0]], np.uint64), kv.BlockIndexError, (str(2**63 + 5), "int64")),
    ("destination twice", [(0, 1), (2, 1)], kv.ArgumentError, ("block 1", "twice")),
    ("destination twice, same source", [(0, 1), (0, 1)], kv.ArgumentError, ("block 1", "twice")),
    ("destination twice in a mapping", {0: 1, 2: [3, 1]}, kv.ArgumentError, ("block 1", "twice")),
    ("floats", [(0.0, 1.0)], kv.DTypeError, ("0.0", "whole number")),
    ("one float", [(0, 1.5)], kv.DTypeError, ("1.5", "whole number")),
    ("NaN", [(0, float("nan"))], kv.DTypeError, ("nan", "whole number")),
    ("float array", np.zeros((1, 2), np.float32), kv.DTypeError, ("float32",)),
    ("bools", [(True, False)], kv.DTypeError, ("True", "whole number")),
    ("one bool", [(2, True)], kv.DTypeError, ("True", "whole number")),
    ("bool array", np.zeros((1, 2), bool), kv.DTypeError, ("bool",)),
    ("strings", [("0", "1")], kv.DTypeError, ("pairs",)),
    ("None inside", [(None, 1)], kv.DTypeError, ("None", "whole number")),
    ("dates", np.zeros((1, 2), "M8[s]"), kv.DTypeError, ("datetime64",)),
    ("three columns", [(0, 1, 2)], kv.ArgumentError, ("[1, 3]", "[n, 2]")),
    ("one dimension", [0, 1], kv.ArgumentError, ("[2]", "[n, 2]")),
    ("three dimensions", [[(0, 1)]], kv.ArgumentError, ("[1, 1, 2]", "[n, 2]")),
    ("unequal rows", [(0, 1), (2,)], kv.ArgumentError, ("pairs",)),
    ("two unequal lists", [[0, 1, 2], [3, 4]], kv.ArgumentError, ("pairs",)),
    ("None", None, kv.ArgumentError, ("pairs", "None")),
    ("a number", 3, kv.ArgumentError, ("pairs", "int")),
]
VERBS: dict[str, Callable[[oracle.Memory, oracle.Memory, Any], Any]] = {
    "copy_blocks": lambda s, d, pairs: kv.copy_blocks(d.cache(), pairs),
    "swap_blocks": lambda s, d, pairs: kv.swap_blocks(s.cache(), d.cache(), pairs),
    "convert_blocks": lambda s, d, pairs: kv.convert_blocks(s.cache(), d.cache(), pairs),
    "Plan.bind": lambda s, d, pairs: kv.Plan(s.cache(), d.cache()).bind(pairs),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("pairs", "kind", "words"), [b[1:] for b in BAD_PAIRS], ids=[b[0] for b in BAD_PAIRS])
def test_pairs(verb: str, pairs: Any, kind: type[kv.Error], words: tuple[str, ...]) -> None:
    source, target = memory(), memory(seed=2)
    if verb in ("convert_blocks", "Plan.bind") and pairs is None:
        words = ("pairs", "src_blocks")  # nothing was given
    refused(kind, lambda: VERBS[verb](source, target, pairs), words, source, target)


@pytest.mark.parametrize("verb", VERBS)
def test_a_good_pair_before_a_bad_one_is_not_carried_out(verb: str) -> None:
    source, target = memory(), memory(seed=2)
    for bad in ((0, 5), (-1, 4), (2, 1)):
        kind = kv.ArgumentError if bad == (2, 1) else kv.BlockIndexError
        refused(kind, lambda bad=bad: VERBS[verb](source, target, [(0, 1), (3, 2), bad]), (), source, target)


def test_torch_ids() -> None:
    torch = pytest.importorskip("torch")
    source, target = memory(), memory(seed=2)
    bad = [
        (torch.tensor([[0, 5]]), kv.BlockIndexError, "5"),
        (torch.tensor([[0, 5]], dtype=torch.int32), kv.BlockIndexError, "5"),
        (torch.tensor([[0, -1]], dtype=torch.int8), kv.BlockIndexError, "-1"),
        (torch.tensor([[0.0, 1.0]]), kv.DTypeError, "float32"),
        (torch.tensor([[True, False]]), kv.DTypeError, "bool"),
        (torch.zeros(1, 2, dtype=torch.complex64), kv.DTypeError, "complex64"),
        (torch.zeros(1, 2, dtype=torch.int64, device="meta"), kv.ArgumentError, "meta"),
        (torch.zeros(1, 2, dtype=torch.int64).to_sparse(), kv.ArgumentError, "sparse"),
        (torch.tensor([0, 1]), kv.ArgumentError, "[2]"),
        (torch.tensor(1), kv.ArgumentError, "[n, 2]"),
    ]
    for pairs, kind, word in bad:
        refused(
            kind, lambda pairs=pairs: kv.convert_blocks(source.cache(), target.cache(), pairs), (word,), source, target
        )


@pytest.mark.parametrize(
    ("ids", "kind", "words"),
    [
        ([5], kv.BlockIndexError, ("5", "num_blocks is 5", "ids")),
        ([0, 1, -1], kv.BlockIndexError, ("-1", "num_blocks is 5", "ids[2]")),
        ([2**31], kv.BlockIndexError, (str(2**31), "num_blocks is 5")),
        ([2**64], kv.BlockIndexError, (str(2**64),)),
        ([1, 2, 1], kv.ArgumentError, ("block 1", "twice")),
        ([[1]], kv.ArgumentError, ("[1, 1]", "one dimension")),
        ([1.0], kv.DTypeError, ("ids", "1.0")),
        ([True], kv.DTypeError, ("ids", "True")),
        (1, kv.ArgumentError, ("ids", "int")),
        (None, kv.ArgumentError, ("ids", "None")),
    ],
)
def test_zero_blocks(ids: Any, kind: type[kv.Error], words: tuple[str, ...]) -> None:
    target = memory()
    refused(kind, lambda: kv.zero_blocks(target.cache(), ids), ("zero_blocks", *words), target)


@pytest.mark.parametrize(
    ("ids", "ratio", "kind", "words"),
    [
        ([0], 0, kv.ArgumentError, ("ratio 0",)),
        ([0], -1, kv.ArgumentError, ("ratio -1",)),
        ([0], 1.5, kv.ArgumentError, ("ratio 1.5",)),
        ([0], float("nan"), kv.ArgumentError, ("ratio nan",)),
        ([0], float("inf"), kv.ArgumentError, ("ratio inf",)),
        ([0], 2**70, kv.BlockIndexError, ("ratio", str(2**70))),
        ([0], "2", kv.DTypeError, ("ratio",)),
        ([0], None, kv.DTypeError, ("ratio",)),
        ([0], True, kv.DTypeError, ("ratio",)),
        ([-1], 2, kv.BlockIndexError, ("-1", "ids[0]")),
        ([0, 2**62], 4, kv.BlockIndexError, (str(2**62), "ids[1]")),
        ([2**64], 4, kv.BlockIndexError, (str(2**64),)),
        ([0.5], 2, kv.DTypeError, ("ids", "0.5")),
        ([True], 2, kv.DTypeError, ("ids", "True")),
        ([[0]], 2, kv.ArgumentError, ("[1, 1]",)),
    ],
)
def test_expand_block_ids(ids: Any, ratio: Any, kind: type[kv.Error], words: tuple[str, ...]) -> None:
    refused(kind, lambda: kv.expand_block_ids(ids, ratio), ("expand_block_ids", *words))


# --- Token sequences, heads, layers.

SPANS: list[tuple[dict[str, Any], type[kv.Error], tuple[str, ...]]] = [
    ({"tokens": (0, 0, 9)}, kv.ArgumentError, ("9 tokens from token 0", "2 source blocks of 4")),
    ({"tokens": (5, 0, 4)}, kv.ArgumentError, ("4 tokens from token 5", "2 source blocks of 4")),
    ({"tokens": (0, 5, 4)}, kv.ArgumentError, ("4 tokens from token 5", "2 destination blocks of 4")),
    ({"tokens": (-1, 0, 1)}, kv.ArgumentError, ("-1", "source")),
    ({"tokens": (0, -1, 1)}, kv.ArgumentError, ("-1", "destination")),
    ({"tokens": (0, 0, -1)}, kv.ArgumentError, ("-1",)),
    ({"tokens": (8, 8, 1)}, kv.ArgumentError, ("from token 8", "2 source blocks of 4")),
    ({"tokens": (2**62, 0, 2**62)}, kv.ArgumentError, (str(2**62),)),
    ({"tokens": (0, 0, 2**63 - 1)}, kv.ArgumentError, (str(2**63 - 1),)),
    ({"tokens": (0, 0, 2**70)}, kv.BlockIndexError, ("tokens", str(2**70))),
    ({"tokens": (0, 0)}, kv.ArgumentError, ("tokens",)),
    ({"tokens": (0, 0, 1.5)}, kv.DTypeError, ("tokens", "1.5")),
    ({"tokens": 4}, kv.ArgumentError, ("tokens",)),
    ({"src_blocks": [0, 5]}, kv.BlockIndexError, ("5", "src_blocks[1]", "num_blocks is 5")),
    ({"dst_blocks": [-1, 3]}, kv.BlockIndexError, ("-1", "dst_blocks[0]", "num_blocks is 5")),
    ({"dst_blocks": [2**31, 3]}, kv.BlockIndexError, (str(2**31), "num_blocks is 5")),
    ({"src_blocks": [0]}, kv.ArgumentError, ("4 source tokens", "8 destination tokens")),
    ({"dst_blocks": [0, 1, 2]}, kv.ArgumentError, ("8 source tokens", "12 destination tokens")),
    ({"dst_blocks": [2, 2]}, kv.ArgumentError, ("slot 8", "block 2", "twice")),
    ({"dst_blocks": [2, 2], "tokens": (0, 1, 5)}, kv.ArgumentError, ("block 2", "twice")),
    ({"dst_blocks": None}, kv.ArgumentError, ("dst_blocks",)),
    ({"src_blocks": None}, kv.ArgumentError, ("src_blocks",)),
    ({"src_blocks": [0.0, 1.0]}, kv.DTypeError, ("src_blocks", "0.0")),
    ({"pairs": [(0, 1)]}, kv.ArgumentError, ("pairs", "not both")),
    ({"null_block": 0}, kv.ArgumentError, ("null_block",)),
    ({"heads": (0, 0, 4)}, kv.BlockIndexError, ("(0, 0, 4)", "num_kv_heads is 3")),
    ({"heads": (2, 0, 2)}, kv.BlockIndexError, ("(2, 0, 2)", "num_kv_heads is 3")),
    ({"heads": (0, 2, 2)}, kv.BlockIndexError, ("(0, 2, 2)", "num_kv_heads is 3")),
    ({"heads": (-1, 0, 1)}, kv.BlockIndexError, ("(-1, 0, 1)", "num_kv_heads is 3")),
    ({"heads": (0, 0, -1)}, kv.BlockIndexError, ("(0, 0, -1)", "num_kv_heads is 3")),
    ({"heads": (2**62, 0, 2**62)}, kv.BlockIndexError, (str(2**62), "num_kv_heads is 3")),
    ({"heads": (0, 0, 2**70)}, kv.BlockIndexError, ("heads", str(2**70))),
    ({"heads": (0, 0)}, kv.ArgumentError, ("heads",)),
    ({"heads": (0, 0, 1.5)}, kv.DTypeError, ("heads", "1.5")),
    ({"layers": (0, 2)}, kv.BlockIndexError, ("(0, 2)", "num_layers is 1")),
    ({"layers": (1, 1)}, kv.BlockIndexError, ("(1, 1)", "num_layers is 1")),
    ({"layers": (-1, 1)}, kv.BlockIndexError, ("(-1, 1)", "num_layers is 1")),
    ({"layers": (0, -1)}, kv.BlockIndexError, ("(0, -1)", "num_layers is 1")),
    ({"layers": (2**62, 2**62)}, kv.BlockIndexError, (str(2**62), "num_layers is 1")),
    ({"layers": (0, 2**70)}, kv.BlockIndexError, ("layers", str(2**70))),
    ({"layers": (0,)}, kv.ArgumentError, ("layers",)),
    ({"layers": 0}, kv.ArgumentError, ("layers",)),
    ({"layers": (0.0, 1)}, kv.DTypeError, ("layers", "0.0")),
]


@pytest.mark.parametrize(("changed", "kind", "words"), SPANS, ids=[str(s[0]) for s in SPANS])
def test_token_sequences_heads_and_layers(
    changed: dict[str, Any], kind: type[kv.Error], words: tuple[str, ...]
) -> None:
    source, target = memory(), memory("B H N KV D", 2)
    good = {"src_blocks": [0, 1], "dst_blocks": [2, 3]}
    assert kv.convert_blocks(source.cache(), target.copy().cache(), **good) == 8
    arguments = good | changed
    refused(
        kind,
        lambda: kv.convert_blocks(source.cache(), target.cache(), **arguments),
        ("convert_blocks", *words),
        source,
        target,
    )


@pytest.mark.parametrize("layers", [(0, 3), (2, 1), (-1, 1), (1, 2)])
def test_layers_of_the_other_verbs(layers: tuple[int, int]) -> None:
    for order in ("B KV N H D", "L B KV N H D"):
        source, target = memory(order, num_layers=2), memory(order, 2, num_layers=2)
        words = (str(layers), "num_layers is 2")
        refused(kv.BlockIndexError, lambda d=target: kv.copy_blocks(d.cache(), [(0, 1)], layers=layers), words, target)
        refused(
            kv.BlockIndexError,
            lambda s=source, d=target: kv.swap_blocks(s.cache(), d.cache(), [(0, 1)], layers=layers),
            words,
            source,
            target,
        )


@pytest.mark.parametrize("null_block", [1.5, "0", 2**70, -1, -(2**63)])
def test_null_block(null_block: Any) -> None:
    source, target = memory(), memory(seed=2)
    kind = kv.BlockIndexError if isinstance(null_block, int) else kv.DTypeError
    for one in (kv.copy_blocks, kv.zero_blocks):
        ids = [(0, 1)] if one is kv.copy_blocks else [1]
        refused(kind, lambda one=one, ids=ids: one(target.cache(), ids, null_block=null_block), ("null_block",), target)
    for verb in (kv.swap_blocks, kv.convert_blocks):
        refused(
            kind,
            lambda verb=verb: verb(source.cache(), target.cache(), [(0, 1)], null_block=null_block),
            ("null_block",),
            source,
            target,
        )


# --- Two caches that do not go together.

MISMATCHES: list[tuple[str, dict[str, Any], type[kv.Error], tuple[str, ...]]] = [
    ("dtype", {"dtype": "i32"}, kv.DTypeError, ("'key'", "f32", "i32")),
    ("16-bit dtype", {"dtype": "bf16"}, kv.DTypeError, ("'key'", "f32", "bf16", "cast")),
    ("head size", {"head_size": 16}, kv.LayoutError, ("'key'", "8", "16")),
    ("value head size", {"value_head_size": 4}, kv.LayoutError, ("'value'", "8", "4")),
    ("heads", {"num_kv_heads": 2}, kv.LayoutError, ("3 heads", "2", "heads=")),
    ("block size", {"block_size": 8}, kv.LayoutError, ("block_size is 4", "8")),
    ("layers", {"num_layers": 2}, kv.LayoutError, ("1 layer", "2", "layers=")),
    ("planes", {"order": "B N {latent: D, rope: D}"}, kv.LayoutError, ("latent", "no plane")),
    ("one plane more", {"order": "B N H {key: D, value: D, index: D}"}, kv.LayoutError, ("'index'", "no plane")),
    ("one plane less", {"order": "B N H {key: D}"}, kv.LayoutError, ("'value'", "no plane")),
    ("no block axis", {"order": "KV N H D"}, kv.LayoutError, ("block",)),
]


@pytest.mark.parametrize(("changed", "kind", "words"), [m[1:] for m in MISMATCHES], ids=[m[0] for m in MISMATCHES])
def test_caches_of_other_sizes(changed: dict[str, Any], kind: type[kv.Error], words: tuple[str, ...]) -> None:
    source = memory()
    target = memory(**({"seed": 2} | changed))
    for pairs in ([(0, 0)], []):
        if changed.get("order") == "KV N H D" and not pairs:
            continue  # nothing moves
        if changed.get("order") == "KV N H D":
            kind, words, pairs = kv.BlockIndexError, ("1", "num_blocks is 1"), [(0, 1)]
        refused(
            kind, lambda pairs=pairs: kv.convert_blocks(source.cache(), target.cache(), pairs), words, source, target
        )
        refused(kind, lambda pairs=pairs: kv.Plan(source.cache(), target.cache()).bind(pairs), words, source, target)


@pytest.mark.parametrize(
    "other",
    ["B KV H N D", "KV B N H D", "B N H KV D", "L B KV N H D", "B KV N/2 H N%2 D", "B {key: N H D, value: H N D}"],
)
def test_swap_blocks_needs_one_order(other: str) -> None:
    source, target = memory(), memory(other, 2)
    words = ("swap_blocks", "different orders", "convert_blocks")
    if other == "L B KV N H D":  # one layer: the same addresses
        assert kv.swap_blocks(source.cache(), target.copy().cache(), [(0, 1)]) == 1
        return
    refused(kv.LayoutError, lambda: kv.swap_blocks(source.cache(), target.cache(), [(0, 1)]), words, source, target)
    refused(kv.LayoutError, lambda: kv.swap_blocks(source.cache(), target.cache(), []), words, source, target)


def test_raw_planes() -> None:
    source, target = memory("B {state: D[8]}"), memory("B {state: D[8]}", 2)

    def call(**arguments: Any) -> Callable[[], Any]:
        return lambda: kv.convert_blocks(source.cache(), target.cache(), **arguments)

    refused(kv.ArgumentError, call(pairs=[(0, 1)], heads=(0, 0, 1)), ("'state'", "raw", "head"), source, target)
    refused(
        kv.ArgumentError,
        call(src_blocks=[0], dst_blocks=[1], tokens=(0, 0, 2)),
        ("'state'", "whole blocks"),
        source,
        target,
    )
    refused(kv.ArgumentError, lambda: kv.gather_tokens(source.cache(), [0]), ("gather_tokens", "'state'"), source)


# --- Memory that is shared, and memory that only looks so.


def test_overlapping_caches() -> None:
    """Views of one buffer: touched bytes that meet are an error, whatever the distance."""
    g = geometry()
    layout = kv.Layout("B KV N H D", g)
    block = layout.num_bytes // 5
    for shift in (1, 4, 32, block // 2, block, 4 * block, layout.num_bytes - 1):
        raw = np.random.default_rng(shift).integers(0, 256, layout.num_bytes + shift, dtype=np.uint8)
        source, target = kv.Cache(raw[: layout.num_bytes], layout), kv.Cache(raw[shift:], layout)
        everything = [(i, 4 - i) for i in range(5)]
        for verb in (kv.convert_blocks, kv.swap_blocks):
            refused(
                kv.ArgumentError,
                lambda verb=verb, s=source, t=target, p=everything: verb(s, t, p),
                (verb.__name__, "share memory"),
                raw,
            )
    for shift in (layout.num_bytes, layout.num_bytes + 3):
        raw = np.random.default_rng(shift).integers(0, 256, layout.num_bytes + shift, dtype=np.uint8)
        want = raw[: layout.num_bytes].copy()
        kv.convert_blocks(
            kv.Cache(raw[: layout.num_bytes], layout), kv.Cache(raw[shift:], layout), [(i, i) for i in range(5)]
        )
        np.testing.assert_array_equal(raw[shift : shift + layout.num_bytes], want)


def test_one_cache_on_both_sides() -> None:
    """Disjoint blocks of one cache are no overlap; a chain or a block onto itself is (copy_blocks does those)."""
    here = memory()
    cache = here.cache()
    for verb in (kv.convert_blocks, kv.swap_blocks):
        for pairs in ([(0, 1), (1, 2)], [(1, 1)], [(0, 1), (1, 0)], [(3, 2), (0, 3)]):
            refused(kv.ArgumentError, lambda verb=verb, p=pairs: verb(cache, cache, p), ("share memory",), here)
        want = here.copy()
        oracle.convert(here, want, [(0, 1), (2, 3)])
        assert verb(cache, cache, [(0, 1), (2, 3)]) == 2
        assert here.same(want)


@pytest.mark.parametrize("axis", range(5), ids=["block", "KV", "token", "head", "dim"])
@pytest.mark.parametrize("target_order", ["B KV N H D", "B H N KV D"])
def test_interleaved_memory_that_does_not_overlap(axis: int, target_order: str) -> None:
    """Source and destination in turns in one buffer, along each axis: no byte meets, so it works."""
    shape = [5, 2, 4, 3, 8]
    shape[axis] *= 2
    raw = np.random.default_rng(axis).normal(size=shape).astype(np.float32)
    halves = [raw[(slice(None),) * axis + (slice(i, None, 2),)] for i in range(2)]
    g = geometry()
    source, target = kv.Cache(halves[0], "B KV N H D", geometry=g), kv.Cache(halves[1], "B KV N H D", geometry=g)
    before = raw.copy()
    if target_order == "B KV N H D":
        kv.convert_blocks(source, target, [(i, 4 - i) for i in range(5)])
        np.testing.assert_array_equal(halves[1], halves[0][::-1])
    else:
        kv.swap_blocks(source, target, [(0, 4), (3, 1)])
        np.testing.assert_array_equal(halves[1][[4, 1]], halves[0][[0, 3]])
    np.testing.assert_array_equal(halves[0], before[(slice(None),) * axis + (slice(0, None, 2),)])
    # One element further, and they meet.
    meeting = [
        raw[(slice(None),) * axis + (slice(0, shape[axis] // 2),)],
        raw[(slice(None),) * axis + (slice(shape[axis] // 2 - 1, -1),)],
    ]
    caches = [kv.Cache(m, "B KV N H D", geometry=g) for m in meeting]
    refused(
        kv.ArgumentError, lambda: kv.convert_blocks(*caches, [(i, 4 - i) for i in range(5)]), ("share memory",), raw
    )


def test_halves_of_one_buffer() -> None:
    """Block ranges, head ranges and layers of one tensor are caches of their own."""
    raw = np.random.default_rng(1).normal(size=(10, 2, 4, 6, 8)).astype(np.float32)
    want = raw.copy()
    want[5:] = raw[:5]
    low, high = kv.Cache(raw[:5], "B KV N H D"), kv.Cache(raw[5:], "B KV N H D")
    kv.swap_blocks(low, high, [(i, i) for i in range(5)])
    np.testing.assert_array_equal(raw, want)
    want[:, :, :, 3:] = raw[:, :, :, :3]
    left, right = kv.Cache(raw[..., :3, :], "B KV N H D"), kv.Cache(raw[..., 3:, :], "B KV N H D")
    kv.convert_blocks(left, right, [(i, i) for i in range(10)])
    np.testing.assert_array_equal(raw, want)


def test_tensors_of_one_cache_that_share_memory() -> None:
    raw = np.zeros((5, 2, 4, 3, 8), np.float32)
    refused(kv.ArgumentError, lambda: kv.Cache([raw, raw], "B KV N H D"), ("share memory",), raw)
    order = "key: B N H D | value: B N H D"
    refused(kv.ArgumentError, lambda: kv.Cache((raw[:, 0], raw[:, 0]), order), ("share memory",), raw)
    flat = raw.reshape(-1)
    size = 5 * 4 * 3 * 8
    pair = (flat[:size].reshape(5, 4, 3, 8), flat[size - 1 : 2 * size - 1].reshape(5, 4, 3, 8))
    refused(kv.ArgumentError, lambda: kv.Cache(pair, order), ("share memory",), raw)
    kv.Cache((raw[:, 0], raw[:, 1]), order)  # in turns, block by block


# --- Tensors that cannot be a cache.


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """A float32 view with these strides in elements."""
    return np.lib.stride_tricks.as_strided(np.zeros(4000, np.float32), shape, [4 * s for s in strides])


TENSORS: list[tuple[str, Any, type[kv.Error], tuple[str, ...]]] = [
    ("float64", np.zeros((5, 2, 4, 3, 8)), kv.DTypeError, ("float64",)),
    ("int64", np.zeros((5, 2, 4, 3, 8), np.int64), kv.DTypeError, ("int64",)),
    ("bool", np.zeros((5, 2, 4, 3, 8), bool), kv.DTypeError, ("bool",)),
    ("complex", np.zeros((5, 2, 4, 3, 8), np.complex64), kv.DTypeError, ("complex64",)),
    ("object", np.zeros((5, 2, 4, 3, 8), object), kv.DTypeError, ("object",)),
    ("structured", np.zeros((5, 2, 4, 3, 8), [("a", "f4")]), kv.DTypeError, ("[('a', '<f4')]",)),
    ("big endian", np.zeros((5, 2, 4, 3, 8), ">f4"), kv.DTypeError, (">f4", "byte order")),
    (
        "float16",
        np.zeros((5, 2, 4, 3, 8), np.float16),
        kv.LayoutError,
        ("[5, 2, 4, 3, 8]", "item size 2", "item size 4"),
    ),
    ("int32", np.zeros((5, 2, 4, 3, 8), np.int32), kv.DTypeError, ("int32", "f32")),
    ("rank 0", np.zeros((), np.float32), kv.ArgumentError, ("rank 0",)),
    ("rank 4", np.zeros((5, 2, 4, 3), np.float32), kv.LayoutError, ("[5, 2, 4, 3]", "[5, 2, 4, 3, 8]")),
    ("rank 6", np.zeros((5, 2, 4, 3, 2, 4), np.float32), kv.LayoutError, ("[5, 2, 4, 3, 2, 4]", "[5, 2, 4, 3, 8]")),
    ("rank 14", np.zeros((1,) * 14, np.float32), kv.ArgumentError, ("14", "12")),
    ("fewer blocks", np.zeros((4, 2, 4, 3, 8), np.float32), kv.LayoutError, ("[4, 2, 4, 3, 8]", "[5, 2, 4, 3, 8]")),
    ("three halves", np.zeros((5, 3, 4, 3, 8), np.float32), kv.LayoutError, ("[5, 3, 4, 3, 8]", "[5, 2, 4, 3, 8]")),
    ("other heads", np.zeros((5, 2, 4, 4, 6), np.float32), kv.LayoutError, ("[5, 2, 4, 4, 6]", "[5, 2, 4, 3, 8]")),
    ("too small", np.zeros(959, np.float32), kv.LayoutError, ("[959]", "3840 bytes")),
    ("empty", np.zeros((0, 2, 4, 3, 8), np.float32), kv.LayoutError, ("[0, 2, 4, 3, 8]", "length 0")),
    ("negative stride", np.zeros((5, 2, 4, 3, 8), np.float32)[::-1], kv.ArgumentError, ("negative stride", "-192")),
    ("stride 0", strided((5, 2, 4, 3, 8), (0, 96, 24, 8, 1)), kv.LayoutError, ("[0, 96, 24, 8, 1]",)),
    (
        "broadcast",
        np.broadcast_to(np.zeros((1, 2, 4, 3, 8), np.float32), (5, 2, 4, 3, 8)),
        kv.LayoutError,
        ("[0, 96,",),
    ),
    ("overlapping strides", strided((5, 2, 4, 3, 8), (100, 96, 24, 8, 1)), kv.LayoutError, ("[100, 96, 24, 8, 1]",)),
    (
        "permuted strides",
        np.zeros((5, 2, 3, 4, 8), np.float32).swapaxes(2, 3),
        kv.LayoutError,
        ("[192, 96, 8, 32, 1]",),
    ),
    (
        "uneven byte stride",
        np.ndarray((5, 2, 4, 3, 8), np.float32, bytearray(9000), 0, (1602, 800, 96, 32, 4)),
        kv.LayoutError,
        ("1602", "4"),
    ),
    ("None", None, kv.ArgumentError, ("NoneType",)),
    ("a number", 3.5, kv.ArgumentError, ("float",)),
    ("text", "tensor", kv.ArgumentError, ("str",)),
    ("a dict", {"a": np.zeros((5, 2, 4, 3, 8), np.float32)}, kv.ArgumentError, ("dict",)),
    ("an empty list", [], kv.ArgumentError, ("empty",)),
    ("a list of numbers", [1, 2], kv.ArgumentError, ("list",)),
    (
        "two layers of two shapes",
        [np.zeros((5, 2, 4, 3, 8), np.float32), np.zeros((6, 2, 4, 3, 8), np.float32)],
        kv.LayoutError,
        ("[5, 2, 4, 3, 8]", "[6, 2, 4, 3, 8]"),
    ),
    (
        "two layers of two dtypes",
        [np.zeros((5, 2, 4, 3, 8), np.float32), np.zeros((5, 2, 4, 3, 8), np.int32)],
        kv.LayoutError,
        ("float32", "int32"),
    ),
]


@pytest.mark.parametrize(("tensor", "kind", "words"), [t[1:] for t in TENSORS], ids=[t[0] for t in TENSORS])
def test_tensors(tensor: Any, kind: type[kv.Error], words: tuple[str, ...]) -> None:
    refused(kind, lambda: kv.Cache(tensor, "B KV N H D", geometry=geometry()), words)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    shape = (5, 2, 4, 3, 8)
    plain = torch.zeros(shape)
    complex_ = torch.zeros(shape, dtype=torch.complex64)
    bad = [
        (plain.to("meta"), kv.ArgumentError, "meta"),
        (plain.to_sparse(), kv.ArgumentError, "sparse"),
        (torch.zeros(5, 8).to_sparse_csr(), kv.ArgumentError, "sparse"),
        (complex_.conj(), kv.ArgumentError, "conjugate"),
        (complex_.conj().imag, kv.ArgumentError, "negative"),
        (torch._neg_view(plain), kv.ArgumentError, "negative"),
        (complex_, kv.DTypeError, "complex64"),
        (plain.double(), kv.DTypeError, "float64"),
        (plain.bool(), kv.DTypeError, "bool"),
        (plain.to(torch.int64), kv.DTypeError, "int64"),
        (plain[:1].expand(shape), kv.LayoutError, "[0, 96, 24, 8, 1]"),
        (plain.transpose(2, 3), kv.LayoutError, "[5, 2, 3, 4, 8]"),
        (plain[:, :, :, :0], kv.LayoutError, "[5, 2, 4, 0, 8]"),
        (torch.quantize_per_tensor(plain, 1.0, 0, torch.qint8), kv.DTypeError, "qint8"),
    ]
    for tensor, kind, word in bad:
        refused(kind, lambda tensor=tensor: kv.Cache(tensor, "B KV N H D", geometry=geometry()), (word,))
    resolved = complex_.conj().resolve_conj().real.contiguous()
    assert kv.Cache(resolved, "B KV N H D").key().shape == (5, 4, 3, 8)


@pytest.mark.parametrize(
    ("tensors", "kind", "words"),
    [
        (np.zeros((5, 4, 3, 8), np.float32), kv.ArgumentError, ("2 tensors", "1 given")),
        ((np.zeros((5, 4, 3, 8), np.float32),), kv.ArgumentError, ("2 tensors", "1 given")),
        ((np.zeros((5, 4, 3, 8), np.float32),) * 3, kv.ArgumentError, ("2 tensors", "3 given")),
        (([np.zeros((5, 4, 3, 8), np.float32)], []), kv.ArgumentError, ("empty",)),
        (([], []), kv.ArgumentError, ("empty",)),
        ((None, None), kv.ArgumentError, ("NoneType",)),
        ((1, 2), kv.ArgumentError, ("int",)),
        ((np.zeros((5, 4, 3, 8), np.float32), np.zeros((5, 4, 3, 9), np.float32)), kv.LayoutError, ("[5, 4, 3, 9]",)),
        ((np.zeros((5, 4, 3, 8), np.float32), np.zeros((6, 4, 3, 8), np.float32)), kv.LayoutError, ("[6, 4, 3, 8]",)),
        ((np.zeros((5, 4, 3, 8), np.float32), np.zeros((5, 4, 3, 8), np.float16)), kv.LayoutError, ("item size 2",)),
        ((np.zeros((5, 4, 3, 8), np.float32), np.zeros((5, 4, 3, 8), np.int32)), kv.DTypeError, ("int32",)),
    ],
)
def test_pairs_of_tensors(tensors: Any, kind: type[kv.Error], words: tuple[str, ...]) -> None:
    refused(kind, lambda: kv.Cache(tensors, "key: B N H D | value: B N H D", geometry=geometry()), words)


def test_what_is_no_layout() -> None:
    tensor = np.zeros((5, 2, 4, 3, 8), np.float32)
    layout = kv.Layout("B KV N H D", geometry())
    refused(kv.ArgumentError, lambda: kv.Cache(tensor, layout, geometry=geometry()), ("geometry",))
    refused(kv.ArgumentError, lambda: kv.Cache(tensor, None), ("layout", "None"))
    refused(kv.ArgumentError, lambda: kv.Cache(tensor, 3), ("layout", "int"))
    refused(kv.ArgumentError, lambda: kv.Cache(tensor, "B KV N H D", geometry={"num_blocks": 5}), ("geometry", "dict"))
    refused(kv.LayoutError, lambda: kv.Cache(tensor, "B KV N H Q"), ("column 10", "'Q'"))
    refused(kv.LayoutError, lambda: kv.Cache(tensor, "vllm/no-such"), ("'vllm/no-such'",))
    refused(
        kv.LayoutError,
        lambda: kv.Cache([tensor, tensor.copy()], "B KV N H D", geometry=geometry(num_layers=3)),
        ("2 tensors", "3"),
    )


def test_dtype_that_a_carrier_does_not_say() -> None:
    refused(kv.DTypeError, lambda: kv.Cache(np.zeros((5, 2, 4, 3, 8), np.uint16), "B KV N H D"), ("uint16", "geometry"))
    refused(
        kv.DTypeError, lambda: kv.Cache(np.zeros((5, 2, 4, 3, 8), np.float16), "B KV N H D bf16"), ("float16", "bf16")
    )


# --- Views.


@pytest.mark.parametrize(
    ("layer", "kind", "words"),
    [
        (1, kv.BlockIndexError, ("layer 1", "num_layers is 1")),
        (-1, kv.BlockIndexError, ("layer -1", "num_layers is 1")),
        (2**40, kv.BlockIndexError, (str(2**40), "num_layers is 1")),
        (2**70, kv.BlockIndexError, ("layer", str(2**70))),
        (0.0, kv.DTypeError, ("layer", "0.0")),
        ("key", kv.DTypeError, ("layer", "key")),
        (None, kv.DTypeError, ("layer", "None")),
    ],
)
def test_layers_of_views(layer: Any, kind: type[kv.Error], words: tuple[str, ...]) -> None:
    cache = memory().cache()
    refused(kind, lambda: cache.key(layer), words)
    refused(kind, lambda: cache.value(layer), words)
    refused(kind, lambda: cache.plane(layer, "key"), words)


def test_planes_that_are_not_there() -> None:
    refused(kv.LayoutError, lambda: memory().cache().plane(0, "latent"), ("'latent'", "key, value"))
    refused(kv.LayoutError, lambda: memory("B N {latent: D}").cache().key(), ("'key'", "latent"))
    refused(kv.LayoutError, lambda: kv.Layout("B KV N H D", geometry()).offset("KEY"), ("'KEY'", "key, value"))


@pytest.mark.parametrize(
    ("index", "kind", "words"),
    [
        ({"layer": 1}, kv.BlockIndexError, ("layer 1", "num_layers is 1")),
        ({"block": 5}, kv.BlockIndexError, ("block 5", "num_blocks is 5")),
        ({"block": -1}, kv.BlockIndexError, ("block -1", "num_blocks is 5")),
        ({"block": 2**31}, kv.BlockIndexError, (str(2**31), "num_blocks is 5")),
        ({"block": 2**70}, kv.BlockIndexError, ("block", str(2**70))),
        ({"token": 4}, kv.BlockIndexError, ("token 4", "block_size is 4")),
        ({"head": 3}, kv.BlockIndexError, ("head 3", "num_kv_heads is 3")),
        ({"dim": 8}, kv.BlockIndexError, ("dim 8", "is 8")),
        ({"token": 1.0}, kv.DTypeError, ("token", "1.0")),
        ({"token": True}, kv.DTypeError, ("token", "True")),
        ({"token": "1"}, kv.DTypeError, ("token",)),
    ],
)
def test_offsets_outside(index: dict[str, Any], kind: type[kv.Error], words: tuple[str, ...]) -> None:
    layout = kv.Layout("B KV N H D", geometry())
    refused(kind, lambda: layout.offset("value", **index), words)


def test_parts_outside() -> None:
    layout = kv.Layout("B KV N H D", geometry())
    for part in (1, -1, 2**40):
        refused(kv.BlockIndexError, lambda part=part: layout.part_bytes(part), (str(part),))


# --- Sizes.


@pytest.mark.parametrize(
    "field", ["num_layers", "num_blocks", "block_size", "num_kv_heads", "head_size", "value_head_size", "k"]
)
@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (0, kv.LayoutError, ("0", "from 1")),
        (-1, kv.LayoutError, ("-1", "from 1")),
        (2**48 + 1, kv.LayoutError, (str(2**48 + 1), "281474976710656")),
        (2**63, kv.LayoutError, (str(2**63), "from 1")),
        (-(2**80), kv.LayoutError, (str(-(2**80)), "from 1")),
        (1.0, kv.DTypeError, ("1.0", "whole number")),
        (True, kv.DTypeError, ("True", "whole number")),
        ("3", kv.DTypeError, ("'3'", "whole number")),
    ],
)
def test_geometry_fields(field: str, value: Any, kind: type[kv.Error], words: tuple[str, ...]) -> None:
    refused(kind, lambda: kv.Geometry(**(SIZES | {field: value})), (field, *words))


def test_geometry_that_is_none() -> None:
    refused(kv.DTypeError, lambda: kv.Geometry(**(SIZES | {"num_blocks": None})), ("num_blocks", "None"))
    refused(kv.DTypeError, lambda: kv.Geometry(**SIZES, dtype="bfloat16"), ("'bfloat16'", "bf16"))
    refused(kv.DTypeError, lambda: kv.Geometry(**SIZES, dtype=""), ("''",))
    refused(kv.LayoutError, lambda: kv.Geometry(**SIZES, x=8), ("x",))
    with pytest.raises(TypeError):
        kv.Geometry(num_blocks=5, block_size=4, num_kv_heads=3)


@pytest.mark.parametrize(
    ("order", "sizes"),
    [
        ("B KV N H D", {"num_blocks": 2**48, "block_size": 2**48}),
        ("B KV N H D", {"num_blocks": 2**48, "head_size": 2**14}),
        ("L B KV N H D", {"num_layers": 2**40, "num_blocks": 2**22}),
        ("B KV N H D@4611686018427387904", {}),
        ("B@9223372036854775807 KV N H D", {}),
        ("B KV@4611686018427387904 N H D", {}),
        ("B {key@9223372036854775807: N H D, value: N H D}", {}),
        ("B KV N H D[9223372036854775807]", {}),
        ("B KV N%9223372036854775807 H D", {}),
        ("B KV N H D D D D D D D D D D D D D D D D D D D D D D D D D D D D", {}),
    ],
)
def test_sizes_beyond_int64(order: str, sizes: dict[str, int]) -> None:
    refused(kv.LayoutError, lambda: kv.Layout(order, geometry(**sizes)), ())


def test_the_largest_layouts_work() -> None:
    """2^62 bytes at most; offsets stay exact beyond 2^53."""
    layout = kv.Layout("B KV N H D", geometry("u8", num_blocks=2**48, block_size=2**10, num_kv_heads=1, head_size=8))
    assert layout.num_bytes == 2**62
    last = layout.offset("value", block=2**48 - 1, token=2**10 - 1, dim=7)
    assert last == (0, 2**62 - 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("B KV N/2 H D", ("N",)),
        ("B KV N/3 N%3 H D", ("4", "3")),
        ("B KV N/2 N%4 H D", ("N", "4", "2")),
        ("B KV N%2 H D", ("N", "2", "4")),
        ("B B KV N H D", ("B",)),
        ("B KV N H D/x", ("D",)),
        ("B N H D", ("name",)),
        ("NHD", ("column 1", "vllm/flashinfer-nhd")),
        ("B KV N H", ()),
        ("", ("column 1", "empty")),
        ("B KV N H D }", ("column 12", "'}'")),
        ("B KV@8 N H D", ("overlap",)),
        ("B@0 KV N H D", ("overlap",)),
        ("B KV N H D@2", ("overlap",)),
        ("B KV N/q H N%q D", ("'q'",)),
    ],
)
def test_texts(text: str, words: tuple[str, ...]) -> None:
    if text == "B KV N H":  # an axis that is not there has length 1
        assert kv.Layout(text, geometry()).extents("key") == (1, 5, 4, 3, 1)
        return
    refused(kv.LayoutError, lambda: kv.Layout(text, geometry()), words)
    refused(kv.LayoutError, lambda: kv.layout(text, geometry()), words)


def test_stride_orders() -> None:
    """An engine's stride order that is no permutation of its shape."""
    facts = {
        "backend": "FlashInferBackend",
        "args": SIZES,
        "logical_shape": [5, 2, 4, 3, 8],
        "from": "0.25.1",
    }
    for order in [(0, 1, 2, 3, 4, 5), (0, 1, 1, 3, 4), (0, 1, 2, 3), (1, 2, 3, 4, 5), (-1, 1, 2, 3, 4)]:
        refused(
            kv.LayoutError,
            lambda order=order: name_layout(facts | {"stride_order": order}),
            (str(order), "permutation"),
        )


# --- Tokens.


def tokens(count: int = 3, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [token, head, dim]."""
    rng = np.random.default_rng(count)
    key, value = rng.normal(size=(2, count, 3, 8)).astype(dtype)
    return key.copy(), value.copy()


WRITES: list[tuple[str, Callable[[np.ndarray, np.ndarray], tuple[Any, ...]], type[kv.Error], tuple[str, ...]]] = [
    ("layer", lambda k, v: (1, k, v, [0]), kv.BlockIndexError, ("layer 1", "num_layers is 1")),
    ("negative layer", lambda k, v: (-1, k, v, [0]), kv.BlockIndexError, ("layer -1", "num_layers is 1")),
    ("huge layer", lambda k, v: (2**70, k, v, [0]), kv.BlockIndexError, ("layer", str(2**70))),
    ("float layer", lambda k, v: (0.0, k, v, [0]), kv.DTypeError, ("layer", "0.0")),
    ("slot at the limit", lambda k, v: (0, k, v, [0, 20]), kv.BlockIndexError, ("20", "num_blocks 5", "block_size 4")),
    ("slot 2^31", lambda k, v: (0, k, v, [2**31]), kv.BlockIndexError, (str(2**31), "20")),
    ("slot 2^63 - 1", lambda k, v: (0, k, v, [2**63 - 1]), kv.BlockIndexError, (str(2**63 - 1), "20")),
    ("slot 2^64", lambda k, v: (0, k, v, [2**64]), kv.BlockIndexError, (str(2**64), "int64")),
    ("slot twice", lambda k, v: (0, k, v, [1, -1, 1]), kv.ArgumentError, ("slot 1", "twice")),
    ("more slots than tokens", lambda k, v: (0, k, v, [0, 1, 2, 3]), kv.ArgumentError, ("[3, 3, 8]", "4")),
    ("fewer values", lambda k, v: (0, k, v[:1], [0, 1]), kv.ArgumentError, ("value", "[1, 3, 8]", "2")),
    ("rank", lambda k, v: (0, k[0], v, [0]), kv.ArgumentError, ("key", "[3, 8]", "[token, head, dim]")),
    ("heads", lambda k, v: (0, k[:, :2], v, [0]), kv.ArgumentError, ("key", "[3, 2, 8]", "3, 8]")),
    ("dim", lambda k, v: (0, k, v[:, :, :4], [0]), kv.ArgumentError, ("value", "[3, 3, 4]", "3, 8]")),
    ("float16", lambda k, v: (0, k.astype(np.float16), v, [0]), kv.DTypeError, ("key", "f16", "f32")),
    ("float64", lambda k, v: (0, k, v.astype(float), [0]), kv.DTypeError, ("value", "float64")),
    ("int32", lambda k, v: (0, k.astype(np.int32), v, [0]), kv.DTypeError, ("key", "i32", "f32")),
    ("no tensor", lambda k, v: (0, None, v, [0]), kv.ArgumentError, ("key", "NoneType")),
    ("a list", lambda k, v: (0, k.tolist(), v, [0]), kv.ArgumentError, ("key", "list")),
    ("slots of rank 2", lambda k, v: (0, k, v, [[0]]), kv.ArgumentError, ("slot_mapping", "[1, 1]")),
    ("float slots", lambda k, v: (0, k, v, [0.0]), kv.DTypeError, ("slot_mapping", "0.0")),
    ("bool slots", lambda k, v: (0, k, v, [True]), kv.DTypeError, ("slot_mapping", "True")),
    ("negative stride", lambda k, v: (0, k[::-1], v, [0]), kv.ArgumentError, ("key", "negative stride")),
]


@pytest.mark.parametrize(("make", "kind", "words"), [w[1:] for w in WRITES], ids=[w[0] for w in WRITES])
def test_write_tokens(make: Callable[..., tuple[Any, ...]], kind: type[kv.Error], words: tuple[str, ...]) -> None:
    target = memory()
    key, value = tokens()
    arguments = make(key, value)
    refused(kind, lambda: kv.write_tokens(target.cache(), *arguments), ("write_tokens", *words), target, key, value)


def test_write_tokens_may_read_one_memory_twice() -> None:
    """One tensor as key and value, a head expanded to all: reading twice harms nothing."""
    target = memory()
    key, _ = tokens()
    kv.write_tokens(target.cache(), 0, key, key, [5, 0])
    cache = target.cache()
    np.testing.assert_array_equal(cache.key()[1, 1], key[0])
    np.testing.assert_array_equal(cache.value()[0, 0], key[1])
    expanded = np.broadcast_to(key[:, :1], key.shape)
    kv.write_tokens(cache, 0, expanded, key, [7])
    np.testing.assert_array_equal(cache.key()[1, 3], expanded[0])


def test_write_tokens_of_nothing() -> None:
    """An engine's empty step, or one where every token is padding."""
    target = memory()
    before = target.copy()
    key, value = tokens()
    kv.write_tokens(target.cache(), 0, key[:0], value[:0], [])
    kv.write_tokens(target.cache(), 0, key, value, [])
    kv.write_tokens(target.cache(), 0, key, value, [-1, -(2**62), -5])
    assert target.same(before)


def test_write_tokens_into_its_own_source() -> None:
    """Keys that are a view of the block that is written."""
    target = memory()
    cache = target.cache()
    refused(
        kv.ArgumentError,
        lambda: kv.write_tokens(cache, 0, cache.key()[0], cache.value()[1], [1, 2]),
        ("write_tokens", "share memory"),
        target,
    )
    want = target.copy()
    oracle.convert(target, want, [(0, 4)])
    kv.write_tokens(cache, 0, cache.key()[0], cache.value()[0], [16, 17, 18, 19])
    assert target.same(want)


@pytest.mark.parametrize("cast", ["no", 1, 0, None, [False]])
def test_what_is_no_flag(cast: Any) -> None:
    source, target = memory(), memory(seed=2, dtype="f8_e4m3")
    ends = source.cache(), target.cache()
    words = ("cast", "True or False")
    refused(kv.ArgumentError, lambda: kv.convert_blocks(*ends, [(0, 1)], cast=cast), words, source, target)
    refused(kv.ArgumentError, lambda: kv.Plan(*ends, cast=cast), words, source, target)
    kv.convert_blocks(*ends, [(0, 1)], cast=np.True_)


def test_masked_arrays() -> None:
    """Their masks would be ignored."""
    target, pool = memory(), kv.HostTier(1 << 20)
    cache = target.cache()
    key, value = tokens()
    ids = np.ma.array([0, 1], mask=[False, True])
    hidden = np.ma.array(key, mask=True)
    space = kv.Namespace(
        model="m", revision="r", planes={"key": "f32", "value": "f32"}, num_layers=1, num_kv_heads=3, head_size=8,
        block_size=4, raw="x",
    )  # fmt: skip
    store = kv.Store(pool, namespace=space)
    for call in (
        lambda: kv.copy_blocks(cache, ids.reshape(1, 2)),
        lambda: kv.zero_blocks(cache, ids),
        lambda: kv.gather_tokens(cache, ids),
        lambda: kv.expand_block_ids(ids, 2),
        lambda: kv.write_tokens(cache, 0, key[:2], value[:2], ids),
        lambda: kv.write_tokens(cache, 0, hidden, value, [0, 1, 2]),
        lambda: kv.write_tokens(cache, 0, key, value, [0, 1, 2], key_scale=np.ma.array([1.0], mask=[True])),
        lambda: kv.Cache(np.ma.array(np.zeros((5, 2, 4, 3, 8), np.float32)), "B KV N H D"),
        lambda: kv.detect(np.ma.zeros((5, 2, 4, 3, 8), np.float32)),
        lambda: kv.scatter_tokens(cache, [0, 1], {"key": np.ma.zeros((1, 2, 3, 8)), "value": value}),
        lambda: kv.Key.chain(None, ids),
        lambda: store.put([b"k"], cache, ids[:1]),
        lambda: store.get_bytes([b"k"], [np.ma.zeros(8, np.uint8)]),
    ):
        refused(kv.ArgumentError, call, ("masked",), target)
    store.close()


BAD_SCALES = [0, -1, -0.0, float("nan"), float("inf"), 1e39, 1e-60]


@pytest.mark.parametrize("scale", BAD_SCALES)
def test_scales(scale: float) -> None:
    source = memory()
    target = memory(seed=2, dtype="f8_e4m3")
    key, value = tokens()
    for name in ("key_scale", "value_scale"):
        refused(
            kv.ArgumentError,
            lambda name=name: kv.write_tokens(target.cache(), 0, key, value, [0], **{name: scale}),
            ("write_tokens", name, "positive"),
            target,
        )
    for values in (scale, [scale], [1.0, scale, 1.0], np.array([1, 1, scale], np.float64)):
        refused(
            kv.ArgumentError,
            lambda values=values: kv.convert_blocks(
                source.cache(), target.cache(), [(0, 0)], cast=True, scales={"value": values}
            ),
            ("convert_blocks", "scales", "'value'", "positive"),
            source,
            target,
        )


@pytest.mark.parametrize(
    ("scales", "kind", "words"),
    [
        ({"latent": 1.0}, kv.ArgumentError, ("'latent'",)),
        ({"key": []}, kv.ArgumentError, ("0 values", "1 or 3")),
        ({"key": [1.0, 2.0]}, kv.ArgumentError, ("2 values", "1 or 3")),
        ({"key": [1.0] * 4}, kv.ArgumentError, ("4 values", "1 or 3")),
        ({"key": None}, kv.DTypeError, ("'key'", "None")),
        ({"key": "1"}, kv.DTypeError, ("'key'",)),
        ([1.0], kv.ArgumentError, ("scales", "list")),
    ],
)
def test_scales_of_a_wrong_kind(scales: Any, kind: type[kv.Error], words: tuple[str, ...]) -> None:
    source, target = memory(), memory(seed=2, dtype="f8_e4m3")
    refused(
        kind,
        lambda: kv.convert_blocks(source.cache(), target.cache(), [(0, 0)], cast=True, scales=scales),
        ("scales", *words),
        source,
        target,
    )


def test_scales_of_write_tokens_of_a_wrong_kind() -> None:
    target = memory(dtype="f8_e4m3")
    key, value = tokens()
    for scale in (None, "x", [1.0, 2.0]):
        refused(
            kv.DTypeError,
            lambda scale=scale: kv.write_tokens(target.cache(), 0, key, value, [0], key_scale=scale),
            ("key_scale",),
            target,
        )


def test_scales_and_casts_where_there_is_nothing_to_scale() -> None:
    source, half, target = memory(), memory(seed=2, dtype="bf16"), memory(seed=3, dtype="f8_e4m3")
    refused(
        kv.ArgumentError,
        lambda: kv.convert_blocks(source.cache(), half.cache(), [(0, 0)], cast=True, scales={"key": 2.0}),
        ("'key'", "f8"),
        source,
        half,
    )
    refused(
        kv.DTypeError,
        lambda: kv.convert_blocks(source.cache(), target.cache(), [(0, 0)], scales={"key": 2.0}),
        ("cast",),
        source,
        target,
    )
    for verb in (kv.convert_blocks, kv.swap_blocks):
        refused(
            kv.DTypeError, lambda verb=verb: verb(source.cache(), half.cache(), [(0, 0)]), ("f32", "bf16"), source, half
        )


GATHERS: list[tuple[Any, type[kv.Error], tuple[str, ...]]] = [
    ([20], kv.BlockIndexError, ("20", "num_blocks 5", "block_size 4")),
    ([0, -1], kv.BlockIndexError, ("-1", "slots[1]")),
    ([2**31], kv.BlockIndexError, (str(2**31), "20")),
    ([2**63], kv.BlockIndexError, (str(2**63),)),
    ([1.0], kv.DTypeError, ("slots", "1.0")),
    ([[1]], kv.ArgumentError, ("[1, 1]",)),
    (None, kv.ArgumentError, ("slots", "None")),
]


@pytest.mark.parametrize(("slots", "kind", "words"), GATHERS, ids=[str(g[0]) for g in GATHERS])
def test_gather_and_scatter_slots(slots: Any, kind: type[kv.Error], words: tuple[str, ...]) -> None:
    target = memory()
    count = len(slots) if isinstance(slots, list) else 1
    out = {p: np.full((1, count, 3, 8), 7, np.float32) for p in ("key", "value")}
    refused(
        kind, lambda: kv.gather_tokens(target.cache(), slots, out=out), ("gather_tokens", *words), target, *out.values()
    )
    refused(
        kind, lambda: kv.scatter_tokens(target.cache(), slots, out), ("scatter_tokens", *words), target, *out.values()
    )


def test_scatter_slot_twice() -> None:
    target = memory()
    planes = {p: np.zeros((1, 2, 3, 8), np.float32) for p in ("key", "value")}
    refused(kv.ArgumentError, lambda: kv.scatter_tokens(target.cache(), [3, 3], planes), ("slot 3", "twice"), target)


def dense(**changed: Any) -> dict[str, Any]:
    """Good dense planes of two tokens, some replaced."""
    return {"key": np.zeros((1, 2, 3, 8), np.float32), "value": np.zeros((1, 2, 3, 8), np.float32)} | changed


READ_ONLY = np.zeros((1, 2, 3, 8), np.float32)
READ_ONLY.flags.writeable = False
DENSE: list[tuple[str, Any, type[kv.Error], tuple[str, ...]]] = [
    ("dim", dense(key=np.zeros((1, 2, 3, 7), np.float32)), kv.ArgumentError, ("'key'", "[1, 2, 3, 7]", "[1, 2, 3, 8]")),
    (
        "tokens",
        dense(value=np.zeros((1, 1, 3, 8), np.float32)),
        kv.ArgumentError,
        ("'value'", "[1, 1, 3, 8]", "[1, 2, 3, 8]"),
    ),
    ("rank", dense(key=np.zeros((2, 3, 8), np.float32)), kv.ArgumentError, ("'key'", "[2, 3, 8]", "[1, 2, 3, 8]")),
    (
        "strided",
        dense(key=np.zeros((1, 4, 3, 8), np.float32)[:, ::2]),
        kv.ArgumentError,
        ("not contiguous", "[96, 48, 8, 1]"),
    ),
    ("dtype", dense(key=np.zeros((1, 2, 3, 8), np.float16)), kv.DTypeError, ("'key'", "float16", "f32")),
    ("int dtype", dense(key=np.zeros((1, 2, 3, 8), np.int32)), kv.DTypeError, ("'key'", "int32", "f32")),
    ("a plane less", {"key": np.zeros((1, 2, 3, 8), np.float32)}, kv.ArgumentError, ("'key'", "'value'")),
    ("a plane more", dense(index=np.zeros((1, 2, 3, 8), np.float32)), kv.ArgumentError, ("'index'",)),
    ("no tensor", dense(key=None), kv.ArgumentError, ("'key'", "NoneType")),
]


@pytest.mark.parametrize(("planes", "kind", "words"), [d[1:] for d in DENSE], ids=[d[0] for d in DENSE])
def test_dense_planes(planes: Any, kind: type[kv.Error], words: tuple[str, ...]) -> None:
    target = memory()
    refused(kind, lambda: kv.scatter_tokens(target.cache(), [0, 1], planes), ("scatter_tokens", *words), target)
    refused(kind, lambda: kv.gather_tokens(target.cache(), [0, 1], out=planes), ("gather_tokens", *words), target)


def test_dense_planes_that_cannot_be_written() -> None:
    target = memory()
    out = dense(key=READ_ONLY)
    refused(
        kv.ArgumentError,
        lambda: kv.gather_tokens(target.cache(), [0, 1], out=out),
        ("read-only",),
        target,
        *out.values(),
    )
    kv.scatter_tokens(target.cache(), [0, 1], out)  # a source may be read-only
    both = np.zeros((1, 2, 3, 8), np.float32)
    refused(
        kv.ArgumentError,
        lambda: kv.gather_tokens(target.cache(), [0, 1], out={"key": both, "value": both}),
        ("share memory",),
        target,
    )
    view = target.cache().key()[None, 0, :2]
    refused(
        kv.ArgumentError,
        lambda: kv.gather_tokens(target.cache(), [0, 1], out=dense(key=view)),
        ("share memory",),
        target,
    )
    refused(
        kv.ArgumentError, lambda: kv.scatter_tokens(target.cache(), [1, 0], dense(key=view)), ("share memory",), target
    )
    for planes in (None, [1, 2], 3):
        refused(
            kv.ArgumentError,
            lambda planes=planes: kv.scatter_tokens(target.cache(), [0, 1], planes),
            ("scatter_tokens", "planes"),
            target,
        )
    refused(kv.ArgumentError, lambda: kv.scatter_tokens(target.cache(), [], {"nope": 1}), ("'nope'", "'key'"), target)


# --- Read-only caches, things that are no cache, plans.


def test_read_only_caches() -> None:
    """Every verb that would write refuses; reading works."""
    array = np.random.default_rng(1).normal(size=(5, 2, 4, 3, 8)).astype(np.float32)
    array.flags.writeable = False
    cache, other = kv.Cache(array, "B KV N H D"), memory()
    key, value = tokens()
    calls: dict[str, Callable[[], Any]] = {
        "copy_blocks": lambda: kv.copy_blocks(cache, [(0, 1)]),
        "swap_blocks": lambda: kv.swap_blocks(other.cache(), cache, [(0, 1)]),
        "convert_blocks": lambda: kv.convert_blocks(other.cache(), cache, [(0, 1)]),
        "zero_blocks": lambda: kv.zero_blocks(cache, [0]),
        "scatter_tokens": lambda: kv.scatter_tokens(cache, [0, 1], dense()),
        "write_tokens": lambda: kv.write_tokens(cache, 0, key, value, [0]),
        "plan": lambda: kv.Plan(other.cache(), cache).bind([(0, 1)]).run(),
    }
    for verb, call in calls.items():
        refused(kv.ArgumentError, call, (verb, "read-only"), array, other)
    assert kv.swap_blocks(cache, other.cache(), [(0, 1)]) == 1
    np.testing.assert_array_equal(other.cache().key()[1], array[0, 0])
    assert kv.gather_tokens(cache, [3])["value"].shape == (1, 1, 3, 8)


@pytest.mark.parametrize(
    "thing", [None, 3, "cache", np.zeros((5, 2, 4, 3, 8), np.float32)], ids=lambda t: type(t).__name__
)
def test_what_is_no_cache(thing: Any) -> None:
    good = memory()
    key, value = tokens()
    name = (type(thing).__name__,)
    calls = [
        lambda: kv.copy_blocks(thing, [(0, 1)]),
        lambda: kv.swap_blocks(thing, good.cache(), [(0, 1)]),
        lambda: kv.swap_blocks(good.cache(), thing, [(0, 1)]),
        lambda: kv.convert_blocks(good.cache(), thing, [(0, 1)]),
        lambda: kv.convert_blocks(thing, good.cache(), src_blocks=[0], dst_blocks=[1]),
        lambda: kv.zero_blocks(thing, [0]),
        lambda: kv.gather_tokens(thing, [0]),
        lambda: kv.scatter_tokens(thing, [0, 1], dense()),
        lambda: kv.write_tokens(thing, 0, key, value, [0]),
    ]
    for call in calls:
        refused(kv.ArgumentError, call, name, good)
    refused(kv.ArgumentError, lambda: kv.Plan(thing, good.cache()), ("Plan", "two caches or two layouts"), good)
    refused(kv.ArgumentError, lambda: kv.Plan(good.layout, thing), ("Plan", "two caches or two layouts"), good)


def test_plans() -> None:
    source, target = memory(), memory(seed=2)
    layouts = (source.layout, target.layout)
    refused(
        kv.ArgumentError, lambda: kv.Plan(source.cache(), target.layout), ("two caches or two layouts",), source, target
    )
    refused(kv.ArgumentError, lambda: kv.Plan(*layouts).bind([(0, 1)]).run(), ("no memory",), source, target)
    refused(kv.BlockIndexError, lambda: kv.Plan(*layouts).bind([(0, 5)]), ("5", "num_blocks is 5"))
    refused(kv.ArgumentError, lambda: kv.Plan(*layouts, tokens=(0, 0, 4)).bind([(0, 1)]), ("tokens",))
    refused(kv.ArgumentError, lambda: kv.Plan(*layouts).bind([(0, 1)], src_blocks=[0], dst_blocks=[1]), ("src_blocks",))
    refused(kv.ArgumentError, lambda: kv.Plan(*layouts).bind(), ("pairs", "src_blocks"))
    refused(kv.ArgumentError, lambda: kv.Plan(*layouts).bind(src_blocks=[0, 1], dst_blocks=[0]), ("8", "4"))
    refused(kv.BlockIndexError, lambda: kv.Plan(*layouts, heads=(0, 0, 9)), ("(0, 0, 9)", "num_kv_heads is 3"))
    refused(kv.BlockIndexError, lambda: kv.Plan(*layouts, layers=(0, 2)), ("(0, 2)", "num_layers is 1"))
    # A failed bind leaves nothing bound.
    plan = kv.Plan(source.cache(), target.cache()).bind([(0, 1)])
    refused(kv.ArgumentError, lambda: plan.bind([(0, 2), (1, 2)]), ("twice",), source, target)
    before = target.copy()
    if plan.num_bytes == 0:
        plan.run()
        assert target.same(before)
    # One cache on both sides, checked when it runs.
    one = kv.Plan(source.cache(), source.cache()).bind([(0, 1), (1, 2)])
    refused(kv.ArgumentError, one.run, ("share memory",), source)


# --- Calls that no signature has: one line, not nanobind's many.

LAYOUT = kv.Layout("B KV N H D", geometry())
CALLS: list[tuple[str, Callable[[], Any], type[kv.Error], tuple[str, ...]]] = [
    ("sizes by place", lambda: kv.Geometry(5, 4, 3, 8), kv.ArgumentError, ("by name",)),
    ("a symbol", lambda: kv.Geometry(**SIZES, **{"\ud800": 1}), kv.ArgumentError, ("UTF-8",)),
    ("no geometry", lambda: kv.Layout("B N H D"), kv.ArgumentError, ("Layout: geometry", "Geometry")),
    ("a size", lambda: kv.Layout("B N H D", 3), kv.ArgumentError, ("Layout: geometry is int", "Geometry")),
    ("a layout", lambda: kv.Layout(LAYOUT), kv.ArgumentError, ("Layout: order is Layout", "B KV N H D")),
    ("bytes", lambda: kv.Layout(b"B N H D", geometry()), kv.ArgumentError, ("Layout: order is bytes",)),
    ("a surrogate", lambda: kv.Layout("\ud800", geometry()), kv.ArgumentError, ("Layout: order", "UTF-8")),
    ("sizes", lambda: kv.Layout("B N H D", num_blocks=3), kv.ArgumentError, ("Layout(order, geometry)", "num_blocks")),
    ("too many", lambda: kv.Layout("B N H D", geometry(), 1), kv.ArgumentError, ("Layout(order, geometry)", "1 more")),
    ("layout: no geometry", lambda: kv.layout("B N H D"), kv.ArgumentError, ("layout: geometry", "Geometry")),
    ("layout: a mapping", lambda: kv.layout("B N H D", SIZES), kv.ArgumentError, ("layout: geometry is dict",)),
    ("layout: a name", lambda: kv.layout(3, geometry()), kv.ArgumentError, ("layout: name_or_order is int",)),
    ("layout: sizes", lambda: kv.layout("B N H D", **SIZES), kv.ArgumentError, ("layout(", "num_blocks")),
    ("offset()", lambda: LAYOUT.offset(), kv.ArgumentError, ("offset: plane", "name")),
    ("offset(3)", lambda: LAYOUT.offset(3), kv.ArgumentError, ("offset: plane is int", "name")),
    ("offset, too many", lambda: LAYOUT.offset("key", 0, 0, 0, 0, 0, 0, 9), kv.ArgumentError, ("offset(", "2 more")),
    ("offset, an axis by letter", lambda: LAYOUT.offset("key", B=1), kv.ArgumentError, ("offset(plane, ", "given B=")),
    ("part_bytes(0, 1)", lambda: LAYOUT.part_bytes(0, 1), kv.ArgumentError, ("part_bytes(part)", "1 more")),
    ("extents, two", lambda: LAYOUT.extents("key", 1), kv.ArgumentError, ("extents(plane)", "1 more")),
    ("modes, two", lambda: LAYOUT.modes("key", "value"), kv.ArgumentError, ("modes(plane)", "1 more")),
    ("part, two", lambda: LAYOUT.part("key", x=1), kv.ArgumentError, ("part(plane)", "given x=")),
    ("has_head, two", lambda: LAYOUT.has_head("key", 1), kv.ArgumentError, ("has_head(plane)", "1 more")),
    ("with_layers(1, 2)", lambda: LAYOUT.with_layers(1, 2), kv.ArgumentError, ("with_layers(num_layers)", "1 more")),
    ("offset, no such plane", lambda: LAYOUT.offset("rope"), kv.LayoutError, ("rope", "key")),
    ("offset, None", lambda: LAYOUT.offset("key", None), kv.DTypeError, ("offset: layer is None",)),
    ("extents", lambda: LAYOUT.extents(3), kv.ArgumentError, ("extents: plane is int",)),
    ("modes", lambda: LAYOUT.modes(), kv.ArgumentError, ("modes: plane",)),
    ("part", lambda: LAYOUT.part(None), kv.ArgumentError, ("part: plane",)),
    ("has_head", lambda: LAYOUT.has_head(3), kv.ArgumentError, ("has_head: plane is int",)),
    ("with_layers('2')", lambda: LAYOUT.with_layers("2"), kv.DTypeError, ("num_layers is '2'",)),
    ("with_layers(2^70)", lambda: LAYOUT.with_layers(2**70), kv.LayoutError, (str(2**70), "2^48")),
    ("with_layers(0)", lambda: LAYOUT.with_layers(0), kv.LayoutError, ("num_layers", "0")),
    ("part_bytes('0')", lambda: LAYOUT.part_bytes("0"), kv.DTypeError, ("part is '0'",)),
    ("part_bytes(2^70)", lambda: LAYOUT.part_bytes(2**70), kv.BlockIndexError, (str(2**70),)),
    ("num_threads(1)", lambda: kv.num_threads(1), kv.ArgumentError, ("num_threads()", "1 more")),
    ("num_threads(x=1)", lambda: kv.num_threads(x=1), kv.ArgumentError, ("num_threads()", "x=")),
    ("registry(0)", lambda: kv.registry(0), kv.ArgumentError, ("registry()", "1 more")),
    ("version(0)", lambda: kv.version(0), kv.ArgumentError, ("version()", "1 more")),
    ("instruction_sets(0)", lambda: kv.instruction_sets(0), kv.ArgumentError, ("instruction_sets()", "1 more")),
    ("threads 2^31", lambda: kv.set_num_threads(2**31), kv.ArgumentError, (str(2**31),)),
    ("threads 2^32 + 1", lambda: kv.set_num_threads(2**32 + 1), kv.ArgumentError, (str(2**32 + 1),)),
    ("threads '2'", lambda: kv.set_num_threads("2"), kv.DTypeError, ("set_num_threads: threads is '2'",)),
    ("threads True", lambda: kv.set_num_threads(True), kv.DTypeError, ("set_num_threads: threads is True",)),
    ("threads -1", lambda: kv.set_num_threads(-1), kv.ArgumentError, ("-1",)),
    ("threads 2^70", lambda: kv.set_num_threads(2**70), kv.ArgumentError, (str(2**70),)),
    ("out=3", lambda: kv.gather_tokens(memory().cache(), [0], out=3), kv.ArgumentError, ("out", "int", "mapping")),
    ("planes", lambda: kv.scatter_tokens(memory().cache(), [0], {3: 1, "key": 2}), kv.ArgumentError, ("3", "'key'")),
]


@pytest.mark.parametrize(("call", "kind", "words"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_calls(call: Callable[[], Any], kind: type[kv.Error], words: tuple[str, ...]) -> None:
    refused(kind, call, words)


@pytest.mark.parametrize(
    ("value", "threads"),
    [("3", "3"), ("0", None), ("", None), ("many", None), ("-1", None), ("1025", None), ("2 ", None)],
)
def test_threads_from_the_environment(value: str, threads: str | None) -> None:
    text = "import kvstride; print(kvstride.num_threads())"
    environment = {**os.environ, "KVSTRIDE_NUM_THREADS": value}
    out = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert threads is None or out.stdout.strip() == threads
    ignored = f"kvstride: KVSTRIDE_NUM_THREADS is '{value}', ignored: no whole number from 0 to 1024\n"
    assert out.stderr == ("" if value in ("3", "0", "") else ignored)
