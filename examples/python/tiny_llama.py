# SPDX-License-Identifier: Apache-2.0
"""A small Llama with seeded random weights, written as a directory that vLLM and transformers can load."""

from __future__ import annotations

from pathlib import Path


def write_tiny_llama(directory: str | Path, *, seed: int = 20) -> Path:
    """Write config.json and model.safetensors of a seeded Llama and return the directory.

    6 layers, 8 query heads over 4 KV heads of 128, bf16. The weights are drawn wide
    (initializer_range 0.2): with small or dummy weights greedy decoding falls into a loop of
    a few tokens, which hides a damaged KV cache.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype=torch.bfloat16,
    )
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    path = Path(directory)
    model.save_pretrained(path)
    return path
