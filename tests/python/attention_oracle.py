# SPDX-License-Identifier: Apache-2.0
"""Naive attention in f64 over plain arrays, and caches that hold the same tokens in scattered blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvstride as kv

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def bf16(array: Any) -> np.ndarray:
    """Rounded to nearest even, as uint16."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_f64(array: np.ndarray) -> np.ndarray:
    """The numbers of an array; uint16 is bf16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def dense(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float = 0.0,
    sinks: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: q `[row, head, dim]`, k and v `[key, KV head, dim]`. Returns out and natural LSE."""
    q, k, v = to_f64(q), to_f64(k), to_f64(v)
    rows, heads, dim = q.shape
    out, lse = np.zeros((rows, heads, v.shape[2])), np.full((rows, heads), -np.inf)
    for r in range(rows):
        at = r + len(k) - rows
        first = 0 if window is None else max(0, at - window + 1)
        end = min(len(k), max(0, at + 1)) if causal else len(k)
        for h in range(heads):
            kv_head = h // (heads // k.shape[1])
            scores = k[first:end, kv_head] @ q[r, h] * (dim**-0.5 if scale is None else scale)
            if soft_cap > 0:
                scores = soft_cap * np.tanh(scores / soft_cap)
            sink = -np.inf if sinks is None else float(sinks[h])
            top = max([sink, *scores])
            if top == -np.inf:
                continue
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(sink - top)
            out[r, h] = weights @ v[first:end, kv_head] / total
            lse[r, h] = top + np.log(total)
    return out, lse


class Batch:
    """Sequences whose tokens lie in scattered blocks of a cache where everything else is NaN.

    `lengths` are (query rows, keys) of each sequence; `q`, `k`, `v` are theirs.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        order: str = "B KV N H D",
        page: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        value_dim: int | None = None,
        dtype: str = "f32",
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)

        def numbers(*shape: int) -> np.ndarray:
            array = rng.standard_normal(shape).astype(np.float32)
            return bf16(array) if dtype == "bf16" else array.astype(NUMPY[dtype])

        columns = max([1, *(-(-keys // page) for _, keys in lengths)])
        self.num_blocks = len(lengths) * columns + 3
        geometry = kv.Geometry(
            num_blocks=self.num_blocks,
            block_size=page,
            num_kv_heads=kv_heads,
            head_size=dim,
            value_head_size=value_dim,
            dtype=dtype,
        )
        layout = kv.layout(order, geometry)
        self.memory = [
            np.full(
                layout.part_bytes(part) // np.dtype(NUMPY[dtype]).itemsize, 0x7FC0 if dtype == "bf16" else np.nan
            ).astype(NUMPY[dtype])
            for part in range(layout.num_parts)
        ]
        self.cache = kv.Cache(self.memory[0] if len(self.memory) == 1 else tuple(self.memory), layout)
        self.table = np.full((len(lengths), columns), -1, np.int32)
        self.seq_lens = np.array([keys for _, keys in lengths], np.int32)
        self.query_start_loc = np.cumsum([0] + [rows for rows, _ in lengths], dtype=np.int32)
        self.q = numbers(int(self.query_start_loc[-1]), heads, dim)
        self.k = [numbers(keys, kv_heads, dim) for _, keys in lengths]
        self.v = [numbers(keys, kv_heads, value_dim or dim) for _, keys in lengths]
        ids = rng.permutation(self.num_blocks).astype(np.int32)
        for s, (_, keys) in enumerate(lengths):
            used = -(-keys // page)
            self.table[s, :used], ids = ids[:used], ids[used:]
            slots = self.table[s, np.arange(keys) // page].astype(np.int64) * page + np.arange(keys) % page
            kv.write_tokens(self.cache, 0, self.k[s], self.v[s], slots)

    def attend(self, **options: Any) -> Any:
        """kv.attention over it."""
        return kv.attention(self.q, self.cache, 0, self.table, self.seq_lens, self.query_start_loc, **options)

    def expected(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """The oracle's out and LSE."""
        parts = [
            dense(self.q[self.query_start_loc[s] : self.query_start_loc[s + 1]], self.k[s], self.v[s], **options)
            for s in range(len(self.k))
        ]
        return np.concatenate([out for out, _ in parts]), np.concatenate([lse for _, lse in parts])
