# SPDX-License-Identifier: Apache-2.0
"""kv.attention against vectors of ModelOpt 0.47's own Triton kernels, in every layout that can hold them.

`KVSTRIDE_GOLDEN_DIR` names their directory; facts of the kernels: docs/attention.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstride as kv

GOLDEN = Path(os.environ.get("KVSTRIDE_GOLDEN_DIR") or Path(__file__).parent.parent / "golden" / "sparse_attention")
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())
PAGED = [name for name, case in CASES.items() if case.get("kernel", "attention_decode") == "attention_decode"]
TOLERANCE = {"f32": 5e-6, "f16": 1e-3, "bf16": 1e-2}

#: Orders of keys and values: every kind that has strides, and some that do not. "own" is the case's own memory.
ORDERS = [
    "own",
    "B KV N H D",
    "B KV H N D",
    "KV B N H D",
    "KV B H N D",
    "B H N KV D",
    "B N H KV D",
    "B N KV H D",
    "B {key: H D/8 N D%8, value: H D N}",
    "B H {key: D N, value: N D}",
    "key: B H D/4 N D%4 | value: B H N D",
]
OWN = {"kv-first": "KV B N H D", "blocks-first": "B KV N H D", "packed": "B H N KV D"}


def to_floats(array: np.ndarray, dtype: str) -> np.ndarray:
    """bf16 comes as uint16."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def own_cache(case: dict[str, Any], kv_cache: np.ndarray) -> kv.Cache:
    view = case["k_view"]["shape"]
    geometry = kv.Geometry(
        num_blocks=view[0], block_size=view[1], num_kv_heads=view[2], head_size=view[3], dtype=case["dtype"]
    )
    return kv.Cache(kv_cache, OWN[case["layout"]], geometry=geometry)


def cache_in(order: str, case: dict[str, Any], kv_cache: np.ndarray) -> kv.Cache:
    """The case's keys and values in memory of another order, whose other bytes are NaN."""
    own = own_cache(case, kv_cache)
    if order == "own":
        return own
    layout = kv.layout(order, own.layout.geometry)
    item = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[case["dtype"]]
    parts = [
        np.full(layout.num_bytes // np.dtype(item).itemsize, 0x7FC0 if item is np.uint16 else np.nan, item)
        for _ in range(layout.num_parts)
    ]
    cache = kv.Cache(parts[0] if len(parts) == 1 else tuple(parts), layout)
    kv.convert_blocks(own, cache, [(b, b) for b in range(layout.geometry.num_blocks)])
    return cache


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"scale": case["softmax_scale"], "causal": case.get("causal", False)}
    if case.get("skip_softmax_threshold"):
        out |= {"skip_lambda": case["skip_softmax_threshold"], "tile": (case["block_m"], case["block_n"])}
    if case.get("sparsity_n"):
        out |= {"nm": (case["sparsity_n"], case["sparsity_m"])}
        out |= {"recent": case["dense_recent_tokens"], "sink_tokens": case["dense_sink_tokens"]}
    return out


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PAGED)
def test_golden(name: str, order: str) -> None:
    case = CASES[name]
    data = np.load(GOLDEN / f"{name}.npz")
    cache = cache_in(order, case, data["kv_cache"])
    query_start_loc = data["query_start_loc"] if "query_start_loc" in data.files else np.arange(len(data["q"]) + 1)
    out, lse, rows = kv.attention(
        data["q"],
        cache,
        0,
        data["block_table"],
        data["seq_lens"],
        query_start_loc,
        return_lse=True,
        lse_base="2",
        counters="map",
        **arguments(case),
    )
    tolerance = TOLERANCE[case["dtype"]]
    np.testing.assert_allclose(
        to_floats(out, case["dtype"]), to_floats(data["out"], case["dtype"]), rtol=tolerance, atol=tolerance
    )
    if "lse" in data.files:
        np.testing.assert_allclose(lse, data["lse"], rtol=1e-5, atol=1e-5)
    if "skip_map" not in data.files:
        assert len(rows) == 0
        return
    expected = data["skip_map"].astype(np.int64)
    np.testing.assert_array_equal(rows, expected[np.lexsort(expected.T[3::-1])])
    assert (len(rows), rows[:, 4].sum()) == (case["tiles_total"], case["tiles_skipped"])


@pytest.mark.parametrize("page", [1, 7, 16, 300, 512])
def test_calibration(page: int) -> None:
    (name,) = [name for name, case in CASES.items() if case.get("kernel") == "attention_calibrate"]
    case, data = CASES[name], np.load(GOLDEN / f"{name}.npz")
    tokens = len(data["k"])
    blocks = -(-tokens // page)
    geometry = kv.Geometry(num_blocks=blocks, block_size=page, num_kv_heads=1, head_size=case["head_dim"], dtype="f16")
    memory = np.full((blocks, 2, page, 1, case["head_dim"]), np.nan, np.float16)
    cache = kv.Cache(memory, "B KV N H D", geometry=geometry)
    table = np.arange(blocks)[::-1].copy()
    slots = np.array([table[t // page] * page + t % page for t in range(tokens)])
    kv.write_tokens(cache, 0, data["k"], data["v"], slots)
    out, counts = kv.attention_calibrate(
        data["q"],
        cache,
        0,
        table[None],
        [tokens],
        [0, tokens],
        case["threshold_trials"],
        scale=case["softmax_scale"],
        tile=(case["block_m"], case["block_n"]),
    )
    np.testing.assert_array_equal(counts, data["counters"])
    np.testing.assert_allclose(out.astype(np.float32), data["out"].astype(np.float32), rtol=1e-3, atol=1e-3)
