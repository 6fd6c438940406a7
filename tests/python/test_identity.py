# SPDX-License-Identifier: Apache-2.0
"""Namespaces and keys: golden vectors, a second implementation, other processes, faults of the field, every refusal."""

from __future__ import annotations

import array
import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstride as kv
from identity_page import PAGE, VECTORS, extra_of, hashed, key_bytes, namespace_text, parent_of, sha256, tables

GOLDEN: dict[str, Any] = json.loads(VECTORS.read_text())
FIELDS: dict[str, Any] = {
    "model": "acme/chat-8b",
    "revision": "5f0b02c7",
    "planes": {"key": "bf16", "value": "bf16"},
    "num_layers": 32,
    "num_kv_heads": 8,
    "head_size": 128,
    "block_size": 16,
}
DTYPES = [
    "f32",
    "f16",
    "bf16",
    "f8_e4m3",
    "f8_e5m2",
    "f8_e4m3fnuz",
    "f8_e5m2fnuz",
    "f8_e8m0",
    "f4x2",
    "i8",
    "u8",
    "i32",
]


def space(**changes: Any) -> kv.Namespace:
    return kv.Namespace(**{**FIELDS, **changes})


def refused(kind: type[kv.Error], call: Callable[[], Any], *words: str) -> None:
    """`call` raises exactly `kind`, in one short line that has all words."""
    with pytest.raises(kv.Error) as caught:
        call()
    assert type(caught.value) is kind, repr(caught.value)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    for word in words:
        assert word in message, message


# --- What the page says.


@pytest.mark.parametrize("vector", GOLDEN["namespaces"], ids=lambda v: v["name"])
def test_golden_namespaces(vector: dict[str, Any]) -> None:
    made = kv.Namespace(**vector["fields"])
    assert made.text == vector["text"] == namespace_text(**vector["fields"])
    assert made.hex == vector["hex"] == hashlib.sha256(vector["text"].encode()).hexdigest()
    assert made.digest == bytes.fromhex(vector["hex"])
    assert kv.Namespace.parse(vector["text"]) == made


@pytest.mark.parametrize("vector", GOLDEN["keys"], ids=lambda v: v["name"])
def test_golden_keys(vector: dict[str, Any]) -> None:
    made = kv.Key.chain(parent_of(vector), vector["tokens"], [extra_of(item) for item in vector["extra"]])
    assert made.hex == vector["hex"]
    assert hashed(vector) == bytes.fromhex(vector["bytes"])
    assert made.bytes == hashlib.sha256(bytes.fromhex(vector["bytes"])).digest()


def test_golden_page() -> None:
    """The tables of the page are the vectors."""
    page = PAGE.read_text()
    for table in tables(GOLDEN):
        assert table in page
    assert len(GOLDEN["namespaces"]) >= 5
    assert len(GOLDEN["keys"]) >= 6
    assert len({v["hex"] for v in GOLDEN["keys"]}) == len(GOLDEN["keys"])


#: Blanks alone, auto and names that move are for other tests.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).map(lambda text: "x" + text + "x")
SIZES = st.integers(1, 2**48)
SPECS = st.tuples(st.sampled_from(DTYPES), st.none() | SIZES).map(lambda s: s[0] + (f"[{s[1]}]" if s[1] else ""))
PLANES = st.dictionaries(st.from_regex(r"\A(?!auto\Z)(value)?[a-z_][a-z0-9_]{0,5}\Z"), SPECS, min_size=1, max_size=8)
ALL_FIELDS = st.fixed_dictionaries(
    {"model": TEXTS, "revision": TEXTS, "planes": PLANES}
    | dict.fromkeys(("num_layers", "num_kv_heads", "head_size", "block_size"), SIZES),
    optional={"first_layer": st.integers(0, 2**48), "group": st.integers(0, 2**48), "salt_policy": TEXTS}
    | {"value_head_size": st.none() | SIZES, "adapter": st.none() | TEXTS, "raw": st.none() | TEXTS},
)


@given(ALL_FIELDS)
def test_any_namespace(fields: dict[str, Any]) -> None:
    made = kv.Namespace(**fields)
    assert made.text == namespace_text(**fields)
    assert made.hex == sha256(made.text.encode())
    assert kv.Namespace.parse(made.text) == made


@given(
    st.none() | st.binary(min_size=1, max_size=64),
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.lists(st.binary(max_size=20) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=4),
)
def test_any_key(parent: bytes | None, tokens: list[int], extra: list[bytes | str]) -> None:
    data = key_bytes(parent, tokens, [item.encode() if isinstance(item, str) else item for item in extra])
    made = kv.Key.chain(parent, tokens, extra)
    assert made.hex == sha256(data)
    assert kv.Key.chain(parent and kv.Key(parent), np.array(tokens, np.uint32), tuple(extra)) == made


# --- Values.

WAYS: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy] + [
    lambda thing, p=protocol: pickle.loads(pickle.dumps(thing, p)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
]
VALUES = [
    space(),
    space(model="../a\n\0é", raw="x=1"),
    kv.Key(b"\0"),
    kv.Key(bytes(64)),
    kv.Key.chain(None, [1, 2, 3]),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values(value: Any) -> None:
    names = {"Namespace": kv.Namespace, "Key": kv.Key}
    for other in [way(value) for way in WAYS] + [eval(repr(value), names)]:
        assert type(other) is type(value)
        assert other == value
        assert hash(other) == hash(value)
        assert other.hex == value.hex
        assert {value: 1}[other] == 1
    assert [value == other for other in VALUES].count(True) == 1
    assert value != value.hex
    assert value != 5


def test_attributes() -> None:
    key = kv.Key(b"\x00\xff")
    assert (key.bytes, bytes(key), key.hex) == (b"\x00\xff", b"\x00\xff", "00ff")
    assert type(key.bytes) is bytes
    for same in (bytearray(b"\x00\xff"), memoryview(b"\xff\x00")[::-1], np.array([0, 255], np.uint8).data):
        assert kv.Key(same) == key
    for thing in (key, space()):
        for name in ("hex", "text", "bytes", "digest", "more"):
            with pytest.raises(AttributeError):
                setattr(thing, name, 1)


def test_given_or_default_is_one_namespace() -> None:
    same = [
        space(value_head_size=128),
        space(planes={"value": "bf16[128]", "key": "bf16[128]"}),
        space(first_layer=0, group=0, adapter=None, salt_policy="none", raw=None, value_head_size=None),
        space(num_layers=np.int32(32)),
    ]
    for other in same:
        assert other == space()
    assert space(value_head_size=64) == space(planes={"key": "bf16", "value": "bf16[64]"}) != space()


def test_tokens_of_any_kind() -> None:
    numbers = [0, 1, 127, 128000]
    expected = kv.Key.chain(None, numbers)
    wide = np.zeros((4, 2), np.int64)
    wide[:, 0] = numbers
    fixed = np.array(numbers, np.uint32)
    fixed.flags.writeable = False
    kinds: list[Any] = [
        tuple(numbers),
        iter(numbers),
        [np.int64(n) for n in numbers],
        [np.uint64(0), 1, np.int8(127), 128000],
        array.array("I", numbers),
        np.array(numbers),
        np.array(numbers, np.int32),
        np.array(numbers, np.uint64),
        np.array(numbers, ">u4"),
        wide[:, 0],
        np.array(numbers[::-1])[::-1],
        fixed,
    ]
    for kind in kinds:
        assert kv.Key.chain(None, kind) == expected, kind
    assert kv.Key.chain(None, range(3)) == kv.Key.chain(None, np.arange(3, dtype=np.uint8))
    for nothing in ((), [], np.array([]), np.zeros(0, np.int32), range(0)):
        assert kv.Key.chain(None, nothing) == kv.Key.chain(None, [])


def test_tokens_of_torch() -> None:
    torch = pytest.importorskip("torch")
    expected = kv.Key.chain(None, [3, 1, 2])
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.int16):
        assert kv.Key.chain(None, torch.tensor([3, 1, 2], dtype=dtype)) == expected
    assert kv.Key.chain(None, torch.tensor([[3, 0], [1, 0], [2, 0]])[:, 0]) == expected
    for dtype in (torch.float32, torch.bool, torch.complex64):
        refused(kv.DTypeError, lambda d=dtype: kv.Key.chain(None, torch.ones(2, dtype=d)), "no integers")
    quantized = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
    refused(kv.DTypeError, lambda: kv.Key.chain(None, quantized), "qint8")
    refused(kv.ArgumentError, lambda: kv.Key.chain(None, torch.tensor([[1]])), "[1, 1]")
    refused(kv.ArgumentError, lambda: kv.Key.chain(None, torch.tensor([0, -1])), "tokens[1] is -1")
    refused(kv.ArgumentError, lambda: kv.Key.chain(None, torch.ones(2, device="meta")), "meta")
    refused(kv.ArgumentError, lambda: kv.Key.chain(None, torch.eye(2).to_sparse()), "sparse")


# --- The same everywhere.

PROGRAM = """
import json, sys, kvstride as kv
fields, tokens = json.load(sys.stdin)
space = kv.Namespace(**fields)
first = kv.Key.chain(None, tokens, ["salt=a"])
print(json.dumps([space.text, space.hex, first.hex, kv.Key.chain(first, tokens).hex]))
"""


def in_another_process(seed: str, fields: dict[str, Any], tokens: list[int]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([fields, tokens]),
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return list(json.loads(done.stdout))


def test_c45_c85_two_processes_and_this_one() -> None:
    """vllm#12621: keys were Python hashes; vllm#56928: a child process had another namespace."""
    fields = {**FIELDS, "planes": dict.fromkeys(("value", "key", "rope", "latent", "index"), "bf16")}
    tokens = list(range(16))
    here = kv.Namespace(**fields)
    first = kv.Key.chain(None, tokens, ["salt=a"])
    expected = [here.text, here.hex, first.hex, kv.Key.chain(first, tokens).hex]
    turned = {name: fields[name] for name in reversed(fields)}
    turned["planes"] = dict.fromkeys(reversed(fields["planes"]), "bf16")
    assert in_another_process("1", fields, tokens) == expected
    assert in_another_process("2", turned, tokens) == expected


def test_c45_strong_and_chained() -> None:
    key = kv.Key.chain(None, [1, 2, 3])
    assert len(key.bytes) * 8 == 256
    assert kv.Key.chain(None, [1, 23]) != kv.Key.chain(None, [12, 3])
    child = kv.Key.chain(key, [4])
    assert child == kv.Key.chain(key.bytes, [4])
    assert len({child, key, kv.Key.chain(None, [4]), kv.Key.chain(kv.Key.chain(None, [1, 2]), [4])}) == 4


def test_c85_the_same_config_is_the_same_namespace() -> None:
    assert in_another_process("random", FIELDS, [1])[:2] == [space().text, space().hex]


# --- What must be told apart.


@pytest.mark.parametrize("auto", ["auto", "AUTO", "Auto", " auto ", "auto\n"])
def test_c17_auto_is_no_dtype_and_no_name(auto: str) -> None:
    """vllm#49438: 'auto' was fp16 for one and bf16 for the other."""
    for name in ("model", "revision", "adapter", "salt_policy", "raw"):
        refused(kv.ArgumentError, lambda name=name: space(**{name: auto}), f"namespace: {name} is")
    for spec in (auto, auto + "[512]"):
        refused(kv.ArgumentError, lambda spec=spec: space(planes={"key": spec}), "'key' is", "dtype")
    refused(kv.ArgumentError, lambda: space(planes={auto: "bf16"}), "planes")
    refused(kv.ArgumentError, lambda: space(raw=f"isa=avx2,order={auto}"), "raw is")


def test_c17_16_bit_types_and_kinds_of_fp8_have_names_of_their_own() -> None:
    assert space(planes={"key": "f16"}) != space(planes={"key": "bf16"})
    kinds = ["f8_e4m3", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "f8_e8m0"]
    assert len({space(planes={"key": kind}).hex for kind in kinds}) == 5


def test_c18_each_dtype_is_another_namespace() -> None:
    """sglang#33268: fp8 pages were read as bf16."""
    assert len({space(planes={"key": dtype, "value": "bf16"}).hex for dtype in DTYPES}) == len(DTYPES)
    assert len({space(planes={"key": "bf16", "value": dtype}).hex for dtype in DTYPES}) == len(DTYPES)
    assert "plane.key=i8[128]\n" in space(planes={"key": "i8"}).text


def test_c41_salts_are_in_the_key_and_not_readable() -> None:
    """sglang#37160: one tenant was served from another tenant's cache."""
    tokens = [1, 2, 3]
    plain, a, b = (kv.Key.chain(None, tokens, extra) for extra in ([], ["salt=tenant-a"], ["salt=tenant-b"]))
    assert len({plain, a, b}) == 3
    assert len({kv.Key.chain(first, [4]) for first in (plain, a, b)}) == 3  # carried on by the chain
    assert plain.hex == next(v["hex"] for v in GOLDEN["keys"] if v["name"] == "first block")  # stays as it is
    assert b"tenant" not in a.bytes
    assert "tenant" not in a.hex
    # A salt may hold anything: no two of these run into each other.
    extras: list[list[str]] = [
        ["salt="],
        ["salt=a", "b"],
        ["salt=a b"],
        ["salt=ab"],
        ["salt=a\0b"],
        ["salt=a", "", "b"],
        [""],
    ]
    assert len({kv.Key.chain(None, tokens, extra) for extra in extras}) == len(extras)
    assert space(salt_policy="request-salt") != space()


def test_c42_adapters_by_their_weights() -> None:
    """vllm#44250, LMCache#2961: adapter B was given KV of adapter A, or of A's former weights."""
    adapters = [None, "sql@sha256:0a", "chat@sha256:0b", "sql@sha256:0c"]
    assert len({space(adapter=adapter).hex for adapter in adapters}) == 4
    keys = {kv.Key.chain(None, [1], [f"adapter={adapter}"] if adapter else []) for adapter in adapters}
    assert len(keys) == 4
    # PEFT's name for any adapter, and others that say nothing of the weights.
    for name in ("default", "latest", "main", "None"):
        refused(kv.ArgumentError, lambda name=name: space(adapter=name), f"adapter is '{name}'", "fingerprint")
    refused(kv.ArgumentError, lambda: space(adapter=""), "adapter is empty")


def test_c43_media_ids_are_whole() -> None:
    """LMCache#690, vllm#56643: pictures with equal placeholders, or equal last 16 bits of their ids, shared keys."""
    tokens = [32000] * 16
    ids = [0x12340001, 0xABCD0001]
    assert len({kv.Key.chain(None, tokens, [f"media={i:08x}"]) for i in ids}) == 2
    assert len({kv.Key.chain(None, tokens, [i.to_bytes(4, "little")]) for i in ids}) == 2
    assert len({kv.Key.chain(None, tokens, [i.to_bytes(4, "big")]) for i in ids}) == 2
    # What a key cannot see is the caller's duty; the page says so.
    assert "Whoever makes keys must refuse, or not store, a block with placeholders" in " ".join(
        PAGE.read_text().split()
    )


def test_c67_revisions_are_of_the_weights() -> None:
    """sglang#24758: a served name stayed, the weights did not."""
    assert space(revision="sha256:01") != space(revision="sha256:02")
    for name in ("main", "master", "latest", "HEAD", "refs/heads/main", "None"):
        refused(kv.ArgumentError, lambda name=name: space(revision=name), f"'{name}'", "a commit or a fingerprint")
    for nothing in ("", " ", "\0"):
        refused(kv.ArgumentError, lambda nothing=nothing: space(revision=nothing), "revision is")
    refused(kv.ArgumentError, lambda: space(revision=None), "revision is missing")


def test_names_are_harmless() -> None:
    names = [
        "..",
        "../..",
        "/",
        "a/../b",
        "a@b",
        "a\0b",
        "a\nmodel=b",
        "a=b",
        "a%3Db",
        "é",
        "e\u0301",
        "a" * 4096,
        "~",
        "*",
    ]
    made = [space(model=name) for name in names]
    assert len({one.hex for one in made}) == len(names)
    for one in made:
        assert one.text.isascii()
        assert one.text.count("\n") == space().text.count("\n")
        assert set(one.hex) <= set("0123456789abcdef")


# --- Refusals.


@pytest.mark.parametrize("name", list(FIELDS))
def test_missing(name: str) -> None:
    rest = {other: value for other, value in FIELDS.items() if other != name}
    refused(kv.ArgumentError, lambda: kv.Namespace(**rest), f"namespace: {name} is missing")
    refused(kv.ArgumentError, lambda: space(**{name: None}), f"namespace: {name} is missing")


BAD_FIELDS: list[tuple[dict[str, Any], type[kv.Error], tuple[str, ...]]] = [
    ({"model": 5}, kv.ArgumentError, ("model is 5 of type int",)),
    ({"model": b"x"}, kv.ArgumentError, ("model is b'x' of type bytes",)),
    ({"model": "\ud800"}, kv.ArgumentError, ("model is", "UTF-8")),
    ({"model": "x" * 4097}, kv.ArgumentError, ("model has 4097 bytes, may have 4096",)),
    ({"model": "é" * 2049}, kv.ArgumentError, ("model has 4098 bytes",)),
    ({"model": " \n"}, kv.ArgumentError, ("model is '%20%0A', nothing but blanks",)),
    ({"adapter": 1}, kv.ArgumentError, ("adapter is 1",)),
    ({"raw": ["a\nb"] * 99}, kv.ArgumentError, ("raw is",)),
    ({"salt_policy": None}, kv.ArgumentError, ("salt_policy is missing",)),
    ({"planes": {}}, kv.ArgumentError, ("planes are missing",)),
    ({"planes": "bf16"}, kv.ArgumentError, ("planes is 'bf16'",)),
    ({"planes": [("key", "bf16")]}, kv.ArgumentError, ("planes is [",)),
    ({"planes": {1: "bf16"}}, kv.ArgumentError, ("the name of a plane is 1",)),
    ({"planes": {"key": None}}, kv.ArgumentError, ("'key' is None",)),
    ({"planes": {"key": np.float32}}, kv.ArgumentError, ("'key' is <class",)),
    ({"planes": {"a b": "bf16"}}, kv.ArgumentError, ("'a%20b' is no plane's name",)),
    ({"planes": {"key": "bfloat16"}}, kv.DTypeError, ("'key' is 'bfloat16'", "none of f32, f16, bf16")),
    ({"planes": {"key": ""}}, kv.DTypeError, ("'key' is ''",)),
    ({"planes": {"key": "bf16[]"}}, kv.ArgumentError, ("'key' is 'bf16%5B%5D'", "bf16[512]")),
    ({"planes": {"key": "bf16[0]"}}, kv.ArgumentError, ("dim of key is 0",)),
    ({"planes": {f"p{i}": "u8" for i in range(65)}}, kv.ArgumentError, ("65 planes, may be 64",)),
    ({"num_layers": 0}, kv.ArgumentError, ("num_layers is 0, must be from 1 to 281474976710656",)),
    ({"num_layers": 2**48 + 1}, kv.ArgumentError, ("num_layers is 281474976710657",)),
    ({"num_layers": 2**64}, kv.ArgumentError, ("num_layers is 18446744073709551616",)),
    ({"num_layers": 1.0}, kv.DTypeError, ("num_layers is 1.0",)),
    ({"num_layers": True}, kv.DTypeError, ("num_layers is True",)),
    ({"num_layers": "1"}, kv.DTypeError, ("num_layers is '1'",)),
    ({"num_kv_heads": -1}, kv.ArgumentError, ("num_kv_heads is -1",)),
    ({"head_size": 0}, kv.ArgumentError, ("head_size is 0",)),
    ({"value_head_size": 0}, kv.ArgumentError, ("value_head_size is 0",)),
    ({"block_size": 0}, kv.ArgumentError, ("block_size is 0",)),
    ({"first_layer": -1}, kv.ArgumentError, ("first_layer is -1, must be from 0",)),
    ({"first_layer": None}, kv.ArgumentError, ("first_layer is missing",)),
    ({"group": -1}, kv.ArgumentError, ("group is -1",)),
]


@pytest.mark.parametrize(("fields", "kind", "words"), BAD_FIELDS, ids=lambda x: repr(x)[:40])
def test_bad_fields(fields: dict[str, Any], kind: type[kv.Error], words: tuple[str, ...]) -> None:
    refused(kind, lambda: space(**fields), "namespace: ", *words)


def test_bad_texts() -> None:
    text = space().text
    for bad in ("", text[:-1], text + "\n", text.replace("\n", "\r\n"), text.replace("32", "032"), " " + text):
        refused(kv.ArgumentError, lambda bad=bad: kv.Namespace.parse(bad), "in the text of a namespace")
    for wrong in (None, 5, text.encode(), "\ud800"):
        refused(kv.ArgumentError, lambda wrong=wrong: kv.Namespace.parse(wrong), "namespace: text is")


BAD_KEYS: list[tuple[tuple[Any, ...], type[kv.Error], tuple[str, ...]]] = [
    ((None, [0, -1]), kv.ArgumentError, ("tokens[1] is -1, must be from 0 to 4294967295",)),
    ((None, [1, 2**32, -1]), kv.ArgumentError, ("tokens[1] is 4294967296",)),
    ((None, [1, 2**63]), kv.ArgumentError, ("tokens[1] is 9223372036854775808",)),
    ((None, [2**32, 2**64]), kv.ArgumentError, ("tokens[0] is 4294967296",)),
    ((None, [-(2**70)]), kv.ArgumentError, ("tokens[0] is -1180591620717411303424",)),
    ((None, [1, np.uint64(2**63)]), kv.ArgumentError, ("tokens[1] is 9223372036854775808",)),
    ((None, np.array([5, -7, 2**40])), kv.ArgumentError, ("tokens[1] is -7",)),
    ((None, np.array([5, 2**64 - 1], np.uint64)), kv.ArgumentError, ("tokens[1] is 18446744073709551615",)),
    ((None, np.array([5, -1], np.int8)), kv.ArgumentError, ("tokens[1] is -1",)),
    ((None, np.zeros((2, 2), np.int32)), kv.ArgumentError, ("[2, 2]",)),
    ((None, np.int32(3)), kv.ArgumentError, ("tokens is",)),
    ((None, np.array(3)), kv.ArgumentError, ("shape []",)),
    ((None, np.array([1.0])), kv.DTypeError, ("float64",)),
    ((None, np.array([True])), kv.DTypeError, ("bool",)),
    ((None, np.array([1], object)), kv.DTypeError, ("object",)),
    ((None, [1, 2.0]), kv.DTypeError, ("tokens[1] is 2.0",)),
    ((None, [1, True]), kv.DTypeError, ("tokens[1] is True",)),
    ((None, [None]), kv.DTypeError, ("tokens[0] is None",)),
    ((None, [[1], [2]]), kv.DTypeError, ("tokens[0] is [1]",)),
    ((None, "123"), kv.ArgumentError, ("tokens is '123'",)),
    ((None, b"123"), kv.ArgumentError, ("tokens is b'123'",)),
    ((None, {1, 2}), kv.ArgumentError, ("tokens is {1, 2}",)),
    ((None, {1: 2}), kv.ArgumentError, ("tokens is {1: 2}",)),
    ((None, 5), kv.ArgumentError, ("tokens is 5",)),
    ((None, None), kv.ArgumentError, ("tokens is None",)),
    ((b"", [1]), kv.ArgumentError, ("key: 0 bytes",)),
    ((bytes(65), [1]), kv.ArgumentError, ("key: 65 bytes",)),
    (("ab", [1]), kv.ArgumentError, ("parent is 'ab' of type str",)),
    ((5, [1]), kv.ArgumentError, ("parent is 5 of type int",)),
    ((None, [1], "salt"), kv.ArgumentError, ("extra is 'salt', expected a list",)),
    ((None, [1], b"salt"), kv.ArgumentError, ("extra is b'salt'",)),
    ((None, [1], {"a"}), kv.ArgumentError, ("extra is {",)),
    ((None, [1], None), kv.ArgumentError, ("extra is None",)),
    ((None, [1], ["a", 5]), kv.ArgumentError, ("extra[1] is 5",)),
    ((None, [1], ["a", None]), kv.ArgumentError, ("extra[1] is None",)),
    ((None, [1], ["\ud800"]), kv.ArgumentError, ("extra[0] is", "UTF-8")),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), BAD_KEYS, ids=lambda x: repr(x)[:40])
def test_bad_chains(arguments: tuple[Any, ...], kind: type[kv.Error], words: tuple[str, ...]) -> None:
    refused(kind, lambda: kv.Key.chain(*arguments), *words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "key: 0 bytes, must be from 1 to 64"),
        (bytes(65), "key: 65 bytes, must be from 1 to 64"),
        ("00", "key is '00' of type str, expected bytes"),
        (32, "key is 32 of type int, expected bytes"),  # bytes(32) would be 32 zeros
        ([1, 2], "key is [1, 2] of type list"),
        (None, "key is None of type NoneType"),
    ],
)
def test_bad_bytes(value: Any, words: str) -> None:
    refused(kv.ArgumentError, lambda: kv.Key(value), words)
