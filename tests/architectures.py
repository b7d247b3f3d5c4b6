"""Tiny random models of the architectures we promise to support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import otaro
from otaro.sefp import Format

VOCABULARY = 99
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config(name: str) -> PreTrainedConfig:
    kinds: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
        "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
        "qwen2": (transformers.Qwen2Config, {}),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 12}),
        "mistral": (transformers.MistralConfig, {"head_dim": 12}),
        "gemma": (transformers.GemmaConfig, {"head_dim": 12}),
        "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 12}),
        "mixtral": (transformers.MixtralConfig, {"head_dim": 12, "num_local_experts": 4}),
        "qwen3-moe": (
            transformers.Qwen3MoeConfig,
            {"head_dim": 12, "num_experts": 4, "moe_intermediate_size": 40, "num_experts_per_tok": 2},
        ),
        "gpt-oss": (
            transformers.GptOssConfig,
            {"head_dim": 12, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ),
    }
    if name == "gpt2":
        ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        sizes = {"n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
        return transformers.GPT2Config(**sizes, **ids)
    kind, options = kinds[name]
    return kind(**{**SMALL, **options})


NAMES = (
    *("llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "mixtral", "qwen3-moe", "gpt-oss", "gpt2"),
)


def random_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose every parameter is drawn at random, norms and biases too, so that none can be lost unnoticed."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def some_ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))


def packed_model(config: PreTrainedConfig, folder: Path, format: Format = Format()) -> Path:
    """A random model in a packed folder, its norms and biases not what they begin with."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "model")
    otaro.pack(folder / "model", folder / "packed", format=format)
    return folder / "packed"
