"""A source as a whole: its model in memory, and its tokenizer."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from otaro import sefp
from otaro.progress import Progress
from otaro.quiet import quiet
from otaro.sources.base import Source, TensorSpec
from otaro.tokenizer import load_tokenizer


def load_model(
    source: Source,
    progress: Progress | None = None,
    dtype: torch.dtype = torch.float32,
    see: Callable[[TensorSpec, Tensor], None] = lambda spec, weight: None,
) -> Any:
    """The source's model in memory, in that type whatever its files hold: tuning needs float32, small updates vanish in
    fewer bits. `see` is shown each weight as the files have it."""
    with quiet(), no_init_weights():
        # Not made and then cast: what is computed from the config, such as rotary frequencies, stays in float32.
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(source.model.config), dtype=dtype, trust_remote_code=False
        )
    state = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        for number, spec in enumerate(source.tensors, 1):
            weight = source.read(spec)
            see(spec, weight)
            state[spec.name].copy_(weight)
            if spec.name in parameters:
                sefp.check_finite(state[spec.name], f"tensor {spec.name}")
            if progress is not None:
                progress(f"reading {spec.name}", number, len(source.tensors))
    model.tie_weights()
    return model


def source_tokenizer(source: Source) -> Any:
    """The tokenizer of a source, whatever form it has there."""
    with tempfile.TemporaryDirectory(prefix="otaro-tokenizer-") as folder:
        return save_tokenizer(source, Path(folder))


def save_tokenizer(source: Source, folder: Path) -> Any:
    """Write what the source's tokenizer is made from into a folder; the tokenizer."""
    source.save_extras(folder)
    (folder / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
    return load_tokenizer(folder, source.label)
