# SPDX-License-Identifier: Apache-2.0
"""Checks of the model and of what a restart would find in the directory."""

from __future__ import annotations

import json
import re
from typing import Any

from kvstride import ArgumentError, StoreError

from ..offload.weights import folder_of, revision_of
from .directory import usable
from .finding import Finding, Setup, counted, fail, ok, printable, size_text, warn

_SHOWN = 8


def identity(setup: Setup) -> tuple[str, str]:
    """Name and revision under which chunks of the model are kept. Raises ArgumentError."""
    assert setup.model is not None
    if setup.options is not None and setup.options.revision:
        return setup.model, setup.options.revision
    return revision_of(setup.model)


def check_model(setup: Setup) -> Finding | None:
    """Weights can be told from others, and vLLM can be told to offload the model."""
    if setup.model is None:
        return None
    try:
        name, revision = identity(setup)
    except ArgumentError as error:
        return fail(str(error))
    facts = {"name": name, "revision": revision}
    if setup.has_vllm and setup.engine.get("platform") == "cpu" and _is_mla(setup.model):
        return fail(
            f"{name} has MLA", "on vLLM's CPU backend it gives other tokens with any connector: refused", facts=facts
        )
    return ok(f"{name}, revision {revision}", facts=facts)


def _is_mla(model: str) -> bool:
    """A configuration that says so; False where there is none to be seen."""
    try:
        found = json.loads((folder_of(model) / "config.json").read_text())
    except (ArgumentError, OSError, ValueError):
        return False
    texts = [found, found.get("text_config")] if isinstance(found, dict) else []
    return any(isinstance(t, dict) and t.get("kv_lora_rank") for t in texts)


def check_stored(setup: Setup) -> Finding | None:
    """Chunks by namespace; with a model, how many of them are its own."""
    if setup.options is None or not usable(setup):
        return None
    try:
        found = setup.stat
    except StoreError as error:
        return warn(str(error), "what is stored cannot be told")
    if found is None or not found["chunks"]:
        return ok("nothing is stored yet: the first prompts are computed", facts={"chunks": 0})
    spaces = [s for s in found["namespaces"] if s["chunks"]]
    facts: dict[str, Any] = {k: found[k] for k in ("chunks", "bytes", "namespaces")}
    details = tuple(_line(s) for s in spaces[:_SHOWN])
    if len(spaces) > _SHOWN:
        details += (f"and {len(spaces) - _SHOWN} more (kvstride store ls)",)
    total = f"{counted(found['chunks'], 'chunk')}, {size_text(found['bytes'])}"
    total += f" in {counted(len(spaces), 'namespace')}"
    more: dict[str, Any] = {"details": details, "facts": facts}
    if found["strays"]:
        facts["strays"] = found["strays"]
        stray = found["strays"][0]
        return warn(
            f"{total}; {counted(len(found['strays']), 'thing')} in between are no chunks",
            f"{stray['path']}: {stray['reason']}",
            **more,
        )
    if setup.model is None:
        return ok(f"{total} (--model says how many are a model's)", **more)
    return _of_model(setup, spaces, total, more)


def _of_model(setup: Setup, spaces: list[dict[str, Any]], total: str, more: dict[str, Any]) -> Finding:
    try:
        name, revision = identity(setup)
    except ArgumentError:
        return ok(total, **more)
    named = [s for s in spaces if s.get("model") == name]
    # A revision is followed by a digest of the settings in use, which a running engine knows.
    mine = [s for s in named if str(s["revision"]).partition("+")[0] == revision]
    chunks = sum(s["chunks"] for s in mine)
    more["facts"]["of_model"] = chunks
    if not mine and named:
        text = f"{total}; {counted(sum(s['chunks'] for s in named), 'chunk')} of {name}, but of other weights"
        return warn(text, f"none of revision {revision}: all is computed at first", **more)
    if not mine:
        return ok(f"{total}, none of {name}: its first prompts are computed", **more)
    ranks = {int(tp) for s in mine for tp in re.findall(r"\btp=(\d+);", s["raw"] or "")}
    if setup.tensor_parallel is not None and ranks - {setup.tensor_parallel}:
        text = f"{total}, {chunks:,} of {name}; raw ones were written by {', '.join(map(str, sorted(ranks)))} ranks"
        return warn(text, f"{setup.tensor_parallel} ranks do not find those of others", **more)
    return ok(f"{total}; {chunks:,} of {name} with these weights", **more)


def _line(space: dict[str, Any]) -> str:
    """A namespace in one line."""
    begin = f"{space['namespace'][:12]}  {counted(space['chunks'], 'chunk')}, {size_text(space['bytes'])}"
    if space.get("error"):
        return f"{begin}  ({space['error']})"
    kind = "raw" if space["raw"] else "any tensor-parallel size"
    age = space["last_use_age"]
    used = "" if age is None else f", last used {age // 3600} h ago" if age >= 7200 else f", last used {age} s ago"
    return printable(f"{begin}  {space['model']} {str(space['revision'])[:18]} ({kind}{used})")
