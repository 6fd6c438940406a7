# SPDX-License-Identifier: Apache-2.0
"""Faults of the field that come from a wrong layout, each as its kind; numbers as in the collection of cases."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import kvstride as kv
import oracle
from kvstride.vllm import name_layout

#: Layouts of one layer's keys and values, with the axes of their natural tensor.
LAYOUTS = {
    "B KV N H D": "BKNHD",
    "B KV H N D": "BKHND",
    "KV B N H D": "KBNHD",
    "KV B H N D": "KBHND",
    "B N KV H D": "BNKHD",
    "B N H KV D": "BNHKD",
    "B H N KV D": "BHNKD",
    "H B N KV D": "HBNKD",
    "KV H B N D": "KHBND",
    "N B KV H D": "NBKHD",
}
#: (blocks, tokens, heads, dim)
SIZES = [(5, 4, 3, 8), (2, 2, 2, 2), (7, 1, 2, 4), (6, 16, 1, 8), (5, 3, 5, 3)]


def numbers(blocks: int, tokens: int, heads: int, dim: int) -> np.ndarray:
    """[block, K/V, token, head, dim] = 1 + flat index: the fixture of the cases at any size."""
    return np.arange(1, 2 * blocks * tokens * heads * dim + 1, dtype=np.int32).reshape(blocks, 2, tokens, heads, dim)


def as_layout(data: np.ndarray, order: str) -> np.ndarray:
    """The numbers in the memory of a layout: a contiguous tensor of its natural shape."""
    axes = LAYOUTS[order]
    return data.transpose(["BKNHD".index(a) for a in axes]).copy()


def as_blocks(tensor: np.ndarray, order: str) -> np.ndarray:
    """[block, K/V, token, head, dim] of a tensor of a layout."""
    return tensor.transpose([LAYOUTS[order].index(a) for a in "BKNHD"])


def cache_of(tensor: np.ndarray, order: str, size: tuple[int, int, int, int]) -> kv.Cache:
    """A cache over the tensor, which nothing is left to guess of."""
    return kv.Cache(tensor, order, geometry=geometry(*size, dtype="i32"))


def geometry(blocks: int, tokens: int, heads: int, dim: int, dtype: str = "bf16", **more: int) -> kv.Geometry:
    """A geometry from the four sizes."""
    return kv.Geometry(num_blocks=blocks, block_size=tokens, num_kv_heads=heads, head_size=dim, dtype=dtype, **more)


# --- C01


def test_c01_block_swap_on_the_block_axis(field_fixture: np.ndarray) -> None:
    """The example: blocks-first F, map (0,3), (4,1)."""
    target = np.zeros_like(field_fixture)
    kv.swap_blocks(kv.Cache(field_fixture, "B KV N H D"), kv.Cache(target, "B KV N H D"), [(0, 3), (4, 1)])
    assert (target[3] == field_fixture[0]).all()
    assert (target[1] == field_fixture[4]).all()
    assert not target[[0, 2, 4]].any()
    assert target.sum() == 184512
    assert np.count_nonzero(target) == 384


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("order", LAYOUTS)
def test_c01_block_swap_in_every_layout(order: str, size: tuple[int, int, int, int]) -> None:
    """Whole blocks move in each layout, between caches and inside one."""
    data = numbers(*size)
    last = size[0] - 1
    pairs = [(0, last), (last, 0)]
    want = np.zeros_like(data)
    for s, d in pairs:
        want[d] = data[s]
    source, target = as_layout(data, order), as_layout(np.zeros_like(data), order)
    kv.swap_blocks(cache_of(source, order, size), cache_of(target, order, size), pairs)
    np.testing.assert_array_equal(as_blocks(target, order), want)
    np.testing.assert_array_equal(as_blocks(source, order), data)
    kv.copy_blocks(cache_of(source, order, size), pairs)
    want = data.copy()
    want[[last, 0]] = data[[0, last]]
    np.testing.assert_array_equal(as_blocks(source, order), want)


def old_swap(source: np.ndarray, target: np.ndarray, pairs: list[tuple[int, int]]) -> None:
    """vLLM's kernel of old over K/V views: steps by src[0].numel(), ignores strides."""
    size = source[0].size
    flat_source = np.lib.stride_tricks.as_strided(source, (source.base.size,), (4,))
    flat_target = np.lib.stride_tricks.as_strided(target, (target.base.size,), (4,))
    for s, d in pairs:
        flat_target[d * size : (d + 1) * size] = flat_source[s * size : (s + 1) * size]


def test_c01_control_wrong_kernels(field_fixture: np.ndarray) -> None:
    """What the two public wrong codes do: the K/V-axis swap, and the proposed fix with kv[:, 0] and kv[:, 1] views."""
    target = np.zeros_like(field_fixture)
    with pytest.raises(IndexError):
        for s, d in [(0, 3), (4, 1)]:
            target[:, d] = field_fixture[:, s]
    target = np.zeros(field_fixture.size, np.int32).reshape(field_fixture.shape)
    source = field_fixture.ravel().reshape(field_fixture.shape)
    for half in (0, 1):
        old_swap(source[:, half], target[:, half], [(0, 3)])
    assert not (target[3] == field_fixture[0]).all()
    assert target[1, 1].any()  # V of block 1 …
    assert target[2, 0].any()  # … and K of block 2 are overwritten instead
    assert not target[3].any()
    right = np.zeros_like(field_fixture)
    kv.swap_blocks(kv.Cache(field_fixture, "B KV N H D"), kv.Cache(right, "B KV N H D"), [(0, 3)])
    assert (right[3] == field_fixture[0]).all()
    assert np.count_nonzero(right) == 192
    # The same two views, told as what they are: a strided K and a strided V tensor.
    views = np.zeros_like(field_fixture)
    order = "key: B N H D | value: B N H D"
    kv.swap_blocks(
        kv.Cache((field_fixture[:, 0], field_fixture[:, 1]), order),
        kv.Cache((views[:, 0], views[:, 1]), order),
        [(0, 3)],
    )
    np.testing.assert_array_equal(views, right)


# --- C02


def test_c02_host_staging_of_one_block(field_fixture: np.ndarray) -> None:
    """Block 1 of F: exactly its 192 elements change; the wrong axis changes 480."""
    target = np.zeros_like(field_fixture)
    kv.swap_blocks(kv.Cache(field_fixture, "B KV N H D"), kv.Cache(target, "B KV N H D"), [(1, 1)])
    assert np.count_nonzero(target) == 192
    np.testing.assert_array_equal(target[1], field_fixture[1])
    wrong = np.zeros_like(field_fixture)
    wrong[:, [1]] = field_fixture[:, [1]]
    assert np.count_nonzero(wrong) == 480
    with pytest.raises(IndexError):
        wrong[:, [3]] = field_fixture[:, [3]]
    kv.swap_blocks(kv.Cache(field_fixture, "B KV N H D"), kv.Cache(target, "B KV N H D"), [(3, 3)])
    assert np.count_nonzero(target) == 384


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("order", "host"), [*zip(LAYOUTS, LAYOUTS, strict=True), *itertools.permutations(list(LAYOUTS)[:5], 2)]
)
def test_c02_every_block_id_in_every_layout(order: str, host: str, size: tuple[int, int, int, int]) -> None:
    """Each id moves its own block to a host cache and back, whatever the two layouts are."""
    data = numbers(*size)
    device = as_layout(data, order)
    for block in range(size[0]):
        staging = as_layout(np.zeros_like(data), host)
        kv.convert_blocks(cache_of(device, order, size), cache_of(staging, host, size), [(block, block)])
        want = np.zeros_like(data)
        want[block] = data[block]
        np.testing.assert_array_equal(as_blocks(staging, host), want)
        back = as_layout(np.zeros_like(data), order)
        kv.convert_blocks(cache_of(staging, host, size), cache_of(back, order, size), [(block, block)])
        np.testing.assert_array_equal(as_blocks(back, order), want)


# --- C03


@pytest.mark.parametrize("inner", [(4, 3, 8), (16, 8, 64), (1, 1, 2), (2, 2, 2), (64, 1, 128)], ids=str)
def test_c03_two_blocks_are_never_guessed(inner: tuple[int, int, int]) -> None:
    shape = (2, 2, *inner)
    half = inner[0] * inner[1] * inner[2]
    hints = dict(zip(("block_size", "num_kv_heads", "head_size"), inner, strict=True))
    for known in ({}, hints, hints | {"num_blocks": 2}):
        with pytest.raises(kv.AmbiguousLayout) as caught:
            kv.detect(shape, **known)
        assert "vllm/flashinfer-nhd" in str(caught.value)
        assert "vllm/flash-attention-nhd" in str(caught.value)
    array = np.arange(4 * half, dtype=np.int32).reshape(shape)
    g = geometry(2, *inner, dtype="i32")
    for name, first in (("vllm/flashinfer-nhd", 2 * half), ("vllm/flash-attention-nhd", half)):
        reading = kv.detect(array, among=[name], **hints)
        assert reading.layout.offset("key", block=1) == (0, 4 * first)
        for layout in (name, reading.order):
            cache = kv.Cache(array, layout, geometry=g)
            assert cache.key()[1, 0, 0, 0] == first
            assert cache.value()[0, 0, 0, 0] == (half if first != half else 2 * half)


def test_c03_the_example() -> None:
    """Shape (2,2,4,3,8): K of block 1 starts at 192 or at 96."""
    array = np.arange(384, dtype=np.int32).reshape(2, 2, 4, 3, 8)
    assert kv.Cache(array, "vllm/flashinfer-nhd").key()[1, 0, 0, 0] == 192
    assert kv.Cache(array, "vllm/flash-attention-nhd").key()[1, 0, 0, 0] == 96


# --- C04


@pytest.mark.parametrize(("blocks", "tokens", "dim"), [(7, 16, 128), (3, 8, 64), (2, 2, 4), (5, 32, 96)])
def test_c04_two_heads_look_like_packed(blocks: int, tokens: int, dim: int) -> None:
    """(blocks, tokens, 2, 2·dim): head 1 starts at dim in a token (K/V split) or at 2·dim (packed)."""
    shape = (blocks, tokens, 2, 2 * dim)
    for known in ({}, {"num_kv_heads": 2}, {"num_kv_heads": 2, "head_size": dim}):
        with pytest.raises(kv.AmbiguousLayout):
            kv.detect(shape, **known)
    array = np.arange(blocks * tokens * 4 * dim, dtype=np.int32).reshape(shape)
    g = geometry(blocks, tokens, 2, dim, dtype="i32")
    for name, step, value in (("vllm/flex-attention", dim, 2 * dim), ("vllm/diffkv-nhd", 2 * dim, dim)):
        cache = kv.Cache(array, name, geometry=g)
        assert cache.layout.offset("key", head=1) == (0, 4 * step)
        assert cache.key()[0, 0, 1, 0] == step
        assert cache.value()[0, 0, 0, 0] == value
        assert cache.value()[blocks - 1, tokens - 1, 1, dim - 1] == array.size - 1  # both end at the same element


# --- C06


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(16, 1, 16), (16, 4, 16), (32, 8, 64), (8, 3, 4)])
def test_c06_three_contracts_of_one_backend(tokens: int, heads: int, dim: int) -> None:
    """kv-first, blocks-first and packed: each probe shape is told apart, and the same K and V come out of all three."""
    hints = {"num_blocks": 3, "block_size": tokens, "num_kv_heads": heads, "head_size": dim}
    data = numbers(3, tokens, heads, dim)
    among = ["vllm/flash-attention-nhd", "vllm/flashinfer-nhd", "vllm/packed-hnd"]
    tensors = {
        among[0]: np.ascontiguousarray(data.transpose(1, 0, 2, 3, 4)),
        among[1]: data,
        among[2]: np.ascontiguousarray(data.transpose(0, 3, 2, 1, 4)).reshape(3, heads, tokens, 2 * dim),
    }
    for name, tensor in tensors.items():
        reading = kv.detect(tensor, among=among, **hints)
        assert name in reading.names
        cache = kv.Cache(tensor, reading.layout)
        np.testing.assert_array_equal(cache.key(), data[:, 0])
        np.testing.assert_array_equal(cache.value(), data[:, 1])
    assert [t.shape for t in tensors.values()][:2] == [(2, 3, tokens, heads, dim), (3, 2, tokens, heads, dim)]
    with pytest.raises(kv.UnknownLayout):
        kv.detect((3, 4, tokens, heads, dim), among=among, **hints)
    # The plug-in that kept the oldest contract unbinds axis 0: two blocks even give two tensors of the right shape.
    two = np.ascontiguousarray(data[:2])
    cache = kv.Cache(two, among[1], geometry=geometry(2, tokens, heads, dim, dtype="i32"))
    np.testing.assert_array_equal(cache.key(), data[:2, 0])
    assert not np.array_equal(cache.key(), two[0]) and not np.array_equal(cache.value(), two[1])


# --- C07


def test_c07_permuted_memory_address() -> None:
    """The example: index (1,2,3,4,5) of a permuted view."""
    strides = (477495296, 65536, 128, 8192, 1)
    g = geometry(7286, 64, 8, 128)
    reading = kv.detect((2, 7286, 64, 8, 128), strides=strides, num_kv_heads=8, block_size=64)
    assert reading.name == "vllm/flash-attention-hnd"
    assert reading.layout.offset("value", block=2, token=3, head=4, dim=5) == (0, 2 * 477659525)
    assert kv.layout("vllm/flash-attention-hnd", g).offset("value", block=2, token=3, head=4, dim=5) == (
        0,
        2 * 477659525,
    )
    assert kv.layout("vllm/flash-attention-nhd", g).offset("value", block=2, token=3, head=4, dim=5) == (
        0,
        2 * 477629957,
    )


@pytest.mark.parametrize("size", [(5, 4, 3, 8), (7, 1, 2, 4), (6, 16, 1, 8), (3, 5, 4, 3)], ids=str)
def test_c07_every_permuted_view(size: tuple[int, int, int, int]) -> None:
    """A tensor of logical shape over another memory is read by its strides, or refused; never as if contiguous."""
    data = numbers(*size)
    rows = ("vllm/flashinfer-nhd", "vllm/flashinfer-hnd", "vllm/flash-attention-nhd", "vllm/flash-attention-hnd")
    read = refused = 0
    for order, logical, row in itertools.product(LAYOUTS, ("BKNHD", "KBNHD"), rows):
        view = as_layout(data, order).transpose([LAYOUTS[order].index(a) for a in logical])
        try:
            cache = kv.Cache(view, row, geometry=geometry(*size, dtype="i32"))
        except kv.LayoutError:
            refused += 1
            continue
        read += 1
        np.testing.assert_array_equal(cache.key(), data[:, 0])
        np.testing.assert_array_equal(cache.value(), data[:, 1])
    assert read >= 4
    assert refused > 40


# --- C10


def test_c10_zeroing_one_block_of_one_layer() -> None:
    """The example: ones (3,2,16), blocks × layers; block 1 of layer 0."""
    ones = np.ones((3, 2, 16), np.float32)
    order = "B {latent: D}"
    g = geometry(3, 1, 1, 16, dtype="f32")
    kv.zero_blocks(kv.Cache(ones[:, 0], order, geometry=g), [1])
    assert ones.sum() == 80
    assert not ones[1, 0].any()
    wrong = np.ones((3, 2, 16), np.float32)
    wrong.reshape(-1)[1 * 16 : 2 * 16] = 0  # the block's own size as the step between blocks
    assert wrong[1, 0].all() and not wrong[0, 1].any()


@pytest.mark.parametrize(
    "order",
    ["B L KV N H D", "B H L KV N D", "L B KV N H D", "B KV H L N D", "B L N H KV D", "KV L B N H D", "L H B N KV D"],
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_c10_zeroing_in_shared_pages(order: str, size: tuple[int, int, int, int]) -> None:
    """One block in all layers, or in one layer's view; every other cell keeps its value, padding included."""
    layers = 3
    g = geometry(*size, dtype="i32", num_layers=layers)
    layout = kv.Layout(order, g)
    memory = oracle.Memory(layout, 7, pad=12)
    before = memory.copy()
    block = size[0] - 1
    kv.zero_blocks(memory.cache(), [block])
    zero = (0).to_bytes(4, "little")
    changed = 0
    for plane in layout.planes:
        for index in oracle.elements(layout, plane):
            want = zero if index[1] == block else before.get(plane, index)
            assert memory.get(plane, index) == want
            changed += index[1] == block
    assert changed == layers * 2 * size[1] * size[2] * size[3]
    assert (memory.buffers[0] != before.buffers[0]).sum() <= 4 * changed
    assert (memory.buffers[0][-12:] == before.buffers[0][-12:]).all()
    # One layer of the same page through its own strided view.
    memory = before.copy()
    key = kv.Cache(memory.buffers[0], layout).key(1)
    axes = sorted(range(3), key=lambda axis: -key.strides[axis])
    text = " ".join("BNH"[axis] for axis in axes) + " {key: D}"
    kv.zero_blocks(kv.Cache(key.transpose(*axes, 3), text, geometry=geometry(*size, dtype="i32")), [block])
    assert not key[block].any()
    for plane in layout.planes:
        for index in oracle.elements(layout, plane):
            cleared = plane == "key" and index[0] == 1 and index[1] == block
            assert memory.get(plane, index) == (zero if cleared else before.get(plane, index))


# --- C14


def swizzled(token: int, column: int, columns: int) -> int:
    """vLLM 0.32's swizzle of V scales: groups of four tokens by columns."""
    group = columns // 4
    return ((token // 4) * 4 + column // group) * columns + (column % group) * 4 + token % 4


@pytest.mark.parametrize("heads", [8, 6, 4, 3, 1])
@pytest.mark.parametrize(("tokens", "dim"), [(16, 128), (32, 64), (8, 256)])
def test_c14_nvfp4_addresses(heads: int, tokens: int, dim: int) -> None:
    """Block size is not the second axis of an HND cache, heads need not divide by 4, K and V scales differ."""
    g = geometry(2, tokens, heads, dim)
    data, scales = dim // 2, dim // 16
    layout = kv.layout("vllm/nvfp4-hnd-sm100", g)
    side = heads * tokens * (data + scales)
    assert layout.num_bytes == 2 * 2 * side
    assert layout.extents("key") == (1, 2, tokens, heads, data)
    assert layout.extents("value_scale") == (1, 2, tokens, heads, scales)
    differs = 0
    for b, n, h in itertools.product(range(2), range(tokens), range(heads)):
        for plane, half in (("key", 0), ("value", 1)):
            base = (2 * b + half) * side
            for d in (0, data - 1):
                assert layout.offset(plane, block=b, token=n, head=h, dim=d) == (0, base + (h * tokens + n) * data + d)
            for c in range(scales):
                inner = n * scales + c if half == 0 else swizzled(n, c, scales)
                want = base + heads * tokens * data + h * tokens * scales + inner
                assert layout.offset(f"{plane}_scale", block=b, token=n, head=h, dim=c) == (0, want)
                differs += half == 1 and inner != n * scales + c
    assert differs > 0  # mixing K's linear scales and V's swizzled ones up would be seen
    linear = kv.layout("vllm/nvfp4-hnd-fa2", g)
    assert linear != layout
    assert linear.offset("value_scale", token=1) == (0, side + heads * tokens * data + scales)


def test_c14_the_declared_tensor() -> None:
    """(NB, 2·NH, BS, 72) bytes at head size 128: 16 tokens, not 8 heads, whatever NH is."""
    for heads in (8, 6):
        tensor = np.zeros((3, 2 * heads, 16, 72), np.uint8)
        cache = kv.Cache(tensor, "vllm/nvfp4-hnd-sm100", geometry=geometry(3, 16, heads, 128))
        assert cache.layout.geometry.block_size == 16
        assert cache.key().shape == (3, 16, heads, 64)
        with pytest.raises(kv.LayoutError):
            kv.Cache(tensor, "vllm/nvfp4-hnd-sm100", geometry=geometry(3, heads, 16, 128))
    # Converted to linear V scales and back nothing is lost; reading the one as the other mixes V's scales up.
    g = geometry(2, 16, 6, 128)
    source = np.random.default_rng(0).integers(0, 256, kv.layout("vllm/nvfp4-hnd-sm100", g).num_bytes, dtype=np.uint8)
    linear, back = np.zeros_like(source), np.zeros_like(source)
    pairs = [(0, 0), (1, 1)]
    swizzled_cache = kv.Cache(source, "vllm/nvfp4-hnd-sm100", geometry=g)
    linear_cache = kv.Cache(linear, "vllm/nvfp4-hnd-fa2", geometry=g)
    kv.convert_blocks(swizzled_cache, linear_cache, pairs)
    kv.convert_blocks(linear_cache, kv.Cache(back, "vllm/nvfp4-hnd-sm100", geometry=g), pairs)
    np.testing.assert_array_equal(back, source)
    mixed = kv.Cache(linear, "vllm/nvfp4-hnd-sm100", geometry=g)
    np.testing.assert_array_equal(mixed.plane(0, "key_scale"), swizzled_cache.plane(0, "key_scale"))
    np.testing.assert_array_equal(mixed.value(), swizzled_cache.value())
    assert (mixed.plane(0, "value_scale") != swizzled_cache.plane(0, "value_scale")).mean() > 0.5


# --- C34


@pytest.mark.parametrize(("heads", "ranks"), [(4, 2), (8, 4), (6, 3), (2, 1)])
@pytest.mark.parametrize("order", ["B H N KV D", "B N H KV D", "B KV N H D"])
def test_c34_packed_is_sharded_and_mla_is_not(order: str, heads: int, ranks: int) -> None:
    """A rank of the packed cache gets its heads; of an MLA cache it gets all."""
    share = heads // ranks
    data = numbers(5, 4, heads, 8)
    whole = cache_of(as_layout(data, order), order, (5, 4, heads, 8))
    for rank in range(ranks):
        part = as_layout(np.zeros((5, 2, 4, share, 8), np.int32), order)
        kv.convert_blocks(
            whole, cache_of(part, order, (5, 4, share, 8)), [(b, b) for b in range(5)], heads=(rank * share, 0, share)
        )
        np.testing.assert_array_equal(as_blocks(part, order), data[..., rank * share : (rank + 1) * share, :])
    latent = np.arange(5 * 4 * 576, dtype=np.int32).reshape(5, 4, 576)
    mla = "B N {latent: D[512], rope: D[64]}"
    for rank in range(ranks):
        copy = np.zeros_like(latent)
        g = geometry(5, 4, heads, 576, dtype="i32")
        kv.convert_blocks(
            kv.Cache(latent, mla, geometry=g),
            kv.Cache(copy, mla, geometry=geometry(5, 4, share, 576, dtype="i32")),
            [(b, b) for b in range(5)],
            heads=(rank * share, 0, share),
        )
        np.testing.assert_array_equal(copy, latent)


# --- C47, C48


def test_c47_groups_of_different_widths() -> None:
    """132 bytes of indexer and 576 bf16 of latents a token: each group has its own size; the report's count."""
    g = geometry(1, 256, 1, 576)
    indexer, latent = kv.layout("vllm/mla-indexer", g), kv.layout("vllm/mla", g)
    assert indexer.num_bytes // 256 == 132
    assert latent.num_bytes // 256 == 1152
    assert 78 * (indexer.num_bytes + latent.num_bytes) == 25_638_912
    for layout in (indexer, latent):
        source, target = oracle.Memory(layout, 3), oracle.Memory(layout)
        kv.convert_blocks(source.cache(), target.cache(), [(0, 0)])
        assert target.same(source)
    with pytest.raises(kv.LayoutError):
        kv.convert_blocks(oracle.Memory(indexer, 1).cache(), oracle.Memory(latent).cache(), [(0, 0)])
    # One width for both groups does not fit the other's tensor.
    with pytest.raises(kv.LayoutError, match=r"132.*576"):
        kv.Cache(np.zeros((1, 256, 132), np.uint8), "vllm/mla", geometry=g)
    with pytest.raises(kv.LayoutError):
        kv.Cache(np.zeros((1, 256, 576), np.float16), "vllm/mla-indexer", geometry=g)


@pytest.mark.parametrize("row", ["vllm/flashinfer-nhd", "vllm/packed-hnd", "vllm/flash-attention-nhd"])
@pytest.mark.parametrize(("first", "second"), [(256, 512), (64, 128), (8, 24)])
def test_c48_layers_of_different_head_sizes(row: str, first: int, second: int) -> None:
    """Two groups, each with its own size; one cache of both is refused and names both shapes."""
    tensors = []
    for dim in (first, second, first, second):
        layout = kv.layout(row, geometry(3, 4, 2, dim, dtype="f32"))
        shape = layout.shape if row != "vllm/packed-hnd" else (3, 2, 4, 2 * dim)
        tensors.append(np.zeros(shape, np.float32))
    with pytest.raises(kv.LayoutError) as caught:
        kv.Cache(tensors, row)
    assert str(list(tensors[0].shape)) in str(caught.value)
    assert str(list(tensors[1].shape)) in str(caught.value)
    local, global_ = kv.Cache(tensors[::2], row), kv.Cache(tensors[1::2], row)
    assert local.layout.geometry.head_size == first
    assert global_.layout.geometry.head_size == second
    with pytest.raises(kv.LayoutError, match=f"{first}.*{second}"):
        kv.convert_blocks(local, global_, [(0, 0)])


# --- C49


@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 6, 7), (3, 4, 16, 1, 17), (11,), (2, 2, 2, 2, 2, 2, 2, 2)], ids=str)
def test_c49_unknown_shapes_are_errors_at_registration(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    with pytest.raises(kv.UnknownLayout) as caught:
        kv.detect(array)
    assert str(list(shape)) in str(caught.value)
    for row in ("vllm/flashinfer-nhd", "vllm/packed-hnd", "vllm/mla"):
        with pytest.raises(kv.LayoutError, match=str(list(shape)).replace("[", r"\[").replace("]", r"\]")):
            kv.Cache(array, row)


@pytest.mark.parametrize("wrong", ["num_blocks", "block_size", "num_kv_heads", "head_size"])
@pytest.mark.parametrize(
    "row", ["vllm/flashinfer-nhd", "vllm/flash-attention-nhd", "vllm/packed-hnd", "sglang/layer-first"]
)
def test_c49_declared_sizes_must_match(row: str, wrong: str) -> None:
    """Detected sizes that are not the declared ones are an error, also where the number of bytes is the same."""
    right = {"num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_size": 32}
    layout = kv.layout(row, kv.Geometry(**right, dtype="f32"))
    shape = (4, 2, 16, 64) if row == "vllm/packed-hnd" else layout.shape
    array = np.zeros(shape, np.float32)
    assert kv.Cache(array, row, geometry=kv.Geometry(**right, dtype="f32")).layout == layout
    other = {"block_size": "num_kv_heads", "head_size": "num_kv_heads"}.get(wrong, "head_size")
    for sizes in (right | {wrong: right[wrong] * 2}, right | {wrong: right[wrong] * 2, other: right[other] // 2}):
        with pytest.raises(kv.LayoutError):
            kv.Cache(array, row, geometry=kv.Geometry(**sizes, dtype="f32"))
        with pytest.raises(kv.UnknownLayout):
            kv.detect(array, among=[row], **sizes)


# --- C50


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_c50_the_second_call_is_the_first(framework: str) -> None:
    """The same HND views stored twice: the same bytes both times, the caller's tensors unchanged."""
    data = numbers(5, 4, 3, 8)
    memory = np.ascontiguousarray(data.transpose(0, 1, 3, 2, 4))
    views: list[Any] = [memory.transpose(0, 1, 3, 2, 4), memory.copy().transpose(0, 1, 3, 2, 4)]
    if framework == "torch":
        torch = pytest.importorskip("torch")
        views = [torch.from_numpy(v.base).permute(0, 1, 3, 2, 4) for v in views]
    seen = [(v.shape, v.stride() if framework == "torch" else v.strides) for v in views]
    g = geometry(5, 4, 3, 8, dtype="i32")
    stored = []
    for _ in range(3):
        cache = kv.Cache(views, "vllm/flashinfer-hnd", geometry=g)
        target = oracle.Memory(kv.Layout("B H L KV N D", geometry(5, 4, 3, 8, dtype="i32", num_layers=2)))
        kv.convert_blocks(cache, target.cache(), [(b, b) for b in range(5)])
        stored.append(target.buffers[0].tobytes())
        assert [(v.shape, v.stride() if framework == "torch" else v.strides) for v in views] == seen
        np.testing.assert_array_equal(np.asarray(views[0]), data)
    assert stored[0] == stored[1] == stored[2]
    want = np.stack([data, data]).transpose(1, 4, 0, 2, 3, 5)
    assert stored[0] == np.ascontiguousarray(want).tobytes()


# --- C52


def facts(order: tuple[int, ...] | None, backend: str = "FlashInferBackend") -> dict[str, Any]:
    """What a release to 0.25 says of a FlashInfer cache (7 blocks, 16 tokens, 3 heads, dim 32)."""
    args = {"num_blocks": 7, "block_size": 16, "num_kv_heads": 3, "head_size": 32}
    return {
        "backend": backend,
        "args": args,
        "logical_shape": [7, 2, 16, 3, 32],
        "stride_order": order,
        "from": "0.25.1",
    }


@pytest.mark.parametrize(
    "order",
    [
        (0, 1, 2, 3, 4, 5),
        (0, 1, 1, 3, 4),
        (0, 1, 2, 3),
        (0, 1, 2, 3, 5),
        (-1, 1, 2, 3, 4),
        (1, 2, 3, 4, 5),
        (0, 0, 0, 0, 0),
        (),
    ],
    ids=str,
)
def test_c52_stride_order_that_is_no_permutation(order: tuple[int, ...]) -> None:
    with pytest.raises(kv.LayoutError) as caught:
        name_layout(facts(order))
    message = str(caught.value)
    assert "permutation" in message
    assert str(order) in message
    assert "\n" not in message


@pytest.mark.parametrize("order", [None, (0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (0, 2, 1, 3, 4), (1, 0, 2, 3, 4)], ids=str)
def test_c52_a_valid_stride_order_is_a_view(order: tuple[int, ...] | None) -> None:
    """The view has the logical shape and shares memory with what the engine allocated in its physical order."""
    shape = (7, 2, 16, 3, 32)
    form = order or (0, 1, 2, 3, 4)
    memory = np.arange(7 * 2 * 16 * 3 * 32, dtype=np.uint32).astype(np.uint16).reshape([shape[i] for i in form])
    tensor = memory.transpose(np.argsort(form))
    assert tensor.shape == shape
    cache = name_layout(facts(order)).cache(tensor)
    np.testing.assert_array_equal(cache.key(), tensor[:, 0])
    np.testing.assert_array_equal(cache.value(), tensor[:, 1])
    assert np.shares_memory(cache.key(), memory)
    cache.value()[6, 15, 2, 31] = 9
    assert tensor[6, 1, 15, 2, 31] == 9
