# SPDX-License-Identifier: Apache-2.0
"""What stored bytes belong to: a namespace, and a key in it (docs/formats/identity.md)."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from . import _core
from ._args import to_size
from ._tensor import is_torch, refuse_masked
from .errors import ArgumentError, DTypeError

_TOKENS = 2**32
_NOT_GIVEN: Any = None


class Namespace:
    """Everything that must be equal for stored bytes to mean the same thing. Immutable.

    `model` and `revision` say which weights: `revision` is a commit or a fingerprint, never a name that can change such
    as 'main'; `adapter` is a fingerprint of the adapter's weights. `planes` maps each plane to its dtype, with its
    number of elements where that is not `head_size` (`value_head_size` of planes called 'value…'): 'bf16', 'bf16[512]'.
    `num_kv_heads` is the whole model's. `block_size` is tokens in a chunk. `salt_policy` says how keys are made. `raw`
    is for bytes whose layout is not known: all that they depend on. 'auto' is refused everywhere.
    """

    __slots__ = ("_core",)
    _core: _core.Namespace

    def __init__(
        self,
        *,
        model: str = _NOT_GIVEN,
        revision: str = _NOT_GIVEN,
        planes: Mapping[str, str] = _NOT_GIVEN,
        num_layers: int = _NOT_GIVEN,
        num_kv_heads: int = _NOT_GIVEN,
        head_size: int = _NOT_GIVEN,
        block_size: int = _NOT_GIVEN,
        value_head_size: int | None = None,
        first_layer: int = 0,
        group: int = 0,
        adapter: str | None = None,
        salt_policy: str = "none",
        raw: str | None = None,
    ) -> None:
        texts = {"model": model, "revision": revision, "salt_policy": salt_policy}
        sizes = {"num_layers": num_layers, "first_layer": first_layer, "num_kv_heads": num_kv_heads}
        sizes |= {"head_size": head_size, "block_size": block_size, "group": group}
        for name, value in (texts | sizes | {"planes": planes}).items():
            if value is None:
                raise ArgumentError(f"namespace: {name} is missing")
        texts |= {name: text for name, text in (("adapter", adapter), ("raw", raw)) if text is not None}
        if value_head_size is not None:
            sizes["value_head_size"] = value_head_size
        if not isinstance(planes, Mapping):
            raise ArgumentError(f"namespace: planes is {_shown(planes)}, expected a mapping such as {{'key': 'bf16'}}")
        for plane in planes:
            _check_text(plane, "namespace: the name of a plane")
        self._core = _core.Namespace(
            {name: _check_text(text, f"namespace: {name}") for name, text in texts.items()},
            {plane: _check_text(spec, f"namespace: planes: {plane!r}") for plane, spec in planes.items()},
            {name: to_size(size, f"namespace: {name}") for name, size in sizes.items()},
        )

    @staticmethod
    def parse(text: str) -> Namespace:
        """From its canonical text. Raises ArgumentError where the text is not exactly that."""
        out = Namespace.__new__(Namespace)
        out._core = _core.Namespace.parse(_check_text(text, "namespace: text"))
        return out

    @property
    def text(self) -> str:
        """The canonical text."""
        return self._core.text

    @property
    def digest(self) -> bytes:
        """SHA-256 of the text."""
        return self._core.digest

    @property
    def hex(self) -> str:
        """The digest in hex."""
        return self._core.hex

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Namespace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Namespace.parse({self.text!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Namespace.parse, (self.text,)


class Key:
    """Which chunk: an engine's own block hash, or one made by `Key.chain`. 1 to 64 bytes. Immutable."""

    __slots__ = ("_bytes",)
    _bytes: builtins.bytes

    def __init__(self, bytes: builtins.bytes | bytearray | memoryview) -> None:
        self._bytes = _to_bytes(bytes, "key")
        if not 1 <= len(self._bytes) <= _core.max_key_bytes:
            raise ArgumentError(f"key: {len(self._bytes)} bytes, must be from 1 to {_core.max_key_bytes}")

    @staticmethod
    def chain(
        parent: Key | builtins.bytes | None,
        tokens: Sequence[int] | Any,
        extra: Iterable[str | builtins.bytes] = (),
    ) -> Key:
        """SHA-256 over the parent (None for the first block), the block's tokens and extras.

        `tokens` are whole numbers from 0 to 2^32 - 1: a list, or a numpy or torch array of integers. `extra` is what
        else the block's KV depends on: salt, adapter, media ids; str stands for its UTF-8. A block with placeholders of
        media needs their whole ids here: the key cannot see that one is missing.
        """
        if parent is not None:
            parent = (parent if isinstance(parent, Key) else Key(_to_bytes(parent, "Key.chain: parent")))._bytes
        return Key(_core.chain_key(parent, _to_tokens(tokens), _to_extra(extra)))

    @property
    def bytes(self) -> builtins.bytes:
        """The bytes themselves."""
        return self._bytes

    @property
    def hex(self) -> str:
        """The bytes in hex."""
        return self._bytes.hex()

    def __bytes__(self) -> builtins.bytes:
        return self._bytes

    def __eq__(self, other: object) -> bool:
        return self._bytes == other._bytes if isinstance(other, Key) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __repr__(self) -> str:
        return f"Key(bytes.fromhex('{self.hex}'))"

    def __reduce__(self) -> tuple[Any, ...]:
        return Key, (self._bytes,)


def _shown(value: Any) -> str:
    return f"{value!r:.80}".replace("\n", " ")


def _check_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"{what} is {_shown(value)} of type {type(value).__name__}, expected a str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} is {_shown(value)}, which UTF-8 cannot hold") from None
    return value


def _to_bytes(value: Any, what: str) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise ArgumentError(f"{what} is {_shown(value)} of type {type(value).__name__}, expected bytes")
    return bytes(value)


def _to_extra(extra: Any) -> list[bytes]:
    if isinstance(extra, (str, bytes, bytearray, Set, Mapping)) or not isinstance(extra, Iterable):
        raise ArgumentError(f"Key.chain: extra is {_shown(extra)}, expected a list of str or bytes")
    out = []
    for i, item in enumerate(extra):
        if isinstance(item, str):
            item = _check_text(item, f"Key.chain: extra[{i}]").encode()
        elif not isinstance(item, (bytes, bytearray, memoryview)):
            raise ArgumentError(f"Key.chain: extra[{i}] is {_shown(item)}, expected a str or bytes")
        out.append(bytes(item))
    return out


def _to_tokens(tokens: Any) -> np.ndarray:
    """A contiguous uint32 array of token ids."""
    refuse_masked(tokens, "Key.chain: tokens")
    if is_torch(tokens):
        tokens = _from_torch(tokens)
    if not isinstance(tokens, np.ndarray):
        tokens = _from_items(tokens)
    if tokens.ndim != 1:
        raise ArgumentError(f"Key.chain: tokens have the shape {list(tokens.shape)}, expected one dimension")
    if tokens.dtype.kind not in "iu" and tokens.size:
        raise DTypeError(f"Key.chain: tokens of dtype {tokens.dtype} are no integers")
    wrong = (tokens < 0) | (tokens >= _TOKENS)
    if wrong.any():
        _refuse(int(wrong.argmax()), tokens[wrong.argmax()])
    return np.ascontiguousarray(tokens, dtype=np.uint32)


def _refuse(index: int, token: Any) -> None:
    raise ArgumentError(f"Key.chain: tokens[{index}] is {token}, must be from 0 to {_TOKENS - 1}")


def _from_torch(tokens: Any) -> np.ndarray:
    import torch

    if tokens.layout is not torch.strided or tokens.device.type != "cpu":
        raise ArgumentError(
            f"Key.chain: tokens are a {tokens.layout} tensor on {tokens.device}, expected one on the CPU"
        )
    if not re.fullmatch(r"torch\.u?int\d+", str(tokens.dtype)):
        raise DTypeError(f"Key.chain: tokens of dtype {tokens.dtype} are no integers")
    return np.asarray(tokens.detach().numpy())


def _from_items(tokens: Any) -> np.ndarray:
    if isinstance(tokens, (str, bytes, bytearray, Set, Mapping)) or not isinstance(tokens, Iterable):
        raise ArgumentError(f"Key.chain: tokens is {_shown(tokens)}, expected a list of whole numbers")
    items = list(tokens)
    if set(map(type, items)) - {int}:
        for i, token in enumerate(items):
            if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
                raise DTypeError(f"Key.chain: tokens[{i}] is {_shown(token)}, no whole number")
        items = [int(token) for token in items]
    try:
        return np.array(items, dtype=np.int64)
    except OverflowError:
        for i, token in enumerate(items):
            if not 0 <= token < _TOKENS:
                _refuse(i, token)
        raise
