# SPDX-License-Identifier: Apache-2.0
"""Checks of what is installed: kvstride, vLLM, the plug-in between them, its attention backends and block hashes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys

import kvstride

from ..offload import needs
from ..offload.options import HASHES
from .engine_facts import lines_of
from .finding import Finding, Setup, counted, fail, ok, warn

_GROUP = "vllm.general_plugins"
_ENTRY = "kvstride.vllm.offload:register"


def check_kvstride(setup: Setup) -> Finding:
    """The package and the program are of one version."""
    text = f"{kvstride.__version__}, CPython {platform.python_version()} in {sys.prefix}"
    facts = {"version": kvstride.__version__, "python": platform.python_version(), "prefix": sys.prefix}
    if not setup.program:
        return warn(f"{text}; no program 'kvstride' beside it or on PATH", "the wheel brings it along", facts=facts)
    try:
        done = subprocess.run([setup.program, "--version"], capture_output=True, text=True, timeout=60)
        found = done.stdout.strip().removeprefix("kvstride ")
    except (OSError, subprocess.TimeoutExpired) as error:
        return warn(f"{setup.program} does not run: {error}", facts=facts)
    if found != kvstride.__version__:
        return warn(f"{text}; {setup.program} is {found or 'no kvstride'}", "install one of them anew", facts=facts)
    return ok(text, facts=facts)


def check_vllm(setup: Setup) -> Finding:
    """The release, that it has what offloading takes, and that it takes the configuration."""
    if not setup.has_vllm:
        advice = "its checks are left out; install kvstride into vLLM's environment and run it there"
        return fail(f"none for {sys.executable}", advice)
    found = setup.engine
    facts = {name: found[name] for name in ("release", "platform", "missing", "tested") if name in found}
    if "error" in found:
        return fail(found["error"])
    text = f"{found.get('release', '')} on {found.get('platform', 'an unknown platform')}"
    if found.get("missing"):
        lacks = needs.first_of(found["missing"])
        return fail(f"{found['release']} lacks what offloading needs: {lacks}", facts=facts)
    if found.get("refused"):
        return fail(f"{found['release']} refuses this --kv-transfer-config: {found['refused']}", facts=facts)
    if "died" in found:
        return fail(found["died"], facts=facts)
    spec = None if setup.extra is None else setup.extra.get("spec_name")
    if found["platform"] == "cpu" and spec not in (None, "kvstride"):
        return fail(f"{text}: {spec} refuses to offload there", 'use "spec_name": "kvstride"', facts=facts)
    if not found["tested"]:
        advice = f"tested are {needs.releases()}"
        return warn(f"{text}, which nobody has run with kvstride", advice, facts=facts)
    return ok(text, facts=facts)


def check_plugin(setup: Setup) -> Finding:
    """vLLM will find the names `kvstride` in its configuration."""
    found = [e for e in importlib.metadata.entry_points(group=_GROUP) if e.value == _ENTRY]
    if not found:
        return fail(f"no entry point of kvstride in the group {_GROUP}", "install the wheel: pip install kvstride")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and found[0].name not in allowed.split(","):
        return fail(f"VLLM_PLUGINS is {allowed!r}, so vLLM leaves it out", f"add {found[0].name!r} to it")
    if setup.has_vllm and setup.engine.get("registered") is False:
        return fail("it does not register with this vLLM", "see the line of vLLM")
    return ok(f"{found[0].name} in {_GROUP}")


def check_backends(setup: Setup) -> Finding | None:
    """Attention backends are known, so that their layouts are portable."""
    if not setup.has_vllm or "release" not in setup.engine:
        return None
    found = lines_of([sys.executable, "-P", "-m", "kvstride.vllm", "--json"])
    if "backends" not in found:
        return warn(found.get("died", "they are not told"), "python -m kvstride.vllm")
    names, unknown = [b["name"] for b in found["backends"]], found["unknown"]
    facts = {"backends": names, "unknown": unknown}
    text = f"{counted(len(names), 'attention backend')}, {sum(not b['error'] for b in found['backends'])} load here"
    if unknown:
        return warn(f"{text}; unknown: {', '.join(unknown)}", "their chunks are kept raw", facts=facts)
    return ok(f"{text}, all are known (python -m kvstride.vllm)", facts=facts)


def check_hashes(setup: Setup) -> Finding | None:
    """Keys of chunks: vLLM's block hashes neither collide nor change from one process to the next."""
    if not setup.has_vllm or "hashes_repeat" not in setup.engine:
        return None
    default, seed = setup.engine["hashing"], os.environ.get("PYTHONHASHSEED")
    facts = {"default": default, "seed": seed, "repeat": setup.engine["hashes_repeat"]}
    if not facts["repeat"]:
        return fail(
            "they begin at random in each process: no restart would find a chunk", "set PYTHONHASHSEED", facts=facts
        )
    if default not in HASHES:
        return warn(f"{default} by default, which is refused", "--prefix-caching-hash-algo sha256", facts=facts)
    if seed is not None:
        return ok(f"{default} from PYTHONHASHSEED={seed}: what was written with another is not found", facts=facts)
    return ok(f"{default}, the same in each process", facts=facts)
