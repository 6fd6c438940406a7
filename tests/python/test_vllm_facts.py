# SPDX-License-Identifier: Apache-2.0
"""Every address of the facts file, through the same function that names a live engine's layout."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import kvstride as kv
from kvstride.vllm import FAMILIES, Named, name_layout
from vllm_facts import facts_file, label, records, visible

AXES = ("B", "N", "H", "D")
ADDRESSED = [r for r in records() if "key" in r and "value" in r]


def lengths(record: dict[str, Any], plane: str) -> tuple[int, ...]:
    """Lengths of B, N, H, D of a plane."""
    args = record["args"]
    dim = args.get("value_head_size", args["head_size"]) if plane == "value" else args["head_size"]
    return args["num_blocks"], args["block_size"], args["num_kv_heads"], dim


def true_addresses(record: dict[str, Any], plane: str) -> np.ndarray:
    """The file's element addresses of a plane, as [block, token, head, dim]."""
    truth = record[plane]
    grid = np.indices(lengths(record, plane), dtype=np.int64)
    out = np.full(lengths(record, plane), truth["offset"], dtype=np.int64)
    for axis, modulus, divisor, stride in truth["modes"]:
        out += (grid[AXES.index(axis)] % modulus) // divisor * stride
    return out


def wrong_addresses(record: dict[str, Any], layout: kv.Layout, item: int) -> int:
    """Elements of both planes whose address is not the file's."""
    wrong = 0
    for plane in ("key", "value"):
        truth = true_addresses(record, plane)
        for index in product(*map(range, truth.shape)):
            block, token, head, dim = index
            at = layout.offset(plane, block=block, token=token, head=head, dim=dim)
            wrong += at != (0, int(truth[index]) * item)
    return wrong


def declared_tensor(record: dict[str, Any], named: Named) -> np.ndarray:
    """A 16-bit tensor as the engine has it: declared shape, true strides."""
    strides = record.get("view_stride_bytes")
    if strides is None:
        order = record.get("stride_order", range(len(named.shape)))
        dense = np.zeros([named.shape[i] for i in order], dtype=np.uint16)
        return dense.transpose(np.argsort(np.asarray(order)))
    span = sum((n - 1) * s for n, s in zip(named.shape, strides, strict=True)) + 2
    return np.lib.stride_tricks.as_strided(np.zeros(span // 2, dtype=np.uint16), named.shape, strides)


def runs(shape: Any, strides: Any) -> list[tuple[int, int]]:
    """(stride, length) of the dimensions longer than 1, outermost first; dimensions that continue each other, such as
    the heads and dims that a backend leaves fused, are one."""
    out: list[tuple[int, int]] = []
    for stride, length in sorted(
        ((int(s), int(n)) for n, s in zip(shape, strides, strict=True) if n > 1), reverse=True
    ):
        if out and out[-1][0] == stride * length:
            out[-1] = (stride, out[-1][1] * length)
        else:
            out.append((stride, length))
    return out


def wrong_view(record: dict[str, Any], named: Named, plane: str) -> str | None:
    """What is wrong with kvstride's view of a plane where the file says one; None where nothing is."""
    told = record.get(f"{plane}_view")
    if told is None:
        return None
    tensor = declared_tensor(record, named)
    cache = named.cache(tensor)
    try:
        view = np.asarray(cache.key(0) if plane == "key" else cache.value(0))
        if view.shape != lengths(record, plane):
            return f"shape {view.shape}"
    except kv.NotStrided:
        view = np.asarray(cache.plane(0, plane))
    start, at = tensor.__array_interface__["data"][0], view.__array_interface__["data"][0]
    if at - start != told["offset"] * 2:
        return f"offset {at - start}"
    have, want = runs(view.shape, [s // 2 for s in view.strides]), runs(told["shape"], told["stride"])
    if view.ndim == 4 and len({axis for axis, *_ in record[plane]["modes"]}) == len(record[plane]["modes"]):
        each = {axis: stride for axis, modulus, _, stride in record[plane]["modes"] if modulus > 1}
        if any(view.strides[AXES.index(axis)] != 2 * stride for axis, stride in each.items()):
            return f"strides {view.strides} by axis"
    return None if have == want else f"strides {have}, not {want}"


def judge(record: dict[str, Any]) -> tuple[str, str]:
    """("right" | "refused" | "wrong", why)."""
    try:
        named = name_layout(visible(record))
        layout = named.layout()
    except kv.LayoutError as error:
        return "refused", f"{type(error).__name__}: {error}"
    wrong = wrong_addresses(record, layout, 2)
    if wrong:
        return "wrong", f"{wrong} addresses under {named.text}"
    for plane in ("key", "value"):
        fault = wrong_view(record, named, plane)
        if fault:
            return "wrong", f"{plane} view: {fault} under {named.text}"
    return "right", named.text


def test_every_address_and_view_of_the_facts_file(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [(record, *judge(record)) for record in ADDRESSED]
    count = {v: sum(1 for _, verdict, _ in verdicts if verdict == v) for v in ("right", "refused", "wrong")}
    with capsys.disabled():
        print(f"\nfacts: {count['right']} right, {count['refused']} refused, {count['wrong']} wrong")
        for record, verdict, why in verdicts:
            if verdict != "right":
                print(f"  {verdict}: {label(record)}: {why}")
    assert count["wrong"] == 0
    if len(ADDRESSED) == 90 and len(records()) == 609:
        assert count["right"] >= 86, f"of the shared file {facts_file()}"


@pytest.mark.parametrize("name", ["SomeBackend", "FlashAttentionBackendV2", "MyFlashInferBackend", ""])
def test_a_class_that_the_table_does_not_know_is_refused(name: str) -> None:
    for record in ADDRESSED:
        with pytest.raises(kv.UnknownLayout, match="not in kvstride's table"):
            name_layout({**visible(record), "backend": name})


def test_the_rule_does_not_look_at_the_truth() -> None:
    poisoned = {"key": None, "value": None, "key_view": 1, "value_view": 1, "opaque_interior": "x", "notes": 7}
    for record in ADDRESSED:
        try:
            clean = name_layout(visible(record)).text
        except kv.LayoutError:
            continue
        assert name_layout({**record, **poisoned}).text == clean


def test_every_class_with_addresses_is_known_and_every_named_layout_has_a_registry_row() -> None:
    assert {r["backend"] for r in ADDRESSED} <= set(FAMILIES)
    for record in ADDRESSED:
        try:
            named = name_layout(visible(record))
        except kv.LayoutError:
            continue
        assert named.name is not None, label(record)
        assert named.name.startswith("vllm/")


def test_records_without_addresses_are_refused_with_a_reason_or_build() -> None:
    for record in records():
        try:
            named = name_layout(visible(record))
        except kv.LayoutError as error:
            assert str(error).startswith(f"{record['backend']}: ") and len(str(error)) > len(record["backend"]) + 10
            continue
        assert named.layout().planes


def one(backend: str, **match: Any) -> dict[str, Any]:
    """The one addressed record of the shared file with these fields, without the truth."""
    from vllm_facts import SHARED

    found = [r for r in records(SHARED) if r["backend"] == backend and "key" in r and match.items() <= r.items()]
    assert found, (backend, match)
    return visible(found[0])


def test_an_unknown_variant_or_isa_is_refused() -> None:
    for record in ADDRESSED:
        with pytest.raises(kv.UnknownLayout, match="variant"):
            name_layout({**visible(record), "variant": "someday"})
    cpu = one("CPUAttentionBackend", **{"from": "0.29.0"})
    for isa in ("neon", "vxe", "rvv", "vsx", "", None):
        with pytest.raises(kv.UnknownLayout, match="ISA"):
            name_layout({**cpu, "isa": isa})


def test_the_cpu_isa_and_item_size_decide_the_tile() -> None:
    cpu = one("CPUAttentionBackend", **{"from": "0.29.0"})
    vec, amx = name_layout(cpu), name_layout({**cpu, "isa": "amx"})
    wide = {**cpu, "isa": "amx", "dtype": "torch.float32", "view_stride_bytes": [12288, 4096, 256, 4]}
    assert vec.order == name_layout({**cpu, "isa": "vec16"}).order == "B H {key: D N, value: N D}"
    assert amx.order == "B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}"
    assert name_layout(wide).order == "B H {key: N/16 D N%16, value: D/16 N D%16}"
    assert vec.opaque and amx.opaque


def test_triton_kv_first_needs_a_variant() -> None:
    triton = one("TritonAttentionBackend", variant="x_split")
    assert name_layout(triton).order == "{key: B H D/x N D%x, value: B H D N}"
    assert name_layout({**triton, "variant": "flash"}).order == "KV B N H D"
    with pytest.raises(kv.UnknownLayout, match="run time"):
        name_layout({**triton, "variant": None})


def test_shuffled_packed_content_is_refused_as_broken() -> None:
    packed = one("AiterFlashAttentionBackend", **{"from": "0.26.0"})
    with pytest.raises(kv.UnknownLayout, match="overlap"):
        name_layout({**packed, "variant": "rocm_shuffle"})
    before = one("AiterFlashAttentionBackend", **{"from": "0.23.0"})
    assert name_layout({**before, "variant": "rocm_shuffle"}).order == "B {key: H D/x N D%x, value: H N/x D N%x}"


def kv_first(blocks: int, tokens: int, heads: int, dim: int) -> dict[str, Any]:
    record = one("FlashAttentionBackend", **{"from": "0.11.0", "layout": "HND"})
    sizes = {"num_blocks": blocks, "block_size": tokens, "num_kv_heads": heads, "head_size": dim}
    for name in ("physical_shape", "logical_axes", "physical_axes"):
        record.pop(name)
    return record | {"args": sizes, "logical_shape": [2, blocks, tokens, heads, dim]}


@pytest.mark.parametrize("sizes", [(2, 16, 3, 32), (7, 16, 2, 32), (7, 16, 16, 32), (7, 32, 3, 32), (3, 16, 3, 32)])
def test_sizes_that_coincide_are_refused_unless_a_probe_tells_the_axes(sizes: tuple[int, ...]) -> None:
    facts = kv_first(*sizes)
    with pytest.raises(kv.AmbiguousLayout, match="equal sizes"):
        name_layout(facts)
    probe = kv_first(7, 640, 11, 128)
    named = name_layout(facts | {"probe": {"args": probe["args"], "logical_shape": probe["logical_shape"]}})
    assert named.text == "KV B H N D"
    with pytest.raises(kv.UnknownLayout):
        name_layout(
            facts
            | {"probe": {"args": probe["args"], "logical_shape": [7, 2, 640, 11, 128]}}
            | {"logical_shape": [2, 9, 16, 3, 32]}
        )


def test_case_C52_a_stride_order_that_is_no_permutation() -> None:
    facts = kv_first(7, 16, 3, 32)
    for order in ([0, 1, 1, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2], [-1, 0, 1, 2, 3]):
        with pytest.raises(kv.LayoutError, match="permutation"):
            name_layout(facts | {"stride_order": order})
    with pytest.raises(kv.LayoutError, match="physical shape"):
        name_layout(facts | {"physical_shape": [2, 7, 16, 3, 32]})


def test_strides_that_overlap_or_are_too_few_are_refused() -> None:
    facts = one("FlashAttentionBackend", layout="BLHNC")
    for strides in ([10, 2048, 128, 2], [30720, 2048, 128], [30720, 2048, 128, 4]):
        with pytest.raises(kv.LayoutError):
            name_layout(facts | {"view_stride_bytes": strides})


def test_asymmetric_heads() -> None:
    record = one("FlashAttentionBackend", layout="LBNHC")
    facts = {k: v for k, v in record.items() if not k.endswith("axes")}
    facts |= {
        "backend": "FlashAttentionDiffKVBackend",
        "args": record["args"] | {"value_head_size": 48},
        "logical_shape": [7, 3, 16, 80],
        "view_stride_bytes": [7680, 160, 480, 2],
    }
    named = name_layout(facts)
    assert named.text == "B N H {key: D, value: D}"
    assert named.layout().offset("value", block=1, token=1, head=2, dim=47) == (0, 7680 + 480 + 320 + 64 + 94)


def test_the_registry_knows_every_class_with_addresses() -> None:
    known = {backend for entry in kv.registry() for backend in entry.backends}
    assert {r["backend"] for r in records() if "key" in r} <= known
