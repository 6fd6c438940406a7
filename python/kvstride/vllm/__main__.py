# SPDX-License-Identifier: Apache-2.0
"""`python -m kvstride.vllm`: each attention backend of the installed vLLM with its layouts.

Exit codes as the `kvstride` program: 0 done, 2 bad usage or no vLLM (one line on stderr), 4 a backend that kvstride's
table does not know.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from kvstride import EngineError

from . import engine
from .naming import Named
from .probe import Backend, backends


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or one JSON object with --json."""
    parser = argparse.ArgumentParser(prog="python -m kvstride.vllm", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        release, listed = engine.release(), backends()
    except EngineError as error:
        print(f"kvstride.vllm: {error}", file=sys.stderr)
        return 2
    unknown = [b for b in listed if not b.known]
    if options.json:
        print(
            json.dumps(
                {"release": release, "backends": [_as_json(b) for b in listed], "unknown": [b.name for b in unknown]}
            )
        )
    else:
        _print_table(release, listed)
        if unknown:
            print(f"\nunknown to kvstride, refused: {', '.join(b.name for b in unknown)}")
    return 4 if unknown else 0


def _as_json(backend: Backend) -> dict[str, Any]:
    layouts = {}
    for letters, layout in backend.layouts.items():
        if isinstance(layout, Named):
            layouts[letters] = {
                "order": layout.order,
                "text": layout.text,
                "name": layout.name,
                "interior": layout.interior.value,
                "shape": list(layout.shape),
                "axes": list(layout.axes),
            }
        else:
            layouts[letters] = {"refused": layout}
    return {
        "name": backend.name,
        "class": backend.path,
        "known": backend.known,
        "error": backend.error,
        "layouts": layouts,
    }


def _print_table(release: str, listed: Sequence[Backend]) -> None:
    print(f"vLLM {release}: {len(listed)} attention backends; orders are those of one layer's tensor\n")
    rows = [(b.name, letters, *rest) for b in listed for letters, *rest in _lines(b)]
    widths = [max(len(row[i]) for row in rows if row[3] or i < 2) for i in range(3)]
    last = None
    for row in [("backend", "layout", "order", "interior"), *rows]:
        shown = ("" if row[0] == last else row[0], *row[1:3])
        last = row[0]
        line = "  ".join(f"{cell:{width}}" for cell, width in zip(shown, widths, strict=True))
        print(f"{line}  {row[3]}".rstrip())


def _lines(backend: Backend) -> list[tuple[str, str, str]]:
    """(layout letters, order or what is wrong, interior or nothing); layouts of one order on one line."""
    flag = "" if backend.known else "UNKNOWN CLASS "
    if backend.error is not None:
        return [("-", f"{flag}not loaded: {_short(backend.error.removeprefix(backend.path + ': '))}", "")]
    lines: dict[tuple[str, str], list[str]] = {}
    for letters, layout in backend.layouts.items():
        if isinstance(layout, Named):
            key = (layout.order, layout.interior.value)
        else:
            key = (f"{flag}refused: {_short(layout.partition(': ')[2] or layout)}", "")
        lines.setdefault(key, []).append(letters)
    return [(" ".join(letters), order, interior) for (order, interior), letters in lines.items()]


def _short(text: str, limit: int = 90) -> str:
    line = text.split("\n")[0]
    return line if len(line) <= limit else line[: limit - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
