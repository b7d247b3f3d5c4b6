"""The model to be tuned: given adapters if asked, written back as a Hugging Face folder."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from otaro import convert
from otaro.errors import OtaroError, foreign_code
from otaro.json_file import write_json
from otaro.nn import FakeSefp
from otaro.partial import new_folder
from otaro.precision import Precision
from otaro.quiet import quiet
from otaro.sefp import Format
from otaro.sources import Source
from otaro.sources.scales import save_scales


def add_adapters(model: nn.Module, format: Format, floor: Precision, *, rank: int, dropout: float = 0.0) -> Any:
    """The model with LoRA adapters on its linear layers, through PEFT; only they are trained.

    The base is simulated first, so the adapters learn beside the weights as each width has them.
    """
    if find_spec("peft") is None:
        raise OtaroError("LoRA needs PEFT: install it with pip install 'otaro-llm[tune]'")
    if rank < 1:
        raise OtaroError(f"adapters of rank {rank} have no weights: choose 1 or more")
    peft: Any = importlib.import_module("peft")
    convert.simulate(model, format, floor)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=dropout, **options)
    with quiet(), foreign_code("adapters cannot be added to this model"):
        return peft.get_peft_model(model, config)


def has_adapters(model: nn.Module) -> bool:
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def merge_adapters(model: Any) -> Any:
    """The base model with its adapters added into the weights."""
    with quiet():
        return model.merge_and_unload()


def save_settled(model: nn.Module, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write the scales that tiers were settled with, if there were any, beside the weights saved in a folder."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FakeSefp) and layer.settled}
    found = {f"{path}.{name}": scale for path, layer in layers.items() for name, scale in layer.scales.items()}
    scales = {name: found[name] for name, _ in model.named_parameters() if name in found}  # a tied one once
    if scales:
        save_scales(folder, scales, weights, next(iter(layers.values())).format)


def save_model(
    model: Any, source: Source, out: Path, extras: list[Path], state: dict[str, torch.Tensor] | None = None
) -> None:
    """Write a Hugging Face folder with float32 weights and the source's tokenizer; it appears when it is whole.

    `state` are the weights where the model itself holds only shards of them.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with new_folder(out, size) as partial:
        with quiet():
            model.save_pretrained(partial, state_dict=state)
        save_settled(model, partial, state or model.state_dict())
        config = dict(sorted({**source.config, "dtype": "float32"}.items()))
        write_json(config, partial / "config.json")
        for path in partial.glob("*.safetensors"):
            # Written readable by their owner alone; they are no more secret than the rest.
            path.chmod((partial / "config.json").stat().st_mode)
        source.save_extras(partial)
        for path in extras:
            shutil.copyfile(path, partial / path.name)
