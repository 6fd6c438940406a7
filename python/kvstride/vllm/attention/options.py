# SPDX-License-Identifier: Apache-2.0
"""Options of the attention backend, from the environment variable `KVSTRIDE_ATTENTION`."""

from __future__ import annotations

import fnmatch
import json
import math
from dataclasses import dataclass
from typing import Any

from kvstride import ArgumentError

VARIABLE = "KVSTRIDE_ATTENTION"
#: As kvstride.attention has it.
_MAX_TILE = 4096
_OFF, _ON = {"", "0", "off", "false"}, {"1", "on", "true"}


@dataclass(frozen=True)
class Lambda:
    """λ of skip-softmax: a number, or a · exp(b · target) / (longest sequence of the batch), as ModelOpt calibrates."""

    value: float = 0.0
    a: float = 0.0
    b: float = 0.0
    target: float = 0.0

    @staticmethod
    def parse(given: Any, what: str) -> Lambda:
        """A number below 1, or {"a", "b", "target"}."""
        if isinstance(given, dict):
            unknown = sorted(given.keys() - {"a", "b", "target"})
            if unknown or not {"a", "b"} <= given.keys():
                raise ArgumentError(f"{VARIABLE}: {what} is {given!r:.80}, expected a number or a, b and target")
            numbers = {name: _number(value, f"{what}.{name}") for name, value in given.items()}
            if numbers["a"] <= 0 or not 0 < numbers.get("target", 0.5) < 1:
                raise ArgumentError(f"{VARIABLE}: {what} needs a above 0 and a target between 0 and 1")
            return Lambda(a=numbers["a"], b=numbers["b"], target=numbers.get("target", 0.5))
        value = _number(given, what)
        if value >= 1:
            raise ArgumentError(f"{VARIABLE}: {what} is {value}, must be below 1")
        return Lambda(max(value, 0.0))

    def at(self, length: int) -> float:
        """λ for a batch whose longest sequence has `length` keys; off (0) where it comes out as 1 or more."""
        if self.a == 0:
            return self.value
        try:
            value = self.a * math.exp(self.b * self.target) / max(length, 1)
        except OverflowError:
            return 0.0
        return value if value < 1 else 0.0


@dataclass(frozen=True)
class AttentionOptions:
    """`prefill` and `decode`: λ for sequences of several query rows and of one. `nm`, `recent`, `sink_tokens`: N:M of
    prefill. `tile`: of skip-softmax. `leave_out`: patterns of layer names that stay dense."""

    prefill: Lambda = Lambda()
    decode: Lambda = Lambda()
    nm: tuple[int, int] | None = None
    recent: int = 64
    sink_tokens: int = 0
    tile: tuple[int, int] = (128, 128)
    leave_out: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> AttentionOptions | None:
        """The options in a text; None where it is off. Raises ArgumentError for what is neither `1`, `0` nor JSON of
        skip_lambda (a number, {"a", "b", "target"}, or one of them for "prefill" and "decode"), nm ([n, m]), recent,
        sink_tokens, tile ([query rows, keys]) and leave_out (a list of patterns such as "model.layers.0.*")."""
        if text.strip().lower() in _OFF:
            return None
        if text.strip().lower() in _ON:
            return AttentionOptions()
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ArgumentError(f"{VARIABLE} is {text!r:.80}, expected 1, 0 or JSON: {error}") from None
        if not isinstance(given, dict):
            raise ArgumentError(f"{VARIABLE} is {text!r:.80}, expected 1, 0 or a JSON object")
        names = {"skip_lambda", "nm", "recent", "sink_tokens", "tile", "leave_out"}
        unknown = sorted(given.keys() - names)
        if unknown:
            raise ArgumentError(f"{VARIABLE}: unknown option {unknown[0]!r}, known are {', '.join(sorted(names))}")
        prefill, decode = _lambdas(given.get("skip_lambda", 0.0))
        options = AttentionOptions(
            prefill=prefill,
            decode=decode,
            nm=_pair(given.get("nm"), "nm"),
            recent=_whole(given.get("recent", 64), "recent"),
            sink_tokens=_whole(given.get("sink_tokens", 0), "sink_tokens"),
            tile=_pair(given.get("tile"), "tile") or (128, 128),
            leave_out=_patterns(given.get("leave_out", [])),
        )
        if options.nm is not None and (options.nm[1] not in (4, 8) or not 0 < options.nm[0] < options.nm[1]):
            raise ArgumentError(f"{VARIABLE}: nm is {list(options.nm)}, M must be 4 or 8 and N from 1 to M - 1")
        if max(options.tile) > _MAX_TILE or (options.nm is not None and options.tile[1] % options.nm[1]):
            raise ArgumentError(
                f"{VARIABLE}: tile is {list(options.tile)}, at most {_MAX_TILE} each, the second a multiple of M"
            )
        return options

    @property
    def dense(self) -> bool:
        """Nothing sparse is asked for."""
        return self.nm is None and self.prefill == Lambda() == self.decode

    def leaves_out(self, layer: str) -> bool:
        """Whether a layer stays dense."""
        return any(fnmatch.fnmatchcase(layer, pattern) for pattern in self.leave_out)


def _lambdas(given: Any) -> tuple[Lambda, Lambda]:
    if isinstance(given, dict) and given.keys() & {"prefill", "decode"}:
        unknown = sorted(given.keys() - {"prefill", "decode"})
        if unknown:
            raise ArgumentError(f"{VARIABLE}: skip_lambda has {unknown[0]!r}, expected prefill and decode")
        prefill, decode = (Lambda.parse(given.get(name, 0.0), f"skip_lambda.{name}") for name in ("prefill", "decode"))
        return prefill, decode
    both = Lambda.parse(given, "skip_lambda")
    return both, both


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ArgumentError(f"{VARIABLE}: {what} is {value!r:.80}, expected a number")
    return float(value)


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ArgumentError(f"{VARIABLE}: {what} is {value!r:.80}, expected a whole number from 0 to 2^62")
    return value


def _pair(value: Any, what: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ArgumentError(f"{VARIABLE}: {what} is {value!r:.80}, expected two whole numbers")
    first, second = (_whole(v, what) for v in value)
    if min(first, second) < 1:
        raise ArgumentError(f"{VARIABLE}: {what} is {value!r:.80}, both must be at least 1")
    return first, second


def _patterns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ArgumentError(f"{VARIABLE}: leave_out is {value!r:.80}, expected a list of patterns")
    return tuple(value)
