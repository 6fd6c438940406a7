# SPDX-License-Identifier: Apache-2.0
"""kvstride as vLLM's attention on the CPU: dense it answers as vLLM's own backend does, sparse it counts what it skips.

Each engine is a process of its own (some 15 s). Equal means the same greedy tokens, where two are not as likely as each
other, and logprobs within what the dtype rounds.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

import kvstride as kv
from kvstride.vllm.attention.options import AttentionOptions, Lambda
from offload import compare, run

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and not os.environ.get("KVSTRIDE_REQUIRE_VLLM"),
    reason="vLLM is not installed; with KVSTRIDE_REQUIRE_VLLM=1 this fails",
)
LONG = bool(os.environ.get("KVSTRIDE_LONG"))

FIRST = list(range(5, 405))
#: A long prompt alone, then several at once: prefill in chunks beside decodes.
STEPS: list[Any] = [
    {"prompt": FIRST, "tokens": 12},
    {"together": [{"prompt": [*range(i, i + 37 * (i % 9) + 1)], "tokens": 3 + i % 5} for i in range(7, 31)]},
    {"prompt": [*range(300, 700), 7, 8, 9]},
]
SMALL_STEPS = {"max_num_batched_tokens": 256, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the tests of this file share."""
    return tmp_path_factory.mktemp("attention")


_own: dict[str, dict[str, Any]] = {}


def own(work: Path, kind: str, dtype: str) -> dict[str, Any]:
    """What vLLM's own backend answers."""
    name = f"{kind} {dtype}"
    if name not in _own:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("KVSTRIDE_ATTENTION", raising=False)
            _own[name] = run(work, STEPS, kind=kind, llm={"dtype": dtype, **SMALL_STEPS})
    return _own[name]


def ours(monkeypatch: pytest.MonkeyPatch, work: Path, options: Any = "1", **job: Any) -> dict[str, Any]:
    """What the engine answers with our backend."""
    monkeypatch.setenv("KVSTRIDE_ATTENTION", options if isinstance(options, str) else json.dumps(options))
    return run(work, STEPS, **job)


def expect_alike(got: dict[str, Any], expected: dict[str, Any], noise: float) -> None:
    for a, b in zip(got["answers"], expected["answers"], strict=True):
        far, fair = compare(a, b, noise)
        assert far <= noise and fair, (far, fair, a["tokens"], b["tokens"])


def rounding(work: Path, kind: str, dtype: str) -> float:
    """How far vLLM's own answers in a dtype are from its answers in float32: two that round so may differ by twice."""
    pairs = zip(own(work, kind, dtype)["answers"], own(work, kind, "float32")["answers"], strict=True)
    return 2 * max(compare(a, b, 1.0)[0] for a, b in pairs)


def counted(told: dict[str, Any], name: str, phase: str) -> float:
    return float(told["metrics"].get(f"kvstride_attention_{name}_total{{phase={phase}}}", 0))


long = pytest.mark.skipif(not LONG, reason="KVSTRIDE_LONG=1, as make test-long has it")


@needs_vllm
@pytest.mark.parametrize(
    ("kind", "dtype", "llm", "layout"),
    [
        ("llama", "float32", {}, None),
        pytest.param("llama", "bfloat16", {"block_size": 16}, "NHD", marks=long),
        # Windows, q and k norms, scale of its own.
        pytest.param("gemma3", "float32", {}, "NHD", marks=long),
        pytest.param("llama", "float16", {"block_size": 8}, "HND", marks=long),
    ],
)
def test_dense_answers_as_vllm_does(
    work: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, llm: dict[str, Any], layout: str | None
) -> None:
    expected = own(work, kind, dtype)
    if layout:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    told = ours(monkeypatch, work, kind=kind, llm={"dtype": dtype, **SMALL_STEPS, **llm})
    expect_alike(told, expected, 1e-4 if dtype == "float32" else rounding(work, kind, dtype))
    assert "kvstride attends" in told["log"]
    assert counted(told, "tokens", "prefill") > 400 and counted(told, "tokens", "decode") > 0
    assert counted(told, "tiles", "prefill") == 0


_dense: dict[str, Any] = {}
SPARSE: dict[str, Any] = {"kind": "llama", "llm": {"dtype": "float32", **SMALL_STEPS}}
TILE = {"tile": [16, 32]}


def dense(monkeypatch: pytest.MonkeyPatch, work: Path) -> dict[str, Any]:
    """Our dense answers."""
    if not _dense:
        _dense.update(ours(monkeypatch, work, **SPARSE))
    return _dense


@needs_vllm
def test_sparse_skips_and_counts(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = ours(monkeypatch, work, {"skip_lambda": {"prefill": 0.7, "decode": 0.3}, **TILE}, **SPARSE)
    for phase in ("prefill", "decode"):
        assert 0 < counted(large, "tiles_skipped", phase) < counted(large, "tiles", phase)
    expected = own(work, "llama", "float32")
    assert any(a["logprobs"] != b["logprobs"] for a, b in zip(large["answers"], expected["answers"], strict=True))


@needs_vllm
@long
def test_lambda_to_zero_is_dense(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ours(monkeypatch, work, {"skip_lambda": 1e-30, **TILE}, **SPARSE)
    expect_alike(tiny, dense(monkeypatch, work), 1e-4)
    assert counted(tiny, "tiles", "prefill") > 0 and counted(tiny, "tiles", "decode") > 0
    assert counted(tiny, "tiles_skipped", "prefill") == counted(tiny, "tiles_skipped", "decode") == 0


@needs_vllm
@long
def test_sparse_in_bf16(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMX where the processor has it: tiles that nobody skips, and tiles that are."""
    llm = {"dtype": "bfloat16", **SMALL_STEPS}
    tiny = ours(monkeypatch, work, {"skip_lambda": 1e-30, **TILE}, kind="llama", llm=llm)
    expect_alike(tiny, own(work, "llama", "bfloat16"), rounding(work, "llama", "bfloat16"))
    assert counted(tiny, "tiles", "prefill") > 0 and counted(tiny, "tiles_skipped", "prefill") == 0
    large = ours(monkeypatch, work, {"skip_lambda": 0.7, **TILE}, kind="llama", llm=llm)
    assert 0 < counted(large, "tiles_skipped", "prefill") < counted(large, "tiles", "prefill")


@needs_vllm
@long
@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM has fp8 KV on AVX-512 only")
def test_fp8_keys_and_values(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two round to f8 otherwise, and this model of random weights feels each rounding: ours must come as near to
    what is not rounded as vLLM's own does."""
    llm = {"dtype": "float32", "kv_cache_dtype": "fp8", **SMALL_STEPS}
    plain = own(work, "llama", "float32")
    theirs = run(work, STEPS, kind="llama", llm=llm)
    told = ours(monkeypatch, work, kind="llama", llm=llm)

    def distance(answers: list[dict[str, Any]]) -> float:
        pairs = zip(answers, plain["answers"], strict=True)
        return sum(compare(a, b, 1.0)[0] for a, b in pairs) / len(answers)

    assert 0 < distance(told["answers"]) <= 1.25 * distance(theirs["answers"])


@needs_vllm
@long
def test_layers_that_are_left_out(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"skip_lambda": 0.7, "nm": [1, 4], "recent": 0, "leave_out": ["*.layers.*"], **TILE}
    expect_alike(ours(monkeypatch, work, options, **SPARSE), dense(monkeypatch, work), 1e-4)
    options["leave_out"] = ["*.layers.0.*"]
    one = ours(monkeypatch, work, options, **SPARSE)
    assert any(a["logprobs"] != b["logprobs"] for a, b in zip(one["answers"], _dense["answers"], strict=True))


@needs_vllm
@long
def test_n_of_m(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill alone: everything recent is dense."""
    recent = ours(monkeypatch, work, {"nm": [2, 4], "recent": 5000}, **SPARSE)
    expect_alike(recent, dense(monkeypatch, work), 1e-4)
    sparse = ours(monkeypatch, work, {"nm": [1, 8], "recent": 4, "sink_tokens": 1}, **SPARSE)
    assert any(a["logprobs"] != b["logprobs"] for a, b in zip(sparse["answers"], _dense["answers"], strict=True))


@needs_vllm
@long
def test_wrong_options_stop_the_engine(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="KVSTRIDE_ATTENTION: unknown option 'skip'"):
        ours(monkeypatch, work, {"skip": 0.1}, kind="llama")


def test_options() -> None:
    parse = AttentionOptions.parse
    assert parse("") is parse("0") is parse("off") is None
    assert parse("1") == AttentionOptions() and AttentionOptions().dense
    one = parse('{"skip_lambda": 0.1, "nm": [2, 4], "leave_out": ["model.layers.0.*"]}')
    assert one is not None and not one.dense
    assert (one.prefill, one.decode) == (Lambda(0.1), Lambda(0.1))
    assert one.leaves_out("model.layers.0.self_attn") and not one.leaves_out("model.layers.10.self_attn")
    two = parse('{"skip_lambda": {"prefill": {"a": 100, "b": 2, "target": 0.5}, "decode": 0}}')
    assert two is not None and two.decode == Lambda()
    assert two.prefill.at(1000) == pytest.approx(0.1 * 2.718281828)
    assert two.prefill.at(100) == 0.0  # 1 and more is off


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yes", "expected 1, 0 or JSON"),
        ("[1]", "expected 1, 0 or a JSON object"),
        ('{"lambda": 1}', "unknown option 'lambda'"),
        ('{"skip_lambda": 1.0}', "must be below 1"),
        ('{"skip_lambda": "0.1"}', "expected a number"),
        ('{"skip_lambda": NaN}', "expected a number"),
        ('{"skip_lambda": {"prefill": 0.1, "chunk": 0.1}}', "skip_lambda has 'chunk'"),
        ('{"skip_lambda": {"a": 1}}', "expected a number or a, b and target"),
        ('{"skip_lambda": {"a": 0, "b": 1}}', "needs a above 0"),
        ('{"nm": [4, 4]}', "M must be 4 or 8"),
        ('{"nm": [2]}', "expected two whole numbers"),
        ('{"tile": [0, 8]}', "both must be at least 1"),
        ('{"recent": -1}', "a whole number from 0 to"),
        ('{"leave_out": "x"}', "expected a list of patterns"),
    ],
)
def test_wrong_options(text: str, said: str) -> None:
    with pytest.raises(kv.ArgumentError, match=said) as caught:
        AttentionOptions.parse(text)
    assert "KVSTRIDE_ATTENTION" in str(caught.value)
