# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a live vLLM, side by side: no connector, kvstride, vLLM's fs tier, a plain copying worker,
and LMCache where it is installed.

    python offload [--rounds N] [--repeats N] [--dtype float32] [--dir DIR] [--json FILE]

Each system is an engine on the seeded 92 M-parameter model that serves prompts of four lengths (`--repeats` of each):
cold, then from host memory (vLLM's prefix cache is reset), then, in a new process, from the directory. The systems take
turns, and each figure is the median over rounds of the ratio to the other system in the same round. Loads from a
directory come from the disk: its pages are dropped from the page cache before. Also told: tokens that were not
computed, bytes on disk, and whether the generated tokens are those of no connector. What vLLM's scheduler pays is
measured by scheduler.py.

LMCache is a server of its own (lmcache_server.py), which is started again with the engine that reads the directory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lmcache_server

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "vllm"))

from engines import Answer, compare, python_path, quick_dtype, run

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [168, 360, 744, 1512]
BLOCK = 32
#: Generated for each prompt.
TOKENS = 8


class System(NamedTuple):
    """What is compared."""

    #: Whatever has to run beside an engine; gives what the engine's job says of the connector.
    beside: Callable[[], AbstractContextManager[dict[str, Any]]]
    #: Where it keeps files.
    folder: Path | None = None


def systems(root: Path) -> dict[str, System]:
    """By name."""
    host: dict[str, Any] = {"cpu_bytes_to_use": 1e9}
    ours = {**host, "spec_name": "kvstride", "root_dir": str(root / "kvstride"), "max_bytes": 8e9}
    fs = {**host, "spec_name": "kvstride", "secondary_tiers": [{"type": "fs", "root_dir": str(root / "fs")}]}
    copy = {**host, "spec_name": "CopySpec", "spec_module_path": "copy_spec", "secondary_tiers": []}
    out = {
        "no connector": System(partial(nullcontext, {})),
        "kvstride": System(partial(nullcontext, {"extra": ours}), root / "kvstride"),
        "vLLM fs tier": System(partial(nullcontext, {"extra": fs}), root / "fs"),
        "plain copy": System(partial(nullcontext, {"extra": copy})),
    }
    if lmcache_server.installed():
        out["LMCache"] = System(partial(lmcache_server.serving, root / "lmcache", BLOCK), root / "lmcache")
    return out


def prompts(seed: int, repeats: int) -> list[dict[str, Any]]:
    """So many prompts of each length that have no prefix in common."""
    rng = random.Random(seed)
    return [
        {"prompt": [rng.randrange(10, 1000) for _ in range(length)], "tokens": TOKENS} for length in LENGTHS * repeats
    ]


def engine(work: Path, dtype: str, more: dict[str, Any], steps: list[Any]) -> list[Answer]:
    """One engine's answers, without those of its warm-up. `more`: of its job."""
    warm = [{"prompt": list(range(900, 964)), "tokens": 2}] * 3
    job: dict[str, Any] = {
        "model": str(work / "llama-92m"),
        "kind": "llama-92m",
        "llm": {"max_model_len": 1600, "block_size": BLOCK, "num_gpu_blocks_override": 512, "dtype": dtype},
        "steps": [*warm, *steps],
    }
    status, log, told = run(work, job | more)
    if status or told is None:
        raise SystemExit(f"the engine ended with {status}:\n{log[-3000:]}")
    return list(told["answers"][len(warm) :])


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


def seconds(answers: list[Answer]) -> dict[int, float]:
    """Median time to the first token by length."""
    return {
        length: statistics.median(a["seconds"] for a in answers[i :: len(LENGTHS)]) for i, length in enumerate(LENGTHS)
    }


def one_round(work: Path, number: int, dtype: str, repeats: int) -> dict[str, Any]:
    """All systems once, with prompts of their own."""
    asked = prompts(number, repeats)
    answers: dict[str, dict[str, list[Answer]]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=work) as directory:
        names = list(systems(Path(directory)).items())
        for name, system in names if number % 2 else names[::-1]:
            with system.beside() as more:
                again = ["settle", "reset", *asked] if more else []
                told = engine(work, dtype, more, [*asked, *again])
            answers[name] = {"cold": told[: len(asked)]}
            if again:
                answers[name]["host"] = told[len(asked) :]
            if system.folder:
                sizes[name] = drop_pages(system.folder)
                with system.beside() as more:
                    answers[name]["directory"] = engine(work, dtype, more, asked)
        plain = answers["no connector"]["cold"]
        return {
            name: {
                **{kind: found(given, plain) for kind, given in answers[name].items()},
                **({"bytes": sizes[name]} if name in sizes else {}),
            }
            for name, _ in names
        }


def found(answers: list[Answer], plain: list[Answer]) -> dict[str, Any]:
    """Figures of an engine that served the prompts which `plain` has answers to. A prompt that is computed in other
    parts rounds differently: a token may be another one where both were as likely (a tie)."""
    equal = [a["tokens"] == b["tokens"] for a, b in zip(answers, plain, strict=True)]
    compared = [compare(a, b, 0.1) for a, b in zip(answers, plain, strict=True)]
    return {
        "seconds": seconds(answers),
        "cached": sum(a["cached"] for a in answers),
        "prompts": len(answers),
        "equal": sum(equal),
        "ties": sum(fair and not same for same, (_, fair) in zip(equal, compared, strict=True)),
        "apart": max(far for far, _ in compared),
    }


KINDS = ("cold", "host", "directory")
#: What is compared: title, (system, kind), (other system, kind).
RATIOS = [
    ("cold, of no connector", ("kvstride", "cold"), ("no connector", "cold")),
    ("host memory, of a plain copy", ("kvstride", "host"), ("plain copy", "host")),
    ("directory, of vLLM's fs tier", ("kvstride", "directory"), ("vLLM fs tier", "directory")),
    ("cold, of LMCache", ("kvstride", "cold"), ("LMCache", "cold")),
    ("host memory, of LMCache", ("kvstride", "host"), ("LMCache", "host")),
    ("directory, of LMCache", ("kvstride", "directory"), ("LMCache", "directory")),
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
    os.environ["PYTHONPATH"] = python_path(Path(__file__).parent)  # copy_spec.py, lmcache_connector.py
    if not lmcache_server.installed():
        print("LMCache is not installed: it is left out", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        work = Path(directory)
        engine(work, options.dtype, {}, [])  # writes the model
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

    def at(name: str, kind: str, number: int) -> dict[int, float]:
        return rounds[number][name][kind]["seconds"]

    def row(title: str, width: int, figures: list[str]) -> None:
        print(f"{title:34}" + "".join(f"{f:>{width}}" for f in figures))

    turns, shown = range(len(rounds)), [(n, k) for n in rounds[0] for k in KINDS if k in rounds[0][n]]
    row("ms to the first token", 9, [*map(str, LENGTHS), "  by prompt length"])
    for name, kind in shown:
        middle = [statistics.median(at(name, kind, t)[n] for t in turns) for n in LENGTHS]
        row(f"{name}, {kind}", 9, [f"{s * 1e3:.1f}" for s in middle])
    print("\nratio, median of rounds")
    for title, one, other in RATIOS:
        if one in shown and other in shown:
            middle = [statistics.median(at(*one, t)[n] / at(*other, t)[n] for t in turns) for n in LENGTHS]
            row(title, 9, [f"{s:.3f}" for s in middle])
    print()
    row("all rounds", 13, ["cached", "equal tokens", "ties", "logprobs ±", "MB on disk"])
    for name, kind in shown:
        parts = [r[name][kind] for r in rounds]
        prompts, equal, ties, cached = (sum(p[key] for p in parts) for key in ("prompts", "equal", "ties", "cached"))
        size = sum(r[name]["bytes"] for r in rounds) if kind == "directory" else 0
        figures = [str(cached), f"{equal} of {prompts}", str(ties), f"{max(p['apart'] for p in parts):.3f}"]
        row(f"{name}, {kind}", 13, [*figures, f"{size / 1e6:.1f}" if size else ""])


if __name__ == "__main__":
    sys.exit(main())
