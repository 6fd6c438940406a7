# SPDX-License-Identifier: Apache-2.0
"""Block ids, pairs and slots from lists, mappings, numpy arrays and tensors to int64 arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ._tensor import is_torch, refuse_masked
from .errors import ArgumentError, BlockIndexError, DTypeError

_INT64 = np.dtype(np.int64)


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


def to_vector(ids: Any, what: str) -> np.ndarray:
    """Ids as a one-dimensional int64 array."""
    array = to_ids(ids, what)
    if array.ndim != 1:
        raise ArgumentError(f"{what}: shape {list(array.shape)}, expected one dimension")
    return array


def to_pairs(pairs: Any, what: str) -> np.ndarray:
    """(source, destination) pairs as an int64 array `[n, 2]`; a mapping is source -> destination(s)."""
    if type(pairs) is np.ndarray and pairs.dtype is _INT64 and pairs.shape[1:] == (2,) and pairs.flags.c_contiguous:
        return pairs  # what small calls should not pay for
    array = to_ids(pairs, what)
    if array.size == 0:
        return np.zeros((0, 2), dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ArgumentError(f"{what}: shape {list(array.shape)}, expected [n, 2] (source, destination)")
    return array
