# SPDX-License-Identifier: Apache-2.0
"""ModelOpt 0.47's own Triton kernels and vLLM plug-in on kvstride's views, run by Triton's interpreter.

Over every layout the kernel must give what it gives over a contiguous cache, to the last bit, and what kv.attention
gives. `modelopt_worker.py` runs them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelopt_worker as worker

if not os.environ.get("KVSTRIDE_REQUIRE_MODELOPT"):
    for _package in ("vllm", "modelopt", "triton", "scipy"):
        if importlib.util.find_spec(_package) is None:
            pytest.skip(f"no {_package}; KVSTRIDE_REQUIRE_MODELOPT=1 fails", allow_module_level=True)

TOLERANCE = {"f32": 5e-6, "f16": 1e-3}
CASES = [f"{entry.name} {dtype}" for dtype in worker.DTYPES for entry in worker.strided_rows()]
#: Rows whose dims are not dense, which ModelOpt's kernel has no stride for.
TRANSPOSED = {"vllm/cpu-vec", "vllm/cpu-vec-kvfirst", "llamacpp/no-flash"}


class Results:
    """What one run of the worker left."""

    def __init__(self, folder: Path) -> None:
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
        self.arrays = {name: np.load(folder / f"{name}.npz") for name in ("registry", "writers", "plugin")}

    def of(self, part: str, case: str, *kinds: str) -> list[np.ndarray]:
        """Arrays of a case; its part must have run to the end."""
        assert part not in self.facts["failed"], self.facts["failed"][part]
        return [self.arrays[part][f"{case}|{kind}"] for kind in kinds]

    def fact(self, name: str) -> Any:
        """A fact of the plug-in."""
        assert "plugin" not in self.facts["failed"], self.facts["failed"]["plugin"]
        return self.facts["plugin"][name]

    def cases(self, part: str) -> list[str]:
        """The cases of a part."""
        return list(dict.fromkeys(key.rpartition("|")[0] for key in self.arrays[part].files))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("modelopt")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", worker.__file__, str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_VERSION": "9"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return Results(folder)


def assert_close(got: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    assert np.isfinite(got).all()
    limit = TOLERANCE[dtype]
    np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), rtol=limit, atol=limit)


@pytest.mark.parametrize("case", CASES)
def test_kernel_over_each_layout_of_the_registry(results: Results, case: str) -> None:
    name, dtype = case.split()
    skipped = results.facts.get("registry", {})
    if name in TRANSPOSED:
        assert skipped[case] == "dims are not dense"
        return
    if case in skipped:
        assert case == "vllm/pallas f32"
        pytest.skip(skipped[case])
    got, dense, ours = results.of("registry", case, "got", "reference", "ours")
    np.testing.assert_array_equal(got, dense)
    assert_close(got, ours, dtype)


@pytest.mark.parametrize("case", [f"{name} {dtype}" for dtype in worker.DTYPES for name, *_ in worker.WRITERS])
def test_kernel_over_what_the_engine_wrote(results: Results, case: str) -> None:
    got, dense, ours = results.of("writers", case, "got", "reference", "ours")
    np.testing.assert_array_equal(got, dense)
    assert_close(got, ours, case.split()[1])


def test_the_plugin_is_broken_without_the_patch(results: Results) -> None:
    """A control: when this fails, ModelOpt or vLLM has changed and the patch is to be looked at."""
    assert "get_kv_cache_shape" in results.fact("without the patch")


def test_the_split_alone_gives_decode_rows_the_prefill_lambda(results: Results) -> None:
    """A control for the launches below: their comparison sees a wrong λ."""
    got, right, wrong = results.of("plugin", "without the phase split", "got", "reference", "ours")
    assert_close(got, wrong, "f32")
    assert np.abs(got[:2] - right[:2]).max() > 0.01
    assert_close(got[2:], right[2:], "f32")


LAUNCHES = 24


def test_launches_of_the_patched_plugin(results: Results) -> None:
    names = [name for name in results.cases("plugin") if name != "without the phase split"]
    assert len(names) == LAUNCHES
    for name in names:
        got, ours, dense, counts, native = results.of("plugin", name, "got", "ours", "reference", "counts", "native")
        try:
            assert_close(got, ours, "f16" if "f16" in name else "f32")
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        # something was sparse, and the comparison can see it
        assert np.abs(got.astype(np.float64) - dense).max() > 0.01, name
        assert counts[1] > 0 or "N:M" in name, name
        # the engine's own attention is asked where a phase has no sparse work, once
        assert native == ("N:M" in name and "mixed" in name), name


def test_the_patch_is_made_once_and_undone(results: Results) -> None:
    assert results.fact("again") is True
    assert results.fact("undone") is True


def test_quantized_probabilities_pass_through(results: Results) -> None:
    from_kernel, from_plain, native = results.fact("fp8 P")
    assert from_kernel == 0 and 1e-3 < from_plain < 0.5 and native == 0


def test_profiling_gives_zeros(results: Results) -> None:
    assert results.fact("profiling") is True


def test_a_cache_of_another_rank_is_refused_with_its_shape(results: Results) -> None:
    said = results.fact("five dimensions")
    assert said.startswith("split_kv_cache: kv_cache [1, ") and "5 dimensions" in said and "\n" not in said


@pytest.mark.parametrize("builder", [0, 1], ids=["FlashAttention", "FlashInfer"])
def test_what_a_builder_notes(results: Results, builder: int) -> None:
    built = results.fact("built")[builder]
    decodes, prefills = built["mixed"]
    assert decodes == [[1, 3], [3, 9], [0, 1, 2], 1]
    assert prefills == [[0, 2], [0, 1, 2, 4, 5, 6, 7, 8], [0, 3, 8], 5]
    assert built["decodes"] is built["after"] is False
    assert built["theirs is kept"] is True


def test_a_plugin_that_is_not_known_is_refused(results: Results) -> None:
    said = results.fact("refused")
    assert said.pop("untouched") == "True"
    expected = {
        "release": "ModelOpt 0.48.0, the patch is for 0.47",
        "older vLLM": "vLLM 0.28.0, the patch is for 0.29 to 0.32",
        "newer vLLM": "vLLM 0.33.0",
        "arguments": "_resolve_forward takes (impl layer), known is (impl layer attn_metadata",
        "fields": "FlashInfer's metadata gets ()",
        "another module": "the plug-in has no _resolve_forward",
    }
    assert said.keys() == expected.keys()
    for name, text in expected.items():
        assert text in said[name] and "\n" not in said[name], said[name]


def test_checkpoint_blocks_mean_what_modelopt_makes_of_them(results: Results) -> None:
    pairs = results.fact("groups")
    assert len(pairs) == 7 * 4 * 2
    assert sum(bool(theirs) for _, theirs in pairs) >= 15
    # ModelOpt forgets `ignore` where a group has no calibration: no such block is among these
    for ours, theirs in pairs:
        assert ours == theirs


def test_fits_are_those_of_modelopts_calibrator(results: Results) -> None:
    for ours, theirs in results.fact("fit"):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
