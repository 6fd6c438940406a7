# SPDX-License-Identifier: Apache-2.0
"""The secondary tier `kvstride`: rows of vLLM's primary tier in a verified, bounded directory.

It runs in the scheduler's process and never waits: stores and loads are jobs of the store, and keys that only the file
system knows are asked on a thread. What cannot be stored is dropped and counted; a chunk that is damaged, gone, slow or
unreadable is a failed promotion, which vLLM computes again.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingEvent, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

import kvstride as kv
from kvstride import StoreError

from .options import TierOptions
from .region import read_descriptions
from .rows import Group, Rows

logger = init_logger("vllm.kvstride")

_RESULT_FIELDS = set(inspect.signature(JobResult).parameters)
_BASE_TAKES = set(inspect.signature(SecondaryTierManager.__init__).parameters)


@dataclass
class _Job:
    """A job of vLLM, as jobs of stores: one for each KV cache group in it."""

    load: bool
    keys: list[bytes]
    parts: list[tuple[list[int], kv.Job]]
    begin: float = field(default_factory=time.monotonic)


class KvstrideTier(SecondaryTierManager):  # type: ignore[misc]
    """vLLM's SecondaryTierManager over a kvstride store. All calls come from the scheduler's thread."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        extra = {"backpressure_detector": backpressure_detector} if "backpressure_detector" in _BASE_TAKES else {}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **extra)
        self._options = TierOptions.parse(options, f"secondary tier '{tier_type}'")
        config = offloading_spec.config
        rows = _agreed(config)
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self._tier = kv.DirectoryTier(
            self._options.root_dir,
            self._options.max_bytes,
            keep_free=self._options.keep_free,
            sync=self._options.sync,
            group=self._options.group,
            engine=self._options.engine,
            num_threads=self._options.num_threads,
        )
        self._groups = [
            _GroupStore(self._tier, self._rows, rows, group, config.cache.blocks_per_chunk, self._options)
            for group in rows.groups
        ]
        self._by_index = {store.group.index: store for store in self._groups}
        self._jobs: dict[int, _Job] = {}
        self._asker = _Asker()
        self._failed: dict[str, set[bytes]] = {}
        self._counters: dict[str, int] = {}
        self._events: list[Any] | None = [] if self._wants_events(offloading_spec) else None
        portable = sum(g.cache is not None for g in self._groups)
        logger.info(
            "kvstride tier: %s, %.1f of %.1f GB used, %s; layout %s; %d of %d groups portable; namespaces %s",
            self._options.root_dir,
            self._tier.metrics()["used_bytes"] / 1e9,
            self._options.max_bytes / 1e9,
            self._tier.metrics()["detail"].split(", ", 1)[-1],
            rows.layout,
            portable,
            len(self._groups),
            ", ".join(g.space.hex[:12] for g in self._groups),
        )
        for store in self._groups:
            if store.cache is None:
                logger.info("kvstride tier: group %d is kept raw: %s", store.group.index, store.group.raw)

    def _wants_events(self, spec: Any) -> bool:
        if not self._options.enable_kv_events:
            return False
        if not spec.kv_events_config.enable_kv_cache_events:
            logger.warning("kvstride tier: enable_kv_events is set, but KV cache events are off in vLLM; none are sent")
            return False
        return True

    # --- What vLLM asks.

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS where it is known, RETRY while the file system is asked."""
        store = self._by_index.get(int.from_bytes(key[-4:], "big"))
        if store is None:
            return LookupResult.MISS
        failed = self._failed.get(req_context.req_id)
        if failed is not None and key in failed:
            return LookupResult.MISS
        hash_ = bytes(key[:-4])
        if store.store.lookup([hash_], ask=False)[0]:
            return LookupResult.HIT
        answer = self._asker.answer(req_context.req_id, store, hash_)
        if answer is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> Any:
        """Chunks are offloaded as they come."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what is known of the request."""
        self._failed.pop(req_context.req_id, None)
        self._asker.forget(req_context.req_id)

    def on_schedule_end(self, context: Any = None) -> None:
        """Questions of this step go to the thread together."""
        self._asker.flush()

    def submit_store(self, job_metadata: Any) -> None:
        """Rows of the primary tier to the store."""
        self._submit(job_metadata, False)

    def submit_load(self, job_metadata: Any) -> None:
        """Chunks of the store to rows of the primary tier, verified before the first byte of a row changes."""
        self._submit(job_metadata, True)

    def _submit(self, job: Any, load: bool) -> None:
        keys = [bytes(k) for k in job.keys]
        places: dict[int, list[int]] = {}
        for i, key in enumerate(keys):
            places.setdefault(int.from_bytes(key[-4:], "big"), []).append(i)
        parts = []
        for index, mine in places.items():
            store = self._by_index.get(index)
            if store is None:
                continue
            hashes = [keys[i][:-4] for i in mine]
            rows = [int(job.chunk_ids[i]) for i in mine]
            try:
                parts.append((mine, store.move(hashes, rows, load)))
            except kv.KvstrideError as error:  # never of the data: something in the configuration
                logger.error("kvstride tier: %s of %d chunks: %s", "load" if load else "store", len(mine), error)
        self._jobs[job.job_id] = _Job(load, keys, parts)
        if load:
            self._request_of[job.job_id] = job.req_context.req_id

    @property
    def _request_of(self) -> dict[int, str]:
        return self.__dict__.setdefault("_requests", {})  # type: ignore[no-any-return]

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs that have ended since the last call."""
        done = [i for i, job in self._jobs.items() if all(part.done for _, part in job.parts)]
        return [self._result(i, self._jobs.pop(i)) for i in done]

    def _result(self, job_id: int, job: _Job) -> Any:
        kept: list[int] = []
        for mine, part in job.parts:
            for i, outcome in zip(mine, part.wait(), strict=True):
                name = f"{'load' if job.load else 'store'}_{outcome}"
                self._counters[name] = self._counters.get(name, 0) + 1
                if outcome == "ok":
                    kept.append(i)
        whole = len(kept) == len(job.keys)
        good = [job.keys[i] for i in kept]
        if job.load and not whole:
            lost = set(job.keys) - set(good)
            self._failed.setdefault(self._request_of.get(job_id, ""), set()).update(lost)
        self._request_of.pop(job_id, None)
        if not job.load and good and self._events is not None:
            self._events.append(OffloadingEvent(keys=good, medium=self.medium, removed=False))
        found = {
            "job_id": job_id,
            "success": whole,
            "successful_keys": tuple(good) if job.load and good and not whole else None,
            "transfer_time": time.monotonic() - job.begin,
            "transfer_bytes": len(kept) * self._rows.shape[1],
        }
        return JobResult(**{name: value for name, value in found.items() if name in _RESULT_FIELDS})

    def has_pending_work(self) -> bool:
        """Whether jobs are under way, or questions: then vLLM goes on stepping."""
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Wait until nothing touches the primary tier; at most until the jobs' deadlines."""
        for job in self._jobs.values():
            for _, part in job.parts:
                part.wait()

    def take_events(self) -> Iterable[Any]:
        """Events of what was stored, where they are wanted."""
        if self._events is None:
            return ()
        out, self._events = self._events, []
        return out

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Chunks that the primary tier has are in use here, too."""

    def shutdown(self) -> None:
        """End the threads and let go of the primary tier."""
        self._asker.close()
        for store in self._groups:
            store.close()
        self._groups = []
        self._by_index = {}
        self._tier.close()
        self._rows = None  # type: ignore[assignment]


class _GroupStore:
    """The store of one KV cache group: portable chunks, or raw rows."""

    def __init__(
        self, tier: kv.DirectoryTier, rows: np.ndarray, about: Rows, group: Group, blocks: int, options: TierOptions
    ) -> None:
        self.group = group
        self._rows = rows
        self.cache: kv.Cache | None = None
        page = group.portable
        names = hashlib.sha256("\n".join(group.layers).encode()).hexdigest()[:16]
        common = {
            "model": about.model,
            "revision": f"{about.revision}+{about.settings}",
            "group": group.index,
            "salt_policy": f"vllm {about.hashing}; layers {names}",
        }
        if page is not None:
            layout = page.layout(rows.shape[0], rows.shape[1], blocks)
            item = layout.itemsize if hasattr(layout, "itemsize") else kv_itemsize(layout)
            flat = rows.reshape(-1)[page.first :].view(_CARRIERS[item])
            self.cache = kv.Cache(_natural(flat, layout), layout)
            sizes = layout.geometry
            value = {"value_head_size": sizes.value_head_size} if sizes.value_head_size is not None else {}
            space = kv.Namespace(
                planes=dict(layout.planes),
                num_layers=page.num_layers,
                num_kv_heads=sizes.num_kv_heads,
                head_size=sizes.head_size,
                block_size=sizes.block_size,
                **value,
                **common,
            )
        else:
            space = kv.Namespace(
                planes={"state": "u8"},
                num_layers=max(len(group.layers), 1),
                num_kv_heads=1,
                head_size=1,
                block_size=group.tokens * blocks,
                raw=f"vLLM rows; {about.raw}",
                **common,
            )
        self.space = space
        self.store = kv.Store([tier], namespace=space, deadline=options.deadline)

    def move(self, keys: list[bytes], rows: list[int], load: bool) -> kv.Job:
        """Start a get into, or a put from, these rows."""
        if self.cache is not None:
            return (self.store.get if load else self.store.put)(keys, self.cache, rows)
        buffers = [self._rows[row] for row in rows]
        return (self.store.get_bytes if load else self.store.put_bytes)(keys, buffers)

    def close(self) -> None:
        """End the store: nothing touches the rows any more."""
        self.store.close()
        self.cache = None
        self._rows = None  # type: ignore[assignment]


class _Asker:
    """Asks the file system about keys, on a thread of its own, a step's keys together."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._known: dict[str, dict[tuple[int, bytes], bool | None]] = {}
        self._fresh: dict[_GroupStore, list[tuple[str, bytes]]] = {}
        self._asked: list[tuple[_GroupStore, list[tuple[str, bytes]]]] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvstride-lookup", daemon=True)
        self._thread.start()

    def answer(self, request: str, store: _GroupStore, key: bytes) -> bool | None:
        """What is known; None: it is being asked."""
        with self._lock:
            known = self._known.setdefault(request, {})
            place = (store.group.index, key)
            if place not in known:
                known[place] = None
                self._fresh.setdefault(store, []).append((request, key))
            return known[place]

    def flush(self) -> None:
        """Let the thread ask."""
        with self._lock:
            if self._fresh:
                self._asked += self._fresh.items()
                self._fresh = {}
                self._lock.notify()

    def forget(self, request: str) -> None:
        """Answers are for one request: others may find more."""
        with self._lock:
            self._known.pop(request, None)

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._stop = True
            self._lock.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._asked or self._stop)
                if self._stop:
                    return
                asked, self._asked = self._asked, []
            for store, questions in asked:
                try:
                    found = store.store.lookup([key for _, key in questions])
                except StoreError:
                    found = [False] * len(questions)
                with self._lock:
                    for (request, key), there in zip(questions, found, strict=True):
                        if request in self._known:
                            self._known[request][store.group.index, key] = there


_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ITEM = {"f32": 4, "f16": 2, "bf16": 2, "u8": 1, "i8": 1}


def kv_itemsize(layout: kv.Layout) -> int:
    """Bytes of an element; all planes of an attention layer have one dtype."""
    dtypes = set(layout.planes.values())
    if len(dtypes) != 1:
        return 1
    dtype = dtypes.pop()
    return _ITEM.get(dtype, 1)


def _natural(flat: np.ndarray, layout: kv.Layout) -> np.ndarray:
    steps = [s * flat.itemsize for s in layout.strides]  # type: ignore[attr-defined]
    return np.lib.stride_tricks.as_strided(flat, tuple(layout.shape), steps)  # type: ignore[arg-type]


def _agreed(config: Any) -> Rows:
    """The description of the rows. Workers that disagree, or are not ours, leave raw rows only."""
    found = read_descriptions(config.engine_id, config.parallel.world_size)
    if not found:
        raise StoreError(
            "kvstride tier: no worker has described its rows; use \"spec_name\": \"kvstride\" with the tier's options "
            "beside it"
        )
    first = found[0]
    for other in found[1:]:
        if (other.model, other.revision, other.settings, other.hashing) != (
            first.model,
            first.revision,
            first.settings,
            first.hashing,
        ):
            raise StoreError("kvstride tier: the workers have different weights or settings")
    groups = []
    for at, group in enumerate(first.groups):
        others = [r.groups[at] for r in found]
        if any(o.portable != group.portable or o.layers != group.layers for o in others):
            group = Group(group.index, group.layers, group.tokens, None, "workers describe it differently")
        groups.append(group)
    import dataclasses

    return dataclasses.replace(first, groups=tuple(groups))
