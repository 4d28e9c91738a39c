"""Random Hugging Face models of each family, small enough to run anywhere: heads that two ranks share, two layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCABULARY = 61

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # so that its answers vary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Family:
    """A model class of transformers with a tiny configuration; ``inputs`` says what it is called with."""

    model: str
    config: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=lambda: _DECODER)
    inputs: str = "tokens"

    def build(self, seed: int = 0, **overrides: Any) -> Any:
        """On the CPU in float32, in eval mode; the same weights for the same seed."""
        fields = {**self.base, **self.fields, **overrides}
        config = getattr(transformers, self.config)(**fields)
        torch.manual_seed(seed)
        model = getattr(transformers, self.model)(config)
        for parameter in model.parameters():  # biases and norms too: what is zero or one hides faults
            if parameter.ndim == 1 and not parameter.is_meta:
                torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
        return model.eval()

    def batch(self, rows: int = 4, length: int = 6, seed: int = 1) -> dict[str, torch.Tensor]:
        """Arguments of a call."""
        generator = torch.Generator().manual_seed(seed)
        if self.inputs == "pixels":
            return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator)}
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        if self.inputs == "pairs":
            return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :4].contiguous()}
        return {"input_ids": ids}

    def labelled(self) -> dict[str, torch.Tensor]:
        """Arguments of a call that returns a loss."""
        batch = self.batch()
        if self.inputs == "pixels":
            return {**batch, "labels": torch.arange(4)}
        if self.inputs == "pairs":
            return {"input_ids": batch["input_ids"], "labels": batch["decoder_input_ids"]}
        return {**batch, "labels": batch["input_ids"]}


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {"sliding_window": 5}),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", {"head_dim": 8}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    ),
    "phi": Family("PhiForCausalLM", "PhiConfig", {"num_key_value_heads": 4}),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config"),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        base={
            key: _DECODER[key] for key in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")
        },
    ),
    "bert": Family(
        "BertForMaskedLM",
        "BertConfig",
        {"vocab_size": VOCABULARY, "max_position_embeddings": 64},
        base=_ENCODER,
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
        },
        base={},
        inputs="pairs",
    ),
    "t5 gated": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
        },
        base={},
        inputs="pairs",
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {"image_size": 8, "patch_size": 4, "num_labels": 5},
        base=_ENCODER,
        inputs="pixels",
    ),
    "mixtral": Family(
        "MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "qwen2 moe": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "qwen3 moe": Family(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4, "head_dim": 8}
    ),
    "deepseek v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 18,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
