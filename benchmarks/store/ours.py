# SPDX-License-Identifier: Apache-2.0
"""kvstride's store as the benchmarks call it: everything that names its API."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from caches import DIM, HEADS

import kvstride as kv

NAME = "kvstride"
GiB = 1 << 30
PATIENCE = 120.0  # seconds; on a slow disk everything shall be measured, not refused


@dataclass(frozen=True)
class Chunks:
    """So many chunks of `tokens` tokens, and the cache whose blocks they are."""

    name: str
    count: int
    layers: int
    tokens: int
    order: str = "LBNHC"  # vLLM's, from 0.29 on
    block: int = 16  # tokens in a block of the cache

    @property
    def chunk_bytes(self) -> int:
        """Of one chunk."""
        return self.layers * self.tokens * 2 * HEADS * DIM * 2

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return self.count * self.chunk_bytes

    @property
    def blocks(self) -> np.ndarray:
        """All of the cache's blocks; a chunk's lie together, chunks do not."""
        ratio = self.tokens // self.block
        starts = np.random.default_rng(2).permutation(self.count).astype(np.int64) * ratio
        return (starts[:, None] + np.arange(ratio)).reshape(-1)

    def cache(self, memory: np.ndarray) -> kv.Cache:
        """Over the first bytes of `memory`."""
        geometry = kv.Geometry(
            num_layers=self.layers,
            num_blocks=self.count * self.tokens // self.block,
            block_size=self.block,
            num_kv_heads=HEADS,
            head_size=DIM,
        )
        words = memory[: self.num_bytes].view(np.uint16)
        whole = "L" in self.order  # one tensor, or one a layer
        return kv.Cache(words if whole else list(words.reshape(self.layers, -1)), kv.layout(self.order, geometry))

    def namespace(self) -> kv.Namespace:
        """What the store knows them by."""
        return kv.Namespace(
            model="benchmarks/store",
            revision="0" * 40,
            planes={"key": "bf16", "value": "bf16"},
            num_layers=self.layers,
            num_kv_heads=HEADS,
            head_size=DIM,
            block_size=self.tokens,
        )


def key(name: str) -> kv.Key:
    """Of a chunk that is called so, in hex."""
    return kv.Key(bytes.fromhex(name))


class OurFiles:
    """Chunks of a cache in a directory tier."""

    name = NAME

    def __init__(self, directory: Path, threads: int, chunks: Chunks, src: np.ndarray, dst: np.ndarray) -> None:
        """With `threads` I/O threads; 0: as many as the store takes by itself."""
        self._tier = kv.DirectoryTier(str(directory / "store"), 8 * GiB, num_threads=threads)
        self._store = kv.Store([self._tier], namespace=chunks.namespace(), deadline=PATIENCE)
        self._from, self._to = chunks.cache(src), chunks.cache(dst)
        self._blocks = chunks.blocks

    def write(self, names: Sequence[str]) -> float:
        """Seconds until every chunk is in its file."""
        keys = [key(name) for name in names]
        start = time.perf_counter()
        outcomes = self._store.put(keys, self._from, self._blocks).wait()
        seconds = time.perf_counter() - start
        all_ok("put", outcomes)
        return seconds

    def read(self, names: Sequence[str]) -> float:
        """Seconds until every chunk is in the other cache."""
        keys = [key(name) for name in names]
        start = time.perf_counter()
        outcomes = self._store.get(keys, self._to, self._blocks).wait()
        seconds = time.perf_counter() - start
        all_ok("get", outcomes)
        return seconds

    def close(self) -> None:
        """Ends the store's threads."""
        self._store.close()


class HostMemory:
    """Chunks of a cache in a host tier."""

    def __init__(self, chunks: Chunks, src: np.ndarray) -> None:
        self._store = kv.Store(
            [kv.HostTier(chunks.num_bytes + (chunks.count + 64) * 8192)], namespace=chunks.namespace()
        )
        self._keys = [kv.Key(i.to_bytes(8, "little")) for i in range(chunks.count)]
        self._chunks, self._blocks = chunks, chunks.blocks
        all_ok("put", self._store.put(self._keys, chunks.cache(src), self._blocks).wait())

    def get(self, dst: np.ndarray) -> float:
        """Seconds until all chunks are in a cache over `dst`."""
        cache = self._chunks.cache(dst)
        start = time.perf_counter()
        outcomes = self._store.get(self._keys, cache, self._blocks).wait()
        seconds = time.perf_counter() - start
        all_ok("get", outcomes)
        return seconds

    def close(self) -> None:
        """Ends the store's threads."""
        self._store.close()


class Tiny:
    """Chunks of 64 bytes in a directory tier: only their number matters."""

    MOST = 4096  # that a call takes

    def __init__(self, directory: Path) -> None:
        space = kv.Namespace(
            model="benchmarks/store",
            revision="0" * 40,
            planes={"key": "bf16", "value": "bf16"},
            num_layers=1,
            num_kv_heads=1,
            head_size=16,
            block_size=1,
        )
        geometry = kv.Geometry(num_blocks=self.MOST, block_size=1, num_kv_heads=1, head_size=16)
        self._cache = kv.Cache(np.zeros(self.MOST * 32, np.uint16), kv.layout("B KV N H D", geometry))
        tier = kv.DirectoryTier(str(directory), 16 * GiB)
        self._store = kv.Store([tier], namespace=space, deadline=PATIENCE)

    def keys(self, numbers: range) -> list[kv.Key]:
        """Of these chunks; spread like hashes."""
        return [kv.Key(hashlib.sha256(number.to_bytes(8, "little")).digest()) for number in numbers]

    def put(self, numbers: range) -> None:
        """MOST of them at most."""
        all_ok("put", self._store.put(self.keys(numbers), self._cache, np.arange(len(numbers))).wait())

    def lookup(self, keys: list[kv.Key]) -> list[bool]:
        """The store's own."""
        return self._store.lookup(keys)

    def close(self) -> None:
        """Ends the store's threads."""
        self._store.close()


def all_ok(verb: str, outcomes: Sequence[str]) -> None:
    """What was measured must have happened."""
    if set(outcomes) != {"ok"}:
        raise AssertionError(f"{verb}: {dict(Counter(outcomes))}")
