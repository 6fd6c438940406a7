# SPDX-License-Identifier: Apache-2.0
"""Ask a backend class of the installed vLLM how it lays its KV cache out."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstride import EngineError, LayoutError, UnknownLayout

from . import engine
from .axes import PROBE_LAYERS, PROBE_SIZES
from .families import FAMILIES, UNDESCRIBED, Interior
from .naming import Named, name_layout

#: vLLM's layouts from 0.29 on, and its two before.
SIX = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
TWO = ("NHD", "HND")

#: Sizes of a probe of an MLA class: one head, latent 512 and rope 64.
_MLA_SIZES = {**PROBE_SIZES, "num_kv_heads": 1, "head_size": 576}
_TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Backend:
    """One attention backend of the installed vLLM: what it is called, and its layouts or why it has none here.

    `layouts` maps vLLM's layout name to a `Named` or, where kvstride refuses it, to the reason. `error` says why the
    class could not be loaded (a backend of another machine), `known` whether kvstride's table has the class at all.
    """

    name: str
    path: str
    layouts: Mapping[str, Named | str]
    error: str | None = None
    known: bool = True


def layout_of_backend(
    backend_class: type | enum.Enum | str,
    *,
    num_blocks: int | None = None,
    block_size: int | None = None,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
    value_head_size: int | None = None,
    num_layers: int | None = None,
    dtype: str = "bf16",
    cache_dtype: str = "auto",
    layout: str | None = None,
    isa: str | None = None,
) -> Named:
    """The layout that a backend class of the installed vLLM gives its KV cache, by asking the class.

    To 0.28 the class answers `get_kv_cache_shape` and `get_kv_cache_stride_order`; from 0.29 on its
    `supported_kv_cache_layouts`, its `customize_spec` and the engine's own strides for them. It is always asked with
    sizes that cannot be confused (7 blocks, 640 tokens, 11 heads of 128, 17 layers), which tells the axes, and then
    with the sizes given; sizes not given are the probe's. Nothing is cached. `num_layers`: layers that share the
    allocation, from 0.29 on.

    `backend_class`: a class, a member of vLLM's enumeration or a name such as `FLASH_ATTN`. `dtype`: of the model
    (`bf16`, `f16`, `f32`); `cache_dtype`: vLLM's word. `layout`: `NHD`/`HND` to 0.28, `LBHNC` … from 0.29; None: what
    the engine would take without a wish. `isa`: of the CPU backend; None: asked of the engine (`_get_attn_isa`).

    Raises UnknownLayout for a class, variant or ISA whose bytes are not known and for a class that is not vLLM's own,
    EngineError where vLLM is absent, of an unknown release, or cannot answer.
    """
    found = engine.resolve(backend_class)
    here = engine.release()
    if not engine.belongs(found):
        raise UnknownLayout(f"{found.__module__}.{found.__name__} is not a class of vLLM: its interior is not known")
    mla = _is_mla(found)
    default = _MLA_SIZES if mla else PROBE_SIZES
    probe = dict(default)
    args = {
        "num_blocks": num_blocks or default["num_blocks"],
        "block_size": block_size or default["block_size"],
        "num_kv_heads": num_kv_heads or default["num_kv_heads"],
        "head_size": head_size or default["head_size"],
    }
    if value_head_size and value_head_size != args["head_size"]:
        args["value_head_size"] = value_head_size
        probe["value_head_size"] = 192
    if engine.by_enum():
        facts = _by_enum(found, args, probe, num_layers or PROBE_LAYERS, dtype, cache_dtype, layout)
    else:
        facts = _by_shape(found, args, probe, dtype, cache_dtype, layout)
    facts |= {"from": here, "backend": engine.writer_of(found).__name__, "cache_dtype": cache_dtype, "args": args}
    facts |= {"platform": engine.platform(), "variant": variant_of(found)}
    family = FAMILIES.get(found.__name__)
    if family is not None and family.interior is Interior.CPU_TILE:
        facts["isa"] = isa or isa_of(found, dtype, args["block_size"], args["head_size"], cache_dtype)
    return name_layout(facts)


def backends() -> list[Backend]:
    """Every attention backend of the installed vLLM with each of its layouts, probed. Raises EngineError where there is
    no vLLM or its release is unknown; a backend that cannot be loaded on this machine is listed with the reason."""
    listed = []
    for name, path in engine.backend_paths().items():
        known = path.rpartition(".")[2] in FAMILIES or path.rpartition(".")[2] in UNDESCRIBED
        try:
            found = engine.load(path)
        except EngineError as error:
            listed.append(Backend(name, path, {}, str(error), known))
            continue
        layouts: dict[str, Named | str] = {}
        for letters in layouts_of(found):
            try:
                layouts[letters] = layout_of_backend(found, layout=letters)
            except (LayoutError, EngineError) as error:
                layouts[letters] = str(error)
        listed.append(Backend(name, path, layouts, None, known))
    return listed


def layouts_of(backend_class: type) -> tuple[str, ...]:
    """vLLM's names of the layouts that a class can have: what it supports from 0.29 on, NHD and HND before."""
    if not engine.by_enum():
        return TWO
    supported = backend_class.supported_kv_cache_layouts()  # type: ignore[attr-defined]
    return SIX if supported is None else tuple(member.name for member in supported)


def variant_of(backend_class: type, impl: Any = None) -> str | None:
    """The run-time switch that changes the class's bytes, as the engine has it now; None where there is none.

    AITER's shuffle (0.9.2 and newer), and whether Triton and ROCm attention write x-split or flash-wise (to 0.11.0).
    `impl`: the layer's implementation object, of a running engine.
    """
    family = FAMILIES.get(backend_class.__name__)
    offered = family.variants if family else {}
    if "x_split" in offered:
        return _split_variant(backend_class, impl)
    if "rocm_shuffle" not in offered and "aiter_sparse_pa" not in offered:
        return None
    try:
        aiter = engine.find("vllm._aiter_ops:rocm_aiter_ops")
    except EngineError:
        return None
    asked = getattr(aiter, "is_shuffle_kv_cache_enabled", None)
    if asked is None or not asked():
        return None
    return "rocm_shuffle" if "rocm_shuffle" in offered else "aiter_sparse_pa"


def _split_variant(backend_class: type, impl: Any) -> str | None:
    """What `VLLM_V1_USE_PREFILL_DECODE_ATTENTION` does to a class whose implementation reads it (Triton 0.9.0 to
    0.10.2, ROCm 0.11.0); x-split for one that knows no other way (Triton 0.8.5)."""
    forced = getattr(impl, "force_prefill_decode_attn", None)
    if forced is None:
        made = backend_class.get_impl_cls()  # type: ignore[attr-defined]
        if "force_prefill_decode_attn" in made.__init__.__code__.co_names:
            forced = getattr(engine.find("vllm:envs"), "VLLM_V1_USE_PREFILL_DECODE_ATTENTION", None)
        elif "split_kv_cache" in (names := made.forward.__code__.co_names):
            forced = True if "unbind" not in names else None
    return None if forced is None else "x_split" if forced else "flash"


def isa_of(backend_class: type, dtype: str, block_size: int, head_size: int, cache_dtype: str) -> str:
    """The ISA that the engine's own `_get_attn_isa` picks on this machine (0.11.1 and newer)."""
    pick = getattr(sys.modules[backend_class.__module__], "_get_attn_isa", None)
    if pick is None:
        raise EngineError(f"vLLM {engine.release()}: {backend_class.__module__} has no _get_attn_isa")
    given = {
        "dtype": _torch_dtype(dtype),
        "block_size": block_size,
        "head_size": head_size,
        "kv_cache_dtype": cache_dtype,
    }
    accepted = inspect.signature(pick).parameters
    try:
        return str(pick(**{k: v for k, v in given.items() if k in accepted}))
    except Exception as error:
        raise EngineError(f"vLLM {engine.release()}, _get_attn_isa: {type(error).__name__}: {error}") from error


def declared_shape(backend_class: type, args: Mapping[str, int], cache_dtype: str) -> tuple[int, ...]:
    """What `get_kv_cache_shape` of a class (to 0.28) says for these sizes."""
    ask = getattr(backend_class, "get_kv_cache_shape", None)
    if ask is None:
        raise EngineError(f"{backend_class.__name__} has no get_kv_cache_shape")
    extra = {}
    accepted = inspect.signature(ask).parameters
    if "cache_dtype_str" in accepted:
        extra["cache_dtype_str"] = cache_dtype
    sizes = (args["num_blocks"], args["block_size"], args["num_kv_heads"], args["head_size"])
    # DiffKV classes take V's head size from a class attribute, which a running engine may have set: put it back.
    asymmetric = hasattr(backend_class, "head_size_v")
    before = getattr(backend_class, "head_size_v", None)
    try:
        if asymmetric:
            backend_class.head_size_v = args.get("value_head_size", args["head_size"])  # type: ignore[attr-defined]
        return tuple(ask(*sizes, **extra))
    except Exception as error:
        raise EngineError(
            f"{backend_class.__name__}.get_kv_cache_shape{sizes}: {type(error).__name__}: {error}"
        ) from error
    finally:
        if asymmetric:
            backend_class.head_size_v = before  # type: ignore[attr-defined]


def _by_shape(
    found: type, args: Mapping[str, int], probe: Mapping[str, int], dtype: str, cache_dtype: str, layout: str | None
) -> dict[str, Any]:
    """The facts of a class to 0.28: shape and stride order."""
    if layout is not None and layout not in TWO:
        raise LayoutError(f"layout {layout!r}: vLLM {engine.release()} has {' and '.join(TWO)}")
    required = getattr(found, "get_required_kv_cache_layout", None)
    wish = layout or (required() if required else None)
    with engine.layout_setting(wish):
        order = _stride_order(found)
    return {
        "logical_shape": declared_shape(found, args, cache_dtype),
        "probe": {"args": dict(probe), "logical_shape": declared_shape(found, probe, cache_dtype)},
        "stride_order": order,
        "layout": wish,
        "dtype": _element(dtype, cache_dtype),
    }


def _stride_order(found: type) -> tuple[int, ...] | None:
    """The class's stride order under the engine's setting; None where it has none, as the engine's runner takes it."""
    ask = getattr(found, "get_kv_cache_stride_order", None)
    if ask is None:
        return None
    try:
        return tuple(ask())
    except NotImplementedError:
        return None
    except Exception:
        # Outside an engine the setting's default wants a configuration; that default is NHD.
        try:
            with engine.layout_setting("NHD"):
                return tuple(ask())
        except Exception as error:
            name = f"{found.__name__}.get_kv_cache_stride_order"
            raise EngineError(f"{name}: {type(error).__name__}: {error}") from error


def _by_enum(
    found: type,
    args: Mapping[str, int],
    probe: Mapping[str, int],
    num_layers: int,
    dtype: str,
    cache_dtype: str,
    layout: str | None,
) -> dict[str, Any]:
    """The facts of a class from 0.29 on: its spec, the layout and the engine's strides for them."""
    offered = layouts_of(found)
    letters = layout or ("LBNHC" if offered == SIX else offered[0])
    letters = {"NHD": "LBNHC", "HND": "LBHNC"}.get(letters, letters)
    if letters not in offered:
        raise LayoutError(f"layout {letters!r}: {found.__name__} offers {', '.join(offered)}")
    chosen = engine.find("vllm.v1.kv_cache_layout:KVCacheLayout", "vllm.v1.kv_cache_interface:KVCacheLayout")[letters]
    shape, strides, item = _view(found, args, num_layers, chosen, dtype, cache_dtype)
    probed, _, _ = _view(found, probe, num_layers, chosen, dtype, cache_dtype)
    return {
        "logical_shape": shape,
        "probe": {"args": dict(probe), "logical_shape": probed},
        "view_stride_bytes": strides,
        "stride_order_LBHNC": tuple(chosen.value),
        "layout": letters,
        "dtype": item,
    }


def _view(
    found: type, args: Mapping[str, int], num_layers: int, layout: Any, dtype: str, cache_dtype: str
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Shape, byte strides and element dtype of one layer's view `[B, H, N, C]`."""
    shape_of = engine.find("vllm.v1.kv_cache_interface:compute_layer_kv_cache_shape_bytes")
    strides_of = engine.find("vllm.v1.kv_cache_interface:compute_layout_strides")
    spec = _spec(found, args, dtype, cache_dtype)
    blocks = args["num_blocks"]
    shape = tuple(shape_of(spec, blocks))
    strides = tuple(strides_of(spec, blocks, num_layers, layout))[1:]
    element = getattr(spec, "dtype", None) or _torch_dtype("int8")
    item = element.itemsize
    if shape[3] % item:
        raise LayoutError(f"content of {shape[3]} bytes is no whole number of {element}")
    return (*shape[:3], shape[3] // item), (*strides[:3], item), str(element)


def _spec(found: type, args: Mapping[str, int], dtype: str, cache_dtype: str) -> Any:
    """The spec that a layer with these sizes has under the class (its own where models publish their own)."""
    family = FAMILIES.get(found.__name__)
    if family is not None and family.interior is Interior.STATE:
        state = engine.find("vllm.v1.kv_cache_interface:MambaSpec")
        shapes = ((args["num_kv_heads"], args["head_size"]),)
        return state(block_size=args["block_size"], shapes=shapes, dtypes=(_torch_dtype(dtype),))
    mla = _is_mla(found)
    make = engine.find(f"vllm.v1.kv_cache_interface:{'MLAAttentionSpec' if mla else 'FullAttentionSpec'}")
    quant = engine.find("vllm.v1.kv_cache_interface:get_kv_quant_mode")
    given: dict[str, Any] = {
        "block_size": args["block_size"],
        "num_kv_heads": args["num_kv_heads"],
        "head_size": args["head_size"],
        "dtype": cache_torch_dtype(dtype, cache_dtype),
        "kv_quant_mode": quant(cache_dtype),
    }
    if mla:
        given["cache_dtype_str"] = cache_dtype
        if cache_dtype == "fp8_ds_mla":
            given["state_content_bytes"] = 656
    elif "value_head_size" in args:
        given["head_size_v"] = args["value_head_size"]
    fields = {f.name for f in dataclasses.fields(make)}
    try:
        return found.customize_spec(make(**{k: v for k, v in given.items() if k in fields}))  # type: ignore[attr-defined]
    except Exception as error:
        raise EngineError(f"{found.__name__}.customize_spec: {type(error).__name__}: {error}") from error


def _is_mla(found: type) -> bool:
    ask = getattr(found, "is_mla", None)
    if ask is not None:
        return bool(ask())
    family = FAMILIES.get(found.__name__)
    return family is not None and family.interior is Interior.MLA


def _torch_dtype(dtype: str) -> Any:
    name = _TORCH_NAMES.get(dtype, dtype.removeprefix("torch."))
    return getattr(importlib.import_module("torch"), name)


def cache_torch_dtype(dtype: str, cache_dtype: str) -> Any:
    """The torch dtype that the engine keeps a cache of this dtype in."""
    if cache_dtype == "auto":
        return _torch_dtype(dtype)
    table = engine.find("vllm.utils.torch_utils:STR_DTYPE_TO_TORCH_DTYPE", "vllm.utils:STR_DTYPE_TO_TORCH_DTYPE")
    if cache_dtype not in table:
        raise LayoutError(f"cache dtype {cache_dtype!r}: vLLM {engine.release()} has {', '.join(table)}")
    return table[cache_dtype]


def _element(dtype: str, cache_dtype: str) -> str:
    return str(cache_torch_dtype(dtype, cache_dtype))
