# SPDX-License-Identifier: Apache-2.0
"""A vLLM without an engine: what offloading looks at, with the signatures of 0.32, as files that can be edited."""

from __future__ import annotations

from pathlib import Path

_IMPORTS = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any
"""

#: Sources by path. An edit is a text of one of them and what stands there instead.
FILES = {
    "vllm/__init__.py": '__version__ = "0.32.0+cpu"\n',
    "vllm/logger.py": "import logging\ninit_logger = logging.getLogger\n",
    "vllm/config.py": """
class CacheConfig:
    prefix_caching_hash_algo: str
class CompilationConfig:
    static_forward_context: dict
class ModelConfig:
    model: str
    revision: str | None
    dtype: str
    quantization: str | None
    def __init__(self):
        self.hf_config = None
    @property
    def use_mla(self): ...
    def get_total_num_kv_heads(self): ...
def get_current_vllm_config_or_none(): ...
""",
    "vllm/distributed/kv_transfer/kv_connector/v1/offloading/metrics.py": """
class OffloadingConnectorStats:
    def increase_counter(self, counter_name, counter_increase_value=1, labelvalues=()): ...
    def set_gauge(self, gauge_name, gauge_value, labelvalues=()): ...
""",
    "vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py": """
class OffloadingConnectorWorker:
    def __init__(self, spec, vllm_config, kv_cache_config):
        self.spec = spec
        self._is_store_writer = not spec.replicated_layout or spec.config.canonical_layout
""",
    "vllm/v1/kv_offload/config.py": _IMPORTS
    + """
@dataclass
class OffloadingGroupConfig:
    tokens_per_block: int
    layer_names: tuple
    group_id: int
@dataclass
class OffloadingModelConfig:
    name: str
    dtype: str
@dataclass
class OffloadingCacheConfig:
    tokens_per_hash: int
    blocks_per_chunk: int
@dataclass
class OffloadingParallelConfig:
    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
@dataclass
class OffloadingConfig:
    groups: tuple
    worker_kv_bytes_per_block: int
    extra_config: dict
    engine_id: str
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    parallel: OffloadingParallelConfig
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = None
""",
    "vllm/v1/kv_offload/base.py": _IMPORTS
    + """
class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"
LookupResult = Enum("LookupResult", "MISS HIT HIT_PENDING RETRY")
@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"
@dataclass
class OffloadingEvent:
    keys: list
    medium: Medium
    removed: bool
@dataclass
class OffloadingCounterMetadata:
    documentation: str
    labelnames: tuple = ()
@dataclass
class OffloadingGaugeMetadata(OffloadingCounterMetadata): ...
@dataclass
class CanonicalKVCacheTensor:
    tensor: Any
    page_size_bytes: int
@dataclass
class CopyRun:
    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int
@dataclass
class CanonicalPageMapping:
    canonical_page_size_bytes: int
    local_page_size_bytes: int
    runs: tuple
    num_writers: int
    writer_index: int
    parallelism_agnostic: bool
@dataclass
class CanonicalKVCacheRef:
    tensor_idx: int
    page_size_bytes: int
    mapping: Any = None
@dataclass
class CanonicalKVCaches:
    tensors: list
    group_data_refs: list
class BlockIDsLoadStoreSpec:
    def __init__(self, block_ids):
        self.block_ids = block_ids
class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    def __init__(self, block_ids, group_sizes, block_indices):
        super().__init__(block_ids)
        self.group_sizes = group_sizes
        self.block_indices = block_indices
@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
class OffloadingWorker(ABC):
    @abstractmethod
    def submit_store(self, job_id, src_spec, dst_spec): ...
    @abstractmethod
    def submit_load(self, job_id, src_spec, dst_spec): ...
    @abstractmethod
    def get_finished(self): ...
    @abstractmethod
    def wait(self, job_ids): ...
    def shutdown(self): ...
""",
    "vllm/v1/kv_offload/factory.py": """
import importlib
class OffloadingSpecFactory:
    _registry = {}
    @classmethod
    def register_spec(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError(name)
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)
""",
    "vllm/v1/kv_offload/cpu/shared_offload_region.py": """
class SharedOffloadRegion:
    def __init__(self, engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size, barrier=None):
        self._creator = False
    def create_next_worker_view(self, tensor_page_size): ...
    def create_next_canonical_view(self, tensor_page_size): ...
    def create_kv_memoryview(self): ...
    def cleanup(self): ...
""",
    "vllm/v1/kv_offload/tiering/factory.py": """
import importlib
class SecondaryTierFactory:
    _registry = {}
    @classmethod
    def register_tier(cls, tier_type, module_path, class_name):
        if tier_type in cls._registry:
            raise ValueError(tier_type)
        cls._registry[tier_type] = lambda: getattr(importlib.import_module(module_path), class_name)
""",
    "vllm/v1/kv_offload/tiering/base.py": _IMPORTS
    + """
@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: Any
@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None
class SecondaryTierManager(ABC):
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None): ...
    @abstractmethod
    def lookup(self, key, req_context): ...
    @abstractmethod
    def submit_store(self, job_metadata): ...
    @abstractmethod
    def submit_load(self, job_metadata): ...
    @abstractmethod
    def get_finished_jobs(self): ...
    @abstractmethod
    def on_new_request(self, req_context): ...
    @abstractmethod
    def drain_jobs(self): ...
    def on_schedule_end(self, context): ...
""",
    "vllm/v1/kv_offload/tiering/spec.py": """
class TieringOffloadingSpec:
    def __init__(self, config):
        self.config = config
        self.kv_events_config = self._manager = self._worker = None
        self.blocks_per_chunk = self.num_chunks = self.kv_bytes_per_chunk = self.cpu_page_size_per_worker = 1
        self.replicated_layout = False
    @classmethod
    def build_metric_definitions(cls, extra_config): ...
    def get_manager(self): ...
    def get_worker(self, kv_caches): ...
    def create_worker(self, kv_caches): ...
""",
}


def write(root: Path, *edits: tuple[str, str, str]) -> Path:
    """The tree below `root`. An edit: (end of a path, a text that stands there once, what stands there instead); with
    an empty text the file is left out."""
    files = dict(FILES)
    for end, old, new in edits:
        (path,) = (p for p in files if p.endswith(end))
        assert not old or files[path].count(old) == 1, f"{old!r} is not once in {path}"
        if old:
            files[path] = files[path].replace(old, new)
        else:
            del files[path]
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root
