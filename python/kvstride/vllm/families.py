# SPDX-License-Identifier: Apache-2.0
"""What each attention backend class of vLLM keeps inside the dimensions of its KV tensor.

Shapes and strides come from the engine. This table holds only what an engine cannot be asked: whether the
content is literal (one K and one V vector where the shape says) or packed for a kernel. A class that is not here
is unknown, whatever its shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Interior(Enum):
    """Families of interiors; the value is the words used in messages and listings."""

    STRIDED = "strided"
    SLOTS = "strided, K and V as two head slots"
    X_SPLIT = "x-split"
    SHUFFLE = "AITER shuffle"
    FLAT_HND = "flat [H, N, D]"
    CPU_TILE = "CPU tile"
    PALLAS = "K and V interleaved on the head axis"
    PAIR = "a K tensor and a V tensor"
    MLA = "MLA latent"
    MLA_PAGE = "MLA latent, scales behind the rows of a page"
    INDEXER = "sparse-MLA indexer"
    STATE = "recurrent state"


#: Interiors whose bytes neither shape nor strides tell.
OPAQUE = frozenset(
    {
        Interior.X_SPLIT,
        Interior.SHUFFLE,
        Interior.FLAT_HND,
        Interior.CPU_TILE,
        Interior.MLA_PAGE,
        Interior.INDEXER,
    }
)


@dataclass(frozen=True)
class Family:
    """One backend class: its interior, and what run-time switches ("variants") make of it.

    `variants` maps a variant to the interior it selects, or to the reason why it is refused. A variant that is not
    in it is unknown.
    """

    interior: Interior
    variants: Mapping[str, Interior | str] = field(default_factory=dict)
    #: Why a K/V-first tensor of this class is refused unless a variant settles it.
    kv_first: str | None = None


_HYBRID = {"hybrid_mamba": Interior.STRIDED}
_STRIDED = Family(Interior.STRIDED, _HYBRID)
_SPLIT = Family(Interior.X_SPLIT)
_MLA = Family(Interior.MLA)
_MLA_PAGE = Family(Interior.MLA_PAGE)
_STATE = Family(Interior.STATE)

#: The compute capability ("cap=…") decides which layouts FlashInfer offers, and the scales of NVFP4.
_CAPABILITIES = {f"cap={c}": Interior.STRIDED for c in ("None", "8", "9", "10", "12")}

_AITER_PA = (
    "AITER sparse paged attention shuffles each 16-token page of K and V in place (_ensure_aiter_sparse_pa_kv_cache, "
    "vLLM 0.27); the tensor's own dimensions are not where the elements are"
)
_MINIMAX = Family(Interior.STRIDED, {"aiter_sparse_pa": _AITER_PA})

FAMILIES: Mapping[str, Family] = {
    # One K and one V vector per token and head, where shape and strides say.
    "FlashAttentionBackend": _STRIDED,
    "_FABackend": _STRIDED,
    "_FA4Backend": _STRIDED,
    "Qwen4ExpQSAFlashAttentionBackend": _STRIDED,
    "FlashAttentionDiffKVBackend": _STRIDED,
    "DualChunkFlashAttentionBackend": _STRIDED,
    "FlashInferBackend": Family(Interior.STRIDED, _HYBRID | _CAPABILITIES),
    "FlexAttentionBackend": _STRIDED,
    "TreeAttentionBackend": _STRIDED,
    "XFormersAttentionBackend": _STRIDED,
    "HpcAttentionBackend": _STRIDED,
    "KvstrideAttentionBackend": _STRIDED,  # ours, python/kvstride/vllm/attention
    "TritonAttentionBackend": Family(
        Interior.STRIDED,
        _HYBRID | {"x_split": Interior.X_SPLIT, "flash": Interior.STRIDED},
        kv_first="0.9.0 to 0.10.2 write a K/V-first cache flash-wise or x-split, chosen at run time",
    ),
    "TritonAttentionDiffKVBackend": _STRIDED,
    "TritonFlashAttentionBackend": _STRIDED,
    "TritonFlashInferBackend": _STRIDED,
    # Its write path never shuffles (use_shuffle_layout=False), whatever the environment asks of AITER.
    "RocmAiterUnifiedAttentionBackend": Family(Interior.STRIDED, _HYBRID | {"rocm_shuffle": Interior.STRIDED}),
    "AiterFlashAttentionBackend": Family(Interior.STRIDED, _HYBRID | {"rocm_shuffle": Interior.SHUFFLE}),
    "MiniMaxM3SparseBackend": _MINIMAX,
    "MiniMaxM3SparseMSABackend": _MINIMAX,
    "MiniMaxM3SparseCutlassBackend": _MINIMAX,
    "MiniMaxM3SparseTritonBackend": _MINIMAX,
    # K and V in the place of the head slots, heads inside the content.
    "B12xPagedAttentionBackend": Family(Interior.SLOTS),
    "RocmSegmentedAttentionBackend": Family(Interior.SLOTS),
    # Packed for PagedAttention's kernels.
    "PagedAttention": _SPLIT,
    "_PagedAttention": _SPLIT,
    "BlocksparseFlashAttentionBackend": _SPLIT,
    "ROCmFlashAttentionBackend": _SPLIT,
    "XFormersBackend": _SPLIT,
    "IpexAttnBackend": _SPLIT,
    "TorchSDPABackend": _SPLIT,
    "RocmAttentionBackend": Family(Interior.X_SPLIT, {"x_split": Interior.X_SPLIT, "flash": Interior.STRIDED}),
    "_IPEXPagedAttention": Family(Interior.FLAT_HND),
    "CPUAttentionBackend": Family(Interior.CPU_TILE),
    # Other machines.
    "PallasAttentionBackend": Family(Interior.PALLAS),
    "HPUAttentionBackend": Family(Interior.PAIR),
    "HPUPagedAttention": Family(Interior.PAIR),
    # One latent vector a token; the shuffle switch of AITER does not reach them.
    "MLACommonBackend": _MLA,
    "TritonMLABackend": _MLA,
    "FlashMLABackend": _MLA,
    "CutlassMLABackend": _MLA,
    "FlashInferMLABackend": _MLA,
    "FlashAttnMLABackend": _MLA,
    "XPUFlashAttnMLABackend": _MLA,
    "TokenspeedMLABackend": _MLA,
    "AiterMLABackend": Family(Interior.MLA, {"rocm_shuffle": Interior.MLA}),
    "AiterTritonMLABackend": Family(Interior.MLA, {"rocm_shuffle": Interior.MLA}),
    "CPUMLABackend": _MLA,
    "AMXMLABackend": _MLA,
    "FlashMLASparseBackend": _MLA,
    "HYV4FlashMLASparseBackend": _MLA,
    "DeepseekV32MLASparseBackend": _MLA,
    "FlashInferMLASparseBackend": _MLA,
    "FlashInferMLASparseTRTLLMBackend": _MLA,
    "FlashInferMLASparseSM120Backend": _MLA,
    "FlashInferMLASparseSM90Backend": _MLA,
    "FlashAttnMLASparseBackend": _MLA,
    "XPUMLASparseBackend": _MLA,
    "ROCMAiterMLASparseBackend": Family(Interior.MLA, {"rocm_shuffle": Interior.MLA}),
    # DeepSeek V4: all rows of a page, then all scales of a page (quantize_and_insert_k_cache).
    "DeepseekV4SparseMLABackend": _MLA_PAGE,
    "DeepseekV4FlashMLABackend": _MLA_PAGE,
    "DeepseekV4FlashMLASparseBackend": _MLA_PAGE,
    "DeepseekV4XPUSparseBackend": _MLA_PAGE,
    "DeepseekSparseSWABackend": _MLA_PAGE,
    "DeepseekSparseSWAFlashMLABackend": _MLA_PAGE,
    # Values of a block, then its scales; ROCm tiles them.
    "DeepseekV32IndexerBackend": Family(Interior.INDEXER),
    # One page of raw bytes a block, from 0.29 on.
    "Mamba1AttentionBackend": _STATE,
    "Mamba2AttentionBackend": _STATE,
    "GDNAttentionBackend": _STATE,
    "LinearAttentionBackend": _STATE,
    "BailingLinearAttentionBackend": _STATE,
    "ShortConvAttentionBackend": _STATE,
    "PleShortConvAttentionBackend": _STATE,
    "KimiK3ROCmKDABackend": _STATE,
    "KimiK3KDAAttentionBackend": _STATE,
}

_OWN_PAGE = "pages of a format that is not described here"
_OWN_INDEX = "index keys of a format that is not described here"

#: Classes that the table knows and refuses, and why.
UNDESCRIBED: Mapping[str, str] = {
    "TurboQuantAttentionBackend": "a slot holds rotated, packed K and V of its own format",
    "UltraQuantAttentionBackend": "a slot holds packed FP4 values with group scales of its own format",
    "DifferentialFlashAttentionBackend": "two caches of half the heads in one tensor",
    "CacheOnlyAttentionBackend": "hidden states, no K and V",
    "CompressorBackend": "compressor state of a model's own format",
    "InklingSconvBackend": "convolution state of a model's own format",
    "QSAStateBackend": "state of a model's own format",
    "KpoolTailBackend": "pooled tail of a model's own format",
    "MiniMaxM3SparseMSANvfp4Backend": "NVFP4 data and scales of its own format",
    "MiniMaxM3SparseAiterPABackend": _AITER_PA,
    "PlaceholderAttentionBackend": "no cache at all",
    "NoAttentionBackend": "no cache at all",
    "IpexAttentionBackend": "the engine names it (0.12 to 0.14) but does not ship it",
    "Dots3NoteTritonMLABackend": "MLA rows padded in a model's own way",
    "Dots3NotePaddedSparseBackend": "MLA rows padded in a model's own way",
    # DeepSeek V4 on machines whose kernels write another format, and V4.1.
    "DeepseekV4ROCMAiterMLASparseBackend": _OWN_PAGE,
    "DeepseekV4CPUSparseBackend": _OWN_PAGE,
    "DeepseekV4FlashInferMLASparseBackend": _OWN_PAGE,
    "DeepseekSparseSWAFlashInferBackend": _OWN_PAGE,
    "DeepseekV41ROCMAiterSparseSWABackend": _OWN_PAGE,
    "FlashMLAMegaAttnBackend": _OWN_PAGE,
    # Indexers but DeepSeek V3.2's on CUDA.
    "DeepseekV32ROCmIndexerBackend": _OWN_INDEX,
    "DeepseekV4IndexerBackend": _OWN_INDEX,
    "DeepseekV4CPUIndexerBackend": _OWN_INDEX,
    "DeepseekV41IndexerBackend": _OWN_INDEX,
    "DeepseekV41SparseIndexerBackend": _OWN_INDEX,
    "DeepseekV41RocmMxfp4IndexerBackend": _OWN_INDEX,
    "Glm5NextIndexerBackend": _OWN_INDEX,
    "MiniMaxM3IndexerBackend": _OWN_INDEX,
    "MiniMaxM3IndexerMSABackend": _OWN_INDEX,
    "MiniMaxM3IndexerAiterBackend": _OWN_INDEX,
}
