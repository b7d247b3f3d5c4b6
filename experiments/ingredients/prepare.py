"""What `experiments.ingredients.run` needs beside the model and texts of `experiments.stories.prepare`.

    python -m experiments.ingredients.prepare --data DIR --tokenizer tok512.model --wikitext wiki.train.tokens
    python -m experiments.ingredients.prepare --data DIR --tokenizer tok512.model --wikitext wiki.train.tokens \
        --alpaca alpaca_data.json

DIR is the folder that `experiments.stories.prepare` wrote. Into it come `near`, a text that the tiny Llama wrote, and
`wiki`, a Llama of a million parameters trained from scratch on the beginning of WikiText-2 (minutes on a CPU). With
`--alpaca` come the texts of the larger Llamas instead, which are trained on a GPU: `articles`, WikiText-2 in the tiny
Llama's tokens, `encyclopedia` and `answers`, WikiText-2 and Alpaca's answers in SmolLM2's.

    python -m experiments.small_llama.run --train DIR/train.npy --out DIR/llama-14m --vocabulary 512 --hidden 512 \
        --inner 1536 --layers 4
    python -m experiments.small_llama.run --train DIR/encyclopedia/train.npy --out DIR/llama-44m --hidden 512 \
        --inner 1536 --layers 6
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import common
from experiments.small_llama.run import build, train
from otaro.tokenizer import encode

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


def save(folder: Path, train: object, test: object) -> None:
    folder.mkdir(exist_ok=True)
    np.save(folder / "train.npy", np.array(train, np.uint16))
    np.save(folder / "test.npy", np.array(test, np.uint16))


def write_texts(data: Path, small: Any, wikitext: Path, alpaca: Path) -> None:
    """Texts in the tokens of the tiny Llama (`small`) and of SmolLM2."""
    large = common.load_tokenizer("smollm2")
    articles = [
        common.clean_wikitext(path.read_text(encoding="utf-8"))
        for path in (wikitext, wikitext.with_name("wiki.test.tokens"))
    ]
    save(data / "articles", *(small.encode(text) for text in articles))
    save(data / "encyclopedia", *(encode(large, text) for text in articles))
    answers = "\n\n".join(row["output"] for row in json.loads(alpaca.read_text(encoding="utf-8")))
    tokens = encode(large, answers)
    save(data / "answers", tokens[:-HELD_BACK], tokens[-HELD_BACK:])


def main() -> None:
    import sentencepiece

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="a sentencepiece model (needs pip install sentencepiece)")
    parser.add_argument("--wikitext", type=Path, required=True, help="wiki.train.tokens; wiki.test.tokens is beside it")
    parser.add_argument("--alpaca", type=Path, help="alpaca_data.json, for the texts of the larger Llamas")
    arguments = parser.parse_args()
    data: Path = arguments.data
    processor = sentencepiece.SentencePieceProcessor(model_file=arguments.tokenizer)
    if arguments.alpaca is not None:
        write_texts(data, processor, arguments.wikitext, arguments.alpaca)
        return
    text = written_by(common.load_model(str(data / "model")).eval())
    save(data / "near", text[:-HELD_BACK], text[-HELD_BACK:])
    wikitext = arguments.wikitext.read_text(encoding="utf-8")[:CHARACTERS]
    model = build(processor.vocab_size(), 128, 5, 2048)
    loss = train(model, torch.tensor(processor.encode(wikitext)), STEPS, BATCH, TRAIN_LENGTH, RATE)
    model.save_pretrained(data / "wiki")
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} million parameters, loss {loss:.3f}")


if __name__ == "__main__":
    main()
