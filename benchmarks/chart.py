# SPDX-License-Identifier: Apache-2.0
"""The charts: for each work with a target a bar as long as its ratio, and a tick at the target."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

ROW, LEFT, WIDE, TOP = 15, 290, 480, 64
HALO = 'paint-order="stroke" stroke="white" stroke-width="3"'  # over the tick of a target
MET, MISSED, TICK, GRID = "#2a9d5c", "#d9822b", "#222222", "#dddddd"


@dataclass(frozen=True)
class Bar:
    """One work."""

    name: str
    ratio: float
    target: float
    met: bool
    text: str


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'


def _svg(result: dict[str, Any], title: str, bars: list[Bar], longest: float) -> str:
    """The bars from above; what is longer than `longest` is cut."""

    def x(ratio: float) -> float:
        return round(LEFT + min(ratio, longest) / longest * WIDE, 1)

    height = TOP + ROW * len(bars) + 12
    width = LEFT + WIDE + 50
    key = "green: target met, orange: missed, black: the target"
    machine = f"{result['cpu']}, {result['date']}; {key}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(10, 20, title, 'font-size="15" font-weight="bold"'),
        _text(10, 38, machine, 'fill="#555555"'),
    ]
    for tenth in range(0, int(longest * 10) + 1, 2):
        at = x(tenth / 10)
        lines.append(f'<line x1="{at}" x2="{at}" y1="{TOP - 4}" y2="{height - 8}" stroke="{GRID}"/>')
        lines.append(_text(at, TOP - 8, f"{tenth / 10:.1f}", 'text-anchor="middle"'))
    for i, bar in enumerate(bars):
        y, end, at = TOP + i * ROW, x(bar.ratio), x(bar.target)
        color = MET if bar.met else MISSED
        lines += [
            _text(LEFT - 8, y + 10, bar.name.replace("_", " "), 'text-anchor="end"'),
            f'<rect x="{LEFT}" y="{y + 2}" width="{round(end - LEFT, 1)}" height="{ROW - 4}" fill="{color}"/>',
            f'<line x1="{at}" x2="{at}" y1="{y}" y2="{y + ROW}" stroke="{TICK}" stroke-width="2"/>',
            _text(end + 5, y + 10, bar.text, HALO),
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def draw(result: dict[str, Any]) -> str:
    """The works of one thread beside the best copy, as SVG."""
    bars = [
        Bar(r["name"], r["ratio"], r["target"], r["met"], f"{r['ratio']:.2f}")
        for r in result["works"]
        if r["threads"] == 1 and "target" in r
    ]
    return _svg(result, "Ratio to the best copy, one thread", bars, 1.2)


def draw_targets(result: dict[str, Any], part: str, title: str) -> str:
    """Works whose targets differ: each as a part of its own target, as SVG."""
    bars = []
    for r in result[part]:
        name = f"{r['name']} : {r.get('against', r['unit'])}"
        if r["threads"] in ("1", "2", "4"):
            name += f", {r['threads']} thread{'s' * (r['threads'] != '1')}"
        if "target" in r:
            bars.append(Bar(name, r["ratio"] / r["target"], 1, r["met"], f"{r['ratio']:.2f} of {r['target']:g}"))
        if "limit" in r:
            bars.append(Bar(name, r["limit"] / r["ours"], 1, r["met"], f"{r['ours']:.2f} of {r['limit']:g}"))
    return _svg(result, f"{title}: reached, as a part of the target", bars, 2.0)
