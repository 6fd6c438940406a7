# SPDX-License-Identifier: Apache-2.0
"""vLLM's connector to an LMCache server, as the benchmark's engines load it on a host without a GPU.

There vLLM 0.32 replaces Triton's kernels by looking at `vars()` of everything in every module. LMCache brings modules
with objects whose `__dict__` is no dict, on which that ends the engine's start: they are passed over here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector
from vllm.triton_utils import dispatcher

__all__ = ["LMCacheMPConnector"]


def _attributes(value: Any) -> Mapping[str, Any]:
    found = value.__dict__
    return found if isinstance(found, Mapping) else {}


dispatcher.vars = _attributes  # instead of the built-in one
