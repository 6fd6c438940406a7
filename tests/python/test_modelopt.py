# SPDX-License-Identifier: Apache-2.0
"""kvstride.modelopt without torch, vLLM or ModelOpt: calibration, the checkpoint block, views of orders."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstride as kv
from kvstride import modelopt

SKIP = {
    "algorithm": "skip_softmax",
    "targets": ["LlamaAttention"],
    "ignore": ["cross_attn", "layers.0."],
    "threshold_scale_factor": {
        "formula": "a * exp(b * target_sparsity)",
        "prefill": {"a": 7.93, "b": 8.61},
        "decode": {"a": 0.12, "b": 9.85},
    },
    "target_sparsity": {"prefill": 0.5},
}
NM = {"algorithm": "sparse_softmax", "targets": ["LlamaAttention"], "sparsity_n": 2, "sparsity_m": 4}
ATTN = "model.layers.3.self_attn.attn"


def block(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"config_groups": {f"group_{i}": group for i, group in enumerate(groups)}, **more}


def test_importing_needs_no_torch_vllm_or_modelopt() -> None:
    check = (
        "import sys, kvstride.modelopt; print([n for n in ('torch', 'vllm', 'modelopt', 'scipy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- sparsity, fit, λ -----------------------------------------------------------------------------------------------


def test_sparsity_of_one_call_and_of_nothing() -> None:
    assert modelopt.sparsity(np.array([40, 30])) == 0.75
    assert modelopt.sparsity([(0, 0)]) == 0.0
    assert modelopt.sparsity(np.zeros((0, 2), np.int64)) == 0.0
    assert modelopt.sparsity([(2**62, 2**61), (2**62, 2**61)]) == 0.5


@pytest.mark.parametrize("counters", [[(1, 2)], [(3, -1)], [(1.0, 0.5)], [(1, 2, 3)], 7, None, "ab", [["4", "1"]]])
def test_sparsity_of_what_is_no_count(counters: Any) -> None:
    with pytest.raises(kv.ArgumentError, match=r"^sparsity: "):
        modelopt.sparsity(counters)


def exact(a: float, b: float, lengths: list[int]) -> np.ndarray:
    """Sparsities that lie on a curve, as [sample, trial]."""
    factors = np.outer(lengths, modelopt.THRESHOLD_TRIALS)
    return np.clip(np.log(factors / a) / b, 0.0, 1.0)


@pytest.mark.parametrize("log_space", [False, True])
def test_fit_finds_the_curve(log_space: bool) -> None:
    pytest.importorskip("scipy")
    lengths = [1024, 4096, 16384]
    found = modelopt.fit(modelopt.THRESHOLD_TRIALS, lengths, exact(5.0, 9.0, lengths), log_space=log_space)
    assert found.a == pytest.approx(5.0, rel=1e-4)
    assert found.b == pytest.approx(9.0, rel=1e-4)
    assert found.r2 == pytest.approx(1.0)
    assert 0.1 <= found.min_sparsity < found.max_sparsity <= 0.9
    # back: the λ of a target is the trial at which that sparsity was measured
    assert modelopt.skip_lambda(found, target=0.5, length=4096) == pytest.approx(5 * math.exp(4.5) / 4096, rel=1e-3)


def test_fit_keeps_only_sparsities_of_a_tenth_to_nine_tenths() -> None:
    pytest.importorskip("scipy")
    lengths = [1024, 4096]
    measured = exact(5.0, 9.0, lengths)
    wild = np.where(
        (measured < 0.1) | (measured > 0.9), np.random.default_rng(1).choice([0.0, 0.99], measured.shape), measured
    )
    assert modelopt.fit(modelopt.THRESHOLD_TRIALS, lengths, wild).b == pytest.approx(9.0, rel=1e-4)


def test_calibrated_lambda_skips_what_was_aimed_at() -> None:
    """From counts over fit and λ to the share of tiles that attention skips, on scores without structure."""
    pytest.importorskip("scipy")
    rng, length = np.random.default_rng(3), 512
    geometry = kv.Geometry(num_blocks=1, block_size=length, num_kv_heads=2, head_size=32, dtype="f32")
    memory = rng.standard_normal((1, 2, length, 2, 32)).astype(np.float32)
    q = 2 * rng.standard_normal((length, 2, 32)).astype(np.float32)
    call = (q, kv.Cache(memory, "B KV N H D", geometry=geometry), 0, [[0]], [length], [0, length])
    _, counts = kv.attention_calibrate(*call, modelopt.THRESHOLD_TRIALS, tile=(1, 16))
    measured = [[modelopt.sparsity([pair]) for pair in counts]]
    found = modelopt.fit(modelopt.THRESHOLD_TRIALS, [length], measured, log_space=True)
    for target in (0.3, 0.5, 0.7):
        skip = modelopt.skip_lambda(found, target=target, length=length)
        _, counts = kv.attention(*call, skip_lambda=skip, tile=(1, 16), counters=True)
        assert modelopt.sparsity(counts) == pytest.approx(target, abs=0.1)


@pytest.mark.parametrize(
    ("thresholds", "lengths", "sparsities", "message"),
    [
        ([0.1] * 3, [10, 10, 10], np.full((3, 3), 0.5), "9 points, at least 10"),
        ([0.1] * 5, [10, 10], np.full((2, 5), 0.05), "0 of 10 points"),
        ([0.1] * 5, [10, 10], np.full((5, 2), 0.5), r"shape \[5, 2\], expected \[sample, trial\] = \[2, 5\]"),
        ([0.1] * 4 + [1.5], [10, 10], np.full((2, 5), 0.5), "thresholds hold 1.5"),
        ([0.1] * 5, [10, math.nan], np.full((2, 5), 0.5), "lengths hold nan"),
        ([0.1] * 5, [10, 10], np.full((2, 5), math.nan), "sparsities hold nan"),
    ],
)
def test_fit_of_too_little_or_wrong(thresholds: Any, lengths: Any, sparsities: Any, message: str) -> None:
    with pytest.raises(kv.ArgumentError, match=message) as caught:
        modelopt.fit(thresholds, lengths, sparsities)
    assert "\n" not in str(caught.value)


def test_fit_without_scipy_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(kv.EngineError, match=r"^fit: needs scipy \(pip install scipy\)"):
        modelopt.fit(modelopt.THRESHOLD_TRIALS, [1024], exact(5.0, 9.0, [1024]))


def test_lambda_by_the_formula() -> None:
    assert modelopt.skip_lambda(7.93, 8.61, 0.5, 16384) == pytest.approx(7.93 * math.exp(8.61 * 0.5) / 16384, abs=0)
    assert modelopt.skip_lambda(modelopt.Fit(0.12, 9.85, 1.0, 0.1, 0.9), target=0.5, length=np.int64(4096)) < 1


@pytest.mark.parametrize(
    "arguments",
    [
        (0.0, 5.0, 0.5, 1024),
        (-1.0, 5.0, 0.5, 1024),
        (1.0, 5.0, 0.5, 0),
        (1.0, 5.0, 0.5, -3),
        (1000.0, 5.0, 0.5, 10),  # λ >= 1
        (1.0, 1e6, 1.0, 10),  # overflows
    ],
)
def test_lambda_that_is_off(arguments: tuple[Any, ...]) -> None:
    assert modelopt.skip_lambda(*arguments) is None


def test_lambda_of_exactly_one_is_off() -> None:
    assert modelopt.skip_lambda(1024.0, 0.0, 0.5, 1024) is None
    assert modelopt.skip_lambda(1023.0, 0.0, 0.5, 1024) == 1023 / 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((math.nan, 5.0, 0.5, 10), "a is nan"),
        ((1.0, math.inf, 0.5, 10), "b is inf"),
        ((1.0, 5.0, 1.5, 10), "target is 1.5, must be 0 to 1"),
        ((1.0, 5.0, True, 10), "target is True"),
        ((1.0, 5.0, 0.5, "10"), "length is '10'"),
        ((1.0, None, 0.5, 10), "b is None"),
        ((modelopt.Fit(1, 2, 1, 0, 1), 5.0, 0.5, 10), "a fit has its b"),
    ],
)
def test_lambda_of_what_is_no_number(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(kv.ArgumentError, match=f"^skip_lambda: {message}"):
        modelopt.skip_lambda(*arguments)


# --- The checkpoint block -------------------------------------------------------------------------------------------


def test_block_in_every_form(tmp_path: Path) -> None:
    whole = {"model_type": "llama", "sparse_attention_config": block(SKIP, NM)}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    groups = modelopt.read_config(block(SKIP, NM))
    assert groups == modelopt.read_config(whole)
    assert groups == modelopt.read_config(json.dumps(whole))
    assert groups == modelopt.read_config(tmp_path)
    assert groups == modelopt.read_config(str(tmp_path / "config.json"))
    assert [g.algorithm for g in groups] == ["skip_softmax", "sparse_softmax"]
    assert groups[0].calibration == {"prefill": (7.93, 8.61), "decode": (0.12, 9.85)}
    assert groups[0].target == {"prefill": 0.5, "decode": 0.5}
    assert (groups[1].nm, groups[1].recent, groups[1].sink_tokens) == ((2, 4), 64, 0)
    assert modelopt.read_config({"model_type": "llama"}) == []


def test_layer_gets_both_methods_by_phase() -> None:
    layer = modelopt.for_layer(modelopt.read_config(block(SKIP, NM)), ATTN)
    prefill, decode = (layer.arguments(phase, 16384) for phase in ("prefill", "decode"))
    assert prefill == {
        "skip_lambda": pytest.approx(7.93 * math.exp(8.61 / 2) / 16384),
        "tile": (128, 128),
        "nm": (2, 4),
        "recent": 64,
        "sink_tokens": 0,
    }
    assert decode == {"skip_lambda": pytest.approx(0.12 * math.exp(9.85 / 2) / 16384), "tile": (128, 128)}
    assert layer.skip_lambda("decode", 1) is None  # 16.6: no λ
    assert layer.arguments("prefill", 100) == {k: v for k, v in prefill.items() if k != "skip_lambda"}


def test_arguments_are_those_of_attention() -> None:
    layer = modelopt.for_layer(modelopt.read_config(block(SKIP, NM)), ATTN, tile=(16, 32))
    geometry = kv.Geometry(num_blocks=2, block_size=32, num_kv_heads=1, head_size=16, dtype="f32")
    memory = np.random.default_rng(0).standard_normal((2, 2, 32, 1, 16)).astype(np.float32)
    cache = kv.Cache(memory, "B KV N H D", geometry=geometry)
    for phase, rows in (("prefill", 40), ("decode", 1)):
        q = np.ones((rows, 1, 16), np.float32)
        out = kv.attention(q, cache, 0, [[0, 1]], [64], [0, rows], **layer.arguments(phase, 64000))
        assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        (ATTN, False),
        ("model.layers.0.self_attn.attn", True),
        ("model.layers.10.cross_attn", True),
        ("model.layers.3.mlp", True),
        ("model.layers.3.Attention", True),  # case counts, as there
    ],
)
def test_ignore_comes_first_and_attn_second(name: str, dense: bool) -> None:
    assert modelopt.for_layer(modelopt.read_config(block(SKIP, NM)), name).dense is dense


def test_uncalibrated_groups() -> None:
    plain = {"algorithm": "skip_softmax"}
    assert modelopt.for_layer(modelopt.read_config(block(plain)), ATTN).arguments("decode", 10)["skip_lambda"] == 0.1
    both = modelopt.for_layer(modelopt.read_config(block(plain, NM)), ATTN)
    assert both.arguments("decode", 10) == {}
    assert both.arguments("prefill", 10)["nm"] == (2, 4)
    one_phase = {**SKIP, "threshold_scale_factor": {"decode": {"a": 1.0, "b": 2.0}}}
    layer = modelopt.for_layer(modelopt.read_config(block(one_phase)), ATTN)
    assert layer.arguments("prefill", 1000) == {}
    assert layer.arguments("decode", 1000)["skip_lambda"] == pytest.approx(math.exp(1) / 1000)
    assert modelopt.for_layer([], ATTN).dense


def test_a_block_of_older_exports_overrides_its_group() -> None:
    (group,) = modelopt.read_config(
        block(NM, sparse_softmax={"sparsity_n": 4, "sparsity_m": 8, "dense_sink_tokens": 3})
    )
    assert (group.nm, group.sink_tokens, group.recent) == ((4, 8), 3, 64)


def changed(group: dict[str, Any], **values: Any) -> dict[str, Any]:
    return block({**group, **values})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (block({"algorithm": "vsa"}), "group_0: algorithm is 'vsa', known are skip_softmax"),
        (block({}), "group_0: algorithm is None"),
        (block({"algorithm": ["skip_softmax"]}), "group_0: algorithm is"),
        (block(7), "group_0 is 7, expected an object"),
        ({"config_groups": []}, r"config_groups is \[\], expected an object"),
        ({"sparse_attention_config": 3}, "sparse_attention_config is 3"),
        ({"sparse_attention_config": {}}, "config_groups is None"),
        (changed(SKIP, ignore="cross_attn"), "ignore is 'cross_attn', expected a list"),
        (changed(SKIP, ignore=[""]), "ignore is"),
        (changed(SKIP, target_sparsity=1.5), "target_sparsity: prefill is 1.5"),
        (changed(SKIP, target_sparsity={"decode": "x"}), "target_sparsity: decode is 'x'"),
        (changed(SKIP, threshold_scale_factor=[1]), "threshold_scale_factor is"),
        (changed(SKIP, threshold_scale_factor={"formula": "k / (1 - s) ** p"}), "formula is 'k / "),
        (changed(SKIP, threshold_scale_factor={"prefill": {"a": 1}}), "prefill: b is None"),
        (changed(SKIP, threshold_scale_factor={"prefill": {"a": -1, "b": 1}}), "prefill: a is -1"),
        (changed(SKIP, threshold_scale_factor={"decode": {"a": math.nan, "b": 1}}), "decode: a is nan"),
        (changed(SKIP, threshold_scale_factor={"decode": {"a": 10**400, "b": 1}}), "decode: a is 1"),
        (changed(SKIP, initial_disabled_steps=-1), "initial_disabled_steps is -1"),
        (changed(NM, sparsity_n=4), "sparsity is 4:4"),
        (changed(NM, sparsity_m=16), "sparsity is 2:16"),
        (changed(NM, sparsity_n=True), "sparsity_n is True"),
        (changed(NM, dense_recent_tokens=1.5), "dense_recent_tokens is 1.5"),
        ("{", "text: no JSON"),
        ("[1]", "a list, expected an object"),
        ("{" + '"a":{' * 100_000, "no JSON"),
        (7, "config is int, expected"),
        (None, "config is NoneType"),
    ],
)
def test_a_block_that_is_wrong(config: Any, message: str) -> None:
    with pytest.raises(kv.ArgumentError, match=message) as caught:
        modelopt.read_config(config)
    assert str(caught.value).startswith("read_config: ") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        modelopt.read_config(tmp_path / "none.json")


# --- Views by name and order, in numpy ------------------------------------------------------------------------------


def test_views_of_an_order_share_memory() -> None:
    memory = np.zeros((4, 2, 8, 3, 16), np.float32)
    split = modelopt.split_kv_cache(memory, "B KV N H D")
    key, value = split
    assert key.shape == value.shape == (4, 8, 3, 16)
    assert split.page_size == 8 and split.dense_dim
    value[2, 5, 1, 7] = 3
    assert memory[2, 1, 5, 1, 7] == 3
    key[:] = 1
    assert (memory[:, 0] == 1).all() and memory[:, 1].sum() == 3


def test_a_transposed_layout_says_so() -> None:
    cache = np.zeros((4, 3, 8 * 16 * 2), np.float32)
    geometry = kv.Geometry(num_blocks=4, block_size=8, num_kv_heads=3, head_size=16, dtype="f32")
    split = modelopt.split_kv_cache(cache, kv.layout("B H {key: D N, value: N D}", geometry))
    assert not split.dense_dim
    assert split.key.shape == split.value.shape == (4, 8, 3, 16)


@pytest.mark.parametrize(
    ("shape", "order", "sizes", "error", "message"),
    [
        ((4, 8, 3, 16), "B KV N H D", {}, kv.LayoutError, r"\[4, 8, 3, 16\]"),
        ((4, 3, 8, 3, 16), "B KV N H D", {}, kv.LayoutError, r"\[4, 3, 8, 3, 16\]"),
        ((4, 2, 8, 3, 16), "B KV N H D", {"head_size": 8}, kv.LayoutError, r"\[4, 2, 8, 3, 16\]"),
        ((4, 2, 8, 3, 16), "B KV N H D", {"num_kv_heads": 0}, kv.ArgumentError, "num_kv_heads is 0"),
        ((4, 2, 8, 3, 16), "B KV N H D", {"num_kv_heads": 1.5}, kv.DTypeError, "num_kv_heads is 1.5"),
        ((4, 2, 8, 3, 16), "B KV N H", {}, kv.LayoutError, "does not fit 'B KV N H'"),
        ((4, 2, 8, 3, 16), "NHD", {}, kv.LayoutError, "different bytes in different releases"),
        ((4, 2, 8, 3, 16), "vllm/none", {}, kv.LayoutError, "no layout 'vllm/none' in the registry"),
        ((4, 8, 576), "B N {latent: D[512], rope: D[64]}", {}, kv.LayoutError, "holds latent, rope"),
        ((4, 3, 2, 8, 8, 8), "B H KV D/8 N D%8", {}, kv.NotStrided, r"\[4, 3, 2, 8, 8, 8\].*kv.attention reads"),
    ],
)
def test_views_refused(shape: tuple[int, ...], order: str, sizes: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        modelopt.split_kv_cache(np.zeros(shape, np.float32), order, **sizes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [None, [], "text", object(), [1, 2]])
def test_views_of_what_is_no_tensor(wrong: Any) -> None:
    with pytest.raises(kv.Error, match=r"^split_kv_cache: "):
        modelopt.split_kv_cache(wrong, "B KV N H D")


@pytest.mark.parametrize(
    "ask",
    [
        lambda: modelopt.split_kv_cache(np.zeros((4, 6, 8, 32), np.float32), "FLASH_ATTN"),
        lambda: modelopt.make_kv_cache("FLASH_ATTN", num_blocks=1, block_size=8, num_kv_heads=1, head_size=16),
        modelopt.patch,
    ],
    ids=["split", "make", "patch"],
)
def test_backends_without_vllm_are_one_line(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(kv.EngineError, match="no vLLM here") as caught:
        ask()
    assert "\n" not in str(caught.value)


def test_a_layout_of_other_sizes_is_refused() -> None:
    geometry = kv.Geometry(num_blocks=4, block_size=8, num_kv_heads=3, head_size=16, dtype="f32")
    layout = kv.layout("B KV N H D", geometry)
    with pytest.raises(kv.LayoutError, match="head_size is 8, but 16 in the layout"):
        modelopt.split_kv_cache(np.zeros((4, 2, 8, 3, 16), np.float32), layout, head_size=8)
    with pytest.raises(kv.LayoutError, match=r"\[5, 2, 8, 3, 16\]"):
        modelopt.split_kv_cache(np.zeros((5, 2, 8, 3, 16), np.float32), layout)
