# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of the kernels: check_kernels.py FILE ARCHITECTURE…

Reads FILE (an object, a library or a program) with cuobjdump and fails where an architecture (`80-real`, `120` …) is
missing, a kernel has a stack, local memory or spills, or a copy kernel (`move_…`) has no loads or stores of 128 bits.
Prints the table that docs/cuda.md keeps. Ends with 77 where there is no cuobjdump.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter

SKIPPED = 77
#: Instructions that would be wide, and those that only spills and arrays in local memory need.
WIDE = ("LDG.E.128", "STG.E.128")
LOCAL = ("LDL", "STL")


def by_kernel(text: str, mark: str) -> dict[tuple[str, str], str]:
    """(architecture, kernel) → what cuobjdump says of it; `mark` is before the kernel's name."""
    out: dict[tuple[str, str], str] = {}
    for part in text.split("\narch = ")[1:]:
        arch = part.split("\n", 1)[0].strip()
        for kernel in re.split(mark, part)[1:]:
            name, rest = re.split(r"[:\s]", kernel, maxsplit=1)
            out[arch, name] = rest
    return out


def plain(name: str) -> str:
    """`move_table` of a mangled name."""
    full = subprocess.run(["c++filt", name], check=True, capture_output=True, text=True).stdout
    return re.sub(r"\(anonymous namespace\)", "", full).split("(", 1)[0].strip().rsplit("::", 1)[-1]


def main(file: str, architectures: list[str]) -> int:
    """Checks one file."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        print("skipped: no cuobjdump on PATH (scripts/nvcc.sh puts one into .venv)")
        return SKIPPED

    def dump(what: str) -> str:
        return "\n" + subprocess.run([tool, what, file], check=True, capture_output=True, text=True).stdout

    usage = by_kernel(dump("--dump-resource-usage"), r"\n Function ")
    code = by_kernel(dump("--dump-sass"), r"\n\s*Function : ")
    wrong = []
    for arch in architectures:
        if not any(of == f"sm_{arch.split('-')[0]}" for of, _ in usage):
            wrong.append(f"sm_{arch.split('-')[0]}: no kernels")
    print("| | kernel | registers | stack, local | shared | loads, stores of 128 bits |\n|---|---|---|---|---|---|")
    for (arch, mangled), text in usage.items():
        name = plain(mangled)
        sizes = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text.split("\n\n", 1)[0])}
        found = Counter(re.findall(r"\b(?:LD|ST)[GL]?\b[.\w]*", code.get((arch, mangled), "")))
        wide = [sum(n for op, n in found.items() if op.startswith(kind)) for kind in WIDE]
        local = sum(n for op, n in found.items() if op.startswith(LOCAL))
        inside = sizes["STACK"] + sizes["LOCAL"]
        print(f"| {arch} | `{name}` | {sizes['REG']} | {inside} | {sizes['SHARED']:,} | {wide[0]}, {wide[1]} |")
        if not found:
            wrong.append(f"{arch} {name}: no loads and stores were read: does this cuobjdump write SASS as ever?")
        if inside or local:
            wrong.append(f"{arch} {name}: {inside} bytes of stack and local memory, {local} loads and stores there")
        if name.startswith("move_") and not all(wide):
            wrong.append(f"{arch} {name}: {wide[0]} loads and {wide[1]} stores of 128 bits")
    for line in wrong:
        print(f"check_kernels: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
