# SPDX-License-Identifier: Apache-2.0
"""Which weights a model has: a commit where its files are those of a commit, else a fingerprint of the files."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from kvstride import ArgumentError

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")
_WHOLE = 64 << 20
_SAMPLE = 64 << 10
_SAMPLES = 64
#: What a configuration says of the library that wrote it, not of the model.
_INCIDENTAL = {"transformers_version", "_name_or_path", "_commit_hash"}


def revision_of(model: str, revision: str | None = None) -> tuple[str, str]:
    """Name and revision of a model: of a hub's cache its commit, of a directory a fingerprint of its files.

    Raises ArgumentError where neither can be found, naming the option that says it.
    """
    path = folder_of(model, revision)
    commit = _commit(path)
    if commit is not None:
        return commit
    return path.name or "model", f"files-{fingerprint(path)}"


def folder_of(model: str, revision: str | None = None) -> Path:
    """Where the files of a model are: a directory, or the hub's cache. Raises ArgumentError."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except Exception as error:
        raise _unknown(model, str(error)) from error
    if not isinstance(found, str):
        raise _unknown(model, "it is no directory, and not in the hub's cache")
    return Path(found).parent


def _unknown(model: str, why: str) -> ArgumentError:
    return ArgumentError(
        f'the weights of {model!r} cannot be told from others ({why}): give "revision", a commit or a fingerprint'
    )


def _commit(path: Path) -> tuple[str, str] | None:
    """(owner/name, commit) of a directory of the hub's cache."""
    found = re.fullmatch(r"models--(.+)", path.parent.parent.name)
    if path.parent.name != "snapshots" or not re.fullmatch("[0-9a-f]{40}", path.name) or not found:
        return None
    return found[1].replace("--", "/"), path.name


def fingerprint(path: Path) -> str:
    """SHA-256 over the configuration and the weights: files up to 64 MiB whole, of larger ones their size and 64
    samples of 64 KiB. Training changes nearly every byte, so no two trained models agree in all samples."""
    out = hashlib.sha256()
    files = sorted({f for pattern in _WEIGHTS for f in path.glob(pattern) if f.is_file()})
    if not files:
        raise _unknown(str(path), "the directory has no weights")
    for name in ("config.json", "quantize_config.json", "hf_quant_config.json"):
        if (path / name).is_file():
            out.update(name.encode() + b"\0" + (path / name).read_bytes())
    for file in files:
        size = file.stat().st_size
        out.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as data:
            if size <= _WHOLE:
                out.update(data.read())
                continue
            for i in range(_SAMPLES):
                data.seek((size - _SAMPLE) * i // (_SAMPLES - 1))
                out.update(data.read(_SAMPLE))
    return out.hexdigest()[:32]


def settings_of(model_config: Any) -> str:
    """A digest of what changes the values of a KV cache beside the weights: the configuration as it is in use
    (overrides included), the dtype that is computed in, the quantization."""
    config = model_config.hf_config.to_dict()
    text = {
        "config": {k: v for k, v in config.items() if k not in _INCIDENTAL},
        "dtype": str(model_config.dtype),
        "quantization": str(model_config.quantization),
    }
    return hashlib.sha256(json.dumps(text, sort_keys=True, default=str).encode()).hexdigest()[:16]
