# SPDX-License-Identifier: Apache-2.0
"""The classes that vLLM asks for: backend, metadata builder, implementation.

The engine's tensor of a layer is `[block, head, slot, 2 × head_size]`, strided as its KV cache layout says (LBHNC,
LBNHC, LHBNC, BLHNC, BLNHC or BHLNC): keys in the first half of a row, values in the second, whatever the strides.
Source of the interface: vLLM 0.32.0, v1/attention/backend.py and v1/attention/backends/cpu_attn.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvstride

from . import counts
from .options import VARIABLE, AttentionOptions

logger = init_logger("vllm.kvstride")

_ELEMENTS = {"auto": None, "fp8": "f8_e4m3", "fp8_e4m3": "f8_e4m3", "fp8_e5m2": "f8_e5m2"}
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class KvstrideAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU backend with other kernels: any block size, any head size, any of the engine's layouts."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any."""
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Any."""
        return []

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Any; heads first (LBHNC) where nobody wishes another, as vLLM's own CPU backend has it."""
        first = KVCacheLayout.LBHNC
        return (first, *(layout for layout in KVCacheLayout if layout is not first))

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks are part of the softmax."""
        return True

    @staticmethod
    def get_impl_cls() -> type[KvstrideAttentionImpl]:
        """The implementation."""
        return KvstrideAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[KvstrideMetadataBuilder]:
        """The builder."""
        return KvstrideMetadataBuilder


def options_of_process() -> AttentionOptions:
    """What the environment says; dense where the backend is used without."""
    return AttentionOptions.parse(os.environ.get(VARIABLE, "")) or AttentionOptions()


def order_of(kv_cache: torch.Tensor) -> str:
    """The order of a layer's tensor: axes from the largest stride to the smallest, keys and values of a slot side by
    side behind them."""
    axes = sorted(zip("BHN", kv_cache.stride(), strict=False), key=lambda axis: -axis[1])
    return " ".join(letter for letter, _ in axes) + " {key: D, value: D}"


@dataclass
class KvstrideMetadata:
    """A batch, for all layers of a group. Arrays share the engine's memory; `seq_lens` and `starts` are int64."""

    starts: np.ndarray
    seq_lens: np.ndarray
    block_table: torch.Tensor
    causal: Any
    num_actual_tokens: int
    longest: int
    decodes: np.ndarray  #: sequences of one query row
    num_decode_tokens: int


class KvstrideMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Batches as `kvstride.attention` takes them; those of encoders stay vLLM's."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # When plug-ins are loaded, vLLM does not print yet.
        logger.info_once("kvstride attends: %s", str(options_of_process()))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """One batch."""
        if self.is_encoder_only_attention:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        starts = common.query_start_loc.numpy().astype(np.int64)
        seq_lens = common.seq_lens.numpy().astype(np.int64)
        decodes = np.diff(starts) == 1
        causal: Any = False if self.is_cross_attention else common.causal
        return KvstrideMetadata(
            starts=starts,
            seq_lens=seq_lens,
            block_table=common.block_table_tensor,
            causal=causal,
            num_actual_tokens=common.num_actual_tokens,
            longest=int(seq_lens.max(initial=0)),
            decodes=decodes,
            num_decode_tokens=int(decodes.sum()),
        )


class KvstrideAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """One layer."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._encoder = self.attn_type in _ENCODERS
        if self.alibi_slopes is not None:
            raise NotImplementedError("kvstride attention: ALiBi is not supported; unset KVSTRIDE_ATTENTION")
        if self.kv_cache_dtype not in _ELEMENTS:
            raise NotImplementedError(f"kvstride attention: kv_cache_dtype {self.kv_cache_dtype!r} is not supported")
        self._options = options_of_process()
        self._dense: bool | None = None  # known with the layer's name
        self._cache: tuple[tuple[Any, ...], kvstride.Cache] | None = None
        self._sinks: np.ndarray | None = None
        counts.export()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a batch over the layer's cache, which holds its keys and values already."""
        if self._encoder or attn_metadata is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvstride attention: fused output quantisation is not supported")
        batch: KvstrideMetadata = attn_metadata
        tokens = batch.num_actual_tokens
        options: dict[str, Any] = {
            "scale": self.scale,
            "causal": batch.causal,
            "window": None if self.sliding_window < 0 else self.sliding_window,
            "soft_cap": float(self.logits_soft_cap),
            "sinks": self._sink_values(),
            "out": output[:tokens].view(tokens, self.num_heads, self.head_size),
        }
        if _ELEMENTS[self.kv_cache_dtype] is not None:
            options |= {"key_scale": layer._k_scale_float, "value_scale": layer._v_scale_float}
        if self._is_dense(layer):
            self._attend(query, kv_cache, batch, options)
            counts.add("decode", batch.num_decode_tokens, 0, 0)
            counts.add("prefill", tokens - batch.num_decode_tokens, 0, 0)
        else:
            self._attend_sparsely(query, kv_cache, batch, options)
        return output

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: KvstrideMetadata, options: Any) -> Any:
        return kvstride.attention(
            query[: batch.num_actual_tokens].view(batch.num_actual_tokens, self.num_heads, self.head_size),
            self._cache_of(kv_cache),
            0,
            batch.block_table,
            batch.seq_lens,
            batch.starts,
            **options,
        )

    def _attend_sparsely(
        self, query: torch.Tensor, kv_cache: torch.Tensor, batch: KvstrideMetadata, options: dict[str, Any]
    ) -> None:
        o = self._options
        lambdas = np.where(batch.decodes, o.decode.at(batch.longest), o.prefill.at(batch.longest))
        options |= {"skip_lambda": lambdas, "tile": o.tile, "counters": "each"}
        options |= {"nm": o.nm, "recent": o.recent, "sink_tokens": o.sink_tokens}
        _, tiles = self._attend(query, kv_cache, batch, options)
        for phase, rows, tokens in (
            ("decode", batch.decodes, batch.num_decode_tokens),
            ("prefill", ~batch.decodes, batch.num_actual_tokens - batch.num_decode_tokens),
        ):
            seen, skipped = tiles[rows].sum(0)
            counts.add(phase, tokens, int(seen), int(skipped))

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write a batch's new keys and values into the layer's cache."""
        if self._encoder:
            return
        scales: dict[str, float] = {}
        if _ELEMENTS[self.kv_cache_dtype] is not None:
            scales = {"key_scale": layer._k_scale_float, "value_scale": layer._v_scale_float}
        kvstride.write_tokens(self._cache_of(kv_cache), 0, key, value, slot_mapping, **scales)

    def _is_dense(self, layer: Any) -> bool:
        if self._dense is None:
            self._dense = self._options.dense or self._options.leaves_out(str(getattr(layer, "layer_name", "")))
        return self._dense

    def _sink_values(self) -> np.ndarray | None:
        # Weights are loaded after the layer is made.
        if self._sinks is None and self.sinks is not None:
            self._sinks = self.sinks.detach().float().numpy().astype(np.float32)
        return self._sinks

    def _cache_of(self, kv_cache: torch.Tensor) -> kvstride.Cache:
        known = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
        if self._cache is None or self._cache[0] != known:
            blocks, heads, slots, row = kv_cache.shape
            element = _ELEMENTS[self.kv_cache_dtype]
            geometry = kvstride.Geometry(
                num_blocks=blocks,
                block_size=slots,
                num_kv_heads=heads,
                head_size=row // 2,
                dtype=element or {torch.float32: "f32", torch.float16: "f16"}.get(kv_cache.dtype, "bf16"),
            )
            self._cache = known, kvstride.Cache(kv_cache, order_of(kv_cache), geometry=geometry)
        return self._cache[1]
