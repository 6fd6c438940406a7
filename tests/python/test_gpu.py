# SPDX-License-Identifier: Apache-2.0
"""The verbs on a real CUDA device through torch, against the oracle: `pytest -m gpu`. Without one, all are skipped."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvstride as kv
import oracle

try:
    import torch
except ImportError:
    torch = None


def _missing() -> str:
    """Why nothing here can run, or nothing."""
    if torch is None:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    if kv.num_cuda_devices() == 0:
        return f"kvstride: {kv.cuda_status()}"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_missing()), reason=_missing() or "-")]

#: Orders in which engines keep caches: one tensor a layer, all layers in one, split axes, K and V apart.
ORDERS = [
    "B KV N H D", "B KV H N D", "KV B N H D", "B N H KV D", "B H N KV D", "B H L KV N D", "L B N H KV D",
    "{key: B H D/x N D%x, value: B H D N}", "B H {key: D N, value: N D}", "key: B N H D | value: B H N D",
]  # fmt: skip
PAIRS = [(0, 3), (6, 1), (2, 2), (5, 8)]
BLOCKS = 9


def sizes(**more: Any) -> kv.Geometry:
    usual = {"num_layers": 3, "num_blocks": BLOCKS, "block_size": 16, "num_kv_heads": 4, "head_size": 64}
    return kv.Geometry(**{"dtype": "bf16", **usual, **more})


class There:
    """An oracle's memory and its copy on the device."""

    def __init__(self, layout: kv.Layout, seed: int, device: Any = "cuda:0") -> None:
        self.truth = oracle.Memory(layout, seed)
        self.tensors = [torch.from_numpy(b).to(device) for b in self.truth.buffers]
        parts = layout.num_parts
        columns = [self.tensors[p::parts] for p in range(parts)]
        self.cache = kv.Cache(columns[0] if parts == 1 else tuple(columns), layout)
        torch.cuda.synchronize()

    def check(self) -> None:
        """All bytes on the device are those of the truth, padding included."""
        torch.cuda.synchronize()
        for there, here in zip(self.tensors, self.truth.buffers, strict=True):
            assert np.array_equal(there.cpu().numpy(), here)

    @property
    def host(self) -> kv.Cache:
        """The truth as a cache."""
        return self.truth.cache()


def fast(src: There, dst: There, pairs: Any, **more: Any) -> None:
    """The truth by the CPU's verbs, which test_blocks_oracle.py compares with the element-by-element oracle."""
    kv.convert_blocks(src.host, dst.host, pairs, **more)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    kv.cuda_check(0)


def test_what_is_there() -> None:
    assert kv.num_cuda_devices() == torch.cuda.device_count()
    assert torch.cuda.get_device_name(0) in kv.cuda_status()


@pytest.mark.parametrize("to", ORDERS)
@pytest.mark.parametrize("of", ORDERS)
def test_convert(of: str, to: str) -> None:
    src, dst = There(kv.Layout(of, sizes()), 1), There(kv.Layout(to, sizes()), 2)
    fast(src, dst, PAIRS)
    assert kv.convert_blocks(src.cache, dst.cache, PAIRS) == len(PAIRS)
    dst.check()
    src.check()


@pytest.mark.parametrize("order", ORDERS)
def test_small_caches_against_every_element(order: str) -> None:
    small = sizes(num_layers=2, block_size=4, num_kv_heads=2, head_size=16)
    src, dst = There(kv.Layout(order, small), 1), There(kv.Layout("B KV H N D", small), 2)
    oracle.convert(src.truth, dst.truth, PAIRS)
    kv.convert_blocks(src.cache, dst.cache, PAIRS)
    dst.check()


@pytest.mark.parametrize("order", ORDERS)
def test_verbs_of_one_cache(order: str) -> None:
    memory = There(kv.Layout(order, sizes()), 3)
    for pairs in ([(0, 1), (1, 2), (2, 0)], [(3, 4), (4, 5), (3, 6)], [(7, 7), (8, 0)]):  # cycles, chains
        kv.copy_blocks(memory.host, pairs)
        assert kv.copy_blocks(memory.cache, pairs) == len(pairs)
        memory.check()
    kv.zero_blocks(memory.host, [2, 5])
    kv.zero_blocks(memory.cache, [2, 5])
    memory.check()
    other = There(memory.truth.layout, 4)
    kv.swap_blocks(memory.host, other.host, PAIRS, layers=(1, 1))
    kv.swap_blocks(memory.cache, other.cache, PAIRS, layers=(1, 1))
    other.check()


@pytest.mark.parametrize("order", ORDERS)
def test_tokens(order: str) -> None:
    memory = There(kv.Layout(order, sizes()), 5)
    slots = [17, 0, BLOCKS * 16 - 1, 64, 17]
    truth = kv.gather_tokens(memory.host, slots)
    for given in (slots, torch.tensor(slots, device="cuda"), torch.tensor(slots, device="cuda", dtype=torch.int32)):
        found = kv.gather_tokens(memory.cache, given)
        assert all(found[p].is_cuda and np.array_equal(_bits(found[p]), _bits(truth[p])) for p in truth)
    unlike = [3, 90, 41, 128, 16]
    kv.scatter_tokens(memory.host, unlike, truth)
    kv.scatter_tokens(memory.cache, torch.tensor(unlike, device="cuda"), found)
    memory.check()
    generator = torch.Generator().manual_seed(6)
    qkv = torch.randn((7, 3, 4, 64), generator=generator).to(torch.bfloat16)  # key and value are parts of it
    mapping = [4, -1, 100, 33, 12]
    kv.write_tokens(memory.host, 2, qkv[:, 1], qkv[:, 2], mapping)
    there = qkv.cuda()
    kv.write_tokens(memory.cache, 2, there[:, 1], there[:, 2], torch.tensor(mapping, device="cuda"))
    memory.check()


def _bits(tensor: Any) -> np.ndarray:
    if isinstance(tensor, np.ndarray):
        return tensor.view(np.uint16)
    return tensor.cpu().view(torch.uint16).numpy()


def test_casts_and_heads() -> None:
    src = There(kv.Layout("B KV N H D", sizes(dtype="f32")), 1)
    for tensor, buffer in zip(src.tensors, src.truth.buffers, strict=True):  # numbers, not any bits
        numbers = np.random.default_rng(1).normal(size=buffer.nbytes // 4).astype(np.float32)
        buffer[:] = numbers.view(np.uint8)
        tensor.copy_(torch.from_numpy(buffer))
    for dtype in ("bf16", "f16", "f8_e4m3", "f8_e5m2"):
        dst = There(kv.Layout("B KV H N D", sizes(dtype=dtype, num_kv_heads=2)), 2)
        more: dict[str, Any] = {"cast": True, "heads": (1, 0, 2)}
        if dtype.startswith("f8"):
            more["scales"] = {"key": [0.5, 2.0], "value": 0.25}
        fast(src, dst, PAIRS, **more)
        kv.convert_blocks(src.cache, dst.cache, PAIRS, **more)
        dst.check()


def test_token_sequences_and_plans() -> None:
    src, dst = There(kv.Layout("B KV N H D", sizes()), 1), There(kv.Layout("B KV H N D", sizes(block_size=48)), 2)
    for call in (kv.convert_blocks,):
        call(src.host, dst.host, src_blocks=[4, 1, 7], dst_blocks=[2], tokens=(3, 1, 40))
        call(src.cache, dst.cache, src_blocks=[4, 1, 7], dst_blocks=[2], tokens=(3, 1, 40))
    dst.check()
    same = There(kv.Layout("B KV H N D", sizes()), 3)
    fast(src, same, PAIRS)
    plan = kv.Plan(src.cache, same.cache).bind(PAIRS)
    plan.run(stream=torch.cuda.current_stream())
    same.check()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("of", "to"), [("B KV N H D", "B KV N H D"), ("B KV H N D", "B H L KV N D")])
def test_between_host_and_device(of: str, to: str, pinned: bool) -> None:
    src, dst = There(kv.Layout(of, sizes()), 1), There(kv.Layout(to, sizes()), 2)

    def on_host(memory: There) -> tuple[kv.Cache, list[Any]]:
        tensors = [torch.from_numpy(b.copy()) for b in memory.truth.buffers]
        tensors = [t.pin_memory() for t in tensors] if pinned else tensors
        return kv.Cache(tensors, memory.truth.layout), tensors

    source, _ = on_host(src)
    assert source.device == "cpu"
    target, back = on_host(dst)
    fast(src, dst, PAIRS)
    kv.convert_blocks(source, dst.cache, PAIRS)
    dst.check()
    kv.convert_blocks(src.cache, target, PAIRS)  # done when it returns
    assert all(np.array_equal(t.numpy(), b) for t, b in zip(back, dst.truth.buffers, strict=True))


@pytest.mark.parametrize("given", ["stream", "number", "current"])
def test_order_on_a_stream(given: str) -> None:
    src, dst = There(kv.Layout("B KV N H D", sizes()), 1), There(kv.Layout("B KV H N D", sizes()), 2)
    fast(src, dst, PAIRS)
    final = [t.clone() for t in src.tensors]
    for tensor in src.tensors:
        tensor.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # what the verb has to come after
        for tensor, value in zip(src.tensors, final, strict=True):
            tensor.copy_(value, non_blocking=True)
        if given == "current":
            kv.convert_blocks(src.cache, dst.cache, PAIRS)
    if given != "current":
        handle = stream if given == "stream" else stream.cuda_stream
        kv.convert_blocks(src.cache, dst.cache, PAIRS, stream=handle)
    assert not stream.query()  # the call has not waited
    with torch.cuda.stream(stream):
        seen = [t.clone() for t in dst.tensors]
    torch.cuda.synchronize()
    dst.check()
    assert all(torch.equal(a, b) for a, b in zip(seen, dst.tensors, strict=True))


def test_memory_of_tensors_that_are_dropped_is_not_used_again() -> None:
    memory = There(kv.Layout("B KV N H D", sizes()), 1)
    stream = torch.cuda.Stream()
    mapping = list(range(64))
    key = torch.randn((64, 4, 64)).to(torch.bfloat16)
    kv.write_tokens(memory.host, 0, key, key, mapping)
    there, slots = key.cuda(), torch.tensor(mapping, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
    kv.write_tokens(memory.cache, 0, there, there, slots, stream=stream)
    del there, slots
    gc.collect()
    for _ in range(8):  # would get the same memory, and overwrite it before the stream reads it
        torch.full((64, 4, 64), 7.0, dtype=torch.bfloat16, device="cuda")
        torch.full((64,), 5, dtype=torch.int64, device="cuda")
    memory.check()


def test_views_and_layouts_are_torchs() -> None:
    kv_cache = torch.zeros((BLOCKS, 2, 16, 4, 64), dtype=torch.bfloat16, device="cuda")
    cache = kv.Cache(kv_cache, "vllm/flashinfer-nhd")
    assert cache.device == "cuda:0" and cache.key().is_cuda
    cache.value()[3, 5] = 2
    assert torch.equal(kv_cache[3, 1, 5], torch.full_like(kv_cache[3, 1, 5], 2))
    hints = {"num_kv_heads": 4, "head_size": 64, "block_size": 16}
    assert "vllm/flashinfer-nhd" in [r.name for r in kv.candidates(kv_cache, **hints)]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ids_on_the_device(dtype: str) -> None:
    src, dst = There(kv.Layout("B KV N H D", sizes()), 1), There(kv.Layout("B KV H N D", sizes()), 2)
    pairs = torch.tensor(PAIRS, dtype=getattr(torch, dtype), device="cuda")
    for ids in (pairs, pairs.T.contiguous().T):
        fast(src, dst, PAIRS)
        assert kv.convert_blocks(src.cache, dst.cache, ids) == len(PAIRS)
        dst.check()
    kv.zero_blocks(dst.host, [1, 8])
    kv.zero_blocks(dst.cache, torch.tensor([1, BLOCKS, 8], dtype=pairs.dtype, device="cuda"))
    with pytest.raises(kv.BlockIndexError, match=rf"zero_blocks: id {BLOCKS} in ids\[1\]"):
        kv.cuda_check("cuda:0")
    dst.check()
    with pytest.raises(kv.ArgumentError, match="ids on cuda:0, the cache is not"):
        kv.zero_blocks(dst.host, pairs[:, 0])
    with pytest.raises(kv.DTypeError, match="dtype int16 on cuda:0, expected int32 or int64"):
        kv.zero_blocks(dst.cache, pairs[:, 0].to(torch.int16))


def test_other_exporters() -> None:
    class OnlyInterface:
        def __init__(self, tensor: Any) -> None:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__

    class OnlyDLPack:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack__(self, **more: Any) -> Any:
            return self.tensor.__dlpack__(**more)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    layout = kv.Layout("B KV N H D", sizes())
    for wrap in (OnlyInterface, OnlyDLPack):
        memory = There(layout, 1)
        cache = kv.Cache([wrap(t) for t in memory.tensors], layout)
        assert cache.device == "cuda:0"
        kv.copy_blocks(memory.host, [(0, 1), (1, 0)])
        kv.copy_blocks(cache, [(0, 1), (1, 0)])
        memory.check()
    view = cache.key(0) if wrap is OnlyDLPack else None
    assert view is not None and view.is_cuda
    interface = kv.Cache([OnlyInterface(t) for t in memory.tensors], layout).key(1)
    assert torch.as_tensor(interface, device="cuda").data_ptr() == interface.__cuda_array_interface__["data"][0]


def test_cuda_graphs() -> None:
    src, dst = There(kv.Layout("B KV N H D", sizes()), 1), There(kv.Layout("B KV H N D", sizes()), 2)
    host = src.host
    ids = torch.tensor(PAIRS, device="cuda")
    kv.convert_blocks(src.cache, dst.cache, PAIRS)  # what is made at first use is there
    torch.cuda.synchronize()
    refused: list[str] = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except kv.DeviceError as error:
            refused.append(str(error).rpartition("cannot take ")[2])

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attempt(lambda: kv.convert_blocks(src.cache, dst.cache, ids))
        attempt(lambda: kv.convert_blocks(host, dst.cache, PAIRS))
        attempt(lambda: kv.copy_blocks(dst.cache, [(0, 1), (1, 0)]))
        kv.convert_blocks(src.cache, dst.cache, PAIRS)
    assert refused == [
        "ids in device memory", "copies from one memory to another", "pairs whose source another one overwrites",
    ]  # fmt: skip
    for tensor, buffer in zip(src.tensors, src.truth.buffers, strict=True):
        buffer[:] = np.random.default_rng(9).integers(0, 256, buffer.size, np.uint8)
        tensor.copy_(torch.from_numpy(buffer))
    fast(src, dst, PAIRS)
    graph.replay()
    dst.check()


@pytest.mark.skipif(_missing() == "" and torch.cuda.device_count() < 2, reason="one device")
def test_two_devices() -> None:
    src = There(kv.Layout("B KV N H D", sizes()), 1)
    dst = There(kv.Layout("B KV H N D", sizes()), 2, "cuda:1")
    fast(src, dst, PAIRS)
    kv.convert_blocks(src.cache, dst.cache, PAIRS)
    torch.cuda.synchronize(1)
    dst.check()
    with pytest.raises(kv.ArgumentError, match="stream is of cuda:0, the work is cuda:1's"):
        kv.convert_blocks(src.cache, dst.cache, PAIRS, stream=torch.cuda.current_stream(0))
    with pytest.raises(kv.ArgumentError, match="tensor 0 lies on cuda:0, tensor 1 on cuda:1"):
        kv.Cache([src.tensors[0], *dst.tensors[1:]], src.truth.layout)


def test_a_cache_beyond_four_gigabytes() -> None:
    blocks = 40_000  # 5.2 GB: offsets need more than 32 bits
    large = kv.Geometry(num_blocks=blocks, block_size=16, num_kv_heads=8, head_size=128, dtype="bf16")
    if torch.cuda.mem_get_info(0)[0] < 12 << 30:
        pytest.skip("needs 12 GB of free device memory")
    tensor = torch.zeros((blocks, 2, 16, 8, 128), dtype=torch.bfloat16, device="cuda")
    tensor[0] = torch.randn(tensor.shape[1:]).to(torch.bfloat16)
    cache = kv.Cache(tensor, "B KV N H D", geometry=large)
    kv.copy_blocks(cache, [(0, blocks - 1), (0, blocks // 2)])
    assert torch.equal(tensor[0], tensor[-1]) and torch.equal(tensor[0], tensor[blocks // 2])
    assert not tensor[1].any() and not tensor[-2].any()
