# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.32 in this process on the CPU: one small engine, its KV tensors, and which blocks a request used."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# One OpenMP thread that sleeps while it waits: spinning threads make a small machine 10 times slower.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def prepare_process() -> None:
    """Set what vLLM reads from the environment; before the first import of torch or vLLM."""
    os.environ.update(ENVIRONMENT)
    for name in ("torchvision", "torchaudio", "torchcodec"):
        # PyPI builds them for CUDA: beside a CPU torch their import fails, and vLLM's with it.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Answer:
    """What one request gave: everything that has to be equal when its KV cache was restored right."""

    tokens: list[int]
    logprobs: list[dict[int, float]]  # per token, of the most likely ones
    num_cached_tokens: int
    blocks: list[int]  # block ids that the scheduler gave the request, in token order

    def same_as(self, other: Answer) -> bool:
        """Tokens and logprobs equal, to the last bit."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs


@dataclass
class Write:
    """Key and value, [token, head, dim], that the engine gave its own write op, and their slots."""

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor


@dataclass
class LiveEngine:
    """A vLLM engine in this process. Not thread-safe; the request is always the same prompt."""

    model: Path
    prompt: list[int]
    max_tokens: int = 16
    block_size: int = 32
    num_blocks: int = 64
    llm: Any = field(init=False)
    _num_requests: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(self.model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=512,
            block_size=self.block_size,
            num_gpu_blocks_override=self.num_blocks,
            enable_prefix_caching=True,
            use_tqdm_on_load=False,
        )

    @property
    def kv_tensors(self) -> list[torch.Tensor]:
        """The KV tensors that the engine registered, one a layer: its own memory, not copies."""
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        return list(worker.model_runner.kv_caches)

    def poison(self) -> None:
        """Overwrite every byte of the engine's KV memory with 0xA5."""
        import torch

        for tensor in self.kv_tensors:
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xA5)

    def generate(self) -> Answer:
        """Run the prompt to the end, greedily, and return the answer and the request's block ids."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        params = SamplingParams(
            temperature=0, max_tokens=self.max_tokens, detokenize=False, ignore_eos=True, logprobs=5
        )
        self._num_requests += 1
        engine.add_request(f"request-{self._num_requests}", {"prompt_token_ids": self.prompt}, params)
        blocks: list[int] = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            for request in scheduler.requests:  # gone after the last step: its blocks are freed, but stay cached
                (blocks,) = scheduler.kv_cache_manager.get_block_ids(request)
        (output,) = outputs
        completion = output.outputs[0]
        return Answer(
            tokens=list(completion.token_ids),
            logprobs=[{token: p.logprob for token, p in step.items()} for step in completion.logprobs],
            num_cached_tokens=output.num_cached_tokens,
            blocks=list(blocks),
        )

    def generate_recorded(self) -> tuple[Answer, list[list[Write]]]:
        """As `generate`, and per layer what the engine gave its KV write op: the truth about its cache."""
        from vllm import _custom_ops as ops

        layer_of = {tensor.data_ptr(): layer for layer, tensor in enumerate(self.kv_tensors)}
        writes: list[list[Write]] = [[] for _ in layer_of]
        write_op = ops.cpu_attn_reshape_and_cache

        def record(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *args: Any, **kw: Any) -> None:
            writes[layer_of[key_cache.data_ptr()]].append(Write(key.clone(), value.clone(), slots.clone()))
            write_op(key, value, key_cache, value_cache, slots, *args, **kw)

        ops.cpu_attn_reshape_and_cache = record
        try:
            return self.generate(), writes
        finally:
            ops.cpu_attn_reshape_and_cache = write_op
