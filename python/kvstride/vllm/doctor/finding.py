# SPDX-License-Identifier: Apache-2.0
"""What checks are given and what they find."""

from __future__ import annotations

import enum
import functools
import importlib.util
import json
import os
import pwd
import subprocess
from dataclasses import dataclass, field
from typing import Any

from kvstride import StoreError

from ..offload.options import TierOptions
from .engine_facts import ask


class Result(enum.Enum):
    """How a check went. `WARN`: it serves, but not as one may think."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What a check found: one line, what to do where it is not ok, further lines, and the same for programs."""

    result: Result
    text: str
    advice: str = ""
    details: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Text and advice; control characters of paths and names are shown as such."""
        return printable(f"{self.text}: {self.advice}" if self.advice else self.text)


def ok(text: str, **more: Any) -> Finding:
    """All is well."""
    return Finding(Result.OK, text, **more)


def warn(text: str, advice: str = "", **more: Any) -> Finding:
    """It serves, but."""
    return Finding(Result.WARN, text, advice, **more)


def fail(text: str, advice: str = "", **more: Any) -> Finding:
    """It would not serve."""
    return Finding(Result.FAIL, text, advice, **more)


@dataclass(frozen=True)
class Setup:
    """What is checked.

    `transfer` is the object of --kv-transfer-config, None where only a part of it was given; `extra` its
    kv_connector_extra_config, None where only a tier was. `tier`: options of kvstride's tier as they were given.
    `options`: as much of them as can be read, None where even `root_dir` cannot; `max_bytes` is 0 where that is not
    known. `program`: the `kvstride` program, empty where there is none.
    """

    transfer: dict[str, Any] | None
    extra: dict[str, Any] | None
    tier: dict[str, Any]
    options: TierOptions | None
    model: str | None = None
    tensor_parallel: int | None = None
    program: str = ""

    @functools.cached_property
    def has_vllm(self) -> bool:
        """Whether this Python has a package vllm; it is not imported."""
        return importlib.util.find_spec("vllm") is not None

    @functools.cached_property
    def engine(self) -> dict[str, Any]:
        """What the installed vLLM says (`engine_facts.steps`); some seconds, the first time."""
        return ask(self.transfer)

    @functools.cached_property
    def stat(self) -> dict[str, Any] | None:
        """What `kvstride store stat` says of the directory, None where it is no store yet. Raises StoreError."""
        assert self.options is not None
        root = self.options.root_dir
        if not os.path.exists(os.path.join(root, "ledger")):
            return None
        if not self.program:
            raise StoreError("there is no program 'kvstride' beside this Python or on PATH")
        group = ["--group"] if self.options.group else []
        command = [self.program, "store", "stat", "--json", *group, "--", root]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StoreError(f"kvstride store stat: {error}") from error
        if not done.stdout:
            raise StoreError(done.stderr.strip().removeprefix("kvstride: ") or f"store stat ended by {done.returncode}")
        return json.loads(done.stdout)


def size_text(num_bytes: float) -> str:
    """Bytes in units of 1000, as configurations have them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 999.5 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"


def counted(number: int, one: str, several: str = "") -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def user_name(uid: int | None = None) -> str:
    """Of the user, or of this process."""
    uid = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def printable(text: str) -> str:
    """One line, whatever a path or a model's name holds."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
