# SPDX-License-Identifier: Apache-2.0
"""kv.attention: what it takes, what it refuses, random batches against an f64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstride as kv
from attention_oracle import Batch, to_f64

TOLERANCE = {"f32": 5e-6, "f16": 1e-3, "bf16": 1e-2}
ORDERS = [
    "B KV N H D",
    "KV B N H D",
    "B KV H N D",
    "B N H {key: D, value: D}",
    "B H N {key: D, value: D}",
    "B {key: H D/4 N D%4, value: H D N}",
    "key: B N H D | value: B H N D",
]


def close(got: Any, expected: np.ndarray, dtype: str) -> None:
    np.testing.assert_allclose(to_f64(got), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_batches(data: st.DataObject) -> None:
    """Lengths around pages, GQA ratios, windows, caps, sinks, dtypes, layouts."""
    page = data.draw(st.sampled_from([1, 2, 4, 16, 17]))
    lengths = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 1, 2, 7, 40]),
                st.sampled_from([0, 1, page - 1, page, page + 1, 13, 31, 127, 131, 257]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    dtype = data.draw(st.sampled_from(["f32", "f16", "bf16"]))
    order = data.draw(st.sampled_from(ORDERS))
    batch = Batch(
        lengths,
        order=order,
        page=page,
        heads=2 * (group := data.draw(st.sampled_from([1, 5, 6, 7, 64]))),
        dim=data.draw(st.sampled_from([8, 24, 64])),
        value_dim=data.draw(st.sampled_from([None, 12])) if "KV" not in order else None,
        dtype=dtype,
        seed=data.draw(st.integers(0, 99)),
    )
    options: dict[str, Any] = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.sampled_from([None, 1, 5, 130])),
        "soft_cap": data.draw(st.sampled_from([0.0, 2.5])),
        "scale": data.draw(st.sampled_from([None, 0.3])),
        "sinks": data.draw(st.sampled_from([None, np.linspace(-2, 2, 2 * group)])),
    }
    out, lse = batch.attend(return_lse=True, **options)
    expected, logs = batch.expected(**options)
    close(out, expected, dtype)
    np.testing.assert_allclose(lse, logs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"soft_cap": 1.0}])
def test_chunks_change_nothing(options: dict[str, Any]) -> None:
    """A prompt of 96 tokens at once, and in chunks that see what came before."""
    whole = Batch([(96, 96)], page=16)
    out = whole.attend(**options)
    done = 0
    for chunk in (1, 30, 5, 28, 32):
        end = done + chunk
        part = kv.attention(whole.q[done:end], whole.cache, 0, whole.table, [end], [0, chunk], **options)
        np.testing.assert_allclose(part, out[done:end], rtol=5e-6, atol=5e-6)
        done = end
    assert done == 96


def test_n_of_m_in_chunks() -> None:
    """Groups are of absolute keys: chunks of more than one row prune what the whole prompt prunes."""
    whole = Batch([(90, 90)], page=16)
    options: dict[str, Any] = {"nm": (2, 4), "recent": 5, "sink_tokens": 2}
    out = whole.attend(**options)
    assert np.abs(out - whole.attend()).max() > 1e-2
    for first, end in ((0, 17), (17, 40), (40, 90)):
        part = kv.attention(whole.q[first:end], whole.cache, 0, whole.table, [end], [0, end - first], **options)
        np.testing.assert_allclose(part, out[first:end], rtol=5e-6, atol=5e-6)
    # A lone row is dense.
    alone = kv.attention(whole.q[89:], whole.cache, 0, whole.table, [90], [0, 1], **options)
    np.testing.assert_array_equal(alone, kv.attention(whole.q[89:], whole.cache, 0, whole.table, [90], [0, 1]))


def test_causal_for_each_sequence() -> None:
    batch = Batch([(5, 9), (5, 9)])
    both = batch.attend(causal=np.array([True, False]))
    np.testing.assert_array_equal(both[:5], batch.attend(causal=True)[:5])
    np.testing.assert_array_equal(both[5:], batch.attend(causal=False)[5:])


def test_queries_longer_than_their_keys() -> None:
    batch = Batch([(6, 2)])
    out, lse = batch.attend(return_lse=True)
    assert (out[:4] == 0).all() and (lse[:4] == -np.inf).all() and np.isfinite(lse[4:]).all()
    close(out, batch.expected()[0], "f32")


def test_any_strides_of_queries_and_output() -> None:
    batch = Batch([(3, 9), (1, 4)])
    expected = batch.attend()
    for axes in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (2, 0, 1)):
        back = np.argsort(axes)
        q = np.ascontiguousarray(batch.q.transpose(axes)).transpose(back)
        memory = np.full(tuple(2 * n for n in np.array(expected.shape)[list(axes)]), np.nan, np.float32)
        out = memory[::2, ::2, ::2].transpose(back)
        got = kv.attention(q, batch.cache, 0, batch.table, batch.seq_lens, batch.query_start_loc, out=out)
        assert got is out
        np.testing.assert_array_equal(out, expected)
        assert np.isnan(memory).sum() == memory.size - out.size


def test_rows_behind_the_last_sequence() -> None:
    batch = Batch([(2, 5)])
    q = np.concatenate([batch.q, np.full((3, 4, 8), np.nan, np.float32)])
    args = (batch.cache, 0, batch.table, batch.seq_lens, batch.query_start_loc)
    out, lse = kv.attention(q, *args, return_lse=True)
    assert (out[2:] == 0).all() and (lse[2:] == -np.inf).all()
    given_out = np.full_like(out, 7)
    kv.attention(q, *args, out=given_out)
    assert (given_out[2:] == 7).all()
    np.testing.assert_array_equal(given_out[:2], out[:2])


def test_scales_of_f8() -> None:
    """One scale, and one for each KV head, of keys and values."""
    geometry = kv.Geometry(num_blocks=3, block_size=4, num_kv_heads=2, head_size=8, dtype="f8_e4m3")
    plain = kv.Geometry(num_blocks=3, block_size=4, num_kv_heads=2, head_size=8, dtype="f32")
    rng = np.random.default_rng(1)
    numbers = (rng.integers(-8, 9, (3, 2, 4, 2, 8)) / 8).astype(np.float32)
    small = kv.Cache(np.zeros((3, 2, 4, 2, 8), np.uint8), "B KV N H D", geometry=geometry)
    large = kv.Cache(np.zeros((3, 2, 4, 2, 8), np.float32), "B KV N H D", geometry=plain)
    q = rng.standard_normal((2, 4, 8)).astype(np.float32)
    slots = np.arange(12)
    rows = numbers.transpose(1, 0, 2, 3, 4).reshape(2, 12, 2, 8)
    kv.write_tokens(small, 0, rows[0], rows[1], slots)
    for key, value in ((2.0, 0.25), ([2.0, 4.0], [0.5, 1.0])):
        steps = [np.reshape(np.float32(scale), (-1, 1)) for scale in (key, value)]
        kv.write_tokens(large, 0, rows[0] * steps[0], rows[1] * steps[1], slots)
        args = (0, [[0, 1, 2]], [11], [0, 2])
        got = kv.attention(q, small, *args, key_scale=key, value_scale=value)
        np.testing.assert_allclose(got, kv.attention(q, large, *args), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("name", ["f8_e4m3", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz"])
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("which", [0, 1])
def test_not_a_number_in_f8(name: str, rows: int, which: int) -> None:
    """A NaN that is there is one in the output, though its bits are like a number's."""
    geometry = kv.Geometry(num_blocks=2, block_size=32, num_kv_heads=1, head_size=40, dtype=name)
    memory = np.full((2, 2, 32, 1, 40), 0x38, np.uint8)
    cache = kv.Cache(memory, "B KV N H D", geometry=geometry)
    args = (np.ones((rows, 1, 40), np.float32), cache, 0, [[0, 1]], [50], [0, rows])
    assert np.isfinite(kv.attention(*args, causal=False)).all()
    for bits in (0x80,) if "fnuz" in name else (0x7F, 0xFF):
        for dim in (0, 7, 33, 39):
            memory[...] = 0x38
            memory[1, which, 3, 0, dim] = bits
            bad = np.isnan(kv.attention(*args, causal=False))
            assert bad.all() if which == 0 else (bad[..., dim].all() and bad.sum() == rows), (bits, dim)


def test_lse_of_base_two() -> None:
    batch = Batch([(3, 9)])
    _, natural = batch.attend(return_lse=True)
    _, binary = batch.attend(return_lse=True, lse_base="2")
    np.testing.assert_allclose(binary, natural / np.log(2), rtol=1e-6)


@pytest.mark.parametrize("base", ["e", "2"])
def test_cascade(base: str) -> None:
    """A shared prefix once for all sequences, their own keys each, merged: what they give together."""
    batch = Batch([(1, 40), (1, 52), (1, 33)], page=8)
    batch.table[1:, :3] = batch.table[0, :3]  # 24 shared keys
    out, lse = batch.attend(return_lse=True, lse_base=base)
    q = batch.q
    shared = kv.attention(
        q, batch.cache, 0, batch.table[:1], [24], [0, 3], causal=False, return_lse=True, lse_base=base
    )
    own = kv.attention(
        q,
        batch.cache,
        0,
        batch.table[:, 3:],
        batch.seq_lens - 24,
        batch.query_start_loc,
        return_lse=True,
        lse_base=base,
    )
    merged, logs = kv.merge_states(*shared, *own, lse_base=base)
    np.testing.assert_allclose(merged, out, rtol=5e-6, atol=5e-6)
    np.testing.assert_allclose(logs, lse, rtol=1e-5, atol=1e-5)


def test_merging_with_nothing() -> None:
    out = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    lse = np.array([[0.5, -3.0]], np.float32)
    nothing, none = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    for pair in ((out, lse, nothing, none), (nothing, none, out, lse)):
        merged, logs = kv.merge_states(*pair)
        np.testing.assert_array_equal(merged, out)
        np.testing.assert_array_equal(logs, lse)
    merged, logs = kv.merge_states(nothing, none, nothing, none)
    assert (merged == 0).all() and (logs == -np.inf).all()


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    for dtype, name in ((torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "bf16")):
        batch = Batch([(3, 9), (1, 20)], dtype=name)
        memory = torch.from_numpy(batch.memory[0].view(np.int16) if name == "bf16" else batch.memory[0]).view(dtype)
        cache = kv.Cache(memory, batch.cache.layout)
        q = torch.from_numpy(batch.q.view(np.int16) if name == "bf16" else batch.q).view(dtype)
        table, lens, starts = (torch.from_numpy(a) for a in (batch.table, batch.seq_lens, batch.query_start_loc))
        out, lse = kv.attention(q, cache, 0, table, lens, starts, causal=torch.tensor([True, True]), return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        expected, logs = batch.attend(return_lse=True)
        np.testing.assert_array_equal(out.float().numpy(), to_f64(expected))
        np.testing.assert_array_equal(lse.numpy(), logs)
        merged, _ = kv.merge_states(out, lse, out, lse)
        np.testing.assert_array_equal(merged.float().numpy(), to_f64(expected))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layer": 1}, kv.BlockIndexError, "attention: layer 1 is outside the cache"),
    ({"layer": 0.5}, kv.DTypeError, "layer"),
    ({"q": np.zeros((4, 4, 7), np.float32)}, kv.ArgumentError, "q has head size 7, the keys 8"),
    ({"q": np.zeros((4, 3, 8), np.float32)}, kv.ArgumentError, "q has 3 heads.*multiple of the cache's 2 KV heads"),
    ({"q": np.zeros((4, 0, 8), np.float32)}, kv.ArgumentError, "q has 0 heads"),
    ({"q": np.zeros((4, 32), np.float32)}, kv.ArgumentError, r"q has shape \[4, 32\], expected"),
    ({"q": np.zeros((4, 4, 8), np.float64)}, kv.DTypeError, "float64"),
    ({"q": np.zeros((4, 4, 8), np.float16)}, kv.DTypeError, "q is f16, the cache holds f32"),
    ({"block_table": [[0, 1, 2], [3, 4, 99]]}, kv.BlockIndexError, r"block_table\[1\]\[2\] is 99.*seq_lens\[1\] = 9"),
    ({"block_table": [[0, 1, 2], [3, -1, 5]]}, kv.BlockIndexError, r"block_table\[1\]\[1\] is -1"),
    ({"block_table": [[0, 1, 2]]}, kv.ArgumentError, "block_table has 1 rows for 2 sequences"),
    ({"block_table": [[0, 1], [3, 4]]}, kv.ArgumentError, r"seq_lens\[1\] is 9, which needs 3 blocks"),
    ({"block_table": [0, 1, 2]}, kv.ArgumentError, r"block_table has shape \[3\]"),
    ({"block_table": np.zeros((2, 3), np.float32)}, kv.DTypeError, "block_table"),
    ({"seq_lens": [4, -1]}, kv.ArgumentError, r"seq_lens\[1\] is -1"),
    ({"seq_lens": [4, 2**62]}, kv.ArgumentError, r"seq_lens\[1\] is 4611686018427387904, which needs"),
    ({"seq_lens": [4]}, kv.ArgumentError, "query_start_loc has 3 values for 1 sequences"),
    ({"query_start_loc": [0, 3, 5]}, kv.ArgumentError, r"query_start_loc\[2\] is 5.*q's 4 tokens"),
    ({"query_start_loc": [0, 3, 2]}, kv.ArgumentError, r"query_start_loc\[2\] is 2, must be from 3"),
    ({"query_start_loc": [1, 3, 4]}, kv.ArgumentError, r"query_start_loc\[0\] is 1"),
    ({"query_start_loc": []}, kv.ArgumentError, "query_start_loc has 0 values"),
    ({"scale": float("nan")}, kv.ArgumentError, "scale is nan"),
    ({"scale": "big"}, kv.DTypeError, "scale"),
    ({"causal": "yes"}, kv.ArgumentError, "causal is 'yes'"),
    ({"causal": [True]}, kv.ArgumentError, "causal has 1 values for 2 sequences"),
    ({"window": 0}, kv.ArgumentError, "window is 0, expected at least 1"),
    ({"window": -1}, kv.ArgumentError, "window is -1"),
    ({"soft_cap": -1.0}, kv.ArgumentError, "soft_cap is -1"),
    ({"sinks": [1.0]}, kv.ArgumentError, "1 sinks for 4 query heads"),
    ({"key_scale": 2.0}, kv.ArgumentError, "key_scale is 2, but the cache holds f32 as it came"),
    ({"value_scale": 0.0}, kv.ArgumentError, "value_scale 0 is not a positive"),
    ({"value_scale": [1.0] * 3}, kv.ArgumentError, "value_scale has 3 values"),
    ({"skip_lambda": 1.0}, kv.ArgumentError, "skip_lambda is 1"),
    ({"skip_lambda": [0.1] * 3}, kv.ArgumentError, "skip_lambda has 3 values for 2 sequences"),
    ({"skip_lambda": 0.1, "tile": (0, 8)}, kv.ArgumentError, r"tile is \(0, 8\)"),
    ({"tile": 128}, kv.ArgumentError, "tile is 128"),
    ({"tile": None}, kv.ArgumentError, "tile is None"),
    ({"nm": (2, 5)}, kv.ArgumentError, "nm is 2:5, M must be 4 or 8"),
    ({"nm": (4, 4)}, kv.ArgumentError, "nm is 4:4, N must be from 1 to 3"),
    ({"nm": (0, 8)}, kv.ArgumentError, "nm is 0:8, N must be from 1 to 7"),
    ({"nm": (2**40, 8)}, kv.ArgumentError, "nm is"),
    ({"nm": (2, 4), "recent": -1}, kv.ArgumentError, "recent is -1"),
    ({"nm": (2, 8), "tile": (128, 12)}, kv.ArgumentError, "tile has 12 keys, which is no multiple of M"),
    ({"lse_base": "10"}, kv.ArgumentError, "lse_base is '10'"),
    ({"counters": "all"}, kv.ArgumentError, "counters"),
    ({"cache": np.zeros(4)}, kv.ArgumentError, "cache is ndarray"),
]


@pytest.mark.parametrize(("change", "error", "text"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input(change: dict[str, Any], error: type[Exception], text: str) -> None:
    """One line, and nothing was written."""
    batch = Batch([(3, 4), (1, 9)])
    named: dict[str, Any] = {
        "q": batch.q,
        "cache": batch.cache,
        "layer": 0,
        "block_table": batch.table,
        "seq_lens": batch.seq_lens,
        "query_start_loc": batch.query_start_loc,
    } | change
    heads = named["q"].shape[1] if named["q"].ndim == 3 else 4
    out = np.full((4, heads, 8), 7, np.float16 if named["q"].dtype == np.float16 else np.float32)
    with pytest.raises(error, match=text) as caught:
        kv.attention(**named, out=out)
    assert "\n" not in str(caught.value)
    assert (out == 7).all()


def test_bad_output() -> None:
    batch = Batch([(3, 4), (1, 9)])
    memory = np.zeros((2, 4, 4, 8), np.float32)
    memory[0] = batch.q
    args = (memory[0], batch.cache, 0, batch.table, batch.seq_lens, batch.query_start_loc)
    for out, text in (
        (memory[0], "overlaps q"),
        (memory.reshape(-1)[64:192].reshape(4, 4, 8), "overlaps q"),
        (batch.memory[0][:128].reshape(4, 4, 8), "overlaps the cache"),
        (np.broadcast_to(memory[1, :1], (4, 4, 8)), "read-only|share memory"),
        (np.lib.stride_tricks.as_strided(memory[1], (4, 4, 8), (16, 32, 4)), "share memory"),
        (memory[1, :3], "out has shape"),
        (np.zeros((4, 4, 8), np.float16), "out is float16"),
    ):
        with pytest.raises((kv.ArgumentError, kv.DTypeError), match=text):
            kv.attention(*args, out=out)
    np.testing.assert_array_equal(memory[0], batch.q)


def test_layouts_that_are_no_keys_and_values() -> None:
    geometry = kv.Geometry(num_blocks=2, block_size=4, num_kv_heads=1, head_size=8, dtype="f32")
    scaled = kv.Cache(
        np.zeros(1000, np.uint8), kv.layout("B N {key: D f8_e4m3, key_scale: D[1] f32, value: D f8_e4m3}", geometry)
    )
    latent = kv.Cache(np.zeros(1000, np.float32), kv.layout("B N {latent: D}", geometry))
    codes = kv.Cache(np.zeros(1000, np.uint8), kv.layout("B N {key: D u8, value: D u8}", geometry))
    q = np.zeros((1, 1, 8), np.float32)
    for cache, error, text in (
        (scaled, kv.LayoutError, "plane 'key_scale', which attention would ignore"),
        (latent, kv.LayoutError, "plane 'latent'"),
        (codes, kv.DTypeError, "plane 'key' is u8"),
    ):
        with pytest.raises(error, match=text):
            kv.attention(q, cache, 0, [[0]], [1], [0, 1])


def test_calibration_refuses() -> None:
    batch = Batch([(3, 4)])
    args = (batch.q, batch.cache, 0, batch.table, batch.seq_lens, batch.query_start_loc)
    for thresholds, text in (([], "no thresholds"), ([0.0], "threshold 0 is not"), ([0.5, 1.0], "threshold 1 is not")):
        with pytest.raises(kv.ArgumentError, match=text):
            kv.attention_calibrate(*args, thresholds)


def test_merge_refuses() -> None:
    out, lse = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    for args, text in (
        ((out, lse, out[:1], lse[:1]), r"out1 has shape \[2, 3, 4\], out2 \[1, 3, 4\]"),
        ((out, lse, out.astype(np.float16), lse), "out1 is f32, out2 f16"),
        ((out, lse[:1], out, lse), "lse1 has shape"),
        ((out, lse.astype(np.float16), out, lse), "lse1 is float16"),
        ((out[0], lse, out, lse), "out1 has shape"),
    ):
        with pytest.raises((kv.ArgumentError, kv.DTypeError), match=text):
            kv.merge_states(*args)


def test_values_of_their_own_width() -> None:
    """The plane's width counts, whatever the geometry says: nothing is written behind it."""
    geometry = kv.Geometry(num_blocks=2, block_size=4, num_kv_heads=1, head_size=8, dtype="f32")
    for width in (4, 64):
        layout = kv.layout(f"B N H {{key: D, value: D[{width}]}}", geometry)
        cache = kv.Cache(np.ones(layout.num_bytes // 4, np.float32), layout)
        args = (np.ones((1, 1, 8), np.float32), cache, 0, [[0]], [3], [0, 1])
        assert kv.attention(*args).shape == (1, 1, width)
        memory = np.full(200, 7, np.float32)
        with pytest.raises(kv.ArgumentError, match=r"out has shape \[1, 1, 8\]"):
            kv.attention(*args, out=memory[:8].reshape(1, 1, 8))
        assert (memory == 7).all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("far", [0, 200])
def test_every_nan_stays_one(bits: int, rows: int, far: float) -> None:
    """Of keys, values and queries, whatever its payload and weight, with tiles looked at or not."""
    nan = np.array([bits], np.uint32).view(np.float32)[0]
    for what in ("key", "value", "query"):
        batch = Batch([(rows, 40)], heads=1, kv_heads=1, order="B KV N H D")
        q = batch.q * 0 + 1
        key, value = batch.cache.key(0), batch.cache.value(0)
        block, slot = batch.table[0, 3], 2
        key[batch.table[0, :10]] = 0
        key[block, slot, 0, 0] = -far
        if what == "query":
            q[...] = nan
        else:
            (key if what == "key" else value)[block, slot, 0, 3] = nan
        for more in ({}, {"skip_lambda": 0.01, "tile": (16, 8)}):
            if more and what == "value" and far:
                continue  # the tile may be skipped, and is not read then
            out = kv.attention(q, batch.cache, 0, batch.table, [40], [0, rows], causal=False, scale=1.0, **more)
            assert np.isnan(out if what != "value" else out[..., 3]).all(), (what, more)


def test_windows_beyond_everything() -> None:
    for lengths in ([(6, 2)], [(3, 9), (1, 50)]):
        batch = Batch(lengths)
        for causal in (True, False):
            expected = batch.attend(causal=causal)
            for window in (2**63 - 1, 2**62, 1000):
                np.testing.assert_array_equal(batch.attend(causal=causal, window=window), expected)
        far = batch.attend(nm=(1, 4), recent=2**63 - 1, sink_tokens=2**63 - 1)
        np.testing.assert_allclose(far, batch.attend(), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_long_sums(rows: int) -> None:
    """100,000 equal keys: the mean of their values."""
    keys = 100_000
    memory = np.zeros((1, 2, keys, 1, 4), np.float32)
    memory[:, 1] = 0.1
    geometry = kv.Geometry(num_blocks=1, block_size=keys, num_kv_heads=1, head_size=4, dtype="f32")
    cache = kv.Cache(memory, "B KV N H D", geometry=geometry)
    out = kv.attention(np.zeros((rows, 1, 4), np.float32), cache, 0, [[0]], [keys], [0, rows])
    np.testing.assert_allclose(out, np.float32(0.1), rtol=1e-5)


def test_other_layers_of_one_allocation() -> None:
    """An output behind the last layer is free; one over another layer is not."""
    layers, blocks = 2, 3
    whole = np.zeros(layers * blocks * 64 + 64, np.float32)
    allocation = whole[:-64].reshape(blocks, layers, 1, 4, 2, 8)
    geometry = kv.Geometry(num_blocks=blocks, block_size=4, num_kv_heads=1, head_size=8, dtype="f32")
    q = np.ones((1, 1, 8), np.float32)
    for layer in range(layers):
        cache = kv.Cache(allocation[:, layer], "B H N KV D", geometry=geometry)
        kv.attention(q, cache, 0, [[0]], [2], [0, 1], out=whole[-64:][:8].reshape(1, 1, 8))
    both = kv.Cache([np.zeros((3, 2, 4, 1, 8), np.float32) for _ in range(2)], "B KV N H D", geometry=geometry)
    with pytest.raises(kv.ArgumentError, match="overlaps the cache"):
        kv.attention(q, both, 0, [[0]], [2], [0, 1], out=both.key(1)[0, :1])


def test_counters_of_each_sequence() -> None:
    batch = Batch([(1, 200), (0, 64), (129, 200)], page=16, heads=2)
    each = batch.attend(skip_lambda=0.5, counters="each")[1]
    tiles = batch.attend(skip_lambda=0.5, counters="map")[1]
    for s in range(3):
        mine = tiles[tiles[:, 0] == s]
        assert each[s].tolist() == [len(mine), mine[:, 4].sum()]


@pytest.mark.parametrize(
    "change",
    [
        {"counters": np.zeros(2)},
        {"lse_base": []},
        {"causal": [[True], [True, False]]},
        {"causal": np.ones((2, 2), bool)},
        {"sinks": [np.nan] * 4},
        {"sinks": [np.inf] * 4},
        {"scale": np.zeros((9, 9))},
        {"window": 2**70},
        {"recent": 2**70},
    ],
)
def test_one_line_for_what_is_no_argument(change: dict[str, Any]) -> None:
    batch = Batch([(3, 4), (1, 9)])
    with pytest.raises(kv.Error) as caught:
        batch.attend(**change)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("attention: ")
