# SPDX-License-Identifier: Apache-2.0
"""Name the KV tensors that a running vLLM has registered, from its live objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import kvstride
from kvstride import ArgumentError, EngineError, UnknownLayout

from . import engine, probe
from .axes import PROBE_SIZES
from .families import FAMILIES, Interior
from .naming import Named, name_layout

#: From an engine, an executor or a worker to the model runner: attributes tried in turn (0.8.5 to 0.32.0).
_TO_RUNNER = ("llm_engine", "engine_core", "model_executor", "driver_worker", "worker", "model_runner")


@dataclass(frozen=True)
class EngineCache:
    """Layers of a running engine whose tensors have one layout and whose blocks have the same ids.

    `named`: the layout of one layer's tensor. `tensors`: the engine's own memory, one a layer, in the order of
    `layer_names`. A block id of the scheduler is `kernel_blocks` consecutive blocks of these tensors (1 unless the
    attention kernel wants smaller blocks, vLLM 0.11.1 and newer). `group`: the engine's KV cache group; different
    groups may share memory, each with block ids of its own.
    """

    layer_names: tuple[str, ...]
    named: Named
    tensors: tuple[Any, ...]
    kernel_blocks: int = 1
    group: int = 0

    @property
    def layout(self) -> kvstride.Layout:
        """The layout of all these layers, one tensor a layer."""
        geometry = dict(self.named.geometry) | {"num_layers": len(self.tensors)}
        return kvstride.Layout(self.named.text, kvstride.Geometry(**geometry))

    @property
    def cache(self) -> kvstride.Cache:
        """The engine's memory with its layout, without a copy: layer i is `layer_names[i]`."""
        return self.named.cache(list(self.tensors))


def layouts_of_engine(running: Any) -> list[EngineCache]:
    """The KV caches of a running engine, each named by asking the engine, ready to use.

    `running`: a model runner, a worker, an executor or an in-process `LLM` (VLLM_ENABLE_V1_MULTIPROCESSING=0).
    Layers of one KV cache group whose tensors have the same layout come together, in the order of the engine's layers;
    layers that share another layer's cache and layers without one are left out.

    Raises UnknownLayout naming the layer where the bytes of one are not known, ArgumentError where `running` leads to
    no model runner or its caches are not there yet, EngineError where the installed release is unknown.
    """
    engine.release()
    runner = _runner(running)
    layers = _layers(runner)
    tensors = {name: layer.kv_cache for name, layer in layers.items()}
    config = getattr(runner, "kv_cache_config", None)
    return _group(layers, tensors, _pages(runner, layers), _isas(runner), config)


def name_registered(kv_caches: Mapping[str, Any], vllm_config: Any, kv_cache_config: Any = None) -> list[EngineCache]:
    """As `layouts_of_engine`, for what a connector gets: `register_kv_caches(kv_caches)`, its `vllm_config` and its
    `kv_cache_config`. Without the last, layers are taken to be one KV cache group, and refused where they share memory.

    Where the attention kernel wants smaller blocks than the scheduler's, a registered tensor's own dimensions do not
    say how a block is laid out inside; then the layer's kernel-block view of the same memory is named and returned.
    """
    engine.release()
    context = vllm_config.compilation_config.static_forward_context
    missing = [name for name in kv_caches if name not in context]
    if missing:
        raise ArgumentError(f"name_registered: no layer {missing[0]!r} in the engine's forward context")
    layers = {name: context[name] for name in kv_caches}
    bound = {name: _bound(layers[name], tensor) for name, tensor in kv_caches.items()}
    found = _group(layers, bound, dict(kv_caches), {}, kv_cache_config)
    if kv_cache_config is None:
        _refuse_shared(found)
    return found


def _refuse_shared(found: list[EngineCache]) -> None:
    owner: dict[int, str] = {}
    for cache in found:
        for name, tensor in zip(cache.layer_names, cache.tensors, strict=True):
            other = owner.setdefault(tensor.data_ptr(), name)
            if other != name:
                raise ArgumentError(
                    f"name_registered: layers {other} and {name} share memory under block ids of their own: "
                    "kv_cache_config says which layers belong together"
                )


def _bound(layer: Any, registered: Any) -> Any:
    """The layer's own view of the registered memory where it has bound one."""
    held = _tensor_of(getattr(layer, "kv_cache", None))
    if held is not None and held.numel() and held.data_ptr() == registered.data_ptr():
        return held
    return registered


def _runner(running: Any) -> Any:
    here = running
    for _ in range(2 * len(_TO_RUNNER)):
        if hasattr(here, "kv_caches") and hasattr(here, "vllm_config"):
            return here
        step = next((getattr(here, a) for a in _TO_RUNNER if getattr(here, a, None) is not None), None)
        if step is None:
            break
        here = step
    raise ArgumentError(
        f"layouts_of_engine: {type(running).__name__} leads to no model runner; an engine in another process must be "
        "asked there, e.g. by collective_rpc"
    )


def _layers(runner: Any) -> dict[str, Any]:
    """The attention-like layers that have a cache of their own."""
    context = runner.vllm_config.compilation_config.static_forward_context
    shared = getattr(runner, "shared_kv_cache_layers", {})
    layers = {}
    for name, layer in context.items():
        if not hasattr(layer, "kv_cache") or name in shared:
            continue
        if getattr(layer, "kv_sharing_target_layer_name", None) or _empty(layer.kv_cache):
            continue
        layers[name] = layer
    if not layers:
        raise ArgumentError("layouts_of_engine: the engine has bound no KV cache yet")
    return layers


def _empty(held: Any) -> bool:
    parts = held if isinstance(held, (list, tuple)) else [held]
    return not parts or all(not hasattr(p, "numel") or p.numel() == 0 for p in parts)


def _tensor_of(held: Any) -> Any:
    """The one tensor that a layer holds: itself, or in a list of one virtual engine; None for state in parts."""
    if isinstance(held, (list, tuple)):
        return held[0] if len(held) == 1 and hasattr(held[0], "numel") else None
    return held if hasattr(held, "numel") else None


def _pages(runner: Any, layers: Mapping[str, Any]) -> dict[str, Any]:
    """The registered tensor of each layer, where the runner's list has exactly one a layer."""
    listed = [t for t in runner.kv_caches if hasattr(t, "numel")]
    if len(listed) != len(layers) or len(listed) != len(runner.kv_caches):
        return {}
    index = engine.find("vllm.model_executor.models.utils:extract_layer_index", "vllm.utils:extract_layer_index")
    try:
        ordered = sorted(layers, key=index)
    except AssertionError:
        return {}
    return dict(zip(ordered, listed, strict=True))


def _attention_groups(runner: Any) -> Iterator[Any]:
    for groups in getattr(runner, "attn_groups", ()):
        yield from groups if isinstance(groups, (list, tuple)) else [groups]


def _isas(runner: Any) -> dict[str, str]:
    """The ISA that the engine's own metadata builders hold, by layer."""
    isas: dict[str, str] = {}
    for group in _attention_groups(runner):
        builders = getattr(group, "metadata_builders", None) or [getattr(group, "metadata_builder", None)]
        isa = getattr(builders[0], "isa", None)
        if isa is not None:
            isas |= {name: str(isa) for name in group.layer_names}
    return isas


def _group(
    layers: Mapping[str, Any],
    held: Mapping[str, Any],
    pages: Mapping[str, Any],
    isas: Mapping[str, str],
    config: Any,
) -> list[EngineCache]:
    groups = getattr(config, "kv_cache_groups", None) or ()
    group_of = {name: i for i, group in enumerate(groups) for name in group.layer_names}
    scheduled = getattr(config, "num_blocks", None)
    found: dict[tuple[Any, ...], list[tuple[str, Named, Any]]] = {}
    for name, layer in layers.items():
        tensor = _tensor_of(held[name])
        if tensor is None:
            tensor = pages.get(name)
        if tensor is None:
            raise UnknownLayout(f"layer {name}: its state is held in parts, and the page that they share was not given")
        try:
            named = name_tensor(layer, tensor, isa=isas.get(name))
        except (kvstride.LayoutError, EngineError) as error:
            raise type(error)(f"layer {name}: {error}") from error
        blocks = named.geometry["num_blocks"]
        ratio, rest = divmod(blocks, scheduled or blocks)
        if rest or not ratio:
            raise UnknownLayout(f"layer {name}: {blocks} blocks are no whole multiple of the scheduler's {scheduled}")
        key = (group_of.get(name, 0), named.text, named.backend, tuple(sorted(named.geometry.items())), ratio)
        found.setdefault(key, []).append((name, named, tensor))
    return [
        EngineCache(tuple(n for n, _, _ in same), same[0][1], tuple(t for _, _, t in same), key[-1], key[0])
        for key, same in found.items()
    ]


def name_tensor(layer: Any, tensor: Any, *, isa: str | None = None) -> Named:
    """Name one tensor of a running engine from the layer that owns it: its backend class, its sizes, the tensor's own
    shape and strides, and the engine's switches. Raises as `name_layout`."""
    found = _backend_of(layer)
    if not engine.belongs(found):
        raise UnknownLayout(f"{found.__module__}.{found.__name__} is not a class of vLLM: its interior is not known")
    family = FAMILIES.get(found.__name__)
    cache_dtype = str(getattr(layer, "kv_cache_dtype", None) or "auto")
    facts: dict[str, Any] = {
        "from": engine.release(),
        "backend": found.__name__,
        "cache_dtype": cache_dtype,
        "dtype": _element(str(tensor.dtype), cache_dtype),
        "logical_shape": tuple(tensor.shape),
        "view_stride_bytes": tuple(s * tensor.element_size() for s in tensor.stride()),
        "platform": engine.platform(),
        "variant": _variant(layer, found),
    }
    if family is not None and family.interior is Interior.STATE:
        facts |= {"cache_dtype": "mamba", "by_contract": True}
        facts["args"] = {"num_blocks": int(tensor.shape[0]), "block_size": 1, "num_kv_heads": 1, "head_size": 1}
        return name_layout(facts)

    sizes = _sizes(layer)
    if engine.by_enum():
        facts["by_contract"] = True
        sizes |= {"num_blocks": int(tensor.shape[0]), "block_size": int(tensor.shape[-2])}
    else:
        asked = dict(PROBE_SIZES) | {k: v for k, v in sizes.items() if family and family.interior is Interior.MLA}
        if "value_head_size" in sizes:
            asked["value_head_size"] = 192
        facts["probe"] = {"args": asked, "logical_shape": probe.declared_shape(found, asked, cache_dtype)}
        sizes |= _block_sizes(facts, tensor)
    facts["args"] = sizes
    if family is not None and family.interior is Interior.CPU_TILE:
        facts["isa"] = isa or getattr(layer, "isa", None)
        if facts["isa"] is None:
            model = str(getattr(layer, "dtype", tensor.dtype))
            facts["isa"] = probe.isa_of(found, model, sizes["block_size"], sizes["head_size"], cache_dtype)
    return name_layout(facts)


def _backend_of(layer: Any) -> type:
    ask = getattr(layer, "get_attn_backend", None)
    found = ask() if ask is not None else getattr(layer, "attn_backend", None)
    if not isinstance(found, type):
        raise UnknownLayout(f"{type(layer).__name__} names no attention backend class")
    return engine.writer_of(found)


def _variant(layer: Any, found: type) -> str | None:
    kind = str(getattr(layer, "attn_type", "")).lower()
    if found.__name__ == "RocmAiterUnifiedAttentionBackend" and "encoder_decoder" in kind and not engine.by_enum():
        return "cross_attention"  # 0.23 to 0.25.1 give these layers a K/V-first view behind the shape's back
    return probe.variant_of(found, getattr(layer, "impl", None))


def _element(dtype: str, cache_dtype: str) -> str:
    """The element type as the machine reads it: AMD's older fp8 differs from the others'."""
    if cache_dtype.startswith("fp8") and cache_dtype != "fp8_ds_mla" and dtype == "torch.uint8":
        current = engine.find("vllm.platforms:current_platform")
        fnuz = getattr(current, "is_fp8_fnuz", None)
        if fnuz is not None and fnuz():
            return "f8_e5m2fnuz" if "e5m2" in cache_dtype else "f8_e4m3fnuz"
    return dtype


def _sizes(layer: Any) -> dict[str, int]:
    """Heads and head sizes of a layer, and how an MLA row divides."""
    heads = getattr(layer, "num_kv_heads", None)
    head = getattr(layer, "head_size", None)
    if heads is None or head is None:
        raise UnknownLayout(f"{type(layer).__name__} does not say its KV heads and head size")
    sizes = {"num_kv_heads": int(heads), "head_size": int(head)}
    value = getattr(layer, "head_size_v", None)
    if value and int(value) != int(head):
        sizes["value_head_size"] = int(value)
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        if isinstance(getattr(layer, name, None), int):
            sizes[name] = int(getattr(layer, name))
            sizes.pop("value_head_size", None)
    return sizes


def _block_sizes(facts: Mapping[str, Any], tensor: Any) -> dict[str, int]:
    """num_blocks and block_size of a tensor to 0.28, whose class says at probe sizes which dimension is which."""
    asked = facts["probe"]
    learned = name_layout(
        {
            **facts,
            "args": asked["args"],
            "logical_shape": asked["logical_shape"],
            "isa": "vec",
            "view_stride_bytes": None,
            "probe": None,
        }
    )
    axes = learned.axes
    if "N" not in axes:
        raise UnknownLayout(f"a tensor of dimensions {axes} does not show its block size")
    return {"num_blocks": int(tensor.shape[axes.index("B")]), "block_size": int(tensor.shape[axes.index("N")])}
