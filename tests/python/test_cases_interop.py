# SPDX-License-Identifier: Apache-2.0
"""Faults of the field between types, layouts and ranks, each as its kind; numbers as in the collection of cases."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvstride as kv
import oracle


def geometry(blocks: int = 5, tokens: int = 4, heads: int = 3, dim: int = 8, **more: Any) -> kv.Geometry:
    """A geometry from the four sizes."""
    sizes = {"num_blocks": blocks, "block_size": tokens, "num_kv_heads": heads, "head_size": dim}
    return kv.Geometry(**sizes, **({"dtype": "i32"} | more))


# --- C19


def test_c19_one_16_bit_type_is_not_the_other() -> None:
    """0x3E25 is 0.1611 in bf16 and 1.536 in fp16: an error, or the value; never the bits."""
    bits = np.full((1, 2, 1, 1, 8), 0x3E25, np.uint16)
    source = kv.Cache(bits, "B KV N H D", geometry=geometry(1, 1, 1, 8, dtype="bf16"))
    target = np.zeros((1, 2, 1, 1, 8), np.float16)
    cache = kv.Cache(target, "B KV N H D")
    for verb in (kv.convert_blocks, kv.swap_blocks):
        with pytest.raises(kv.DTypeError, match=r"bf16.*f16"):
            verb(source, cache, [(0, 0)])
    assert not target.any()
    kv.convert_blocks(source, cache, [(0, 0)], cast=True)
    np.testing.assert_allclose(target.astype(np.float32), 0.1611, atol=1e-4)
    assert bits.view(np.float16)[0, 0, 0, 0, 0] == np.float16(1.536)  # what a bit copy would give
    assert (target.view(np.uint16) != 0x3E25).all()


@pytest.mark.parametrize(
    ("src", "dst"), list(itertools.permutations(["f32", "f16", "bf16", "f8_e4m3", "f8_e5m2", "i8", "u8", "i32"], 2))
)
def test_c19_every_pair_of_types(src: str, dst: str) -> None:
    """Equal sizes or not, different types never copy bits, through any verb."""
    source = oracle.Memory(kv.Layout("B KV N H D", geometry(dtype=src)), 1)
    target = oracle.Memory(kv.Layout("B KV N H D", geometry(dtype=dst)))
    before = target.copy()
    calls = [
        lambda: kv.convert_blocks(source.cache(), target.cache(), [(0, 1)]),
        lambda: kv.swap_blocks(source.cache(), target.cache(), [(0, 1)]),
        lambda: kv.convert_blocks(source.cache(), target.cache(), src_blocks=[0], dst_blocks=[1], tokens=(0, 0, 3)),
        lambda: kv.Plan(source.cache(), target.cache()),
    ]
    for call in calls:
        with pytest.raises(kv.DTypeError, match=f"{src}.*{dst}"):
            call()
    assert target.same(before)


def test_c19_tokens_of_another_type() -> None:
    """write_tokens quantises into f8 and never turns bf16 into f16."""
    tokens = np.ones((2, 3, 8), ml_dtypes.bfloat16)
    cache = kv.Cache(np.zeros((5, 2, 4, 3, 8), np.float16), "B KV N H D")
    with pytest.raises(kv.DTypeError, match=r"bf16.*f16"):
        kv.write_tokens(cache, 0, tokens, tokens.copy(), [0, 1])
    assert not cache.key().any()


# --- C29


@pytest.mark.parametrize(
    ("hnd", "nhd"),
    [
        ("B KV H N D", "B KV N H D"),
        ("KV B H N D", "KV B N H D"),
        ("B H N {key: D}", "B N H {key: D}"),
        ("B H N KV D", "B N H KV D"),
        ("L B KV H N D", "L B KV N H D"),
        ("B KV H L N D", "B KV N H L D"),
        ("H B N {key: D}", "N H B {key: D}"),
        ("key: B H N D | value: B H N D", "key: B N H D | value: B N H D"),
    ],
)
@pytest.mark.parametrize("back", [False, True])
def test_c29_hnd_to_nhd_of_any_rank(hnd: str, nhd: str, back: bool) -> None:
    """With and without K/V axis and layers: blocks 1 and 3 arrive permuted, other blocks are unchanged."""
    g = geometry(num_layers=2 if "L" in hnd else 1)
    source = oracle.Memory(kv.Layout(nhd if back else hnd, g), 5)
    target = oracle.Memory(kv.Layout(hnd if back else nhd, g))
    kv.convert_blocks(source.cache(), target.cache(), [(1, 1), (3, 3)])
    for plane in source.layout.planes:
        for index in oracle.elements(source.layout, plane):
            want = source.get(plane, index) if index[1] in (1, 3) else b"\xa5" * 4
            assert target.get(plane, index) == want


def test_c29_the_example(field_fixture: np.ndarray) -> None:
    """F as HND, 5-D, and its keys as HND, 4-D."""
    hnd = np.ascontiguousarray(field_fixture.transpose(0, 1, 3, 2, 4))
    target = np.zeros_like(field_fixture)
    kv.convert_blocks(kv.Cache(hnd, "B KV H N D"), kv.Cache(target, "B KV N H D"), [(1, 1), (3, 3)])
    np.testing.assert_array_equal(target[[1, 3]], field_fixture[[1, 3]])
    assert not target[[0, 2, 4]].any()
    keys = np.ascontiguousarray(hnd[:, 0])
    target = np.zeros((5, 4, 3, 8), np.int32)
    g = geometry()
    kv.convert_blocks(
        kv.Cache(keys, "key: B H N D", geometry=g), kv.Cache(target, "key: B N H D", geometry=g), [(1, 1), (3, 3)]
    )
    np.testing.assert_array_equal(target[[1, 3]], field_fixture[[1, 3], 0])
    assert not target[[0, 2, 4]].any()


# --- C31


@pytest.mark.parametrize(("x", "b", "c"), [(8, 2, 2), (16, 4, 4), (12, 4, 8), (2, 2, 2)])
@pytest.mark.parametrize("ranks", [2, 1])
def test_c31_state_of_three_parts(x: int, b: int, c: int, ranks: int) -> None:
    """[x|B|C] of sizes 8, 2, 2 over two ranks: rank 0 has columns 0…3, 8 and 10, not 0…5."""

    def order(heads: int) -> str:
        return f"B {{state_x: H D[{x // heads}], state_b: H D[{b // heads}], state_c: H D[{c // heads}]}}"

    width = x + b + c
    conv_steps = 3
    whole = np.arange(conv_steps * width, dtype=np.int32).reshape(conv_steps, width)
    source = kv.Cache(whole, order(2), geometry=geometry(conv_steps, 1, 2, 1))
    share = 2 // ranks
    for rank in range(ranks):
        mine = np.full((conv_steps, width // ranks), -1, np.int32)
        text = f"B {{state_x: H D[{x // 2}], state_b: H D[{b // 2}], state_c: H D[{c // 2}]}}"
        target = kv.Cache(mine, text, geometry=geometry(conv_steps, 1, share, 1))
        kv.convert_blocks(source, target, [(i, i) for i in range(conv_steps)], heads=(rank * share, 0, share))
        columns: list[int] = []
        for start, size in ((0, x), (x, b), (x + b, c)):
            columns += range(start + rank * size // ranks, start + (rank + 1) * size // ranks)
        if (x, b, c, ranks, rank) == (8, 2, 2, 2, 0):
            assert columns == [0, 1, 2, 3, 8, 10]
        np.testing.assert_array_equal(mine, whole[:, columns])
        if ranks == 2:
            flat = whole[:, rank * width // 2 : (rank + 1) * width // 2]
            assert not np.array_equal(mine, flat)  # one flat range
        # And back: the two ranks together make the whole again.
        again = np.full_like(whole, -1)
        kv.convert_blocks(
            target,
            kv.Cache(again, order(2), geometry=geometry(conv_steps, 1, 2, 1)),
            [(i, i) for i in range(conv_steps)],
            heads=(0, rank * share, share),
        )
        np.testing.assert_array_equal(again[:, columns], whole[:, columns])
        assert (np.delete(again, columns, axis=1) == -1).all()


@pytest.mark.parametrize("heads", [(0, 0, 1), (1, 0, 1), (0, 1, 1)])
def test_c31_raw_state_cannot_be_cut(heads: tuple[int, int, int]) -> None:
    """The same bytes without heads are raw: a head range has no meaning and is an error, the whole moves."""
    raw = "B {state: D[12]}"
    g = geometry(3, 1, 2, 1)
    source, target = oracle.Memory(kv.Layout(raw, g), 1), oracle.Memory(kv.Layout(raw, g))
    before = target.copy()
    with pytest.raises(kv.ArgumentError, match="'state' is raw"):
        kv.convert_blocks(source.cache(), target.cache(), [(0, 0)], heads=heads)
    assert target.same(before)
    kv.convert_blocks(source.cache(), target.cache(), [(0, 0), (1, 1), (2, 2)])
    assert target.same(source)


# --- C55

STORED = [
    # torch name, kvstride name, numpy carrier
    ("bfloat16", "bf16", np.uint16),
    ("float8_e4m3fn", "f8_e4m3", np.uint8),
    ("float8_e5m2", "f8_e5m2", np.uint8),
    ("float8_e4m3fnuz", "f8_e4m3fnuz", np.uint8),
    ("float8_e5m2fnuz", "f8_e5m2fnuz", np.uint8),
    ("float16", "f16", np.float16),
    ("uint8", "u8", np.uint8),
    ("int8", "i8", np.int8),
]


@pytest.mark.parametrize(("name", "dtype", "carrier"), STORED)
def test_c55_round_trip_through_a_file(name: str, dtype: str, carrier: type, tmp_path: Path) -> None:
    """torch → numpy buffer of another layout → file → torch: equal bytes of every pattern, no byte more on disk."""
    torch = pytest.importorskip("torch")
    kind = getattr(torch, name)
    g = geometry(2, 2, 1, 3, dtype=dtype)
    patterns = torch.arange(24 * kind.itemsize, dtype=torch.int64) * 37 + 0x41
    tensor = patterns.to(torch.uint8).view(kind).reshape(2, 2, 2, 1, 3)
    cache = kv.Cache(tensor, "B KV N H D")
    assert cache.layout.planes == {"key": dtype, "value": dtype}
    stored = np.zeros(24, carrier)
    kv.convert_blocks(cache, kv.Cache(stored, "B H L KV N D", geometry=g), [(0, 0), (1, 1)])
    path = tmp_path / "block"
    stored[:12].tofile(path)
    assert path.stat().st_size == 12 * kind.itemsize
    stored.tofile(path)
    back = torch.zeros_like(tensor)
    loaded = np.fromfile(path, carrier)
    kv.convert_blocks(kv.Cache(loaded, "B H L KV N D", geometry=g), kv.Cache(back, "B KV N H D"), [(0, 0), (1, 1)])
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    dense = kv.gather_tokens(cache, [0, 3])
    assert dense["key"].dtype == kind
    from_numpy = kv.gather_tokens(kv.Cache(loaded, "B H L KV N D", geometry=g), [0, 3])["key"]
    assert from_numpy.tobytes() == dense["key"].contiguous().view(torch.uint8).numpy().tobytes()


def test_c55_large_bf16_values_survive() -> None:
    """bf16 65536.0 comes back as 65536.0; by way of fp16 it would be infinity."""
    torch = pytest.importorskip("torch")
    tensor = torch.full((1, 2, 1, 1, 8), 65536.0, dtype=torch.bfloat16)
    stored = np.zeros((1, 2, 1, 1, 8), np.uint16)
    g = geometry(1, 1, 1, 8, dtype="bf16")
    kv.convert_blocks(kv.Cache(tensor, "B KV N H D"), kv.Cache(stored, "B KV N H D", geometry=g), [(0, 0)])
    assert stored.nbytes == tensor.nbytes
    back = torch.zeros_like(tensor)
    kv.convert_blocks(kv.Cache(stored, "B KV N H D", geometry=g), kv.Cache(back, "B KV N H D"), [(0, 0)])
    assert (back == 65536.0).all()
    half = np.zeros((1, 2, 1, 1, 8), np.float16)
    kv.convert_blocks(kv.Cache(tensor, "B KV N H D"), kv.Cache(half, "B KV N H D"), [(0, 0)], cast=True)
    assert np.isinf(half).all()
