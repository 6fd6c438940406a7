# SPDX-License-Identifier: Apache-2.0
"""Block ids, pairs and slots from lists, mappings, numpy arrays and tensors: int64 arrays, or left on their device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ._cuda_array import is_cuda_array
from ._tensor import TensorInfo, inspect, is_torch, refuse_masked
from .errors import ArgumentError, BlockIndexError, DTypeError

_INT64 = np.dtype(np.int64)


class DeviceIds(tuple[Any, ...]):
    """Ids in the memory of a CUDA device as the library takes them: a list, or a pair of lists.

    A list is (address, bytes of an id, stride in ids, count).
    """

    info: TensorInfo  #: the tensor
    size: int  #: how many


def _there(ids: Any, what: str, columns: int, on: str | None) -> DeviceIds | np.ndarray | None:
    """Ids on a device, None where they are on the host. `on` is where the caches lie, None where that does not help."""
    if isinstance(ids, (np.ndarray, list, tuple)):
        return None
    torch = is_torch(ids)
    if ids.device.type == "cpu" if torch else not is_cuda_array(ids):
        return None
    if on is None or on == "cpu":
        caches = "" if on is None else ", the cache is not"
        raise ArgumentError(
            f"{what}: ids on {ids.device if torch else 'a CUDA device'}{caches}; copy them to the CPU first"
        )
    info = inspect(ids, what, allow_empty=True, where="cuda", ids=True)
    if 0 in info.shape:
        return np.zeros((0, 2) if columns == 2 else 0, dtype=np.int64)
    if info.device != on:
        raise ArgumentError(f"{what}: ids on {info.device}, the cache lies on {on}; copy them to the CPU first")
    if info.dtype_name not in ("int32", "int64"):
        raise DTypeError(f"{what}: dtype {info.dtype_name} on {info.device}, expected int32 or int64")
    lists: list[Any] = []
    if columns == 1 and len(info.shape) == 1:
        lists = [info.address, info.item_size, info.strides[0], info.shape[0]]
    elif columns == 2 and info.shape[1:] == (2,):
        step = info.strides[1] * info.item_size
        lists = [(info.address + i * step, info.item_size, info.strides[0], info.shape[0]) for i in range(2)]
    if not lists:
        expected = "one dimension" if columns == 1 else "[n, 2] (source, destination)"
        raise ArgumentError(f"{what}: shape {list(info.shape)}, expected {expected}")
    out = DeviceIds(lists)
    out.info, out.size = info, info.shape[0]
    return out


def to_ids(ids: Any, what: str) -> np.ndarray:
    """A C-contiguous int64 array of any shape. Raises DTypeError for floats and bools, BlockIndexError beyond int64."""
    refuse_masked(ids, what)
    if not isinstance(ids, np.ndarray) and is_torch(ids):
        ids = _from_torch(ids, what)
    elif isinstance(ids, Mapping):
        ids = [(src, dst) for src, many in ids.items() for dst in (many if isinstance(many, (list, tuple)) else [many])]
    array = ids if isinstance(ids, np.ndarray) else _from_items(ids, what)
    if array.size == 0:
        return np.zeros(array.shape, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise DTypeError(f"{what}: dtype {array.dtype} is no integer type")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise BlockIndexError(f"{what}: id {int(array.max())} does not fit int64")
    return np.ascontiguousarray(array, dtype=np.int64)


def _from_torch(ids: Any, what: str) -> np.ndarray:
    import torch

    if ids.layout is not torch.strided:
        raise ArgumentError(f"{what}: a {ids.layout} tensor holds no list of ids")
    if ids.device.type != "cpu":
        raise ArgumentError(f"{what}: ids on {ids.device}; copy them to the CPU first")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DTypeError(f"{what}: dtype {ids.dtype} is no integer type")
    return np.asarray(ids.detach().numpy())


def _from_items(ids: Any, what: str) -> np.ndarray:
    """An array from a list or another iterable of ints or of pairs of ints."""
    try:
        items = ids if isinstance(ids, (list, tuple)) else list(ids)
        array = np.asarray(items, dtype=object)
    except TypeError:
        raise ArgumentError(f"{what}: {type(ids).__name__} is no list of ids") from None
    except ValueError:
        raise ArgumentError(f"{what}: the rows are not equally long") from None
    for value in array.flat:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            if isinstance(value, (list, tuple)):
                raise ArgumentError(f"{what}: the rows are not equally long")
            raise DTypeError(f"{what}: {value!r} is no whole number")
        if not -(2**63) <= value < 2**63:
            raise BlockIndexError(f"{what}: id {value} does not fit int64")
    return array.astype(np.int64)


def to_vector(ids: Any, what: str, on: str | None = None) -> Any:
    """Ids as a one-dimensional int64 array, or those in the memory of the device `on`, where the caches lie."""
    if (there := _there(ids, what, 1, on)) is not None:
        return there
    array = to_ids(ids, what)
    if array.ndim != 1:
        raise ArgumentError(f"{what}: shape {list(array.shape)}, expected one dimension")
    return array


def to_pairs(pairs: Any, what: str, on: str | None = None) -> Any:
    """(source, destination) pairs as an int64 array `[n, 2]`; a mapping is source -> destination(s).

    Those in the memory of the device `on`, where the caches lie, stay there.
    """
    if type(pairs) is np.ndarray and pairs.dtype is _INT64 and pairs.shape[1:] == (2,) and pairs.flags.c_contiguous:
        return pairs  # what small calls should not pay for
    if (there := _there(pairs, what, 2, on)) is not None:
        return there
    array = to_ids(pairs, what)
    if array.size == 0:
        return np.zeros((0, 2), dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ArgumentError(f"{what}: shape {list(array.shape)}, expected [n, 2] (source, destination)")
    return array
