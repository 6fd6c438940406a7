# SPDX-License-Identifier: Apache-2.0
"""Releases of vLLM that offloading can work with, and what is said of those with which it cannot: no vLLM is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fake_vllm

BASE, TIER, REGION = "kv_offload/base.py", "tiering/base.py", "shared_offload_region.py"
LOAD = "submit_load(self, job_id, src_spec, dst_spec"
START = "kvstride.errors.EngineError: kvstride cannot offload for vLLM 0.32.0+cpu: vllm.v1.kv_offload."
END = " (tested: 0.30, 0.31, 0.32)"

#: What vLLM's processes do: all of them register, those that are told to offload ask for the classes.
ASK = """
import logging
logging.basicConfig(level=logging.INFO)
from kvstride.vllm.offload import needs, register
register()
register()
print("registered")
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
print(OffloadingSpecFactory._registry["kvstride"]().__module__)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
print(SecondaryTierFactory._registry["kvstride"]().__module__)
print(needs.untested())
"""
FOUND = ["registered", "kvstride.vllm.offload.spec", "kvstride.vllm.offload.tier"]


#: One row for two ranks that hold the same bytes, and for two that do not.
ROWS = """
from kvstride.vllm.offload import KvstrideSpec
from vllm.v1.kv_offload.config import OffloadingConfig
options = {"cpu_bytes_to_use": 1e8, "root_dir": "none", "max_bytes": 1}
for replicated in (True, False):
    config = OffloadingConfig((), 1, options, "engine", None, None, None, replicated_layout=replicated)
    print(KvstrideSpec(config).config.canonical_layout)
"""


def ask(root: Path, script: str = ASK) -> tuple[int, list[str]]:
    """Exit status and lines of a script beside the packages of `root`."""
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-u", "-W", "ignore", "-c", script]  # what is printed before an error stays before it
    ran = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return ran.returncode, ran.stdout.splitlines()


SAME: list[tuple[str, str, str]] = [
    ("vllm/__init__.py", "0.32.0+cpu", "0.30.1"),
    (BASE, LOAD, LOAD + ", expedited=False"),
    (TIER, "    transfer_bytes: int | None = None\n", ""),
    (TIER, ", backpressure_detector=None", ""),
    (TIER, "    def on_schedule_end", "    def serve_external_requests(self, parent): ...\n    def on_schedule_end"),
    (REGION, "barrier=None", "barrier=None, *, num_segments=1"),
]  # fmt: skip


@pytest.mark.parametrize("edit", SAME)
def test_what_some_releases_have_and_others_have_not(tmp_path: Path, edit: tuple[str, str, str]) -> None:
    assert ask(fake_vllm.write(tmp_path, edit)) == (0, [*FOUND, "None"])


OTHER: list[tuple[tuple[str, str, str], str]] = [
    ((BASE, "    tensor_idx: int\n", ""), "base.CanonicalKVCacheRef.tensor_idx is missing"),
    ((BASE, '    STORAGE = "STORAGE"\n', ""), "base.Medium.STORAGE is missing"),
    ((BASE, "class GPULoadStoreSpec", "class DeviceLoadStoreSpec"), "base.GPULoadStoreSpec is missing"),
    ((BASE, "self.block_indices = block_indices", "pass"), "base.GPULoadStoreSpec.block_indices is missing"),
    ((BASE, "class TransferResult:\n", "class TransferResult:\n    rank: int\n"),
     "base.TransferResult: missing a required argument: 'rank'"),
    ((TIER, "    success: bool\n", "    failed: bool\n"),
     "tiering.base.JobResult: missing a required argument: 'failed'"),
    ((TIER, "def drain_jobs(self", "def drain_jobs(self, timeout"),
     "tiering.base.SecondaryTierManager.drain_jobs(timeout) is another: got an unexpected keyword argument 'timeout'"),
    ((BASE, "def submit_store(self, job_id, src_spec, dst_spec", "def submit_store(self, job"),
     "base.OffloadingWorker.submit_store(job) is another: missing a required argument: 'job_id'"),
    ((TIER, "    def on_schedule_end", "    @abstractmethod\n    def cancel(self): ...\n    def on_schedule_end"),
     "tiering.base.SecondaryTierManager.cancel is not implemented"),
    ((REGION, "kv_bytes_per_chunk, ", ""),
     "cpu.shared_offload_region.SharedOffloadRegion: got an unexpected keyword argument 'kv_bytes_per_chunk'"),
    ((REGION, "self._creator = False", "pass"), "cpu.shared_offload_region.SharedOffloadRegion._creator is missing"),
    (("tiering/spec.py", "class Tiering", "import no_such_package\nclass Tiering"),
     "tiering.spec: ModuleNotFoundError: No module named 'no_such_package'"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "said"), OTHER)
def test_what_is_missing_is_named(tmp_path: Path, edit: tuple[str, str, str], said: str) -> None:
    """One line to whoever configures offloading, nothing to others."""
    status, told = ask(fake_vllm.write(tmp_path, edit))
    assert (status, told[:2]) == (1, ["registered", "Traceback (most recent call last):"])
    assert told[-1] == f"{START}{said}{END}"


def test_much_is_missing(tmp_path: Path) -> None:
    """A spec can be named, and there is nothing of which it could be made. The first three are named."""
    files = (BASE, TIER, "tiering/spec.py", REGION, "kv_offload/config.py", "tiering/factory.py")
    status, told = ask(fake_vllm.write(tmp_path, *((file, "", "") for file in files)))
    assert (status, told[0]) == (1, "registered")
    gone = [f"{name}: ModuleNotFoundError: No module named" for name in ("base", "tiering.base", "tiering.spec")]
    assert told[-1].startswith(START + gone[0]) and all(each in told[-1] for each in gone)
    assert told[-1].endswith(f" and 2 more{END}")


def test_a_release_without_offloading_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.9.2"\n')
    status, told = ask(tmp_path)
    assert status == 1 and told[0] == "registered" and told[-1] == "ModuleNotFoundError: No module named 'vllm.v1'"


def test_an_untested_release_is_said(tmp_path: Path) -> None:
    fake_vllm.write(tmp_path, ("vllm/__init__.py", "0.32.0+cpu", "0.34.1"))
    assert ask(tmp_path) == (0, [*FOUND, "offloading was tested on vLLM 0.30, 0.31, 0.32, not on 0.34.1"])


def test_canonical_rows_only_where_all_of_them_is_written(tmp_path: Path) -> None:
    """In 0.30 one of the ranks that hold the same bytes stores, and of canonical rows it would store its share."""
    assert ask(fake_vllm.write(tmp_path / "0.31"), ROWS) == (0, ["True", "True"])
    edit = ("offloading/worker.py", " or spec.config.canonical_layout", "")
    assert ask(fake_vllm.write(tmp_path / "0.30", edit), ROWS) == (0, ["False", "True"])


@pytest.mark.parametrize("chosen", ["vllm._C_AVX2", "vllm._C"])
def test_a_backend_of_another_machine_loads_no_kernels(tmp_path: Path, chosen: str) -> None:
    """On a CPU without AVX-512 `import vllm._C`, as vLLM's module for ROCm has it, ends the process."""
    root = fake_vllm.write(tmp_path) / "vllm"
    (root / "platforms.py").write_text(
        f"class current_platform:\n    device_name = 'cpu'\n    import_kernels = lambda: __import__('{chosen}')\n"
    )
    (root / "_C.py").write_text("import os, sys\n'vllm.amd' in sys.modules and os.abort()\n")
    (root / "_C_AVX2.py").write_text("raise ImportError('no module, but its operators are there')\n")
    (root / "amd.py").write_text("try:\n    import vllm._C\nexcept ImportError:\n    pass\nclass Backend: ...\n")
    script = (
        "import sys; from kvstride.vllm import engine; print(engine.load('vllm.amd.Backend'), 'vllm._C' in sys.modules)"
    )
    assert ask(tmp_path, script) == (0, [f"<class 'vllm.amd.Backend'> {chosen == 'vllm._C'}"])
