# SPDX-License-Identifier: Apache-2.0
"""The block verbs.

Every id, size, dtype and layout is checked before the first byte is written; after an error nothing was written. A
call means what it would mean if all sources were read before any destination was written. Only the planes' own bytes
change, never padding, another layer or another plane. Block ids may be lists, mappings, numpy arrays or CPU tensors of
any integer type. The interpreter lock is released while bytes move; calls on different blocks may run at once.

Caches may lie on CUDA devices (docs/cuda.md). `stream` is then where the work goes: a `torch.cuda.Stream`, a
cudaStream_t as a number, or an object with `ptr` (cupy) or `__cuda_stream__`. None: the stream on which the memory's
owners work (torch's current one; what `__cuda_array_interface__` says), or, where that is not one, kvstride's own, and
the call waits. With a stream the call returns at once where all memory is the device's, and where some is the host's as
soon as the host may use it; of two devices it is the destination's; on the host it is ignored. Ids of int32 or int64
may lie on the device where all of the memory lies: they are read when the work is done. Those that name nothing are
left out, and a later verb or `cuda_check` raises BlockIndexError; nobody sees a destination that is given twice. Raises
DeviceError for what CUDA refuses, and for what a stream that is being captured into a graph cannot take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from . import _core
from ._args import to_flag, to_int, to_layers, to_null_block, to_scale, to_scales, to_size, to_span
from ._ids import to_pairs, to_vector
from ._stream import allocating, put
from ._tensor import TensorInfo, empty_like, inspect, is_torch
from .cache import Cache
from .errors import ArgumentError, DTypeError

#: (first, count)
Layers = tuple[int, int]
#: (source first, destination first, count)
Span = tuple[int, int, int]


def core_of(cache: Any, what: str) -> _core.Cache:
    """The library's cache of a `Cache`. Raises ArgumentError for anything else."""
    if not isinstance(cache, Cache):
        raise ArgumentError(f"{what} is {type(cache).__name__}, expected a kvstride.Cache")
    return cache.core()


def host_core_of(cache: Any, verb: str) -> _core.Cache:
    """The same for what takes caches in host memory. Raises ArgumentError for one on a device."""
    core = core_of(cache, f"{verb}: cache")
    if cache.cuda >= 0:
        raise ArgumentError(f"{verb}: the cache lies on {cache.device}; {verb} takes host memory")
    return core


def place_of(src: Cache, dst: Cache) -> str:
    """Where ids for two caches may lie."""
    return src.device if src.cuda == dst.cuda else f"{src.device} and {dst.device}"


def copy_blocks(
    cache: Cache,
    pairs: Any,
    *,
    layers: Layers | None = None,
    null_block: int | None = None,
    stream: Any = None,
) -> int:
    """Copy blocks inside one cache: all planes, all layers or a range of them.

    `pairs` are (source, destination) block ids; (b, b) does nothing, chains and cycles are allowed. Pairs that name
    `null_block`, the id that an engine reserves, are left out. Returns the number of pairs carried out; where the ids
    are on a device, of those given, and no source may then be another pair's destination. Raises BlockIndexError for an
    id outside the cache, ArgumentError for a destination given twice or a read-only cache.
    """
    core = core_of(cache, "copy_blocks: cache")
    if layers is not None:
        layers = to_layers(layers, "copy_blocks")
    if null_block is not None:
        null_block = to_null_block(null_block, "copy_blocks")
    ids = to_pairs(pairs, "copy_blocks: pairs", cache.device)
    return put("copy_blocks", stream, (cache,), ids, _core.copy_blocks, core, ids, layers, null_block)


def swap_blocks(
    src: Cache,
    dst: Cache,
    pairs: Any,
    *,
    layers: Layers | None = None,
    null_block: int | None = None,
    stream: Any = None,
) -> int:
    """Copy blocks between two caches of one order (vLLM's historical name; nothing is exchanged).

    num_blocks and outer strides may differ. Raises LayoutError where the orders differ (`convert_blocks` converts),
    ArgumentError where bytes that are read and bytes that are written meet.
    """
    source = core_of(src, "swap_blocks: src")
    target = core_of(dst, "swap_blocks: dst")
    if layers is not None:
        layers = to_layers(layers, "swap_blocks")
    if null_block is not None:
        null_block = to_null_block(null_block, "swap_blocks")
    ids = to_pairs(pairs, "swap_blocks: pairs", place_of(src, dst))
    return put("swap_blocks", stream, (src, dst), ids, _core.swap_blocks, source, target, ids, layers, null_block)


def convert_blocks(
    src: Cache,
    dst: Cache,
    pairs: Any = None,
    *,
    src_blocks: Any = None,
    dst_blocks: Any = None,
    tokens: Span | None = None,
    heads: Span | None = None,
    layers: Layers | None = None,
    cast: bool = False,
    scales: Mapping[str, Any] | None = None,
    null_block: int | None = None,
    stream: Any = None,
) -> int:
    """Copy blocks between any two layouts of the same planes.

    With `pairs`, both caches have one block size. With `src_blocks` and `dst_blocks` the blocks are two token
    sequences over block sizes of any kind: token t of the source lies in slot t % block_size of
    `src_blocks[t // block_size]`; `tokens` = (source first, destination first, count), by default all of both.
    `heads` = (source first, destination first, count) moves a tensor-parallel slice; planes without H (latent, rope,
    index) are always copied whole, raw planes (`state…`) refuse it. `layers` = (first, count). `cast` converts values
    where dtypes differ: round to nearest even, f8 saturates, NaN stays NaN; `scales` maps a plane to one scale or
    one for each head of the f8 side: dequantise q × scale, quantise x / scale.

    Returns the number of pairs (or tokens) carried out. Raises DTypeError for different dtypes without `cast`,
    BlockIndexError, ArgumentError (a destination given twice, touched bytes that meet), LayoutError (other planes or
    sizes).
    """
    verb = "convert_blocks"
    ends = core_of(src, f"{verb}: src"), core_of(dst, f"{verb}: dst")
    casts = to_flag(cast, f"{verb}: cast")
    options = (to_span(heads, f"{verb}: heads"), to_layers(layers, verb), casts, to_scales(scales, verb))
    if pairs is not None:
        if src_blocks is not None or dst_blocks is not None or tokens is not None:
            raise ArgumentError("convert_blocks: give pairs, or src_blocks, dst_blocks and tokens, not both")
        ids = to_pairs(pairs, "convert_blocks: pairs", place_of(src, dst))
        null = to_null_block(null_block, verb)
        return int(put(verb, stream, (src, dst), ids, _core.convert_blocks, *ends, ids, *options, null))
    if src_blocks is None or dst_blocks is None:
        raise ArgumentError("convert_blocks: give pairs, or src_blocks and dst_blocks")
    if null_block is not None:
        raise ArgumentError("convert_blocks: null_block goes with pairs; a token sequence has no holes")
    sources = to_vector(src_blocks, "convert_blocks: src_blocks")
    destinations = to_vector(dst_blocks, "convert_blocks: dst_blocks")
    span = token_span(src, dst, sources, destinations, tokens, "convert_blocks")
    put(verb, stream, (src, dst), None, _core.convert_tokens, *ends, sources, destinations, span, *options)
    return int(span[2])


def token_span(
    src: Any, dst: Any, sources: np.ndarray, destinations: np.ndarray, tokens: Span | None, verb: str
) -> Span:
    """`tokens`, or all tokens of both sequences where they are equally long."""
    given = to_span(tokens, f"{verb}: tokens")
    if given is not None:
        return given
    total_src = len(sources) * src.layout.geometry.block_size
    total_dst = len(destinations) * dst.layout.geometry.block_size
    if total_src != total_dst:
        raise ArgumentError(f"{verb}: {total_src} source tokens, {total_dst} destination tokens; give tokens=")
    return (0, 0, total_src)


def zero_blocks(cache: Cache, ids: Any, *, null_block: int | None = None, stream: Any = None) -> None:
    """Zero every byte of the planes of these blocks, padding untouched. An id given twice is an error."""
    core = core_of(cache, "zero_blocks: cache")
    null = to_null_block(null_block, "zero_blocks")
    blocks = to_vector(ids, "zero_blocks: ids", cache.device)
    put("zero_blocks", stream, (cache,), blocks, _core.zero_blocks, core, blocks, null)


def expand_block_ids(ids: Any, ratio: int | float) -> np.ndarray:
    """Kernel block ids of manager block ids: b becomes b × ratio … b × ratio + ratio − 1, as int64.

    `ratio` is manager block size / kernel block size. Raises ArgumentError for a ratio that is not whole.
    """
    if isinstance(ratio, float):
        if not ratio.is_integer():
            raise ArgumentError(f"expand_block_ids: ratio {ratio} is not whole")
        ratio = int(ratio)
    number = to_int(ratio, "expand_block_ids: ratio")
    return np.asarray(_core.expand_block_ids(to_vector(ids, "expand_block_ids: ids"), number), dtype=np.int64)


def set_num_threads(threads: int) -> None:
    """Threads that large calls started later are split over.

    0 goes back to the default: KVSTRIDE_NUM_THREADS, or the process's cores.
    """
    _core.set_num_threads(to_size(threads, "set_num_threads: threads"))


def gather_tokens(
    cache: Cache, slots: Any, *, out: Mapping[str, Any] | None = None, stream: Any = None
) -> dict[str, Any]:
    """Tokens by slot (block × block_size + token) as dense tensors `[layer, token, head, dim]`, one a plane.

    Slots may repeat. `out` gives tensors to fill, by plane, all on one device, which need not be the cache's. Without
    it they are made where the cache is, for which a cache on a device must be torch's. Raises ArgumentError for raw
    planes.
    """
    verb = "gather_tokens"
    core = core_of(cache, f"{verb}: cache")
    ids = to_vector(slots, f"{verb}: slots", cache.device)
    layout = _core.dense_layout(cache.layout, ids.size)
    planes = out if out is not None else _new_planes(cache, layout, ids.size, stream)
    dense = _dense(layout, planes, ids.size, f"{verb}: out")
    if dense is not None:
        put(verb, stream, (cache, dense), ids, _core.gather_tokens, core, ids, dense.core)
    return dict(planes)


def scatter_tokens(cache: Cache, slots: Any, planes: Mapping[str, Any], *, stream: Any = None) -> None:
    """The reverse of `gather_tokens`: tensors `[layer, token, head, dim]` to slots. A slot given twice is an error."""
    verb = "scatter_tokens"
    core = core_of(cache, f"{verb}: cache")
    ids = to_vector(slots, f"{verb}: slots", cache.device)
    layout = _core.dense_layout(cache.layout, ids.size)
    dense = _dense(layout, planes, ids.size, f"{verb}: planes")
    if dense is not None:
        put(verb, stream, (dense, cache), ids, _core.scatter_tokens, core, ids, dense.core)


class _Dense(NamedTuple):
    """Dense tensors as a cache."""

    core: _core.Cache
    tensors: list[TensorInfo]
    cuda: int


def _dense_shape(layout: _core.Layout, plane: str, num_tokens: int) -> tuple[int, ...]:
    layers, _, _, heads, dims = layout.extents(plane)
    return (layers, num_tokens, heads, dims)


def _new_planes(cache: Cache, layout: _core.Layout, num_tokens: int, stream: Any) -> dict[str, Any]:
    like = cache.tensors[0]
    shapes = {plane: _dense_shape(layout, plane, num_tokens) for plane in layout.planes}
    if like.cuda >= 0 and not is_torch(like.owner):
        raise ArgumentError(f"gather_tokens: give out=; on {like.device} only torch makes tensors here")
    with allocating(stream, "gather_tokens", like):
        return {p: empty_like(like, dtype, shapes[p]) for p, dtype in layout.planes.items()}


def _dense(layout: _core.Layout, planes: Mapping[str, Any], num_tokens: int, what: str) -> _Dense | None:
    """The dense tensors as a cache; None where there are no tokens."""
    if not isinstance(planes, Mapping):
        raise ArgumentError(f"{what}: {type(planes).__name__}, expected a mapping from plane to tensor")
    if set(planes) != set(layout.planes):
        raise ArgumentError(f"{what}: planes {sorted(planes, key=str)}, the cache has {sorted(layout.planes)}")
    if num_tokens == 0:
        return None
    infos: list[TensorInfo] = []
    for plane, dtype in layout.planes.items():
        info = inspect(planes[plane], f"{what}[{plane!r}]", where="cuda")
        shape = _dense_shape(layout, plane, num_tokens)
        if info.shape != shape:
            raise ArgumentError(f"{what}[{plane!r}]: shape {list(info.shape)}, expected contiguous {list(shape)}")
        strides = [int(np.prod(shape[i + 1 :])) for i in range(4)]
        if list(info.strides) != strides and not _ones_only(info):
            raise ArgumentError(
                f"{what}[{plane!r}]: not contiguous, strides {list(info.strides)} of shape {list(shape)}, "
                f"expected {strides}"
            )
        _check_dtype(info, dtype, f"{what}[{plane!r}]")
        if infos and info.device != infos[0].device:
            raise ArgumentError(f"{what}[{plane!r}]: on {info.device}, the first plane on {infos[0].device}")
        infos.append(info)
    cuda = infos[0].cuda
    core = _core.Cache([info.address for info in infos], layout, any(info.read_only for info in infos), cuda)
    return _Dense(core, infos, cuda)


def _ones_only(info: TensorInfo) -> bool:
    """Whether the strides are those of a contiguous tensor up to dimensions of length 1."""
    expected = 1
    for length, stride in zip(reversed(info.shape), reversed(info.strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _check_dtype(info: TensorInfo, dtype: str, what: str) -> None:
    item = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2}.get(dtype, 1)
    if (not info.carrier and info.dtype != dtype) or info.item_size != item:
        raise DTypeError(f"{what}: {info.dtype_name}, the cache holds {dtype}")


def write_tokens(
    cache: Cache,
    layer: int,
    key: Any,
    value: Any,
    slot_mapping: Any,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    stream: Any = None,
) -> None:
    """Write new tokens of one layer, as an engine's reshape_and_cache does.

    `key` and `value` are `[token, head, dim]`, strided as they like. Token i goes to slot `slot_mapping[i]` (block ×
    block_size + token); any negative slot is skipped; key and value may each be longer than slot_mapping, the
    rest is not read. A cache of an f8 dtype stores x / scale, saturated; otherwise dtypes must be equal (bf16 never
    becomes f16). A slot given twice is an error. key and value lie on one device, as a rule the cache's.
    """
    core = core_of(cache, "write_tokens: cache")
    slots = to_vector(slot_mapping, "write_tokens: slot_mapping", cache.device)
    scales = to_scale(key_scale, "write_tokens: key_scale"), to_scale(value_scale, "write_tokens: value_scale")
    tokens: list[Any] = []
    memory: list[Any] = []
    for name, tensor in (("key", key), ("value", value)):
        info = inspect(tensor, f"write_tokens: {name}", allow_empty=True, where="cuda")
        if len(info.shape) != 3:
            raise ArgumentError(f"write_tokens: {name} has shape {list(info.shape)}, expected [token, head, dim]")
        plane = cache.layout.planes.get(name)
        dtype = info.dtype
        if plane is not None and info.carrier and info.item_size == {"bf16": 2, "f16": 2, "f32": 4}.get(plane, 1):
            dtype = plane  # uint16 for bf16, uint8 for f8
        if dtype is None:
            raise DTypeError(f"write_tokens: {name} is {info.dtype_name}, the cache holds {plane}")
        tokens.append((info.address, dtype, info.shape, info.strides, info.cuda))
        memory.append(info)
    number = to_int(layer, "write_tokens: layer")
    put("write_tokens", stream, (*memory, cache), slots, _core.write_tokens, core, number, *tokens, slots, *scales)
