# SPDX-License-Identifier: Apache-2.0
"""The engine's own writes, read back through kvstride: vLLM's CPU op for each ISA, its Triton kernels for each layout.

Nothing here writes with kvstride, and nothing but kvstride says where an element lies: if K and V, two heads or
two dims changed places in a layout's description, some digit would read back wrong.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine_writes_worker as worker
import kvstride as kv
from engine_writes_worker import AMX16, AMX32, CASES, CPU_CASES, VEC, Case

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and not os.environ.get("KVSTRIDE_REQUIRE_VLLM"),
    reason="vLLM is not installed; with KVSTRIDE_REQUIRE_VLLM=1 this fails",
)

# How the registry calls what the engine declares: (writer, order) of a case.
NAMES = {
    ("cpu", VEC): "vllm/cpu-vec",
    ("cpu", AMX16): "vllm/cpu-amx16",
    ("cpu", AMX32): "vllm/cpu-amx32",
    ("triton-packed", "B H N KV D"): "vllm/packed-hnd",
    ("triton-packed", "B N H KV D"): "vllm/packed-nhd",
    ("triton-packed", "B L H N KV D"): "vllm/blhnc",
    ("triton-packed", "L B N H KV D"): "vllm/lbnhc",
    ("triton-packed", "L H B N KV D"): "vllm/lhbnc",
    ("triton-packed", "B H L N KV D"): "vllm/bhlnc",
    ("triton-blocks-first", "B KV N H D"): "vllm/flashinfer-nhd",
    ("triton-blocks-first", "B KV H N D"): "vllm/flashinfer-hnd",
    ("triton-blocks-first", "B N KV H D"): "vllm/flex-attention",
    ("triton-kv-first", "KV B N H D"): "vllm/flash-attention-nhd",
    ("triton-kv-first", "KV B H N D"): "vllm/flash-attention-hnd",
    ("rocm-attn", "B {key: H D/x N D%x, value: H D N}"): "vllm/rocm-lbhnc",
    ("rocm-attn-kv-first", "{key: B H D/x N D%x, value: B H D N}"): "vllm/rocm-attention",
    ("rocm-segmented", "B KV N H D"): "vllm/two-slot-lbhnc",
    ("aiter-shuffle", "B {key: H D/x N D%x, value: H N/x D N%x}"): "vllm/aiter-shuffle-lbhnc",
    ("triton-diff-kv", "B H N {key: D, value: D}"): "vllm/packed-hnd",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where one run of the worker left every case's bytes."""
    folder = tmp_path_factory.mktemp("engine_writes")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", worker.__file__, str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def geometry(case: Case) -> kv.Geometry:
    """The sizes of a case."""
    return kv.Geometry(
        num_layers=case.num_layers, num_blocks=case.num_blocks, block_size=case.block_size,
        num_kv_heads=case.num_kv_heads, head_size=case.head_size, value_head_size=case.value_head_size or None,
        dtype=case.stored,
    )  # fmt: skip


#: vLLM's CPU build has AMX tiles (it makes them without AMX, too) and fp8 KV in its AVX-512 part only.
WIDE = "avx512f" in Path("/proc/cpuinfo").read_text()


def runs(case: Case) -> bool:
    """Whether vLLM has the case's kernel on this machine."""
    return WIDE or case not in CPU_CASES or (not case.isa.startswith("amx") and not case.stored.startswith("f8"))


def load(results: Path, case: Case, pass_: int) -> tuple[list[Any], Any]:
    """The engine's tensors as they were after the write, one a layer, and their memory as flat bytes."""
    import torch

    if not runs(case):
        pytest.skip("vLLM has this kernel on CPUs with AVX-512 only")
    error = results / f"{case.name}.error"
    assert not error.exists(), error.read_text()
    tensors = worker.make_tensors(case)
    memory = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    memory.copy_(torch.from_numpy(np.load(results / f"{case.name}.npz")[f"bytes{pass_}"]))
    return tensors, memory


def floats(tensor: Any, case: Case) -> np.ndarray:
    """Elements as numbers, whatever they are stored in."""
    import torch

    kinds = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}
    if case.stored in kinds and tensor.dtype == torch.uint8:
        tensor = tensor.view(kinds[case.stored])
    return tensor.to(torch.float32).numpy()


def dense(cache: kv.Cache, layer: int, plane: str, case: Case) -> Any:
    """A plane as [block, token, head, dim]: through the view of its split axes, which lie beside each other."""
    dim = case.value_dim if plane.startswith("value") else case.head_size
    return cache.plane(layer, plane).reshape(case.num_blocks, case.block_size, case.num_kv_heads, -1)[..., :dim]


def assert_reads_back(cache: kv.Cache, case: Case, pass_: int) -> None:
    """Every written slot holds what the engine was given, every other slot still its poison."""
    slot = worker.slots(case)
    used = slot[slot >= 0]
    unused = np.setdiff1d(np.arange(case.num_blocks * case.block_size), used)
    poison = floats(_poison(case), case)
    gathered = kv.gather_tokens(cache, used)
    for layer in range(case.num_layers):
        for plane, rows in zip(("key", "value"), worker.written(case, layer, pass_), strict=True):
            expected = rows[slot >= 0]
            view = floats(dense(cache, layer, plane, case), case)
            np.testing.assert_array_equal(view[used // case.block_size, used % case.block_size], expected, plane)
            np.testing.assert_array_equal(floats(gathered[plane][layer], case), expected, plane)
            rest = view[unused // case.block_size, unused % case.block_size]
            np.testing.assert_array_equal(rest, np.broadcast_to(poison, rest.shape))


def _poison(case: Case) -> Any:
    import torch

    itemsize = {"f32": 4, "bf16": 2, "f16": 2}.get(case.stored, 1)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}.get(case.stored, torch.uint8)
    return torch.full((itemsize,), worker.POISON, dtype=torch.uint8).view(kind)


def test_every_isa_that_the_op_accepts_has_a_case(results: Path) -> None:
    accepted = json.loads((results / "isas.json").read_text())
    taken = {isa: set(dtypes.split()) for isa, dtypes in accepted.items() if not dtypes.startswith("refused")}
    tested: dict[str, set[str]] = {}
    for case in filter(runs, CPU_CASES):
        tested.setdefault(case.isa, set()).add(case.dtype)
    assert taken == tested, accepted


@pytest.mark.parametrize("case", [c for c in CASES if c.stored != "i8"], ids=lambda c: c.name)
def test_engine_writes_read_back(results: Path, case: Case) -> None:
    for pass_ in range(worker.num_passes(case)):
        _, memory = load(results, case, pass_)
        assert_reads_back(kv.Cache(memory, case.order, geometry=geometry(case)), case, pass_)


@pytest.mark.parametrize("case", [c for c in CASES if (c.writer, c.order) in NAMES], ids=lambda c: c.name)
def test_engine_tensors_read_back_by_name(results: Path, case: Case) -> None:
    tensors, _ = load(results, case, 0)
    name = NAMES[case.writer, case.order]
    cache = kv.Cache(tensors if case.num_layers > 1 else tensors[0], name, geometry=geometry(case))
    assert_reads_back(cache, case, 0)


@pytest.mark.parametrize("case", [c for c in CASES if c.stored != "i8"], ids=lambda c: c.name)
def test_write_tokens_leaves_the_engines_bytes(results: Path, case: Case) -> None:
    import torch

    _, theirs = load(results, case, 0)
    ours = torch.full_like(theirs, worker.POISON)
    cache = kv.Cache(ours, case.order, geometry=geometry(case))
    for layer in range(case.num_layers):
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[case.dtype]
        key, value = (torch.from_numpy(rows).to(kind) for rows in worker.written(case, layer, 0))
        kv.write_tokens(cache, layer, key, value, worker.slots(case))
    assert torch.equal(ours, theirs)


def test_the_first_half_of_packed_content_is_k(results: Path) -> None:
    case = next(c for c in CASES if c.name == "packed-hnd-bf16")
    _, memory = load(results, case, 0)
    exchanged = kv.Cache(memory, "B H N {value: D, key: D}", geometry=geometry(case))
    with pytest.raises(AssertionError):
        assert_reads_back(exchanged, case, 0)


def test_heads_and_tokens_in_the_wrong_order_are_seen(results: Path) -> None:
    case = next(c for c in CASES if c.name == "packed-hnd-bf16")
    _, memory = load(results, case, 0)
    with pytest.raises(AssertionError):
        assert_reads_back(kv.Cache(memory, "B N H KV D", geometry=geometry(case)), case, 0)


def test_the_cpu_shape_read_as_packed_is_wrong(results: Path) -> None:
    """CPU_ATTN declares the packed tensors' shape [B, H, N, 2 D] and strides, but fills it with tiles."""
    case = next(c for c in CASES if c.name == "cpu-vec-bf16")
    _, memory = load(results, case, 0)
    with pytest.raises(AssertionError):
        assert_reads_back(kv.Cache(memory, "B H N KV D", geometry=geometry(case)), case, 0)


def test_per_token_head_scales_read_back(results: Path) -> None:
    """Data and scale multiply to what was written: the values are whole numbers times powers of two."""
    case = next(c for c in CASES if c.name == "per-token-head-i8")
    _, memory = load(results, case, 0)
    cache = kv.Cache(memory, case.order, geometry=geometry(case))
    slot = worker.slots(case)
    used = slot[slot >= 0]
    for plane, rows in zip(("key", "value"), worker.written(case, 0, 0), strict=True):
        where = used // case.block_size, used % case.block_size
        data = cache.plane(0, plane).numpy()[where].astype(np.float32)
        scale = cache.plane(0, f"{plane}_scale").numpy()[where]
        np.testing.assert_array_equal(data * scale, rows[slot >= 0], plane)
        np.testing.assert_array_equal(scale[..., 0], np.abs(rows[slot >= 0]).max(axis=2) / 127)
