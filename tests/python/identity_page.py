# SPDX-License-Identifier: Apache-2.0
"""The code of docs/formats/identity.md, as a second implementation, and golden vectors made by it.

python tests/python/identity_page.py    rewrites the results in tests/data/identity.json and the page's tables
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "formats" / "identity.md"
VECTORS = ROOT / "tests" / "data" / "identity.json"

_NAMES: dict[str, Any] = {}
exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)[1], _NAMES)  # type: ignore[index]
namespace_text, key_bytes, sha256 = (_NAMES[name] for name in ("namespace_text", "key_bytes", "sha256"))


def extra_of(item: str | dict[str, str]) -> str | bytes:
    """An extra of a vector: text, or bytes as {"hex": …}."""
    return item if isinstance(item, str) else bytes.fromhex(item["hex"])


def parent_of(vector: dict[str, Any]) -> bytes | None:
    """The bytes of a vector's parent."""
    return None if vector["parent"] is None else bytes.fromhex(vector["parent"])


def hashed(vector: dict[str, Any]) -> bytes:
    """What a key is the hash of."""
    extra = [item.encode() if isinstance(item, str) else item for item in map(extra_of, vector["extra"])]
    return key_bytes(parent_of(vector), vector["tokens"], extra)


def tables(vectors: dict[str, Any]) -> tuple[str, str]:
    """The vectors as Markdown: namespaces, keys."""
    spaces, seen = "", set()
    for v in vectors["namespaces"]:
        spaces += f"{v['name']}: `{v['hex']}`\n\n" + ("" if v["hex"] in seen else f"```\n{v['text']}```\n\n")
        seen.add(v["hex"])
    rows = ["| parent | tokens | extras | key |", "|---|---|---|---|"]
    for v in vectors["keys"]:
        extra = ", ".join(
            f"`{x}`" if x and isinstance(x, str) else f"bytes {x['hex']}" if x else "an empty one" for x in v["extra"]
        )
        tokens = ", ".join(map(str, v["tokens"]))
        parent = f"`{v['parent']}`" if v["parent"] else "–"
        rows.append(f"| {parent} | {tokens or '–'} | {extra or '–'} | `{v['hex']}` |")
    return spaces.rstrip("\n") + "\n", "\n".join(rows) + "\n"


def main() -> None:
    vectors = json.loads(VECTORS.read_text())
    for vector in vectors["namespaces"]:
        vector["text"] = namespace_text(**vector["fields"])
        vector["hex"] = sha256(vector["text"].encode())
    for vector in vectors["keys"]:
        vector["bytes"] = hashed(vector).hex()
        vector["hex"] = sha256(hashed(vector))
    VECTORS.write_text(json.dumps(vectors, indent=1, ensure_ascii=True) + "\n")
    spaces, keys = tables(vectors)
    before, rest = PAGE.read_text().split("### Namespaces\n", 1)
    after = rest.split("\n## ", 1)[1]
    PAGE.write_text(f"{before}### Namespaces\n\n{spaces}\n### Keys\n\n{keys}\n## {after}")


if __name__ == "__main__":
    main()
