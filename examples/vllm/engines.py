# SPDX-License-Identifier: Apache-2.0
"""Runs engines of offload_engine.py, and compares what they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ENGINE = Path(__file__).resolve().parent / "offload_engine.py"

Answer = dict[str, Any]


def run(
    work: Path, job: dict[str, Any], where: list[str] | None = None, environment: dict[str, str] | None = None
) -> tuple[int, str, dict[str, Any] | None]:
    """One engine: its exit status, what it printed, what it told if it came so far. `job`: see offload_engine.py.
    `where`: the beginning of a command line that starts it elsewhere."""
    given, told = work / "job.json", work / "answer.json"
    given.write_text(json.dumps(job))
    told.unlink(missing_ok=True)
    command = [*(where or []), sys.executable, str(_ENGINE), str(given), str(told)]
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    return done.returncode, done.stdout + done.stderr, json.loads(told.read_text()) if told.exists() else None


def python_path(folder: Path) -> str:
    """PYTHONPATH for processes that shall find modules in a folder, too."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def quick_dtype() -> str:
    """What this CPU computes fast in: vLLM emulates bfloat16 without AVX-512, some seven times slower."""
    return "bfloat16" if "avx512f" in Path("/proc/cpuinfo").read_text() else "float32"


def compare(a: Answer, b: Answer, tie: float) -> tuple[float, bool]:
    """The largest difference of a logprob that both tell, while both choose the same tokens; and whether the first
    token that differs, if one does, was as likely as the other, but for `tie`."""
    far = 0.0
    for x, y, one, other in zip(a["logprobs"], b["logprobs"], a["tokens"], b["tokens"], strict=True):
        far = max([far, *(abs(x[t] - y[t]) for t in x.keys() & y.keys())])
        if one != other:
            return far, str(other) in x and abs(x[str(one)] - x[str(other)]) <= tie
    return far, True


def chunk_files(root: Path) -> list[Path]:
    """Files of chunks in a store's directory, with something in them."""
    return sorted(f for f in root.glob("*/?/*") if f.stat().st_size > 0)
