# SPDX-License-Identifier: Apache-2.0
"""A CPU attention backend for vLLM: `kvstride.attention` on the engine's own KV caches, dense or sparse.

Off unless the environment variable `KVSTRIDE_ATTENTION` is set: to `1`, or to options as JSON (`options`). `register`
is the entry point of vLLM's plugins (group `vllm.general_plugins`); `backend` has the classes that vLLM asks for
and `counts` what they count. Written for vLLM 0.32's backend interface, which 0.30 and 0.31 share.
"""

from __future__ import annotations

import os

from .counts import attended
from .options import VARIABLE, AttentionOptions

__all__ = ["AttentionOptions", "attended", "register"]

_BACKEND = "kvstride.vllm.attention.backend.KvstrideAttentionBackend"


def register() -> None:
    """Put the backend in the place of vLLM's CPU attention where `KVSTRIDE_ATTENTION` asks for it. Called by vLLM in
    each of its processes; does nothing elsewhere.

    Raises ArgumentError for options that are wrong: an engine that was told to use other attention than it has would
    be worse than one that does not start. vLLM logs a plug-in's exception and ends the process.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if AttentionOptions.parse(text) is None:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # The CPU platform serves with CPU_ATTN whatever is selected (0.30 to 0.32): its path is what can be replaced.
    register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)
