# SPDX-License-Identifier: Apache-2.0
"""Pickling of what is a value: geometries, layouts, readings, registry entries. Importing it is what registers them."""

from __future__ import annotations

import copyreg
from typing import Any

from . import _core
from ._core import Entry, Geometry, Layout, Reading, registry
from .cache import geometry_sizes
from .errors import LayoutError


def _geometry(sizes: dict[str, int], dtype: str) -> Geometry:
    return Geometry(dtype=dtype, **sizes)


def _reading(*fields: Any) -> Reading:
    return _core.make_reading(*fields)


def _entry(name: str) -> Entry:
    for entry in registry():
        if entry.name == name:
            return entry
    raise LayoutError(f"registry: no row '{name}' in this release")


copyreg.pickle(Geometry, lambda g: (_geometry, (geometry_sizes(g), g.dtype)))
copyreg.pickle(Layout, lambda layout: (Layout, (layout.order, layout.geometry)))  # its order has its own strides
copyreg.pickle(Reading, lambda r: (_reading, (r.name, r.names, r.order, r.layout, r.assumes)))
copyreg.pickle(Entry, lambda entry: (_entry, (entry.name,)))
