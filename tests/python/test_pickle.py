# SPDX-License-Identifier: Apache-2.0
"""What is a value survives pickling and copying as it is; what is memory of this process refuses both."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import kvstride as kv
from declared import geometry_for
from trees import LENGTHS, Tree, trees

SIZES = {"num_blocks": 5, "block_size": 4, "num_kv_heads": 2, "head_size": 8}
WAYS: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy] + [
    lambda thing, p=protocol: pickle.loads(pickle.dumps(thing, p)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
]


def check_layout(layout: kv.Layout) -> None:
    for way in WAYS:
        other = way(layout)
        assert other == layout and hash(other) == hash(layout) and str(other) == str(layout)
        assert (other.order, other.geometry) == (layout.order, layout.geometry)
        assert (other.shape, other.strides) == (layout.shape, layout.strides)


def fields(reading: kv.Reading) -> tuple[Any, ...]:
    return reading.name, reading.names, reading.order, reading.layout, reading.layout.order, reading.assumes


@pytest.mark.parametrize(
    "geometry",
    [
        kv.Geometry(**SIZES),
        kv.Geometry(**SIZES, num_layers=3, value_head_size=16, dtype="f8_e4m3", k=8, g=2),
        kv.Geometry(num_blocks=2**48, block_size=1, num_kv_heads=1, head_size=1, dtype="u8"),
    ],
    ids=str,
)
def test_geometries(geometry: kv.Geometry) -> None:
    for way in WAYS:
        assert way(geometry) == geometry and repr(way(geometry)) == repr(geometry)


@pytest.mark.parametrize("entry", kv.registry(), ids=lambda entry: entry.name)
def test_registry(entry: kv.Entry) -> None:
    check_layout(kv.layout(entry.name, geometry_for(entry)))
    for way in WAYS:
        other = way(entry)
        for name in ("name", "order", "shape", "engine", "first", "last", "source", "note", "backends", "opaque"):
            assert getattr(other, name) == getattr(entry, name)


def test_strides_of_a_tensor() -> None:
    wide = np.zeros((5, 2, 6, 4, 16), np.float32)[:, :, :4, ::2, :8]
    check_layout(kv.Cache(wide, "vllm/flashinfer-nhd").layout)
    reading = kv.detect(wide, among=["vllm/flashinfer-nhd"])
    check_layout(reading.layout)
    for way in WAYS:
        assert fields(way(reading)) == fields(reading)


@given(trees())
def test_any_layout(tree: Tree) -> None:
    names = {"L": "num_layers", "B": "num_blocks", "N": "block_size", "H": "num_kv_heads", "D": "head_size"}
    check_layout(kv.Layout(tree.text(), kv.Geometry(**{names[axis]: n for axis, n in LENGTHS.items()})))


def test_ambiguous() -> None:
    """The readings come along, each with its own layout."""
    with pytest.raises(kv.AmbiguousLayout) as caught:
        kv.detect((2, 2, 16, 8, 64))
    error = caught.value
    for way in WAYS:
        other = way(error)
        assert type(other) is kv.AmbiguousLayout and str(other) == str(error)
        assert [fields(r) for r in other.readings] == [fields(r) for r in error.readings]


def test_other_errors() -> None:
    with pytest.raises(kv.LayoutError) as caught:
        kv.Layout("B Q", kv.Geometry(**SIZES))
    for way in WAYS:
        other = way(caught.value)
        assert (type(other), str(other), other.column) == (kv.LayoutError, str(caught.value), 3)


def test_another_process() -> None:
    """A fresh interpreter needs no import of its own."""
    layout = kv.Layout("B H KV N D", kv.Geometry(**SIZES))
    code = (
        "import pickle, sys; layout = pickle.load(sys.stdin.buffer); sys.stdout.write(f'{layout!r} {layout.num_bytes}')"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(layout), capture_output=True, check=True)
    assert done.stdout.decode() == f"{layout!r} {layout.num_bytes}"


def test_a_row_of_another_release() -> None:
    entry = kv.registry()[0]
    data = pickle.dumps(entry, 0).replace(entry.name.encode(), b"vllm/gone")
    with pytest.raises(kv.LayoutError, match="'vllm/gone'"):
        pickle.loads(data)


def test_memory_is_refused() -> None:
    cache = kv.Cache(np.zeros((5, 2, 4, 2, 8), np.float32), "vllm/flashinfer-nhd")
    for thing in (cache, kv.Plan(cache, cache), kv.Plan(cache.layout, cache.layout)):
        for way in WAYS:
            with pytest.raises(TypeError, match=rf"^{type(thing).__name__}: .* pickle") as caught:
                way(thing)
            assert "\n" not in str(caught.value)
