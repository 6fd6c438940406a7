# SPDX-License-Identifier: Apache-2.0
"""Drop-in functions with the signatures of vLLM's block and cache-write ops of 0.8.5 to 0.32.0.

What the engine's own functions guessed from a tensor's axes, these take from a layout: from `layout=` (a
registry name, an order or a `kvstride.Layout`), or from an earlier `register(kv_caches, layout=...)`. Without
either, a function that moves whole blocks works where every reading of the tensor agrees on the bytes that a
block id owns; where readings differ it raises `AmbiguousLayout`, where there is none `UnknownLayout`. The ops
whose arguments say it all (`reshape_and_cache`: K split by x, V transposed; `reshape_and_cache_flash`:
[num_blocks, block_size, num_kv_heads, head_size] views) take their arguments at their word and honour strides; over
a registered cache a view must be exactly one of its planes, and where `layout=` is given the strides must agree.

Tensors may be torch tensors or numpy arrays, all in host memory: on a CUDA device the engine has its own ops, and
kvstride's verbs take a `kvstride.Cache` there. Every argument is checked before the first byte is
written. Not thread-safe against concurrent `register`/`unregister`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, overload

import numpy as np

import kvstride as kv
from kvstride import AmbiguousLayout, ArgumentError, DTypeError, LayoutError, UnknownLayout, _core
from kvstride._args import to_int, to_scale
from kvstride._ids import to_pairs, to_vector
from kvstride._tensor import TensorInfo, _item_size, _Memory, inspect

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
class _Plane:
    """A plane of one layer: where it lies, and its elements as `[block, token, head, dim]` or with split axes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_size: int
    dtype: str
    split: bool


@dataclass(frozen=True)
class _Entry:
    """A registered tensor (kept alive by its cache), what its caller said of it, and its planes layer by layer."""

    cache: kv.Cache
    layout: LayoutLike
    geometry: kv.Geometry | None
    info: TensorInfo
    span: tuple[int, int]
    layers: list[dict[str, _Plane]]


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
    entries = []
    with _as("register"):
        for tensor in tensors:
            inspect(tensor, "register: kv_caches")
            cache = kv.Cache(tensor, layout, geometry=geometry)
            info = cache.tensors[0]
            entries.append(_Entry(cache, layout, geometry, info, _span(info), _planes(cache)))
    _registered.update((_identity(entry.info), entry) for entry in entries)


def unregister(kv_caches: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None) -> None:
    """Forget these tensors' layouts, or all of them. Tensors that were not registered are no error."""
    if kv_caches is None:
        _registered.clear()
        return
    for tensor in _tensors(kv_caches):
        _registered.pop(_identity(inspect(tensor, "unregister: tensor")), None)


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
        pairs = to_pairs(pairs, f"swap_blocks: {names[2]}")
        kv.swap_blocks(*_same_order("swap_blocks", src, dst, layout), pairs)
        return
    src, dst, block_bytes, pairs = values
    size = to_int(block_bytes, "swap_blocks: block_size_in_bytes")
    if size < 1:
        raise ArgumentError(f"swap_blocks: block_size_in_bytes is {size}, must be at least 1")
    pairs = to_pairs(pairs, "swap_blocks: block_mapping")
    kv.swap_blocks(_pages(src, size, layout, "src"), _pages(dst, size, layout, "dst"), pairs)


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
    verb = "copy_blocks"
    jobs: list[_Job] = []
    if len(args) + len(kwargs) == 2:
        kv_caches, pairs = _arguments(verb, ("kv_caches", "src_to_dists"), args, kwargs)
        ids = to_pairs(pairs, f"{verb}: src_to_dists")
        for tensor in _tensors(kv_caches):
            info = inspect(tensor, f"{verb}: kv_caches")
            if all(_identity(info) != _identity(job.memory[0]) for job in jobs):  # layers may share one tensor
                jobs.append(_Job(_one(verb, info, layout), None, (info,)))
    else:
        names = ("key_caches", "value_caches", "block_mapping")
        keys, values, pairs = _arguments(verb, names, args, kwargs)
        ids = to_pairs(pairs, f"{verb}: block_mapping")
        keys, values = _tensors(keys), _tensors(values)
        if len(keys) != len(values):
            raise ArgumentError(f"{verb}: {len(keys)} key_caches but {len(values)} value_caches")
        seen = set()
        for key, value in zip(keys, values, strict=True):
            both = inspect(key, f"{verb}: key_caches"), inspect(value, f"{verb}: value_caches")
            for name, info in zip(("key", "value"), both, strict=True):
                if not info.shape:
                    raise LayoutError(f"{verb}: a {name} cache of shape [] has no blocks")
            if both[0].shape[0] != both[1].shape[0]:
                raise LayoutError(f"{verb}: a key cache of {both[0].shape[0]} blocks, its value of {both[1].shape[0]}")
            pair = tuple(_identity(info) for info in both)
            if pair in seen:
                continue
            seen.add(pair)
            if layout is not None:
                _check_rows_agree(verb, layout, both)
            whole = None if layout is not None else _registered_rows(verb, both)
            if whole is not None:
                jobs.append(_Job(whole[0], (whole[1], 1), both))
            else:
                jobs += [_Job(_block_rows(verb, info), None, (info,)) for info in both[: len(set(pair))]]
    for job in jobs:  # all are checked before any is written
        if job.cache.read_only:
            raise ArgumentError(f"{verb}: a cache is read-only")
        with _as(verb):
            kv.Plan(job.cache.layout, job.cache.layout).bind(ids)
    if len(ids):
        _check_apart(verb, [(str(i), (), job.memory) for i, job in enumerate(jobs)])
    for job in jobs:
        kv.copy_blocks(job.cache, ids, layers=job.layers)


def swap_blocks_batch(src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, is_src_access_order_any: bool = False) -> None:
    """Copy sizes[i] bytes from address src_ptrs[i] to dst_ptrs[i], for each i: the op from 0.20.0 on.

    The arguments are raw host addresses: only their count, dtype (int64 or uint64) and signs can be checked and
    are; whether they point into a cache is the caller's word. `is_src_access_order_any` tells a GPU's copy engine
    that it may read early; copies here are done when the call returns, so both values mean the same.
    """
    del is_src_access_order_any
    columns = []
    for name, column in (("src_ptrs", src_ptrs), ("dst_ptrs", dst_ptrs), ("sizes", sizes)):
        if hasattr(column, "dtype") and str(column.dtype).removeprefix("torch.") not in ("int64", "uint64"):
            raise DTypeError(f"swap_blocks_batch: {name} is {column.dtype}, not int64 or uint64")
        if isinstance(column, np.ndarray) and column.dtype == np.uint64 and column.ndim == 1:
            columns.append(column.tolist())  # an address beyond int63 is none of the process's own, but a number
        else:
            columns.append(to_vector(column, f"swap_blocks_batch: {name}").tolist())
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
    verb = "copy_kv_blocks"
    ids = to_vector(src_block_ids, f"{verb}: src_block_ids"), to_vector(dst_block_ids, f"{verb}: dst_block_ids")
    if len(ids[0]) != len(ids[1]):
        raise ArgumentError(f"{verb}: {len(ids[0])} src_block_ids, {len(ids[1])} dst_block_ids")
    for argument, mapping in (("src_kv_caches", src_kv_caches), ("dst_kv_caches", dst_kv_caches)):
        if not isinstance(mapping, Mapping):
            raise ArgumentError(
                f"{verb}: {argument} is {type(mapping).__name__}, expected a mapping from layer to tensor"
            )
    if set(src_kv_caches) != set(dst_kv_caches):
        lone = sorted(str(name) for name in set(src_kv_caches) ^ set(dst_kv_caches))
        raise ArgumentError(f"{verb}: layers on one side only: {', '.join(lone)}")
    pairs = np.stack(ids, axis=1)
    plans, seen, memory = [], set(), []
    for name, tensor in src_kv_caches.items():  # all are checked before any is written
        src = inspect(tensor, f"{verb}: src_kv_caches[{name!r}]")
        dst = inspect(dst_kv_caches[name], f"{verb}: dst_kv_caches[{name!r}]")
        ends = _identity(src), _identity(dst)
        if ends in seen:  # layers may share one tensor
            continue
        seen.add(ends)
        caches = _same_order(verb, src, dst, layout)
        with _as(f"{verb}: layer {name!r}"):
            plan = kv.Plan(*caches).bind(pairs)
            plan.check()
        plans.append(plan)
        memory.append((str(name), (src,), (dst,)))
    if len(pairs):
        _check_apart(verb, memory)
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
    caches = (
        _rank(verb, "key_cache", key_cache, 5, "[num_blocks, num_kv_heads, head_size / x, block_size, x]"),
        _rank(verb, "value_cache", value_cache, 4, "[num_blocks, num_kv_heads, head_size, block_size]"),
    )
    _write(verb, caches, layout, kv_cache_dtype, (key, value), slot_mapping, (k_scale, v_scale))


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
    meaning = "[num_blocks, block_size, num_kv_heads, head_size]"
    caches = _rank(verb, "key_cache", key_cache, 4, meaning), _rank(verb, "value_cache", value_cache, 4, meaning)
    _write(verb, caches, layout, kv_cache_dtype, (key, value), slot_mapping, (k_scale, v_scale))


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
    try:
        return list(kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches)
    except TypeError:
        raise ArgumentError(f"caches: {type(kv_caches).__name__} is no tensor and no list of tensors") from None


def _rank(verb: str, name: str, tensor: Tensor, rank: int, meaning: str) -> TensorInfo:
    info = inspect(tensor, f"{verb}: {name}")
    if len(info.shape) != rank:
        raise UnknownLayout(f"{verb}: {name} of shape {info.shape} is not {meaning}")
    return info


@contextmanager
def _as(verb: str) -> Iterator[None]:
    """Errors from inside name the function that was called."""
    try:
        yield
    except kv.Error as error:
        if not str(error).startswith(verb):
            error.args = (f"{verb}: {error}", *error.args[1:])
        raise


# --- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """Blocks to copy inside one cache, in all its layers or some, and the tensors that were given for it."""

    cache: kv.Cache
    layers: tuple[int, int] | None
    memory: tuple[TensorInfo, ...]


def _identity(info: TensorInfo) -> tuple[Any, ...]:
    """Equal for two views of the same elements of the same memory."""
    return (info.address, info.shape, info.strides, info.dtype_name)


def _span(info: TensorInfo | _Plane) -> tuple[int, int]:
    """The first byte and the one after the last."""
    reach = [(length - 1) * stride * info.item_size for length, stride in zip(info.shape, info.strides, strict=True)]
    return info.address + sum(min(r, 0) for r in reach), info.address + sum(max(r, 0) for r in reach) + info.item_size


def _meet(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two tensors have a byte in common; yes where that is too hard to tell."""
    (a_first, a_end), (b_first, b_end) = _span(a), _span(b)
    if a_end <= b_first or b_end <= a_first:
        return False
    return _bytes_meet(b.address - a.address, a.shape, a.strides, a.item_size, b.shape, b.strides, b.item_size)


@lru_cache(maxsize=65536)
def _bytes_meet(
    apart: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int, other_shape: tuple[int, ...],
    other_strides: tuple[int, ...], other_item: int,
) -> bool:  # fmt: skip
    base = 1 << 60  # nothing is read: only the addresses count
    arrays = []
    for at, lengths, steps, size in (
        (base, shape, strides, item),
        (base + apart, other_shape, other_strides, other_item),
    ):
        interface = {
            "version": 3, "shape": (*lengths, size), "strides": (*(step * size for step in steps), 1),
            "typestr": "|u1", "data": (at, True),
        }  # fmt: skip
        arrays.append(np.asarray(_Memory(None, interface)))
    limit: Any = 100_000  # numpy's stubs know two values only
    try:
        return bool(np.shares_memory(arrays[0], arrays[1], max_work=limit))
    except np.exceptions.TooHardError:
        return True


def _check_apart(verb: str, ends: Sequence[tuple[str, tuple[TensorInfo, ...], tuple[TensorInfo, ...]]]) -> None:
    """What one layer writes must be nothing that another reads or writes."""
    spans = []
    for layer, (_, sources, targets) in enumerate(ends):
        spans += [(*_span(info), layer, False, info) for info in sources]
        spans += [(*_span(info), layer, True, info) for info in targets]
    active: list[tuple[int, int, int, bool, TensorInfo]] = []
    for span in sorted(spans, key=lambda s: s[:4]):
        active = [other for other in active if other[1] > span[0]]
        for other in active:
            if other[2] != span[2] and (other[3] or span[3]) and _meet(other[4], span[4]):
                names = sorted((ends[other[2]][0], ends[span[2]][0]))
                raise ArgumentError(
                    f"{verb}: layers {names[0]} and {names[1]} share memory that one writes and the other reads or "
                    "writes"
                )
        active.append(span)


# --- parts of registered caches -------------------------------------------------------------------------------------


def _planes(cache: kv.Cache) -> list[dict[str, _Plane]]:
    layout = cache.layout
    layers: list[dict[str, _Plane]] = []
    for layer in range(layout.geometry.num_layers if layout.layered else 1):
        layers.append({})
        for name in layout.planes:
            try:
                dtype, tensor, offset, shape, strides = _core.plane_view(layout, name, layer, True)
            except kv.Error:  # no view of whole elements
                continue
            where = cache.tensors[tensor].address + offset
            layers[-1][name] = _Plane(where, tuple(shape), tuple(strides), _item_size(dtype), dtype, len(shape) > 4)
    return layers


Accepts: TypeAlias = Callable[[str, TensorInfo, "_Plane"], bool]


def _same_dtype(info: TensorInfo, plane: _Plane) -> bool:
    return info.item_size == plane.item_size and (info.dtype == plane.dtype or info.carrier)


def _same_elements(address: int, shape: Sequence[int], strides: Sequence[int], info: TensorInfo) -> bool:
    return (address, tuple(shape)) == (info.address, info.shape) and all(
        length == 1 or a == b for length, a, b in zip(shape, strides, info.strides, strict=True)
    )


def _is_plane(name: str, info: TensorInfo, plane: _Plane) -> bool:
    """Whether a view is the plane, element by element, `[block, token, head, dim]` or with its split axes."""
    del name
    return _same_dtype(info, plane) and _same_elements(plane.address, plane.shape, plane.strides, info)


def _is_x_split(name: str, info: TensorInfo, plane: _Plane) -> bool:
    """Whether a view is the plane as `reshape_and_cache` has it: `[B, H, D/x, N, x]` of K, `[B, H, D, N]` of V."""
    if not _same_dtype(info, plane):
        return False
    shape, strides = plane.shape, plane.strides
    if name == "key":
        if not plane.split and shape[3] % info.shape[4] == 0:
            x = info.shape[4]
            shape = (*shape[:3], shape[3] // x, x)
            strides = (*strides[:3], strides[3] * x, strides[3])
        axes: tuple[int, ...] = (0, 2, 3, 1, 4)
    elif plane.split:  # other bytes inside a block than the view's (AITER's shuffle), of the op's historical view
        return _rows(info) == _rows(plane)
    else:
        axes = (0, 2, 3, 1)
    if len(shape) != len(axes):
        return False
    return _same_elements(plane.address, [shape[i] for i in axes], [strides[i] for i in axes], info)


def _rows(view: TensorInfo | _Plane) -> tuple[Any, ...]:
    """Which bytes each index of the first axis owns: equal only where they are equal."""
    step = view.strides[0] * view.item_size if view.shape[0] > 1 else 0
    inner: list[tuple[int, int]] = []
    axes = [(s * view.item_size, n) for s, n in zip(view.strides[1:], view.shape[1:], strict=True) if n > 1]
    for stride, length in [*sorted(axes, reverse=True), (1, view.item_size)]:
        if inner and inner[-1][0] == stride * length:
            inner[-1] = (stride, length * inner[-1][1])
        else:
            inner.append((stride, length))
    return view.address, view.shape[0], step, tuple(inner)


def _is_rows(name: str, info: TensorInfo, plane: _Plane) -> bool:
    """Whether block b of a view is block b of the plane, in whatever sequence its axes are."""
    del name
    return len(info.shape) > 1 and _same_dtype(info, plane) and _rows(info) == _rows(plane)


def _matches(views: Mapping[str, TensorInfo], accepts: Accepts) -> list[tuple[_Entry, int]]:
    """Registered caches and layers whose planes of these names the views are."""
    found = []
    for entry in _registered.values():
        first, end = entry.span
        if not all(first <= info.address < end for info in views.values()):
            continue
        for layer, planes in enumerate(entry.layers):
            if all(name in planes and accepts(name, info, planes[name]) for name, info in views.items()):
                found.append((entry, layer))
    return found


def _only(verb: str, views: Mapping[str, TensorInfo], found: list[tuple[_Entry, int]]) -> tuple[_Entry, int]:
    """The one of several registered caches over the same memory; they must mean the same elements."""
    entry, layer = found[0]
    for other, at in found[1:]:
        if entry.layers[layer] != other.layers[at]:
            raise AmbiguousLayout(
                f"{verb}: {_described(views)} fits two registered caches, '{entry.cache.layout}' and "
                f"'{other.cache.layout}'"
            )
    return entry, layer


def _described(views: Mapping[str, TensorInfo]) -> str:
    return ", ".join(
        f"{name} of shape {info.shape} strides {info.strides} {info.dtype_name}" for name, info in views.items()
    )


def _refuse_part(verb: str, views: Mapping[str, TensorInfo]) -> None:
    """Raise where a view lies in a registered cache: it is none of its planes."""
    spans = [(*_span(info), info) for info in views.values()]
    for entry in _registered.values():
        start, stop = entry.span
        near = (info for first, end, info in spans if first < stop and start < end)
        met = next((info for info in near if _meet(info, entry.info)), None)
        if met is None:
            continue
        at = met.address - entry.info.address
        planes = "; ".join(
            f"{name} at byte {p.address - entry.info.address} shape {p.shape} strides {p.strides} {p.dtype}"
            for name, p in entry.layers[0].items()
        )
        raise LayoutError(
            f"{verb}: {_described(views)}, {at} bytes into the registered cache of shape {entry.info.shape}, is not "
            f"what its layout '{entry.cache.layout}' has there ({planes}); split on the wrong axis?"
        )


def _registered_rows(verb: str, both: tuple[TensorInfo, TensorInfo]) -> tuple[kv.Cache, int] | None:
    """The registered cache and the layer whose K and V these are, for functions that move whole blocks."""
    views = {"key": both[0], "value": both[1]}
    found = _matches(views, _is_plane) or _matches(views, _is_rows)
    if not found:
        _refuse_part(verb, views)
        return None
    entry, layer = _only(verb, views, found)
    return entry.cache, layer


# --- whole caches ---------------------------------------------------------------------------------------------------


def _named(verb: str, info: TensorInfo, layout: LayoutLike | None) -> tuple[kv.Cache, LayoutLike | None] | None:
    """The cache by the layout that the caller gave, or by what was registered; None where neither tells.

    With it comes what can be said of another tensor of the same order: None for a plane of a registered cache.
    """
    if layout is not None:
        return _by_layout(verb, info, layout), layout
    entry = _registered.get(_identity(info))
    if entry is not None:
        if entry.geometry is None or not isinstance(entry.layout, str):
            return entry.cache, entry.layout
        return entry.cache, kv.layout(entry.layout, entry.geometry)
    found = []
    for accepts in (_is_plane, _is_rows):
        for name in sorted({name for entry in _registered.values() for name in entry.layers[0]}):
            found += _matches({name: info}, accepts)
        if found:
            break
    if found:
        _only(verb, {"a tensor": info}, found)
        return _block_rows(verb, info), None
    _refuse_part(verb, {"a tensor": info})
    return None


def _by_layout(verb: str, info: TensorInfo, layout: LayoutLike) -> kv.Cache:
    """One tensor by a layout; a Layout's number of blocks and of layers may be another's."""
    with _as(verb):
        if not isinstance(layout, kv.Layout):
            return kv.Cache(info.owner, layout)
        if not layout.layered:
            layout = layout.with_layers(1)
        sizes = layout.geometry
        num_blocks = max(1, _count(info) * info.item_size // (layout.num_bytes // sizes.num_blocks))
        if num_blocks == sizes.num_blocks:
            return kv.Cache(info.owner, layout)
        return kv.Cache(info.owner, layout.order, geometry=_with_blocks(sizes, num_blocks))


def _with_blocks(sizes: kv.Geometry, num_blocks: int) -> kv.Geometry:
    return kv.Geometry(
        num_layers=sizes.num_layers, num_blocks=num_blocks, block_size=sizes.block_size,
        num_kv_heads=sizes.num_kv_heads, head_size=sizes.head_size, value_head_size=sizes.value_head_size,
        dtype=sizes.dtype, **sizes.symbols,
    )  # fmt: skip


def _readings(verb: str, info: TensorInfo) -> list[kv.Reading]:
    """All readings of an unnamed tensor, where its shape leaves it to readings at all."""
    if not info.shape:
        raise LayoutError(f"{verb}: a tensor of shape [] is no cache")
    if len(info.shape) == 3 and info.shape[0] == 2:
        raise AmbiguousLayout(
            f"{verb}: shape {info.shape} is an MLA cache of 2 blocks ('vllm/mla') or PagedAttention's flat "
            "(2, num_blocks, n) ('vllm/paged-attention', 'vllm/ipex'); give layout= or register it"
        )
    with _as(verb):
        return kv.candidates(info.owner)


def _one(verb: str, info: TensorInfo, layout: LayoutLike | None) -> kv.Cache:
    """One layer's cache by its name, or by any reading where all agree on the bytes of every block."""
    named = _named(verb, info, layout)
    if named is not None:
        return named[0]
    readings = _readings(verb, info)
    if not readings or not all(_core.same_block_bytes(readings[0].layout, r.layout) for r in readings):
        with _as(verb):
            kv.detect(info.owner)  # raises, with every reading and an example
        raise AmbiguousLayout(f"{verb}: readings of shape {info.shape} differ in the bytes of a block")
    return kv.Cache(info.owner, readings[0].layout)


def _same_order(verb: str, source: Tensor, target: Tensor, layout: LayoutLike | None) -> tuple[kv.Cache, kv.Cache]:
    """Two caches of one order: what is known of one holds for both, and a reading counts only if both have it."""
    src = source if isinstance(source, TensorInfo) else inspect(source, f"{verb}: src")
    dst = target if isinstance(target, TensorInfo) else inspect(target, f"{verb}: dst")
    of_src, of_dst = _named(verb, src, layout), _named(verb, dst, layout)
    if of_src is not None and of_dst is not None:
        return of_src[0], of_dst[0]
    if of_src is not None:
        return of_src[0], _alike(verb, dst, src, of_src[1])
    if of_dst is not None:
        return _alike(verb, src, dst, of_dst[1]), of_dst[0]
    targets = [(r.order, _block_sizes(r.geometry), r.layout) for r in _readings(verb, dst)]
    shared = [
        (reading.layout, other)
        for reading in _readings(verb, src)
        for order, sizes, other in targets
        if reading.order == order and _block_sizes(reading.geometry) == sizes
    ]
    if not shared:
        with _as(verb):
            kv.detect(src.owner)  # raises where the source has several readings or none
            kv.detect(dst.owner)
        raise UnknownLayout(f"{verb}: no layout fits both shape {src.shape} and shape {dst.shape}")
    first = shared[0]
    if not all(_core.same_block_bytes(a, b) for pair in shared for a, b in zip(first, pair, strict=True)):
        with _as(verb):
            kv.detect(src.owner)
        raise AmbiguousLayout(f"{verb}: readings of shape {src.shape} differ in the bytes of a block")
    return kv.Cache(src.owner, first[0]), kv.Cache(dst.owner, first[1])


def _alike(verb: str, info: TensorInfo, known: TensorInfo, said: LayoutLike | None) -> kv.Cache:
    """An unnamed tensor by what is known of the one that it is copied from or to: a layout, or one plane's view."""
    if said is not None:
        return _by_layout(verb, info, said)
    if info.shape[1:] != known.shape[1:] or info.dtype_name != known.dtype_name:
        raise LayoutError(
            f"{verb}: {_described({'a plane of a registered cache': known})}, but the other tensor is of shape "
            f"{info.shape} {info.dtype_name}; they must differ in num_blocks alone"
        )
    return _block_rows(verb, info)


def _block_sizes(geometry: kv.Geometry) -> tuple[Any, ...]:
    """All sizes but num_blocks, in which caches of one order may differ."""
    return (
        geometry.num_layers, geometry.block_size, geometry.num_kv_heads, geometry.head_size, geometry.value_head_size,
        geometry.dtype,
    )  # fmt: skip


def _pages(tensor: Tensor, size: int, layout: LayoutLike | None, argument: str) -> kv.Cache:
    """A tensor whose block b is said to be bytes [b * size, (b + 1) * size), and is."""
    verb = "swap_blocks"
    info = inspect(tensor, f"{verb}: {argument}")
    named = _named(verb, info, layout)
    if named is None and _is_page_table(info, size):
        return kv.Cache(info.owner, _pages_layout(info.shape[0], size))
    cache = named[0] if named is not None else _one(verb, info, None)
    if not _core.same_block_bytes(cache.layout, _pages_layout(cache.layout.geometry.num_blocks, size)):
        raise ArgumentError(
            f"{verb}: block_size_in_bytes is {size}, but {argument} of shape {info.shape}, read as "
            f"'{cache.layout}', does not keep block b in bytes [b * {size}, (b + 1) * {size})"
        )
    return cache


def _pages_layout(num_blocks: int, size: int) -> kv.Layout:
    sizes = kv.Geometry(num_blocks=num_blocks, block_size=1, num_kv_heads=1, head_size=size, dtype="u8")
    return kv.Layout("state: B D", sizes)


def _is_page_table(info: TensorInfo, size: int) -> bool:
    """[num_blocks, page] of consecutive pages of this size: the shape itself says what a block is."""
    shape = info.shape
    return len(shape) == 2 and shape[1] * info.item_size == size and info.strides == (shape[1], 1)


# --- K and V given apart --------------------------------------------------------------------------------------------


def _write(
    verb: str, caches: tuple[TensorInfo, TensorInfo], layout: LayoutLike | None, kv_cache_dtype: str,
    tokens: tuple[Tensor, Tensor], slots: Tensor, scales: tuple[Any, Any],
) -> None:  # fmt: skip
    numbers = []
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if hasattr(scale, "shape") and (count := _count(scale)) != 1:
            raise ArgumentError(f"{verb}: {name} has {count} elements; one scale a tensor is supported")
        numbers.append(to_scale(scale, f"{verb}: {name}"))
    rows = [
        inspect(tensor, f"{verb}: {name}", allow_empty=True)
        for name, tensor in zip(("key", "value"), tokens, strict=True)
    ]
    cache, layer, stored = _pair(verb, caches, layout, kv_cache_dtype)
    for name, info, dtype in zip(("key", "value"), rows, stored, strict=True):
        _check_kv_cache_dtype(verb, kv_cache_dtype, name, info, dtype)
    slots = to_vector(slots, f"{verb}: slot_mapping")
    with _as(verb):
        kv.write_tokens(cache, layer, rows[0].owner, rows[1].owner, slots, key_scale=numbers[0], value_scale=numbers[1])


def _pair(
    verb: str, caches: tuple[TensorInfo, TensorInfo], layout: LayoutLike | None, kv_cache_dtype: str
) -> tuple[kv.Cache, int, tuple[str, str]]:
    """A cache and a layer of it for K and V views, by the layout given, the registered whole, or the op's meaning.

    With them the dtypes of the elements of K and of V.
    """
    key, value = caches
    dtypes = _cache_dtype(verb, key, kv_cache_dtype), _cache_dtype(verb, value, kv_cache_dtype)
    split = len(key.shape) == 5
    if layout is None:
        views = {"key": key, "value": value}
        found = _matches(views, _is_x_split if split else _is_plane)
        if found:
            entry, layer = _only(verb, views, found)
            planes = entry.layers[layer]
            held = planes["key"].dtype, planes["value"].dtype
            # A cache registered as bytes, in which the engine keeps fp8: its strided views say the rest.
            if held != ("u8", "u8") or dtypes == held or planes["key"].split != split or planes["value"].split:
                return entry.cache, layer, held
        else:
            _refuse_part(verb, views)
    if dtypes[0] != dtypes[1]:
        raise DTypeError(f"{verb}: key_cache is {key.dtype_name}, value_cache {value.dtype_name}")
    num_blocks, block_size, heads, dim = key.shape[:4]
    if split:
        num_blocks, heads, groups, block_size, x = key.shape
        dim = groups * x
    geometry = kv.Geometry(
        num_blocks=num_blocks, block_size=block_size, num_kv_heads=heads, head_size=dim,
        value_head_size=value.shape[2 if split else 3], dtype=dtypes[0],
    )  # fmt: skip
    memory: tuple[Tensor, ...]
    orders: tuple[str, ...]
    if layout is not None:
        orders = _orders_apart(_order_of(layout))
        if split:
            _check_x_split(verb, layout, orders)
        else:
            _check_agrees(verb, layout, geometry, caches)
        memory = tuple(_arranged(view, "BNHD", order) for view, order in zip(caches, orders, strict=True))
    elif split:
        orders, memory = ("B H D/x N D%x", "B H D N"), (key.owner, value.owner)
    else:
        orders = tuple(_letters_by_stride("BNHD", view) for view in caches)
        memory = tuple(_arranged(view, "BNHD", order) for view, order in zip(caches, orders, strict=True))
    with _as(verb):
        cache = kv.Cache((memory[0], memory[1]), f"key: {orders[0]} | value: {orders[1]}", geometry=geometry)
    return cache, 0, dtypes


def _check_x_split(verb: str, layout: LayoutLike, orders: tuple[str, str]) -> None:
    """A layout of `reshape_and_cache`'s views has K split by x; V transposed or split."""
    if not re.search(r"D/\w+ N D%\w+$", orders[0]) or not re.search(r"%|D N$", orders[1]):
        raise LayoutError(
            f"{verb}: layout '{layout}' has K as '{orders[0]}' and V as '{orders[1]}'; the views' K is "
            "[num_blocks, num_kv_heads, head_size / x, block_size, x]"
        )


def _check_agrees(
    verb: str, layout: LayoutLike, geometry: kv.Geometry, views: tuple[TensorInfo, TensorInfo]
) -> None:  # fmt: skip
    """[num_blocks, block_size, num_kv_heads, head_size] views must have the strides that the layout gives them.

    The outermost stride may be longer (padding, other layers); split axes have no strides of such a view.
    """
    order = _order_of(layout)
    symbols = {}
    if isinstance(layout, kv.Layout):
        said, symbols = layout.geometry, layout.geometry.symbols
        wanted = said.block_size, said.num_kv_heads, said.head_size
        given = geometry.block_size, geometry.num_kv_heads, geometry.head_size
        if wanted != given:
            raise LayoutError(
                f"{verb}: key_cache of shape {views[0].shape}, but '{layout}' has block_size, num_kv_heads and "
                f"head_size {wanted}"
            )
    if re.search(r"[%/]", order):
        return
    layered = re.search(r"\bL\b", order)
    outside = order[: layered.start()] if layered else ""
    sizes = kv.Geometry(
        num_blocks=geometry.num_blocks, block_size=geometry.block_size, num_kv_heads=geometry.num_kv_heads,
        head_size=geometry.head_size, value_head_size=geometry.value_head_size, dtype=geometry.dtype, **symbols,
    )  # fmt: skip
    with _as(verb):
        whole = kv.layout(re.sub(r"\bL\b(@\d+)?(\[\d+\])?\s*", "", order), sizes)
    for name, view in zip(("key", "value"), views, strict=True):
        if name not in whole.planes:
            raise LayoutError(f"{verb}: layout '{layout}' has no plane '{name}'")
        _, _, _, shape, strides = _core.plane_view(whole, name, 0, False)
        longest = max((s for s, n in zip(strides, shape, strict=True) if n > 1), default=1)
        for axis, length, expected, stride in zip("BNHD", shape, strides, view.strides, strict=True):
            longer = expected == longest or axis in outside
            if length > 1 and (stride < expected if longer else stride != expected):
                raise LayoutError(
                    f"{verb}: {name}_cache of shape {view.shape} has strides {view.strides}, layout '{layout}' gives "
                    f"{tuple(strides)}"
                )
    apart = whole.offset("value")[1] - whole.offset("key")[1]
    found = views[1].address - views[0].address
    if whole.num_parts == 1 and (found < apart if layered or not order.lstrip().startswith("B") else found != apart):
        raise LayoutError(
            f"{verb}: value_cache starts {found} bytes after key_cache, with layout '{layout}' it starts {apart} after"
        )


def _check_rows_agree(verb: str, layout: LayoutLike, both: tuple[TensorInfo, TensorInfo]) -> None:
    """`copy_blocks`'s views against `layout=`: their tokens may come before or after their heads."""
    if len(both[0].shape) != 4 or len(both[1].shape) != 4:
        return
    errors = []
    for axes in ((0, 1, 2, 3), (0, 2, 1, 3)):
        views = [
            TensorInfo(
                i.address, tuple(i.shape[a] for a in axes), tuple(i.strides[a] for a in axes), i.item_size, i.dtype,
                i.dtype_name, i.read_only, i.owner,
            )
            for i in both
        ]  # fmt: skip
        sizes = kv.Geometry(
            num_blocks=views[0].shape[0], block_size=views[0].shape[1], num_kv_heads=views[0].shape[2],
            head_size=views[0].shape[3], value_head_size=views[1].shape[3], dtype=_cache_dtype(verb, both[0], "auto"),
        )  # fmt: skip
        try:
            _check_agrees(verb, layout, sizes, (views[0], views[1]))
            return
        except LayoutError as error:
            errors.append(error)
    raise errors[0]


def _count(thing: Any) -> int:
    return int(np.prod(thing.shape, dtype=object))


_KV_CACHE_DTYPES = {
    "auto": None, "bfloat16": "bf16", "half": "f16", "float16": "f16", "float": "f32", "float32": "f32",
    "fp8": "f8_e4m3", "fp8_e4m3": "f8_e4m3", "fp8_e5m2": "f8_e5m2",
}  # fmt: skip


def _check_kv_cache_dtype(verb: str, kv_cache_dtype: str, name: str, tokens: TensorInfo, stored: str) -> None:
    """What is stored must be what `kv_cache_dtype` says; only its fp8 names quantise."""
    wanted = _KV_CACHE_DTYPES[kv_cache_dtype]
    if wanted is not None and not (stored == wanted or (wanted.startswith("f8") and stored == f"{wanted}fnuz")):
        raise DTypeError(f"{verb}: kv_cache_dtype {kv_cache_dtype!r} over a {name} cache of {stored}")
    if wanted is not None and wanted.startswith("f8"):
        return
    if tokens.dtype != stored and not (tokens.carrier and tokens.item_size == _item_size(stored)):
        raise DTypeError(
            f"{verb}: {name} is {tokens.dtype_name}, the cache holds {stored}; kv_cache_dtype {kv_cache_dtype!r} does "
            "not convert"
        )


def _cache_dtype(verb: str, cache: TensorInfo, kv_cache_dtype: str) -> str:
    """The dtype of stored elements: the tensor's own, or the fp8 kind that the engine keeps in bytes."""
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in _KV_CACHE_DTYPES:
        raise DTypeError(f"{verb}: kv_cache_dtype {kv_cache_dtype!r} is not one that this function writes")
    kind = _KV_CACHE_DTYPES[kv_cache_dtype] or ""
    if kind.startswith("f8") and cache.dtype_name == "uint8":
        return kind
    own = "bf16" if cache.dtype_name == "uint16" else cache.dtype
    if own is None:
        raise DTypeError(f"{verb}: a cache of {cache.dtype_name}")
    return own


def _block_rows(verb: str, info: TensorInfo) -> kv.Cache:
    """A tensor whose first axis is the block, whatever its other axes mean."""
    letters = "BLNHD"[: len(info.shape)]
    x_split = len(info.shape) == 5 and info.shape[4] * info.item_size == 16
    if not (2 <= len(info.shape) <= 4 or x_split):
        raise UnknownLayout(
            f"{verb}: shape {info.shape} is neither [num_blocks, block_size, num_kv_heads, head_size] nor "
            "[num_blocks, num_kv_heads, head_size / x, block_size, x]"
        )
    order = _letters_by_stride(letters, info)
    sizes = dict.fromkeys("BLNHD", 1) | dict(zip(letters, info.shape, strict=True))
    rows = kv.Geometry(
        num_layers=sizes["L"], num_blocks=sizes["B"], block_size=sizes["N"], num_kv_heads=sizes["H"],
        head_size=sizes["D"], dtype=_cache_dtype(verb, info, "auto"),
    )  # fmt: skip
    with _as(verb):
        return kv.Cache(_arranged(info, letters, order), f"key: {order}", geometry=rows)


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


def _letters_by_stride(letters: str, info: TensorInfo) -> str:
    """The axes of a tensor in the sequence in which they lie in memory, outermost first."""
    ranked = sorted(zip(info.strides, (-i for i in range(len(letters))), letters, strict=True), reverse=True)
    return " ".join(letter for _, _, letter in ranked)


def _arranged(info: TensorInfo, letters: str, order: str) -> Tensor:
    """The tensor with its axes in the order's sequence; its blocks as flat rows where its shape is not the order's."""
    terms, tensor = order.split(), info.owner
    if sorted(terms) == sorted(letters) and len(letters) == len(info.shape):
        axes = [letters.index(term) for term in terms]
        steps = [info.strides[axis] for axis in axes if info.shape[axis] > 1]
        if steps == sorted(steps, reverse=True):
            return tensor.permute(*axes) if hasattr(tensor, "permute") else tensor.transpose(axes)
    elif len(terms) == len(info.shape):
        return tensor
    rows = tensor.reshape(tensor.shape[0], -1)
    if inspect(rows).address != info.address:
        raise LayoutError(f"a view of shape {info.shape} whose blocks are not contiguous, for '{order}'")
    return rows
