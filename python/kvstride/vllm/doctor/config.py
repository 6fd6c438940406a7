# SPDX-License-Identifier: Apache-2.0
"""Reads a configuration in the forms in which users have it, and checks its options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstride import ArgumentError, Error

from ..offload.options import TierOptions, faults, our_tiers, readable, tier_options, with_tier
from .finding import Finding, Setup, fail, ok, size_text, warn

_MOST = 1 << 20
_WHERE = "kv_connector_extra_config"
#: What makes an object the tier's, or kv_connector_extra_config.
_EXTRA = ("spec_name", "secondary_tiers", "cpu_bytes_to_use", "root_dir", "max_bytes")


def load(given: str) -> dict[str, Any]:
    """The JSON object that `given` is, or that is in the file of that name. Raises ArgumentError."""
    text, where = given, "--config"
    if not given.lstrip().startswith(("{", "[")):
        where = f"--config {given}"
        try:
            with Path(given).open("rb") as file:
                data = file.read(_MOST + 1)
            text = data.decode()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise ArgumentError(f"{where}: cannot be read: {why}") from error
        if len(data) > _MOST:
            raise ArgumentError(f"{where}: larger than {_MOST} bytes, this is no configuration")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "" if where != "--config" else " (is it in single quotes, so that the shell leaves it alone?)"
        raise ArgumentError(f"{where}: no JSON: {error}{hint}") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"{where}: {type(found).__name__} is no configuration, expected a JSON object")
    return found


def understand(given: Mapping[str, Any]) -> Setup:
    """Which part of a configuration it is: --kv-transfer-config, its kv_connector_extra_config, or one of
    `secondary_tiers`. Raises ArgumentError where it is none of them."""
    if "kv_connector" in given or "kv_connector_extra_config" in given:
        transfer = _offloading(given)
        extra = _object(transfer.get("kv_connector_extra_config") or {}, "kv_connector_extra_config")
        return _setup(transfer, extra)
    if given.get("type") == "kvstride":
        tier = tier_options(given)
        return Setup(None, None, tier, _usable(tier))
    if any(name in given for name in _EXTRA):
        return _setup(None, dict(given))
    raise ArgumentError(
        "--config: neither the object of --kv-transfer-config (kv_connector, …), nor its kv_connector_extra_config "
        f'(spec_name, root_dir, …), nor a tier ("type": "kvstride"): its names are {", ".join(sorted(given)) or "none"}'
    )


def _offloading(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a MultiConnector the part that offloads."""
    extra = given.get("kv_connector_extra_config")
    if given.get("kv_connector") == "MultiConnector" and isinstance(extra, dict):
        for one in extra.get("connectors") or []:
            if isinstance(one, dict) and one.get("kv_connector") == "OffloadingConnector":
                return one
    return dict(given)


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentError(f"--config: {what} is {value!r:.80}, expected an object")
    return value


def _setup(transfer: dict[str, Any] | None, extra: dict[str, Any]) -> Setup:
    try:
        ours = our_tiers(extra)
    except ArgumentError:  # `check_options` says so
        ours = []
    beside = {name: value for name, value in extra.items() if name in TierOptions.__dataclass_fields__}
    tier = ours[0] if ours and not beside else beside
    return Setup(transfer, extra, tier, _usable(tier))


def _usable(tier: Mapping[str, Any]) -> TierOptions | None:
    """What the other checks can go by; `check_options` says what is wrong with the rest."""
    good = readable(tier)
    if "root_dir" not in good:
        return None
    return TierOptions(**{"max_bytes": 0, **good})


def check_options(setup: Setup) -> Finding:
    """Every option is known and can be; the same rules as at start."""
    wrong = [] if setup.transfer is None else _transfer_faults(setup.transfer)
    # A tier that was given alone is one of no spec's.
    spec = None if setup.extra is None else setup.extra.get("spec_name") or "CPUOffloadingSpec"
    tiers = [setup.tier]
    if setup.extra is not None:
        try:
            tiers = _tiers(setup.extra, str(spec))
        except Error as error:
            wrong.append(str(error))
    for tier in tiers:
        wrong += faults(tier, _WHERE if wrong else "tier 'kvstride'")
    wrong = list(dict.fromkeys(wrong))
    if wrong:
        return fail(wrong[0], details=tuple(wrong[1:]))
    if not tiers:
        return warn("spec kvstride without a tier of type kvstride", "kvstride keeps nothing over a restart")
    if len(tiers) > 1:
        return warn(f"{len(tiers)} tiers of type kvstride", "only the first is checked here")
    first = TierOptions.parse(tiers[0], _WHERE)
    if spec != "kvstride" and first.revision is None:
        return fail(
            "the tier alone is not told which weights and settings these are",
            'give it "revision", a text that is another one whenever they are others, or use "spec_name": "kvstride"',
        )
    text = f"directory {first.root_dir}, limit {size_text(first.max_bytes)}"
    if (setup.extra or {}).get("canonical_layout") is False:
        advice = "no other tensor-parallel size will read what is stored; leave it out"
        return warn(f"{text}, canonical_layout off", advice)
    return ok(f"{'spec kvstride' if spec == 'kvstride' else 'tier kvstride alone'}, {text}")


def _transfer_faults(transfer: Mapping[str, Any]) -> list[str]:
    connector, role = transfer.get("kv_connector"), transfer.get("kv_role")
    found = []
    if connector != "OffloadingConnector":
        found.append(f"kv_connector is {connector!r}, expected 'OffloadingConnector'")
    if role not in ("kv_both", "kv_producer", "kv_consumer"):
        found.append(f"kv_role is {role!r}, expected 'kv_both'")
    return found


def _tiers(extra: Mapping[str, Any], spec: str) -> list[dict[str, Any]]:
    """Options of kvstride's tiers. Raises ArgumentError."""
    if spec == "kvstride":
        return our_tiers(with_tier(extra))
    ours = our_tiers(extra)
    if not ours:
        raise ArgumentError(
            f"spec_name is {spec!r} and no secondary tier is of type 'kvstride': kvstride is not used; "
            'set "spec_name" to "kvstride"'
        )
    if spec == "CPUOffloadingSpec":
        raise ArgumentError(
            f"spec_name is {extra.get('spec_name')!r}, which has no secondary tiers: set it to 'kvstride'"
        )
    return ours
