# SPDX-License-Identifier: Apache-2.0
"""What offloading needs of the installed vLLM: the one place that knows what differs between its releases.

Nothing here goes by a release's number but the warning on one that nobody has run. `missing` looks for every name and
tries every call on the signatures that it finds; `fitting` leaves out what a release does not take yet.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from kvstride import EngineError

from .. import engine
from .._rows import release_of

#: Releases on which the tests of live engines ran.
TESTED = ((0, 30), (0, 31), (0, 32))

_OFFLOAD = "vllm.v1.kv_offload"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"

#: What is called, as (callable, number of positional arguments, names of the others).
CALLS = (
    (f"{_OFFLOAD}.base:TransferResult", 0, "job_id success transfer_size transfer_time"),
    (f"{_OFFLOAD}.base:OffloadingEvent", 0, "keys medium removed"),
    (f"{_OFFLOAD}.base:RequestOffloadingContext", 0, ""),
    (f"{_OFFLOAD}.base:OffloadingCounterMetadata", 0, "documentation labelnames"),
    (f"{_OFFLOAD}.base:OffloadingGaugeMetadata", 0, "documentation"),
    (f"{_OFFLOAD}.tiering.base:JobResult", 0, "job_id success"),
    (f"{_OFFLOAD}.tiering.base:SecondaryTierManager.__init__", 4, ""),
    (f"{_OFFLOAD}.tiering.spec:TieringOffloadingSpec.__init__", 2, ""),
    (
        f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion",
        0,
        "engine_id num_chunks rank kv_bytes_per_chunk cpu_page_size",
    ),
    (f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion.create_next_canonical_view", 2, ""),
    (f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion.create_next_worker_view", 2, ""),
    (f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion.create_kv_memoryview", 1, ""),
    (f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion.cleanup", 1, ""),
    (f"{_CONNECTOR}.metrics:OffloadingConnectorStats.increase_counter", 4, ""),
    (f"{_CONNECTOR}.metrics:OffloadingConnectorStats.set_gauge", 3, ""),
    ("vllm.config:get_current_vllm_config_or_none", 0, ""),
)

#: What is read, or set, of a class or of its instances.
NAMES = {
    f"{_OFFLOAD}.base:LookupResult": "HIT MISS RETRY",
    f"{_OFFLOAD}.base:Medium": "STORAGE",
    f"{_OFFLOAD}.base:GPULoadStoreSpec": "block_ids group_sizes block_indices",
    f"{_OFFLOAD}.base:CanonicalKVCaches": "tensors group_data_refs",
    f"{_OFFLOAD}.base:CanonicalKVCacheTensor": "tensor page_size_bytes",
    f"{_OFFLOAD}.base:CanonicalKVCacheRef": "tensor_idx page_size_bytes mapping",
    f"{_OFFLOAD}.base:CanonicalPageMapping": (
        "canonical_page_size_bytes local_page_size_bytes runs num_writers writer_index parallelism_agnostic"
    ),
    f"{_OFFLOAD}.base:CopyRun": (
        "local_offset canonical_offset fragment_size num_fragments local_stride canonical_stride"
    ),
    f"{_OFFLOAD}.config:OffloadingConfig": (
        "groups worker_kv_bytes_per_block extra_config engine_id model cache parallel replicated_layout "
        "canonical_layout kv_cache_layout"
    ),
    f"{_OFFLOAD}.config:OffloadingGroupConfig": "group_id layer_names tokens_per_block",
    f"{_OFFLOAD}.config:OffloadingModelConfig": "name dtype",
    f"{_OFFLOAD}.config:OffloadingCacheConfig": "blocks_per_chunk",
    f"{_OFFLOAD}.config:OffloadingParallelConfig": "rank world_size tp_size pp_size pcp_size dcp_size",
    f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion": "_creator",
    f"{_OFFLOAD}.tiering.base:TransferJob": "job_id keys chunk_ids req_context",
    f"{_OFFLOAD}.tiering.spec:TieringOffloadingSpec": (
        "config kv_events_config blocks_per_chunk num_chunks kv_bytes_per_chunk cpu_page_size_per_worker "
        "replicated_layout _manager _worker create_worker"
    ),
    f"{_CONNECTOR}.worker:OffloadingConnectorWorker": "spec",
    "vllm.config:CacheConfig": "prefix_caching_hash_algo",
    "vllm.config:CompilationConfig": "static_forward_context",
    "vllm.config:ModelConfig": "model revision hf_config dtype quantization use_mla get_total_num_kv_heads",
}

#: What vLLM calls of ours: its abstract class, and our class in this package.
OVERRIDDEN = (
    (f"{_OFFLOAD}.base:OffloadingWorker", "worker:HostWorker"),
    (f"{_OFFLOAD}.base:OffloadingWorker", "cuda_worker:CudaWorker"),
    (f"{_OFFLOAD}.tiering.base:SecondaryTierManager", "tier:KvstrideTier"),
    (f"{_OFFLOAD}.tiering.spec:TieringOffloadingSpec", "spec:KvstrideSpec"),
)


def missing() -> list[str]:
    """What the installed vLLM lacks, or gives otherwise, one text for each; empty where offloading can work.

    Raises EngineError where there is no vLLM at all. Imports what it looks at.
    """
    engine.version()
    # Our classes are looked at only where their modules can be imported.
    found = [*_calls(), *_names()] or [*_overridden()]
    return list(dict.fromkeys(found))


def check() -> None:
    """Raises EngineError, one line that names what is missing."""
    found = missing()
    if found:
        raise EngineError(
            f"kvstride cannot offload for vLLM {engine.version()}: {first_of(found)} (tested: {releases()})"
        )


def untested() -> str | None:
    """What to warn of where nobody has run the installed release, None elsewhere."""
    version = engine.version()
    if release_of(version)[:2] in TESTED:
        return None
    return f"offloading was tested on vLLM {releases()}, not on {version}"


def ranks_take_turns() -> bool:
    """Of ranks that hold the same bytes each stores its share of canonical rows. In 0.30 the first alone is let store,
    and still its share alone: rows of its primary tier would not be whole."""
    return "canonical_layout" in _names_of(_resolve(f"{_CONNECTOR}.worker:OffloadingConnectorWorker"))


def fitting(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` without those named arguments that this release does not take."""
    takes = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **{name: value for name, value in named.items() if name in takes})

    return call


def first_of(found: list[str]) -> str:
    """What is missing, in one line."""
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def releases() -> str:
    """Those that are TESTED."""
    return ", ".join(".".join(map(str, release)) for release in TESTED)


def _calls() -> Iterator[str]:
    for path, positional, others in CALLS:
        function = _resolve(path)
        if isinstance(function, str):
            yield function
            continue
        try:
            inspect.signature(function).bind(*[None] * positional, **dict.fromkeys(others.split()))
        except TypeError as error:
            yield f"{_dotted(path)}: {error}"


def _names() -> Iterator[str]:
    for path, names in NAMES.items():
        cls = _resolve(path)
        if isinstance(cls, str):
            yield cls
            continue
        has = _names_of(cls)
        yield from (f"{_dotted(path)}.{name} is missing" for name in names.split() if name not in has)


def _overridden() -> Iterator[str]:
    for path, own in OVERRIDDEN:
        base, ours = _resolve(path), _resolve(f"{__package__}.{own}")
        for either in (base, ours):
            if isinstance(either, str):
                yield either
        if isinstance(base, str) or isinstance(ours, str):
            continue
        yield from (
            f"{_dotted(path)}.{name} is not implemented" for name in sorted(getattr(ours, "__abstractmethods__", ()))
        )
        for name in vars(ours):
            theirs, mine = getattr(base, name, None), getattr(ours, name)
            if not inspect.isroutine(theirs) or name == "__init__":
                continue
            takes = inspect.signature(theirs).parameters.values()
            named = [p.name for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            try:
                inspect.signature(mine).bind(**dict.fromkeys(named))
            except TypeError as error:
                given = ", ".join(n for n in named if n != "self")
                yield f"{_dotted(path)}.{name}({given}) is another: {error}"


def _names_of(cls: type) -> set[str]:
    """Names of a class, of its fields, and of what its constructors set or read on an instance."""
    names = set(dir(cls))
    for each in cls.__mro__:
        names |= set(vars(each).get("__annotations__", ()))
        made = inspect.unwrap(vars(each).get("__init__", object))
        names |= set(made.__code__.co_names) if inspect.isfunction(made) else set()
    return names


def _resolve(path: str) -> Any:
    """What is at `module:name.name`, or a text that says what is missing."""
    module, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # beside other dependencies than its own, a module may fail to import in any way
        return f"{module}: {type(error).__name__}: {error}"
    for name in names.split("."):
        found = getattr(found, name, None)
        if found is None:
            return f"{_dotted(path)} is missing"
    return found


def _dotted(path: str) -> str:
    return path.replace(":", ".")
