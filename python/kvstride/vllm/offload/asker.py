# SPDX-License-Identifier: Apache-2.0
"""Questions to the file system about chunks that another process may have written."""

from __future__ import annotations

import threading

from vllm.logger import init_logger

from kvstride import StoreError

from .chunks import GroupStore

logger = init_logger("vllm.kvstride")


class Asker:
    """Asks the file system about keys, on a thread of its own, a step's keys together."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._known: dict[str, dict[tuple[int, bytes], bool | None]] = {}
        self._fresh: dict[GroupStore, list[tuple[str, bytes]]] = {}
        self._asked: list[tuple[GroupStore, list[tuple[str, bytes]]]] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvstride-lookup", daemon=True)
        self._thread.start()

    def answer(self, request: str, store: GroupStore, key: bytes) -> bool | None:
        """What is known; None: it is being asked."""
        with self._lock:
            known = self._known.setdefault(request, {})
            place = (store.group.index, key)
            if place not in known:
                known[place] = None
                self._fresh.setdefault(store, []).append((request, key))
            return known[place]

    def flush(self) -> None:
        """Let the thread ask."""
        with self._lock:
            if self._fresh:
                self._asked += self._fresh.items()
                self._fresh = {}
                self._lock.notify()

    def forget(self, request: str) -> None:
        """Answers are for one request: others may find more."""
        with self._lock:
            self._known.pop(request, None)

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._stop = True
            self._lock.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._asked or self._stop)
                if self._stop:
                    return
                asked, self._asked = self._asked, []
            for store, questions in asked:
                found = [False] * len(questions)  # who asks waits for an answer, whatever happens
                try:
                    found = store.store.lookup([key for _, key in questions])
                except StoreError:
                    pass  # it is closed
                except Exception:
                    logger.exception("kvstride: a lookup of %d chunks", len(questions))
                with self._lock:
                    for (request, key), there in zip(questions, found, strict=True):
                        if request in self._known:
                            self._known[request][store.group.index, key] = there
