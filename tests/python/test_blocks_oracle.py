# SPDX-License-Identifier: Apache-2.0
"""Every verb against the naive oracle over random layouts of the notation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstride as kv
import oracle

settings.register_profile("kvstride", deadline=None, max_examples=150)
settings.load_profile("kvstride")

DTYPES = ["f32", "f16", "bf16", "f8_e4m3", "i8", "i32"]


@st.composite
def orders(draw: st.DrawFn, axes: str = "LBNH") -> str:
    """A random order with K and V: permuted axes, the split in any place, splits of N, H and D, other V interiors."""
    letters = list(draw(st.permutations(list(axes) + ["D"])))
    if draw(st.booleans()):
        letters.remove("L")
    cut = draw(st.integers(0, len(letters)))

    def split(terms: list[str], which: dict[str, int]) -> list[str]:
        out: list[str] = []
        for term in terms:
            if term in which:
                out += [f"{term}/{which[term]}"]
            else:
                out.append(term)
        for term, size in which.items():
            if term in terms:
                at = draw(st.integers(out.index(f"{term}/{size}") + 1, len(out)))
                out.insert(at, f"{term}%{size}")
        return out

    which = {t: s for t, s in (("N", 2), ("D", 4), ("H", 2)) if draw(st.booleans())}
    outer, inner = letters[:cut], letters[cut:]
    if draw(st.booleans()):
        inner_text = " ".join(split(inner, {k: v for k, v in which.items() if k in inner}))
        return " ".join(split(outer, {k: v for k, v in which.items() if k in outer}) + ["KV", inner_text]).strip()
    other = list(draw(st.permutations(inner)))
    key = " ".join(split(inner, {k: v for k, v in which.items() if k in inner}))
    value = " ".join(split(other, {k: v for k, v in which.items() if k in other and draw(st.booleans())}))
    if not key:
        return " ".join([*letters[:-1], "KV", letters[-1]])
    return " ".join([*outer, f"{{key: {key}, value: {value}}}"]).strip()


def geometry(layers: int = 2, blocks: int = 5, tokens: int = 4, heads: int = 2, dim: int = 8, dtype: str = "bf16"):
    """Small odd sizes that the splits of `orders` divide."""
    return kv.Geometry(
        num_layers=layers, num_blocks=blocks, block_size=tokens, num_kv_heads=heads, head_size=dim, dtype=dtype
    )


def pairs_of(blocks: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Pairs without a destination given twice."""
    return st.lists(
        st.tuples(st.integers(0, blocks - 1), st.integers(0, blocks - 1)), max_size=blocks, unique_by=lambda p: p[1]
    )


@given(orders(), orders(), st.sampled_from(DTYPES), pairs_of(5), st.integers(0, 2**32 - 1))
def test_convert_blocks(src_order: str, dst_order: str, dtype: str, pairs: list[tuple[int, int]], seed: int) -> None:
    g = geometry(dtype=dtype)
    src = oracle.Memory(kv.Layout(src_order, g), seed)
    dst = oracle.Memory(kv.Layout(dst_order, g))
    want = dst.copy()
    before = src.copy()
    oracle.convert(src, want, pairs)
    kv.convert_blocks(src.cache(), dst.cache(), pairs)
    assert dst.same(want)
    assert src.same(before)


@given(orders(), st.sampled_from(DTYPES), pairs_of(6), st.integers(0, 2**32 - 1))
def test_copy_blocks_reads_before_it_writes(order: str, dtype: str, pairs: list[tuple[int, int]], seed: int) -> None:
    g = geometry(blocks=6, dtype=dtype)
    memory = oracle.Memory(kv.Layout(order, g), seed)
    want = memory.copy()
    oracle.convert(memory, want, pairs)
    kv.copy_blocks(memory.cache(), pairs)
    assert memory.same(want)


@given(orders(), orders(), st.data(), st.integers(0, 2**32 - 1))
def test_heads_and_layers(src_order: str, dst_order: str, data: st.DataObject, seed: int) -> None:
    src = oracle.Memory(kv.Layout(src_order, geometry(heads=4)), seed)
    dst = oracle.Memory(kv.Layout(dst_order, geometry(heads=2)))
    count = data.draw(st.integers(1, 2))
    heads = (data.draw(st.integers(0, 4 - count)), data.draw(st.integers(0, 2 - count)), count)
    layers = data.draw(st.sampled_from([None, (0, 1), (1, 1), (0, 2), (1, 0)]))
    want = dst.copy()
    oracle.convert(src, want, [(1, 0), (4, 2)], layers, heads)
    kv.convert_blocks(src.cache(), dst.cache(), [(1, 0), (4, 2)], heads=heads, layers=layers)
    assert dst.same(want)


@given(orders(), orders(), st.sampled_from([(4, 4), (4, 8), (8, 4), (4, 6), (6, 10), (2, 6)]), st.data())
def test_token_sequences(src_order: str, dst_order: str, sizes: tuple[int, int], data: st.DataObject) -> None:
    src = oracle.Memory(kv.Layout(src_order, geometry(blocks=4, tokens=sizes[0])), data.draw(st.integers(0, 99)))
    dst = oracle.Memory(kv.Layout(dst_order, geometry(blocks=4, tokens=sizes[1])))
    src_blocks = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    dst_blocks = data.draw(st.permutations(range(4)))
    room = min(len(src_blocks) * sizes[0], 4 * sizes[1])
    count = data.draw(st.integers(0, room))
    first_src = data.draw(st.integers(0, len(src_blocks) * sizes[0] - count))
    first_dst = data.draw(st.integers(0, 4 * sizes[1] - count))
    tokens = (first_src, first_dst, count)
    want = dst.copy()
    oracle.convert_tokens(src, want, src_blocks, dst_blocks, tokens)
    kv.convert_blocks(src.cache(), dst.cache(), src_blocks=src_blocks, dst_blocks=dst_blocks, tokens=tokens)
    assert dst.same(want)


@given(orders(), st.sampled_from(DTYPES), st.lists(st.integers(0, 19), max_size=12), st.integers(0, 99))
def test_gather_and_scatter(order: str, dtype: str, slots: list[int], seed: int) -> None:
    memory = oracle.Memory(kv.Layout(order, geometry(dtype=dtype)), seed)
    got = kv.gather_tokens(memory.cache(), slots)
    layout = memory.layout
    for plane in layout.planes:
        layers, _, _, heads, dims = layout.extents(plane)
        assert got[plane].shape == (layers, len(slots), heads, dims)
        flat = np.ascontiguousarray(got[plane]).view(np.uint8).reshape(-1)
        want = b"".join(
            memory.get(plane, (layer, slot // 4, slot % 4, h, e))
            for layer in range(layers)
            for slot in slots
            for h in range(heads)
            for e in range(dims)
        )
        assert flat.tobytes() == want
    unique = list(dict.fromkeys(slots))
    other = oracle.Memory(layout)
    want_memory = other.copy()
    for plane in layout.planes:
        for layer, slot, h, e in itertools.product(range(2), unique, range(2), range(8)):
            index = (layer, slot // 4, slot % 4, h, e)
            want_memory.set(plane, index, memory.get(plane, index))
    kv.scatter_tokens(other.cache(), unique, kv.gather_tokens(memory.cache(), unique))
    assert other.same(want_memory)


@given(orders(), st.lists(st.integers(0, 4), unique=True), st.integers(0, 99))
def test_zero_blocks(order: str, ids: list[int], seed: int) -> None:
    memory = oracle.Memory(kv.Layout(order, geometry()), seed, pad=7)
    want = memory.copy()
    for plane in memory.layout.planes:
        for index in oracle.elements(memory.layout, plane):
            if index[1] in ids:
                want.set(plane, index, b"\0\0")
    kv.zero_blocks(memory.cache(), ids)
    assert memory.same(want)


@given(orders(), st.lists(st.integers(-3, 19), max_size=8), st.integers(0, 99), st.booleans())
def test_write_tokens(order: str, slots: list[int], seed: int, strided: bool) -> None:
    used = [s for s in slots if s >= 0]
    memory = oracle.Memory(kv.Layout(order, geometry()), seed)
    rng = np.random.default_rng(seed)
    n = len(slots) + 2
    if strided:
        qkv = rng.integers(0, 65536, (n, 5, 8), dtype=np.uint16)
        key, value = qkv[:, 1:3], qkv[:, 3:5]
    else:
        key, value = rng.integers(0, 65536, (2, n, 2, 8), dtype=np.uint16)
    if len(set(used)) != len(used):
        with pytest.raises(kv.ArgumentError, match="given twice"):
            kv.write_tokens(memory.cache(), 1, key, value, slots)
        return
    want = memory.copy()
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        for h, e in itertools.product(range(2), range(8)):
            want.set("key", (1, slot // 4, slot % 4, h, e), key[i, h, e].tobytes())
            want.set("value", (1, slot // 4, slot % 4, h, e), value[i, h, e].tobytes())
    kv.write_tokens(memory.cache(), 1, key, value, slots)
    assert memory.same(want)


@given(orders(), st.sampled_from(DTYPES), st.integers(0, 99))
def test_views_show_the_elements(order: str, dtype: str, seed: int) -> None:
    memory = oracle.Memory(kv.Layout(order, geometry(dtype=dtype)), seed)
    cache = memory.cache()
    for plane in memory.layout.planes:
        for layer in range(2):
            try:
                view = cache.key(layer) if plane == "key" else cache.value(layer)
            except kv.NotStrided as error:
                assert "cache.plane" in str(error)
                view = cache.plane(layer, plane).reshape(5, 4, 2, 8)
            want = [memory.get(plane, (layer, *i)) for i in np.ndindex(5, 4, 2, 8)]
            assert np.ascontiguousarray(view).tobytes() == b"".join(want)


@given(orders(), st.sampled_from(DTYPES))
def test_canonical_text_is_the_layout(order: str, dtype: str) -> None:
    g = geometry(dtype=dtype)
    layout = kv.Layout(order, g)
    again = kv.Layout(str(layout), g)
    assert again == layout
    assert str(again) == str(layout)
    assert all(again.offset(p, *i) == layout.offset(p, *i) for p in layout.planes for i in oracle.elements(layout, p))


RECORDS = [
    "B N {latent: D[24], rope: D[8]}",
    "B N {latent: D[16] f8_e4m3, latent_scale: D[4] f32, rope: D[8] bf16}",
    "B N@56 {latent: D[32] f8_e4m3, rope: D[8] bf16, latent_scale: D[7] f8_e8m0}",
]


@pytest.mark.parametrize(
    ("src_order", "dst_order"), list(itertools.permutations(["B N X", "L B N X", "B L N X", "B X"], 2))
)
def test_replicated_records(src_order: str, dst_order: str) -> None:
    """MLA planes have no H: they are copied whole whatever the head range."""
    g = geometry(heads=4)
    record = "{latent: N D[16] f8_e4m3, latent_scale: N D[1] f32, rope: N D[8] bf16}"
    texts = [
        o.replace("N X", "X").replace("X", record) if o == "B X" else o.replace("N X", record)
        for o in (src_order, dst_order)
    ]
    src = oracle.Memory(kv.Layout(texts[0], g), 5)
    dst = oracle.Memory(kv.Layout(texts[1], g))
    want = dst.copy()
    oracle.convert(src, want, [(0, 4), (3, 1)])
    kv.convert_blocks(src.cache(), dst.cache(), [(0, 4), (3, 1)], heads=(0, 2, 2))
    assert dst.same(want)


@pytest.mark.parametrize("order", RECORDS)
def test_records_token_by_token(order: str) -> None:
    g = geometry()
    src = oracle.Memory(kv.Layout(order, g), 5)
    dst = oracle.Memory(kv.Layout(order, geometry(tokens=6)))
    want = dst.copy()
    oracle.convert_tokens(src, want, [4, 0, 1], [3, 1], (1, 2, 10))
    kv.convert_blocks(src.cache(), dst.cache(), src_blocks=[4, 0, 1], dst_blocks=[3, 1], tokens=(1, 2, 10))
    assert dst.same(want)
