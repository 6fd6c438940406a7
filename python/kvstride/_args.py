# SPDX-License-Identifier: Apache-2.0
"""Checks of the verbs' other arguments: whole numbers, ranges, scales. One line of message for each fault."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._tensor import is_torch, refuse_masked
from .errors import ArgumentError, BlockIndexError, DTypeError

_MIN, _MAX = -(2**63), 2**63 - 1


def to_int(value: Any, what: str) -> int:
    """A whole number that fits int64. Raises DTypeError for floats and bools, BlockIndexError beyond int64."""
    if isinstance(value, (bool, np.bool_)):
        raise DTypeError(f"{what} is {value!r}, must be a whole number")
    try:
        number = operator.index(value)
    except TypeError:
        raise DTypeError(f"{what} is {value!r}, must be a whole number") from None
    if not _MIN <= number <= _MAX:
        raise BlockIndexError(f"{what} is {number}, which does not fit int64")
    return number


def to_size(value: Any, what: str) -> int:
    """A length or a stride. Raises DTypeError for floats and bools, ArgumentError beyond int64."""
    try:
        return to_int(value, what)
    except BlockIndexError as error:
        raise ArgumentError(str(error)) from None


def to_flag(value: Any, what: str) -> bool:
    """True or False, and nothing that merely counts as one of them, such as 'no'."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{what} is {value!r:.80}, expected True or False")
    return bool(value)


def to_null_block(value: Any, verb: str) -> int | None:
    """The id of the block that an engine reserves, or None."""
    if value is None:
        return None
    number = to_int(value, f"{verb}: null_block")
    if number < 0:
        raise BlockIndexError(f"{verb}: null_block is {number}, below 0")
    return number


def to_numbers(value: Any, names: tuple[str, ...], what: str) -> Any:
    """A tuple of whole numbers, one for each name, or None."""
    if value is None:
        return None
    if not isinstance(value, (tuple, list, np.ndarray)) or len(value) != len(names):
        raise ArgumentError(f"{what} is {' '.join(repr(value).split()):.80}, expected ({', '.join(names)})")
    return tuple(to_int(v, f"{what}: {name}") for v, name in zip(value, names, strict=True))


def to_layers(layers: Any, verb: str) -> tuple[int, int] | None:
    """(first, count) of layers."""
    return to_numbers(layers, ("first", "count"), f"{verb}: layers")


def to_span(span: Any, what: str) -> tuple[int, int, int] | None:
    """(source first, destination first, count) of heads or tokens."""
    return to_numbers(span, ("source first", "destination first", "count"), what)


def to_scale(value: Any, what: str) -> float:
    """One number."""
    if type(value) is float:
        return value
    numbers = to_floats(value, f"{what} is")
    if len(numbers) != 1:
        raise DTypeError(f"{what} has {len(numbers)} values, must be one number")
    return numbers[0]


def to_floats(value: Any, what: str) -> list[float]:
    """One or many numbers; `what` begins the message, as in 'sinks is'. Raises DTypeError for what is no number."""
    refuse_masked(value, what.removesuffix(" is"))
    try:
        array = np.asarray(value.detach().float().cpu() if is_torch(value) else value)
    except (TypeError, ValueError):
        array = np.asarray(None)
    if array.dtype.kind not in "fiu" and array.dtype.name not in ("bfloat16",):
        raise DTypeError(f"{what} {' '.join(repr(value).split()):.80}, must be a number")
    return [float(v) for v in array.reshape(-1)]


def to_scales(scales: Any, verb: str) -> dict[str, list[float]]:
    """One list of scales a plane."""
    if scales is None:
        return {}
    if not isinstance(scales, Mapping):
        raise ArgumentError(f"{verb}: scales is {type(scales).__name__}, expected a mapping from plane to scale(s)")
    out: dict[str, list[float]] = {}
    for plane, value in scales.items():
        if not isinstance(plane, str):
            raise ArgumentError(f"{verb}: scales has the key {plane!r}, expected the name of a plane")
        out[plane] = to_floats(value, f"{verb}: scales of plane '{plane}':")
    return out
