# SPDX-License-Identifier: Apache-2.0
"""A run-time patch for ModelOpt 0.47's vLLM plug-in, which makes it right on vLLM 0.29 to 0.32.

What is wrong there, and what this does instead:

- The plug-in asks `FlashAttentionBackend.get_kv_cache_shape`, which is gone since 0.29, and wants five dimensions of
  FlashInfer, which has four since 0.26. Here keys and values come from `split_kv_cache`.
- It splits a batch of decodes and prefills by `num_decodes` and `num_prefills` of the metadata. FlashAttention's have
  no such fields (`num_decode_reqs` there is set under decode context parallelism only), nor does that backend put
  decodes first; decode rows got the prefill λ. Here requests are split by their own query lengths, in any order.
- `causal` may be a tensor, one int32 a request. Here requests are split by it, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata as _distributions
from typing import Any

from kvstride import EngineError, NotStrided
from kvstride.vllm import engine
from kvstride.vllm._rows import release_of

from ._views import split_kv_cache

_PLUGIN = "modelopt.torch.sparsity.attention_sparsity.plugins.vllm"
_RELEASE = (0, 47)
_MARK, _PARTS, _SPLIT = "_kvstride_patch", "_kvstride_parts", "_kvstride_split"

_LAUNCH = "layer query key value kv_cache attn_metadata output output_scale output_block_scale"
#: What is called or replaced, with the names of its parameters; * is where keyword-only ones begin.
_KNOWN = {
    "_resolve_forward": "impl layer attn_metadata output_scale output_block_scale * require_flashinfer_metadata",
    "_forward_modelopt": (
        "impl * layer query key_cache value_cache block_table seq_lens cu_seqlens_q num_actual_tokens max_query_len "
        "max_seq_len is_causal output p_qdq p_qdq_amax v_qdq v_qdq_amax quant_active dense_fallback prepare_modelopt"
    ),
    "_flashinfer_forward": f"impl native_forward {_LAUNCH}",
    "ModelOptSparseAttentionImpl.forward": f"self {_LAUNCH}",
    "ModelOptSparseAttentionImpl._forward_vllm_flash_attn": f"self {_LAUNCH}",
}
#: Fields of FlashInfer's metadata, which the plug-in attaches there.
_FLASHINFER_FIELDS = (
    *("_modelopt_block_table", "_modelopt_seq_lens", "_modelopt_query_start_loc", "_modelopt_num_actual_tokens"),
    *("_modelopt_max_query_len", "_modelopt_max_seq_len", "_modelopt_causal"),
)
_BUILDERS = (
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder",
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder",
)


class Patch:
    """A patched plug-in. `undo()` puts everything back; as a context manager it does so at the end of the block."""

    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin
        self.active = True
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, made: Any) -> None:
        """Put `made` in the place of an attribute, until `undo`."""
        self._replaced.append((owner, name, getattr(owner, name), made))
        setattr(owner, name, made)

    def undo(self) -> None:
        """Put back what was there before. What others have replaced since then is left to them."""
        self.active = False
        for owner, name, before, made in self._replaced:
            if getattr(owner, name, None) is made:
                setattr(owner, name, before)
        self._replaced.clear()
        if getattr(self.plugin, _MARK, None) is self:
            delattr(self.plugin, _MARK)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch(plugin: Any = None) -> Patch:
    """Make ModelOpt 0.47's vLLM plug-in right on vLLM 0.29 to 0.32; in each worker, before or after it is installed.

    `plugin`: the module `modelopt.torch.sparsity.attention_sparsity.plugins.vllm`; imported where None. A plug-in that
    is patched already is left as it is, and its `Patch` returned.

    Everything is checked before anything is replaced. Raises EngineError where ModelOpt or vLLM is absent or of another
    release, or where a function of the plug-in takes other arguments than the ones that are known.
    """
    engine.release()
    if plugin is None:
        try:
            plugin = importlib.import_module(_PLUGIN)
        except ImportError as error:
            raise EngineError(f"patch: no ModelOpt here: tried to import {_PLUGIN}: {error}") from error
    known: Patch | None = getattr(plugin, _MARK, None)
    if known is not None:
        return known
    _check(plugin)
    builders = list(_builders())
    made = Patch(plugin)
    made.replace(plugin.ModelOptSparseAttentionImpl, "forward", _flash_forward(plugin))
    made.replace(plugin, "_flashinfer_forward", _flashinfer_forward(plugin))
    for owner in builders:
        made.replace(owner, "build", _recording(made, owner.build))
    setattr(plugin, _MARK, made)
    return made


def _check(plugin: Any) -> None:
    try:
        version = _distributions.version("nvidia-modelopt")
    except _distributions.PackageNotFoundError:
        version = str(getattr(sys.modules.get("modelopt"), "__version__", "unknown"))
    if release_of(version)[:2] != _RELEASE:
        raise EngineError(f"patch: ModelOpt {version}, the patch is for 0.47")
    if not engine.by_enum():
        raise EngineError(f"patch: vLLM {engine.release()}, the patch is for 0.29 to 0.32")
    for name, parameters in _KNOWN.items():
        found = functools.reduce(lambda owner, part: getattr(owner, part, None), name.split("."), plugin)
        if not callable(found):
            raise EngineError(f"patch: ModelOpt {version}: the plug-in has no {name}")
        have = _parameters(found)
        if have != parameters:
            raise EngineError(f"patch: ModelOpt {version}: {name} takes ({have}), known is ({parameters})")
    fields = tuple(getattr(plugin, "_FLASHINFER_METADATA_FIELDS", ()))
    if fields != _FLASHINFER_FIELDS:
        raise EngineError(f"patch: ModelOpt {version}: FlashInfer's metadata gets {fields}, known is other")


def _parameters(function: Any) -> str:
    words: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(parameter.name)
    return " ".join(words)


def _builders() -> Iterator[Any]:
    """The metadata builders that this machine can import."""
    for place in _BUILDERS:
        try:
            found = engine.find(place)
        except EngineError:  # FlashInfer is not installed: nobody uses its builder
            continue
        if "common_attn_metadata" not in inspect.signature(found.build).parameters:
            raise EngineError(f"patch: vLLM {engine.release()}: {found.__name__}.build has no common_attn_metadata")
        yield found


def _recording(made: Patch, build: Callable[..., Any]) -> Callable[..., Any]:
    """`build`, and the parts of its batch noted in the metadata: there the lengths are on the CPU, and no layer waits
    for the device to read them."""
    signature = inspect.signature(build)

    @functools.wraps(build)
    def recording(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        common = signature.bind(*args, **kwargs).arguments["common_attn_metadata"]
        starts = getattr(common, "query_start_loc_cpu", None)
        if made.active and starts is not None and common.max_query_len > 1:
            _note(metadata, _parts(starts.tolist(), common.causal, common.query_start_loc.device))
        return metadata

    return recording


def _flash_forward(plugin: Any) -> Callable[..., Any]:
    """`forward` of the FlashAttention adapter."""

    def forward(
        self: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any = None,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        assert output is not None, "Output tensor must be provided."
        if attn_metadata is None:
            return output.fill_(0)
        launch = (layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        native = functools.cache(lambda: self._forward_vllm_flash_attn(*launch))
        resolved = plugin._resolve_forward(self, layer, attn_metadata, output_scale, output_block_scale)
        if resolved is None:
            return native()
        batch = _Batch.of(query, output, attn_metadata)
        views = _views(self, kv_cache, plugin.FlashAttentionBackend)
        return _dispatch(plugin, self, layer, batch, attn_metadata, views, resolved, native)

    return forward


def _flashinfer_forward(plugin: Any) -> Callable[..., Any]:
    """The plug-in's function behind `forward` of its FlashInfer adapter. From 0.29 on the engine has written the keys
    and values before."""

    def _flashinfer_forward(
        impl: Any,
        native_forward: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any = None,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        assert output is not None, "Output tensor must be provided."
        if attn_metadata is None:
            return output.fill_(0)
        launch = (layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        native = functools.cache(lambda: native_forward(*launch))
        resolved = plugin._resolve_forward(
            impl, layer, attn_metadata, output_scale, output_block_scale, require_flashinfer_metadata=True
        )
        if resolved is None:
            return native()
        batch = _Batch.of(query, output, attn_metadata, "_modelopt_")
        views = _views(impl, kv_cache, engine.find("vllm.v1.attention.backends.flashinfer:FlashInferBackend"))
        return _dispatch(plugin, impl, layer, batch, attn_metadata, views, resolved, native)

    return _flashinfer_forward


@dataclass(frozen=True)
class _Batch:
    """What a launch is about: queries and output `[token, head, dim]`, `query_start_loc` `[request + 1]`."""

    query: Any
    output: Any
    block_table: Any
    seq_lens: Any
    query_start_loc: Any
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: Any

    @staticmethod
    def of(query: Any, output: Any, metadata: Any, prefix: str = "") -> _Batch:
        """As the metadata has it, in fields of these names or, where the plug-in attached them, with its prefix."""
        names = ("block_table", "seq_lens", "query_start_loc", "num_actual_tokens", "max_query_len", "max_seq_len")
        return _Batch(query, output, *(getattr(metadata, prefix + name) for name in (*names, "causal")))


@dataclass(frozen=True)
class _Part:
    """Requests of one phase and one `causal`. `requests` and `tokens` index the batch: slices where they are in a row,
    else tensors on its device; `starts` is the part's own `query_start_loc`. `whole`: there is no other part."""

    requests: Any
    tokens: Any
    starts: Any
    num_tokens: int
    max_query_len: int
    causal: bool
    whole: bool


def _parts(starts: Sequence[int], causal: Any, device: Any) -> list[_Part]:
    """The parts of a batch, decodes first. Requests without a query row, which only pad, are in none."""
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    each: list[bool] | None = None
    if hasattr(causal, "tolist"):
        told = causal.reshape(-1).tolist()
        each = [bool(told[i if len(told) > 1 else 0]) for i in range(len(lengths))]
    found: dict[tuple[bool, bool], list[int]] = {}
    for request, length in enumerate(lengths):
        if length > 0:
            # a single row, the last one, sees the same keys either way
            how = bool(causal) if each is None else each[request] or length == 1
            found.setdefault((length > 1, how), []).append(request)
    padded = sum(map(len, found.values())) < len(lengths)
    return [
        _part(requests, starts, lengths, how, len(found) == 1 and not padded, device)
        for (_, how), requests in sorted(found.items())
    ]


def _part(
    requests: list[int], starts: Sequence[int], lengths: Sequence[int], causal: bool, whole: bool, device: Any
) -> _Part:
    import torch

    own = [0]
    for request in requests:
        own.append(own[-1] + lengths[request])
    first, last = requests[0], requests[-1]
    if len(requests) == last - first + 1:
        chosen: tuple[Any, Any] = (slice(first, last + 1), slice(starts[first], starts[last + 1]))
    else:
        tokens = [t for request in requests for t in range(starts[request], starts[request + 1])]
        chosen = (torch.tensor(requests, device=device), torch.tensor(tokens, device=device))
    return _Part(
        requests=chosen[0],
        tokens=chosen[1],
        starts=torch.tensor(own, dtype=torch.int32, device=device),
        num_tokens=own[-1],
        max_query_len=max(lengths[request] for request in requests),
        causal=causal,
        whole=whole,
    )


def _note(metadata: Any, parts: list[_Part]) -> None:
    with contextlib.suppress(AttributeError):  # frozen metadata: each layer finds out for itself
        setattr(metadata, _PARTS, parts)


def _parts_of(metadata: Any, batch: _Batch) -> list[_Part]:
    """The parts as the metadata's builder noted them; else from the device, once a batch."""
    noted: list[_Part] | None = getattr(metadata, _PARTS, None)
    if noted is None:
        noted = _parts(batch.query_start_loc.tolist(), batch.causal, batch.query_start_loc.device)
        _note(metadata, noted)
    return noted


def _views(impl: Any, kv_cache: Any, backend: type) -> tuple[Any, Any]:
    """Keys and values. The layout is asked once for a layer's cache; afterwards the views are made from its numbers."""
    seen = (backend, tuple(kv_cache.shape), tuple(kv_cache.stride()), kv_cache.dtype)
    known = vars(impl).get(_SPLIT)
    start = kv_cache.storage_offset()
    if known is None or known[0] != seen:
        split = split_kv_cache(
            kv_cache,
            backend,
            num_kv_heads=impl.num_kv_heads,
            head_size=impl.head_size,
            cache_dtype=str(getattr(impl, "kv_cache_dtype", "auto")).removeprefix("torch."),
        )
        if not split.dense_dim:
            raise NotStrided(f"{backend.__name__}: dims of a head are not one after the other, as ModelOpt reads them")
        known = (seen, [(tuple(v.shape), tuple(v.stride()), v.storage_offset() - start) for v in split])
        setattr(impl, _SPLIT, known)
    key, value = (kv_cache.as_strided(shape, strides, start + offset) for shape, strides, offset in known[1])
    return key, value


def _dispatch(
    plugin: Any,
    impl: Any,
    layer: Any,
    batch: _Batch,
    metadata: Any,
    views: tuple[Any, Any],
    resolved: Any,
    native: Callable[[], Any],
) -> Any:
    """Each part of a batch by the plug-in's own path, with its own λ and N:M. Where a part has no sparse work, the
    engine's own attention is asked once for all of it. As in ModelOpt, λ is of the longest sequence of the batch."""
    launch = functools.partial(
        plugin._forward_modelopt,
        impl,
        layer=layer,
        key_cache=views[0],
        value_cache=views[1],
        max_seq_len=batch.max_seq_len,
        p_qdq=resolved.p_qdq,
        p_qdq_amax=resolved.p_qdq_amax,
        v_qdq=resolved.v_qdq,
        v_qdq_amax=resolved.v_qdq_amax,
        quant_active=resolved.quant_active,
        dense_fallback=native,
    )
    parts = [] if batch.max_query_len <= 1 else _parts_of(metadata, batch)
    if not parts or parts[0].whole:
        return launch(
            query=batch.query,
            block_table=batch.block_table,
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.query_start_loc,
            num_actual_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            is_causal=parts[0].causal if parts else batch.causal is True,
            output=batch.output,
        )
    made = []
    for part in parts:
        rows = batch.output.new_empty((part.num_tokens, *batch.output.shape[1:]))
        result = launch(
            query=batch.query[part.tokens],
            block_table=batch.block_table[part.requests],
            seq_lens=batch.seq_lens[part.requests],
            cu_seqlens_q=part.starts,
            num_actual_tokens=part.num_tokens,
            max_query_len=part.max_query_len,
            is_causal=part.causal,
            output=rows,
        )
        if result is rows:
            made.append((part, rows))
    # behind all launches: the engine's own attention, where it was asked, wrote every row
    for part, rows in made:
        batch.output[part.tokens] = rows
    return batch.output
