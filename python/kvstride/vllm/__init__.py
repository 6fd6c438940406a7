# SPDX-License-Identifier: Apache-2.0
"""KV layouts of vLLM, named by asking the engine: a backend class, a record of facts, or a running engine.

Importing this package needs no vLLM. `name_layout` is the one rule (facts → layout); `layout_of_backend`, `backends`,
`layouts_of_engine` and `name_registered` gather the facts from the installed vLLM (0.8.5 to 0.32.x) and raise
`kvstride.EngineError` where there is none or its release is unknown.
"""

from __future__ import annotations

from .families import FAMILIES, UNDESCRIBED, Family, Interior
from .live import EngineCache, layouts_of_engine, name_registered, name_tensor
from .naming import Named, name_layout
from .probe import Backend, backends, layout_of_backend

__all__ = [
    "FAMILIES",
    "UNDESCRIBED",
    "Backend",
    "EngineCache",
    "Family",
    "Interior",
    "Named",
    "backends",
    "layout_of_backend",
    "layouts_of_engine",
    "name_layout",
    "name_registered",
    "name_tensor",
]
