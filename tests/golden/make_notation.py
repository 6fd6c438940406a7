# SPDX-License-Identifier: Apache-2.0
"""Writes notation.json: byte offsets of the layouts of DESIGN section 2, from an evaluator that is not kvstride's.

    python make_notation.py ../shared/tools > notation.json

The argument is the folder of `notation.py`, an executable sketch of the notation. Where the design page lies beside
that folder, every layout of its table must be in ROWS below.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

AXES = "LBNHD"
MAX_SAMPLES = 500

SHUFFLE = "key: {b}H D/x N D%x, value: {b}H N/x D N%x"
XSPLIT = "key: {b}H D/x N D%x, value: {b}H D N"
NVFP4 = (
    "B {{key: {{data: H N D[D/2] u8, scale: H N D[D/16] f8_e4m3}}, value: {{data: H N D[D/2] u8, scale: {v} f8_e4m3}}}}"
)
AMX16 = "key: {b}N/16 D/2 N%16 D%2, value: {b}D/16 N/2 D%16 N%2"
AMX32 = "key: {b}N/16 D N%16, value: {b}D/16 N D%16"

#: (layout, dtypes: one for each size).
ROWS: list[tuple[str, tuple[str, str]]] = [
    (order, ("bf16", "f8_e4m3"))
    for order in (
        "B KV N H D",
        "B KV H N D",
        "KV B N H D",
        "KV B H N D",
        "B N KV H D",
        "B N H KV D",
        "B H N KV D",
        "LBHNC",
        "LBNHC",
        "LHBNC",
        "BLHNC",
        "BLNHC",
        "BHLNC",
        "B H L KV N D",
        "B KV H L N D",
        "{" + XSPLIT.format(b="B ") + "}",
        "B {" + XSPLIT.format(b="") + "}",
        "B {" + SHUFFLE.format(b="") + "}",
        "{" + SHUFFLE.format(b="B ") + "}",
        "B H {key: D N, value: N D}",
        "{key: B H D N, value: B H N D}",
        "B H {" + AMX16.format(b="") + "}",
        "{" + AMX16.format(b="B H ") + "}",
        "B N {latent: D[512], rope: D[64]}",
        "B N {latent: D[512] f8_e4m3, latent_scale: D[4] f32, rope: D[64] bf16}",
        "B N@584 {latent: D[448] f8_e4m3, rope: D[64] bf16, latent_scale: D[7] f8_e8m0}",
        "B {index: N D[128] f8_e4m3, index_scale: N D[1] f32}",
        "B H N {key: {data: D i8, scale: D[1] f32}, value: {data: D i8, scale: D[1] f32}}",
        NVFP4.format(v="H N/4 D[D/16] N%4"),
        NVFP4.format(v="H N D[D/16]"),
        "B N/k H N%k KV D",
        "B N H KV@256 D",
        "B@131072 {state: D[68608] u8}",
        "B L KV N H D",
        "B L KV H N D",
        "KV L B N H D",
        "KV B N L H D",
        "KV B H N L D",
        "B H/g L KV N H%g D",
        "KV L N H D",
        "key: N H D | value: H D N",
        "key: B H N D | value: B H N D",
    )
] + [(order, ("f32", "f32")) for order in ("B H {" + AMX32.format(b="") + "}", "{" + AMX32.format(b="B H ") + "}")]

#: Lengths that the splits divide and no two of which are equal; `Dv` is the head size of values.
SIZES: list[dict[str, int]] = [
    {"L": 2, "B": 3, "N": 32, "H": 4, "D": 64, "k": 8, "g": 2},
    {"L": 5, "B": 4, "N": 48, "H": 6, "D": 96, "k": 16, "g": 3},
]
#: The same layouts where K and V have different head sizes.
UNEVEN: dict[str, int] = {"L": 2, "B": 3, "N": 16, "H": 4, "D": 64, "Dv": 32, "k": 8, "g": 2}


def part_tables(notation: ModuleType, order: str, dtype: str, size: dict[str, int]) -> list[dict[str, Any]]:
    """One table for each tensor of the order: its bytes and its planes' sampled offsets."""
    symbols = {name: value for name, value in size.items() if name in "kg"}
    geometry = {name: value for name, value in size.items() if name not in "kg"} | {"sym": symbols}
    out = []
    for name, text in notation.tensors(order):
        planes, num_bytes = notation.build(notation.parse(text), geometry, {"*": dtype}, name or "")
        out.append(
            {"bytes": num_bytes, "planes": {name: sample(modes, base) for name, (modes, base, _) in planes.items()}}
        )
    return out


def sample(modes: list[tuple[Any, ...]], base: int) -> dict[str, Any]:
    """Offsets of elements 0, step, 2·step … of a plane, counted with its last axis fastest."""
    lengths = dict.fromkeys(AXES, 1)
    for axis, modulus, *_ in modes:
        lengths[axis] = max(lengths[axis], modulus)
    total = math.prod(lengths.values())
    step = max(1, total // MAX_SAMPLES)
    while math.gcd(step, total) != 1:
        step += 1
    offsets = []
    for number in range(0, total, step):
        index, rest = {}, number
        for axis in reversed(AXES):
            rest, index[axis] = divmod(rest, lengths[axis])
        offsets.append(base + sum((index[a] % m) // d * stride for a, m, d, _, stride, _ in modes))
    return {"lengths": [lengths[axis] for axis in AXES], "step": step, "offsets": offsets}


def check_complete(design: Path) -> None:
    """Every layout of the design's table is in ROWS."""
    table = design.read_text().split("## 2.")[1].split("## 3.")[0].split("\n|---")[1]
    known = {order for order, _ in ROWS}
    for line in table.splitlines()[1:]:
        if not line.startswith("|"):
            continue
        for order in re.findall(r"`([^`]+)`", line.replace("\\|", "|").split("|", 2)[2]):
            if order != "C" and not set(order) <= set("KV D") and order not in known:
                raise SystemExit(f"{design}: `{order}` is not in ROWS")


def main() -> None:
    """Prints the JSON."""
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    import notation

    design = folder.parent / "DESIGN.md"
    if design.exists():
        check_complete(design)
    cases = []
    for order, dtypes in ROWS:
        for dtype, size in zip(dtypes, SIZES, strict=True):
            cases.append((order, dtype, size))
        if "KV" in order or order.endswith("C"):
            cases.append((order, dtypes[0], UNEVEN))
    records = [{"order": o, "dtype": t, "size": s, "tensors": part_tables(notation, o, t, s)} for o, t, s in cases]
    print("[")
    print(",\n".join(json.dumps(record, separators=(",", ":")) for record in records))
    print("]")


if __name__ == "__main__":
    main()
