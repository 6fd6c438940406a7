# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's own KV write ops and Triton write kernels on tiny caches and saves the bytes they left.

`test_engine_writes.py` starts this file as a program, because Triton's interpreter has to be
chosen before Triton is imported, and because vLLM should not be loaded into the test process.
Importing it loads neither vLLM nor torch: the table of cases is plain data, used by both sides.

Each case is written several times, once a *digit*: in pass p the engine writes digit p (to a base
that the cache's dtype holds exactly) of each element's number. An element that reads back right in
every pass can only be the one that was written.
"""

from __future__ import annotations

import ast
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

POISON = 0xA5
ISAS = ("vec", "vec16", "amx", "amx_fp8", "neon", "vxe", "rvv", "vsx")
AMX16 = "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}"
AMX32 = "B H {key: N/16 D N%16, value: D/16 N D%16}"
VEC = "B H {key: D N, value: N D}"


@dataclass(frozen=True)
class Case:
    """One write by the engine: who writes, into what, and the order in which the bytes must lie."""

    name: str
    writer: str
    order: str
    dtype: str = "bf16"  # of key and value
    cache_dtype: str = ""  # of the cache where it differs
    isa: str = ""
    num_blocks: int = 5
    block_size: int = 32
    num_kv_heads: int = 3
    head_size: int = 64
    value_head_size: int = 0
    num_layers: int = 1

    @property
    def stored(self) -> str:
        """The dtype of the cache's elements."""
        return self.cache_dtype or self.dtype

    @property
    def value_dim(self) -> int:
        """The head size of V."""
        return self.value_head_size or self.head_size


def _cpu(isa: str, dtype: str, order: str, cache_dtype: str = "", **sizes: int) -> Case:
    size = "".join(f"-{k[:1]}{v}" for k, v in sizes.items())
    name = f"cpu-{isa}-{dtype}" + (f"-{cache_dtype}" if cache_dtype else "") + size
    return Case(name, "cpu", order, dtype, cache_dtype, isa, **sizes)


CPU_CASES = [
    *(_cpu("vec", d, VEC) for d in ("bf16", "f16", "f32")),
    _cpu("vec", "bf16", VEC, block_size=128, head_size=128),
    _cpu("vec", "bf16", VEC, block_size=96, head_size=96),
    *(_cpu("vec16", d, VEC, block_size=16, head_size=80) for d in ("bf16", "f16", "f32")),
    _cpu("vec16", "bf16", VEC, block_size=48, head_size=112),
    *(_cpu("amx", d, AMX16) for d in ("bf16", "f16")),
    _cpu("amx", "bf16", AMX16, block_size=128, head_size=128),
    _cpu("amx", "f32", AMX32),
    *(_cpu("vec", d, VEC, c) for d in ("bf16", "f32") for c in ("f8_e4m3", "f8_e5m2")),
    *(_cpu("amx", d, AMX16, c) for d in ("bf16", "f32") for c in ("f8_e4m3", "f8_e5m2")),
]
_SMALL = {"block_size": 16, "head_size": 32}
TRITON_CASES = [
    *(Case(f"packed-hnd-{d}", "triton-packed", "B H N KV D", d, **_SMALL) for d in ("bf16", "f16", "f32")),
    Case("packed-nhd-bf16", "triton-packed", "B N H KV D", **_SMALL),
    Case("packed-two-heads", "triton-packed", "B H N KV D", num_kv_heads=2, **_SMALL),
    Case("packed-blhnc", "triton-packed", "B L H N KV D", num_layers=3, **_SMALL),
    Case("packed-lbnhc", "triton-packed", "L B N H KV D", num_layers=3, **_SMALL),
    Case("packed-lhbnc", "triton-packed", "L H B N KV D", num_layers=3, **_SMALL),
    Case("packed-bhlnc", "triton-packed", "B H L N KV D", num_layers=3, **_SMALL),
    Case("blocks-first-nhd", "triton-blocks-first", "B KV N H D", **_SMALL),
    Case("blocks-first-hnd", "triton-blocks-first", "B KV H N D", **_SMALL),
    Case("blocks-first-two-blocks", "triton-blocks-first", "B KV N H D", num_blocks=2, **_SMALL),
    Case("blocks-first-kv-in-token", "triton-blocks-first", "B N KV H D", **_SMALL),
    Case("kv-first-nhd", "triton-kv-first", "KV B N H D", **_SMALL),
    Case("kv-first-hnd", "triton-kv-first", "KV B H N D", **_SMALL),
    Case("kv-first-two-blocks", "triton-kv-first", "KV B N H D", num_blocks=2, **_SMALL),
    Case("rocm-attn", "rocm-attn", "B {key: H D/x N D%x, value: H D N}", block_size=64, head_size=32),
    Case("rocm-attn-kv-first", "rocm-attn-kv-first", "{key: B H D/x N D%x, value: B H D N}", **_SMALL),
    Case("rocm-attn-kv-first-f32", "rocm-attn-kv-first", "{key: B H D/x N D%x, value: B H D N}", "f32", **_SMALL),
    Case("rocm-segmented", "rocm-segmented", "B KV N H D", **_SMALL),
    Case("aiter-shuffle", "aiter-shuffle", "B {key: H D/x N D%x, value: H N/x D N%x}", **_SMALL),
    Case("diff-kv", "triton-diff-kv", "B H N {key: D, value: D}", value_head_size=16, **_SMALL),
    Case(
        "per-token-head-i8",
        "per-token-head",
        "B H N {key: {data: D i8, scale: D[1] f32}, value: {data: D i8, scale: D[1] f32}}",
        cache_dtype="i8",
        **_SMALL,
    ),
]
CASES = CPU_CASES + TRITON_CASES

# The largest base whose digits the dtype holds exactly.
_BASE = {"bf16": 256, "f16": 256, "f32": 1 << 20, "f8_e4m3": 16, "f8_e5m2": 8}


def slots(case: Case) -> np.ndarray:
    """The slot of each written token: a shuffle of most slots, with a few -1 (padding) among them."""
    rng = np.random.default_rng(len(case.name))
    total = case.num_blocks * case.block_size
    out = rng.permutation(total)[: total - 5]
    out[[1, len(out) // 2]] = -1
    return out.astype(np.int64)


def num_passes(case: Case) -> int:
    """How many digits number every element of one layer's key and value."""
    if case.stored == "i8":
        return 1
    largest = len(slots(case)) * case.num_kv_heads * (case.head_size + case.value_dim) * case.num_layers
    return max(1, math.ceil(math.log(largest, _BASE[case.stored])))


def written(case: Case, layer: int, pass_: int) -> tuple[np.ndarray, np.ndarray]:
    """Key and value, f32 [token, head, dim], that the engine is given in this pass."""
    tokens = len(slots(case))
    rows = (tokens, case.num_kv_heads)
    width = case.head_size + case.value_dim
    if case.stored == "i8":
        # Whole numbers up to 127 times a power of two: the engine's scale is that power, exactly.
        rng = np.random.default_rng(99)
        data = rng.integers(-126, 127, (*rows, width)).astype(np.float32)
        data[..., 0] = data[..., case.head_size] = 127
        powers = 2.0 ** rng.integers(-6, 7, (*rows, 2))
        key = data[..., : case.head_size] * powers[..., :1]
        return key.astype(np.float32), (data[..., case.head_size :] * powers[..., 1:]).astype(np.float32)
    count = tokens * case.num_kv_heads * width
    base = _BASE[case.stored]
    digits = (np.arange(layer * count, (layer + 1) * count) // base**pass_) % base
    digits = digits.astype(np.float32).reshape(*rows, width)
    return digits[..., : case.head_size], digits[..., case.head_size :]


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return {
        "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "i8": torch.int8,
        "f8_e4m3": torch.uint8, "f8_e5m2": torch.uint8,
    }[name]  # fmt: skip


def _poisoned(case: Case, *shape: int) -> torch.Tensor:
    """A tensor of the given memory order, every byte poison."""
    import torch

    dtype = _torch_dtype(case.stored)
    return torch.full((math.prod(shape) * dtype.itemsize,), POISON, dtype=torch.uint8).view(dtype).view(shape)


def make_tensors(case: Case) -> list[torch.Tensor]:
    """One tensor a layer in the shape that the engine declares, over memory in the case's order."""
    b, n, h, d, layers = case.num_blocks, case.block_size, case.num_kv_heads, case.head_size, case.num_layers
    c = d + case.value_dim
    if case.writer == "per-token-head":
        c += 8
    if layers > 1:  # vLLM 0.29 and later: views of one allocation, declared (layer,) [B, H, N, 2 D]
        axes = case.order.removesuffix(" KV D").split()
        size = {"L": layers, "B": b, "H": h, "N": n}
        memory = _poisoned(case, *(size[a] for a in axes), c)
        return list(memory.permute(*(axes.index(a) for a in "LBHN"), 4))
    if case.order == "B N H KV D":
        return [_poisoned(case, b, n, h, c).transpose(1, 2)]
    if case.writer == "triton-blocks-first":
        memory, order = {
            "B KV N H D": ((b, 2, n, h, d), (0, 1, 2, 3, 4)),
            "B KV H N D": ((b, 2, h, n, d), (0, 1, 3, 2, 4)),
            "B N KV H D": ((b, n, 2, h, d), (0, 2, 1, 3, 4)),
        }[case.order]
        return [_poisoned(case, *memory).permute(order)]
    if case.writer == "triton-kv-first":
        if case.order == "KV B H N D":
            return [_poisoned(case, 2, b, h, n, d).transpose(2, 3)]
        return [_poisoned(case, 2, b, n, h, d)]
    if case.writer == "rocm-attn-kv-first":
        return [_poisoned(case, 2, b, n, h, d)]
    if case.writer in ("rocm-attn", "rocm-segmented", "aiter-shuffle"):
        return [_poisoned(case, b, 2, n, h * d)]
    return [_poisoned(case, b, h, n, c)]


def _write_cpu(case: Case, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot: torch.Tensor) -> None:
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
    impl.attn_type = AttentionType.DECODER
    impl.kv_cache_dtype = {"f8_e4m3": "fp8_e4m3", "f8_e5m2": "fp8_e5m2"}.get(case.stored, "auto")
    impl.do_kv_cache_update(_layer(case), key, value, cache, slot)


def _layer(case: Case) -> Any:
    import types

    import torch

    one = torch.ones(1)
    return types.SimpleNamespace(isa=case.isa, _k_scale_float=1.0, _v_scale_float=1.0, _k_scale=one, _v_scale=one)


def _impl(module: str, name: str, case: Case, **attributes: Any) -> Any:
    """An engine's attention object without its constructor, which asks for a model."""
    import importlib

    from vllm.v1.attention.backend import AttentionType

    cls = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), name)
    impl = cls.__new__(cls)
    defaults = {
        "attn_type": AttentionType.DECODER, "head_size": case.head_size, "num_kv_heads": case.num_kv_heads,
        "kv_cache_dtype": "auto", "kv_sharing_target_layer_name": None,
    }  # fmt: skip
    for attribute, value in {**defaults, **attributes}.items():
        setattr(impl, attribute, value)
    return impl


def _aiter_writer() -> Callable[..., None]:
    """The shuffle writer of rocm_aiter_fa.py: its module defines it on ROCm only, so from its source."""
    import importlib.util

    spec = importlib.util.find_spec("vllm.v1.attention.backends.rocm_aiter_fa")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    wanted = ("reshape_and_cache_shuffle_kernel", "reshape_and_cache_shuffle_triton")
    functions = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name in wanted
    ]
    assert len(functions) == 2
    head = (
        "import torch\nfrom vllm.triton_utils import tl, triton\n"
        "from vllm.utils.torch_utils import is_quantized_kv_cache\n\n"
    )
    path = Path(tempfile.mkdtemp()) / "aiter_shuffle.py"  # Triton reads a kernel's source from its file
    path.write_text(head + "\n\n".join(functions))
    spec = importlib.util.spec_from_file_location("aiter_shuffle", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reshape_and_cache_shuffle_triton


def _write_triton(case: Case, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot: torch.Tensor) -> None:
    from vllm.v1.attention.ops.paged_attn import PagedAttention
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    layer = _layer(case)
    scales = (layer._k_scale, layer._v_scale)
    if case.writer == "triton-packed":
        impl = _impl("triton_attn", "TritonAttentionImpl", case, _is_per_token_head_quant=False)
        impl.do_kv_cache_update(layer, key, value, cache, slot)
    elif case.writer == "triton-blocks-first":  # triton_attn.py of 0.11 to 0.25: kv_cache.unbind(1)
        triton_reshape_and_cache_flash(key, value, *cache.unbind(1), slot, "auto", *scales)
    elif case.writer == "triton-kv-first":  # flash_attn.py to 0.22: kv_cache.unbind(0)
        triton_reshape_and_cache_flash(key, value, *cache.unbind(0), slot, "auto", *scales)
    elif case.writer == "rocm-attn":  # block size 64: the backend takes its Triton writer
        impl = _impl("rocm_attn", "RocmAttentionImpl", case)
        impl.do_kv_cache_update(layer, key, value, cache, slot)
    elif case.writer == "rocm-attn-kv-first":  # rocm_attn.py of 0.11 to 0.28
        split = PagedAttention.split_kv_cache(cache, case.num_kv_heads, case.head_size)
        triton_reshape_and_cache_flash(key, value, *split, slot, "auto", *scales)
    elif case.writer == "rocm-segmented":
        impl = _impl("rocm_segmented_attn", "RocmSegmentedAttentionImpl", case)
        impl.do_kv_cache_update(layer, key, value, cache, slot)
    elif case.writer == "aiter-shuffle":
        sides = cache.unflatten(-1, (case.num_kv_heads, case.head_size)).unbind(1)
        _aiter_writer()(key, value, *sides, slot, "auto", *scales)
    elif case.writer == "triton-diff-kv":
        impl = _impl("triton_attn_diffkv", "TritonAttentionDiffKVImpl", case, head_size_v=case.value_dim)
        impl.do_kv_cache_update(layer, key, value, cache, slot)
    elif case.writer == "per-token-head":
        from vllm.v1.kv_cache_interface import KVQuantMode

        impl = _impl(
            "triton_attn", "TritonAttentionImpl", case,
            _is_per_token_head_quant=True, _kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        )  # fmt: skip
        impl.do_kv_cache_update(layer, key, value, cache, slot)
    else:
        raise AssertionError(case.writer)


def _accepted_isas() -> dict[str, str]:
    """For each ISA name the dtypes that the op takes, or the reason why it takes none."""
    import torch
    from vllm import _custom_ops as ops

    out = {}
    for isa in ISAS:
        taken, reason = [], ""
        for name in ("bf16", "f16", "f32"):
            key = torch.zeros(1, 1, 64, dtype=_torch_dtype(name))
            halves = torch.zeros(1, 1, 64, 64, dtype=key.dtype).chunk(2, dim=2)
            try:
                ops.cpu_attn_reshape_and_cache(key, key, *halves, torch.zeros(1, dtype=torch.int64), isa)
                taken.append(name)
            except (RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
        out[isa] = " ".join(taken) or f"refused: {reason}"
    return out


def _offer_triton() -> None:
    """Let vLLM's CPU build use Triton: it looks for a back end named "cpu" and a Hopper device."""
    import types

    import torch
    import triton.backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def main(directory: str) -> None:
    """Run every case and write `<name>.npz` (or `<name>.error`) and `isas.json` into the directory."""
    os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    for name in ("torchvision", "torchaudio", "torchcodec"):  # built for CUDA torch: their import fails here
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    _offer_triton()
    import torch

    out = Path(directory)
    for case in CASES:
        write = _write_cpu if case.writer == "cpu" else _write_triton
        slot = torch.from_numpy(slots(case))
        try:
            saved: dict[str, np.ndarray] = {}
            for pass_ in range(num_passes(case)):
                caches = make_tensors(case)
                for layer, cache in enumerate(caches):
                    # contiguous: the kernels step over a token's heads by head_size, whatever the strides
                    pair = (
                        torch.from_numpy(x).to(_torch_dtype(case.dtype)).contiguous()
                        for x in written(case, layer, pass_)
                    )
                    write(case, cache, *pair, slot)
                raw = torch.empty(0, dtype=torch.uint8).set_(caches[0].untyped_storage())
                saved[f"bytes{pass_}"] = raw.numpy().copy()
            np.savez(out / f"{case.name}.npz", **saved)
        except Exception as error:
            (out / f"{case.name}.error").write_text(f"{type(error).__name__}: {error}")
    (out / "isas.json").write_text(json.dumps(_accepted_isas()))


if __name__ == "__main__":
    main(sys.argv[1])
