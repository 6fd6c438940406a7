# SPDX-License-Identifier: Apache-2.0
"""KV offloading for vLLM: the spec and the secondary tier that are called `kvstride` in its configuration.

`register` is the entry point of vLLM's plugins (group `vllm.general_plugins`). The parts, in the order in which bytes
pass them: `worker` copies blocks of the engine to rows of vLLM's primary tier, `rows` says what these rows hold and who
has certified it, `tier` keeps rows in a kvstride store, `spec` makes all of it from the options (`options`). What the
installed vLLM must have for that is in `needs`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

__all__ = ["KvstrideSpec", "KvstrideTier", "register"]

_NAME = "kvstride"
#: Our classes, and who makes them by name in vLLM.
_CLASSES = {
    "KvstrideSpec": ("spec", "vllm.v1.kv_offload.factory", "OffloadingSpecFactory", "register_spec"),
    "KvstrideTier": ("tier", "vllm.v1.kv_offload.tiering.factory", "SecondaryTierFactory", "register_tier"),
}


def register() -> None:
    """Make the names known to vLLM. Called by vLLM in each of its processes, whether it offloads or not; does nothing
    the second time, nor where this vLLM does not offload, and never fails: that would end the process."""
    for cls, (_, module, factory, add) in _CLASSES.items():
        try:
            found = getattr(importlib.import_module(module), factory)
            with contextlib.suppress(ValueError):  # it knows the name already
                getattr(found, add)(_NAME, __name__, cls)
        except Exception as error:
            logging.getLogger("vllm.kvstride").debug("kvstride: not registered as %s: %s", add, error)


def __getattr__(name: str) -> Any:
    """`KvstrideSpec` and `KvstrideTier`, as vLLM asks for them when it is told to offload: where this vLLM lacks
    something that they need, EngineError names it."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .needs import check

    check()
    return getattr(importlib.import_module(f".{_CLASSES[name][0]}", __name__), name)
