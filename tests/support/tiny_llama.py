"""A random Llama small enough to run anywhere, with SmolLM2's geometry: 9 query heads on 3 key/value heads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97


def tiny_config(**overrides: Any) -> LlamaConfig:
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 72,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,  # so that its answers vary
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return LlamaConfig(**(fields | overrides))


def tiny_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """On the CPU in float32, ready for inference; the same weights for the same seed."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**overrides))
    model.generation_config.pad_token_id = 0
    return model.eval()


def prompt(batch: int, length: int = 7, seed: int = 1) -> torch.Tensor:
    """Token ids without the special ones, int64, shape (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
