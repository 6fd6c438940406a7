# SPDX-License-Identifier: Apache-2.0
"""What the installed vLLM says, asked in a process of its own: importing an engine beside the wrong libraries may end
the process that does it.

`python -m kvstride.vllm.doctor.engine_facts` reads a --kv-transfer-config, or null, and prints a JSON object a line:
each step's facts, so that what was found before a crash is told, too.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from kvstride import EngineError

from .. import engine
from ..offload import needs, register

_SECONDS = 300


def ask(transfer: dict[str, Any] | None) -> dict[str, Any]:
    """All facts; `died` says why where the process ended before it had them."""
    command = [sys.executable, "-P", "-m", __spec__.name]
    return lines_of(command, json.dumps(transfer))


def lines_of(command: list[str], given: str = "") -> dict[str, Any]:
    """The JSON objects that a command prints, as one; `died` where it ended otherwise than by itself."""
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"died": f"importing it took longer than {_SECONDS} s"}
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        try:
            found |= json.loads(line)
        except (ValueError, TypeError):
            continue  # an engine's own line
    if done.returncode < 0:
        said = next((line.partition("what():")[2] for line in done.stderr.splitlines() if "what():" in line), "")
        name = signal.Signals(-done.returncode).name
        found["died"] = f"importing it ends the process by {name}{':' if said else ''}{said.rstrip():.160}"
    elif done.returncode and not found:
        found["died"] = (done.stderr.strip().splitlines() or [f"it ended by {done.returncode}"])[-1][:300]
    return found


def steps(transfer: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Facts, one kind after the other."""
    try:
        yield {"release": engine.version()}
    except EngineError as error:
        yield {"error": str(error)}
        return
    yield {"missing": needs.missing(), "tested": needs.untested() is None}
    yield {"platform": engine.platform()}
    yield {"refused": _refused(transfer)}
    register()
    yield {"registered": "kvstride" in engine.find("vllm.v1.kv_offload.factory:OffloadingSpecFactory")._registry}
    yield {"hashing": str(engine.find("vllm.config:CacheConfig").prefix_caching_hash_algo)}
    yield {"hashes_repeat": _hashes_repeat()}


def _refused(transfer: dict[str, Any] | None) -> str:
    """Why vLLM does not take the configuration; empty where it does."""
    if transfer is None:
        return ""
    try:
        engine.find("vllm.config:KVTransferConfig")(**transfer)
    except Exception as error:  # pydantic's, or the class's own
        # Of pydantic's lines the field and the reason.
        text = " ".join(str(error).split()).partition("for KVTransferConfig ")
        return (text[2] or text[0]).partition(" [type=")[0].removeprefix("Value error, ")[:300]
    return ""


def _hashes_repeat() -> bool:
    """Whether two processes would begin their chains of block hashes alike."""
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    sha256 = engine.find("vllm.utils.hashing:sha256", "vllm.utils:sha256")
    starts = []
    for _ in range(2):
        utils.init_none_hash(sha256)
        starts.append(utils.NONE_HASH)
    return bool(starts[0] == starts[1])


def main() -> None:
    """Prints them."""
    for facts in steps(json.load(sys.stdin)):
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
