"""The model and the texts of `experiments.stories.run`.

    python -m experiments.stories.prepare --checkpoint stories260K.bin --tokenizer tok512.model \
        --alpaca alpaca_data.json --out DIR

The checkpoint is one of llama2.c's (version 0: seven integers, then float32 tensors); its weights were never quantised.
The last 131,072 tokens of the text are for testing, as many before them for choosing the learning rate.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

HEADER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def convert(checkpoint: Path) -> torch.nn.Module:
    """A llama2.c checkpoint as a Hugging Face model."""
    data = checkpoint.read_bytes()
    *sizes, vocabulary, longest = struct.unpack("7i", data[:28])
    options = dict(zip(HEADER, sizes, strict=True))
    if vocabulary <= 0:
        raise SystemExit(f"{checkpoint} has a head of its own, which is not supported")
    config = LlamaConfig(
        **options, vocab_size=vocabulary, max_position_embeddings=longest, rms_norm_eps=1e-5, tie_word_embeddings=True
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    width, inner, layers, heads, shared = sizes
    narrow = width // heads * shared
    values = torch.from_numpy(np.frombuffer(data, np.float32, offset=28).copy())
    shapes = {
        "model.embed_tokens.weight": (vocabulary, width),
        "input_layernorm": (layers, width),
        "self_attn.q_proj": (layers, width, width),
        "self_attn.k_proj": (layers, narrow, width),
        "self_attn.v_proj": (layers, narrow, width),
        "self_attn.o_proj": (layers, width, width),
        "post_attention_layernorm": (layers, width),
        "mlp.gate_proj": (layers, inner, width),
        "mlp.down_proj": (layers, width, inner),
        "mlp.up_proj": (layers, inner, width),
        "model.norm.weight": (width,),
    }
    state, start = {}, 0
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        tensor = values[start : start + count].view(shape)
        start += count
        if name.startswith("model."):
            state[name] = tensor
            continue
        for number, weight in enumerate(tensor):
            if name.endswith(("q_proj", "k_proj")):
                # llama2.c rotates neighbours, transformers the two halves of a head.
                pairs = weight.view(-1, width // heads // 2, 2, width)
                weight = pairs.transpose(1, 2).reshape(weight.shape)
            state[f"model.layers.{number}.{name}.weight"] = weight
    found = model.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"], []), found
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="a sentencepiece model (needs pip install sentencepiece)")
    parser.add_argument("--alpaca", type=Path, required=True, help="alpaca_data.json, whose answers are the text")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    arguments = parser.parse_args()
    from sentencepiece import SentencePieceProcessor

    answers = [row["output"] for row in json.loads(arguments.alpaca.read_text(encoding="utf-8"))]
    tokenizer = SentencePieceProcessor(model_file=arguments.tokenizer)
    tokens = np.concatenate([np.array([tokenizer.bos_id(), *ids]) for ids in tokenizer.encode(answers)]).astype(
        np.uint16
    )
    convert(arguments.checkpoint).save_pretrained(arguments.out / "model")
    held = min(len(tokens) // 20, 1 << 17)
    for name, part in {
        "train": tokens[: -2 * held],
        "valid": tokens[-2 * held : -held],
        "test": tokens[-held:],
    }.items():
        np.save(arguments.out / f"{name}.npy", part)
        print(f"{name}: {len(part)} tokens")


if __name__ == "__main__":
    main()
