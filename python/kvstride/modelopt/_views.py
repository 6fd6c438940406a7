# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one layer's KV tensor as views `[block, token, head, dim]`, in every layout."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvstride import AmbiguousLayout, ArgumentError, DTypeError, Layout, LayoutError, NotStrided, _core
from kvstride._args import to_size
from kvstride._tensor import TensorInfo, inspect, view
from kvstride.cache import geometry_sizes
from kvstride.vllm import engine, layout_of_backend, name_tensor
from kvstride.vllm.interiors import dtypes as _dtypes

_VERB = "split_kv_cache"
#: A class, an enumeration member or the listing of a class in its module, but no order of the notation.
_BACKEND_NAME = re.compile(r"[A-Za-z_][\w.]{3,}( \([\w.]+\))?")


@dataclass(frozen=True)
class SplitCache:
    """Keys and values of one layer, views of the cache's own memory, `[block, token, head, dim]`.

    `key, value = split_kv_cache(…)` unpacks the two; `page_size` is the number of tokens of a block.
    """

    key: Any
    value: Any

    @property
    def page_size(self) -> int:
        """Tokens of a block, as the key view has them."""
        return int(self.key.shape[1])

    @property
    def dense_dim(self) -> bool:
        """Whether the dims of a head lie one after the other in both, as kernels want that take no stride for them,
        ModelOpt's among them. Not so in transposed layouts, such as `B H {key: D N, value: N D}`."""
        infos = [inspect(view, where="any") for view in self]
        return all(info.shape[-1] == 1 or info.strides[-1] == 1 for info in infos)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.key, self.value))


def split_kv_cache(
    kv_cache: Any,
    backend: type | enum.Enum | str | Layout,
    *,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
    value_head_size: int | None = None,
    cache_dtype: str = "auto",
) -> SplitCache:
    """Zero-copy key and value views `[block, token, head, dim]` of one layer's KV tensor.

    `kv_cache`: the tensor as the engine gives it to a layer (torch, on any device; with an order or a registry name
    numpy too), or a (key, value) pair where the layout has two tensors. Strides and padding are the tensor's own.

    `backend` says what the bytes are, and no axis is fixed here:

    - an attention backend of the installed vLLM (0.8.5 to 0.32.x): its class, a member of `AttentionBackendEnum` or the
      name of either. The class is asked for its shape at sizes that cannot be confused, as `kvstride.vllm` does.
      `cache_dtype` is vLLM's word for the cache's dtype;
    - a registry name (`vllm/flashinfer-nhd`), an order (`B KV N H D`) or a `kvstride.Layout`. No vLLM is needed.

    Sizes that are not given are read off the tensor's dimensions; then K and V are taken to be equally large. Give
    `num_kv_heads` and `head_size` where they are known: then they are checked, too.

    Elements come with the dtype of the tensor; bytes of an fp8 cache with the float8 dtype that they are.

    Raises NotStrided where the layout has no such views (the CPU's tiles, x-split), LayoutError where rank or sizes are
    not the backend's, with the whole shape, UnknownLayout for a backend whose bytes are not known, AmbiguousLayout
    where a name or an order fits in two ways, EngineError where a backend is named and there is no vLLM.
    """
    sizes = _given_sizes(num_kv_heads, head_size, value_head_size)
    parts = kv_cache if isinstance(kv_cache, (tuple, list)) else (kv_cache,)
    if not parts:
        raise ArgumentError(f"{_VERB}: kv_cache is an empty {type(kv_cache).__name__}")
    infos = [inspect(part, f"{_VERB}: kv_cache", where="any") for part in parts]
    seen = " and ".join(f"{list(i.shape)} strides {list(i.strides)} {i.dtype_name}" for i in infos)
    try:
        if isinstance(backend, Layout) or (isinstance(backend, str) and not names_backend(backend)):
            layout = _bound(infos, backend, sizes, cache_dtype)
        else:
            layout = _named(infos, kv_cache, backend, sizes, cache_dtype)
        return _split(layout, infos)
    except NotStrided as error:
        advice = "kv.attention reads this cache as it is; kv.convert_blocks writes it into an order that has views"
        raise NotStrided(f"{_VERB}: kv_cache {seen}: {error}; {advice}") from None
    except AmbiguousLayout as error:
        raise AmbiguousLayout(f"{_VERB}: kv_cache {seen}: {error}", readings=error.readings) from None
    except (LayoutError, DTypeError) as error:
        raise type(error)(f"{_VERB}: kv_cache {seen}: {error}") from None


def names_backend(text: str) -> bool:
    """Whether `text` is meant as the name of an attention backend and not of a layout. Raises LayoutError where it is
    neither a registry name nor an order, nor could be a backend's name."""
    try:
        _core.num_parts(text)
    except LayoutError:
        if _BACKEND_NAME.fullmatch(text) is None:
            raise
        return True
    return False


def _given_sizes(num_kv_heads: Any, head_size: Any, value_head_size: Any) -> dict[str, int]:
    named = {"num_kv_heads": num_kv_heads, "head_size": head_size, "value_head_size": value_head_size}
    sizes = {name: to_size(value, f"{_VERB}: {name}") for name, value in named.items() if value is not None}
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"{_VERB}: {name} is {size}, must be at least 1")
    return sizes


def _bound(infos: list[TensorInfo], layout: Layout | str, sizes: dict[str, int], cache_dtype: str) -> Layout:
    """The layout that a name, an order or a Layout has over these tensors, with their own strides."""
    dtype = infos[0].dtype
    if cache_dtype != "auto":
        _, dtype = _dtypes({"dtype": infos[0].dtype_name, "cache_dtype": cache_dtype})
    order, sizes = str(layout), {"num_layers": 1, **sizes}
    if isinstance(layout, Layout):
        known = geometry_sizes(layout.geometry)
        for name, size in sizes.items():
            if known.setdefault(name, known["head_size"]) != size:
                raise LayoutError(f"{name} is {size}, but {known[name]} in the layout")
        order, sizes, dtype = layout.order, known, layout.geometry.dtype
    elif dtype is None:
        raise DTypeError("this dtype does not say what the elements are; give a kvstride.Layout")
    return _core.bind_layout(order, [info.part for info in infos], sizes, dtype, 1)


def _named(infos: list[TensorInfo], tensor: Any, backend: Any, sizes: dict[str, int], cache_dtype: str) -> Layout:
    """The layout that a backend of the installed vLLM gives this tensor."""
    found = engine.resolve(backend)
    if len(infos) != 1 or not hasattr(tensor, "data_ptr"):
        raise LayoutError(f"{found.__name__} is asked about one torch tensor, not about {type(tensor).__name__}")
    value = sizes.get("value_head_size")
    axes = layout_of_backend(found, cache_dtype=cache_dtype, value_head_size=value).axes
    shape = infos[0].shape
    if len(shape) != len(axes):
        raise LayoutError(f"{len(shape)} dimensions, but {found.__name__} declares [{', '.join(axes)}]")
    heads, dims = _sizes_of(dict(zip(axes, shape, strict=True)), sizes)
    layer = SimpleNamespace(
        get_attn_backend=lambda: found,
        num_kv_heads=heads,
        head_size=dims,
        head_size_v=value or dims,
        kv_cache_dtype=cache_dtype,
    )
    return name_tensor(layer, tensor).layout()


def _sizes_of(lengths: dict[str, int], sizes: dict[str, int]) -> tuple[int, int]:
    """KV heads and head size, given or from the lengths of the axes that the backend declares."""
    heads = sizes.get("num_kv_heads") or lengths.get("H") or lengths.get("2*H", 0) // 2
    dims = sizes.get("head_size") or lengths.get("D") or 0
    if not dims and "KV*D" in lengths:
        both = lengths["KV*D"]
        dims = both - sizes["value_head_size"] if "value_head_size" in sizes else both // 2
    if not dims and "H*D" in lengths and heads:
        dims = lengths["H*D"] // heads
    if set(lengths) <= {"B", "N", "1", "C"}:  # one row a token, whatever it holds: it is named, then refused
        heads, dims = heads or 1, dims or lengths.get("C", 1)
    if not heads or dims < 1:
        raise LayoutError(f"axes [{', '.join(lengths)}] do not tell heads and head size; give num_kv_heads, head_size")
    return heads, dims


def _split(layout: Layout, infos: list[TensorInfo]) -> SplitCache:
    planes = layout.planes
    if set(planes) != {"key", "value"}:
        raise LayoutError(f"'{layout}' holds {', '.join(planes)}, no keys and values alone")
    if layout.geometry.num_layers != 1:
        raise LayoutError(f"'{layout}' holds {layout.geometry.num_layers} layers; give the tensor of one")
    views = []
    for plane in ("key", "value"):
        dtype, tensor, offset, shape, strides = _core.plane_view(layout, plane, 0, False)
        views.append(view(infos[tensor], offset, dtype, shape, strides))
    return SplitCache(*views)
