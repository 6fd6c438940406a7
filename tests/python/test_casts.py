# SPDX-License-Identifier: Apache-2.0
"""Casts between float types against ml_dtypes: every code, ties, saturation, NaN, subnormals and scales."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import kvstride as kv

DTYPES = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f8_e4m3": ml_dtypes.float8_e4m3fn,
    "f8_e5m2": ml_dtypes.float8_e5m2,
    "f8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "f8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
F8 = [name for name in DTYPES if name.startswith("f8")]
#: Largest finite values, of the formats' own tables.
MAX = {"f8_e4m3": 448.0, "f8_e5m2": 57344.0, "f8_e4m3fnuz": 240.0, "f8_e5m2fnuz": 57344.0}
BITS = {4: np.uint32, 2: np.uint16, 1: np.uint8}
TOKENS, HEADS, DIM = 4, 2, 16


def bits(array: np.ndarray) -> np.ndarray:
    """The array's bits."""
    return np.ascontiguousarray(array).view(BITS[array.dtype.itemsize])


def all_codes(dtype: str) -> np.ndarray:
    """Every value of an 8- or 16-bit type."""
    kind = np.dtype(DTYPES[dtype])
    return np.arange(2 ** (8 * kind.itemsize), dtype=np.uint64).astype(BITS[kind.itemsize]).view(kind)


def want(values: np.ndarray, dst: str, scale: np.ndarray | float = 1.0) -> np.ndarray:
    """What a cast of `values` gives, by ml_dtypes: f8 saturates, other types go to infinity."""
    from_f8 = values.dtype in [np.dtype(DTYPES[name]) for name in F8]
    x = values.astype(np.float32)
    with np.errstate(all="ignore"):
        if from_f8 and dst not in F8:
            x = x * np.float32(scale) if np.isscalar(scale) else x * scale
        elif not from_f8 and dst in F8:
            x = x / np.float32(scale) if np.isscalar(scale) else x / scale
        if dst in F8:
            x = np.where(np.isnan(x), x, np.clip(x, -MAX[dst], MAX[dst])).astype(np.float32)
        return x.astype(DTYPES[dst])


def convert(
    values: np.ndarray, src: str, dst: str, scales: dict[str, object] | None = None, order: str = "B H N KV D"
) -> np.ndarray:
    """`values` through a cache of `src` into one of `dst` with another layout; keys hold them, values the reverse."""
    per_block = TOKENS * HEADS * DIM
    blocks = -(-len(values) // per_block)
    padded = np.zeros(blocks * per_block, dtype=values.dtype)
    padded[: len(values)] = values

    def cache(text: str, dtype: str) -> kv.Cache:
        g = kv.Geometry(num_blocks=blocks, block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=dtype)
        made = kv.Layout(text, g)
        return kv.Cache(np.zeros(made.shape, dtype=DTYPES[dtype]), made)

    source, target = cache("B KV N H D", src), cache(order, dst)
    shape = (blocks, TOKENS, HEADS, DIM)
    source.key()[...] = padded.reshape(shape)
    source.value()[...] = padded[::-1].reshape(shape)
    kv.convert_blocks(source, target, [(b, blocks - 1 - b) for b in range(blocks)], cast=True, scales=scales)
    key = np.ascontiguousarray(target.key()[::-1]).reshape(-1)
    value = np.ascontiguousarray(target.value()[::-1]).reshape(-1)[::-1]
    assert key.dtype == DTYPES[dst]
    if scales is None or "value" in scales:
        np.testing.assert_array_equal(bits(key), bits(value))
    return key[: len(values)]


def check(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits; NaN is NaN of any payload."""
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(bits(got)[~nan], bits(expected)[~nan])


def interesting_f32(dst: str) -> np.ndarray:
    """All values of `dst`, the midpoints between neighbours and their f32 neighbours, limits and random bits."""
    codes = all_codes(dst).astype(np.float32)
    finite = np.unique(codes[np.isfinite(codes)])
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    close = [np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    edge = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 65519.9, 65520, 447.9, 464, 480]
    )
    random = np.random.default_rng(7).integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    return np.concatenate([finite, middle, *close, edge.astype(np.float32), -edge.astype(np.float32), random])


@pytest.mark.parametrize("dst", [d for d in DTYPES if d != "f32"])
def test_f32_rounds_to_nearest_even(dst: str) -> None:
    values = interesting_f32(dst)
    check(convert(values, "f32", dst), want(values, dst))


@pytest.mark.parametrize(("src", "dst"), [p for p in itertools.permutations(DTYPES, 2) if p[0] != "f32"])
def test_every_code(src: str, dst: str) -> None:
    """All 256 codes of 8-bit types and all 65,536 of 16-bit types, into every other type."""
    values = all_codes(src)
    check(convert(values, src, dst), want(values, dst))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "f32"])
def test_f32_and_back_is_the_identity(dtype: str) -> None:
    values = all_codes(dtype)
    finite = np.isfinite(values.astype(np.float32))
    wide = convert(values, dtype, "f32")
    assert np.array_equal(wide[finite], values.astype(np.float32)[finite])
    back = convert(wide, "f32", dtype)
    np.testing.assert_array_equal(bits(back)[finite], bits(values)[finite])


@pytest.mark.parametrize("dtype", F8)
@pytest.mark.parametrize("src", ["f32", "bf16", "f16"])
def test_f8_saturates(dtype: str, src: str) -> None:
    """Above max, infinity included, becomes max; the wrong codes (NaN, infinity) never appear."""
    big = {"f32": 3e38, "bf16": 3e38, "f16": 65504.0}[src]
    values = np.array([np.inf, -np.inf, big, -big, MAX[dtype], -MAX[dtype], 1.0], dtype=DTYPES[src])
    got = convert(values, src, dtype).astype(np.float32)
    assert got.tolist() == [MAX[dtype], -MAX[dtype], MAX[dtype], -MAX[dtype], MAX[dtype], -MAX[dtype], 1.0]


def test_16_bit_overflow_is_infinity() -> None:
    """Unlike f8; bf16 65536.0 is infinity in f16 and 65519.99 is not."""
    values = np.array([65536.0, -65536.0, 65519.99, 65504.0, 1e38, np.inf], dtype=np.float32)
    assert convert(values, "f32", "f16").astype(np.float32).tolist() == [np.inf, -np.inf, 65504, 65504, np.inf, np.inf]
    assert convert(values[:1].astype(ml_dtypes.bfloat16), "bf16", "f16").astype(np.float32)[0] == np.inf
    huge = np.array([3.3895314e38, 3.39e38, 3.4028235e38, -3.4028235e38], dtype=np.float32)
    assert convert(huge, "f32", "bf16").astype(np.float32).tolist() == [
        float(np.float32(3.3895314e38)),
        float(np.float32(3.3895314e38)),
        np.inf,
        -np.inf,
    ]


@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(DTYPES, 2)))
def test_nan_stays_nan(src: str, dst: str) -> None:
    if src == "f32":
        payloads = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFF800001], dtype=np.uint32)
        values = payloads.view(np.float32)
    else:
        values = all_codes(src)
        values = values[np.isnan(values.astype(np.float32))]
    assert len(values) > 0
    assert np.isnan(convert(values, src, dst).astype(np.float32)).all()


@pytest.mark.parametrize("dst", [d for d in DTYPES if d != "f32"])
def test_ties_go_to_even(dst: str) -> None:
    """Hand-made: between the first two codes above 1, and at half of the smallest subnormal."""
    kind = np.dtype(DTYPES[dst])
    one = bits(np.ones(1, kind))[0]
    codes = np.array([one, one + 1, one + 2], dtype=BITS[kind.itemsize]).view(kind).astype(np.float32)
    tiny = np.array([1, 2], dtype=BITS[kind.itemsize]).view(kind).astype(np.float32)
    values = np.array(
        [(codes[0] + codes[1]) / 2, (codes[1] + codes[2]) / 2, tiny[0] / 2, tiny[0] * 1.5], dtype=np.float32
    )
    assert convert(values, "f32", dst).astype(np.float32).tolist() == [codes[0], codes[2], 0.0, tiny[1]]


SCALES = [1.0, 0.5, 0.03125, 3.0, 0.0123, 1e-6, 117.0, 2.0**-20]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(["f32", "f16", "bf16"], F8)))
def test_quantise_divides(src: str, dst: str, scale: float) -> None:
    values = np.random.default_rng(3).normal(size=2000).astype(np.float32) * np.float32(40 * scale)
    values = np.concatenate([values, [np.inf, -np.inf, np.nan, 0.0, -0.0]]).astype(DTYPES[src])
    got = convert(values, src, dst, {"key": scale, "value": scale})
    check(got, want(values, dst, scale))
    if scale != 1.0:
        assert (bits(got) != bits(want(values, dst, 1 / scale))).any()  # multiplied instead


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(F8, ["f32", "f16", "bf16"])))
def test_dequantise_multiplies(src: str, dst: str, scale: float) -> None:
    values = all_codes(src)
    got = convert(values, src, dst, {"key": scale, "value": scale})
    check(got, want(values, dst, scale))


@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(F8, 2)))
def test_f8_to_f8_keeps_the_scale(src: str, dst: str) -> None:
    """Both sides have one scale: the number is recoded, and saturates at the smaller maximum."""
    values = all_codes(src)
    check(convert(values, src, dst, {"key": 0.25, "value": 0.25}), want(values, dst))
    if MAX[dst] < MAX[src]:
        top = np.array([MAX[src], -MAX[src]], dtype=DTYPES[src])
        assert convert(top, src, dst).astype(np.float32).tolist() == [MAX[dst], -MAX[dst]]


def caches(src: str, dst: str, heads: int = HEADS) -> tuple[kv.Cache, kv.Cache, np.ndarray]:
    """A source cache with random numbers, an empty destination, and the numbers [2, block, token, head, dim]."""
    rng = np.random.default_rng(11)
    numbers = (rng.normal(size=(2, 3, TOKENS, heads, DIM)) * 5).astype(np.float32).astype(DTYPES[src])
    sizes = {"num_blocks": 3, "block_size": TOKENS, "num_kv_heads": heads, "head_size": DIM}
    source = kv.Cache(
        np.ascontiguousarray(numbers.transpose(1, 0, 2, 3, 4)), "B KV N H D", geometry=kv.Geometry(**sizes, dtype=src)
    )
    made = kv.Layout("B H {key: D/4 N D%4, value: D N}", kv.Geometry(**sizes, dtype=dst))
    target = kv.Cache(np.zeros(made.num_bytes // np.dtype(DTYPES[dst]).itemsize, dtype=DTYPES[dst]), made)
    return source, target, numbers


def planes(cache: kv.Cache) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [block, token, head, dim]."""
    key = cache.plane(0, "key")
    return key.reshape(*key.shape[:3], -1), cache.value()


@pytest.mark.parametrize(
    ("src", "dst"), [("f32", "f8_e4m3"), ("bf16", "f8_e5m2"), ("f8_e4m3", "bf16"), ("f8_e5m2fnuz", "f16")]
)
def test_scales_by_plane(src: str, dst: str) -> None:
    """Key and value have scales of their own; a plane without one has 1."""
    source, target, numbers = caches(src, dst)
    kv.convert_blocks(source, target, [(0, 2), (1, 1), (2, 0)], cast=True, scales={"key": 0.25, "value": 8.0})
    key, value = planes(target)
    check(key[::-1].reshape(-1), want(numbers[0].reshape(-1), dst, 0.25))
    check(value[::-1].reshape(-1), want(numbers[1].reshape(-1), dst, 8.0))
    kv.convert_blocks(source, target, [(0, 2), (1, 1), (2, 0)], cast=True, scales={"value": [8.0]})
    check(planes(target)[0][::-1].reshape(-1), want(numbers[0].reshape(-1), dst))


@pytest.mark.parametrize(
    ("src", "dst"), [("f32", "f8_e4m3"), ("bf16", "f8_e5m2"), ("f8_e4m3", "bf16"), ("f8_e4m3fnuz", "f32")]
)
def test_scales_by_head(src: str, dst: str) -> None:
    """One scale a head of the f8 side, also for a slice of heads; mixing heads up is seen."""
    source, target, numbers = caches(src, dst, heads=4)
    scales = np.array([0.25, 2.0, 0.5, 16.0], dtype=np.float32)
    kv.convert_blocks(
        source, target, [(0, 0), (1, 1), (2, 2)], cast=True, scales={"key": scales, "value": scales[::-1]}
    )
    key, value = planes(target)
    check(key.reshape(-1), want(numbers[0], dst, scales[:, None]).reshape(-1))
    check(value.reshape(-1), want(numbers[1], dst, scales[::-1, None]).reshape(-1))
    assert (bits(key) != bits(want(numbers[0], dst, scales[::-1, None]))).any()
    before = key.copy()
    kv.convert_blocks(source, target, [(0, 1)], cast=True, scales={"key": scales, "value": scales}, heads=(2, 0, 2))
    key, value = planes(target)
    mine = scales[2:, None] if src in F8 else scales[:2, None]
    check(key[1, :, :2].reshape(-1), want(numbers[0, 0, :, 2:], dst, mine).reshape(-1))
    check(value[1, :, :2].reshape(-1), want(numbers[1, 0, :, 2:], dst, mine).reshape(-1))
    np.testing.assert_array_equal(bits(key[1, :, 2:]), bits(before[1, :, 2:]))
    np.testing.assert_array_equal(bits(key[[0, 2]]), bits(before[[0, 2]]))


@pytest.mark.parametrize(("src", "dst"), list(itertools.product(["f32", "f16", "bf16"], F8)))
def test_write_tokens_quantises(src: str, dst: str) -> None:
    """reshape_and_cache into an f8 cache: x / scale, saturated."""
    rng = np.random.default_rng(5)
    key, value = (rng.normal(size=(2, 5, HEADS, DIM)) * 300).astype(DTYPES[src])
    key[0, 0, :4] = [np.inf, -np.inf, np.nan, 0.0]
    cache = kv.Cache(
        np.zeros((3, 2, TOKENS, HEADS, DIM), DTYPES[dst]),
        "B KV N H D",
        geometry=kv.Geometry(num_blocks=3, block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=dst),
    )
    slots = [11, -1, 0, 6]
    kv.write_tokens(cache, 0, key, value, slots, key_scale=0.5, value_scale=4.0)
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        check(cache.key()[slot // TOKENS, slot % TOKENS].reshape(-1), want(key[i].reshape(-1), dst, 0.5))
        check(cache.value()[slot // TOKENS, slot % TOKENS].reshape(-1), want(value[i].reshape(-1), dst, 4.0))
    assert np.count_nonzero(bits(cache.key())) <= 3 * HEADS * DIM


def test_only_asked_for() -> None:
    """Without cast, and for types without values, dtypes that differ are an error and nothing is written."""
    for src, dst in [("f16", "bf16"), ("f32", "bf16"), ("f8_e4m3", "f8_e5m2"), ("bf16", "f8_e4m3")]:
        source, target, _ = caches(src, dst)
        with pytest.raises(kv.DTypeError, match=f"{src}.*{dst}.*cast"):
            kv.convert_blocks(source, target, [(0, 0)])
        assert not bits(target.value()).any()
    sizes = {"num_blocks": 1, "block_size": 1, "num_kv_heads": 1, "head_size": 4}
    for src, dst in [("i8", "f32"), ("f32", "u8"), ("bf16", "i32"), ("f8_e8m0", "f32"), ("f4x2", "bf16"), ("i8", "u8")]:
        with pytest.raises(kv.DTypeError, match=f"no cast from {src} to {dst}"):
            kv.Plan(
                kv.Layout("B KV N H D", kv.Geometry(**sizes, dtype=src)),
                kv.Layout("B KV N H D", kv.Geometry(**sizes, dtype=dst)),
                cast=True,
            )


def test_negative_zero() -> None:
    """-0 keeps its sign except where the type has none."""
    zeros = np.array([-0.0, 0.0], dtype=np.float32)
    for dst in ("f16", "bf16", "f8_e4m3", "f8_e5m2"):
        assert np.signbit(convert(zeros, "f32", dst).astype(np.float32)).tolist() == [True, False]
    for dst in ("f8_e4m3fnuz", "f8_e5m2fnuz"):
        assert bits(convert(zeros, "f32", dst)).tolist() == [0, 0]
        small = np.array([-1e-30], dtype=np.float32)
        assert bits(convert(small, "f32", dst)).tolist() == [0]  # 0x80 would be NaN


def test_scales_by_head_belong_to_the_f8_side() -> None:
    """A rank's two heads into heads 2 and 3 of an f8 cache take the scales of those, and back."""

    def cache(heads: int, dtype: str) -> tuple[np.ndarray, kv.Cache]:
        geometry = kv.Geometry(num_blocks=1, block_size=4, num_kv_heads=heads, head_size=8, dtype=dtype)
        layout = kv.layout("B KV N H D", geometry)
        memory = np.zeros(layout.num_bytes, np.uint8)
        return memory, kv.Cache(memory, layout)

    rank, source = cache(2, "f32")
    rank.view(np.float32)[:] = 8
    whole, stored = cache(4, "f8_e4m3")
    scales = {"key": [1, 2, 4, 8], "value": 1.0}
    kv.convert_blocks(source, stored, [(0, 0)], heads=(0, 2, 2), cast=True, scales=scales)
    codes = whole.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(2, 4, 4, 8)
    assert codes[0, 0, :, 0].tolist() == [0, 0, 2, 1]
    assert codes[1, 0, :, 0].tolist() == [0, 0, 8, 8]
    rank[:] = 0
    kv.convert_blocks(stored, source, [(0, 0)], heads=(2, 0, 2), cast=True, scales=scales)
    assert (rank.view(np.float32) == 8).all()
    with pytest.raises(kv.ArgumentError, match="expected 1 or 4, the heads of its destination side"):
        kv.convert_blocks(source, stored, [(0, 0)], heads=(0, 2, 2), cast=True, scales={"key": [1, 2]})
