# SPDX-License-Identifier: Apache-2.0
"""A process of its own between a store and its servers, which is told how it shall treat what it passes on.

It does not share a lock with the test, as a thread would: a client that keeps Python's lock while it waits for its
server would wait for the proxy, too.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys


class Forwarder:
    """The module `name`, running; `said` is what it said first. It ends with its input. A context manager."""

    def __init__(self, name: str, *arguments: object) -> None:
        command = [sys.executable, "-m", name, *map(str, arguments)]
        where = pathlib.Path(__file__).parents[1]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # A session of its own: what a terminal or `timeout` tells the test's group is not for it.
        self.process = subprocess.Popen(command, **pipes, cwd=where, start_new_session=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout
        self.said = self._out.readline().split()
        if not self.said:
            self.close()
            raise RuntimeError(f"{name} does not run here")

    def set(self, **options: float) -> None:
        """From now on; without options all passes as it is."""
        self._in.write(json.dumps(options))
        self._in.flush()
        self._out.readline()

    def close(self) -> None:
        self._in.close()
        self.process.wait()
        self._out.close()

    def __enter__(self):  # type: ignore[no-untyped-def]
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def options_said() -> dict[str, float] | None:
    """In the forwarder: what set() was called with, None at the end."""
    said = os.read(0, 4096)
    if not said:
        return None
    print(flush=True)
    return json.loads(said)
