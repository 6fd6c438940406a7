# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own: makes a model, serves prompts, tells what it did.

    python offload_engine.py JOB.json ANSWER.json

JOB: `model` (a directory, see write_model), `tp`, `llm` (arguments of LLM), `extra` (kv_connector_extra_config, absent:
no connector), `connector`, `module` (that brings it, if vLLM does not), `events` (tell KV events), `steps`.
A step is one of {"prompt": [ids], "tokens": n, "salt": text, "adapter": directory, "digest": bool}; {"together": [such
prompts]}, served at once; {"remove": file}; {"signal": [process], "after": seconds}, which is killed then, or at once
(below 0: its group); {"spoil": {"how": …, "layers": …, "heads": …}}, see spoil; "reset"; "settle"; "kill".
ANSWER: what each prompt gave, in the order asked, the metrics at the end, and the events.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import live_engine

#: Class of the configuration and sizes: 'llama' is small, with 4 KV heads.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.2},
    ),
    "llama-92m": (
        "LlamaConfig",
        {
            "hidden_size": 896,
            "intermediate_size": 2560,
            "num_hidden_layers": 8,
            "num_attention_heads": 14,
            "initializer_range": 0.03,
            "max_position_embeddings": 2048,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 64,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "query_pre_attn_scalar": 64,
        },
    ),
    "deepseek": (
        "DeepseekV2Config",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
}


def write_model(kind: str, directory: Path) -> Path:
    """A seeded model, one of MODELS."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(20)
    common = {
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": torch.bfloat16,
        "head_dim": 64,
    }
    config, sizes = MODELS[kind]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**(common | sizes)))
    model.to(torch.bfloat16).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Words w0 to w999, one token each."""
    import tokenizers
    import transformers

    words = {f"w{i}": i for i in range(1000)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="w0", bos_token="w1", eos_token="w2", clean_up_tokenization_spaces=False
    )
    whole.save_pretrained(directory)


def digests(worker: Any, blocks: list[int]) -> list[list[list[str]]]:
    """By layer, block and head of this worker: a digest of the bytes that the engine holds."""
    import torch

    out = []
    for tensor in worker.model_runner.kv_caches:
        pages = []
        for block in blocks:
            heads = tensor[block].contiguous().view(torch.uint8).numpy()
            pages.append([hashlib.sha256(heads[h].tobytes()).hexdigest()[:16] for h in range(heads.shape[0])])
        out.append(pages)
    return out


def describe_event(event: Any) -> dict[str, Any]:
    """A KV event as JSON: its kind, its medium, and how many blocks it is about."""
    hashes = getattr(event, "block_hashes", [])
    return {"kind": type(event).__name__, "medium": getattr(event, "medium", None), "blocks": len(hashes)}


def spoil(how: str, layers: int, heads: int) -> None:
    """From now on the worker of this process changes rows before it loads them: controls that a comparison must see.

    'zero' clears them, 'halves' exchanges K and V, 'heads' exchanges heads, 'flip' changes one bit.
    """
    from kvstride.vllm.offload.worker import HostWorker

    load = HostWorker.submit_load

    def spoiled(self: HostWorker, job_id: int, src_spec: Any, dst_spec: Any, **more: Any) -> bool:
        for row in src_spec.block_ids:
            at = int(row) * self._row_bytes
            parts = self._rows[at : at + self._row_bytes].reshape(layers, heads, 2, -1)
            if how == "zero":
                parts[:] = 0
            elif how == "halves":
                parts[:] = parts.flip(2)
            elif how == "heads":
                parts[:] = parts.flip(1)
            elif how == "flip":
                parts[0, 0, 0, 101] ^= 0x40
            else:
                raise ValueError(how)
        return bool(load(self, job_id, src_spec, dst_spec, **more))

    HostWorker.submit_load = spoiled  # type: ignore[method-assign]


class Engine:
    """An LLM in this process (its workers may be others)."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        more = dict(job.get("llm", {}))
        if "extra" in job:
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector=job.get("connector", "OffloadingConnector"),
                kv_connector_module_path=job.get("module"),
                kv_role="kv_both",
                kv_connector_extra_config=job["extra"],
            )
        if job.get("events"):
            more["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        arguments = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": 768,
            "block_size": 32,
            "num_gpu_blocks_override": 160,
            "tensor_parallel_size": job.get("tp", 1),
            "disable_log_stats": False,
            "use_tqdm_on_load": False,
        }
        self.llm = LLM(model=job["model"], **(arguments | more))
        self.answers: list[dict[str, Any]] = []
        self.events: list[Any] = []
        self._count = 0
        self._adapters: dict[str, int] = {}
        if job.get("events"):
            publisher = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher
            publisher.publish = lambda batch: self.events.extend(describe_event(e) for e in batch.events)

    def serve(self, asked: list[dict[str, Any]]) -> None:
        """Serve prompts greedily, all at once."""
        engine = self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        begin = time.perf_counter()
        names = [self._add(step) for step in asked]
        first: dict[str, float] = {}
        done: dict[str, Any] = {}
        blocks: dict[str, tuple[list[int], ...]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter() - begin)
                if output.finished:
                    done[output.request_id] = output
            for request in scheduler.requests:
                # vLLM adds some letters of its own.
                blocks[request.rsplit("-", 1)[0]] = scheduler.kv_cache_manager.get_block_ids(request)
        for name, step in zip(names, asked, strict=True):
            output = done[name].outputs[0]
            answer = {
                "tokens": list(output.token_ids),
                "logprobs": [{str(t): p.logprob for t, p in sorted(at.items())} for at in output.logprobs],
                "cached": done[name].num_cached_tokens,
                "seconds": first[name],
            }
            if step.get("digest"):
                whole = len(step["prompt"]) // 32
                answer["digests"] = self.llm.collective_rpc(digests, args=(list(blocks[name][0][:whole]),))
            self.answers.append(answer)

    def _add(self, step: dict[str, Any]) -> str:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=step.get("tokens", 8), detokenize=False, ignore_eos=True, logprobs=3
        )
        self._count += 1
        name = f"request.{self._count}"
        given: dict[str, Any] = {"prompt_token_ids": step["prompt"]}
        if "salt" in step:
            given["cache_salt"] = step["salt"]
        more = {}
        if "adapter" in step:
            from vllm.lora.request import LoRARequest

            adapter = step["adapter"]
            number = self._adapters.setdefault(adapter, len(self._adapters) + 1)
            more["lora_request"] = LoRARequest(Path(adapter).name, number, adapter)
        self.llm.llm_engine.add_request(name, given, params, **more)
        return name

    def settle(self) -> None:
        """Until everything that shall be offloaded is: stores of a step begin with the next one."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True)
        for _ in range(4):
            self.llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
            time.sleep(0.1)
        if "kvstride" in sys.modules:  # what goes to a remote engine does so behind vLLM's back
            store = sys.modules["kvstride"].Store
            for one in [one for one in gc.get_objects() if type(one) is store]:
                one.flush()

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of vLLM by name and labels, and what kvstride counts in this process."""
        from prometheus_client import REGISTRY

        out = {}
        for family in REGISTRY.collect():
            for sample in family.samples if family.name.startswith("kvstride_") else ():
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                out[f"{sample.name}{{{labels}}}"] = sample.value
        for metric in self.llm.get_metrics():
            labels = ",".join(f"{k}={v}" for k, v in sorted(metric.labels.items()) if k not in ("model_name", "engine"))
            if hasattr(metric, "value"):
                out[f"{metric.name}{{{labels}}}"] = metric.value
        return out


def main() -> None:
    """Do the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    live_engine.prepare_process()
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    if not Path(job["model"]).is_dir():
        write_model(job["kind"], Path(job["model"]))
    engine = Engine(job)
    for step in job["steps"]:
        if step == "reset":
            engine.llm.reset_prefix_cache()
        elif step == "settle":
            engine.settle()
        elif step == "kill":
            tell(engine)
            os.kill(os.getpid(), signal.SIGKILL)
        elif "spoil" in step:
            spoil(**step["spoil"])
        elif "signal" in step:
            kill(step["signal"], step.get("after", 0.0))
        elif "remove" in step:
            Path(step["remove"]).unlink()
        else:
            engine.serve(step.get("together", [step]))
    tell(engine)


def kill(processes: list[int], seconds: float) -> None:
    """At once, or while this process goes on."""

    def now() -> None:
        for process in processes:
            os.kill(process, signal.SIGKILL)

    threading.Timer(seconds, now).start() if seconds else now()


def tell(engine: Engine) -> None:
    """Write the answer."""
    told = {"answers": engine.answers, "metrics": engine.metrics(), "events": engine.events}
    Path(sys.argv[2]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
