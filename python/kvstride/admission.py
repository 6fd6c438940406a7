# SPDX-License-Identifier: Apache-2.0
"""What a tier takes, and how long it keeps it (docs/store.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import _core
from ._args import to_size
from .errors import ArgumentError

_MOST = 2**60
_MOST_TENANT: int = 256


@dataclass(frozen=True)
class Admission:
    """What a tier takes and how long it keeps it; without arguments everything, until it is evicted.

    `min_reuse`: a chunk is taken when it has been asked for so many times recently (1 to 15), the request that brings
    it included; `reuse_window`: an ask counts for so many more asks of the tier, at most for twice as many.
    `write_bytes_per_day`: so many may be written, None for no limit; `write_burst` of them at once after a pause (None:
    an hour's share). `ttl`: seconds after which a chunk is no longer found. `tenant_bytes`: what a tenant may hold,
    each for itself, requests without a tenant included; `bytes_of_tenant`: other limits for some, 0 for nothing at all.
    Byte counts may be floats such as 2e12. Raises ArgumentError that names the argument, its value and its limit.
    """

    min_reuse: int = 1
    reuse_window: int = 1 << 20
    write_bytes_per_day: int | float | None = None
    write_burst: int | float | None = None
    ttl: float | None = None
    tenant_bytes: int | float | None = None
    bytes_of_tenant: Mapping[str, int | float] | None = None

    def __post_init__(self) -> None:
        _whole(self.min_reuse, "min_reuse", 1, 15)
        _whole(self.reuse_window, "reuse_window", 1, 2**30)
        for name in ("write_bytes_per_day", "write_burst", "tenant_bytes"):
            if getattr(self, name) is not None:
                _whole(getattr(self, name), name, 1, _MOST)
        if self.write_burst is not None and self.write_bytes_per_day is None:
            raise ArgumentError("Admission: write_burst needs write_bytes_per_day")
        ttl = self.ttl
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl <= 1e9):
            raise ArgumentError(f"Admission: ttl is {ttl!r}, expected seconds above 0, at most 1e9")
        of_tenant = {} if self.bytes_of_tenant is None else self.bytes_of_tenant
        if not isinstance(of_tenant, Mapping):
            raise ArgumentError(
                f"Admission: bytes_of_tenant is {type(of_tenant).__name__}, expected a mapping from tenant to bytes"
            )
        for tenant, size in of_tenant.items():
            to_tenant(tenant, "Admission: bytes_of_tenant: tenant")
            _whole(size, f"bytes_of_tenant[{tenant!r:.80}]", 0, _MOST)

    def _to_core(self) -> _core.Admission:
        """As the library has it. Nanoseconds below 1 are 1."""
        return _core.Admission(
            int(self.min_reuse),
            int(self.reuse_window),
            int(self.write_bytes_per_day or 0),
            int(self.write_burst or 0),
            0 if self.ttl is None else max(int(self.ttl * 1e9), 1),
            int(self.tenant_bytes or 0),
            {tenant: int(size) for tenant, size in (self.bytes_of_tenant or {}).items()},
        )


def to_core(admission: Any, what: str) -> _core.Admission:
    """Of a tier's argument; None takes everything. Raises ArgumentError for what is no Admission."""
    if admission is None:
        return Admission()._to_core()
    if not isinstance(admission, Admission):
        raise ArgumentError(f"{what} is {type(admission).__name__}, expected an Admission")
    return admission._to_core()


def to_tenant(value: Any, what: str) -> str:
    """A tenant's name: text of at most 256 bytes; None is the nameless one. Raises ArgumentError."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ArgumentError(f"{what} is {type(value).__name__}, expected a str")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} is not UTF-8") from None
    if size > _MOST_TENANT:
        raise ArgumentError(f"{what} has {size} bytes, at most {_MOST_TENANT} are allowed")
    return value


def _whole(value: Any, name: str, least: int, most: int) -> None:
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    size = to_size(whole, f"Admission: {name}")
    if not least <= size <= most:
        raise ArgumentError(f"Admission: {name} is {size}, it must be from {least} to {most}")
