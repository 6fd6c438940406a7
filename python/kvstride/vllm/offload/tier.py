# SPDX-License-Identifier: Apache-2.0
"""The secondary tier `kvstride`: rows of vLLM's primary tier in a verified, bounded directory, and in a remote engine
below it.

It runs in the scheduler's process and never waits: stores and loads are jobs of the store, and keys that only the file
system knows are asked on a thread. What cannot be stored is dropped and counted; a chunk that is damaged, gone, slow or
unreadable is a failed promotion, which vLLM computes again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingEvent, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

import kvstride as kv
from kvstride import StoreError

from .. import engine
from .asker import Asker
from .chunks import GroupStore
from .metrics import Stats, definitions
from .needs import fitting, untested
from .options import TierOptions
from .region import read_descriptions
from .rows import Group, Rows

logger = init_logger("vllm.kvstride")

# 0.30 has no number of bytes in the one, and no locality in the other.
_job_result = fitting(JobResult)
_offloading_event = fitting(OffloadingEvent)
_HIT = LookupResult.HIT  # looking up a member costs as much as the rest


@dataclass
class _Job:
    """A job of vLLM, as jobs of stores: one for each KV cache group in it."""

    load: bool
    request: str
    keys: list[bytes]
    parts: list[tuple[Sequence[int], kv.Job]]
    begin: float = field(default_factory=time.monotonic)


class KvstrideTier(SecondaryTierManager):  # type: ignore[misc]
    """vLLM's SecondaryTierManager over a kvstride store. Calls come one at a time."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        # 0.30 has no backpressure.
        start = fitting(super().__init__)
        start(offloading_spec, primary_kv_view, tier_type, backpressure_detector=backpressure_detector)
        self._options = TierOptions.parse(options, f"secondary tier '{tier_type}'")
        # 0.30 knows no localities.
        kinds = getattr(base, "Locality", None)
        self.locality = kinds(self._options.locality) if kinds and self._options.locality else None
        about = agreed(offloading_spec.config, self._options)
        self._jobs: dict[int, _Job] = {}
        self._failed: dict[str, set[bytes]] = {}
        self._stats = Stats()
        self._told = 0.0
        self._events: list[Any] | None = [] if self._wants_events(offloading_spec) else None
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        remote = self._options.shared()  # before the directory is made: its URL may be wrong
        self._tier = self._options.directory()
        #: The fastest first.
        self._tiers: list[kv.Tier] = [self._tier] if remote is None else [self._tier, remote]
        blocks = offloading_spec.config.cache.blocks_per_chunk
        #: By the last four bytes of vLLM's offload keys, which are a block hash and the number of its KV cache group.
        self._groups = {
            group.index.to_bytes(4, "big"): GroupStore(self._tiers, self._rows, about, group, blocks, self._options)
            for group in about.groups
        }
        self._asker = Asker()
        self._say(about)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """kvstride's counters."""
        return definitions()

    def _wants_events(self, spec: Any) -> bool:
        if not self._options.enable_kv_events:
            return False
        if not spec.kv_events_config.enable_kv_cache_events:
            logger.warning("kvstride: enable_kv_events is set, but KV cache events are off in vLLM; none are sent")
            return False
        return True

    def _say(self, about: Rows) -> None:
        # Of all processes of an engine one has the tier.
        warning = untested()
        if warning:
            logger.warning(
                "kvstride: %s; it has all that is needed, but run `kvstride doctor` before you rely on it", warning
            )
        metrics = self._tier.metrics()
        logger.info(
            "kvstride: %s, %.2f of %.2f GB used by %d files, %s; layout %s; namespaces %s",
            self._options.root_dir,
            metrics["used_bytes"] / 1e9,
            self._options.max_bytes / 1e9,
            metrics["chunks"],
            metrics["detail"].split(", ", 1)[-1]
            + "".join(f"; {tier.metrics()['detail']} below it" for tier in self._tiers[1:]),
            about.layout,
            ", ".join(
                f"{g.space.hex[:12]} ({'any tensor-parallel size' if g.group.portable else 'raw: ' + g.group.raw})"
                for g in self._groups.values()
            ),
        )

    # --- What vLLM asks.

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS where it is known, RETRY while the file system is asked."""
        group = self._groups.get(key[-4:])
        if group is None or (self._failed and key in self._failed.get(req_context.req_id, ())):
            return LookupResult.MISS
        chunk = key[:-4]
        if group.store.holds(chunk):
            return _HIT
        answer = self._asker.answer(req_context.req_id, group, chunk)
        if answer is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> Any:
        """Chunks are offloaded as they come."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what is known for the request alone."""
        self._failed.pop(req_context.req_id, None)
        self._asker.forget(req_context.req_id)

    def on_schedule_end(self, context: Any = None) -> None:
        """Questions of this step go to the thread together."""
        self._asker.flush()

    def submit_store(self, job_metadata: Any) -> None:
        """Rows of the primary tier to the store. What it cannot take is dropped."""
        self._submit(job_metadata, False)

    def submit_load(self, job_metadata: Any) -> None:
        """Chunks of the store to rows of the primary tier, verified before the first byte of a row changes."""
        self._submit(job_metadata, True)

    def _submit(self, job: Any, load: bool) -> None:
        keys = list(job.keys)
        suffixes = {key[-4:] for key in keys}
        parts = []
        for suffix in suffixes:
            group = self._groups.get(suffix)
            if group is None:
                continue
            mine: Sequence[int] = range(len(keys))
            names, rows = keys, np.asarray(job.chunk_ids, np.int64)
            if len(suffixes) > 1:
                mine = [i for i, key in enumerate(keys) if key[-4:] == suffix]
                names, rows = [keys[i] for i in mine], rows[mine]
            try:
                parts.append((mine, group.move([key[:-4] for key in names], rows, load)))
            except kv.Error as error:  # a closed store, no thread: never of the data
                logger.error("kvstride: %s of %d chunks: %s", "load" if load else "store", len(mine), error)
        self._jobs[job.job_id] = _Job(load, job.req_context.req_id, keys, parts)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs that have ended since the last call."""
        done = [i for i, job in self._jobs.items() if all(part.done for _, part in job.parts)]
        return [self._result(i, self._jobs.pop(i)) for i in done]

    def _result(self, job_id: int, job: _Job) -> Any:
        good: list[Any] = []
        for mine, part in job.parts:
            verb = "load" if job.load else "store"
            if part.ok:  # nearly always: no list of outcomes is made
                self._stats.count(verb, "ok", len(mine))
                good += job.keys if len(mine) == len(job.keys) else [job.keys[i] for i in mine]
                continue
            for i, outcome in zip(mine, part.wait(), strict=True):
                self._stats.count(verb, outcome)
                if outcome == "ok":
                    good.append(job.keys[i])
        whole = len(good) == len(job.keys)
        if job.load and not whole:
            # Or the same request would ask for the same chunk again.
            self._failed.setdefault(job.request, set()).update(set(job.keys) - set(good))
        if not job.load and good and self._events is not None:
            self._events.append(self._event(good, removed=False))
        return _job_result(
            job_id=job_id,
            success=whole,
            successful_keys=tuple(good) if job.load and good and not whole else None,
            transfer_time=time.monotonic() - job.begin,
            transfer_bytes=len(good) * self._rows.shape[1],
        )

    def has_pending_work(self) -> bool:
        """While jobs are under way vLLM goes on stepping."""
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Wait until nothing touches the primary tier: at most until the jobs' deadlines."""
        for job in self._jobs.values():
            for _, part in job.parts:
                part.wait()

    def take_events(self) -> Iterable[Any]:
        """What was stored, and what has gone from the directory, where that is wanted."""
        if self._events is None:
            return ()
        for suffix, group in self._groups.items():
            # What the remote engine has too has not gone.
            gone: list[Any] = [key + suffix for key in group.store.take_gone() if not group.store.holds(key)]
            if gone:
                self._events.append(self._event(gone, removed=True))
        out, self._events = self._events, []
        return out

    def _event(self, keys: list[Any], removed: bool) -> Any:
        return _offloading_event(keys=keys, medium=self.medium, removed=removed, locality=self.locality)

    def get_stats(self) -> Any:
        """kvstride's counters; those of the directory once a second."""
        now = time.monotonic()
        if now - self._told < 1:
            return self._stats.take(None)
        self._told = now
        return self._stats.take([tier.metrics() for tier in self._tiers])

    def shutdown(self) -> None:
        """End the threads and let go of the primary tier. Does nothing the second time."""
        self._asker.close()
        for group in self._groups.values():
            group.close()
        self._groups = {}
        for tier in self._tiers:
            tier.close()
        self._rows = None  # type: ignore[assignment]


def agreed(config: Any, options: TierOptions) -> Rows:
    """What the workers say of the rows; groups on which they disagree are raw.

    Where no worker is ours (the tier alone below vLLM's own spec) nothing is certified: all is raw, and `revision` must
    say which weights and settings these are.
    """
    found = read_descriptions(config.engine_id, config.parallel.world_size)
    if not found:
        return _undescribed(config, options)
    first = found[0]
    for other in found[1:]:
        for name in ("model", "revision", "settings", "hashing"):
            if getattr(other, name) != getattr(first, name):
                raise StoreError(f"kvstride: workers disagree on the {name}: {getattr(first, name)!r} and others")
    groups = []
    for at, group in enumerate(first.groups):
        if any(r.groups[at].portable != group.portable or r.groups[at].layers != group.layers for r in found):
            group = Group(group.index, group.layers, group.tokens, None, "workers describe it differently")
        groups.append(group)
    return dataclasses.replace(first, groups=tuple(groups))


def _undescribed(config: Any, options: TierOptions) -> Rows:
    if options.revision is None:
        raise StoreError(
            'kvstride: without "spec_name": "kvstride" no worker says which weights and settings these are: give the '
            'tier "revision", a text that is another one whenever they are others'
        )
    # Replicas for data parallelism hold the same chunks.
    names = [f.name for f in dataclasses.fields(config.parallel) if not f.name.startswith("data_parallel")]
    facts = {name: getattr(config.parallel, name) for name in names}
    raw = f"undescribed; {facts}; layout={config.kv_cache_layout}; canonical={config.canonical_layout}"
    raw += f"; dtype={config.model.dtype}; bytes={config.worker_kv_bytes_per_block}; release={engine.version()}"
    groups = tuple(Group(g.group_id, g.layer_names, g.tokens_per_block, None, "undescribed") for g in config.groups)
    return Rows(config.model.name, options.revision, "undescribed", "unknown", groups, raw, "undescribed")
