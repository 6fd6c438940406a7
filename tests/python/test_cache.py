# SPDX-License-Identifier: Apache-2.0
"""Cache over numpy, torch and DLPack: shapes that engines declare, natural, fused and flat, and zero-copy views."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstride as kv
import oracle
from declared import Engine, engine_tensors, geometry_for, has_axis

try:
    import torch
except ImportError:  # the numpy half of this file runs without it
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")

SIZES = {"num_blocks": 5, "block_size": 4, "num_kv_heads": 3, "head_size": 8}
TORCH = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "f8_e4m3fnuz": "float8_e4m3fnuz",
    "f8_e5m2fnuz": "float8_e5m2fnuz",
    "f8_e8m0": "float8_e8m0fnu",
    "i8": "int8",
    "u8": "uint8",
    "i32": "int32",
}
NUMPY = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f8_e4m3": ml_dtypes.float8_e4m3fn,
    "f8_e5m2": ml_dtypes.float8_e5m2,
    "f8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "f8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "f8_e8m0": ml_dtypes.float8_e8m0fnu,
    "i8": np.int8,
    "u8": np.uint8,
    "i32": np.int32,
}


def geometry(dtype: str = "bf16", **sizes: int) -> kv.Geometry:
    """Small sizes, some of them replaced."""
    return kv.Geometry(**(SIZES | sizes), dtype=dtype)


def address_of(view: Any, index: tuple[int, ...]) -> int:
    """Address of an element of a numpy or torch view."""
    if torch is not None and isinstance(view, torch.Tensor):
        return view.data_ptr() + view.element_size() * sum(i * s for i, s in zip(index, view.stride(), strict=True))
    start = view.__array_interface__["data"][0]
    return start + sum(i * s for i, s in zip(index, view.strides, strict=True))


def some(lengths: tuple[int, ...], count: int = 60) -> list[tuple[int, ...]]:
    """Random indices, the first and the last among them."""
    rng = random.Random(count)
    last = tuple(n - 1 for n in lengths)
    return [tuple(0 for _ in lengths), last] + [tuple(rng.randrange(n) for n in lengths) for _ in range(count)]


def check(cache: kv.Cache, engine: Engine) -> None:
    """The cache's addresses are those of kv.layout, and its views lie on them."""
    starts = [info.address for info in cache.tensors]
    memory = dict(zip(engine.addresses, engine.buffers, strict=True))
    assert set(cache.layout.planes.items()) == set(engine.layout.planes.items())
    for plane in engine.layout.planes:
        lengths = engine.layout.extents(plane)
        assert cache.layout.extents(plane) == lengths
        for index in some(lengths):
            tensor, byte = cache.layout.offset(plane, *index)
            assert starts[tensor] + byte == engine.address(plane, index), (plane, index)
        for layer in range(lengths[0]):
            inner = some(lengths[1:], 20)
            try:
                view = cache._view(plane, layer, False)
            except kv.NotStrided as error:
                assert f'cache.plane(layer, "{plane}")' in str(error)
                flat = np.ascontiguousarray(cache.plane(layer, plane)).reshape(lengths[1:])
                for index in inner:
                    tensor, byte = engine.layout.offset(plane, layer, *index)
                    buffer = memory[engine.addresses[tensor]]
                    item = oracle.item_size(engine.layout.planes[plane])
                    assert flat[index].tobytes() == buffer[byte : byte + item].tobytes(), (plane, layer, index)
                continue
            assert tuple(view.shape) == lengths[1:]
            for index in inner:
                assert address_of(view, index) == engine.address(plane, (layer, *index)), (plane, layer, index)


# --- The shape that the engine declares.

ROWS = kv.registry()


@pytest.mark.parametrize("entry", ROWS, ids=[e.name for e in ROWS])
def test_declared_shape(entry: kv.Entry) -> None:
    """The tensor that the engine registers is read right, opaque rows and layers in one allocation included."""
    g = geometry_for(entry)
    engine = engine_tensors(entry, g)
    cache = kv.Cache(engine.tensors, entry.name, geometry=g)
    assert cache.layout.geometry == g
    check(cache, engine)


GRID = list(itertools.product([1, 2], [1, 2, 3], [1, 2, 16, 32], [1, 2, 4], [2, 8, 16, 32]))


@pytest.mark.parametrize("entry", ROWS, ids=[e.name for e in ROWS])
def test_declared_shape_over_sizes(entry: kv.Entry) -> None:
    """Sizes of 1 and 2 and equal axes: right, or refused where the layout has no such size; never other bytes."""
    right = 0
    for layers, blocks, tokens, heads, dim in GRID:
        sizes = {"num_layers": layers, "num_blocks": blocks, "block_size": tokens, "num_kv_heads": heads}
        sizes |= {"head_size": dim, "k": max(1, tokens // 2), "g": max(1, heads // 2)}
        try:
            g = geometry_for(entry, **sizes)
            kv.layout(entry.name, g)
        except kv.LayoutError:
            continue
        engine = engine_tensors(entry, g)
        cache = kv.Cache(engine.tensors, entry.name, geometry=g)
        starts = [info.address for info in cache.tensors]
        for plane in engine.layout.planes:
            assert cache.layout.extents(plane) == engine.layout.extents(plane)
            for index in some(engine.layout.extents(plane), 8):
                tensor, byte = cache.layout.offset(plane, *index)
                assert starts[tensor] + byte == engine.address(plane, index), (g, plane, index)
        right += 1
    assert right >= 3


@pytest.mark.parametrize("entry", ROWS, ids=[e.name for e in ROWS])
def test_declared_shape_without_geometry(entry: kv.Entry) -> None:
    """Where shape and strides leave a size open, an error; never other bytes."""
    outcomes = set()
    for layers, blocks, tokens, heads, dim in GRID[::3]:
        sizes = {"num_layers": layers, "num_blocks": blocks, "block_size": tokens, "num_kv_heads": heads}
        sizes |= {"head_size": dim, "k": max(1, tokens // 2), "g": max(1, heads // 2)}
        try:
            g = geometry_for(entry, **sizes)
            kv.layout(entry.name, g)
        except kv.LayoutError:
            continue
        engine = engine_tensors(entry, g, {2: ml_dtypes.bfloat16, 4: np.float32})
        try:
            cache = kv.Cache(engine.tensors, entry.name)
        except kv.LayoutError as error:
            outcomes.add(type(error))
            continue
        outcomes.add(kv.Cache)
        starts = [info.address for info in cache.tensors]
        for plane in engine.layout.planes:
            assert cache.layout.extents(plane) == engine.layout.extents(plane)
            for index in some(engine.layout.extents(plane), 8):
                tensor, byte = cache.layout.offset(plane, *index)
                assert starts[tensor] + byte == engine.address(plane, index), (g, plane, index)
    fused = any(sign in dim for dim in entry.shape.split(",") for sign in ("N*H*D", "H*D", "+", "2*H"))
    assert (kv.Cache in outcomes) == (not fused)


def test_layers_of_one_allocation() -> None:
    """vLLM 0.29 and newer: the per-layer views of all six layouts hold the same keys and values."""
    names = ["vllm/lbhnc", "vllm/lbnhc", "vllm/lhbnc", "vllm/blhnc", "vllm/blnhc", "vllm/bhlnc"]
    g = kv.Geometry(num_layers=3, **SIZES, dtype="f32")
    numbers = np.arange(3 * 2 * 5 * 4 * 3 * 8, dtype=np.float32).reshape(3, 2, 5, 4, 3, 8)
    for name in names:
        entry = next(e for e in ROWS if e.name == name)
        engine = engine_tensors(entry, g, {4: np.float32})
        assert len(engine.buffers) == 1
        cache = kv.Cache(engine.tensors, name, geometry=g)
        whole = kv.Cache(engine.buffers[0].view(np.float32), name, geometry=g)
        for layer in range(3):
            cache.key(layer)[...] = numbers[layer, 0]
            cache.value(layer)[...] = numbers[layer, 1]
        for layer in range(3):
            np.testing.assert_array_equal(whole.key(layer), numbers[layer, 0])
            np.testing.assert_array_equal(whole.value(layer), numbers[layer, 1])
        copy = engine.buffers[0].copy()
        kv.copy_blocks(cache, [(0, 4)], layers=(1, 1))
        np.testing.assert_array_equal(cache.key(1)[4], numbers[1, 0, 0])
        np.testing.assert_array_equal(cache.key(0), numbers[0, 0])
        np.testing.assert_array_equal(cache.value(2), numbers[2, 1])
        assert (engine.buffers[0] != copy).any()


# --- Natural, fused and flat shapes, padded strides.


@st.composite
def plain_orders(draw: st.DrawFn) -> str:
    """Permuted axes with KV in any place, tokens or dims split."""
    terms = list(draw(st.permutations(["B", "N", "H", "D"] + draw(st.sampled_from([[], ["L"]])))))
    terms.insert(draw(st.integers(0, len(terms) - 1)), "KV")
    for axis in draw(st.sampled_from([[], ["N"], ["D"], ["N", "D"]])):
        at = terms.index(axis)
        terms[at] = f"{axis}/2"
        terms.insert(draw(st.integers(at + 1, len(terms))), f"{axis}%2")
    if terms[-1] == "KV":
        terms[-1], terms[-2] = terms[-2], terms[-1]
    return " ".join(terms)


@settings(max_examples=200, deadline=None)
@given(
    plain_orders(),
    st.lists(st.sampled_from([0, 0, 1, 3, 64]), min_size=9, max_size=9),
    st.sampled_from([False, torch is not None]),
)
def test_natural_shape_with_padded_strides(order: str, padding: list[int], as_torch: bool) -> None:
    """One dimension a term; every stride may have padding, and the addresses are those of the text with `@`."""
    g = geometry(num_layers=2)
    shape = kv.Layout(order, g).shape
    strides, span = [], 1
    for length, pad in zip(reversed(shape), padding[: len(shape)], strict=True):
        strides.insert(0, span + pad)
        span += (length - 1) * strides[0]
    terms = order.split(" ")
    text = " ".join(f"{t}@{2 * s}" for t, s in zip(terms, strides, strict=True))
    want = kv.Layout(text, g)
    layers = 1 if "L" in terms else 2
    raw = np.random.default_rng(span).integers(0, 2**16, layers * span, dtype=np.uint16)
    if as_torch:
        memory = torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
        tensors = [memory.as_strided(shape, strides, i * span) for i in range(layers)]
    else:
        tensors = [
            np.ndarray(shape, np.uint16, raw.data, 2 * i * span, [2 * s for s in strides]) for i in range(layers)
        ]
    cache = kv.Cache(tensors, order, geometry=g)
    assert cache.layout == want
    assert str(cache.layout) == str(want)
    for plane, index in itertools.product(("key", "value"), some((2, 5, 4, 3, 8), 20)):
        tensor, byte = want.offset(plane, *index)
        view = cache.plane(index[0], plane)
        got = (
            np.ascontiguousarray(view.view(torch.int16).numpy() if as_torch else view)
            .view(np.uint16)
            .reshape(5, 4, 3, 8)
        )
        assert got[index[1:]] == raw[tensor * span + byte // 2]


@settings(max_examples=100, deadline=None)
@given(plain_orders(), st.lists(st.booleans(), min_size=8, max_size=8))
def test_fused_neighbours(order: str, cuts: list[bool]) -> None:
    """Neighbours may be one dimension where the geometry is given."""
    g = geometry(num_layers=2, dtype="f32")
    want = kv.Layout(order, g)
    shape = [want.shape[0]]
    for length, cut in zip(want.shape[1:], cuts, strict=False):
        if cut:
            shape.append(length)
        else:
            shape[-1] *= length
    tensors = [np.zeros(shape, np.float32) for _ in range(want.num_tensors)]
    assert kv.Cache(tensors, order, geometry=g).layout == want
    padded = [np.zeros([shape[0], *shape[1:-1], shape[-1] + 8], np.float32)[..., : shape[-1]] for _ in tensors]
    if len(shape) > 1:
        cache = kv.Cache(padded, order, geometry=g)
        index = (1, 4, 3, 2, 7)
        tensor, byte = cache.layout.offset("value", *index)
        cache.tensors[tensor].owner[...] = np.arange(padded[0].size, dtype=np.float32).reshape(shape)
        natural_byte = want.offset("value", *index)[1]
        position = (cache.tensors[tensor].address + byte - padded[tensor].ctypes.data) // 4
        row = shape[-1]
        assert position == natural_byte // 4 // row * (row + 8) + natural_byte // 4 % row


def test_fused_needs_the_geometry() -> None:
    array = np.zeros((5, 2, 4, 24), np.float32)
    with pytest.raises(kv.LayoutError, match=r"\[5, 2, 4, 24\].*geometry"):
        kv.Cache(array, "B KV N H D")
    assert kv.Cache(array, "B KV N H D", geometry=geometry("f32")).key().shape == (5, 4, 3, 8)
    # K and V of a packed head are the one fusion that needs no hint.
    packed = kv.Cache(np.zeros((5, 3, 4, 16), np.float32), "B H N KV D").value()
    assert packed.strides == (4 * 192, 4 * 16, 4 * 64, 4)


@pytest.mark.parametrize(
    "order", ["B KV N H D", "B H {key: D/2 N D%2, value: D N}", "L B N H KV D", "B N/2 H N%2 KV D"]
)
def test_flat_buffers(order: str) -> None:
    """At least num_bytes bytes, as the dtype itself or as bytes."""
    g = geometry(num_layers=2)
    want = kv.Layout(order, g)
    kinds = ["uint8", "uint16"] + (["torch.bfloat16", "torch.uint8", "torch.int16"] if torch is not None else [])
    for kind, extra in itertools.product(kinds, [0, 7]):
        item = 1 if kind.endswith("uint8") else 2

        def zeros(length: int, kind: str = kind) -> Any:
            if kind.startswith("torch."):
                return torch.zeros(length, dtype=getattr(torch, kind.removeprefix("torch.")))
            return np.zeros(length, kind)

        length = want.num_bytes // item
        cache = kv.Cache([zeros(length + extra) for _ in range(want.num_tensors)], order, geometry=g)
        assert cache.layout == want
        with pytest.raises(kv.LayoutError, match=f"{want.num_bytes} bytes"):
            kv.Cache([zeros(length - 1) for _ in range(want.num_tensors)], order, geometry=g)


def test_flat_buffers_of_two_parts() -> None:
    g = geometry(value_head_size=4, dtype="f32")
    order = "key: B N H D | value: B H D N"
    keys, values = np.arange(480, dtype=np.float32), np.arange(240, dtype=np.float32)
    cache = kv.Cache((keys, values), order, geometry=g)
    assert cache.key()[4, 3, 2, 7] == 479
    assert cache.value()[4, 3, 2, 1] == 4 * 48 + 2 * 16 + 1 * 4 + 3
    with pytest.raises(kv.LayoutError):
        kv.Cache((values, keys), order, geometry=g)


@needs_torch
def test_padded_outer_strides_of_the_engine() -> None:
    """A block stride that is more than the block, as hybrid models have it."""
    storage = torch.arange(5 * 300, dtype=torch.float32)
    tensor = storage.as_strided((5, 2, 4, 3, 8), (300, 96, 24, 8, 1), 0)
    cache = kv.Cache(tensor, "vllm/flashinfer-nhd")
    assert str(cache.layout) == "B[5]@1200 KV N[4] H[3] D[8] f32".replace(" f32", "")
    assert cache.value()[3, 1, 2, 5].item() == 3 * 300 + 96 + 24 + 16 + 5
    hybrid = storage.as_strided((2, 5, 4, 3, 8), (96, 300, 24, 8, 1), 0)
    cache = kv.Cache(hybrid, "vllm/hybrid-nhd")
    assert cache.value()[3, 1, 2, 5].item() == 3 * 300 + 96 + 24 + 16 + 5
    with pytest.raises(kv.LayoutError, match=r"strides \[96, 300, 24, 8, 1\]"):
        kv.Cache(hybrid, "vllm/flash-attention-nhd")


@needs_torch
def test_strides_must_fall_in_the_orders_sequence() -> None:
    nhd = torch.zeros(5, 2, 4, 3, 8)
    hnd = torch.zeros(5, 2, 3, 4, 8).transpose(2, 3)
    assert nhd.shape == hnd.shape
    assert kv.Cache(nhd, "vllm/flashinfer-nhd").key().stride() == (192, 24, 8, 1)
    assert kv.Cache(hnd, "vllm/flashinfer-hnd").key().stride() == (192, 8, 32, 1)
    with pytest.raises(kv.LayoutError, match=r"\[5, 2, 4, 3, 8\] strides \[192, 96, 8, 32, 1\].*B,2,N,H,D"):
        kv.Cache(hnd, "vllm/flashinfer-nhd")
    with pytest.raises(kv.LayoutError, match=r"\[5, 2, 4, 3, 8\]"):
        kv.Cache(nhd, "vllm/flashinfer-hnd", geometry=geometry("f32"))


# --- Views: the same memory.


@needs_torch
@pytest.mark.parametrize("dtype", TORCH)
def test_torch_views(dtype: str) -> None:
    """data_ptr, storage, shape, stride, offset and dtype; writing is seen on the other side."""
    kind = getattr(torch, TORCH[dtype])
    storage = torch.zeros(7 * 8 + 5 * 192, dtype=torch.int32).view(kind)
    tensor = storage[7:].as_strided((5, 2, 4, 3, 8), (192, 96, 24, 8, 1), 7)
    cache = kv.Cache(tensor, "B KV N H D")
    assert cache.layout.planes == {"key": dtype, "value": dtype}
    for view, half in ((cache.key(), 0), (cache.value(), 1)):
        expected = tensor[:, half]
        assert view.dtype == kind
        assert tuple(view.shape) == (5, 4, 3, 8)
        assert view.stride() == expected.stride() == (192, 24, 8, 1)
        assert view.storage_offset() == expected.storage_offset() == 7 + 96 * half
        assert view.data_ptr() == expected.data_ptr()
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    cache.value().view(bits)[4, 3, 2, 7] = 77
    assert tensor.view(bits)[4, 1, 3, 2, 7] == 77
    tensor.view(bits)[2, 0, 1, 0, 3] = 55
    assert cache.key().view(bits)[2, 1, 0, 3] == 55


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_views(dtype: str) -> None:
    """ml_dtypes in, ml_dtypes out."""
    array = np.zeros((5, 3, 4, 16), dtype=NUMPY[dtype])
    cache = kv.Cache(array, "B H N KV D")
    assert cache.layout.planes == {"key": dtype, "value": dtype}
    key, value = cache.key(), cache.value()
    assert type(key) is np.ndarray
    assert key.dtype == value.dtype == array.dtype
    assert key.shape == value.shape == (5, 4, 3, 8)
    item = array.dtype.itemsize
    assert key.strides == value.strides == tuple(item * s for s in (192, 16, 64, 1))
    assert key.__array_interface__["data"][0] == array.ctypes.data
    assert value.__array_interface__["data"][0] == array.ctypes.data + 8 * item
    assert np.shares_memory(key, array)
    value.view(np.uint8)[4, 3, 2, -1] = 7
    assert array.view(np.uint8)[4, 2, 3, -1] == 7


@pytest.mark.parametrize(
    ("dtype", "carrier"),
    [("bf16", np.uint16), ("f16", np.uint16), ("f8_e4m3", np.uint8), ("f8_e5m2", np.uint8)],
)
def test_numpy_carriers(dtype: str, carrier: type) -> None:
    """Without ml_dtypes bf16 is uint16 and f8 is uint8; the dtype comes from the geometry or the order."""
    array = np.arange(960).astype(carrier).reshape(5, 2, 4, 3, 8)
    cache = kv.Cache(array, "B KV N H D", geometry=geometry(dtype))
    assert cache.layout.planes == {"key": dtype, "value": dtype}
    assert cache.key().view(carrier)[3, 1, 2, 5] == array[3, 0, 1, 2, 5]
    assert np.shares_memory(cache.key(), array)
    assert kv.Cache(array, f"B KV N H D {dtype}").layout.planes["key"] == dtype
    if carrier != np.uint8:
        with pytest.raises(kv.DTypeError, match="uint16"):
            kv.Cache(array, "B KV N H D")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_numbers_are_no_carriers(dtype: str) -> None:
    """int16 in numpy are numbers; in torch, which of old has no uint16, they may be the bits of others."""
    array = np.arange(960).astype(np.int16).reshape(5, 2, 4, 3, 8)
    with pytest.raises(kv.DTypeError, match="int16"):
        kv.Cache(array, "B KV N H D", geometry=geometry(dtype))
    if torch is not None:
        cache = kv.Cache(torch.from_numpy(array), "B KV N H D", geometry=geometry(dtype))
        assert cache.layout.planes["key"] == dtype


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=needs_torch)])
def test_views_of_records(framework: str) -> None:
    """A uint8 record of f8 data, f32 scales and bf16 rope: each plane has its dtype, nothing is copied."""
    raw = np.random.default_rng(3).integers(0, 120, (5, 4, 656), dtype=np.uint8)
    tensor = raw if framework == "numpy" else torch.from_numpy(raw)
    cache = kv.Cache(tensor, "vllm/fp8-ds-mla", geometry=geometry(head_size=576))
    latent, scale, rope = (cache.plane(0, p) for p in ("latent", "latent_scale", "rope"))
    assert tuple(latent.shape) == (5, 4, 1, 512)
    assert tuple(scale.shape) == (5, 4, 1, 4)
    assert tuple(rope.shape) == (5, 4, 1, 64)
    if framework == "numpy":
        assert (latent.dtype, scale.dtype, rope.dtype) == (np.uint8, np.float32, np.uint16)
        rope_bits, scale_bits = rope, scale.view(np.uint32)
    else:
        assert (latent.dtype, scale.dtype, rope.dtype) == (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
        assert {v.untyped_storage().data_ptr() for v in (latent, scale, rope)} == {tensor.untyped_storage().data_ptr()}
        rope_bits, scale_bits = rope.view(torch.int16).numpy(), scale.view(torch.int32).numpy()
    assert int(rope_bits[3, 2, 0, 9]) == int(raw[3, 2, 528 + 18 : 528 + 20].view(np.uint16)[0])
    assert int(scale_bits[4, 1, 0, 3]) == int(raw[4, 1, 524:528].view(np.uint32)[0])
    cache = kv.Cache(np.zeros((5, 4, 584), np.uint8), "vllm/ds-mla-584", geometry=geometry(head_size=576))
    assert cache.plane(0, "latent_scale").strides == (584 * 4, 584, 7, 1)


@needs_torch
def test_views_of_half_byte_data() -> None:
    """NVFP4: dims count storage bytes."""
    g = geometry(head_size=32, block_size=4)
    tensor = torch.zeros(5, 6, 4, 18, dtype=torch.uint8)
    cache = kv.Cache(tensor, "vllm/nvfp4-hnd-sm100", geometry=g)
    assert tuple(cache.key().shape) == (5, 4, 3, 16)
    assert cache.key().stride() == (6 * 4 * 18, 16, 64, 1)
    assert tuple(cache.plane(0, "key_scale").shape) == (5, 4, 3, 2)
    assert cache.plane(0, "key_scale").dtype == torch.float8_e4m3fn
    swizzled = cache.plane(0, "value_scale")
    assert tuple(swizzled.shape) == (5, 4, 3, 2)  # N/4 has length 1 here, so four tokens are one mode
    assert swizzled.stride() == (432, 1, 8, 4)
    packed = torch.zeros(5, 2, 4, 3, 16, dtype=torch.float4_e2m1fn_x2)
    cache = kv.Cache(packed, "B KV N H D[D/2] f4x2", geometry=g)
    assert cache.key().dtype == torch.float4_e2m1fn_x2
    assert tuple(cache.value().shape) == (5, 4, 3, 16)


SHAPES = [
    # order, sizes, shape of plane(), strides in elements
    ("B N {key: D, value: D}", {}, (5, 4, 1, 8), (64, 16, 8, 1)),
    ("N H KV D", {}, (1, 4, 3, 8), (192, 48, 16, 1)),
    ("B H KV D", {"block_size": 1}, (5, 1, 3, 8), (48, 48, 16, 1)),
    ("B KV N H D", {"num_blocks": 1}, (1, 4, 3, 8), (96, 24, 8, 1)),
    ("B KV N H D", {"head_size": 1}, (5, 4, 3, 1), (24, 3, 1, 1)),
    ("B H KV N", {"head_size": 1}, (5, 4, 3, 1), (24, 1, 8, 1)),
    ("B KV H N D", {"num_kv_heads": 1}, (5, 4, 1, 8), (64, 8, 8, 1)),
    ("D H N KV B", {}, (5, 4, 3, 8), (1, 10, 40, 120)),
]


@pytest.mark.parametrize(("order", "sizes", "shape", "strides"), SHAPES, ids=[f"{o} {s}" for o, s, _, _ in SHAPES])
def test_axes_without_a_mode(order: str, sizes: dict[str, int], shape: tuple, strides: tuple) -> None:
    """Length 1 and the stride next inner stride × next inner length."""
    g = geometry(**sizes)
    cache = kv.Cache(np.zeros(kv.Layout(order, g).num_bytes // 2, np.uint16), order, geometry=g)
    assert cache.key().shape == cache.plane(0, "key").shape == shape
    assert cache.key().strides == cache.plane(0, "value").strides == tuple(2 * s for s in strides)


def test_split_axes() -> None:
    """NotStrided names the view that exists; that has the digits in place of their axis, outermost first."""
    g = geometry(head_size=16)
    order = "{key: B H D/x N D%x, value: B H D N}"
    array = np.arange(2 * 5 * 3 * 16 * 4, dtype=np.uint16)
    cache = kv.Cache(array, order, geometry=g)
    with pytest.raises(kv.NotStrided, match=r'dim is split.*cache.plane\(layer, "key"\)') as caught:
        cache.key()
    assert isinstance(caught.value, kv.LayoutError)
    key = cache.plane(0, "key")
    assert key.shape == (5, 4, 3, 2, 8)
    assert key.strides == (2 * 192, 2 * 8, 2 * 64, 2 * 32, 2)
    assert cache.value().strides == (2 * 192, 2, 2 * 64, 2 * 4)
    assert key[4, 3, 2, 1, 5] == 4 * 192 + 2 * 64 + 32 + 24 + 5
    assert cache.value()[4, 3, 2, 13] == 960 + 4 * 192 + 2 * 64 + 13 * 4 + 3
    tokens = kv.Cache(array, "B N/2 H KV N%2 D", geometry=g)
    assert tokens.plane(0, "key").shape == (5, 2, 2, 3, 16)
    assert tokens.plane(0, "key").strides == (768, 384, 32, 128, 2)
    whole = kv.Cache(array[: 2 * 5 * 4 * 3 * 8], "B KV H D/x N D%x", geometry=geometry())  # x is all of D
    assert whole.key().strides == (384, 16, 64, 2)


def test_unaligned_planes_have_no_view() -> None:
    """f32 scales at a stride of 10 bytes."""
    cache = kv.Cache(
        np.zeros((5, 4, 10), np.uint8), "B N {latent: D[6] u8, latent_scale: D[1] f32}", geometry=geometry()
    )
    assert cache.plane(0, "latent").strides == (40, 10, 6, 1)
    with pytest.raises(kv.NotStrided, match=r"10 bytes.*item size 4"):
        cache.plane(0, "latent_scale")


# --- Several tensors.


@needs_torch
def test_list_of_layers() -> None:
    tensors = [torch.full((5, 2, 4, 3, 8), float(i)) for i in range(3)]
    cache = kv.Cache(tensors, "B KV N H D")
    assert cache.layout.geometry.num_layers == 3
    assert cache.layout.num_tensors == 3
    for i in range(3):
        assert cache.key(i).data_ptr() == tensors[i].data_ptr()
        assert cache.value(i).data_ptr() == tensors[i].data_ptr() + 96 * 4
    assert kv.Cache(tensors, "B KV N H D", geometry=geometry("f32")).layout.geometry.num_layers == 3
    assert kv.Cache(tuple(tensors), "B KV N H D").value(2)[0, 0, 0, 0] == 2.0
    with pytest.raises(kv.LayoutError, match=r"3 tensors.*num_layers is 4"):
        kv.Cache(tensors, "B KV N H D", geometry=geometry("f32", num_layers=4))
    with pytest.raises(kv.BlockIndexError, match=r"layer 3.*num_layers is 3"):
        cache.key(3)


@needs_torch
def test_keys_and_values() -> None:
    """(keys, values): a pair of tensors, or of lists of one a layer; vLLM's HPU and llama.cpp."""
    order = "key: B N H D | value: B H D N"
    keys = [torch.full((5, 4, 3, 8), float(i)) for i in range(2)]
    values = [torch.full((5, 3, 8, 4), float(10 + i)) for i in range(2)]
    one = kv.Cache((keys[0], values[0]), order)
    assert one.key().data_ptr() == keys[0].data_ptr()
    assert one.value().stride() == (96, 1, 32, 4)
    both = kv.Cache((keys, values), order)
    assert both.layout.num_tensors == 4
    for i in range(2):
        assert both.key(i).data_ptr() == keys[i].data_ptr()
        assert both.value(i).data_ptr() == values[i].data_ptr()
    assert both.layout.offset("value", 1) == (3, 0)
    halves = torch.zeros(5, 2, 4, 3, 8)
    cache = kv.Cache((halves[:, 0], halves[:, 1]), "key: B N H D | value: B N H D")
    kv.zero_blocks(cache, [])
    cache.value().fill_(1)
    assert halves.sum() == halves[:, 1].numel() == halves[:, 1].sum()


# --- DLPack, read-only memory, lifetime.


class Exporter:
    """Anything with DLPack that is neither numpy nor torch."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.owner.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.owner.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["f32", "f16", "i8", "u8", "i32", "bf16", "f8_e4m3", "f8_e5m2"])
def test_dlpack(dtype: str) -> None:
    """Zero copies; types that numpy has not come out as torch tensors."""
    if torch is not None:
        tensor = torch.zeros(5 * 2 * 4 * 3 * 8 * 4, dtype=torch.uint8).view(getattr(torch, TORCH[dtype]))[:960]
        tensor = tensor.view(5, 2, 4, 3, 8)
        cache = kv.Cache(Exporter(tensor), "B KV N H D")
        assert cache.layout.planes["key"] == dtype
        assert address_of(cache.value(), (2, 1, 0, 3)) == tensor[2, 1, 1, 0, 3].data_ptr()
    if dtype in ("f32", "f16", "i8", "u8", "i32"):
        array = np.zeros((5, 2, 4, 3, 8), NUMPY[dtype])
        cache = kv.Cache(Exporter(array), "B KV N H D")
        cache.key()[1, 2, 0, 3] = 9
        assert array[1, 0, 2, 0, 3] == 9


def test_read_only_stays_read_only() -> None:
    array = np.zeros((5, 2, 4, 3, 8), np.float32)
    array.flags.writeable = False
    for tensor in (array, Exporter(array), [array]):
        cache = kv.Cache(tensor, "B KV N H D")
        assert cache.read_only
        assert not cache.key().flags.writeable
        assert not cache.plane(0, "value").flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            cache.key()[0, 0, 0, 0] = 1
    writable = np.zeros((5, 2, 4, 3, 8), np.float32)
    assert not kv.Cache(writable, "B KV N H D").read_only
    mixed = kv.Cache([writable, array], "B KV N H D")
    assert mixed.read_only
    assert mixed.key(0).flags.writeable
    assert not mixed.key(1).flags.writeable
    kv.convert_blocks(kv.Cache(array, "B KV N H D"), kv.Cache(writable, "B KV N H D"), [(0, 1)])  # a source may be


@pytest.mark.parametrize("mode", ["c", "r"])
def test_memory_map(mode: str, tmp_path: Any) -> None:
    """A read-only map is read-only, a copy-on-write map is not; both are read in place."""
    path = tmp_path / "cache"
    np.arange(960, dtype=np.float32).tofile(path)
    array = np.memmap(path, np.float32, mode, shape=(5, 2, 4, 3, 8))
    cache = kv.Cache(array, "B KV N H D")
    assert cache.read_only == (mode == "r")
    assert cache.value()[4, 3, 2, 7] == 959
    assert cache.key().__array_interface__["data"][0] == array.ctypes.data


def test_views_keep_their_owner_alive() -> None:
    class Owner(np.ndarray):
        """An array that can be watched."""

    array = np.zeros((5, 2, 4, 3, 8), np.float32).view(Owner)
    array[...] = 3
    alive = weakref.ref(array)
    view = kv.Cache(array, "B KV N H D").value()[1:, 2]
    del array
    gc.collect()
    assert alive() is not None
    assert (view == 3).all()
    del view
    gc.collect()
    assert alive() is None


@needs_torch
def test_torch_views_keep_their_storage_alive() -> None:
    numbers = np.full(960, 3, np.float32)
    alive = weakref.ref(numbers)
    tensor = torch.from_numpy(numbers).view(5, 2, 4, 3, 8)
    del numbers
    plane = kv.Cache(tensor, "B KV N H D").plane(0, "value")
    other = kv.Cache(tensor.view(torch.uint8).view(-1), "B KV N H D", geometry=geometry("f32")).key()
    del tensor
    gc.collect()
    assert alive() is not None
    assert (plane == 3).all() and (other == 3).all()
    del plane, other
    gc.collect()
    assert alive() is None


def test_caches_and_plans_keep_their_tensors_alive() -> None:
    source = np.full((5, 2, 4, 3, 8), 3, np.float32)
    target = np.zeros((5, 2, 4, 3, 8), np.float32)
    plan = kv.Plan(kv.Cache(source, "B KV N H D"), kv.Cache(target, "B KV N H D")).bind([(1, 2)])
    del source
    gc.collect()
    plan.run()
    assert (target[2] == 3).all()


# --- Reading the registry's own rules.


def test_engine_tensors_differ_by_row() -> None:
    """The helper under the declared shapes is not the identity: rows of one shape have other addresses."""
    g = kv.Geometry(num_layers=1, num_blocks=5, block_size=32, num_kv_heads=6, head_size=32)
    made = {}
    for entry in ROWS:
        if not entry.opaque and entry.shape in ("B,H,N,2*D", "B,2,N,H,D") and has_axis(entry, "B"):
            engine = engine_tensors(entry, g)
            index = (0, 3, 5, 4, 7)
            made[entry.name] = engine.address("value", index) - engine.addresses[0]
    assert made["vllm/packed-nhd"] == 2 * (((3 * 32 + 5) * 6 + 4) * 64 + 32 + 7)
    assert made["vllm/packed-hnd"] == 2 * (((3 * 6 + 4) * 32 + 5) * 64 + 32 + 7)
    assert made["vllm/lhbnc"] == 2 * (((4 * 5 + 3) * 32 + 5) * 64 + 32 + 7)
    assert made["vllm/flex-attention"] == 2 * (((3 * 32 + 5) * 2 + 1) * 192 + 4 * 32 + 7)


def test_memory_that_moved_is_refused() -> None:
    """A verb must not write where the tensor once was."""
    array = np.zeros((4, 2, 3, 2, 8), np.float32)
    cache = kv.Cache(array, "B KV N H D")
    array.resize((400, 2, 3, 2, 8), refcheck=False)
    if array.ctypes.data != cache.tensors[0].address:
        for verb in (lambda: kv.zero_blocks(cache, [0]), lambda: cache.key(0)):
            with pytest.raises(kv.ArgumentError, match="moved or freed"):
                verb()


def test_an_array_that_was_made_read_only_is_not_written() -> None:
    arrays = [np.zeros((4, 2, 3, 2, 8), np.float32) for _ in range(2)]
    cache = kv.Cache(arrays, "B KV N H D")
    other = kv.Cache([np.ones((4, 2, 3, 2, 8), np.float32) for _ in range(2)], "B KV N H D")
    kv.swap_blocks(other, cache, [(0, 0)])
    assert not cache.read_only
    arrays[1].setflags(write=False)
    for verb in (lambda: kv.zero_blocks(cache, [0]), lambda: kv.swap_blocks(other, cache, [(1, 1)])):
        with pytest.raises(kv.ArgumentError, match="read-only"):
            verb()
    assert cache.read_only
    assert cache.key(0).flags.writeable
    assert not cache.key(1).flags.writeable
    assert arrays[1][0].all()
    assert not arrays[1][1:].any()
    kv.swap_blocks(cache, other, [(3, 0)])  # it is still read
    assert not other.key(1)[0].any()


def test_torch_storage_that_was_released_is_refused() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 2, 3, 2, 8)
    cache = kv.Cache(tensor, "B KV N H D")
    plan = kv.Plan(cache, kv.Cache(torch.zeros(4, 2, 3, 2, 8), "B KV N H D")).bind([(0, 1)])
    tensor.untyped_storage().resize_(0)
    for verb in (lambda: kv.zero_blocks(cache, [0]), lambda: cache.key(0), plan.run):
        with pytest.raises(kv.ArgumentError, match="moved or freed"):
            verb()


def test_scales_of_write_tokens_are_never_dropped() -> None:
    """f8 tokens into an f8 cache are stored as they come, or refused: a scale has no effect that could be lost."""
    torch = pytest.importorskip("torch")
    memory = torch.zeros(4, 2, 8, 2, 8, dtype=torch.float8_e4m3fn)
    cache = kv.Cache(memory, "B KV N H D")
    same, other = (torch.full((1, 2, 8), 4.0).to(t) for t in (torch.float8_e4m3fn, torch.float8_e5m2))
    with pytest.raises(kv.DTypeError):
        kv.write_tokens(cache, 0, other, other, [0])
    with pytest.raises(kv.ArgumentError, match="key_scale"):
        kv.write_tokens(cache, 0, same, same, [0], key_scale=2.0)
    assert not memory.view(torch.uint8).any()
    kv.write_tokens(cache, 0, same, same, [0])
    assert (memory[0, :, 0].float() == 4.0).all()


@pytest.mark.parametrize("blocks, tokens, heads", [(3, 4, 2), (1, 4, 1), (1, 1, 1)])
def test_a_value_tensor_has_the_value_head_size(blocks, tokens, heads):
    """Found by fuzzing: it was taken with the key's, so that a view of it ended behind its memory."""
    sizes = kv.Geometry(
        num_blocks=blocks, block_size=tokens, num_kv_heads=heads, head_size=6, value_head_size=10, dtype="i8"
    )
    key, value, short = (np.zeros((blocks, tokens, heads, dim), np.int8) for dim in (6, 10, 6))
    for order in ("key: B N H D | value: B N H D", "key: B N H D | value: H N B D"):
        turned = value if "H N B" not in order else np.ascontiguousarray(value.transpose(2, 1, 0, 3))
        cache = kv.Cache((key, turned), order, geometry=sizes)
        assert cache.value().shape == (blocks, tokens, heads, 10) and cache.key().shape[-1] == 6
        with pytest.raises(kv.LayoutError, match="does not fit"):
            kv.Cache((key, short if turned is value else short.transpose(2, 1, 0, 3).copy()), order, geometry=sizes)
