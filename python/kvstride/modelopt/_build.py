# SPDX-License-Identifier: Apache-2.0
"""A KV tensor as an engine makes it, for tests that should not restate a layout."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from math import prod
from typing import Any

from kvstride import ArgumentError, Entry, Geometry, Layout, LayoutError, layout, registry
from kvstride._args import to_size
from kvstride._tensor import torch_dtype
from kvstride.vllm import layout_of_backend
from kvstride.vllm.families import Interior
from kvstride.vllm.interiors import dtypes as _dtypes
from kvstride.vllm.probe import cache_torch_dtype

from ._views import names_backend

_VERB = "make_kv_cache"
_WORDS = {"L": "layer", "B": "block", "N": "token", "H": "head", "D": "dim"}


def make_kv_cache(
    backend: type | enum.Enum | str,
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    value_head_size: int | None = None,
    dtype: str = "bf16",
    cache_dtype: str = "auto",
    layout: str | None = None,
    num_layers: int = 1,
    fill: float | None = None,
    device: Any = "cpu",
    **symbols: int,
) -> Any:
    """One layer's KV tensor in the shape and with the strides that the engine gives it: a torch tensor.

    `backend`: an attention backend of the installed vLLM (a class, a member of its enumeration, a name), which is asked
    as `kvstride.vllm.layout_of_backend` does, `layout` among its layouts (`NHD` and `HND` to 0.28, `LBHNC` … from 0.29
    on; None: the engine's choice) and `cache_dtype` in vLLM's words; or a registry name, for the declared shape of any
    release's engine; or an order, for its natural shape.

    `num_layers`: layers that share the allocation (from 0.29 on, and registry rows with an L): the result is then the
    first layer's tensor, with the strides that it has among them. `symbols`: sizes such as `k=16` that an order names.

    `dtype`: `bf16`, `f16` or `f32`, of the model. `fill`: the value of each element, those between the layer's own
    included (NaN as a poison); 0 unless given, as engines do.

    A layout of two tensors gives a (key, value) tuple. Raises as `layout_of_backend`; LayoutError where the sizes do
    not suit the layout.
    """
    sizes: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "value_head_size": value_head_size,
        "num_layers": num_layers,
    }
    for name, size in sizes.items():
        if size is not None and to_size(size, f"{_VERB}: {name}") < 1:
            raise ArgumentError(f"{_VERB}: {name} is {size}, must be at least 1")
    if isinstance(backend, str) and not names_backend(backend):
        if layout is not None:
            raise ArgumentError(f"{_VERB}: layout is {layout!r}, but '{backend}' is a layout already")
        return _of_order(backend, sizes, dtype, cache_dtype, fill, device, symbols)
    if symbols:
        raise ArgumentError(f"{_VERB}: a backend's layout has no size {next(iter(symbols))!r}")
    named = layout_of_backend(backend, **sizes, dtype=dtype, cache_dtype=cache_dtype, layout=layout)
    if named.interior is Interior.STATE:
        raise LayoutError(f"{_VERB}: {named.backend} keeps recurrent state, no keys and values")
    kind = cache_torch_dtype(dtype, cache_dtype)
    strides = [named.strides[axis] // kind.itemsize for axis in named.axes]
    return _tensor(named.shape, strides, kind, named.layout().num_bytes, fill, device)


def _of_order(
    name: str, sizes: dict[str, Any], dtype: str, cache_dtype: str, fill: Any, device: Any, symbols: dict[str, int]
) -> Any:
    """The tensor of a registry name or an order."""
    element = dtype
    if cache_dtype != "auto":
        _, element = _dtypes({"cache_dtype": cache_dtype, "dtype": "uint8"})
    entry = next((e for e in registry() if e.name == name), None)
    if entry is None and sizes["num_layers"] != 1:
        raise ArgumentError(f"{_VERB}: num_layers is {sizes['num_layers']}, an order describes one layer's tensor")
    found = layout(name, Geometry(**sizes, dtype=element, **symbols))
    kinds = {torch_dtype(kind) for kind in found.planes.values()}
    if len(kinds) != 1:
        raise LayoutError(f"{_VERB}: '{name}' holds {', '.join(map(str, kinds))}: no one dtype for its tensor")
    kind = kinds.pop()
    natural: Any = (found.shape, found.strides)
    if entry is not None:
        views = [_declared(entry, found, part, kind.itemsize) for part in range(found.num_parts)]
    elif found.num_parts == 1:
        views = [natural]
    else:
        views = list(zip(*natural, strict=True))
    made = tuple(
        _tensor(shape, strides, kind, found.part_bytes(part), fill, device)
        for part, (shape, strides) in enumerate(views)
    )
    return made[0] if len(made) == 1 else made


def _declared(entry: Entry, found: Layout, part: int, item: int) -> tuple[list[int], list[int]]:
    """Shape and strides, in elements of `item` bytes, of the tensor that a registry row declares; the strides are the
    layout's own."""
    shape, strides, outer = [], [], []
    for word in entry.shape.split("|")[part].split(","):
        if word.strip() == "2*D":  # keys, then values, whatever their head sizes
            factors = [(found.extents("key")[-1] + found.extents("value")[-1], item)]
        else:
            factors = [_factor(factor, found, part) for factor in word.strip().split("*")]
        shape.append(prod(length for length, _ in factors))
        strides.append(min((step // item for length, step in factors if length > 1), default=1))
        outer.append(word.strip() in ("L", "B", "2"))
    if entry.opaque:  # only the outer dimensions are what they say; what is inside fills them
        inside = [i for i, true in enumerate(outer) if not true]
        for i, at in enumerate(inside):
            strides[at] = prod(shape[j] for j in inside[i + 1 :])
    return shape, strides


def _factor(text: str, found: Layout, part: int) -> tuple[int, int]:
    """Length and byte stride of a factor of a declared dimension: `H`, `2`, `N//k`, `k`, or a number."""
    planes = [plane for plane in found.planes if found.part(plane) == part]
    lengths = dict(zip(_WORDS, found.extents(planes[0]), strict=True))
    symbols = found.geometry.symbols

    def step(axis: str, distance: int) -> int:
        if distance >= lengths[axis]:
            return 0
        return found.offset(planes[0], **{_WORDS[axis]: distance})[1] - found.offset(planes[0])[1]

    if text in lengths:
        return lengths[text], step(text, 1)
    if text == "2":
        return 2, found.offset("value")[1] - found.offset("key")[1]
    axis, _, size = text.partition("//")
    if size:
        return lengths[axis] // symbols[size], step(axis, symbols[size])
    if text in symbols:
        return symbols[text], step(next(a for a in lengths if f"{a}%{text}" in found.order), 1)
    return int(text), step("D", 1)


def _tensor(shape: Sequence[int], strides: Sequence[int], kind: Any, num_bytes: int, fill: Any, device: Any) -> Any:
    """A tensor of these strides at the start of memory that holds `fill`: of `num_bytes`, the other layers' between
    its blocks included."""
    import torch

    last = sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    span = max(last + 1, num_bytes // kind.itemsize)
    try:
        # float8 has no fill of its own
        wide = torch.float32 if kind.is_floating_point and kind.itemsize == 1 else kind
        memory = torch.full((span,), 0 if fill is None else fill, dtype=wide).to(kind)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{_VERB}: fill is {fill!r:.40}, the cache is {kind}: {error}") from None
    return memory.to(device).as_strided(tuple(shape), tuple(strides))
