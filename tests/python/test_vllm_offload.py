# SPDX-License-Identifier: Apache-2.0
"""Offloading on a live vLLM: what comes back is what was computed, whoever wrote it; what is damaged is computed again.

Each engine is a process of its own (some 15 s), so tests of one kind share them. Equal means tokens and logprobs, to
the last bit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offload import alike, chunk_files, compare, engines, options, run, same

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and not os.environ.get("KVSTRIDE_REQUIRE_VLLM"),
    reason="vLLM is not installed; with KVSTRIDE_REQUIRE_VLLM=1 this fails",
)

FIRST = list(range(5, 405))
SECOND = [*range(300, 700), 7, 8, 9]
BOTH: list[Any] = [{"prompt": FIRST}, {"prompt": SECOND}]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the tests of this file share."""
    return tmp_path_factory.mktemp("offload")


def leftovers(log: str) -> list[str]:
    """What the engine that printed this has in shared memory. Others on this machine may have engines, too."""
    engine = re.search(r"/dev/shm/vllm_offload_([\w-]+)\.mmap", log)
    assert engine, log[-6000:]
    return sorted(p.name for p in Path("/dev/shm").iterdir() if engine[1] in p.name)


@pytest.fixture(scope="module")
def plain(work: Path) -> list[dict[str, Any]]:
    """What an engine without a connector answers."""
    return run(work, [*BOTH, {"prompt": FIRST, "salt": "a"}])["answers"]  # type: ignore[no-any-return]


def test_cold_warm_and_after_a_restart(work: Path, plain: list[dict[str, Any]]) -> None:
    root = work / "restart"
    steps = [*BOTH, "settle", "reset", *BOTH]
    first = run(work, steps, extra=options(root))
    assert [a["cached"] for a in first["answers"]] == [0, 0, 384, 384]
    assert all(same(a, plain[i]) for i, a in enumerate(first["answers"][:2]))
    # Some machines' kernels round a short rest of a prompt otherwise than the whole.
    assert all(alike(a, plain[i], 0.01) for i, a in enumerate(first["answers"][2:]))
    assert "kvstride: " in first["log"] and "any tensor-parallel size" in first["log"]
    files = chunk_files(root)
    assert len(files) == 24

    again = run(work, BOTH, extra=options(root))
    assert [a["cached"] for a in again["answers"]] == [384, 384]
    assert all(same(a, b) for a, b in zip(again["answers"], first["answers"][2:], strict=True))
    assert again["metrics"]["vllm:kvstride_chunks{outcome=ok,verb=load}"] == 24
    assert chunk_files(root) == files
    assert leftovers(first["log"]) == leftovers(again["log"]) == []

    # What the doctor says of it without starting one.
    told = doctor(options(root), work / "llama")
    assert [told[name]["result"] for name in ("vLLM", "plug-in", "block hashes", "directory")] == ["ok"] * 4
    assert "verified" in told["speed"]["text"]
    assert told["stored"]["facts"]["of_model"] == 24 and told["backends"]["facts"]["backends"]
    assert chunk_files(root) == files


def doctor(extra: dict[str, Any], model: Path) -> dict[str, Any]:
    """Its checks by name."""
    whole = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    command = [sys.executable, "-m", "kvstride.vllm.doctor", "--json", "--config", json.dumps(whole)]
    done = subprocess.run([*command, "--model", str(model)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return {check["check"]: check for check in json.loads(done.stdout)["checks"]}


def test_damaged_files_are_computed_again(work: Path, plain: list[dict[str, Any]]) -> None:
    root = work / "damage"
    run(work, [*BOTH, "settle"], extra=options(root))
    files = chunk_files(root)
    assert len(files) == 24
    # A flipped bit, a cut file, one that is another's, one without its first page, one that is gone.
    data = files[0].read_bytes()
    files[0].write_bytes(data[:9000] + bytes([data[9000] ^ 1]) + data[9001:])
    files[1].write_bytes(data[:8192])
    files[2].write_bytes(files[3].read_bytes())
    files[4].write_bytes(bytes(4096) + files[4].read_bytes()[4096:])
    files[5].unlink()
    found = run(work, [*BOTH, "settle", "reset", *BOTH], extra=options(root))
    assert all(alike(a, plain[i % 2]) for i, a in enumerate(found["answers"]))
    assert sum(a["cached"] for a in found["answers"][:2]) < 768
    # What was computed again was stored again.
    assert [a["cached"] for a in found["answers"][2:]] == [384, 384]


def test_any_tensor_parallel_size_reads_what_another_wrote(work: Path, plain: list[dict[str, Any]]) -> None:
    root = work / "parallel"
    asked = [{"prompt": FIRST, "digest": True}, {"prompt": SECOND}]
    one = run(work, [*asked, "settle"], extra=options(root))
    alone = run(work, BOTH, tp=2)
    two = run(work, [*asked, "settle"], extra=options(root), tp=2)
    assert [a["cached"] for a in two["answers"]] == [384, 384]
    # Every byte that rank r holds is that of the heads of the one writer.
    (writer,) = one["answers"][0]["digests"]
    for rank, reader in enumerate(two["answers"][0]["digests"]):
        mine = [[heads[2 * rank : 2 * rank + 2] for heads in layer] for layer in writer]
        assert reader == mine, f"rank {rank}"
    for read, there, here in zip(two["answers"], alone["answers"], plain, strict=False):
        # Sizes of tensor parallelism differ in the last bits by themselves.
        assert alike(read, there, 2 * compare(here, there, 0)[0] + 0.01)
    files = chunk_files(root)
    assert len(files) == 24, "both wrote the same chunks"


@pytest.mark.skipif(not os.environ.get("KVSTRIDE_LONG"), reason="KVSTRIDE_LONG=1, as make test-long has it")
def test_our_attention_and_vllms_own_read_what_the_other_wrote(
    work: Path, plain: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU kernels keep heads in tiles, ours keep them as the shape says: chunks are the same."""
    root = work / "backends"
    rounding = 0.2  # of two kernels in bf16
    monkeypatch.setenv("KVSTRIDE_ATTENTION", "1")
    ours = run(work, [BOTH[0], "settle"], extra=options(root))
    assert "any tensor-parallel size" in ours["log"], "our caches are known"
    assert alike(ours["answers"][0], plain[0], rounding)
    monkeypatch.delenv("KVSTRIDE_ATTENTION")
    theirs = run(work, [*BOTH, "settle"], extra=options(root))
    assert [a["cached"] for a in theirs["answers"]] == [384, 0]
    assert all(alike(a, plain[i], rounding) for i, a in enumerate(theirs["answers"]))
    monkeypatch.setenv("KVSTRIDE_ATTENTION", "1")
    again = run(work, BOTH, extra=options(root))
    assert [a["cached"] for a in again["answers"]] == [384, 384]
    assert all(alike(a, plain[i], rounding) for i, a in enumerate(again["answers"]))


def test_killed_while_it_stores(work: Path, plain: list[dict[str, Any]]) -> None:
    root = work / "killed"
    killed = run(work, [{"prompt": FIRST}, "settle", {"prompt": SECOND}, "kill"], extra=options(root), killed=True)
    assert leftovers(killed["log"]), "a killed engine leaves its description"
    found = run(work, BOTH, extra=options(root))
    assert found["answers"][0]["cached"] == 384, "what was complete is there"
    assert all(alike(a, plain[i], 0.01) for i, a in enumerate(found["answers"]))
    assert leftovers(killed["log"]) == leftovers(found["log"]) == []


def test_more_than_both_tiers_hold(work: Path, plain: list[dict[str, Any]]) -> None:
    """Evictions in both tiers, several blocks a chunk, salts that never hit each other."""
    root = work / "small"
    prompts: list[Any] = [{"prompt": list(range(n, n + 350)), "tokens": 4} for n in range(5, 405, 50)]
    steps = [*BOTH, "settle", *prompts, "settle", "reset", *prompts, {"prompt": FIRST, "salt": "a"}, *BOTH]
    extra = options(root, cpu_bytes_to_use=8e6, max_bytes=4e6, blocks_per_chunk=2)
    found = run(work, steps, extra=extra)
    answers = found["answers"]
    assert all(same(a, plain[i]) for i, a in enumerate([*answers[:2]]))
    assert all(alike(a, b) for a, b in zip(answers[2:10], answers[10:18], strict=True))
    assert answers[18]["cached"] == 0 and same(answers[18], plain[2])
    assert all(alike(a, b) for a, b in zip(answers[19:], plain, strict=False))
    assert found["metrics"]["vllm:kvstride_directory_events{event=evictions}"] > 0
    assert sum(f.stat().st_size for f in root.rglob("*") if f.is_file() and f.name != "ledger") <= 4e6


def test_c43_what_changes_bytes_is_in_the_block_hash() -> None:
    """The tier's keys are vLLM's block hashes: prompts of the same tokens that differ in an image, its place, an
    adapter or a salt have no block in common; all in all equal, they have all."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)

    def hashes(image: str = "", at: int = 3, **more: Any) -> list[bytes]:
        images = [
            MultiModalFeatureSpec(
                data=None, modality="image", identifier=image, mm_position=PlaceholderRange(offset=at, length=40)
            )
        ]
        request = Request(
            request_id="r",
            prompt_token_ids=list(range(10, 110)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=images if image else [],
            block_hasher=get_request_block_hasher(32, sha256),
            **more,
        )
        return [bytes(h) for h in request.block_hashes]

    adapters = [LoRARequest(name, number, "somewhere") for number, name in enumerate(("a", "b"), 1)]
    kinds: list[dict[str, Any]] = [
        {},
        {"image": "12340001"},
        {"image": "abcd0001"},
        {"image": "12340001", "at": 4},
        {"cache_salt": "s"},
        {"cache_salt": "t"},
        {"image": "12340001", "cache_salt": "s"},
        {"lora_request": adapters[0]},
        {"lora_request": adapters[1]},
        {"lora_request": adapters[0], "cache_salt": "s"},
    ]
    found = [hashes(**kind) for kind in kinds]
    assert found == [hashes(**kind) for kind in kinds]
    assert len({h for one in found for h in one}) == 3 * len(kinds)


def test_what_cannot_be_is_said_at_start(work: Path) -> None:
    for extra, said in (
        ({"max_byte": 1}, "unknown option 'max_byte'; did you mean 'max_bytes'?"),
        ({"max_bytes": "lots"}, "max_bytes is 'lots', expected a whole number"),
        ({"cpu_bytes_to_use": 10}, "cpu_bytes_to_use is 10, one chunk takes"),
    ):
        job = {"model": str(work / "llama"), "kind": "llama", "steps": [], "extra": options(work / "refused", **extra)}
        status, log, _ = engines.run(work, job)
        assert status != 0 and said in log, log[-2000:]
    assert not (work / "refused").exists()


@pytest.mark.parametrize(
    ("kind", "llm"),
    [
        ("gemma3", {}),
        ("qwen3_next", {"block_size": None, "enable_prefix_caching": True, "num_gpu_blocks_override": 32}),
        pytest.param(
            "llama",
            {"kv_cache_dtype": "fp8"},
            marks=pytest.mark.skipif(
                "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM has fp8 KV on CPUs with AVX-512 only"
            ),
        ),
    ],
)
@pytest.mark.skipif(not os.environ.get("KVSTRIDE_LONG"), reason="KVSTRIDE_LONG=1, as make test-long has it")
def test_all_kinds_of_caches(work: Path, kind: str, llm: dict[str, Any]) -> None:
    """Groups that share memory, states beside attention, elements of one byte."""
    root = work / f"{kind}-{len(llm)}"
    alone = run(work, BOTH, kind=kind, llm=llm)["answers"]
    first = run(work, [*BOTH, "settle", "reset", *BOTH], kind=kind, llm=llm, extra=options(root))["answers"]
    again = run(work, BOTH, kind=kind, llm=llm, extra=options(root))["answers"]
    # Three blocks of 128 tokens, or one of 256: with states vLLM chooses by the machine.
    cached = 256 if kind == "qwen3_next" and first[2]["cached"] == 256 else 384
    assert [a["cached"] for a in [*first, *again]] == [0, 0, *[cached] * 4]
    assert all(alike(a, alone[i % 2], 0.01) for i, a in enumerate([*first, *again]))
    assert all(same(a, b) for a, b in zip(again, first[2:], strict=True))
