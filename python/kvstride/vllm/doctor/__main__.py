# SPDX-License-Identifier: Apache-2.0
"""`python -m kvstride.vllm.doctor`, which `kvstride doctor` calls.

Exit codes: 0 nothing failed, 2 bad usage or a configuration that cannot be read, 5 a check failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from kvstride import Error

from .config import check_options, load, understand
from .directory import check_directory, check_file_system, check_room
from .finding import Finding, Result, Setup, counted, fail, printable
from .installation import check_backends, check_hashes, check_kvstride, check_plugin, check_vllm
from .memory import check_leftovers, check_memory
from .remote import check_remote
from .speed import check_speed
from .stored import check_model, check_stored

CHECKS: tuple[tuple[str, Callable[[Setup], Finding | None]], ...] = (
    ("configuration", check_options),
    ("kvstride", check_kvstride),
    ("vLLM", check_vllm),
    ("plug-in", check_plugin),
    ("backends", check_backends),
    ("block hashes", check_hashes),
    ("model", check_model),
    ("memory", check_memory),
    ("leftovers", check_leftovers),
    ("directory", check_directory),
    ("file system", check_file_system),
    ("room", check_room),
    ("speed", check_speed),
    ("stored", check_stored),
    ("remote", check_remote),
)

_ABOUT = "Check an installation and a configuration of vLLM's offloading before serving (docs/vllm.md)."
_FOOTER = """Nothing is changed: a trial of at most 128 MiB is written into the directory and removed, one of
8 MiB in a remote engine. It may run beside engines that use the same directory.

Exit codes: 0 nothing failed (warnings may be there), 2 bad usage or a configuration that cannot be read
(one line on stderr), 5 a check failed, 130 interrupted."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as the program's other commands."""
        print(f"kvstride: doctor: {message} (see kvstride doctor --help)", file=sys.stderr)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks and print them: a line each, or one JSON object with --json."""
    options = _parse(arguments)
    _quiet()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        setup = dataclasses.replace(
            understand(load(options.config)),
            model=options.model,
            tensor_parallel=options.tp,
            program=options.program or _program(),
        )
    except Error as error:
        print(f"kvstride: doctor: {printable(str(error))}", file=sys.stderr)
        return 2
    try:
        return _run(setup, options.json)
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # of printing: checks have their own
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"kvstride: doctor: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="kvstride doctor",
        description=_ABOUT,
        epilog=_FOOTER,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE|JSON",
        help="what --kv-transfer-config is given, or its kv_connector_extra_config, or a tier of type kvstride",
    )
    parser.add_argument("--model", metavar="DIR|NAME", help="what vllm serve is given")
    parser.add_argument("--tp", type=int, metavar="N", help="what --tensor-parallel-size is given")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--program", help=argparse.SUPPRESS)  # the program that called this
    found = parser.parse_args(arguments)
    if found.tp is not None and found.tp < 1:
        parser.error(f"--tp is {found.tp}, expected 1 or more")
    return found


def _program() -> str:
    """The `kvstride` that was installed beside this Python, or the one on PATH."""
    return shutil.which("kvstride", path=os.path.dirname(sys.executable)) or shutil.which("kvstride") or ""


def _quiet() -> None:
    """For the processes that import vLLM."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _run(setup: Setup, as_json: bool) -> int:
    found: list[tuple[str, Finding]] = []
    for name, check in CHECKS:
        with _waiting(name):
            finding = _guarded(check, setup)
        if finding is None:
            continue
        found.append((name, finding))
        if not as_json:
            _print(name, finding)
    failed = [name for name, finding in found if finding.result is Result.FAIL]
    warned = sum(finding.result is Result.WARN for _, finding in found)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [_as_json(name, f) for name, f in found]}), flush=True)
    if failed:
        print(f"kvstride: doctor: {counted(len(failed), 'check')} failed: {', '.join(failed)}", file=sys.stderr)
    elif not as_json:
        print(f"\nnothing failed, {counted(warned, 'warning')}" if warned else "\nall is well", flush=True)
    return 5 if failed else 0


def _guarded(check: Callable[[Setup], Finding | None], setup: Setup) -> Finding | None:
    """A check that fails in a way that nobody thought of is one that failed."""
    try:
        return check(setup)
    except Exception as error:
        return fail(f"the check itself failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _print(name: str, finding: Finding) -> None:
    width = max(len(name) for name, _ in CHECKS)
    print(f"{finding.result.value:4}  {name:{width}}  {finding.line}", flush=True)
    for line in finding.details:
        print(f"{'':4}  {'':{width}}  {printable(line)}", flush=True)


def _as_json(name: str, finding: Finding) -> dict[str, Any]:
    return {
        "check": name,
        "result": finding.result.value,
        "text": finding.text,
        "advice": finding.advice,
        "details": list(finding.details),
        "facts": finding.facts,
    }


@contextlib.contextmanager
def _waiting(name: str) -> Iterator[None]:
    """On a terminal: says what is being checked, where that takes longer than a second."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(1.0, lambda: print(f"\rchecking: {name} …\x1b[K", end="", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
