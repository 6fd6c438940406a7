# SPDX-License-Identifier: Apache-2.0
"""Every verb over random layouts with padding, gaps, scales and digits in any order; memory that is shared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvstride as kv
import oracle
from trees import Tree, trees

RULES = settings(max_examples=100, deadline=None)
PAIRS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=3, unique_by=lambda pair: pair[1])


def layout(tree: Tree) -> kv.Layout:
    """Two layers, three blocks of four tokens, two heads, eight dims."""
    sizes = {"num_layers": 2, "num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "head_size": 8}
    return kv.Layout(tree.text(), kv.Geometry(**sizes))


@st.composite
def pairs_of_layouts(draw: st.DrawFn) -> tuple[kv.Layout, kv.Layout]:
    """Two layouts of the same planes."""
    src, dst = layout(draw(trees())), layout(draw(trees()))
    assume(src.planes == dst.planes)
    return src, dst


@RULES
@given(pairs_of_layouts(), PAIRS, st.integers(0, 9))
def test_convert_and_plan(ends: tuple[kv.Layout, kv.Layout], pairs: list[tuple[int, int]], seed: int) -> None:
    src, dst = oracle.Memory(ends[0], seed, pad=5), oracle.Memory(ends[1], seed + 1, pad=3)
    before, want = src.copy(), dst.copy()
    oracle.convert(src, want, pairs)
    target = dst.copy()
    kv.convert_blocks(src.cache(), target.cache(), pairs)
    assert target.same(want)
    assert src.same(before)
    plan = kv.Plan(src.cache(), dst.cache()).bind(pairs)
    block = sum(oracle.item_size(t) * int(np.prod(ends[0].extents(p))) // 3 for p, t in ends[0].planes.items())
    assert plan.num_bytes == block * len(pairs) == sum(size * count for size, count in plan.sizes.items())
    assert plan.num_copies == sum(plan.sizes.values())
    assert kv.Plan(*ends).bind(pairs).num_bytes == plan.num_bytes
    for turn in range(2):
        for buffer, new in zip(src.buffers, oracle.Memory(ends[0], turn + 20, pad=5).buffers, strict=True):
            buffer[...] = new
        want = dst.copy()
        oracle.convert(src, want, pairs)
        plan.run()
        assert dst.same(want)


@RULES
@given(trees(), PAIRS, st.sampled_from([None, (0, 1), (1, 1), (0, 2)]))
def test_copy_and_zero(tree: Tree, pairs: list[tuple[int, int]], layers: tuple[int, int] | None) -> None:
    memory = oracle.Memory(layout(tree), 3, pad=9)
    want = memory.copy()
    oracle.convert(memory, want, pairs, layers)
    kv.copy_blocks(memory.cache(), pairs, layers=layers)
    assert memory.same(want)
    ids = [dst for _, dst in pairs]
    for plane, dtype in memory.layout.planes.items():
        for index in oracle.elements(memory.layout, plane):
            if index[1] in ids:
                want.set(plane, index, b"\0" * oracle.item_size(dtype))
    kv.zero_blocks(memory.cache(), ids)
    assert memory.same(want)


@RULES
@given(pairs_of_layouts(), st.lists(st.integers(0, 2), min_size=1, max_size=3), st.permutations(range(3)), st.data())
def test_token_sequences_and_heads(
    ends: tuple[kv.Layout, kv.Layout], src_blocks: list[int], dst_blocks: list[int], data: st.DataObject
) -> None:
    src, dst = oracle.Memory(ends[0], 1), oracle.Memory(ends[1], 2)
    count = data.draw(st.integers(0, 4 * len(src_blocks)))
    tokens = (data.draw(st.integers(0, 4 * len(src_blocks) - count)), data.draw(st.integers(0, 12 - count)), count)
    want = dst.copy()
    oracle.convert_tokens(src, want, src_blocks, dst_blocks, tokens)
    kv.convert_blocks(src.cache(), dst.cache(), src_blocks=src_blocks, dst_blocks=dst_blocks, tokens=tokens)
    assert dst.same(want)
    heads = data.draw(st.sampled_from([(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1), (0, 0, 2)]))
    layers = data.draw(st.sampled_from([None, (0, 1), (1, 1)]))
    oracle.convert(src, want, [(2, 0), (0, 1)], layers, heads)
    kv.convert_blocks(src.cache(), dst.cache(), [(2, 0), (0, 1)], heads=heads, layers=layers)
    assert dst.same(want)


@RULES
@given(trees(), st.lists(st.integers(0, 11), max_size=6))
def test_gather_and_scatter(tree: Tree, slots: list[int]) -> None:
    memory = oracle.Memory(layout(tree), 4)
    got = kv.gather_tokens(memory.cache(), slots)
    for plane in memory.layout.planes:
        layers, _, _, heads, dims = memory.layout.extents(plane)
        order = itertools.product(range(layers), slots, range(heads), range(dims))
        want = b"".join(memory.get(plane, (i, slot // 4, slot % 4, h, d)) for i, slot, h, d in order)
        assert np.ascontiguousarray(got[plane]).tobytes() == want
    once = list(dict.fromkeys(slots))
    other = oracle.Memory(memory.layout, 5, pad=4)
    expected = other.copy()
    for plane in memory.layout.planes:
        for index in oracle.elements(memory.layout, plane):
            if index[1] * 4 + index[2] in once:
                expected.set(plane, index, memory.get(plane, index))
    kv.scatter_tokens(other.cache(), once, kv.gather_tokens(memory.cache(), once))
    assert other.same(expected)


def touched(of: kv.Layout, blocks: set[int], start: int) -> set[tuple[int, int]]:
    """(tensor, byte) of every byte of these blocks."""
    out = set()
    for plane, dtype in of.planes.items():
        for index in oracle.elements(of, plane):
            if index[1] in blocks:
                tensor, byte = of.offset(plane, *index)
                out.update((tensor, start + byte + i) for i in range(oracle.item_size(dtype)))
    return out


def window(of: kv.Layout, buffers: list[np.ndarray], start: int) -> oracle.Memory:
    """A layout that starts somewhere in the buffers."""
    out = oracle.Memory.__new__(oracle.Memory)
    out.layout = of
    out.buffers = [buffer[start:] for buffer in buffers]
    return out


@RULES
@given(pairs_of_layouts(), PAIRS, st.sampled_from([0, 0, 2, 64]), st.data())
def test_shared_memory_is_an_error_exactly_where_bytes_meet(
    ends: tuple[kv.Layout, kv.Layout], pairs: list[tuple[int, int]], shift: int, data: st.DataObject
) -> None:
    """Two caches over one buffer: refused, with nothing written, where a byte that is read is also written."""
    src, dst = (ends[0], ends[0]) if data.draw(st.booleans()) else ends
    assume(src.layered == dst.layered)
    span = max(src.num_bytes, dst.num_bytes)
    start = data.draw(st.sampled_from([0, 2, 8, 32, span // 2 + span // 2 % 2]))
    buffers = [np.random.default_rng(i).integers(0, 256, 3 * span + 70, dtype=np.uint8) for i in range(src.num_tensors)]
    want = [buffer.copy() for buffer in buffers]
    ends_of_memory = window(src, buffers, shift), window(dst, buffers, start)
    meet = touched(src, {s for s, _ in pairs}, shift) & touched(dst, {d for _, d in pairs}, start)
    if meet:
        with pytest.raises(kv.ArgumentError, match="share memory"):
            kv.convert_blocks(ends_of_memory[0].cache(), ends_of_memory[1].cache(), pairs)
    else:
        oracle.convert(window(src, [b.copy() for b in buffers], shift), window(dst, want, start), pairs)
        kv.convert_blocks(ends_of_memory[0].cache(), ends_of_memory[1].cache(), pairs)
    assert all(np.array_equal(got, expected) for got, expected in zip(buffers, want, strict=True))
