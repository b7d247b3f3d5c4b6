"""A packed model of the shape of Llama-3.2-1B with random weights: large enough that reading it takes the time.

python bench/random_model.py random-1b
otaro bench random-1b/packed --threads 2 --against llama.cpp --new-tokens 24 --no-speculation \
    --json bench/bench_engine_1b.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import otaro

CONFIG = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, and "th": llama.cpp loads no byte-level tokenizer without a merge."""
    letters = {letter: number for number, letter in enumerate([*sorted(ByteLevel.alphabet()), "th"])}
    tokenizer = Tokenizer(BPE(letters, [("t", "h")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|end|>")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    otaro.pack(folder / "model", folder / "packed")


if __name__ == "__main__":
    main()
