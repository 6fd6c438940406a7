# SPDX-License-Identifier: Apache-2.0
"""What the rows of vLLM's primary tier hold, as the workers have certified it.

A row is one offloaded chunk: for each canonical tensor a slot with the pages of its blocks. With `canonical_layout` a
page has every head, placed by vLLM's `CanonicalPageMapping`; without, each worker has a part of its own. Only a worker
sees the layers' tensors, and only the scheduler's process keeps rows, so workers write a description (`Rows`, as JSON)
beside the shared memory and the scheduler reads it.

A group is *portable* where its layout is known by name and where moving a page by the mapping's runs gives exactly the
bytes that the same layout has with all heads: both are done with random bytes and compared. Everything else is raw.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvstride as kv
from kvstride import LayoutError

from ..live import EngineCache

FORMAT = 1


@dataclass(frozen=True)
class Portable:
    """Pages of one group: layers of one size, evenly spaced in the row.

    `order` is the layout of one layer's page without strides; `geometry` has the block size of the engine and all heads
    of the model. Layer i has its pages at `first + i * layer_step`, block j of a chunk `j * block_step` further.
    """

    order: str
    geometry: dict[str, Any]
    num_layers: int
    first: int
    layer_step: int
    block_step: int

    def layout(self, num_rows: int, row_bytes: int, blocks: int) -> kv.Layout:
        """The layout of all rows from the first layer's page on; a chunk of `blocks` blocks is one block of it."""
        tokens = self.geometry["block_size"]
        text = _chunked(self.order, row_bytes, self.layer_step, self.block_step, tokens, blocks)
        sizes = {**self.geometry, "num_blocks": num_rows, "block_size": tokens * blocks, "num_layers": self.num_layers}
        return kv.Layout(text, kv.Geometry(**sizes))


@dataclass(frozen=True)
class Group:
    """One KV cache group of the engine. `raw` says why it is not portable."""

    index: int
    layers: tuple[str, ...]
    tokens: int
    portable: Portable | None
    raw: str


@dataclass(frozen=True)
class Rows:
    """All that a reader of rows must know. `raw` is what the meaning of uncertified bytes depends on."""

    model: str
    revision: str
    settings: str
    hashing: str
    groups: tuple[Group, ...]
    raw: str
    layout: str

    def to_json(self) -> str:
        """For the scheduler's process."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Rows:
        """The reverse. Raises StoreError for another release's."""
        found = json.loads(text)
        if found.pop("format") != FORMAT:
            raise kv.StoreError("the description of rows is of another release of kvstride")
        groups = tuple(
            Group(
                **{
                    **g,
                    "layers": tuple(g["layers"]),
                    "portable": Portable(**g["portable"]) if g["portable"] else None,
                }
            )
            for g in found.pop("groups")
        )
        return Rows(groups=groups, **found)


def _chunked(order: str, row: int, layer: int, block: int, tokens: int, blocks: int) -> str:
    """The layout of rows: `order` with the steps of rows, layers and blocks before its page."""
    first, _, rest = order.partition(" ")
    if first != "B" or not rest:
        raise LayoutError(f"'{order}' does not begin with blocks")
    head = [f"B@{row}", f"L@{layer}"]
    if blocks > 1:
        # Of a chunk's tokens the engine's block is the outer digit.
        head.append(f"N/{tokens}@{block}")
        rest = _inner_tokens(rest, tokens)
    return " ".join(head) + " " + rest


def _inner_tokens(text: str, tokens: int) -> str:
    out = []
    for word in text.replace("{", "{ ").replace("}", " }").split():
        bare = word.rstrip(",")
        tail = word[len(bare) :]
        if bare == "N":
            bare = f"N%{tokens}"
        elif bare.startswith(("N/", "N%")) or "*N" in bare:
            raise LayoutError(f"the tokens of '{text}' are split already")
        out.append(bare + tail)
    return " ".join(out).replace("{ ", "{").replace(" }", "}")


def describe_group(
    index: int,
    layers: Sequence[str],
    tokens: int,
    cache: EngineCache | None,
    refs: Sequence[Any],
    slots: Sequence[int],
    block_bytes: Sequence[int],
    total_heads: int,
    first_head: int,
    blocks: int,
) -> Group:
    """What this worker knows of a group. `refs`: vLLM's CanonicalKVCacheRef, one a layer; `slots` and `block_bytes`: by
    tensor, where its slot in a row begins and how far its blocks are apart; `blocks`: of a chunk."""

    def raw(why: str) -> Group:
        return Group(index, tuple(layers), tokens, None, why)

    if cache is None:
        return raw("layers of several kinds, or of one that is not known by name")
    if len(refs) != len(layers) or set(cache.layer_names) != set(layers):
        return raw("layers and pages do not correspond")
    if any(r.mapping is None or not r.mapping.parallelism_agnostic for r in refs):
        return raw("vLLM has not certified its pages as independent of the parallelism")
    if cache.kernel_blocks != 1:
        return raw("its blocks are several of the attention kernel's")
    named = cache.named
    mapping = refs[0].mapping
    if any(r.mapping != mapping for r in refs):
        return raw("layers of several page sizes")
    at = [slots[r.tensor_idx] for r in refs]
    steps = {b - a for a, b in itertools.pairwise(at)} or {max(block_bytes[refs[0].tensor_idx], 1)}
    if len(steps) != 1 or min(steps) <= 0 or len({block_bytes[r.tensor_idx] for r in refs}) != 1:
        return raw("its layers are not evenly spaced in a row")
    geometry = {**named.geometry, "num_layers": 1}
    whole = {**geometry, "num_kv_heads": total_heads}
    why = _differs(named.order, geometry, whole, mapping, first_head)
    if why:
        return raw(why)
    page = Portable(named.order, whole, len(layers), at[0], steps.pop(), block_bytes[refs[0].tensor_idx])
    try:
        page.layout(1, at[-1] + page.block_step * blocks, blocks)
    except LayoutError as error:  # tokens that are split already, as AMX tiles are
        return raw(str(error))
    return Group(index, tuple(layers), tokens, page, "")


def _differs(order: str, local: Mapping[str, Any], whole: Mapping[str, Any], mapping: Any, first_head: int) -> str:
    """Why the mapping's runs do not give the bytes of the layout with all heads; empty where they do."""
    try:
        near = kv.Layout(order, kv.Geometry(**{**local, "num_blocks": 1}))
        far = kv.Layout(order, kv.Geometry(**{**whole, "num_blocks": 1}))
    except LayoutError as error:
        return str(error)
    if near.num_bytes != mapping.local_page_size_bytes or far.num_bytes != mapping.canonical_page_size_bytes:
        return "its pages have other sizes than their layout"
    page = np.random.default_rng(0).integers(0, 256, near.num_bytes, dtype=np.uint8)
    moved = np.zeros(far.num_bytes, np.uint8)
    for run in mapping.runs:
        for i in range(run.num_fragments):
            a = run.local_offset + i * run.local_stride
            b = run.canonical_offset + i * run.canonical_stride
            moved[b : b + run.fragment_size] = page[a : a + run.fragment_size]
    ours = np.zeros(far.num_bytes, np.uint8)
    heads = (0, first_head, local["num_kv_heads"])
    kv.convert_blocks(kv.Cache(page, near), kv.Cache(ours, far), [[0, 0]], heads=heads)
    return "" if np.array_equal(moved, ours) else "vLLM moves its pages in another order than their layout"
