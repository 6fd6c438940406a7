# SPDX-License-Identifier: Apache-2.0
"""Faults of the field in attention, each as its kind; numbers as in the collection of cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstride as kv
import oracle
from attention_oracle import Batch, to_f64
from kvstride import modelopt

ORDERS = ["B KV N H D", "KV B N H D", "B KV H N D", "B H N KV D", "B {key: H D/4 N D%4, value: H D N}"]


def one_head(keys: Any, values: Any, page: int = 4, spare: float = np.nan) -> kv.Cache:
    """A cache of one head: keys `[key, dim]`, values one number each; the rest is `spare`."""
    keys, values = np.asarray(keys, np.float32), np.asarray(values, np.float32)
    blocks = -(-len(keys) // page) + 1
    memory = np.full((blocks, 2, page, 1, keys.shape[1]), spare, np.float32)
    cache = kv.Cache(
        memory,
        "B KV N H D",
        geometry=kv.Geometry(num_blocks=blocks, block_size=page, num_kv_heads=1, head_size=keys.shape[1], dtype="f32"),
    )
    tiled = np.repeat(values[:, None, None], keys.shape[1], 2)
    kv.write_tokens(cache, 0, keys[:, None, :], tiled, np.arange(len(keys)))
    return cache


def scored(rows: Any, values: Any, page: int = 4, **options: Any) -> Any:
    """Attention whose scores are `rows`: row r's query is unit vector r, key k is column k."""
    rows = np.asarray(rows, np.float32)
    count, keys = rows.shape
    cache = one_head(rows.T, values, page)
    q = np.eye(count, dtype=np.float32)[:, None, :]
    table = np.arange(-(-keys // page))[None]
    return kv.attention(q, cache, 0, table, [keys], [0, count], scale=1.0, causal=False, **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 2, 30])
def test_c21_unused_slots_hold_anything(bad: float, rows: int) -> None:
    cache = one_head(np.zeros((2, 4)), [1, 2], spare=bad)
    q = np.ones((rows, 1, 4), np.float32)
    out = kv.attention(q, cache, 0, [[0]], [2], [0, rows], causal=False)
    assert (out == 1.5).all()


@pytest.mark.parametrize("order", ORDERS)
def test_c21_a_block_used_before(order: str) -> None:
    """The block of a longer sequence, with NaN of its own behind the new one's end."""
    batch = Batch([(3, 6), (1, 5)], order=order)
    view = batch.cache.plane(0, "value")
    view[...] = np.where(np.isnan(view), np.inf, view)
    out, lse = batch.attend(return_lse=True)
    expected, logs = batch.expected()
    np.testing.assert_allclose(out, expected, rtol=5e-6, atol=5e-6)
    np.testing.assert_allclose(lse, logs, rtol=1e-5, atol=1e-5)


def test_c23_very_negative_scores() -> None:
    out, lse = scored([[-89600, -90048]], [1, 3], return_lse=True)
    assert (out[0, 0, 0], lse[0, 0]) == (1.0, -89600.0)
    # Many rows, and far below any number that could stand for a mask.
    out, lse = scored([[-3.0e38, -3.0e38]] * 20, [1, 3], return_lse=True)
    assert (out == 2.0).all() and (lse < -2.9e38).all()


class TestC24:
    """Tiles of two keys, λ = 1e-3, values 1, 2, 30, 40."""

    VALUES = (1, 2, 30, 40)

    def skip(self, rows: Any, rows_of_tile: int = 4, **options: Any) -> Any:
        return scored(rows, self.VALUES, skip_lambda=1e-3, tile=(rows_of_tile, 2), counters="map", **options)

    def test_c24_a_tile_below_the_maximum_is_skipped(self) -> None:
        out, tiles = self.skip([[10, 10, 0, 0]])
        assert out[0, 0, 0] == 1.5 and tiles.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]
        assert scored([[10, 10, 0, 0]], self.VALUES)[0, 0, 0] == pytest.approx(1.50152, abs=1e-5)

    def test_c24_one_row_keeps_it_for_all(self) -> None:
        out, tiles = self.skip([[10, 10, 0, 0], [0, 0, 0, 0]])
        assert tiles[:, 4].sum() == 0
        np.testing.assert_allclose(out[:, 0, 0], [1.50152, 18.25], atol=1e-5)

    def test_c24_a_row_of_another_tile_does_not(self) -> None:
        out, tiles = self.skip([[10, 10, 0, 0], [0, 0, 0, 0]], rows_of_tile=1)
        assert tiles[:, 4].tolist() == [0, 1, 0, 0]
        np.testing.assert_allclose(out[:, 0, 0], [1.5, 18.25], atol=1e-5)

    def test_c24_the_running_maximum_not_the_last_one(self) -> None:
        out, tiles = self.skip([[0, 0, 10, 10]])
        assert tiles[:, 4].sum() == 0
        assert out[0, 0, 0] == pytest.approx(scored([[0, 0, 10, 10]], self.VALUES)[0, 0, 0])

    @pytest.mark.parametrize("rows", [1, 12])
    def test_c24_a_first_tile_that_is_masked(self, rows: int) -> None:
        minus = -np.inf
        out, tiles = self.skip([[0, 0, 0, 0]] * rows, 128, window=2)
        # Row r of a window of two: the last one sees keys 2 and 3 alone.
        assert out[-1, 0, 0] == 35 and np.isfinite(out).all() and tiles[:, 4].sum() == 0
        out, tiles = self.skip([[minus, minus, 0, 0]])
        assert out[0, 0, 0] == 35 and tiles[:, 4].sum() == 0

    @pytest.mark.parametrize("off", [None, 0, -1.0])
    def test_c24_off_is_dense(self, off: Any) -> None:
        rows = np.random.default_rng(0).standard_normal((5, 4)) * 9
        out, counts = scored(rows, self.VALUES, skip_lambda=off, tile=(2, 2), counters=True)
        np.testing.assert_array_equal(out, scored(rows, self.VALUES))
        assert counts.tolist() == [0, 0]

    @pytest.mark.parametrize("large", [1, 1.0, 2.0, np.inf, np.nan])
    def test_c24_lambda_of_one_is_refused(self, large: float) -> None:
        with pytest.raises(kv.ArgumentError, match=r"skip_lambda is .*must be below 1"):
            scored([[1, 2, 3, 4]], self.VALUES, skip_lambda=large)


@pytest.mark.parametrize("page", [1, 2, 3, 16])
def test_c26_windows_are_of_rows(page: int) -> None:
    """Window 4 at position 4 sees keys 1 to 4; window 3 at 4 and 5 sees 2 to 4 and 3 to 5."""
    keys, values = np.zeros((6, 4)), [1, 2, 4, 8, 16, 32]
    cache = one_head(keys, values, page)
    table = np.arange(-(-6 // page))[None].astype(np.int32)
    one = kv.attention(np.ones((1, 1, 4), np.float32), cache, 0, table, [5], [0, 1], window=4)
    assert one[0, 0, 0] == (2 + 4 + 8 + 16) / 4
    two = kv.attention(np.ones((2, 1, 4), np.float32), cache, 0, table, [6], [0, 2], window=3)
    np.testing.assert_allclose(two[:, 0, 0], [(4 + 8 + 16) / 3, (8 + 16 + 32) / 3], rtol=1e-6)
    table[0, : 3 // page] = -1  # blocks that the window has left are not looked at
    again = kv.attention(np.ones((2, 1, 4), np.float32), cache, 0, table, [6], [0, 2], window=2)
    np.testing.assert_allclose(again[:, 0, 0], [12, 24])


@pytest.mark.parametrize("window", [1, 7, 64, 100])
@pytest.mark.parametrize("rows", [1, 3, 150])
def test_c26_prompts_longer_than_the_window(window: int, rows: int) -> None:
    batch = Batch([(rows, 150)], page=16)
    out = np.full((rows, 4, 8), np.nan, np.float32)
    batch.attend(window=window, out=out)
    np.testing.assert_allclose(out, batch.expected(window=window)[0], rtol=5e-6, atol=5e-6)


def test_c27_scattered_blocks() -> None:
    """Blocks [4, 0, 2] of F, ten tokens: token 9 is slot 1 of block 2."""
    f = oracle.fixture_f().astype(np.float32) / 1000
    geometry = kv.Geometry(num_blocks=5, block_size=4, num_kv_heads=3, head_size=8, dtype="f32")
    scattered = kv.Cache(f, "B KV N H D", geometry=geometry)
    together = kv.Cache(f[[4, 0, 2, 1, 3]].copy(), "B KV N H D", geometry=geometry)
    q = np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32)
    out = kv.attention(q, scattered, 0, [[4, 0, 2]], [10], [0, 1])
    np.testing.assert_array_equal(out, kv.attention(q, together, 0, [[0, 1, 2]], [10], [0, 1]))
    last = kv.attention(q, scattered, 0, [[4, 0, 2]], [10], [0, 1], window=1)
    np.testing.assert_allclose(last[0], f[2, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page", [1, 3, 4, 5])
def test_c54_lengths_around_a_page(order: str, page: int) -> None:
    if "4" in order:
        page += page % 2
    lengths = [(1, keys) for keys in (0, 1, page - 1, page, page + 1, 2 * page, 7, 8, 10)]
    lengths += [(min(3, keys), keys) for _, keys in lengths]
    batch = Batch(lengths, order=order, page=page)
    out, lse = batch.attend(return_lse=True)
    expected, logs = batch.expected()
    np.testing.assert_allclose(out, expected, rtol=5e-6, atol=5e-6)
    np.testing.assert_allclose(lse, logs, rtol=1e-5, atol=1e-5)
    assert (out[0] == 0).all() and (lse[0] == -np.inf).all()


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_c56_skipped_tiles_leave_nothing_old(rows: int) -> None:
    batch = Batch([(rows, 256)], page=16, dtype="f16")
    for tile in ((16, 16), (128, 128)):
        fresh, counts = batch.attend(skip_lambda=0.9, tile=tile, counters=True)
        assert 0 < counts[1] < counts[0] or tile == (128, 128)
        out = np.full_like(fresh, np.nan)
        assert batch.attend(skip_lambda=0.9, tile=tile, out=out) is out
        np.testing.assert_array_equal(out, fresh)
        assert np.isfinite(to_f64(out)).all()


def test_c59_sparsity_is_a_ratio_of_sums() -> None:
    assert modelopt.sparsity([(40, 30), (2, 1)]) == 31 / 42
    assert modelopt.sparsity(np.array([[40, 30], [2, 1]])) == pytest.approx(0.738, abs=1e-3)
    assert modelopt.sparsity([]) == 0.0


def test_c59_padding_rows_count_nowhere() -> None:
    """A tile of 128 rows that holds one: it decides alone; sequences without rows have no tiles."""
    batch = Batch([(1, 200), (0, 64), (129, 200)], page=16, heads=2)
    _, tiles = batch.attend(skip_lambda=0.5, counters="map")
    # Two tiles of keys for the first, none for the second; tile 0 of the third ends at key 71 + 128.
    assert [len(tiles[tiles[:, 0] == s]) for s in range(3)] == [2 * 2, 0, 2 * (2 + 2)]
    counts = batch.attend(skip_lambda=0.5, counters=True)[1]
    assert counts.tolist() == [len(tiles), tiles[:, 4].sum()]
