# SPDX-License-Identifier: Apache-2.0
"""Caches on CUDA devices. Where the build has the stand-in, `make stand-in`, every verb runs on it against the oracle;
elsewhere: what is said without a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstride as kv
import oracle
import stand_in
from kvstride import _stream
from kvstride._tensor import inspect
from stand_in import FakeArray, Stream

on_stand_in = pytest.mark.skipif(stand_in.LIBRARY is None, reason="needs a build with KVSTRIDE_CUDA_STAND_IN")
GEOMETRY = kv.Geometry(num_layers=2, num_blocks=6, block_size=4, num_kv_heads=2, head_size=8, dtype="bf16")
NHD, HND = (kv.Layout(order, GEOMETRY) for order in ("B KV N H D", "B KV H N D"))
PAIRS = [(0, 3), (5, 1), (2, 2)]


@contextmanager
def refused(kind: type[Exception], message: str) -> Iterator[None]:
    """An error of one line that has this text."""
    with pytest.raises(kind) as caught:
        yield
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves work or faults to the next one."""
    yield
    if stand_in.LIBRARY is not None:
        stand_in.drain()
        for device in range(2):
            kv.cuda_check(device)


def on_device(memory: oracle.Memory, device: int = 0, **more: Any) -> kv.Cache:
    return kv.Cache([FakeArray(b, device, **more) for b in memory.buffers], memory.layout)


def ids_there(ids: Any, dtype: Any = np.int64, device: int = 0) -> FakeArray:
    return FakeArray(np.array(ids, dtype), device)


# --- without a device -----------------------------------------------------------------------------------------------


def test_what_can_be_asked_anywhere() -> None:
    assert kv.cuda_status() and "\n" not in kv.cuda_status()
    assert kv.num_cuda_devices() >= 0
    for device in ("cpu", 0, "cuda:0", np.int64(1)):
        kv.cuda_check(device)
    for wrong in ("cuda", "xpu:0", -1, 1 << 40):
        with refused(kv.ArgumentError, "cuda_check: device is "):
            kv.cuda_check(wrong)
    with refused(kv.DTypeError, "cuda_check: device is 0.5"):
        kv.cuda_check(0.5)


def test_host_memory_is_as_ever() -> None:
    cache = oracle.Memory(NHD, 1).cache() if not stand_in.PLACES else kv.Cache(oracle.Memory(NHD, 1).buffers, NHD)
    assert cache.device == "cpu" and cache.cuda == -1 and {t.device for t in cache.tensors} == {"cpu"}
    for stream in (None, 0, 7, SimpleNamespace(cuda_stream=3), SimpleNamespace(ptr=4)):  # ignored
        assert kv.copy_blocks(cache, [(0, 1)], stream=stream) == 1
    with refused(kv.ArgumentError, "copy_blocks: stream is str, expected a torch.cuda.Stream, a cuda"):
        kv.copy_blocks(cache, [(0, 1)], stream="main")
    for wrong in (-1, SimpleNamespace(ptr=-5)):
        with refused(kv.ArgumentError, "zero_blocks: stream is -"):
            kv.zero_blocks(cache, [0], stream=wrong)
    with refused(kv.DTypeError, "zero_blocks: stream is True"):
        kv.zero_blocks(cache, [0], stream=True)
    before = [b.array.copy() if hasattr(b, "array") else b.copy() for b in cache._owners]
    ids = ids_there([[0, 1]])
    with refused(kv.ArgumentError, "copy_blocks: pairs: ids on a CUDA device, the cache is not; copy them"):
        kv.copy_blocks(cache, ids)
    with refused(kv.ArgumentError, "expand_block_ids: ids: ids on a CUDA device; copy them to the CPU"):
        kv.expand_block_ids(ids, 2)
    assert all(np.array_equal(a, b) for a, b in zip(before, cache._owners, strict=True))


@pytest.mark.skipif(stand_in.LIBRARY is not None or kv.num_cuda_devices() > 0, reason="here is a device")
def test_without_a_device() -> None:
    with pytest.raises(kv.DeviceError) as error:
        on_device(oracle.Memory(NHD))
    assert str(error.value) == f"Cache: tensor 0: cuda:0: kvstride has no CUDA here: {kv.cuda_status()}"


def test_detect_asks_no_memory() -> None:
    shape = np.zeros((7, 2, 16, 3, 64), np.float16)
    options = {"num_kv_heads": 3, "head_size": 64, "block_size": 16, "among": ["vllm/flashinfer-nhd"]}
    found, want = (kv.detect(thing, **options) for thing in (FakeArray(shape, contiguous=True), shape))
    assert found.layout == want.layout and found.names == want.names


@pytest.mark.parametrize(("number", "name"), [(8, "metal"), (10, "rocm"), (14, "oneapi")])
def test_other_devices_are_refused_by_name(number: int, name: str) -> None:
    export = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (number, 1))
    with pytest.raises(
        kv.ArgumentError, match=f"^Cache: tensor 0: on {name}:1; kvstride handles host and CUDA memory$"
    ):
        kv.Cache(export, NHD)


# --- caches ---------------------------------------------------------------------------------------------------------


@on_stand_in
def test_a_cache_of_arrays_on_a_device() -> None:
    memory = oracle.Memory(NHD, 1)
    cache = on_device(memory, 1)
    assert cache.device == "cuda:1" and cache.cuda == 1 and not cache.read_only
    view = cache.key(1)
    told = view.__cuda_array_interface__
    assert view.shape == (6, 4, 2, 8) == told["shape"] and told["typestr"] == "<u2" and told["stream"] is None
    assert told["data"] == (memory.buffers[1].ctypes.data, False) and told["strides"] == (256, 32, 16, 2)
    again = kv.Cache(view, kv.Layout("key: B N H D", kv.Geometry(**_sizes(num_layers=1))))  # views are arrays
    assert again.device == "cuda:1"
    del cache, memory
    assert view._owner.array.array.nbytes == 6 * 4 * 2 * 8 * 2 * 2  # kept alive
    natural = np.zeros((6, 2, 4, 2, 8), np.float16)
    for array in (FakeArray(natural), FakeArray(natural, contiguous=True), FakeArray(natural.view("V2"))):
        assert (
            kv.Cache(array, "B KV N H D", geometry=kv.Geometry(**_sizes(num_layers=1, dtype="f16"))).device == "cuda:0"
        )
    natural.flags.writeable = False
    frozen = kv.Cache(FakeArray(natural), "B KV N H D")
    with refused(kv.ArgumentError, "copy_blocks: the cache is read-only"):
        kv.copy_blocks(frozen, [(0, 1)])


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "num_layers": 2,
        "num_blocks": 6,
        "block_size": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "dtype": "bf16",
    } | more


@on_stand_in
def test_caches_that_are_refused() -> None:
    memory = oracle.Memory(NHD)
    one, two = memory.buffers
    for tensors, message in (
        ([FakeArray(one), FakeArray(two, 1)], "tensor 0 lies on cuda:0, tensor 1 on cuda:1; a cache has one device"),
        ([FakeArray(one), two], "tensor 0 lies on cuda:0, tensor 1 on cpu; a cache has one device"),
    ):
        with refused(kv.ArgumentError, message):
            kv.Cache(tensors, NHD)
    unknown = FakeArray(one)
    stand_in.forget(one)
    with pytest.raises(
        kv.ArgumentError, match=r"^Cache: tensor 0: address 0x\w+ of a __cuda_array_interface__ is no mem"
    ):
        kv.Cache([unknown, FakeArray(two)], NHD)
    for field, value, message in (
        ("typestr", "<V3", "dtype void24 is none of"),
        ("typestr", "|O", "dtype object is no plain number"),
        ("typestr", ">u2", "dtype >u2 is not in native byte order"),
        ("mask", 1, "masked array"),
        ("strides", (3,), "a stride of 3 bytes"),
        ("data", None, "is not one"),
    ):
        told = FakeArray(one.view(np.uint16), contiguous=True).__cuda_array_interface__ | {field: value}
        if value is None:
            del told[field]
        with refused(kv.Error, message):
            inspect(SimpleNamespace(__cuda_array_interface__=told), where="cuda")
    with refused(kv.ArgumentError, "k: FakeArray lies on a CUDA device; this function takes host"):
        inspect(FakeArray(one), "k")


@on_stand_in
def test_memory_that_moves_is_found_out() -> None:
    memory = oracle.Memory(NHD)
    arrays = [FakeArray(b) for b in memory.buffers]
    cache = kv.Cache(arrays, NHD)
    arrays[1].array = arrays[1].array.copy()
    with refused(kv.ArgumentError, "the memory of tensor 1 was moved or freed"):
        kv.zero_blocks(cache, [0])


@on_stand_in
def test_pinned_memory_is_the_hosts() -> None:
    memory = oracle.Memory(NHD, 3)
    cache = on_device(memory, -1)
    assert cache.device == "cpu"
    want = memory.copy()
    oracle.convert(memory, want, [(0, 1)])
    kv.copy_blocks(cache, [(0, 1)])
    assert memory.same(want) and isinstance(cache.key(), np.ndarray)


# --- streams --------------------------------------------------------------------------------------------------------


def _rows(memory: oracle.Memory, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, 1 << 15, (3, 2, 8), np.uint16)


def verbs() -> dict[str, Callable[..., Any]]:
    """Each verb over a source and a destination, called on a stream."""
    rng = np.random.default_rng(5)
    key, value = (rng.integers(1, 1 << 15, (3, 2, 8), np.uint16) for _ in range(2))
    slots = [4, -1, 21]
    dense = {p: rng.integers(1, 1 << 15, (2, 3, 2, 8), np.uint16) for p in ("key", "value")}

    def plan(src: kv.Cache, dst: kv.Cache, place: Any, **more: Any) -> None:
        kv.Plan(src, dst).bind(PAIRS).run(**more)

    return {
        "copy": lambda src, dst, place, **more: kv.copy_blocks(dst, [(0, 1), (1, 4), (4, 0), (5, 2)], **more),
        "swap": lambda src, dst, place, **more: kv.swap_blocks(src, src_like(dst), PAIRS, **more),
        "convert": lambda src, dst, place, **more: kv.convert_blocks(src, dst, PAIRS, **more),
        "tokens": lambda src, dst, place, **more: kv.convert_blocks(
            src, dst, src_blocks=[1, 4], dst_blocks=[5, 0], tokens=(1, 2, 5), **more
        ),
        "plan": plan,
        "zero": lambda src, dst, place, **more: kv.zero_blocks(dst, [3, 1], **more),
        "write": lambda src, dst, place, **more: kv.write_tokens(dst, 1, place(key), place(value), slots, **more),
        "scatter": lambda src, dst, place, **more: kv.scatter_tokens(
            dst, [9, 0, 17], {p: place(t) for p, t in dense.items()}, **more
        ),
    }


def src_like(cache: kv.Cache) -> kv.Cache:
    """The same memory read in the source's order, so that swap_blocks takes it."""
    owners = cache._owners
    return kv.Cache([getattr(o, "array", o) for o in owners], NHD)


@on_stand_in
@pytest.mark.parametrize("verb", verbs())
@pytest.mark.parametrize("kind", ["torch's", "number", "cupy's", "protocol"])
def test_work_comes_after_what_is_on_the_stream(verb: str, kind: str) -> None:
    call = verbs()[verb]
    src, dst = oracle.Memory(NHD, 1), oracle.Memory(HND, 2)
    later, before = src.copy(), dst.copy()
    want = dst.copy()
    call(kv.Cache(later.buffers, NHD), kv.Cache(want.buffers, HND), lambda a: a)
    for buffer in src.buffers:
        buffer[:] = 0
    stream = Stream()
    for buffer, final in zip(src.buffers, later.buffers, strict=True):
        stream.write(buffer, final)
    given = {
        "torch's": stream,
        "number": stream.cuda_stream,
        "cupy's": SimpleNamespace(ptr=stream.cuda_stream, device_id=0),
        "protocol": SimpleNamespace(__cuda_stream__=lambda: (0, stream.cuda_stream)),
    }[kind]
    keep: list[Any] = []

    def place(array: np.ndarray) -> FakeArray:
        keep.append(FakeArray(array))
        return keep[-1]

    source, target = on_device(src), on_device(dst)
    call(source, target, place, stream=given)
    assert dst.same(before) and not src.buffers[0].any()  # nothing is done yet
    stand_in.drain()
    assert dst.same(want)


@on_stand_in
@pytest.mark.parametrize("verb", verbs())
def test_without_a_stream_the_call_waits(verb: str) -> None:
    call = verbs()[verb]
    src, dst = oracle.Memory(NHD, 1), oracle.Memory(HND, 2)
    want = dst.copy()
    call(kv.Cache(src.buffers, NHD), kv.Cache(want.buffers, HND), lambda a: a)
    call(on_device(src), on_device(dst), FakeArray)
    assert dst.same(want)


@on_stand_in
def test_the_stream_that_the_memory_names_is_used() -> None:
    stream, other = Stream(), Stream()
    src, dst = oracle.Memory(NHD, 1), oracle.Memory(HND, 2)
    want, before = dst.copy(), dst.copy()
    oracle.convert(src, want, PAIRS)
    later = src.copy()
    for buffer, final in zip(src.buffers, later.buffers, strict=True):
        buffer[:] = 0
        stream.write(buffer, final)
    arrays = [FakeArray(b, stream=stream.cuda_stream) for b in src.buffers]
    source = kv.Cache(arrays, NHD)
    target = on_device(dst, stream=stream.cuda_stream)
    kv.convert_blocks(source, target, PAIRS)
    assert dst.same(before)  # on that stream, not waited for
    stand_in.drain()
    assert dst.same(want)
    # Another stream of the source from now on: both are waited for, and so is the work.
    for buffer, final in zip(src.buffers, later.buffers, strict=True):
        buffer[:] = 0
        other.write(buffer, final)
    for array in arrays:
        array.stream = other.cuda_stream
    for buffer in dst.buffers:
        buffer[:] = 0xA5
    kv.convert_blocks(source, target, [(b, b) for b in range(6)])
    whole = oracle.Memory(HND)
    oracle.convert(later, whole, [(b, b) for b in range(6)])
    assert dst.same(whole)
    # Only on the host side: named by one, done when the call returns.
    host = oracle.Memory(HND)
    kv.convert_blocks(source, kv.Cache(host.buffers, HND), [(b, b) for b in range(6)])
    assert host.same(whole)


@on_stand_in
def test_streams_of_another_device_are_refused() -> None:
    cache = on_device(oracle.Memory(NHD))
    stream = SimpleNamespace(cuda_stream=Stream().cuda_stream, device=SimpleNamespace(index=1))
    with refused(kv.ArgumentError, "zero_blocks: stream is of cuda:1, the work is cuda:0's"):
        kv.zero_blocks(cache, [0], stream=stream)


def test_tensors_of_torch_are_kept_for_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        def __init__(self) -> None:
            self.used_on: list[Any] = []

        def record_stream(self, stream: Any) -> None:
            self.used_on.append(stream)

    def info(owner: Any, device: str) -> Any:
        return inspect(np.zeros(1, np.uint8))._replace(owner=owner, device=device)

    monkeypatch.setattr(_stream, "is_torch", lambda owner: isinstance(owner, Tensor))
    monkeypatch.setattr(_stream, "torch_stream", lambda handle, device: (handle, device))
    monkeypatch.setattr(_stream, "_torch_current", lambda device: 40 + device)
    waited: list[Any] = []
    monkeypatch.setattr(_stream._core, "wait_for", lambda device, handle: waited.append((device, handle)))
    here, there, host = Tensor(), Tensor(), Tensor()
    parts = [info(here, "cuda:0"), info(host, "cpu"), info(there, "cuda:1")]

    def put(memory: list[Any], stream: Any) -> Any:
        return _stream.put("verb", stream, memory, None, lambda handle: handle)

    assert put(parts, 9) == 9
    assert (here.used_on, there.used_on, host.used_on) == ([(9, 1)], [(9, 1)], [])
    assert put(parts[:2], None) == 40 and not waited  # torch's own rule from here on
    assert put(parts, None) is None and sorted(waited) == [(0, 40), (1, 41)]  # two streams: both are waited for
    assert put(parts[1:2], None) is None
    assert put(parts[:1], 1) == 0  # CUDA's other name of the default stream
    assert len(here.used_on) == 2


# --- ids on the device ----------------------------------------------------------------------------------------------


@on_stand_in
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_on_the_device(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    stream = Stream()
    for turned in (False, True):

        def pairs(list_: list[tuple[int, int]], turned: bool = turned) -> FakeArray:
            array = np.array(list_, dtype)
            return FakeArray(np.ascontiguousarray(array.T).T if turned else array)

        src, dst = oracle.Memory(NHD, 1), oracle.Memory(HND, 2)
        want = dst.copy()
        oracle.convert(src, want, PAIRS)
        source, target = on_device(src), on_device(dst)
        ids = pairs(PAIRS)
        before = dst.copy()
        assert kv.convert_blocks(source, target, ids, stream=stream) == 3
        assert dst.same(before)
        stand_in.drain()
        assert dst.same(want)

        twin, twin_want = oracle.Memory(NHD, 4), oracle.Memory(NHD, 4)
        oracle.convert(src, twin_want, PAIRS)
        assert kv.swap_blocks(source, on_device(twin), pairs(PAIRS)) == 3
        assert twin.same(twin_want)
        oracle.convert(twin_want.copy(), twin_want, [(0, 1), (5, 4)])
        assert kv.copy_blocks(on_device(twin), pairs([(0, 1), (5, 4)])) == 2
        assert twin.same(twin_want)

        spaced = np.array([5, -9, 2, -9], dtype)[::2]
        host = dst.copy()
        kv.zero_blocks(kv.Cache(host.buffers, HND), [5, 2])
        kv.zero_blocks(target, FakeArray(spaced))
        assert dst.same(host)

        slots = [7, 0, 23, 7]
        out = {p: np.zeros((2, 4, 2, 8), np.uint16) for p in ("key", "value")}
        given = {p: FakeArray(t) for p, t in out.items()}
        assert kv.gather_tokens(source, ids_there(slots, dtype), out=given) == given
        truth = kv.gather_tokens(kv.Cache(src.buffers, NHD), slots)
        assert all(np.array_equal(out[p], truth[p]) for p in out)
        kv.scatter_tokens(kv.Cache(host.buffers, HND), [3, 11, 22, 8], truth)
        kv.scatter_tokens(target, ids_there([3, 11, 22, 8], dtype), given)
        assert dst.same(host)

        key, value = (rng.integers(0, 1 << 16, (5, 2, 8), np.uint16) for _ in range(2))
        kv.write_tokens(kv.Cache(host.buffers, HND), 0, key, value, [4, -1, 20])
        kv.write_tokens(target, 0, FakeArray(key), FakeArray(value), ids_there([4, -1, 20], dtype))
        assert dst.same(host)
        kv.zero_blocks(target, ids_there([], dtype))
        assert dst.same(host)


@on_stand_in
def test_ids_that_name_nothing_are_left_out_and_reported() -> None:
    memory, stream = oracle.Memory(NHD, 1), Stream()
    cache = on_device(memory)
    want = memory.copy()
    kv.zero_blocks(kv.Cache(want.buffers, NHD), [1])
    kv.zero_blocks(cache, ids_there([1, 6]), stream=stream)
    with pytest.raises(
        kv.BlockIndexError, match=r"^zero_blocks: id 6 in ids\[1\] of the source is not from 0 to 5; it"
    ):
        kv.cuda_check("cuda:0")
    assert memory.same(want)
    kv.cuda_check(0)  # said once
    with refused(kv.BlockIndexError, "copy_blocks: id -2 in pairs[0]"):  # a call that waits says it
        kv.copy_blocks(cache, ids_there([[1, -2]]))
    assert memory.same(want)


@on_stand_in
def test_ids_that_are_refused() -> None:
    memory = oracle.Memory(NHD, 1)
    cache, host = on_device(memory), kv.Cache(oracle.Memory(NHD, 2).buffers, NHD)
    pairs, before = ids_there([[0, 1]]), memory.copy()
    for call, message in (
        (
            lambda: kv.copy_blocks(cache, ids_there([[0, 1]], device=1)),
            "pairs: ids on cuda:1, the cache lies on cuda:0;",
        ),
        (
            lambda: kv.swap_blocks(host, cache, pairs),
            "pairs: ids on cuda:0, the cache lies on cpu and cuda:0",
        ),
        (
            lambda: kv.copy_blocks(host, pairs),
            "copy_blocks: pairs: ids on a CUDA device, the cache is not; copy them to",
        ),
        (lambda: kv.copy_blocks(cache, pairs, null_block=0), "copy_blocks: null_block goes with ids in host memory"),
        (lambda: kv.zero_blocks(cache, ids_there([1]), null_block=0), "zero_blocks: null_block goes with ids in host"),
        (lambda: kv.copy_blocks(cache, ids_there([0, 1])), "shape [2], expected [n, 2] (source, destination)"),
        (lambda: kv.zero_blocks(cache, pairs), "zero_blocks: ids: shape [1, 2], expected one dimension"),
        (
            lambda: kv.Plan(cache, cache).bind(pairs),
            "Plan.bind: pairs: ids on a CUDA device; copy them to the CPU first",
        ),
        (
            lambda: kv.convert_blocks(cache, cache, src_blocks=ids_there([0]), dst_blocks=[1]),
            "convert_blocks: src_blocks: ids on a CUDA device; copy them",
        ),
        (
            lambda: kv.write_tokens(cache, 0, *[np.zeros((1, 2, 8), np.uint16)] * 2, ids_there([1])),
            "write_tokens: ids in device memory are for caches of that device",
        ),
    ):
        with refused(kv.ArgumentError, message):
            call()
    for dtype in (np.int16, np.uint8, np.float32):
        with refused(kv.DTypeError, f"dtype {np.dtype(dtype)} on cuda:0, expected int32 or int64"):
            kv.copy_blocks(cache, ids_there([[0, 1]], dtype))
    assert memory.same(before)


# --- between memories, what is refused, graphs ----------------------------------------------------------------------


@on_stand_in
@pytest.mark.parametrize(("src_device", "dst_device"), [(-1, 0), (0, -1), (0, 1)])
def test_between_memories(src_device: int, dst_device: int) -> None:
    def cache(memory: oracle.Memory, device: int) -> kv.Cache:
        return kv.Cache(memory.buffers, memory.layout) if device < 0 else on_device(memory, device)

    src, dst = oracle.Memory(NHD, 1), oracle.Memory(HND, 2)
    want = dst.copy()
    oracle.convert(src, want, PAIRS)
    kv.convert_blocks(cache(src, src_device), cache(dst, dst_device), PAIRS)
    assert dst.same(want)
    out = {p: np.zeros((2, 3, 2, 8), np.uint16) for p in ("key", "value")}
    place = (lambda a: a) if dst_device < 0 else lambda a: FakeArray(a, dst_device)
    kv.gather_tokens(cache(src, src_device), [3, 9, 3], out={p: place(t) for p, t in out.items()})
    truth = kv.gather_tokens(kv.Cache(src.buffers, NHD), [3, 9, 3])
    assert all(np.array_equal(out[p], truth[p]) for p in out)
    key, value = out["key"][0], out["value"][0]
    host = src.copy()
    kv.write_tokens(kv.Cache(host.buffers, NHD), 1, key, value, [0, 5, 8])
    kv.write_tokens(cache(src, src_device), 1, place(key), place(value), [0, 5, 8])
    assert src.same(host)


def test_drop_in_functions_take_host_memory() -> None:
    from kvstride.vllm import ops

    there = FakeArray(np.zeros((6, 2, 4, 2, 8), np.float16))
    for verb, call in (
        ("register: kv_caches", lambda: ops.register([there], layout="B KV N H D")),
        ("swap_blocks: src", lambda: ops.swap_blocks(there, there, [(0, 1)])),
        ("copy_blocks: kv_caches", lambda: ops.copy_blocks([there], [(0, 1)])),
    ):
        with refused(kv.ArgumentError, f"{verb}: FakeArray lies on a CUDA device; this function takes host memory"):
            call()


@on_stand_in
def test_what_takes_host_memory_says_so() -> None:
    cache = on_device(oracle.Memory(NHD, 1))
    query = np.zeros((1, 2, 8), np.uint16)
    with refused(kv.ArgumentError, "attention: the cache lies on cuda:0; attention takes host memory"):
        kv.attention(query, cache, 0, [[0]], [1], [0, 1])
    host = kv.Cache(oracle.Memory(NHD, 1).buffers, NHD)
    with refused(kv.ArgumentError, "attention: q: FakeArray lies on a CUDA device; this function takes host memory"):
        kv.attention(FakeArray(query), host, 0, [[0]], [1], [0, 1])
    with refused(kv.ArgumentError, "gather_tokens: give out=; on cuda:0 only torch makes tensors here"):
        kv.gather_tokens(cache, [0])
    mixed = {"key": FakeArray(np.zeros((2, 1, 2, 8), np.uint16)), "value": np.zeros((2, 1, 2, 8), np.uint16)}
    with refused(kv.ArgumentError, "gather_tokens: out['value']: on cpu, the first plane on cuda:0"):
        kv.gather_tokens(cache, [0], out=mixed)
    names = {"key": "bf16", "value": "bf16"}
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_size": 8, "block_size": 4}
    namespace = kv.Namespace(model="m", revision="r", planes=names, **sizes)
    with kv.Store([kv.HostTier(1 << 20)], namespace=namespace) as store:
        for verb in ("put", "get"):
            with refused(kv.ArgumentError, f"{verb}: the cache lies on cuda:0; {verb} takes host memory"):
                getattr(store, verb)([kv.Key(b"k")], cache, [0])


@on_stand_in
def test_streams_that_are_captured() -> None:
    memory, stream = oracle.Memory(NHD, 1), Stream()
    cache, host = on_device(memory), kv.Cache(oracle.Memory(NHD, 2).buffers, NHD)
    want, before = memory.copy(), memory.copy()
    oracle.convert(memory, want, [(0, 1), (2, 3)])
    stream.capture(True)
    stand_in.forget_calls()
    why = "the stream is being captured into a CUDA graph, which cannot take"
    for call, message in (
        (lambda: kv.copy_blocks(cache, [(0, 1), (1, 0)], stream=stream), "pairs whose source another one overwrites"),
        (lambda: kv.copy_blocks(cache, ids_there([[0, 1]]), stream=stream), "ids in device memory"),
        (lambda: kv.swap_blocks(host, cache, [(0, 1)], stream=stream), "copies from one memory to another"),
    ):
        with refused(kv.DeviceError, f"_blocks: cuda:0: {why} {message}"):
            call()
    assert [stand_in.calls(name) for name in ("launch", "copy", "record", "done", "finish")] == [0] * 5
    assert kv.copy_blocks(cache, [(0, 1), (2, 3)], stream=stream) == 2
    assert stand_in.calls("launch") == 1 and memory.same(before)
    stream.capture(False)
    stand_in.drain()
    assert memory.same(want)
