# SPDX-License-Identifier: Apache-2.0
"""Fails where a case of tests/data/cases.txt is in no test's name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
#: `TEST_F(Suite, Name` in C++, `def test_name` in Python.
NAME = {".cpp": re.compile(r"^\s*TEST(?:_\w)?\(\s*\w+,\s*(\w+)", re.M), ".py": re.compile(r"^\s*def (test_\w+)", re.M)}
#: `c01_…`, `…_c01`, `C01Word`.
CASE = re.compile(r"(?:^|_)[cC](\d\d)(?=_|[A-Z]|$)")


def required() -> dict[str, str]:
    """Id → title of each case that needs a test."""
    lines = (TESTS / "data" / "cases.txt").read_text().splitlines()
    return dict(line.split("  ", 1) for line in lines if line and not line.startswith("#"))


def tested() -> set[str]:
    """Ids in the names of tests."""
    names = [
        name
        for suffix, pattern in NAME.items()
        for path in TESTS.rglob(f"*{suffix}")
        for name in pattern.findall(path.read_text())
    ]
    return {f"C{number}" for name in names for number in CASE.findall(name)}


def main() -> int:
    cases = required()
    missing = {case: title for case, title in cases.items() if case not in tested()}
    for case, title in missing.items():
        print(f"no test carries {case}: {title}", file=sys.stderr)
    print(f"cases: {len(cases) - len(missing)} of {len(cases)} have a test")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
