# SPDX-License-Identifier: Apache-2.0
"""The drop-in functions of `kvstride.vllm.ops`: right in each layout, refused where readings differ."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvstride as kv
from kvstride.vllm import ops

NB, BS, NH, HS = 5, 4, 3, 8
K_OR_V = BS * NH * HS  # elements of K (or V) in one block: 96
SPLIT = {
    "blocks-first": ("vllm/flashinfer-nhd", (NB, 2, BS, NH, HS), lambda c, b, kv_: c[b, kv_]),
    "kv-first": ("vllm/flash-attention-nhd", (2, NB, BS, NH, HS), lambda c, b, kv_: c[kv_, b]),
    "packed": ("vllm/packed-hnd", (NB, NH, BS, 2 * HS), lambda c, b, kv_: c[b, ..., kv_ * HS : (kv_ + 1) * HS]),
}
# Without a name: whatever the first and last are, their blocks are the first axis; (2, 5, 4, 3, 8) can be either.
HOWS = [
    (name, how)
    for name in SPLIT
    for how in ("layout", "registered", "unnamed")
    if (name, how) != ("kv-first", "unnamed")
]
LIBRARIES = ["numpy"] + (["torch"] if importlib.util.find_spec("torch") else [])


@pytest.fixture(params=LIBRARIES)
def lib(request: pytest.FixtureRequest) -> Callable[[np.ndarray], Any]:
    """Makes a numpy array one of the library under test, over the same memory."""
    if request.param == "numpy":
        return lambda array: array
    import torch

    return torch.from_numpy


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """No registration outlives a test."""
    yield
    ops.unregister()


def filled(shape: tuple[int, ...], first: int = 1) -> np.ndarray:
    """Every element another number: first, first + 1, …"""
    return np.arange(first, first + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def after_pairs(source: np.ndarray, target: np.ndarray, pairs: list[tuple[int, int]], part: Callable) -> np.ndarray:
    """What the target must be: K and V of each pair's block copied, everything else as it was."""
    before, out = source.copy(), target.copy()
    for src, dst in pairs:
        for plane in (0, 1):
            part(out, dst, plane)[...] = part(before, src, plane)
    return out


# --- swap_blocks, copy_blocks on whole caches -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), HOWS)
def test_c01_swap_blocks(lib: Any, name: str, how: str) -> None:
    layout, shape, part = SPLIT[name]
    source, target = filled(shape), np.zeros(shape, np.int32)
    pairs = [(0, 3), (4, 1)]
    expected = after_pairs(source, target, pairs, part)
    src, dst = lib(source), lib(target)
    if how == "registered":
        ops.register([src, dst], layout=layout)
    ops.swap_blocks(src, dst, pairs, **({"layout": layout} if how == "layout" else {}))
    np.testing.assert_array_equal(target, expected)
    assert np.count_nonzero(target) == 384
    if name == "blocks-first":
        assert target.sum() == 184512
    np.testing.assert_array_equal(source, filled(shape))


@pytest.mark.parametrize(("name", "how"), HOWS)
def test_c01_copy_blocks_in_every_layer(lib: Any, name: str, how: str) -> None:
    layout, shape, part = SPLIT[name]
    layers = [filled(shape), filled(shape, 5000)]
    pairs = np.array([(0, 3), (3, 1), (2, 2)])  # a chain: block 1 gets what block 3 was
    expected = [after_pairs(layer, layer, pairs.tolist(), part) for layer in layers]
    tensors = [lib(layer) for layer in layers]
    if how == "registered":
        ops.register(dict(zip(("layer.0", "layer.1"), tensors, strict=True)), layout=layout)
    ops.copy_blocks(tensors, lib(pairs), **({"layout": layout} if how == "layout" else {}))
    for layer, wanted in zip(layers, expected, strict=True):
        np.testing.assert_array_equal(layer, wanted)


def test_c03_two_blocks_without_a_name_are_refused(lib: Any) -> None:
    shape = (2, 2, BS, NH, HS)
    source, target = filled(shape), np.zeros(shape, np.int32)
    with pytest.raises(kv.AmbiguousLayout, match=r"2, 2, 4, 3, 8"):
        ops.swap_blocks(lib(source), lib(target), [(0, 1)])
    good = filled(SPLIT["blocks-first"][1])
    with pytest.raises(kv.AmbiguousLayout):
        ops.copy_blocks([lib(good), lib(source)], [(0, 1)])
    assert not target.any()
    np.testing.assert_array_equal(source, filled(shape))
    np.testing.assert_array_equal(good, filled(good.shape))  # the first layer was fine, but nothing is written


def test_a_kv_first_cache_without_a_name_is_refused(lib: Any) -> None:
    source, target = filled(SPLIT["kv-first"][1]), np.zeros(SPLIT["kv-first"][1], np.int32)
    with pytest.raises(kv.AmbiguousLayout, match="vllm/flash-attention-nhd"):
        ops.swap_blocks(lib(source), lib(target), [(0, 1)])
    with pytest.raises(kv.AmbiguousLayout):
        ops.copy_blocks([lib(source)], [(0, 1)])
    with pytest.raises(kv.AmbiguousLayout):
        ops.copy_kv_blocks({"layer": lib(source)}, {"layer": lib(target)}, [0], [1], "d2h")
    assert not target.any()
    np.testing.assert_array_equal(source, filled(source.shape))


@pytest.mark.parametrize(("name", "block_1"), [("blocks-first", (1,)), ("kv-first", (slice(None), 1))])
def test_c03_two_blocks_with_a_name(lib: Any, name: str, block_1: Any) -> None:
    shape = (2, 2, BS, NH, HS)
    source, target = filled(shape), np.zeros(shape, np.int32)
    src, dst = lib(source), lib(target)
    ops.register(src, layout=SPLIT[name][0])  # known of one, and both have one order
    ops.swap_blocks(src, dst, [(1, 1)])
    expected = np.zeros(shape, np.int32)
    expected[block_1] = source[block_1]
    np.testing.assert_array_equal(target, expected)


def test_a_shape_that_is_no_cache_is_refused(lib: Any) -> None:
    shape = (2, 3, 2, 3, 2, 3, 2)
    with pytest.raises(kv.UnknownLayout):
        ops.swap_blocks(lib(filled(shape)), lib(filled(shape)), [(0, 1)])
    with pytest.raises(kv.LayoutError):
        ops.register(lib(filled(shape)), layout="vllm/flashinfer-nhd")


@pytest.mark.parametrize("pairs", [[(0, NB)], [(-1, 0)], [(0, 2**31 + 1)]])
def test_a_block_id_out_of_range_writes_nothing(lib: Any, pairs: list[tuple[int, int]]) -> None:
    layers = [filled(SPLIT["blocks-first"][1]), filled(SPLIT["blocks-first"][1])]
    with pytest.raises(kv.BlockIndexError):
        ops.copy_blocks([lib(layer) for layer in layers], [(0, 1), *pairs])
    for layer in layers:
        np.testing.assert_array_equal(layer, filled(layer.shape))


def test_wrong_arguments_are_type_errors() -> None:
    with pytest.raises(TypeError, match="swap_blocks"):
        ops.swap_blocks(1, 2)
    with pytest.raises(TypeError, match="block_mapping"):
        ops.swap_blocks(1, 2, 3, block_maping=4)


# --- headline 1: FlashInfer's cache under PagedAttention's functions ------------------------------------------------


def old_op(base: np.ndarray, src_at: int, dst_at: int, numel: int, pairs: list[tuple[int, int]], source: Any) -> None:
    """vLLM's swap_blocks and copy_blocks kernels: a block is `numel` elements, whatever the strides."""
    flat, read = base.reshape(-1), source.reshape(-1).copy()
    for src, dst in pairs:
        flat[dst_at + dst * numel :][:numel] = read[src_at + src * numel :][:numel]


def test_c01_paged_attentions_swap_blocks_is_wrong_for_flashinfers_cache() -> None:
    layout, shape, part = SPLIT["blocks-first"]
    source = filled(shape)
    pairs = [(0, 3), (4, 1)]

    wrong = np.zeros(shape, np.int32)  # PagedAttention.swap_blocks: src_kv_cache[0] is "K", src_kv_cache[1] is "V"
    for axis_0 in (0, 1):
        at = axis_0 * 2 * K_OR_V
        old_op(wrong, at, at, K_OR_V, pairs, source)
    right = np.zeros(shape, np.int32)
    ops.swap_blocks(source, right, pairs, layout=layout)

    np.testing.assert_array_equal(right, after_pairs(source, np.zeros(shape, np.int32), pairs, part))
    assert not np.array_equal(wrong, right)
    assert not wrong[3].any()  # block 0 never arrived
    expected_wrong = np.zeros(shape, np.int32)
    expected_wrong[0, 1], expected_wrong[2, 1], expected_wrong[1, 1] = source[2, 0], source[1, 0], source[3, 0]
    np.testing.assert_array_equal(wrong, expected_wrong)  # keys of blocks that nobody named, among the values


def test_c01_the_fix_with_views_is_wrong_too_and_ours_is_right(lib: Any) -> None:
    _, shape, part = SPLIT["blocks-first"]
    pairs = [(0, 3)]

    wrong = filled(shape)  # copy_blocks([kv[:, 0]], [kv[:, 1]]): steps by key_caches[0][0].numel(), ignores strides
    old_op(wrong, 0, 0, K_OR_V, pairs, wrong)
    old_op(wrong, K_OR_V, K_OR_V, K_OR_V, pairs, wrong)
    before = filled(shape)
    np.testing.assert_array_equal(wrong[1, 1], before[0, 0])  # V of block 1 is overwritten
    np.testing.assert_array_equal(wrong[2, 0], before[0, 1])  # and K of block 2
    np.testing.assert_array_equal(wrong[3], before[3])  # block 3 got nothing

    right = filled(shape)
    tensor = lib(right)
    ops.copy_blocks([tensor[:, 0]], [tensor[:, 1]], pairs)
    np.testing.assert_array_equal(right, after_pairs(before, before, pairs, part))


@pytest.mark.parametrize("how", ["layout", "registered", "unnamed"])
@pytest.mark.parametrize("name", SPLIT)
def test_historical_copy_blocks_takes_views_of_any_layout(lib: Any, name: str, how: str) -> None:
    layout, shape, part = SPLIT[name]
    layers = [filled(shape), filled(shape, 9000)]
    pairs = [(0, 3), (1, 4), (3, 2)]
    expected = [after_pairs(layer, layer, pairs, part) for layer in layers]
    tensors = [lib(layer) for layer in layers]
    if how == "registered":
        ops.register(tensors, layout=layout)
    keys, values = zip(*(split(name, tensor) for tensor in tensors), strict=True)
    ops.copy_blocks(list(keys), list(values), pairs, **({"layout": layout} if how == "layout" else {}))
    for layer, wanted in zip(layers, expected, strict=True):
        np.testing.assert_array_equal(layer, wanted)


def split(name: str, cache: Any) -> tuple[Any, Any]:
    """K and V views, [block, token, head, dim], as the backends of that era split them."""
    if name == "blocks-first":
        return cache[:, 0], cache[:, 1]
    if name == "kv-first":
        return cache[0], cache[1]
    heads_inside = cache.swapaxes(1, 2)
    return heads_inside[..., :HS], heads_inside[..., HS:]


def test_historical_copy_blocks_refuses_a_whole_cache(lib: Any) -> None:
    whole = filled(SPLIT["kv-first"][1])  # its first axis is K/V, not the block
    with pytest.raises(kv.UnknownLayout, match="2, 5, 4, 3, 8"):
        ops.copy_blocks([lib(whole)], [lib(filled(whole.shape))], [(0, 1)])
    with pytest.raises(kv.ArgumentError, match="1 key_caches but 2"):
        ops.copy_blocks([lib(whole)], [lib(whole), lib(whole)], [(0, 1)])
    np.testing.assert_array_equal(whole, filled(whole.shape))


def test_registered_cache_split_on_the_wrong_axis_is_refused(lib: Any) -> None:
    shape = (2, 2, BS, NH, HS)
    cache = filled(shape)
    tensor = lib(cache)
    ops.register(tensor, layout="vllm/flashinfer-nhd")
    with pytest.raises(kv.LayoutError, match="wrong axis"):
        ops.copy_blocks([tensor[0]], [tensor[1]], [(0, 1)])
    np.testing.assert_array_equal(cache, filled(shape))
    ops.copy_blocks([tensor[:, 0]], [tensor[:, 1]], [(0, 1)])
    np.testing.assert_array_equal(cache[1], filled(shape)[0])


def test_a_part_of_a_registered_cache_must_be_its_k_or_v(lib: Any) -> None:
    """PagedAttention.swap_blocks hands the op `src_kv_cache[0]`: K of a kv-first cache, or block 0 of another."""
    for name, right in (("kv-first", True), ("blocks-first", False)):
        layout, shape, _ = SPLIT[name]
        source, target = filled(shape), np.zeros(shape, np.int32)
        src, dst = lib(source), lib(target)
        ops.register([src, dst], layout=layout)
        if right:
            ops.swap_blocks(src[0], dst[0], [(0, 3)])
            expected = np.zeros(shape, np.int32)
            expected[0, 3] = source[0, 0]
            np.testing.assert_array_equal(target, expected)
        else:
            with pytest.raises(kv.LayoutError, match="wrong axis"):
                ops.swap_blocks(src[0], dst[0], [(0, 1)])
            assert not target.any()


def test_historical_copy_blocks_in_one_layer_of_a_registered_allocation(lib: Any) -> None:
    cache = filled((NB, 2, 2, NH, BS, HS))  # B L KV H N D: all layers in a block
    tensor = lib(cache)
    geometry = kv.Geometry(num_layers=2, num_blocks=NB, block_size=BS, num_kv_heads=NH, head_size=HS, dtype="i32")
    ops.register(tensor, layout="B L KV H N D", geometry=geometry)
    ops.copy_blocks([tensor[:, 1, 0]], [tensor[:, 1, 1]], [(0, 3)])
    expected = filled(cache.shape)
    expected[3, 1] = expected[0, 1]
    np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize("num_blocks", [NB, 9])
def test_a_layout_with_its_geometry(lib: Any, num_blocks: int) -> None:
    """The two-slot shape (num_blocks, 2, block_size, heads * dim) does not say its heads: a Layout does."""
    source, target = filled((NB, 2, BS, NH * HS)), np.zeros((num_blocks, 2, BS, NH * HS), np.int32)
    geometry = kv.Geometry(num_layers=4, num_blocks=NB, block_size=BS, num_kv_heads=NH, head_size=HS, dtype="i32")
    ops.swap_blocks(lib(source), lib(target), [(4, 0)], layout=kv.layout("B KV N H D", geometry))
    expected = np.zeros_like(target)
    expected[0] = source[4]
    np.testing.assert_array_equal(target, expected)


# --- headline 2: ModelOpt's sparse attention after the layout moved -------------------------------------------------


def attend(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Softmax attention of one query [head, dim] over tokens [token, head, dim]."""
    scores = np.einsum("hd,thd->ht", query, key) / np.sqrt(query.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), value)


def test_c06_unbinding_the_axis_of_another_release() -> None:
    rng = np.random.default_rng(6)
    blocks = 2  # the number at which the wrong axis does not even fail
    key, value = rng.normal(size=(2, blocks, BS, NH, HS)).astype(np.float32)
    query = rng.normal(size=(NH, HS)).astype(np.float32)
    truth = attend(query, key.reshape(-1, NH, HS), value.reshape(-1, NH, HS))
    caches = {
        "vllm/flash-attention-nhd": np.stack([key, value]),
        "vllm/flashinfer-nhd": np.stack([key, value], axis=1),
        "vllm/packed-hnd": np.ascontiguousarray(np.concatenate([key, value], axis=-1).swapaxes(1, 2)),
    }
    for name, memory in caches.items():
        cache = kv.Cache(memory, name)
        right = attend(query, cache.key().reshape(-1, NH, HS), cache.value().reshape(-1, NH, HS))
        np.testing.assert_array_equal(right, truth)

    moved = caches["vllm/flashinfer-nhd"]
    old_key, old_value = moved[0], moved[1]  # kv_cache.unbind(0), right for flash-attention-nhd only
    wrong = attend(query, old_key.reshape(-1, NH, HS), old_value.reshape(-1, NH, HS))
    assert np.abs(wrong - truth).max() > 0.1
    with pytest.raises(kv.AmbiguousLayout):
        kv.detect(moved)


# --- swap_blocks with block_size_in_bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), [how for how in HOWS if how[0] != "kv-first"])
def test_swap_blocks_by_bytes(lib: Any, name: str, how: str) -> None:
    layout, shape, part = SPLIT[name]
    source, target = filled(shape), np.zeros(shape, np.int32)
    src, dst = lib(source), lib(target)
    if how == "registered":
        ops.register([src, dst], layout=layout)
    ops.swap_blocks(
        src, dst, 2 * K_OR_V * 4, lib(np.array([(0, 3), (4, 1)])), **({"layout": layout} if how == "layout" else {})
    )
    np.testing.assert_array_equal(target, after_pairs(source, np.zeros_like(target), [(0, 3), (4, 1)], part))


def test_swap_blocks_by_bytes_of_pages(lib: Any) -> None:
    source = np.random.default_rng(1).integers(1, 100, (6, 40)).astype(np.int8)
    target = np.zeros((9, 40), np.int8)
    ops.swap_blocks(lib(source), lib(target), 40, [(5, 8), (0, 0)])
    expected = np.zeros_like(target)
    expected[8], expected[0] = source[5], source[0]
    np.testing.assert_array_equal(target, expected)


def test_swap_blocks_by_bytes_refuses_half_a_block(lib: Any) -> None:
    layout, shape, _ = SPLIT["kv-first"]
    source, target = filled(shape), np.zeros(shape, np.int32)
    for size in (K_OR_V * 4, 2 * K_OR_V * 4):
        with pytest.raises(kv.ArgumentError, match=f"block_size_in_bytes is {size}"):
            ops.swap_blocks(lib(source), lib(target), size, [(0, 1)], layout=layout)
        with pytest.raises(kv.AmbiguousLayout):
            ops.swap_blocks(lib(source), lib(target), size, [(0, 1)])
    good, blocks = filled(SPLIT["blocks-first"][1]), np.zeros(SPLIT["blocks-first"][1], np.int32)
    with pytest.raises(kv.ArgumentError, match="block_size_in_bytes is 384"):
        ops.swap_blocks(lib(good), lib(blocks), K_OR_V * 4, [(0, 1)])
    assert not blocks.any()
    assert not target.any()


# --- swap_blocks_batch ----------------------------------------------------------------------------------------------


def test_swap_blocks_batch(lib: Any) -> None:
    source, target = filled((4, 6)), np.zeros((4, 6), np.int32)
    at = [array.__array_interface__["data"][0] for array in (source, target)]
    ops.swap_blocks_batch(
        lib(np.array([at[0] + 24, at[0]])), lib(np.array([at[1], at[1] + 72])), lib(np.array([24, 8])), True
    )
    expected = np.zeros_like(target)
    expected[0], expected[3, :2] = source[1], source[0, :2]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        (np.array([24]), kv.ArgumentError),
        (np.array([24, -1]), kv.ArgumentError),
        (np.array([24, 8], np.int32), kv.DTypeError),
        (np.array([[24, 8]]), kv.ArgumentError),
    ],
)
def test_swap_blocks_batch_checks_lengths(sizes: np.ndarray, error: type[Exception]) -> None:
    source, target = filled((4, 6)), np.zeros((4, 6), np.int32)
    at = [array.__array_interface__["data"][0] for array in (source, target)]
    with pytest.raises(error):
        ops.swap_blocks_batch(np.array([at[0], at[0]]), np.array([at[1], at[1] + 24]), sizes)
    assert not target.any()


# --- copy_kv_blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), HOWS)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_c02_copy_kv_blocks(lib: Any, name: str, how: str, direction: str) -> None:
    layout, shape, part = SPLIT[name]
    source = {f"layer.{i}": filled(shape, 1 + i * 7000) for i in range(2)}
    target = {name_: np.zeros(shape, np.int32) for name_ in source}
    src, dst = ({n: lib(a) for n, a in side.items()} for side in (source, target))
    if how == "registered":
        ops.register(src, layout=layout)
    ops.copy_kv_blocks(src, dst, [1, 3], [1, 0], direction, **({"layout": layout} if how == "layout" else {}))
    for layer, array in target.items():
        np.testing.assert_array_equal(array, after_pairs(source[layer], np.zeros_like(array), [(1, 1), (3, 0)], part))


def test_c02_indexing_axis_1_changes_480_elements_and_ours_192() -> None:
    _, shape, _ = SPLIT["blocks-first"]
    source, wrong, right = filled(shape), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    wrong[:, [1]] = source[:, [1]]  # vLLM 0.10.2 to 0.22.1: cache[:, ids], for every backend
    ops.copy_kv_blocks({"layer": source}, {"layer": right}, [1], [1], "d2h")
    assert np.count_nonzero(wrong) == 480
    assert np.count_nonzero(right) == 192
    with pytest.raises(IndexError):
        wrong[:, [3]] = source[:, [3]]
    ops.copy_kv_blocks({"layer": source}, {"layer": right}, [3], [3], "d2h")
    np.testing.assert_array_equal(right[3], source[3])


def test_copy_kv_blocks_refusals(lib: Any) -> None:
    two = {"layer": lib(filled((2, 2, BS, NH, HS)))}
    with pytest.raises(kv.AmbiguousLayout):
        ops.copy_kv_blocks(two, {"layer": lib(filled((2, 2, BS, NH, HS)))}, [0], [1], "h2d")
    array = filled(SPLIT["blocks-first"][1])
    good = {"layer": lib(array)}
    other = {"layer": lib(np.zeros_like(array))}
    for arguments, message in (
        ((good, other, [0, 1], [0], "h2d"), "2 src_block_ids, 1 dst_block_ids"),
        ((good, other, [0], [0], "up"), "direction is 'up'"),
        ((good, {"another": other["layer"]}, [0], [0], "h2d"), "another, layer"),
    ):
        with pytest.raises(kv.ArgumentError, match=message):
            ops.copy_kv_blocks(*arguments)
    ops.copy_kv_blocks(good, other, [], [], "h2d")
    assert not np.asarray(other["layer"]).any()


# --- reshape_and_cache, reshape_and_cache_flash ---------------------------------------------------------------------

SLOTS = np.array([7, -1, 0, 19, 12], np.int64)


def tokens(dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Key and value of six tokens: one more than SLOTS, as the engine pads them."""
    rng = np.random.default_rng(3)
    key, value = rng.integers(-99, 99, (2, 6, NH, HS)).astype(dtype)
    return key, value


@pytest.mark.parametrize("how", ["layout", "registered", "unnamed"])
@pytest.mark.parametrize("name", SPLIT)
def test_reshape_and_cache_flash(lib: Any, name: str, how: str) -> None:
    layout, shape, _ = SPLIT[name]
    cache = np.full(shape, -1000, np.float32)
    expected = cache.copy()
    key, value = tokens()
    for view, rows in zip(split(name, expected), (key, value), strict=True):
        for slot, row in zip(SLOTS, rows, strict=False):
            if slot >= 0:
                view[slot // BS, slot % BS] = row
    tensor = lib(cache)
    if how == "registered":
        ops.register(tensor, layout=layout)
    ops.reshape_and_cache_flash(
        lib(key), lib(value), *split(name, tensor), lib(SLOTS), "auto", 1.0, 1.0,
        **({"layout": layout} if how == "layout" else {}),
    )  # fmt: skip
    np.testing.assert_array_equal(cache, expected)


def test_reshape_and_cache_flash_where_the_layout_is_not_what_the_views_say(lib: Any) -> None:
    """ROCM_ATTN's cache has FlashAttention's shape, but K split by x and V transposed inside."""
    x = 4
    cache = np.full((2, NB, BS, NH, HS), -1000, np.float32)
    key, value = tokens()
    tensor = lib(cache)
    ops.reshape_and_cache_flash(
        lib(key), lib(value), tensor[0], tensor[1], lib(SLOTS), "auto", 1.0, 1.0, layout="vllm/rocm-attention"
    )
    split_key = cache[0].reshape(NB, NH, HS // x, BS, x)
    split_value = cache[1].reshape(NB, NH, HS, BS)
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            block, token = divmod(int(slot), BS)
            np.testing.assert_array_equal(split_key[block, :, :, token].reshape(NH, HS), key[i])
            np.testing.assert_array_equal(split_value[block, :, :, token], value[i])
    assert (cache == -1000).sum() == cache.size - 4 * 2 * NH * HS


X_SPLIT = {
    "kv-first": ("vllm/rocm-attention", (2, NB, BS, NH, HS), lambda c: (c[0], c[1])),
    "blocks-first": ("vllm/rocm-lbhnc", (NB, 2, BS, NH * HS), lambda c: (c[:, 0], c[:, 1])),
}


def x_split(name: str, cache: Any, x: int) -> tuple[Any, Any]:
    """PagedAttention.split_kv_cache: [B, H, D/x, N, x] and [B, H, D, N] views of [2, B, …] or [B, 2, …]."""
    key, value = X_SPLIT[name][2](cache)
    return key.reshape(NB, NH, HS // x, BS, x), value.reshape(NB, NH, HS, BS)


@pytest.mark.parametrize("how", ["registered", "unnamed"])
@pytest.mark.parametrize("name", X_SPLIT)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_reshape_and_cache(lib: Any, name: str, how: str, dtype: type) -> None:
    x = 16 // np.dtype(dtype).itemsize
    cache = np.full(X_SPLIT[name][1], -1000, dtype)
    expected = cache.copy()
    key, value = tokens(dtype)
    key_view, value_view = x_split(name, expected, x)
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            block, token = divmod(int(slot), BS)
            key_view[block, :, :, token] = key[i].reshape(NH, HS // x, x)
            value_view[block, :, :, token] = value[i]
    tensor = lib(cache)
    if how == "registered":
        geometry = kv.Geometry(
            num_blocks=NB, block_size=BS, num_kv_heads=NH, head_size=HS, dtype={4: "f32", 8: "f16"}[x]
        )
        ops.register(tensor, layout=X_SPLIT[name][0], geometry=geometry)
    ops.reshape_and_cache(lib(key), lib(value), *x_split(name, tensor, x), lib(SLOTS), "auto", 1.0, 1.0)
    np.testing.assert_array_equal(cache, expected)


def test_reshape_and_cache_with_the_shuffled_layout(lib: Any) -> None:
    """AITER's shuffle shares K's bytes with the x-split, V's it does not: `layout=` tells."""
    x = 4
    cache = np.zeros((2, NB, BS, NH, HS), np.float32)
    key, value = tokens()
    ops.reshape_and_cache(
        lib(key), lib(value), *x_split("kv-first", lib(cache), x), lib(SLOTS), "auto", 1.0, 1.0,
        layout="{key: B H D/x N D%x, value: B H N/x D N%x}",
    )  # fmt: skip
    shuffled = cache[1].reshape(NB, NH, BS // x, HS, x)
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            block, token = divmod(int(slot), BS)
            np.testing.assert_array_equal(shuffled[block, :, token // x, :, token % x], value[i])


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_reshape_and_cache_flash_quantises(lib: Any, kind: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    cache = np.zeros((2, NB, BS, NH, HS), np.uint8)
    key, value = tokens()
    tensor = lib(cache)
    one_k, one_v = lib(np.array([0.5], np.float32)), lib(np.array([2.0], np.float32))
    ops.reshape_and_cache_flash(lib(key), lib(value), tensor[0], tensor[1], lib(SLOTS), kind, one_k, one_v)
    stored = ml_dtypes.float8_e5m2 if kind == "fp8_e5m2" else ml_dtypes.float8_e4m3fn
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            block, token = divmod(int(slot), BS)
            np.testing.assert_array_equal(cache[0, block, token], (key[i] / 0.5).astype(stored).view(np.uint8))
            np.testing.assert_array_equal(cache[1, block, token], (value[i] / 2.0).astype(stored).view(np.uint8))


def test_reshape_and_cache_flash_of_bf16() -> None:
    torch = pytest.importorskip("torch")
    key, value = (torch.from_numpy(x).bfloat16() for x in tokens())
    packed = torch.zeros((NB, NH, BS, 2 * HS), dtype=torch.bfloat16)
    views = packed.transpose(1, 2).split(HS, dim=-1)
    ops.reshape_and_cache_flash(key, value, *views, torch.from_numpy(SLOTS), "auto", torch.ones(1), torch.ones(1))
    for i, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            block, token = divmod(slot, BS)
            assert torch.equal(packed[block, :, token, :HS], key[i])
            assert torch.equal(packed[block, :, token, HS:], value[i])
    bits = np.zeros((2, NB, BS, NH, HS), np.uint16)  # numpy has no bf16: its bits
    raw = [x.view(torch.uint16).numpy() for x in (key, value)]
    ops.reshape_and_cache_flash(*raw, bits[0], bits[1], SLOTS, "auto", 1.0, 1.0)
    np.testing.assert_array_equal(bits[0, 1, 3], raw[0][0])
    np.testing.assert_array_equal(bits[1, 3, 0], raw[1][4])


def test_reshape_and_cache_refusals(lib: Any) -> None:
    key, value = (lib(x) for x in tokens())
    cache = np.zeros((2, NB, BS, NH, HS), np.float32)
    tensor = lib(cache)
    views = x_split("kv-first", lib(np.zeros_like(cache)), 4)
    with pytest.raises(kv.UnknownLayout, match="key_cache of shape"):
        ops.reshape_and_cache_flash(key, value, tensor, tensor, lib(SLOTS), "auto", 1.0, 1.0)
    with pytest.raises(kv.UnknownLayout, match="key_cache of shape"):
        ops.reshape_and_cache(key, value, tensor[0], tensor[1], lib(SLOTS), "auto", 1.0, 1.0)
    with pytest.raises(kv.BlockIndexError):
        ops.reshape_and_cache(key, value, *views, lib(np.array([0, NB * BS])), "auto", 1.0, 1.0)
    with pytest.raises(kv.DTypeError, match="int4"):
        ops.reshape_and_cache_flash(key, value, tensor[0], tensor[1], lib(SLOTS), "int4", 1.0, 1.0)
    with pytest.raises(kv.DTypeError, match="fp8"):
        ops.reshape_and_cache_flash(key, value, tensor[0], tensor[1], lib(SLOTS), "fp8", 1.0, 1.0)
    with pytest.raises(kv.ArgumentError, match="k_scale has 3"):
        ops.reshape_and_cache_flash(
            key, value, tensor[0], tensor[1], lib(SLOTS), "auto", lib(np.ones(3, np.float32)), 1.0
        )
    assert not cache.any()


# --- registered caches: a view must be a plane, element by element --------------------------------------------------


def refused(error: type[Exception], match: str, arrays: list[np.ndarray], call: Callable[[], Any]) -> None:
    """The call raises one line and changes no byte."""
    before = [array.copy() for array in arrays]
    with pytest.raises(error, match=match) as raised:
        call()
    assert "\n" not in str(raised.value)
    for array, was in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, was)


def test_registered_views_must_be_whole_planes(lib: Any) -> None:
    array = filled((NB, 2, BS, NH, HS))
    cache = lib(array)
    ops.register(cache, layout="vllm/flashinfer-nhd")
    parts = {
        "fewer blocks": (cache[:2, 0], cache[:2, 1]),
        "fewer heads": (cache[:, 0, :, :1], cache[:, 1, :, :1]),
        "fewer tokens": (cache[:, 0, :2], cache[:, 1, :2]),
        "half the head": (cache[:, 0, ..., :4], cache[:, 1, ..., :4]),
        "K and V swapped": (cache[:, 1], cache[:, 0]),
        "every other block": (cache[::2, 0], cache[::2, 1]),
    }
    for key, value in parts.values():
        refused(kv.LayoutError, r"registered cache of shape \(5, 2, 4, 3, 8\)", [array],
                lambda key=key, value=value: ops.copy_blocks([key], [value], [(0, 1)]))  # fmt: skip
    refused(kv.LayoutError, r"registered", [array], lambda: ops.copy_blocks([cache[:2, 0]], [(0, 1)]))
    other = np.zeros((NB, BS, NH, 1), np.int32)
    refused(kv.LayoutError, "registered", [array, other],
            lambda: ops.swap_blocks(lib(other), cache[..., :1][:, 0], [(0, 1)]))  # fmt: skip


def test_registered_caches_are_written_through_their_own_views_only(lib: Any) -> None:
    key, value = (lib(x) for x in tokens())
    geometry = kv.Geometry(num_blocks=NB, block_size=BS, num_kv_heads=NH, head_size=HS, dtype="f32")
    plain, opaque = np.zeros((2, NB, BS, NH, HS), np.float32), np.zeros((2, NB, BS, NH, HS), np.float32)
    both = [plain, opaque]
    ops.register(lib(plain), layout="vllm/flash-attention-nhd")
    ops.register(lib(opaque), layout="vllm/rocm-attention", geometry=geometry)
    rest = (lib(SLOTS), "auto", 1.0, 1.0)
    square = lib(plain).swapaxes(2, 3)
    for op, views in (
        (ops.reshape_and_cache, x_split("kv-first", lib(plain), 4)),
        (ops.reshape_and_cache_flash, (lib(opaque)[0], lib(opaque)[1])),
        (ops.reshape_and_cache_flash, (square[0], square[1])),  # heads and tokens exchanged
        (ops.reshape_and_cache_flash, (lib(plain)[0, :2], lib(plain)[1, :2])),
        (ops.reshape_and_cache_flash, (lib(plain)[0], lib(plain)[0])),
    ):
        refused(kv.LayoutError, "registered cache of shape", both,
                lambda op=op, views=views: op(key, value, *views, *rest))  # fmt: skip


def test_equal_heads_and_tokens_do_not_hide_a_transposed_view(lib: Any) -> None:
    array = np.zeros((NB, 2, 3, 3, HS), np.float32)
    cache = lib(array)
    ops.register(cache, layout="vllm/flashinfer-nhd")
    key, value = (lib(x) for x in tokens())
    views = cache[:, 0].swapaxes(1, 2), cache[:, 1].swapaxes(1, 2)
    refused(kv.LayoutError, "registered", [array],
            lambda: ops.reshape_and_cache_flash(key, value, *views, lib(SLOTS[:3]), "auto", 1.0, 1.0))  # fmt: skip


def fp8_cache(dtype: str, array: np.ndarray, lib: Any) -> Any:
    cache = lib(array)
    geometry = kv.Geometry(num_blocks=NB, block_size=BS, num_kv_heads=NH, head_size=HS, dtype=dtype)
    ops.register(cache, layout="vllm/flash-attention-nhd", geometry=geometry)
    return cache


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("f8_e4m3", "auto"), ("f8_e4m3", "fp8_e5m2"), ("f8_e5m2", "fp8"), ("f8_e4m3", "int4"), ("f8_e4m3", "float32"),
     ("f8_e4m3", None), ("f8_e5m2", "fp8_e4m3")],
)  # fmt: skip
def test_kv_cache_dtype_must_agree_with_the_registered_dtype(lib: Any, dtype: str, kind: Any) -> None:
    array = np.zeros((2, NB, BS, NH, HS), np.uint8)
    cache = fp8_cache(dtype, array, lib)
    key, value = (lib(x) for x in tokens())
    refused(kv.DTypeError, "reshape_and_cache_flash: ", [array],
            lambda: ops.reshape_and_cache_flash(key, value, cache[0], cache[1], lib(SLOTS), kind, 1.0, 1.0)
            )  # fmt: skip


@pytest.mark.parametrize(("dtype", "kind"), [("f8_e4m3", "fp8"), ("f8_e5m2", "fp8_e5m2"), ("u8", "fp8_e4m3")])
def test_kv_cache_dtype_that_agrees_quantises(lib: Any, dtype: str, kind: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.zeros((2, NB, BS, NH, HS), np.uint8)
    cache = fp8_cache(dtype, array, lib)
    key, value = tokens()
    ops.reshape_and_cache_flash(lib(key), lib(value), cache[0], cache[1], lib(SLOTS), kind, 0.5, 2.0)
    stored = ml_dtypes.float8_e5m2 if kind == "fp8_e5m2" else ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(array[0, 1, 3], (key[0] / 0.5).astype(stored).view(np.uint8))
    np.testing.assert_array_equal(array[1, 1, 3], (value[0] / 2.0).astype(stored).view(np.uint8))


@pytest.mark.parametrize("kind", ["half", "bfloat16", "fp8"])
def test_kv_cache_dtype_over_f32(lib: Any, kind: str) -> None:
    array = np.zeros((2, NB, BS, NH, HS), np.float32)
    cache = lib(array)
    key, value = (lib(x) for x in tokens())
    for register in (False, True):
        if register:
            ops.register(cache, layout="vllm/flash-attention-nhd")
        refused(kv.DTypeError, kind, [array],
                lambda: ops.reshape_and_cache_flash(key, value, cache[0], cache[1], lib(SLOTS), kind, 1.0, 1.0)
                )  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_two_registered_caches_over_one_memory(lib: Any, first: int) -> None:
    """Groups share memory: the view decides, not who came first."""
    memory = np.zeros(NB * 2 * BS * NH * HS, np.float32)
    shapes = [(NB, 2, BS, NH, HS), (NB * 2, 2, 2, NH, HS)]  # blocks of 4 tokens, and of 2
    caches = [lib(memory.reshape(shape)) for shape in shapes]
    for i in (first, 1 - first):
        ops.register(caches[i], layout="vllm/flashinfer-nhd")
    key, value = tokens()
    for cache, shape in zip(caches, shapes, strict=True):
        memory[:] = 0
        ops.reshape_and_cache_flash(
            lib(key), lib(value), cache[:, 0], cache[:, 1], lib(np.array([3])), "auto", 1.0, 1.0
        )  # fmt: skip
        expected = np.zeros(shape, np.float32)
        expected[3 // shape[2], 0, 3 % shape[2]], expected[3 // shape[2], 1, 3 % shape[2]] = key[0], value[0]
        np.testing.assert_array_equal(memory.reshape(shape), expected)


def test_two_registered_caches_that_both_fit_and_differ(lib: Any) -> None:
    memory = np.zeros((2, NB, BS, NH, HS), np.uint16)
    ops.register(lib(memory), layout="vllm/flash-attention-nhd", geometry=kv.Geometry(
        num_blocks=NB, block_size=BS, num_kv_heads=NH, head_size=HS, dtype="bf16"))  # fmt: skip
    flat = lib(memory.reshape(-1))
    ops.register(flat, layout="vllm/flash-attention-nhd", geometry=kv.Geometry(
        num_blocks=NB, block_size=BS, num_kv_heads=NH, head_size=HS, dtype="f16"))  # fmt: skip
    key, value = (lib(x) for x in tokens(np.float16))
    refused(kv.AmbiguousLayout, "two registered caches", [memory], lambda: ops.reshape_and_cache_flash(
        key, value, lib(memory)[0], lib(memory)[1], lib(SLOTS), "auto", 1.0, 1.0))  # fmt: skip


def test_registered_layers_that_interleave(lib: Any) -> None:
    array = filled((NB, 3, 2, BS, NH, HS)).astype(np.float32)
    big = lib(array)
    ops.register([big[:, layer] for layer in range(3)], layout="vllm/flashinfer-nhd")
    expected = array.copy()
    expected[3, 1] = expected[0, 1]
    ops.copy_blocks([big[:, 1, 0]], [big[:, 1, 1]], [(0, 3)])
    np.testing.assert_array_equal(array, expected)
    key, value = tokens()
    ops.reshape_and_cache_flash(
        lib(key), lib(value), big[:, 2, 0], big[:, 2, 1], lib(np.array([7])), "auto", 1.0, 1.0
    )  # fmt: skip
    expected[1, 2, 0, 3], expected[1, 2, 1, 3] = key[0], value[0]
    np.testing.assert_array_equal(array, expected)


# --- layout= against the views' strides -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["vllm/flashinfer-hnd", "vllm/flash-attention-nhd", "vllm/flex-attention",
                                    "vllm/packed-hnd", "vllm/cpu-vec"])  # fmt: skip
def test_layout_must_agree_with_the_strides_of_views(lib: Any, layout: str) -> None:
    array = np.zeros((NB, 2, BS, NH, HS), np.float32)
    cache = lib(array)
    key, value = (lib(x) for x in tokens())
    first = int(layout == "vllm/flash-attention-nhd")  # there, V before K
    views = cache[:, first], cache[:, 1 - first]
    refused(kv.LayoutError, "layout 'vllm", [array], lambda: ops.reshape_and_cache_flash(
        key, value, *views, lib(SLOTS), "auto", 1.0, 1.0, layout=layout))  # fmt: skip


def test_layout_of_another_kind_of_view_is_refused(lib: Any) -> None:
    array = np.zeros((2, NB, BS, NH, HS), np.float32)
    key, value = (lib(x) for x in tokens())
    refused(kv.LayoutError, "head_size / x", [array], lambda: ops.reshape_and_cache(
        key, value, *x_split("kv-first", lib(array), 4), lib(SLOTS), "auto", 1.0, 1.0,
        layout="vllm/flash-attention-nhd"))  # fmt: skip
    two = filled((2, 2, BS, NH, HS))
    refused(kv.LayoutError, "strides", [two], lambda: ops.copy_blocks(
        [lib(two)[0]], [lib(two)[1]], [(0, 1)], layout="vllm/flashinfer-nhd"))  # fmt: skip


# --- all layers are checked before any is written -------------------------------------------------------------------


def test_copy_kv_blocks_checks_every_layer_first() -> None:
    shape = SPLIT["blocks-first"][1]
    x, y, to_x, to_y = filled(shape), filled(shape, 5000), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    everything = [x, y, to_x, to_y]
    locked = to_y.view()
    locked.flags.writeable = False
    cases = {
        "read-only": ({"x": x, "y": y}, {"x": to_x, "y": locked}),
        "meet": ({"x": x, "y": y}, {"x": to_x, "y": y}),
        "layers x and y": ({"x": x, "y": y}, {"x": to_x, "y": x}),
        "layers x and y share memory": ({"x": x, "y": y}, {"x": to_x, "y": to_x}),
    }
    for message, (src, dst) in cases.items():
        ids = ([0, 1], [1, 2])
        refused(kv.ArgumentError, "^copy_kv_blocks: " + ("" if message in ("meet", "read-only") else message),
                everything, lambda src=src, dst=dst, ids=ids: ops.copy_kv_blocks(src, dst, *ids, "h2d"))  # fmt: skip


def test_layers_that_share_a_tensor_are_copied_once(lib: Any) -> None:
    array = filled(SPLIT["blocks-first"][1])
    expected = array.copy()
    expected[1], expected[2] = array[0], array[1]
    cache = lib(array)
    ops.copy_blocks([cache, cache], [(0, 1), (1, 2)])
    np.testing.assert_array_equal(array, expected)
    ops.copy_blocks([cache[:, 0]] * 2, [cache[:, 1]] * 2, [(1, 2), (2, 3)])
    expected[3], expected[2] = expected[2].copy(), expected[1].copy()
    np.testing.assert_array_equal(array, expected)
    target = np.zeros_like(array)
    ops.copy_kv_blocks({"a": cache, "b": cache}, {"a": lib(target), "b": lib(target)}, [3], [0], "d2h")
    np.testing.assert_array_equal(target[0], array[3])
    refused(kv.ArgumentError, "share memory", [array], lambda: ops.copy_blocks([cache, cache[1:]], [(0, 1)]))


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [lambda: zip([0], [3], strict=True), lambda: iter([(0, 3)]), lambda: {0: [3]}])
def test_pairs_of_any_kind_are_read_once(lib: Any, pairs: Any) -> None:
    layers = [filled(SPLIT["blocks-first"][1]) for _ in range(2)]
    tensors = [lib(layer) for layer in layers]
    ops.copy_blocks(tensors, pairs(), layout="vllm/flashinfer-nhd")
    ops.copy_blocks([tensors[0][:, 0]], [tensors[0][:, 1]], {3: 4})
    for layer in layers:
        np.testing.assert_array_equal(layer[3], layer[0])
    np.testing.assert_array_equal(layers[0][4], layers[0][0])


def test_numbers_are_checked(lib: Any) -> None:
    source, target = filled(SPLIT["blocks-first"][1]), np.zeros(SPLIT["blocks-first"][1], np.int32)
    src, dst = lib(source), lib(target)
    both = [source, target]
    for ids in (([1.9], [2.7]), (["1"], [2]), ([1], [True]), ([1], None), (1, 2)):
        refused(kv.Error, "^copy_kv_blocks: ", both,
                lambda ids=ids: ops.copy_kv_blocks({"a": src}, {"a": dst}, *ids, "h2d"))  # fmt: skip
    for size in (768.9, "x", True, None, 0, -768, 2**70):
        refused(kv.Error, "block_size_in_bytes", both,
                lambda size=size: ops.swap_blocks(src, dst, size, [(0, 1)]))  # fmt: skip
    for sizes in ([1.5], ["x"], 3, None):
        refused(kv.Error, "^swap_blocks_batch: ", both,
                lambda sizes=sizes: ops.swap_blocks_batch([0], [0], sizes))  # fmt: skip
    ops.swap_blocks_batch([source.ctypes.data], [target.ctypes.data], [8])
    assert target.reshape(-1)[:3].tolist() == [1, 2, 0]


@pytest.mark.parametrize("scale", [None, "x", True, [1.0, 2.0], 0.0, -1.0, float("nan")])
def test_scales_are_checked(lib: Any, scale: Any) -> None:
    array = np.zeros((2, NB, BS, NH, HS), np.uint8)
    cache = lib(array)
    key, value = (lib(x) for x in tokens())
    for scales in ((scale, 1.0), (1.0, scale)):
        refused(kv.Error, "^reshape_and_cache_flash: ", [array],
                lambda scales=scales: ops.reshape_and_cache_flash(
                    key, value, cache[0], cache[1], lib(SLOTS), "fp8", *scales))  # fmt: skip


def test_no_tensor_and_no_cache_are_typed_errors(lib: Any) -> None:
    cache = filled(SPLIT["blocks-first"][1])
    scalar = lib(np.array(1, np.int32))
    calls: list[Callable[[], Any]] = [
        lambda: ops.swap_blocks([1, 2], lib(cache), [(0, 1)]),
        lambda: ops.swap_blocks(lib(cache), 3, [(0, 1)]),
        lambda: ops.swap_blocks(scalar, scalar, [(0, 1)]),
        lambda: ops.swap_blocks(lib(cache), [1], 768, [(0, 1)]),
        lambda: ops.copy_blocks([[1]], [(0, 1)]),
        lambda: ops.copy_blocks(3, [(0, 1)]),
        lambda: ops.copy_blocks([scalar], [(0, 1)]),
        lambda: ops.copy_blocks([scalar], [scalar], [(0, 1)]),
        lambda: ops.copy_blocks([lib(cache)], [(0, 1)], layout=3),
        lambda: ops.copy_blocks([lib(cache)], 3),
        lambda: ops.copy_kv_blocks([lib(cache)], {"a": lib(cache)}, [0], [1], "h2d"),
        lambda: ops.copy_kv_blocks({"a": [1]}, {"a": lib(cache)}, [0], [1], "h2d"),
        lambda: ops.reshape_and_cache_flash([1], [1], lib(cache), [2], lib(SLOTS), "auto", 1.0, 1.0),
        lambda: ops.register(3, layout="vllm/flashinfer-nhd"),
        lambda: ops.register([[3]], layout="vllm/flashinfer-nhd"),
    ]
    for call in calls:
        refused(kv.Error, ".", [cache], call)


def test_a_plane_of_a_registered_cache_and_a_plain_tensor(lib: Any) -> None:
    array, target = filled(SPLIT["blocks-first"][1]), np.zeros((9, BS, NH, HS), np.int32)
    cache = lib(array)
    ops.register(cache, layout="vllm/flashinfer-nhd")
    ops.swap_blocks(cache[:, 0], lib(target), [(4, 8)])
    expected = np.zeros_like(target)
    expected[8] = array[4, 0]
    np.testing.assert_array_equal(target, expected)
    wrong = np.zeros((9, BS, NH, 2 * HS), np.int32)
    refused(kv.LayoutError, r"\(9, 4, 3, 16\)", [array, wrong],
            lambda: ops.swap_blocks(cache[:, 0], lib(wrong), [(4, 8)]))  # fmt: skip


def test_flat_kv_first_is_only_ever_named(lib: Any) -> None:
    array = filled((2, 7, 576))
    cache = lib(array)
    both = [array]
    refused(kv.AmbiguousLayout, "vllm/mla.*vllm/paged-attention", both, lambda: ops.copy_blocks([cache], [(0, 1)]))
    refused(kv.AmbiguousLayout, "vllm/mla", both, lambda: ops.swap_blocks(cache, lib(array.copy()), [(0, 1)]))
    refused(kv.AmbiguousLayout, "vllm/mla", both, lambda: ops.copy_kv_blocks(
        {"a": cache}, {"a": lib(array.copy())}, [0], [1], "h2d"))  # fmt: skip
    ops.copy_blocks([cache], [(0, 1)], layout="vllm/mla")
    np.testing.assert_array_equal(array[1], array[0])
    three = filled((3, 7, 576))
    ops.copy_blocks([lib(three)], [(0, 1)])
    np.testing.assert_array_equal(three[1], three[0])


def test_readings_of_the_target_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = kv.candidates
    monkeypatch.setattr(kv, "candidates", lambda tensor: calls.append(1) or original(tensor))
    shape = SPLIT["blocks-first"][1]
    ops.swap_blocks(filled(shape), np.zeros(shape, np.int32), [(0, 1)])
    assert len(calls) == 2
