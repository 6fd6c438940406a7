# SPDX-License-Identifier: Apache-2.0
"""Offloading under all that a vLLM does while it serves; minutes long, so with KVSTRIDE_LONG=1 only (make test-long).

test_vllm_offload.py has the first questions; here are many prompts at once, chunked prefill, preemption, adapters,
engines that share a directory, disks that are full, KV events, the HTTP server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvstride as kv
from offload import alike, chunk_files, compare, engines, options, run, same

pytestmark = [
    pytest.mark.skipif(not os.environ.get("KVSTRIDE_LONG"), reason="KVSTRIDE_LONG=1, as make test-long has it"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None and not os.environ.get("KVSTRIDE_REQUIRE_VLLM"),
        reason="vLLM is not installed; with KVSTRIDE_REQUIRE_VLLM=1 this fails",
    ),
]

BLOCK = 32
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "vllm"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the tests of this file share."""
    return tmp_path_factory.mktemp("serving")


def whole(prompt: list[int]) -> int:
    """Tokens that a store can have of a prompt: whole blocks, and one token at least is computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def fleet(number: int) -> list[list[int]]:
    """Prompts that begin as others do, in random order."""
    rng = random.Random(number)

    def words(count: int) -> list[int]:
        return [rng.randrange(10, 1000) for _ in range(count)]

    systems = [words(rng.randrange(40, 300)) for _ in range(8)]
    talks = [rng.choice(systems) + words(rng.randrange(20, 150)) for _ in range(number // 4)]
    prompts = [
        rng.choice([*systems, *talks])[: rng.randrange(33, 500)] + words(rng.randrange(1, 90)) for _ in talks * 3
    ]
    out = [*talks, *prompts][:number]
    rng.shuffle(out)
    return out


PROMPTS = fleet(200)
AT_ONCE = 8


def together(prompts: list[list[int]], tokens: int = 4) -> list[Any]:
    """Steps that serve AT_ONCE prompts at a time."""
    asked = [{"prompt": p, "tokens": tokens} for p in prompts]
    return [{"together": asked[i : i + AT_ONCE]} for i in range(0, len(asked), AT_ONCE)]


@pytest.fixture(scope="module")
def alone(work: Path) -> list[dict[str, Any]]:
    """What an engine without a connector answers to PROMPTS, one after the other."""
    return run(work, [{"prompt": p, "tokens": 4} for p in PROMPTS])["answers"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "llm", "extra"),
    [
        ("chunked prefill", {"max_num_batched_tokens": 96, "max_num_seqs": AT_ONCE}, {}),
        ("no prefix caching", {"enable_prefix_caching": False}, {}),
        ("small tiers", {}, {"cpu_bytes_to_use": 6e6, "max_bytes": 16e6}),
        ("all blocks", {"max_num_batched_tokens": 192}, {"offload_prompt_only": False, "blocks_per_chunk": 3}),
    ],
)
def test_two_hundred_prompts(
    work: Path, alone: list[dict[str, Any]], name: str, llm: dict[str, Any], extra: dict[str, Any]
) -> None:
    root = work / name.replace(" ", "-")
    order = list(range(len(PROMPTS)))
    random.Random(name).shuffle(order)
    for start, steps in enumerate((list(range(len(PROMPTS))), order)):
        found = run(work, [*together([PROMPTS[i] for i in steps]), "settle"], llm=llm, extra=options(root, **extra))
        for i, answer in zip(steps, found["answers"], strict=True):
            assert alike(answer, alone[i], 0.1), f"prompt {i} of engine {start}"
        if start and "max_bytes" not in extra and "blocks_per_chunk" not in extra:
            # Each block of each prompt is there: the engine before has computed all of them. Where a prompt ends with a
            # block vLLM counts the last one as cached or not, by where it comes from; it computes a token of it anyway.
            for i, answer in zip(steps, found["answers"], strict=True):
                assert answer["cached"] in (whole(PROMPTS[i]), len(PROMPTS[i]) // BLOCK * BLOCK), f"prompt {i}"
        assert start or found["metrics"]["vllm:kvstride_chunks{outcome=ok,verb=store}"] > 0
        assert not [n for n in found["metrics"] if "outcome=corrupt" in n]


def test_preemption(work: Path) -> None:
    """Fewer blocks than the prompts need at once: requests lose theirs, and begin again."""
    asked = [{"prompt": p[:200], "tokens": 150} for p in PROMPTS[:6]]
    llm = {"num_gpu_blocks_override": 40, "max_num_seqs": 6}
    # Served as they are here, without a connector: alone each would be rounded otherwise over 150 tokens.
    plain = run(work, [{"together": asked}], llm=llm)["answers"]
    for _ in range(2):
        found = run(work, [{"together": asked}, "settle"], llm=llm, extra=options(work / "preempted"))
        assert found["metrics"]["vllm:num_preemptions{}"] > 0
        assert all(alike(a, b, 0.1) for a, b in zip(found["answers"], plain, strict=True))
    assert sum(a["cached"] for a in found["answers"]) >= sum(min(whole(p[:200]), 160) for p in PROMPTS[:6])


def test_tensor_parallel_one_two_one(work: Path) -> None:
    root = work / "one-two-one"
    first, second = list(range(5, 405)), list(range(500, 850))
    plain = run(work, [{"prompt": first}, {"prompt": second}])["answers"]
    run(work, [{"prompt": first}, "settle"], extra=options(root))
    asked = [{"prompt": first, "digest": True}, {"prompt": second, "digest": True}]
    two = run(work, [*asked, "settle"], extra=options(root), tp=2)["answers"]
    assert [a["cached"] for a in two] == [whole(first), 0]
    one = run(work, asked, extra=options(root))["answers"]
    assert [a["cached"] for a in one] == [whole(first), whole(second)]
    for read, written in zip(one, two, strict=True):
        (mine,) = read["digests"]
        halves = written["digests"]
        assert mine == [[a + b for a, b in zip(*layer, strict=True)] for layer in zip(*halves, strict=True)]
    # What two ranks have computed rounds otherwise than what one has.
    assert all(alike(a, b, 0.1) for a, b in zip(one, plain, strict=True))


def test_two_engines_at_once(work: Path, alone: list[dict[str, Any]]) -> None:
    root = work / "shared"
    run(work, [], extra=options(work / "warm-up"))  # the model is there
    orders = [list(range(100)), list(range(99, -1, -1))]
    places = [work / "left", work / "right"]

    def serve(place: Path, order: list[int]) -> dict[str, Any]:
        place.mkdir()
        steps = [*together([PROMPTS[i] for i in order]), "settle"]
        job = {"model": str(work / "llama"), "kind": "llama", "steps": steps}
        status, log, told = engines.run(place, {**job, "extra": options(root, max_bytes=12e6)})
        assert status == 0 and told is not None, log[-6000:]
        return told

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(serve, places, orders))
    for order, found in zip(orders, both, strict=True):
        assert all(alike(a, alone[i], 0.1) for i, a in zip(order, found["answers"], strict=True))
        assert "vllm:kvstride_chunks{outcome=corrupt,verb=load}" not in found["metrics"]
    assert sum(f.stat().st_size for f in root.rglob("*") if f.is_file() and f.name != "ledger") <= 12e6


def write_adapter(directory: Path, seed: int) -> str:
    """A LoRA adapter of the small Llama, strong enough to change tokens."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for name, size in (("q_proj", 512), ("v_proj", 256)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, 256, generator=rng) * 0.3
            weights[f"{at}.lora_B.weight"] = torch.randn(size, 8, generator=rng) * 0.3
    save_file({name: w.to(torch.bfloat16) for name, w in weights.items()}, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def test_adapters_and_salts_never_hit_each_other(work: Path) -> None:
    root = work / "adapters"
    one, other = (write_adapter(work / f"adapter-{seed}", seed) for seed in (1, 2))
    prompt = list(range(5, 405))
    kinds: list[dict[str, Any]] = [
        {},
        {"adapter": one},
        {"adapter": other},
        {"salt": "s"},
        {"adapter": one, "salt": "s"},
    ]
    asked = [{"prompt": prompt, **kind} for kind in kinds]
    llm = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    plain = run(work, asked, llm=llm)["answers"]
    assert len({tuple(a["tokens"]) for a in plain}) == 3, "adapters change what is said"
    extra = options(root, lora_names_are_fixed=True)
    cold = run(work, [*asked, "settle"], llm=llm, extra=extra)["answers"]
    assert [a["cached"] for a in cold] == [0] * 5
    warm = run(work, asked, llm=llm, extra=extra)["answers"]
    assert [a["cached"] for a in warm] == [whole(prompt)] * 5
    assert all(same(a, b) for a, b in zip(cold, plain, strict=True))
    assert all(alike(a, b, 0.01) for a, b in zip(warm, plain, strict=True))
    assert len(chunk_files(root)) == 5 * whole(prompt) // BLOCK


def test_c81_sliding_windows_hit_at_every_length(work: Path) -> None:
    """A window of 64 tokens, blocks of 32: what the writer keeps is enough for the reader, at any length."""
    root = work / "windows"
    asked = [{"prompt": list(range(n, 2 * n))} for n in (33, 64, 65, 96, 97, 129, 160, 193, 255, 300, 333, 420)]
    plain = run(work, asked, kind="gemma3")["answers"]
    run(work, [*asked, "settle"], kind="gemma3", extra=options(root))
    found = run(work, asked, kind="gemma3", extra=options(root))["answers"]
    assert [a["cached"] for a in found] == [whole(step["prompt"]) for step in asked]
    assert all(alike(a, b, 0.1) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("how", ["zero", "halves", "heads", "flip"])
def test_wrong_bytes_would_be_seen(work: Path, how: str) -> None:
    """Controls: what the other tests compare does change when bytes are wrong."""
    root = work / "control"
    prompt = {"prompt": list(range(5, 405))}
    if not root.exists():
        run(work, [prompt, "settle"], extra=options(root))
    right, wrong = (
        run(work, [*first, prompt], extra=options(root))["answers"][0]
        for first in ([], [{"spoil": {"how": how, "layers": 2, "heads": 4}}])
    )
    assert right["cached"] == wrong["cached"] == 384
    assert not same(right, wrong)
    if how != "flip":
        assert not alike(right, wrong, 0.1)


@pytest.fixture
def small_disk(work: Path) -> Any:
    """A file system of 8 MiB."""
    place = work / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_a_pause(work: Path, small_disk: Path) -> None:
    """Offloading stops, is counted, and goes on when there is room."""
    asked = [{"prompt": list(range(n, n + 350))} for n in (5, 205, 405, 605)]
    plain = run(work, asked)["answers"]
    extra = options(small_disk / "cache", max_bytes=1e9, keep_free=65536)
    kv.DirectoryTier(extra["root_dir"], 10**9, keep_free=65536).close()  # a store that is there
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    steps = [*asked, "settle", {"remove": str(filler)}, "reset", *asked, "settle"]
    found = run(work, steps, extra=extra)
    assert all(alike(a, plain[i % 4], 0.01) for i, a in enumerate(found["answers"]))
    assert found["metrics"]["vllm:kvstride_chunks{outcome=refused,verb=store}"] == 40
    assert found["metrics"].get("vllm:kvstride_chunks{outcome=ok,verb=store}", 0) == 0, found["metrics"]
    # vLLM hands a chunk over once, when it is computed: what was refused comes again with the next engine.
    cold = run(work, [*asked, "settle"], extra=extra)
    assert cold["metrics"]["vllm:kvstride_chunks{outcome=ok,verb=store}"] == 40
    warm = run(work, asked, extra=extra)
    assert [a["cached"] for a in warm["answers"]] == [320] * 4
    assert all(alike(a, b, 0.01) for a, b in zip(warm["answers"], plain, strict=True))


def test_kv_events(work: Path) -> None:
    """Routers are told what is stored in the directory, and what has gone from it."""
    asked = [{"prompt": list(range(n, n + 350))} for n in range(5, 405, 50)]
    extra = options(work / "events", max_bytes=3e6, enable_kv_events=True)
    found = run(work, [*asked, "settle"], extra=extra, events=True)
    kinds = {(e["kind"], e["medium"]) for e in found["events"]}
    assert {("BlockStored", "STORAGE"), ("BlockRemoved", "STORAGE")} <= kinds
    stored = found["metrics"]["vllm:kvstride_chunks{outcome=ok,verb=store}"]
    told = sum(e["blocks"] for e in found["events"] if (e["kind"], e["medium"]) == ("BlockStored", "STORAGE"))
    assert told == stored


def test_the_tier_alone(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below vLLM's own spec no worker of ours describes the rows: all is raw, and `revision` says whose."""
    monkeypatch.setenv("PYTHONPATH", engines.python_path(Path(__file__).parent))  # host_spec.py
    tier = {"type": "kvstride", "root_dir": str(work / "alone"), "max_bytes": 5e8, "revision": "seed 20"}
    extra = {
        "spec_name": "HostSpec",
        "spec_module_path": "host_spec",
        "cpu_bytes_to_use": 1e8,
        "secondary_tiers": [tier],
    }
    asked = [{"prompt": list(range(5, 405))}]
    plain = run(work, asked)["answers"]
    cold = run(work, [*asked, "settle"], extra=extra)
    warm = run(work, asked, extra=extra)
    assert [cold["answers"][0]["cached"], warm["answers"][0]["cached"]] == [0, 384]
    assert "raw: undescribed" in warm["log"]
    assert alike(warm["answers"][0], plain[0], 0.01)
    other = run(work, asked, extra={**extra, "secondary_tiers": [{**tier, "revision": "seed 21"}]})
    assert other["answers"][0]["cached"] == 0
    two = run(work, asked, extra=extra, tp=2)
    assert two["answers"][0]["cached"] == 0, "raw rows are for the same number of ranks"


@pytest.mark.parametrize(
    ("kind", "llm", "said"),
    [
        ("deepseek", {"block_size": None}, "kvstride: MLA on vLLM's CPU backend gives other tokens with any connector"),
        (
            "llama",
            {"prefix_caching_hash_algo": "xxhash"},
            "prefix_caching_hash_algo is xxhash, whose hashes may collide",
        ),
        ("llama", {"enable_lora": True}, "LoRA is on, and vLLM's block hash knows an adapter by its name only"),
    ],
)
def test_refused_by_name(work: Path, kind: str, llm: dict[str, Any], said: str) -> None:
    """What vLLM would start, and what would then be wrong."""
    job = {"model": str(work / kind), "kind": kind, "llm": llm, "steps": [], "extra": options(work / "refused")}
    status, log, _ = engines.run(work, job)
    assert status != 0 and said in log, log[-3000:]


def test_the_http_server(work: Path) -> None:
    """examples/vllm/serve.py: `vllm serve`, killed and started again."""
    done = subprocess.run([sys.executable, str(EXAMPLES / "serve.py")], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "all as it must be" in done.stdout, done.stdout + done.stderr
    assert "vllm:kvstride_chunks_total{" in done.stdout


def test_compare_sees_another_choice() -> None:
    """`alike` itself."""
    a = {"tokens": [5, 6], "logprobs": [{"5": -0.1, "6": -3.0}, {"6": -0.2}]}
    b = {"tokens": [6, 6], "logprobs": [{"5": -0.1, "6": -3.0}, {"6": -0.2}]}
    assert alike(a, a) and not alike(a, b) and compare(a, b, 5.0) == (0.0, True)
