# SPDX-License-Identifier: Apache-2.0
"""Exceptions of kvstride; each is also the built-in that a caller would catch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core import Reading


class Error(Exception):
    """Base of all exceptions of kvstride. The message is one line: the verb, the argument, the value, the limit."""


class LayoutError(Error, ValueError):
    """Text that is no layout, or a tensor that contradicts one. `column` is 1-based, None where it does not apply."""

    column: int | None = None


class AmbiguousLayout(LayoutError):
    """Several readings fit and differ. The message has the shape, the strides and an element of each reading.

    `readings` are those of `detect`; empty where only sizes are open, which a geometry settles.
    """

    def __init__(self, *args: object, readings: Sequence[Reading] = ()) -> None:
        super().__init__(*args)
        self.readings = list(readings)


class UnknownLayout(LayoutError, RuntimeError):
    """No reading fits, or the engine's layout is one whose bytes are not known."""


class NotStrided(LayoutError):
    """A plane has no `[block, token, head, dim]` view; `cache.plane(layer, name)` gives one with split axes."""


class ArgumentError(Error, ValueError):
    """Lengths that differ, duplicates, overlap, read-only memory, tensors that cannot be used."""


class BlockIndexError(Error, IndexError):
    """A block, slot, layer or element index out of range."""


class DTypeError(Error, TypeError):
    """Dtypes that differ or that a verb cannot handle."""


class DeviceError(Error, RuntimeError):
    """A device that is not there, or a call of the CUDA runtime that failed."""


class StoreError(Error, OSError):
    """A store cannot be opened or configured."""


class EngineError(Error, ImportError):
    """An engine is not installed, or of a release that cannot be asked."""
