# SPDX-License-Identifier: Apache-2.0
"""Keys and values of every layout that the registry knows and of every backend of the installed vLLM, as views."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvstride as kv
from absent import stand_ins
from declared import declared_strides, engine_tensors
from kvstride import modelopt
from kvstride.vllm import engine, layout_of_backend
from kvstride.vllm.families import Interior
from kvstride.vllm.probe import layouts_of

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

try:
    RELEASE = engine.release()
except kv.EngineError:
    if os.environ.get("KVSTRIDE_REQUIRE_VLLM"):
        raise
    pytest.skip("no vLLM here", allow_module_level=True)

torch = pytest.importorskip("torch")
SIZES = {"num_blocks": 5, "block_size": 32, "num_kv_heads": 6, "head_size": 32}
SYMBOLS = {"k": 8, "g": 3}
STRIDED, SPLIT = [], []
for _entry in kv.registry():
    if "latent" in _entry.order or "index" in _entry.order or "scale" in _entry.order:
        continue
    (SPLIT if any(m in _entry.order for m in ("%x", "%16", "N%k", "H%g")) else STRIDED).append(_entry)


@pytest.fixture(scope="module", autouse=True)
def absent_packages() -> Iterator[None]:
    """FlashInfer's classes can be asked without FlashInfer."""
    with stand_ins():
        yield


def sizes_for(entry: kv.Entry) -> dict[str, Any]:
    """Sizes that the row can have: caches without an axis B are one block."""
    blocks = {} if "B" in entry.order.split() or "B H" in entry.order else {"num_blocks": 1}
    return SIZES | blocks | {"dtype": "f32" if "amx32" in entry.name else "bf16"}


def layers_of(entry: kv.Entry) -> tuple[int, ...]:
    """Layers that may share a row's allocation while a tensor is of one."""
    return (1, 3) if "L" in entry.order.split() and "L" not in entry.shape else (1,)


def assert_same_memory(split: modelopt.SplitCache, memory: Any, layout: kv.Layout) -> None:
    """Each view has the cache's addresses, and what is written through it stands where the layout says."""
    parts = memory if isinstance(memory, tuple) else (memory,)
    g = layout.geometry
    for plane, view, dims in (
        ("key", split.key, g.head_size),
        ("value", split.value, g.value_head_size or g.head_size),
    ):
        assert tuple(view.shape) == (g.num_blocks, g.block_size, g.num_kv_heads, dims)
        tensor, first = layout.offset(plane)
        owner = parts[tensor]
        assert view.data_ptr() == owner.data_ptr() + first
        assert view.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()
        rng = np.random.default_rng(first)
        for number in range(1, 9):
            at = tuple(int(rng.integers(n)) for n in view.shape)
            view[at] = number
            byte = layout.offset(plane, 0, *at)[1]
            item = view.element_size()
            assert sum(i * s for i, s in zip(at, view.stride(), strict=True)) * item == byte - first
            flat = torch.empty(0, dtype=view.dtype).set_(owner.untyped_storage(), 0, (byte // item + 1,), (1,))
            assert float(flat[owner.storage_offset() + byte // item]) == number


def test_the_registry_is_divided() -> None:
    assert len(STRIDED) >= 35 and len(SPLIT) >= 12


@pytest.mark.parametrize("entry", STRIDED, ids=lambda e: e.name)
def test_views_of_a_registry_layout(entry: kv.Entry) -> None:
    for layers in layers_of(entry):
        sizes = sizes_for(entry)
        layout = kv.layout(entry.name, kv.Geometry(num_layers=layers, **sizes, **SYMBOLS))
        made = modelopt.make_kv_cache(entry.name, **sizes, **SYMBOLS, num_layers=layers)
        for given in (entry.name, entry.order, kv.layout(entry.name, kv.Geometry(**sizes, **SYMBOLS))):
            if given == entry.order and entry.opaque:
                continue  # an order alone does not know the shape that an engine declares
            hints = {} if isinstance(given, kv.Layout) else {"num_kv_heads": 6, "head_size": 32}
            try:
                split = modelopt.split_kv_cache(made, given, **hints)
            except kv.LayoutError as error:
                # the declared shape of a row is not always a natural shape of its order
                assert given == entry.order and "does not fit" in str(error), str(error)
                continue
            assert_same_memory(split, made, layout)
            assert split.page_size == sizes["block_size"]
            key, value = split
            assert key is split.key and value is split.value


@pytest.mark.parametrize("entry", STRIDED + SPLIT, ids=lambda e: e.name)
def test_built_tensors_are_those_that_rows_declare(entry: kv.Entry) -> None:
    """Against the oracle of the registry's own tests, and through kv.Cache."""
    for layers in layers_of(entry):
        sizes = sizes_for(entry)
        geometry = kv.Geometry(num_layers=layers, **sizes, **SYMBOLS)
        made = modelopt.make_kv_cache(entry.name, **sizes, **SYMBOLS, num_layers=layers)
        parts = made if isinstance(made, tuple) else (made,)
        for part, tensor in enumerate(parts):
            shape, strides, item = declared_strides(entry, kv.layout(entry.name, geometry), part)
            assert list(tensor.shape) == shape
            have = [s * item for s, n in zip(tensor.stride(), shape, strict=True) if n > 1]
            assert have == [s for s, n in zip(strides, shape, strict=True) if n > 1]
        one = kv.Geometry(**sizes, **SYMBOLS)
        assert set(kv.Cache(made, entry.name, geometry=one).layout.planes) == {"key", "value"}


@pytest.mark.parametrize("entry", SPLIT, ids=lambda e: e.name)
def test_layouts_without_views_say_what_to_do(entry: kv.Entry) -> None:
    sizes = sizes_for(entry)
    made = modelopt.make_kv_cache(entry.name, **sizes, **SYMBOLS)
    layout = kv.layout(entry.name, kv.Geometry(**sizes, **SYMBOLS))
    with pytest.raises(kv.NotStrided, match=r"kv\.attention reads this cache as it is") as caught:
        modelopt.split_kv_cache(made, layout)
    assert str(list(made.shape)) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", [e for e in STRIDED if not e.opaque and "L" not in e.shape], ids=lambda e: e.name)
def test_views_of_an_engines_numpy_tensors(entry: kv.Entry) -> None:
    geometry = kv.Geometry(num_layers=1, **sizes_for(entry), **SYMBOLS)
    made = engine_tensors(entry, geometry)
    tensors = tuple(column[0] for column in made.tensors) if isinstance(made.tensors, tuple) else made.tensors
    key, value = modelopt.split_kv_cache(tensors, kv.layout(entry.name, geometry))
    for plane, view in (("key", key), ("value", value)):
        assert view.ctypes.data == made.address(plane, (0, 0, 0, 0, 0))
        last = tuple(n - 1 for n in view.shape)
        at = view.ctypes.data + sum(i * s for i, s in zip(last, view.strides, strict=True))
        assert at == made.address(plane, (0, *last))


# --- Backends -------------------------------------------------------------------------------------------------------


def backends() -> list[tuple[str, str]]:
    return [(name, path) for name, path in engine.backend_paths().items()]


@pytest.mark.parametrize(("name", "path"), backends(), ids=lambda value: value.rpartition(".")[2])
def test_views_of_a_backend(name: str, path: str) -> None:
    try:
        found = engine.load(path)
    except kv.EngineError as error:
        pytest.skip(str(error))
    for letters in layouts_of(found):
        for layers in (1, 3):
            sizes = SIZES | {"num_kv_heads": 3, "head_size": 64}
            given = {"layout": letters, "num_layers": layers, "dtype": "bf16"}
            try:
                named = layout_of_backend(found, **sizes, **given)
            except (kv.LayoutError, kv.EngineError) as refused:
                # what has no name has no tensor either
                with pytest.raises(type(refused)):
                    modelopt.make_kv_cache(found, **sizes, **given)
                continue
            if named.interior is Interior.STATE:
                with pytest.raises(kv.LayoutError, match="recurrent state"):
                    modelopt.make_kv_cache(found, **sizes, **given)
                continue
            made = modelopt.make_kv_cache(found, **sizes, **given)
            assert tuple(made.shape) == named.shape
            item = made.element_size()
            assert [s * item for s in made.stride()] == [named.strides[a] for a in named.axes]
            asked = [(found, {"num_kv_heads": 3, "head_size": 64}), (name, {"num_kv_heads": 3, "head_size": 64})]
            if "H*D" not in named.axes:
                asked.append((found, {}))
            for backend, hints in asked:
                if named.interior is Interior.CPU_TILE:
                    _assert_tile(named, made, backend, hints)
                elif set(named.layout().planes) != {"key", "value"}:
                    with pytest.raises(kv.LayoutError, match="no keys and values alone"):
                        modelopt.split_kv_cache(made, backend, **hints)
                elif "%" in named.order:
                    with pytest.raises(kv.NotStrided, match=r"kv\.attention reads"):
                        modelopt.split_kv_cache(made, backend, **hints)
                else:
                    split = modelopt.split_kv_cache(made, backend, **hints)
                    assert_same_memory(split, made, named.layout())
                    assert split.dense_dim


def _assert_tile(named: Any, made: Any, backend: Any, hints: dict[str, int]) -> None:
    """The CPU's tiles: AMX's are split, those of vectors have keys the other way round."""
    if "%" in named.order:
        with pytest.raises(kv.NotStrided):
            modelopt.split_kv_cache(made, backend, **hints)
        return
    split = modelopt.split_kv_cache(made, backend, **hints)
    assert_same_memory(split, made, named.layout())
    assert not split.dense_dim


def test_backends_of_modelopts_plugin_are_seen() -> None:
    known = {path.rpartition(".")[2] for _, path in backends()}
    assert {"FlashAttentionBackend", "FlashInferBackend", "TritonAttentionBackend", "CPUAttentionBackend"} <= known


def test_members_of_the_enumeration_are_asked_too() -> None:
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    member = registry.AttentionBackendEnum.FLASH_ATTN
    made = modelopt.make_kv_cache(member, **SIZES)
    assert modelopt.split_kv_cache(made, member).key.shape == (5, 32, 6, 32)


def test_the_two_plugins_that_others_restated() -> None:
    """Keys first, then values, in one dimension: [B, H, N, 2 D] of both, from 0.29 on."""
    if not engine.by_enum():
        pytest.skip("0.29 and newer")
    for backend in ("FLASH_ATTN", "FLASHINFER"):
        cache = modelopt.make_kv_cache(backend, **SIZES, fill=7.0)
        assert (cache == 7).all()
        key, value = modelopt.split_kv_cache(cache, backend)
        value.zero_()
        assert (cache[..., :32] == 7).all() and (cache[..., 32:] == 0).all()
        assert torch.equal(key, cache.transpose(1, 2)[..., :32])


@pytest.mark.parametrize("backend", ["vllm/blhnc", "vllm/bhlnc", "FLASH_ATTN"])
def test_a_layer_among_others_lies_in_memory_for_all(backend: str) -> None:
    """So that whatever is made next is not between the bytes that the last block would reach."""
    if "/" not in backend and not engine.by_enum():
        pytest.skip("0.29 and newer")
    layout = None if "/" in backend else "BLHNC"
    cache = modelopt.make_kv_cache(backend, **SIZES, layout=layout, num_layers=3, fill=2.0)
    assert cache.untyped_storage().nbytes() == 3 * 5 * 32 * 6 * 64 * 2
    whole = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())
    assert (whole == 2).all()


def test_fp8_bytes_come_as_what_they_are() -> None:
    cache = modelopt.make_kv_cache("FLASH_ATTN", **SIZES, cache_dtype="fp8")
    assert cache.dtype == torch.uint8
    key, value = modelopt.split_kv_cache(cache, "FLASH_ATTN", cache_dtype="fp8")
    assert key.dtype == value.dtype == torch.float8_e4m3fn
    assert key.data_ptr() == cache.data_ptr()


def test_values_of_another_head_size() -> None:
    backend = next((name for name, _ in backends() if name.endswith("DIFFKV")), None)
    if backend is None:
        pytest.skip(f"vLLM {RELEASE} has no such backend")
    cache = modelopt.make_kv_cache(backend, **SIZES, value_head_size=16, fill=0.5)
    key, value = modelopt.split_kv_cache(cache, backend, value_head_size=16)
    assert (key.shape[-1], value.shape[-1]) == (32, 16)
    assert (key == 0.5).all() and (value == 0.5).all()
    value.fill_(2)
    assert (cache[..., 32:] == 2).all() and (cache[..., :32] == 0.5).all()


def test_a_slice_of_a_larger_tensor_is_split_where_it_lies() -> None:
    whole = torch.zeros(9, 6, 32, 64)
    key, _ = modelopt.split_kv_cache(whole[2:7], "vllm/lbhnc")
    assert key.data_ptr() == whole[2].data_ptr()
    assert key.shape[0] == 5


@pytest.mark.parametrize(
    ("shape", "backend", "hints", "error", "message"),
    [
        ((5, 2, 32, 6, 32), "FLASH_ATTN", {}, kv.LayoutError, r"\[5, 2, 32, 6, 32\].*declares \[B, H, N, KV\*D\]"),
        ((5,), "FLASH_ATTN", {}, kv.LayoutError, r"\[5\].*1 dimensions"),
        ((5, 6, 32, 64), "FLASH_ATTN", {"head_size": 64}, kv.LayoutError, r"\[5, 6, 32, 64\]"),
        ((5, 6, 32, 64), "FLASH_ATTN", {"num_kv_heads": 5}, kv.LayoutError, r"\[5, 6, 32, 64\]"),
        ((5, 6, 32, 63), "FLASHINFER", {}, kv.LayoutError, r"\[5, 6, 32, 63\]"),
        ((5, 6, 32, 64), "FLASH_ATTN", {"value_head_size": 64}, kv.LayoutError, r"\[5, 6, 32, 64\]"),
        ((5, 6, 32, 64), "NO_SUCH_BACKEND", {}, kv.EngineError, "NO_SUCH_BACKEND"),
        ((5, 6, 32, 64), "FLASH_ATTN", {"cache_dtype": "fp7"}, kv.LayoutError, "fp7"),
    ],
)
def test_tensors_that_a_backend_does_not_make(
    shape: tuple[int, ...], backend: str, hints: dict[str, Any], error: type, message: str
) -> None:
    if not engine.by_enum():
        pytest.skip("shapes of 0.29 and newer")
    with pytest.raises(error, match=message) as caught:
        modelopt.split_kv_cache(torch.zeros(shape), backend, **hints)
    assert "\n" not in str(caught.value)


def test_the_patch_without_modelopt_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    with pytest.raises(kv.EngineError, match=r"^patch: no ModelOpt here") as caught:
        modelopt.patch()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "changes", "error", "message"),
    [
        ("FLASH_ATTN", {"num_blocks": 0}, kv.ArgumentError, "num_blocks is 0"),
        ("FLASH_ATTN", {"head_size": 1.5}, kv.DTypeError, "head_size is 1.5"),
        ("FLASH_ATTN", {"layout": "XYZ"}, kv.LayoutError, "XYZ"),
        ("FLASH_ATTN", {"k": 3}, kv.ArgumentError, "no size 'k'"),
        ("FLASH_ATTN", {"fill": "x"}, kv.ArgumentError, "fill is 'x'"),
        ("FLASH_ATTN", {"fill": float("nan"), "cache_dtype": "fp8"}, kv.ArgumentError, "fill is nan"),
        ("B KV N H D", {"layout": "NHD"}, kv.ArgumentError, "is a layout already"),
        ("B KV N H D", {"num_layers": 2}, kv.ArgumentError, "num_layers is 2"),
        ("vllm/cpu-amx16", {"block_size": 17}, kv.LayoutError, "17"),
    ],
)
def test_tensors_that_cannot_be(backend: str, changes: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        modelopt.make_kv_cache(backend, **(SIZES | changes))
    assert "\n" not in str(caught.value)
