# SPDX-License-Identifier: Apache-2.0
"""The parser and printer of the notation: grammar corners, columns of errors, equality and canonical text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvstride as kv
import oracle
from trees import Tree, trees

SIZES = {"num_layers": 2, "num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "head_size": 8}


def geometry(dtype: str = "bf16", **sizes: int) -> kv.Geometry:
    """Small sizes, some of them replaced."""
    return kv.Geometry(**(SIZES | sizes), dtype=dtype)


def layout(text: str, dtype: str = "bf16", **sizes: int) -> kv.Layout:
    """A layout over the small sizes."""
    return kv.Layout(text, geometry(dtype, **sizes))


def addresses(a: kv.Layout) -> dict[tuple[str, tuple[int, ...]], tuple[int, int]]:
    """Every element's place."""
    return {(plane, index): a.offset(plane, *index) for plane in a.planes for index in oracle.elements(a, plane)}


# --- Grammar corners: each text with the place of one element that another reading would put elsewhere.

CORNERS = [
    # text, sizes, element, (tensor, byte)
    ("B KV N H D", {}, ("value", 0, 1, 2, 1, 3), (0, 2 * (((1 * 2 + 1) * 4 + 2) * 16 + 8 + 3))),
    ("  B\tKV   N H D ", {}, ("value", 0, 1, 2, 1, 3), (0, 2 * (((1 * 2 + 1) * 4 + 2) * 16 + 8 + 3))),
    ("L B KV N H D", {}, ("key", 1, 0, 0, 0, 0), (0, 2 * 3 * 128)),
    ("B KV N H D", {}, ("key", 1, 0, 0, 0, 0), (1, 0)),  # without L: a tensor a layer
    ("KV@1000 B N H D", {}, ("value", 0, 0, 0, 0, 1), (0, 1002)),
    ("B KV@1000 N H D", {}, ("key", 0, 2, 0, 0, 0), (0, 4000)),  # the section is padded to 2 × 1000
    ("B {key: N H D, value@1000: N H D}", {}, ("key", 0, 2, 0, 0, 0), (0, 2 * 1128)),  # … and this one is not
    ("B {key@64: N H D, value: N H D}", {}, ("value", 0, 0, 0, 0, 0), (0, 64 + 128)),
    ("B {value: N H D, key@300: N H D}", {}, ("key", 0, 1, 0, 0, 1), (0, 428 + 302)),
    ("B@1024 KV N H D", {}, ("key", 0, 2, 1, 0, 0), (0, 2048 + 32)),
    ("B KV N@100 H D", {}, ("value", 0, 0, 3, 1, 1), (0, 400 + 300 + 16 + 2)),
    ("B KV N H D@4", {}, ("key", 0, 0, 0, 1, 3), (0, 8 * 4 + 12)),
    ("B KV N/2 H N%2 D", {}, ("key", 0, 0, 3, 1, 5), (0, 2 * (1 * 32 + 1 * 16 + 1 * 8 + 5))),
    ("B KV N%2 N/2 H D", {}, ("key", 0, 0, 2, 0, 0), (0, 32)),  # digits in any order
    ("B KV N%4/2 H N%2 D", {}, ("key", 0, 0, 3, 1, 5), (0, 2 * (1 * 32 + 1 * 16 + 1 * 8 + 5))),
    (
        "B H N%8/2 D N/8 N%2 KV",
        {"block_size": 16},
        ("value", 0, 0, 13, 0, 1),
        (0, 2 * (2 * 64 + 8 + (1 * 2 + 1) * 2 + 1)),
    ),
    ("B N/k H N%k KV D", {"k": 2}, ("value", 0, 0, 3, 1, 0), (0, 2 * (1 * 64 + 1 * 32 + 1 * 16 + 8))),
    ("B H/g L KV N H%g D", {"num_kv_heads": 4, "g": 2}, ("key", 1, 0, 0, 3, 0), (0, 2 * ((1 * 2 + 1) * 2 * 64 + 8))),
    ("{key: B H D/x N D%x, value: B H D N}", {"head_size": 16}, ("key", 0, 0, 1, 0, 9), (0, 2 * (32 + 8 + 1))),
    ("B N/each H N%each KV D", {"each": 2}, ("key", 0, 0, 2, 0, 0), (0, 2 * 64)),  # symbols of any name
    ("B N {latent: D[6], rope: D[2]}", {}, ("rope", 0, 0, 1, 0, 1), (0, 2 * (8 + 6 + 1))),
    ("B N KV D[D/2]", {}, ("value", 0, 1, 0, 0, 3), (0, 2 * (4 * 8 + 4 + 3))),
    ("B N KV H D[N/2]", {}, ("value", 0, 0, 1, 0, 0), (0, 2 * (8 + 4))),
    ("B N {index: D[k]}", {"k": 5}, ("index", 0, 0, 3, 0, 4), (0, 2 * (15 + 4))),
    ("B N@40 H {key: D, value: D[D/4]}", {}, ("value", 0, 0, 3, 1, 1), (0, 120 + 20 + 16 + 2)),
    ("N H KV D", {}, ("value", 0, 0, 1, 0, 0), (0, 2 * (32 + 8))),  # without B: one block
    ("LBHNC", {}, ("value", 1, 1, 1, 1, 2), (0, 2 * ((((1 * 3 + 1) * 2 + 1) * 4 + 1) * 16 + 8 + 2))),
    ("LBNHC", {}, ("value", 1, 1, 1, 1, 2), (0, 2 * ((((1 * 3 + 1) * 4 + 1) * 2 + 1) * 16 + 8 + 2))),
    ("LHBNC", {}, ("value", 1, 1, 1, 1, 2), (0, 2 * ((((1 * 2 + 1) * 3 + 1) * 4 + 1) * 16 + 8 + 2))),
    ("BLHNC", {}, ("value", 1, 1, 1, 1, 2), (0, 2 * ((((1 * 2 + 1) * 2 + 1) * 4 + 1) * 16 + 8 + 2))),
    ("BLNHC", {}, ("value", 1, 1, 1, 1, 2), (0, 2 * ((((1 * 2 + 1) * 4 + 1) * 2 + 1) * 16 + 8 + 2))),
    ("BHLNC", {}, ("value", 1, 1, 1, 1, 2), (0, 2 * ((((1 * 2 + 1) * 2 + 1) * 4 + 1) * 16 + 8 + 2))),
    ("key: N H D | value: H D N", {}, ("value", 1, 0, 1, 1, 2), (3, 2 * (8 * 4 + 2 * 4 + 1))),
    ("key: L N H D | value: L H D N", {}, ("value", 1, 0, 1, 1, 2), (1, 2 * (64 + 8 * 4 + 2 * 4 + 1))),
    ("B KV N H D | index: B N D[6] u8", {}, ("index", 1, 1, 1, 0, 5), (3, 24 + 6 + 5)),
    ("key: {data: B N H D i8, scale: B N H D[1] f32}", {}, ("key_scale", 0, 1, 1, 1, 0), (0, 192 + 4 * 11)),
    ("B N H KV D", {"value_head_size": 4}, ("value", 0, 0, 0, 1, 2), (0, 2 * (12 + 8 + 2))),
    ("B KV N H D", {"value_head_size": 4}, ("key", 0, 1, 0, 0, 0), (0, 2 * (64 + 32))),
]


@pytest.mark.parametrize(("text", "sizes", "element", "place"), CORNERS, ids=[c[0] for c in CORNERS])
def test_grammar_corner(text: str, sizes: dict[str, int], element: tuple, place: tuple[int, int]) -> None:
    assert layout(text, **sizes).offset(*element) == place


DTYPES = [
    # text, planes, key or first plane's second token
    ("B KV N H D", "f16", {"key": "f16", "value": "f16"}),
    ("B KV N H D f32", "f16", {"key": "f32", "value": "f32"}),
    ("B {key: N H D f8_e4m3, value: N H D}", "f16", {"key": "f8_e4m3", "value": "f16"}),
    ("B {key: N H D f8_e5m2, value: N H D} f32", "f16", {"key": "f8_e5m2", "value": "f32"}),
    (
        "B N H KV {data: D i8, scale: D[1] f32}",
        "f16",
        {k: d for p in ("key", "value") for k, d in ((p, "i8"), (p + "_scale", "f32"))},
    ),
    (
        "B N H KV {data: D i8, scale: f32}",
        "f16",
        {k: d for p in ("key", "value") for k, d in ((p, "i8"), (p + "_scale", "f32"))},
    ),
    ("B KV N H D[D/2] f4x2", "bf16", {"key": "f4x2", "value": "f4x2"}),
    ("key: B N H D f8_e4m3fnuz | value: B N H D f8_e5m2fnuz", "bf16", {"key": "f8_e4m3fnuz", "value": "f8_e5m2fnuz"}),
    ("B {index: N D[8] f8_e4m3, index_scale: N D[1] f8_e8m0}", "bf16", {"index": "f8_e4m3", "index_scale": "f8_e8m0"}),
    (
        "B {a: N D[2] u8, b: {data: N D[3] i32, b: {data: N D[1], c: N D[1] i8}}} f16",
        "bf16",
        {"a": "u8", "b": "i32", "b_b": "f16", "b_b_c": "i8"},
    ),
]


@pytest.mark.parametrize(("text", "dtype", "planes"), DTYPES, ids=[d[0] for d in DTYPES])
def test_dtype_placement(text: str, dtype: str, planes: dict[str, str]) -> None:
    """An inner dtype beats an outer one, which beats the geometry's; names of nested members join."""
    made = layout(text, dtype)
    assert made.planes == planes
    assert str(kv.Layout(str(made), made.geometry)) == str(made)
    assert kv.Layout(str(made), made.geometry) == made
    ends = {place[1] + oracle.item_size(planes[key[0]]) for key, place in addresses(made).items()}
    assert max(ends) == max(made.part_bytes(p) for p in range(made.num_parts))


def test_f4x2_counts_bytes() -> None:
    """NVFP4 data are addressed in bytes of two values: head size 16 is D[8]."""
    nvfp4 = layout("B KV H N D[D/2] f4x2", head_size=16)
    assert nvfp4.extents("key")[4] == 8
    assert nvfp4.offset("key", 0, 0, 1, 0, 3) == (0, 11)
    assert nvfp4.num_bytes == 3 * 2 * 2 * 4 * 8


def test_value_head_size() -> None:
    """D of planes whose name starts with `value` is value_head_size, their scales' too."""
    made = layout(
        "B N H {key: {data: D i8, scale: D[1] f32}, value: {data: D i8, scale: D[D/2] f32}}", value_head_size=6
    )
    assert {p: made.extents(p)[4] for p in made.planes} == {"key": 8, "key_scale": 1, "value": 6, "value_scale": 3}
    assert layout("B N {values: D, valve: D}", value_head_size=6).extents("values")[4] == 6
    assert layout("B N {values: D, valve: D}", value_head_size=6).extents("valve")[4] == 8
    for text in ("B KV N H D", "KV B N H D", "B N KV H D", "B H N KV D"):
        assert layout(text, value_head_size=6).num_bytes == 3 * 4 * 2 * (8 + 6) * 2


def test_x_is_16_over_the_planes_item_size() -> None:
    text = "B {key: H D/x N D%x f8_e4m3, value: H D/x N D%x f32}"
    made = layout(text, head_size=32)
    assert [m for m in made.modes("key") if m[0] == "D"] == [("D", 32, 16, 2, 64), ("D", 16, 1, 16, 1)]
    assert [m for m in made.modes("value") if m[0] == "D"] == [("D", 32, 4, 8, 64), ("D", 4, 1, 4, 4)]
    with pytest.raises(kv.LayoutError, match="x is 16 / item size"):
        geometry(x=8)


def test_order_prints_as_written_and_layout_canonically() -> None:
    made = layout("  B   KV N/2 N%2 H D")
    assert made.order == "  B   KV N/2 N%2 H D"
    assert str(made) == "B[3] KV N[4] H[2] D[8]"
    assert str(layout("LBHNC")) == "L[2] B[3] H[2] N[4] KV D[8]"
    assert layout("LBHNC").order == "LBHNC"


# --- Errors point at the column.

SYNTAX = [
    # text, column, what the message names
    ("", 1, "empty"),
    ("   ", 4, "empty"),
    ("|", 1, "empty"),
    ("B KV N H D |", 13, "empty"),
    ("key: B N H D | ", 16, "empty"),
    ("B KV N H Q", 10, "'Q'"),
    ("b KV N H D", 1, "'b'"),
    ("B KV NH D", 6, "'NH'"),
    ("B kv N H D", 3, "'kv'"),
    ("B KV N H D f64", 12, "'f64'"),
    ("B KV N H D bf16 f16", 17, "dtype"),
    ("B KV bf16 N H D", 11, "dtype"),
    ("B KV N H D;", 11, "';'"),
    ("B KV N-1 H D", 7, "'-'"),
    ("B KV (N H D)", 6, "'('"),
    ("B \u00e9", 3, "byte"),
    ("B\x00KV", 2, "byte"),
    ("B KV N /2 H D", 8, "'/'"),
    ("B KV N [4] H D", 8, "'['"),
    ("B KV @512 N H D", 6, "'@'"),
    ("KV B KV N", 1, "KV inside KV"),
    ("B KV N KV H D", 3, "KV inside KV"),
    ("KV {a: N, b: KV D}", 1, "KV inside KV"),
    ("B {key N H D}", 8, "':'"),
    ("B {: N}", 4, "name"),
    ("B {}", 4, "name"),
    ("B {key: N,}", 11, "name"),
    ("B {N: H D}", 4, "name"),
    ("B {KV: H D}", 4, "name"),
    ("B {key: N H D, value: N H D", 28, "'}'"),
    ("B {key: N} H", 12, "'H'"),
    ("B KV N H D}", 11, "'}'"),
    ("L: B N D", 1, "'L'"),
    ("KV: B N D", 1, "'KV'"),
    ("f16: B N D", 1, "'f16'"),
    ("B KV N%0 H D", 8, "0"),
    ("B KV N/0 H D", 8, "0"),
    ("B KV N H D[0]", 12, "0"),
    ("B KV N H D[D/0]", 14, "0"),
    ("B KV N/H D", 8, "'H'"),
    ("B KV N%KV D", 8, "'KV'"),
    ("B KV N H D[", 12, "extent"),
    ("B KV N H D[8", 13, "']'"),
    ("B KV N H D[D]", 13, "'/'"),
    ("B KV N H D@", 12, "stride"),
    ("B KV N H D@x", 12, "stride"),
    ("B {key@: N}", 8, "offset"),
    ("B KV@99999999999999999999 N H D", 6, "63 bits"),
    ("B KV N/9223372036854775808 H D", 8, "63 bits"),
    ("LBHNC x", 7, "'x'"),
    ("LBHNC@3", 6, "'@'"),
    ("LBHN", 1, "'LBHN'"),
    ("lbhnc", 1, "'lbhnc'"),
    ("NHD", 1, "vllm/flashinfer-nhd"),
    (" HND", 2, "vllm/packed-hnd"),
    ("{a:" * 9 + "N" + "}" * 9, 28, "deeper than 8"),
    ("B KV N H D " * 400, 4097, "4096"),
]


@pytest.mark.parametrize(("text", "column", "word"), SYNTAX, ids=[repr(s[0][:30]) for s in SYNTAX])
def test_syntax_errors_point_at_their_column(text: str, column: int, word: str) -> None:
    with pytest.raises(kv.LayoutError) as caught:
        layout(text)
    message = str(caught.value)
    assert type(caught.value) is kv.LayoutError
    assert caught.value.column == column
    assert f"column {column}:" in message
    assert word in message
    assert "\n" not in message


def test_nhd_and_hnd_name_the_rows_that_they_could_mean() -> None:
    for text in ("NHD", "HND"):
        with pytest.raises(kv.LayoutError) as caught:
            layout(text)
        rows = [e.name for e in kv.registry() if e.name.endswith("-" + text.lower())]
        assert len(rows) > 3
        assert all(row in str(caught.value) for row in rows)


MEANING = [
    # text, sizes, columns that point at the fault, what the message names
    ("B N H D", {}, (1,), ("plane without a name",)),
    ("key: B N H D | B N H D", {}, (16,), ("plane without a name",)),
    ("B {key: N H D, key: N H D}", {}, (16,), ("'key'", "twice")),
    ("B {key: {data: N D, data: N D}}", {}, (21,), ("'key'", "twice")),
    ("B {a_b: N D, a: {b: N D}}", {}, (14, 18), ("'a_b'", "twice")),
    ("key: B N D | key: B N D", {}, (14,), ("'key'", "twice")),
    ("B KV N H D | key: B N D", {}, (14,), ("'key'", "twice")),
    ("B KV N/3 H N%3 D", {}, (6,), ("N", "4", "3")),
    ("B KV N/2 H D", {}, (6,), ("N", "2")),
    ("B KV N%2 H D", {}, (6,), ("N", "2", "4")),
    ("B KV N/2 H N%4 D", {}, (6, 12), ("N", "4", "2")),
    ("B KV N N H D", {}, (6, 8), ("N", "4")),
    ("B KV N%8/2 N%2 H D", {}, (6, 12), ("N", "8", "4")),
    ("B KV N H D/x", {}, (10,), ("D", "8")),
    ("B KV N H D[D/3]", {}, (10,), ("D", "3", "8")),
    ("B KV N H/q H%q D", {}, (8, 10, 12), ("'q'",)),
    ("B KV N H D[q]", {}, (10, 12), ("'q'",)),
    ("B N/k {key: N%k D, value: N%k D}", {"k": 3}, (3,), ("N", "4", "3")),
    ("key: L B N D | value: B N D", {}, (1, 6, 16, 23), ("L",)),
]


@pytest.mark.parametrize(("text", "sizes", "columns", "words"), MEANING, ids=[m[0] for m in MEANING])
def test_errors_of_meaning_point_at_their_column(
    text: str, sizes: dict[str, int], columns: tuple[int, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(kv.LayoutError) as caught:
        layout(text, **sizes)
    message = str(caught.value)
    assert type(caught.value) is kv.LayoutError
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert caught.value.column in columns
    assert f"column {caught.value.column}" in message


def test_unknown_name_says_so() -> None:
    """A misspelt registry name is not explained as a term of the notation."""
    for name in ("vllm/no-such", " vllm/flashinfer-nhd2 ", "sglang/"):
        with pytest.raises(kv.LayoutError) as caught:
            kv.layout(name, geometry())
        assert f"'{name.strip()}'" in str(caught.value)
        assert "registry" in str(caught.value)


def test_errors_without_a_column_have_none() -> None:
    with pytest.raises(kv.LayoutError) as caught:
        layout("B KV@16 N H D")
    assert caught.value.column is None
    assert "overlap" in str(caught.value)
    with pytest.raises(kv.LayoutError) as caught:
        layout("B KV@16\n N H D")
    assert "\n" not in str(caught.value)


# --- Equality is equality of addresses.

SAME = [
    ("B KV N H D", "B {key: N H D, value: N H D}", {}),
    ("LBNHC", "L B N H KV D", {}),
    ("B KV H N D", "B KV N H D", {"num_kv_heads": 1}),
    ("B KV H N D", "B KV N H D", {"block_size": 1}),
    ("B N KV H D", "B N H KV D", {"num_kv_heads": 1}),
    ("KV B N H D", "B KV N H D", {"num_blocks": 1}),
    ("L B KV N H D", "B L KV N H D", {"num_layers": 1}),
    ("L B KV N H D", "B KV N H D", {"num_layers": 1}),
    ("B KV N/2 N%2 H D", "B KV N H D", {}),
    ("B KV N/2 H N%2 D", "B KV N%4/2 H N%2 D", {}),
    ("B KV N/k H N%k D", "B KV N/2 H N%2 D", {"k": 2}),
    ("B KV N/k H N%k D", "B KV H N D", {"k": 4}),
    ("B KV N/k H N%k D", "B KV N H D", {"k": 1}),
    ("B KV H D/x N D%x", "B KV H N D", {}),  # x is 8, all of D
    ("B N%8/4 N/8 N%4/2 N%2 KV D", "B N%8/4 N/8 N%4 KV D", {"block_size": 32}),
    ("B KV@512 N H D", "B@1024 {key: N H D, value@512: N H D}", {}),
    ("B KV@128 N H D", "B KV N H D", {}),
    ("B@256 KV N@32 H@16 D@2", "B KV N H D", {}),
    ("H@16 N@32 KV@128 B@256 D", "B KV N H D", {}),
    (
        "B N H KV {data: D i8, scale: f32}",
        "B N H {key: {data: D i8, scale: D[1] f32}, value: {data: D i8, scale: D[1] f32}}",
        {},
    ),
    ("B N {latent: D[6], rope: D[2]}", "B N@16 {rope@12: D[2], latent@0: D[6]}", {}),
    ("B KV N H D f16", "B {key: N H D f16, value: N H D f16}", {}),
    ("B {key: N H D, value: N H D} f16", "B KV N H D f16", {}),
]
DIFFERENT = [
    ("B KV N H D", "B KV H N D", {}),
    ("B KV N H D", "KV B N H D", {}),
    ("B KV N H D", "B {value: N H D, key: N H D}", {}),
    ("B KV N H D", "B KV N H D f16", {}),
    ("B KV N H D", "B@512 KV N H D", {}),
    ("B KV N H D", "B KV@512 N H D", {}),
    ("B KV N H D", "B {key: N H D, v: N H D}", {}),
    ("KV B N H D", "key: B N H D | value: B N H D", {}),
    ("L B KV N H D", "B KV N H D", {}),
    ("key: B N H D | value: B N H D", "value: B N H D | key: B N H D", {}),
    ("B KV N/2 H N%2 D", "B KV N H D", {}),
    ("B N {latent: D[6], rope: D[2]}", "B N {latent: D[2], rope: D[6]}", {}),
    ("B KV N H D", "B KV N H D | index: B N D[1]", {}),
]


@pytest.mark.parametrize(("a", "b", "sizes"), SAME, ids=[f"{a} = {b}" for a, b, _ in SAME])
def test_equal_layouts(a: str, b: str, sizes: dict[str, int]) -> None:
    left, right = layout(a, **sizes), layout(b, **sizes)
    assert addresses(left) == addresses(right)  # what equality means
    assert left == right
    assert str(left) == str(right)


@pytest.mark.parametrize(("a", "b", "sizes"), DIFFERENT, ids=[f"{a} | {b}" for a, b, _ in DIFFERENT])
def test_different_layouts(a: str, b: str, sizes: dict[str, int]) -> None:
    left, right = layout(a, **sizes), layout(b, **sizes)
    assert (addresses(left), left.planes) != (addresses(right), right.planes)
    assert left != right
    assert str(left) != str(right)


def test_equal_layouts_are_one_key() -> None:
    """Equal layouts have equal hashes."""
    made = [layout(a, **sizes) for a, _, sizes in SAME] + [layout(b, **sizes) for _, b, sizes in SAME]
    distinct = [m for i, m in enumerate(made) if m not in made[:i]]
    assert len(set(made)) == len(distinct)


def test_layouts_of_other_sizes_differ() -> None:
    assert layout("B KV N H D") != layout("B KV N H D", num_blocks=4)
    assert layout("B KV N H D") != layout("B KV N H D", "f16")
    assert layout("B KV N H D") != "B KV N H D"


# --- Canonical text.

CANONICAL = [
    ("B KV N H D", {}, "B[3] KV N[4] H[2] D[8]"),
    ("B {key: N H D, value: N H D}", {}, "B[3] KV N[4] H[2] D[8]"),
    ("L B KV N H D", {}, "L[2] B[3] KV N[4] H[2] D[8]"),
    ("B KV N H D", {"num_kv_heads": 1}, "B[3] KV N[4] H[1] D[8]"),
    ("B KV N D", {"num_kv_heads": 1}, "B[3] KV N[4] D[8]"),
    ("B KV N H D", {"num_blocks": 1}, "KV N[4] H[2] D[8]"),
    ("B KV N H D", {"num_blocks": 1, "block_size": 1}, "KV H[2] D[8]"),
    ("B KV N/2 N%2 H D", {}, "B[3] KV N[4] H[2] D[8]"),
    ("B KV N/2 H N%2 D", {}, "B[3] KV N/2[4] H[2] N%2 D[8]"),
    ("B@192 KV N H D", {}, None),
    ("B@1024 KV N H D", {}, "B[3]@1024 KV N[4] H[2] D[8]"),
    ("B KV@512 N H D", {}, "B[3] KV@512 N[4] H[2] D[8]"),
    ("B@256 KV@128 N@32 H D", {}, "B[3] KV N[4] H[2] D[8]"),
    ("N@16 H B@64 KV D", {"num_kv_heads": 1, "head_size": 4}, "B[3] N[4] KV H[1] D[4]"),  # H[1] stands before D
    ("key: B H N D | value: B H D N", {}, "key: B[3] H[2] N[4] D[8] | value: B[3] H[2] D[8] N[4]"),
    ("B KV N H D f32", {}, "B[3] KV N[4] H[2] D[8] f32"),
    ("B N {latent: D[6], rope: D[2]}", {}, "B[3] N[4] {latent: D[6], rope: D[2]}"),
    ("B N@20 {latent: D[6], rope: D[2]}", {}, "B[3] N[4]@20 {latent: D[6], rope: D[2]}"),
    ("B N H KV D", {"value_head_size": 4}, "B[3] N[4] H[2] {key: D[8], value: D[4]}"),
    ("B {value: N H D, key: N H D}", {}, "B[3] {value: N[4] H[2] D[8], key: N[4] H[2] D[8]}"),
    ("B H {key: D N, value: N D}", {}, "B[3] H[2] {key: D[8] N[4], value: N[4] D[8]}"),
]


@pytest.mark.parametrize(("text", "sizes", "canonical"), CANONICAL, ids=[c[0] for c in CANONICAL])
def test_canonical_text(text: str, sizes: dict[str, int], canonical: str | None) -> None:
    if canonical is None:
        with pytest.raises(kv.LayoutError, match="overlap"):
            layout(text, **sizes)
        return
    made = layout(text, **sizes)
    assert str(made) == canonical
    assert addresses(kv.Layout(canonical, made.geometry)) == addresses(made)


# --- Random layouts, built as a tree that knows its addresses and its text.


@settings(max_examples=150, deadline=None)
@given(trees())
def test_random_layouts(tree: Tree) -> None:
    """Addresses of every element, canonical text and equality, against a tree that was never parsed."""
    made = layout(tree.text())
    assert sorted(made.planes) == sorted("_".join(p for p in path if p != "data") for path in tree.planes())
    assert made.num_bytes == tree.size()
    for path in tree.planes():
        plane = "_".join(p for p in path if p != "data")
        for index in oracle.elements(made, plane):
            want = tree.place(path, dict(zip("LBNHD", index, strict=True)))
            tensor = 0 if made.layered else index[0]
            assert made.offset(plane, *index) == (tensor, want), (tree.text(), plane, index)
    again = kv.Layout(str(made), made.geometry)
    assert addresses(again) == addresses(made)
    assert again.planes == made.planes
    assert again == made
    assert str(again) == str(made)


@settings(max_examples=400, deadline=None)
@given(
    st.permutations(["B", "N", "H", "D"]),
    st.tuples(*[st.sampled_from([2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]) for _ in range(4)]),
    st.sampled_from([0, 1, 2, 3, 4]),
    st.sampled_from([2, 4, 16, 32, 48, 192, 256]),
)
@example(["B", "N", "H", "D"], (64, 16, 8, 2), 0, 256)
@example(["H", "B", "N", "D"], (16, 64, 32, 2), 4, 8)
def test_overlap_is_an_error_and_interleaving_is_not(
    axes: list[str], strides: tuple[int, ...], at: int, kv_stride: int
) -> None:
    """Strides may interleave sections; two elements that share a byte are refused."""
    lengths = {"B": 2, "N": 2, "H": 2, "D": 4}
    steps = dict(zip(axes, strides, strict=True))
    terms = [f"{a}@{steps[a]}" for a in axes]
    text = " ".join([*terms[:at], f"KV@{kv_stride}", *terms[at:]])
    starts = [
        plane * kv_stride + sum(i * steps[a] for i, a in zip(index, axes, strict=True))
        for plane in range(2)
        for index in itertools.product(*(range(lengths[a]) for a in axes))
    ]
    starts.sort()
    apart = all(a + 2 <= b for a, b in itertools.pairwise(starts))
    sizes = {"num_layers": 1, "num_blocks": 2, "block_size": 2, "num_kv_heads": 2, "head_size": 4}
    if not apart:
        with pytest.raises(kv.LayoutError, match="overlap"):
            layout(text, **sizes)
        return
    made = layout(text, **sizes)
    assert sorted(place[1] for place in addresses(made).values()) == starts
    assert made.num_bytes >= starts[-1] + 2
    assert kv.Layout(str(made), made.geometry) == made
