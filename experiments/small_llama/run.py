"""Train a small Llama from scratch on a text, so that there is a model whose weights were never quantised.

    python -m experiments.small_llama.run --train train.npy --out FOLDER [--hidden 384] [--layers 6] [--steps 1500]

The tokens are those of any tokenizer, `--vocabulary` of them. On a GPU a model of 17 to 30 million parameters takes a
minute or two.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from experiments import common


def build(vocabulary: int, hidden: int, layers: int, context: int, inner: int | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner or hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, tokens: Tensor, steps: int, batch: int, length: int, rate: float) -> float:
    """AdamW with a warm-up and a cosine, on random stretches of the tokens; the last losses' mean."""
    device = tokens.device
    torch.set_float32_matmul_precision("high")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator(device=device).manual_seed(0)
    compiled = torch.compile(model.model) if device.type == "cuda" else model.model
    losses = []
    for step in range(steps):
        fraction = min(1.0, (step + 1) / 100) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate * fraction
        starts = torch.randint(len(tokens) - length, (batch, 1), generator=generator, device=device)
        ids = tokens[starts + torch.arange(length, device=device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model.lm_head(compiled(input_ids=ids, use_cache=False).last_hidden_state)
        loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 0.95 * (steps - 1):
            losses.append(loss.detach())
        if step % 200 == 0:
            print(f"update {step}: {float(loss):.3f}", flush=True)
    return float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="token ids as .npy")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, help="features within an MLP; left out: 8/3 of --hidden")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    arguments = parser.parse_args()
    device = common.device()
    tokens = torch.from_numpy(np.load(arguments.train)).long().to(device)
    model = build(arguments.vocabulary, arguments.hidden, arguments.layers, 2048, arguments.inner).to(device)
    started = time.perf_counter()
    loss = train(model, tokens, arguments.steps, arguments.batch, arguments.length, arguments.learning_rate)
    model.save_pretrained(Path(arguments.out))
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.1f} million parameters, loss {loss:.3f}, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
