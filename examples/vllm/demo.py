# SPDX-License-Identifier: Apache-2.0
"""Offloading with kvstride on a live vLLM: cold, killed, started again, read by two ranks, damaged.

Each line of the table is a vLLM engine in a process of its own that serves the same prompts. Tokens and logprobs are
compared with an engine without a connector. `restart` reads what the killed engine had written; `two ranks` reads it at
another tensor-parallel size, where every restored byte must be the writer's head slice; in `a flipped byte` one file is
damaged, and its chunk is computed again. A prompt that is computed in other parts, and two ranks, round differently:
there logprobs have to be near, and a token may only be another one where both were as likely (a tie). Exit code 0:
everything was as it must be.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import chunk_files, compare, quick_dtype, run

LENGTHS = [168, 360, 744, 1512]
BLOCK = 32


@dataclass
class Row:
    """One engine."""

    name: str
    tokens_equal: bool
    apart: float  # largest difference of a logprob
    from_store: int  # tokens of all prompts that were not computed
    of: int
    seconds: list[float]  # to the first token, by prompt
    megabytes: float  # in the directory
    ok: bool


def prompts(seed: int = 1) -> list[list[int]]:
    """Random tokens, so that no two prompts have a prefix in common."""
    rng = random.Random(seed)
    return [[rng.randrange(10, 1000) for _ in range(length)] for length in LENGTHS]


class Story:
    """Engines on one model and one directory."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.root = work / "cache"
        self.rows: list[Row] = []
        self._asked = [{"prompt": ids, "tokens": 8, "digest": True} for ids in prompts()]
        # What an engine does once only shall not be counted as time to the first token.
        self._warm: list[Any] = [{"prompt": list(range(900, 920)), "tokens": 2}] * 2

    def engine(self, tp: int, offload: bool, then: list[Any], killed: bool = False) -> list[dict[str, Any]]:
        """The answers of one engine, which is killed at the end or ends by itself."""
        job: dict[str, Any] = {
            "model": str(self.work / "llama-92m"),
            "kind": "llama-92m",
            "tp": tp,
            "llm": {"max_model_len": 1600, "block_size": BLOCK, "num_gpu_blocks_override": 128, "dtype": quick_dtype()},
            "steps": [*self._warm, *self._asked, *then],
        }
        if offload:
            job["extra"] = {
                "spec_name": "kvstride",
                "cpu_bytes_to_use": 5e8,
                "root_dir": str(self.root),
                "max_bytes": 1e9,
            }
        status, log, told = run(self.work, job)
        if status != (-signal.SIGKILL if killed else 0) or told is None:
            raise SystemExit(f"the engine ended with {status}:\n{log[-3000:]}")
        return told["answers"][len(self._warm) :]  # type: ignore[no-any-return]

    def row(self, name: str, answers: list[dict[str, Any]], like: list[dict[str, Any]], **must: Any) -> None:
        """Compare, and add a line. `must`: `from_store`, `noise` of logprobs, whatever else has to hold (`also`)."""
        pairs = list(zip(answers, like, strict=True))
        tokens = all(a["tokens"] == b["tokens"] for a, b in pairs)
        compared = [compare(a, b, 0.1) for a, b in pairs]
        far, fair = max(far for far, _ in compared), all(fair for _, fair in compared)
        stored = sum(a["cached"] for a in answers)
        size = sum(f.stat().st_blocks * 512 for f in self.root.rglob("*") if f.is_file()) if self.root.exists() else 0
        ok = fair and far <= must.get("noise", 0.0) and must.get("also", True) and stored == must["from_store"]
        of = sum(LENGTHS)
        seconds = [a["seconds"] for a in answers]
        self.rows.append(Row(name, tokens, far, stored, of, seconds, size / 1e6, ok))
        print_row(self.rows[-1])

    def tell(self) -> None:
        """All of it."""
        whole = sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
        plain = self.engine(1, False, [])
        print_head()
        self.row("no connector", plain, plain, from_store=0)
        cold = self.engine(1, True, ["settle", "kill"], killed=True)
        self.row("cold, then kill -9", cold, plain, from_store=0)
        self.row("restart", self.engine(1, True, []), plain, from_store=whole, noise=0.02)
        two = self.engine(2, True, [])
        bytes_right = all(
            rank_digests == [[heads[r : r + 1] for heads in layer] for layer in one["digests"][0]]
            for one, other in zip(plain, two, strict=True)
            for r, rank_digests in enumerate(other["digests"])
        )
        self.row("two ranks", two, plain, from_store=whole, noise=0.1, also=bytes_right)
        file = chunk_files(self.root)[0]
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(bytes(data))
        damaged = self.engine(1, True, [])
        kept = sum(a["cached"] for a in damaged)
        self.row("a flipped byte", damaged, plain, from_store=kept, noise=0.1, also=kept <= whole - BLOCK)


def print_head() -> None:
    """The table's head; lines follow as engines end."""
    head = f"{'engine':22} {'tokens':>7} {'logprobs':>9} {'from store':>12} {'MB':>7}"
    print(head + "".join(f" {length:>8}" for length in LENGTHS) + "   ms to the first token, by prompt length")


def print_row(row: Row) -> None:
    """One line."""

    tokens = "equal" if row.tokens_equal else "tie"
    apart = "equal" if row.apart == 0 else f"±{row.apart:.3f}"
    line = f"{row.name:22} {tokens:>7} {apart:>9} "
    line += f"{row.from_store:>5} of {row.of} {row.megabytes:>6.1f}"
    line += "".join(f" {s * 1e3:>8.1f}" for s in row.seconds)
    print(line + ("" if row.ok else "   NOT as it must be"), flush=True)


def chart(rows: list[Row]) -> str:
    """Time to the first token over the length of the prompt, cold against warm, as SVG."""
    width, height, left, bottom = 640, 360, 60, 40
    shown = [(r, colour) for r, colour in zip(rows[1:3], ("#b04030", "#2a6f97"), strict=False)]
    most = max(max(r.seconds) for r, _ in shown) * 1.1e3
    x = [left + (width - left - 20) * length / max(LENGTHS) for length in LENGTHS]

    def y(seconds: float) -> float:
        return height - bottom - (height - bottom - 20) * seconds * 1e3 / most

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">']
    out.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    out.append(f'<path d="M{left} 20V{height - bottom}H{width - 20}" fill="none" stroke="#444"/>')
    for length, at in zip(LENGTHS, x, strict=True):
        out.append(f'<text x="{at:.0f}" y="{height - 18}" font-size="12" text-anchor="middle">{length}</text>')
    for part in range(5):
        at = most * part / 4.4
        out.append(f'<text x="{left - 6}" y="{y(at / 1e3) + 4:.0f}" font-size="12" text-anchor="end">{at:.0f}</text>')
    for i, (row, colour) in enumerate(shown):
        points = " ".join(f"{a:.1f},{y(s):.1f}" for a, s in zip(x, row.seconds, strict=True))
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{left + 12}" y="{36 + 18 * i}" font-size="13" fill="{colour}">{row.name}</text>')
    out.append(f'<text x="{width - 20}" y="{height - 4}" font-size="12" text-anchor="end">tokens of the prompt</text>')
    out.append('<text x="8" y="14" font-size="12">ms to the first token</text></svg>')
    return "\n".join(out) + "\n"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chart", type=Path, help="write the chart (SVG) to this file")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        story = Story(Path(directory))
        story.tell()
    ok = all(row.ok for row in story.rows)
    if options.chart:
        options.chart.parent.mkdir(parents=True, exist_ok=True)
        options.chart.write_text(chart(story.rows))
    if options.json:
        options.json.write_text(json.dumps({"ok": ok, "rows": [asdict(row) for row in story.rows]}, indent=1) + "\n")
    print(f"\n{'all as it must be' if ok else 'NOT as it must be'}, {time.perf_counter() - start:.0f} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
