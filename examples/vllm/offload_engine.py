# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own: makes a model, serves prompts, tells what it did.

    python offload_engine.py JOB.json ANSWER.json

JOB: `model` (a directory, see write_model), `tp`, `llm` (arguments of LLM), `extra` (kv_connector_extra_config, absent:
no connector), `connector`, `steps`. A step is {"prompt": [ids], "tokens": n, "salt": text, "digest": bool}, "reset",
"settle" or "kill". ANSWER: what each prompt gave, and the metrics at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
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
    return directory


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


class Engine:
    """An LLM in this process (its workers may be others)."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        more = dict(job.get("llm", {}))
        if "extra" in job:
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector=job.get("connector", "OffloadingConnector"),
                kv_role="kv_both",
                kv_connector_extra_config=job["extra"],
            )
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
        self._count = 0

    def prompt(self, step: dict[str, Any]) -> None:
        """Serve a prompt greedily."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=step.get("tokens", 8), detokenize=False, ignore_eos=True, logprobs=3
        )
        self._count += 1
        given: dict[str, Any] = {"prompt_token_ids": step["prompt"]}
        if "salt" in step:
            given["cache_salt"] = step["salt"]
        engine = self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        begin = time.perf_counter()
        engine.add_request(f"request-{self._count}", given, params)
        first = None
        blocks: tuple[list[int], ...] = ()
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs and first is None and outputs[0].outputs[0].token_ids:
                first = time.perf_counter() - begin
            for request in scheduler.requests:
                blocks = scheduler.kv_cache_manager.get_block_ids(request)
        (output,) = outputs
        done = output.outputs[0]
        answer = {
            "tokens": list(done.token_ids),
            "logprobs": [{str(t): p.logprob for t, p in sorted(at.items())} for at in done.logprobs],
            "cached": output.num_cached_tokens,
            "seconds": first,
        }
        if step.get("digest"):
            whole = len(step["prompt"]) // 32
            answer["digests"] = self.llm.collective_rpc(digests, args=(list(blocks[0][:whole]),))
        self.answers.append(answer)

    def settle(self) -> None:
        """Until everything that shall be offloaded is: stores of a step begin with the next one."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True)
        for _ in range(4):
            self.llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
            time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of vLLM by name and labels."""
        out = {}
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
        else:
            engine.prompt(step)
    tell(engine)


def tell(engine: Engine) -> None:
    """Write the answer."""
    Path(sys.argv[2]).write_text(json.dumps({"answers": engine.answers, "metrics": engine.metrics()}))


if __name__ == "__main__":
    main()
