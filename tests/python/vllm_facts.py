# SPDX-License-Identifier: Apache-2.0
"""Records of a vLLM facts file: where it is, and what the naming rule gets to see of a record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

#: What the file tells about the truth; the rule never sees it.
HIDDEN = frozenset({"key", "value", "key_view", "value_view", "opaque_interior", "notes", "split_extra"})

SHARED = Path(__file__).parent.parent / "data" / "vllm_layouts.json"


def facts_file() -> Path:
    """The file of KVSTRIDE_VLLM_FACTS, by default the copy in tests/data."""
    return Path(os.environ.get("KVSTRIDE_VLLM_FACTS") or SHARED)


def records(path: Path | None = None) -> list[dict[str, Any]]:
    """All records of the file."""
    return list(json.loads((path or facts_file()).read_text()))


def visible(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the truth."""
    return {k: v for k, v in record.items() if k not in HIDDEN}


def label(record: dict[str, Any]) -> str:
    """One line that finds a record again."""
    words = (record["from"], record["to"], record["backend"], record.get("variant"), record.get("layout"))
    return " ".join(str(w) for w in words if w is not None)
