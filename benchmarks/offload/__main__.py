# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a live vLLM, side by side: no connector, kvstride, vLLM's fs tier, a plain copying worker.

    python offload [--rounds N] [--repeats N] [--dtype float32] [--dir DIR] [--json FILE]

Each system is an engine on the seeded 92 M-parameter model that serves prompts of four lengths (`--repeats` of each):
cold, then from host memory (vLLM's prefix cache is reset), then, in a new process, from the directory. The systems take
turns, and each figure is the median over rounds of the ratio to the other system in the same round. Loads from a
directory come from the disk: its pages are dropped from the page cache before. Also told: tokens that were not
computed, and bytes on disk. What vLLM's scheduler pays is measured by scheduler.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "vllm"))

from engines import python_path, quick_dtype, run

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [168, 360, 744, 1512]
BLOCK = 32


def systems(root: Path) -> dict[str, dict[str, Any] | None]:
    """kv_connector_extra_config by name."""
    host: dict[str, Any] = {"cpu_bytes_to_use": 1e9}
    fs = {"type": "fs", "root_dir": str(root / "fs")}
    return {
        "no connector": None,
        "kvstride": {**host, "spec_name": "kvstride", "root_dir": str(root / "kvstride"), "max_bytes": 8e9},
        "vLLM fs tier": {**host, "spec_name": "kvstride", "secondary_tiers": [fs]},
        "plain copy": {**host, "spec_name": "CopySpec", "spec_module_path": "copy_spec", "secondary_tiers": []},
    }


def prompts(seed: int, repeats: int) -> list[dict[str, Any]]:
    """So many prompts of each length that have no prefix in common."""
    rng = random.Random(seed)
    return [{"prompt": [rng.randrange(10, 1000) for _ in range(length)], "tokens": 2} for length in LENGTHS * repeats]


def engine(work: Path, dtype: str, extra: dict[str, Any] | None, steps: list[Any]) -> dict[str, Any]:
    """One engine's answers, without those of its warm-up."""
    warm = [{"prompt": list(range(900, 964)), "tokens": 2}] * 3
    job: dict[str, Any] = {
        "model": str(work / "llama-92m"),
        "kind": "llama-92m",
        "llm": {"max_model_len": 1600, "block_size": BLOCK, "num_gpu_blocks_override": 512, "dtype": dtype},
        "steps": [*warm, *steps],
    }
    if extra is not None:
        job["extra"] = extra
    status, log, told = run(work, job)
    if status or told is None:
        raise SystemExit(f"the engine ended with {status}:\n{log[-3000:]}")
    told["answers"] = told["answers"][len(warm) :]
    return told


def drop_pages(root: Path) -> int:
    """Write back and drop the files' pages; their bytes."""
    total = 0
    for file in root.rglob("*"):
        if file.is_file() and not file.is_symlink():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(fd).st_blocks * 512
            os.close(fd)
    return total


def seconds(answers: list[dict[str, Any]]) -> dict[int, float]:
    """Median time to the first token by length."""
    return {
        length: statistics.median(a["seconds"] for a in answers[i :: len(LENGTHS)]) for i, length in enumerate(LENGTHS)
    }


def one_round(work: Path, number: int, dtype: str, repeats: int) -> dict[str, Any]:
    """All systems once, with prompts of their own."""
    asked = prompts(number, repeats)
    with tempfile.TemporaryDirectory(dir=work) as directory:
        root = Path(directory)
        out: dict[str, Any] = {}
        names = list(systems(root).items())
        for name, extra in names if number % 2 else names[::-1]:
            again = ["settle", "reset", *asked] if extra is not None else []
            told = engine(work, dtype, extra, [*asked, *again])
            cold, warm = told["answers"][: len(asked)], told["answers"][len(asked) :]
            found: dict[str, Any] = {"cold": seconds(cold)}
            if warm:
                found["host"] = seconds(warm)
                found["host tokens"] = sum(a["cached"] for a in warm)
            place = root / name.removeprefix("vLLM ").removesuffix(" tier")
            if place.exists():
                found["bytes"] = drop_pages(place)
                told = engine(work, dtype, extra, asked)
                found["directory"] = seconds(told["answers"])
                found["directory tokens"] = sum(a["cached"] for a in told["answers"])
            out[name] = found
        return out


#: What is compared: title, (system, kind), (other system, kind).
RATIOS = [
    ("cold, of no connector", ("kvstride", "cold"), ("no connector", "cold")),
    ("host memory, of a plain copy", ("kvstride", "host"), ("plain copy", "host")),
    ("directory, of vLLM's fs tier", ("kvstride", "directory"), ("vLLM fs tier", "directory")),
    ("host memory, of cold", ("kvstride", "host"), ("kvstride", "cold")),
    ("directory, of cold", ("kvstride", "directory"), ("kvstride", "cold")),
]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="offload", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default=quick_dtype(), help="of the computation (%(default)s on this CPU)")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where stores lie while it runs")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = python_path(Path(__file__).parent)  # copy_spec.py
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        work = Path(directory)
        engine(work, options.dtype, None, [])  # writes the model
        rounds = []
        for number in range(options.rounds):
            rounds.append(one_round(work, number, options.dtype, options.repeats))
            print(f"round {number + 1} of {options.rounds} is done", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps({"lengths": LENGTHS, "rounds": rounds}, indent=1) + "\n")
    tell(rounds)
    return 0


def tell(rounds: list[dict[str, Any]]) -> None:
    """The tables."""
    print(f"{'ms to the first token':34}" + "".join(f"{n:>9}" for n in LENGTHS) + "   by prompt length")
    for name in rounds[0]:
        for kind in ("cold", "host", "directory"):
            if kind in rounds[0][name]:
                at = [statistics.median(r[name][kind][n] for r in rounds) for n in LENGTHS]
                print(f"{name + ', ' + kind:34}" + "".join(f"{s * 1e3:9.1f}" for s in at))
    print(f"\n{'ratio, median of rounds':34}")
    for title, (a, kind), (b, other) in RATIOS:
        at = [statistics.median(r[a][kind][n] / r[b][other][n] for r in rounds) for n in LENGTHS]
        print(f"{title:34}" + "".join(f"{s:9.3f}" for s in at))
    for name, found in rounds[-1].items():
        if "bytes" in found:
            print(f"{name}: {found['bytes'] / 1e6:.1f} MB, {found['directory tokens']} tokens from the directory")


if __name__ == "__main__":
    sys.exit(main())
