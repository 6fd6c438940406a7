# SPDX-License-Identifier: Apache-2.0
"""The chart: for each work with a target a bar as long as its ratio to the best copy, and a tick at the target."""

from __future__ import annotations

from html import escape
from typing import Any

ROW, LEFT, WIDE, TOP = 15, 290, 480, 64
LONGEST = 1.2  # of a ratio; more is cut
HALO = 'paint-order="stroke" stroke="white" stroke-width="3"'  # over the tick of a target
MET, MISSED, TICK, GRID = "#2a9d5c", "#d9822b", "#222222", "#dddddd"


def _x(ratio: float) -> float:
    return round(LEFT + min(ratio, LONGEST) / LONGEST * WIDE, 1)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'


def _bar(record: dict[str, Any], y: int) -> list[str]:
    color = MET if record["met"] else MISSED
    length = round(_x(record["ratio"]) - LEFT, 1)
    at = _x(record["target"])
    return [
        _text(LEFT - 8, y + 10, record["name"].replace("_", " "), 'text-anchor="end"'),
        f'<rect x="{LEFT}" y="{y + 2}" width="{length}" height="{ROW - 4}" fill="{color}"/>',
        f'<line x1="{at}" x2="{at}" y1="{y}" y2="{y + ROW}" stroke="{TICK}" stroke-width="2"/>',
        _text(_x(record["ratio"]) + 5, y + 10, f"{record['ratio']:.2f}", HALO),
    ]


def draw(result: dict[str, Any]) -> str:
    """The works of one thread, as SVG."""
    records = [r for r in result["works"] if r["threads"] == 1 and "target" in r]
    height = TOP + ROW * len(records) + 12
    width = LEFT + WIDE + 50
    title = "Ratio to the best copy, one thread"
    key = "green: target met, orange: missed, black: the target"
    machine = f"{result['cpu']}, {result['date']}; {key}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(10, 20, title, 'font-size="15" font-weight="bold"'),
        _text(10, 38, machine, 'fill="#555555"'),
    ]
    for tenth in range(0, 13, 2):
        x = _x(tenth / 10)
        lines.append(f'<line x1="{x}" x2="{x}" y1="{TOP - 4}" y2="{height - 8}" stroke="{GRID}"/>')
        lines.append(_text(x, TOP - 8, f"{tenth / 10:.1f}", 'text-anchor="middle"'))
    for i, record in enumerate(records):
        lines += _bar(record, TOP + i * ROW)
    return "\n".join([*lines, "</svg>"]) + "\n"
