"""What the experiments share: models and texts as the product reads them, and a record of the machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from otaro.sources import open_source
from otaro.sources.loading import load_model as load_source
from otaro.sources.loading import source_tokenizer
from otaro.tokenizer import encode

ROOT = Path(__file__).resolve().parent


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(model: str, on: torch.device | None = None) -> Any:
    """A causal language model in float32, as `otaro tune` reads it: a GGUF file, `smollm2` or a folder."""
    with open_source(model) as source:
        return load_source(source).to(on or device()).eval()


def load_tokenizer(model: str) -> Any:
    with open_source(model) as source:
        return source_tokenizer(source)


def clean_wikitext(text: str) -> str:
    """WikiText's token files as ordinary writing: joined hyphens, commas and points, no space before punctuation."""
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    text = re.sub(r" ([,.;:?!%)\]'])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    return text.replace(" n't", "n't")


def tokens_of(text_file: Path, model: str) -> Tensor:
    """The token ids of a WikiText `.tokens` file as one stream, no special tokens; ``.npy`` holds them ready made."""
    if text_file.suffix == ".npy":
        return torch.from_numpy(np.load(text_file).astype(np.int64))
    text = clean_wikitext(text_file.read_text(encoding="utf-8"))
    return torch.tensor(encode(load_tokenizer(model), text))


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, window: int, batch: int) -> float:
    """exp of the mean cross entropy over every predicted token of non-overlapping windows; the rest is dropped."""
    from otaro.evaluate.perplexity import perplexity as measure

    return measure(model, tokens, window=window, batch_size=batch).perplexity


def machine() -> dict[str, Any]:
    """Hardware, library versions and the commit, for the record beside every result."""
    import transformers

    commit = (
        os.environ.get("OTARO_COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
    }
