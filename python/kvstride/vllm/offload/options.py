# SPDX-License-Identifier: Apache-2.0
"""Options of `kv_connector_extra_config`, checked at start."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import kvstride as kv
from kvstride import ArgumentError

#: Options of vLLM's own connector, specs and tiers (0.30 to 0.33): what we do not read ourselves.
VLLM_OPTIONS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "cpu_bytes_to_use",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "canonical_layout",
        "eviction_policy",
        "cache_policy_module_path",
        "store_threshold",
        "max_tracker_size",
        "secondary_tiers",
        "backpressure",
        "tier_poll_interval_s",
        "sync_load_budget_bytes",
    }
)

#: Options of the spec itself. `cuda_worker`: who moves blocks on a CUDA host, 'vllm' or 'kvstride', whose worker nobody
#: has run on a GPU yet.
SPEC_OPTIONS = frozenset({"cuda_worker"})

#: Block hashes that no two prompts share.
HASHES = frozenset({"sha256", "sha256_cbor", "sha256_cbor_64bit"})


@dataclass(frozen=True)
class TierOptions:
    """Options of the tier, in `secondary_tiers` or beside `spec_name`.

    `root_dir` and `max_bytes` are required. `keep_free`: bytes that stay free on the file system (1 GiB, at most 5 %).
    `deadline`: seconds that a load or a store may take. `sync`: fdatasync before a file gets its name. `group`: files
    that other users of the group share. `engine`: 'auto', 'io_uring' or 'blocking'. `num_threads`: of I/O, 0 for the
    engine's own choice. `revision`: a commit or a fingerprint of the weights, where it cannot be found out.
    `lora_names_are_fixed`: an adapter's name never means other weights (vLLM's block hash knows the name only).
    `remote`: the URL of an engine that several machines share, below the directory (docs/remote.md); `remote_timeout`:
    seconds that one attempt there may take, `remote_lookup_timeout`: that a question may.
    `admission`, `remote_admission`: what the directory and the remote engine take, as objects with the arguments of
    `kv.Admission`. Without tenants, whom vLLM does not name to a tier; `ttl` for the directory only.
    `enable_kv_events`: tell routers what is stored and removed. `locality`: what requests and routers are told of the
    directory, 'LOCAL' or 'REMOTE'.
    """

    root_dir: str
    max_bytes: int
    keep_free: int | None = None
    deadline: float = 10.0
    sync: bool = False
    group: bool = False
    engine: str = "auto"
    num_threads: int = 0
    revision: str | None = None
    lora_names_are_fixed: bool = False
    enable_kv_events: bool = False
    locality: str | None = None
    remote: str | None = None
    remote_timeout: float = 5.0
    remote_lookup_timeout: float = 1.0
    admission: kv.Admission | None = None
    remote_admission: kv.Admission | None = None

    def directory(self, path: str | None = None) -> kv.DirectoryTier:
        """The store's tier with these options, in `root_dir` or at another path; ready for I/O. Raises StoreError."""
        return kv.DirectoryTier(
            path or self.root_dir,
            self.max_bytes,
            keep_free=self.keep_free,
            sync=self.sync,
            group=self.group,
            engine=self.engine,
            num_threads=self.num_threads,
            prepare=True,
            admission=self.admission,
        )

    def taking_everything(self) -> TierOptions:
        """The same without admission, for trials."""
        return replace(self, admission=None, remote_admission=None)

    def shared(self) -> kv.RemoteTier | None:
        """The remote tier, if there is to be one; it connects with the first request. Raises ArgumentError."""
        if self.remote is None:
            return None
        return kv.RemoteTier(
            self.remote,
            timeout=self.remote_timeout,
            lookup_timeout=self.remote_lookup_timeout,
            admission=self.remote_admission,
        )

    @staticmethod
    def parse(given: Mapping[str, Any], where: str) -> TierOptions:
        """Raises ArgumentError that names the option, its value and what it must be."""
        for fault in faults(given, where):
            raise ArgumentError(fault)
        return TierOptions(**readable(given))


def faults(given: Mapping[str, Any], where: str) -> list[str]:
    """What is wrong with a tier's options, a line each."""
    known = [f.name for f in fields(TierOptions)]
    found = [f"{where}: unknown option {name!r}{_instead(name, known)}" for name in given if name not in known]
    found += [f"{where}: {name} is missing" for name in ("root_dir", "max_bytes") if given.get(name) is None]
    for name, value in given.items():
        if name in known and value is not None:
            try:
                _READ[name](value, f"{where}: {name}")
            except ArgumentError as error:
                found.append(str(error))
    return found


def readable(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a tier's options those that are known and can be, parsed."""
    found = {}
    for name, value in given.items():
        with contextlib.suppress(ArgumentError, KeyError):
            if value is not None:
                found[name] = _READ[name](value, name)
    return found


def split_options(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The options beside `spec_name` that are the tier's. Raises ArgumentError for one that nobody knows."""
    ours = {f.name for f in fields(TierOptions)}
    for name in extra:
        if name not in ours | SPEC_OPTIONS | VLLM_OPTIONS:
            raise ArgumentError(
                "kv_connector_extra_config: unknown option "
                f"{name!r}{_instead(name, ours | SPEC_OPTIONS | VLLM_OPTIONS)}"
            )
    return {name: value for name, value in extra.items() if name in ours}


def with_tier(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with our tier among the secondary ones, and canonical rows unless told otherwise.

    Where `secondary_tiers` is given and no option of ours beside it, it is taken as it is: others' tiers, or none.
    Raises ArgumentError for what cannot be.
    """
    own = split_options(extra)
    tiers = tiers_of(extra)
    if own or extra.get("secondary_tiers") is None:
        TierOptions.parse(own, "kv_connector_extra_config")  # where nothing is given it says what is missing
        tiers.append({"type": "kvstride", **own})
    cpu_bytes = extra.get("cpu_bytes_to_use")
    number = isinstance(cpu_bytes, (int, float)) and not isinstance(cpu_bytes, bool)
    if not number or not 0 < cpu_bytes < 2**62:  # type: ignore[operator]
        raise ArgumentError(f"kv_connector_extra_config: cpu_bytes_to_use is {cpu_bytes!r}, expected bytes above 0")
    cuda_worker(extra)
    rest = {name: value for name, value in extra.items() if name not in own}
    return {"canonical_layout": True, **rest, "secondary_tiers": tiers}


def cuda_worker(extra: Mapping[str, Any]) -> str:
    """Whose worker moves blocks on a CUDA host. Raises ArgumentError for an unknown one."""
    value = extra.get("cuda_worker", "vllm")
    if value not in ("vllm", "kvstride"):
        raise ArgumentError(f"kv_connector_extra_config: cuda_worker is {value!r}, expected 'vllm' or 'kvstride'")
    return str(value)


def tiers_of(extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A copy of `secondary_tiers`. Raises ArgumentError where that is no list of objects."""
    tiers = extra.get("secondary_tiers") or []
    if not isinstance(tiers, list) or any(not isinstance(t, dict) for t in tiers):
        raise ArgumentError("kv_connector_extra_config: secondary_tiers must be a list of tier configurations")
    return list(tiers)


def our_tiers(extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Options of our tiers among the secondary ones; more than one is unusual. Raises ArgumentError as `tiers_of`."""
    return [tier_options(t) for t in tiers_of(extra) if t.get("type") == "kvstride"]


def tier_options(configured: Mapping[str, Any]) -> dict[str, Any]:
    """Of one of `secondary_tiers` what vLLM gives to the tier."""
    return {name: value for name, value in configured.items() if name != "type"}


def _instead(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{what} is {value!r}, expected text")
    return value


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{what} is {value!r}, expected true or false")
    return value


def _whole(value: Any, what: str) -> int:
    # JSON has 2e11 for a byte count.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1 or not 0 <= value < 2**62:
        raise ArgumentError(f"{what} is {value!r}, expected a whole number from 0 to 2^62")
    return int(value)


def _seconds(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 3600:
        raise ArgumentError(f"{what} is {value!r}, expected seconds above 0, at most 3600")
    return float(value)


def _engine(value: Any, what: str) -> str:
    if value not in ("auto", "io_uring", "blocking"):
        raise ArgumentError(f"{what} is {value!r}, expected 'auto', 'io_uring' or 'blocking'")
    return str(value)


def _locality(value: Any, what: str) -> str:
    if value not in ("LOCAL", "REMOTE"):
        raise ArgumentError(f"{what} is {value!r}, expected 'LOCAL' or 'REMOTE'")
    return str(value)


def _admission(value: Any, what: str, known: tuple[str, ...]) -> kv.Admission:
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{what} is {value!r}, expected an object such as {{'min_reuse': 2}}")
    for name in value:
        if name not in known:
            raise ArgumentError(f"{what}: unknown option {name!r}{_instead(name, known)}")
    try:
        return kv.Admission(**value)
    except kv.Error as error:
        raise ArgumentError(f"{what}: {str(error).removeprefix('Admission: ')}") from None


#: Of kv.Admission what a configuration of vLLM can say: its tiers are not told whose a request is.
_ADMISSION = ("min_reuse", "reuse_window", "write_bytes_per_day", "write_burst", "ttl")

_READ: dict[str, Callable[[Any, str], Any]] = {
    "root_dir": _text,
    "max_bytes": _whole,
    "keep_free": _whole,
    "deadline": _seconds,
    "sync": _flag,
    "group": _flag,
    "engine": _engine,
    "num_threads": _whole,
    "revision": _text,
    "lora_names_are_fixed": _flag,
    "enable_kv_events": _flag,
    "locality": _locality,
    "remote": _text,
    "remote_timeout": _seconds,
    "remote_lookup_timeout": _seconds,
    "admission": lambda value, what: _admission(value, what, _ADMISSION),
    # What is there expires as the engine likes.
    "remote_admission": lambda value, what: _admission(value, what, _ADMISSION[:-1]),
}
