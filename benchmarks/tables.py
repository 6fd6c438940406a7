# SPDX-License-Identifier: Apache-2.0
"""A report as text and as the tables of docs/performance.md."""

from __future__ import annotations

from statistics import median
from typing import Any

Record = dict[str, Any]
HEAD = ("work", "threads", "GB/s", "best copy", "ratio", "target", "")
STORE_HEAD = ("work", "threads", "kvstride", "beside", "its", "ratio", "target", "")
PEER_HEAD = ("work", "threads", "GB/s", "peer", "its GB/s", "ratio", "target", "")


def _target(record: Record) -> str:
    if "target" in record:
        return f"{record['target']:.2f}"
    if "speedup_target" in record:
        return f"{record['speedup_target']:.1f} × one thread"
    return ""


def _verdict(record: Record) -> str:
    if "met" not in record:
        return ""
    return "met" if record["met"] else "missed"


def _ratio(record: Record) -> str:
    faster = f" ({record['speedup']:.2f} × one thread)" if "speedup_target" in record and "speedup" in record else ""
    return f"{record['ratio']:.2f}{faster}"


def _work(record: Record) -> tuple[str, ...]:
    rates = (f"{record['GBps']:.2f}", f"{record['best_GBps']:.2f}")
    return (record["name"], str(record["threads"]), *rates, _ratio(record), _target(record), _verdict(record))


def _peer(record: Record) -> tuple[str, ...]:
    first = (record["name"], str(record["threads"]))
    if "overhead_us" in record:
        call = (f"{record['call_us']:.1f} µs", record["peer"], f"{record['copy_us']:.1f} µs")
        over = (f"+{record['overhead_us']:.1f} µs", f"+{record['target_us']:.0f} µs")
        return (*first, *call, *over, _verdict(record))
    rates = (f"{record['GBps']:.2f}", record["peer"], f"{record['peer_GBps']:.2f}")
    return (*first, *rates, _ratio(record), _target(record), _verdict(record))


def _amount(value: float, unit: str) -> str:
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


def _store(record: Record) -> tuple[str, ...]:
    unit = record["unit"]
    theirs = _amount(record["theirs"], unit) if "theirs" in record else ""
    ratio = f"{record['ratio']:.2f}" if "ratio" in record else ""
    target = f"≤ {record['limit']:g} {unit}" if "limit" in record else _target(record)
    first = (record["name"], str(record["threads"]), _amount(record["ours"], unit))
    return (*first, record.get("against", ""), theirs, ratio, target, _verdict(record))


def _split(result: Record) -> tuple[list[Record], list[Record]]:
    """Works that a target is named for, with any number of threads, and the rest: sweeps and works beside them."""
    asked = {r["name"] for r in result["works"] if _target(r)}
    with_target = [r for r in result["works"] if r["name"] in asked]
    return with_target, [r for r in result["works"] if r["name"] not in asked]


def roofline(result: Record) -> list[str]:
    """What plain copies reach here, and how near the block copies come, in bytes read and written."""
    out = []
    for threads in sorted({r["threads"] for r in result["roofline"]}):
        roofs = {
            r["name"].removeprefix("roofline/"): r["traffic_GBps"]
            for r in result["roofline"]
            if r["threads"] == threads
        }
        given = ", ".join(f"{name.replace('_', ' ')} {rate:.1f}" for name, rate in roofs.items())
        line = f"{threads} thread{'s' * (threads > 1)}, GB/s read and written: {given}."
        moved = [r["traffic_GBps"] for r in result["works"] if r["threads"] == threads and "_blocks/" in r["name"]]
        if moved:
            of = ", ".join(
                f"{median(moved) / roofs[name]:.2f} of {name.replace('_', ' ')}" for name in ("memcpy", "stream_copy")
            )
            line += f" kvstride's block copies {median(moved):.1f}: {of}."
        out.append(line)
    return out


def spread(result: Record) -> list[str]:
    """How far apart the passes were: what a difference between two ratios means."""
    apart = {r["name"]: r["spread"] for r in result["works"] + result["peers"] if "spread" in r}
    if not apart:
        return []
    worst = max(apart, key=lambda name: apart[name])
    middle = f"in {result['passes']} passes a work's ratios lay {median(apart.values()):.0%} apart in the median"
    return [f"{middle.capitalize()}, {apart[worst]:.0%} at most ({worst})."]


def _plain(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]
    return "\n".join(lines)


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in [head, ("---",) * len(head), *rows]]
    return "\n".join(lines) + "\n"


def text(result: Record) -> str:
    """Everything, for a terminal."""
    judged = [r for r in result["works"] + result["peers"] + result["store"] + result["attention"] if "met" in r]
    missed = sum(not r["met"] for r in judged)
    parts = [_plain(HEAD, [_work(r) for r in result["works"]])]
    if result["peers"]:
        parts.append(_plain(PEER_HEAD, [_peer(r) for r in result["peers"]]))
    for part in ("store", "attention"):
        if result[part]:
            parts.append(_plain(STORE_HEAD, [_store(r) for r in result[part]]))
    parts += ["\n".join(roofline(result) + spread(result)), "\n".join(f"absent: {line}" for line in result["absent"])]
    parts.append(f"{len(judged) - missed} targets met, {missed} missed")
    return "\n\n".join(part for part in parts if part)


def markdown(result: Record) -> dict[str, str]:
    """The text for each marker of docs/performance.md."""
    asked, rest = _split(result)
    how = f"`{result['command']}`, {result['date']}, {result['cpu']}, {result['cores']} cores.\n"
    absent = "".join(f"\nAbsent: {line}.\n" for line in result["absent"])
    return {
        "machine": how + "".join(f"\n{line}\n" for line in roofline(result) + spread(result)),
        "works": _markdown(HEAD, [_work(r) for r in asked]),
        "sweeps": _markdown(HEAD, [_work(r) for r in rest]),
        "store": _markdown(STORE_HEAD, [_store(r) for r in result["store"]]),
        "attention": _markdown(STORE_HEAD, [_store(r) for r in result["attention"]]),
        "peers": _markdown(PEER_HEAD, [_peer(r) for r in result["peers"]]) + absent,
    }
