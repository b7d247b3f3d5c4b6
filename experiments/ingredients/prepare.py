"""What `experiments.ingredients.run` needs beside the model and texts of `experiments.stories.prepare`.

    python -m experiments.ingredients.prepare --data DIR --tokenizer tok512.model --wikitext wiki.train.tokens

DIR is the folder that `experiments.stories.prepare` wrote. Into it come `near`, a text that the tiny Llama wrote, and
`wiki`, a Llama of a million parameters trained from scratch on the beginning of WikiText-2 (minutes on a CPU).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from experiments import common
from experiments.small_llama.run import build, train

SEQUENCES, LENGTH = 1536, 384
HELD_BACK = 1 << 16
CHARACTERS = 4_000_000
STEPS, BATCH, TRAIN_LENGTH, RATE = 700, 32, 128, 1.5e-3


@torch.no_grad()
def written_by(model: torch.nn.Module) -> np.ndarray:
    """Texts that a model writes from nothing, one after the other."""
    torch.manual_seed(0)
    texts = []
    for _ in range(SEQUENCES // 256):
        start = torch.ones(256, 1, dtype=torch.long)
        texts.append(model.generate(start, max_new_tokens=LENGTH, do_sample=True, top_k=0, eos_token_id=None))  # type: ignore[operator]
    return torch.cat(texts).flatten().numpy().astype(np.uint16)


def main() -> None:
    import sentencepiece

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="a sentencepiece model (needs pip install sentencepiece)")
    parser.add_argument("--wikitext", type=Path, required=True)
    arguments = parser.parse_args()
    near = arguments.data / "near"
    near.mkdir(exist_ok=True)
    text = written_by(common.load_model(str(arguments.data / "model")).eval())
    np.save(near / "train.npy", text[:-HELD_BACK])
    np.save(near / "test.npy", text[-HELD_BACK:])
    processor = sentencepiece.SentencePieceProcessor(model_file=arguments.tokenizer)
    wikitext = arguments.wikitext.read_text(encoding="utf-8")[:CHARACTERS]
    model = build(processor.vocab_size(), 128, 5, 2048)
    loss = train(model, torch.tensor(processor.encode(wikitext)), STEPS, BATCH, TRAIN_LENGTH, RATE)
    model.save_pretrained(arguments.data / "wiki")
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} million parameters, loss {loss:.3f}")


if __name__ == "__main__":
    main()
