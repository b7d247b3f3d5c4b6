"""What every kind of source has in common."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from otaro.errors import SourceError, foreign_code
from otaro.model_config import modules_bounded
from otaro.quiet import quiet
from otaro.sefp import Format


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model, named and shaped as the model class has it, in the type it is stored in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(ABC):
    """A model that can be read one tensor at a time; a context manager.

    Only the tensor being read is in memory (and what it is made from, where the model class merges several of the
    file's tensors into one).
    """

    label: str
    """What to call the model in front of a person; never an absolute path."""
    config: dict[str, Any]
    """The content of config.json, with `architectures` and `dtype`, without a quantization."""
    model: PreTrainedModel
    """The architecture on the meta device: shapes without weights."""
    tensors: list[TensorSpec]
    """Every weight of the model in the order of its state dict; a tied weight appears under one name only."""

    @abstractmethod
    def read(self, spec: TensorSpec) -> Tensor:
        """The weight, on the CPU, in `spec.dtype`."""

    def scale(self, spec: TensorSpec, weight: Tensor, shape: tuple[int, ...], format: Format) -> Tensor | None:
        """The scales that come with a weight, just read and packed in that shape and format; None: they are found."""
        return None

    @abstractmethod
    def save_extras(self, folder: Path) -> None:
        """Write what a model folder holds besides weights and config: tokenizer, chat template, generation settings."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def build_model(config: PreTrainedConfig, label: str, tensors: int) -> PreTrainedModel:
    """The causal language model of that config, on the meta device; there are so many `tensors` for it."""
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _not_causal(label, f"{config.model_type} model")
    declared = config.architectures if isinstance(config.architectures, list) else []
    said = f"{label} has a config that {config.model_type} cannot use"
    with foreign_code(said, SourceError), modules_bounded(tensors), torch.device("meta"), quiet():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    if type(model.config) is not type(config):
        return model  # the language model inside a model of text and images
    # Encoders such as BERT have a causal variant too, which their checkpoints do not fit.
    known = {type(model).__name__.lower(), type(model.base_model).__name__.lower()}
    for name in map(str, declared):
        if name.lower() not in known and not name.endswith(("ForCausalLM", "LMHeadModel")):
            raise _not_causal(label, name)
    return model


def _not_causal(label: str, kind: str) -> SourceError:
    return SourceError(f"{label} is a {kind}, not a causal language model: only those can be packed")


def missing_tensor(name: str, label: str) -> SourceError:
    return SourceError(f"{label} lacks the tensor {name}: the model is incomplete or not of the architecture it states")


def shape_mismatch(name: str, label: str, found: tuple[int, ...], expected: tuple[int, ...]) -> SourceError:
    return SourceError(
        f"tensor {name} of {label} has the shape {found} where its config calls for {expected}: "
        "weights and config do not belong together"
    )
