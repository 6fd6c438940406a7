# SPDX-License-Identifier: Apache-2.0
"""Drop-in functions with the signatures of vLLM's block and cache-write ops of 0.8.5 to 0.32.0.

What the engine's own functions guessed from a tensor's axes, these take from a layout: from `layout=` (a
registry name, an order or a `kvstride.Layout`), or from an earlier `register(kv_caches, layout=...)`. Without
either, a function that moves whole blocks works where every reading of the tensor agrees on the bytes that a
block id owns; where readings differ it raises `AmbiguousLayout`, where there is none `UnknownLayout`. The ops
whose arguments say it all (`reshape_and_cache`: K split by x, V transposed; `reshape_and_cache_flash`:
[num_blocks, block_size, num_kv_heads, head_size] views) take their arguments at their word and honour strides.

Tensors may be torch tensors or numpy arrays in host memory. Every argument is checked before the first byte is
written. Not thread-safe against concurrent `register`/`unregister`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import kvstride as kv
from kvstride import AmbiguousLayout, ArgumentError, DTypeError, LayoutError, UnknownLayout, _core

Tensor: TypeAlias = Any  # torch.Tensor or numpy.ndarray
Pairs: TypeAlias = Any  # [n, 2] integers: a list, a numpy array or a tensor
LayoutLike: TypeAlias = "str | kv.Layout"

__all__ = [
    "copy_blocks",
    "copy_kv_blocks",
    "register",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
    "swap_blocks_batch",
    "unregister",
]


@dataclass(frozen=True)
class _Entry:
    """A registered tensor (kept alive by its cache) and what its caller said of it."""

    cache: kv.Cache
    layout: LayoutLike
    geometry: kv.Geometry | None
    tensor: Tensor


_registered: dict[tuple[Any, ...], _Entry] = {}


def register(
    kv_caches: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    *,
    layout: LayoutLike,
    geometry: kv.Geometry | None = None,
) -> None:
    """Tell the layout of caches once; later calls with the same tensors (or equal views of them) need no `layout=`.

    `kv_caches` is one tensor, a list of one a layer, or the mapping of layer names to tensors that vLLM hands to
    `register_kv_caches`. A tensor that does not suit the layout raises LayoutError and nothing is registered. The
    tensors are kept alive until `unregister`.
    """
    tensors = _tensors(kv_caches)
    entries = [_Entry(kv.Cache(t, layout, geometry=geometry), layout, geometry, t) for t in tensors]
    _registered.update((_identity(entry.tensor), entry) for entry in entries)


def unregister(kv_caches: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None) -> None:
    """Forget these tensors' layouts, or all of them. Tensors that were not registered are no error."""
    if kv_caches is None:
        _registered.clear()
        return
    for tensor in _tensors(kv_caches):
        _registered.pop(_identity(tensor), None)


@overload
def swap_blocks(
    src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Pairs, /, *, layout: LayoutLike | None = None
) -> None: ...
@overload
def swap_blocks(
    src: Tensor, dst: Tensor, block_size_in_bytes: int, block_mapping: Pairs, *, layout: LayoutLike | None = None
) -> None: ...
def swap_blocks(*args: Any, layout: LayoutLike | None = None, **kwargs: Any) -> None:
    """Copy blocks from one cache into another of the same order (the name is historical: nothing is exchanged).

    `swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)`: the attention backends' method and the op of 0.8.5 to
    0.14.1. Each block moves with K and V, wherever the layout keeps them. The numbers of blocks may differ.

    `swap_blocks(src, dst, block_size_in_bytes, block_mapping)`: the op from 0.15.0 on. It says that block b is the
    bytes [b * block_size_in_bytes, (b + 1) * block_size_in_bytes) of the tensor; where the tensor's layout says
    otherwise (a K/V-first cache) that raises ArgumentError instead of moving half a block.
    """
    names: tuple[str, ...] = ("src", "dst", "block_size_in_bytes", "block_mapping")
    if len(args) + len(kwargs) == 3:
        names = ("src_kv_cache", "dst_kv_cache", "src_to_dst")
        if "block_mapping" in kwargs:  # the op of 0.8.5 to 0.14.1
            names = ("src", "dst", "block_mapping")
    values = _arguments("swap_blocks", names, args, kwargs)
    if len(values) == 3:
        src, dst, pairs = values
        kv.swap_blocks(*_same_order("swap_blocks", src, dst, layout), pairs)
        return
    src, dst, block_bytes, pairs = values
    kv.swap_blocks(_pages(src, block_bytes, layout, "src"), _pages(dst, block_bytes, layout, "dst"), pairs)


@overload
def copy_blocks(kv_caches: Sequence[Tensor], src_to_dists: Pairs, /, *, layout: LayoutLike | None = None) -> None: ...
@overload
def copy_blocks(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    block_mapping: Pairs,
    /,
    *,
    layout: LayoutLike | None = None,
) -> None: ...
def copy_blocks(*args: Any, layout: LayoutLike | None = None, **kwargs: Any) -> None:
    """Copy blocks inside caches, in every layer.

    `copy_blocks(kv_caches, src_to_dists)`: the attention backends' method; one tensor a layer, K and V split
    wherever the layout has them.

    `copy_blocks(key_caches, value_caches, block_mapping)`: the op of 0.8.5 to 0.13.0, on tensors whose first axis
    is the block. The op stepped by `key_caches[0][0].numel()`, so views such as `kv[:, 0]` made it write into other
    blocks; here the views' own strides hold.
    """
    if len(args) + len(kwargs) == 2:
        kv_caches, pairs = _arguments("copy_blocks", ("kv_caches", "src_to_dists"), args, kwargs)
        caches: list[tuple[kv.Cache, tuple[int, int] | None]] = [
            (_one("copy_blocks", tensor, layout), None) for tensor in _tensors(kv_caches)
        ]
    else:
        names = ("key_caches", "value_caches", "block_mapping")
        keys, values, pairs = _arguments("copy_blocks", names, args, kwargs)
        keys, values = _tensors(keys), _tensors(values)
        if len(keys) != len(values):
            raise ArgumentError(f"copy_blocks: {len(keys)} key_caches but {len(values)} value_caches")
        caches = []
        for key, value in zip(keys, values, strict=True):
            if key.shape[0] != value.shape[0]:
                raise LayoutError(f"copy_blocks: a key cache of {key.shape[0]} blocks, its value of {value.shape[0]}")
            whole = None if layout is not None else _registered_around("copy_blocks", key, value)
            if whole is not None:
                caches.append((whole[0], (whole[1], 1)))
            else:
                caches += [(_block_rows("copy_blocks", tensor), None) for tensor in (key, value)]
    for cache, _ in caches:  # all are checked before any is written
        if cache.read_only:
            raise ArgumentError("copy_blocks: a cache is read-only")
        kv.Plan(cache.layout, cache.layout).bind(pairs)
    for cache, layers in caches:
        kv.copy_blocks(cache, pairs, layers=layers)


def swap_blocks_batch(src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, is_src_access_order_any: bool = False) -> None:
    """Copy sizes[i] bytes from address src_ptrs[i] to dst_ptrs[i], for each i: the op from 0.20.0 on.

    The arguments are raw host addresses: only their count, dtype (int64 or uint64) and signs can be checked and
    are; whether they point into a cache is the caller's word. `is_src_access_order_any` tells a GPU's copy engine
    that it may read early; copies here are done when the call returns, so both values mean the same.
    """
    del is_src_access_order_any
    columns = []
    for name, column in (("src_ptrs", src_ptrs), ("dst_ptrs", dst_ptrs), ("sizes", sizes)):
        if str(column.dtype).removeprefix("torch.") not in ("int64", "uint64"):
            raise DTypeError(f"swap_blocks_batch: {name} is {column.dtype}, not int64 or uint64")
        if len(column.shape) != 1:
            raise ArgumentError(f"swap_blocks_batch: {name} has {len(column.shape)} axes, not 1")
        columns.append([int(x) for x in column.tolist()])
    sources, targets, lengths = columns
    if not len(sources) == len(targets) == len(lengths):
        raise ArgumentError(
            f"swap_blocks_batch: {len(sources)} src_ptrs, {len(targets)} dst_ptrs and {len(lengths)} sizes"
        )
    for i, (source, target, length) in enumerate(zip(sources, targets, lengths, strict=True)):
        if length < 0 or (length > 0 and (source == 0 or target == 0)):
            raise ArgumentError(f"swap_blocks_batch: copy {i} is of {length} bytes from {source:#x} to {target:#x}")
    for source, target, length in zip(sources, targets, lengths, strict=True):
        ctypes.memmove(target, source, length)


def copy_kv_blocks(
    src_kv_caches: Mapping[str, Tensor],
    dst_kv_caches: Mapping[str, Tensor],
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: str,
    *,
    layout: LayoutLike | None = None,
) -> None:
    """Copy blocks of every layer between two sets of caches: NIXL's host staging, from 0.10.2 on.

    Both sets have the same layer names and, layer by layer, one order. The engine's function indexed `cache[:, ids]`
    to 0.22.1 and `cache[ids]` from 0.23.0 for every backend. `direction` is "h2d" or "d2h" and changes nothing here.
    Lists of unequal length raise ArgumentError (the engine's function returned silently); empty ones do nothing.
    """
    if direction not in ("h2d", "d2h"):
        raise ArgumentError(f"copy_kv_blocks: direction is {direction!r}, not 'h2d' or 'd2h'")
    if len(src_block_ids) != len(dst_block_ids):
        raise ArgumentError(f"copy_kv_blocks: {len(src_block_ids)} src_block_ids, {len(dst_block_ids)} dst_block_ids")
    if set(src_kv_caches) != set(dst_kv_caches):
        lone = sorted(set(src_kv_caches) ^ set(dst_kv_caches))
        raise ArgumentError(f"copy_kv_blocks: layers on one side only: {', '.join(lone)}")
    pairs = [(int(s), int(d)) for s, d in zip(src_block_ids, dst_block_ids, strict=True)]
    caches = [_same_order("copy_kv_blocks", src, dst_kv_caches[name], layout) for name, src in src_kv_caches.items()]
    plans = [kv.Plan(src, dst).bind(pairs) for src, dst in caches]  # all are checked before any is written
    both = {s for s, _ in pairs} & {d for _, d in pairs}
    for name, src in src_kv_caches.items():
        if both and _address(src) == _address(dst_kv_caches[name]):
            raise ArgumentError(f"copy_kv_blocks: blocks {sorted(both)} of {name} would be read and written")
    for plan in plans:
        plan.run()


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    *,
    layout: LayoutLike | None = None,
) -> None:
    """Write tokens into PagedAttention's x-split caches.

    key, value: [num_tokens, num_kv_heads, head_size]; key_cache: [num_blocks, num_kv_heads, head_size / x, block_size,
    x] with x = 16 / item size; value_cache: [num_blocks, num_kv_heads, head_size, block_size]. A negative slot is
    skipped; key may be longer than slot_mapping. `kv_cache_dtype` is "auto" (the cache's dtype is key's) or an fp8
    name, with scales of one element: stored = x / scale.
    """
    verb = "reshape_and_cache"
    _rank(verb, "key_cache", key_cache, 5, "[num_blocks, num_kv_heads, head_size / x, block_size, x]")
    _rank(verb, "value_cache", value_cache, 4, "[num_blocks, num_kv_heads, head_size, block_size]")
    at = _pair(verb, key_cache, value_cache, layout, kv_cache_dtype)
    _write(verb, at, key, value, slot_mapping, k_scale, v_scale)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    *,
    layout: LayoutLike | None = None,
) -> None:
    """Write tokens into [num_blocks, block_size, num_kv_heads, head_size] views of any strides.

    The views are those that the backends split off their caches: `kv.unbind(0)` (K/V first), `kv.unbind(1)` (blocks
    first), `kv.transpose(1, 2).split(head_size, -1)` (packed), contiguous or with heads before tokens in memory. Other
    arguments as for `reshape_and_cache`. The CUDA op addresses V with K's strides; here each has its own.
    """
    verb = "reshape_and_cache_flash"
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        _rank(verb, name, tensor, 4, "[num_blocks, block_size, num_kv_heads, head_size]")
    at = _pair(verb, key_cache, value_cache, layout, kv_cache_dtype)
    _write(verb, at, key, value, slot_mapping, k_scale, v_scale)


# --- arguments ------------------------------------------------------------------------------------------------------


def _arguments(verb: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The values of `names`, given by position or by name, as Python itself would bind them."""
    values = dict(zip(names, args, strict=False))
    unknown = [name for name in kwargs if name not in names or name in values]
    values.update(kwargs)
    if unknown or len(args) > len(names) or len(values) != len(names):
        raise TypeError(f"{verb}({', '.join(names)}): got {len(args)} positional arguments and {sorted(kwargs)}")
    return [values[name] for name in names]


def _tensors(kv_caches: Tensor | Iterable[Tensor] | Mapping[str, Tensor]) -> list[Tensor]:
    if hasattr(kv_caches, "shape"):
        return [kv_caches]
    return list(kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches)


def _rank(verb: str, name: str, tensor: Tensor, rank: int, meaning: str) -> None:
    if len(tensor.shape) != rank:
        raise UnknownLayout(f"{verb}: {name} of shape {tuple(tensor.shape)} is not {meaning}")


# --- numpy and torch alike ------------------------------------------------------------------------------------------


def _address(tensor: Tensor) -> int:
    return int(tensor.data_ptr()) if hasattr(tensor, "data_ptr") else int(tensor.__array_interface__["data"][0])


def _item_bytes(tensor: Tensor) -> int:
    return int(tensor.element_size()) if hasattr(tensor, "element_size") else int(tensor.itemsize)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """In elements."""
    if hasattr(tensor, "data_ptr"):
        return tuple(tensor.stride())
    return tuple(s // tensor.itemsize for s in tensor.strides)


def _permute(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    return tensor.permute(*axes) if hasattr(tensor, "permute") else tensor.transpose(axes)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two views of the same elements of the same memory."""
    return (_address(tensor), tuple(tensor.shape), _strides(tensor), str(tensor.dtype))


# --- whole caches ---------------------------------------------------------------------------------------------------


def _named(verb: str, tensor: Tensor, layout: LayoutLike | None) -> kv.Cache | None:
    """The cache by the layout that the caller gave, or by what was registered; None where neither tells."""
    if layout is not None:
        return _by_layout(tensor, layout)
    entry = _registered.get(_identity(tensor))
    if entry is not None:
        return entry.cache
    owner = _owner(tensor)
    if owner is None:
        return None
    _check_is_plane(verb, tensor, owner)
    return _block_rows(verb, tensor)


def _by_layout(tensor: Tensor, layout: LayoutLike) -> kv.Cache:
    """One tensor by a layout; a Layout's number of blocks and of layers may be another's."""
    if isinstance(layout, str):
        return kv.Cache(tensor, layout)
    if not layout.layered:
        layout = layout.with_layers(1)
    sizes = layout.geometry
    num_blocks = max(1, _count(tensor) * _item_bytes(tensor) // (layout.num_bytes // sizes.num_blocks))
    if num_blocks == sizes.num_blocks:
        return kv.Cache(tensor, layout)
    return kv.Cache(tensor, layout.order, geometry=_with_blocks(sizes, num_blocks))


def _with_blocks(sizes: kv.Geometry, num_blocks: int) -> kv.Geometry:
    return kv.Geometry(
        num_layers=sizes.num_layers, num_blocks=num_blocks, block_size=sizes.block_size,
        num_kv_heads=sizes.num_kv_heads, head_size=sizes.head_size, value_head_size=sizes.value_head_size,
        dtype=sizes.dtype, **sizes.symbols,
    )  # fmt: skip


def _owner(tensor: Tensor) -> _Entry | None:
    """The registered cache inside whose memory a tensor starts."""
    at = _address(tensor)
    for entry in _registered.values():
        start = _address(entry.tensor)
        if start <= at < start + entry.cache.layout.num_bytes:
            return entry
    return None


def _check_is_plane(verb: str, part: Tensor, owner: _Entry) -> None:
    """A part of a registered cache, whose first axis is to be the block, must be all blocks of one plane."""
    layout = owner.cache.layout
    at = _address(part) - _address(owner.tensor)
    for name in layout.planes:
        for layer in range(layout.geometry.num_layers if layout.layered else 1):
            first = layout.offset(name, layer=layer)[1]
            second = layout.offset(name, layer=layer, block=min(1, layout.geometry.num_blocks - 1))[1]
            steps = part.shape[0] == 1 or _strides(part)[0] * _item_bytes(part) == second - first
            if at == first and part.shape[0] == layout.geometry.num_blocks and steps:
                return
    raise LayoutError(
        f"{verb}: a part of shape {tuple(part.shape)}, {at} bytes into the registered cache of shape "
        f"{tuple(owner.tensor.shape)}, is none of the planes of its layout '{layout}'; split on the wrong axis?"
    )


def _one(verb: str, tensor: Tensor, layout: LayoutLike | None) -> kv.Cache:
    """One layer's cache by its name, or by any reading where all agree on the bytes of every block."""
    named = _named(verb, tensor, layout)
    if named is not None:
        return named
    readings = kv.candidates(tensor)
    if not readings or not all(_core.same_block_bytes(readings[0].layout, r.layout) for r in readings):
        kv.detect(tensor)  # raises, with every reading and an example
        raise AmbiguousLayout(f"{verb}: readings of shape {tuple(tensor.shape)} differ in the bytes of a block")
    return kv.Cache(tensor, readings[0].layout)


def _same_order(verb: str, src: Tensor, dst: Tensor, layout: LayoutLike | None) -> tuple[kv.Cache, kv.Cache]:
    """Two caches of one order: what is known of one holds for both, and a reading counts only if both have it."""
    named = _named(verb, src, layout), _named(verb, dst, layout)
    if named[0] is not None and named[1] is not None:
        return named[0], named[1]
    if named[0] is not None:
        return named[0], _by_layout(dst, _said_of(src, named[0]))
    if named[1] is not None:
        return _by_layout(src, _said_of(dst, named[1])), named[1]
    shared = [
        (of_src.layout, of_dst.layout)
        for of_src in kv.candidates(src)
        for of_dst in kv.candidates(dst)
        if of_src.order == of_dst.order and _block_sizes(of_src.geometry) == _block_sizes(of_dst.geometry)
    ]
    if not shared:
        kv.detect(src)  # raises where the source has several readings or none
        kv.detect(dst)
        raise UnknownLayout(f"{verb}: no layout fits both shape {tuple(src.shape)} and shape {tuple(dst.shape)}")
    first = shared[0]
    if not all(_core.same_block_bytes(a, b) for pair in shared for a, b in zip(first, pair, strict=True)):
        kv.detect(src)
        raise AmbiguousLayout(f"{verb}: readings of shape {tuple(src.shape)} differ in the bytes of a block")
    return kv.Cache(src, first[0]), kv.Cache(dst, first[1])


def _said_of(tensor: Tensor, cache: kv.Cache) -> LayoutLike:
    """What was registered of a tensor: a name or an order, with its geometry where one was given."""
    entry = _registered.get(_identity(tensor))
    if entry is None:  # a plane of a registered cache
        return cache.layout
    if entry.geometry is None or not isinstance(entry.layout, str):
        return entry.layout
    return kv.layout(entry.layout, entry.geometry)


def _block_sizes(geometry: kv.Geometry) -> tuple[Any, ...]:
    """All sizes but num_blocks, in which caches of one order may differ."""
    return (
        geometry.num_layers, geometry.block_size, geometry.num_kv_heads, geometry.head_size, geometry.value_head_size,
        geometry.dtype,
    )  # fmt: skip


def _pages(tensor: Tensor, block_bytes: int, layout: LayoutLike | None, argument: str) -> kv.Cache:
    """A tensor whose block b is said to be bytes [b * block_bytes, (b + 1) * block_bytes), and is."""
    verb = "swap_blocks"
    size = int(block_bytes)
    if size < 1:
        raise ArgumentError(f"{verb}: block_size_in_bytes is {size}")
    if _named(verb, tensor, layout) is None and _is_page_table(tensor, size):
        return kv.Cache(tensor, _pages_layout(tensor.shape[0], size))
    cache = _one(verb, tensor, layout)
    if not _core.same_block_bytes(cache.layout, _pages_layout(cache.layout.geometry.num_blocks, size)):
        raise ArgumentError(
            f"{verb}: block_size_in_bytes is {size}, but {argument} of shape {tuple(tensor.shape)}, read as "
            f"'{cache.layout}', does not keep block b in bytes [b * {size}, (b + 1) * {size})"
        )
    return cache


def _pages_layout(num_blocks: int, size: int) -> kv.Layout:
    sizes = kv.Geometry(num_blocks=num_blocks, block_size=1, num_kv_heads=1, head_size=size, dtype="u8")
    return kv.Layout("state: B D", sizes)


def _is_page_table(tensor: Tensor, size: int) -> bool:
    """[num_blocks, page] of consecutive pages of this size: the shape itself says what a block is."""
    shape, strides = tensor.shape, _strides(tensor)
    return len(shape) == 2 and shape[1] * _item_bytes(tensor) == size and strides == (shape[1], 1)


# --- K and V given apart --------------------------------------------------------------------------------------------


def _pair(
    verb: str, key_cache: Tensor, value_cache: Tensor, layout: LayoutLike | None, kv_cache_dtype: str
) -> tuple[kv.Cache, int]:
    """A cache and a layer of it for K and V views, by the layout given, the registered whole, or the op's meaning."""
    whole = None if layout is not None else _registered_around(verb, key_cache, value_cache)
    if whole is not None:
        return whole
    split = len(key_cache.shape) == 5
    num_blocks, block_size, heads, dim = key_cache.shape[:4]
    if split:
        num_blocks, heads, groups, block_size, x = key_cache.shape
        dim = groups * x
    value_dim = value_cache.shape[2 if split else 3]
    geometry = kv.Geometry(
        num_blocks=num_blocks, block_size=block_size, num_kv_heads=heads, head_size=dim, value_head_size=value_dim,
        dtype=_cache_dtype(verb, key_cache, kv_cache_dtype),
    )  # fmt: skip
    memory: tuple[Tensor, ...]
    orders: tuple[str, ...]
    if layout is not None:
        orders = _orders_apart(_order_of(layout))
        memory = tuple(
            _arranged(view, "BNHD", order) for view, order in zip((key_cache, value_cache), orders, strict=True)
        )
    elif split:
        orders, memory = ("B H D/x N D%x", "B H D N"), (key_cache, value_cache)
    else:
        orders = tuple(_letters_by_stride("BNHD", view) for view in (key_cache, value_cache))
        memory = tuple(
            _arranged(view, "BNHD", order) for view, order in zip((key_cache, value_cache), orders, strict=True)
        )
    return kv.Cache((memory[0], memory[1]), f"key: {orders[0]} | value: {orders[1]}", geometry=geometry), 0


def _write(
    verb: str, at: tuple[kv.Cache, int], key: Tensor, value: Tensor, slots: Tensor, k_scale: Tensor | float,
    v_scale: Tensor | float,
) -> None:  # fmt: skip
    scales = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if hasattr(scale, "shape") and (count := _count(scale)) != 1:
            raise ArgumentError(f"{verb}: {name} has {count} elements; one scale a tensor is supported")
        scales.append(float(scale))
    kv.write_tokens(*at, key, value, slots, key_scale=scales[0], value_scale=scales[1])


def _count(tensor: Tensor) -> int:
    return int(tensor.numel()) if hasattr(tensor, "numel") else int(tensor.size)


def _cache_dtype(verb: str, cache: Tensor, kv_cache_dtype: str) -> str:
    """The dtype of stored elements: the tensor's own, or the fp8 kind that the engine keeps in bytes."""
    name = str(cache.dtype).removeprefix("torch.")
    own = {
        "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2",
        "float8_e4m3fnuz": "f8_e4m3fnuz", "float8_e5m2fnuz": "f8_e5m2fnuz", "uint8": "u8", "int8": "i8", "int32": "i32",
        "uint16": "bf16",
    }  # fmt: skip
    if kv_cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        kind = "f8_e5m2" if kv_cache_dtype == "fp8_e5m2" else "f8_e4m3"
        if name != "uint8" and not own.get(name, "").startswith(kind):
            raise DTypeError(f"{verb}: kv_cache_dtype {kv_cache_dtype!r} over a cache of {name}")
        return own[name] if name != "uint8" else kind
    if kv_cache_dtype not in ("auto", "bfloat16", "half", "float16", "float", "float32"):
        raise DTypeError(f"{verb}: kv_cache_dtype {kv_cache_dtype!r} is not one that this function writes")
    if name not in own:
        raise DTypeError(f"{verb}: a cache of {name}")
    return own[name]


def _registered_around(verb: str, key_cache: Tensor, value_cache: Tensor) -> tuple[kv.Cache, int] | None:
    """The registered cache and the layer that these views were split off; refused where they are not its K and V."""
    owner = _owner(key_cache)
    if owner is None:
        return None
    layout, start = owner.cache.layout, _address(owner.tensor)
    found = _address(key_cache) - start, _address(value_cache) - start
    layers = range(layout.geometry.num_layers if layout.layered else 1)
    places = [tuple(layout.offset(name, layer=layer)[1] for name in ("key", "value")) for layer in layers]
    if found not in places:
        raise LayoutError(
            f"{verb}: key_cache and value_cache start {found[0]} and {found[1]} bytes into the registered cache of "
            f"shape {tuple(owner.tensor.shape)}, whose layout '{layout}' has key at {places[0][0]} and value at "
            f"{places[0][1]}; split on the wrong axis?"
        )
    return owner.cache, places.index(found)


def _block_rows(verb: str, tensor: Tensor) -> kv.Cache:
    """A tensor whose first axis is the block, whatever its other axes mean."""
    letters = "BLNHD"[: len(tensor.shape)]
    x_split = len(tensor.shape) == 5 and tensor.shape[4] * _item_bytes(tensor) == 16
    if not (2 <= len(tensor.shape) <= 4 or x_split):
        raise UnknownLayout(
            f"{verb}: shape {tuple(tensor.shape)} is neither [num_blocks, block_size, num_kv_heads, head_size] nor "
            "[num_blocks, num_kv_heads, head_size / x, block_size, x]"
        )
    order = _letters_by_stride(letters, tensor)
    sizes = dict.fromkeys("BLNHD", 1) | dict(zip(letters, tensor.shape, strict=True))
    rows = kv.Geometry(
        num_layers=sizes["L"], num_blocks=sizes["B"], block_size=sizes["N"], num_kv_heads=sizes["H"],
        head_size=sizes["D"], dtype=_cache_dtype(verb, tensor, "auto"),
    )  # fmt: skip
    return kv.Cache(_arranged(tensor, letters, order), f"key: {order}", geometry=rows)


# --- orders ---------------------------------------------------------------------------------------------------------


def _order_of(layout: LayoutLike) -> str:
    """The order behind a registry name, an order or a Layout."""
    if not isinstance(layout, str):
        return str(layout.order)
    return next((str(entry.order) for entry in kv.registry() if entry.name == layout), layout)


def _orders_apart(order: str) -> tuple[str, str]:
    """The orders of one layer's K alone and V alone: `B KV N H D` gives `B N H D` twice."""
    order = re.sub(r"\bL\b(@\d+)?(\[\d+\])?\s*", "", order)
    if apart := re.fullmatch(r"\s*key:(.*)\|\s*value:(.*)", order):
        return apart[1].strip(), apart[2].strip()
    if alike := re.fullmatch(r"(.*?)\bKV(?:@\d+)?\s+([^{}]*)", order):
        return (f"{alike[1]}{alike[2]}",) * 2
    if members := re.fullmatch(r"(.*?)\{\s*key(?:@\d+)?:([^{},]*),\s*value(?:@\d+)?:([^{},]*)\}\s*", order):
        return f"{members[1]}{members[2].strip()}", f"{members[1]}{members[3].strip()}"
    raise LayoutError(f"'{order}' has no key and value plane of one piece each")


def _letters_by_stride(letters: str, tensor: Tensor) -> str:
    """The axes of a tensor in the sequence in which they lie in memory, outermost first."""
    ranked = sorted(zip(_strides(tensor), (-i for i in range(len(letters))), letters, strict=True), reverse=True)
    return " ".join(letter for _, _, letter in ranked)


def _arranged(tensor: Tensor, letters: str, order: str) -> Tensor:
    """The tensor with its axes in the order's sequence; its blocks as flat rows where its shape is not the order's."""
    terms = order.split()
    if sorted(terms) == sorted(letters):
        arranged = _permute(tensor, [letters.index(term) for term in terms])
        steps = [stride for stride, length in zip(_strides(arranged), arranged.shape, strict=True) if length > 1]
        if steps == sorted(steps, reverse=True):
            return arranged
    elif len(terms) == len(tensor.shape):
        return tensor
    rows = tensor.reshape(tensor.shape[0], -1)
    if _address(rows) != _address(tensor):
        raise LayoutError(f"a view of shape {tuple(tensor.shape)} whose blocks are not contiguous, for '{order}'")
    return rows
