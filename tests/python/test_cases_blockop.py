# SPDX-License-Identifier: Apache-2.0
"""Faults of the field in block operations, each as its kind; numbers as in the collection of cases."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import numpy as np
import pytest

import kvstride as kv
import oracle
from kvstride.vllm import ops

PAGE = 1_039_680  #: bytes of a page that holds all layers


def geometry(blocks: int = 5, tokens: int = 4, heads: int = 3, dim: int = 8, **more: object) -> kv.Geometry:
    """A geometry from the four sizes."""
    sizes = {"num_blocks": blocks, "block_size": tokens, "num_kv_heads": heads, "head_size": dim}
    return kv.Geometry(**sizes, **({"dtype": "i32"} | more))


# --- C11


@pytest.mark.parametrize(("block", "byte"), [(2065, 2_146_939_200), (2066, 2_147_978_880), (4132, 4_295_957_760)])
def test_c11_offsets_beyond_32_bits(block: int, byte: int) -> None:
    """Page 2066 starts beyond 2^31 (int32 would give −2,146,988,416), page 4132 beyond 2^32."""
    assert byte == block * PAGE
    g = geometry(5000, 16, 8, 64, num_layers=32, dtype="bf16")
    layout = kv.Layout(f"B@{PAGE * 2} L KV N H D", g)
    assert layout.offset("key", block=block) == (0, 2 * byte)
    assert layout.offset("value", layer=1, block=block, token=1) == (0, 2 * byte + 3 * 16 * 8 * 64 * 2 + 8 * 64 * 2)
    record = kv.Layout(f"B@{PAGE} {{latent: D[64] u8}}", geometry(5000))
    assert record.offset("latent", block=block) == (0, byte)
    if block > 2065:
        assert np.int64(byte).astype(np.int32) < byte  # what 32 bits would make of it


def sparse(path: Path, pages: int) -> np.ndarray:
    """A file of zero pages that takes no room on disk, mapped for writing."""
    with path.open("wb") as file:
        file.truncate(pages * PAGE)
    return np.memmap(path, np.uint8, "r+", shape=(pages * PAGE,))


@pytest.mark.parametrize(("pages", "target"), [(2067, 2066), (4133, 4132)])
def test_c11_copy_into_a_high_page(tmp_path: Path, pages: int, target: int) -> None:
    """Page 1 → 2066 of a sparse file writes 64 bytes there and nowhere else; the page before stays zero."""
    path = tmp_path / "pages"
    memory = sparse(path, pages)
    memory[PAGE : PAGE + 64] = np.arange(1, 65)
    cache = kv.Cache(memory, f"B@{PAGE} {{latent: D[64] u8}}", geometry=geometry(pages, 1, 1, 64))
    kv.copy_blocks(cache, [(1, target)])
    assert memory[target * PAGE : target * PAGE + 64].tolist() == list(range(1, 65))
    assert not memory[target * PAGE + 64 :].any()
    assert not memory[(target - 1) * PAGE : target * PAGE].any()
    assert not memory[:PAGE].any()
    wrapped = target * PAGE % 2**32 % (pages * PAGE)
    if target * PAGE >= 2**32:
        assert not memory[wrapped : wrapped + 64].any()  # where 32 unsigned bits would have written
    # The other verbs and the views reach the same bytes.
    assert cache.plane(0, "latent")[target, 0, 0].tolist() == list(range(1, 65))
    assert kv.gather_tokens(cache, [target])["latent"].reshape(-1).tolist() == list(range(1, 65))
    kv.scatter_tokens(cache, [target - 1], {"latent": np.full((1, 1, 1, 64), 9, np.uint8)})
    assert int(memory[(target - 1) * PAGE : target * PAGE].sum()) == 9 * 64
    kv.zero_blocks(cache, [target])
    assert not memory[target * PAGE :].any()
    small = np.zeros((2, 64), np.uint8)
    dense = kv.Cache(small, "B {latent: D[64] u8}", geometry=geometry(2, 1, 1, 64))
    kv.convert_blocks(cache, dense, [(1, 0), (target - 1, 1)])
    assert small[0].tolist() == list(range(1, 65))
    assert (small[1] == 9).all()
    memory.flush()
    del cache, memory
    assert path.stat().st_blocks * 512 < 64 * mmap.PAGESIZE * 8


@pytest.mark.parametrize("order", ["B L KV N H D", "B KV L N H D", "KV B L N H D", "B H L KV N D"])
def test_c11_writing_tokens_beyond_2_31(order: str, tmp_path: Path) -> None:
    """write_tokens, copies and conversions in a cache of more than 2^31 bytes, each element by the oracle's offset."""
    g = geometry(9000, 16, 8, 256, num_layers=1, dtype="f32")
    layout = kv.Layout(order, g)
    assert layout.num_bytes > 2**31
    with (tmp_path / "cache").open("wb") as file:
        file.truncate(layout.num_bytes)
    memory = np.memmap(tmp_path / "cache", np.uint8, "r+", shape=(layout.num_bytes,))
    cache = kv.Cache(memory, layout)
    tokens = np.arange(1, 2 * 3 * 8 * 256 + 1, dtype=np.float32).reshape(2, 3, 8, 256)
    slots = [8999 * 16 + 15, 8500 * 16, 3]
    kv.write_tokens(cache, 0, tokens[0], tokens[1], slots)
    kv.copy_blocks(cache, [(8999, 8998)])
    for (plane, data), (i, slot) in itertools.product(zip(("key", "value"), tokens, strict=True), enumerate(slots)):
        for block in {slot // 16, 8998 if slot // 16 == 8999 else slot // 16}:
            for h, d in itertools.product(range(8), (0, 1, 255)):
                _, byte = layout.offset(plane, 0, block, slot % 16, h, d)
                assert memory[byte : byte + 4].view(np.float32)[0] == data[i, h, d]


# --- C12


@pytest.mark.parametrize(
    ("logical", "kernel", "ids", "rows"),
    [
        (128, 64, [3, 0], [6, 7, 0, 1]),
        (128, 16, [2], list(range(16, 24))),
        (16, 16, [5, 1], [5, 1]),
        (96, 32, [0, 2], [0, 1, 2, 6, 7, 8]),
        (64, 16, [], []),
        (48, 16, [10**9], [3 * 10**9, 3 * 10**9 + 1, 3 * 10**9 + 2]),
    ],
)
def test_c12_kernel_rows_of_manager_blocks(logical: int, kernel: int, ids: list[int], rows: list[int]) -> None:
    got = kv.expand_block_ids(ids, logical / kernel)
    assert got.dtype == np.int64
    assert got.tolist() == rows
    assert kv.expand_block_ids(np.array(ids, np.int64), logical // kernel).tolist() == rows


@pytest.mark.parametrize(("logical", "kernel"), [(96, 64), (64, 128), (100, 16), (1, 3)])
def test_c12_unwhole_ratios_are_errors(logical: int, kernel: int) -> None:
    with pytest.raises(kv.ArgumentError, match=r"ratio.*whole") as caught:
        kv.expand_block_ids([0, 1], logical / kernel)
    assert str(logical / kernel) in str(caught.value)


@pytest.mark.parametrize(
    "order", ["B H N KV D", "B KV H N D", "B N H KV D", "KV B H N D", "B H {key: D N, value: N D}"]
)
@pytest.mark.parametrize(("logical", "kernel"), [(16, 4), (8, 4), (12, 4), (4, 4)])
def test_c12_a_manager_block_is_its_kernel_rows(order: str, logical: int, kernel: int) -> None:
    """Scheduler ids over the tensor of smaller kernel rows: expanded ids, or token sequences, never the ids as rows."""
    ratio = logical // kernel
    kernel_cache = oracle.Memory(kv.Layout(order, geometry(5 * ratio, kernel)), 3)
    store = oracle.Memory(kv.Layout("B H L KV N D", geometry(5, logical)))
    rows = kv.expand_block_ids([3, 0], ratio).tolist()
    kv.convert_blocks(kernel_cache.cache(), store.cache(), src_blocks=rows, dst_blocks=[1, 4])
    for plane in ("key", "value"):
        for place, (block, stored) in enumerate([(3, 1), (0, 4)]):
            for n, h, d in itertools.product(range(logical), range(3), range(8)):
                source = (0, rows[place * ratio + n // kernel], n % kernel, h, d)
                assert source[1] == block * ratio + n // kernel
                assert store.get(plane, (0, stored, n, h, d)) == kernel_cache.get(plane, source)
    if ratio > 1:
        with pytest.raises(kv.LayoutError, match=f"block_size is {kernel}.*{logical}"):
            kv.convert_blocks(kernel_cache.cache(), store.cache(), [(3, 1), (0, 4)])
        # The same memory as manager blocks of kernel blocks: one layout, the scheduler's ids.
        if order == "B H N KV D":
            manager = kv.Layout("B N/k H N%k KV D", geometry(5, logical, k=kernel))
            assert manager.offset("value", block=3, token=kernel, head=2, dim=5) == kernel_cache.layout.offset(
                "value", block=3 * ratio + 1, token=0, head=2, dim=5
            )
            again = oracle.Memory(store.layout)
            kv.convert_blocks(kv.Cache(kernel_cache.buffers[0], manager), again.cache(), [(3, 1), (0, 4)])
            assert again.same(store)
            assert kv.Layout("B H N KV D", geometry(5, logical)) != manager  # [H, kernel] tiles, not [H, logical]


# --- C37


def test_c37_destination_ids_count(field_fixture: np.ndarray) -> None:
    """Source [0,1], destination [3,2]: crosswise."""
    target = np.zeros_like(field_fixture)
    source_cache, target_cache = kv.Cache(field_fixture, "B KV N H D"), kv.Cache(target, "B KV N H D")
    kv.convert_blocks(source_cache, target_cache, src_blocks=[0, 1], dst_blocks=[3, 2])
    assert (target[3] == field_fixture[0]).all()
    assert (target[2] == field_fixture[1]).all()
    assert not target[[0, 1, 4]].any()
    target[...] = 0
    kv.swap_blocks(source_cache, target_cache, np.array([[0, 3], [1, 2]], np.int32))
    assert (target[3] == field_fixture[0]).all()
    assert (target[2] == field_fixture[1]).all()


@pytest.mark.parametrize(
    ("sources", "targets"),
    [(range(7), range(4)), (range(4), range(7)), ([0], []), ([], [0]), (range(2008), range(2016))],
)
def test_c37_lists_of_different_lengths(sources: object, targets: object) -> None:
    """7 and 4; groups of 16 and 2000 with 2008 ids; nothing is written."""
    source = oracle.Memory(kv.Layout("B KV N H D", geometry(2100, 1, 1, 4)), 1)
    target = oracle.Memory(kv.Layout("B KV N H D", geometry(2100, 1, 1, 4)))
    before = target.copy()
    with pytest.raises(kv.ArgumentError) as caught:
        kv.convert_blocks(source.cache(), target.cache(), src_blocks=list(sources), dst_blocks=list(targets))
    assert str(len(list(sources))) in str(caught.value)
    assert str(len(list(targets))) in str(caught.value)
    with pytest.raises(kv.ArgumentError):
        ops.copy_kv_blocks(
            {"a": source.buffers[0].view(np.int32).reshape(2100, 2, 1, 1, 4)},
            {"a": target.buffers[0].view(np.int32).reshape(2100, 2, 1, 1, 4)},
            list(sources),
            list(targets),
            "d2h",
            layout="B KV N H D",
        )
    assert target.same(before)


# --- C38


@pytest.mark.parametrize("device", ["B KV N H D", "B H N KV D", "KV B N H D"])
@pytest.mark.parametrize("host", ["B H L KV N D", "B KV N H D", "B N/4 KV H N%4 D"])
@pytest.mark.parametrize("factor", [4, 2, 8])
def test_c38_sub_block_of_a_larger_block(device: str, host: str, factor: int) -> None:
    """GPU block 5 ↔ CPU row 1, sub-block 1 (factor 4); GPU blocks 4, 5, 6 fill subs 0, 1, 2 and leave sub 3 alone."""
    gpu = oracle.Memory(kv.Layout(device, geometry(9, 4)), 5)
    cpu = oracle.Memory(kv.Layout(host, geometry(3, 4 * factor)))
    want = cpu.copy()
    sub = 5 % factor
    oracle.convert_tokens(gpu, want, [5], [1], (0, 4 * sub, 4))
    kv.convert_blocks(gpu.cache(), cpu.cache(), src_blocks=[5], dst_blocks=[1], tokens=(0, 4 * sub, 4))
    assert cpu.same(want)
    wrong = oracle.Memory(cpu.layout)
    oracle.convert_tokens(gpu, wrong, [5], [1], (0, 0, 4))
    assert sub == 0 or not wrong.same(want)  # always to offset 0
    first = 4 % factor
    count = min(3, factor - first)
    oracle.convert_tokens(gpu, want, [4, 5, 6], [1], (0, 4 * first, 4 * count))
    kv.convert_blocks(gpu.cache(), cpu.cache(), src_blocks=[4, 5, 6], dst_blocks=[1], tokens=(0, 4 * first, 4 * count))
    assert cpu.same(want)
    untouched = 4 * (first + count)
    if untouched < 4 * factor:
        for plane, n in itertools.product(("key", "value"), range(untouched, 4 * factor)):
            assert cpu.get(plane, (0, 1, n, 0, 0)) == b"\xa5" * 4
    back = oracle.Memory(gpu.layout)
    kv.convert_blocks(cpu.cache(), back.cache(), src_blocks=[1], dst_blocks=[0], tokens=(4 * sub, 0, 4))
    for plane, n, h, d in itertools.product(("key", "value"), range(4), range(3), range(8)):
        assert back.get(plane, (0, 0, n, h, d)) == gpu.get(plane, (0, 5, n, h, d))


# --- C40


@pytest.mark.parametrize("null", [0, 4, 7])
@pytest.mark.parametrize("order", ["B KV N H D", "KV B N H D", "B H L KV N D"])
def test_c40_the_null_block_is_left_out(order: str, null: int) -> None:
    """The list [0,0,5,6] with null block 0 stores two blocks and says so; block 0 is neither read nor written."""
    source = oracle.Memory(kv.Layout(order, geometry(8)), 5)
    ids = [null, null, 5, 6]
    pairs = [(s, d) for s, d in zip(ids, [1, 2, 3, 4], strict=True)]
    for verb in (kv.swap_blocks, kv.convert_blocks):
        target = oracle.Memory(source.layout)
        want = target.copy()
        oracle.convert(source, want, [(5, 3), (6, 4)] if null not in (3, 4) else [(5, 3)])
        kept = verb(source.cache(), target.cache(), pairs, null_block=null)
        assert kept == (2 if null not in (3, 4) else 1)
        assert target.same(want)
    # As a destination too, twice even, and in copies inside one cache.
    target = oracle.Memory(source.layout)
    before = target.copy()
    assert kv.convert_blocks(source.cache(), target.cache(), [(1, null), (2, null)], null_block=null) == 0
    assert target.same(before)
    memory = source.copy()
    want = source.copy()
    oracle.convert(source, want, [(5, 3)] if null != 3 else [])
    assert kv.copy_blocks(memory.cache(), [(null, 1), (2, null), (5, 3)], null_block=null) == 1
    assert memory.same(want)
    kv.zero_blocks(memory.cache(), [null, 2], null_block=null)
    for plane in ("key", "value"):
        assert memory.get(plane, (0, null, 0, 0, 0)) == want.get(plane, (0, null, 0, 0, 0))
        assert memory.get(plane, (0, 2, 3, 2, 7)) == b"\0\0\0\0"
    # Without it block 0 is a block like any other.
    if null == 0:
        assert kv.convert_blocks(source.cache(), target.cache(), [(0, 1), (5, 3)]) == 2
        assert target.get("key", (0, 1, 0, 0, 0)) == source.get("key", (0, 0, 0, 0, 0))


def test_c40_without_a_null_block_the_list_is_an_error() -> None:
    """[0,0,5,6] as destinations names block 0 twice: an error, nothing stored."""
    source = oracle.Memory(kv.Layout("B KV N H D", geometry(8)), 5)
    target = oracle.Memory(source.layout)
    before = target.copy()
    with pytest.raises(kv.ArgumentError, match="block 0 is given twice"):
        kv.convert_blocks(source.cache(), target.cache(), [(1, 0), (2, 0), (3, 5), (4, 6)])
    assert target.same(before)


# --- C94


@pytest.mark.parametrize("sizes", [[], [0], [1], [8], [0, 1, 8, 0, 7], [4096, 1]], ids=str)
def test_c94_batches_of_any_size(sizes: list[int]) -> None:
    """Sizes of 0, 1 and 8 bytes and an empty batch, without any stream."""
    torch = pytest.importorskip("torch")
    source = torch.arange(1, 10001, dtype=torch.int64).to(torch.uint8)
    target = torch.zeros(10000, dtype=torch.uint8)
    starts = [0, *itertools.accumulate(size + 3 for size in sizes)][: len(sizes)]
    arguments = (
        torch.tensor([source.data_ptr() + s for s in starts], dtype=torch.int64),
        torch.tensor([target.data_ptr() + s + 1 for s in starts], dtype=torch.int64),
        torch.tensor(sizes, dtype=torch.int64),
    )
    ops.swap_blocks_batch(*arguments)
    want = torch.zeros_like(target)
    for start, size in zip(starts, sizes, strict=True):
        want[start + 1 : start + 1 + size] = source[start : start + size]
    assert torch.equal(target, want)
    with pytest.raises(kv.ArgumentError):
        ops.swap_blocks_batch(arguments[0], arguments[1], torch.zeros(len(sizes) + 1, dtype=torch.int64))


@pytest.mark.parametrize("count", [0, 1, 8])
@pytest.mark.parametrize("dim", [1, 2, 8])
def test_c94_tiny_blocks(dim: int, count: int) -> None:
    """Blocks of 1, 2 and 8 bytes through every verb; empty pairs do nothing."""
    layout = kv.Layout("B {latent: D}", geometry(16, 1, 1, dim, dtype="u8"))
    source, target = oracle.Memory(layout, 4), oracle.Memory(layout)
    pairs = [(i, 15 - i) for i in range(count)]
    want = target.copy()
    oracle.convert(source, want, pairs)
    assert kv.swap_blocks(source.cache(), target.cache(), pairs) == count
    assert target.same(want)
    plan = kv.Plan(source.cache(), target.cache()).bind(pairs)
    assert plan.num_bytes == count * dim
    plan.run()
    assert target.same(want)
    assert kv.copy_blocks(target.cache(), np.zeros((0, 2), np.int64)) == 0
    kv.zero_blocks(target.cache(), [])
    assert kv.gather_tokens(source.cache(), [])["latent"].shape == (1, 0, 1, dim)
    kv.scatter_tokens(target.cache(), [], {"latent": np.zeros((1, 0, 1, dim), np.uint8)})
    assert target.same(want)


def test_c94_other_devices_are_errors() -> None:
    torch = pytest.importorskip("torch")
    here, elsewhere = torch.zeros(5, 2, 4, 3, 8), torch.zeros(5, 2, 4, 3, 8, device="meta")
    for source, target in [(here, elsewhere), (elsewhere, here), (elsewhere, elsewhere)]:
        with pytest.raises(kv.ArgumentError, match="meta"):
            kv.swap_blocks(kv.Cache(source, "B KV N H D"), kv.Cache(target, "B KV N H D"), [(0, 1)])
        with pytest.raises(kv.ArgumentError, match="meta"):
            ops.swap_blocks(source, target, torch.tensor([[0, 1]]), layout="B KV N H D")
    assert not here.any()
