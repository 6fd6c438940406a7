# SPDX-License-Identifier: Apache-2.0
"""kvstride: paged KV caches of LLM engines, right in every layout.

Describe a layout (`Layout`), name or detect one (`layout`, `detect`, `registry`), put it over tensors (`Cache`), read
keys and values through zero-copy views, and copy, swap and convert blocks between any two layouts.
"""

from . import _pickle as _pickle
from ._attention import attention, attention_calibrate, merge_states
from ._core import Entry, Geometry, Layout, Reading, instruction_sets, layout, num_threads, registry, version
from .admission import Admission
from .blocks import (
    checksum_blocks,
    convert_blocks,
    copy_blocks,
    expand_block_ids,
    gather_tokens,
    scatter_tokens,
    set_num_threads,
    swap_blocks,
    write_tokens,
    zero_blocks,
)
from .cache import Cache
from .detect import candidates, detect, probe
from .device import cuda_check, cuda_status, num_cuda_devices
from .errors import (
    AmbiguousLayout,
    ArgumentError,
    BlockIndexError,
    DeviceError,
    DTypeError,
    EngineError,
    Error,
    LayoutError,
    NotStrided,
    StoreError,
    UnknownLayout,
)
from .identity import Key, Namespace
from .plan import Plan
from .store import DirectoryTier, HostTier, Job, Pins, RemoteTier, Store, Tier

__version__ = version()

__all__ = [
    "Admission",
    "AmbiguousLayout",
    "ArgumentError",
    "BlockIndexError",
    "Cache",
    "DTypeError",
    "DeviceError",
    "DirectoryTier",
    "EngineError",
    "Entry",
    "Error",
    "Geometry",
    "HostTier",
    "Job",
    "Key",
    "Layout",
    "LayoutError",
    "Namespace",
    "NotStrided",
    "Pins",
    "Plan",
    "Reading",
    "RemoteTier",
    "Store",
    "StoreError",
    "Tier",
    "UnknownLayout",
    "attention",
    "attention_calibrate",
    "candidates",
    "checksum_blocks",
    "convert_blocks",
    "copy_blocks",
    "cuda_check",
    "cuda_status",
    "detect",
    "expand_block_ids",
    "gather_tokens",
    "instruction_sets",
    "layout",
    "merge_states",
    "num_cuda_devices",
    "num_threads",
    "probe",
    "registry",
    "scatter_tokens",
    "set_num_threads",
    "swap_blocks",
    "write_tokens",
    "zero_blocks",
]
