# SPDX-License-Identifier: Apache-2.0
"""ModelOpt's checkpoint block `sparse_attention_config`: read, checked, and turned into arguments of `kv.attention`.

The block is what `export_sparse_attention_config` of ModelOpt 0.47 writes into a model's config.json; which layer it
means is the rule of `load_from_checkpoint_metadata` and `match_sparse_config` there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvstride import ArgumentError

from ._calibration import skip_lambda

_VERB = "read_config"
_BLOCK = "sparse_attention_config"
_SKIP, _NM = "skip_softmax", "sparse_softmax"
#: Names of algorithms in a group → ours.
_ALGORITHMS = {_SKIP: _SKIP, _NM: _NM, "triton_sparse_softmax": _NM}
_PHASES = ("prefill", "decode")
_FORMULA = "a * exp(b * target_sparsity)"
#: ModelOpt's λ where a skip_softmax group has no calibration (preset SKIP_SOFTMAX_TRITON_DEFAULT).
_STATIC_LAMBDA = 0.1
_DEFAULT_TARGET = 0.5
_DEFAULTS = {"sparsity_n": 2, "sparsity_m": 4, "dense_sink_tokens": 0, "dense_recent_tokens": 64}


@dataclass(frozen=True)
class Group:
    """One `config_groups` entry, checked.

    `algorithm`: `skip_softmax` or `sparse_softmax`. `targets`: class names of modules, for the record: ModelOpt does
    not match by them. `ignore`: modules that stay dense. `calibration`: (a, b) by phase (`prefill`, `decode`), of
    λ = a · exp(b · target) / length; `target`: the sparsity aimed at, by phase. `nm`, `recent`, `sink_tokens` as
    `kv.attention` has them. `initial_disabled_steps`: of diffusion models, which nothing here uses.
    """

    algorithm: str
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    calibration: Mapping[str, tuple[float, float]] | None = None
    target: Mapping[str, float] | None = None
    nm: tuple[int, int] | None = None
    recent: int = 64
    sink_tokens: int = 0
    initial_disabled_steps: int = 0


@dataclass(frozen=True)
class LayerSparsity:
    """What a layer does: `kv.attention(…, **layer.arguments("decode", longest))`.

    Nothing set is a dense layer. `static_lambda`: λ where there is no calibration. `tile`: (query rows, keys), those
    that calibration counts.
    """

    calibration: Mapping[str, tuple[float, float]] | None = None
    target: Mapping[str, float] | None = None
    static_lambda: float | None = None
    nm: tuple[int, int] | None = None
    recent: int = 64
    sink_tokens: int = 0
    tile: tuple[int, int] = (128, 128)

    @property
    def dense(self) -> bool:
        """No sparse method in either phase."""
        return not self.calibration and self.static_lambda is None and self.nm is None

    def skip_lambda(self, phase: str, length: int) -> float | None:
        """λ of a phase (`prefill`, `decode`) for `length` KV tokens, of the batch's longest sequence; None: off."""
        if phase not in _PHASES:
            raise ArgumentError(f"skip_lambda: phase is {phase!r:.40}, expected prefill or decode")
        if not self.calibration:
            return self.static_lambda
        if phase not in self.calibration:
            return None
        a, b = self.calibration[phase]
        return skip_lambda(a, b, (self.target or {}).get(phase, _DEFAULT_TARGET), length)

    def arguments(self, phase: str, length: int) -> dict[str, Any]:
        """Keyword arguments of `kv.attention`; none where the phase is dense. Decode has no N:M."""
        found: dict[str, Any] = {}
        skip = self.skip_lambda(phase, length)
        if skip is not None:
            found |= {"skip_lambda": skip, "tile": self.tile}
        if self.nm is not None and phase == "prefill":
            found |= {"nm": self.nm, "recent": self.recent, "sink_tokens": self.sink_tokens, "tile": self.tile}
        return found


def read_config(config: Any) -> list[Group]:
    """The groups of a `sparse_attention_config`: of the block itself, or of a config.json that has it.

    `config`: a mapping, JSON text, or the path of a config.json (of its directory, too). A configuration without the
    block has no groups. Keys that nothing here uses are passed over; those that are used must be right in type and
    range, and an algorithm or a formula that is not known is refused, since it would mean other attention.

    Raises ArgumentError with the place and the value, FileNotFoundError and other OSErrors for a path.
    """
    block: Any = config if isinstance(config, Mapping) else _load(config)
    if not isinstance(block, Mapping):
        raise ArgumentError(f"{_VERB}: a {type(block).__name__}, expected an object")
    if "config_groups" not in block:
        block = block.get(_BLOCK)
        if block is None:
            return []
    groups = _mapping(_mapping(block, _BLOCK).get("config_groups"), "config_groups")
    override = block.get("sparse_softmax")  # of older exports; ModelOpt lets it win over the group's own
    if override is not None:
        override = _mapping(override, "sparse_softmax")
    return [_group(_mapping(group, name), str(name), override or {}) for name, group in groups.items()]


def for_layer(groups: Sequence[Group], name: str, *, tile: tuple[int, int] = (128, 128)) -> LayerSparsity:
    """What the layer `name` (such as `model.layers.3.self_attn.attn`) does.

    As ModelOpt 0.47's loader: the first skip_softmax group and the first sparse_softmax group count. A name that has a
    pattern of `ignore` in it is dense, any other that has `attn` in it gets the methods, the rest are dense. Where the
    skip_softmax group is not calibrated, N:M replaces it if there is any, else λ is 0.1.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"for_layer: name is {type(name).__name__}, expected text")
    skip = next((g for g in groups if g.algorithm == _SKIP), None)
    nm = next((g for g in groups if g.algorithm == _NM), None)
    if skip is not None and not skip.calibration and nm is not None:
        skip = None
    ignored = skip is not None and any(fnmatchcase(name, f"*{pattern}*") for pattern in skip.ignore)
    if ignored or not fnmatchcase(name, "*attn*"):
        return LayerSparsity(tile=tile)
    found: dict[str, Any] = {"tile": tile}
    if skip is not None and skip.calibration:
        found |= {"calibration": skip.calibration, "target": skip.target}
    elif skip is not None:
        found |= {"static_lambda": _STATIC_LAMBDA}
    if nm is not None:
        found |= {"nm": nm.nm, "recent": nm.recent, "sink_tokens": nm.sink_tokens}
    return LayerSparsity(**found)


def _load(config: Any) -> Any:
    if isinstance(config, str) and config.lstrip()[:1] in ("{", "["):
        text, where = config, "text"
    elif isinstance(config, (str, os.PathLike)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            text, where = path.read_text(encoding="utf-8"), str(path)
        except UnicodeDecodeError as error:
            raise ArgumentError(f"{_VERB}: {path}: no UTF-8 text: {error}") from None
    else:
        raise ArgumentError(f"{_VERB}: config is {type(config).__name__}, expected a mapping, JSON text or a path")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{_VERB}: {where}: no JSON: {error}") from None


def _group(group: Mapping[str, Any], name: str, override: Mapping[str, Any]) -> Group:
    algorithm = group.get("algorithm")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise ArgumentError(f"{_VERB}: {name}: algorithm is {algorithm!r:.60}, known are {', '.join(_ALGORITHMS)}")
    kind = _ALGORITHMS[algorithm]
    found: dict[str, Any] = {
        "targets": _names(group, "targets", name),
        "ignore": _names(group, "ignore", name),
        "initial_disabled_steps": _count(group.get("initial_disabled_steps", 0), f"{name}: initial_disabled_steps"),
    }
    if kind == _SKIP:
        found |= {"calibration": _calibration(group, name), "target": _target(group, name)}
    else:
        sizes = {
            key: _count(override.get(key, group.get(key, default)), f"{name}: {key}")
            for key, default in _DEFAULTS.items()
        }
        n, m = sizes["sparsity_n"], sizes["sparsity_m"]
        if m not in (4, 8) or not 1 <= n < m:
            raise ArgumentError(f"{_VERB}: {name}: sparsity is {n}:{m}, M must be 4 or 8 and N 1 to M - 1")
        found |= {"nm": (n, m), "recent": sizes["dense_recent_tokens"], "sink_tokens": sizes["dense_sink_tokens"]}
    return Group(kind, **found)


def _calibration(group: Mapping[str, Any], name: str) -> dict[str, tuple[float, float]] | None:
    told = group.get("threshold_scale_factor")
    if told is None:
        return None
    where = f"{name}: threshold_scale_factor"
    told = _mapping(told, where)
    formula = told.get("formula", _FORMULA)
    if formula != _FORMULA:
        raise ArgumentError(f"{_VERB}: {where}: formula is {formula!r:.80}, known is {_FORMULA!r}")
    found = {}
    for phase in _PHASES:
        if phase in told:
            pair = _mapping(told[phase], f"{where}: {phase}")
            a, b = (_number(pair.get(key), f"{where}: {phase}: {key}") for key in ("a", "b"))
            if a < 0:
                raise ArgumentError(f"{_VERB}: {where}: {phase}: a is {a:g}, below 0")
            found[phase] = (a, b)
    return found or None


def _target(group: Mapping[str, Any], name: str) -> dict[str, float]:
    told = group.get("target_sparsity", {})
    if not isinstance(told, Mapping):
        told = dict.fromkeys(_PHASES, told)
    found = {}
    for phase in _PHASES:
        found[phase] = _number(told.get(phase, _DEFAULT_TARGET), f"{name}: target_sparsity: {phase}")
        if not 0 <= found[phase] <= 1:
            raise ArgumentError(f"{_VERB}: {name}: target_sparsity: {phase} is {found[phase]:g}, must be 0 to 1")
    return found


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{_VERB}: {where} is {value!r:.60}, expected an object")
    return value


def _names(group: Mapping[str, Any], key: str, name: str) -> tuple[str, ...]:
    value = group.get(key, [])
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) and v for v in value):
        raise ArgumentError(f"{_VERB}: {name}: {key} is {value!r:.60}, expected a list of names")
    return tuple(value)


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ArgumentError(f"{_VERB}: {where} is {value!r:.60}, expected a whole number from 0 on")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(value):
                return float(value)
    raise ArgumentError(f"{_VERB}: {where} is {value!r:.60}, expected a finite number")
