# SPDX-License-Identifier: Apache-2.0
"""Which row of kvstride's registry a named layout is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import kvstride

if TYPE_CHECKING:
    from .naming import Named

_SHAPE_WORDS = {"KV": "2", "KV*D": "2*D"}


def release_of(text: str) -> tuple[int, ...]:
    """`0.9.0.post2` as (0, 9, 0); () where the text has no release."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(g or 0) for g in found.groups()) if found else ()


def registry_name(named: Named) -> str | None:
    """Name of the one vLLM row of this order, this declared shape and this release, else None.

    Rows with L (0.29 and newer) describe the allocation of all layers, of which a named tensor is one layer: they
    are compared without L, and where several remain, vLLM's letters decide.
    """
    shape = ",".join(_SHAPE_WORDS.get(a, a) for a in named.axes)
    geometry = kvstride.Geometry(**named.geometry)
    rows = []
    for entry in kvstride.registry():
        if entry.engine != "vllm" or not _in_range(named.release, entry.first, entry.last):
            continue
        order = entry.order if "L" in named.axes else _without_layers(entry.order)
        if order in (named.order, named.text) or _same_bytes(order, named.order, geometry):
            rows.append((entry, order))
    for keep in (
        lambda e, order: order in (named.order, named.text),
        lambda e, order: e.shape == shape,
        lambda e, order: named.letters is not None and e.name.endswith(named.letters.lower()),
    ):
        kept = [(e, o) for e, o in rows if keep(e, o)]
        rows = kept or rows
    return str(rows[0][0].name) if len(rows) == 1 else None


def _in_range(release: str | None, first: str, last: str) -> bool:
    if release is None:
        return True
    here = release_of(release)
    return (not first or release_of(first) <= here) and (not last or here <= release_of(last))


def _without_layers(order: str) -> str:
    return " ".join(term for term in order.split(" ") if term != "L")


def _same_bytes(order: str, other: str, geometry: kvstride.Geometry) -> bool:
    try:
        return bool(kvstride.Layout(order, geometry) == kvstride.Layout(other, geometry))
    except kvstride.LayoutError:
        return False
