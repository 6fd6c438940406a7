# SPDX-License-Identifier: Apache-2.0
"""Runs ModelOpt's own kernels and its vLLM plug-in, by Triton's interpreter, on views that kvstride makes.

`test_modelopt_kernels.py` starts this file as a program, because Triton's interpreter has to be chosen before Triton is
imported. What it leaves: `registry.npz` and `writers.npz`, for each case the kernel's output, that over a contiguous
cache and that of kv.attention; `plugin.npz`, the same for launches of the plug-in; `facts.json`, the rest. The tests
compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import kvstride as kv

if TYPE_CHECKING:
    import torch

#: Tiles of ModelOpt's kernel where PYTEST_VERSION is set: (query rows, keys).
TILE = (16, 32)
DTYPES = ("f32", "f16")
Q_HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 16


def strided_rows() -> list[kv.Entry]:
    """Registry rows of keys and values that have views, those included whose dims are not dense."""
    rows = []
    for entry in kv.registry():
        planes = not any(word in entry.order for word in ("latent", "index", "scale"))
        if planes and not any(word in entry.order for word in ("%x", "%16", "N%k", "H%g")):
            rows.append(entry)
    return rows


# --- Kernels over views ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    """Queries, and keys and values by sequence, in pages that are taken in no order."""

    lengths: list[tuple[int, int]]  # (query rows, KV tokens)
    page: int = PAGE
    dtype: str = "f32"
    seed: int = 0
    spread: float = 1.0
    spare: int = 1  # blocks that nobody uses
    kv_heads: int = KV_HEADS
    dim: int = DIM

    def __post_init__(self) -> None:
        import torch

        rng = np.random.default_rng(self.seed)
        kind = {"f32": torch.float32, "f16": torch.float16}[self.dtype]
        counts = [-(-length // self.page) for _, length in self.lengths]
        self.num_blocks = sum(counts) + self.spare
        order = rng.permutation(self.num_blocks)
        self.table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        slots: list[int] = []
        start = 0
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.from_numpy(order[start : start + count].astype(np.int32))
            start += count
            slots += [
                int(self.table[row, t // self.page]) * self.page + t % self.page for t in range(self.lengths[row][1])
            ]
        self.slots = torch.tensor(slots)
        rows = [q for q, _ in self.lengths]
        self.starts = torch.tensor(np.cumsum([0, *rows]), dtype=torch.int32)
        self.seq_lens = torch.tensor([length for _, length in self.lengths], dtype=torch.int32)

        def normal(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * self.spread).to(kind)

        self.q = normal(sum(rows), Q_HEADS, self.dim)
        self.keys, self.values = (normal(len(slots), self.kv_heads, self.dim) for _ in range(2))

    @property
    def sizes(self) -> dict[str, Any]:
        """Of a cache for it."""
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.page,
            "num_kv_heads": self.kv_heads,
            "head_size": self.dim,
            "dtype": self.dtype,
        }

    def fill(self, cache: kv.Cache) -> kv.Cache:
        """Write the keys and values."""
        kv.write_tokens(cache, 0, self.keys, self.values, self.slots)
        return cache

    def contiguous(self) -> tuple[Any, Any]:
        """Dense keys and dense values, `[block, token, head, dim]`."""
        import torch

        shape = (self.num_blocks, self.page, self.kv_heads, self.dim)
        pair = tuple(torch.full(shape, math.nan, dtype=self.keys.dtype) for _ in range(2))
        self.fill(kv.Cache(pair, "key: B N H D | value: B N H D"))
        return pair

    def ours(self, cache: kv.Cache, **options: Any) -> torch.Tensor:
        """kv.attention."""
        return kv.attention(self.q, cache, 0, self.table, self.seq_lens, self.starts, tile=TILE, **options)

    def theirs(self, key: Any, value: Any, **options: Any) -> torch.Tensor:
        """ModelOpt's kernel."""
        import torch
        from modelopt.torch.kernels.common.attention.triton_fa import attention

        none = torch.empty(0, self.kv_heads, self.dim, dtype=self.q.dtype)
        return attention(
            self.q,
            none,
            none,
            self.starts[:-1],
            self.starts[1:] - self.starts[:-1],
            max(q for q, _ in self.lengths),
            is_causal=True,
            b_seq_len_k=self.seq_lens,
            max_input_len_k=int(self.seq_lens.max()),
            k_cache=key,
            v_cache=value,
            block_table=self.table,
            page_size=key.shape[1],
            **options,
        )


def registry_batch(entry: kv.Entry, dtype: str) -> Batch:
    """A decode and a chunk; one block of all tokens where caches have no axis B."""
    if "B" in entry.order.replace("KV", ""):
        return Batch([(1, 37), (5, 21)], dtype=dtype)
    return Batch([(5, 21)], page=21, dtype=dtype, spare=0)


def run_registry(save: Callable[..., None]) -> dict[str, str]:
    """Every row with views, in f32 and f16; why a row was not run."""
    from kvstride import modelopt

    skipped = {}
    for dtype in DTYPES:
        dense: dict[int, Any] = {}
        for entry in strided_rows():
            batch = registry_batch(entry, dtype)
            if entry.name == "vllm/pallas" and dtype == "f32":
                skipped[f"{entry.name} {dtype}"] = "padded to 128 elements of 16 bits"
                continue
            layers = 2 if "L" in entry.order.split() and "L" not in entry.shape else 1
            memory = modelopt.make_kv_cache(entry.name, **batch.sizes, num_layers=layers, fill=math.nan)
            geometry = kv.Geometry(**batch.sizes)
            cache = batch.fill(kv.Cache(memory, entry.name, geometry=geometry))
            split = modelopt.split_kv_cache(memory, kv.layout(entry.name, geometry))
            if not split.dense_dim:
                skipped[f"{entry.name} {dtype}"] = "dims are not dense"
                continue
            if batch.page not in dense:
                dense[batch.page] = batch.theirs(*batch.contiguous())
            save(f"{entry.name} {dtype}", batch.theirs(*split), dense[batch.page], batch.ours(cache))
    return skipped


# --- Caches that the engine wrote -----------------------------------------------------------------------------------

#: Writers of `engine_writes_worker` that run by the interpreter: (name, writer, order, what the split is told).
WRITERS = [
    ("packed-hnd", "triton-packed", "B H N KV D", "TRITON_ATTN"),
    ("packed-nhd", "triton-packed", "B N H KV D", "TRITON_ATTN"),
    ("blocks-first-nhd", "triton-blocks-first", "B KV N H D", "vllm/flashinfer-nhd"),
    ("blocks-first-hnd", "triton-blocks-first", "B KV H N D", "vllm/flashinfer-hnd"),
    ("blocks-first-kv-in-token", "triton-blocks-first", "B N KV H D", "vllm/flex-attention"),
    ("kv-first-nhd", "triton-kv-first", "KV B N H D", "vllm/flash-attention-nhd"),
    ("kv-first-hnd", "triton-kv-first", "KV B H N D", "vllm/flash-attention-hnd"),
    ("rocm-segmented", "rocm-segmented", "B KV N H D", "ROCM_SEGMENTED_ATTN"),
]


def run_writers(save: Callable[..., None]) -> None:
    """The engine's own Triton kernels write, ModelOpt's kernel reads through the views."""
    import torch

    import engine_writes_worker as writes
    from kvstride import modelopt

    for dtype in DTYPES:
        batch = Batch([(1, 37), (5, 21)], dtype=dtype)
        dense = batch.theirs(*batch.contiguous())
        for name, writer, order, told in WRITERS:
            case = writes.Case(
                f"{name}-{dtype}", writer, order, dtype, num_blocks=batch.num_blocks, block_size=batch.page,
                num_kv_heads=batch.kv_heads, head_size=batch.dim,
            )  # fmt: skip
            (memory,) = writes.make_tensors(case)
            writes._write_triton(case, memory, batch.keys, batch.values, batch.slots)
            split = modelopt.split_kv_cache(memory, told, num_kv_heads=batch.kv_heads, head_size=batch.dim)
            flat = torch.empty(0, dtype=memory.dtype).set_(memory.untyped_storage())
            cache = kv.Cache(flat, order, geometry=kv.Geometry(**batch.sizes))
            save(f"{name} {dtype}", batch.theirs(*split), dense, batch.ours(cache))


# --- The plug-in ----------------------------------------------------------------------------------------------------

#: λ · length = a · exp(b · target), by phase: λ 0.15 and 0.46 at 97 tokens.
CALIBRATION = {"prefill": {"a": 6.0, "b": 3.0}, "decode": {"a": 30.0, "b": 2.0}}
TARGET = {"prefill": 0.3, "decode": 0.2}
LENGTHS = {
    "prefill": [(40, 40), (17, 17)],
    "chunked": [(20, 70), (9, 45)],
    "decode": [(1, 70), (1, 33), (1, 97)],
    "mixed": [(1, 70), (1, 97), (20, 70), (17, 33)],
    "mixed in any order": [(20, 70), (1, 97), (17, 33), (1, 70)],
    "mixed, padded": [(1, 70), (20, 70), (0, 0), (0, 0)],
}


def lambdas(batch: Batch) -> list[float]:
    """λ of each sequence by the formula, off where there is none."""
    from kvstride import modelopt

    longest = max(length for _, length in batch.lengths)
    found = []
    for rows, _ in batch.lengths:
        phase = "prefill" if rows > 1 else "decode"
        pair = CALIBRATION[phase]
        found.append(modelopt.skip_lambda(pair["a"], pair["b"], TARGET[phase], longest) or 0.0)
    return found


class Launch:
    """One launch of the plug-in on stub metadata, and what it must give."""

    def __init__(self, plugin: Any, batch: Batch, backend: str, layout: str | None, num_layers: int = 1) -> None:
        import torch

        from kvstride import modelopt
        from kvstride.vllm import layout_of_backend

        self.plugin, self.batch, self.native_calls, self.quant_kw = plugin, batch, 0, None
        self.memory = modelopt.make_kv_cache(
            backend, **batch.sizes, layout=layout, num_layers=num_layers, fill=math.nan
        )
        named = layout_of_backend(backend, **batch.sizes, layout=layout, num_layers=num_layers)
        self.cache = batch.fill(named.cache(self.memory))
        self.output = torch.full_like(batch.q, math.nan)

    def impl(self, made: type, sparse: dict[str, Any]) -> Any:
        """An adapter without its constructor."""
        impl = made.__new__(made)
        impl.scale = self.batch.dim**-0.5
        impl.num_kv_heads, impl.head_size, impl.kv_cache_dtype = self.batch.kv_heads, self.batch.dim, "auto"
        impl.sparse_kw, impl.quant_kw = dict(sparse), self.quant_kw
        impl._forward_vllm_flash_attn = self.native
        return impl

    def native(self, *launch: Any) -> Any:
        """The engine's own attention: dense, all rows."""
        self.native_calls += 1
        used = int(self.batch.starts[-1])
        launch[6][:used] = kv.attention(
            self.batch.q, self.cache, 0, self.batch.table, self.batch.seq_lens, self.batch.starts
        )[:used]
        return launch[6]

    def flash(self, sparse: dict[str, Any], **changes: Any) -> Any:
        """Through the FlashAttention adapter."""
        from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

        batch = self.batch
        given = {
            "num_actual_tokens": int(batch.starts[-1]),
            "max_query_len": max(q for q, _ in batch.lengths),
            "query_start_loc": batch.starts,
            "max_seq_len": int(batch.seq_lens.max()),
            "seq_lens": batch.seq_lens,
            "block_table": batch.table,
            "slot_mapping": batch.slots,
        }
        for known in dataclasses.fields(FlashAttentionMetadata):  # to 0.31: those of cascade attention
            if known.default is dataclasses.MISSING:
                given.setdefault(known.name, None)
        metadata = FlashAttentionMetadata(**(given | changes))
        impl = self.impl(self.plugin.ModelOptSparseAttentionImpl, sparse)
        return impl.forward(types.SimpleNamespace(), batch.q, None, None, self.memory, metadata, output=self.output)

    def flashinfer(self, sparse: dict[str, Any], **changes: Any) -> Any:
        """Through the FlashInfer adapter."""
        batch = self.batch
        rows = [q for q, _ in batch.lengths]
        decodes = sum(q <= 1 for q in rows)
        metadata = types.SimpleNamespace(
            _modelopt_block_table=batch.table,
            _modelopt_seq_lens=batch.seq_lens,
            _modelopt_query_start_loc=batch.starts,
            _modelopt_num_actual_tokens=int(batch.starts[-1]),
            _modelopt_max_query_len=max(rows),
            _modelopt_max_seq_len=int(batch.seq_lens.max()),
            _modelopt_causal=True,
            num_decodes=decodes,
            num_prefills=len(rows) - decodes,
            num_decode_tokens=decodes,
            num_prefill_tokens=sum(q for q in rows if q > 1),
        )
        vars(metadata).update(changes)
        impl = self.impl(self.plugin.get_flashinfer_sparse_impl_cls(), sparse)
        return impl.forward(types.SimpleNamespace(), batch.q, None, None, self.memory, metadata, self.output)


FLASHINFER_BUILDER = "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder"
SKIP = {"threshold_scale_factor": CALIBRATION, "target_sparse_ratio": TARGET}
NM = {"sparsity_n": 2, "sparsity_m": 4, "dense_sink_tokens": 3, "dense_recent_tokens": 8}
OURS_NM = {"nm": (2, 4), "sink_tokens": 3, "recent": 8}


def run_plugin(save: Callable[..., None]) -> dict[str, Any]:
    """Launches of the patched plug-in, and the facts of the patch."""
    from unittest import mock

    import torch
    from modelopt.torch.sparsity.attention_sparsity.plugins import vllm as plugin

    from absent import stand_ins
    from kvstride import modelopt
    from kvstride.vllm import engine

    facts: dict[str, Any] = {}
    batch = Batch(LENGTHS["prefill"], spread=2.0)
    try:
        Launch(plugin, batch, "FLASH_ATTN", "LBHNC").flash(SKIP)
        facts["without the patch"] = "ran"
    except Exception as error:
        facts["without the patch"] = f"{type(error).__name__}: {error}"

    before = plugin.ModelOptSparseAttentionImpl.forward, plugin._flashinfer_forward
    builder = sys.modules["vllm.v1.attention.backends.flash_attn"].FlashAttentionMetadataBuilder
    built = builder.build
    # the cache's layout alone put right: what then happens to a mixed batch
    batch = Batch(LENGTHS["mixed"], spread=2.0)
    launch = Launch(plugin, batch, "FLASH_ATTN", "LBHNC")
    with mock.patch.object(plugin, "_flash_attention_kv_cache_layout", lambda: "packed"):
        got = launch.flash(SKIP)
    right, wrong = lambdas(batch), [lambdas(batch)[-1]] * len(batch.lengths)
    attend = functools.partial(batch.ours, launch.cache)
    save("without the phase split", got, attend(skip_lambda=right), attend(skip_lambda=wrong))

    with modelopt.patch() as patch:
        facts["again"] = modelopt.patch() is patch and modelopt.patch(plugin) is patch
        _run_launches(save, plugin, stand_ins)
        _run_edges(save, plugin, facts)
    facts["undone"] = (
        plugin.ModelOptSparseAttentionImpl.forward is before[0]
        and plugin._flashinfer_forward is before[1]
        and builder.build is built
        and not hasattr(plugin, "_kvstride_patch")
    )
    facts["built"] = [_parts_of_a_built_batch(builder, torch)]
    with stand_ins():
        facts["built"].append(_parts_of_a_built_batch(engine.find(FLASHINFER_BUILDER), torch))
    facts["refused"] = _refusals(plugin)
    facts["groups"] = _loader()
    facts["fit"] = _fits()
    return facts


def _run_launches(save: Callable[..., None], plugin: Any, stand_ins: Any) -> None:
    def check(name: str, launch: Launch, got: Any, **options: Any) -> None:
        batch = launch.batch
        dense = batch.ours(launch.cache)
        ours, counts = batch.ours(launch.cache, counters=True, **options)
        save(name, got, dense, ours, counts=counts, native=np.array(launch.native_calls))

    layouts = [("LBHNC", 1), ("LBNHC", 1), ("BLHNC", 2), ("LHBNC", 1)]
    for name, lengths in LENGTHS.items():
        for layout, layers in layouts if name == "mixed" else layouts[:1]:
            batch = Batch(lengths, spread=2.0)
            launch = Launch(plugin, batch, "FLASH_ATTN", layout, layers)
            check(f"flash {name} {layout}", launch, launch.flash(SKIP), skip_lambda=lambdas(batch))
    for name in ("chunked", "mixed", "mixed in any order"):
        batch = Batch(LENGTHS[name], spread=2.0)
        launch = Launch(plugin, batch, "FLASH_ATTN", "LBHNC")
        check(f"flash {name} N:M", launch, launch.flash(NM), **OURS_NM)
        launch = Launch(plugin, batch, "FLASH_ATTN", "LBHNC")
        check(f"flash {name} both", launch, launch.flash(SKIP | NM), skip_lambda=lambdas(batch), **OURS_NM)
    batch = Batch(LENGTHS["mixed"], dtype="f16")
    launch = Launch(plugin, batch, "FLASH_ATTN", "LBNHC")
    check("flash mixed f16", launch, launch.flash(SKIP), skip_lambda=lambdas(batch))

    import torch

    for name, flags in (("causal by request", [1, 0, 1, 0]), ("causal all", [1] * 4), ("causal none", [0] * 4)):
        batch = Batch(LENGTHS["mixed"], spread=2.0)
        launch = Launch(plugin, batch, "FLASH_ATTN", "LBHNC")
        got = launch.flash(SKIP, causal=torch.tensor(flags, dtype=torch.int32))
        check(f"flash {name}", launch, got, skip_lambda=lambdas(batch), causal=np.array(flags, bool))
    with stand_ins():
        for name in ("prefill", "decode", "mixed", "mixed in any order"):
            for layout in ("LBHNC", "LBNHC") if name == "mixed" else ("LBNHC",):
                batch = Batch(LENGTHS[name], spread=2.0)
                launch = Launch(plugin, batch, "FLASHINFER", layout)
                check(f"flashinfer {name} {layout}", launch, launch.flashinfer(SKIP), skip_lambda=lambdas(batch))


def _run_edges(save: Callable[..., None], plugin: Any, facts: dict[str, Any]) -> None:
    from kvstride import modelopt

    batch = Batch(LENGTHS["mixed"], spread=2.0)
    launch = Launch(plugin, batch, "FLASH_ATTN", "LBHNC")
    impl = launch.impl(plugin.ModelOptSparseAttentionImpl, SKIP)
    profiled = impl.forward(None, batch.q, None, None, launch.memory, None, output=launch.output)
    facts["profiling"] = bool((profiled == 0).all())
    # quantized probabilities: no λ, so that the kernel over the whole batch is what both phases must give
    launch = Launch(plugin, batch, "FLASH_ATTN", "BLHNC", 2)
    quantized = {"p_qdq": "fp8", "p_qdq_amax": 1.0}
    launch.quant_kw = quantized | {"v_qdq": None, "v_qdq_amax": None}
    got = launch.flash({})
    whole = batch.theirs(*modelopt.split_kv_cache(launch.memory, "FLASH_ATTN"), **quantized)
    plain = batch.ours(launch.cache)
    facts["fp8 P"] = [float((got - whole).abs().max()), float((got - plain).abs().max()), launch.native_calls]
    wrong = Launch(plugin, batch, "FLASH_ATTN", "LBHNC")
    wrong.memory = wrong.memory.unsqueeze(0)
    try:
        wrong.flash(SKIP)
        facts["five dimensions"] = "ran"
    except kv.LayoutError as error:
        facts["five dimensions"] = str(error)


def _parts_of_a_built_batch(builder: type, torch: Any) -> dict[str, Any]:
    """What a patched `build` notes: of a mixed batch, of decodes, and after the patch was undone."""
    from kvstride import modelopt

    original = builder.build  # type: ignore[attr-defined]

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return types.SimpleNamespace()

    def common(starts: list[int]) -> Any:
        rows = np.diff(starts)
        return types.SimpleNamespace(
            query_start_loc=torch.tensor(starts),
            query_start_loc_cpu=torch.tensor(starts),
            max_query_len=int(rows.max()),
            causal=True,
        )

    builder.build = build  # type: ignore[attr-defined]
    try:
        with modelopt.patch() as patch:
            made = object.__new__(builder)
            mixed = made.build(0, common([0, 3, 4, 9, 10]))
            decodes = made.build(common_prefix_len=0, common_attn_metadata=common([0, 1, 2]))
            noted = [
                [p.requests.tolist(), p.tokens.tolist(), p.starts.tolist(), p.max_query_len]
                for p in mixed._kvstride_parts
            ]
            # somebody wraps the patched function, and the patch is undone afterwards
            theirs = functools.wraps(builder.build)(lambda *a, inner=builder.build, **k: inner(*a, **k))  # type: ignore[attr-defined]
            builder.build = theirs  # type: ignore[attr-defined]
            patch.undo()
            later = made.build(0, common([0, 3, 4]))
            kept = builder.build is theirs  # type: ignore[attr-defined]
    finally:
        builder.build = original  # type: ignore[attr-defined]
    return {
        "mixed": noted,
        "decodes": hasattr(decodes, "_kvstride_parts"),
        "after": hasattr(later, "_kvstride_parts"),
        "theirs is kept": kept,
    }


def _refusals(plugin: Any) -> dict[str, str]:
    """What the patch says of a plug-in, a ModelOpt and a vLLM that it does not know."""
    from importlib import metadata
    from unittest import mock

    import vllm

    from kvstride import modelopt

    said = {}

    def attempt(name: str, given: Any = plugin) -> None:
        try:
            modelopt.patch(given).undo()
            said[name] = "patched"
        except kv.EngineError as error:
            said[name] = str(error)

    with mock.patch.object(metadata, "version", lambda name: "0.48.0"):
        attempt("release")
    with mock.patch.object(vllm, "__version__", "0.28.0"):
        attempt("older vLLM")
    with mock.patch.object(vllm, "__version__", "0.33.0"):
        attempt("newer vLLM")
    with mock.patch.object(plugin, "_resolve_forward", lambda impl, layer: None):
        attempt("arguments")
    with mock.patch.object(plugin, "_FLASHINFER_METADATA_FIELDS", {}):
        attempt("fields")
    attempt("another module", types.ModuleType("other"))
    said["untouched"] = str(not hasattr(plugin, "_kvstride_patch"))
    return said


def _blocks() -> list[dict[str, Any]]:
    """Blocks whose arguments are compared with what ModelOpt's own loader makes of them."""
    skip = {
        "algorithm": "skip_softmax",
        "targets": ["LlamaAttention"],
        "ignore": ["cross_attn", "layers.0."],
        "threshold_scale_factor": {"formula": "a * exp(b * target_sparsity)", **CALIBRATION},
        "target_sparsity": {"prefill": 0.3},
    }
    nm = {"algorithm": "sparse_softmax", "sparsity_n": 2, "sparsity_m": 8, "dense_recent_tokens": 32}
    plain = {"algorithm": "skip_softmax"}
    return [
        {"config_groups": {f"group_{i}": group for i, group in enumerate(groups)}}
        for groups in ([skip], [nm], [plain], [skip, nm], [nm, skip], [plain, nm], [skip, plain])
    ]


def _loader() -> list[list[Any]]:
    """[ours, theirs] for each block, name and phase: the kernel's arguments at 4096 tokens."""
    from modelopt.torch.sparsity.attention_sparsity.plugins import vllm as plugin
    from modelopt.torch.sparsity.attention_sparsity.plugins.sparse_attn_config import (
        load_from_checkpoint_metadata,
        match_sparse_config,
    )

    from kvstride import modelopt

    out = []
    for block in _blocks():
        groups = modelopt.read_config(block)
        config, _ = load_from_checkpoint_metadata(types.SimpleNamespace(sparse_attention_config=block))
        for name in ("model.layers.3.self_attn.attn", "model.layers.0.self_attn.attn", "x.cross_attn", "x.mlp"):
            layer = modelopt.for_layer(groups, name)
            matched = match_sparse_config(name, config)
            for phase in ("prefill", "decode"):
                kernel = {}
                if matched is not None and matched.get("enable", True):
                    kernel = plugin._build_sparse_kw(matched)
                plugin._resolve_skip_softmax_calibration(kernel, is_prefill=phase == "prefill", max_seq_len=4096)
                if phase == "decode":
                    kernel = {k: v for k, v in kernel.items() if k == "skip_softmax_threshold"}
                ours = layer.arguments(phase, 4096)
                ours.pop("tile", None)
                renamed = {
                    "skip_lambda": kernel.get("skip_softmax_threshold"),
                    "nm": [kernel["sparsity_n"], kernel["sparsity_m"]] if "sparsity_n" in kernel else None,
                    "recent": kernel.get("dense_recent_tokens"),
                    "sink_tokens": kernel.get("dense_sink_tokens"),
                }
                theirs = {k: v for k, v in renamed.items() if v is not None}
                out.append([json.loads(json.dumps(ours)), theirs])
    return out


def _fits() -> list[list[list[float]]]:
    """[ours, theirs] of (a, b, R², least, most): the fit of noisy measurements, in linear and in log space."""
    from unittest import mock

    from modelopt.torch.sparsity.attention_sparsity.calibration import calibrator

    from kvstride import modelopt

    rng = np.random.default_rng(5)
    lengths = [1024, 4096, 16384]
    factors = np.outer(lengths, modelopt.THRESHOLD_TRIALS)
    measured = np.clip(np.log(factors / 5.0) / 9.0 + rng.normal(0, 0.02, factors.shape), 0, 1)
    out = []
    for log_space in (False, True):
        made = calibrator.DynamicThresholdCalibrator(fit_logspace=log_space)
        assert list(made.threshold_trials) == list(modelopt.THRESHOLD_TRIALS)
        stats = [{"sample_length": n, "sparsity": row.tolist()} for n, row in zip(lengths, measured, strict=True)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(calibrator, "get_sparse_attention_modules", lambda model: [0]))
            for method in ("_set_thresholds", "_enable_calibration_mode", "_disable_calibration_mode"):
                stack.enter_context(mock.patch.object(made, method, lambda *_: None))
            said = functools.partial(lambda found, *_, **__: found, stats)
            stack.enter_context(mock.patch.object(made, "_extract_calibration_stats", said))
            theirs = made.calibrate(None, lambda model: None, "prefill")
        ours = modelopt.fit(modelopt.THRESHOLD_TRIALS, lengths, measured, log_space=log_space)
        names = ("a", "b", "r_squared", "min_observed_sparsity", "max_observed_sparsity")
        out.append([list(ours), [theirs[name] for name in names]])
    return out


def main(directory: str) -> None:
    """Run everything and leave `kernels.npz`, `plugin.npz` and `facts.json` in the directory."""
    # PYTEST_VERSION: then ModelOpt's kernel has one tile size instead of a search among three
    os.environ.update(TRITON_INTERPRET="1", PYTEST_VERSION="9", OMP_NUM_THREADS="1")
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    for name in ("torchvision", "torchaudio", "torchcodec"):  # built for CUDA torch: their import fails here
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    import engine_writes_worker as writes

    writes._offer_triton()
    import torch

    torch.cuda.device = lambda *_: contextlib.nullcontext()  # the kernel's launches name a device; there is none
    out = Path(directory)
    facts: dict[str, Any] = {"failed": {}}

    def part(name: str, run: Callable[[Callable[..., None]], Any]) -> None:
        saved: dict[str, np.ndarray] = {}

        def save(case: str, got: Any, reference: Any, ours: Any, **more: np.ndarray) -> None:
            for kind, array in {"got": got, "reference": reference, "ours": ours, **more}.items():
                saved[f"{case}|{kind}"] = np.asarray(array)

        try:
            facts[name] = run(save)
        except Exception:
            facts["failed"][name] = traceback.format_exc()
        np.savez(out / f"{name}.npz", **saved)

    part("registry", run_registry)
    part("writers", run_writers)
    part("plugin", run_plugin)
    (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
