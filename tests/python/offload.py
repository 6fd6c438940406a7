# SPDX-License-Identifier: Apache-2.0
"""What tests of offloading share: engines of examples/vllm, and how their answers are compared."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "vllm"))

import engines
from engines import chunk_files, compare

__all__ = ["alike", "chunk_files", "compare", "engines", "options", "run", "same"]


def run(work: Path, steps: list[Any], *, kind: str = "llama", killed: bool = False, **job: Any) -> dict[str, Any]:
    """What an engine answers; its output, too, under "log"."""
    status, log, told = engines.run(work, {"model": str(work / kind), "kind": kind, "steps": steps, **job})
    assert status == (-signal.SIGKILL if killed else 0) and told is not None, log[-6000:]
    return {**told, "log": log}


def options(directory: Path, **more: Any) -> dict[str, Any]:
    """The configuration that a user gives."""
    return {"spec_name": "kvstride", "cpu_bytes_to_use": 1e8, "root_dir": str(directory), "max_bytes": 5e8, **more}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Tokens and logprobs equal, to the last bit."""
    return bool(a["tokens"] == b["tokens"] and a["logprobs"] == b["logprobs"])


def alike(a: dict[str, Any], b: dict[str, Any], noise: float = 0.05) -> bool:
    """Equal but for rounding: prompts that are computed in other parts, or by other numbers of ranks, differ in the
    last bits. Logprobs are near, and where the choice is another one both were about as likely: each of the two may be
    off by the noise."""
    far, fair = compare(a, b, 2 * noise)
    return far <= noise and fair
