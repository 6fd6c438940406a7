# SPDX-License-Identifier: Apache-2.0
"""Detection: never a guess. Every reading that fits is found, one is the answer, several are an error."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import kvstride as kv
from declared import declared_strides, engine_tensors, geometry_for
from fit_oracle import Read, contiguous, reading_of, readings

ROWS = [e for e in kv.registry() if not e.opaque]
LETTERS = {"num_layers": "L", "num_blocks": "B", "block_size": "N", "num_kv_heads": "H", "head_size": "D"}


def find(shape: Any, strides: Any = None, **hints: Any) -> kv.Reading:
    """detect, with two strides or shapes for a pair."""
    return kv.detect(shape, strides=strides, **hints)


# --- The rule against a second implementation of it.

#: (L, B, N, H, D, k, g): 1 and 2, equal axes, heads that pair with K/V, a record's usual sizes.
GRID = [
    (1, 7, 16, 3, 32, 4, 3),
    (1, 2, 16, 3, 8, 4, 1),
    (1, 2, 2, 2, 4, 1, 1),
    (1, 3, 2, 2, 2, 2, 2),
    (1, 1, 1, 1, 8, 1, 1),
    (1, 4, 4, 4, 4, 2, 2),
    (1, 2, 4, 1, 8, 2, 1),
    (1, 5, 1, 3, 8, 1, 3),
    (2, 2, 4, 2, 4, 2, 2),
    (2, 3, 4, 4, 8, 4, 2),
    (3, 2, 2, 3, 2, 1, 3),
    (2, 2, 2, 2, 2, 1, 1),
]
HINTS = [(), ("num_kv_heads",), ("head_size", "num_blocks"), ("num_blocks", "block_size", "num_kv_heads", "head_size")]


def tensors_of(entry: kv.Entry, g: kv.Geometry) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(shape, strides in elements) of the row's tensors."""
    layout = kv.layout(entry.name, g)
    out = []
    for part in range(layout.num_parts):
        shape, strides, item = declared_strides(entry, layout, part)
        out.append((tuple(shape), tuple(s // item for s in strides)))
    return out


def questions(entry: kv.Entry) -> list[tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], dict[str, int]]]:
    """Tensors and hints of one row over the grid, its own strides and contiguous ones."""
    out = []
    for layers, blocks, tokens, heads, dim, k, g in GRID:
        sizes = {
            "num_layers": layers,
            "num_blocks": blocks,
            "block_size": tokens,
            "num_kv_heads": heads,
            "head_size": dim,
        }
        try:
            made = geometry_for(entry, **sizes, k=k, g=g)
            tensors = tensors_of(entry, made)
        except kv.LayoutError:
            continue
        known = {name: getattr(made, name) for name in LETTERS}
        for names in HINTS:
            hints = {name: known[name] for name in names}
            if "L" in entry.shape and layers > 1:
                hints["num_layers"] = layers
            out.append((tensors, hints))
        plain = [(shape, contiguous(shape)) for shape, _ in tensors]
        if plain != tensors:
            out.append((plain, {}))
    return out


def ask(tensors: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Any]:
    """The arguments of detect for one tensor or a pair."""
    if len(tensors) == 1:
        return {"tensor_or_shape": tensors[0][0], "strides": tensors[0][1]}
    return {"tensor_or_shape": [shape for shape, _ in tensors], "strides": [strides for _, strides in tensors]}


@pytest.mark.parametrize("entry", ROWS, ids=[e.name for e in ROWS])
def test_grid(entry: kv.Entry) -> None:
    """Every pair of rows, and all rows: unique exactly where all fitting readings agree on every address."""
    unique = 0
    for tensors, hints in questions(entry):
        letters = {LETTERS[name]: value for name, value in hints.items()}
        fits = {row.name: readings(row, tensors, letters) for row in ROWS}
        everything: set[Read] = set().union(*fits.values())
        assert {reading_of(r.layout) for r in kv.candidates(**ask(tensors), **hints)} == everything
        for row in ROWS:
            want = fits[entry.name] | fits[row.name]
            question = {**ask(tensors), **hints, "among": [entry.name, row.name]}
            if len(want) == 1:
                reading = kv.detect(**question)
                assert {reading_of(reading.layout)} == want
                assert sorted(reading.names) == sorted({n for n in (entry.name, row.name) if fits[n]})
                assert reading.assumes == "strided"
                unique += 1
            else:
                expected = kv.AmbiguousLayout if want else kv.UnknownLayout
                with pytest.raises(expected) as caught:
                    kv.detect(**question)
                assert type(caught.value) is expected
    assert unique > 100


@pytest.mark.parametrize("entry", ROWS, ids=[e.name for e in ROWS])
def test_own_tensor_is_among_the_readings(entry: kv.Entry) -> None:
    """With every hint given, a row is among the readings of its own declared shape and strides."""
    for layers, blocks, tokens, heads, dim, k, g in [*GRID, (4, 7, 640, 11, 96, 16, 11), (17, 7, 640, 11, 128, 64, 1)]:
        sizes = {
            "num_layers": layers,
            "num_blocks": blocks,
            "block_size": tokens,
            "num_kv_heads": heads,
            "head_size": dim,
        }
        made = geometry_for(entry, **sizes, k=k, g=g)
        try:
            layout = kv.layout(entry.name, made)
        except kv.LayoutError:
            continue
        hints = {name: getattr(made, name) for name in LETTERS}
        found = kv.candidates(**ask(tensors_of(entry, made)), **hints)
        own = [r for r in found if entry.name in r.names]
        assert own, (made, [r.names for r in found])
        index = {"block": made.num_blocks - 1, "token": tokens - 1}
        plane = next(iter(layout.planes))
        for reading in own:
            assert reading.geometry.num_blocks == made.num_blocks
        assert any(
            r.layout.offset(plane, **index)[1] - r.layout.offset(plane)[1]
            == layout.offset(plane, **index)[1] - layout.offset(plane)[1]
            for r in own
        )


@pytest.mark.parametrize("entry", ROWS, ids=[e.name for e in ROWS])
def test_tensors_read_as_their_shape(entry: kv.Entry) -> None:
    """numpy arrays answer as shape, strides and dtype do, and their elements are the layout's."""
    made = geometry_for(entry, num_layers=1, num_blocks=7, block_size=16, num_kv_heads=3, head_size=32, k=4, g=3)
    engine = engine_tensors(entry, made, {2: np.float16})
    tensors = engine.tensors
    pair = isinstance(tensors, tuple)
    thing = tuple(column[0] for column in tensors) if pair else tensors[0] if isinstance(tensors, list) else tensors
    hints = {name: getattr(made, name) for name in LETTERS if name != "num_layers"}
    found = kv.candidates(thing, **hints, among=[entry.name])
    assert found
    for reading in found:
        assert reading.geometry.dtype == "f16"
        assert set(reading.layout.planes.values()) == {"f16"}
    starts = [a.ctypes.data for a in (thing if pair else [thing])]
    indices = [(0, made.num_blocks - 1, 3, 0, 5), (0, 0, 15, 0, 31)]
    plane = next(iter(engine.layout.planes))
    assert any(
        all(
            starts[r.layout.offset(plane, *i)[0]] + r.layout.offset(plane, *i)[1] == engine.address(plane, i)
            for i in indices
        )
        for r in found
    )


# --- Hints, among, strides.


def test_the_issues_two_shapes() -> None:
    with pytest.raises(kv.AmbiguousLayout) as caught:
        kv.detect((2, 2, 16, 8, 64))
    assert "vllm/flashinfer-nhd = B KV N H D" in str(caught.value)
    assert "vllm/flash-attention-nhd = KV B N H D" in str(caught.value)
    reading = kv.detect((7, 2, 16, 3, 32), num_kv_heads=3, head_size=32, block_size=16, num_blocks=7)
    assert reading.name == "vllm/flashinfer-nhd"
    assert reading.order == "B KV N H D"
    assert str(reading.layout) == "B[7] KV N[16] H[3] D[32]"
    assert reading.geometry == kv.Geometry(num_blocks=7, block_size=16, num_kv_heads=3, head_size=32)
    assert "strided" in reading.assumes


@pytest.mark.parametrize(
    ("blocks", "tokens", "heads", "dim"), [(2, 4, 3, 8), (2, 16, 8, 64), (2, 2, 2, 2), (2, 1, 1, 8), (2, 128, 4, 128)]
)
def test_two_blocks(blocks: int, tokens: int, heads: int, dim: int) -> None:
    """C03: with exactly two blocks the K/V axis and the block axis look the same, hints of size or not."""
    shape = (2, 2, tokens, heads, dim)
    first, kv_first = 2 * tokens * heads * dim, tokens * heads * dim
    for hints in ({}, {"num_blocks": 2, "block_size": tokens, "num_kv_heads": heads, "head_size": dim}):
        with pytest.raises(kv.AmbiguousLayout, match=r"B KV N H D.*KV B N H D"):
            kv.detect(shape, **hints)
    sizes = {"block_size": tokens, "num_kv_heads": heads}
    blocks_first = kv.detect(shape, **sizes, among=["vllm/flashinfer-nhd"])
    assert blocks_first.layout.offset("key", block=1) == (0, 2 * first)
    assert kv.detect(shape, **sizes, among=["vllm/flash-attention-nhd"]).layout.offset("key", block=1) == (
        0,
        2 * kv_first,
    )
    # Strides that say which axis is outermost settle it: page-major hybrid memory.
    swapped = (kv_first, first, heads * dim, dim, 1)
    if tokens * heads > 1:
        reading = kv.detect(shape, strides=swapped, **sizes, head_size=dim)
        assert reading.layout.offset("key", block=1) == (0, 2 * first)
        assert reading.layout.offset("value") == (0, 2 * kv_first)


@pytest.mark.parametrize(("tokens", "dim"), [(16, 128), (32, 64), (8, 256)])
def test_two_heads(tokens: int, dim: int) -> None:
    """C04: split K/V and packed content have one shape where there are two heads."""
    shape = (7, tokens, 2, 2 * dim)
    for hints in (
        {},
        {"num_kv_heads": 2},
        {"num_kv_heads": 2, "head_size": dim},
        {"num_kv_heads": 2, "block_size": tokens},
    ):
        with pytest.raises(kv.AmbiguousLayout):
            kv.detect(shape, **hints)
    found = kv.candidates(shape, num_kv_heads=2, head_size=dim, block_size=tokens)
    heads = {r.layout.offset("key", head=1)[1] // 2 for r in found}
    assert {dim, 2 * dim} <= heads
    packed = kv.detect(shape, num_kv_heads=2, block_size=tokens, among=["vllm/packed-nhd"])
    assert packed.layout.offset("key", head=1) == (0, 2 * 2 * dim)
    flex = kv.detect(shape, num_kv_heads=2, head_size=dim, among=["vllm/flex-attention"])
    assert flex.layout.offset("key", head=1) == (0, 2 * dim)


CONTRACTS = [((2, 3), "KV B N H D"), ((3, 2), "B KV N H D")]


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(16, 1, 16), (16, 3, 16), (32, 8, 64)])
def test_three_contracts_of_one_backend(tokens: int, heads: int, dim: int) -> None:
    """C06: probe shapes of kv-first, blocks-first and packed releases."""
    hints = {"num_blocks": 3, "block_size": tokens, "num_kv_heads": heads, "head_size": dim}
    for outer, order in CONTRACTS:
        assert kv.detect((*outer, tokens, heads, dim), **hints).order == order
    strides = (heads * tokens * 2 * dim, tokens * 2 * dim, 2 * dim, 1)
    packed = kv.detect(
        (3, heads, tokens, 2 * dim), strides=strides, **hints, among=["vllm/packed-nhd", "vllm/packed-hnd"]
    )
    assert "vllm/packed-hnd" in packed.names
    assert packed.layout.offset("value", token=1) == (0, 2 * 3 * dim)
    with pytest.raises(kv.UnknownLayout, match=rf"\[3, 4, {tokens}, {heads}, {dim}\]"):
        kv.detect((3, 4, tokens, heads, dim), **hints)


def test_each_hint_must_agree() -> None:
    right = {"num_blocks": 7, "block_size": 16, "num_kv_heads": 3, "head_size": 32, "num_layers": 1}
    shape = (7, 2, 16, 3, 32)
    assert len(kv.candidates(shape)) > 1
    assert len(kv.candidates(shape, **right)) == 1
    for name in ("num_blocks", "block_size", "num_kv_heads", "head_size"):
        wrong = right | {name: right[name] + 1}
        assert kv.candidates(shape, **wrong) == []
        with pytest.raises(kv.UnknownLayout) as caught:
            kv.detect(shape, **wrong)
        assert "[7, 2, 16, 3, 32]" in str(caught.value)
        assert "vllm/flashinfer-nhd would need L=1,B=7,N=16,H=3,D=32" in str(caught.value)


def test_fused_dimensions_need_hints() -> None:
    for shape in [(7, 2, 16, 96), (7, 2, 48, 32), (7, 2 * 16, 3, 32), (7, 2 * 16 * 3 * 32)]:
        without = [r for r in kv.candidates(shape) if "vllm/flashinfer-nhd" in r.names]
        assert without == []
        hints = {"num_kv_heads": 3, "head_size": 32, "block_size": 16, "num_blocks": 7}
        fused = [r for r in kv.candidates(shape, **hints) if "vllm/flashinfer-nhd" in r.names]
        assert [str(r.layout) for r in fused] == ["B[7] KV N[16] H[3] D[32]"]
    # A size that the caller knows splits its neighbour.
    two = kv.detect((7, 2, 16, 96), head_size=32, among=["vllm/flashinfer-nhd"])
    assert two.geometry.num_kv_heads == 3
    assert kv.candidates((7, 2, 16, 96), head_size=33, among=["vllm/flashinfer-nhd"]) == []
    assert kv.candidates((7, 2, 16, 96), num_blocks=7, among=["vllm/flashinfer-nhd"]) == []
    # K and V of one head need none.
    assert kv.detect((7, 3, 16, 64), among=["vllm/packed-hnd"]).geometry.head_size == 32
    assert kv.candidates((7, 3, 16, 63), among=["vllm/packed-hnd"]) == []


def test_layers() -> None:
    """Without num_layers the tensor is one layer; with it, one tensor may hold all."""
    six = (4, 7, 2, 16, 3, 32)
    hints = {"block_size": 16, "num_kv_heads": 3, "head_size": 32, "num_blocks": 7}
    with pytest.raises(kv.UnknownLayout):
        kv.detect(six, **hints, among=["vllm"])
    strides = (3072, 4 * 3072, 1536, 96, 32, 1)
    reading = kv.detect(six, strides=strides, num_layers=4, **hints)
    assert reading.name == "vllm/cross-layer-nhd"
    assert reading.geometry.num_layers == 4
    assert reading.layout.offset("value", 3, 5, 2, 1, 7) == (0, 2 * (((5 * 4 + 3) * 2 + 1) * 1536 + 2 * 96 + 32 + 7))
    one = kv.detect((1, *six[1:]), num_layers=1, **hints, among=["vllm/cross-layer-nhd"])
    assert one.geometry.num_layers == 1


def test_strides_decide() -> None:
    """One shape, three memories."""
    shape = (7, 2, 16, 3, 32)
    hints = {"num_kv_heads": 3, "block_size": 16}
    orders = {
        (3072, 1536, 96, 32, 1): "B KV N H D",
        (3072, 1536, 32, 512, 1): "B KV H N D",
        (3072, 96, 192, 32, 1): "B N KV H D",
    }
    for strides, order in orders.items():
        reading = kv.detect(shape, strides=strides, **hints)
        assert reading.order == order
        assert reading.layout.offset("value", block=2, token=5, head=1, dim=9) == (
            0,
            2 * sum(i * s for i, s in zip((2, 1, 5, 1, 9), strides, strict=True)),
        )
    assert kv.detect(shape, **hints).order == kv.detect(shape, strides=(3072, 1536, 96, 32, 1), **hints).order


def test_padded_strides_and_axes_of_one() -> None:
    padded = kv.detect((7, 2, 16, 3, 32), strides=(4000, 1700, 100, 33, 1), num_kv_heads=3, block_size=16)
    assert str(padded.layout) == "B[7]@8000 KV@3400 N[16]@200 H[3]@66 D[32]"
    plain = kv.candidates((7, 2, 16, 1, 32), strides=(1024, 512, 32, 32, 1), block_size=16, num_kv_heads=1)
    for anything in (0, 1, 7, 10**6):
        other = kv.candidates((7, 2, 16, 1, 32), strides=(1024, 512, 32, anything, 1), block_size=16, num_kv_heads=1)
        assert [str(r.layout) for r in other] == [str(r.layout) for r in plain]
    reading = kv.detect((7, 2, 16, 1, 32), num_kv_heads=1, block_size=16)
    assert {"vllm/flashinfer-nhd", "vllm/flashinfer-hnd"} <= set(reading.names)  # one head: the same addresses


def test_among() -> None:
    shape = (7, 2, 16, 3, 32)
    both = kv.candidates(shape, among=["vllm/flashinfer-nhd", "vllm/flashinfer-hnd"])
    assert [r.name for r in both] == ["vllm/flashinfer-nhd", "vllm/flashinfer-hnd"]
    assert kv.detect(shape, among=["vllm/flashinfer-hnd"]).geometry.num_kv_heads == 16
    engine = {name for r in kv.candidates((2, 7, 16, 1, 3, 32), among=["sglang"]) for name in r.names}
    assert engine and all(name.startswith("sglang/") for name in engine)
    with pytest.raises(kv.UnknownLayout):
        kv.detect(shape, among=["vllm/mla"])
    for name, words in (("nope", "'nope'"), ("vllm/cpu-vec", "opaque"), ("", "''")):
        with pytest.raises(kv.LayoutError, match=words):
            kv.detect(shape, among=["vllm/flashinfer-nhd", name])


def test_opaque_rows_are_never_observed() -> None:
    """Tensors of opaque rows read as strided ones or not at all, and the answer says what it assumes."""
    for entry in kv.registry():
        if not entry.opaque:
            continue
        made = geometry_for(entry)
        layout = kv.layout(entry.name, made)
        shape, strides, item = declared_strides(entry, layout)
        hints = {name: getattr(made, name) for name in LETTERS if name != "num_layers"}
        dtype = {1: "u8", 2: "bf16", 4: "f32"}[item]
        for reading in kv.candidates(shape, strides=[s // item for s in strides], dtype=dtype, **hints):
            assert entry.name not in reading.names
            assert "strided" in reading.assumes


def test_pairs_of_tensors() -> None:
    key, value = np.zeros((7, 16, 3, 32), np.float16), np.zeros((7, 16, 3, 32), np.float16)
    reading = kv.detect((key, value), num_kv_heads=3, block_size=16)
    assert reading.name == "vllm/hpu"
    assert reading.layout.offset("value", block=1, head=2) == (1, 2 * (1536 + 64))
    with pytest.raises(kv.AmbiguousLayout, match=r"\[7, 16, 3, 32\].*\|.*vllm/hpu.*transformers/dynamic-cache"):
        kv.detect([key, value])
    llama = kv.detect([(16, 3, 32), (3, 32, 16)])
    assert llama.name == "llamacpp/no-flash"
    assert llama.layout.offset("value", token=5, head=1, dim=9) == (1, 2 * ((32 + 9) * 16 + 5))
    with pytest.raises(kv.UnknownLayout):
        kv.detect([(16, 3, 32), (3, 16, 32)])
    strided = kv.detect([(7, 16, 3, 32)] * 2, strides=[(3072, 96, 32, 1)] * 2, num_kv_heads=3, block_size=16)
    assert str(strided.layout) == "key: B[7]@6144 N[16] H[3] D[32] | value: B[7]@6144 N[16] H[3] D[32]"


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    hints = {"num_kv_heads": 3, "block_size": 16}
    nhd = torch.zeros(7, 2, 16, 3, 32, dtype=torch.bfloat16)
    assert kv.detect(nhd, **hints).order == "B KV N H D"
    hnd = torch.zeros(7, 2, 3, 16, 32, dtype=torch.float8_e4m3fn).transpose(2, 3)
    reading = kv.detect(hnd, **hints)
    assert reading.order == "B KV H N D"
    assert reading.layout.planes == {"key": "f8_e4m3", "value": "f8_e4m3"}
    flex = torch.zeros(7, 16, 2, 3, 32).permute(0, 2, 1, 3, 4)
    assert kv.detect(flex, **hints).layout.offset("value") == (0, 96 * 4)
    packed = torch.zeros(7, 16, 3, 64).permute(0, 2, 1, 3)
    assert kv.detect(packed, **hints, among=["vllm/packed-nhd", "vllm/packed-hnd"]).name == "vllm/packed-nhd"
    sliced = torch.zeros(7, 4, 16, 3, 32)[:, 1:3]
    assert str(kv.detect(sliced, **hints).layout) == "B[7]@24576 KV N[16] H[3] D[32]"
    assert kv.Cache(sliced, kv.detect(sliced, **hints).layout).key().data_ptr() == sliced.data_ptr()
    with pytest.raises(kv.ArgumentError, match="meta"):
        kv.detect(torch.zeros(7, 2, 16, 3, 32, device="meta"))


# --- What the errors say.


def test_ambiguous_says_everything() -> None:
    """Shape, strides, each reading with its order and sizes, and an element whose address differs."""
    shape = (2, 2, 16, 8, 64)
    found = kv.candidates(shape)
    with pytest.raises(kv.AmbiguousLayout) as caught:
        kv.detect(shape)
    message = str(caught.value)
    assert "\n" not in message
    assert "[2, 2, 16, 8, 64]" in message
    assert "[16384, 8192, 512, 64, 1]" in message
    assert len(found) >= 4
    for reading in found:
        g = reading.geometry
        assert f"{reading.name} = {reading.order}" in message
        assert f"B={g.num_blocks},N={g.block_size},H={g.num_kv_heads},D={g.head_size}" in message
    assert isinstance(caught.value, (kv.LayoutError, ValueError))
    # The example elements are true: block 1 of the kv-first reading.
    assert "KV B N H D [L=1,B=2,N=16,H=8,D=64,dtype=bf16] puts key(B=1, N=0, H=0, D=0) at byte 16384" in message


def test_ambiguous_carries_its_readings() -> None:
    """Those that `candidates` gives for the same question, of a shape, a tensor or a pair."""
    pair = [np.zeros((7, 16, 3, 32), np.float16)] * 2
    questions: list[tuple[Any, dict[str, Any]]] = [
        ((2, 2, 16, 8, 64), {}),
        ((2, 2, 16, 8, 64), {"num_kv_heads": 8, "among": ["vllm", "trtllm/pool"]}),
        (np.zeros((7, 16, 2, 256), np.float32), {}),
        (pair, {"num_blocks": 7}),
    ]
    for thing, hints in questions:
        with pytest.raises(kv.AmbiguousLayout) as caught:
            kv.detect(thing, **hints)
        found = kv.candidates(thing, **hints)
        assert len(found) > 1
        readings = caught.value.readings
        assert [(r.names, r.order, r.layout) for r in readings] == [(r.names, r.order, r.layout) for r in found]
    assert kv.AmbiguousLayout("of two sizes").readings == []


def test_among_may_be_any_iterable() -> None:
    names = ["vllm/flashinfer-nhd", "vllm/flash-attention-nhd"]
    for among in (names, tuple(names), iter(names), dict.fromkeys(names)):
        with pytest.raises(kv.AmbiguousLayout) as caught:
            kv.detect((2, 2, 16, 8, 64), among=among)
        assert [r.name for r in caught.value.readings] == names


def test_unknown_says_everything() -> None:
    for shape in [(3, 4, 16, 1, 16, 5), (3000,), (3, 5, 16, 3, 33), (3, 4, 5, 6, 7, 8, 9, 10)]:
        with pytest.raises(kv.UnknownLayout) as caught:
            kv.detect(shape, num_kv_heads=12345)
        message = str(caught.value)
        assert "\n" not in message
        assert f"[{', '.join(map(str, shape))}]" in message
        assert f"[{', '.join(map(str, contiguous(shape)))}]" in message
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, kv.LayoutError)


BAD = [
    (((),), {}, kv.ArgumentError, "rank 0"),
    (((2,) * 13,), {}, kv.ArgumentError, "13"),
    (((7, 2, 16, 3, 0),), {}, (kv.ArgumentError, kv.LayoutError), "0"),
    (((7, 2, 16, 3, -32),), {}, (kv.ArgumentError, kv.LayoutError), "-32"),
    (((7, 2, 16, 3, 1.5),), {}, kv.DTypeError, "1.5"),
    (((7, 2, 16, 3, True),), {}, kv.DTypeError, "True"),
    (((7, 2, 2**70, 3, 32),), {}, (kv.ArgumentError, kv.LayoutError), str(2**70)),
    (((2**40, 2, 2**40, 3, 8),), {}, kv.LayoutError, "2^62"),
    ((7,), {}, kv.ArgumentError, "int"),
    ((None,), {}, kv.ArgumentError, "None"),
    (("7,2,16,3,32",), {}, kv.ArgumentError, "str"),
    (((7, 2, 16, 3, 32),), {"strides": (1, 2)}, kv.ArgumentError, "2 strides.*rank 5"),
    (((7, 2, 16, 3, 32),), {"strides": (3072, -1536, 96, 32, 1)}, kv.ArgumentError, "-1536"),
    (((7, 2, 16, 3, 32),), {"strides": (3072, 1536, 96.5, 32, 1)}, kv.DTypeError, "96.5"),
    (((7, 2, 16, 3, 32),), {"num_kv_heads": 0}, kv.ArgumentError, "num_kv_heads is 0"),
    (((7, 2, 16, 3, 32),), {"head_size": -1}, kv.ArgumentError, "head_size is -1"),
    (((7, 2, 16, 3, 32),), {"num_layers": 0}, kv.ArgumentError, "num_layers is 0"),
    (((7, 2, 16, 3, 32),), {"block_size": 16.5}, kv.DTypeError, "16.5"),
    (((7, 2, 16, 3, 32),), {"num_blocks": "7"}, kv.DTypeError, "'7'"),
    (((7, 2, 16, 3, 32),), {"num_kv_heads": 2**70}, (kv.ArgumentError, kv.LayoutError), str(2**70)),
    (((7, 2, 16, 3, 32),), {"dtype": "bfloat16"}, kv.DTypeError, "bfloat16"),
    (((7, 2, 16, 3, 32),), {"among": ["no/such"]}, kv.LayoutError, "no/such"),
    (((7, 2, 16, 3, 32),), {"among": "no-such"}, (kv.LayoutError, kv.ArgumentError), "no-such"),
    (([(7, 16, 3, 32)] * 3,), {}, kv.ArgumentError, "pair"),
    (([(7, 16, 3, 32)] * 2,), {"strides": [(1536, 96, 32, 1)]}, kv.ArgumentError, "1 strides.*2 shapes"),
    (([(7, 16, 3, 32)] * 2,), {"strides": [1536, 96]}, kv.ArgumentError, "strides is 1536"),
    (([(7, 16, 3, 32)] * 2,), {"strides": 1536}, kv.ArgumentError, "strides is 1536"),
    (((7, 2, 16, 3, 32),), {"strides": 1}, kv.ArgumentError, "strides is 1"),
    (((7, 2, 16, 3, 32),), {"among": 3}, kv.ArgumentError, "among is 3"),
    (((7, 2, 16, 3, 32),), {"among": [None]}, kv.ArgumentError, "among is .None."),
]


@pytest.mark.parametrize(("arguments", "hints", "kind", "words"), BAD, ids=[f"{a[0]} {h}"[:60] for a, h, _, _ in BAD])
def test_bad_questions(arguments: tuple, hints: dict[str, Any], kind: Any, words: str) -> None:
    for ask_it in (kv.detect, kv.candidates):
        with pytest.raises(kind, match=words.replace("^", r"\^")) as caught:
            ask_it(*arguments, **hints)
        assert isinstance(caught.value, kv.Error)
        assert "\n" not in str(caught.value)


def test_a_tensor_has_its_own_strides() -> None:
    with pytest.raises(kv.ArgumentError, match="own strides"):
        kv.detect(np.zeros((7, 2, 16, 3, 32), np.float16), strides=(3072, 1536, 96, 32, 1))


def test_overlapping_strides_are_no_reading() -> None:
    for strides in [(0, 1536, 96, 32, 1), (10, 1536, 96, 32, 1), (3072, 1536, 32, 32, 1), (2**60, 1536, 96, 32, 1)]:
        assert (
            kv.candidates((7, 2, 16, 3, 32), strides=strides, num_kv_heads=3, block_size=16) == []
            or strides[0] == 2**60
        )


def test_no_crash_on_random_questions() -> None:
    """Shapes, strides and hints at random: an answer or one of the two errors."""
    rng = np.random.default_rng(1)
    counts = dict.fromkeys(["answer", "ambiguous", "unknown"], 0)
    for _ in range(3000):
        rank = int(rng.integers(1, 8))
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 6, 8, 16, 64, 576], rank))
        strides = None
        if rng.random() < 0.5:
            strides = contiguous(shape)
            order = list(rng.permutation(rank)) if rng.random() < 0.5 else list(range(rank))
            strides = tuple(int(strides[i]) + int(rng.integers(0, 3)) for i in order)
        hints = {name: int(rng.choice([1, 2, 3, 4, 8, 16, 64])) for name in LETTERS if rng.random() < 0.4}
        try:
            reading = kv.detect(shape, strides=strides, **hints)
            counts["answer"] += 1
            assert all(getattr(reading.geometry, name) == value for name, value in hints.items())
        except kv.AmbiguousLayout:
            counts["ambiguous"] += 1
            assert len(kv.candidates(shape, strides=strides, **hints)) > 1
        except kv.UnknownLayout:
            counts["unknown"] += 1
            assert kv.candidates(shape, strides=strides, **hints) == []
    assert min(counts.values()) > 20


def test_readings_are_distinct() -> None:
    for shape in itertools.product([2, 4], [2, 3], [2, 4], [2, 4], [4]):
        found = kv.candidates(shape, among=["vllm"])
        assert len({str(r.layout) + str(r.geometry) for r in found}) == len(found)
        for a, b in itertools.combinations(found, 2):
            assert a.layout != b.layout
