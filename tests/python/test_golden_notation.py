# SPDX-License-Identifier: Apache-2.0
"""Offsets of every layout of the design's table against golden/notation.json, made by an evaluator of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstride as kv

GOLDEN = Path(__file__).parents[1] / "golden" / "notation.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())


def case_id(case: dict[str, Any]) -> str:
    """A readable test name."""
    return f"{case['order']}-{case['dtype']}-" + "".join(f"{k}{v}" for k, v in case["size"].items())


def geometry(case: dict[str, Any]) -> kv.Geometry:
    """The geometry of a record; symbols that the order does not use are given too."""
    size = case["size"]
    return kv.Geometry(
        num_layers=size["L"],
        num_blocks=size["B"],
        block_size=size["N"],
        num_kv_heads=size["H"],
        head_size=size["D"],
        value_head_size=size.get("Dv"),
        dtype=case["dtype"],
        k=size["k"],
        g=size["g"],
    )


def elements(table: dict[str, Any]) -> Iterator[tuple[tuple[int, ...], int]]:
    """(index [layer, block, token, head, dim], byte) of each sampled element."""
    for at, byte in enumerate(table["offsets"]):
        number, index = at * table["step"], []
        for length in reversed(table["lengths"]):
            number, digit = divmod(number, length)
            index.append(digit)
        yield tuple(reversed(index)), byte


def test_all_layouts_are_there() -> None:
    orders = {case["order"] for case in CASES}
    assert len(orders) == 44
    assert all(sum(case["order"] == order for case in CASES) >= 2 for order in orders)
    assert sum(len(t["offsets"]) for c in CASES for part in c["tensors"] for t in part["planes"].values()) > 100_000


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_offsets(case: dict[str, Any]) -> None:
    layout = kv.Layout(case["order"], geometry(case))
    names = [name for part in case["tensors"] for name in part["planes"]]
    assert list(layout.planes) == names
    assert layout.num_parts == len(case["tensors"])
    for part, tensor in enumerate(case["tensors"]):
        assert layout.part_bytes(part) == tensor["bytes"]
        for plane, table in tensor["planes"].items():
            layers, *rest = layout.extents(plane)
            assert rest == table["lengths"][1:]
            assert layers == (table["lengths"][0] if layout.layered else case["size"]["L"])
            compared = 0
            for index, byte in elements(table):
                assert layout.offset(plane, *index) == (part, byte), (plane, index)
                compared += 1
            assert compared == len(table["offsets"]) > 0


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_canonical_text_has_the_same_offsets(case: dict[str, Any]) -> None:
    g = geometry(case)
    layout = kv.Layout(str(kv.Layout(case["order"], g)), g)
    for part, tensor in enumerate(case["tensors"]):
        for plane, table in tensor["planes"].items():
            for index, byte in elements(table):
                assert layout.offset(plane, *index) == (part, byte), (plane, index)


def test_a_wrong_layout_is_seen() -> None:
    """The comparison is not empty: another interior of the same size differs from the golden offsets."""
    case = next(c for c in CASES if c["order"] == "B KV N H D")
    wrong = kv.Layout("B KV H N D", geometry(case))
    table = case["tensors"][0]["planes"]["key"]
    assert sum(wrong.offset("key", *index) != (0, byte) for index, byte in elements(table)) > 100
