# SPDX-License-Identifier: Apache-2.0
"""Chunks of one KV cache group: the store that keeps them, and the rows of the primary tier that they come from."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import kvstride as kv

from .._natural import natural_view
from .options import TierOptions
from .rows import Group, Rows

#: How numpy carries elements of so many bytes, whatever they mean.
_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


class GroupStore:
    """The store of one KV cache group: portable chunks, or rows as they are, each one record of bytes."""

    def __init__(
        self,
        tiers: list[kv.Tier],
        rows: np.ndarray,
        about: Rows,
        group: Group,
        blocks: int,
        options: TierOptions,
    ) -> None:
        self.group = group
        page = group.portable
        num_rows, row_bytes = rows.shape
        layout = (
            page.layout(num_rows, row_bytes, blocks) if page else _whole(num_rows, row_bytes, group.tokens * blocks)
        )
        self._cache = kv.Cache(_from_page(rows, page.first if page else 0, layout), layout)
        self.space = _namespace(about, group, layout)
        # vLLM's rows are free as soon as the directory has a chunk: the remote engine gets it behind their backs.
        self.store = kv.Store(tiers, namespace=self.space, deadline=options.deadline, write_behind=len(tiers) > 1)

    def move(self, keys: list[bytes], rows: np.ndarray, load: bool) -> kv.Job:
        """Start a get into, or a put from, these rows."""
        return (self.store.get if load else self.store.put)(keys, self._cache, rows)

    def close(self) -> None:
        """End the store: nothing touches the rows any more."""
        self.store.close()
        del self._cache  # and the rows


def _whole(num_rows: int, row_bytes: int, tokens: int) -> kv.Layout:
    """Rows whose bytes have no known meaning."""
    sizes = kv.Geometry(num_blocks=num_rows, block_size=tokens, num_layers=1, num_kv_heads=1, head_size=row_bytes)
    return kv.Layout(f"B@{row_bytes} {{state: D[{row_bytes}] u8}}", sizes)


def _from_page(rows: np.ndarray, first: int, layout: kv.Layout) -> np.ndarray:
    """All rows from the first page on, in the layout's own shape."""
    item = max(_ITEM_BYTES.get(dtype, 1) for dtype in layout.planes.values())
    flat = rows.reshape(-1)[first:]
    flat = flat[: len(flat) // item * item].view(_CARRIERS[item])
    return natural_view(flat, layout)


def _namespace(about: Rows, group: Group, layout: kv.Layout) -> kv.Namespace:
    """What chunks belong to. Group numbers and layer names are the engine's: the same names are the same layers."""
    layers = hashlib.sha256("\n".join(group.layers).encode()).hexdigest()[:16]
    sizes = layout.geometry
    value: dict[str, Any] = {} if sizes.value_head_size is None else {"value_head_size": sizes.value_head_size}
    raw: dict[str, Any] = {} if group.portable else {"raw": f"vLLM rows; {about.raw}"}
    return kv.Namespace(
        model=about.model,
        revision=f"{about.revision}+{about.settings}",
        group=group.index,
        num_layers=sizes.num_layers,
        salt_policy=f"vllm {about.hashing}; layers {layers}",
        planes=dict(layout.planes),
        num_kv_heads=sizes.num_kv_heads,
        head_size=sizes.head_size,
        block_size=sizes.block_size,
        **value,
        **raw,
    )
