# SPDX-License-Identifier: Apache-2.0
"""Block ids, pairs and slots from lists, mappings, numpy arrays and tensors to int64 arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ._tensor import is_torch
from .errors import ArgumentError, BlockIndexError, DTypeError


def to_ids(ids: Any, what: str) -> np.ndarray:
    """A C-contiguous int64 array of any shape. Raises DTypeError for floats and bools, BlockIndexError beyond int64."""
    if is_torch(ids):
        if ids.device.type != "cpu":
            raise ArgumentError(f"{what}: ids on {ids.device}; copy them to the CPU first")
        if ids.is_floating_point() or ids.is_complex() or str(ids.dtype) == "torch.bool":
            raise DTypeError(f"{what}: dtype {ids.dtype} is no integer type")
        ids = ids.detach().numpy()
    if isinstance(ids, Mapping):
        ids = [(src, dst) for src, many in ids.items() for dst in (many if isinstance(many, (list, tuple)) else [many])]
    try:
        array = np.asarray(ids if isinstance(ids, np.ndarray) else _to_list(ids))
    except (ValueError, OverflowError) as error:
        raise ArgumentError(f"{what}: {error}") from None
    if array.size == 0:
        return np.zeros(array.shape, dtype=np.int64)
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and (array > np.iinfo(np.int64).max).any():
        raise BlockIndexError(f"{what}: id {int(array.max())} does not fit int64")
    if array.dtype.kind == "O":
        for value in array.flat:
            if isinstance(value, int) and not isinstance(value, bool):
                raise BlockIndexError(f"{what}: id {max((abs(v), v) for v in array.flat)[1]} does not fit int64")
            break
    if array.dtype.kind not in "iu":
        raise DTypeError(f"{what}: dtype {array.dtype} is no integer type")
    return np.ascontiguousarray(array, dtype=np.int64)


def _to_list(ids: Any) -> Any:
    return ids if isinstance(ids, (list, tuple)) else list(ids)


def to_vector(ids: Any, what: str) -> np.ndarray:
    """Ids as a one-dimensional int64 array."""
    array = to_ids(ids, what)
    if array.ndim != 1:
        raise ArgumentError(f"{what}: shape {list(array.shape)}, expected one dimension")
    return array


def to_pairs(pairs: Any, what: str) -> np.ndarray:
    """(source, destination) pairs as an int64 array `[n, 2]`; a mapping is source -> destination(s)."""
    array = to_ids(pairs, what)
    if array.size == 0:
        return np.zeros((0, 2), dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ArgumentError(f"{what}: shape {list(array.shape)}, expected [n, 2] (source, destination)")
    return array
