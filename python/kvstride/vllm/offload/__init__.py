# SPDX-License-Identifier: Apache-2.0
"""KV offloading for vLLM: the spec and the secondary tier that are called `kvstride` in its configuration.

`register` is the entry point of vLLM's plugins (group `vllm.general_plugins`). The parts, in the order in which bytes
pass them: `worker` copies blocks of the engine to rows of vLLM's primary tier, `rows` says what these rows hold and who
has certified it, `tier` keeps rows in a kvstride store, `spec` makes all of it from the options (`options`).
"""

from __future__ import annotations

import logging

__all__ = ["register"]

_NAME = "kvstride"


def register() -> None:
    """Make the names known to vLLM. Called by vLLM in each of its processes; does nothing the second time."""
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        logging.getLogger("vllm").info(
            "kvstride: this vLLM has no offloading in tiers (%s); 0.30 and newer have", error
        )
        return
    here = __name__
    for factory, add, cls in (
        (OffloadingSpecFactory, "register_spec", "KvstrideSpec"),
        (SecondaryTierFactory, "register_tier", "KvstrideTier"),
    ):
        if _NAME not in factory._registry:
            getattr(factory, add)(_NAME, f"{here}.{'spec' if cls == 'KvstrideSpec' else 'tier'}", cls)
