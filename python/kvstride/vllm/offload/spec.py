# SPDX-License-Identifier: Apache-2.0
"""The offloading spec `kvstride`: vLLM's own tiering, our workers, and our tier below the primary one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvstride as kv
from kvstride import ArgumentError, EngineError

from .. import engine, live
from .needs import ranks_take_turns
from .options import HASHES, cuda_worker, our_tiers, with_tier
from .region import Description, forget_name, sweep
from .rows import Group, Rows, describe_group
from .weights import revision_of, settings_of
from .worker import BlockWorker, HostWorker, slot_bytes

logger = init_logger("vllm.kvstride")


class KvstrideSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's TieringOffloadingSpec with kvstride's worker and tier."""

    config: Any
    _manager: Any
    _worker: Any

    def __init__(self, config: Any) -> None:
        extra = with_tier(config.extra_config)
        canonical = bool(extra["canonical_layout"]) and (ranks_take_turns() or not config.replicated_layout)
        config = dataclasses.replace(config, extra_config=extra, canonical_layout=canonical)
        super().__init__(config)
        if self.num_chunks == 0:
            need = self.kv_bytes_per_chunk
            raise ArgumentError(
                f"kv_connector_extra_config: cpu_bytes_to_use is {extra['cpu_bytes_to_use']}, one chunk takes {need}"
            )
        # Set while vLLM makes its workers, not where it makes the scheduler.
        self._vllm_config = get_current_vllm_config_or_none()
        self._description: Description | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Metrics of vLLM's tiering and of our tier."""
        return super().build_metric_definitions(with_tier(extra_config))

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """As vLLM 0.33 asks."""
        return super().config_info_keys(with_tier(extra_config))

    def get_manager(self) -> Any:
        """vLLM's manager. It is the last to map the shared memory, whose name is no longer needed then."""
        fresh = not self._manager
        manager = super().get_manager()
        if fresh:
            forget_name(self.config.engine_id)
        return manager

    def get_worker(self, kv_caches: Any) -> Any:
        """Our worker on CPU hosts and, with `cuda_worker`, on CUDA hosts; vLLM's own elsewhere. Rows are described."""
        if not self._worker:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> Any:
        """A worker, and the description of what it writes."""
        sweep()
        config = self._vllm_config
        if config is None:
            raise EngineError("kvstride: vLLM has not said its configuration to the worker")
        host = engine.platform() == "cpu"
        canonical = self.config.canonical_layout
        if host and config.model_config.use_mla:
            raise EngineError(
                "kvstride: MLA on vLLM's CPU backend gives other tokens with any connector: "
                f"{config.model_config.model} cannot be offloaded there"
            )
        if canonical and any(r.mapping is None for refs in kv_caches.group_data_refs for r in refs):
            logger.info("kvstride: vLLM does not certify this layout as canonical; rows are kept as they are")
            canonical = False
        slots = _slots(kv_caches, canonical, self.blocks_per_chunk, self._row_offset(canonical))
        tiers = our_tiers(self.config.extra_config)
        rows = describe(config, self.config, tiers[0], kv_caches, canonical, slots) if tiers else None
        if host:
            worker: Any = self._our_worker(HostWorker, kv_caches, canonical, slots)
        elif engine.platform() == "cuda" and cuda_worker(self.config.extra_config) == "kvstride":
            from .cuda_worker import CudaWorker

            worker = self._our_worker(CudaWorker, kv_caches, canonical, slots)
        else:
            self.config = dataclasses.replace(self.config, canonical_layout=canonical)
            worker = super().create_worker(kv_caches)
        if rows is not None:
            self._description = Description(self.config.engine_id, self.config.parallel.rank, rows)
        return worker

    def _row_offset(self, canonical: bool) -> int:
        rank = 0 if canonical or self.replicated_layout else self.config.parallel.rank
        return int(rank * self.cpu_page_size_per_worker)

    def _region(self) -> Any:
        """This worker's mapping of the primary tier."""
        return SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )

    def _our_worker(self, kind: type[BlockWorker], kv_caches: Any, canonical: bool, slots: list[int]) -> BlockWorker:
        region = self._region()
        try:
            region._creator = False  # its name is removed by the scheduler's process, or swept
            if kind is not HostWorker:
                _pin(region)
            worker = kind(kv_caches, region, self.num_chunks, self.kv_bytes_per_chunk, self.blocks_per_chunk, canonical)
            if worker.slots != slots:
                raise EngineError(f"kvstride: slots of a row are at {worker.slots}, not at {slots}")
            return worker
        except BaseException:
            region.cleanup()
            raise


def _pin(region: Any) -> None:
    """Has vLLM register the primary tier's memory with CUDA; where that fails transfers are slower, not wrong."""
    try:
        from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region
    except ImportError:
        logger.info("kvstride: this vLLM pins its offloading memory otherwise; transfers will be slower")
        return
    if not region.is_pinned:
        pin_mmap_region(region)


def _slots(kv_caches: Any, canonical: bool, blocks: int, first: int) -> list[int]:
    """Where each tensor's slot begins in a row: one after the other."""
    out = []
    for size in slot_bytes(kv_caches, canonical):
        out.append(first)
        first += size * blocks
    return out


def describe(
    config: Any, offload: Any, tier: Mapping[str, Any], kv_caches: Any, canonical: bool, slots: list[int]
) -> Rows:
    """What rows hold, from the engine's configuration and its live tensors. `tier`: our tier's options."""
    hashing = str(config.cache_config.prefix_caching_hash_algo)
    if hashing not in HASHES:
        raise ArgumentError(
            f"kvstride: prefix_caching_hash_algo is {hashing}, whose hashes may collide; expected one of "
            f"{', '.join(sorted(HASHES))}"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ArgumentError(
            "kvstride: calculate_kv_scales makes scales that no other process has: bytes cannot be kept"
        )
    if config.lora_config is not None and not tier.get("lora_names_are_fixed", False):
        raise ArgumentError(
            "kvstride: LoRA is on, and vLLM's block hash knows an adapter by its name only: set lora_names_are_fixed to"
            " true if a name never refers to other weights"
        )
    model = config.model_config
    name, revision = (
        (model.model, tier["revision"]) if tier.get("revision") else revision_of(model.model, model.revision)
    )
    caches = _named(config, offload)
    parallel = offload.parallel
    tensor_parallel = parallel.tp_size
    total = model.get_total_num_kv_heads()
    shard = parallel.rank * min(tensor_parallel, total) // tensor_parallel
    sizes = slot_bytes(kv_caches, canonical)
    groups = []
    for group, refs in zip(offload.groups, kv_caches.group_data_refs, strict=True):
        cache = next((c for c in caches if set(c.layer_names) == set(group.layer_names)), None)
        if not canonical:
            groups.append(
                Group(group.group_id, group.layer_names, group.tokens_per_block, None, "rows are not canonical")
            )
            continue
        heads = cache.named.geometry["num_kv_heads"] if cache else 1
        groups.append(
            describe_group(
                group.group_id,
                group.layer_names,
                group.tokens_per_block,
                cache,
                refs,
                slots,
                sizes,
                total,
                shard * heads,
                offload.cache.blocks_per_chunk,
            )
        )
    return Rows(
        model=name,
        revision=revision,
        settings=settings_of(model),
        hashing=hashing,
        groups=tuple(groups),
        raw=_raw(config, offload, canonical, caches, sizes),
        layout=", ".join(dict.fromkeys(c.named.name or c.named.order for c in caches)) or "unknown",
    )


def _named(config: Any, offload: Any) -> list[live.EngineCache]:
    """The engine's caches by name; those of layers that cannot be named are not in it."""
    context = config.compilation_config.static_forward_context
    found = []
    for i, group in enumerate(offload.groups):
        tensors = {name: getattr(context.get(name), "kv_cache", None) for name in group.layer_names}
        if any(not hasattr(t, "data_ptr") for t in tensors.values()):
            continue
        layers = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(group.layer_names))])
        try:
            caches = live.name_registered(tensors, config, layers)
        except (kv.LayoutError, EngineError) as error:
            logger.info("kvstride: group %d is kept as raw bytes: %s", i, error)
            continue
        found += caches
    return found


def _raw(config: Any, offload: Any, canonical: bool, caches: list[live.EngineCache], sizes: list[int]) -> str:
    """All that bytes of unknown meaning depend on."""
    p = offload.parallel
    facts = {
        "release": engine.version(),
        "runner": "v2" if getattr(config, "use_v2_model_runner", False) else "v1",
        "platform": engine.platform(),
        "world": p.world_size,
        "tp": p.tp_size,
        "pp": p.pp_size,
        "pcp": p.pcp_size,
        "dcp": p.dcp_size,
        "canonical": canonical,
        "replicated": offload.replicated_layout,
        "layout": str(offload.kv_cache_layout),
        "orders": [c.named.text for c in caches],
        "pages": sizes,
        "blocks": offload.cache.blocks_per_chunk,
        "kv_dtype": offload.model.dtype,
    }
    return "; ".join(f"{name}={value}" for name, value in facts.items())
