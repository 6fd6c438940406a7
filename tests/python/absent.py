# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages of other machines, so that a backend's *source* can be imported and asked."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

NAMES = ("flashinfer",)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        return None


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, FlashInfer's backend classes can be asked without FlashInfer."""
    finder = _Absent()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.split(".")[0] in NAMES]:
            if isinstance(sys.modules[name], MagicMock):
                del sys.modules[name]
