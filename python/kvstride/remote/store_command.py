# SPDX-License-Identifier: Apache-2.0
"""`kvstride store` on an engine that is written in Python: the program hands over to main()."""

from __future__ import annotations

import json
import signal
import sys

from .. import _core
from ..errors import Error
from .engine import open_engine


def main() -> int:
    """Carries out the command that the program's one argument holds; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # calls of the library do not come back for Python's own
    arguments = sys.argv[1]
    try:
        engine = open_engine(json.loads(arguments)["path"])
        try:
            out, message, code = _core.store_command(arguments, engine)
        finally:
            engine.close()
    except Error as error:
        out, message, code = b"", str(error), 2
    try:
        sys.stdout.buffer.write(out)
        sys.stdout.buffer.flush()
    except OSError as error:
        sys.stdout = None  # nothing is left for it to say
        message, code = f"cannot write to standard output: {error.strerror}", 2
    if message:
        line = "".join(c if c >= " " and c != "\x7f" else " " for c in message)
        sys.stderr.write(f"kvstride: {line}\n")
    return code
